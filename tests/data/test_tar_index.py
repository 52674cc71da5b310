"""The index cache: it saves the scan, never gives the index of another file, and its failure breaks no run."""

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from disco_jax.data import tar_index
from disco_jax.data.tar_index import ROLES, atomic_write, default_cache_dir, index_tars, scan_tar


def make_tar(path, *keys):
    with tarfile.open(path, "w") as tar:
        for name in (f"{key}.{kind}" for key in keys for kind in ("jpg", "txt")):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return str(path)


@pytest.fixture
def scans(monkeypatch):
    """The paths scanned so far."""
    paths = []

    def scan(path):
        paths.append(path)
        return scan_tar(path)

    monkeypatch.setattr(tar_index, "scan_tar", scan)
    return paths


def keys(path, cache):
    return index_tars([path], cache)[0].keys.tolist()


def test_scan_gives_keys_blocks_and_sizes(tmp_path):
    tar = make_tar(tmp_path / "s.tar", "a", "bc")
    index, whole = scan_tar(tar)
    assert whole and index.keys.tolist() == [b"a", b"bc"]
    assert index.members.dtype == np.uint32 and index.members.shape == (2, len(ROLES), 2)
    for row, key in enumerate(("a", "bc")):
        for role, kind in enumerate(("jpg", "txt")):
            block, size = index.members[row, role].tolist()
            with open(tar, "rb") as file:
                file.seek(block * 512)
                assert file.read(size).decode() == f"{key}.{kind}"
    assert not index.members[:, 2:].any()


def test_a_second_run_does_not_scan(tmp_path, scans):
    tar = make_tar(tmp_path / "s.tar", "a", "b")
    first, second = (index_tars([tar], tmp_path / "deep" / "cache")[0] for _ in range(2))
    assert scans == [tar]
    np.testing.assert_array_equal(first.keys, second.keys)
    np.testing.assert_array_equal(first.members, second.members)


def test_a_changed_or_moved_tar_is_scanned_again(tmp_path, scans):
    tar = make_tar(tmp_path / "s.tar", "a")
    stat = os.stat(tar)
    assert keys(tar, tmp_path / "cache") == [b"a"]
    make_tar(tar, "b")  # the same size, another time
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert keys(tar, tmp_path / "cache") == [b"b"]
    make_tar(tar, *map(str, range(30)))  # another size, the same time
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert len(keys(tar, tmp_path / "cache")) == 30
    os.rename(tar, tmp_path / "t.tar")
    assert len(keys(str(tmp_path / "t.tar"), tmp_path / "cache")) == 30
    assert len(scans) == 4


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped", "pickled", "other arrays"])
def test_a_broken_cache_file_is_made_again(tmp_path, scans, damage):
    tar, cache = make_tar(tmp_path / "s.tar", "a"), tmp_path / "cache"
    keys(tar, cache)
    (file,) = cache.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[data.index(b"}") + 60] ^= 1
    file.write_bytes({"empty": b"", "text": b"no zip", "cut": data[: len(data) // 2]}.get(damage, data))
    if damage == "pickled":
        np.savez(file, keys=np.array([{}], dtype=object), members=np.zeros(1))
    if damage == "other arrays":
        np.savez(file, something=np.zeros(3))
    assert keys(tar, cache) == [b"a"]
    assert keys(tar, cache) == [b"a"]
    assert len(scans) == 2


def test_an_unusable_cache_folder_breaks_no_run(tmp_path, scans):
    tar = make_tar(tmp_path / "s.tar", "a")
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        assert keys(tar, tmp_path / "file" / "cache") == [b"a"]
    assert len(scans) == 2


def test_many_indexers_at_once(tmp_path):
    tars = [make_tar(tmp_path / f"{i}.tar", *(f"{i}-{j}" for j in range(20))) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: index_tars(tars, tmp_path / "cache"), range(6)))
    for indices in results:
        assert [index.keys[3] for index in indices] == [f"{i}-3".encode() for i in range(6)]
    assert len(os.listdir(tmp_path / "cache")) == 6, "no temporary file stays"


def test_one_bad_tar_ends_the_indexing(tmp_path, scans):
    (tmp_path / "bad.tar").write_bytes(b"no tar")
    tars = [make_tar(tmp_path / f"{i}.tar", "a") for i in range(3)]
    with pytest.raises(ValueError, match=r"bad\.tar is not a tar"):
        index_tars([str(tmp_path / "bad.tar"), *tars], tmp_path / "cache")


def test_the_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "disco_jax" / "index"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "disco_jax" / "index"


def test_no_damaged_header_is_fatal(tmp_path):
    make_tar(tmp_path / "s.tar", *map(str, range(8)))
    data = (tmp_path / "s.tar").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(data)
        for place in rng.integers(0, 512, 3) + 1024 * rng.integers(1, 16):
            damaged[place] = rng.integers(256)
        (tmp_path / "d.tar").write_bytes(damaged)
        index, _ = scan_tar(str(tmp_path / "d.tar"))
        assert index.keys[0] == b"0"


def test_atomic_write_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a") as file:
        file.write(b"half")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with atomic_write(tmp_path / "a") as file:
        file.write(b"whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"whole" and len(os.listdir(tmp_path)) == 1
