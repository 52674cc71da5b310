"""The tile walk that the losses share: all similarities of a batch on a rectangle of devices, never held at once.

The notation is that of docs/loss.md. The batch of B pairs lies on N = r x c devices, b pairs on each. Device (p, q)
owns the block of similarities of the images of its row of devices, R = b c of them, with the texts of its column of
devices, b r of them. Every pair of the batch lies in one block, and a device's own pairs lie in its own block.

The images of the block are gathered once. Its texts come by chunks: each step gathers the same few of every device's
texts, makes one tile, R x C, of the block, and has done with these columns when it ends.

Everything here is called inside a `jax.shard_map`. Without axes (one device) the collectives do nothing.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

Axes: TypeAlias = tuple[str, ...]

# Similarities in a tile by default, and the fewest columns: below, the products are too thin to be fast.
TILE = 2**23
LEAST_CHUNK = 512


class Rectangle(NamedTuple):
    """How the devices divide the similarities.

    rows: mesh axes along which the texts are gathered, r devices; cols: the images, c devices; the batch is divided
    over both. chunk: columns of a tile over all devices of `rows`, None for the default.
    """

    rows: Axes
    cols: Axes
    chunk: int | None


class Pairs(NamedTuple):
    """A device's own b pairs. Those of equal labels are positives of each other, `positives` of them in the batch."""

    images: Float[Array, "b D"]
    texts: Float[Array, "b D"]
    labels: Int[Array, " b"]
    positives: Int[Array, " b"]


NO_GRADIENT: Any = None  # of the labels and positives, which are integers


class BlockRows(NamedTuple):
    """What a device's block has of the R images of its row of devices, gathered; as in `Pairs`."""

    images: Float[Array, "R D"]
    labels: Int[Array, " R"]
    positives: Int[Array, " R"]


class Tile(NamedTuple):
    """Some columns of a device's block: its R images with C = r x c' texts, c' of each device along `rows`.

    similarities: [R, C], float32 or wider. positive: [R, C], whether image and text have the same label.
    texts: [C, D]. valid: [C], False for the padding of the last tile; None where there is none.
    """

    similarities: Float[Array, "R C"]
    positive: Bool[Array, "R C"]
    texts: Float[Array, "C D"]
    valid: Bool[Array, " C"] | None

    def masked(self, values: Float[Array, "R C"], fill: float) -> Float[Array, "R C"]:
        """`values`, with `fill` in the columns that are padding."""
        return values if self.valid is None else jnp.where(self.valid[None, :], values, fill)


# (carry, tile, the columns' own values of this step) -> carry, values for this device's own c' texts of this step
Visit: TypeAlias = Callable[[Any, Tile, Any], tuple[Any, Any]]


