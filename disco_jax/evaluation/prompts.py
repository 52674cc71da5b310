"""Class names and prompt templates of zero-shot classification, from files or from the data."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disco_jax.data.examples import ExampleSource


@dataclass(frozen=True)
class Prompts:
    """What is asked of each class.

    names: of the classes, in the order of the labels; templates: prompts with a `{}` for the name.
    """

    names: tuple[str, ...]
    templates: tuple[str, ...]


def make_prompts(
    source: ExampleSource,
    classes: str | None,
    templates: str | Sequence[str],
    *,
    setting: str = "",
) -> Prompts | None:
    """The prompts of a source; None where its classes have no names.

    Args:
        classes: file of class names, one a line, UTF-8; None: as the source itself names them.
        templates: the templates, or a file of them, one a line.
        setting: what the names of the two settings begin with in messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not UTF-8 or has an empty line; no template, or one without `{}`; another number of
            classes than the source knows.
    """
    known = tuple(getattr(source, "label_names", None) or ())
    if classes is None and not known:
        return None
    names = known if classes is None else read_lines(classes, f"{setting}classes", "class name")
    if known and len(known) != len(names):
        raise ValueError(
            f"{setting}classes={classes} names {len(names)} classes, the data have {len(known)} ({known[0]!r}, ...): "
            "give one line for each, in the labels' order"
        )
    if isinstance(templates, str):
        templates = read_lines(templates, f"{setting}templates", "prompt template")
    if not templates:
        raise ValueError(f"{setting}templates is empty: give prompts like 'a photo of a {{}}.'")
    for template in templates:
        if "{}" not in template:
            cure = ": write {} for {c}" if "{c}" in template else ""  # as CLIP_benchmark's files have it
            raise ValueError(f"{setting}templates: {template!r} has no {{}} for the class name{cure}")
    return Prompts(names, tuple(templates))


def read_lines(path: str | os.PathLike[str], setting: str, what: str) -> tuple[str, ...]:
    """The lines of a file of class names or templates; `setting` names it in messages."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{setting}={path} does not exist: give a file with one {what} a line")
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines())
    except UnicodeDecodeError:
        raise ValueError(f"{setting}={path} is not UTF-8: save it as UTF-8") from None
    if not lines or not all(lines):
        raise ValueError(f"{setting}={path} has an empty line: every line is a {what}")
    return lines
