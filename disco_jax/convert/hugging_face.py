"""The folder of a Hugging Face CLIPModel: config, tensors, image processor and tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from disco_jax.convert.layout import Layout
from disco_jax.convert.open_clip import check_normalisation
from disco_jax.convert.tensors import Tensors, read_tensors, write_tensors
from disco_jax.data.tokenizer import clip_vocabulary, load_tokenizer
from disco_jax.models import IMAGE_MEAN, IMAGE_STD, CLIPConfig, TextConfig, VisionConfig

LAYOUT = Layout(
    parameters={
        "visual.projection.kernel": "visual_projection.weight",
        "text.projection.kernel": "text_projection.weight",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.position_embedding": "vision_model.embeddings.position_embedding.weight",
        "text.position_embedding": "text_model.embeddings.position_embedding.weight",
        "logit_scale": "logit_scale",
    },
    modules=(
        ("visual.", "vision_model."),
        ("text.", "text_model."),
        ("patch_embedding", "embeddings.patch_embedding"),
        ("token_embedding", "embeddings.token_embedding"),
        ("ln_pre", "pre_layrnorm"),  # so it is spelt
        ("ln_post", "post_layernorm"),
        ("ln_final", "final_layer_norm"),
        ("transformer.blocks.", "encoder.layers.{}."),
        (".ln_", ".layer_norm"),
        (".attn.", ".self_attn."),
        ("c_fc", "fc1"),
        ("c_proj", "fc2"),
    ),
    linear_projections=True,
    inputs={leaf: [f"{x}_proj.{name}" for x in "qkv"] for leaf, name in (("kernel", "weight"), ("bias", "bias"))},
)
CONFIG_FILE, TENSORS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
PROCESSOR_FILE, TOKENIZER_FILE = "preprocessor_config.json", "tokenizer.json"
_ACTIVATIONS = {"quick_gelu": "quickgelu", "gelu": "gelu"}
# What a config that leaves it out means.
_TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
    "eos_token_id": 49407,
}
_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "num_channels": 3,
}
_BOTH = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_OLD_EOS = 2  # configs of before transformers 4.31 say so, and mean the largest id


def model_of_config(path: Path) -> CLIPConfig:
    """The model of a CLIPModel's config.json. Raises ValueError for another kind of model."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") != "clip":
            raise ValueError(f"{path} is of a model of type {config.get('model_type')!r}: only 'clip' can be imported")
        text = _TEXT | _BOTH | {k: v for k, v in (config.get("text_config") or {}).items() if v is not None}
        vision = _VISION | _BOTH | {k: v for k, v in (config.get("vision_config") or {}).items() if v is not None}
        for name, tower in (("text_config", text), ("vision_config", vision)):
            if tower["layer_norm_eps"] != 1e-5:
                raise ValueError(f"{path}: {name}.layer_norm_eps is {tower['layer_norm_eps']}: only 1e-5 is supported")
            if tower["hidden_act"] not in _ACTIVATIONS or tower["hidden_act"] != text["hidden_act"]:
                raise ValueError(
                    f"{path}: {name}.hidden_act is {tower['hidden_act']!r}: it must be "
                    f"{' or '.join(_ACTIVATIONS)}, and the same in both towers"
                )
        if vision["num_channels"] != 3:
            raise ValueError(f"{path}: vision_config.num_channels is {vision['num_channels']}: images have 3")
        eos, vocab_size = text["eos_token_id"], text["vocab_size"]
        if type(eos) is not int:
            raise ValueError(f"{path}: text_config.eos_token_id is {eos!r}: it must be one number")
        return CLIPConfig(
            config.get("projection_dim", 512),
            VisionConfig(
                vision["image_size"],
                vision["patch_size"],
                vision["hidden_size"],
                vision["num_hidden_layers"],
                vision["num_attention_heads"],
                vision["intermediate_size"],
            ),
            TextConfig(
                text["hidden_size"],
                text["num_hidden_layers"],
                text["num_attention_heads"],
                text["intermediate_size"],
                text["max_position_embeddings"],
                vocab_size,
                vocab_size - 1 if eos == _OLD_EOS else eos,
            ),
            _ACTIVATIONS[text["hidden_act"]],
        )
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no config of a CLIPModel ({error})") from None