def walk(
    visit: Visit,
    carry: PyTree,
    block_rows: BlockRows,
    pairs: Pairs,
    own: PyTree,
    rectangle: Rectangle,
    *,
    block: Float[Array, "k R C"] | None = None,
    keep_block: bool = False,
) -> tuple[PyTree, PyTree, Float[Array, "k R C"] | None]:
    """Visit the block of this device tile by tile.

    Args:
        visit: what is done with a tile. What it gives for a step are values of the device's own texts of that step;
            `gather`, `exchange` and `scatter` go between those and all columns of the tile.
        carry: its first state, the same on all devices.
        block_rows: of `gather_block_rows`.
        pairs: this device's own; their texts are walked over.
        own: more values of the device's own texts, [b, ...] each; `visit` is given those of the tile's columns.
        rectangle: the division.
        block: the similarities, where an earlier walk kept them.
        keep_block: give them back.

    Returns:
        the last carry; the values of this device's own texts, [b, ...]; the similarities or None.
    """
    b, r = len(pairs.texts), axis_size(rectangle.rows)
    steps, c = tiling(b, len(block_rows.images), r, rectangle.chunk)

    def step(carry: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        number, own_chunk, similarities = given
        chunk_texts, chunk_labels, values = jax.tree.map(lambda x: gather(x, rectangle.rows), own_chunk)
        valid = None
        if steps * c > b:
            valid = jnp.tile(number * c + jnp.arange(c, dtype=jnp.int32) < b, r)
        if similarities is None:
            similarities = matmul(block_rows.images, chunk_texts.T)
        positive = block_rows.labels[:, None] == chunk_labels[None, :]
        if valid is not None:
            positive &= valid[None, :]
        tile = Tile(similarities, positive, chunk_texts, valid)
        carry, results = visit(carry, tile, values)
        return carry, (results, similarities if keep_block else None)

    def chunks(x: Array) -> Array:
        padding = [(0, steps * c - b)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(steps, c, *x.shape[1:])

    varying = varying_axes(block_rows.images) | varying_axes(pairs.texts)
    inputs = (jnp.arange(steps, dtype=jnp.int32), jax.tree.map(chunks, (pairs.texts, pairs.labels, own)), block)
    carry = jax.tree.map(lambda x: vary(x, varying), carry)
    carry, (results, block) = jax.lax.scan(step, carry, inputs)
    results = jax.tree.map(lambda x: x.reshape(steps * c, *x.shape[2:])[:b], results)
    return carry, results, block


def gather_block_rows(pairs: Pairs, rectangle: Rectangle) -> BlockRows:
    """The rows of this device's block, from the devices of its row."""
    return BlockRows(*(gather(x, rectangle.cols) for x in (pairs.images, pairs.labels, pairs.positives)))


def tiling(b: int, R: int, r: int, chunk: int | None) -> tuple[int, int]:
    """The number of steps, and the texts of each device in a step.

    Steps without padding are taken where they make tiles of at least half the wanted size; else, as when b is prime,
    steps as equal as they can be, so that the padding is less than one text a step.
    """
    columns = max(TILE // R, LEAST_CHUNK) if chunk is None else chunk
    most = min(b, max(1, columns // r))
    for c in range(most, most // 2, -1):
        if b % c == 0:
            return b // c, c
    c = math.ceil(b / math.ceil(b / most))
    return math.ceil(b / c), c


def matmul(left: Float[Array, "m k"], right: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """The product of two matrices in their own type, added up in float32 (float64 for float64)."""
    # "highest": GPUs would round float32 factors to TF32; of no effect on bfloat16.
    return jnp.matmul(left, right, precision="highest", preferred_element_type=accumulator(left))


def accumulator(features: Array) -> jnp.dtype:
    """The type of statistics and sums over `features`: float32, or float64 for float64."""
    return jnp.promote_types(features.dtype, jnp.float32)


def varying_axes(x: Array | float) -> frozenset[str]:
    """The mesh axes along which `x` may differ, as jax's types have it inside a `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Array, axes: Axes | frozenset[str]) -> Array:
    """`x`, typed as one that may differ along `axes`; in a gradient, the sum over them."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: Array | None) -> list[Any]:
    """The arrays, typed as ones that may differ along every axis along which one of them may."""
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(arrays)))
    return [None if x is None else vary(x, axes) for x in arrays]


def axis_size(axes: Axes) -> int:
    """The number of devices along `axes`."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def gather(own: Array, axes: Axes) -> Array:
    """[b, ...] of each of n devices to [n b, ...] on all of them."""
    return jax.lax.all_gather(own, axes, tiled=True) if axes else own


def exchange(partial: Array, axes: Axes) -> Array:
    """[n b] with something for each of n devices to the [n, b] that they had for this one."""
    if not axes:
        return partial[None]
    return jax.lax.all_to_all(partial.reshape(axis_size(axes), -1), axes, split_axis=0, concat_axis=0)


def scatter(partial: Array, axes: Axes) -> Array:
    """[n b, ...] with something for each of n devices to the sum, [b, ...], of what they had for this one."""
    return jax.lax.psum_scatter(partial, axes, tiled=True) if axes else partial
