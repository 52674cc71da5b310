"""How parameters and optimizer state lie on the devices, and how a device gets and gives what the others hold.

"replicated": every device has all of it. "zero1": the optimizer's state is divided over all devices (Rajbhandari et al.
2020, arXiv 1910.02054, its first stage). "fsdp": the parameters too, and each device gathers them block by block where
it computes.
"""

from functools import partial
from typing import TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from disco_jax.models.transformer import FETCHED

SHARDINGS = ("replicated", "zero1", "fsdp")
WHOLE = -1  # the dimension along which an array is divided that isn't

Axes: TypeAlias = tuple[str, ...]


def divided_dim(path: jax.tree_util.KeyPath, shape: tuple[int, ...], devices: int) -> int:
    """The dimension along which an array of the state is divided over so many devices, or WHOLE.

    Matrices are divided along their longest dimension that is a multiple of the devices, the last of equal ones;
    vectors and scalars never are. The leading axis of what is stacked over `blocks` is no dimension of the matrix.
    """
    first = 1 if "blocks" in dict_keys(path) else 0
    if len(shape) - first < 2:
        return WHOLE
    fitting = [dim for dim in range(first, len(shape)) if shape[dim] % devices == 0]
    return max(fitting, key=lambda dim: (shape[dim], dim), default=WHOLE)


def dict_keys(path: jax.tree_util.KeyPath) -> list[str]:
    """The names on the way to an array, e.g. ["visual", "transformer", "blocks", "mlp", "c_fc", "kernel"]."""
    return [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]


def divided_dims(tree: PyTree, devices: int, divide: bool = True) -> PyTree:
    """`divided_dim` of each array of a tree, with `divide` false WHOLE for all."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: divided_dim(path, leaf.shape, devices) if divide else WHOLE, tree
    )


def partition_specs(dims: PyTree, axes: Axes) -> PyTree:
    """For each of `divided_dims` the PartitionSpec that divides over all of `axes`."""
    return jax.tree.map(lambda dim: PartitionSpec(*(None,) * dim, axes) if dim != WHOLE else PartitionSpec(), dims)


def shardings(tree: PyTree, mesh: Mesh, divide: bool) -> PyTree:
    """Shardings of a tree of arrays (or their shapes) on a mesh: divided over all its axes, or replicated."""
    specs = partition_specs(divided_dims(tree, mesh.size, divide), mesh.axis_names)
    return jax.tree.map(partial(NamedSharding, mesh), specs)


def abstract(tree: PyTree, shardings: PyTree) -> PyTree:
    """The shapes and dtypes of a tree with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def gather(params: PyTree, dims: PyTree, axes: Axes, dtype: DTypeLike) -> PyTree:
    """Inside a shard_map: whole parameters from what the devices of `axes` hold of them.

    Kernels travel in `dtype`, in which they are multiplied, all others as they are. The gradients come back summed over
    the devices, in the parameters' own type, and divided as the parameters are.
    """

    def whole(path: jax.tree_util.KeyPath, shard: Array, dim: int) -> Array:
        if dim == WHOLE:
            return shard
        return checkpoint_name(_gather(shard, dim, axes, dtype if dict_keys(path)[-1] == "kernel" else None), FETCHED)

    return jax.tree_util.tree_map_with_path(whole, params, dims)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: Array, dim: int, axes: Axes, dtype: DTypeLike | None) -> Array:
    return jax.lax.all_gather(shard if dtype is None else shard.astype(dtype), axes, axis=dim, tiled=True)


def _gather_forward(shard: Array, dim: int, axes: Axes, dtype: DTypeLike | None) -> tuple[Array, Array]:
    return _gather(shard, dim, axes, dtype), shard[:0]  # of the shard only the type is kept


def _gather_backward(dim: int, axes: Axes, dtype: DTypeLike | None, like: Array, gradient: Array) -> tuple[Array]:
    # In bfloat16 the sum over many devices would lose what each of them added.
    return (jax.lax.psum_scatter(gradient.astype(like.dtype), axes, scatter_dimension=dim, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def total(gradients: PyTree, dims: PyTree, divided: PyTree, axes: Axes) -> PyTree:
    """Inside a shard_map: sums each device's gradients over all of them.

    What lies divided in the parameters, as `dims` says, is summed already, by `gather`. Of the others each device keeps
    the share that `divided` says.
    """

    def of_all(gradient: Array, dim: int, divided: int) -> Array:
        if dim != WHOLE:
            return gradient
        if divided != WHOLE:
            return jax.lax.psum_scatter(gradient, axes, scatter_dimension=divided, tiled=True)
        return jax.lax.psum(gradient, axes)

    return jax.tree.map(of_all, gradients, dims, divided)
