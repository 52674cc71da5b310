"""Each optimizer against its plain formula in NumPy, and the schedules at chosen steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from disco_jax.training.config import ConfigError, default_config, validate
from disco_jax.training.optimizer import make_optimizer, make_schedule

NAMES = ("adamw", "lion", "adafactor")
LAYERS, IN, OUT = 3, 130, 140  # large enough to be factored; layers never are


def settings(**changes):
    config = default_config().optimizer
    config.update(learning_rate=0.1, warmup_steps=4, **changes)
    return config


def tree(seed, layers=LAYERS):
    """A stacked kernel and bias, an unstacked kernel too small to be factored, and a gain."""
    rng = np.random.default_rng(seed)
    return {
        "blocks": {"kernel": rng.normal(size=(layers, IN, OUT)), "bias": rng.normal(size=(layers, OUT))},
        "projection": {"kernel": rng.normal(size=(2, 3))},
        "ln": {"scale": rng.normal(size=(4,))},
    }


def on_device(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def updates_of(optimizer, params, gradients):
    """The updates after each of some gradients, of parameters that stay as they are."""
    params = on_device(params)
    state, history = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(on_device(gradient), state, params)
        history.append(updates)
    return history


def adamw(gradients, config):
    mean, square = 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        root = np.sqrt(square / (1 - config.beta2**step))
        yield mean / (1 - config.beta1**step) / (root + config.eps)


def lion(gradients, config):
    mean = 0.0
    for gradient in gradients:
        yield np.sign(config.beta1 * mean + (1 - config.beta1) * gradient)
        mean = config.beta2 * mean + (1 - config.beta2) * gradient


def adafactor(gradients, config):
    rows, columns, square, mean = 0.0, 0.0, 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        decay = min(0.999, 1 - step**-0.8)
        if gradient.shape[-2:] == (IN, OUT):  # of each layer by itself
            rows = decay * rows + (1 - decay) * np.mean(gradient**2, axis=-1, keepdims=True)
            columns = decay * columns + (1 - decay) * np.mean(gradient**2, axis=-2, keepdims=True)
            square = rows * columns / np.mean(rows, axis=-2, keepdims=True)
        else:
            square = decay * square + (1 - decay) * gradient**2
        mean = config.beta1 * mean + (1 - config.beta1) * gradient / np.sqrt(square)
        yield mean


FORMULAS = {"adamw": adamw, "lion": lion, "adafactor": adafactor}


@pytest.mark.parametrize(
    "changes",
    [{"name": name} for name in NAMES]
    + [{"name": name, "beta1": 0.5, "beta2": 0.75, "eps": 0.1} for name in NAMES]
    + [{"name": "adafactor", "beta1": 0.0}],
    ids=str,
)
def test_updates_are_those_of_the_formula(changes):
    config = settings(weight_decay=0.3, **changes)
    params, gradients = tree(0), [tree(seed) for seed in (1, 2, 3)]
    history = updates_of(make_optimizer(config), params, gradients)

    def check(path, param, *leaves):
        wanted = list(FORMULAS[config.name](leaves[:3], config))
        decay = 0.3 * param if path[-1].key == "kernel" else 0.0
        for update, direction in zip(leaves[3:], wanted, strict=True):
            np.testing.assert_allclose(update, -(direction + decay), rtol=1e-4, atol=1e-5)

    jax.tree_util.tree_map_with_path(check, params, *gradients, *history)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_of_matrices_alone_and_not_part_of_the_moments(name):
    params, zeros = tree(0), jax.tree.map(np.zeros_like, tree(0))
    for updates in updates_of(make_optimizer(settings(name=name, weight_decay=0.5)), params, [zeros, zeros]):
        for group in ("blocks", "projection"):
            np.testing.assert_allclose(updates[group]["kernel"], -0.5 * params[group]["kernel"], rtol=1e-6)
        assert not np.any(updates["blocks"]["bias"]) and not np.any(updates["ln"]["scale"])


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_tree_is_updated_as_in_the_whole(name):
    optimizer = make_optimizer(settings(name=name))
    params, gradient = tree(0), tree(1)
    (whole,) = updates_of(optimizer, params, [gradient])
    (part,) = updates_of(optimizer, {"blocks": params["blocks"]}, [{"blocks": gradient["blocks"]}])
    jax.tree.map(np.testing.assert_array_equal, part, {"blocks": whole["blocks"]})


@pytest.mark.parametrize("name", NAMES)
def test_the_global_norm_is_clipped_before(name):
    params, gradients = tree(0), [tree(1), optax.tree.scale(10.0, tree(2))]
    clipped = [optax.tree.scale(1 / optax.tree.norm(gradient), gradient) for gradient in gradients]
    wanted = updates_of(make_optimizer(settings(name=name, eps=0.1)), params, clipped)
    updates = updates_of(make_optimizer(settings(name=name, eps=0.1, grad_clip=1.0)), params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), updates, wanted)


def test_adafactor_factors_each_layer_by_itself():
    optimizer = make_optimizer(settings(name="adafactor"))
    params, gradient = tree(0), tree(1)
    (stacked,) = updates_of(optimizer, params, [gradient])
    (single,) = updates_of(
        optimizer, {"kernel": params["blocks"]["kernel"][1]}, [{"kernel": gradient["blocks"]["kernel"][1]}]
    )
    np.testing.assert_allclose(stacked["blocks"]["kernel"][1], single["kernel"], rtol=1e-5)


def test_adafactor_goes_on_forgetting_in_long_runs():
    optimizer = make_optimizer(settings(name="adafactor"))
    params = {"scale": jnp.ones(4)}
    late = optax.tree.set(optimizer.init(params), count=100_000)
    _, state = optimizer.update({"scale": jnp.full(4, 2.0)}, late, params)
    np.testing.assert_allclose(optax.tree.get(state, "v")["scale"], 0.001 * 2.0**2, rtol=1e-4)


def state_shapes(params, **changes):
    optimizer = make_optimizer(settings(**changes))
    shapes = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in params.items()}
    return jax.eval_shape(optimizer.init, shapes)


def test_the_biases_of_many_layers_are_not_factored():
    state = state_shapes({"bias": (48, 1664)}, name="adafactor")
    assert optax.tree.get(state, "v")["bias"].shape == (48, 1664)


def test_adafactor_keeps_no_second_moment_of_the_size_of_a_kernel():
    kernel = {"kernel": (12, 768, 3072)}

    def copies(**changes):
        leaves = jax.tree.leaves(state_shapes(kernel, **changes))
        assert {leaf.dtype for leaf in leaves} <= {jnp.dtype("float32"), jnp.dtype("int32")}
        return sum(leaf.size for leaf in leaves) / (12 * 768 * 3072)

    assert copies(name="adamw") == pytest.approx(2, rel=1e-3)
    assert copies(name="lion") == pytest.approx(1, rel=1e-3)
    assert copies(name="adafactor") == pytest.approx(1 + 1 / 768 + 1 / 3072, rel=1e-5)
    assert copies(name="adafactor", beta1=0.0) == pytest.approx(1 / 768 + 1 / 3072, rel=1e-3)


def rates(steps, total_steps=20, **changes):
    """The same of a traced step and of a Python int."""
    schedule = make_schedule(settings(**changes), total_steps)
    values = [float(schedule(step)) for step in steps]
    traced = jax.jit(lambda steps: jax.lax.map(schedule, steps))(jnp.asarray(steps, jnp.int32))
    np.testing.assert_allclose(values, traced, rtol=1e-6, atol=1e-9)
    return values


@pytest.mark.parametrize(
    ("schedule", "warm"),
    [
        ("cosine", [0.1, 0.05, 0.0, 0.0]),
        ("constant", [0.1, 0.1, 0.1, 0.1]),
        ("rsqrt", [0.1, 0.1 / 3, 0.1 / 17**0.5, 0.1 / 19**0.5]),
    ],
)
def test_schedules_at_chosen_steps(schedule, warm):
    changes = {"schedule": schedule, "rsqrt_timescale": 1}
    values = rates([0, 1, 3, 4, 12, 20, 22], **changes)
    np.testing.assert_allclose(values, [0.0, 0.025, 0.075, *warm], rtol=1e-5, atol=1e-9)

    # The last 8 steps times a line: 12 is the last whole one, 16 half of it, 20 the end.
    values, cooled = (rates([2, 4, 11, 12, 13, 16, 19, 20, 22], cooldown_steps=n, **changes) for n in (0, 8))
    factors = [1, 1, 1, 1, 7 / 8, 1 / 2, 1 / 8, 0, 0]
    np.testing.assert_allclose(cooled, np.multiply(values, factors), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "rsqrt"])
def test_without_warm_up_the_first_step_has_the_full_rate(schedule):
    config = settings(schedule=schedule)
    config.warmup_steps = 0
    assert float(make_schedule(config, 20)(0)) == pytest.approx(0.1)


def test_the_cosine_is_that_of_optax():
    expected = optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 20)
    assert rates(range(22)) == [float(expected(step)) for step in range(22)]


def test_rsqrt_falls_to_half_after_three_timescales():
    assert rates([3004, 8004], 10_000, schedule="rsqrt", rsqrt_timescale=1000) == pytest.approx([0.05, 0.1 / 3])


def test_rsqrt_is_finite_inside_a_warm_up_longer_than_its_timescale():
    with jax.debug_nans(True):
        assert rates([0, 2], schedule="rsqrt", rsqrt_timescale=1) == pytest.approx([0.0, 0.05])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("name", "sgd", "config.optimizer.name='sgd' is unknown: use one of adamw, lion, adafactor"),
        ("schedule", "linear", "config.optimizer.schedule='linear' is unknown: use one of cosine, constant, rsqrt"),
        ("cooldown_steps", -1, "config.optimizer.cooldown_steps=-1 must be at least 0"),
        ("rsqrt_timescale", 0, "config.optimizer.rsqrt_timescale=0 must be at least 1"),
        (
            "cooldown_steps",
            8001,
            "config.optimizer.warmup_steps=2000 and cooldown_steps=8001 are more than config.total_steps=10000: "
            "shorten one of them or lengthen the run",
        ),
    ],
)
def test_settings_that_cannot_be_run_are_named(name, value, message):
    config = default_config()
    config.data.train = "shards/*.tar"
    config.optimizer[name] = value
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert str(error.value) == message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["cosine", "constant", "rsqrt"])
def test_every_pair_of_names_is_valid(name, schedule):
    config = default_config()
    config.data.train = "shards/*.tar"
    config.optimizer.update(name=name, schedule=schedule, beta1=0.0, cooldown_steps=8000)
    validate(config)
    make_optimizer(config.optimizer)
    make_schedule(config.optimizer, config.total_steps)


def test_unknown_names_are_not_taken_for_the_default():
    with pytest.raises(ValueError, match="optimizer 'sgd' is unknown: use one of adamw, lion, adafactor"):
        make_optimizer(settings(name="sgd"))
    with pytest.raises(ValueError, match="schedule 'linear' is unknown: use one of cosine, constant, rsqrt"):
        make_schedule(settings(schedule="linear"), 20)
