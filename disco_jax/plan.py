"""Tells whether a config fits into the memory of a GPU cluster, without a GPU, by compiling its training step for it.

    python -m disco_jax.plan --config configs/NAME.py --target a100-40gb --hosts 8 --gpus-per-host 8 \
        [--config.key=value ...] [--json FILE] [--png FILE] [--find-batch | --find-microbatch]

Needs pip install -e '.[plan]'. Exit status: 0 where it fits, 1 where it does not, 2 where it cannot be planned.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: GPUs of this machine are not needed, and left alone

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from disco_jax.command import leave, one_line, parse_flags
from disco_jax.gpu_targets import TARGETS
from disco_jax.planning.draw import draw
from disco_jax.planning.measure import make_plan
from disco_jax.planning.report import Cluster, Plan, gib, text, to_json
from disco_jax.planning.search import find_batch, find_microbatch

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.")
TARGET = flags.DEFINE_enum("target", None, list(TARGETS), "The kind of GPU.", required=True)
HOSTS = flags.DEFINE_integer("hosts", 1, "How many hosts there are.", lower_bound=1)
GPUS_PER_HOST = flags.DEFINE_integer("gpus-per-host", 8, "How many GPUs each has.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Write the plan to this file, too.")
PNG = flags.DEFINE_string("png", None, "Draw the plan into this file.")
FIND_BATCH = flags.DEFINE_boolean(
    "find-batch", False, "Find the largest batch that fits, to 3 %, in some compilations."
)
FIND_MICROBATCH = flags.DEFINE_boolean("find-microbatch", False, "Find the largest microbatch that fits.")
flags.mark_flag_as_required("config")
parse = partial(parse_flags, command="plan", status=2)


def main(argv: list[str]) -> None:
    """Plans, prints and writes; what cannot be planned ends with one line and exit status 2."""
    logging.set_verbosity(logging.WARNING)  # the progress is told by `announced`
    if len(argv) > 1:
        leave(f"plan: {argv[1]!r} is no flag: flags begin with --", 2)
    if FIND_BATCH.value and FIND_MICROBATCH.value:
        leave("plan: --find-batch and --find-microbatch exclude each other: find the microbatch first", 2)
    if JSON.value and PNG.value and Path(JSON.value).resolve() == Path(PNG.value).resolve():
        leave(f"plan: --json and --png are both {JSON.value}: name two files", 2)
    try:
        for path in (JSON.value, PNG.value):
            check_writable(path)
        config = CONFIG.value.copy_and_resolve_references()  # raises OSError where there is no such file
        plan = run(config, Cluster(TARGET.value, HOSTS.value, GPUS_PER_HOST.value))
        if JSON.value:
            Path(JSON.value).write_text(json.dumps(to_json(plan), indent=2) + "\n", encoding="utf-8")
        if PNG.value:
            draw(PNG.value, [plan])
    except (ValueError, ImportError, OSError, ArithmeticError, RuntimeError) as error:
        leave(f"plan: {one_line(error)}", 2)
    except KeyboardInterrupt:
        leave("plan: interrupted", 130)
    sys.exit(0 if plan.fits else 1)


def run(config: ConfigDict, cluster: Cluster) -> Plan:
    """Prints and gives the plan of the config, or of the size that was found."""
    if not (FIND_BATCH.value or FIND_MICROBATCH.value):
        plan = announced(make_plan)(config, cluster)
        print(text(plan))
        return plan
    find, setting = (find_batch, "batch_size") if FIND_BATCH.value else (find_microbatch, "microbatch")
    search = find(config, cluster, announced(make_plan))
    print(f"{text(search.plan)}\n{search.verdict(f'config.{setting}')}")
    return search.plan


def announced(make_plan: Callable[[ConfigDict, Cluster], Plan]) -> Callable[[ConfigDict, Cluster], Plan]:
    """The same, with lines on stderr for each plan, at once and at its end: compiling takes minutes."""

    def make(config: ConfigDict, cluster: Cluster) -> Plan:
        microbatch = "" if config.microbatch is None else f", microbatch {config.microbatch:,}"
        print(f"batch {config.batch_size:,}{microbatch}: compiling ...", file=sys.stderr, flush=True)
        plan = make_plan(config, cluster)
        fits = "fits" if plan.fits else "does not fit"
        outcome = f"{gib(plan.peak)} of {gib(plan.pool)} GiB, {fits} ({plan.compile_seconds:.0f} s)"
        print(f"    {outcome}", file=sys.stderr, flush=True)
        return plan

    return make


def check_writable(path: str | None) -> None:
    """Raises OSError for a file that could not be written after minutes of compiling."""
    if path is None:
        return
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not os.access(Path(path).parent, os.W_OK):
        raise FileNotFoundError(f"{path} cannot be written: make its folder, or name another file")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
