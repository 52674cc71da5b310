import io
import json
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from disco_jax.data.examples import BadExample, Example
from disco_jax.data.tfds_source import TfdsSource

N_TRAIN, N_TEST = 40, 5
TEXT_KEYS = re.escape("['captions/text', 'lines', 'text', 'titles/en']")


def png(red: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


def stored(i: int) -> dict:
    return {
        "image": io.BytesIO(png(i)),
        "mask": io.BytesIO(b"no image at all"),
        "text": f"caf\u00e9 {i}",
        "label": -1 if i == 3 else i % 2,
        "captions": [{"id": i, "text": text} for text in texts(i)],
        "lines": texts(i)[1:],
        "objects": [{"names": ["a", "b"]}],
        "titles": {"en": f"title {i}"},
    }


def texts(i: int) -> list[str]:
    return [f"caf\u00e9 {i}, {k}" for k in range(i % 4)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """A dataset as tfds keeps it, in several ArrayRecord files, written without TensorFlow."""
    data_dir = tmp_path_factory.mktemp("tfds")
    version = data_dir / "tiny_pairs" / "1.0.0"
    version.mkdir(parents=True)
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(),
            "mask": tfds.features.Image(shape=(None, None, 1)),
            "text": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=["red_circle", "blue_square"]),
            "captions": tfds.features.Sequence({"id": np.int64, "text": tfds.features.Text()}),  # as coco_captions
            "lines": tfds.features.Sequence(tfds.features.Text()),
            "objects": tfds.features.Sequence({"names": tfds.features.Tensor(shape=(2,), dtype=np.str_)}),
            "titles": {"en": tfds.features.Text()},
        }
    )
    identity = tfds.core.DatasetIdentity(
        name="tiny_pairs", version=tfds.core.Version("1.0.0"), data_dir=str(version), module_name="tiny_pairs"
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=16, file_format="array_record")
    writer.initialize_splits(["train", "test"])
    writer.add_examples({"train": [stored(i) for i in range(N_TRAIN)], "test": [stored(i) for i in range(N_TEST)]})
    writer.close_all()
    return data_dir


@pytest.fixture
def version(data_dir) -> str:
    return str(data_dir / "tiny_pairs" / "1.0.0")


def copy_of(version: str, path: Path) -> Path:
    path.mkdir()
    for file in Path(version).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_text_captions(version):
    source = TfdsSource(version, "train", text_key="text", label_key="label")
    assert len(source) == N_TRAIN
    for i in range(N_TRAIN):
        label = None if i == 3 else i % 2
        assert source[i] == Example(f"train/{i}", png(i), f"caf\u00e9 {i}".encode(), label)
    assert source.label_names == ("red circle", "blue square")
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(("text_key", "first"), [("captions/text", 0), ("lines", 1)])
def test_several_captions(version, text_key, first):
    source = pickle.loads(pickle.dumps(TfdsSource(version, "train", text_key=text_key, label_key="label")))
    for i in range(N_TRAIN):
        expected = [text.encode() for text in texts(i)[first:]]
        if expected:
            assert [source[i].caption, *source[i].other_captions] == expected
        else:
            with pytest.raises(BadExample, match=rf"train/{i}: the sequence of captions is empty") as error:
                source[i]
            assert error.value.reason == "caption:missing"


def test_a_text_within_another_feature(version):
    source = TfdsSource(version, "train", text_key="titles/en")
    assert source[7] == Example("train/7", png(7), b"title 7")


def test_without_label_key_there_is_no_label(version):
    source = TfdsSource(version, "test", text_key="text")
    assert source.label_names is None and source[0].label is None


def test_captions_from_labels(version):
    source = TfdsSource(version, "train", label_key="label", prompt="one {}, seen.")
    captions = ["one red circle, seen.", "one blue square, seen.", "one red circle, seen.", None]
    assert [source[i].caption for i in range(4)] == captions
    assert [source[i].label for i in range(4)] == [0, 1, 0, None]


