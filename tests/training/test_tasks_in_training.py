"""Evaluation tasks of a run: at their steps, under their names, and checked before anything is compiled."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ml_collections import ConfigDict

from disco_jax.data.scenes import Scenes, write_scenes
from disco_jax.data.shards import write_tar
from disco_jax.evaluation.tasks import eval_task
from disco_jax.models import PRESETS, CLIPConfig, TextConfig, VisionConfig
from disco_jax.training import ConfigError, default_config, train
from disco_jax.training.config import smoke_config, validate
from disco_jax.training.metrics import read_history
from disco_jax.training.setup import prepare

MODEL = CLIPConfig(16, VisionConfig(16, 8, 16, 1, 2, 32), TextConfig(16, 1, 2, 32, context_length=24))


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", MODEL)
    config = default_config()
    config.update_from_flattened_dict(
        {
            "batch_size": 16,
            "total_steps": 6,
            "cpu_devices": 8,
            "model.name": "tiny",
            "model.dtype": "float32",
            "data.source": "scenes",
            "data.train": "train",
            "data.threads": 2,
            "optimizer.warmup_steps": 1,
            "optimizer.schedule": "constant",
            "eval.batch_size": 16,
            "checkpoint.every_steps": 100,
            "checkpoint.keep_last": 1,
        }
    )
    return config


def steps_of(workdir, metric):
    return [row["step"] for row in read_history(workdir) if metric in row]


def test_tasks_run_at_their_steps_and_at_the_end_and_rank_checkpoints(config, tmp_path):
    write_scenes(tmp_path / "data", {"held_out": 23}, side=16)
    tars = {"split": f"{tmp_path}/data/held_out-*.tar", "index_cache": str(tmp_path / "index")}
    config.data.update(source="tars", label="cls", index_cache=str(tmp_path / "index"))
    config.data.update(train=tars["split"], eval=tars["split"])
    classes = str(tmp_path / "data" / "classes.txt")
    config.eval.update(classes=classes, every_steps=3)
    config.eval.tasks.shapes = eval_task("zero-shot", classes=classes, every_steps=2, **tars)
    config.eval.tasks.pairs = eval_task("retrieval", **tars)
    config.eval.tasks.files = eval_task("embed", part_size=10, every_steps=0, **tars)
    config.checkpoint.best_metric = "shapes/top1"
    metrics = train(config, tmp_path / "run")

    run = tmp_path / "run"
    assert steps_of(run, "eval/image_to_text/R@1") == [3, 6]
    assert steps_of(run, "shapes/top1") == [2, 4, 6]
    assert steps_of(run, "pairs/text_to_image/R@10") == [3, 6]
    assert steps_of(run, "files/rows") == [6]
    assert metrics["files/rows"] == 23
    for name, value in metrics.items():  # the same data and model as the built-in evaluation
        if name.startswith("eval/"):
            assert metrics[name.replace("eval/zero_shot/", "shapes/").replace("eval/", "pairs/")] == value
    assert sorted(path.name for path in (run / "embed" / "files" / "step_6" / "img_emb").iterdir()) == [
        f"img_emb_{i}.npy" for i in range(3)
    ]
    assert set(json.loads((run / "config.json").read_text())["eval"]["tasks"]) == {"shapes", "pairs", "files"}
    # Saved at the steps of the task that ranks them, not at those of the evaluation; kept are the last and the best.
    scores = {row["step"]: row["shapes/top1"] for row in read_history(run) if "shapes/top1" in row}
    kept = {int(path.name) for path in (run / "checkpoints").iterdir()}
    assert 6 in kept <= scores.keys() and max(scores[step] for step in kept) == max(scores.values())

    # Tasks change no number of training, so a run may go on under others; what is embedded again replaces the files.
    (run / "embed" / "files" / "step_6" / "img_emb" / "img_emb_0.npy").write_bytes(b"of other parameters")
    del config.eval.tasks.shapes
    config.checkpoint.best_metric = "eval/image_to_text/R@1"
    again = train(config, run)
    assert again == {name: value for name, value in metrics.items() if not name.startswith("shapes/")}
    assert np.load(run / "embed" / "files" / "step_6" / "img_emb" / "img_emb_0.npy").shape == (10, 16)


def test_a_task_that_fails_costs_no_steps(config, tmp_path):
    scenes = (Scenes("held_out", side=16)[i] for i in range(20))
    write_tar(tmp_path / "held_out-0.tar", [replace(scene, label=i // 19) for i, scene in enumerate(scenes)])
    (tmp_path / "classes.txt").write_text("a name\n")  # the last example's label has none
    config.eval.tasks.shapes = eval_task(
        "zero-shot",
        split=f"{tmp_path}/held_out-*.tar",
        classes=str(tmp_path / "classes.txt"),
        index_cache=str(tmp_path / "index"),
        every_steps=2,
    )
    with pytest.raises(ConfigError, match=r"config\.eval\.tasks\.shapes cannot be evaluated: labels holds 1"):
        train(config, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


def wrong(name="shapes", kind="zero-shot", **changes):
    return lambda tasks: tasks.update({name: eval_task(kind, **{"source": "scenes", "split": "held_out"} | changes)})


def misspelt(tasks):
    wrong()(tasks)
    tasks.shapes.unlock()
    tasks.shapes.clases = "names.txt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong("eval"), r"config\.eval\.tasks\.eval: its metrics need another name"),
        (wrong("a/b"), r"config\.eval\.tasks\.a/b: its metrics need another name"),
        (wrong(split=""), r"config\.eval\.tasks\.shapes: split is empty"),
        (wrong(every_steps=-1), r"config\.eval\.tasks\.shapes: every_steps=-1 must be at least 0"),
        (wrong(source="webdataset"), r"config\.eval\.tasks\.shapes: source='webdataset' is unknown"),
        (wrong(classes="nowhere.txt"), r"config\.eval\.tasks\.shapes: classes=nowhere\.txt does not exist"),
        (wrong(split="valid"), r"config\.eval\.tasks\.shapes: unknown split 'valid'"),
        (wrong(split="train"), r"config\.eval\.tasks\.shapes: classes is not set"),
        (misspelt, r"config\.eval\.tasks\.shapes\.clases: did you mean config\.eval\.tasks\.shapes\.classes\?"),
        (lambda tasks: tasks.update(shapes=ConfigDict({"task": "zeroshot"})), r"tasks\.shapes must be eval_task\(KIND"),
        (lambda tasks: tasks.update(shapes=3), r"tasks\.shapes must be eval_task\(KIND"),
    ],
)
def test_wrong_tasks_are_named_before_any_work(config, tmp_path, change, message):
    change(config.eval.tasks)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_tasks_survive_json_and_are_left_out_of_a_smoke_run(config):
    config.eval.tasks.shapes = eval_task("zero-shot", source="scenes", split="held_out", templates="file.txt")
    config.eval.tasks.shapes.every_steps = 5
    config.checkpoint.best_metric = "shapes/top1"
    validate(config)
    again = ConfigDict(json.loads(config.to_json()))
    validate(again)
    assert again.eval.tasks.shapes.to_dict() == config.eval.tasks.shapes.to_dict()
    smoke = smoke_config(config)
    validate(smoke)
    assert not smoke.eval.tasks


@pytest.mark.parametrize("metric", ["shape/top1", "recall"])
def test_a_best_metric_of_no_evaluation_is_named(config, metric):
    config.checkpoint.best_metric = metric
    with pytest.raises(ConfigError, match=rf"best_metric='{metric}' is not measured: use one of eval/\.\.\., train/"):
        validate(config)


def test_the_worst_median_rank_is_not_kept_as_the_best(config):
    config.checkpoint.best_metric = "eval/image_to_text/median_rank"
    with pytest.raises(ConfigError, match=r"median_rank' is best where it is lowest"):
        validate(config)
