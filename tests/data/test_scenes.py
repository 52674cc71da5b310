import io

import numpy as np
import pytest
from PIL import Image

from disco_jax.data.scenes import CLASS_NAMES, COLOURS, COMBINATIONS, HELD_OUT, SHAPES, Scenes, write_scenes
from disco_jax.data.shards import TarSource


def test_held_out_combinations_leave_every_colour_and_shape_in_training():
    seen = set(COMBINATIONS) - set(HELD_OUT)
    assert len(HELD_OUT) == len(COMBINATIONS) // 4
    for colour in COLOURS:
        assert sum(c == colour for c, _ in seen) >= 6
    for shape in SHAPES:
        assert sum(s == shape for _, s in seen) >= 7


def test_training_captions_never_name_a_held_out_combination():
    held_out = {f"{colour} {shape}" for colour, shape in HELD_OUT}
    for example in map(Scenes("train", 300).__getitem__, range(300)):
        assert not any(name in example.caption for name in held_out)
        assert example.label is None


def test_held_out_labels_name_what_the_caption_says():
    scenes = Scenes("held_out", 50)
    for i in range(50):
        example = scenes[i]
        assert CLASS_NAMES[example.label] in example.caption


def test_an_example_depends_on_seed_and_index_alone():
    assert Scenes("train", 10)[7] == Scenes("train", 99)[7]
    assert Scenes("train", 10)[7] != Scenes("train", 10, seed=1)[7]


@pytest.mark.parametrize("colour", ["red", "green", "blue"])
def test_the_named_colour_is_in_the_picture(colour):
    scenes = Scenes("held_out", 200)
    example = next(scenes[i] for i in range(200) if f" {colour} " in scenes[i].caption)
    pixels = np.asarray(Image.open(io.BytesIO(example.image)), np.int32).reshape(-1, 3)
    brightest = pixels[np.argsort(pixels.sum(1))[-40:]].mean(0)
    assert int(brightest.argmax()) == ["red", "green", "blue"].index(colour)


def test_unknown_split_and_no_examples_are_errors():
    with pytest.raises(ValueError, match="'held_out'"):
        Scenes("test", 3)
    with pytest.raises(ValueError, match="size=0"):
        Scenes("train", 0)


def test_written_tars_hold_the_scenes(tmp_path):
    write_scenes(tmp_path, {"train": 5, "held_out": 3}, side=32)
    source = TarSource(str(tmp_path / "held_out-*.tar"), label="cls", cache_dir=tmp_path / "index")
    assert len(source) == 3
    wanted = Scenes("held_out", 3, side=32)[2]
    assert source[2].image == wanted.image
    assert source[2].caption == wanted.caption.encode()
    assert source[2].label == wanted.label
    assert (tmp_path / "classes.txt").read_text().split("\n")[wanted.label] == CLASS_NAMES[wanted.label]
