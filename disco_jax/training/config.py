"""Every setting of a run with its default, and the checks that need nothing but the settings."""

import dataclasses
import difflib
import math
import re
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from disco_jax.data.sources import SOURCES, source_settings
from disco_jax.evaluation.tasks import TASKS, check_task, eval_task
from disco_jax.losses.checks import check_method
from disco_jax.models import CLIPConfig, preset
from disco_jax.models.transformer import ATTENTIONS, REMATS
from disco_jax.sharding import SHARDINGS


class ConfigError(ValueError):
    """A setting that cannot be run; the message names it and the cure."""


# What may differ when a run is resumed: none of these changes the numbers of training.
FREE_ON_RESUME = frozenset(
    f"config.{name}"
    for name in (
        *("checkpoint", "cpu_devices", "distributed", "eval", "log", "on_nonfinite", "resume_changed"),
        *(
            "mesh",
            "microbatch",
            "prefetch",
            "stream_inputs",
            "sharding",
            "model.attention",
            "model.remat",
            "loss.chunk",
        ),  # but for rounding
        *(f"data.{key}" for key in ("eval", "index_cache", "label", "max_dropped", "threads")),
    )
)


# What decides the form of the state in a checkpoint: a run cannot go on under another.
FORM_OF_STATE = frozenset(
    f"config.{name}" for name in ("ema_decay", "lock_image", "lock_text", "loss.name", "optimizer.name")
)
MOST_SAMPLES = 2**30 - 1  # in a batch: they are counted in 32 bits


def default_config() -> ConfigDict:
    """All settings; a file in configs/ changes some of them. Locked: an unknown key is an error."""
    config = ConfigDict()
    config.seed = 0
    config.batch_size = 1024  # global: over all devices
    config.total_steps = 10_000
    config.smoke = False  # 3 steps of a shrunken model on generated data and CPU, whatever the rest says
    config.on_nonfinite = "stop"  # a loss or gradient that is NaN or inf: "stop" the run, or "skip" the update
    config.resume_changed = False  # go on in a workdir although settings that change the numbers differ

    # Mesh axes and their sizes in devices, outermost first, e.g. (("cols", 8), ("rows", 8)); one size may be -1: the
    # rest. The batch is split over all of them. The loss sends images along the axis "cols", texts along the others, so
    # the last ones should lie within a host. Unset: ("rows", -1) on one host, on H hosts (("cols", H), ("rows", -1)).
    config.mesh = placeholder(tuple)
    config.cpu_devices = placeholder(int)  # run on so many simulated CPU devices

    # What decides the memory of a device, and changes no number but for rounding; so does model.remat.
    config.microbatch = placeholder(int)  # samples a device encodes at a time; unset: all of its share of the batch
    config.stream_inputs = False  # the batch waits in the host's memory; a device holds two microbatches of it
    config.prefetch = True  # not streamed: the next batch travels during a step, so that devices hold two of them
    config.sharding = "replicated"  # or "zero1": optimizer state divided over the devices; "fsdp": parameters too

    # Start from these weights instead of at random: what disco_jax.convert.load takes, an imported folder or one of our
    # runs among it. Position embeddings are resized; projections to another width start at random.
    config.init_from = placeholder(str)
    config.lock_image = False  # leave the image tower as it starts, without gradients and optimizer state: for LiT
    config.lock_text = False
    config.ema_decay = placeholder(float)  # keep a running average of the parameters, e.g. 0.9999; see eval.ema

    config.distributed = ConfigDict()  # unset: as a complete cluster environment says, else one process
    config.distributed.coordinator = placeholder(str)  # host:port of process 0
    config.distributed.num_processes = placeholder(int)
    config.distributed.process_id = placeholder(int)

    config.model = ConfigDict()
    config.model.name = "ViT-B-32"  # a preset of disco_jax.models, by open_clip's name
    config.model.dtype = "bfloat16"  # of the computation; parameters are float32
    config.model.remat = "none"  # what the backward pass computes again: "full": blocks, "dots": all but their products
    config.model.attention = "auto"  # "xla", or "cudnn": fused, of GPUs; auto: cudnn where it is supported
    config.model.patch_dropout = 0.0  # share of an image's patches left out in training (FLIP)
    config.model.image_size = placeholder(int)  # instead of the preset's
    config.model.patch_size = placeholder(int)
    config.model.context_length = placeholder(int)

    config.loss = ConfigDict()
    config.loss.name = "contrastive"  # CLIP's, or "sigmoid": SigLIP's, with scale 10 and bias -10 to begin with
    config.loss.method = "chunked"  # contrastive: walked in tiles; "block": kept, less work; "disco": the paper's form
    config.loss.chunk = placeholder(int)  # chunked and sigmoid: columns of a tile; fewer need less memory
    config.loss.label_smoothing = 0.0  # contrastive, but not disco

    config.data = source_settings()  # where the data are: disco_jax/data/sources.py
    config.data.train = ""  # tars: brace or glob pattern; tfds and scenes: split
    config.data.eval = ""  # likewise, held out; empty: no evaluation
    config.data.tokenizer = placeholder(str)  # path of a tokenizer.json; unset: CLIP's own
    config.data.crop_scale = (0.9, 1.0)  # RandomResizedCrop: share of the area
    config.data.crop_ratio = (3 / 4, 4 / 3)  # and aspect ratio
    config.data.apply_exif = True  # turn photographs upright
    config.data.max_dropped = 0.01  # stop when a larger share of the examples is bad
    config.data.threads = 16  # per process, that read and decode

    config.optimizer = ConfigDict()  # as OpenAI's recipe
    config.optimizer.name = "adamw"  # or "lion", "adafactor"
    config.optimizer.learning_rate = 5e-4
    config.optimizer.beta1 = 0.9  # adafactor: of its momentum, 0 for none
    config.optimizer.beta2 = 0.98  # not of adafactor
    config.optimizer.eps = 1e-6  # adamw
    config.optimizer.weight_decay = 0.2  # on matrices only; times the learning rate
    config.optimizer.schedule = "cosine"  # to 0 at the end; or "constant", "rsqrt"
    config.optimizer.rsqrt_timescale = 10_000  # rsqrt: learning_rate / sqrt(1 + steps after warm-up / timescale)
    config.optimizer.warmup_steps = 2000  # linear from 0
    config.optimizer.cooldown_steps = 0  # the last steps: the schedule times a line to 0
    config.optimizer.grad_clip = placeholder(float)  # largest global norm; unset: none

    config.eval = ConfigDict()
    config.eval.every_steps = 1000  # and at the end; 0: only at the end
    config.eval.batch_size = 1024
    config.eval.ema = False  # evaluate the running average of the parameters
    config.eval.train_examples = 0  # so many training pairs are evaluated too, as train/...
    config.eval.classes = placeholder(str)  # file of class names, one a line, for zero-shot; tfds: the dataset's own
    config.eval.templates = ("a photo of a {}.",)
    config.eval.tasks = ConfigDict()  # more of them, by name: of disco_jax.evaluation.tasks.eval_task

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1000
    config.checkpoint.every_minutes = 15.0  # whichever comes first; 0: by steps only
    config.checkpoint.keep_last = 3
    config.checkpoint.keep_best = 1  # by best_metric, where it was evaluated
    config.checkpoint.best_metric = "eval/image_to_text/R@1"

    config.log = ConfigDict()
    config.log.every_steps = 10
    config.log.wandb_project = placeholder(str)  # log to Weights & Biases too
    config.lock()
    config.eval.tasks.unlock()  # takes new names; each task is locked itself
    return config


