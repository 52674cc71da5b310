"""The largest batch or microbatch that fits, in few compilations: each takes minutes.

Memory is about affine in either. One plan tells the slope by those of its parts that grow; from then on lines through
the nearest plans do. The search ends when a size fits and the next one does not.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

from disco_jax.planning.report import Cluster, Plan, gib
from disco_jax.training.config import MOST_SAMPLES, ConfigError

BATCH_STEP = 0.03  # the batch is found to this share of it
FIRST_MICROBATCH = 1024
MOST_GROWTH = 64.0  # times the largest size that fits: memory may be flat at first, and no line tells where that ends
MOST_LINES = 4  # plans between a size that fits and one that doesn't, before the rest is halved


@dataclass(frozen=True)
class Search:
    """What a search found. sizes: all candidates, growing; plans: of the sizes that were compiled, in that order."""

    sizes: Sequence[int]
    plans: dict[int, Plan]

    @property
    def largest(self) -> int | None:
        """The largest size that fits; None where not even the least one does."""
        return max((size for size, plan in self.plans.items() if plan.fits), default=None)

    @property
    def plan(self) -> Plan:
        """Of the largest size that fits, or of the least one."""
        return self.plans[min(self.plans) if self.largest is None else self.largest]

    def verdict(self, setting: str) -> str:
        """One line; `setting` is the name of what was searched, e.g. "config.batch_size"."""
        if self.largest is None:
            least = min(self.plans)
            return (
                f"nothing fits: even {setting}={least} needs {gib(self.plan.peak)} GiB, "
                f"{gib(self.plan.peak - self.plan.pool)} GiB more than the pool"
            )
        larger = [size for size in self.plans if size > self.largest]
        beyond = f"{min(larger)} needs {gib(self.plans[min(larger)].peak)} GiB" if larger else "the largest there is"
        return f"largest that fits: --config.{setting.removeprefix('config.')}={self.largest} ({beyond})"


def find_batch(config: ConfigDict, cluster: Cluster, make_plan: Callable[[ConfigDict, Cluster], Plan]) -> Search:
    """The largest batch size that fits, in steps of BATCH_STEP, or of one (micro)batch on all GPUs where that is more.

    Begins at `config.batch_size`. Raises `ConfigError`, and what `make_plan` raises.
    """
    _check_positive(config)
    microbatch = 1 if config.microbatch is None else config.microbatch
    # Microbatches encode alike however many there are, and a streamed batch is on no GPU.
    grows = ["features and loss"]
    grows += [] if config.stream_inputs else ["inputs"]
    grows += ["activations"] if config.microbatch is None else []
    sizes = batch_sizes(cluster.size * microbatch, config.batch_size)
    return find_largest(_varied(config, cluster, make_plan, "batch_size"), sizes, config.batch_size, grows)


def find_microbatch(config: ConfigDict, cluster: Cluster, make_plan: Callable[[ConfigDict, Cluster], Plan]) -> Search:
    """The largest microbatch that fits: among all divisors of a GPU's share of the batch.

    Begins at `config.microbatch`. Raises `ConfigError`, and what `make_plan` raises.
    """
    _check_positive(config)
    local, rest = divmod(config.batch_size, cluster.size)
    if local < 1 or rest:
        raise ConfigError(
            f"config.batch_size={config.batch_size} does not divide over {cluster.size} GPUs: use a multiple"
        )
    first = FIRST_MICROBATCH if config.microbatch is None else config.microbatch
    grows = ["activations", "inputs"] if config.stream_inputs else ["activations"]
    return find_largest(_varied(config, cluster, make_plan, "microbatch"), divisors(local), first, grows)


def find_largest(make_plan: Callable[[int], Plan], sizes: Sequence[int], first: int, grows: Collection[str]) -> Search:
    """The largest of some sizes whose plan fits, if whatever is smaller than a size that fits does too.

    Args:
        make_plan: gives the plan of a size; called as rarely as possible, at most once a size.
        sizes: the candidates, growing.
        first: where to begin: at the largest size that is no larger.
        grows: the parts of a plan that are about proportional to the size.
    """
    plans: dict[int, Plan] = {}
    low, high = -1, len(sizes)  # all up to sizes[low] fit, none from sizes[high] on does
    index, lines = max(0, bisect_right(sizes, first) - 1), 0
    while True:
        plan = plans[sizes[index]] = make_plan(sizes[index])
        low, high = (index, high) if plan.fits else (low, index)
        if high - low == 1:
            return Search(sizes, plans)
        lines += high < len(sizes)
        middle = (low + high) // 2
        guess = middle if lines > MOST_LINES else bisect_right(sizes, _crossing(plans, grows)) - 1
        index = min(max(guess, low + 1), high - 1)  # where lines lead nowhere new, the neighbour should be the last


def batch_sizes(unit: int, first: int) -> list[int]:
    """Multiples of `unit`, in steps of BATCH_STEP where that is more; also `first` where it is a multiple."""
    sizes, multiple = set(), 1
    while multiple * unit <= MOST_SAMPLES:
        sizes.add(multiple * unit)
        multiple = max(multiple + 1, math.floor(multiple * (1 + BATCH_STEP)))
    return sorted(sizes | {first}) if first % unit == 0 else sorted(sizes)


def divisors(number: int) -> list[int]:
    """All of them, growing."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _check_positive(config: ConfigDict) -> None:
    for name, value in (("batch_size", config.batch_size), ("microbatch", config.microbatch)):
        if value is not None and value < 1:
            raise ConfigError(f"config.{name}={value} must be at least 1")


def _crossing(plans: dict[int, Plan], grows: Collection[str]) -> float:
    """The size at which memory should reach the pool, by the nearest plans."""
    sizes = sorted(plans)
    fitting = [size for size in sizes if plans[size].fits]
    beyond = [size for size in sizes if not plans[size].fits]
    near = fitting[-1] if fitting else beyond[0]
    if len(sizes) == 1:
        slope = sum(plans[near].parts[name] for name in grows) / near
    else:
        other = beyond[0] if fitting and beyond else fitting[-2] if fitting else beyond[1]
        slope = (plans[other].peak - plans[near].peak) / (other - near)
    most = math.inf if beyond else MOST_GROWTH * near
    free = plans[near].pool - plans[near].peak
    if slope <= 0:
        return most if free >= 0 else 0.0
    return min(near + free / slope, most)


def _varied(
    config: ConfigDict, cluster: Cluster, make_plan: Callable[[ConfigDict, Cluster], Plan], setting: str
) -> Callable[[int], Plan]:
    """The plan by one of the settings."""

    def make(value: int) -> Plan:
        varied = config.copy_and_resolve_references()
        varied[setting] = value
        return make_plan(varied, cluster)

    return make
