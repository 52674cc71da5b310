"""Draws the pictures of docs/loss.md: python docs/draw_loss.py

blocks.png: which device computes which similarities. traffic.png: what travels between devices.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from disco_jax.evaluation.report import INK, MUTED

HERE = Path(__file__).parent
COLORS = ("#9cc8f0", "#f8c093", "#a8dba8", "#d7b5e8", "#f2a6a6", "#c9b79c", "#f5e08a", "#9fd8d3")
OWN = "#0b4f94"  # pairs of a device
N = 8  # devices in the pictures

Cell = tuple[int, int]  # of the N x N cells, each the b x b similarities of one device's images with one's texts


def main() -> None:
    """Writes both pictures beside this file."""
    figure = _figure(15.6, 6.1)
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.04, right=0.99, top=0.88, bottom=0.16, wspace=0.22)
    order = list(range(N))
    _blocks(panels[0], order, order, lambda i, j: i, "DisCo on 8 devices: two blocks each")
    _second_block(panels[0], device=2)
    _blocks(panels[1], order, order, lambda i, j: i, "One block each, 8 x 1 devices")
    _tile(panels[1], rows=(2, 3), columns=order)
    rows = [(p, q) for p in range(4) for q in range(2)]  # images, sorted by p: those of a block are neighbours
    columns = [(p, q) for q in range(2) for p in range(4)]  # texts, sorted by q
    numbers = {pq: 2 * pq[0] + pq[1] for pq in rows}
    by_row, by_column = [numbers[pq] for pq in rows], [numbers[pq] for pq in columns]
    _blocks(panels[2], by_row, by_column, lambda i, j: 2 * (i // 2) + j // 4, "One block each, 4 x 2 devices")
    _tile(panels[2], rows=(2, 4), columns=range(4))
    _notes(panels)
    figure.savefig(HERE / "blocks.png")

    figure = _figure(14, 4.8)
    _devices(figure.add_axes((0.02, 0.64, 0.5, 0.28)), 8, 1, "8 x 1 (p to the right): a text visits 8 devices")
    _devices(figure.add_axes((0.02, 0.03, 0.5, 0.46)), 4, 2, "4 x 2 (q downwards): a text visits 4 devices, an image 2")
    _received(figure.add_axes((0.64, 0.05, 0.33, 0.8)))
    figure.savefig(HERE / "traffic.png")


def received(B: int, D: int, r: int, c: int, *, width: int, walks: int = 2) -> int:
    """Bytes that a device receives for the loss and its gradients, docs/loss.md, (7.1).

    width: bytes of a number of a feature. walks: over the texts, 1 where the block is kept.
    """
    feature, statistic, gradient = width * D + 4, 4, 4 * D  # a feature comes with its label
    texts = walks * feature + 2 * statistic + gradient  # log-sum-exp: home and back
    images = feature + 3 * statistic + gradient  # gathered once: both walks share it; and the target sum, home
    return B // (r * c) * ((r - 1) * texts + (c - 1) * images)


def received_sigmoid(B: int, D: int, r: int, c: int, *, width: int) -> int:
    """The same for the sigmoid loss: features with their labels, and gradients."""
    return B // (r * c) * (r + c - 2) * (width * D + 4 + 4 * D)


def received_disco(B: int, D: int, n: int, *, width: int) -> int:
    """The same for DisCo: both features gathered, of both the gradients of all B summed on every device."""
    return B // n * (n - 1) * (2 * width * D + 2 * 2 * 4 * D)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _blocks(axes: Axes, rows: list[int], columns: list[int], owner: Callable[[int, int], int], title: str) -> None:
    """N x N cells in the colours of the devices that compute them; dark where a device meets its own pairs."""
    for i, image_device in enumerate(rows):
        for j, text_device in enumerate(columns):
            color = OWN if image_device == text_device else COLORS[owner(i, j)]
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", linewidth=0.8))
    axes.set_xlim(-0.05, N + 0.05)
    axes.set_ylim(N + 0.05, -0.05)
    axes.set_aspect("equal")
    axes.set_xticks(np.arange(N) + 0.5, [f"{x}" for x in columns], color=INK)
    axes.set_yticks(np.arange(N) + 0.5, [f"{x}" for x in rows], color=INK)
    axes.tick_params(length=0, pad=1)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=24)
    axes.text(0, -0.25, "texts of device", color=MUTED, fontsize=9.5)
    axes.set_ylabel("images of device", color=MUTED, fontsize=9.5)
    axes.xaxis.set_ticks_position("bottom")


def _second_block(axes: Axes, device: int) -> None:
    """The text block of one device: its texts with all images, a stripe of columns."""
    for x, y, w, h in ((device, 0, 1, N), (0, device, N, 1)):
        axes.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor=INK, linewidth=2.6))


def _tile(axes: Axes, rows: tuple[int, int], columns: list[int] | range) -> None:
    """The block of one device, and a tile of it: a few of each device's texts."""
    first, last = rows
    height = last - first
    axes.add_patch(Rectangle((columns[0], first), len(columns), height, fill=False, edgecolor=INK, linewidth=2.6))
    for column in columns:
        axes.add_patch(
            Rectangle(
                (column + 0.25, first), 0.25, height, facecolor="none", edgecolor=INK, hatch="//////", linewidth=0
            )
        )


