"""Model FLOPs against compiled programs, jax's own count and open_clip's table."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from golden_clip import abstract_clip, fast_jit

from disco_jax.hlo import read_program
from disco_jax.models import CLIPConfig, TextConfig, VisionConfig, preset
from disco_jax.models.flops import forward_flops, loss_flops_per_sample, step_flops_per_sample
from disco_jax.models.patch_dropout import count_kept

SMALL = CLIPConfig(8, VisionConfig(12, 4, 16, 2, 2, 40), TextConfig(24, 3, 2, 40, 6, 50, 49))
WIDE = CLIPConfig(256, VisionConfig(64, 8, 512, 1, 8, 2048), TextConfig(512, 1, 8, 2048, 32, 50, 49))
B = 4
PIXEL_GRADIENT = 2 * 9 * (3 * 4 * 4) * 16  # of SMALL: counted, but never computed


def inputs(model):
    size = model.vision.image_size
    return {
        "visual": jax.ShapeDtypeStruct((B, size, size, 3), jnp.uint8),
        "text": jax.ShapeDtypeStruct((B, model.text.context_length), jnp.int32),
    }


def products_of_a_step(locked=(), kept=None):
    """FLOPs a pair of SMALL's products in the compiled encoders and their gradients."""
    graphdef, params = abstract_clip(SMALL)
    kept = kept and jax.ShapeDtypeStruct((B, kept), jnp.int32)

    def encode_and_differentiate(params, inputs, kept, cotangent):
        def encode(params):
            clip = nnx.merge(graphdef, nnx.State({**params, **{name: fixed[name] for name in locked}}))
            return clip.encode_image(inputs["visual"], kept_patches=kept), clip.encode_text(inputs["text"])

        fixed = dict(params)
        features, backward = jax.vjp(encode, {name: value for name, value in fixed.items() if name not in locked})
        return features, backward((cotangent, cotangent))

    cotangent = jax.ShapeDtypeStruct((B, SMALL.embed_dim), jnp.float32)
    compiled = fast_jit(encode_and_differentiate).lower(params, inputs(SMALL), kept, cotangent).compile()
    return 2 * read_program(compiled.as_text()).multiply_adds / B


def test_products_of_a_compiled_step():
    assert products_of_a_step() == step_flops_per_sample(SMALL) - PIXEL_GRADIENT


def test_a_locked_tower_and_patch_dropout():
    assert count_kept(SMALL.vision, 0.3) == 6
    expected = step_flops_per_sample(SMALL, locked=("text",), patch_dropout=0.3) - PIXEL_GRADIENT * 6 // 9
    assert products_of_a_step(locked=("text",), kept=6) == expected


def test_a_locked_tower_costs_a_third():
    forward = forward_flops(SMALL)
    assert step_flops_per_sample(SMALL) == 3 * (forward["visual"] + forward["text"])
    assert step_flops_per_sample(SMALL, locked=["visual"]) == forward["visual"] + 3 * forward["text"]
    assert step_flops_per_sample(SMALL, locked={"visual", "text"}) == forward["visual"] + forward["text"]


@pytest.mark.parametrize("tower, encode", [("visual", "encode_image"), ("text", "encode_text")])
def test_jax_counts_little_more(tower, encode):
    """Norms, softmax and activations are a few percent of a wide model."""
    graphdef, params = abstract_clip(WIDE)
    lowered = jax.jit(lambda params, x: getattr(nnx.merge(graphdef, params), encode)(x)).lower(
        params, inputs(WIDE)[tower]
    )
    assert 1 < lowered.cost_analysis()["flops"] / B / forward_flops(WIDE)[tower] < 1.04


@pytest.mark.parametrize(
    "name, visual, text",
    [
        ("ViT-S-32-alt", 2.29, 1.27),
        ("ViT-B-32", 8.82, 5.96),
        ("ViT-B-16", 35.13, 5.96),
        ("ViT-L-14-336", 381.92, 13.3),
        ("ViT-g-14", 534.06, 47.09),
        ("ViT-bigG-14", 967.5, 97.86),
    ],
)
def test_gflops_of_open_clip(name, visual, text):
    """Columns image_gflops and text_gflops of docs/model_profile.csv in open_clip; rounded there."""
    forward = forward_flops(preset(name))
    assert [forward["visual"] / 1e9, forward["text"] / 1e9] == pytest.approx([visual, text], abs=0.006)


def test_the_loss_has_three_products():
    """B^2 D multiply-adds each for the whole batch."""
    assert 32 * loss_flops_per_sample(32, 8) == 3 * 2 * 32**2 * 8


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"locked": ("image",)}, "unknown tower 'image': use 'visual', 'text'"),
        ({"patch_dropout": 1.0}, "patch_dropout is 1.0: give a share"),
        ({"patch_dropout": -0.1}, "patch_dropout is -0.1: give a share"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        step_flops_per_sample(SMALL, **settings)
