"""The one entrance to the distributed contrastive losses: checks, then the form asked for."""

import math

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from disco_jax.losses.dense import check_features
from disco_jax.losses.disco import disco_contrastive_loss


def contrastive_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""],
    *,
    mesh: Mesh,
    rows: str | tuple[str, ...] = "data",
    cols: str | tuple[str, ...] | None = None,
    method: str = "disco",
) -> Float[Array, ""]:
    """CLIP's loss over the whole batch, computed by all devices of a mesh; exact in value and gradients.

    Call it on whole (global) arrays, inside `jax.jit` or not; it places their rows on the devices itself.

    Args:
        image_features: L2-normalised rows, any float type. Similarities and sums are float32 whatever that type
            (float64 features: float64); gradients come back in it.
        text_features: the same; row i is the caption of image i.
        logit_scale: what the similarities are multiplied by (not its logarithm).
        mesh: the devices.
        rows: mesh axis, or axes, over which the rows of both feature arrays are divided.
        cols: mesh axes for a second division of the similarities; only None so far.
        method: the form of the loss; only "disco" (DisCo-CLIP, arXiv 2304.08480) so far.

    Returns:
        The mean over the batch of both directions, float32 (or float64), the same on every device.

    Raises:
        ValueError: features or scale of a wrong shape or type, an unknown method or mesh axis, a batch that does not
            divide over the devices of `rows`.
    """
    rows = (rows,) if isinstance(rows, str) else rows
    if method != "disco":
        raise ValueError(f"loss method {method!r} is unknown: use 'disco'")
    if cols is not None:
        raise ValueError(f"the 'disco' loss divides its similarities over rows alone: got cols={cols!r}, use None")
    if not rows or len(set(rows)) < len(rows) or not set(rows) <= set(mesh.axis_names):
        raise ValueError(f"rows={rows!r} must be different axes of the mesh, which has {mesh.axis_names!r}")
    check_features(image_features, text_features, logit_scale)
    devices = math.prod(mesh.shape[axis] for axis in rows)
    if len(image_features) % devices:
        raise ValueError(
            f"a batch of {len(image_features)} does not divide over the {devices} devices of {rows!r}: "
            f"use a multiple of {devices}"
        )
    logit_scale = jnp.asarray(logit_scale, jnp.promote_types(image_features.dtype, jnp.float32))
    return disco_contrastive_loss(image_features, text_features, logit_scale, mesh, rows)
