"""Microbatches, streamed inputs and divided state change no number: each form of the step against the plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny_program import batch, fast_jit, first_state, make, run

from disco_jax.hlo import read_program
from disco_jax.models import CLIPConfig, TextConfig, VisionConfig
from disco_jax.training import compiled, streaming
from disco_jax.training.compiled import compile_step
from disco_jax.training.program import averaged
from disco_jax.training.stages import device_bytes

# 16 patches, of which patch dropout leaves 8.
PATCHES = CLIPConfig(8, VisionConfig(16, 4, 16, 2, 2, 32), TextConfig(16, 2, 2, 32, 6, 56, 49))
SIGMOID = dataclasses.replace(PATCHES, init_logit_scale=np.log(10), init_logit_bias=-10.0)
LOCKED = {"model": SIGMOID, "loss__name": "sigmoid", "lock_text": True}
FORMS = {
    "two devices, microbatch of 4": {"devices": 2, "microbatch": 4},
    "two devices, microbatch of 16": {"devices": 2, "microbatch": 16},
    "full": {"microbatch": 2, "model__remat": "full"},
    "zero1, rectangle": {"cols": 2, "microbatch": 2, "sharding": "zero1"},
    "fsdp, dots": {"sharding": "fsdp", "microbatch": 2, "model__remat": "dots"},
    "streamed": {"stream_inputs": True, "microbatch": 2},
    "streamed, fsdp, rectangle": {"stream_inputs": True, "microbatch": 1, "sharding": "fsdp", "cols": 2},
    "streamed, zero1, locked": {"stream_inputs": True, "microbatch": 4, "sharding": "zero1", "devices": 4, **LOCKED},
}


def exact_attention(query, key, value, *, is_causal, implementation):
    """jax's softmax is float32 in float64 attention too."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    if is_causal:
        logits = jnp.where(jnp.tri(query.shape[1], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)


def float64(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, tree)


def first_step(**changes):
    """Loss and gradients in float64, half of the patches dropped: Adam's first moments are a tenth of the gradients."""
    defaults = {"model": PATCHES, "batch_size": 32, "model__dtype": "float64", "model__patch_dropout": 0.5}
    program = make(**defaults | changes)
    state = jax.eval_shape(float64, program.abstract_state)
    state = jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        state,
        program.abstract_state,
    )
    init = program.init
    program = dataclasses.replace(program, abstract_state=state)
    start = fast_jit(lambda: float64(init()), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))()
    state, (metrics,) = run(program, [batch(0, 32, PATCHES)], start)
    return metrics["loss"], optax.tree.get(state.opt_state, "mu")