@pytest.mark.parametrize("name", ["tiny_pairs", "tiny_pairs:1.0.0", "tiny_pairs:1.*.*"])
def test_by_name(data_dir, name, monkeypatch):
    assert len(TfdsSource(name, "test", data_dir=str(data_dir), text_key="text")) == N_TEST
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert len(TfdsSource(name, "test", text_key="text")) == N_TEST


def test_split_slices(version):
    source = TfdsSource(version, "train[15:18]+test[:1]", text_key="text")
    assert [source[i].caption for i in range(len(source))] == [f"caf\u00e9 {i}".encode() for i in (15, 16, 17, 0)]


def test_iteration_ends(version):
    source = TfdsSource(version, "test", text_key="text")
    assert len(list(source)) == N_TEST
    for index in (N_TEST, -1):
        with pytest.raises(IndexError, match=f"example {index} of {N_TEST}"):
            source[index]


def test_threads_and_pickling(version):
    source = pickle.loads(pickle.dumps(TfdsSource(version, "train", text_key="text")))
    order = list(range(N_TRAIN)) * 10
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        examples = list(pool.map(source.__getitem__, order))
    assert [example.image for example in examples] == [png(i) for i in order]


@pytest.mark.parametrize(
    ("split", "settings", "message"),
    [
        ("valid", {"text_key": "text"}, r"no split 'valid' .*one of \['test', 'train'\]"),
        ("train[:99]", {"text_key": "text"}, r"no split 'train\[:99\]' \(.*40 examples.*\)"),
        ("train[", {"text_key": "text"}, r"no split 'train\['"),
        ("train[:1%]", {"text_key": "text"}, "has no examples"),
        ("train[5:2]", {"text_key": "text"}, "has no examples"),
        ("train", {}, rf"set text_key to one of {TEXT_KEYS} or label_key to one of \['label'\]"),
        ("train", {"text_key": "caption"}, rf"no text feature 'caption': set text_key to one of {TEXT_KEYS}$"),
        ("train", {"text_key": "captions"}, r"no text feature 'captions'"),
        ("train", {"text_key": "captions/id"}, r"no text feature 'captions/id'"),
        ("train", {"text_key": "objects/names"}, r"no text feature 'objects/names'"),
        ("train", {"text_key": "label"}, r"no text feature 'label'"),
        ("train", {"label_key": "text"}, r"no class label feature 'text': set label_key to one of \['label'\]"),
        ("train", {"image_key": "photo", "text_key": "text"}, r"set image_key to one of \['image', 'mask'\]"),
        ("train", {"label_key": "label", "prompt": "a photo"}, r"prompt 'a photo' has no \{\}"),
    ],
)
def test_bad_settings_are_named(version, split, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        TfdsSource(version, split, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["other", "tiny_pairs:2.0.0", "no name", "some/folder/1.0.0", ""])
def test_unknown_dataset_is_named(data_dir, name):
    with pytest.raises(FileNotFoundError, match=rf"no prepared tfds dataset '{name}'.*\(there: tiny_pairs\)") as error:
        TfdsSource(name, "train", data_dir=str(data_dir), text_key="text")
    assert "\n" not in str(error.value)


def test_missing_file_is_named(version, tmp_path):
    copy = copy_of(version, tmp_path / "copy")
    gone = sorted(copy.glob("*-train*"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of its files, first .*{gone.name}: prepare"):
        TfdsSource(str(copy), "train", text_key="text")
    assert len(TfdsSource(str(copy), "test", text_key="text")) == N_TEST


def test_other_file_format_is_refused(version, tmp_path):
    copy = copy_of(version, tmp_path / "copy")
    info = json.loads((copy / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    for split in info["splits"]:
        split["filepathTemplate"] = split["filepathTemplate"].replace("array_record", "tfrecord")
    (copy / "dataset_info.json").write_text(json.dumps(info))
    for file in copy.glob("*array_record*"):
        file.rename(copy / file.name.replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"not stored as ArrayRecord: .*--file_format=array_record") as error:
        TfdsSource(str(copy), "train", text_key="text")
    assert "\n" not in str(error.value)


def test_without_tfds_the_cure_is_named(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'disco-jax\[tfds\]'"):
        TfdsSource(version, "train", text_key="text")
