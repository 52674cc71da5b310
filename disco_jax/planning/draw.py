"""A picture of plans: what fills the memory of a GPU, and for one plan also what travels."""

import os
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from disco_jax.evaluation.report import GRID, INK, MUTED
from disco_jax.gpu_targets import TARGETS
from disco_jax.planning.report import GIB, PARTS, Plan, gib, how, title, with_unit

# All lengths are in inches.
WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW = 12.5, 4.1, 1.7, 1.1, 0.55, 0.62
TRAFFIC_HEADING, TRAFFIC_ROW = 0.65, 0.4

COLORS = dict(zip(PARTS, ("#0b4f94", "#6fb1ec", "#1a9850", "#7a3e9d", "#ee7f2d"), strict=True))
TRAFFIC, POOL, CARD, TOO_MUCH = "#6b7785", "#1f2933", "#eef1f5", "#b3261e"
MOST_CARDS = 1.5  # a longer bar is cut off there, and tells its length


def draw(path: str | os.PathLike[str], plans: Sequence[Plan]) -> None:
    """Writes a PNG with a stacked bar for each plan, the first on top; for one plan also the bytes of collectives.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("there is no plan to draw: give at least one")
    traffic = plans[0].traffic if len(plans) == 1 else {}
    bars, below = ROW * len(plans), TRAFFIC_HEADING + TRAFFIC_ROW * len(traffic) if traffic else 0.0
    height = TOP + bars + BOTTOM + below
    figure = Figure(figsize=(WIDTH, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)

    def axes_at(bottom: float, inches: float) -> Axes:
        return figure.add_axes((LEFT / WIDTH, bottom / height, (WIDTH - LEFT - RIGHT) / WIDTH, inches / height))

    figure.text(0.35 / WIDTH, 1 - 0.36 / height, _heading(plans), color=INK, fontsize=13.5, fontweight="bold")
    _legend(figure, y=1 - 0.72 / height)
    _draw_memory(axes_at(height - TOP - bars, bars), plans)
    if traffic:
        axes = axes_at(0.2, TRAFFIC_ROW * len(traffic))
        axes.set_title("Received by each GPU in a step", loc="left", color=INK, fontsize=10.5, pad=8)
        _draw_traffic(axes, traffic)
    figure.savefig(os.fspath(path), format="png")


def _heading(plans: Sequence[Plan]) -> str:
    targets = {plan.cluster.target for plan in plans}
    kind = f" of an {TARGETS[targets.pop()].description}" if len(targets) == 1 else ""
    return f"Memory{kind} at the peak of a training step, GiB"


def _legend(figure: Figure, y: float) -> None:
    handles: list[Artist] = [Patch(color=color, label=name) for name, color in COLORS.items()]
    handles += [
        Line2D([], [], color=POOL, linewidth=2, label="what the runtime can give"),
        Patch(facecolor=CARD, edgecolor=GRID, label="the card"),
    ]
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.35 / WIDTH, y),
        borderaxespad=0,
        borderpad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _draw_memory(axes: Axes, plans: Sequence[Plan]) -> None:
    cards = [TARGETS[plan.cluster.target].memory / GIB for plan in plans]
    longest = max(
        max(cards), *(min(plan.peak / GIB, MOST_CARDS * card) for plan, card in zip(plans, cards, strict=True))
    )
    for y, (plan, card) in enumerate(zip(plans, cards, strict=True)):
        axes.barh(y, card, height=0.62, color=CARD, edgecolor=GRID, linewidth=0.8)
        start = 0.0
        for name, color in COLORS.items():
            size = plan.parts[name] / GIB
            axes.barh(y, size, left=start, height=0.62, color=color)
            start += size
        axes.vlines(plan.pool / GIB, y - 0.42, y + 0.42, color=POOL, linewidth=2)
        cut_off = start > longest
        label = f"{gib(plan.peak)} of {gib(plan.pool)}"
        axes.annotate(
            f"\N{RIGHTWARDS ARROW} {label}" if cut_off else label,
            (longest, y),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=INK if plan.fits else TOO_MUCH,
            fontsize=10,
            fontweight="normal" if plan.fits else "bold",
            annotation_clip=False,
        )
        axes.annotate(
            title(plan),
            (0, y),
            xytext=(-10, 7),
            textcoords="offset points",
            ha="right",
            va="center",
            color=INK,
            fontsize=10,
        )
        axes.annotate(
            _where(plan, with_target=len({plan.cluster.target for plan in plans}) > 1),
            (0, y),
            xytext=(-10, -7),
            textcoords="offset points",
            ha="right",
            va="center",
            color=MUTED,
            fontsize=8.5,
        )
    axes.set_xlim(0, longest)
    axes.set_ylim(len(plans) - 0.5, -0.5)
    axes.set_yticks([])
    _style(axes)


def _where(plan: Plan, *, with_target: bool) -> str:
    kind = f" {plan.cluster.target}" if with_target else ""
    gpus = "1 GPU" if plan.cluster.size == 1 else f"{plan.cluster.size} GPUs"
    return f"{gpus}{kind}, {how(plan)}"


def _draw_traffic(axes: Axes, traffic: dict[str, tuple[int, int]]) -> None:
    sizes = [size for _, size in traffic.values()]
    bars = axes.barh(range(len(traffic)), sizes, height=0.6, color=TRAFFIC)
    labels = [f"{with_unit(size)} in {calls:,} call{'s' * (calls != 1)}" for calls, size in traffic.values()]
    axes.bar_label(bars, labels, padding=6, color=INK, fontsize=9.5)
    axes.set_yticks(range(len(traffic)), list(traffic), color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(sizes) or 1)
    _style(axes)
    axes.set_xticks([])  # the labels say it


def _style(axes: Axes) -> None:
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.tick_params(axis="x", length=0, labelsize=9, colors=MUTED)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GRID)
