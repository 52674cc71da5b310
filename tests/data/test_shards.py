"""Shards: what is found in them, what is refused before work starts, what is dropped with a reason when read."""

import gzip
import io
import json
import logging
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from disco_jax.data import shards
from disco_jax.data.examples import BadExample, Example
from disco_jax.data.shards import TarSource, shard_paths


def encoded(kind="JPEG", shade=0):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, kind)
    return file.getvalue()


JPEG = encoded()


def make_tar(path, members, **options):
    """A tar of the given (name, bytes) pairs; None instead of bytes makes a folder."""
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type = tarfile.DIRTYPE
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return str(path)


def samples(*names):
    return [(f"{name}{ext}", data) for name in names for ext, data in ((".jpg", JPEG), (".txt", name.encode()))]


@pytest.fixture
def source(tmp_path):
    """Makes a source over one tar of the given members."""

    def make(members, **options):
        tar = make_tar(tmp_path / "s.tar", members)
        return TarSource(tar, cache_dir=tmp_path / "cache", **options)

    return make


@pytest.fixture
def warned(caplog):
    """The warnings logged so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def reason(source, index):
    with pytest.raises(BadExample) as error:
        source[index]
    assert "\n" not in str(error.value)
    return error.value.reason


def keys(source):
    return [source[i].key for i in range(len(source))]


# ---- what is found ----


def test_reads_what_img2dataset_writes(source):
    rows = [("000000000", "a cat"), ("000000001", "a dog")]
    members = []
    for key, caption in rows:
        members += [(f"{key}.jpg", JPEG), (f"{key}.txt", caption.encode())]
        members += [(f"{key}.json", json.dumps({"caption": caption + "!", "label": 7, "width": 4}).encode())]
    ours = source(members)
    assert [ours[i] for i in range(2)] == [Example(f"s/{key}", JPEG, caption.encode()) for key, caption in rows]
    ours = source(members, caption="json:caption", label="json:label")
    assert [ours[i] for i in range(2)] == [Example(f"s/{key}", JPEG, caption + "!", 7) for key, caption in rows]


def captions(example):
    return [example.caption, *example.other_captions]


def test_each_line_of_a_text_is_a_caption(source):
    # CLIP_benchmark's retrieval tars; the blank line has a space that only UTF-8 knows
    text = " caf\u00e9\r\n\n  \n\u3000\na dog\n".encode()
    members = [("1.webp", JPEG), ("1.txt", text), ("2.jpg", JPEG), ("2.txt", b"one"), ("3.jpg", JPEG)]
    ours = source([*members, ("3.txt", b" \n\n"), ("4.jpg", JPEG)], caption="txt:lines")
    assert captions(ours[0]) == [" caf\u00e9".encode(), b"a dog"]
    assert captions(ours[1]) == [b"one"]
    assert [reason(ours, 2), reason(ours, 3)] == ["caption:empty", "caption:missing"]
    assert captions(source(members)[0]) == [text]


def test_json_lists_are_captions(source):
    texts = [["a cat", "two"], ["one"], "alone", [], [1], ["a", None], [["a"]], {"a": "b"}]
    members = [(f"{i}.jpg", JPEG) for i in range(len(texts))]
    members += [(f"{i}.json", json.dumps({"texts": text}).encode()) for i, text in enumerate(texts)]
    ours = source(members, caption="json:texts")
    assert [captions(ours[i]) for i in range(3)] == [["a cat", "two"], ["one"], ["alone"]]
    assert ours[1].other_captions == ()
    assert [reason(ours, i) for i in range(3, 8)] == ["caption:missing"] + ["caption:not_text"] * 4


def test_without_captions_an_image_is_enough(source):
    members = [("1.webp", JPEG), ("1.cls", b"3"), ("2.jpg", JPEG), ("2.txt", b"unread"), ("3.txt", b"no image")]
    ours = source([*members, ("4.cls", b"1"), ("5.json", b"{}")], caption=None)
    assert [ours[i] for i in range(len(ours))] == [Example("s/1", JPEG, None), Example("s/2", JPEG, None)]


def test_without_captions_labels_can_be_needed(source):
    members = [("1.png", JPEG), ("1.cls", b"3"), ("2.jpg", JPEG), ("3.cls", b"1"), ("4.json", b"{}")]
    ours = source(members, caption=None, label="cls")
    assert ours[0] == Example("s/1", JPEG, None, 3)
    assert len(ours) == 3 and [reason(ours, 1), reason(ours, 2)] == ["label:missing", "image:missing"]
    members = [("1.png", JPEG), ("1.json", b'{"class": 5}')]
    assert source(members, caption=None, label="json:class")[0] == Example("s/1", JPEG, None, 5)


def test_members_are_grouped_by_the_path_to_the_first_dot(source):
    ours = source(
        [
            ("b", None),
            ("b/1.jpg", JPEG),
            ("1.txt", b"outer"),  # members of one sample need not be neighbours
            ("b/1.txt", b"inner"),
            ("1.JPG", JPEG),
            ("./c.d/2.TXT", b"dot in the folder"),
            ("./c.d/2.JPeG", JPEG),
        ]
    )
    got = {ours[i].key: ours[i].caption for i in range(len(ours))}
    assert got == {"s/b/1": b"inner", "s/1": b"outer", "s/c.d/2": b"dot in the folder"}


def test_other_members_are_ignored(source):
    rubbish = [
        ".DS_Store",
        "._1.jpg",
        "a/._1.txt",
        "__MACOSX/a/._1.jpg",
        "1.seg.png",
        "1.npy",
        "1",
        "1.image",
        "n.json",
    ]
    ours = source([(name, b"rubbish") for name in rubbish] + samples("1") + [("1.png", b"second image")])
    assert keys(ours) == ["s/1"]
    assert ours[0].image == JPEG


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "PNG"])
def test_image_extensions(source, extension):
    assert source([(f"1.{extension}", JPEG), ("1.txt", b"a")])[0].image == JPEG


def test_links_are_no_images(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        link = tarfile.TarInfo("2.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "1.jpg"
        tar.addfile(link)
        for name, data in [*samples("1"), ("2.txt", b"two")]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    ours = TarSource(str(tmp_path / "s.tar"), cache_dir=tmp_path)
    assert [ours[0].key, reason(ours, 1)] == ["s/1", "image:missing"]


@pytest.mark.parametrize("options", [{"format": tarfile.GNU_FORMAT}, {"format": tarfile.PAX_FORMAT}])
def test_long_and_foreign_names(tmp_path, options):
    name = "f" * 90 + "/" + "\u00e9" * 60
    tar = make_tar(tmp_path / "s.tar", samples(name), **options)
    assert keys(TarSource(tar, cache_dir=tmp_path)) == [f"s/{name}"]


def test_shards_are_told_apart_by_their_folders(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        make_tar(tmp_path / folder / "0.tar", samples("1", "2"))
    assert keys(TarSource(str(tmp_path / "*" / "0.tar"), cache_dir=tmp_path)) == ["a/0/1", "a/0/2", "b/0/1", "b/0/2"]


def test_uneven_shards_are_one_sequence(tmp_path):
    counts = [3, 1, 5]
    for shard, count in enumerate(counts):
        make_tar(tmp_path / f"{shard}.tar", samples(*(f"{shard}-{i}" for i in range(count))))
    ours = TarSource(str(tmp_path / "{0..2}.tar"), cache_dir=tmp_path)
    assert len(ours) == 9
    assert keys(ours) == [f"{shard}/{shard}-{i}" for shard, count in enumerate(counts) for i in range(count)]
    assert ours[np.int64(8)].key == "2/2-4"
    for outside in (-1, 9):
        with pytest.raises(IndexError):
            ours[outside]


# ---- what is dropped with a reason ----


def test_incomplete_samples_stay_and_are_named(source):
    ours = source([*samples("1"), ("2.jpg", JPEG), ("3.txt", b"three"), ("4.jpg", b""), ("4.txt", b"")])
    assert len(ours) == 4
    assert [reason(ours, 1), reason(ours, 2)] == ["caption:missing", "image:missing"]
    assert (ours[3].image, ours[3].caption) == (b"", b"")  # the decoder and clean_caption say what is wrong with these


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"text": null}', "caption:missing"),
        (b'{"other": "a"}', "caption:missing"),
        (b'{"text": 3}', "caption:not_text"),
        (b'["a"]', "json:broken"),
        (b'{"text": "a', "json:broken"),
        (b'{"text": "caf\xe9"}', "json:broken"),
        (b"[" * 100_000, "json:broken"),
    ],
)
def test_odd_json_captions_are_named(source, data, expected):
    assert reason(source([("1.jpg", JPEG), ("1.json", data)], caption="json:text"), 0) == expected


@pytest.mark.parametrize(("data", "label"), [(b"12\n", 12), (b"-1", -1), (b"cat", None), (b"", None), (b"1.5", None)])
def test_cls_labels(source, data, label):
    ours = source([*samples("1"), ("1.cls", data)], label="cls")
    if label is None:
        assert reason(ours, 0) == "label:not_an_integer"
    else:
        assert ours[0].label == label


@pytest.mark.parametrize(("value", "label"), [(12, 12), ("12", 12), (True, None), (1.0, None), ("cat", None)])
def test_json_labels(source, value, label):
    ours = source([*samples("1"), ("1.json", json.dumps({"class": value}).encode())], label="json:class")
    if label is None:
        assert reason(ours, 0) == "label:not_an_integer"
    else:
        assert ours[0].label == label


def test_a_missing_label_is_named(source):
    assert reason(source([*samples("1", "2"), ("1.cls", b"1")], label="cls"), 1) == "label:missing"


def test_a_shard_cut_or_removed_after_indexing_is_named(tmp_path):
    tar = make_tar(tmp_path / "s.tar", samples("1", "2"))
    ours = TarSource(tar, cache_dir=tmp_path)
    os.truncate(tar, 512 * 2)
    assert reason(ours, 1) == "shard:truncated"
    removed = pickle.loads(pickle.dumps(ours))
    os.remove(tar)
    assert reason(removed, 0) == "shard:unreadable"


def test_of_a_cut_tar_the_whole_samples_are_used(tmp_path, warned):
    tar = make_tar(tmp_path / "s.tar", samples("1", "2", "3"))
    with tarfile.open(tar) as opened:
        places = {member.name: member.offset_data for member in opened}
    os.truncate(tar, places["3.txt"])  # after the header of the caption, before its bytes
    for _ in range(2):  # also when the index could have come from the cache
        ours = TarSource(tar, cache_dir=tmp_path / "cache")
        assert [ours[0].caption, ours[1].caption, reason(ours, 2)] == [b"1", b"2", "caption:missing"]
    assert len(warned()) == 2 and "s.tar is cut off or damaged at byte" in warned()[0]


def test_of_a_damaged_tar_the_samples_before_are_used(tmp_path, warned):
    tar = make_tar(tmp_path / "s.tar", samples("1", "2", "3"))
    with tarfile.open(tar) as opened:
        header = next(member.offset for member in opened if member.name == "3.jpg")
    with open(tar, "r+b") as file:
        file.seek(header)
        file.write(b"\xff" * 512)
    ours = TarSource(tar, cache_dir=tmp_path / "cache")
    assert keys(ours) == ["s/1", "s/2"]
    assert "damaged at byte" in warned()[0]


# ---- what is refused before work starts ----


def refusal(error, tmp_path, pattern, **options):
    with pytest.raises(error) as raised:
        TarSource(pattern, cache_dir=tmp_path / "cache", **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_pattern_without_a_match_names_what_is_near(tmp_path):
    make_tar(tmp_path / "train-0.tar", samples("1"))
    for pattern in ("{a,b}.tar", "no*.tar", "deeper/down/0.tar"):
        message = refusal(FileNotFoundError, tmp_path, str(tmp_path / pattern))
        assert pattern in message and f"nearest folder is {tmp_path} with 1 .tar files, such as train-0.tar" in message


def test_missing_named_shards_are_counted(tmp_path):
    make_tar(tmp_path / "0.tar", samples("1"))
    message = refusal(FileNotFoundError, tmp_path, str(tmp_path / "{0..3}.tar"))
    assert "3 of the 4 shards" in message and f"first {tmp_path / '1.tar'}" in message


def test_patterns(tmp_path, monkeypatch):
    names = ["00009.tar", "00010.tar", "00011.tar", "other.tar", "a[1].tar"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "folder.tar").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shard_paths("{00009..00011}.tar") == names[:3]
    assert shard_paths("{00011,00009}.tar") == ["00011.tar", "00009.tar"]
    assert shard_paths("000*.tar") == names[:3]
    assert shard_paths("{other,0001?}.tar") == ["other.tar", "00010.tar", "00011.tar"]
    assert shard_paths(["other.tar", "0000*.tar"]) == ["other.tar", "00009.tar"]
    assert shard_paths("a[1].tar") == ["a[1].tar"]
    assert shard_paths("~/other.tar") == [str(tmp_path / "other.tar")]
    assert len(shard_paths("*.tar")) == 5
    with pytest.raises(FileNotFoundError, match="is a folder"):
        shard_paths(str(tmp_path))
    with pytest.raises(ValueError, match="named twice"):
        shard_paths(["*.tar", "./other.tar"])
    with pytest.raises(ValueError, match="no shard pattern"):
        shard_paths([])
    with pytest.raises(ValueError, match="more than 1,000,000"):
        shard_paths("{0..99999999}.tar")


def test_tens_of_thousands_of_names(tmp_path):
    (tmp_path / "12000.tar").touch()
    message = refusal(FileNotFoundError, tmp_path, str(tmp_path / "{00000..12000}.tar"))
    assert "12000 of the 12001 shards" in message


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "0 image, 0 txt"),
        ([("readme.md", b"hello")], "0 image, 0 txt"),
        ([("1.jpg", JPEG), ("2.txt", b"a")], "1 image, 1 txt"),
        ([("1.jpg", JPEG), ("1.json", b"{}")], "1 image, 0 txt, 1 json"),
    ],
)
def test_a_tar_without_a_sample(tmp_path, members, words):
    tar = make_tar(tmp_path / "s.tar", members)
    message = refusal(ValueError, tmp_path, tar)
    assert f"{tar} holds no sample with an image and .txt" in message and words in message


def test_a_tar_without_an_image(tmp_path):
    tar = make_tar(tmp_path / "s.tar", [("1.txt", b"a"), ("1.cls", b"1")])
    assert "holds no sample with an image; its members are 0 image" in refusal(ValueError, tmp_path, tar, caption=None)
    message = refusal(ValueError, tmp_path, tar, caption=None, label="cls")
    assert "holds no sample with an image and .cls" in message


def test_a_tar_without_a_label(tmp_path):
    tar = make_tar(tmp_path / "s.tar", samples("1"))
    assert "an image and .txt and .cls" in refusal(ValueError, tmp_path, tar, label="cls")


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"\x01" * 2000])
def test_no_tar(tmp_path, data):
    (tmp_path / "s.tar").write_bytes(data)
    assert f"{tmp_path / 's.tar'} is not a tar" in refusal(ValueError, tmp_path, str(tmp_path / "s.tar"))


def test_a_compressed_tar(tmp_path):
    make_tar(tmp_path / "s.tar", samples("1"))
    packed = tmp_path / "s.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "s.tar").read_bytes()))
    assert f"{packed} is compressed with gzip: unpack it" in refusal(ValueError, tmp_path, str(packed))


@pytest.mark.parametrize("place", ["text", "json:", "cls", "txt:", "txt:line", "lines", ""])
def test_malformed_captions(tmp_path, place):
    message = refusal(ValueError, tmp_path, "any.tar", caption=place)
    assert message == f"caption is {place!r}: give 'txt', 'txt:lines' or 'json:FIELD'"


@pytest.mark.parametrize("place", ["txt", "cls:lines", "txt:lines", "json"])
def test_malformed_labels(tmp_path, place):
    message = refusal(ValueError, tmp_path, "any.tar", label=place)
    assert message == f"label is {place!r}: give 'cls' or 'json:FIELD'"


# ---- the rest of what a source promises ----


def test_pickled_and_threaded_reads_are_the_same(tmp_path):
    for shard in range(4):
        make_tar(tmp_path / f"{shard}.tar", samples(*map(str, range(25))))
    ours = TarSource(str(tmp_path / "*.tar"), cache_dir=tmp_path)
    expected = [ours[i] for i in range(100)]
    copy = pickle.loads(pickle.dumps(ours))
    order = np.random.default_rng(0).integers(0, 100, 2000)
    with ThreadPoolExecutor(8) as pool:
        for i, example in zip(order, pool.map(copy.__getitem__, order), strict=True):
            assert example == expected[i]


def test_open_files_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN_FILES", 4)
    for shard in range(20):
        make_tar(tmp_path / f"{shard:02}.tar", samples(str(shard)))
    ours = TarSource(str(tmp_path / "*.tar"), cache_dir=tmp_path)

    def open_tars():
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.lexists(link))

    order = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 40))
    with ThreadPoolExecutor(4) as pool:
        for i, example in zip(order, pool.map(ours.__getitem__, order), strict=True):
            assert example.caption == str(i).encode()
    if os.path.isdir("/proc/self/fd"):
        assert open_tars() == 4
        del ours
        assert open_tars() == 0


def test_relative_patterns_survive_a_change_of_folder(tmp_path, monkeypatch):
    make_tar(tmp_path / "s.tar", samples("1"))
    monkeypatch.chdir(tmp_path)
    ours = TarSource("s.tar", cache_dir=tmp_path)
    monkeypatch.chdir("/")
    assert ours[0].caption == b"1"
