"""`load`: weights from wherever they are."""

import os
from pathlib import Path

from disco_jax.convert import hugging_face, open_clip
from disco_jax.convert.runs import is_run, read_run
from disco_jax.convert.tensors import PICKLED, SAFETENSORS, read_tensors
from disco_jax.convert.weights import MODEL_FILE, Weights, read_weights
from disco_jax.models import CLIPConfig

OPEN_CLIP_CONFIG = "open_clip_config.json"
_OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def load(
    source: str | os.PathLike[str],
    *,
    ema: bool = False,
    activation: str | None = None,
    vision_heads: int | None = None,
    text_heads: int | None = None,
    like: CLIPConfig | None = None,
) -> Weights:
    """Reads the weights of a ViT CLIP.

    Args:
        source: one of
            a .safetensors, .pt, .pth or .bin file with open_clip's or OpenAI's names, with or without the model config
            that our export writes beside it (NAME.json for NAME.safetensors);
            a folder with open_clip_config.json, as on the Hugging Face hub;
            a folder of a Hugging Face CLIPModel (config.json and model.safetensors);
            a folder that `python -m disco_jax.convert import` wrote;
            a workdir of train.py, for its last checkpoint, or WORKDIR/checkpoints/STEP.
        ema: the running averages of one of our runs instead of its parameters.
        activation: "gelu" or "quickgelu", of a file without a config; by default OpenAI's files have QuickGELU, others
            GELU.
        vision_heads, text_heads: of a file without a config; by default those of the preset with the same sizes, else
            heads of 64 dimensions.
        like: the model whose heads and activation are taken, instead of these defaults, for what a file does not say.

    Returns:
        the weights, whose `notes` say what was taken for granted.

    Raises:
        FileNotFoundError: there is nothing at `source`, or a folder of no known kind.
        ValueError: a tensor is missing, unexpected or mis-shaped, by name; another kind of model; an argument for what
            the source itself says.
        ImportError: a .pt file, and no torch.
    """
    path = Path(source).expanduser().absolute()
    told = {"activation": activation, "vision_heads": vision_heads, "text_heads": text_heads}
    given = [name for name, value in told.items() if value is not None]
    if not path.exists():
        raise FileNotFoundError(f"{source} does not exist: give a file or a folder with weights")
    if path.is_dir() and is_run(path):
        _refuse(given, path, "the run's config")
        return read_run(path, ema=ema)
    if ema:
        raise ValueError(f"{source} is no run of train.py: only these keep running averages (--ema)")
    config: Path | None = None
    if path.is_dir():
        if (path / MODEL_FILE).is_file():
            _refuse(given, path, MODEL_FILE)
            return read_weights(path)
        if not (path / OPEN_CLIP_CONFIG).is_file():
            if not (path / hugging_face.CONFIG_FILE).is_file():
                raise FileNotFoundError(
                    f"{source} is no folder with weights: it has neither {MODEL_FILE}, {OPEN_CLIP_CONFIG} nor "
                    f"{hugging_face.CONFIG_FILE}"
                )
            _refuse(given, path, hugging_face.CONFIG_FILE)
            return _from_hugging_face(path)
        config = path / OPEN_CLIP_CONFIG
        files = [path / name for name in _OPEN_CLIP_FILES if (path / name).is_file()]
        if not files:
            raise FileNotFoundError(f"{source} has {OPEN_CLIP_CONFIG} but none of {', '.join(_OPEN_CLIP_FILES)}")
        path = files[0]
    elif path.suffix in SAFETENSORS + PICKLED and open_clip.is_config(path.with_suffix(".json")):
        config = path.with_suffix(".json")
    tensors = read_tensors(path)
    openai = open_clip.is_openai(tensors)
    tensors = open_clip.plain_names(tensors, path)
    if config is not None:
        _refuse(given, path, config.name)
        model, notes = open_clip.model_of_config(config), [f"sizes, heads and activation: as {config} says"]
    else:
        model, notes = open_clip.model_of_shapes(
            tensors,
            path,
            openai=openai,
            like=like,
            activation=activation,
            vision_heads=vision_heads,
            text_heads=text_heads,
        )
    return Weights(model, open_clip.LAYOUT.from_tensors(tensors, model, path), str(source), notes=tuple(notes))


def _from_hugging_face(folder: Path) -> Weights:
    model = hugging_face.model_of_config(folder / hugging_face.CONFIG_FILE)
    tensors = hugging_face.read_folder(folder)
    params = hugging_face.LAYOUT.from_tensors(tensors, model, folder)
    tokenizer, note = hugging_face.find_tokenizer(folder, model)
    return Weights(model, params, str(folder), tokenizer, notes=(note,))


def _refuse(given: list[str], path: Path, says: str) -> None:
    if given:
        raise ValueError(f"{given[0]} is given, but {says} says it already for {path}: leave it out")
