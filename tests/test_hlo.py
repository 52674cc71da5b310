"""The reader of compiled programs, on texts as XLA writes them, and on programs for CPUs and absent GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from disco_jax.gpu_targets import target_devices
from disco_jax.hlo import Collective, Traffic, read_program

PROGRAM = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %carry = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %own = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %all = f32[32,8]{1,0} all-gather(%own), channel_id=1, REPLICA_GROUPS, dimensions={0}, use_global_device_ids=true
  %tile = f32[4,32]{1,0} dot(%own, %all), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%i, %own)
}

%cond (carry: (s32[], f32[4,8])) -> pred[] {
  %carry = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (features: bf16[4,8]) -> bf16[4,8] {
  %features = bf16[4,8]{1,0} parameter(0)
  %start = (s32[], f32[4,8]{1,0}) custom-call(%features), custom_call_target="start"
  %loop = (s32[], f32[4,8]) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %mean = bf16[4,8]{1,0} all-reduce(%features), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "groups, size",
    [
        ("replica_groups=[2,8]<=[16]", 8),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", 2),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=mesh['cols'=2,'rows'=8] {'rows'}", 8),
        ("replica_groups=mesh['cols'=2,'rows'=8] {'cols','rows'}", 16),
    ],
)
def test_products_and_collectives_of_a_loop(groups, size):
    program = read_program(PROGRAM.replace("REPLICA_GROUPS", groups))
    assert program.multiply_adds == 3 * 4 * 32 * 8
    gathers = Collective("all-gather", size, 4 * 8 * 4 * (size - 1), calls=3)
    mean = Collective("all-reduce", 2, 2 * 4 * 8 * 2 // 2, calls=1)
    assert sorted(program.collectives) == [gathers, mean]
    assert program.bytes_moved == 3 * gathers.bytes + mean.bytes
    assert program.by_kind == {
        "all-gather": Traffic(3, 3 * gathers.bytes),
        "all-reduce": Traffic(1, mean.bytes),
        "reduce-scatter": Traffic(0, 0),
        "all-to-all": Traffic(0, 0),
        "collective-permute": Traffic(0, 0),
    }


GATHER = "all-gather(%own), channel_id=1, replica_groups=[2,8]<=[16], dimensions={0}, use_global_device_ids=true"
WRAPPED = f"""
%wrapped (own: f32[4,8]) -> f32[32,8] {{
  %own = f32[4,8]{{1,0}} parameter(0)
  ROOT %gathered = f32[32,8]{{1,0}} {GATHER}
}}
"""


@pytest.mark.parametrize(
    "start, done",
    [
        (GATHER.replace("(", "-start(", 1), "all-gather-done(%start)"),
        ("async-start(%own), calls=%wrapped", "async-done(%start)"),
        ("async-start(%own), calls=%wrapped", "async-done(%start), calls=%wrapped"),
    ],
    ids=["named", "wrapped", "wrapped twice"],
)
def test_an_asynchronous_collective_counts_once(start, done):
    plain = PROGRAM.replace("REPLICA_GROUPS", "replica_groups=[2,8]<=[16]")
    pair = f"%start = ((f32[4,8]{{1,0}}), f32[32,8]{{1,0}}, u32[]) {start}\n  %all = f32[32,8]{{1,0}} {done}"
    text = plain.replace(f"%all = f32[32,8]{{1,0}} {GATHER}", pair).replace("\nENTRY", WRAPPED + "\nENTRY")
    assert "-start(" in text
    program = read_program(text)
    assert sorted(program.collectives) == sorted(read_program(plain).collectives)


def test_all_operands_of_a_merged_collective_travel():
    """A compiler merges what several calls send into one."""
    text = PROGRAM.replace("REPLICA_GROUPS", "replica_groups=[2,8]<=[16]").replace(
        "%mean = bf16[4,8]{1,0} all-reduce(%features)",
        "%mean = (bf16[4,8]{1,0}, /*index=1*/s32[], f32[4,8]{1,0}) all-reduce(%features, %i, %x)",
    )
    text = text.replace("  %start =", "  %i = s32[] constant(0)\n  %x = f32[4,8]{1,0} constant(0)\n  %start =")
    assert read_program(text).by_kind["all-reduce"] == Traffic(1, 64 + 4 + 128)


MICROBATCHES, BLOCKS, b, W, N = 3, 2, 8, 16, 8


def nested_loops(inputs, shards):
    """On one device: microbatches over blocks whose kernels lie divided over the devices, as a training step has it."""

    def block(x, shard):
        kernel = jax.lax.all_gather(shard * x.mean(), "rows", axis=1, tiled=True)  # not the same in all microbatches
        x = jnp.tanh(x @ kernel)
        return x, jax.lax.psum_scatter(x.T @ x, "rows", tiled=True)

    def microbatch(total, x):
        x, gradients = jax.lax.scan(block, x, shards)
        x = jax.lax.ppermute(x, "rows", [(i, (i + 1) % N) for i in range(N)])
        x = jax.lax.all_to_all(x + total, "rows", 0, 0, tiled=True)
        return total + jax.lax.psum(x.sum(0), "rows"), (x, gradients)

    return jax.lax.scan(microbatch, jnp.zeros(W), inputs)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_nested_loops_of_a_compiled_program(platform):
    """On GPUs the collectives are asynchronous, and the first steps of some loops stand before them."""
    if platform == "gpu":
        pytest.importorskip("jax_plugins.xla_cuda12", reason="make test-plan")
    devices = jax.devices() if platform == "cpu" else target_devices("a100-40gb", hosts=1, gpus_per_host=N)
    mesh = jax.make_mesh((N,), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
    of_rows, of_columns = PartitionSpec(None, "rows"), PartitionSpec(None, None, "rows")
    function = jax.shard_map(
        nested_loops,
        mesh=mesh,
        in_specs=(of_rows, of_columns),
        out_specs=(PartitionSpec(), (of_rows, of_columns)),
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((MICROBATCHES, N * b, W), of_rows), ((BLOCKS, W, W), of_columns))
    ]
    platforms = ("cuda",) if platform == "gpu" else None
    program = read_program(jax.jit(function).trace(*shapes).lower(lowering_platforms=platforms).compile().as_text())
    blocks, others = MICROBATCHES * BLOCKS, N - 1
    assert program.by_kind == {
        "all-gather": Traffic(blocks, blocks * 4 * W * (W // N) * others),
        "reduce-scatter": Traffic(blocks, blocks * 4 * W * (W // N) * others),
        "all-reduce": Traffic(MICROBATCHES, MICROBATCHES * 2 * 4 * (W // N) * others),
        "all-to-all": Traffic(MICROBATCHES, MICROBATCHES * 4 * (b // N) * W * others),
        "collective-permute": Traffic(MICROBATCHES, MICROBATCHES * 4 * b * W),
    }
    assert program.multiply_adds == blocks * 2 * b * W * W  # too small for cuBLAS


def test_a_group_of_one_device_sends_nothing():
    text = PROGRAM.replace("REPLICA_GROUPS", "replica_groups=[16,1]<=[16]")
    assert [collective.kind for collective in read_program(text).collectives] == ["all-reduce"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"known_trip_count":{"n":"3"}', "", "the loop loop has no known number of steps"),
        ("REPLICA_GROUPS", "replica_groups=some", "the devices of a collective are not understood"),
        (" custom-call(", " conditional(", "the conditional start: which branch runs is not known"),
        ("lhs_contracting_dims", "contracting", "the product tile is not understood"),
        ("ENTRY ", "", "has no ENTRY computation"),
        (" custom-call(", " send(", "the send start: what it sends is not known"),
        ("all-gather(%own)", "all-gather(%other)", "the operands of all are not understood"),
        ("dot(%own, %all)", "dot()", "the operands of tile are not understood"),
    ],
)
def test_what_is_not_understood_is_refused(old, new, message):
    text = PROGRAM.replace(old, new).replace("REPLICA_GROUPS", "replica_groups=[2,8]<=[16]")
    with pytest.raises(ValueError, match=message):
        read_program(text)
