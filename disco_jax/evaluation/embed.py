"""Features of a dataset as files, in the layout that clip-retrieval and embedding-reader read.

    img_emb/img_emb_0.npy            float16 [n, D], L2-normalised
    text_emb/text_emb_0.npy          likewise, of the captions; only where there are captions
    metadata/metadata_0.parquet      image_path (the example's key) and caption
    embed_manifest.json              what the files were made of

Row i of the three files of a part is one example. Parts follow the order of the data; their numbers have as many digits
as the number of parts, so that the order of the names is theirs. A part without a usable example has no files:
embedding-reader pairs files by their order, and passes over empty ones in some folders only.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import Float16, Float32, PyTree

from disco_jax.data.examples import ExampleSource
from disco_jax.data.tar_index import atomic_write
from disco_jax.evaluation.evaluator import Evaluator, NoUsableExample, SplitFeatures
from disco_jax.evaluation.ranks import normalized
from disco_jax.mesh import gather_json
from disco_jax.progress import Progress

MANIFEST = "embed_manifest.json"
FOLDERS = ("img_emb", "text_emb", "metadata")


def check_pyarrow() -> None:
    """Raises ImportError where what writes the metadata is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ImportError("embed writes Parquet and needs pyarrow: pip install 'disco-jax[embed]'") from None


def embed(
    evaluator: Evaluator,
    params: PyTree,
    source: ExampleSource,
    out: Path,
    *,
    part_size: int,
    captioned: bool,
    made_of: Mapping[str, Any],
    anew: bool = False,
) -> int:
    """Writes the features of all usable examples of a source, and gives their number.

    A part is whole once its metadata are there, so a restart goes on after the last whole one, to the same files.

    Args:
        evaluator, params: the model, over its devices.
        source: the examples; bad ones get no row.
        out: the folder, which is made.
        part_size: examples of a part, the bad ones included.
        captioned: whether the first good caption of each example is embedded too, which it then needs.
        made_of: what else the features depend on, as JSON; it goes into the manifest.
        anew: removes what an earlier run left, instead of going on.

    Raises:
        ValueError: there are files made of something else; no example is usable; features are not finite.
    """
    starts = range(0, len(source), part_size)
    parts = _Parts(out, len(starts), captioned)
    manifest = {"made_of": made_of, "examples": len(source), "part_size": part_size, "captions": captioned}
    failure, whole = gather_json(parts.begin(manifest, anew) if jax.process_index() == 0 else None)[0]
    if failure is not None:
        raise ValueError(failure)
    if whole:
        logging.info("%d of %d parts are there already", len(whole), len(starts))
    done = sum(min(part_size, len(source) - starts[part]) for part in whole)
    with Progress("examples embedded", len(source), done) as progress:
        for part, start in enumerate(starts):
            if part in whole:
                continue
            try:
                features = evaluator.features(
                    params, source, first=start, size=part_size, captions=int(captioned), progress=progress
                )
            except NoUsableExample:
                logging.warning("Part %d is left out: it has no usable example", part)
                continue
            if jax.process_index() == 0:
                parts.write(part, features)
    rows: int = gather_json(parts.rows() if jax.process_index() == 0 else 0)[0]
    if not rows:
        raise NoUsableExample("not one usable example to embed: see the warnings above")
    return rows


class _Parts:
    """The files; only one process has to do with them."""

    def __init__(self, out: Path, count: int, captioned: bool):
        self._out, self._captioned, self._count = out, captioned, count

    def begin(self, manifest: Mapping[str, Any], anew: bool) -> tuple[str | None, list[int]]:
        """What stands in the way, else the parts that are there; for all processes to know."""
        try:
            failure = self._claim(manifest, anew)
        except OSError as error:
            failure = f"cannot write to {self._out} ({error.strerror}): embed into another folder"
        return failure, [] if failure else self.whole()

    def _claim(self, manifest: Mapping[str, Any], anew: bool) -> str | None:
        """Makes the folders and the manifest, or says what stands in the way."""
        path = self._out / MANIFEST
        there = [name for name in FOLDERS if (self._out / name).exists()]
        if anew:
            path.unlink(missing_ok=True)
            for name in there:
                shutil.rmtree(self._out / name)
        elif path.exists():
            try:
                old = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                return f"{path} is damaged ({error}): embed into another folder, or remove this one"
            new = json.loads(json.dumps(manifest))
            changed = "; ".join(_differences(old, new))
            if changed:
                return (
                    f"{self._out} holds features made of something else ({changed}): embed into another "
                    "folder, or remove this one"
                )
        elif there:
            return f"{self._out} holds {there[0]} but no {MANIFEST}: embed into another folder"
        for name in FOLDERS:
            if name != "text_emb" or self._captioned:
                (self._out / name).mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write((json.dumps(manifest, indent=2) + "\n").encode())
        return None

    def path(self, folder: str, part: int, extension: str) -> Path:
        """Of a part's file in one of the folders."""
        return self._out / folder / f"{folder}_{part:0{len(str(self._count))}d}.{extension}"

    def whole(self) -> list[int]:
        """The parts that are there."""
        return [part for part in range(self._count) if self.path("metadata", part, "parquet").exists()]

    def write(self, part: int, features: SplitFeatures) -> None:
        """Writes the files of a part, the metadata last."""
        import pyarrow
        import pyarrow.parquet

        columns: dict[str, Any] = {"image_path": pyarrow.array(features.keys, pyarrow.string())}
        arrays = {"img_emb": features.images}
        if self._captioned:
            arrays["text_emb"] = features.texts
            columns["caption"] = pyarrow.array(features.captions, pyarrow.string())
        for name, array in arrays.items():
            with atomic_write(self.path(name, part, "npy")) as file:
                np.save(file, _half(array))
        with atomic_write(self.path("metadata", part, "parquet")) as file:
            pyarrow.parquet.write_table(pyarrow.table(columns), file)

    def rows(self) -> int:
        """How many examples the parts hold together."""
        import pyarrow.parquet

        return sum(
            pyarrow.parquet.read_metadata(self.path("metadata", part, "parquet")).num_rows for part in self.whole()
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """One for each value that differs, of nested ones too."""
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after)
        elif before != after:
            yield f"{key}: {before!r} -> {after!r}"


def _half(features: Float32[np.ndarray, "n D"]) -> Float16[np.ndarray, "n D"]:
    return normalized(features).astype(np.float16)
