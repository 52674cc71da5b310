"""The towers on one device of a mesh: training and evaluation encode with these, inside a `jax.shard_map`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree, UInt8

from disco_jax.losses.walk import accumulator
from disco_jax.models import CLIP, CLIPConfig
from disco_jax.models.patch_dropout import draw_patches
from disco_jax.models.transformer import FetchBlock
from disco_jax.sharding import WHOLE, Axes, gather, partition_specs

TOWERS = ("visual", "text")


def make_graphdef(
    model: CLIPConfig, dtype: DTypeLike, *, remat: str = "none", attention: str = "auto"
) -> nnx.GraphDef[CLIP]:
    """The model without its parameters: `nnx.merge(graphdef, params)` is the model. Allocates nothing."""
    return nnx.graphdef(
        nnx.eval_shape(lambda: CLIP(model, dtype=dtype, remat=remat, attention=attention, rngs=nnx.Rngs(0)))
    )


def l2_normalize(features: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Rows of unit length, in their own type, computed at least in float32; a zero row stays zero."""
    exact = features.astype(accumulator(features))
    lengths = jax.lax.rsqrt(jnp.maximum(jnp.sum(exact**2, axis=-1, keepdims=True), 1e-24))
    return (exact * lengths).astype(features.dtype)


@dataclass(frozen=True)
class Encoder:
    """Encodes a device's rows with parameters that may lie divided over the devices.

    model, graphdef: of the CLIP; dims: of its parameters, from `disco_jax.sharding.divided_dims`; axes: of the mesh;
    dtype: of the products; patch_dropout: share of the patches that training leaves out.
    """

    model: CLIPConfig
    graphdef: nnx.GraphDef[CLIP]
    dims: PyTree
    axes: Axes
    dtype: Any
    patch_dropout: float = 0.0

    @property
    def specs(self) -> PyTree:
        """The PartitionSpecs of the parameters."""
        return partition_specs(self.dims, self.axes)

    def fetch(self, params: PyTree) -> PyTree:
        """What the device has of the model's parameters made whole, all but the blocks."""

        def of_tower(params: PyTree, dims: PyTree) -> PyTree:
            rest, rest_dims = ({k: v for k, v in tree.items() if k != "transformer"} for tree in (params, dims))
            return params | gather(rest, rest_dims, self.axes, self.dtype)

        return params | {tower: of_tower(params[tower], self.dims[tower]) for tower in TOWERS}

    def encode(
        self,
        tower: str,
        params: PyTree,
        inputs: UInt8[Array, "b H W 3"] | Int[Array, "b L"],
        samples: Int[Array, " b"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b D"]:
        """L2-normalised features in the compute dtype, of images by "visual" and of tokens by "text".

        `params` are from `fetch`. In training give the places of the samples in the global batch and the key of the
        step: then patches are dropped.
        """
        fetch_block: FetchBlock | None = None
        block_dims = self.dims[tower]["transformer"]["blocks"]
        if any(dim != WHOLE for dim in jax.tree.leaves(block_dims)):
            # In a loop over microbatches jax and XLA would else gather all blocks before the loop, and keep them.
            blocks, inputs = jax.lax.optimization_barrier((params[tower]["transformer"], inputs))
            params = params | {tower: params[tower] | {"transformer": blocks}}
            # A block has no leading axis.
            block_dims = jax.tree.map(lambda dim: WHOLE if dim == WHOLE else dim - 1, block_dims)
            fetch_block = partial(gather, dims=block_dims, axes=self.axes, dtype=self.dtype)
        clip = nnx.merge(self.graphdef, params)
        if tower == "text":
            return l2_normalize(clip.encode_text(inputs, fetch_block=fetch_block))
        kept = None
        if self.patch_dropout and samples is not None and key is not None:
            kept = draw_patches(key, samples, self.model.vision, self.patch_dropout)
        return l2_normalize(clip.encode_image(inputs, kept_patches=kept, fetch_block=fetch_block))
