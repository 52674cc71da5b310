"""The search against exhaustive search on made-up memory, counting plans: each stands for minutes of compiling."""

import itertools
import random
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_jax.planning.report import GIB, PARTS, Cluster, Plan
from disco_jax.planning.search import BATCH_STEP, batch_sizes, divisors, find_batch, find_largest, find_microbatch
from disco_jax.training import ConfigError, default_config

POOL = 36 * GIB
EIGHT = Cluster("a100-40gb", 1, 8)
CONFIG = default_config()


def plan_of(fixed, growing, *, in_part="activations"):
    """`growing` bytes in one part, `fixed` in the parameters."""
    parts = dict.fromkeys(PARTS, 0) | {"parameters": int(fixed), in_part: int(growing)}
    return Plan(CONFIG, EIGHT, {"rows": 8}, POOL, parts, {}, flops_per_sample=0, compile_seconds=0.0, notes=())


def affine(fixed, slope):
    return lambda size: plan_of(fixed, slope * size)


def jumping(fixed, slope, at, by):
    """Such as where XLA goes over to another algorithm."""
    return lambda size: plan_of(fixed, slope * size + (by if size >= at else 0))


def noisy(fixed, slope, share, seed):
    """Such as by alignment and fragmentation."""

    def make_plan(size):
        noise = random.Random(f"{seed} {size}").uniform(-share, share)
        return plan_of(fixed, slope * size * (1 + noise))

    return make_plan


def flat_then_affine(fixed, slope, until):
    """The peak of a streamed step is that of its largest stage."""
    return lambda size: plan_of(fixed, slope * max(size, until))


MEMORY = {
    "affine": affine(2.2 * GIB, 150_000),
    "affine, small": affine(2.2 * GIB, 20_000_000),
    "affine, nearly all fixed": affine(35 * GIB, 9_000),
    "fixed parts under a wrong name": lambda size: plan_of(0, 20 * GIB + 100_000 * size),
    "jump where it still fits": jumping(2.2 * GIB, 150_000, at=100_000, by=6 * GIB),
    "jump over the pool": jumping(2.2 * GIB, 150_000, at=120_000, by=60 * GIB),
    "noise": noisy(2.2 * GIB, 150_000, 0.004, "a"),
    "more noise": noisy(2.2 * GIB, 150_000, 0.02, "b"),
    "flat, then affine": flat_then_affine(2.2 * GIB, 20_000, until=400_000),
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("first", [8, 32_768, 8_388_608])
@pytest.mark.parametrize("unit", [1024, 8_192])
def test_batches(name, first, unit):
    make_plan = MEMORY[name]
    sizes = batch_sizes(unit, first)
    search = find_largest(make_plan, sizes, first, ["activations"])
    fitting = [size for size in range(unit, 2_500_000, unit) if make_plan(size).fits]
    assert search.plan.fits == bool(fitting)
    if not fitting:
        assert search.largest is None and list(search.plans)[-1] == unit
        return
    assert search.largest in fitting
    noise = 0.05 if "noise" in name else 0  # a larger one may fit by chance
    assert max(fitting) < max(search.largest * (1 + BATCH_STEP + noise), search.largest + 2 * unit)
    most = 11 if name == "jump over the pool" else 6 if first >= 32_768 else 8
    assert len(search.plans) <= most, list(search.plans)


@pytest.mark.parametrize("local", [4096, 131_072, 786_432, 720_720, 32_749])
@pytest.mark.parametrize("first", [1, 128, 1024])
@pytest.mark.parametrize("name", [name for name in MEMORY if "noise" not in name])
def test_microbatches(local, first, name):
    make_plan, sizes = MEMORY[name], divisors(local)
    search = find_largest(make_plan, sizes, first, ["activations"])
    assert search.largest == max((size for size in sizes if make_plan(size).fits), default=None)
    assert len(search.plans) <= (8 if name == "jump over the pool" else 6), list(search.plans)


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.floats(0, 40 * GIB),
    slope=st.floats(1, GIB),
    jump_at=st.integers(1, 10**6),
    jump_by=st.floats(0, 40 * GIB),
    first=st.integers(1, 10**6),
    number=st.integers(1, 10**6),
)
def test_any_growing_memory(fixed, slope, jump_at, jump_by, first, number):
    make_plan = jumping(fixed, slope, jump_at, jump_by)
    for sizes in (divisors(number), batch_sizes(8, first)):
        search = find_largest(make_plan, sizes, first, ["activations"])
        fitting = sizes[: bisect_right(sizes, POOL, key=lambda size: make_plan(size).peak)]
        assert search.largest == max(fitting, default=None)
        assert len(search.plans) <= 16


