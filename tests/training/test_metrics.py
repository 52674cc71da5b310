import io
import json
import logging as standard_logging
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from absl import logging
from tensorboardX.proto.event_pb2 import Event

from disco_jax.training.metrics import MetricWriter, read_history


def writer(workdir, **arguments):
    return MetricWriter(workdir, **({"total_steps": 100, "batch_size": 64} | arguments))


def tensorboard_events(workdir):
    """All events of the folder's files: records of length, checksum, bytes, checksum."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_rows_are_on_disk_at_once_and_read_back(tmp_path):
    with writer(tmp_path / "new" / "run") as metrics:
        metrics.write(1, {"loss": np.float32(2.5), "logit_scale": 14})
        assert read_history(tmp_path / "new" / "run") == [{"step": 1, "loss": 2.5, "logit_scale": 14.0}]
        metrics.write(1, {"eval/image_to_text/R@1": 0.1})
        metrics.write(2, {"loss": 1 / 3})
    assert read_history(tmp_path / "new" / "run") == [
        {"step": 1, "loss": 2.5, "logit_scale": 14.0},
        {"step": 1, "eval/image_to_text/R@1": 0.1},
        {"step": 2, "loss": 1 / 3},
    ]


def test_no_file_is_no_rows(tmp_path):
    assert read_history(tmp_path) == []


def test_nan_and_infinity_are_null(tmp_path):
    with writer(tmp_path) as metrics:
        metrics.write(1, {"loss": float("nan"), "grad_norm": np.inf, "low": -np.inf, "fine": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "low": None,
        "fine": 1.0,
    }


def test_resume_drops_later_rows_and_a_half_written_line(tmp_path):
    with writer(tmp_path) as metrics:
        for step in range(1, 8):
            metrics.write(step, {"loss": step / 3})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    assert [row["step"] for row in read_history(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]

    with writer(tmp_path, resume_step=5) as metrics:
        assert [row["step"] for row in read_history(tmp_path)] == [1, 2, 3, 4, 5]
        metrics.write(6, {"loss": 9.0})
    rows = read_history(tmp_path)
    assert rows == [{"step": step, "loss": step / 3} for step in range(1, 6)] + [{"step": 6, "loss": 9.0}]
    assert not list(tmp_path.glob("*.tmp"))


def test_resume_after_a_half_written_line_appends_on_a_new_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"st')
    with writer(tmp_path, resume_step=2) as metrics:
        metrics.write(3, {"loss": 3.0})
    assert [row["step"] for row in read_history(tmp_path)] == [1, 2, 3]


def test_a_run_from_the_start_begins_the_file_anew(tmp_path):
    with writer(tmp_path) as metrics:
        metrics.write(0, {"loss": 1.0})
        metrics.write(3, {"loss": 1.0})
    with writer(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.0})
    assert read_history(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_damage_before_the_last_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is no row of metrics"):
        writer(tmp_path, resume_step=3)


def test_tensorboard_gets_the_scalars_and_forgets_the_steps_after_a_resume(tmp_path, caplog):
    caplog.set_level(standard_logging.INFO, "tensorboardX")
    with writer(tmp_path, resume_step=6) as metrics:
        metrics.write(7, {"eval/image_to_text/R@1": 0.25, "loss": 3.0})
    events = tensorboard_events(tmp_path)
    scalars = {(event.step, value.tag): value.simple_value for event in events for value in event.summary.value}
    assert scalars == {(7, "eval/image_to_text/R_1"): 0.25, (7, "loss"): 3.0}
    assert [event.step for event in events if event.HasField("session_log")] == [7]
    assert not caplog.records


def test_other_processes_write_nothing(tmp_path):
    with writer(tmp_path / "run", is_main=False, wandb_project="p") as metrics:
        metrics.write(1, {"loss": 1.0})
        metrics.progress(1, loss=1.0, samples_per_sec=10.0, scale=14.0)
    assert not (tmp_path / "run").exists()


def test_progress_is_one_log_line_without_a_terminal(tmp_path, caplog):
    caplog.set_level(standard_logging.INFO, "absl")
    with writer(tmp_path) as metrics:
        metrics.progress(10, loss=np.float32(2.5), samples_per_sec=1920.4, scale=14.29)
        metrics.progress(20, loss=2.0, samples_per_sec=0.0, scale=14.3)
    assert [record.getMessage() for record in caplog.records] == [
        "step 10/100: loss 2.5000, 1,920 samples/s, scale 14.29, 00:02 left",  # 90 steps of 64 at 1920 a second
        "step 20/100: loss 2.0000, 0 samples/s, scale 14.30, ? left",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_in_a_terminal_and_log_lines_stay_above_it(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.get_absl_handler().python_handler
    with writer(tmp_path, resume_step=50) as metrics:
        metrics.progress(75, loss=2.5, samples_per_sec=1600.0, scale=14.29)
        before = terminal.tell()
        handler.filter(standard_logging.makeLogRecord({"msg": "saved"}))
        cleared = terminal.getvalue()[before:]
        terminal.write("saved\n")
        metrics.progress(100, loss=1.25, samples_per_sec=1600.0, scale=14.3)
    last = terminal.getvalue().rstrip().split("\r")[-1]
    assert "100%" in last and "100/100" in last
    assert "loss 1.2500, 1,600 samples/s, scale 14.30, 00:00 left" in last
    assert cleared.startswith("\r") and not cleared.strip()  # blanks over the bar, back at the line's start
    assert not handler.filters


def test_close_twice_is_fine(tmp_path):
    metrics = writer(tmp_path)
    metrics.close()
    metrics.close()


def test_wandb_gets_the_scalars_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    calls = []

    def init(**arguments):
        calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"] or f"id{len(calls)}",
            log=lambda values, step: calls.append(("log", step, values)),
            finish=lambda: calls.append(("finish",)),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for resume_step in (0, 5, 0):
        with writer(tmp_path, wandb_project="p", config={"seed": 1}, resume_step=resume_step) as metrics:
            metrics.write(resume_step + 1, {"loss": 2.0})
    arguments = [call[1] for call in calls if call[0] == "init"]
    assert [a["id"] for a in arguments] == [None, "id1", None]
    assert arguments[0] == {
        "dir": str(tmp_path),
        "config": {"seed": 1},
        "id": None,
        "resume": "allow",
        "project": "p",
    }
    assert [call for call in calls if call[0] != "init"] == [
        ("log", 1, {"loss": 2.0}),
        ("finish",),
        ("log", 6, {"loss": 2.0}),
        ("finish",),
        ("log", 1, {"loss": 2.0}),
        ("finish",),
    ]
