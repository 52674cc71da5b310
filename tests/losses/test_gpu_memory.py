"""Memory of the losses on A100s that are not there, as XLA plans it; needs the extra `plan` (make test-plan)."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from disco_jax.gpu_targets import target_devices
from disco_jax.hlo import read_program
from disco_jax.losses import contrastive_loss, sigmoid_loss
from docs.draw_loss import received

pytest.importorskip("jax_plugins.xla_cuda12", reason="make test-plan")
MIB = 2**20


@functools.cache  # jax cannot read programs for absent GPUs back from its cache
def compiled(B, D, rows, cols=1, loss=contrastive_loss, **settings):
    """Value and gradient of bfloat16 features on hosts of 8 A100-40GB, a row of devices within a host."""
    devices = target_devices("a100-40gb", hosts=math.ceil(rows * cols / 8), gpus_per_host=8)
    mesh = jax.make_mesh((cols, rows), ("cols", "rows"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    features = jax.ShapeDtypeStruct((B, D), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(("cols", "rows"))))
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    args = features, features, *[scalar] * (2 if loss is sigmoid_loss else 1)
    settings |= {"mesh": mesh, "rows": "rows", "cols": "cols" if cols > 1 else None}
    step = jax.value_and_grad(lambda *args: loss(*args, **settings), argnums=tuple(range(len(args))))
    return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).compile()


@pytest.mark.parametrize(
    "B, D, rows, cols, settings, limit",
    [
        (32_768, 512, 8, 1, {}, 64),
        (32_768, 512, 8, 1, {"chunk": 1024}, 37),
        (1_048_576, 768, 8, 1, {}, 710),
        (196_608, 512, 64, 1, {}, 47),
        (196_608, 512, 8, 8, {}, 160),
        (32_768, 512, 8, 1, {"loss": sigmoid_loss}, 72),
        (32_771 * 8, 512, 8, 1, {}, 215),  # a prime number of pairs on each
    ],
)
def test_temporary_memory(B, D, rows, cols, settings, limit):
    used = compiled(B, D, rows, cols, **settings).memory_analysis().temp_size_in_bytes / MIB
    assert 0.5 * limit < used <= limit


def test_the_other_methods_hold_their_blocks():
    """float32: one block of similarities, and DisCo's two; the test above can fail."""
    block = 32_768**2 / 8 * 4 / MIB
    for method, blocks in (("block", 1), ("disco", 2)):
        assert compiled(32_768, 512, 8, method=method).memory_analysis().temp_size_in_bytes / MIB > blocks * block


@pytest.mark.parametrize("r, c", [(64, 1), (8, 8)])
def test_what_travels(r, c):
    """(7.1) of docs/loss.md for bfloat16 features: sums over devices are float32. Beside it, two scalars."""
    beside = read_program(compiled(196_608, 512, r, c).as_text()).bytes_moved - received(196_608, 512, r, c, width=2)
    assert 0 < beside < 2 * 2 * 4
