"""The README's table of plans, with plans that need no compiler."""

import json

import pytest

from benchmarks import plans
from disco_jax.planning.report import GIB, PARTS, Plan
from disco_jax.training import ConfigError

README = "# A\n<!-- plan-table -->\nold\n<!-- /plan-table -->\nrest\n"


def plan_of(config, cluster):
    parts = dict.fromkeys(PARTS, GIB) | {"activations": 20 * GIB if cluster.size > 1 else 40 * GIB}
    mesh = {"rows": cluster.size}
    return Plan(
        config, cluster, mesh, 36 * GIB, parts, collectives={}, flops_per_sample=0, compile_seconds=1.0, notes=()
    )


def test_table_record_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "make_plan", plan_of)
    readme, out = tmp_path / "README.md", tmp_path / "out"
    readme.write_text(README)
    for _ in range(2):  # the second time it replaces its own
        plans.main(["--readme", str(readme), "--out", str(out)])
        lines = readme.read_text().splitlines()
        assert lines[:2] == ["# A", "<!-- plan-table -->"] and lines[-2:] == ["<!-- /plan-table -->", "rest"]
        assert len(lines) == 4 + 2 + len(plans.CASES)
    assert lines[5] == (
        "| [`vit_b32_32k.py`](configs/vit_b32_32k.py) | 32,768 | 1 | microbatch 1,024, replicated, remat dots | "
        "44.0 of 36.0 | activations, 40.0 | no |"
    )
    assert (
        "| 32,768 | 8 x 8 | " in lines[-3]
        and ", fsdp, remat full | 24.0 of 36.0 | activations, 20.0 | yes |" in lines[-3]
    )
    assert (
        "11/11 vit_bigg14_32k on 8 x 8 a100-40gb: compiling ...\n    24.0 of 36.0 GiB (1 s)" in capsys.readouterr().out
    )
    record = json.loads((out / "plans.json").read_text())
    assert record["jax"] and len(record["plans"]) == len(plans.CASES)
    assert record["plans"][1]["fits"] is False
    assert (out / "plans.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", README * 2, "<!-- /plan-table -->\n<!-- plan-table -->\n"])
def test_marks_are_needed_before_anything_is_compiled(tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SystemExit) as exit:
        plans.main(["--readme", str(tmp_path / "README.md"), "--out", str(tmp_path / "out")])
    assert exit.value.code == 2 and "the table needs one line <!-- plan-table -->" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_config_that_cannot_be_planned_is_named(tmp_path, monkeypatch):
    def fail(config, cluster):
        raise ConfigError("the mesh is of other devices")

    monkeypatch.setattr(plans, "make_plan", fail)
    (tmp_path / "README.md").write_text(README)
    with pytest.raises(SystemExit, match="vit_b32_32k on 8 a100-40gb: the mesh is"):
        plans.main(["--readme", str(tmp_path / "README.md"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "README.md").read_text() == README
