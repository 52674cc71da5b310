"""Runs that start from weights: what is taken as it is, what is fitted, what is refused."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from tiny_program import MODEL, make

from disco_jax import convert
from disco_jax.convert.layout import abstract_params, flatten, unflatten
from disco_jax.convert.weights import Weights
from disco_jax.models import PRESETS
from disco_jax.training import ConfigError, default_config, train
from disco_jax.training.initial import PROJECTIONS, first_state, read_initial, resize_image_positions

BIGGER = dataclasses.replace(
    MODEL,
    vision=dataclasses.replace(MODEL.vision, image_size=16),
    text=dataclasses.replace(MODEL.text, context_length=9),
)


def write(path, model=MODEL, tokenizer=None):
    rng = np.random.default_rng(0)
    flat = {name: rng.normal(size=leaf.shape).astype("f4") for name, leaf in abstract_params(model).items()}
    weights = Weights(model, unflatten(flat), "random", tokenizer)
    convert.write(weights, path)
    return weights


def start(path, model=MODEL, **changes):
    program = make(model=model, init_from=str(path), **changes)
    initial = read_initial(program)
    return program, initial, first_state(program, initial)


def assert_equal(params, wanted, names=None):
    params, wanted = (traverse_util.flatten_dict(tree, sep=".") for tree in (params, wanted))
    for name in names or wanted:
        np.testing.assert_array_equal(params[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("sharding", ["replicated", "zero1", "fsdp"])
def test_the_first_state_has_the_weights_where_the_program_wants_them(tmp_path, sharding):
    weights = write(tmp_path / "weights")
    program, initial, state = start(tmp_path / "weights", sharding=sharding, ema_decay=0.9, lock_image=True)
    assert initial.notes == ()
    assert_equal(state.params, weights.params)
    assert_equal(state.ema, {name: group for name, group in weights.params.items() if name != "visual"})
    assert set(state.ema) == {"text", "logit_scale"}
    assert int(state.step) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted.sharding or pytest.fail(), state, program.abstract_state)
    assert_equal(first_state(program, None).params, jax.jit(program.init)().params)


@pytest.mark.parametrize(("old", "new"), [(MODEL, BIGGER), (BIGGER, MODEL)])
def test_other_image_sizes_and_context_lengths(tmp_path, old, new):
    weights = write(tmp_path / "weights", old)
    _, initial, state = start(tmp_path / "weights", new)
    positions = ["visual.position_embedding", "text.position_embedding"]
    assert_equal(state.params, weights.params, [name for name in flatten(weights.params) if name not in positions])
    assert [note.split(" resized ")[0] for note in initial.notes] == [
        "image position embeddings",
        "text position embeddings",
    ]
    visual, text = (state.params[tower]["position_embedding"] for tower in ("visual", "text"))
    before = weights.params["text"]["position_embedding"]
    np.testing.assert_array_equal(text[:6], before[:6])
    assert (np.asarray(text[6:]) == before[5]).all() if new is BIGGER else len(text) == 6
    np.testing.assert_array_equal(visual[0], weights.params["visual"]["position_embedding"][0])
    assert visual.shape == (1 + (new.vision.image_size // 4) ** 2, 16)

    # Texts that fit into both are encoded as before.
    tokens = jnp.asarray([[48, 5, 6, 49, 0, 0]])
    now = dataclasses.replace(weights, model=new, params=jax.device_get(state.params)).clip()
    np.testing.assert_allclose(now.encode_text(tokens), weights.clip().encode_text(tokens), rtol=1e-5)


def test_a_resized_square_of_positions_keeps_its_shape():
    x, y = np.meshgrid(np.arange(8.0), np.arange(8.0))
    square = np.stack([x, y, np.ones_like(x)], -1).reshape(64, 3).astype("f4")
    resized = resize_image_positions(np.concatenate([square[:1] - 7, square]), 17)
    np.testing.assert_array_equal(resized[0], square[0] - 7)
    grid = resized[1:].reshape(4, 4, 3)
    np.testing.assert_allclose(
        grid[1:3, 1:3, 0], [[2.5, 4.5], [2.5, 4.5]], atol=0.05
    )  # in the middle a plane stays one
    np.testing.assert_allclose(grid[..., 2], 1, atol=1e-6)
    np.testing.assert_allclose(grid[..., 0], grid[..., 1].T, atol=1e-6)


def test_projections_to_another_width_start_at_random(tmp_path):
    weights = write(tmp_path / "weights")
    program, initial, state = start(tmp_path / "weights", dataclasses.replace(MODEL, embed_dim=12))
    assert len(initial.notes) == 1 and "8 features, the model 12" in initial.notes[0]
    assert_equal(state.params, weights.params, flatten(weights.params).keys() - PROJECTIONS)
    assert_equal(state.params, jax.jit(program.init)().params, PROJECTIONS)


def test_the_bias_follows_the_loss(tmp_path):
    biased = dataclasses.replace(MODEL, init_logit_bias=-10.0)
    write(tmp_path / "plain")
    write(tmp_path / "biased", biased)
    _, initial, state = start(tmp_path / "plain", biased)
    assert float(state.params["logit_bias"]) == -10.0 and "the weights have none" in initial.notes[0]
    _, initial, state = start(tmp_path / "biased")
    assert "logit_bias" not in state.params and "left out" in initial.notes[0]


def test_a_file_that_does_not_say_heads_and_activation_has_the_models(tmp_path):
    text = dataclasses.replace(MODEL.text, eot_id=MODEL.text.vocab_size - 1)
    model = dataclasses.replace(MODEL, activation="quickgelu", text=text)
    write(tmp_path / "weights", model)
    out = convert.export(tmp_path / "weights", tmp_path / "weights.safetensors")[0]
    out.with_suffix(".json").unlink()
    _, initial, _ = start(out, model)
    assert [note.split(";")[0] for note in initial.notes] == [
        "activation: quickgelu, as config.model has",
        "vision heads: 2, as config.model has",
        "text heads: 2, as config.model has",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"layers": 3}}, r"vision\.layers is 3, of the weights 2"),
        ({"vision": {"patch_size": 8}}, r"vision\.patch_size is 8, of the weights 4"),
        ({"text": {"heads": 4, "mlp_width": 48}}, r"text\.heads is 4, of the weights 2; text\.mlp_width is 48"),
        ({"activation": "quickgelu"}, "activation is quickgelu, of the weights gelu"),
    ],
)
def test_other_transformers_are_refused(tmp_path, changes, message):
    write(tmp_path / "weights")
    towers = {
        name: dataclasses.replace(getattr(MODEL, name), **c) for name, c in changes.items() if name != "activation"
    }
    model = dataclasses.replace(MODEL, **{**changes, **towers})
    with pytest.raises(ConfigError, match=message):
        read_initial(make(model=model, init_from=str(tmp_path / "weights")))


def test_a_missing_file_and_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.init_from: .*nowhere does not exist"):
        read_initial(make(init_from=str(tmp_path / "nowhere")))
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path / "weights", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer of its own: set config\.data\.tokenizer=.*tokenizer\.json"):
        read_initial(make(init_from=str(tmp_path / "weights")))


def test_a_locked_image_tower_stays_as_the_weights_have_it(tmp_path, monkeypatch, caplog):
    """LiT, from a run of ours; going on needs the weights no more."""
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(MODEL, embed_dim=16))
    config = default_config()
    config.update(batch_size=16, total_steps=2, cpu_devices=8)
    config.model.update(name="tiny", dtype="float32", context_length=16)
    config.data.update(source="scenes", train="train", threads=2)
    config.optimizer.update(warmup_steps=1, learning_rate=1e-2)
    config.checkpoint.every_steps = 2
    train(config, tmp_path / "first")
    first = convert.load(tmp_path / "first")

    config.update(lock_image=True, init_from=str(tmp_path / "first"), total_steps=4)
    with caplog.at_level(logging.INFO, logger="absl"):
        train(config, tmp_path / "tuned")
    assert f"Started from the weights of {tmp_path / 'first'}" in caplog.text
    (tmp_path / "first").rename(tmp_path / "moved")
    config.update(total_steps=6, resume_changed=True)
    train(config, tmp_path / "tuned")
    tuned = convert.load(tmp_path / "tuned")
    assert tuned.step == 6
    assert_equal(tuned.params["visual"], first.params["visual"])
    assert all(
        (now != before).any()
        for now, before in zip(*map(jax.tree.leaves, (tuned.params["text"], first.params["text"])), strict=True)
    )
    config.init_from = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
