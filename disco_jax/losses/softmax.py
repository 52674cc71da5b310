"""CLIP's loss from one block of similarities a device, on any rectangle of devices: docs/loss.md, sections 2 to 4.

With s the scale, S = s X the logits, X the similarities, and W the targets (section 5: the identity for plain CLIP),

    loss = 1/(2B) [ sum_i row_lse_i + sum_j col_lse_j ] - 1/B sum_ij W_ij S_ij                         (2.1)
    E    = exp(S - row_lse) + exp(S - col_lse) - 2 W           2B times the gradient of S              (2.2)
    dI   = s/(2B) E T      dT = s/(2B) E^t I      ds = 1/(2B) sum_ij E_ij X_ij                         (2.3)

A first walk over the tiles finds the two log-sum-exps, a second one, in the backward rule, E and what follows from it:
4 products of b B D in all, 3 where the block is kept. Statistics, exponentials and sums are float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Float, Int

from disco_jax.losses import in_batch
from disco_jax.losses.in_batch import Share
from disco_jax.losses.walk import (
    NO_GRADIENT,
    Pairs,
    Rectangle,
    Tile,
    accumulator,
    exchange,
    gather,
    gather_block_rows,
    matmul,
    scatter,
    walk,
)


class Settings(NamedTuple):
    """What is fixed when the loss is compiled; B: pairs of the batch."""

    rectangle: Rectangle
    B: int
    keep_block: bool
    label_smoothing: float
    return_metrics: bool


class RunningLse(NamedTuple):
    """A log-sum-exp on the way: the largest term so far, and the sum of exp(term - largest)."""

    largest: Float[Array, " R"]
    sum: Float[Array, " R"]


class Saved(NamedTuple):
    """For the backward rule; lse: of this device's own images and texts; block: its similarities where kept."""

    pairs: Pairs
    scale: Float[Array, ""]
    row_lse: Float[Array, " b"]
    col_lse: Float[Array, " b"]
    block: Float[Array, "k R C"] | None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_loss(pairs: Pairs, scale: Float[Array, ""], settings: Settings) -> Share:
    """This device's share of the loss, and of the metrics where they are wanted: the sums over devices are the whole.

    Args:
        pairs: this device's own; features L2-normalised, of any float type.
        scale: the multiplier s, in the type of the statistics.
        settings: what is fixed.
    """
    return _forward(pairs, scale, settings)[0]


def _forward(pairs: Pairs, scale: Float[Array, ""], settings: Settings) -> tuple[Share, Saved]:
    rectangle, B = settings.rectangle, settings.B
    block_rows = gather_block_rows(pairs, rectangle)
    R, dtype = len(block_rows.images), accumulator(pairs.images)

    def visit(carry: Any, tile: Tile, _: None) -> tuple[Any, Any]:
        lse, target_sum, statistics = carry
        logits = tile.masked(scale * tile.similarities, -jnp.inf)
        lse = _add_terms(lse, logits)
        # In the columns that are padding, W is e/B all the same: their similarities are 0.
        target_sum += jnp.sum(_targets(tile, block_rows.positives, settings) * tile.similarities, axis=1)
        # A column is whole with this tile: over the images of this block, then over the blocks of the other devices.
        col_lse = logsumexp(exchange(logsumexp(logits, axis=0), rectangle.rows), axis=0)
        extremes = None
        if statistics is not None:
            statistics, extremes = in_batch.add_tile(statistics, tile, rectangle)
        return (lse, target_sum, statistics), (col_lse, extremes)

    zeros = jnp.zeros(R, dtype)
    statistics = in_batch.first_statistics(R, dtype) if settings.return_metrics else None
    carry = RunningLse(jnp.full(R, -jnp.inf, dtype), zeros), zeros, statistics
    carry, (col_lse, extremes), block = walk(
        visit, carry, block_rows, pairs, None, rectangle, keep_block=settings.keep_block
    )
    lse, target_sum, statistics = carry
    # A row is whole over the blocks of the devices of `cols`; (b,), for this device's own images.
    row_lse = logsumexp(exchange(lse.largest + jnp.log(lse.sum), rectangle.cols), axis=0)
    target = scale * exchange(target_sum, rectangle.cols).sum(axis=0)

    loss = jnp.sum(row_lse + col_lse - 2 * target) / (2 * B)  # (2.1)
    metrics = None
    if statistics is not None:
        metrics = in_batch.own_share(statistics, extremes, block_rows.positives, rectangle, B)
    return (loss, metrics), Saved(pairs, scale, row_lse, col_lse, block)


def _backward(settings: Settings, saved: Saved, cotangents: Share) -> tuple[Pairs, Array]:
    pairs, scale, row_lse, col_lse, block = saved
    rectangle, cotangent = settings.rectangle, cotangents[0]
    factor = cotangent / (2 * settings.B)
    block_rows, row_lse = gather_block_rows(pairs, rectangle), gather(row_lse, rectangle.cols)
    dtype, narrow = accumulator(pairs.images), pairs.images.dtype

    def visit(carry: Any, tile: Tile, col_lse: Float[Array, " C"]) -> tuple[Any, Any]:
        image_sums, scale_sums = carry
        logits = scale * tile.similarities
        errors = jnp.exp(logits - row_lse[:, None]) + jnp.exp(logits - col_lse[None, :])
        errors = tile.masked(errors - 2 * _targets(tile, block_rows.positives, settings), 0.0)  # (2.2)
        scale_sums += jnp.sum(errors * tile.similarities, axis=1)
        errors = errors.astype(narrow)
        image_sums += matmul(errors, tile.texts)  # (2.3); 1/(2B) comes last, in float32: no underflow
        text_sums = scatter(matmul(errors.T, block_rows.images), rectangle.rows)
        return (image_sums, scale_sums), (factor * scale * text_sums).astype(narrow)

    carry = jnp.zeros(block_rows.images.shape, dtype), jnp.zeros(len(block_rows.images), dtype)
    carry, text_gradient, _ = walk(visit, carry, block_rows, pairs, col_lse, rectangle, block=block)
    image_sums, scale_sums = carry
    image_gradient = (factor * scale * scatter(image_sums, rectangle.cols)).astype(narrow)
    return Pairs(image_gradient, text_gradient, NO_GRADIENT, NO_GRADIENT), factor * jnp.sum(scale_sums)


softmax_loss.defvjp(_forward, _backward)


def _add_terms(lse: RunningLse, logits: Float[Array, "R C"]) -> RunningLse:
    largest = jnp.maximum(lse.largest, logits.max(axis=1))
    terms = jnp.exp(logits - largest[:, None])
    return RunningLse(largest, lse.sum * jnp.exp(lse.largest - largest) + terms.sum(axis=1))


def _targets(tile: Tile, row_positives: Int[Array, " R"], settings: Settings) -> Float[Array, "R C"]:
    """W of the tile (5.1): the positives of a row share 1 - label_smoothing, all B columns share label_smoothing."""
    dtype = tile.similarities.dtype
    positive_weight = (1 - settings.label_smoothing) / row_positives.astype(dtype)
    everywhere = settings.label_smoothing / settings.B
    return jnp.where(tile.positive, positive_weight[:, None], 0) + everywhere
