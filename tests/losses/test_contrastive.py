"""The DisCo loss against the dense formula: value, every gradient, types, collectives, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import config as jaxtyping_config

from disco_jax.losses import contrastive_loss, dense_contrastive_loss
from disco_jax.mesh import batch_sharding, make_mesh, replicated

DATA = make_mesh([("data", 8)])
GRID = make_mesh([("replica", 2), ("data", 4)])


def features(B, D=16, dtype=jnp.float64, seed=0):
    """Pairs that resemble each other a little, L2-normalised."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(B, D))
    texts = images + 2 * rng.normal(size=(B, D))
    return tuple(jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype) for x in (images, texts))


def value_and_gradients(loss, *args, cotangent=1.0, **settings):
    """The loss, and its gradients times `cotangent`, which is what the backward rule is given."""

    def weighted(*args):
        value = loss(*args, **settings)
        return cotangent * value, value

    gradients, value = jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(*args)
    return jax.device_get((value, gradients))


def relative_errors(got, want):
    pairs = [(np.asarray(g, np.float64), np.asarray(w, np.float64)) for g, w in zip(got, want, strict=True)]
    return [float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in pairs]


def assert_exact(B, mesh, rows):
    """Value and gradients of images, texts and scale against the dense formula, in float64."""
    with jax.enable_x64(True):
        args = (*features(B), jnp.float64(14.3))
        value, gradients = value_and_gradients(contrastive_loss, *args, cotangent=-2.5, mesh=mesh, rows=rows)
        expected_value, expected = value_and_gradients(dense_contrastive_loss, *args, cotangent=-2.5)
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    assert max(relative_errors(gradients, expected)) < 1e-12


@pytest.mark.parametrize("N, b", [(1, 7), (2, 3), (4, 8), (8, 1), (8, 5)])
def test_value_and_gradients_equal_the_dense_formula(N, b):
    assert_exact(N * b, make_mesh([("data", N)]), "data")


@pytest.mark.parametrize("rows", [("replica", "data"), ("data", "replica"), "replica"])
def test_rows_are_any_axes_of_the_mesh(rows):
    assert_exact(24, GRID, rows)


def test_the_gradient_of_the_log_scale_goes_through_a_larger_loss():
    """As the training step has it: exp of the parameter outside, other terms beside, value_and_grad under jit."""
    with jax.enable_x64(True):
        images, texts = features(40)

        def total(loss):
            return lambda i, t, log_scale: 3 * loss(i, t, jnp.exp(log_scale)) + jnp.sum(i * t)

        args = images, texts, jnp.asarray(2.66)
        value, gradients = jax.jit(
            jax.value_and_grad(total(lambda *a: contrastive_loss(*a, mesh=DATA)), argnums=(0, 1, 2)),
            in_shardings=(batch_sharding(DATA), batch_sharding(DATA), replicated(DATA)),
        )(*args)
        expected_value, expected = jax.jit(jax.value_and_grad(total(dense_contrastive_loss), argnums=(0, 1, 2)))(*args)
        np.testing.assert_allclose(value, expected_value, rtol=1e-12)
        assert max(relative_errors(gradients, expected)) < 1e-12
        assert gradients[0].sharding.is_equivalent_to(batch_sharding(DATA), 2)


def test_without_jit_on_unplaced_and_on_placed_features():
    mesh = make_mesh([("data", 2)])
    images, texts = features(6, dtype=jnp.float32)
    expected = dense_contrastive_loss(images, texts, jnp.float32(14.3))
    for pair in ((images, texts), jax.device_put((images, texts), batch_sharding(mesh))):
        np.testing.assert_allclose(contrastive_loss(*pair, jnp.float32(14.3), mesh=mesh), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 1e-2), (jnp.float16, 1e-3)])
def test_low_precision_features_keep_float32_logits(dtype, tolerance):
    """The value is that of float32 arithmetic on the rounded features; the gradients have the features' type."""
    images, texts = features(128, dtype=dtype)
    scale = jnp.float32(60.0)
    value, gradients = value_and_gradients(contrastive_loss, images, texts, scale, mesh=DATA)
    expected_value, expected = value_and_gradients(
        dense_contrastive_loss, images.astype(jnp.float32), texts.astype(jnp.float32), scale
    )
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [dtype, dtype, jnp.float32]
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    errors = relative_errors(gradients, expected)
    assert max(errors[:2]) < tolerance and errors[2] < 1e-5


def test_the_scale_keeps_its_own_type():
    images, texts = features(8, dtype=jnp.float32)
    value, (_, _, scale_gradient) = value_and_gradients(contrastive_loss, images, texts, jnp.bfloat16(14), mesh=DATA)
    assert value.dtype == jnp.float32 and scale_gradient.dtype == jnp.bfloat16


