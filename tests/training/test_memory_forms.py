"""Microbatches, streamed inputs and divided state change no number: each form of the step against the plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny_program import MODEL, B, batch, fast_jit, first_state, make, run

from disco_jax.hlo import read_program
from disco_jax.mesh import make_mesh
from disco_jax.models import CLIPConfig, TextConfig, VisionConfig
from disco_jax.sharding import divided_dims, gather, partition_specs, shardings, total
from disco_jax.training.compiled import compile_step

# 16 patches, of which patch dropout leaves 8.
PATCHES = CLIPConfig(8, VisionConfig(16, 4, 16, 2, 2, 32), TextConfig(16, 2, 2, 32, 6, 56, 49))
FORMS = {
    "microbatch of 1": {"microbatch": 1},
    "microbatch of 2": {"microbatch": 2, "model__remat": "full"},
    "two devices, microbatch of 4": {"devices": 2, "microbatch": 4},
    "two devices, microbatch of 16": {"devices": 2, "microbatch": 16},
    "rectangle": {"cols": 2, "microbatch": 2, "sharding": "zero1"},
    "zero1": {"sharding": "zero1"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp, dots": {"sharding": "fsdp", "microbatch": 2, "model__remat": "dots"},
    "streamed": {"stream_inputs": True, "microbatch": 2},
    "streamed, whole": {"stream_inputs": True, "model__remat": "full"},
    "streamed, fsdp, rectangle": {"stream_inputs": True, "microbatch": 1, "sharding": "fsdp", "cols": 2},
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
    program = make(model=PATCHES, batch_size=32, **{"model__dtype": "float64", "model__patch_dropout": 0.5} | changes)
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
def plain():
    return first_step()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_plain_step(in_float64, form):
    loss, gradients = first_step(**FORMS[form])
    expected_loss, expected = plain()
    assert loss == pytest.approx(expected_loss, rel=1e-13)
    for (path, value), wanted in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(value - wanted) / np.linalg.norm(wanted)
        # A key's bias moves no softmax: its gradient is zero.
        assert error < 1e-12, (jax.tree_util.keystr(path), error)
    scale = gradients["logit_scale"]
    assert abs(scale) > 1e-6  # counted, and below once
    assert scale == pytest.approx(expected["logit_scale"], rel=1e-12)


def test_patch_dropout_changes_the_loss_and_from_step_to_step(in_float64):
    whole, _ = first_step(model__patch_dropout=0.0)
    assert abs(whole - plain()[0]) > 1e-3
    program = make(1, model=PATCHES, batch_size=8, model__patch_dropout=0.5, optimizer__learning_rate=1e-30)
    _, history = run(program, [batch(0, 8, PATCHES)] * 2)
    assert history[0]["loss"] != history[1]["loss"]


def test_float32_training_is_the_same_to_rounding():
    batches = [batch(seed) for seed in range(3)]
    _, plain = run(make(), batches)
    for changes in ({"microbatch": 1}, {"sharding": "zero1"}, {"sharding": "fsdp"}, {"stream_inputs": True}):
        _, history = run(make(**changes), batches)
        for one, other in zip(plain, history, strict=True):
            np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5, err_msg=str(changes))
            np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-4, err_msg=str(changes))


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


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"all-reduce"}),
        ({"sharding": "zero1"}, {"reduce-scatter", "all-gather", "all-reduce"}),
        ({"sharding": "fsdp"}, {"reduce-scatter", "all-gather", "all-reduce"}),
    ],
)
def test_golden_collectives(changes, kinds):
    """Gradients travel once however many microbatches there are, but under fsdp."""

    def calls(**more):
        (stage,) = compile_step(make(loss__method="disco", **changes, **more)).stages.values()
        return read_program(stage.compiled.as_text()).collectives

    whole, pieces = calls(), calls(microbatch=1)
    assert kinds <= {collective.kind for collective in whole}
    moved = [sum(c.bytes * c.calls for c in collectives) for collectives in (whole, pieces)]
    if changes.get("sharding") == "fsdp":
        assert moved[0] < moved[1]
    else:
        assert moved[0] == moved[1]
