"""Features of a dataset as files: which rows there are, and that a broken-off run goes on to the same bytes."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
from tiny_model import encoded, evaluator

from disco_jax.data.scenes import Scenes
from disco_jax.evaluation import embed as embed_module
from disco_jax.evaluation.embed import embed

SIZE = 13


class SomeBad:
    """Scenes with broken images at the given places; the captions can be taken away."""

    def __init__(self, bad=(), size=SIZE, captioned=True):
        self.scenes, self.bad, self.captioned = Scenes("held_out", size), bad, captioned

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        example = self.scenes[index]
        captions = ("the first", "the second") if index == 3 else ()
        example = replace(example, image=b"" if index in self.bad else example.image, other_captions=captions)
        return example if self.captioned else replace(example, caption=None)


def run(out, source=None, *, devices=1, part_size=5, captioned=True, made_of=None, anew=False):
    source = SomeBad(bad=(4, 12)) if source is None else source
    made_of = {"step": 3} if made_of is None else made_of
    return embed(*evaluator(devices), source, out, part_size=part_size, captioned=captioned, made_of=made_of, anew=anew)


def contents(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def part(out, number):
    table = pyarrow.parquet.read_table(out / "metadata" / f"metadata_{number}.parquet").to_pydict()
    return table, *(np.load(out / name / f"{name}_{number}.npy") for name in ("img_emb", "text_emb"))


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_row_i_of_a_parts_files_is_one_example(tmp_path):
    assert run(tmp_path) == 11
    assert sorted(contents(tmp_path)) == sorted(
        ["embed_manifest.json"]
        + [f"{name}/{name}_{i}.npy" for name in ("img_emb", "text_emb") for i in range(3)]
        + [f"metadata/metadata_{i}.parquet" for i in range(3)]
    )
    source, preprocessor = SomeBad(), evaluator(1)[0].preprocessor
    for number, good in enumerate([(0, 1, 2, 3), (5, 6, 7, 8, 9), (10, 11)]):
        table, images, texts = part(tmp_path, number)
        examples = [source[i] for i in good]
        assert table == {"image_path": [e.key for e in examples], "caption": [e.caption for e in examples]}
        assert images.dtype == texts.dtype == np.float16
        np.testing.assert_allclose(images, unit(encoded(preprocessor, images=examples)), atol=1e-3)
        np.testing.assert_allclose(texts, unit(encoded(preprocessor, texts=table["caption"])), atol=1e-3)


def test_eight_devices_write_what_one_does(tmp_path):
    assert run(tmp_path / "one") == run(tmp_path / "eight", devices=8)
    for number in range(3):
        for ours, theirs in zip(part(tmp_path / "one", number), part(tmp_path / "eight", number), strict=True):
            if isinstance(ours, dict):
                assert ours == theirs
            else:
                np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("at", ["text_emb_1.npy", "metadata_1.parquet", "img_emb_2.npy"])
def test_broken_off_anywhere_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, at):
    class Killed(BaseException):
        pass

    def write_until(path):
        if path.name == at:
            raise Killed
        return atomic_write(path)

    run(tmp_path / "whole")
    atomic_write = embed_module.atomic_write
    with monkeypatch.context() as patched:
        patched.setattr(embed_module, "atomic_write", write_until)
        with pytest.raises(Killed):
            run(tmp_path / "broken")
    assert len(list((tmp_path / "broken" / "metadata").iterdir())) == (2 if at == "img_emb_2.npy" else 1)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "broken").rglob("*_0.*")}
    assert run(tmp_path / "broken") == 11
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert times == {path: path.stat().st_mtime_ns for path in times}  # not made again


def test_images_alone_have_no_text_features(tmp_path):
    assert run(tmp_path, SomeBad(captioned=False), captioned=False, part_size=100) == SIZE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["embed_manifest.json", "img_emb", "metadata"]
    table = pyarrow.parquet.read_table(tmp_path / "metadata" / "metadata_0.parquet")
    assert table.column_names == ["image_path"] and table.num_rows == SIZE


def test_numbers_of_parts_sort_as_names_and_empty_parts_have_no_files(tmp_path):
    assert run(tmp_path, SomeBad(bad=(2,), size=11), part_size=1, captioned=False) == 10
    names = [f"img_emb_{i:02d}.npy" for i in range(11) if i != 2]
    assert sorted(path.name for path in (tmp_path / "img_emb").iterdir()) == names
    with pytest.raises(ValueError, match="not one usable example to embed"):
        run(tmp_path / "none", SomeBad(bad=(0,), size=1), captioned=False)


def test_files_made_of_something_else_are_not_completed(tmp_path):
    run(tmp_path / "a", part_size=100)
    with pytest.raises(ValueError, match=r"made of something else \(step: 3 -> 4\): embed into another folder"):
        run(tmp_path / "a", part_size=100, made_of={"step": 4})
    with pytest.raises(ValueError, match=r"\(part_size: 100 -> 5\)"):
        run(tmp_path / "a")
    run(tmp_path / "a", made_of={"step": 4}, anew=True)
    assert len(list((tmp_path / "a" / "img_emb").iterdir())) == 3

    (tmp_path / "a" / "embed_manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"embed_manifest\.json is damaged"):
        run(tmp_path / "a")
    (tmp_path / "a" / "embed_manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds img_emb but no embed_manifest\.json"):
        run(tmp_path / "a")
