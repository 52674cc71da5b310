"""Every form of the losses against the dense formulas in float64: value and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference import MESHES, assert_equal, features, rectangle, relative_errors, value_and_gradients

from disco_jax.losses import (
    contrastive_loss,
    dense_contrastive_loss,
    dense_sigmoid_loss,
    local_contrastive_loss,
    local_sigmoid_loss,
    sigmoid_loss,
)
from disco_jax.mesh import batch_sharding, make_mesh, replicated

SCALE, BIAS = 14.3, -3.7


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def scalars(*values):
    return tuple(jnp.asarray(value, jnp.float64) for value in values)


# Odd local batches, whose last tile is padded, and on some meshes even ones, whose tiles have no padding.
DIVISIONS = [(mesh, 5) for mesh in MESHES] + [("8", 8), ("4x2", 8)]
FORMS = [(method, *division) for method in ("chunked", "block") for division in DIVISIONS]
FORMS += [("disco", mesh, b) for mesh, b in DIVISIONS if "x" not in mesh]  # the paper's form has one dimension


@pytest.mark.parametrize("method, mesh, b", FORMS)
def test_contrastive(method, mesh, b):
    division = rectangle(mesh)
    chunk = 3 * MESHES[mesh][0] if method == "chunked" else None  # several tiles
    args = (*features(b * division["mesh"].size), *scalars(SCALE))
    assert_equal(contrastive_loss, dense_contrastive_loss, args, method=method, chunk=chunk, **division)


@pytest.mark.parametrize("mesh, b", DIVISIONS)
def test_sigmoid(mesh, b):
    division = rectangle(mesh)
    args = (*features(b * division["mesh"].size), *scalars(SCALE, BIAS))
    assert_equal(sigmoid_loss, dense_sigmoid_loss, args, chunk=3 * MESHES[mesh][0], **division)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mesh=st.sampled_from(list(MESHES)),
    b=st.integers(1, 12),
    D=st.integers(1, 9),
    chunk=st.none() | st.integers(1, 100),
    scale=st.floats(-2, 100),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    classes=st.none() | st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes_and_scales(mesh, b, D, chunk, scale, smoothing, classes, seed):
    division = rectangle(mesh)
    B = b * division["mesh"].size
    args = (*features(B, D, seed=seed), *scalars(scale))
    labels = None if classes is None else jnp.asarray(np.random.default_rng(seed).integers(0, classes, B))
    targets = {"label_smoothing": smoothing, "labels": labels}

    got = value_and_gradients(contrastive_loss, *args, chunk=chunk, **targets, **division)
    expected = value_and_gradients(dense_contrastive_loss, *args, **targets)
    # One class or one pair can make the gradient 0: an absolute error as large as rounding is none.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12), got, expected)


@pytest.mark.parametrize("mesh", ["1", "8", "4x2"])
@pytest.mark.parametrize("method", ["chunked", "block"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_and_smoothing(method, mesh, smoothing):
    """Labels of any integers."""
    division = rectangle(mesh)
    B = 5 * division["mesh"].size
    labels = jnp.asarray(np.random.default_rng(1).choice([-7, 0, 3, 4, 2**30], B))
    args = (*features(B), *scalars(SCALE))
    targets = {"labels": labels, "label_smoothing": smoothing}
    chunk = 3 * MESHES[mesh][0] if method == "chunked" else None
    given = {"method": method, "chunk": chunk, **division, **targets}
    assert_equal(contrastive_loss, dense_contrastive_loss, args, dense_settings=targets, **given)


@pytest.mark.parametrize("mesh", ["1", "8", "4x2"])
def test_sigmoid_with_labels(mesh):
    division = rectangle(mesh)
    B = 5 * division["mesh"].size
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 4, B))
    args = (*features(B), *scalars(SCALE, BIAS))
    given = {"labels": labels, "chunk": 3 * MESHES[mesh][0], **division}
    assert_equal(sigmoid_loss, dense_sigmoid_loss, args, dense_settings={"labels": labels}, **given)


def test_labels_all_different_are_no_labels():
    images, texts = features(16)
    division = rectangle("4x2")
    labels = jnp.asarray(np.random.default_rng(0).permutation(16))
    one, other = (contrastive_loss(images, texts, *scalars(SCALE), labels=x, **division) for x in (None, labels))
    np.testing.assert_allclose(one, other, rtol=1e-14)


GRID = [("a", 2), ("b", 2), ("c", 2)]


@pytest.mark.parametrize(
    "rows, cols, method",
    [
        (("a", "b", "c"), None, "chunked"),
        (("c", "a", "b"), None, "disco"),
        ("b", None, "chunked"),  # the others hold copies
        ("b", None, "disco"),
        (("a", "c"), "b", "chunked"),
        ("c", ("b", "a"), "chunked"),
        ("c", ("b", "a"), "block"),
    ],
)
def test_rows_and_cols_are_any_axes_of_the_mesh(rows, cols, method):
    args = (*features(24), *scalars(SCALE))
    assert_equal(
        contrastive_loss, dense_contrastive_loss, args, mesh=make_mesh(GRID), rows=rows, cols=cols, method=method
    )


@pytest.mark.parametrize("method", ["chunked", "block", "disco"])
def test_in_a_larger_loss_with_the_gradient_of_the_log_scale(method):
    """As the training step has it: exp of the parameter outside, other terms beside, value_and_grad under jit."""
    division = rectangle("8" if method == "disco" else "2x4")
    images, texts = features(40)

    def total(loss):
        return lambda i, t, log_scale: 3 * loss(i, t, jnp.exp(log_scale)) + jnp.sum(i * t)

    args = images, texts, jnp.asarray(2.66)
    sharding = batch_sharding(division["mesh"])
    value, gradients = jax.jit(
        jax.value_and_grad(total(lambda *a: contrastive_loss(*a, method=method, **division)), argnums=(0, 1, 2)),
        in_shardings=(sharding, sharding, replicated(division["mesh"])),
    )(*args)
    expected_value, expected = jax.jit(jax.value_and_grad(total(dense_contrastive_loss), argnums=(0, 1, 2)))(*args)
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    assert max(relative_errors(gradients, expected)) < 1e-12
    assert gradients[0].sharding.is_equivalent_to(sharding, 2)


def test_without_jit_on_unplaced_and_on_placed_features():
    division = rectangle("2x2")
    images, texts = features(12)
    expected = dense_contrastive_loss(images, texts, *scalars(SCALE))
    for pair in ((images, texts), jax.device_put((images, texts), batch_sharding(division["mesh"]))):
        np.testing.assert_allclose(contrastive_loss(*pair, *scalars(SCALE), **division), expected, rtol=1e-12)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize("types", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_meshes_whose_axes_are_explicit(types):
    """As jax.make_mesh makes them by default; on one device, or divided otherwise, features are moved all the same."""
    mesh = jax.make_mesh((2, 4), ("rows", "cols"), axis_types=types)
    args = (*features(24), *scalars(SCALE))
    labels = jnp.arange(24) // 3
    given = {"mesh": mesh, "rows": "rows", "cols": "cols", "labels": labels}
    assert_equal(contrastive_loss, dense_contrastive_loss, args, dense_settings={"labels": labels}, **given)
    placed = jax.device_put(args[0], NamedSharding(mesh, PartitionSpec(None, "rows")))
    expected = dense_contrastive_loss(*args, labels=labels)
    np.testing.assert_allclose(contrastive_loss(placed, *args[1:], **given), expected, rtol=1e-12)


@pytest.mark.parametrize("where_the_gradient_is_taken", ["outside", "inside"])
@pytest.mark.parametrize("method", ["chunked", "block", "disco"])
def test_the_core_inside_a_shard_map_of_the_users_own(method, where_the_gradient_is_taken):
    """Features made inside from a parameter that all devices share, on a mesh with an axis the loss doesn't know."""
    mesh = make_mesh([("data", 4), ("model", 2)])
    inputs, texts = features(12)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(16, 16)))
    log_scale = jnp.asarray(2.66)

    def local(weights, log_scale, inputs, texts):
        return local_contrastive_loss(inputs @ weights, texts, jnp.exp(log_scale), rows="data", method=method)

    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"))
    if where_the_gradient_is_taken == "inside":
        inner = jax.grad(local, argnums=(0, 1, 2))
        step = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=specs[:3])
    else:
        step = jax.grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()), argnums=(0, 1, 2))
    got = jax.jit(step)(weights, log_scale, inputs, texts)

    def dense(weights, log_scale, inputs, texts):
        return dense_contrastive_loss(inputs @ weights, texts, jnp.exp(log_scale))

    expected = jax.grad(dense, argnums=(0, 1, 2))(weights, log_scale, inputs, texts)
    assert max(relative_errors(got, expected)) < 1e-12


