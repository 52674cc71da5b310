"""Image-caption shards: tars as img2dataset and WebDataset write them, read in any order.

A sample is a group of members with one key: `000000003.jpg`, `000000003.txt`, `000000003.json`, `000000003.cls`.
"""

import functools
import glob
import io
import json
import operator
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import bracex
import numpy as np
from absl import logging

from disco_jax.data.examples import BadExample, Example
from disco_jax.data.images import image_extension
from disco_jax.data.tar_index import BLOCK, ROLES, atomic_write, default_cache_dir, index_tars

_MOST_SHARDS = 1_000_000  # a slip in a brace pattern must not fill the memory
_OPEN_FILES = 128  # well below the usual limits of 256 and 1,024


class TarSource:
    """The samples of all shards as a random-access sequence of `Example`.

    Each tar is indexed once, and read by offset from any number of threads. Example keys are `SHARD/SAMPLE`, the shard
    without `.tar` and without the folders all shards share. A sample without its image or caption stays in the
    sequence: reading it raises `BadExample`, so that it is counted.

    Args:
        pattern: tars by name, brace pattern (`{00000..00127}.tar`) or glob (`*.tar`), or several of these.
        caption: where captions are: `"txt"`; `"txt:lines"`, each line that is not blank; `"json:FIELD"`, a field of the
            JSON member that holds a text or a list of them; None: there are none, and samples need only their image.
        label: where class indices are: None (there are none), `"cls"` or `"json:FIELD"`.
        cache_dir: folder for the indices; by default `disco_jax/index` in the user's cache folder.

    Raises:
        FileNotFoundError: the pattern matches nothing, or some of its named files are missing.
        ValueError: a file is not a plain tar or holds no complete sample, or an argument is malformed.
    """

    def __init__(
        self,
        pattern: str | Sequence[str],
        *,
        caption: str | None = "txt",
        label: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        wanted = {"image": 0}  # what is read of a sample, and the member's role
        self._fields: dict[str, str | None] = {}
        self._lines = caption == "txt:lines"
        if caption is not None:
            wanted["caption"] = self._parse("caption", "txt" if self._lines else caption, "txt")
        if label is not None:
            wanted["label"] = self._parse("label", label, "cls")
        self._wanted, roles = tuple(wanted), list(wanted.values())
        self._paths = [os.path.abspath(path) for path in shard_paths(pattern)]
        folder = os.path.commonpath([os.path.dirname(path) for path in self._paths])
        self._shards = [os.path.relpath(path, folder).removesuffix(".tar") for path in self._paths]
        self._keys: list[np.ndarray] = []
        self._members: list[np.ndarray] = []  # uint32 [n, len(wanted), 2]
        for path, index in zip(self._paths, index_tars(self._paths, cache_dir or default_cache_dir()), strict=True):
            there = index.members[:, :, 0] > 0
            if not there[:, roles].all(1).any():
                needed = " and ".join("an image" if role == 0 else f".{ROLES[role]}" for role in dict.fromkeys(roles))
                held = ", ".join(f"{n} {name}" for n, name in zip(there.sum(0), ROLES, strict=True))
                raise ValueError(f"{path} holds no sample with {needed}; its members are {held}")
            ours = there[:, roles[:2]].any(1)  # a lone member of another kind is no sample
            self._keys.append(index.keys[ours])
            self._members.append(index.members[ours][:, roles])
        self._starts = np.cumsum([0] + [len(keys) for keys in self._keys])
        self._open = functools.lru_cache(_OPEN_FILES)(_open)
        logging.info("%d samples in %d shards of %s", len(self), len(self._paths), folder)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: SupportsIndex) -> Example:
        """Reads one sample.

        Raises:
            BadExample: `image:missing`, `caption:missing`, `caption:not_text`, `caption:empty` (no line is not blank),
                `label:missing`, `label:not_an_integer`, `json:broken`, `shard:truncated` or `shard:unreadable`.
        """
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[shard])
        key = f"{self._shards[shard]}/{self._keys[shard][row].decode()}"
        data = {
            what: self._read(shard, key, what, int(block), int(size))
            for what, (block, size) in zip(self._wanted, self._members[shard][row], strict=True)
        }
        captions = self._captions(data["caption"], key) if "caption" in data else []
        label = _integer(self._value("label", data["label"], key), key) if "label" in data else None
        return Example(key, data["image"], captions[0] if captions else None, label, tuple(captions[1:]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _open=functools.lru_cache(_OPEN_FILES)(_open))

    def _parse(self, what: str, place: str, plain: str) -> int:
        """The role that holds captions or labels; notes the field if it is JSON."""
        role, _, field = place.partition(":")
        if place != plain and not (role == "json" and field):
            lines = "" if what == "label" else ", 'txt:lines'"
            raise ValueError(f"{what} is {place!r}: give {plain!r}{lines} or 'json:FIELD'")
        self._fields[what] = field or None
        return ROLES.index(role)

    def _read(self, shard: int, key: str, what: str, block: int, size: int) -> bytes:
        if not block:
            raise BadExample(f"{what}:missing", f"{key} has no {what} member")
        path = self._paths[shard]
        try:
            data = self._open(path).read(size, block * BLOCK)
        except OSError as error:
            raise BadExample("shard:unreadable", f"{path}: {error}") from error
        if len(data) < size:
            raise BadExample("shard:truncated", f"{path} ends within the {what} of {key}: it was cut after indexing")
        return data

    def _captions(self, data: bytes, key: str) -> list[Any]:
        """The captions that the member holds, at least one."""
        value = self._value("caption", data, key)
        if self._lines:
            value = [line for line in data.splitlines() if line.decode(errors="replace").strip()]
            if not value:
                raise BadExample("caption:empty", f"{key}: each line of the captions is blank")
        captions = value if isinstance(value, list) else [value]
        if not captions:
            raise BadExample("caption:missing", f"{key}: the list of captions is empty")
        if not all(isinstance(caption, bytes | str) for caption in captions):
            raise BadExample("caption:not_text", f"{key}: the caption is {value!r}")
        return captions

    def _value(self, what: str, data: bytes, key: str) -> object:
        """The member itself, or a field of it."""
        field = self._fields[what]
        if field is None:
            return data
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadExample("json:broken", f"{key}: {error}") from error
        if not isinstance(fields, dict):
            raise BadExample("json:broken", f"{key}: the JSON is no object with fields")
        if fields.get(field) is None:
            raise BadExample(f"{what}:missing", f"{key}: no {field!r} among the JSON fields {', '.join(fields)}")
        return fields[field]


def _integer(value: object, key: str) -> int:
    try:
        if isinstance(value, bytes | str) or type(value) is int:
            number = int(value)
            if -(2**31) <= number < 2**31:
                return number
    except ValueError:
        pass
    raise BadExample("label:not_an_integer", f"{key}: the label is {value!r}")


class _Reader:
    """An open file that closes after its last user, so that the cache may drop it while a thread still reads."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _open(path: str) -> _Reader:
    return _Reader(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def shard_paths(pattern: str | Sequence[str]) -> list[str]:
    """The files that names, brace patterns and globs stand for, in the order given; those of a glob are sorted.

    Raises:
        FileNotFoundError: nothing matches, or some of the named files are missing.
        ValueError: there is no pattern, or a file is named twice.
    """
    paths = [path for one in ([pattern] if isinstance(pattern, str) else pattern) for path in _expand(one)]
    if not paths:
        raise ValueError("no shard pattern is given")
    twice = [path for path, count in Counter(os.path.abspath(path) for path in paths).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} shards are named twice by {pattern!r}, the first is {twice[0]}")
    return paths


def _expand(pattern: str) -> list[str]:
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [pattern]  # even if its name looks like a pattern
    if os.path.isdir(pattern):
        raise FileNotFoundError(
            f"{pattern} is a folder: name its shards, for instance {os.path.join(pattern, '*.tar')}"
        )
    try:
        names = bracex.expand(pattern, limit=_MOST_SHARDS)
    except bracex.ExpansionLimitException:
        raise ValueError(f"{pattern!r} stands for more than {_MOST_SHARDS:,} shards: check its braces") from None
    matches = [sorted(glob.glob(name, recursive=True)) if re.search(r"[*?[]", name) else [name] for name in names]
    files = [[path for path in paths if os.path.isfile(path)] for paths in matches]
    missing = [name for name, found in zip(names, files, strict=True) if not found]
    if len(missing) == len(names):
        raise FileNotFoundError(f"no file matches {pattern!r}: {_what_is_near(names[0])}")
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} shards {pattern!r} are missing, first {missing[0]}"
        )
    return [path for found in files for path in found]


def _what_is_near(name: str) -> str:
    folder = os.path.dirname(os.path.abspath(name))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    tars = sorted(os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(folder), "*.tar")))
    return f"the nearest folder is {folder} with {len(tars)} .tar files" + (f", such as {tars[0]}" if tars else "")


def write_tar(path: str | os.PathLike[str], examples: Iterable[Example]) -> None:
    """Writes a shard: of each example `KEY.jpg` (or its own kind), `KEY.txt`, and `KEY.cls` if it has a label.

    Where an example has other captions, each is a line of its `KEY.txt`, for `caption="txt:lines"`. The same examples
    give the same bytes. The file appears only when it is complete.

    Raises:
        ValueError: there are no examples, a key cannot name a sample or comes twice, an image is of no known kind, or
            one of several captions has more than one line.
    """
    keys: set[str] = set()
    with atomic_write(Path(path)) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for example in examples:
            key = example.key
            if "." in key.rpartition("/")[2] or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
                raise ValueError(f"key {key!r} cannot name a sample: give a relative path whose file name has no dot")
            if key in keys:
                raise ValueError(f"key {key!r} comes twice in {path}")
            keys.add(key)
            extension = image_extension(example.image)
            if extension is None:
                raise ValueError(f"the image of {key!r} is of no known kind, it starts with {example.image[:16]!r}")
            members = {extension: example.image}
            if example.caption is not None:
                captions = (example.caption, *example.other_captions)
                lines = [text.encode() if isinstance(text, str) else text for text in captions]
                if len(lines) > 1 and any(len(text.splitlines()) > 1 for text in lines):
                    raise ValueError(f"a caption of {key!r} has line breaks: replace them, each caption is a line")
                members["txt"] = b"\n".join(lines)
            if example.label is not None:
                members["cls"] = str(example.label).encode()
            for kind, data in members.items():
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        if not keys:
            raise ValueError(f"there are no examples to write to {path}")
