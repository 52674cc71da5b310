"""Measures a model, or embeds a dataset with it.

    python -m disco_jax.evaluate --checkpoint PATH --task zero-shot --data 'val/*.tar' --classes names.txt
    python -m disco_jax.evaluate --checkpoint PATH --task retrieval --data 'flickr/*.tar' --caption txt:lines
    python -m disco_jax.evaluate --checkpoint PATH --task embed --data 'shards/*.tar' --out DIR

Prints a table, appends a row to OUT/metrics.jsonl and writes OUT/NAME.json; embed writes its files into OUT, and the
same command goes on where it was broken off. Exit status: 0, or 1 with one line on what is wrong.
"""

import argparse
import json
import re
import shlex
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh
from jaxtyping import PyTree

from disco_jax import mesh as mesh_lib
from disco_jax.command import leave, log_progress, one_line
from disco_jax.convert import Weights, load
from disco_jax.convert.runs import is_run, workdir_of
from disco_jax.data.loader import Preprocessor
from disco_jax.data.sources import SOURCES, source_settings
from disco_jax.data.tar_index import atomic_write
from disco_jax.data.tokenizer import Tokenizer, load_tokenizer
from disco_jax.encoding import Encoder, make_graphdef
from disco_jax.evaluation.evaluator import Evaluator
from disco_jax.evaluation.tasks import TASKS, Destination, Outcome, Task, eval_task, open_task, run_task
from disco_jax.models.transformer import ACTIVATIONS
from disco_jax.sharding import divided_dims
from disco_jax.training.metrics import METRICS_FILE, read_history


def parser() -> argparse.ArgumentParser:
    """The arguments; those of the task's settings are there only where they are given."""
    parser = argparse.ArgumentParser(
        prog="python -m disco_jax.evaluate",
        description="Measures a model, or embeds a dataset with it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="workdir of a run, WORKDIR/checkpoints/STEP, or other weights to import")
    add("--task", required=True, choices=list(TASKS))
    add("--name", help="what the metrics are called by; default: the task")
    add("--out", help="folder for the results; default: evaluation, in the checkpoint's folder; embed: required")
    add("--batch-size", type=int, default=256, help="images or texts at a time, over all devices (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation (%(default)s)")
    add("--cpu-devices", type=int, help="run on so many simulated CPU devices")
    add("--threads", type=int, default=16, help="that read and decode (%(default)s)")

    data = parser.add_argument_group("data", argument_default=argparse.SUPPRESS)
    data.add_argument("--data", dest="split", required=True, help="shard pattern, folder of class folders, or split")
    data.add_argument("--source", choices=SOURCES, help="what that is; default: tars")
    data.add_argument("--caption", help="tars: txt, txt:lines, or json:FIELD; embed: none, for images alone")
    data.add_argument("--label", help="tars: cls, which is the default, or json:FIELD, for zero-shot")
    data.add_argument("--classes", help="zero-shot: file of class names, one a line; default: as the data name them")
    data.add_argument("--templates", help="zero-shot: file of prompts with {} for the name; default: a photo of a {}.")
    data.add_argument("--part-size", type=int, help="embed: examples of a file (100,000)")
    for setting in source_settings():
        if setting.startswith("tfds_") or setting == "index_cache":
            data.add_argument("--" + setting.replace("_", "-"), help="as config.data." + setting)

    weights = parser.add_argument_group("weights")
    weights.add_argument("--tokenizer", help="a tokenizer.json; default: that of the weights")
    weights.add_argument("--ema", action="store_true", help="a run's running averages instead of its parameters")
    weights.add_argument("--activation", choices=list(ACTIVATIONS), help="as in disco_jax.convert import")
    for tower in ("vision", "text"):
        weights.add_argument(f"--{tower}-heads", type=int, help="likewise")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Evaluates; what cannot be done ends with one line and exit status 1."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    flags.FLAGS.mark_as_parsed()  # else absl says that they are not
    log_progress()
    try:
        evaluate(arguments, shlex.join(["python", "-m", "disco_jax.evaluate", *argv]))
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        leave(f"evaluate: {one_line(error)}", 1)
    except KeyboardInterrupt:
        leave("evaluate: interrupted", 130)


def evaluate(arguments: argparse.Namespace, command: str) -> None:
    """Checks everything, evaluates, prints and writes. Raises what `main` tells in one line."""
    name, out = arguments.name or arguments.task, _out(arguments)
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"--name {name} must be of letters, digits, - and _")
    if arguments.cpu_devices is not None:
        mesh_lib.simulate_cpu_devices(arguments.cpu_devices)
    mesh_lib.initialize_processes()
    mesh = mesh_lib.make_mesh([("rows", -1)])
    if arguments.batch_size < 1 or arguments.batch_size % mesh.size:
        raise ValueError(f"--batch-size {arguments.batch_size} must be a multiple of the {mesh.size} devices")
    if arguments.threads < 1:
        raise ValueError(f"--threads {arguments.threads} must be at least 1")
    task = open_task(name, _settings(arguments))
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    weights = load(
        arguments.checkpoint,
        ema=arguments.ema,
        activation=arguments.activation,
        vision_heads=arguments.vision_heads,
        text_heads=arguments.text_heads,
    )
    evaluator = make_evaluator(
        weights,
        tokenizer or load_tokenizer(weights.tokenizer),
        mesh,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        threads=arguments.threads,
    )
    for note in weights.notes if jax.process_index() == 0 else ():
        print(note)
    logging.info("%d examples, %d at a time on %d devices", len(task.source), arguments.batch_size, mesh.size)

    about: dict[str, Any] = {
        "checkpoint": str(Path(arguments.checkpoint).expanduser().absolute()),
        "step": weights.step,
        "ema": weights.ema,
        "dtype": arguments.dtype,
    }
    made_of = about | {"tokenizer": arguments.tokenizer, "parameters": _checksum(weights.params)}
    outcome = run_task(task, evaluator, on_devices(weights.params, mesh), Destination(out, made_of))
    if jax.process_index() == 0:
        print(_table(task, outcome))
        _write(task, outcome, out, about | {"command": command})
        print(f"wrote {out / f'{name}.json'}")


