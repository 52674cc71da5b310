"""Patch dropout: in training the image tower sees some of the patches only (FLIP, Li et al. 2023, arXiv 2212.00794)."""

import jax
from jaxtyping import Array, Int, Key

from disco_jax.models.presets import VisionConfig


def count_kept(vision: VisionConfig, rate: float) -> int:
    """How many patches of an image are left when a share `rate` of them is dropped: at least one."""
    return max(1, int((vision.image_size // vision.patch_size) ** 2 * (1 - rate)))


def draw_patches(
    key: Key[Array, ""], samples: Int[Array, " b"], vision: VisionConfig, rate: float
) -> Int[Array, "b k"]:
    """Which patches of each image are kept, drawn without replacement.

    Args:
        key: of the step.
        samples: places of the images in the global batch. A sample's patches follow from the key and its place, so
            devices and microbatches don't matter.
        vision: sizes of the image tower.
        rate: the share that is dropped, in [0, 1).

    Returns:
        for each sample k = `count_kept` different patches, numbered row by row from 0.
    """

    def draw(sample: Array) -> Array:
        noise = jax.random.uniform(jax.random.fold_in(key, sample), ((vision.image_size // vision.patch_size) ** 2,))
        return jax.lax.top_k(noise, count_kept(vision, rate))[1]

    return jax.vmap(draw)(samples)
