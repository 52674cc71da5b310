"""Memory, matrix products, traffic and time of the contrastive loss with its gradients, for each method and mesh.

    python benchmarks/loss.py --batch 8192 --dim 512 --meshes 8x1 4x2
    python benchmarks/loss.py --batch 196608 --dtype bfloat16 --target a100-40gb --topology 8x8

The first runs on the GPUs of this machine, or on simulated CPU devices where there is none. The second needs no GPU: it
compiles for those of the target (`pip install -e '.[plan]'`) and measures all but the time.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from disco_jax.evaluation.report import GRID, INK, MUTED
from disco_jax.gpu_targets import TARGETS, target_devices
from disco_jax.hlo import read_program
from disco_jax.losses import contrastive_loss
from disco_jax.losses.walk import matmul

# Each method with the colour of its bars.
METHODS = {"chunked": "#0b4f94", "block": "#3d8fd9", "disco": "#ee7f2d", "autodiff": "#9aa5b1"}
OVER_ROWS_ONLY = ("disco", "autodiff")
DEFAULT_DEVICES = 8  # simulated on the CPU, or on the one host of a target
MIB = 2**20

PER_DEVICE = PartitionSpec(("cols", "rows"))
Shape = tuple[int, int]  # rows x cols of a mesh, or hosts x GPUs of each


@dataclass
class Row:
    """What one method on one mesh takes for the loss and its gradients; memory, products and traffic of each device.

    temp_mib: beside arguments and results. products: in units of b B D multiply-adds; None where XLA calls cuBLAS,
    whose products the program's text does not tell. collectives: calls of each kind. moved_mib: received from others.
    milliseconds: of a call, median over the rounds; times_*: that, divided by the milliseconds of the method named.

    Two things that XLA does show in the products: walks over a block of one tile share its similarities (3, not 4), and
    what does not fit into the memory of a target is computed again and again (up to 10).
    """

    method: str
    mesh: str
    compile_seconds: float
    temp_mib: float
    products: float | None
    collectives: dict[str, int]
    moved_mib: float
    loss: float | None = None
    milliseconds: float | None = None
    milliseconds_of_rounds: list[float] = field(default_factory=list)
    times_disco: float | None = None
    times_autodiff: float | None = None


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes loss.json and loss.png."""
    argv = sys.argv[1:] if argv is None else argv
    args, devices = parse(argv)
    title = f"Contrastive loss with gradients: B = {args.batch:,}, D = {args.dim:,}, {args.dtype}"
    found = describe_devices(args, devices)
    where = f"{found}, jax {jax.__version__}"
    print(f"{title}\n{where}", flush=True)

    all_rows = (len(devices), 1)
    forms = [(x, shape) for x in args.methods for shape in ([all_rows] if x in OVER_ROWS_ONLY else args.meshes)]
    try:
        inputs = None if args.target else make_inputs(args, make_mesh(devices, all_rows))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"--batch {args.batch}: no memory for the features ({error}): give fewer, or use --target")
    rows, calls = [], []
    for method, shape in forms:
        mesh = make_mesh(devices, shape)
        print(f"{method} on {name(shape)}: compiling", end=" ", flush=True)
        start = time.perf_counter()
        compiled = compile_step(args, method, mesh)
        rows.append(read_row(args, compiled, method, mesh, time.perf_counter() - start))
        print(f"took {rows[-1].compile_seconds:.1f} s", flush=True)
        if inputs:
            calls.append(partial(compiled, *jax.device_put(inputs, shardings(mesh))))
    if calls:
        print(f"timing {args.rounds} rounds", flush=True)
        measure_times(rows, calls, args.rounds)

    print(f"\n{table(rows)}\n")
    record = {
        "command": shlex.join(["python", "benchmarks/loss.py", *argv]),
        "jax": jax.__version__,
        "devices": found,
        "settings": {**vars(args), "out": str(args.out)},
        "rows": [asdict(row) for row in rows],
    }
    (args.out / "loss.json").write_text(json.dumps(record, indent=2) + "\n")
    draw(args.out / "loss.png", rows, title, where)
    print(f"wrote {args.out / 'loss.json'} and {args.out / 'loss.png'}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[jax.Device]]:
    """The settings, with every default filled in, and the devices; whatever is wrong ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Measures the contrastive loss with its gradients: memory, products, traffic and time of each "
        "method on each mesh. 'autodiff' is all_gather and softmax cross-entropies under jax.grad."
    )
    parser.add_argument("--batch", type=count, default=8192, metavar="B", help="pairs on all devices (%(default)s)")
    parser.add_argument("--dim", type=count, default=512, metavar="D", help="width of the features (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(%(default)s)")
    parser.add_argument(
        "--meshes",
        type=sizes,
        nargs="+",
        metavar="RxC",
        help="rows x cols, all of the same number of devices; disco and autodiff divide over rows only and run once, "
        "on Nx1 (default: Nx1, and for a topology of several hosts also GPUs of a host x hosts)",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--chunk", type=count, help="columns of a tile of the chunked method (default: the library's)")
    parser.add_argument("--rounds", type=count, default=10, help="calls of each form that are timed (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/loss"), help="folder (%(default)s)")
    parser.add_argument(
        "--target", choices=TARGETS, help="compile for absent GPUs of this kind; needs pip install -e '.[plan]'"
    )
    parser.add_argument(
        "--topology", type=sizes, metavar="HxG", help="hosts x GPUs of each, with --target (default: one host of 8)"
    )
    args = parser.parse_args(argv)

    numbers = sorted({rows * cols for rows, cols in args.meshes or []})
    if len(numbers) > 1:
        parser.error(f"--meshes {names(args.meshes)} have {numbers} devices: give meshes of one number of devices")
    wanted = numbers[0] if numbers else None
    if args.topology and not args.target:
        parser.error(f"--topology {name(args.topology)} is of absent GPUs: name their kind with --target")
    if args.target:
        args.topology = args.topology or (1, wanted or DEFAULT_DEVICES)
        hosts, gpus = args.topology
        if wanted not in (None, hosts * gpus):
            parser.error(
                f"--meshes {names(args.meshes)} have {wanted} devices, --topology {name(args.topology)} has "
                f"{hosts * gpus}: give meshes of {hosts * gpus}, or another topology"
            )
        jax.config.update("jax_platforms", "cpu")  # as target_devices needs it
        try:
            devices = target_devices(args.target, hosts, gpus)
        except ImportError as error:
            parser.error(f"--target {args.target}: {error}")
    else:
        with contextlib.suppress(RuntimeError):  # jax has its devices already, in the tests
            jax.config.update("jax_num_cpu_devices", wanted or DEFAULT_DEVICES)  # of no effect where GPUs are found
        devices = jax.devices()
        if wanted and wanted > len(devices):
            parser.error(
                f"--meshes {names(args.meshes)} need {wanted} devices, there are {len(devices)} "
                f"({devices[0].device_kind}): give smaller meshes, or compile for absent GPUs with --target"
            )
        devices = devices[:wanted]
    if args.batch % len(devices):
        parser.error(
            f"--batch {args.batch} does not divide over {len(devices)} devices: give a multiple of {len(devices)}"
        )

    if not args.meshes:
        args.meshes = [(len(devices), 1)]
        if args.target and hosts > 1:
            args.meshes.append((gpus, hosts))
    args.meshes, args.methods = list(dict.fromkeys(args.meshes)), list(dict.fromkeys(args.methods))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written ({error.strerror}): give another folder")
    return args, devices


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def sizes(text: str) -> Shape:
    """Two numbers of at least 1, such as 4x2."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be two whole numbers of at least 1, such as 4x2")
    return int(match[1]), int(match[2])


