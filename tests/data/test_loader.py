from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from disco_jax.data import loader
from disco_jax.data.examples import BadExample, Example
from disco_jax.data.loader import (
    DropCounter,
    Preprocessor,
    TooManyBadExamples,
    eval_batches,
    rows_at_a_time,
    train_batches,
)
from disco_jax.data.scenes import Scenes
from disco_jax.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def preprocessor():
    return Preprocessor(load_tokenizer(), image_size=16, context_length=24)


class WithBad:
    """`scenes` with broken images, empty captions and unreadable examples at the given places."""

    def __init__(self, scenes, image=(), caption=(), read=()):
        self.scenes, self.image, self.caption, self.read = scenes, image, caption, read

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index) -> Example:
        if index in self.read:
            raise BadExample("shard:truncated", "cut off")
        example = self.scenes[index]
        if index in self.image:
            return replace(example, image=b"<html>")
        return replace(example, caption=b"  ") if index in self.caption else example


def take(source, preprocessor, count, *, batch_size=4, first_step=0, seed=0, drops=None):
    drops = drops or DropCounter()
    with closing(
        train_batches(source, preprocessor, drops, batch_size=batch_size, seed=seed, first_step=first_step, threads=2)
    ) as batches:
        return [next(batches) for _ in range(count)]


def keys(batches):
    return [str(key) for batch in batches for key in batch.keys]


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)


def test_an_epoch_has_each_example_once_and_the_next_another_order(preprocessor):
    scenes = Scenes("train", 12)
    batches = take(scenes, preprocessor, 6)
    first, second = keys(batches[:3]), keys(batches[3:])
    assert sorted(first) == sorted(second) == sorted(scenes[i].key for i in range(12))
    assert first != second
    assert first != sorted(first)
    assert keys(take(scenes, preprocessor, 3, seed=1)) != first


def test_shapes_and_dtypes(preprocessor):
    (batch,) = take(Scenes("train", 5), preprocessor, 1)
    assert batch.images.shape == (4, 16, 16, 3) and batch.images.dtype == np.uint8
    assert batch.tokens.shape == (4, 24) and batch.tokens.dtype == np.int32
    assert batch.keys.shape == (4,)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000, 4096, 32_768, 90_112 // 4, 4_194_304])
@pytest.mark.parametrize("threads", [2, 16, 64])
def test_a_batch_is_read_in_some_pieces_for_each_thread(batch_size, threads):
    pieces, rest = divmod(batch_size, rows_at_a_time(batch_size, threads))
    assert rest == 0
    assert min(batch_size, 4 * threads) <= pieces <= max(1000, 8 * threads)


def test_rows_read_together_are_those_read_one_by_one(preprocessor, monkeypatch):
    scenes = Scenes("train", 40)
    together = take(scenes, preprocessor, 3, batch_size=16)  # by two threads, two at a time
    monkeypatch.setattr(loader, "rows_at_a_time", lambda *_: 1)
    assert_equal(together, take(scenes, preprocessor, 3, batch_size=16))


def test_starting_at_a_step_gives_the_batches_of_an_unbroken_pass(preprocessor):
    scenes = Scenes("train", 10)
    assert_equal(take(scenes, preprocessor, 6)[4:], take(scenes, preprocessor, 2, first_step=4))


def test_augmentation_differs_between_epochs(preprocessor):
    one, two = take(Scenes("train", 1), preprocessor, 2, batch_size=1)
    assert keys([one]) == keys([two])
    assert (one.images != two.images).any()


@pytest.mark.parametrize("count", [2, 4])
def test_hosts_share_the_same_global_batches_row_by_row(preprocessor, monkeypatch, count):
    scenes = Scenes("train", 10)
    whole = take(scenes, preprocessor, 3, batch_size=4)
    parts = []
    for process in range(count):
        monkeypatch.setattr(jax, "process_index", lambda p=process: p)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        parts.append(take(scenes, preprocessor, 3, batch_size=4))
    joined = [
        type(batch)(*map(np.concatenate, zip(*parts, strict=True))) for batch, *parts in zip(whole, *parts, strict=True)
    ]
    assert_equal(whole, joined)