@pytest.fixture
def in_float64(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", exact_attention)
    with jax.enable_x64(True):
        yield


@functools.cache
def plain(locked):
    return first_step(**(LOCKED if locked else {}))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_plain_step(in_float64, form):
    loss, gradients = first_step(**FORMS[form])
    expected_loss, expected = plain("locked" in form)
    assert loss == pytest.approx(expected_loss, rel=1e-13)
    for (path, value), wanted in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(value - wanted) / np.linalg.norm(wanted)
        # A key's bias moves no softmax: its gradient is zero.
        assert error < 1e-12, (jax.tree_util.keystr(path), error)
    scalars = {"logit_scale", "logit_bias"} & gradients.keys()
    assert len(scalars) == 1 + ("locked" in form) and ("text" in gradients) != ("locked" in form)
    for name in scalars:
        assert abs(gradients[name]) > 1e-6  # counted, and below once
        assert gradients[name] == pytest.approx(expected[name], rel=1e-12)


def test_other_patches_are_dropped_at_each_step():
    program = make(1, model=PATCHES, batch_size=8, model__patch_dropout=0.5, optimizer__learning_rate=1e-30)
    _, history = run(program, [batch(0, 8, PATCHES)] * 2)
    assert abs(history[0]["loss"] - history[1]["loss"]) > 1e-3


D = ("cols", "rows")
GOLDEN = {  # of the parameters under fsdp, and of the optimizer's moments under zero1 and fsdp
    "visual/class_embedding": (),
    "visual/position_embedding": (None, D),  # 5 x 16: the longest dimension that 8 divides
    "visual/patch_embedding/kernel": (D,),
    "visual/projection/kernel": (D,),
    "visual/ln_post/scale": (),
    "visual/transformer/blocks/attn/in_proj/kernel": (None, None, D),
    "visual/transformer/blocks/attn/in_proj/bias": (),
    "visual/transformer/blocks/attn/out_proj/kernel": (None, None, D),
    "visual/transformer/blocks/mlp/c_fc/kernel": (None, None, D),
    "visual/transformer/blocks/mlp/c_proj/kernel": (None, D),
    "text/token_embedding/embedding": (D,),
    "text/position_embedding": (None, D),
    "logit_scale": (),
}


@pytest.mark.parametrize("sharding", ["replicated", "zero1", "fsdp"])
def test_golden_shardings(sharding):
    state = make(cols=2, sharding=sharding, ema_decay=0.9).abstract_state

    def specs(tree):
        return {
            "/".join(str(key.key) for key in path): leaf.sharding.spec
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    divided = {name: PartitionSpec(*spec) for name, spec in GOLDEN.items()}
    whole = dict.fromkeys(GOLDEN, PartitionSpec())
    for tree, expected in (
        (state.params, divided if sharding == "fsdp" else whole),
        (optax.tree.get(state.opt_state, "mu"), whole if sharding == "replicated" else divided),
        (optax.tree.get(state.opt_state, "nu"), whole if sharding == "replicated" else divided),
        (state.ema, whole if sharding == "replicated" else divided),
    ):
        found = specs(tree)
        assert {name: found[name] for name in GOLDEN} == expected
    assert state.step.sharding.spec == PartitionSpec()


def traffic(**changes):
    (stage,) = compile_step(make(loss__method="disco", **changes)).stages.values()
    return read_program(stage.compiled.as_text()).by_kind


def test_gradients_travel_once_however_many_microbatches_there_are():
    whole, pieces = traffic(sharding="zero1"), traffic(sharding="zero1", microbatch=1)
    assert whole == pieces
    assert all(whole[kind].calls for kind in ("reduce-scatter", "all-gather", "all-reduce"))


def test_fsdp_keeps_no_kernel_for_the_backward_pass():
    """Two towers of two blocks of four kernels are gathered to encode, again with the replay, and again to go back."""
    found = traffic(sharding="fsdp", microbatch=1)
    assert found["all-gather"].calls >= 2 * (2 * 2 * 4) * 3
    assert found["reduce-scatter"].calls >= 2 * (2 * 2 * 4)


def test_the_peak_of_every_stage_holds_the_state():
    program = make(2, batch_size=32, microbatch=2, stream_inputs=True, lock_image=True)
    for stage in compile_step(program).stages.values():
        assert stage.peak >= device_bytes(program.abstract_state)


@pytest.mark.parametrize(
    "tower, changes",
    [
        ("visual", {"lock_image": True, "sharding": "fsdp"}),
        ("text", {"lock_text": True, "sharding": "zero1", "microbatch": 1, "stream_inputs": True}),
    ],
)
def test_a_locked_tower_stays_as_it_is(tower, changes):
    program = make(ema_decay=0.5, **changes)
    start = jax.device_get(first_state(program))
    state, history = run(program, [batch(0), batch(1)])
    for name in ("visual", "text"):
        moved = jax.tree.map(lambda a, b: np.any(a != b), start.params[name], state.params[name])
        assert any(jax.tree.leaves(moved)) == (name != tower)
    assert tower not in optax.tree.get(state.opt_state, "mu") and tower not in state.ema
    assert averaged(state)[tower] is state.params[tower]
    # Before the first update both towers are as without a lock.
    _, (free,) = run(make(), [batch(0)])
    assert history[0]["loss"] == pytest.approx(free["loss"], rel=1e-5)
    assert 0 < history[0]["grad_norm"] < free["grad_norm"]


def test_a_locked_tower_takes_no_memory_for_gradients():
    (locked,) = compile_step(make(1, batch_size=512, model=PATCHES, lock_image=True)).stages.values()
    (trained,) = compile_step(make(1, batch_size=512, model=PATCHES)).stages.values()
    temp = [stage.compiled.memory_analysis().temp_size_in_bytes for stage in (locked, trained)]
    assert temp[0] < 0.6 * temp[1]


def test_the_average_of_the_parameters():
    program = make(2, ema_decay=0.75)
    step, state = compile_step(program), first_state(program)
    expected = jax.device_get(state.params)
    for seed in range(3):
        state, _ = step(state, *batch(seed))
        expected = jax.tree.map(lambda ema, new: 0.75 * ema + 0.25 * np.asarray(new), expected, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.ema, expected)
    assert averaged(state)["text"] is state.ema["text"]


@pytest.mark.parametrize("locked", [False, True])
def test_never_more_than_two_microbatches_are_on_a_device(monkeypatch, locked):
    """One that is computed and one that travels, also where a stage or a step ends: what was waited for tells."""
    program = make(2, batch_size=32, microbatch=4, stream_inputs=True, lock_text=locked)
    step, state = compile_step(program), first_state(program)
    put, wait = streaming.global_array, jax.block_until_ready
    results, uses, calls, done, most = {}, [], 0, 0, 0  # calls run in order: when one is done, so are those before

    def counted_put(sharding, rows):
        nonlocal most
        if rows.ndim == 4:
            assert rows.shape == (8, 8, 8, 3)
            uses.append(calls + 1)  # by the next call
            most = max(most, sum(use > done for use in uses))
        return put(sharding, rows)

    def counted_call(compiled):
        def call(*args):
            nonlocal calls
            calls += 1
            out = compiled(*args)
            results.update((id(leaf), (leaf, calls)) for leaf in jax.tree.leaves(out))
            return out

        return call

    def counted_wait(leaf):
        nonlocal done
        done = max(done, results.get(id(leaf), (None, 0))[1])
        return wait(leaf)

    step.stages = {name: stage._replace(compiled=counted_call(stage.compiled)) for name, stage in step.stages.items()}
    monkeypatch.setattr(streaming, "global_array", counted_put)
    monkeypatch.setattr(jax, "block_until_ready", counted_wait)
    for seed in range(2):
        state, _ = step(state, *batch(seed, 32))
    assert len(uses) == 2 * 2 * 4 and calls == 2 * (4 + 1 + 4 + 1) and most == 2


def test_what_a_locked_tower_sees_travels_once(monkeypatch):
    program = make(2, batch_size=32, microbatch=4, stream_inputs=True, lock_image=True)
    step, state = compile_step(program), first_state(program)
    put, ranks = streaming.global_array, []
    monkeypatch.setattr(
        streaming, "global_array", lambda sharding, rows: ranks.append(rows.ndim) or put(sharding, rows)
    )
    step(state, *batch(0, 32))
    assert ranks.count(4) == 4 and ranks.count(2) == 8  # images, and tokens


@pytest.mark.parametrize("prefetch", [True, False])
def test_without_prefetch_a_batch_waits_for_the_step_before(monkeypatch, prefetch):
    program = make(2, prefetch=prefetch)
    step, state = compile_step(program), first_state(program)
    put, wait, events = compiled.global_array, jax.block_until_ready, []
    monkeypatch.setattr(compiled, "global_array", lambda *args: events.append("put") or put(*args))
    monkeypatch.setattr(jax, "block_until_ready", lambda leaf: events.append(leaf) or wait(leaf))
    step(state, *batch(0))
    assert events == ([] if prefetch else [state.step]) + ["put", "put"]


def test_microbatches_bound_the_activations():
    temp = {}
    for microbatch in (None, 16):
        (stage,) = compile_step(make(1, batch_size=256, model=PATCHES, microbatch=microbatch)).stages.values()
        temp[microbatch] = stage.compiled.memory_analysis().temp_size_in_bytes
    assert temp[16] < 0.3 * temp[None]
