"""The README's table of what fits where: compiles the training steps of configs for GPU clusters, without a GPU.

    make plan-table

Prints the table, puts it between the lines MARKS of README.md, and writes plans.json and plans.png.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: GPUs of this machine are not needed, and left alone

import jax

from disco_jax.planning.draw import draw
from disco_jax.planning.measure import make_plan
from disco_jax.planning.report import Cluster, Plan, gib, how, to_json

MARKS = "<!-- plan-table -->", "<!-- /plan-table -->"
ONE_GPU, ONE_HOST, FOUR_HOSTS, EIGHT_HOSTS = (
    Cluster("a100-40gb", hosts, gpus) for hosts, gpus in ((1, 1), (1, 8), (4, 8), (8, 8))
)


class Case(NamedTuple):
    """A config of configs/ on a cluster."""

    config: str
    cluster: Cluster


CASES = (
    Case("vit_b32_32k", ONE_HOST),
    Case("vit_b32_32k", ONE_GPU),
    Case("vit_b32_196k", EIGHT_HOSTS),
    Case("vit_b32_196k", ONE_HOST),
    Case("vit_b32_1m", ONE_HOST),
    Case("vit_b32_4m", ONE_HOST),
    Case("vit_b16_32k", ONE_HOST),
    Case("vit_l14_90k", FOUR_HOSTS),
    Case("vit_l14_262k", ONE_HOST),
    Case("vit_h14_32k", EIGHT_HOSTS),
    Case("vit_bigg14_32k", EIGHT_HOSTS),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Plans all cases, prints the table and writes it."""
    parser = argparse.ArgumentParser(description="Plans the README's configs for GPU clusters, without a GPU.")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="where the table goes (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/plans"), help="folder (%(default)s)")
    args = parser.parse_args(argv)
    try:
        with_table(args.readme.read_text(encoding="utf-8"), "")
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"{args.readme}: {error}")

    plans = []
    for number, case in enumerate(CASES, 1):
        print(f"{number}/{len(CASES)} {describe(case)}: compiling ...", flush=True)
        config = importlib.import_module(f"configs.{case.config}").get_config()
        try:
            plan = make_plan(config, case.cluster)
        except (ValueError, ImportError) as error:
            sys.exit(f"{describe(case)}: {error}")
        print(f"    {gib(plan.peak)} of {gib(plan.pool)} GiB ({plan.compile_seconds:.0f} s)", flush=True)
        plans.append(plan)

    print(f"\n{table(plans)}\n")
    cases = [{"name": case.config} | to_json(plan) for case, plan in zip(CASES, plans, strict=True)]
    record = {"jax": jax.__version__, "plans": cases}
    (args.out / "plans.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draw(args.out / "plans.png", plans)
    readme = with_table(args.readme.read_text(encoding="utf-8"), table(plans))  # others may have edited it meanwhile
    args.readme.write_text(readme, encoding="utf-8")
    print(f"wrote {args.out / 'plans.json'}, {args.out / 'plans.png'} and the table of {args.readme}")


def describe(case: Case) -> str:
    """For the progress."""
    return f"{case.config} on {gpus(case.cluster)} {case.cluster.target}"


def gpus(cluster: Cluster) -> str:
    """Such as "8", or "8 x 8" of several hosts."""
    return f"{cluster.hosts} x {cluster.gpus_per_host}" if cluster.hosts > 1 else str(cluster.gpus_per_host)


def table(plans: Sequence[Plan]) -> str:
    """In Markdown, a row for each of CASES."""
    lines = [
        "| config | batch | GPUs | how | peak of pool, GiB | largest part | fits |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, plan in zip(CASES, plans, strict=True):
        cells = (
            f"[`{case.config}.py`](configs/{case.config}.py)",
            f"{plan.config.batch_size:,}",
            gpus(plan.cluster),
            how(plan),
            f"{gib(plan.peak)} of {gib(plan.pool)}",
            f"{plan.largest_part}, {gib(plan.parts[plan.largest_part])}",
            "yes" if plan.fits else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str, table: str) -> str:
    """The text with `table` between MARKS. Raises ValueError where these are not there once each, in their order."""
    first, last = MARKS
    before, found, rest = text.partition(f"{first}\n")
    old, found_too, after = rest.partition(f"{last}\n")
    if not (found and found_too) or any(mark in part for mark in MARKS for part in (before, old, after)):
        raise ValueError(f"the table needs one line {first} and, below, one line {last}: put them where it goes")
    return f"{before}{first}\n{table}\n{last}\n{after}"


if __name__ == "__main__":
    main()
