"""Low precision, large scales, degenerate rows, and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import features, rectangle, relative_errors, value_and_gradients

from disco_jax.losses import contrastive_loss, dense_contrastive_loss, dense_sigmoid_loss, sigmoid_loss

FORMS = {
    "disco": {"method": "disco", **rectangle("8")},
    "block": {"method": "block", **rectangle("2x4")},
    "chunked": {"method": "chunked", "chunk": 8, **rectangle("8")},
    "chunked 4x2": {"method": "chunked", "chunk": 4, **rectangle("4x2")},
}
forms = pytest.mark.parametrize("form", FORMS)


def float64_reference(dense, *args):
    with jax.enable_x64(True):
        return value_and_gradients(dense, *(jnp.asarray(np.asarray(x, np.float64)) for x in args))


SIGMOID = {"chunk": 8, **rectangle("8")}


def loss_and_reference(form, scale):
    """A loss, its dense form, its division over devices, and its scalars."""
    if form == "sigmoid":
        return sigmoid_loss, dense_sigmoid_loss, SIGMOID, (jnp.float32(scale), jnp.float32(-10))
    return contrastive_loss, dense_contrastive_loss, FORMS[form], (jnp.float32(scale),)


@pytest.mark.parametrize("form", [*FORMS, "sigmoid"])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 1e-2), (jnp.float16, 1e-3)])
def test_low_precision_features_keep_float32_logits(form, dtype, tolerance):
    """The value is that of float32 arithmetic on the rounded features; the gradients have the features' type."""
    images, texts = features(128, dtype=dtype)
    loss, dense, division, scalars = loss_and_reference(form, scale=60)
    value, gradients = value_and_gradients(loss, images, texts, *scalars, **division)
    expected_value, expected = float64_reference(dense, images, texts, *scalars)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients[:2]] == [dtype, dtype]
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    errors = relative_errors(gradients, expected)
    assert max(errors[:2]) < tolerance and max(errors[2:]) < 1e-5


@pytest.mark.parametrize("form", [*FORMS, "sigmoid"])
def test_well_learnt_pairs_in_bfloat16(form):
    """The error of a positive, 1 + 1 - 2 or 1 - 1, is taken before it is rounded: what is left is small, and right."""
    images, _ = features(64, D=64, dtype=jnp.bfloat16)
    loss, dense, division, scalars = loss_and_reference(form, scale=20 if form == "sigmoid" else 10)
    _, gradients = value_and_gradients(loss, images, images, *scalars, **division)
    _, expected = float64_reference(dense, images, images, *scalars)
    assert max(relative_errors(gradients, expected)) < 1e-2


def test_float16_gradients_below_its_range_come_through_a_large_cotangent():
    """As loss scaling has it; SigLIP's gradients are made before the cotangent is known."""
    images, texts = features(64, dtype=jnp.float16)
    args = images, texts, jnp.float32(1e-3), jnp.float32(0)
    _, (got, *_) = value_and_gradients(sigmoid_loss, *args, cotangent=2.0**16, **rectangle("8"))
    wide = images.astype(jnp.float32), texts.astype(jnp.float32), *args[2:]
    _, (expected, *_) = value_and_gradients(dense_sigmoid_loss, *wide, cotangent=2.0**16)
    assert np.abs(expected).max() / 2.0**16 < 6e-5  # where float16 loses digits
    assert relative_errors([got], [expected])[0] < 2e-3


def test_the_scale_keeps_its_own_type():
    images, texts = features(8, dtype=jnp.float32)
    value, (_, _, gradient) = value_and_gradients(contrastive_loss, images, texts, jnp.bfloat16(14), **rectangle("8"))
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16


@forms
@pytest.mark.parametrize("scale", [100, 1000])
def test_identical_rows(form, scale):
    """All similarities are 1, so the loss is ln B and the features' gradients vanish."""
    row = features(1, dtype=jnp.float32)[0]
    same = jnp.tile(row, (64, 1))
    value, gradients = value_and_gradients(contrastive_loss, same, same, jnp.float32(scale), **FORMS[form])
    np.testing.assert_allclose(value, np.log(64), rtol=1e-6 * scale)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=2e-6 * scale)


@forms
@pytest.mark.parametrize("scale", [100, 1000])
@pytest.mark.parametrize("sign", [1, -1], ids=["random", "opposite"])
def test_large_scales(form, scale, sign):
    """Opposite pairs have logits down to -scale: shifted by the scale alone, they underflow to an infinite loss."""
    images, texts = features(16, dtype=jnp.float32)
    texts = texts if sign == 1 else -images
    value, gradients = value_and_gradients(contrastive_loss, images, texts, jnp.float32(scale), **FORMS[form])
    expected_value, expected = float64_reference(dense_contrastive_loss, images, texts, scale)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert max(relative_errors(gradients, expected)) < 1e-6 * scale


@forms
@pytest.mark.parametrize("scale", [100, 1000])
def test_a_zero_row(form, scale):
    images, texts = features(16, dtype=jnp.float32)
    images, texts = images.at[3].set(0), texts.at[9].set(0)
    value, gradients = value_and_gradients(contrastive_loss, images, texts, jnp.float32(scale), **FORMS[form])
    expected_value, expected = float64_reference(dense_contrastive_loss, images, texts, scale)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert max(relative_errors(gradients, expected)) < 1e-6 * scale


@forms
@pytest.mark.parametrize("bad, row", [(np.nan, 5), (np.inf, 5), (-np.inf, 12)])
def test_a_nan_or_infinite_feature_is_not_hidden(form, bad, row):
    images, texts = features(16, dtype=jnp.float32)
    images = images.at[row, 2].set(bad)
    value, (image_gradient, text_gradient, _) = value_and_gradients(
        contrastive_loss, images, texts, jnp.float32(10), **FORMS[form]
    )
    assert np.isnan(value) if np.isnan(bad) else not np.isfinite(value)
    assert np.isnan(image_gradient[row]).all() and np.isnan(text_gradient).any()


def test_sigmoid_of_large_logits_and_of_nan():
    images, texts = features(16, dtype=jnp.float32)
    args = images, texts, jnp.float32(1000), jnp.float32(-10)
    value, gradients = value_and_gradients(sigmoid_loss, *args, **SIGMOID)
    expected_value, expected = float64_reference(dense_sigmoid_loss, *args)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert max(relative_errors(gradients, expected)) < 1e-4
    value, (gradient, *_) = value_and_gradients(sigmoid_loss, images.at[5, 2].set(jnp.nan), *args[1:], **SIGMOID)
    assert np.isnan(value) and np.isnan(gradient[5]).all()
