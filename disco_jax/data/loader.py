"""From sources to batches: one seeded global order for training, one pass in order for evaluation.

The batch of a training step is a function of (seed, step) alone, on any number of hosts, so the state of the data is
the step. A bad example gives its place to another one, drawn from (seed, position), which keeps that promise; what was
dropped is counted by reason, and too large a share of it stops the run.
"""

import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import logging

from disco_jax.data.captions import clean_caption
from disco_jax.data.examples import BadExample, Example, ExampleSource
from disco_jax.data.images import decode_image, eval_transform, train_transform
from disco_jax.data.tokenizer import Tokenizer

NO_LABEL = -1
"""Instead of a class index in arrays."""


class Batch(NamedTuple):
    """Training examples of this process.

    images: uint8 [b, H, W, 3]; tokens: int32 [b, L]; keys: the examples' names, [b] strings.
    """

    images: np.ndarray
    tokens: np.ndarray
    keys: np.ndarray


class EvalBatch(NamedTuple):
    """Consecutive examples for evaluation, padded to the batch size; every process holds its own rows.

    images: uint8 [b, H, W, 3]; labels: int32 [b], -1 where there is none; indices: int64 [b], places in the source, -1
    for padding and for bad examples; keys: the examples' names, [b] strings; captions: [b] tuples of clean strings.
    """

    images: np.ndarray
    labels: np.ndarray
    indices: np.ndarray
    keys: np.ndarray
    captions: np.ndarray


class TooManyBadExamples(ValueError):
    """The dropped share of the examples passed the limit."""


class DropCounter:
    """Counts the examples read and those dropped, by reason; logs the first of each reason.

    Raises `TooManyBadExamples` from `drop` when more than `limit` of all examples read were dropped, looked at after
    `grace` examples. Bad captions of examples that are kept for their others are counted apart.
    """

    def __init__(self, limit: float = 0.01, grace: int = 1000):
        self.limit, self.grace = limit, grace
        self.read = 0
        self.dropped: Counter[str] = Counter()
        self.captions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Counts a good example."""
        with self._lock:
            self.read += 1

    def drop(self, key: str, error: BadExample) -> None:
        """Counts a bad example, named by `key` in the log."""
        with self._lock:
            self.read += 1
            self.dropped[error.reason] += 1
            if self.dropped[error.reason] == 1:
                logging.warning("Dropped %s (%s): %s. Later ones like it are only counted.", key, error.reason, error)
            total = self.dropped.total()
            if self.read >= self.grace and total > self.limit * self.read:
                raise TooManyBadExamples(f"{self}, over the limit of {self.limit:.2%}: mend the data or raise "
                                         "config.data.max_dropped")  # fmt: skip

    def drop_caption(self, key: str, error: BadExample) -> None:
        """Counts a bad caption of an example that has good ones."""
        with self._lock:
            self.captions[error.reason] += 1
            if self.captions[error.reason] == 1:
                logging.warning("Dropped a caption of %s (%s): %s", key, error.reason, error)

    def __str__(self) -> str:
        text = f"dropped {self.dropped.total()} of {self.read} examples{_reasons(self.dropped)}"
        return text + (f", {self.captions.total()} captions{_reasons(self.captions)}" if self.captions else "")


def _reasons(counts: Counter[str]) -> str:
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return f" ({', '.join(f'{count} {reason}' for reason, count in most_first)})" if counts else ""


class Preprocessor:
    """Turns stored examples into model inputs.

    Args:
        tokenizer: captions to ids.
        image_size: side of the square images in pixels.
        context_length: tokens per caption.
        apply_exif: turn photographs upright as their EXIF orientation says.
        scale, ratio: ranges of the area and the aspect ratio of the training crop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        image_size: int,
        context_length: int,
        apply_exif: bool = True,
        scale: tuple[float, float] = (0.9, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ):
        self.tokenizer, self.image_size, self.context_length = tokenizer, image_size, context_length
        self.apply_exif, self.scale, self.ratio = apply_exif, scale, ratio

    def tokens(self, example: Example) -> np.ndarray:
        """Token ids of the caption, int32 [L]; raises `BadExample`."""
        return self.tokenizer([clean_caption(example.caption)], self.context_length)[0]

    def train_image(self, example: Example, rng: np.random.Generator) -> np.ndarray:
        """A random crop, uint8 [H, W, 3]; raises `BadExample`."""
        image = decode_image(example.image, apply_exif=self.apply_exif)
        return train_transform(image, self.image_size, rng, self.scale, self.ratio)

    def eval_image(self, example: Example) -> np.ndarray:
        """The centre crop, uint8 [H, W, 3]; raises `BadExample`."""
        return eval_transform(decode_image(example.image, apply_exif=self.apply_exif), self.image_size)


