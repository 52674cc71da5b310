"""python -m disco_jax.evaluate: what it writes, what it refuses, and that two processes embed as one."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_model import MODEL, evaluator, weights

from disco_jax import evaluate
from disco_jax.convert import write
from disco_jax.data.scenes import CLASS_NAMES, Scenes
from disco_jax.data.shards import write_tar
from disco_jax.evaluation.prompts import Prompts
from disco_jax.evaluation.tasks import Destination, Task, eval_task, run_task
from disco_jax.training.metrics import read_history

ROOT = Path(__file__).parents[2]
HELD_OUT = ["--source", "scenes", "--data", "held_out"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    write(replace(weights(), step=7, notes=("heads: as ever",)), folder)
    return folder


@pytest.fixture(autouse=True)
def quietly(monkeypatch):
    monkeypatch.setattr(evaluate, "log_progress", lambda: None)  # it changes the log of all tests after


def test_results_are_printed_and_kept_and_are_those_of_one_device(checkpoint, capsys):
    arguments = ["--checkpoint", str(checkpoint), "--task", "zero-shot", *HELD_OUT, "--batch-size", "200"]
    evaluate.main([*arguments, "--name", "unseen"])
    evaluate.main(["--checkpoint", str(checkpoint), "--task", "retrieval", *HELD_OUT, "--batch-size", "200"])
    printed = capsys.readouterr().out

    expected = []
    for kind, prompts in (("zero-shot", Prompts(CLASS_NAMES, ("a photo of a {}.",))), ("retrieval", None)):
        task = Task("x", eval_task(kind), Scenes("held_out"), prompts)
        expected.append(run_task(task, *evaluator(1, 200), Destination(Path("unused"), {})).metrics)
    out = checkpoint / "evaluation"
    rows = read_history(out)
    assert rows[0] == {"step": 7} | {f"unseen/{name}": value for name, value in expected[0].items()}
    assert rows[1] == {"step": 7} | {f"retrieval/{name}": value for name, value in expected[1].items()}

    results = json.loads((out / "unseen.json").read_text())
    assert results["metrics"] == expected[0]
    assert (results["checkpoint"], results["step"], results["ema"]) == (str(checkpoint), 7, False)
    assert (results["examples"], results["dropped"], results["settings"]["source"]) == (1000, 0, "scenes")
    assert results["command"] == f"python -m disco_jax.evaluate {' '.join(arguments)} --name unseen"
    assert "heads: as ever\nunseen: 1,000 examples\n" in printed
    assert f"  top1                   {100 * expected[0]['top1']:8.2f} %\n" in printed
    assert f"  image_to_text/median_rank  {expected[1]['image_to_text/median_rank']:8,.6g}\n" in printed


def test_two_processes_embed_as_one(checkpoint, tmp_path):
    scenes = (Scenes("held_out")[i] for i in range(11))
    write_tar(tmp_path / "s.tar", [replace(s, caption=" ") if i in (3, 6) else s for i, s in enumerate(scenes)])
    arguments = ["--checkpoint", str(checkpoint), "--task", "embed", "--batch-size", "4", "--part-size", "6"]
    arguments += ["--data", str(tmp_path / "s.tar"), "--index-cache", str(tmp_path), "--threads", "2"]
    evaluate.main([*arguments, "--batch-size", "8", "--out", str(tmp_path / "one")])

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "disco_jax.evaluate", *arguments, "--cpu-devices", "1", "--out", tmp_path / "two"],
            cwd=ROOT,
            env=os.environ
            | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "embed: 9 examples, 2 left out" in outputs[0][0] and "embed" not in outputs[1][0]
    for part in range(2):
        one, two = (tmp_path / name / "metadata" / f"metadata_{part}.parquet" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        for kind in ("img_emb", "text_emb"):
            one, two = (np.load(tmp_path / name / kind / f"{kind}_{part}.npy") for name in ("one", "two"))
            np.testing.assert_allclose(one, two, atol=1e-3)


def test_an_unknown_step_is_0_and_a_cut_off_row_is_dropped(tmp_path, capsys):
    write(weights(), tmp_path / "tiny")
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 3, "a": 1}\n{"step": 4, "a"')
    flags = ["--task", "embed", *HELD_OUT, "--batch-size", "200", "--caption", "none", "--out", str(out)]
    evaluate.main(["--checkpoint", str(tmp_path / "tiny"), *flags])
    assert read_history(out) == [{"step": 3, "a": 1}, {"step": 0, "embed/rows": 1000.0}]
    assert "rows     1,000\n" in capsys.readouterr().out


WRONG = {
    "checkpoint": (["--checkpoint", "nowhere"], r"--checkpoint .*nowhere does not exist"),
    "no weights": (["--checkpoint", "."], r"is no folder with weights"),
    "out": (["--task", "embed"], "--out is not given"),
    "name": (["--name", "a/b"], "--name a/b must be of letters"),
    "batch": (["--batch-size", "12"], "--batch-size 12 must be a multiple of the 8 devices"),
    "no batch": (["--batch-size", "0"], "--batch-size 0 must be a multiple"),
    "threads": (["--threads", "0"], "--threads 0 must be at least 1"),
    "devices": (["--cpu-devices", "3"], "cannot simulate 3 CPU devices"),
    "data": (["--source", "tars", "--data", "nowhere/*.tar"], r"no file matches 'nowhere/\*\.tar'"),
    "foreign": (["--classes", "names.txt"], "--classes is not for the task retrieval"),
    "classes": (["--task", "zero-shot", "--classes", "nowhere.txt"], r"classes=nowhere\.txt does not exist"),
    "tokenizer": (["--tokenizer", "nowhere.json"], r"no tokenizer file nowhere\.json"),
    "averages": (["--ema"], "only these keep running averages"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_evaluated_ends_with_one_line(checkpoint, tmp_path, capsys, monkeypatch, name):
    arguments, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "run_task", lambda *_: pytest.fail("nothing may be run"))
    out = [] if name == "out" else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--checkpoint", str(checkpoint), "--task", "retrieval", *HELD_OUT, *out, *arguments])
    assert left.value.code == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("evaluate: ") and complaint.count("\n") == 1
    assert re.search(message, complaint), complaint


def test_a_workdir_keeps_its_own_history(checkpoint, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit):
        evaluate.main(
            ["--checkpoint", str(checkpoint), "--task", "retrieval", *HELD_OUT, "--out", str(tmp_path / "run")]
        )
    assert "is the workdir of a run" in capsys.readouterr().err


def test_a_model_gets_its_own_tokenizer(tmp_path, capsys):
    model = replace(MODEL, text=replace(MODEL.text, vocab_size=99, eot_id=98))
    params = {**weights().params, "text": {**weights().params["text"]}}
    embedding = params["text"]["token_embedding"]
    params["text"]["token_embedding"] = {name: array[:99] for name, array in embedding.items()}
    write(replace(weights(), model=model, params=params), tmp_path / "tiny")
    with pytest.raises(SystemExit):
        evaluate.main(["--checkpoint", str(tmp_path / "tiny"), "--task", "retrieval", *HELD_OUT])
    assert "the tokenizer has 49408 ids and ends texts with 49407, the model 99 and 98" in capsys.readouterr().err
