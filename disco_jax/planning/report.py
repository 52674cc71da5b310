"""What was planned, and its text for the terminal."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from disco_jax.gpu_targets import TARGETS

PARTS = ("parameters", "optimizer", "inputs", "features and loss", "activations")
GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """Hosts with GPUs of one kind. target: its name in `gpu_targets.TARGETS`."""

    target: str
    hosts: int
    gpus_per_host: int

    @property
    def size(self) -> int:
        """GPUs of all hosts."""
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True)
class Plan:
    """What the training step of a config takes on a cluster, by its compiled program.

    mesh: sizes of its axes in GPUs; pool: bytes that the runtime can give on one GPU; parts: bytes on each GPU when it
    holds most, by the names in PARTS, of which "activations" include gradients and workspace; collectives: calls, and
    bytes that each GPU receives, of each kind in one step; flops_per_sample: model FLOPs of a step; notes: what to know
    about the plan, one line each.
    """

    config: ConfigDict
    cluster: Cluster
    mesh: dict[str, int]
    pool: int
    parts: dict[str, int]
    collectives: dict[str, tuple[int, int]]
    flops_per_sample: int
    compile_seconds: float
    notes: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes that each GPU holds at most."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the runtime can give as much."""
        return self.peak <= self.pool

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """The kinds of collectives that the step has."""
        return {kind: (calls, size) for kind, (calls, size) in self.collectives.items() if calls}

    @property
    def largest_part(self) -> str:
        """The name of the part with most bytes."""
        return max(self.parts, key=self.parts.__getitem__)


def text(plan: Plan) -> str:
    """The plan in lines for the terminal; the last one is the verdict."""
    hosts, gpus, config = plan.cluster.hosts, plan.cluster.gpus_per_host, plan.config
    share = config.batch_size // plan.cluster.size
    lines = [
        f"{title(plan)} on {plan.cluster.size} x {TARGETS[plan.cluster.target].description}",
        f"hosts: {hosts} with {gpus} GPU{'s' * (gpus > 1)} each; a GPU has {share:,} samples; {how(plan)}",
        f"compiled in {plan.compile_seconds:.0f} s",
        "",
        *_table(
            ("memory of a GPU at the peak", "GiB", "of the pool"),
            [(name, f"{size / GIB:.2f}", f"{size / plan.pool:.1%}") for name, size in plan.parts.items()]
            + [("all", f"{plan.peak / GIB:.2f}", f"{plan.peak / plan.pool:.1%}")],
        ),
        "",
    ]
    if plan.traffic:
        lines += _table(
            ("between GPUs in a step", "calls", "received by each"),
            [(kind, f"{calls:,}", with_unit(size)) for kind, (calls, size) in plan.traffic.items()],
        )
    else:
        lines.append("nothing travels between GPUs")
    lines += ["", f"{plan.flops_per_sample / 1e9:,.1f} GFLOPs of the model per sample and step"]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join([*lines, "", verdict(plan)])


def title(plan: Plan) -> str:
    """Such as "ViT-B-32, batch 32,768"."""
    return f"{plan.config.model.name}, batch {plan.config.batch_size:,}"


def how(plan: Plan) -> str:
    """What decides the memory, e.g. "microbatch 1,024, fsdp, remat full, streamed"."""
    config = plan.config
    return ", ".join(
        [
            "no microbatches" if config.microbatch is None else f"microbatch {config.microbatch:,}",
            config.sharding,
            *[f"remat {config.model.remat}"] * (config.model.remat != "none"),
            *["streamed" if config.stream_inputs else "no prefetch"] * (config.stream_inputs or not config.prefetch),
        ]
    )


def verdict(plan: Plan) -> str:
    """One line: whether it fits, and what to try where it does not."""
    if plan.fits:
        return f"fits: {gib(plan.peak)} of {gib(plan.pool)} GiB"
    return (
        f"does not fit: {gib(plan.peak - plan.pool)} GiB too much, {gib(plan.peak)} of {gib(plan.pool)} GiB; "
        f"largest part: {plan.largest_part}; try {', '.join(_advice(plan))}"
    )


def gib(size: int) -> str:
    """Bytes as a number of GiB, with one digit behind the point, or two where it is below 10."""
    value = size / GIB
    return f"{value:,.1f}" if value >= 9.995 else f"{value:.2f}"


def with_unit(size: int) -> str:
    """Bytes to three digits in the unit that suits."""
    value, unit = next(
        ((size / scale, unit) for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if size >= scale),
        (size, "bytes"),
    )
    return f"{value:,.0f} {unit}" if value >= 99.95 or unit == "bytes" else f"{value:#.3g} {unit}"


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan, its peak and whether it fits, for `json.dump`; sizes in bytes."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return fields | {
        "config": plan.config.to_dict(),
        "cluster": dataclasses.asdict(plan.cluster),
        "collectives": {kind: {"calls": calls, "bytes": size} for kind, (calls, size) in plan.collectives.items()},
        "peak": plan.peak,
        "fits": plan.fits,
    }


def _advice(plan: Plan) -> list[str]:
    """What makes the large parts smaller, the largest first; not what the plan has already."""
    config = plan.config
    if plan.cluster.size == 1:
        optimizer = parameters = "more GPUs with config.sharding='fsdp'"
    else:
        parameters = "more GPUs" if config.sharding == "fsdp" else "config.sharding='fsdp'"
        optimizer = "config.sharding='zero1'" if config.sharding == "replicated" else "more GPUs"
    smaller_microbatch = [] if config.microbatch == 1 else ["--find-microbatch"]
    walked = config.loss.method == "chunked"
    cures = {
        "parameters": [parameters],
        "optimizer": [optimizer],
        "inputs": smaller_microbatch
        if config.stream_inputs
        else [
            *["config.prefetch=False"] * config.prefetch,
            *["--find-microbatch"] * (config.microbatch is None),  # which streaming needs
            "config.stream_inputs=True",
        ],
        "features and loss": ["a smaller config.loss.chunk" if walked else "config.loss.method='chunked'", "more GPUs"],
        "activations": [*smaller_microbatch, *["config.model.remat='full'"] * (config.model.remat != "full")],
    }
    large = [name for name, size in plan.parts.items() if size >= plan.peak / 10]
    large.sort(key=plan.parts.__getitem__, reverse=True)
    return list(dict.fromkeys([cure for name in large for cure in cures[name]] + ["--find-batch"]))


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in (heading, *rows)
    ]
