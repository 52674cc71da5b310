"""Weights in and out.

    python -m disco_jax.convert import SOURCE --out DIR [--activation gelu|quickgelu] [--vision-heads N --text-heads N]
    python -m disco_jax.convert export CHECKPOINT --format open_clip|hf --out PATH [--ema]

Exit status: 0, or 1 with one line on what is wrong.
"""

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: weights pass through the host's memory alone

import jax
from absl import logging

from disco_jax.command import leave, one_line
from disco_jax.convert import export, load, write
from disco_jax.convert.export import FORMATS
from disco_jax.convert.weights import check_new
from disco_jax.models.transformer import ACTIVATIONS


def parser() -> argparse.ArgumentParser:
    """The arguments of both commands."""
    parser = argparse.ArgumentParser(prog="python -m disco_jax.convert", description="Weights in and out.")
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser(
        "import",
        help="make a folder for config.init_from and disco_jax.evaluate",
        description="Makes a folder of weights, for config.init_from, disco_jax.evaluate and export.",
    )
    importing.add_argument("source", help="open_clip or OpenAI file, CLIPModel folder, or one of our runs")
    importing.add_argument("--out", required=True, help="the folder to make")
    importing.add_argument(
        "--activation", choices=list(ACTIVATIONS), help="of a file without a config; default: gelu, OpenAI's: quickgelu"
    )
    for tower in ("vision", "text"):
        importing.add_argument(
            f"--{tower}-heads",
            type=int,
            help="of a file without a config; default: of the preset with its sizes, else 64 dimensions each",
        )
    exporting = commands.add_parser(
        "export", help="write weights for open_clip or transformers", description="Writes weights for other projects."
    )
    exporting.add_argument(
        "source", metavar="CHECKPOINT", help="a workdir, WORKDIR/checkpoints/STEP, or what import takes"
    )
    exporting.add_argument("--format", choices=FORMATS, required=True)
    exporting.add_argument("--out", required=True, help="open_clip: NAME.safetensors; hf: the folder to make")
    for command in (importing, exporting):
        command.add_argument("--ema", action="store_true", help="a run's running averages instead of its parameters")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs the command; what cannot be done ends with one line and exit status 1."""
    arguments = parser().parse_args(argv)
    logging.set_verbosity(logging.WARNING)
    try:
        if arguments.command == "export":
            for path in export(arguments.source, arguments.out, format=arguments.format, ema=arguments.ema):
                print(f"wrote {path}")
            return
        check_new(Path(arguments.out))
        weights = load(
            arguments.source,
            ema=arguments.ema,
            activation=arguments.activation,
            vision_heads=arguments.vision_heads,
            text_heads=arguments.text_heads,
        )
        write(weights, arguments.out)
    except (ValueError, ImportError, OSError) as error:
        leave(f"convert: {one_line(error)}", 1)
    for note in weights.notes:
        print(note)
    vision, text = weights.model.vision, weights.model.text
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights.params))
    print(
        f"{size / 1e6:.2f} M parameters; images of "
        f"{vision.image_size} px in patches of {vision.patch_size}, {text.context_length} tokens of "
        f"{text.vocab_size:,}, {weights.model.embed_dim} features"
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
