"""python -m disco_jax.plan: flags, exit statuses, files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import flagsaver

from disco_jax import plan as command
from disco_jax.planning.report import GIB, PARTS, Plan
from disco_jax.training import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections
ROOT = Path(__file__).parents[2]
TINY = ["--config", str(ROOT / "configs/tiny_shards.py"), "--target", "a100-40gb"]


def plan_of(config, cluster):
    """10 GiB, and one more for each 8,192 samples of the batch and for each 100 of the microbatch."""
    parts = dict.fromkeys(PARTS, 0)
    parts |= {"parameters": 10 * GIB, "inputs": config.batch_size * GIB // 8192}
    parts["activations"] = (config.microbatch or 0) * GIB // 100
    mesh = {"rows": cluster.size}
    return Plan(
        config, cluster, mesh, 36 * GIB, parts, collectives={}, flops_per_sample=0, compile_seconds=1.0, notes=()
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; gives its exit status, stdout and the lines of stderr."""
    monkeypatch.setattr(command, "make_plan", plan_of)

    def run(*arguments):
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit:
            monkeypatch.setattr(sys, "argv", ["plan", *TINY, *arguments])  # config_flags reads it, too
            command.main(command.parse(sys.argv))
        printed = capsys.readouterr()
        return exit.value.code, printed.out, printed.err.splitlines()

    return run


def test_a_plan_that_fits(run, tmp_path):
    files = tmp_path / "plan.json", tmp_path / "plan.png"
    status, out, err = run("--config.batch_size=8192", "--json", str(files[0]), "--png", str(files[1]), "--hosts=2")
    assert status == 0
    assert out.splitlines()[0] == "tiny, batch 8,192 on 16 x NVIDIA A100-SXM4-40GB"
    assert out.splitlines()[-1] == "fits: 11.0 of 36.0 GiB"
    assert err == ["batch 8,192: compiling ...", "    11.0 of 36.0 GiB, fits (1 s)"]
    record = json.loads(files[0].read_text())
    assert record["fits"] and record["config"]["batch_size"] == 8192 and record["cluster"]["hosts"] == 2
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_does_not_fit(run, tmp_path):
    status, out, _ = run("--config.batch_size=819200", "--gpus-per-host=4", "--json", str(tmp_path / "plan.json"))
    assert status == 1
    assert out.splitlines()[-1].startswith("does not fit: 74.0 GiB too much, 110.0 of 36.0 GiB; largest part: inputs")
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False


def test_find_batch(run, tmp_path):
    status, out, err = run("--config.batch_size=8192", "--find-batch", "--json", str(tmp_path / "plan.json"))
    assert status == 0 and len(err) <= 12 and all(line.endswith(": compiling ...") for line in err[::2])
    found = json.loads((tmp_path / "plan.json").read_text())["config"]["batch_size"]
    assert found <= 26 * 8192 < 1.03 * found
    assert out.splitlines()[-2].startswith("fits: ")
    assert out.splitlines()[-1].startswith(f"largest that fits: --config.batch_size={found} (")


def test_find_microbatch(run):
    status, out, _ = run("--config.batch_size=32768", "--find-microbatch")
    assert status == 0
    assert out.splitlines()[-1] == "largest that fits: --config.microbatch=2048 (4096 needs 55.0 GiB)"


def test_nothing_fits(run):
    status, out, err = run("--config.batch_size=819200", "--find-microbatch")
    assert status == 1 and err[-2] == "batch 819,200, microbatch 1: compiling ..."
    assert err[-1] == "    110.0 of 36.0 GiB, does not fit (1 s)"
    assert out.splitlines()[-1] == (
        "nothing fits: even config.microbatch=1 needs 110.0 GiB, 74.0 GiB more than the pool"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.data.treads=3"], "unknown setting "),
        (["--config.batch_size=many"], "config.batch_size=many"),
        (["--target=a1000"], "value should be one of <a100-40gb|"),
        (["--hosts=0"], "--hosts=0"),
        (["--gpus_per_host=3"], "Unknown command line flag 'gpus_per_host'"),
        (["--config=configs/nowhere.py"], "nowhere.py"),
        (["find-batch"], "'find-batch' is no flag: flags begin with --"),
        (["--find-batch", "--find-microbatch"], "--find-batch and --find-microbatch exclude each other"),
        (["--json={folder}/x", "--png={folder}/./x"], "--json and --png are both"),
        (["--json={folder}"], "is a folder: name a file in it"),
        (["--png={folder}/none/x.png"], "none/x.png cannot be written: make its folder"),
        (["--find-microbatch", "--config.batch_size=100"], "batch_size=100 does not divide over 8 GPUs"),
    ],
)
def test_wrong_flags_end_with_one_line(run, tmp_path, arguments, message):
    status, out, err = run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert status == 2 and out == ""
    assert len(err) == 1 and err[0].startswith("plan: ") and message in err[0], err


@pytest.mark.parametrize("error", [ConfigError, ValueError, ImportError, OSError])
def test_what_cannot_be_planned_ends_with_one_line(run, monkeypatch, error):
    def fail(config, cluster):
        raise error("config.mesh is\nof other devices: leave it")

    monkeypatch.setattr(command, "make_plan", fail)
    status, _, err = run("--find-batch")
    assert status == 2
    assert err == ["batch 128: compiling ...", "plan: config.mesh is of other devices: leave it"]


def test_the_command_itself():
    arguments = [*TINY, "--target=a1000"]
    done = subprocess.run(
        [sys.executable, "-m", "disco_jax.plan", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("plan: ")], done.stderr
    assert command.os.environ["JAX_PLATFORMS"] == "cpu"