@pytest.mark.parametrize("shared", [None, "images", "texts", "scale"])
@pytest.mark.parametrize("method", ["chunked", "disco", "sigmoid"])
def test_a_loss_for_each_of_several_groups(method, shared):
    """An axis that the loss doesn't divide: each group of devices has its own loss, of its own or of shared inputs."""
    mesh = make_mesh([("group", 2), ("data", 4)])
    divided = {"images": "data", "texts": "data", "scale": None}
    inputs = dict(zip(divided, (*features(24), jnp.array([SCALE, 3.1])), strict=True))
    specs = {name: PartitionSpec(("group", axis) if axis else "group") for name, axis in divided.items()}
    if shared is not None:
        inputs[shared] = inputs[shared][: len(inputs[shared]) // 2]
        specs[shared] = PartitionSpec(divided[shared])

    def local(images, texts, scale):
        if method == "sigmoid":
            return local_sigmoid_loss(images, texts, scale[0], BIAS, rows="data")[None]
        return local_contrastive_loss(images, texts, scale[0], rows="data", method=method)[None]

    def dense(*inputs):
        losses = []
        for group in (0, 1):
            images, texts, scale = (
                x if name == shared else jnp.split(x, 2)[group] for name, x in zip(specs, inputs, strict=True)
            )
            if method == "sigmoid":
                losses.append(dense_sigmoid_loss(images, texts, scale[0], BIAS))
            else:
                losses.append(dense_contrastive_loss(images, texts, scale[0]))
        return sum(losses)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs.values()), out_specs=PartitionSpec("group"))
    got = jax.jit(jax.grad(lambda *a: mapped(*a).sum(), argnums=(0, 1, 2)))(*inputs.values())
    expected = jax.grad(dense, argnums=(0, 1, 2))(*inputs.values())
    assert max(relative_errors(got, expected)) < 1e-12


def test_the_core_on_one_device_needs_no_mesh():
    images, texts = features(13)
    args = images, texts, *scalars(SCALE)
    assert_equal(local_contrastive_loss, dense_contrastive_loss, args, rows=(), chunk=4)
    assert_equal(local_sigmoid_loss, dense_sigmoid_loss, (*args, *scalars(BIAS)), rows=(), chunk=4)
