"""How well the pairs of a batch are told apart, from the tiles that a loss walks over anyway."""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from disco_jax.losses.walk import Rectangle, Tile, exchange


class InBatchMetrics(NamedTuple):
    """Scalars, float32 (float64 for float64 features); not differentiated.

    image_to_text_accuracy: share of the images that are nearer to a positive text than to any other of the batch (a tie
    is a miss). text_to_image_accuracy: the same with images and texts exchanged. positive_similarity: mean over the
    images of the mean similarity to their positives. hardest_negative_similarity: mean over images and texts of the
    largest similarity to one that is no positive; -inf where there is none.
    """

    image_to_text_accuracy: Float[Array, ""]
    text_to_image_accuracy: Float[Array, ""]
    positive_similarity: Float[Array, ""]
    hardest_negative_similarity: Float[Array, ""]


# The loss, and the metrics where they are wanted; of one device, its share of them.
Share: TypeAlias = tuple[Float[Array, ""], InBatchMetrics | None]


class Extremes(NamedTuple):
    """The largest similarity to a positive and to a negative, so far; -inf before there is one."""

    positive: Float[Array, " n"]
    negative: Float[Array, " n"]


class RowStatistics(NamedTuple):
    """Of the R images of a block: the sum is over the similarities to their positives."""

    extremes: Extremes
    positive_sum: Float[Array, " R"]


def first_statistics(R: int, dtype: jnp.dtype) -> RowStatistics:
    """Before the first tile."""
    nothing = jnp.full(R, -jnp.inf, dtype)
    return RowStatistics(Extremes(nothing, nothing), jnp.zeros(R, dtype))


def add_tile(rows: RowStatistics, tile: Tile, rectangle: Rectangle) -> tuple[RowStatistics, Extremes]:
    """The rows' statistics with this tile, and the extremes of this device's own texts in it."""
    positives = jnp.where(tile.positive, tile.similarities, -jnp.inf)
    negatives = tile.masked(jnp.where(tile.positive, -jnp.inf, tile.similarities), -jnp.inf)
    extremes = Extremes(
        jnp.maximum(rows.extremes.positive, positives.max(1)), jnp.maximum(rows.extremes.negative, negatives.max(1))
    )
    positive_sum = rows.positive_sum + jnp.where(tile.positive, tile.similarities, 0).sum(1)
    columns = Extremes(*(exchange(x.max(0), rectangle.rows).max(0) for x in (positives, negatives)))
    return RowStatistics(extremes, positive_sum), columns


def own_share(
    rows: RowStatistics, texts: Extremes, positives: Int[Array, " R"], rectangle: Rectangle, B: int
) -> InBatchMetrics:
    """This device's share of the metrics: the sum over the devices is the whole.

    Args:
        rows: of the block's images, after the last tile.
        texts: of this device's own texts.
        positives: how many each of the block's images has.
        rectangle: the division.
        B: pairs of the batch.
    """
    images = Extremes(*(exchange(x, rectangle.cols).max(0) for x in rows.extremes))  # of this device's own images
    return InBatchMetrics(
        jnp.sum(images.positive > images.negative) / B,
        jnp.sum(texts.positive > texts.negative) / B,
        jnp.sum(rows.positive_sum / positives.astype(rows.positive_sum.dtype)) / B,
        jnp.sum(images.negative + texts.negative) / (2 * B),
    )
