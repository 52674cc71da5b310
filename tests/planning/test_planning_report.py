"""The text, the record and the picture of plans."""

import dataclasses
import json

import pytest
from matplotlib.image import imread

from disco_jax.planning.draw import draw
from disco_jax.planning.report import GIB, PARTS, Cluster, Plan, gib, how, text, to_json, verdict, with_unit
from disco_jax.training import default_config

A100 = Cluster("a100-40gb", 1, 8)


def config(**changes):
    config = default_config()
    config.update_from_flattened_dict({"batch_size": 1_048_576, "microbatch": 1024} | changes)
    return config


MILLION = Plan(
    config=config(),
    cluster=A100,
    mesh={"rows": 8},
    pool=36 * GIB,
    parts=dict(zip(PARTS, (GIB // 2, GIB, 18 * GIB, 3 * GIB, 8 * GIB), strict=True)),
    collectives={"all-gather": (14, 3 * GIB // 2), "all-to-all": (0, 0), "all-reduce": (1, 3 * 2**20)},
    flops_per_sample=44_300_000_000,
    compile_seconds=61.2,
    notes=("attention is planned as XLA's",),
)


def with_part(name, size, *, cluster=A100, **changes):
    return dataclasses.replace(MILLION, parts=MILLION.parts | {name: size}, cluster=cluster, config=config(**changes))


def test_text_of_a_plan_that_fits():
    assert MILLION.fits and MILLION.peak == 30.5 * GIB and A100.size == 8
    assert text(MILLION).splitlines() == [
        "ViT-B-32, batch 1,048,576 on 8 x NVIDIA A100-SXM4-40GB",
        "hosts: 1 with 8 GPUs each; a GPU has 131,072 samples; microbatch 1,024, replicated",
        "compiled in 61 s",
        "",
        "memory of a GPU at the peak    GiB  of the pool",
        "parameters                    0.50         1.4%",
        "optimizer                     1.00         2.8%",
        "inputs                       18.00        50.0%",
        "features and loss             3.00         8.3%",
        "activations                   8.00        22.2%",
        "all                          30.50        84.7%",
        "",
        "between GPUs in a step  calls  received by each",
        "all-gather                 14          1.50 GiB",
        "all-reduce                  1          3.00 MiB",
        "",
        "44.3 GFLOPs of the model per sample and step",
        "note: attention is planned as XLA's",
        "",
        "fits: 30.5 of 36.0 GiB",
    ]


def test_the_pool_itself_fits_and_a_byte_more_does_not():
    rest = MILLION.peak - MILLION.parts["inputs"]
    assert with_part("inputs", MILLION.pool - rest).fits
    assert not with_part("inputs", MILLION.pool - rest + 1).fits


@pytest.mark.parametrize(
    "part, changes, cures",
    [
        ("activations", {}, "--find-microbatch, config.model.remat='full', --find-batch"),
        ("activations", {"microbatch": 1}, "config.model.remat='full', --find-batch"),
        ("activations", {"model.remat": "dots"}, "--find-microbatch, config.model.remat='full', --find-batch"),
        ("activations", {"model.remat": "full"}, "--find-microbatch, --find-batch"),
        ("inputs", {}, "config.prefetch=False, config.stream_inputs=True, --find-batch"),
        (
            "inputs",
            {"microbatch": None, "prefetch": False},
            "--find-microbatch, config.stream_inputs=True, --find-batch",
        ),
        ("inputs", {"prefetch": False}, "config.stream_inputs=True, --find-batch"),
        ("inputs", {"stream_inputs": True}, "--find-microbatch, --find-batch"),
        ("features and loss", {}, "a smaller config.loss.chunk, more GPUs, --find-batch"),
        ("features and loss", {"loss.method": "disco"}, "config.loss.method='chunked', more GPUs, --find-batch"),
        ("optimizer", {}, "config.sharding='zero1', --find-batch"),
        ("optimizer", {"sharding": "zero1"}, "more GPUs, --find-batch"),
        ("parameters", {"sharding": "zero1"}, "config.sharding='fsdp', --find-batch"),
        ("parameters", {"sharding": "fsdp"}, "more GPUs, --find-batch"),
        (
            "optimizer",
            {"cluster": Cluster("a100-40gb", 1, 1)},
            "more GPUs with config.sharding='fsdp', --find-batch",
        ),
    ],
)
def test_advice_follows_from_the_plan(part, changes, cures):
    plan = with_part(part, 700 * GIB, **changes)
    excess = plan.peak - plan.pool
    assert verdict(plan) == (
        f"does not fit: {gib(excess)} GiB too much, {gib(plan.peak)} of 36.0 GiB; largest part: {part}; try {cures}"
    )
    assert text(plan).endswith(verdict(plan))


def test_advice_for_several_large_parts_begins_with_the_largest():
    assert verdict(with_part("activations", 20 * GIB)).endswith(
        "try --find-microbatch, config.model.remat='full', config.prefetch=False, config.stream_inputs=True, "
        "--find-batch"
    )


def test_one_gpu_has_no_traffic():
    plan = dataclasses.replace(MILLION, cluster=Cluster("a100-40gb", 1, 1), collectives={"all-reduce": (0, 0)})
    assert "nothing travels between GPUs" in text(plan) and "hosts: 1 with 1 GPU each" in text(plan)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"microbatch": None}, "no microbatches, replicated"),
        ({"prefetch": False, "model.remat": "dots"}, "microbatch 1,024, replicated, remat dots, no prefetch"),
        ({"stream_inputs": True, "sharding": "fsdp"}, "microbatch 1,024, fsdp, streamed"),
    ],
)
def test_what_decides_the_memory(changes, words):
    assert how(dataclasses.replace(MILLION, config=config(**changes))) == words


def test_with_unit():
    sizes = [0, 999, 1024, 1000 * 1024, 3 * 2**20, 1023 * 2**20, 5000 * GIB]
    assert [with_unit(size) for size in sizes] == [
        *("0 bytes", "999 bytes", "1.00 KiB", "1,000 KiB", "3.00 MiB", "1,023 MiB", "5,000 GiB")
    ]


def test_gib():
    assert [gib(int(x * GIB)) for x in (0, 0.017, 9.99, 9.996, 1234.5)] == ["0.00", "0.02", "9.99", "10.0", "1,234.5"]


def test_json():
    record = json.loads(json.dumps(to_json(MILLION)))
    assert record["peak"] == MILLION.peak == sum(record["parts"].values()) and record["fits"] is True
    assert record["cluster"] == {"target": "a100-40gb", "hosts": 1, "gpus_per_host": 8}
    assert record["collectives"]["all-gather"] == {"calls": 14, "bytes": 3 * GIB // 2}
    assert record["notes"] == ["attention is planned as XLA's"]
    assert record["config"]["batch_size"] == 1_048_576 and record["mesh"] == {"rows": 8}


def colours(path):
    """Share of the picture that has each colour."""
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return {
        name: (pixels == [int(color[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).mean()
        for name, color in {"inputs": "#1a9850", "activations": "#ee7f2d", "too much": "#b3261e"}.items()
    }


def test_picture_of_one_plan(tmp_path):
    draw(tmp_path / "one.png", [MILLION])
    shares = colours(tmp_path / "one.png")
    assert shares["inputs"] / shares["activations"] == pytest.approx(18 / 8, rel=0.1)
    assert shares["too much"] == 0


def test_picture_of_several_plans(tmp_path):
    huge = with_part("activations", 3000 * GIB)
    other = dataclasses.replace(MILLION, cluster=Cluster("h200-141gb", 8, 8), pool=129 * GIB)
    draw(tmp_path / "all.png", [MILLION, huge, other])
    shares = colours(tmp_path / "all.png")
    assert shares["too much"] > 0 and shares["inputs"] > 0.01  # the huge one leaves room for the others


def test_no_plan_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match="no plan to draw"):
        draw(tmp_path / "none.png", [])
