"""All that a run needs, made from its config and checked, before anything is compiled."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from disco_jax import mesh as mesh_lib
from disco_jax.data.examples import ExampleSource
from disco_jax.data.loader import Preprocessor
from disco_jax.data.sources import make_source
from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.evaluation.evaluator import Evaluator
from disco_jax.evaluation.prompts import Prompts, make_prompts
from disco_jax.evaluation.tasks import Task, open_task
from disco_jax.models import decay_mask
from disco_jax.training.checkpoints import check_space, steps_in
from disco_jax.training.config import ConfigError, changes_of_state, differences, smoke_config, validate
from disco_jax.training.initial import Initial, read_initial
from disco_jax.training.metrics import read_history
from disco_jax.training.program import Program, make_program, without
from disco_jax.training.stages import device_bytes

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Setup:
    """The parts of a run."""

    config: ConfigDict
    workdir: Path
    program: Program
    train_source: ExampleSource
    eval_source: ExampleSource | None
    preprocessor: Preprocessor
    evaluator: Evaluator
    prompts: Prompts | None  # of the evaluation split
    tasks: tuple[Task, ...]
    initial: Initial | None  # None at random, and where a checkpoint is there

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files of the run."""
        return jax.process_index() == 0


def prepare(config: ConfigDict, workdir: str | os.PathLike[str]) -> Setup:
    """Checks everything and claims `workdir`; raises `ConfigError`, one line with the cure, for what cannot be run."""
    failure: Exception | None = None
    try:
        setup = _prepare(config, Path(workdir).absolute())
    except (ValueError, OSError, ImportError) as error:
        failure = error
    if mesh_lib.any_process(failure is not None):  # all leave together: none waits for one that has left
        raise ConfigError(str(failure or "another process refused the run: see its message")) from failure
    return setup


def _prepare(config: ConfigDict, workdir: Path) -> Setup:
    config = smoke_config(config) if config.get("smoke") else config
    validate(config)
    if config.cpu_devices is not None:
        mesh_lib.simulate_cpu_devices(config.cpu_devices)
    mesh_lib.initialize_processes(**config.distributed.to_dict())
    mesh = mesh_lib.make_mesh(config.mesh or mesh_lib.default_axes())
    tokenizer = load_tokenizer(config.data.tokenizer)
    program = make_program(config, mesh, tokenizer.vocab_size, tokenizer.eot_id)
    model = program.model
    train_source = make_source(config.data, config.data.train, labelled=False)
    eval_source = make_source(config.data, config.data.eval, labelled=True) if config.data.eval else None
    preprocessor = Preprocessor(
        tokenizer,
        image_size=model.vision.image_size,
        context_length=model.text.context_length,
        apply_exif=config.data.apply_exif,
        scale=config.data.crop_scale,
        ratio=config.data.crop_ratio,
    )
    evaluator = Evaluator(
        program.encoder,
        mesh,
        preprocessor,
        batch_size=config.eval.batch_size,
        threads=config.data.threads,
    )
    setup = Setup(
        config=config,
        workdir=workdir,
        program=program,
        train_source=train_source,
        eval_source=eval_source,
        preprocessor=preprocessor,
        evaluator=evaluator,
        prompts=_prompts(config, eval_source),
        tasks=tuple(_open_task(config, name) for name in config.eval.tasks),
        initial=None if steps_in(workdir / "checkpoints") else read_initial(program),
    )
    if setup.is_main:
        _claim_workdir(setup)
        check_space(setup.workdir / "checkpoints", config.checkpoint, program.abstract_state)
    _log(setup)
    return setup


def _prompts(config: ConfigDict, eval_source: ExampleSource | None) -> Prompts | None:
    """Of the evaluation split; None where its classes have no names."""
    if eval_source is None:
        return None
    prompts = make_prompts(eval_source, config.eval.classes, config.eval.templates, setting="config.eval.")
    if config.eval.classes is not None and config.data.source == "tars" and config.data.label is None:
        raise ConfigError("config.eval.classes needs labels: set config.data.label to 'cls' or 'json:FIELD'")
    return prompts


def _open_task(config: ConfigDict, name: str) -> Task:
    try:
        return open_task(name, config.eval.tasks[name])
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"config.eval.tasks.{name}: {error}") from error


def _claim_workdir(setup: Setup) -> None:
    """Makes the workdir with the config in it; refuses one in which another config was trained."""
    path = setup.workdir / CONFIG_FILE
    read_history(setup.workdir)  # raises where metrics.jsonl is damaged
    if path.exists():
        try:
            old = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): restore it or choose another --workdir") from None
        new = json.loads(setup.config.to_json())
        if other_state := changes_of_state(old, new):
            raise ConfigError(
                f"{setup.workdir} holds a run whose checkpoints do not fit the settings ({'; '.join(other_state)}): "
                "choose another --workdir, or go back to its settings"
            )
        changed = differences(old, new)
        if changed and not setup.config.resume_changed:
            raise ConfigError(
                f"{setup.workdir} holds a run with other settings ({'; '.join(changed)}): choose another --workdir, or "
                "go on under the changed ones with --config.resume_changed=True"
            )
        for line in changed:
            logging.warning("Going on under a changed setting: %s", line)
        return
    if setup.workdir.is_dir() and any(setup.workdir.iterdir()):
        raise ConfigError(f"{setup.workdir} holds files but no {CONFIG_FILE} of a run: choose an empty --workdir")
    try:
        setup.workdir.mkdir(parents=True, exist_ok=True)
        write_config(setup)
    except OSError as error:
        raise ConfigError(f"cannot write to {setup.workdir} ({error.strerror}): choose another --workdir") from None


def write_config(setup: Setup) -> None:
    """Writes config.json into the workdir, whole or not at all."""
    temporary = setup.workdir / f"{CONFIG_FILE}.tmp"
    temporary.write_text(setup.config.to_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(setup.workdir / CONFIG_FILE)


def _log(setup: Setup) -> None:
    config = setup.config
    logging.info(
        "%d training examples, %d evaluation examples; batch %d on %d devices (%s) in %d processes",
        len(setup.train_source),
        len(setup.eval_source) if setup.eval_source is not None else 0,
        config.batch_size,
        setup.program.mesh.size,
        " x ".join(f"{name} {size}" for name, size in setup.program.mesh.shape.items()),
        jax.process_count(),
    )
    params = setup.program.abstract_state.params
    logging.info(
        "%s: %.2f M parameters, computed in %s",
        config.model.name,
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e6,
        config.model.dtype,
    )
    state = setup.program.abstract_state
    logging.info(
        "%s state: each device has %.1f MiB of parameters and %.1f MiB of optimizer state and averages",
        config.sharding,
        device_bytes(params) / 2**20,
        device_bytes((state.opt_state, state.ema)) / 2**20,
    )
    if config.lock_image or config.lock_text:
        logging.info("Not trained: the %s tower", "image" if config.lock_image else "text")
    groups: dict[bool, list[str]] = {True: [], False: []}
    trained = without(params, setup.program.locked)
    for path, decayed in jax.tree_util.tree_leaves_with_path(decay_mask(trained)):
        groups[decayed].append(jax.tree_util.keystr(path, simple=True, separator="."))
    logging.info("Weight decay %s on: %s", config.optimizer.weight_decay, ", ".join(groups[True]))
    logging.info("No weight decay on: %s", ", ".join(groups[False]))
