import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from disco_jax.training import ConfigError, default_config
from disco_jax.training.config import differences, model_config, smoke_config, validate

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_data(**changes):
    config = default_config()
    config.data.train = "shards/*.tar"
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_starts_with_its_command(path):
    module = load(path)
    config = module.get_config()
    config.data.train = config.data.train or "shards/*.tar"
    validate(config)
    assert module.__doc__.startswith(("python train.py --config configs/" + path.name, "make "))
    assert path.name in module.__doc__
    smoke = smoke_config(config)
    validate(smoke)
    assert smoke.total_steps == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", -1, "config.seed=-1"),
        ("mesh", (("data", "8"),), "pairs of a name and a size, such as"),
        ("mesh", (("model", 8),), r"config.mesh=\(\('model', 8\),\) must have an axis 'rows'"),
        ("mesh", (("cols", 8),), "must have an axis 'rows'"),
        ("mesh", (), "must have an axis 'rows'"),
        ("mesh", ("rows", 8), "pairs of a name and a size"),
        ("mesh", (("rows", True),), "pairs of a name and a size"),
        ("data.source", "tfds", "config.data.tfds_name is not set"),
        ("eval.templates", ("a photo",), r"'a photo' has no \{\}"),
        ("batch_size", 0, "config.batch_size=0 must be at least 1"),
        ("total_steps", 2000, "warmup_steps=2000 must be smaller than config.total_steps=2000"),
        ("optimizer.warmup_steps", 20_000, "shorten the warm-up"),
        ("optimizer.warmup_steps", -1, "at least 0"),
        ("optimizer.learning_rate", float("nan"), "positive number"),
        ("optimizer.beta2", 1.0, r"\[0, 1\)"),
        ("optimizer.grad_clip", 0.0, "positive number"),
        ("data.source", "webdataset", "use one of tars, tfds, scenes, folder"),
        ("data.source", "folder", "config.data.source='folder' has no captions to train on"),
        ("data.train", "", "config.data.train is empty"),
        ("data.crop_scale", (0.9, 1.2), "crop_scale"),
        ("data.crop_ratio", (2.0, 1.0), "crop_ratio"),
        ("loss.method", "ring", "config.loss: loss method 'ring' is unknown: use one of chunked, block, disco"),
        ("loss.name", "siglip", "use one of contrastive, sigmoid"),
        ("loss.chunk", 0, "config.loss: chunk=0 must be a whole number of at least 1"),
        ("loss.label_smoothing", 1.5, r"config.loss: label_smoothing=1.5 must be a number in \[0, 1\]"),
        ("model.name", "ViT-B-23", "ViT-B-32"),
        ("model.dtype", "float16", "bfloat16"),
        ("on_nonfinite", "ignore", "stop, skip"),
        ("checkpoint.keep_last", 0, "at least 1"),
        ("cpu_devices", 0, "at least 1"),
        ("batch_size", 2**30, "config.batch_size=1073741824 must be at most 1073741823"),
        ("seed", 2**32, "config.seed=4294967296 must be at most"),
        ("optimizer.weight_decay", float("inf"), "weight_decay=inf must be a finite number"),
        ("microbatch", 0, "config.microbatch=0 must be at least 1"),
        ("sharding", "zero3", "use one of replicated, zero1, fsdp"),
        ("stream_inputs", True, "config.stream_inputs=True needs config.microbatch"),
        ("model.remat", "all", "use one of none, dots, full"),
        ("model.attention", "flash", "use one of auto, xla, cudnn"),
        ("model.patch_dropout", 1.0, r"patch_dropout=1.0 must lie in \[0, 1\)"),
        ("ema_decay", 1.0, "config.ema_decay=1.0 must lie between 0 and 1"),
        ("eval.ema", True, "config.eval.ema=True needs a running average: set config.ema_decay"),
    ],
)
def test_wrong_values_are_named(name, value, message):
    with pytest.raises(ValueError, match=message) as error:
        validate(with_data(**{name: value}))
    if name == "mesh":
        with pytest.raises(ConfigError, match=message):
            smoke_config(with_data(mesh=value))
    assert "\n" not in str(error.value)


def test_wandb_missing_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'disco-jax\[wandb\]'"):
        validate(with_data(**{"log.wandb_project": "p"}))


def test_unknown_and_missing_settings_are_named():
    config = ConfigDict(with_data().to_dict())
    config.data.treads = 3
    with pytest.raises(
        ConfigError, match=r"unknown setting config\.data\.treads: did you mean config\.data\.threads\?"
    ):
        validate(config)
    config = ConfigDict(with_data().to_dict())
    del config.seed
    with pytest.raises(ConfigError, match=r"config\.seed is missing"):
        validate(config)


def test_a_typo_in_a_config_file_is_an_error():
    with pytest.raises(AttributeError, match="treads"):
        default_config().data.treads = 3


def test_differences_name_what_changes_the_numbers():
    old, new = with_data(), with_data(seed=1)
    new.data.crop_scale = (0.5, 1.0)
    new.log.every_steps = 1
    new.data.threads = 3
    new.on_nonfinite = "skip"
    new.checkpoint.keep_last = 7
    # On other devices, or in other pieces, a run goes on.
    new.update(mesh=(("rows", 2),), sharding="zero1", microbatch=4, stream_inputs=True, prefetch=False)
    new.model.update(remat="full", attention="xla")
    old, new = (json.loads(config.to_json()) for config in (old, new))
    assert differences(old, new) == ["config.data.crop_scale: [0.9, 1.0] -> [0.5, 1.0]", "config.seed: 0 -> 1"]
    assert differences(old, old) == []


@pytest.mark.parametrize("changes", [{"method": "disco"}, {"label_smoothing": 0.1}])
def test_settings_of_another_loss_are_refused(changes):
    config = with_data(**{"loss.name": "sigmoid"})
    config.loss.update(changes)
    with pytest.raises(ConfigError, match=r"method and label_smoothing are for the contrastive loss"):
        validate(config)


@pytest.mark.parametrize("mesh, smoke", [(None, None), ((("cols", 8), ("rows", 8)), (("cols", 2), ("rows", 1)))])
def test_smoke_keeps_the_axes_of_the_mesh(mesh, smoke):
    assert smoke_config(with_data(mesh=mesh)).mesh == smoke


def test_the_sigmoid_loss_starts_as_siglip():
    config = with_data(**{"model.name": "tiny", "loss.name": "sigmoid"})
    model = model_config(config, vocab_size=100, eot_id=99)
    assert (model.init_logit_scale, model.init_logit_bias) == (math.log(10), -10)


def test_model_config_takes_sizes_of_the_run_and_the_tokenizer():
    config = with_data(**{"model.name": "tiny", "model.image_size": 48, "model.context_length": 20})
    model = model_config(config, vocab_size=100, eot_id=99)
    assert (model.vision.image_size, model.text.context_length) == (48, 20)
    assert (model.text.vocab_size, model.text.eot_id) == (100, 99)


def test_locking_both_towers_is_refused():
    with pytest.raises(ConfigError, match="leave nothing to train"):
        validate(with_data(lock_image=True, lock_text=True))


def test_a_smoke_run_keeps_what_decides_the_memory():
    changes = {"microbatch": 512, "stream_inputs": True, "sharding": "fsdp", "optimizer.cooldown_steps": 500}
    smoke = smoke_config(with_data(**changes))
    assert (smoke.microbatch, smoke.stream_inputs, smoke.sharding) == (4, True, "fsdp")
    validate(smoke)
