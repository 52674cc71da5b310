import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from disco_jax.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from disco_jax.models.patch_dropout import count_kept, draw_patches

VISION = VisionConfig(32, 8, 16, 1, 2, 32)  # 16 patches


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 16), (0.5, 8), (0.7, 4), (0.99, 1)])
def test_how_many_are_kept(rate, kept):
    assert count_kept(VISION, rate) == kept
    drawn = draw_patches(jax.random.key(0), jnp.arange(5), VISION, rate)
    assert drawn.shape == (5, kept)
    assert all(len(set(row)) == kept and set(row) <= set(range(16)) for row in drawn.tolist())


def test_a_samples_patches_follow_from_the_key_and_its_place():
    key = jax.random.key(0)
    all_of_them = np.asarray(draw_patches(key, jnp.arange(64), VISION, 0.5))
    np.testing.assert_array_equal(draw_patches(key, jnp.arange(8, 24), VISION, 0.5), all_of_them[8:24])
    assert (np.asarray(draw_patches(jax.random.key(1), jnp.arange(64), VISION, 0.5)) != all_of_them).any()
    # Every patch is kept about as often.
    counts = np.bincount(np.asarray(draw_patches(key, jnp.arange(2000), VISION, 0.5)).ravel(), minlength=16)
    assert (abs(counts - 1000) < 150).all()


def test_kept_patches_are_seen_with_their_positions():
    """With all patches kept, in any order, the features are those without patch dropout."""
    clip = CLIP(CLIPConfig(8, VISION, TextConfig(16, 1, 2, 32, 6, 50, 49)), rngs=nnx.Rngs(0))
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8))
    order = draw_patches(jax.random.key(0), jnp.arange(3), VISION, 0.0)
    assert (np.asarray(order) != np.arange(16)).any()
    whole = clip.encode_image(images)
    np.testing.assert_allclose(clip.encode_image(images, kept_patches=order), whole, rtol=1e-4, atol=1e-5)
    assert jnp.abs(clip.encode_image(images, kept_patches=order[:, :8]) - whole).max() > 1e-3
