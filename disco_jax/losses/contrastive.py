"""The entrance to CLIP's loss over many devices: for whole arrays, and for a device's own rows inside a shard_map."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from disco_jax.losses import checks
from disco_jax.losses.disco import disco_loss
from disco_jax.losses.in_batch import InBatchMetrics
from disco_jax.losses.labels import label_pairs
from disco_jax.losses.over_mesh import over_mesh
from disco_jax.losses.softmax import Settings, softmax_loss
from disco_jax.losses.walk import Axes, Rectangle, accumulator, axis_size, vary_alike


def contrastive_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""] | float,
    *,
    mesh: Mesh,
    rows: str | Axes = "data",
    cols: str | Axes | None = None,
    method: str = "chunked",
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    labels: Int[Array, " B"] | None = None,
    return_metrics: bool = False,
) -> Float[Array, ""] | tuple[Float[Array, ""], InBatchMetrics]:
    """CLIP's loss over the whole batch, computed by all devices of a mesh; exact in value and gradients.

    Call it on whole (global) arrays, inside `jax.jit` or not; it places their rows on the devices itself: divided over
    the axes of `rows` and `cols` together, in the mesh's order. Which device has which pairs is of no consequence.

    Args:
        image_features: L2-normalised rows, bfloat16, float16, float32 or float64. Similarities, exponentials and sums
            are float32 whatever that type (float64 for float64); gradients come back in it. NaN features give a NaN
            loss.
        text_features: the same; row i is the caption of image i.
        logit_scale: what the similarities are multiplied by (not its logarithm).
        mesh: the devices, of `disco_jax.mesh.make_mesh` or `jax.make_mesh`. Outside `jax.jit` and `jax.set_mesh`, jax
            differentiates nothing on a mesh with Explicit axes.
        rows: mesh axis, or axes, along which texts travel between devices.
        cols: mesh axis, or axes, along which images travel; None: none do. What a device receives grows with r + c
            instead of N = r c (docs/loss.md, (7.1)), for B/r instead of B/N images in memory.
        method: "chunked" walks over the similarities in tiles (docs/loss.md, sections 3 and 4); "block" keeps the
            B/r x B/c of them of each device for one product less; "disco" is the form of DisCo-CLIP (arXiv
            2304.08480), with cols=None, without label smoothing, labels and metrics.
        chunk: columns of a tile for "chunked", in all devices of `rows`. Default: so many that a tile has 2^23
            similarities (32 MiB), at least 512. Any number works with any batch; fewer need less memory.
        label_smoothing: share of each target that is spread over all B columns.
        labels: integers; pairs with equal labels are positives of each other, in equal shares. Number 64-bit ones
            anew: without jax_enable_x64, jax cuts them to 32 bits, which is refused where it can be seen (not by jit).
        return_metrics: also return how well the batch is told apart.

    Returns:
        The mean over the batch of both directions, float32 (or float64), the same on every device; and with
        `return_metrics` an `InBatchMetrics`.

    Raises:
        ValueError: features, scale or labels of a wrong shape or type, an unknown method or mesh axis, a batch that
            does not divide over the devices, options that the method does not have.
    """
    rows, cols = checks.axis_names(rows, cols)
    _check_options(rows, cols, method, chunk, label_smoothing, labels, return_metrics)
    return over_mesh(
        _on_device,
        mesh,
        image_features,
        text_features,
        {"logit_scale": logit_scale},
        labels,
        rows=rows,
        cols=cols,
        method=method,
        chunk=chunk,
        label_smoothing=label_smoothing,
        return_metrics=return_metrics,
    )


def local_contrastive_loss(
    image_features: Float[Array, "b D"],
    text_features: Float[Array, "b D"],
    logit_scale: Float[Array, ""] | float,
    *,
    rows: str | Axes,
    cols: str | Axes | None = None,
    method: str = "chunked",
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    labels: Int[Array, " b"] | None = None,
    return_metrics: bool = False,
) -> Float[Array, ""] | tuple[Float[Array, ""], InBatchMetrics]:
    """The core of `contrastive_loss`, for use inside a `jax.shard_map` of your own: each device gives its own rows.

    Args:
        image_features, text_features: this device's own b pairs, both divided over the devices in one order; the
            other arguments are those of `contrastive_loss`. rows=() and no cols is one device, and needs no shard_map.

    Returns:
        what `contrastive_loss` returns, over the batch of all devices along `rows` and `cols`; the same on all.

    Raises:
        ValueError: as `contrastive_loss`, and where jax's types say that the features do not differ from device to
            device, or the scale does.
    """
    checks.check_features(image_features, text_features, logit_scale=logit_scale)
    checks.check_labels(labels, len(image_features))
    rows, cols = checks.axis_names(rows, cols)
    _check_options(rows, cols, method, chunk, label_smoothing, labels, return_metrics)
    features = {"image_features": image_features, "text_features": text_features}
    checks.check_inside_shard_map(rows + cols, features, {"logit_scale": logit_scale})
    return _on_device(
        image_features,
        text_features,
        logit_scale,
        rows=rows,
        cols=cols,
        method=method,
        chunk=chunk,
        label_smoothing=label_smoothing,
        labels=labels,
        return_metrics=return_metrics,
    )


def _on_device(
    images: Float[Array, "b D"],
    texts: Float[Array, "b D"],
    logit_scale: Float[Array, ""] | float,
    *,
    rows: Axes,
    cols: Axes,
    method: str,
    chunk: int | None,
    label_smoothing: float,
    labels: Int[Array, " b"] | None,
    return_metrics: bool,
) -> Any:
    axes = rows + cols
    scale = jnp.asarray(logit_scale, accumulator(images))
    # Typed as different on each device, the scale gets the sum of all devices' gradients.
    images, texts, scale, labels = vary_alike(images, texts, scale, labels)
    if method == "disco":
        return jax.lax.psum(disco_loss(images, texts, scale, axes), axes)
    B = len(images) * axis_size(axes)
    settings = Settings(
        Rectangle(rows, cols, B if method == "block" else chunk),
        B=B,
        keep_block=method == "block",
        label_smoothing=label_smoothing,
        return_metrics=return_metrics,
    )
    share = softmax_loss(label_pairs(images, texts, labels, axes), scale, settings)
    loss, metrics = jax.lax.psum(share, axes) if axes else share
    return (loss, metrics) if return_metrics else loss


def _check_options(
    rows: Axes,
    cols: Axes,
    method: str,
    chunk: int | None,
    label_smoothing: float,
    labels: Array | None,
    return_metrics: bool,
) -> None:
    checks.check_method(method, chunk, label_smoothing)
    if method == "disco" and (cols or not rows or labels is not None or return_metrics):
        raise ValueError(
            "the 'disco' loss divides its similarities over rows alone, and has no labels and no metrics: got "
            f"rows={rows!r}, cols={cols!r}; use 'chunked' or 'block' for more"
        )