def read_folder(folder: Path) -> Tensors:
    """The tensors of a CLIPModel, from one file or several, without the buffers that only count positions.

    Raises:
        FileNotFoundError: no model.safetensors, nor an index of several such files.
        ValueError: images are normalised with other numbers than CLIP's, or a file is damaged.
    """
    processor = folder / PROCESSOR_FILE
    if processor.is_file():
        check_normalisation(json.loads(processor.read_text(encoding="utf-8")), "image_mean", "image_std", processor)
    if (folder / TENSORS_FILE).is_file():
        tensors = read_tensors(folder / TENSORS_FILE)
    elif (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        tensors = {}
        for file in sorted(set(index["weight_map"].values())):
            tensors |= read_tensors(folder / file)
    else:
        raise FileNotFoundError(f"{folder} has no {TENSORS_FILE}: get the model with its safetensors")
    for tower in ("text_model", "vision_model"):
        name = f"{tower}.embeddings.position_ids"
        positions = tensors.pop(name, None)
        if positions is not None and not np.array_equal(positions.ravel(), np.arange(positions.size)):
            raise ValueError(f"{folder}: the tensor {name!r} does not count the positions: not supported")
    return tensors


def config_of_model(model: CLIPConfig, sot_id: int) -> dict[str, Any]:
    """A CLIPModel's config.json. Raises ValueError for what it cannot say."""
    if model.init_logit_bias is not None:
        raise ValueError("a CLIPModel has no bias, but this model was trained with one: export it as open_clip")
    vision, text = model.vision, model.text
    if text.eot_id == _OLD_EOS:
        raise ValueError(f"a CLIPModel takes an end of text of {_OLD_EOS} for the largest id: export it as open_clip")
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[model.activation]
    both = {"hidden_act": activation, "layer_norm_eps": 1e-5, "projection_dim": model.embed_dim}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": model.embed_dim,
        "logit_scale_init_value": model.init_logit_scale,
        "torch_dtype": "float32",
        "text_config": both
        | {
            "model_type": "clip_text_model",
            "hidden_size": text.width,
            "intermediate_size": text.mlp_width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context_length,
            "vocab_size": text.vocab_size,
            "bos_token_id": sot_id,
            "eos_token_id": text.eot_id,
            "pad_token_id": text.eot_id,
        },
        "vision_config": both
        | {
            "model_type": "clip_vision_model",
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp_width,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "num_channels": 3,
        },
    }


def processor_config(image_size: int) -> dict[str, Any]:
    """preprocessor_config.json of `disco_jax.data.images.eval_transform` and CLIP's normalisation."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "feature_extractor_type": "CLIPFeatureExtractor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": image_size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
    }


def write_tokenizer(folder: Path, model: CLIPConfig, tokenizer: str | None) -> None:
    """Writes the files of CLIP's tokenizer, or a copy of the tokenizer.json at the path `tokenizer`."""
    if tokenizer is None:
        tokens, merges = clip_vocabulary()
        kind, names = "CLIPTokenizer", ["<|startoftext|>", "<|endoftext|>"]
        ids = {token: i for i, token in enumerate([*tokens, *names])}
        _write_json(folder / "vocab.json", ids)
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
        stored = tokenizers.Tokenizer.from_file(tokenizer)
        kind = "PreTrainedTokenizerFast"
        names = [str(stored.id_to_token(i)) for i in (load_tokenizer(tokenizer).sot_id, model.text.eot_id)]
    special = {"bos_token": names[0], "eos_token": names[1], "pad_token": names[1], "unk_token": names[1]}
    _write_json(folder / "special_tokens_map.json", special)
    settings = {"tokenizer_class": kind, "model_max_length": model.text.context_length, "add_prefix_space": False}
    _write_json(folder / "tokenizer_config.json", special | settings)


def write_folder(folder: Path, model: CLIPConfig, tensors: Tensors, tokenizer: str | None) -> None:
    """Writes a CLIPModel with its processor into an empty folder. Raises ValueError for what a CLIPModel cannot say."""
    sot_id = load_tokenizer(tokenizer).sot_id
    _write_json(folder / CONFIG_FILE, config_of_model(model, sot_id))
    _write_json(folder / PROCESSOR_FILE, processor_config(model.vision.image_size))
    write_tokenizer(folder, model, tokenizer)
    write_tensors(folder / TENSORS_FILE, tensors)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_tokenizer(folder: Path, model: CLIPConfig) -> tuple[str | None, str]:
    """Path of the folder's tokenizer.json, None where its tokenizer is CLIP's own; and a line that says which.

    Raises ValueError for another vocabulary without a tokenizer.json.
    """
    tokens, _ = clip_vocabulary()
    file, vocabulary = folder / TOKENIZER_FILE, folder / "vocab.json"
    if file.is_file():
        ids = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")
    elif vocabulary.is_file():
        ids = json.loads(vocabulary.read_text(encoding="utf-8"))
    else:
        fits = len(tokens) + 2 == model.text.vocab_size
        return None, "tokenizer: none in the folder; " + (
            "CLIP's own is taken" if fits else f"CLIP's own does not fit the vocabulary of {model.text.vocab_size:,}"
        )
    if isinstance(ids, dict) and all(ids.get(token) == i for i, token in enumerate(tokens)):
        return None, "tokenizer: CLIP's own"
    if not file.is_file():
        raise ValueError(
            f"{folder} has another vocabulary than CLIP's, but no {TOKENIZER_FILE}: save the tokenizer as one"
        )
    return str(file), f"tokenizer: {file}"
