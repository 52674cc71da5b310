"""Whole runs of a very small model on generated scenes, in this process."""

import gc
import inspect
import json
import os
import shutil
import signal
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from disco_jax.data.loader import Batch
from disco_jax.data.scenes import write_scenes
from disco_jax.evaluation.evaluator import Evaluator
from disco_jax.models import PRESETS, CLIPConfig, TextConfig, VisionConfig
from disco_jax.training import ConfigError, NonFiniteLossError, TrainingInterrupted, default_config, loop, train
from disco_jax.training.metrics import read_history
from disco_jax.training.program import TrainState
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
            "eval.batch_size": 200,
            "checkpoint.every_steps": 2,
            "log.every_steps": 1,
        }
    )
    return config


def losses(workdir):
    return {row["step"]: row["loss"] for row in read_history(workdir) if "loss" in row}


def checkpoints(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def test_a_run_writes_its_files_and_the_same_command_goes_on(config, tmp_path):
    config.data.eval = "held_out"
    config.eval.every_steps = 4
    metrics = train(config, tmp_path)

    assert set(metrics) == {
        *(
            f"eval/{way}/{name}"
            for way in ("image_to_text", "text_to_image")
            for name in ("R@1", "R@5", "R@10", "median_rank")
        ),
        "eval/zero_shot/top1",
        "eval/zero_shot/top5",
        "eval/zero_shot/mean_per_class_recall",
    }
    history = read_history(tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in history if "eval/zero_shot/top1" in row] == [4, 6]
    assert history[-1] == {"step": 6} | metrics
    assert {"loss", "grad_norm", "learning_rate", "logit_scale", "samples_per_sec"} < set(history[0])
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 16
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").iterdir())
    assert checkpoints(tmp_path) == [2, 4, 6]

    # A run that is done evaluates again, and says the same.
    assert train(config, tmp_path) == metrics
    assert read_history(tmp_path) == history

    config.seed = 1
    config.checkpoint.keep_last = 2  # changes no number
    with pytest.raises(
        ConfigError, match=r"other settings \(config\.seed: 0 -> 1\).*another --workdir.*resume_changed"
    ):
        train(config, tmp_path)
    config.resume_changed = True
    config.optimizer.grad_clip = 1.0  # as is advised after a loss that is not finite
    config.total_steps = 4  # it is past that already
    train(config, tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    config.total_steps = 8
    train(config, tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_resumes_to_the_same_numbers(config, tmp_path, signum):
    config.checkpoint.every_steps = 100
    config.total_steps = 30  # the signal comes in time on a busy machine too
    train(config, tmp_path / "whole")
    before = signal.getsignal(signum)

    def interrupt():
        while not (tmp_path / "broken" / "metrics.jsonl").exists() or len(losses(tmp_path / "broken")) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingInterrupted, match=rf"{signum.name}: saved step \d.*same command") as interrupted:
        train(config, tmp_path / "broken")
    thread.join()
    assert signal.getsignal(signum) is before
    assert checkpoints(tmp_path / "broken") == [interrupted.value.step]
    assert 2 < interrupted.value.step < 30
    train(config, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_a_nonfinite_loss_stops_the_run_and_keeps_the_good_checkpoints(config, tmp_path):
    config.optimizer.learning_rate = 1e30
    with pytest.raises(NonFiniteLossError, match=r"step \d: loss .* config\.optimizer\.learning_rate") as error:
        train(config, tmp_path)
    step = int(str(error.value).split(":")[0].removeprefix("step "))
    assert all(kept < step for kept in checkpoints(tmp_path))
    (keys,) = tmp_path.glob("nonfinite_step_*.txt")
    assert len(keys.read_text().splitlines()) == 16
    assert read_history(tmp_path)[-1]["loss"] is None or read_history(tmp_path)[-1]["grad_norm"] is None


def test_features_that_are_not_finite_stop_the_run_too(config, tmp_path):
    config.optimizer.learning_rate = 1e30
    config.data.eval = "held_out"
    config.eval.every_steps = 2
    with pytest.raises(NonFiniteLossError, match=r"step 2: the features hold NaN or inf"):
        train(config, tmp_path)
    assert checkpoints(tmp_path) == []


def test_a_best_metric_that_is_not_measured_is_named(config, tmp_path):
    config.data.eval = "held_out"
    config.checkpoint.best_metric = "eval/recall"
    with pytest.raises(ConfigError, match=r"best_metric='eval/recall' is not measured: use one of eval/image_to_text"):
        train(config, tmp_path)


def test_labels_without_a_class_name_are_named(config, tmp_path):
    write_scenes(tmp_path / "data", {"train": 20, "held_out": 30}, side=16)
    config.data.update(source="tars", label="cls", index_cache=str(tmp_path / "index"))
    config.data.update(train=str(tmp_path / "data/train-*.tar"), eval=str(tmp_path / "data/held_out-*.tar"))
    config.eval.classes = str(tmp_path / "data/classes.txt")
    assert "eval/zero_shot/top1" in train(config, tmp_path / "run")
    (tmp_path / "data/classes.txt").write_text("red square\nblue ring\n")
    with pytest.raises(ConfigError, match="the eval examples cannot be evaluated: labels holds"):
        train(config, tmp_path / "other")
    assert checkpoints(tmp_path / "other") == [2, 4, 6]  # the steps are not lost


def test_a_nonfinite_step_can_be_skipped(config, tmp_path):
    config.on_nonfinite = "skip"
    config.optimizer.learning_rate = 1e30
    train(config, tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_the_best_checkpoint_is_kept_beside_the_last(config, tmp_path, monkeypatch):
    config.data.eval = "held_out"
    config.eval.every_steps = 1
    config.checkpoint.every_steps = 1
    config.checkpoint.keep_last = 2
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])
    monkeypatch.setattr(
        loop, "evaluate", lambda *_: loop.Evaluation({"eval/image_to_text/R@1": next(scores)}, features=None)
    )
    train(config, tmp_path)
    assert checkpoints(tmp_path) == [2, 5, 6]


def test_checkpoints_come_by_minutes_too(config, tmp_path):
    config.checkpoint.every_steps = 100
    config.checkpoint.every_minutes = 1e-9
    config.checkpoint.keep_last = 100
    train(config, tmp_path)
    assert checkpoints(tmp_path) == [1, 2, 3, 4, 5, 6]


WRONG = {
    "more devices than there are": ({"mesh": (("data", 16),)}, r"16 devices, there are 8.*config\.cpu_devices=16"),
    "batch that doesn't divide": ({"batch_size": 12}, r"config\.batch_size=12 does not divide over the 8 devices"),
    "evaluation batch": ({"eval.batch_size": 100}, r"config\.eval\.batch_size=100 does not divide"),
    "missing pattern": ({"data.source": "tars", "data.train": "nowhere/*.tar"}, r"nowhere/\*\.tar"),
    "missing tokenizer": ({"data.tokenizer": "nowhere.json"}, r"nowhere\.json"),
    "no classes": ({"data.eval": "held_out", "eval.classes": "nowhere.txt"}, r"eval\.classes=nowhere\.txt"),
    "unknown split": ({"data.train": "test"}, "'test'"),
    "microbatch": ({"microbatch": 3}, r"microbatch=3 does not divide the 2 samples .* use a divisor of 2"),
    "cudnn": (
        {"model.attention": "cudnn", "model.dtype": "bfloat16"},
        r"config\.model\.attention='cudnn': cuDNN's attention needs NVIDIA GPUs.*this is cpu: use 'xla'",
    ),
    "image size": ({"model.image_size": 20}, "20"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_is_one_line_before_any_work(config, tmp_path, name):
    changes, message = WRONG[name]
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json is damaged .*choose another"),
        ("config.json", "[1]", r"config\.json is damaged"),
        ("metrics.jsonl", '[1]\n{"step": 1}\n', r"metrics\.jsonl, line 1 is no row"),
        ("metrics.jsonl", '\xff\n{"step": 1}\n', r"metrics\.jsonl, line 1 is no row"),
    ],
)
def test_damaged_files_of_a_run_are_named(config, tmp_path, name, content, message):
    prepare(config, tmp_path)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        prepare(config, tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what Orbax leaves unawaited
def test_a_damaged_checkpoint_is_named(config, tmp_path):
    config.total_steps = 4
    train(config, tmp_path)
    (tmp_path / "checkpoints" / "4" / "state" / "_METADATA").unlink()
    with pytest.raises(ConfigError, match=r"checkpoints/4 does not fit .*remove that folder") as error:
        train(config, tmp_path)
    assert "\n" not in str(error.value)
    gc.collect()
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    train(config, tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "changes", [{"ema_decay": 0.9}, {"lock_text": True}, {"optimizer.name": "lion"}, {"loss.name": "sigmoid"}]
)
def test_settings_that_the_checkpoints_do_not_fit_are_refused_whatever_is_asked(config, tmp_path, changes):
    prepare(config, tmp_path)
    config.resume_changed = True
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=rf"checkpoints do not fit the settings \(config\.{next(iter(changes))}: "):
        prepare(config, tmp_path)


@pytest.mark.parametrize("content", ["red ring\n\nblue ring\n", ""])
def test_class_files_with_empty_lines_are_refused(config, tmp_path, content):
    (tmp_path / "classes.txt").write_text(content)
    config.data.eval = "held_out"
    config.eval.classes = str(tmp_path / "classes.txt")
    with pytest.raises(ConfigError, match=r"classes\.txt has an empty line"):
        prepare(config, tmp_path / "run")


def test_a_full_disk_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ConfigError, match=r"0\.00 GiB free.*5 checkpoints of 0\.01 GiB must fit: free some space"):
        prepare(config, tmp_path)


def test_a_folder_of_other_files_is_no_workdir(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds files but no config\.json"):
        prepare(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_workdir_that_cannot_be_made_is_named(config, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot write to .*file/run"):
        prepare(config, tmp_path / "file" / "run")


def test_a_run_goes_on_under_other_shardings_and_on_other_devices(config, tmp_path):
    """From 8 devices to 4, and to a rectangle of them; what changes no number is not refused."""
    config.update(total_steps=2, sharding="fsdp", ema_decay=0.5)
    config.optimizer.schedule = "constant"  # the cosine depends on the length of the run
    forms = [
        ({"mesh": (("rows", 8),)}, 2),
        ({"mesh": (("rows", 4),), "sharding": "zero1", "microbatch": 2}, 4),
        ({"mesh": (("cols", 2), ("rows", 2)), "sharding": "fsdp", "stream_inputs": True}, 6),
    ]
    for changes, total_steps in forms:
        config.update(changes, total_steps=total_steps, resume_changed=total_steps > 2)
        train(config, tmp_path / "moved")
    whole = {"mesh": (("rows", 8),), "sharding": "replicated", "microbatch": None, "stream_inputs": False}
    config.update(whole, resume_changed=False)
    train(config, tmp_path / "whole")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=2e-5)
    assert len(losses(tmp_path / "moved")) == 6


@pytest.mark.parametrize("ema", [False, True])
def test_the_average_is_evaluated_when_asked(config, tmp_path, monkeypatch, ema):
    config.update(ema_decay=0.999)
    config.eval.update(train_examples=200, ema=ema)
    config.data.eval = "held_out"
    setup, seen = replace(prepare(config, tmp_path), eval_source=None), []
    features = SimpleNamespace(labelled=np.ones(1, bool))
    monkeypatch.setattr(Evaluator, "features", lambda self, params, *_, **__: seen.append(params) or features)
    monkeypatch.setattr(Evaluator, "retrieval", lambda self, _: {})
    monkeypatch.setattr(Evaluator, "zero_shot", lambda self, params, *_: seen.append(params) or {})
    state = TrainState(np.int32(3), {"text": 1, "visual": 2, "logit_scale": 3}, None, {"text": 4, "logit_scale": 5})
    inspect.unwrap(loop.evaluate)(setup, state, True, ())
    assert seen == 2 * [{"text": 4, "visual": 2, "logit_scale": 5} if ema else state.params]


def test_the_log_tells_speed_use_of_the_devices_and_waiting(config, tmp_path, monkeypatch):
    def slowly(*args, **kwargs):
        for batch in batches(*args, **kwargs):
            time.sleep(0.5)
            yield batch

    batches = loop.train_batches
    monkeypatch.setattr(loop, "train_batches", slowly)
    monkeypatch.setattr(loop, "peak_flops", lambda kind: 10**9)  # in bfloat16
    program = prepare(config, tmp_path / "float32").program
    assert "mfu" not in loop.device_usage(program, 1.0)
    config.model.dtype = "bfloat16"
    train(config, tmp_path / "run")
    row = read_history(tmp_path / "run")[2]  # after a step that saves, the next one begins at once
    per_device = row["samples_per_sec"] * program.flops_per_sample / 8
    assert row["tflops"] == pytest.approx(per_device / 1e12)
    assert row["mfu"] == pytest.approx(per_device / 1e9)
    assert 0.5 < row["data_wait"] <= 1


def test_a_batch_is_gone_before_the_next_one_is_put_together(config, tmp_path, monkeypatch):
    def batches(*_, **__):
        while True:
            batch = Batch(np.zeros((16, 16, 16, 3), np.uint8), np.zeros((16, 24), np.int32), np.array(16 * ["a"]))
            given.append(weakref.ref(batch.images))
            yield batch
            del batch
            assert given[-1]() is None

    given, one = [], jnp.ones(())
    metrics = dict.fromkeys(("loss", "grad_norm", "logit_scale"), one)
    monkeypatch.setattr(loop, "train_batches", batches)
    monkeypatch.setattr(loop, "compile_step", lambda program: lambda state, images, tokens: (state, metrics))
    train(config, tmp_path)
    assert len(given) == config.total_steps
