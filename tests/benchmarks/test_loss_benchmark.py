"""The loss benchmark at a tiny size: its record, its picture, and what it refuses."""

import json

import jax
import pytest

from benchmarks import loss

TINY = ["--batch", "64", "--dim", "8", "--rounds", "2"]


@pytest.fixture(autouse=True)
def devices():
    assert len(jax.devices()) == 8  # from here on jax keeps them, whatever number the benchmark asks for


def rows_of(out):
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return {(row["method"], row["mesh"]): row for row in json.loads((out / "loss.json").read_text())["rows"]}


def test_record_picture_and_table(tmp_path, capsys):
    loss.main([*TINY, "--meshes", "8x1", "4x2", "--chunk", "16", "--out", str(tmp_path)])
    rows = rows_of(tmp_path)
    products = {form: row["products"] for form, row in rows.items()}
    both = {("chunked", mesh): 4 for mesh in ("8x1", "4x2")} | {("block", mesh): 3 for mesh in ("8x1", "4x2")}
    assert products == both | {("disco", "8x1"): 6, ("autodiff", "8x1"): 6}
    for form, row in rows.items():
        assert row["temp_mib"] > 0 and row["moved_mib"] > 0 and row["collectives"]["all-gather"] > 0
        assert row["milliseconds"] > 0 and len(row["milliseconds_of_rounds"]) == 2
        for other in ("disco", "autodiff"):
            ratio = row["milliseconds"] / rows[other, "8x1"]["milliseconds"]
            assert row[f"times_{other}"] == pytest.approx(ratio), form
        assert row["loss"] == pytest.approx(rows["disco", "8x1"]["loss"], rel=1e-6), form
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert len(table) == 1 + len(rows)
    assert table[2].split()[:2] == ["chunked", "4x2"]

    record = json.loads((tmp_path / "loss.json").read_text())
    assert record["command"].startswith("python benchmarks/loss.py --batch 64 --dim 8")
    assert record["settings"]["batch"] == 64 and record["jax"] and record["devices"].startswith("8 x CPU")


def test_without_disco_there_is_no_ratio_to_it(tmp_path):
    loss.main([*TINY, "--methods", "block", "--dtype", "bfloat16", "--meshes", "2x2", "--out", str(tmp_path)])
    ((form, row),) = rows_of(tmp_path).items()
    assert form == ("block", "2x2")
    assert row["times_disco"] is None and row["times_autodiff"] is None and row["milliseconds"] > 0


def test_absent_gpus(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the extra plan")
    settings = ["--batch", "4096", "--dim", "64", "--dtype", "bfloat16", "--methods", "block", "disco"]
    loss.main([*settings, "--target", "a100-40gb", "--topology", "2x4", "--out", str(tmp_path)])
    rows = rows_of(tmp_path)
    assert list(rows) == [("block", "8x1"), ("block", "4x2"), ("disco", "8x1")]
    assert [row["products"] for row in rows.values()] == [3, 3, 6]
    assert rows["block", "8x1"]["temp_mib"] < rows["disco", "8x1"]["temp_mib"]
    assert all(row["milliseconds"] is None and row["times_disco"] is None for row in rows.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--methods chunky", "argument --methods: invalid choice: 'chunky' (choose from "),
        ("--target a1000", "argument --target: invalid choice: 'a1000' (choose from "),
        ("--meshes 8", "--meshes: '8' must be two whole numbers of at least 1, such as 4x2"),
        ("--meshes 8x1 2x2", "--meshes 8x1 2x2 have [4, 8] devices: give meshes of one number of devices"),
        ("--meshes 64x1", "--meshes 64x1 need 64 devices, there are 8 (cpu): give smaller meshes"),
        ("--batch 100", "--batch 100 does not divide over 8 devices: give a multiple of 8"),
        ("--topology 1x8", "--topology 1x8 is of absent GPUs: name their kind with --target"),
        (
            "--target a100-40gb --topology 2x4 --meshes 4x1",
            "--meshes 4x1 have 4 devices, --topology 2x4 has 8: give meshes of 8",
        ),
        ("--chunk 0", "--chunk: '0' must be a whole number of at least 1"),
        ("--out {file}", "file cannot be written (File exists): give another folder"),
    ],
)
def test_refusals(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loss, "compile_step", None)  # none is compiled before
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit:
        loss.main(["--out", str(tmp_path / "out"), *arguments.format(file=tmp_path / "file").split()])
    assert exit.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last
    assert not (tmp_path / "out").exists()
