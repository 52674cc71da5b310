"""Where the samples of a tar lie. A tar is scanned once; the result is kept as two small arrays in a cache folder."""

import hashlib
import os
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from absl import logging
from tqdm import tqdm

from disco_jax.data.images import IMAGE_EXTENSIONS

ROLES = ("image", "txt", "json", "cls")
"""The members of a sample that are indexed; any others are ignored."""

BLOCK = 512
"""Every member's data starts at a multiple of this many bytes."""

_ROLE_OF_EXTENSION = dict.fromkeys(IMAGE_EXTENSIONS, 0)
_ROLE_OF_EXTENSION |= {"txt": 1, "json": 2, "cls": 3}
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_VERSION = 1  # of the cached arrays: raise it when the scan changes
_THREADS = 8  # enough to hide a network file system's latency; the scan itself is bound to one core
_LOG_SECONDS = 10
_TOO_LARGE = 2**31 - BLOCK * 8  # more than one pread gives; no image or caption is that large


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar, in the order of their first members.

    Attributes:
        keys: bytes [n], UTF-8, the path up to the first dot of the file name (WebDataset's rule).
        members: uint32 [n, len(ROLES), 2], the block where the data starts and its size in bytes; block 0 means that
            the sample has no such member.
    """

    keys: np.ndarray
    members: np.ndarray


def default_cache_dir() -> Path:
    """`disco_jax/index` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "disco_jax" / "index"


def index_tars(paths: Sequence[str], cache_dir: str | os.PathLike[str]) -> list[TarIndex]:
    """The index of each tar, from the cache where it is there; shows progress on a terminal or in the log.

    Raises:
        ValueError: a file is compressed or is no tar.
    """
    indices: list[TarIndex] = []
    logged = time.monotonic()
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        tqdm(total=len(paths), desc="shards indexed", leave=False, disable=None) as bar,
    ):
        futures = [pool.submit(_load_or_scan, path, Path(cache_dir)) for path in paths]
        try:
            for future in futures:
                indices.append(future.result())
                bar.update()
                if bar.disable and time.monotonic() - logged > _LOG_SECONDS:
                    logging.info("%d of %d shards indexed", len(indices), len(paths))
                    logged = time.monotonic()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # one bad tar, or Ctrl-C, must not wait for thousands of others
            raise
    return indices


def scan_tar(path: str) -> tuple[TarIndex, bool]:
    """Finds the samples of a tar, and says whether the tar is whole; of a cut-off one, the samples before the cut.

    Hidden files, folders, links and members of other kinds are ignored. Of members with the same key and role the
    first counts.

    Raises:
        ValueError: the file is compressed or is no tar.
    """
    with open(path, "rb") as file:
        start = file.read(6)
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(f"{path} is compressed with {name}: unpack it to a plain .tar, it is read by offset")
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file underneath is closed
        except tarfile.TarError as error:
            raise ValueError(f"{path} is not a tar: {error}") from error
        samples: dict[str, np.ndarray] = {}
        try:
            while (member := tar.next()) is not None and member.size >= 0:  # a negative size would loop for ever
                tar.members.clear()  # type: ignore[attr-defined] # tarfile would keep every header
                split = _key_and_role(member.name)
                kept = member.isreg() and not member.issparse() and member.size < _TOO_LARGE
                if split is None or not kept or member.offset_data + member.size > length:
                    continue
                key, role = split
                sample = samples.setdefault(key, np.zeros((len(ROLES), 2), np.uint32))
                if not sample[role, 0]:
                    sample[role] = member.offset_data // BLOCK, member.size
        except (tarfile.TarError, ValueError):
            pass  # told below, like the damages that tarfile itself takes for the end
        file.seek(tar.offset)
        end_mark = file.read(BLOCK)
    whole = len(end_mark) == BLOCK and not any(end_mark)
    if not whole:
        cut = min(tar.offset, length)
        logging.warning("%s is cut off or damaged at byte %d; the samples before are used", path, cut)
    keys = np.array([key.encode(errors="backslashreplace") for key in samples], dtype=np.bytes_)
    members = np.array(list(samples.values()), np.uint32).reshape(-1, len(ROLES), 2)
    return TarIndex(keys, members), whole


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` once all is written; after an error nothing of it stays."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _key_and_role(name: str) -> tuple[str, int] | None:
    folder, slash, base = name.removeprefix("./").rpartition("/")
    key, _, extension = base.partition(".")
    role = _ROLE_OF_EXTENSION.get(extension.lower())
    return None if not key or role is None else (folder + slash + key, role)


def _load_or_scan(path: str, cache_dir: Path) -> TarIndex:
    stat = os.stat(path)
    identity = f"{_VERSION}\0{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}"
    cached = cache_dir / f"{hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]}.npz"
    try:
        with open(cached, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return TarIndex(arrays["keys"], arrays["members"])
    except FileNotFoundError:
        pass
    except Exception as error:  # a broken file makes numpy and zipfile raise nearly anything
        logging.log_first_n(logging.WARNING, "index %s is unreadable and is made again: %s", 1, cached, error)
    index, whole = scan_tar(path)
    if whole:  # the warning about a damaged tar belongs into every run
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with atomic_write(cached) as target:
                np.savez(target, keys=index.keys, members=index.members)
        except OSError as error:
            logging.log_first_n(logging.WARNING, "shards are indexed again in each run: %s", 1, error)
    return index