def _check_mesh_setting(mesh: Any) -> None:
    """Checks the form of `config.mesh` and the names of its axes. Raises `ConfigError`."""
    if mesh is None:
        return
    pairs = isinstance(mesh, tuple | list) and all(isinstance(axis, tuple | list) and len(axis) == 2 for axis in mesh)
    if not pairs or not all(isinstance(name, str) and type(size) is int for name, size in mesh):
        raise ConfigError(
            f"config.mesh={mesh!r} must be pairs of a name and a size, such as (('cols', 2), ('rows', 4))"
        )
    names = [name for name, _ in mesh]
    if not set(names) <= {"data", "rows", "cols"} or not set(names) & {"data", "rows"}:
        raise ConfigError(f"config.mesh={mesh!r} must have an axis 'rows' (or 'data'), and may have 'cols' beside it")


def smoke_config(config: ConfigDict) -> ConfigDict:
    """3 steps of the same kind of run, small enough for any CPU: tiny model, generated scenes, 2 simulated devices."""
    _check_mesh_setting(config.mesh)
    config = config.copy_and_resolve_references()
    config.mesh = config.mesh and tuple((name, 2 if i == 0 else 1) for i, (name, _) in enumerate(config.mesh))
    config.update(
        cpu_devices=2,
        batch_size=16,
        total_steps=3,
        microbatch=config.microbatch and 4,
        init_from=None,
        model={
            "name": "tiny",
            "dtype": "float32",
            "attention": "xla",
            "image_size": 32,
            "patch_size": 8,
            "context_length": 16,
        },
        data={"source": "scenes", "train": "train", "eval": "held_out", "label": None, "tokenizer": None, "threads": 2},
        optimizer={"warmup_steps": 1, "cooldown_steps": min(1, config.optimizer.cooldown_steps)},
        eval={"every_steps": 2, "batch_size": 16, "train_examples": 0, "classes": None, "templates": ("a {}",)},
        checkpoint={"every_steps": 2, "best_metric": "eval/image_to_text/R@1"},
        log={"every_steps": 1, "wandb_project": None},
    )
    config.eval.tasks = ConfigDict()
    return config


