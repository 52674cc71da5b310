"""The weights of our own runs, from the checkpoints that the trainer wrote."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from disco_jax.convert.layout import abstract_params, flatten
from disco_jax.convert.weights import Weights
from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.training.checkpoints import steps_in
from disco_jax.training.config import default_config, model_config
from disco_jax.training.setup import CONFIG_FILE

CHECKPOINTS = "checkpoints"


def is_run(path: Path) -> bool:
    """Whether the path is a workdir, or the folder of a step below it."""
    return (workdir_of(path) / CHECKPOINTS).is_dir()


def workdir_of(path: Path) -> Path:
    """The workdir of a path as `read_run` takes it."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


def read_run(path: Path, *, ema: bool) -> Weights:
    """The parameters of a run; nothing in the run's folder is touched, so that it may go on meanwhile.

    Args:
        path: a workdir, for its last committed step, or WORKDIR/checkpoints/STEP.
        ema: the running averages, where the run keeps them.

    Raises:
        FileNotFoundError: no committed step.
        ValueError: no averages are kept, or the checkpoint is damaged or of another model than config.json says.
    """
    workdir = workdir_of(path)
    config_path = workdir / CONFIG_FILE
    if not config_path.is_file():
        raise FileNotFoundError(f"{workdir} has checkpoints but no {CONFIG_FILE}: it is no workdir of train.py")
    run = json.loads(config_path.read_text(encoding="utf-8"))
    config = default_config()
    config.model.update(run["model"])
    config.loss.name = run["loss"]["name"]
    tokenizer = load_tokenizer(run["data"]["tokenizer"])
    model = model_config(config, tokenizer.vocab_size, tokenizer.eot_id)

    folder = path
    if path == workdir:
        steps = steps_in(workdir / CHECKPOINTS)
        if not steps:
            raise FileNotFoundError(f"{workdir} holds no checkpoint yet: wait for the run's first one")
        folder = workdir / CHECKPOINTS / str(steps[-1])
    state = _read_state(folder, ema)
    params = {**state["params"], **(state["ema"] if ema else {})}
    found = {name: leaf.shape for name, leaf in flatten(params).items()}
    expected = {name: leaf.shape for name, leaf in abstract_params(model).items()}
    wrong = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    if wrong:
        raise ValueError(f"{folder} holds another model than {config_path} says: {sorted(wrong)[0]} differs")
    return Weights(model, params, str(path), run["data"]["tokenizer"], int(state["step"]), ema)


def _read_state(folder: Path, ema: bool) -> dict[str, Any]:
    """The step, the parameters and, if asked for, their averages, as numpy arrays; the optimizer's state stays away."""
    names = ("step", "params", "ema") if ema else ("step", "params")
    try:
        shapes = ocp.checkpointables_metadata(folder).metadata["state"]
        kept = bool(shapes["ema"])
        wanted = {name: jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes[name]) for name in names}
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            state: dict[str, Any] = ocp.load_checkpointables(folder, {"state": wanted})["state"]
    except Exception as error:  # of many kinds, many lines long
        found = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{folder} is no checkpoint of a run, or is damaged ({found[:200]})") from error
    if ema and not kept:
        raise ValueError(f"{folder} keeps no running averages: leave --ema, or train with config.ema_decay")
    return state
