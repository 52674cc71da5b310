"""Plans of whole training steps for GPUs that are not there; needs the extra `plan` (make test-plan)."""

import importlib

import pytest

from disco_jax.planning.measure import make_plan
from disco_jax.planning.report import GIB, Cluster
from disco_jax.training import default_config

pytest.importorskip("jax_plugins.xla_cuda12", reason="make test-plan")
HOST = Cluster("a100-40gb", hosts=1, gpus_per_host=8)


def tiny(**changes):
    config = default_config()
    config.update(batch_size=4096, eval={"batch_size": 64}, data={"source": "scenes", "train": "train"})
    config.model.update(name="tiny")
    config.update_from_flattened_dict(changes)
    return config


def test_vit_b32_at_32k():
    plan = make_plan(importlib.import_module("configs.vit_b32_32k").get_config(), HOST)
    assert plan.fits and 10 * GIB < plan.peak < 20 * GIB
    # 151 M parameters, two moments, and 4,096 images twice: they are there, and the next ones travel.
    assert plan.parts["parameters"] == pytest.approx(151.28e6 * 4, rel=1e-3)
    assert plan.parts["optimizer"] == pytest.approx(2 * 151.28e6 * 4, rel=1e-3)
    assert plan.parts["inputs"] == 2 * 4096 * (224 * 224 * 3 + 77 * 4)
    # Features and their gradients go round by the loss, parameters' gradients are summed once.
    assert plan.collectives["all-reduce"][1] == pytest.approx(2 * 7 / 8 * 151.28e6 * 4, rel=0.01)


def test_microbatches_streams_and_fsdp_take_less():
    whole = make_plan(tiny(**{"eval.batch_size": 16_384}), HOST)
    (attention, evaluation) = whole.notes
    assert attention.startswith("attention is planned as XLA's")
    assert evaluation.startswith("the evaluation encodes 2,048 samples at a time on a GPU, more than the step")
    pieces = make_plan(tiny(microbatch=64), HOST)
    streamed = make_plan(tiny(microbatch=64, stream_inputs=True), HOST)
    fsdp = make_plan(
        tiny(microbatch=64, sharding="fsdp", **{"model.dtype": "float32"}),
        Cluster("h100-80gb", hosts=2, gpus_per_host=4),
    )
    assert fsdp.notes == () and fsdp.mesh == {"cols": 2, "rows": 4}
    assert pieces.parts["activations"] < 0.5 * whole.parts["activations"]
    assert streamed.parts["inputs"] == 2 * 64 * (32 * 32 * 3 + 32 * 4) < pieces.parts["inputs"] / 4
    assert fsdp.parts["optimizer"] < 0.2 * pieces.parts["optimizer"]
    assert fsdp.parts["parameters"] < 0.2 * pieces.parts["parameters"]
    assert fsdp.collectives["all-gather"][0] > pieces.collectives["all-gather"][0]
    assert len({plan.flops_per_sample for plan in (whole, pieces, streamed, fsdp)}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": (("rows", 4),)}, r"config\.mesh=\(\('rows', 4\),\) has 4 devices and the cluster 8: .*-1"),
        ({"mesh": (("cols", 16), ("rows", -1))}, r"asks for 16 devices, there are 8 \(gpu\): lower its sizes$"),
        ({"mesh": (("rows", -2),)}, "needs sizes of at least 1"),
        ({"batch_size": 4100}, "does not divide over the 8 devices"),
        ({"model.attention": "cudnn", "model.dtype": "float32"}, "cuDNN's attention computes in bfloat16, not float32"),
        ({"smoke": True}, "plan without it"),
        ({"microbatch": 0}, r"config\.microbatch=0"),
        ({"sharding": "zero3"}, "replicated, zero1, fsdp"),
    ],
)
def test_what_cannot_be_planned(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tiny(**changes), HOST)