def test_bad_examples_are_replaced_counted_and_the_first_of_a_kind_is_logged(preprocessor, caplog):
    source = WithBad(Scenes("train", 20), image=(3, 11), caption=(7,), read=(5,))
    drops = DropCounter(limit=0.5)
    batches = take(source, preprocessor, 5, drops=drops)
    bad = {f"train/{i:06d}" for i in (3, 5, 7, 11)}
    assert not bad & set(keys(batches))
    assert len(keys(batches)) == 20
    assert set(drops.dropped) == {"image:not_an_image", "caption:empty", "shard:truncated"}
    assert sum("image:not_an_image" in record.message for record in caplog.records) == 1
    assert_equal(batches[3:], take(source, preprocessor, 2, first_step=3))


def test_too_many_bad_examples_stop_the_run(preprocessor):
    source = WithBad(Scenes("train", 20), image=(3, 11))
    drops = DropCounter(limit=0.05, grace=40)
    with pytest.raises(TooManyBadExamples, match=r"dropped \d+ of \d\d examples .*max_dropped"):
        take(source, preprocessor, 20, drops=drops)
    take(source, preprocessor, 20, drops=DropCounter(limit=0.2, grace=40))


def test_bad_examples_that_lie_together_count_once_each_and_are_replaced_by_many(preprocessor):
    source = WithBad(Scenes("train", 100), image=range(40, 60))
    drops = DropCounter(limit=1.0)
    drawn = keys(take(source, preprocessor, 25, drops=drops))
    read_ahead = max(4, 2 * 2) + 2  # the threads may be at most a batch, or two examples each, and one each ahead
    assert 0 <= drops.read - drops.dropped.total() - 100 <= read_ahead
    assert 20 <= drops.dropped.total() < 35 + read_ahead
    assert max(drawn.count(key) for key in drawn) <= 4


def test_no_usable_example_is_an_error_however_few_there_are(preprocessor):
    source = WithBad(Scenes("train", 3), image=range(3))
    with pytest.raises(TooManyBadExamples, match=r"no usable example .*: dropped \d+ of \d+ examples"):
        take(source, preprocessor, 1, drops=DropCounter(limit=1.0))


@pytest.mark.parametrize("size", [1, 7, 8])
def test_evaluation_has_each_example_once_in_order(preprocessor, size):
    scenes = Scenes("held_out", size)
    batches = list(eval_batches(scenes, preprocessor, DropCounter(), batch_size=4, threads=2))
    assert len(batches) == -(-size // 4)
    indices = np.concatenate([batch.indices for batch in batches])
    assert indices.tolist() == [i if i < size else -1 for i in range(len(indices))]
    valid = indices >= 0
    labels = np.concatenate([batch.labels for batch in batches])[valid]
    assert labels.tolist() == [scenes[i].label for i in range(size)]
    images = np.concatenate([batch.images for batch in batches])[valid]
    np.testing.assert_array_equal(images[-1], preprocessor.eval_image(scenes[size - 1]))


def test_evaluation_masks_bad_examples_and_stops_at_size(preprocessor):
    source = WithBad(Scenes("held_out", 9), image=(1,), caption=(2,))
    drops = DropCounter(limit=1.0)
    batches = list(eval_batches(source, preprocessor, drops, batch_size=4, size=6, threads=2))
    assert str(drops) == "dropped 2 of 6 examples (1 caption:empty, 1 image:not_an_image)"
    assert np.concatenate([batch.indices for batch in batches]).tolist() == [0, -1, -1, 3, 4, 5, -1, -1]


def test_processes_evaluate_disjoint_rows(preprocessor, monkeypatch):
    scenes = Scenes("held_out", 7)
    whole = list(eval_batches(scenes, preprocessor, DropCounter(), batch_size=4, threads=2))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(loader.jax, "process_index", lambda p=process: p)
        part = list(eval_batches(scenes, preprocessor, DropCounter(), batch_size=4, threads=2))
        for all_rows, rows in zip(whole, part, strict=True):
            np.testing.assert_array_equal(all_rows.labels[2 * process : 2 * process + 2], rows.labels)