def model_config(config: ConfigDict, vocab_size: int, eot_id: int) -> CLIPConfig:
    """The preset with the run's image size, patch size, context length, tokenizer, and scale and bias of the loss."""
    model = preset(config.model.name)
    vision = {key: config.model[key] for key in ("image_size", "patch_size") if config.model[key] is not None}
    text: dict[str, int] = {"vocab_size": vocab_size, "eot_id": eot_id}
    if config.model.context_length is not None:
        text["context_length"] = config.model.context_length
    if config.loss.name == "sigmoid":  # Zhai et al. 2023 (arXiv 2303.15343), section 3.2
        model = dataclasses.replace(model, init_logit_scale=math.log(10), init_logit_bias=-10.0)
    return dataclasses.replace(
        model, vision=dataclasses.replace(model.vision, **vision), text=dataclasses.replace(model.text, **text)
    )


def validate(config: ConfigDict) -> None:
    """Checks the names of all settings, and their values as far as they tell. Raises `ConfigError`."""
    given, known = config.to_dict(), default_config().to_dict()
    tasks = given["eval"].get("tasks") if isinstance(given.get("eval"), dict) else None
    if isinstance(tasks, dict):
        known["eval"]["tasks"] = tasks  # their keys are checked below
    _check_keys(given, known, "config")
    _check_tasks(config)
    at_least = {
        "seed": 0,
        "batch_size": 1,
        "total_steps": 1,
        "data.threads": 1,
        "eval.every_steps": 0,
        "eval.batch_size": 1,
        "eval.train_examples": 0,
        "checkpoint.every_steps": 1,
        "checkpoint.every_minutes": 0,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 0,
        "log.every_steps": 1,
        "optimizer.warmup_steps": 0,
        "optimizer.cooldown_steps": 0,
        "optimizer.rsqrt_timescale": 1,
        "optimizer.weight_decay": 0,
        "data.max_dropped": 0,
        "cpu_devices": 1,
        "microbatch": 1,
        "model.image_size": 1,
        "model.patch_size": 1,
        "model.context_length": 3,
    }
    for name, least in at_least.items():
        value = _get(config, name)
        if value is not None and not value >= least:
            raise ConfigError(f"config.{name}={value} must be at least {least}")
    at_most = {"batch_size": MOST_SAMPLES, "eval.batch_size": MOST_SAMPLES, "seed": 2**32 - 1}
    for name, most in at_most.items():
        if _get(config, name) > most:
            raise ConfigError(f"config.{name}={_get(config, name)} must be at most {most}")
    if not math.isfinite(config.optimizer.weight_decay):
        raise ConfigError(f"config.optimizer.weight_decay={config.optimizer.weight_decay} must be a finite number")
    for name in ("optimizer.learning_rate", "optimizer.eps", "optimizer.grad_clip"):
        value = _get(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"config.{name}={value} must be a positive number")
    for name in ("optimizer.beta1", "optimizer.beta2"):
        if not 0 <= _get(config, name) < 1:
            raise ConfigError(f"config.{name}={_get(config, name)} must lie in [0, 1)")
    choices = {
        "on_nonfinite": ("stop", "skip"),
        "model.dtype": ("float32", "bfloat16"),
        "loss.name": ("contrastive", "sigmoid"),
        "sharding": SHARDINGS,
        "model.remat": REMATS,
        "model.attention": ATTENTIONS,
        "data.source": SOURCES,
        "optimizer.name": ("adamw", "lion", "adafactor"),
        "optimizer.schedule": ("cosine", "constant", "rsqrt"),
    }
    for name, allowed in choices.items():
        if _get(config, name) not in allowed:
            raise ConfigError(f"config.{name}={_get(config, name)!r} is unknown: use one of {', '.join(allowed)}")
    _check_memory_and_towers(config)
    loss = config.loss
    try:
        check_method(loss.method, loss.chunk, loss.label_smoothing)
    except ValueError as error:
        raise ConfigError(f"config.loss: {error}") from None
    if loss.name == "sigmoid" and (loss.method != "chunked" or loss.label_smoothing):
        raise ConfigError(
            "config.loss: method and label_smoothing are for the contrastive loss: leave them for sigmoid"
        )
    warmup, total = config.optimizer.warmup_steps, config.total_steps
    if warmup >= total:
        raise ConfigError(
            f"config.optimizer.warmup_steps={warmup} must be smaller than config.total_steps={total}: "
            "shorten the warm-up or lengthen the run"
        )
    cooldown = config.optimizer.cooldown_steps
    if warmup + cooldown > total:
        raise ConfigError(
            f"config.optimizer.warmup_steps={warmup} and cooldown_steps={cooldown} are more than "
            f"config.total_steps={total}: shorten one of them or lengthen the run"
        )
    for name in ("data.crop_scale", "data.crop_ratio"):
        low, high = _get(config, name)
        if not 0 < low <= high or (name == "data.crop_scale" and high > 1):
            raise ConfigError(f"config.{name}={(low, high)} must be 0 < low <= high, a scale at most 1")
    if not config.data.train:
        raise ConfigError("config.data.train is empty: give the data, e.g. --config.data.train='shards/{000..009}.tar'")
    if config.data.source == "folder":
        raise ConfigError("config.data.source='folder' has no captions to train on: use one of tars, tfds, scenes")
    if config.data.source == "tfds" and config.data.tfds_name is None:
        raise ConfigError("config.data.tfds_name is not set: give 'name:version' or the folder of a prepared dataset")
    _check_mesh_setting(config.mesh)
    for template in config.eval.templates:
        if "{}" not in template:
            raise ConfigError(f"config.eval.templates: {template!r} has no {{}} for the class name")
    if config.log.wandb_project is not None:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise ConfigError("config.log.wandb_project needs wandb: pip install 'disco-jax[wandb]'") from None
    preset(config.model.name)  # raises with a suggestion


