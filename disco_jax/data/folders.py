"""Image folders: one folder of images for each class, as torchvision's ImageFolder reads them."""

import operator
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from absl import logging
from tqdm import tqdm

from disco_jax.data.examples import BadExample, Example
from disco_jax.data.images import IMAGE_EXTENSIONS

_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_LOG_SECONDS = 10


class FolderSource:
    """The images below `root/CLASS/`, at any depth, as a random-access sequence of `Example` without captions.

    Labels are the places of the class folders in the order of their names, as in torchvision's ImageFolder; so is the
    order of the images. Links are followed; files and folders whose name starts with a dot are ignored. Example keys
    are paths below the root. Reading is thread-safe and the source can be pickled.

    Args:
        root: the folder that holds the class folders.

    Attributes:
        label_names: names of the class folders, underscores as spaces.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: no folder is given, it is a file or holds no folders, a class folder holds no image, or a link leads
            in a circle.
        OSError: a folder cannot be read.
    """

    def __init__(self, root: str | os.PathLike[str]):
        if not os.fspath(root):
            raise ValueError("no image folder is given: name the one that holds a folder of images for each class")
        self._root = Path(root).expanduser().absolute()
        classes = _class_folders(self._root)
        self.label_names: tuple[str, ...] = tuple(name.replace("_", " ") for name in classes)
        paths: list[bytes] = []
        counts: list[int] = []
        logged = time.monotonic()
        with tqdm(total=len(classes), desc="class folders read", leave=False, disable=None) as bar:
            for name in classes:
                images = [os.fsencode(path) for path in _images(self._root, name)]
                if not images:
                    raise ValueError(
                        f"{self._root / name} holds no image, and each folder of {self._root} is a class: remove it or "
                        f"put images there ({', '.join(IMAGE_EXTENSIONS)})"
                    )
                paths += images
                counts.append(len(images))
                bar.update()
                if bar.disable and time.monotonic() - logged > _LOG_SECONDS:
                    logging.info("%d of %d class folders read", len(counts), len(classes))
                    logged = time.monotonic()
        self._paths = np.array(paths, np.bytes_)
        self._labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
        logging.info("%d images of %d classes in %s", len(self), len(classes), self._root)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: SupportsIndex) -> Example:
        """Reads one image; raises `BadExample` with `image:unreadable` where its file has vanished, for instance."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        path = self._paths[index]
        try:
            image = (self._root / os.fsdecode(path)).read_bytes()
        except OSError as error:
            raise BadExample("image:unreadable", str(error)) from error
        return Example(path.decode(errors="backslashreplace"), image, None, int(self._labels[index]))


def _class_folders(root: Path) -> list[str]:
    if root.is_file():
        raise ValueError(f"{root} is a file: give the folder that holds one folder of images for each class")
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} does not exist: give the folder that holds one folder of images for each class"
        )
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{root} holds no folders: put the images of each class into a folder with its name")
    return names


def _images(root: Path, name: str) -> Iterator[str]:
    """The paths below the root of a class's images, in the order of their folders' paths, then of their names."""

    def fail(error: OSError) -> None:
        raise error

    found: list[tuple[str, list[str]]] = []
    for path, folders, files in os.walk(root / name, followlinks=True, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = os.path.realpath(path)
        for name in folders:
            link = os.path.join(path, name)
            if os.path.islink(link) and Path(here).is_relative_to(os.path.realpath(link)):
                raise ValueError(f"{link} leads in a circle, to a folder that it lies in: remove the link")
        names = (name for name in files if name.lower().endswith(_SUFFIXES) and not name.startswith("."))
        found.append((os.path.relpath(path, root), sorted(names)))
    for path, images in sorted(found):
        yield from (os.path.join(path, image) for image in images)
