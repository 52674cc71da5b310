import numpy as np
import pytest

from disco_jax.evaluation.zero_shot import class_embeddings, zero_shot_metrics
from disco_jax.mesh import make_mesh

NAMES = ["red circle", "blue square", "green {x} star"]
TEMPLATES = ["a photo of a {}.", "{}", "a {} and {{}}"]


def tokenizer(texts, context_length):
    """The letters of a text, so that every prompt has its own tokens."""
    tokens = np.zeros((len(texts), context_length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = list(text.encode())
    return tokens


def encode_text(tokens):
    """Some features that differ by prompt, in length too."""
    angles = tokens.astype(np.float64) @ np.arange(1, tokens.shape[1] + 1)[:, None] * np.array([0.01, 0.37, 0.73])
    return (np.cos(angles) * (1 + tokens[:, :1])).astype(np.float32)


@pytest.mark.parametrize("batch_size", [1, 4, 9, 16])
def test_class_embeddings_are_means_of_normalised_prompts_in_batches_of_one_shape(batch_size):
    shapes = set()

    def encode(tokens):
        shapes.add((tokens.shape, tokens.dtype))
        return encode_text(tokens)

    result = class_embeddings(encode, tokenizer, NAMES, TEMPLATES, 40, batch_size=batch_size)

    assert shapes == {((batch_size, 40), np.dtype(np.int32))}
    for name, row in zip(NAMES, result, strict=True):
        prompts = [f"a photo of a {name}.", name, f"a {name} and {{{name}}}"]
        features = encode_text(tokenizer(prompts, 40)).astype(np.float64)
        mean = (features / np.linalg.norm(features, axis=1, keepdims=True)).mean(axis=0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), rtol=1e-6)
    assert result.dtype == np.float32


@pytest.mark.parametrize(
    "names, templates, message",
    [
        (NAMES, ["a photo of a {}.", "a photo"], "prompt template 'a photo' has no {} for the class name"),
        ([], TEMPLATES, "at least one class name"),
        (NAMES, [], "one prompt template"),
    ],
)
def test_bad_prompts_are_refused(names, templates, message):
    with pytest.raises(ValueError, match=message):
        class_embeddings(encode_text, tokenizer, names, templates, 40)


def test_metrics_equal_a_count_by_hand():
    rng = np.random.default_rng(0)
    classes = rng.normal(size=(11, 8)).astype(np.float32)
    labels = rng.integers(0, 11, 307)
    images = (classes[labels] + 1.5 * rng.normal(size=(307, 8))).astype(np.float32)
    order = np.argsort(-(images @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T), axis=1)
    right = order[:, 0] == labels
    metrics = zero_shot_metrics(images, labels, classes)
    assert metrics == pytest.approx(
        {
            "top1": right.mean(),
            "top5": (order[:, :5] == labels[:, None]).any(axis=1).mean(),
            "mean_per_class_recall": np.mean([right[labels == c].mean() for c in range(11)]),
        }
    )
    assert 0.2 < metrics["top1"] < metrics["top5"] < 1.0
    for devices in (1, 2):  # the default is all 8
        assert zero_shot_metrics(images, labels, classes, mesh=make_mesh([("x", devices)])) == metrics


def test_classes_count_equally_in_mean_per_class_recall_and_absent_ones_not_at_all():
    classes = np.eye(4, dtype=np.float32)
    named = np.array([0, 0, 0, 1, 1, 3])
    metrics = zero_shot_metrics(classes[named], np.array([0, 0, 0, 0, 1, 1]), classes)
    assert metrics == {"top1": 4 / 6, "mean_per_class_recall": (3 / 4 + 1 / 2) / 2}


def test_top5_needs_more_than_five_classes():
    for classes in (5, 6):
        eye = np.eye(classes, dtype=np.float32)
        assert ("top5" in zero_shot_metrics(eye, np.arange(classes), eye)) == (classes == 6)


def test_collapsed_model_scores_chance():
    same = np.full((1, 5), 0.3, np.float32)
    metrics = zero_shot_metrics(np.repeat(same, 20, 0), np.zeros(20, np.int64), np.repeat(same, 10, 0))
    assert metrics == pytest.approx({"top1": 1 / 10, "top5": 5 / 10, "mean_per_class_recall": 1 / 10})


@pytest.mark.parametrize(
    "labels, message",
    [([0, 3], "labels holds 3, which is not in 0..2"), ([-1, 0], "labels holds -1"), ([], "labels is empty")],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_metrics(
            np.ones((len(labels), 4), np.float32), np.array(labels, np.int64), np.ones((3, 4), np.float32)
        )