def make_evaluator(
    weights: Weights, tokenizer: Tokenizer, mesh: Mesh, *, batch_size: int, dtype: str = "float32", threads: int = 16
) -> Evaluator:
    """An evaluator of weights, whose parameters lie whole `on_devices`.

    Raises ValueError where the tokenizer is not the model's.
    """
    model = weights.model
    if tokenizer.vocab_size > model.text.vocab_size or tokenizer.eot_id != model.text.eot_id:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and ends texts with {tokenizer.eot_id}, the model "
            f"{model.text.vocab_size} and {model.text.eot_id}: give the model's own tokenizer.json with --tokenizer"
        )
    preprocessor = Preprocessor(tokenizer, image_size=model.vision.image_size, context_length=model.text.context_length)
    compute = jnp.dtype(dtype)
    dims = divided_dims(weights.params, mesh.size, False)
    encoder = Encoder(model, make_graphdef(model, compute), dims, mesh.axis_names, compute)
    return Evaluator(encoder, mesh, preprocessor, batch_size=batch_size, threads=threads)


def on_devices(params: PyTree, mesh: Mesh) -> PyTree:
    """A whole copy of the parameters on each device; every process gives the same."""
    whole = mesh_lib.replicated(mesh)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, whole, np.asarray(leaf).__getitem__), params
    )


def _out(arguments: argparse.Namespace) -> Path:
    """The folder for results, made; raises where it cannot be one."""
    checkpoint = Path(arguments.checkpoint).expanduser().absolute()
    if not checkpoint.exists():
        raise FileNotFoundError(f"--checkpoint {checkpoint} does not exist: give a file or a folder with weights")
    if arguments.out is not None:
        out = Path(arguments.out).expanduser().absolute()
    elif arguments.task == "embed" or not checkpoint.is_dir():
        raise ValueError("--out is not given: name the folder for the results")
    else:
        out = (workdir_of(checkpoint) if is_run(checkpoint) else checkpoint) / "evaluation"
    if is_run(out):
        raise ValueError(
            f"--out {out} is the workdir of a run, which has a {METRICS_FILE} of its own: name a folder in it"
        )
    out.mkdir(parents=True, exist_ok=True)
    read_history(out)  # raises where metrics.jsonl is damaged
    return out


def _settings(arguments: argparse.Namespace) -> Any:
    """The settings of the task, of those flags that are given."""
    every = {*source_settings(), "split", "classes", "templates", "part_size"}
    changes = {name: value for name, value in vars(arguments).items() if name in every}
    known = eval_task(arguments.task)
    foreign = [name for name in changes if name not in known]
    if foreign:
        raise ValueError(f"--{foreign[0].replace('_', '-')} is not for the task {arguments.task}: leave it out")
    if changes.get("caption") == "none":
        changes["caption"] = None
    return eval_task(arguments.task, **changes)


def _checksum(params: PyTree) -> str:
    """Of the parameters' bytes, so that features of other weights are not taken for theirs."""
    checksum = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        checksum = zlib.crc32(
            np.ascontiguousarray(leaf).data, zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        )
    return f"{checksum:08x}"


def _table(task: Task, outcome: Outcome) -> str:
    """The metrics, one a line; shares in percent."""
    lost = f", {outcome.dropped:,} left out" if outcome.dropped else ""
    lost += f", {outcome.dropped_captions:,} captions left out" if outcome.dropped_captions else ""
    width = max(len(name) for name in outcome.metrics)
    lines = [f"{task.name}: {outcome.examples:,} examples{lost}"]
    for name, value in outcome.metrics.items():
        share = re.search(r"(R@|top)\d+$|recall$", name)
        lines.append(f"  {name:<{width}}  {f'{100 * value:8.2f} %' if share else f'{value:8,.6g}'}")
    return "\n".join(lines)


def _write(task: Task, outcome: Outcome, out: Path, about: Mapping[str, Any]) -> None:
    row = {"step": about["step"] or 0} | {f"{task.name}/{name}": value for name, value in outcome.metrics.items()}
    rows = [*read_history(out), row]  # without what a killed process may have left of the last one
    with atomic_write(out / METRICS_FILE) as target:
        target.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    results = {
        "name": task.name,
        "metrics": outcome.metrics,
        **about,
        "examples": outcome.examples,
        "dropped": outcome.dropped,
        "dropped_captions": outcome.dropped_captions,
        "settings": json.loads(task.settings.to_json()),
    }
    with atomic_write(out / f"{task.name}.json") as target:
        target.write((json.dumps(results, indent=2, allow_nan=False) + "\n").encode())


if __name__ == "__main__":
    main()
