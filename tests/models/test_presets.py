import dataclasses
import math

import jax
import pytest
from flax import nnx

from disco_jax.models import CLIP, PRESETS, CLIPConfig, TextConfig, VisionConfig, preset

# Parameters in millions: all, image tower, text tower (open_clip's model profile; None: not given there).
MILLIONS = {
    "ViT-S-32-alt": (43.22, 22.59, 20.63),
    "ViT-S-32": (63.09, 22.64, 40.44),
    "ViT-S-16": (62.26, 21.81, 40.44),
    "ViT-M-32": (103.12, 39.69, 63.43),
    "ViT-M-16": (102.02, 38.59, 63.43),
    "ViT-B-32": (151.28, 87.85, 63.43),
    "ViT-B-32-256": (151.29, None, None),
    "ViT-B-16": (149.62, 86.19, 63.43),
    "ViT-B-16-plus-240": (208.38, None, None),
    "ViT-L-16": (427.74, None, None),
    "ViT-L-14": (427.62, 303.97, 123.65),
    "ViT-L-14-336": (427.94, None, None),
    "ViT-H-16": (986.26, None, None),
    "ViT-H-14": (986.11, 632.08, 354.03),
    "ViT-g-14": (1366.68, 1012.65, 354.03),
    "ViT-bigG-14": (2539.57, 1844.91, 694.66),
}
VISION = VisionConfig(image_size=32, patch_size=8, width=32, layers=2, heads=2, mlp_width=128)
TEXT = TextConfig(width=24, layers=2, heads=2, mlp_width=96, context_length=13, vocab_size=99, eot_id=98)


def millions(tree) -> float:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) / 1e6


@pytest.mark.parametrize("name", MILLIONS)
def test_parameter_count(name):
    params = jax.eval_shape(lambda: nnx.state(CLIP(preset(name), rngs=nnx.Rngs(0)), nnx.Param))
    counts = (millions(params), millions(params["visual"]), millions(params["text"]))
    for count, want in zip(counts, MILLIONS[name], strict=True):
        assert want is None or round(count, 2) == want


def test_every_preset_is_counted_or_a_twin():
    twins = {name for name in PRESETS if name.endswith("-quickgelu")}
    assert twins == {f"ViT-{size}-quickgelu" for size in ("B-32", "B-16", "L-14", "L-14-336", "H-14", "bigG-14")}
    assert set(PRESETS) == set(MILLIONS) | twins | {"tiny"}
    for name in twins:
        plain = PRESETS[name.removesuffix("-quickgelu")]
        assert plain.activation == "gelu"
        assert PRESETS[name] == dataclasses.replace(plain, activation="quickgelu")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("ViT-B/32", "did you mean 'ViT-B-32'?"),
        ("vit-l-14-336-quickgelu", "did you mean 'ViT-L-14-336-quickgelu'?"),
        ("resnet", "choose from tiny, ViT-S-32-alt, "),
    ],
)
def test_unknown_preset(wrong, hint):
    with pytest.raises(ValueError, match="unknown preset") as error:
        preset(wrong)
    assert repr(wrong) in str(error.value)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: dataclasses.replace(VISION, heads=3), ["width 32", "3 heads"]),
        (lambda: dataclasses.replace(VISION, image_size=30), ["image_size 30", "patch_size 8"]),
        (lambda: dataclasses.replace(VISION, layers=0), ["VisionConfig.layers is 0"]),
        (lambda: dataclasses.replace(TEXT, heads=5), ["width 24", "5 heads"]),
        (lambda: dataclasses.replace(TEXT, context_length=-1), ["TextConfig.context_length is -1"]),
        (lambda: dataclasses.replace(TEXT, eot_id=99), ["eot_id 99", "vocabulary of 99"]),
        (lambda: dataclasses.replace(TEXT, eot_id=-1), ["eot_id -1", "vocabulary of 99"]),
        (lambda: CLIPConfig(0, VISION, TEXT), ["CLIPConfig.embed_dim is 0"]),
        (lambda: CLIPConfig(16, VISION, TEXT, "relu"), ["'relu'", "gelu, quickgelu"]),
    ],
)
def test_wrong_config(change, words):
    with pytest.raises(ValueError) as error:
        change()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
