"""open_clip's tensors and model config, which are also OpenAI's own names."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from disco_jax.convert.layout import Layout
from disco_jax.convert.tensors import Tensors
from disco_jax.models import IMAGE_MEAN, IMAGE_STD, PRESETS, CLIPConfig, TextConfig, VisionConfig

LAYOUT = Layout(
    parameters={
        "visual.projection.kernel": "visual.proj",
        "text.projection.kernel": "text_projection",
        "visual.class_embedding": "visual.class_embedding",
        "visual.position_embedding": "visual.positional_embedding",
        "text.position_embedding": "positional_embedding",
        "logit_scale": "logit_scale",
        "logit_bias": "logit_bias",
    },
    modules=(
        ("text.", ""),
        ("patch_embedding", "conv1"),
        (".blocks.", ".resblocks.{}."),
    ),
    linear_projections=False,
    inputs={"kernel": ("in_proj_weight",), "bias": ("in_proj_bias",)},
)
_OPENAI_BUFFERS = ("input_resolution", "context_length", "vocab_size")
_HEAD_WIDTH = 64  # of most CLIPs, and open_clip's default
# Settings of open_clip's config with the values under which its model is the one that we have.
_PLAIN: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "vision_cfg": {"pool_type": ("tok",), "pos_embed_type": ("learnable",), "block_type": ("default",)},
    "text_cfg": {"pool_type": ("argmax", "eos"), "proj_type": ("linear",), "block_type": ("default",)},
}
_WITHOUT_EFFECT = {"patch_dropout", "output_tokens", "attn_pooler_queries", "attn_pooler_heads", "eos_id", "pad_id"}


def plain_names(tensors: Tensors, source: object) -> Tensors:
    """The tensors under the names of open_clip's CLIP, without buffers that only repeat what the shapes say.

    open_clip's CustomTextCLIP puts "text." before the names of the text tower. OpenAI's files have three numbers more,
    and older ones of open_clip the causal mask. Raises ValueError where one of these says something else.
    """
    tensors = {name.removeprefix("text."): tensor for name, tensor in tensors.items()}
    for name in (
        "visual.conv1.weight",
        "visual.positional_embedding",
        "positional_embedding",
        "token_embedding.weight",
    ):
        if name not in tensors:
            first = ", ".join(sorted(tensors)[:3])
            raise ValueError(
                f"{source} is no ViT CLIP of open_clip: it lacks the tensor {name!r} (it holds {first} ...)"
            )
    length, patch = len(tensors["positional_embedding"]), tensors["visual.conv1.weight"].shape[-1]
    side = patch * math.isqrt(max(0, len(tensors["visual.positional_embedding"]) - 1))
    known = dict(zip(_OPENAI_BUFFERS, (side, length, len(tensors["token_embedding.weight"])), strict=True))
    for name, number in known.items():
        if name in tensors and tensors.pop(name) != number:
            raise ValueError(f"{source}: its {name} is not the {number} that its other tensors have")
    mask = tensors.pop("attn_mask", None)
    if mask is not None and not np.array_equal(mask, np.triu(np.full((length, length), -np.inf), 1)):
        raise ValueError(f"{source}: its attn_mask is not that of a causal text tower")
    return tensors


def is_openai(tensors: Tensors) -> bool:
    """Whether the file says by its buffers that it is one of OpenAI's."""
    return all(name in tensors for name in _OPENAI_BUFFERS)


