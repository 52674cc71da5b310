"""SigLIP's pairwise loss on the walk of CLIP's: docs/loss.md, section 6 (Zhai et al. 2023, arXiv 2303.15343).

With the logits L = s X + bias, and Z = 1 for positives and 0 for all other pairs,

    loss = 1/B sum_ij softplus(L_ij) - Z_ij L_ij       which is -log sigmoid(L) or -log sigmoid(-L)    (6.1)
    E    = sigmoid(L) - Z                              B times the gradient of L                       (6.2)
    dI   = s/B E T      dT = s/B E^t I      ds = 1/B sum_ij E_ij X_ij      dbias = 1/B sum_ij E_ij     (6.3)

No softmax, so no statistics: one walk gives the loss and all gradients, 3 products of b B D.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from disco_jax.losses import checks, in_batch
from disco_jax.losses.in_batch import InBatchMetrics, Share
from disco_jax.losses.labels import label_pairs
from disco_jax.losses.over_mesh import over_mesh
from disco_jax.losses.walk import (
    NO_GRADIENT,
    Axes,
    Pairs,
    Rectangle,
    Tile,
    accumulator,
    axis_size,
    gather_block_rows,
    matmul,
    scatter,
    vary_alike,
    walk,
)


def sigmoid_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    mesh: Mesh,
    rows: str | Axes = "data",
    cols: str | Axes | None = None,
    chunk: int | None = None,
    labels: Int[Array, " B"] | None = None,
    return_metrics: bool = False,
) -> Float[Array, ""] | tuple[Float[Array, ""], InBatchMetrics]:
    """SigLIP's loss over the whole batch, computed by all devices of a mesh; exact in value and gradients.

    Args:
        logit_bias: what is added to the scaled similarities; SigLIP starts it at -10, and the scale at 10.
        image_features, text_features, logit_scale, mesh, rows, cols, chunk, labels, return_metrics: those of
            `contrastive_loss`, with its "chunked" method.

    Returns:
        The sum over all pairs of image and text, divided by the batch size; float32 (or float64), the same on every
        device. With `return_metrics` also an `InBatchMetrics`.

    Raises:
        ValueError: as `contrastive_loss`.
    """
    checks.check_chunk(chunk)
    rows, cols = checks.axis_names(rows, cols)
    scalars = {"logit_scale": logit_scale, "logit_bias": logit_bias}
    return over_mesh(
        _on_device,
        mesh,
        image_features,
        text_features,
        scalars,
        labels,
        rows=rows,
        cols=cols,
        chunk=chunk,
        return_metrics=return_metrics,
    )


def local_sigmoid_loss(
    image_features: Float[Array, "b D"],
    text_features: Float[Array, "b D"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    rows: str | Axes,
    cols: str | Axes | None = None,
    chunk: int | None = None,
    labels: Int[Array, " b"] | None = None,
    return_metrics: bool = False,
) -> Float[Array, ""] | tuple[Float[Array, ""], InBatchMetrics]:
    """The core of `sigmoid_loss`, for use inside a `jax.shard_map` of your own, as `local_contrastive_loss`."""
    scalars = {"logit_scale": logit_scale, "logit_bias": logit_bias}
    checks.check_features(image_features, text_features, **scalars)
    checks.check_labels(labels, len(image_features))
    checks.check_chunk(chunk)
    rows, cols = checks.axis_names(rows, cols)
    features = {"image_features": image_features, "text_features": text_features}
    checks.check_inside_shard_map(rows + cols, features, scalars)
    return _on_device(
        image_features,
        text_features,
        logit_scale,
        logit_bias,
        rows=rows,
        cols=cols,
        chunk=chunk,
        labels=labels,
        return_metrics=return_metrics,
    )


def _on_device(
    images: Float[Array, "b D"],
    texts: Float[Array, "b D"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    rows: Axes,
    cols: Axes,
    chunk: int | None,
    labels: Int[Array, " b"] | None,
    return_metrics: bool,
) -> Any:
    axes = rows + cols
    scale, bias = (jnp.asarray(x, accumulator(images)) for x in (logit_scale, logit_bias))
    # Typed as different on each device, scale and bias get the sum of all devices' gradients.
    images, texts, scale, bias, labels = vary_alike(images, texts, scale, bias, labels)
    settings = _Settings(Rectangle(rows, cols, chunk), len(images) * axis_size(axes), images.dtype, return_metrics)
    share = _sigmoid_loss(label_pairs(images, texts, labels, axes), scale, bias, settings)
    loss, metrics = jax.lax.psum(share, axes) if axes else share
    return (loss, metrics) if return_metrics else loss


class _Settings(NamedTuple):
    """What is fixed when the loss is compiled; B: pairs of the batch, dtype: of the features."""

    rectangle: Rectangle
    B: int
    dtype: jnp.dtype
    return_metrics: bool


class _Gradients(NamedTuple):
    """Sums over pairs, still to be divided by B, and images and texts to be multiplied by the scale."""

    images: Float[Array, "R D"]
    scale: Float[Array, " R"]
    bias: Float[Array, " R"]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sigmoid_loss(pairs: Pairs, scale: Float[Array, ""], bias: Float[Array, ""], settings: _Settings) -> Share:
    """This device's share of the loss, and of the metrics where they are wanted."""
    share, _, _ = _walk(pairs, scale, bias, settings, gradients=False)
    return share


