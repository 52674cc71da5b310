"""Image folders: what counts as a class and an image, in which order, and what is refused or dropped."""

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from disco_jax.data.examples import BadExample, Example
from disco_jax.data.folders import FolderSource
from disco_jax.data.images import decode_image


def jpeg(shade):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def make(root, *names):
    """Files below the root, each with a picture of its own; gives what they hold."""
    held = {}
    for shade, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(shade * 3))
        held[name] = path.read_bytes()
    return held


def keys(source):
    return [source[i].key for i in range(len(source))]


def test_classes_are_the_sorted_folders(tmp_path):
    # "Z" comes before "a", and "10" before "9", as in torchvision
    held = make(tmp_path, "a_tabby_cat/2.jpg", "a_tabby_cat/1.jpg", "9/x.png", "10/x.png", "Zebra/x.webp")
    source = FolderSource(tmp_path)
    assert source.label_names == ("10", "9", "Zebra", "a tabby cat")
    order = ["10/x.png", "9/x.png", "Zebra/x.webp", "a_tabby_cat/1.jpg", "a_tabby_cat/2.jpg"]
    examples = [source[i] for i in range(len(source))]
    assert examples == [Example(key, held[key], None, label) for key, label in zip(order, (0, 1, 2, 3, 3), strict=True)]
    assert type(examples[0].label) is int and decode_image(examples[0].image).size == (4, 4)


def test_images_lie_at_any_depth(tmp_path):
    make(tmp_path, "cat/b/1.jpg", "cat/b.x/1.jpg", "cat/b/a/1.jpg", "cat/z.jpg", "cat/a.jpg", "dog/c/d/e/1.jpg")
    source = FolderSource(str(tmp_path))
    # torchvision's order: a folder before those below it, folders as their paths compare ("." comes before "/")
    expected = ["cat/a.jpg", "cat/z.jpg", "cat/b/1.jpg", "cat/b.x/1.jpg", "cat/b/a/1.jpg", "dog/c/d/e/1.jpg"]
    assert keys(source) == expected
    assert [source[i].label for i in range(6)] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "JPEG", "png", "webp", "gif", "bmp", "tif", "tiff", "Tiff"])
def test_image_extensions(tmp_path, extension):
    make(tmp_path, f"a/1.x.{extension}")
    assert keys(FolderSource(tmp_path)) == [f"a/1.x.{extension}"]


def test_other_files_are_ignored(tmp_path):
    ignored = ["a/.1.jpg", "a/._2.jpg", "a/.git/1.jpg", ".ipynb_checkpoints/1.jpg", "a/1.txt", "a/jpg", "1.jpg"]
    make(tmp_path, "a/1.jpg", "b/1.jpg", *ignored)
    source = FolderSource(tmp_path)
    assert keys(source) == ["a/1.jpg", "b/1.jpg"]
    assert source.label_names == ("a", "b")


def test_foreign_names(tmp_path):
    make(tmp_path, "caf\u00e9/\u732b.jpg")
    broken = os.path.join(os.fsencode(tmp_path), "caf\u00e9".encode(), b"\xff.jpg")
    with open(broken, "wb") as file:
        file.write(b"bytes")
    source = FolderSource(tmp_path)
    assert keys(source) == ["caf\u00e9/\u732b.jpg", "caf\u00e9/\\xff.jpg"]
    assert source[1].image == b"bytes"


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    make(tmp_path, "elsewhere/deep/1.jpg", "root/a/1.jpg")
    root = tmp_path / "root"
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "2.jpg").symlink_to(tmp_path / "elsewhere/deep/1.jpg")
    assert keys(FolderSource(root)) == ["a/1.jpg", "a/2.jpg", "b/deep/1.jpg"]
    (tmp_path / "elsewhere/deep/up").symlink_to(tmp_path / "elsewhere")
    assert f"{root / 'b/deep/up'} leads in a circle" in refusal(ValueError, root)


# ---- what is refused, and what is dropped ----


def refusal(error, root):
    with pytest.raises(error) as raised:
        FolderSource(root)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_no_image_folder(tmp_path):
    assert "no image folder is given" in refusal(ValueError, "")
    assert f"{tmp_path / 'no'} does not exist" in refusal(FileNotFoundError, tmp_path / "no")
    make(tmp_path, "1.jpg")
    assert f"{tmp_path / '1.jpg'} is a file" in refusal(ValueError, tmp_path / "1.jpg")
    assert f"{tmp_path} holds no folders" in refusal(ValueError, tmp_path)
    (tmp_path / ".hidden").mkdir()
    assert f"{tmp_path} holds no folders" in refusal(ValueError, tmp_path)


def test_a_class_without_an_image_is_named(tmp_path):
    make(tmp_path, "a/1.jpg", "b/._1.jpg", "c/1.jpg")
    assert f"{tmp_path / 'b'} holds no image" in refusal(ValueError, tmp_path)


def test_a_vanished_image_is_named(tmp_path):
    make(tmp_path, "a/1.jpg", "a/2.jpg")
    source = FolderSource(tmp_path)
    (tmp_path / "a/1.jpg").unlink()
    with pytest.raises(BadExample, match=r"a/1\.jpg") as error:
        source[0]
    assert error.value.reason == "image:unreadable"
    assert source[1].key == "a/2.jpg"


def test_only_what_is_there_can_be_read(tmp_path):
    make(tmp_path, "a/1.jpg", "a/2.jpg")
    source = FolderSource(tmp_path)
    assert source[np.int64(1)].key == "a/2.jpg"
    for outside in (-1, 2):
        with pytest.raises(IndexError, match=f"image {outside} of 2"):
            source[outside]


def test_pickled_and_threaded_reads_are_the_same(tmp_path, monkeypatch):
    make(tmp_path, *(f"{label}/{i}.jpg" for label in range(4) for i in range(10)))
    monkeypatch.chdir(tmp_path.parent)
    source = FolderSource(tmp_path.name)
    monkeypatch.chdir("/")
    expected = [source[i] for i in range(40)]
    copy = pickle.loads(pickle.dumps(source))
    order = np.random.default_rng(0).integers(0, 40, 1000)
    with ThreadPoolExecutor(8) as pool:
        for i, example in zip(order, pool.map(copy.__getitem__, order), strict=True):
            assert example == expected[i]
