"""Which pairs are positives: those with equal labels. Without labels every pair has one of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from disco_jax.losses.walk import Axes, Pairs, gather, vary


def label_pairs(
    images: Float[Array, "b D"], texts: Float[Array, "b D"], labels: Int[Array, " b"] | None, axes: Axes
) -> Pairs:
    """A device's own pairs with their labels, where there are none their places in the batch, and their positives.

    Args:
        images: this device's own.
        texts: theirs.
        labels: as the user gave them.
        axes: mesh axes that divide the batch.
    """
    if labels is None:
        b = len(images)
        first = jax.lax.axis_index(axes) * b if axes else 0
        return Pairs(images, texts, first + jnp.arange(b, dtype=jnp.int32), vary(jnp.ones(b, jnp.int32), axes))
    everybodys = jnp.sort(gather(labels, axes))
    first, last = (jnp.searchsorted(everybodys, labels, side=side) for side in ("left", "right"))
    return Pairs(images, texts, labels, last - first)
