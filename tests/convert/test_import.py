"""Golden weights of open_clip and transformers: their features, exact round trips, and files that cannot be read."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from disco_jax import convert
from disco_jax.convert.__main__ import main
from disco_jax.convert.layout import flatten

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("open_clip_gelu", "open_clip_quickgelu", "hf_clip")


@pytest.fixture
def source(tmp_path):
    """Makes a copy of golden weights as they come: a file without a config, or a folder; and the flags for it."""

    def copy(name):
        folder = tmp_path / f"golden_{name}"
        folder.mkdir()
        meta = json.loads((GOLDEN / f"{name}.json").read_text())
        if name == "hf_clip":
            shutil.copy(GOLDEN / "hf_clip.json", folder / "config.json")
            shutil.copy(GOLDEN / "hf_clip.safetensors", folder / "model.safetensors")
            return folder, {}
        shutil.copy(GOLDEN / f"{name}.safetensors", folder)
        activation = "quickgelu" if meta["quick_gelu"] else "gelu"
        heads = {f"{tower}_heads": meta[tower]["heads"] for tower in ("vision", "text")}
        return folder / f"{name}.safetensors", {"activation": activation} | heads

    return copy


def change(path, **tensors):
    """Puts tensors into a file, by names with "__" for the dots; None takes one out."""
    held = safetensors.numpy.load_file(path)
    held |= {name.replace("__", "."): value for name, value in tensors.items()}
    safetensors.numpy.save_file({name: value for name, value in held.items() if value is not None}, path)


def assert_same(one, other):
    one, other = flatten(one.params), flatten(other.params)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype == np.float32
        np.testing.assert_array_equal(value.view(np.int32), other[name].view(np.int32), err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_features_equal_the_originals(source, name):
    path, flags = source(name)
    clip = convert.load(path, **flags).clip()
    golden = np.load(GOLDEN / f"{name}.npz")
    images = jnp.asarray(golden["images_nchw"].transpose(0, 2, 3, 1))
    tokens = jnp.asarray(golden["tokens"].astype(np.int32))
    for got, want in (
        (clip.visual(images), golden["image_features"]),
        (clip.encode_text(tokens), golden["text_features"]),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["open_clip", "hf"])
def test_import_export_import_is_exact(source, tmp_path, monkeypatch, name, format):
    path, flags = source(name)
    first = convert.load(path, **flags)
    # The golden vocabulary is of no tokenizer.
    monkeypatch.setattr("disco_jax.convert.hugging_face.load_tokenizer", lambda _: SimpleNamespace(sot_id=97))
    main(["import", str(path), "--out", str(tmp_path / "ours"), *flag_arguments(flags)])
    out = tmp_path / ("exported.safetensors" if format == "open_clip" else "exported")
    main(["export", str(tmp_path / "ours"), "--format", format, "--out", str(out)])
    again = convert.load(out)
    assert again.model == first.model
    assert_same(first, again)
    if (format == "hf") == (name == "hf_clip"):
        held = [p if p.is_file() else p / "model.safetensors" for p in (path, out)]
        before, after = (safetensors.numpy.load_file(file) for file in held)
        assert before.keys() == after.keys()
        assert all(before[key].tobytes() == after[key].tobytes() for key in before)


def flag_arguments(flags):
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_custom_text_names_and_openai_buffers(source, dtype):
    path, flags = source("open_clip_gelu")
    tensors = safetensors.numpy.load_file(path)
    halved = {name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()}
    safetensors.numpy.save_file(halved, path)
    loaded = convert.load(path, **flags)
    assert_same(loaded, convert.load(path, **flags))
    np.testing.assert_array_equal(
        loaded.params["visual"]["class_embedding"], halved["visual.class_embedding"].astype("f4")
    )

    text = {name: value for name, value in tensors.items() if not name.startswith("visual.") and name != "logit_scale"}
    change(path, **{name.replace(".", "__"): None for name in text})
    change(path, **{f"text__{name.replace('.', '__')}": value for name, value in text.items()})
    change(path, **{name.replace(".", "__"): tensors[name] for name in tensors if name not in text})
    numbers = {"input_resolution": 32, "context_length": 13, "vocab_size": 99}
    change(path, **{name: np.array(number) for name, number in numbers.items()})
    heads = {name: value for name, value in flags.items() if name != "activation"}
    openai = convert.load(path, **heads)
    assert openai.model.activation == "quickgelu"
    assert "OpenAI" in openai.notes[0] and "--activation" in openai.notes[0]
    change(path, vocab_size=np.array(98))
    with pytest.raises(ValueError, match="vocab_size is not the 99"):
        convert.load(path, **heads)


def test_a_torch_file_without_torch_names_the_extra(source, monkeypatch):
    path, _ = source("open_clip_gelu")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'disco-jax\[torch\]'"):
        convert.load(path.rename(path.with_suffix(".pt")))


BLOCK = "visual__transformer__resblocks__1__mlp__c_fc__weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"visual__ln_post__bias": None}, r"lacks the tensor 'visual\.ln_post\.bias'"),
        ({"visual__ls_1__gamma": np.ones(32, "f4")}, r"holds the tensor 'visual\.ls_1\.gamma', .*no place"),
        ({"extra": np.ones(1, "f4"), "more": np.ones(1, "f4")}, r"'extra' \(and 1 others\)"),
        ({BLOCK: np.ones((128, 31), "f4")}, r"resblocks\.1\.mlp\.c_fc\.weight' has shape \(128, 31\).*\(128, 32\)"),
        ({BLOCK: np.ones((128, 32), "f8")}, r"c_fc\.weight' is float64: save it as float32"),
        ({"visual__conv1__weight": None}, r"no ViT CLIP of open_clip: it lacks the tensor 'visual\.conv1\.weight'"),
        ({"visual__proj": np.ones(3, "f4")}, r"'visual\.proj' must have 2 dimensions"),
        ({"attn_mask": np.zeros((13, 13), "f4")}, "attn_mask is not that of a causal text tower"),
        ({"logit_bias": np.zeros(1, "f4")}, r"'logit_bias' has shape \(1,\), the model needs \(\)"),
    ],
)
def test_a_wrong_tensor_is_named(source, tensors, message):
    path, flags = source("open_clip_gelu")
    change(path, **tensors)
    with pytest.raises(ValueError, match=message):
        convert.load(path, **flags)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "siglip"}, "type 'siglip': only 'clip'"),
        ({"vision_config": {"hidden_act": "relu"}}, "vision_config.hidden_act is 'relu'"),
        ({"text_config": {"layer_norm_eps": 1e-6}}, "text_config.layer_norm_eps is 1e-06"),
        ({"vision_config": {"num_hidden_layers": 3}}, r"lacks the tensor 'vision_model\.encoder\.layers\.2\.self_attn"),
        ({"vision_config": {"image_size": 64}}, r"position_embedding\.weight' has shape \(17, 32\).*\(65, 32\)"),
        ({"text_config": {"num_attention_heads": 5}}, "width 24 does not divide into 5 heads"),
        ({"text_config": {"eos_token_id": [1, 2]}}, r"eos_token_id is \[1, 2\]"),
        ({"text_config": 7}, "no config of a CLIPModel"),
    ],
)
def test_a_wrong_config_of_hugging_face_is_named(source, settings, message):
    folder, _ = source("hf_clip")
    config = json.loads((folder / "config.json").read_text())
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        convert.load(folder)


def test_old_configs_of_hugging_face_mean_the_largest_id(source):
    folder, _ = source("hf_clip")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    assert convert.load(folder).model.text.eot_id == 98


def test_images_normalised_otherwise_are_refused(source):
    folder, _ = source("hf_clip")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}))
    with pytest.raises(ValueError, match=r"image_mean is \[0.5, 0.5, 0.5\]"):
        convert.load(folder)


def test_positions_that_are_counted_and_files_in_parts(source):
    folder, _ = source("hf_clip")
    whole = convert.load(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["text_model.embeddings.position_ids"] = np.arange(13)[None]
    names = sorted(tensors)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(convert.load(folder), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere", "--out", "new"], "nowhere does not exist"),
        (["import", "empty", "--out", "new"], "empty is no folder with weights"),
        (["import", "text.safetensors", "--out", "new"], "cannot be read as a .safetensors file"),
        (["import", "text.json", "--out", "new"], "is of no known kind"),
        (["import", "text.safetensors", "--out", "full"], "full is there already"),
        (["export", "empty", "--format", "open_clip", "--out", "new.pt"], "must end in .safetensors"),
        (
            ["export", "empty", "--format", "open_clip", "--out", "full/new.safetensors"],
            "full/README.md is there already",
        ),
        (["export", "empty", "--format", "hf", "--out", "full"], "full is there already"),
        (["export", "empty", "--format", "hf", "--out", "new", "--ema"], "keep running averages"),
    ],
)
def test_wrong_commands_end_with_one_line_and_write_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README.md").write_text("mine")
    for name in ("text.safetensors", "text.json"):
        (tmp_path / name).write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("convert: ") and message in complaint and complaint.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / "README.md").read_text() == "mine"


def test_flags_for_what_a_config_says_are_refused(source):
    folder, _ = source("hf_clip")
    with pytest.raises(ValueError, match=r"activation is given, but config\.json says it already"):
        convert.load(folder, activation="gelu")


def test_sizes_of_a_preset_tell_its_heads():
    from disco_jax.convert import open_clip
    from disco_jax.convert.layout import abstract_params, unflatten
    from disco_jax.models import PRESETS

    for name in ("ViT-H-14", "ViT-S-32-alt", "ViT-bigG-14", "ViT-L-14-336"):
        zeros = {
            key: np.broadcast_to(np.float32(0), leaf.shape) for key, leaf in abstract_params(PRESETS[name]).items()
        }
        tensors = open_clip.LAYOUT.to_tensors(unflatten(zeros))
        model, notes = open_clip.model_of_shapes(
            tensors, name, activation=None, vision_heads=None, text_heads=None, openai=False, like=None
        )
        assert model == PRESETS[name]
        assert len(notes) == 3
        assert open_clip.preset_name(model) == name
