"""The step on 8 devices against plain formulas on one."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_program import MODEL, B, batch, fast_jit, first_state, make, run

from disco_jax.encoding import l2_normalize, make_graphdef
from disco_jax.losses import dense_contrastive_loss, dense_sigmoid_loss
from disco_jax.mesh import make_mesh
from disco_jax.training import step as step_module
from disco_jax.training.config import default_config
from disco_jax.training.optimizer import make_optimizer, make_schedule


def settings(**changes):
    config = default_config().optimizer
    config.update(warmup_steps=2, learning_rate=1e-2, **changes)
    return config


def params_of(**changes):
    return fast_jit(make(**changes).init)().params


@pytest.fixture(scope="module")
def three_steps():
    batches = [batch(seed) for seed in range(3)]
    return batches, run(make(), batches)


def test_loss_and_update_are_those_of_the_plain_formula(three_steps):
    batches, (state, history) = three_steps
    graphdef = make_graphdef(MODEL, jnp.float32)
    optimizer = make_optimizer(settings())
    params = params_of()
    opt_state = optimizer.init(params)

    @fast_jit
    def step(params, opt_state, learning_rate, images, tokens):
        def loss_fn(params):
            clip = nnx.merge(graphdef, params)
            return dense_contrastive_loss(
                l2_normalize(clip.encode_image(images)),
                l2_normalize(clip.encode_text(tokens)),
                jnp.exp(clip.logit_scale[...]),
            )

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updates = optax.tree.scale(learning_rate, updates)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    for rate, arrays, metrics in zip((0.0, 0.005, 0.01), batches, history, strict=True):
        params, opt_state, loss, norm = step(params, opt_state, rate, *arrays)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    # Over all parameters together: Adam blows up the rounding of single gradients that are almost zero.
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, jax.device_get(params)))
    assert difference < 1e-3 * optax.tree.norm(params)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_number_of_devices_changes_nothing(three_steps, devices):
    batches, (_, history) = three_steps
    _, other = run(make(devices), batches)
    for a, b in zip(history, other, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


def test_a_rectangle_of_devices_changes_no_number(three_steps):
    batches, (_, history) = three_steps
    _, (metrics,) = run(make(cols=2), batches[:1])
    np.testing.assert_allclose(metrics["loss"], history[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], history[0]["grad_norm"], rtol=1e-5)


GRID = {"rows": ("rows",), "cols": ("cols",)}
DEFAULTS = GRID | {"method": "chunked", "chunk": None, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("changes", "function", "given"),
    [
        ({}, "local_contrastive_loss", DEFAULTS),
        ({"chunk": 8}, "local_contrastive_loss", DEFAULTS | {"chunk": 8}),
        ({"method": "block"}, "local_contrastive_loss", DEFAULTS | {"method": "block"}),
        ({"label_smoothing": 0.1}, "local_contrastive_loss", DEFAULTS | {"label_smoothing": 0.1}),
        (
            {"method": "disco"},
            "local_contrastive_loss",
            DEFAULTS | {"rows": ("cols", "rows"), "cols": (), "method": "disco"},
        ),
        ({"name": "sigmoid", "chunk": 8}, "local_sigmoid_loss", GRID | {"chunk": 8}),
    ],
)
def test_the_settings_reach_the_loss(monkeypatch, changes, function, given):
    """All forms give the same number, which therefore cannot tell."""
    calls = []
    for name in ("local_contrastive_loss", "local_sigmoid_loss"):
        monkeypatch.setattr(step_module, name, lambda *args, name=name, **kwargs: calls.append((name, kwargs)))
    loss = default_config().loss
    loss.update(changes)
    features, scalars = jnp.ones((B, 8)), {"logit_scale": jnp.ones(()), "logit_bias": jnp.ones(())}
    mesh = make_mesh([("cols", 2), ("rows", 4)])
    inspect.unwrap(step_module.features_loss)(features, features, scalars, mesh=mesh, loss=loss)
    assert calls == [(function, given)]


def test_sigmoid_starts_and_trains_its_scale_and_bias():
    model = dataclasses.replace(MODEL, init_logit_scale=math.log(10), init_logit_bias=-10.0)
    batches = [batch(seed) for seed in range(3)]
    state, history = run(make(cols=2, model=model, loss__name="sigmoid"), batches)

    clip = nnx.merge(make_graphdef(model, jnp.float32), params_of(model=model))
    features = [
        encode(jnp.asarray(x)) for encode, x in zip((clip.encode_image, clip.encode_text), batches[0], strict=True)
    ]
    expected = dense_sigmoid_loss(*map(l2_normalize, features), jnp.float32(10), jnp.float32(-10))
    np.testing.assert_allclose(history[0]["loss"], expected, rtol=1e-5)
    assert [float(history[0][name]) for name in ("logit_scale", "logit_bias")] == pytest.approx([10, -10])
    assert float(state.params["logit_bias"]) == history[2]["logit_bias"] != -10


def test_learning_rate_warms_up_and_follows_a_cosine(three_steps):
    _, (state, history) = three_steps
    rates = [float(metrics["learning_rate"]) for metrics in history]
    np.testing.assert_allclose(rates, [0.0, 0.005, 0.01], rtol=1e-6)
    assert float(make_schedule(settings(), 10)(10)) == pytest.approx(0.0, abs=1e-9)
    assert int(state.step) == 3


@pytest.mark.parametrize(("start", "wanted"), [(10.0, 100.0), (-3.0, 1.0)])
def test_the_scale_is_clamped_after_the_update(start, wanted):
    program = make(2)
    state = first_state(program)
    state.params["logit_scale"] = jnp.full_like(state.params["logit_scale"], start)
    _, (metrics,) = run(program, [batch(0)], state)
    assert float(metrics["logit_scale"]) == pytest.approx(wanted, rel=1e-5)


def poisoned(program):
    state = first_state(program)
    projection = state.params["text"]["projection"]
    projection["kernel"] = projection["kernel"].at[0, 0].set(jnp.nan)
    return state


def test_a_nonfinite_update_can_be_skipped_and_the_schedule_goes_on():
    program = make(2, on_nonfinite="skip", ema_decay=0.5)
    kept, history = run(program, [batch(0), batch(1)], poisoned(program))
    assert not np.isfinite([metrics["loss"] for metrics in history]).any()
    assert int(kept.step) == 2
    assert float(history[1]["learning_rate"]) == pytest.approx(0.005)
    for tree in (kept.params, kept.ema):
        assert np.isfinite(tree["visual"]["projection"]["kernel"]).all()
    lost, _ = run(make(2), [batch(0)], poisoned(make(2)))
    assert np.isnan(lost.params["visual"]["projection"]["kernel"]).any()


def test_weight_decay_shrinks_matrices_alone():
    optimizer = make_optimizer(settings(weight_decay=0.5))
    params = params_of()

    @fast_jit
    def update_without_gradient(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, optimizer.init(params), params)[0]

    updates = update_without_gradient(params)
    blocks = updates["visual"]["transformer"]["blocks"]
    for matrix in (blocks["mlp"]["c_fc"]["kernel"], updates["text"]["token_embedding"]["embedding"]):
        assert np.any(matrix)
    for spared in (
        updates["visual"]["class_embedding"],
        updates["visual"]["position_embedding"],
        blocks["ln_1"]["scale"],
        updates["logit_scale"],
    ):
        assert not np.any(spared)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_number(three_steps, remat):
    batches, (_, history) = three_steps
    _, other = run(make(model__remat=remat), batches[:1])
    np.testing.assert_allclose(other[0]["loss"], history[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(other[0]["grad_norm"], history[0]["grad_norm"], rtol=1e-5)


def test_rematerialisation_keeps_less_of_a_block():
    params = make().abstract_state.params
    images = jax.ShapeDtypeStruct((64, 8, 8, 3), jnp.uint8)

    def saved(remat):
        graphdef = make_graphdef(MODEL, jnp.float32, remat=remat)
        _, backward = jax.eval_shape(
            lambda params, images: jax.vjp(lambda p: nnx.merge(graphdef, p).encode_image(images), params),
            params,
            images,
        )
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    none, dots, full = map(saved, ("none", "dots", "full"))
    assert full < 0.7 * dots and dots < 0.7 * none


def test_gradients_are_clipped_to_the_global_norm():
    gradients = {"kernel": jnp.array([[3.0, 4.0]])}
    first_moments = []
    for grad_clip in (None, 1.0, 10.0):
        optimizer = make_optimizer(settings(grad_clip=grad_clip))
        _, opt_state = optimizer.update(gradients, optimizer.init(gradients), gradients)
        first_moments.append(optax.tree.get(opt_state, "mu")["kernel"])
    unclipped = 0.1 * gradients["kernel"]
    np.testing.assert_allclose(first_moments, [unclipped, unclipped / 5, unclipped], rtol=1e-5)


def test_l2_normalize_keeps_a_zero_row_and_its_gradient_finite():
    rows = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(l2_normalize(rows), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: l2_normalize(x).sum())(rows)).all()
