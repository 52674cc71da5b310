"""report.png: how a run went and what it retrieves, on one page."""

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, get_font
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter

# All lengths are in inches.
WIDTH, MARGIN, PANEL_HEIGHT, HEADING_HEIGHT = 13.0, 0.45, 3.3, 0.55
CAPTION_WIDTH, IMAGE_SIZE, GAP, ROW_HEIGHT = 3.4, 1.6, 0.14, 1.88
CAPTION_COLUMNS, CAPTION_LINES = 40, 6

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
RIGHT, WRONG = "#1a9850", "#c9ced6"
BLUES, ORANGES = ("#0b4f94", "#3d8fd9", "#9cc8f0"), ("#b3470a", "#ee7f2d", "#f8c093")
ACCENTS = ("#0b4f94", "#1a9850", "#b3470a", "#7a3e9d")

# The font that comes with matplotlib, by file: what it lacks is known (see _printable).
FONT_FILE = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
BOLD_FILE = FONT_FILE.with_name("DejaVuSans-Bold.ttf")

Series = tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]  # steps, values
Panel = tuple[str, Callable[[Axes], None]]  # title, what draws it


def write_report(
    path: str | os.PathLike[str],
    history: Sequence[Mapping[str, Any]],
    captions: Sequence[str] = (),
    images: UInt8[np.ndarray, "q k H W 3"] | None = None,
    right: Bool[np.ndarray, "q k"] | None = None,
    *,
    title: str = "Training report",
) -> None:
    """Write a PNG with the curves of `history` and, below, a grid of captions with their k best images.

    The last part of a metric's name says what it is: `loss` and `logit_scale` are drawn against the step, and so are
    `R@k` (its part before is the direction, `image_to_text` or `text_to_image`) and `topk`; other names are left out.
    Characters that the report's font lacks, such as emoji, are drawn as boxes.

    Args:
        path: the file; its folder must be there.
        history: rows `{"step": int, name: number or None, ...}` as `disco_jax.training.metrics.read_history` gives.
        captions: the q queries; without any there is no grid.
        images: the k best images of each, best first.
        right: which of them belong to the caption; these get a green frame and a tick.
        title: the heading.

    Raises:
        ValueError: as many captions as rows of images are needed.
    """
    found = 0 if images is None or right is None else len(images)
    if len(captions) != found:
        raise ValueError(f"the report got {len(captions)} captions for {found} rows of images")
    panels = _panels(history)
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    panel_rows = -(-len(panels) // columns)
    grid_height = HEADING_HEIGHT + len(captions) * ROW_HEIGHT + MARGIN if captions else 0.0
    height = HEADING_HEIGHT + panel_rows * PANEL_HEIGHT + grid_height

    figure = Figure(figsize=(WIDTH, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    _heading(figure, title, y=height - 0.42, size=17.0)
    last_step = max((row["step"] for row in history), default=0)
    panel_width = (WIDTH - 2 * MARGIN + 0.3) / columns
    for number, (name, draw) in enumerate(panels):
        left = MARGIN + 0.3 + number % columns * panel_width
        bottom = height - HEADING_HEIGHT - (number // columns + 1) * PANEL_HEIGHT + 1.0
        axes = _axes(figure, left, bottom, panel_width - 0.6, PANEL_HEIGHT - 1.4)
        _style(axes, name)
        axes.set_xlim(0, 1.03 * max(last_step, 1))
        draw(axes)
    if images is not None and right is not None and captions:
        _grid(figure, grid_height, captions, images, right)
    figure.savefig(os.fspath(path), format="png")


def _grid(
    figure: Figure,
    top: float,
    captions: Sequence[str],
    images: UInt8[np.ndarray, "q k H W 3"],
    right: Bool[np.ndarray, "q k"],
) -> None:
    _heading(figure, "Captions and their best images", y=top - 0.32, size=13.0)
    size = min(IMAGE_SIZE, (WIDTH - 2 * MARGIN - CAPTION_WIDTH) / images.shape[1] - GAP)
    for row, caption in enumerate(captions):
        middle = top - HEADING_HEIGHT - (row + 0.5) * ROW_HEIGHT
        x, y = MARGIN / figure.get_figwidth(), middle / figure.get_figheight()
        label = figure.text(x, y, "", va="center", color=INK, font=_font(11.5), parse_math=False, linespacing=1.3)
        _wrap(label, _printable(caption), (CAPTION_WIDTH - 0.3) * figure.dpi)
        for rank in range(images.shape[1]):
            axes = _axes(figure, MARGIN + CAPTION_WIDTH + rank * (size + GAP), middle - size / 2, size, size)
            _image(axes, images[row, rank], bool(right[row, rank]))


def _panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The loss, then one panel for each kind of number that `history` has."""
    losses: dict[str, Series] = {}
    scales: dict[str, Series] = {}
    retrieval: dict[str, dict[str, Series]] = {}
    zero_shot: dict[str, Series] = {}
    for name in dict.fromkeys(name for row in history for name in row):
        *before, last = name.split("/")
        if last == "loss":
            losses["/".join(before)] = _series(history, name)
        elif last == "logit_scale":
            scales["/".join(before)] = _series(history, name)
        elif re.fullmatch("R@(1|5|10)", last) and before[-1:] in (["image_to_text"], ["text_to_image"]):
            retrieval.setdefault("/".join(before[:-1]), {})[f"{before[-1]}/{last}"] = _series(history, name)
        elif re.fullmatch(r"top\d+", last):
            zero_shot[name] = _series(history, name)
    panels: list[Panel] = [("Loss", partial(_draw_losses, losses=losses))]
    if scales:
        panels.append(("Logit scale", partial(_draw_losses, losses=scales)))
    for prefix, curves in retrieval.items():
        panels.append((f"Retrieval, {prefix}" if prefix else "Retrieval", partial(_draw_recalls, curves=curves)))
    if zero_shot:
        panels.append(("Zero-shot accuracy", partial(_draw_accuracies, curves=zero_shot)))
    return panels


def _series(history: Sequence[Mapping[str, Any]], name: str) -> Series:
    rows = [(row["step"], row[name]) for row in history if name in row]
    steps, values = zip(*rows, strict=True)
    return np.array(steps, np.float64), np.array(values, np.float64)  # None (not finite) becomes NaN: a gap


def _draw_losses(axes: Axes, losses: Mapping[str, Series]) -> None:
    for (name, (steps, values)), color in zip(losses.items(), ACCENTS * len(losses), strict=False):
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
        axes.plot(steps, _smooth(values), color=color, linewidth=1.8, label=_printable(name), **_markers(steps))
    if len(losses) > 1:
        _legend(axes, columns=1)


def _draw_recalls(axes: Axes, curves: Mapping[str, Series]) -> None:
    shades = {"image_to_text": iter(BLUES), "text_to_image": iter(ORANGES)}
    for name, (steps, values) in curves.items():
        direction, recall = name.split("/")
        label = f"{direction.replace('_', ' ')} {recall}: {values[-1]:.1%}"
        axes.plot(
            steps,
            values,
            color=next(shades[direction]),
            linestyle="--" if direction == "text_to_image" else "-",  # seen where both ways are equal
            linewidth=1.8,
            label=label,
            **_markers(steps),
        )
    _percent(axes)
    _legend(axes, columns=2)


def _draw_accuracies(axes: Axes, curves: Mapping[str, Series]) -> None:
    for (name, (steps, values)), color in zip(curves.items(), ACCENTS * len(curves), strict=False):
        label = _printable(f"{name}: {values[-1]:.1%}")
        axes.plot(steps, values, color=color, linewidth=1.8, label=label, **_markers(steps))
    _percent(axes)
    _legend(axes, columns=1 if len(curves) <= 3 else 2)


def _smooth(values: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
    """Centred running mean over about a twentieth of the rows; gaps are left out of it."""
    reach = len(values) // 40
    known = np.isfinite(values)
    window = np.ones(2 * reach + 1)
    total = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)]
    count = np.convolve(known.astype(np.float64), window)[reach : reach + len(values)]
    return np.where(known, total / np.maximum(count, 1.0), np.nan)


def _image(axes: Axes, image: UInt8[np.ndarray, "H W 3"], is_right: bool) -> None:
    axes.imshow(image)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=RIGHT if is_right else WRONG, linewidth=3.5 if is_right else 1.0)
    if is_right:
        axes.annotate(
            "\N{CHECK MARK}",
            xy=(1, 1),
            xycoords="axes fraction",
            xytext=(-1, -1),
            textcoords="offset points",
            ha="center",
            va="center",
            color="white",
            font=_font(11.0),
            bbox={"boxstyle": "circle,pad=0.22", "facecolor": RIGHT, "edgecolor": "white", "linewidth": 1.2},
        )


def _wrap(label: Text, caption: str, width: float) -> None:
    # Letters differ in width: take fewer a line until the widest line fits.
    for columns in range(CAPTION_COLUMNS, 4, -2):
        label.set_text(
            "\n".join(textwrap.wrap(caption, columns, max_lines=CAPTION_LINES, placeholder=" \N{HORIZONTAL ELLIPSIS}"))
        )
        if label.get_window_extent().width <= width:
            return


def _printable(text: str) -> str:
    """The text on one line, with a box for every character that the font lacks."""
    glyphs = get_font(str(FONT_FILE)).get_charmap()
    return "".join(c if ord(c) in glyphs else "\N{WHITE SQUARE}" for c in " ".join(text.split()) if c.isprintable())


def _font(size: float, *, bold: bool = False) -> FontProperties:
    return FontProperties(fname=str(BOLD_FILE if bold else FONT_FILE), size=size)


def _heading(figure: Figure, text: str, *, y: float, size: float) -> None:
    x = MARGIN / figure.get_figwidth()
    figure.text(
        x, y / figure.get_figheight(), _printable(text), color=INK, font=_font(size, bold=True), parse_math=False
    )


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def _style(axes: Axes, title: str) -> None:
    axes.set_title(_printable(title), loc="left", color=INK, font=_font(11.0, bold=True), parse_math=False)
    axes.set_xlabel("step", color=MUTED, font=_font(9.0))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _percent(axes: Axes) -> None:
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _markers(steps: Float[np.ndarray, " rows"]) -> dict[str, Any]:
    """Dots where there are few rows: one row alone draws no line."""
    return {"marker": "o", "markersize": 3.5} if len(steps) <= 12 else {}


def _legend(axes: Axes, *, columns: int) -> None:
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=columns,
        frameon=False,
        prop=_font(8.5),
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.2,
    )
