"""Our own runs, exported: raw and averaged parameters, the card, and configs that only some formats can say."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from disco_jax import convert
from disco_jax.convert import open_clip
from disco_jax.convert.layout import abstract_params, flatten, unflatten
from disco_jax.convert.weights import Weights, read_weights
from disco_jax.models import PRESETS, CLIPConfig, TextConfig, VisionConfig
from disco_jax.training import default_config, train

MODEL = CLIPConfig(16, VisionConfig(16, 8, 16, 1, 2, 40), TextConfig(16, 1, 2, 56, context_length=24))


def random_weights(model):
    rng = np.random.default_rng(0)
    flat = {name: rng.normal(size=leaf.shape).astype("f4") for name, leaf in abstract_params(model).items()}
    return Weights(model, unflatten(flat), "random")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run with averages."""
    workdir = tmp_path_factory.mktemp("run") / "wörk dir"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", MODEL)
        config = default_config()
        config.update(batch_size=16, total_steps=4, cpu_devices=8, ema_decay=0.5)
        config.model.update(name="tiny", dtype="float32")
        config.data.update(source="scenes", train="train", eval="held_out", threads=2)
        config.optimizer.update(warmup_steps=1, learning_rate=1e-2)
        config.eval.batch_size = 200
        config.checkpoint.update(every_steps=2, keep_last=2)
        train(config, workdir)
        yield workdir


def test_raw_and_averaged_parameters_of_any_step(run):
    last, average = convert.load(run), convert.load(run, ema=True)
    assert (last.step, last.ema, average.step, average.ema) == (4, False, 4, True)
    early = convert.load(run / "checkpoints" / "2")
    assert early.step == 2
    names = flatten(last.params)
    assert names.keys() == abstract_params(MODEL).keys()
    assert all(isinstance(value, np.ndarray) for value in names.values())
    for other in (average, early):
        assert any((flatten(other.params)[name] != value).any() for name, value in names.items())


@pytest.mark.parametrize("ema", [False, True])
def test_an_export_says_what_it_is(run, tmp_path, ema):
    out = tmp_path / "new folder" / "demo.safetensors"
    written = convert.export(run, out, ema=ema)
    assert written == [out, out.with_name("README.md"), out.with_suffix(".json")]
    for name, value in flatten(convert.load(run, ema=ema).params).items():
        np.testing.assert_array_equal(value, flatten(convert.load(out).params)[name])
    assert convert.load(out).model == MODEL
    card = out.with_name("README.md").read_text()
    averages = "running averages of the parameters"
    assert (averages in card) is ema and "after 4 steps" in card
    for part in ("ema_decay = 0.5", "batches of 16 for 4 of 4 steps", "eval/image_to_text/R@1", "add_model_config"):
        assert part in card, part
    assert ("--ema" in card) is ema


def test_a_folder_for_transformers_is_whole(run, tmp_path):
    (out,) = convert.export(run, tmp_path / "hf", format="hf")
    assert {file.name for file in out.iterdir()} == {
        *("README.md", "config.json", "merges.txt", "model.safetensors", "preprocessor_config.json"),
        *("special_tokens_map.json", "tokenizer_config.json", "vocab.json"),
    }
    assert json.loads((out / "vocab.json").read_text())["<|endoftext|>"] == 49407
    assert not list(tmp_path.glob(".*"))


def test_runs_without_averages_or_checkpoints(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        convert.load(tmp_path)
    settings = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        convert.load(tmp_path)
    (tmp_path / "checkpoints" / "7").mkdir()
    with pytest.raises(ValueError, match="no checkpoint of a run, or is damaged"):
        convert.load(tmp_path)
    settings["model"]["context_length"] = 23
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "checkpoints" / "7").rmdir()
    (tmp_path / "checkpoints" / "4").symlink_to(run / "checkpoints" / "4")
    with pytest.raises(ValueError, match=r"another model than .* says: text\.position_embedding differs"):
        convert.load(tmp_path)


def test_a_bias_is_for_open_clip_alone(tmp_path):
    weights = random_weights(dataclasses.replace(MODEL, init_logit_bias=-10.0))
    convert.write(weights, tmp_path / "biased")
    with pytest.raises(ValueError, match=r"has no bias.*export it as open_clip"):
        convert.export(tmp_path / "biased", tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()
    out = convert.export(tmp_path / "biased", tmp_path / "biased.safetensors")[0]
    assert "logit_bias" in convert.load(out).params
    assert json.loads(out.with_suffix(".json").read_text())["init_logit_bias"] == -10


@pytest.mark.parametrize("name", PRESETS)
def test_open_clip_configs_say_all_of_a_model(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(open_clip.config_of_model(PRESETS[name])))
    assert open_clip.model_of_config(path) == PRESETS[name]


@pytest.mark.parametrize("mlp_width", range(40, 60))
def test_open_clip_configs_give_any_mlp_width_and_end_of_text(tmp_path, mlp_width):
    text = dataclasses.replace(MODEL.text, mlp_width=mlp_width, eot_id=17)
    model = dataclasses.replace(MODEL, text=text, vision=dataclasses.replace(MODEL.vision, mlp_width=mlp_width))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_cfg": open_clip.config_of_model(model)}))
    assert open_clip.model_of_config(path) == model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision_cfg": {"timm_model_name": "x"}}, r"vision_cfg\.timm_model_name='x' makes another model"),
        ({"text_cfg": {"hf_model_name": "x"}}, r"text_cfg\.hf_model_name='x'"),
        ({"vision_cfg": {"pool_type": "avg"}}, r"vision_cfg\.pool_type='avg'"),
        ({"text_cfg": {"width": None}}, "no model config of an open_clip ViT"),
        ({"preprocess_cfg": {"mean": [0, 0, 0]}}, r"mean is \[0, 0, 0\]"),
    ],
)
def test_open_clip_configs_of_other_models_are_refused(tmp_path, settings, message):
    config = open_clip.config_of_model(MODEL)
    for group, changes in settings.items():
        config[group] = config.get(group, {}) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        open_clip.model_of_config(path)


def test_a_damaged_folder_is_refused(tmp_path):
    convert.write(random_weights(MODEL), tmp_path / "ours")
    read = read_weights(tmp_path / "ours")
    assert read.model == MODEL and jax.tree.all(jax.tree.map(np.array_equal, read.params, random_weights(MODEL).params))
    path = tmp_path / "ours" / "model.json"
    about = json.loads(path.read_text())
    about["model"]["vision"]["layers"] = 2
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"'visual\.transformer\.blocks\..*' has shape \(1, .*needs \(2, "):
        convert.load(tmp_path / "ours")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"model\.json is damaged"):
        convert.load(tmp_path / "ours")
