"""Evaluation tasks: what can be measured or written with a model, in training and by `python -m disco_jax.evaluate`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import PyTree
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from disco_jax.data.examples import BadExample, Example, ExampleSource
from disco_jax.data.sources import SOURCES, make_source, source_settings
from disco_jax.evaluation.embed import check_pyarrow, embed
from disco_jax.evaluation.evaluator import Evaluator, SplitFeatures
from disco_jax.evaluation.prompts import Prompts, make_prompts

_LOOKED_AT = 8  # examples, for what is wrong with all of them


@dataclass(frozen=True)
class Task:
    """A task whose settings are checked and whose data are open.

    name: of its metrics; settings: of `eval_task`; prompts: of zero-shot.
    """

    name: str
    settings: ConfigDict
    source: ExampleSource
    prompts: Prompts | None


@dataclass(frozen=True)
class Outcome:
    """What a task gave.

    metrics: by names such as `top1`; examples: how many they are of; dropped, dropped_captions: how many were left out.
    """

    metrics: dict[str, float]
    examples: int
    dropped: int
    dropped_captions: int = 0


@dataclass(frozen=True)
class Destination:
    """Where a task's files go, if it has some.

    out: the folder; made_of: what they are made of beside the task's settings, as JSON; anew: whether they replace
    those of an earlier run, which is else completed.
    """

    out: Path
    made_of: Mapping[str, Any]
    anew: bool = False


def eval_task(kind: str, **changes: Any) -> ConfigDict:
    """The settings of a task, with changes; locked, so that a wrong name is an error.

    Of all: split, the settings of the data (`source_settings`), and in training every_steps. Of zero-shot: classes,
    templates; of embed: part_size.

    Raises:
        ValueError: there is no such kind.
        KeyError, TypeError: a change has an unknown name or a value of another type.
    """
    if kind not in TASKS:
        raise ValueError(f"unknown task {kind!r}: use one of {', '.join(TASKS)}")
    settings = source_settings()
    settings.task = kind
    settings.split = ""  # as config.data.eval: a shard pattern, a folder, or a split's name
    settings.every_steps = placeholder(int)  # in training: and at the end; unset: as eval.every_steps; 0: at the end
    if kind == "zero-shot":
        settings.label = "cls"  # tars: or "json:FIELD"
        settings.classes = placeholder(str)  # file of class names, one a line; unset: as the data name them
        settings.templates = ("a photo of a {}.",)  # or a file of them, one a line
    if kind == "embed":  # captions too, unless caption is None
        settings.part_size = 100_000  # examples of a file
    settings.lock()
    if isinstance(changes.get("templates"), str):
        with settings.ignore_type():
            settings.templates = changes.pop("templates")
    settings.update(changes)
    return settings


def check_task(settings: ConfigDict) -> None:
    """Raises ValueError for settings that no data can make right."""
    if settings.source not in SOURCES:
        raise ValueError(f"source={settings.source!r} is unknown: use one of {', '.join(SOURCES)}")
    if not settings.split:
        raise ValueError("split is empty: give the data, e.g. 'shards/{000..009}.tar', a folder or a split's name")
    if settings.source == "tfds" and settings.tfds_name is None:
        raise ValueError("tfds_name is not set: give 'name:version' or the folder of a prepared dataset")
    if settings.every_steps is not None and settings.every_steps < 0:
        raise ValueError(f"every_steps={settings.every_steps} must be at least 0")
    if settings.task == "embed" and settings.part_size < 1:
        raise ValueError(f"part_size={settings.part_size} must be at least 1")
    if settings.task == "zero-shot" and settings.source == "tars" and settings.label is None:
        raise ValueError("label is not set: give 'cls' or 'json:FIELD', where the tars have class indices")


def open_task(name: str, settings: ConfigDict) -> Task:
    """Checks a task and opens its data; raises ValueError, OSError or ImportError, one line with the cure."""
    check_task(settings)
    zero_shot = settings.task == "zero-shot"
    captioned = _captioned(settings)
    if settings.task == "embed":
        check_pyarrow()
    source = make_source(settings, settings.split, labelled=zero_shot, captioned=captioned)
    prompts = None
    if zero_shot:
        prompts = make_prompts(source, settings.classes, settings.templates)
        if prompts is None:
            raise ValueError("classes is not set, and the data do not name their classes: give a file, one name a line")
    _look_at_examples(source, prompts, captioned)
    return Task(name, settings, source, prompts)


def run_task(task: Task, evaluator: Evaluator, params: PyTree, destination: Destination) -> Outcome:
    """Runs a task; all processes must call it.

    Raises:
        ValueError: not one example is usable, or the data do not fit the task.
        NonFiniteFeatures: the model gives NaN or infinity.
    """
    return TASKS[task.settings.task](task, evaluator, params, destination)


def _zero_shot(task: Task, evaluator: Evaluator, params: PyTree, _: Destination) -> Outcome:
    assert task.prompts is not None
    features = evaluator.features(params, task.source, captions=0)
    metrics = evaluator.zero_shot(params, features, task.prompts)
    return _outcome(metrics, features, int(features.labelled.sum()), len(task.source))


def _retrieval(task: Task, evaluator: Evaluator, params: PyTree, _: Destination) -> Outcome:
    features = evaluator.features(params, task.source)
    return _outcome(evaluator.retrieval(features), features, len(features.keys), len(task.source))


def _embed(task: Task, evaluator: Evaluator, params: PyTree, destination: Destination) -> Outcome:
    rows = embed(
        evaluator,
        params,
        task.source,
        destination.out,
        part_size=task.settings.part_size,
        captioned=_captioned(task.settings),
        made_of={**destination.made_of, "data": data_settings(task.settings)},
        anew=destination.anew,
    )
    return Outcome({"rows": float(rows)}, rows, len(task.source) - rows)


TASKS: dict[str, Callable[[Task, Evaluator, PyTree, Destination], Outcome]] = {
    "zero-shot": _zero_shot,
    "retrieval": _retrieval,
    "embed": _embed,
}


def data_settings(settings: ConfigDict) -> dict[str, Any]:
    """Those settings of a task that say which examples there are; `index_cache` is not among them."""
    names = [name for name in (*source_settings(), "split") if name != "index_cache"]
    return {name: settings[name] for name in names}


def _captioned(settings: ConfigDict) -> bool:
    return settings.task == "retrieval" or (settings.task == "embed" and settings.caption is not None)


def _outcome(metrics: dict[str, float], features: SplitFeatures, examples: int, of: int) -> Outcome:
    return Outcome(metrics, examples, of - examples, features.dropped_captions.total())


def _look_at_examples(source: ExampleSource, prompts: Prompts | None, captioned: bool) -> None:
    """Raises ValueError where the first good examples lack what the task needs."""
    examples: list[Example] = []
    for index in range(min(_LOOKED_AT, len(source))):
        try:
            examples.append(source[index])
        except BadExample:
            continue  # counted when the task runs
    if captioned and examples and all(example.caption is None for example in examples):
        raise ValueError("the data have no captions: give data that have, or set caption to None to embed images alone")
    if prompts is not None and examples:
        if all(example.label is None for example in examples):
            raise ValueError("the data have no class indices: set label (tars) or tfds_label_key, or give other data")
        wrong = [e for e in examples if e.label is not None and not 0 <= e.label < len(prompts.names)]
        if wrong:
            raise ValueError(
                f"{wrong[0].key} has the label {wrong[0].label}, and there are {len(prompts.names)} class names: they "
                "count from 0, and each needs a name"
            )