def _notes(panels: np.ndarray) -> None:
    notes = (
        "Colours: the first block of each device, its images with\n"
        "all texts. Outlined: both blocks of device 2. Every\n"
        "similarity is computed twice.",
        "Every similarity is computed once. Hatched: a tile of\n"
        "device 2, a few texts of every device; the tile is all\n"
        "that exists of the block at a time.",
        "Device (p, q) is number 2p + q. Its block has the images\n"
        "of the devices (p, ·) and the texts of (·, q). Dark: where\n"
        "a device meets its own pairs, always in its own block.",
    )
    for axes, note in zip(panels, notes, strict=True):
        axes.text(0, N + 0.75, note, color=INK, fontsize=9.5, va="top", linespacing=1.35)


def _devices(axes: Axes, r: int, c: int, title: str) -> None:
    """A grid of r x c devices, with texts moving along `rows` and images along `cols`."""
    for p in range(r):
        for q in range(c):
            axes.add_patch(
                Rectangle((p, 1.6 * q), 0.62, 0.62, facecolor=COLORS[c * p + q], edgecolor=INK, linewidth=0.8)
            )
            axes.text(p + 0.31, 1.6 * q + 0.31, f"{p},{q}", ha="center", va="center", color=INK, fontsize=10)
    for q in range(c):
        y = 1.6 * q - 0.2
        arrow = FancyArrowPatch(
            (0, y), (r - 0.38, y), arrowstyle="<->", mutation_scale=13, color="#b3470a", linewidth=1.6
        )
        axes.add_patch(arrow)
        axes.text(
            (r - 0.38) / 2, y - 0.08, "rows: texts and their gradients", ha="center", color="#b3470a", fontsize=9.5
        )
    if c > 1:
        x = r - 0.2
        arrow = FancyArrowPatch(
            (x, 0), (x, 1.6 * c - 0.98), arrowstyle="<->", mutation_scale=13, color=OWN, linewidth=1.6
        )
        axes.add_patch(arrow)
        axes.text(x + 0.12, 0.8 * c - 0.49, "cols: images and\ntheir gradients", va="center", color=OWN, fontsize=9.5)
    axes.set_xlim(-0.1, 8)
    axes.set_ylim(1.6 * c - 0.9, -0.75)
    axes.set_anchor("W")
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, loc="left", color=INK, fontsize=11.5, fontweight="bold")


def _received(axes: Axes) -> None:
    """Bars of what a device receives on 64 devices."""
    B, D = 196_608, 512
    bars = [("DisCo, 64", received_disco(B, D, 64, width=2), "#ee7f2d")]
    shapes = ((64, 1), (32, 2), (16, 4), (8, 8))
    bars += [(f"chunked, {r} x {c}", received(B, D, r, c, width=2), OWN) for r, c in shapes]
    bars += [("block, 8 x 8", received(B, D, 8, 8, width=2, walks=1), "#3d8fd9")]
    values = [size / 2**20 for _, size, _ in bars]
    drawn = axes.barh(range(len(bars)), values, color=[color for *_, color in bars], height=0.68)
    axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=4, color=INK, fontsize=9.5)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(values))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(
        "MiB that a device receives, B = 196,608, D = 512,\nbfloat16, 64 devices",
        loc="left",
        color=INK,
        fontsize=11.5,
        fontweight="bold",
    )


if __name__ == "__main__":
    main()
