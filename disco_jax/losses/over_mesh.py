"""From a loss inside a `jax.shard_map` to one of whole arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from disco_jax.losses.walk import Axes


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # for callers without jit: one program instead of one an operation
def over_mesh(
    local_loss: Callable[..., Any],
    mesh: Mesh,
    axes: Axes,
    options: tuple[tuple[str, Any], ...],
    features: tuple[Array, Array],
    scalars: tuple[Array, ...],
    labels: Array | None,
) -> Any:
    """`local_loss` on the rows of each device of `mesh`, divided over `axes`; its results are the same on all."""

    def on_device(features: tuple[Array, Array], scalars: tuple[Array, ...], labels: Array | None) -> Any:
        return local_loss(*features, *scalars, labels=labels, **dict(options))

    per_row = PartitionSpec(axes)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(per_row, PartitionSpec(), per_row), out_specs=PartitionSpec()
    )
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:  # as jax.make_mesh has them by default: along these, shard_map moves no array unasked
        rows = PartitionSpec(tuple(axis for axis in axes if axis in explicit))
        features, labels = jax.sharding.reshard((features, labels), NamedSharding(mesh, rows))
        scalars = jax.sharding.reshard(scalars, NamedSharding(mesh, PartitionSpec()))
    return mapped(features, scalars, labels)