def name(shape: Shape) -> str:
    """As on the command line."""
    return f"{shape[0]}x{shape[1]}"


def names(shapes: Sequence[Shape]) -> str:
    """As on the command line."""
    return " ".join(map(name, shapes))


def describe_devices(args: argparse.Namespace, devices: Sequence[jax.Device]) -> str:
    """How many, of what kind, and whether they are there."""
    if args.target:
        return f"{len(devices)} x {TARGETS[args.target].description}, compiled only, {args.topology[1]} GPUs a host"
    if devices[0].platform == "cpu":
        return f"{len(devices)} x CPU, simulated on {os.cpu_count()} cores"
    return f"{len(devices)} x {devices[0].device_kind}"


def make_mesh(devices: Sequence[jax.Device], shape: Shape) -> Mesh:
    """R x C devices; the axis rows varies fastest, so that a row of devices lies within a host where it fits."""
    rows, cols = shape
    return jax.make_mesh((cols, rows), ("cols", "rows"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def shardings(mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Of images, texts and scale."""
    return NamedSharding(mesh, PER_DEVICE), NamedSharding(mesh, PER_DEVICE), NamedSharding(mesh, PartitionSpec())


def autodiff_loss(
    images: Float[Array, "B D"], texts: Float[Array, "B D"], scale: Float[Array, ""], *, mesh: Mesh
) -> Float[Array, ""]:
    """The loss as it is usually written: features gathered, cross-entropies of the own rows; no gradient by hand."""

    def on_device(images: Array, texts: Array, scale: Array) -> Array:
        all_images, all_texts = (jax.lax.all_gather(x, "rows", tiled=True) for x in (images, texts))
        own = jax.lax.axis_index("rows") * len(images) + jnp.arange(len(images))
        image_losses, text_losses = (
            optax.softmax_cross_entropy_with_integer_labels(scale * matmul(x, others.T), own)  # [b, B] logits
            for x, others in ((images, all_texts), (texts, all_images))
        )
        return jax.lax.psum(jnp.sum(image_losses + text_losses) / (2 * len(all_images)), ("cols", "rows"))

    specs = PER_DEVICE, PER_DEVICE, PartitionSpec()
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(images, texts, scale)


def compile_step(args: argparse.Namespace, method: str, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled loss and its gradients by images, texts and scale; the features are divided over all devices."""

    def loss(images: Array, texts: Array, scale: Array) -> Array:
        if method == "autodiff":
            return autodiff_loss(images, texts, scale, mesh=mesh)
        chunk = args.chunk if method == "chunked" else None
        cols = "cols" if mesh.shape["cols"] > 1 else None
        value = contrastive_loss(images, texts, scale, mesh=mesh, rows="rows", cols=cols, method=method, chunk=chunk)
        assert isinstance(value, jax.Array)  # and no metrics
        return value

    kinds = ((args.batch, args.dim), args.dtype), ((args.batch, args.dim), args.dtype), ((), "float32")
    inputs = [jax.ShapeDtypeStruct(*kind, sharding=x) for kind, x in zip(kinds, shardings(mesh), strict=True)]
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*inputs)
    return traced.lower(lowering_platforms=("cuda",) if args.target else None).compile()


def read_row(
    args: argparse.Namespace, compiled: jax.stages.Compiled, method: str, mesh: Mesh, compile_seconds: float
) -> Row:
    """What the compiled program itself tells."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # CPUs and GPUs have both
    program = read_program(text)
    calls: Counter[str] = Counter()
    for collective in program.collectives:
        calls[collective.kind] += collective.calls
    unit = args.batch // mesh.size * args.batch * args.dim
    return Row(
        method,
        name((mesh.shape["rows"], mesh.shape["cols"])),
        compile_seconds,
        temp_mib=memory.temp_size_in_bytes / MIB,
        products=None if "__cublas$" in text else program.multiply_adds / unit,
        collectives=dict(sorted(calls.items())),
        moved_mib=program.bytes_moved / MIB,
    )


def make_inputs(args: argparse.Namespace, mesh: Mesh) -> tuple[Array, ...]:
    """Pairs that resemble each other a little, L2-normalised, and CLIP's first scale."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((args.batch, args.dim), np.float32)
    texts = images + 2 * rng.standard_normal((args.batch, args.dim), np.float32)
    features = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(args.dtype) for x in (images, texts))
    return jax.device_put((*features, np.float32(1 / 0.07)), shardings(mesh))


def measure_times(rows: Sequence[Row], calls: Sequence[Callable[[], Any]], rounds: int) -> None:
    """Fills in losses, times and ratios. A round calls every form once: what else the machine does hits all alike."""
    for row, call in zip(rows, calls, strict=True):  # also the warm-up
        row.loss = float(call()[0])
        jax.block_until_ready(call())
    for _ in range(rounds):
        for row, call in zip(rows, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            row.milliseconds_of_rounds.append(1000 * (time.perf_counter() - start))
    medians = [statistics.median(row.milliseconds_of_rounds) for row in rows]
    of_method = {row.method: median for row, median in zip(rows, medians, strict=True) if row.method in OVER_ROWS_ONLY}
    for row, median in zip(rows, medians, strict=True):
        row.milliseconds = median
        row.times_disco = median / of_method["disco"] if "disco" in of_method else None
        row.times_autodiff = median / of_method["autodiff"] if "autodiff" in of_method else None


def table(rows: Sequence[Row]) -> str:
    """The rows in aligned columns."""
    lines: list[tuple[str, ...]] = [
        ("method", "mesh", "memory MiB", "products", "moved MiB", "time ms", "/disco", "/autodiff", "collective calls")
    ]
    for row in rows:
        calls = ", ".join(f"{calls} {kind}" for kind, calls in row.collectives.items())
        numbers = [row.temp_mib, row.products, row.moved_mib, row.milliseconds, row.times_disco, row.times_autodiff]
        lines.append((row.method, row.mesh, *map(number, numbers), calls))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, 1, len(widths) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(value: float | None) -> str:
    """To three digits, or to whole ones; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def draw(path: Path, rows: Sequence[Row], title: str, footnote: str) -> None:
    """Bars of memory, time (where it is known relative to disco) and traffic, one for each row, side by side."""
    panels = [("Temporary memory per device, MiB", [row.temp_mib for row in rows])]
    ratios = [row.times_disco for row in rows if row.times_disco is not None]
    if ratios:
        panels.append(("Time of a call, disco = 1", ratios))
    panels.append(("Received by each device, MiB", [row.moved_mib for row in rows]))

    size = 1.4 + 3.9 * len(panels), 1.6 + 0.4 * len(rows)
    figure = Figure(figsize=size, dpi=140, layout=ConstrainedLayoutEngine(wspace=0.06))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", color=INK, fontsize=12.5, fontweight="bold")
    figure.supxlabel(footnote, x=0.012, ha="left", color=MUTED, fontsize=9)
    for axes, (heading, values) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        axes.set_title(heading, loc="left", color=INK, fontsize=10.5)
        draw_bars(axes, values, [METHODS[row.method] for row in rows])
        axes.set_yticks(range(len(rows)), [f"{row.method}  {row.mesh}" for row in rows], color=INK)
    axes.invert_yaxis()  # shared: the first row on top
    figure.savefig(path)


def draw_bars(axes: Axes, values: Sequence[float], colors: Sequence[str]) -> None:
    """Horizontal bars with their values at the end; on a logarithmic scale where they span more than a factor of 10."""
    bars = axes.barh(range(len(values)), values, height=0.68, color=colors)
    axes.bar_label(bars, [number(value) for value in values], padding=4, color=INK, fontsize=9.5)
    least, most = min(values), max(values)
    if least > 0 and most > 10 * least:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlim(least / 3, most * (most / least) ** 0.3)
        axes.set_xlabel("logarithmic scale", color=MUTED, fontsize=8.5)
    else:
        axes.set_xlim(0, 1.2 * most or 1)
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", which="both", length=0, colors=MUTED)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GRID)


if __name__ == "__main__":
    main()
