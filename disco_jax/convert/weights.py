"""Weights with their model, and the folder that keeps them: model.json, model.safetensors, perhaps tokenizer.json."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from disco_jax.convert.layout import abstract_params, flatten, unflatten
from disco_jax.convert.tensors import check_tensors, read_tensors, write_tensors
from disco_jax.encoding import make_graphdef
from disco_jax.models import CLIP, CLIPConfig, TextConfig, VisionConfig

MODEL_FILE, TENSORS_FILE, TOKENIZER_FILE = "model.json", "model.safetensors", "tokenizer.json"


@dataclass(frozen=True)
class Weights:
    """A CLIP with its parameters.

    model: its sizes; params: nested dicts of float32 numpy arrays, named as the parameters of `disco_jax.models.CLIP`;
    source: where they come from; tokenizer: path of a tokenizer.json, None for CLIP's own; step: of the training run,
    where it is one of ours; ema: whether they are its running averages; notes: lines on what the source left open.
    """

    model: CLIPConfig
    params: PyTree
    source: str
    tokenizer: str | None = None
    step: int | None = None
    ema: bool = False
    notes: tuple[str, ...] = ()

    def clip(self, dtype: DTypeLike = jnp.float32) -> CLIP:
        """The model, computing in `dtype`."""
        return nnx.merge(make_graphdef(self.model, dtype), jax.tree.map(jnp.asarray, self.params))


def check_new(folder: Path) -> None:
    """Raises FileExistsError where something is there, but for an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: remove it, or name another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is at its place only when it is whole.

    Raises FileExistsError where something is there already.
    """
    check_new(folder)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(weights: Weights, out: str | os.PathLike[str]) -> None:
    """Writes the weights into a new folder, which `disco_jax.convert.load` reads.

    Raises FileExistsError where something is there already.
    """
    with new_folder(Path(out).expanduser().absolute()) as folder:
        _write_files(weights, folder)


def _write_files(weights: Weights, folder: Path) -> None:
    write_tensors(folder / TENSORS_FILE, flatten(weights.params))
    if weights.tokenizer is not None:
        shutil.copyfile(weights.tokenizer, folder / TOKENIZER_FILE)
    about = {"source": weights.source, "step": weights.step, "ema": weights.ema, "notes": weights.notes}
    model = dataclasses.asdict(weights.model)
    (folder / MODEL_FILE).write_text(json.dumps({"model": model} | about, indent=2) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> Weights:
    """The weights in a folder of `write_weights`. Raises ValueError where it is damaged."""
    path = folder / MODEL_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        sizes = dict(about["model"])
        model = CLIPConfig(**sizes | {"vision": VisionConfig(**sizes["vision"]), "text": TextConfig(**sizes["text"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}): import the weights again") from None
    tensors = read_tensors(folder / TENSORS_FILE)
    check_tensors(tensors, {name: leaf.shape for name, leaf in abstract_params(model).items()}, folder / TENSORS_FILE)
    tokenizer = folder / TOKENIZER_FILE
    return Weights(
        model,
        unflatten(tensors),
        about["source"],
        str(tokenizer) if tokenizer.is_file() else None,
        about["step"],
        about["ema"],
        tuple(about["notes"]),
    )
