"""Sizes of CLIP models, under open_clip's names."""

import dataclasses
import difflib
import math
from collections.abc import Mapping

from disco_jax.models.transformer import ACTIVATIONS


def _check_sizes(config: object) -> None:
    """Raise ValueError where a size is not positive or the heads do not divide the width."""
    sizes = {k: v for k, v in vars(config).items() if isinstance(v, int) and k != "eot_id"}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{type(config).__name__}.{name} is {size}: give a positive number")
    if "heads" in sizes and sizes["width"] % sizes["heads"]:
        raise ValueError(
            f"{type(config).__name__}: width {sizes['width']} does not divide into {sizes['heads']} heads: "
            "make width a multiple of heads"
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Sizes of the image tower; image_size and patch_size are the side of a square, in pixels.

    Raises ValueError where a size is not positive, heads do not divide width or patches do not tile the image.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"VisionConfig: image_size {self.image_size} is no multiple of patch_size {self.patch_size}: "
                "change one of them"
            )


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Sizes of the text tower; eot_id is the end-of-text token, at whose first position the features are taken.

    Raises ValueError where a size is not positive, heads do not divide width or eot_id is not in the vocabulary.
    """

    width: int
    layers: int
    heads: int
    mlp_width: int
    context_length: int = 77
    vocab_size: int = 49408
    eot_id: int = 49407

    def __post_init__(self) -> None:
        _check_sizes(self)
        if not 0 <= self.eot_id < self.vocab_size:
            raise ValueError(
                f"TextConfig: eot_id {self.eot_id} is outside the vocabulary of {self.vocab_size}: "
                "give both as the tokenizer has them"
            )


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Both towers, the size of the features they share, and the activation ("gelu" or "quickgelu").

    init_logit_scale: where the log of the temperature's inverse starts, CLIP's ln(1/0.07). init_logit_bias: where the
    bias of the sigmoid loss starts; None: the model has none.

    Raises ValueError where embed_dim is not positive or the activation is unknown.
    """

    embed_dim: int
    vision: VisionConfig
    text: TextConfig
    activation: str = "gelu"
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"CLIPConfig: unknown activation {self.activation!r}: choose from {', '.join(ACTIVATIONS)}"
            )


def _clip(
    embed_dim: int,
    image_size: int,
    patch_size: int,
    vision: tuple[int, int, int],
    text: tuple[int, int, int],
    vision_mlp_width: int | None = None,
    context_length: int = 77,
) -> CLIPConfig:
    """Make a config of (width, layers, heads) for each tower; an MLP is four times as wide as its tower unless said."""
    return CLIPConfig(
        embed_dim,
        VisionConfig(image_size, patch_size, *vision, mlp_width=vision_mlp_width or 4 * vision[0]),
        TextConfig(*text, mlp_width=4 * text[0], context_length=context_length),
    )


_GELU = {
    "tiny": _clip(64, 32, 8, (128, 4, 4), (64, 2, 2), context_length=32),  # ours, for CPU
    "ViT-S-32-alt": _clip(256, 224, 32, (384, 12, 6), (256, 10, 4)),
    "ViT-S-32": _clip(384, 224, 32, (384, 12, 6), (384, 12, 6)),
    "ViT-S-16": _clip(384, 224, 16, (384, 12, 6), (384, 12, 6)),
    "ViT-M-32": _clip(512, 224, 32, (512, 12, 8), (512, 12, 8)),
    "ViT-M-16": _clip(512, 224, 16, (512, 12, 8), (512, 12, 8)),
    "ViT-B-32": _clip(512, 224, 32, (768, 12, 12), (512, 12, 8)),
    "ViT-B-32-256": _clip(512, 256, 32, (768, 12, 12), (512, 12, 8)),
    "ViT-B-16": _clip(512, 224, 16, (768, 12, 12), (512, 12, 8)),
    "ViT-B-16-plus-240": _clip(640, 240, 16, (896, 12, 14), (640, 12, 10)),
    "ViT-L-16": _clip(768, 224, 16, (1024, 24, 16), (768, 12, 12)),
    "ViT-L-14": _clip(768, 224, 14, (1024, 24, 16), (768, 12, 12)),
    "ViT-L-14-336": _clip(768, 336, 14, (1024, 24, 16), (768, 12, 12)),
    "ViT-H-16": _clip(1024, 224, 16, (1280, 32, 16), (1024, 24, 16)),
    "ViT-H-14": _clip(1024, 224, 14, (1280, 32, 16), (1024, 24, 16)),
    "ViT-g-14": _clip(1024, 224, 14, (1408, 40, 16), (1024, 24, 16), vision_mlp_width=6144),
    "ViT-bigG-14": _clip(1280, 224, 14, (1664, 48, 16), (1280, 32, 20), vision_mlp_width=8192),
}
_WITH_QUICKGELU = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336", "ViT-H-14", "ViT-bigG-14")

PRESETS: Mapping[str, CLIPConfig] = _GELU | {
    f"{name}-quickgelu": dataclasses.replace(_GELU[name], activation="quickgelu") for name in _WITH_QUICKGELU
}


def preset(name: str) -> CLIPConfig:
    """Return the config of that name; ValueError with the nearest name where there is none."""
    if name in PRESETS:
        return PRESETS[name]
    by_lower_case = {known.lower(): known for known in PRESETS}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    hint = f"did you mean {by_lower_case[near[0]]!r}?" if near else f"choose from {', '.join(PRESETS)}"
    raise ValueError(f"unknown preset {name!r}: {hint}")
