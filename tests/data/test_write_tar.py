"""Shards as the project writes them."""

import io
import os
import tarfile

import pytest
from PIL import Image

from disco_jax.data.examples import Example
from disco_jax.data.shards import TarSource, write_tar


def encoded(kind):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 0, 0)).save(file, kind)
    return file.getvalue()


JPEG = encoded("JPEG")


def test_written_shards_come_back(tmp_path):
    images = [encoded(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
    examples = [Example(f"folder/{9 - i:03}", image, f"caption \u00e9 {i}", i) for i, image in enumerate(images)]
    write_tar(tmp_path / "s.tar", iter(examples))
    ours = TarSource(str(tmp_path / "s.tar"), label="cls", cache_dir=tmp_path)
    for written, read in zip(examples, (ours[i] for i in range(6)), strict=True):
        assert (read.key, read.image, read.label) == (f"s/{written.key}", written.image, written.label)
        assert read.caption == written.caption.encode()
    with tarfile.open(tmp_path / "s.tar") as tar:
        names = tar.getnames()
    assert names[:6] == [
        f"folder/{key}.{kind}" for key, e in (("009", "jpg"), ("008", "png")) for kind in (e, "txt", "cls")
    ]


def test_several_captions_come_back(tmp_path):
    examples = [Example("1", JPEG, "caf\u00e9", None, (b"two", "three")), Example("2", JPEG, "alone")]
    write_tar(tmp_path / "s.tar", examples)
    ours = TarSource(str(tmp_path / "s.tar"), caption="txt:lines", cache_dir=tmp_path)
    assert (ours[0].caption, ours[0].other_captions) == ("caf\u00e9".encode(), (b"two", b"three"))
    assert (ours[1].caption, ours[1].other_captions) == (b"alone", ())
    with pytest.raises(ValueError, match="a caption of '1' has line breaks"):
        write_tar(tmp_path / "t.tar", [Example("1", JPEG, "a", None, ("b\nc",))])


def test_optional_members_are_left_out(tmp_path):
    write_tar(tmp_path / "s.tar", [Example("1", JPEG, b"a"), Example("2", JPEG, None)])
    with tarfile.open(tmp_path / "s.tar") as tar:
        assert tar.getnames() == ["1.jpg", "1.txt", "2.jpg"]


def test_the_same_examples_give_the_same_bytes(tmp_path):
    examples = [Example(str(i), JPEG, "a", 1) for i in range(5)]
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, examples)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize("key", ["", "a.b", "a/", "/a", "a//b", "../a", "./a", "._a", "a/../b", "a\0b"])
def test_keys_that_cannot_name_a_sample(tmp_path, key):
    with pytest.raises(ValueError, match="cannot name a sample"):
        write_tar(tmp_path / "s.tar", [Example(key, JPEG, "a")])


def test_a_failed_write_leaves_nothing(tmp_path):
    def failing():
        yield Example("1", JPEG, "a")
        raise RuntimeError("the generator broke")

    write_tar(tmp_path / "s.tar", [Example("old", JPEG, "a")])
    before = (tmp_path / "s.tar").read_bytes()
    with pytest.raises(RuntimeError):
        write_tar(tmp_path / "s.tar", failing())
    with pytest.raises(ValueError, match="comes twice"):
        write_tar(tmp_path / "s.tar", [Example("1", JPEG, "a"), Example("1", JPEG, "b")])
    with pytest.raises(ValueError, match="of no known kind"):
        write_tar(tmp_path / "s.tar", [Example("1", b"<html>", "a")])
    with pytest.raises(ValueError, match="no examples"):
        write_tar(tmp_path / "s.tar", [])
    assert os.listdir(tmp_path) == ["s.tar"]
    assert (tmp_path / "s.tar").read_bytes() == before
