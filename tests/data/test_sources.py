import contextlib
import io

import pytest
from PIL import Image

from disco_jax.data.examples import Example
from disco_jax.data.folders import FolderSource
from disco_jax.data.scenes import Scenes
from disco_jax.data.shards import write_tar
from disco_jax.data.sources import SOURCES, make_source, source_settings

FILE = io.BytesIO()
Image.new("RGB", (4, 4)).save(FILE, "JPEG")
JPEG = FILE.getvalue()


def settings(**changes):
    data = source_settings()
    data.update(changes)
    return data


def test_tars_are_opened_as_they_are_needed(tmp_path):
    cache = str(tmp_path / "cache")
    write_tar(tmp_path / "pairs.tar", [Example("1", JPEG, "a", None, ("b",))])
    write_tar(tmp_path / "classes.tar", [Example("1", JPEG, None, 4)])
    data = settings(caption="txt:lines", label="cls", index_cache=cache)
    pairs, classes = (str(tmp_path / f"{name}.tar") for name in ("pairs", "classes"))
    assert make_source(data, pairs, labelled=False)[0] == Example("pairs/1", JPEG, b"a", None, (b"b",))
    assert make_source(data, classes, labelled=True, captioned=False)[0] == Example("classes/1", JPEG, None, 4)
    assert make_source(data, classes, labelled=False, captioned=False)[0] == Example("classes/1", JPEG, None)
    with pytest.raises(ValueError, match=r"an image and \.txt; its"):
        make_source(data, classes, labelled=False)
    with pytest.raises(ValueError, match=r"an image and \.cls"):
        make_source(data, pairs, labelled=True, captioned=False)


def test_folders_and_scenes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(JPEG)
    folder = make_source(settings(source="folder"), str(tmp_path), labelled=True)
    assert isinstance(folder, FolderSource) and folder[0] == Example("a/1.jpg", JPEG, None, 0)
    assert isinstance(make_source(settings(source="scenes"), "train", labelled=True), Scenes)


@pytest.mark.parametrize("name", source_settings())
def test_each_setting_is_read(tmp_path, name):
    def open_all():
        for source in SOURCES:
            data = settings(source=source, tfds_name="none", tfds_dir=str(tmp_path))
            del data[name]
            with contextlib.suppress(FileNotFoundError, ValueError):  # there is nothing to be opened
                make_source(data, str(tmp_path / "none"), labelled=True)

    with pytest.raises(AttributeError, match=name):
        open_all()


def test_wrong_sources_are_named():
    with pytest.raises(ValueError, match="source 'csv' is unknown: use one of tars, tfds, scenes, folder"):
        make_source(settings(source="csv"), "train", labelled=False)
    with pytest.raises(ValueError, match="tfds_name is not set"):
        make_source(settings(source="tfds"), "train", labelled=False)