def train_batches(
    source: ExampleSource,
    preprocessor: Preprocessor,
    drops: DropCounter,
    *,
    batch_size: int,
    seed: int,
    first_step: int = 0,
    threads: int = 16,
) -> Generator[Batch]:
    """This process's rows of the global batches, endlessly, from step `first_step` on; close it to stop its threads.

    Each epoch is a new permutation of the whole source, drawn from (seed, epoch); the augmentation of an example is
    drawn from (seed, position in that order). Process p holds the p-th run of batch_size / processes rows, as its
    devices do in the global array: row r is the same example on any number of processes.

    Args:
        source: random-access examples.
        preprocessor: turns them into arrays.
        drops: counts bad examples, and raises `TooManyBadExamples` in `next`.
        batch_size: the global batch size, divisible by the number of processes.
        seed: of order and augmentation.
        first_step: the step whose batch comes first.
        threads: that read and decode.
    """

    def prepare(index: int, rng: np.random.Generator) -> Batch:
        place = index
        for _ in range(1000):
            key = f"example {place}"
            try:
                example = source[place]
                key = example.key
                tokens = preprocessor.tokens(example)  # before the image, which takes longer
                prepared = Batch(preprocessor.train_image(example, rng), tokens, np.asarray(key, object))
            except BadExample as error:
                drops.drop(key, error)
                place = int(rng.integers(len(source)))  # not the next: bad ones often lie together
                continue
            drops.keep()
            return prepared
        raise TooManyBadExamples(f"no usable example found in 1,000 tries: {drops}")

    # Positions in the endless global order; what happens to an example doesn't depend on which process has it.
    ordered = grain.MapDataset.source(range(len(source))).seed(seed).shuffle().repeat().random_map(prepare)
    local = batch_size // jax.process_count()
    first_row = jax.process_index() * local

    def example(index: int, row: int) -> Batch:
        prepared: Batch = ordered[index // local * batch_size + first_row + row]
        return prepared

    dataset = grain.MapDataset.range(local).repeat().map_with_index(example)
    yield from _batched(dataset[first_step * local :], local, threads)


def _batched(dataset: grain.MapDataset, batch_size: int, threads: int) -> Generator[Any]:
    """Reads examples in `threads` threads; these stop when the generator is closed.

    One batch is read ahead, or two examples for each thread where that is more.
    """
    rows = rows_at_a_time(batch_size, threads)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(batch_size // rows, 2 * threads))
    pieces = dataset.batch(rows, drop_remainder=True).to_iter_dataset(options)
    with closing(iter(pieces.batch(batch_size // rows, drop_remainder=True, batch_fn=_joined))) as batches:
        yield from batches


def rows_at_a_time(batch_size: int, threads: int) -> int:
    """How many rows of a batch a thread reads as one piece: a divisor of it that leaves each thread some pieces.

    Grain looks at all pieces that wait whenever it takes one: by single rows that takes minutes for a batch of 32,768.
    """
    most = max(1, batch_size // (4 * threads))
    return next(rows for rows in range(most, 0, -1) if batch_size % rows == 0)


def _joined(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)


def eval_batches(
    source: ExampleSource,
    preprocessor: Preprocessor,
    drops: DropCounter,
    *,
    batch_size: int,
    first: int = 0,
    size: int | None = None,
    captions: int | None = None,
    threads: int = 16,
) -> Generator[EvalBatch]:
    """One pass over `size` examples from `first` on (default: all) in order, in batches of the global `batch_size`.

    Of each example the first `captions` good captions are given (default: all); it needs one, unless `captions` is 0.
    Bad examples are counted in `drops` and get the index -1. Global row r of batch k is example
    first + k * batch_size + r; process p holds the p-th run of batch_size / processes rows.
    """
    size = len(source) - first if size is None else min(size, len(source) - first)
    local = batch_size // jax.process_count()
    blank = EvalBatch(
        np.zeros((preprocessor.image_size, preprocessor.image_size, 3), np.uint8),
        np.asarray(NO_LABEL, np.int32),
        np.asarray(-1, np.int64),
        np.asarray("", object),
        _cell(()),
    )

    def prepare(row: int) -> EvalBatch:
        batch, row = divmod(row, local)
        row += batch * batch_size + jax.process_index() * local
        if row >= size:
            return blank
        index = first + row
        key = f"example {index}"
        try:
            example = source[index]
            key = example.key
            texts = () if captions == 0 else _good_captions(example, drops)[:captions]
            image = preprocessor.eval_image(example)
        except BadExample as error:
            drops.drop(key, error)
            return blank
        drops.keep()
        label = NO_LABEL if example.label is None else example.label
        return EvalBatch(
            image, np.asarray(label, np.int32), np.asarray(index, np.int64), np.asarray(key, object), _cell(texts)
        )

    rows = -(-size // batch_size) * local
    yield from _batched(grain.MapDataset.source(range(rows)).map(prepare), local, threads)


def _good_captions(example: Example, drops: DropCounter) -> tuple[str, ...]:
    """The captions as text, at least one; raises the `BadExample` of the first where all are bad."""
    texts, errors = [], []
    for raw in (example.caption, *example.other_captions):
        try:
            texts.append(clean_caption(raw))
        except BadExample as found:
            errors.append(found)
    if not texts:
        raise errors[0]
    for error in errors:
        drops.drop_caption(example.key, error)
    return tuple(texts)


def _cell(value: Any) -> np.ndarray:
    """An array [] of one object, whatever it is; a batch of them is an array of objects."""
    cell = np.empty((), object)
    cell[()] = value
    return cell
