"""In-batch metrics against their definitions on the whole matrix of similarities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MESHES, features, rectangle, value_and_gradients

from disco_jax.losses import contrastive_loss, sigmoid_loss

SCALARS = jnp.float32(14.3), jnp.float32(-3.7)
LOSSES = {"contrastive": (contrastive_loss, SCALARS[:1]), "sigmoid": (sigmoid_loss, SCALARS)}


def expected_metrics(images, texts, labels):
    similarities = np.asarray(images, np.float64) @ np.asarray(texts, np.float64).T
    positive = labels[:, None] == labels[None, :]
    best = np.where(positive, similarities, -np.inf)
    hardest = np.where(positive, -np.inf, similarities)
    return (
        np.mean(best.max(1) > hardest.max(1)),
        np.mean(best.max(0) > hardest.max(0)),
        np.mean([similarities[i, positive[i]].mean() for i in range(len(labels))]),
        (hardest.max(1).mean() + hardest.max(0).mean()) / 2,
    )


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("mesh", ["1", "8", "2x4", "4x2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_metrics(loss, mesh, labelled):
    function, scalars = LOSSES[loss]
    division = rectangle(mesh)
    images, texts = features(40, D=8, dtype=jnp.float32)
    labels = jnp.asarray(np.random.default_rng(2).integers(0, 12, 40)) if labelled else None
    settings = {"labels": labels, "chunk": 3, **division}
    value, metrics = function(images, texts, *scalars, return_metrics=True, **settings)
    expected = expected_metrics(images, texts, np.arange(40) if labels is None else labels)
    np.testing.assert_allclose(metrics, expected, rtol=1e-6)
    assert 0 < metrics.image_to_text_accuracy < 1
    assert all(metric.dtype == jnp.float32 for metric in metrics)
    np.testing.assert_allclose(value, function(images, texts, *scalars, **settings), rtol=1e-6)


@pytest.mark.parametrize("mesh", ["1", "8", "4x2"])
def test_padding_is_nobodys_positive_or_negative(mesh):
    """Nor is it of label 0, which it is filled with."""
    division = rectangle(mesh)
    B = 5 * division["mesh"].size
    images = jnp.abs(features(B, D=8, dtype=jnp.float32)[0])  # all similarities lie below the padding's 0
    labels = jnp.asarray(np.random.default_rng(2).integers(0, 3, B))
    settings = {"labels": labels, "chunk": 3 * MESHES[mesh][0], **division}
    _, metrics = contrastive_loss(images, -images, SCALARS[0], return_metrics=True, **settings)
    np.testing.assert_allclose(metrics, expected_metrics(images, -images, np.asarray(labels)), rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_leave_the_gradients_as_they_are(loss):
    function, scalars = LOSSES[loss]
    args = (*features(24, dtype=jnp.float32), *scalars)
    division = rectangle("4x2")
    _, plain = value_and_gradients(function, *args, **division)

    def with_metrics(*args):
        value, metrics = function(*args, return_metrics=True, **division)
        return value + metrics.positive_similarity  # not differentiated

    _, gradients = value_and_gradients(with_metrics, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), gradients, plain)


def test_a_tie_is_a_miss_and_one_class_has_no_negatives():
    same = jnp.ones((8, 4), jnp.float32) / 2
    _, metrics = contrastive_loss(same, same, SCALARS[0], return_metrics=True, **rectangle("2x4"))
    np.testing.assert_allclose(metrics, (0, 0, 1, 1))
    labels = jnp.zeros(8, int)
    _, metrics = contrastive_loss(same, same, SCALARS[0], labels=labels, return_metrics=True, **rectangle("2x4"))
    np.testing.assert_allclose(metrics, (1, 1, 1, -np.inf))
