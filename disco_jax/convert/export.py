"""`export`: weights as open_clip and Hugging Face take them, with a model card."""

import json
import os
from pathlib import Path

from disco_jax.convert import hugging_face, open_clip
from disco_jax.convert.card import model_card
from disco_jax.convert.source import load
from disco_jax.convert.tensors import write_tensors
from disco_jax.convert.weights import Weights, new_folder

FORMATS = ("open_clip", "hf")
CARD_FILE = "README.md"


def export(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, format: str = "open_clip", ema: bool = False
) -> list[Path]:
    """Writes weights for other projects; nothing that is there already is replaced.

    Args:
        source: as `disco_jax.convert.load` takes it.
        out: format "open_clip": a file NAME.safetensors, for `open_clip.create_model_and_transforms(model, out)`;
            beside it come README.md and, where open_clip has no model of these sizes, its config as NAME.json.
            format "hf": a folder for `transformers.CLIPModel.from_pretrained` and `CLIPProcessor.from_pretrained`.
        format: "open_clip" or "hf".
        ema: the running averages of one of our runs instead of its parameters.

    Returns:
        what was written: the file or the folder, then what lies beside it.

    Raises:
        FileExistsError: something is at `out`, or beside it.
        ValueError: an unknown format, or what the format cannot say; and all that `load` raises.
    """
    path = Path(out).expanduser().absolute()
    command = f"python -m disco_jax.convert export {source} --format {format} --out {out}" + (" --ema" if ema else "")
    if format == "open_clip":
        return _export_open_clip(source, path, command, ema)
    if format == "hf":
        return _export_hugging_face(source, path, command, ema)
    raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")


def _export_open_clip(source: str | os.PathLike[str], path: Path, command: str, ema: bool) -> list[Path]:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors: open_clip tells the kind of a file by its name")
    config, card = path.with_suffix(".json"), path.with_name(CARD_FILE)
    for file in (path, config, card):
        if file.exists():
            raise FileExistsError(f"{file} is there already: remove it, or export into another folder")
    weights = load(source, ema=ema)
    name = open_clip.preset_name(weights.model)
    usage = ["import open_clip", ""]
    if name is None:
        usage.append(f'open_clip.add_model_config("{config.name}")')
    arguments = f'"{name or path.stem}", pretrained="{path.name}"'
    usage.append(f"model, _, preprocess = open_clip.create_model_and_transforms({arguments})")
    if weights.tokenizer is None:
        usage.append(f'tokenizer = open_clip.get_tokenizer("{name or path.stem}")')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, open_clip.LAYOUT.to_tensors(weights.params))
    written = [path, card]
    if name is None:
        config.write_text(json.dumps(open_clip.config_of_model(weights.model), indent=2) + "\n", encoding="utf-8")
        written.append(config)
    card.write_text(model_card(weights, path.stem, "\n".join(usage), command), encoding="utf-8")
    return written


def _export_hugging_face(source: str | os.PathLike[str], path: Path, command: str, ema: bool) -> list[Path]:
    with new_folder(path) as folder:
        weights: Weights = load(source, ema=ema)
        tensors = hugging_face.LAYOUT.to_tensors(weights.params)
        hugging_face.write_folder(folder, weights.model, tensors, weights.tokenizer)
        usage = (
            "from transformers import CLIPModel, CLIPProcessor\n\n"
            f'model = CLIPModel.from_pretrained("{path.name}")\n'
            f'processor = CLIPProcessor.from_pretrained("{path.name}")'
        )
        (folder / CARD_FILE).write_text(model_card(weights, path.name, usage, command), encoding="utf-8")
    return [path]