def _walk(
    pairs: Pairs, scale: Float[Array, ""], bias: Float[Array, ""], settings: _Settings, *, gradients: bool
) -> tuple[Share, _Gradients | None, Float[Array, "b D"] | None]:
    rectangle, B = settings.rectangle, settings.B
    block_rows = gather_block_rows(pairs, rectangle)
    R, dtype = len(block_rows.images), accumulator(pairs.images)

    def visit(carry: Any, tile: Tile, _: None) -> tuple[Any, Any]:
        losses, sums, statistics = carry
        logits = scale * tile.similarities + bias
        pair_losses = jax.nn.softplus(logits) - jnp.where(tile.positive, logits, 0)
        losses += jnp.sum(tile.masked(pair_losses, 0.0), axis=1)  # (6.1)
        text_sums = extremes = None
        if sums is not None:
            errors = tile.masked(jax.nn.sigmoid(logits) - tile.positive, 0.0)  # (6.2)
            narrow = errors.astype(pairs.images.dtype)
            sums = _Gradients(  # (6.3)
                sums.images + matmul(narrow, tile.texts),
                sums.scale + jnp.sum(errors * tile.similarities, axis=1),
                sums.bias + jnp.sum(errors, axis=1),
            )
            text_sums = scatter(matmul(narrow.T, block_rows.images), rectangle.rows)
        if statistics is not None:
            statistics, extremes = in_batch.add_tile(statistics, tile, rectangle)
        return (losses, sums, statistics), (text_sums, extremes)

    zeros = jnp.zeros(R, dtype)
    sums = _Gradients(jnp.zeros(block_rows.images.shape, dtype), zeros, zeros) if gradients else None
    statistics = in_batch.first_statistics(R, dtype) if settings.return_metrics else None
    (losses, sums, statistics), (text_sums, extremes), _ = walk(
        visit, (zeros, sums, statistics), block_rows, pairs, None, rectangle
    )
    metrics = None
    if statistics is not None:
        metrics = in_batch.own_share(statistics, extremes, block_rows.positives, rectangle, B)
    return (jnp.sum(losses) / B, metrics), sums, text_sums


def _forward(
    pairs: Pairs, scale: Float[Array, ""], bias: Float[Array, ""], settings: _Settings
) -> tuple[Share, tuple[Array, ...]]:
    share, sums, text_sums = _walk(pairs, scale, bias, settings, gradients=True)
    assert sums is not None and text_sums is not None
    image_sums = scatter(sums.images, settings.rectangle.cols)
    # Kept in float32: the cotangent, which may lift a float16 gradient out of underflow, is still to come.
    return share, (scale, image_sums, text_sums, jnp.sum(sums.scale), jnp.sum(sums.bias))


def _backward(settings: _Settings, saved: tuple[Array, ...], cotangents: Share) -> tuple[Pairs, Array, Array]:
    scale, image_sums, text_sums, scale_sum, bias_sum = saved
    factor = cotangents[0] / settings.B
    image_gradient, text_gradient = ((factor * scale * x).astype(settings.dtype) for x in (image_sums, text_sums))
    return Pairs(image_gradient, text_gradient, NO_GRADIENT, NO_GRADIENT), factor * scale_sum, factor * bias_sum


_sigmoid_loss.defvjp(_forward, _backward)
