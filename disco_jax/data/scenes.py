"""Generated scenes for the demo: one or two coloured shapes on a plain ground, and a caption saying so.

Some combinations of colour and shape never occur in the training split; the held-out split shows only those, so a
model that names them has learnt colour and shape apart from each other.

    python -m disco_jax.data.scenes runs/demo/data
"""

import argparse
import colorsys
import io
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from disco_jax.data.examples import Example
from disco_jax.data.shards import write_tar

COLOURS = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (250, 214, 20),
    "green": (46, 160, 67),
    "cyan": (40, 200, 220),
    "blue": (30, 80, 220),
    "purple": (125, 45, 190),
    "pink": (250, 140, 190),
    "brown": (120, 70, 30),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "crescent")
SIZES = {"small": 0.13, "medium": 0.19, "large": 0.26}  # radius as a share of the image's side
PLACES = {
    "at the top left": (0.28, 0.28),
    "at the top": (0.5, 0.28),
    "at the top right": (0.72, 0.28),
    "on the left": (0.28, 0.5),
    "in the middle": (0.5, 0.5),
    "on the right": (0.72, 0.5),
    "at the bottom left": (0.28, 0.72),
    "at the bottom": (0.5, 0.72),
    "at the bottom right": (0.72, 0.72),
}
COMBINATIONS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
# One in four, spread so that every colour and every shape is seen in training with most of the others.
HELD_OUT = tuple(c for i, c in enumerate(COMBINATIONS) if (i // len(SHAPES) + i % len(SHAPES)) % 4 == 0)
SPLIT_SIZES = {"train": 20_000, "held_out": 1_000}
# What zero-shot classification chooses from.
CLASS_NAMES = tuple(f"{colour} {shape}" for colour, shape in HELD_OUT)


class Scenes:
    """A source of `size` generated examples (default: SPLIT_SIZES); example i depends on (seed, i) alone.

    split "train" shows one or two shapes of the seen combinations; split "held_out" shows one shape of a held-out
    combination and carries its label, an index into CLASS_NAMES. Images are PNG, `side` pixels square.
    """

    def __init__(self, split: str, size: int | None = None, *, side: int = 32, seed: int = 0):
        if split not in SPLIT_SIZES:
            raise ValueError(f"unknown split {split!r} of the generated scenes: use 'train' or 'held_out'")
        size = SPLIT_SIZES[split] if size is None else size
        if size < 1:
            raise ValueError(f"the generated scenes need at least one example, got size={size}")
        self.split, self.size, self.side, self.seed = split, size, side, seed
        self.combinations = HELD_OUT if split == "held_out" else tuple(c for c in COMBINATIONS if c not in HELD_OUT)
        self.label_names = CLASS_NAMES if split == "held_out" else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        rng = np.random.default_rng((self.seed, self.split == "held_out", index))
        count = 1 if self.split == "held_out" else int(rng.integers(1, 3))
        image = Image.new("RGB", (3 * self.side, 3 * self.side), _ground(rng))
        phrases = []
        for name in _places(rng, count):
            colour, shape = self.combinations[rng.integers(len(self.combinations))]
            # Two shapes share the image without touching: neither is large.
            size = list(SIZES)[rng.integers(len(SIZES) if count == 1 else 2)]
            _draw(image, rng, colour, shape, size, name)
            phrases.append(f"a {size} {colour} {shape} {name}")
        buffer = io.BytesIO()
        image.resize((self.side, self.side), Image.Resampling.BOX).save(buffer, "PNG")
        label = HELD_OUT.index((colour, shape)) if self.split == "held_out" else None
        return Example(f"{self.split}/{index:06d}", buffer.getvalue(), " and ".join(phrases), label)


def _ground(rng: np.random.Generator) -> tuple[int, int, int]:
    """A dark ground of any hue, so that every colour stands out from it."""
    red, green, blue = colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(0, 0.5), rng.uniform(0.08, 0.28))
    return int(255 * red), int(255 * green), int(255 * blue)


def _places(rng: np.random.Generator, count: int) -> list[str]:
    """`count` places, two of them at least 0.42 of the image's side apart, so that their shapes don't touch."""
    while True:
        names = [list(PLACES)[i] for i in rng.choice(len(PLACES), count, replace=False)]
        if count == 1 or math.dist(PLACES[names[0]], PLACES[names[1]]) > 0.42:
            return names


def _draw(image: Image.Image, rng: np.random.Generator, colour: str, shape: str, size: str, place: str) -> None:
    side = image.width
    radius = SIZES[size] * rng.uniform(0.9, 1.1) * side
    x, y = (side * (centre + rng.uniform(-0.03, 0.03)) for centre in PLACES[place])
    fill = tuple(int(np.clip(channel + rng.integers(-12, 13), 0, 255)) for channel in COLOURS[colour])
    turn = rng.uniform(-0.2, 0.2)

    def polygon(radii: list[float], start: float) -> list[tuple[float, float]]:
        angles = [start + turn + 2 * math.pi * i / len(radii) for i in range(len(radii))]
        return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]

    mask = Image.new("L", image.size)
    pen = ImageDraw.Draw(mask)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape in ("circle", "ring", "crescent"):
        pen.ellipse(box, fill=255)
        if shape == "ring":
            pen.ellipse(tuple(c + s * 0.5 * radius for c, s in zip(box, (1, 1, -1, -1), strict=True)), fill=0)
        elif shape == "crescent":
            pen.ellipse(tuple(c + s * radius for c, s in zip(box, (0.6, -0.1, 0.6, -0.1), strict=True)), fill=0)
    elif shape == "square":
        pen.polygon(polygon([radius * 1.1] * 4, math.pi / 4), fill=255)
    elif shape == "diamond":
        pen.polygon(polygon([radius * 1.2, radius * 0.75] * 2, math.pi / 2), fill=255)
    elif shape == "triangle":
        pen.polygon(polygon([radius * 1.1] * 3, -math.pi / 2), fill=255)
    elif shape == "star":
        pen.polygon(polygon([radius * 1.15, radius * 0.5] * 5, -math.pi / 2), fill=255)
    elif shape == "cross":
        for start in (0.0, math.pi / 2):
            arm = math.atan(0.32)
            corners = [(radius * 1.05, start + a) for a in (arm, -arm, math.pi + arm, math.pi - arm)]
            pen.polygon([(x + r * math.cos(a + turn), y + r * math.sin(a + turn)) for r, a in corners], fill=255)
    image.paste(fill, mask=mask)


def write_scenes(directory: str | Path, sizes: Mapping[str, int] = SPLIT_SIZES, *, side: int = 32) -> None:
    """Writes the demo's data: train-*.tar and held_out-*.tar of at most 2,000 scenes each, and classes.txt."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        scenes = Scenes(split, size, side=side)
        for shard, start in enumerate(range(0, size, 2000)):
            examples = (scenes[i] for i in range(start, min(start + 2000, size)))
            write_tar(directory / f"{split}-{shard:05d}.tar", examples)
    (directory / "classes.txt").write_text("".join(f"{name}\n" for name in CLASS_NAMES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo's generated scenes as image-text tars.")
    parser.add_argument("directory", help="where train-*.tar, held_out-*.tar and classes.txt go")
    write_scenes(parser.parse_args().directory)
