"""train.py from outside: kill -9 and go on, wrong flags, exit statuses."""

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disco_jax.training.metrics import read_history

ROOT = Path(__file__).parents[1]
RUN = {
    "mesh": "(('data',2),)",
    "cpu_devices": 2,
    "batch_size": 32,
    "total_steps": 20,
    "data.source": "scenes",
    "data.train": "train",
    "data.threads": 2,
    "eval.train_examples": 0,
    "optimizer.warmup_steps": 2,
    "checkpoint.every_steps": 3,
    "log.every_steps": 1,
}


def start(workdir, **changes):
    settings = [f"--config.{name}={value}" for name, value in (RUN | changes).items()]
    return subprocess.Popen(
        [sys.executable, "train.py", "--config", "configs/tiny_shards.py", "--workdir", str(workdir), *settings],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def numbers(workdir):
    measured = ("samples_per_sec", "tflops", "data_wait")
    return [{k: v for k, v in row.items() if k not in measured} for row in read_history(workdir)]


def test_killed_at_a_random_step_it_resumes_to_the_same_numbers(tmp_path):
    whole = start(tmp_path / "whole")
    finish(whole)

    kill_after = random.SystemRandom().randint(7, 16)  # the save at 6 waits for the one at 3
    broken = start(tmp_path / "broken")
    while len(numbers(tmp_path / "broken")) < kill_after:
        assert broken.poll() is None
        time.sleep(0.005)
    broken.send_signal(signal.SIGKILL)
    broken.communicate()
    killed_at = numbers(tmp_path / "broken")[-1]["step"]
    assert kill_after <= killed_at < 20

    resumed = start(tmp_path / "broken")
    _, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    resumed_from = [int(line.rsplit(" ", 1)[1]) for line in errors.splitlines() if "Resumed from step" in line]
    assert resumed_from and 0 < resumed_from[0] <= killed_at, (killed_at, errors)
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole"), (killed_at, resumed_from)


def test_two_processes_train_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"total_steps": 6, "data.eval": "held_out", "eval.batch_size": 100, "optimizer.schedule": "constant"}
    finish(start(tmp_path / "one", **settings))
    distributed = {"distributed.coordinator": address, "distributed.num_processes": 2, "cpu_devices": 1}
    streamed = {"microbatch": 4, "stream_inputs": True}  # of FSDP, gloo on CPUs mixes up the gathers
    for changes in ({"total_steps": 4}, {"total_steps": 6, "resume_changed": True} | streamed):
        settings |= distributed | changes
        for process in [start(tmp_path / "two", **settings, **{"distributed.process_id": i}) for i in range(2)]:
            finish(process)
    rows = numbers(tmp_path / "two")
    one, two = ([row["loss"] for row in numbers(tmp_path / name) if "loss" in row] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-5)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/image_to_text/R@1" in row] == [4, 6]


def test_any_config_has_a_smoke_run(tmp_path):
    command = [sys.executable, "train.py", "--config", "configs/vit_b32_196k.py", "--workdir", str(tmp_path)]
    done = subprocess.run([*command, "--config.smoke=True"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in numbers(tmp_path) if "loss" in row] == [1, 2, 3]
    assert (tmp_path / "report.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.data.treads=3"], "unknown setting"),
        (["--config.batch_size=many"], "config.batch_size=many"),
        (["--config.mesh=(('data',3),)", "--config.cpu_devices=3"], "does not divide over the 3 devices"),
        (["--config.data.train=nowhere/{0..3}.tar"], "nowhere/"),
    ],
)
def test_wrong_flags_end_with_one_line(tmp_path, arguments, message):
    command = [sys.executable, "train.py", "--config", "configs/tiny_shards.py", "--workdir", str(tmp_path / "run")]
    done = subprocess.run([*command, "--config.data.train=x.tar", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    complaint = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(complaint) == 1 and message in complaint[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
