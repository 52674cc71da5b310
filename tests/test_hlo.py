"""The reader of compiled programs, on texts as XLA writes them."""

import pytest

from disco_jax.hlo import Collective, read_program

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
    ],
)
def test_what_is_not_understood_is_refused(old, new, message):
    text = PROGRAM.replace(old, new).replace("REPLICA_GROUPS", "replica_groups=[2,8]<=[16]")
    with pytest.raises(ValueError, match=message):
        read_program(text)