def test_known_parts_give_the_answer_in_three_plans():
    search = find_largest(affine(2.2 * GIB, 150_000), batch_sizes(8192, 32_768), 32_768, ["activations"])
    assert len(search.plans) == 3
    assert search.verdict("config.batch_size") == (
        f"largest that fits: --config.batch_size={search.largest} ({max(search.plans)} needs 36.5 GiB)"
    )


def test_a_batch_is_whole_microbatches_on_all_gpus():
    sizes = batch_sizes(8192, 1_048_576)
    assert sizes[0] == 8192 and 1_048_576 in sizes and all(size % 8192 == 0 for size in sizes)
    for size, larger in itertools.pairwise(sizes):
        assert size < larger <= max(size * (1 + BATCH_STEP), size + 8192)
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(9) == [1, 3, 9]


def test_all_fit_or_none():
    search = find_largest(affine(GIB, 1), divisors(4096), 1024, ["activations"])
    assert search.verdict("config.microbatch") == ("largest that fits: --config.microbatch=4096 (the largest there is)")
    search = find_largest(affine(40 * GIB, 1), divisors(4096), 1024, ["activations"])
    assert search.largest is None and list(search.plans) == [1024, 1]
    assert search.verdict("config.microbatch") == (
        "nothing fits: even config.microbatch=1 needs 40.0 GiB, 4.00 GiB more than the pool"
    )
    assert search.plan is search.plans[1]


@pytest.mark.parametrize(
    "microbatch, streamed, part",
    [(None, False, "activations"), (1024, False, "inputs"), (1024, True, "features and loss")],
)
def test_find_batch_varies_the_config(microbatch, streamed, part):
    def make_plan(config, cluster):
        assert cluster == EIGHT and config.microbatch == microbatch
        asked.append(config.batch_size)
        return plan_of(2 * GIB, 150_000 * config.batch_size / 8, in_part=part)

    asked: list[int] = []
    config = default_config()
    config.update(batch_size=32_768, microbatch=microbatch, stream_inputs=streamed)
    search = find_batch(config, EIGHT, make_plan)
    assert asked == list(search.plans) and asked[0] == 32_768 and len(asked) == 3  # part is known to grow
    assert config.batch_size == 32_768
    exact = 34 * GIB / 150_000 * 8
    assert search.largest <= exact < search.largest * (1 + BATCH_STEP)
    assert search.largest % (8 * (microbatch or 1)) == 0


@pytest.mark.parametrize("streamed, part", [(False, "activations"), (True, "inputs")])
def test_find_microbatch_varies_the_config(streamed, part):
    config = default_config()
    config.update(batch_size=1_048_576, stream_inputs=streamed)
    search = find_microbatch(
        config, EIGHT, lambda config, cluster: plan_of(2 * GIB, 10_000_000 * config.microbatch, in_part=part)
    )
    assert search.largest == 2048 and list(search.plans) == [1024, 2048, 4096]
    assert config.microbatch is None


@pytest.mark.parametrize(
    "find, changes, message",
    [
        (find_microbatch, {"batch_size": 100}, "batch_size=100 does not divide over 8 GPUs: use a multiple"),
        (find_microbatch, {"batch_size": 4}, "batch_size=4 does not divide over 8 GPUs"),
        (find_microbatch, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (find_microbatch, {"microbatch": -1}, "microbatch=-1 must be at least 1"),
        (find_batch, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (find_batch, {"microbatch": 0}, "microbatch=0 must be at least 1"),
    ],
)
def test_refusals(find, changes, message):
    config = default_config()
    config.update(changes)
    with pytest.raises(ConfigError, match=message):
        find(config, EIGHT, lambda config, cluster: plan_of(0, 0))
