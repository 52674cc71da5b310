"""Prepared TensorFlow Datasets as a random-access source, without TensorFlow."""

import functools
import operator
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from disco_jax.data.examples import BadExample, Example


class TfdsSource:
    """Image-caption pairs of a dataset that tfds has prepared as ArrayRecord files.

    Images are left encoded. Captions are a text feature, or a sequence of texts whose first is `Example.caption`, or
    made of a class label's name and a prompt. Reading is thread-safe and the source can be pickled. Only what is on
    disk is used: nothing is downloaded or prepared, and the dataset's own code is not needed.

    Attributes:
      label_names: names of the classes, underscores as spaces; None without `label_key`.
    """

    def __init__(
        self,
        name_or_dir: str,
        split: str,
        *,
        data_dir: str | None = None,
        image_key: str = "image",
        text_key: str | None = None,
        label_key: str | None = None,
        prompt: str = "a photo of a {}.",
    ):
        """Opens a split.

        Args:
          name_or_dir: the folder with `dataset_info.json`, or a name as tfds writes it, `name/config:version`.
          split: as tfds writes it: "train", "test[:10%]", "train+test".
          data_dir: where a named dataset is; None = `$TFDS_DATA_DIR`, or `~/tensorflow_datasets`.
          image_key: the image feature.
          text_key: the text feature that is the caption, or the sequence of all captions; "captions/text" is `text`
            within `captions`. None = captions from the label.
          label_key: the ClassLabel feature that is `Example.label`; tfds's -1 is no label.
          prompt: the caption of a label, with `{}` where the name goes; unused with `text_key`.

        Raises:
          ImportError: tfds is not installed.
          FileNotFoundError: no such dataset, or some of its files are missing.
          ValueError: unknown split or key, a key of another kind, not ArrayRecord, an empty split, no `{}`.
        """
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError(f"cannot import tensorflow_datasets ({error}): pip install 'disco-jax[tfds]'") from error

        builder = _open(name_or_dir, data_dir)
        what = f"tfds dataset {name_or_dir}"
        features = dict(sorted(builder.info.features.items()))

        def pick(setting: str, key: str, kind: str, fits: Collection[str]) -> str:
            if key not in fits:
                raise ValueError(f"{what} has no {kind} feature {key!r}: set {setting} to one of {list(fits)}")
            return key

        texts = {
            "/".join(path): path
            for k, f in features.items()
            if not isinstance(f, tfds.features.Dataset)  # is read as an iterator
            for path in _text_paths(f.shape, f.np_dtype, (k,))
        }
        labels = [k for k, f in features.items() if isinstance(f, tfds.features.ClassLabel)]
        images = [k for k, f in features.items() if isinstance(f, tfds.features.Image)]
        if text_key is None and label_key is None:
            raise ValueError(
                f"{what} needs captions: set text_key to one of {list(texts)} or label_key to one of {labels}"
            )
        self._image_key = pick("image_key", image_key, "image", images)
        self._text_path = None if text_key is None else texts[pick("text_key", text_key, "text", texts)]
        self._label_key = None if label_key is None else pick("label_key", label_key, "class label", labels)
        if text_key is None and "{}" not in prompt:
            raise ValueError(
                f"prompt {prompt!r} has no {{}} for the label's name: write one, as in 'a photo of a {{}}.'"
            )
        self._prompt = prompt
        self.label_names: tuple[str, ...] | None = None
        if label_key is not None:
            self.label_names = tuple(name.replace("_", " ") for name in features[label_key].names)

        self._split = split
        _check_split(builder, split, what)
        try:
            # Other images (masks, depth) are skipped as well: they would be decoded for nothing.
            self._records = builder.as_data_source(split, decoders={k: tfds.decode.SkipDecoding() for k in images})
        except NotImplementedError:
            raise ValueError(
                f"{what} is not stored as ArrayRecord: prepare it again with tfds build --file_format=array_record"
            ) from None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        """Reads one example; its key is `split/index`. Raises `BadExample`: `caption:missing` for an empty sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        record = self._records[index]
        label = None if self._label_key is None else int(record[self._label_key])
        if label == -1:
            label = None
        key = f"{self._split}/{index}"
        captions = self._captions(record, label)
        if not captions and self._text_path is not None:
            raise BadExample("caption:missing", f"{key}: the sequence of captions is empty")
        caption, *others = captions or [None]
        return Example(key, record[self._image_key], caption, label, tuple(others))

    def _captions(self, record: dict[str, Any], label: int | None) -> list[Any]:
        if self._text_path is not None:
            texts: Any = functools.reduce(operator.getitem, self._text_path, record)
            return [texts] if isinstance(texts, bytes | str) else list(texts)
        if label is None or self.label_names is None:
            return []
        return [self._prompt.replace("{}", self.label_names[label])]


def _text_paths(shape: Any, dtype: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Where a feature holds a text or a sequence of texts; a feature of several parts has a dict of shapes."""
    if isinstance(shape, dict):
        for name in shape:
            yield from _text_paths(shape[name], dtype[name], (*path, name))
    elif dtype == np.object_ and len(shape) <= 1:
        yield path


def _open(name_or_dir: str, data_dir: str | None) -> Any:
    """tfds's read-only builder of a prepared dataset."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.read_only_builder import builder_from_files

    folder = Path(name_or_dir).expanduser()
    if (folder / "dataset_info.json").is_file():
        return tfds.builder_from_directory(str(folder))
    data = Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    try:
        # tfds.builder would prefer the dataset's code where there is some, and ask the network.
        return builder_from_files(name_or_dir, data_dir=str(data))
    except ValueError:  # not found, or no name at all
        there = sorted(path.name for path in data.iterdir() if path.is_dir()) if data.is_dir() else []
        raise FileNotFoundError(
            f"no prepared tfds dataset {name_or_dir!r}: neither a folder with dataset_info.json nor a name in {data} "
            f"(there: {', '.join(there) or 'nothing'}); tfds build NAME --file_format=array_record prepares one"
        ) from None


def _check_split(builder: Any, split: str, what: str) -> None:
    try:
        info = builder.info.splits[split]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{what} has no split {split!r} ({' '.join(str(error).split())}): "
            f"give one of {sorted(builder.info.splits)}, or a slice as 'train[:90%]'"
        ) from None
    if info.num_examples < 1:
        raise ValueError(f"split {split!r} of {what} has no examples: give a larger one")
    missing = [part.filename for part in info.file_instructions if not Path(part.filename).is_file()]
    if missing:
        raise FileNotFoundError(f"{what} lacks {len(missing)} of its files, first {missing[0]}: prepare it again")