def model_of_shapes(
    tensors: Tensors,
    source: object,
    *,
    activation: str | None,
    vision_heads: int | None,
    text_heads: int | None,
    openai: bool,
    like: CLIPConfig | None,
) -> tuple[CLIPConfig, list[str]]:
    """The sizes of the model with these tensors, and lines on what they leave open.

    Heads that are not given are those of `like` or a preset with such towers, else of 64 dimensions; the activation is
    QuickGELU for OpenAI's files, else that of `like`, or GELU. Raises ValueError for tensors of another model.
    """
    notes = []

    def note(what: str, value: Any, why: str) -> Any:
        notes.append(f"{what.replace('-', ' ')}: {value}, {why}; the file does not say (--{what} sets another)")
        return value

    def shape(name: str, dims: int) -> tuple[int, ...]:
        if name not in tensors or tensors[name].ndim != dims:
            found = "it is missing" if name not in tensors else f"its shape is {tensors[name].shape}"
            raise ValueError(f"{source}: the tensor {name!r} must have {dims} dimensions, but {found}")
        return tensors[name].shape

    def layers(prefix: str) -> int:
        found = {m[1] for name in tensors if (m := re.match(rf"{prefix}transformer\.resblocks\.(\d+)\.", name))}
        return len(found)

    width, _, patch, _ = shape("visual.conv1.weight", 4)
    side = math.isqrt(shape("visual.positional_embedding", 2)[0] - 1)
    vocab_size, text_width = shape("token_embedding.weight", 2)
    vision = {
        "image_size": side * patch,
        "patch_size": patch,
        "width": width,
        "layers": layers("visual."),
        "mlp_width": shape("visual.transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
    }
    text = {
        "width": text_width,
        "layers": layers(""),
        "mlp_width": shape("transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
        "context_length": shape("positional_embedding", 2)[0],
        "vocab_size": vocab_size,
    }
    embed_dim = shape("visual.proj", 2)[1]
    models = ({"config.model": like} if like else {}) | dict(PRESETS)

    def heads(tower: str, given: int | None, sizes: dict[str, int]) -> int:
        if given is not None:
            return given
        for name, model in models.items():
            known = getattr(model, tower)
            if all(getattr(known, size) == sizes[size] for size in ("width", "layers", "mlp_width")):
                return int(note(f"{tower}-heads", known.heads, f"as {name} has"))
        return int(note(f"{tower}-heads", max(1, sizes["width"] // _HEAD_WIDTH), f"of {_HEAD_WIDTH} dimensions each"))

    if activation is None and openai:
        activation = note("activation", "quickgelu", "as OpenAI's models have")
    elif activation is None:
        activation = note(
            "activation", *((like.activation, "as config.model has") if like else ("gelu", "open_clip's default"))
        )
    model = CLIPConfig(
        embed_dim,
        VisionConfig(**vision, heads=heads("vision", vision_heads, vision)),
        TextConfig(**text, heads=heads("text", text_heads, text), eot_id=vocab_size - 1),
        activation,
        init_logit_bias=float(bias.sum()) if (bias := tensors.get("logit_bias")) is not None else None,
    )
    return model, notes


def is_config(path: Path) -> bool:
    """Whether the file is there and describes a model to open_clip."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(config, dict) and {"embed_dim", "vision_cfg", "text_cfg"} <= config.get("model_cfg", config).keys()
    )


def model_of_config(path: Path) -> CLIPConfig:
    """The model of an open_clip config: NAME.json, or open_clip_config.json with its "model_cfg".

    Raises ValueError for settings of another kind of model, or images normalised with other numbers than CLIP's.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        check_normalisation(config.get("preprocess_cfg", {}), "mean", "std", path)
        config = config.get("model_cfg", config)
        vision, text = dict(config["vision_cfg"]), dict(config["text_cfg"])
        for group, settings in (("vision_cfg", vision), ("text_cfg", text)):
            _check_plain(group, settings, path)
        width = vision["width"]
        vocab_size = text.get("vocab_size", 49408)
        return CLIPConfig(
            config["embed_dim"],
            VisionConfig(
                vision.get("image_size", 224),
                vision["patch_size"],
                width,
                vision["layers"],
                width // vision.get("head_width", _HEAD_WIDTH),
                int(width * vision.get("mlp_ratio", 4.0)),
            ),
            TextConfig(
                text["width"],
                text["layers"],
                text["heads"],
                int(text["width"] * text.get("mlp_ratio", 4.0)),
                text.get("context_length", 77),
                vocab_size,
                text["eos_id"] if text.get("pool_type") == "eos" else vocab_size - 1,
            ),
            "quickgelu" if config.get("quick_gelu") else "gelu",
            init_logit_bias=config.get("init_logit_bias"),
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no model config of an open_clip ViT ({type(error).__name__}: {error})") from None


def _check_plain(group: str, settings: Mapping[str, Any], path: Path) -> None:
    sizes = {"image_size", "patch_size", "width", "layers", "heads", "head_width", "mlp_ratio", "context_length"}
    for name, value in settings.items():
        if name in sizes | {"vocab_size"} | _WITHOUT_EFFECT or not value or value in _PLAIN[group].get(name, ()):
            continue
        raise ValueError(f"{path}: {group}.{name}={value!r} makes another model than a plain ViT CLIP: not supported")


def check_normalisation(settings: Mapping[str, Any], mean: str, std: str, path: Path) -> None:
    """Raises ValueError where images are normalised with other numbers than CLIP's."""
    for key, ours in ((mean, IMAGE_MEAN), (std, IMAGE_STD)):
        if key in settings and not np.allclose(settings[key], ours, atol=1e-6):
            raise ValueError(
                f"{path}: {key} is {settings[key]}, but models here see images normalised with CLIP's {list(ours)}"
            )


def preset_name(model: CLIPConfig) -> str | None:
    """The name under which open_clip knows a model of these sizes, or None."""
    plain = dataclasses.replace(model, init_logit_scale=PRESETS["ViT-B-32"].init_logit_scale)
    return next((name for name, preset in PRESETS.items() if preset == plain and name != "tiny"), None)


def config_of_model(model: CLIPConfig) -> dict[str, Any]:
    """open_clip's model config."""
    vision, text = model.vision, model.text
    config: dict[str, Any] = {
        "embed_dim": model.embed_dim,
        "quick_gelu": model.activation == "quickgelu",
        "vision_cfg": {
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "width": vision.width,
            "layers": vision.layers,
            "head_width": vision.width // vision.heads,
            "mlp_ratio": _ratio(vision.mlp_width, vision.width),
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers,
            "mlp_ratio": _ratio(text.mlp_width, text.width),
        },
    }
    if text.eot_id != text.vocab_size - 1:  # open_clip's default takes the features at the largest id
        config["text_cfg"] |= {"pool_type": "eos", "eos_id": text.eot_id}
    if model.init_logit_bias is not None:
        config["init_logit_bias"] = model.init_logit_bias
    return config


def _ratio(mlp_width: int, width: int) -> float:
    """The float which open_clip multiplies by the width, and cuts, to get the width of an MLP."""
    ratio = mlp_width / width
    return ratio if int(width * ratio) == mlp_width else math.nextafter(ratio, math.inf)