def test_identical_rows_at_scale_100():
    """All similarities are 1, so the loss is ln B and the features' gradients vanish."""
    row = features(1, dtype=jnp.float32)[0]
    same = jnp.tile(row, (64, 1))
    value, gradients = value_and_gradients(contrastive_loss, same, same, jnp.float32(100), mesh=DATA)
    np.testing.assert_allclose(value, np.log(64), rtol=1e-5)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=2e-4)


def test_opposite_pairs_at_scale_100():
    """Logits of -100 for the positives and up to 100 elsewhere: a fixed shift by the scale would underflow."""
    images, _ = features(16, dtype=jnp.float32)
    value, gradients = value_and_gradients(contrastive_loss, images, -images, jnp.float32(100), mesh=DATA)
    with jax.enable_x64(True):
        args = images.astype(jnp.float64), -images.astype(jnp.float64), jnp.float64(100)
        expected_value, expected = value_and_gradients(dense_contrastive_loss, *args)
    assert expected_value > 100
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert max(relative_errors(gradients, expected)) < 1e-4


def walk(jaxpr):
    """All equations of a jaxpr, those inside calls and shard_maps too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from walk(inner)


def test_two_gathers_the_psums_and_no_square_of_the_batch():
    B, D = 64, 4
    images, texts = features(B, D, dtype=jnp.float32)
    scale = jnp.float32(14.3)

    def loss(*args):
        return contrastive_loss(*args, mesh=DATA)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    equations = list(walk(step.trace(images, texts, scale).jaxpr.jaxpr))
    names = [equation.primitive.name for equation in equations]
    assert sum(name.startswith("all_gather") for name in names) == 2
    # the loss and, in the backward rule, the scale's gradient and the inter-device parts of images and of texts
    assert sorted(e.outvars[0].aval.shape for e in equations if e.primitive.name.startswith("psum")) == [
        (), (), (B, D), (B, D)
    ]  # fmt: skip
    assert sum(name == "shard_map" for name in names) == 2
    shapes = {v.aval.shape for e in equations for v in [*e.invars, *e.outvars] if hasattr(v.aval, "shape")}
    assert (B // 8, B) in shapes and (B, B) not in shapes

    placed = jax.device_put((images, texts), NamedSharding(DATA, PartitionSpec("data")))
    compiled = step.lower(*placed, scale).compile().as_text()
    assert len(re.findall(r" all-gather(?:-start)?\(", compiled)) == 2
    assert re.search(r" all-reduce(?:-start)?\(", compiled)
    assert not re.search(r" (all-to-all|collective-permute)(?:-start)?\(", compiled)
    assert f"[{B // 8},{B}]" in compiled and f"[{B},{B}]" not in compiled


@pytest.fixture
def untyped():
    """Without the tests' run-time signatures, as users call it."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


I8, T8 = np.ones((8, 4), np.float32), np.ones((8, 4), np.float32)
SCALE = np.float32(14.3)


@pytest.mark.parametrize(
    "images, texts, scale, message",
    [
        (I8, T8[:4], SCALE, r"one shape \(B, D\): got float32\[8, 4\] and float32\[4, 4\]"),
        (I8[0], T8[0], SCALE, r"one shape \(B, D\): got float32\[4\] and"),
        (I8[:0], T8[:0], SCALE, r"got float32\[0, 4\] and"),
        (I8.astype(np.int32), T8.astype(np.int32), SCALE, r"one floating-point type: got int32\[8, 4\] and"),
        (I8.astype(np.float16), T8, SCALE, r"one floating-point type: got float16\[8, 4\] and float32\[8, 4\]"),
        (I8, T8, np.ones(1, np.float32), r"logit_scale must be a floating-point scalar: got float32\[1\]"),
        (I8, T8, np.int32(14), r"logit_scale must be a floating-point scalar: got int32\[\]"),
    ],
)
def test_refused_features(untyped, images, texts, scale, message):
    for loss in (lambda *a: contrastive_loss(*a, mesh=DATA), dense_contrastive_loss):
        with pytest.raises(ValueError, match=message) as error:
            loss(images, texts, scale)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"method": "walk"}, "loss method 'walk' is unknown: use 'disco'"),
        ({"cols": "model"}, "cols='model', use None"),
        ({"rows": "model"}, r"rows=\('model',\) must be different axes of the mesh, which has \('data',\)"),
        ({"rows": ("data", "data")}, "must be different axes"),
        ({"rows": ()}, "must be different axes"),
    ],
)
def test_refused_settings(untyped, settings, message):
    with pytest.raises(ValueError, match=message):
        contrastive_loss(I8, T8, SCALE, mesh=DATA, **settings)


def test_refused_batch(untyped):
    with pytest.raises(ValueError, match=r"a batch of 6 does not divide over the 8 devices of .*: use a multiple of 8"):
        contrastive_loss(I8[:6], T8[:6], SCALE, mesh=DATA)
