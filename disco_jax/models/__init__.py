"""The CLIP model, its presets and its weight-decay rule."""

from disco_jax.models.clip import CLIP, IMAGE_MEAN, IMAGE_STD
from disco_jax.models.decay import decay_mask
from disco_jax.models.presets import PRESETS, CLIPConfig, TextConfig, VisionConfig, preset

__all__ = [
    "CLIP",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "PRESETS",
    "CLIPConfig",
    "TextConfig",
    "VisionConfig",
    "decay_mask",
    "preset",
]
