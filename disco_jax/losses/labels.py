"""Which pairs are positives: those with equal labels. Without labels every pair has one of its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from disco_jax.losses.walk import Axes, gather, vary


def labels_and_counts(labels: Int[Array, " b"] | None, b: int, axes: Axes) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """The labels of a device's own b pairs, and how many pairs of the whole batch have each of them.

    Args:
        labels: as the user gave them; None: a pair's place in the batch.
        b: pairs on a device.
        axes: mesh axes that divide the batch.
    """
    if labels is None:
        first = jax.lax.axis_index(axes) * b if axes else 0
        return first + jnp.arange(b, dtype=jnp.int32), vary(jnp.ones(b, jnp.int32), axes)
    everybodys = jnp.sort(gather(labels, axes))
    first, last = (jnp.searchsorted(everybodys, labels, side=side) for side in ("left", "right"))
    return labels, last - first