def _check_memory_and_towers(config: ConfigDict) -> None:
    rate, decay = config.model.patch_dropout, config.ema_decay
    if not 0 <= rate < 1:
        raise ConfigError(f"config.model.patch_dropout={rate} must lie in [0, 1): it is the share that is left out")
    if decay is not None and not 0 < decay < 1:
        raise ConfigError(f"config.ema_decay={decay} must lie between 0 and 1, e.g. 0.9999")
    if config.eval.ema and decay is None:
        raise ConfigError("config.eval.ema=True needs a running average: set config.ema_decay, e.g. to 0.9999")
    if config.lock_image and config.lock_text:
        raise ConfigError("config.lock_image and config.lock_text leave nothing to train: lock one tower at most")
    if config.stream_inputs and config.microbatch is None:
        raise ConfigError("config.stream_inputs=True needs config.microbatch: the pieces in which the batch travels")


def _check_tasks(config: ConfigDict) -> None:
    tasks = config.eval.tasks.to_dict()
    for name, settings in tasks.items():
        where = f"config.eval.tasks.{name}"
        if name in ("eval", "train") or not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{where}: its metrics need another name, of letters, digits, - and _, not eval or train")
        kind = settings.get("task") if isinstance(settings, dict) else None
        if kind not in TASKS:
            raise ConfigError(f"{where} must be eval_task(KIND, ...), and KIND one of {', '.join(TASKS)}")
        _check_keys(settings, eval_task(kind).to_dict(), where)
        try:
            check_task(config.eval.tasks[name])
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    best, groups = config.checkpoint.best_metric, ("eval", "train", *tasks)
    if best.split("/")[0] not in groups:
        known = ", ".join(f"{group}/..." for group in groups)
        raise ConfigError(f"config.checkpoint.best_metric={best!r} is not measured: use one of {known}")
    if best.endswith("/median_rank"):
        raise ConfigError(f"config.checkpoint.best_metric={best!r} is best where it is lowest: use one that is highest")


def _get(config: ConfigDict, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def _check_keys(given: dict[str, Any], known: dict[str, Any], path: str) -> None:
    for key in given.keys() - known.keys():
        close = difflib.get_close_matches(key, known, 1)
        cure = f"did you mean {path}.{close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown setting {path}.{key}: {cure}")
    for key in known.keys() - given.keys():
        raise ConfigError(f"{path}.{key} is missing: start from disco_jax.training.default_config()")
    for key, value in known.items():
        if isinstance(value, dict):
            if not isinstance(given[key], dict):
                raise ConfigError(f"{path}.{key}={given[key]!r} must be a group of settings")
            _check_keys(given[key], value, f"{path}.{key}")


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "config") -> list[str]:
    """One line for each setting that differs and isn't free on resume, e.g. "config.seed: 0 -> 1"."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if f"{path}.{key}" in FREE_ON_RESUME:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{path}.{key}")
        elif before != after:
            lines.append(f"{path}.{key}: {before!r} -> {after!r}")
    return lines


def changes_of_state(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Those of the `differences` after which a checkpoint no longer has the form of the state."""
    averaged = old.get("ema_decay") is not None and new.get("ema_decay") is not None
    names = FORM_OF_STATE - ({"config.ema_decay"} if averaged else set())
    return [line for line in differences(old, new) if line.split(":")[0] in names]
