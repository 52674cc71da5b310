import math
from fractions import Fraction

import numpy as np
import pytest

from disco_jax.evaluation.retrieval import retrieval_metrics, top_images
from disco_jax.mesh import make_mesh


def exact_cosine(a: np.ndarray, b: np.ndarray) -> Fraction:
    """Sign and square of the cosine of two integer vectors, without rounding: ordered as the cosine itself."""
    dot, lengths = int(a @ b), int(a @ a) * int(b @ b)
    return Fraction(dot * abs(dot), lengths) if lengths else Fraction(0)


def brute_force(queries, query_ids, candidates, candidate_ids) -> dict[str, float]:
    hits, ranks = {1: [], 5: [], 10: []}, []
    for query, own_id in zip(queries, query_ids, strict=True):
        scores = [exact_cosine(query, candidate) for candidate in candidates]
        own = [score for score, id_ in zip(scores, candidate_ids, strict=True) if id_ == own_id]
        better = sum(score > max(own) for score in scores)
        tied, own_tied = sum(score == max(own) for score in scores), own.count(max(own))

        def misses(drawn, tied=tied, others=tied - own_tied) -> Fraction:  # probability that no own one is drawn
            return Fraction(math.comb(others, drawn), math.comb(tied, drawn))

        for k in hits:
            hits[k].append(1 - misses(min(max(k - better, 0), tied)))
        ranks.append(better + sum(misses(drawn) for drawn in range(tied)))
    middle = sorted(ranks)[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1]
    recalls = {f"R@{k}": float(sum(values) / len(values)) for k, values in hits.items()}
    return recalls | {"median_rank": float(sum(middle) / len(middle))}


def integer_pairs(seed: int, n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Few small integers: many scores tie exactly. Every image has a caption, some have several."""
    rng = np.random.default_rng(seed)
    images, texts = rng.integers(-2, 3, (n, 3)), rng.integers(-2, 3, (m, 3))
    return images, texts, rng.permutation(np.concatenate([np.arange(n), rng.integers(0, n, m - n)]))


@pytest.mark.parametrize("n, m", [(31, 67), (13, 13), (3, 5), (1, 1)])
@pytest.mark.parametrize("chunk_rows", [1, 7, 256])
def test_metrics_equal_exact_brute_force_with_ties(n, m, chunk_rows):
    images, texts, text_to_image = integer_pairs(n, n, m)
    metrics = retrieval_metrics(
        images.astype(np.float32), texts.astype(np.float32), text_to_image, chunk_rows=chunk_rows
    )
    ways = {
        "image_to_text": brute_force(images, range(n), texts, text_to_image),
        "text_to_image": brute_force(texts, text_to_image, images, range(n)),
    }
    expected = {f"{way}/{name}": value for way, values in ways.items() for name, value in values.items()}
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_metrics_equal_sorting_without_ties():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(101, 16)).astype(np.float32)
    text_to_image = np.repeat(np.arange(101), 3)
    texts = (images[text_to_image] + 1.5 * rng.normal(size=(303, 16))).astype(np.float32)
    scores = (texts / np.linalg.norm(texts, axis=1, keepdims=True)) @ (
        images / np.linalg.norm(images, axis=1, keepdims=True)
    ).T
    metrics = retrieval_metrics(images, texts, text_to_image, chunk_rows=10)
    for k in (1, 5, 10):
        best_images = np.argsort(-scores, axis=1)[:, :k]
        best_texts = np.argsort(-scores, axis=0)[:k].T
        text_hits = (best_images == text_to_image[:, None]).any(axis=1)
        image_hits = (text_to_image[best_texts] == np.arange(101)[:, None]).any(axis=1)
        assert metrics[f"text_to_image/R@{k}"] == pytest.approx(text_hits.mean())
        assert metrics[f"image_to_text/R@{k}"] == pytest.approx(image_hits.mean())
    of_texts = np.argmax(np.argsort(-scores, axis=1) == text_to_image[:, None], axis=1) + 1
    of_images = np.argmax(text_to_image[np.argsort(-scores, axis=0).T] == np.arange(101)[:, None], axis=1) + 1
    assert metrics["text_to_image/median_rank"] == np.median(of_texts) > 1
    assert metrics["image_to_text/median_rank"] == np.median(of_images)
    assert 0.1 < metrics["text_to_image/R@1"] < 0.9


@pytest.mark.parametrize("chunk_rows", [1, 10, 256])
def test_collapsed_model_scores_chance(chunk_rows):
    features = np.random.default_rng(1).normal(size=(1, 37)).astype(np.float32)
    metrics = retrieval_metrics(
        np.repeat(features, 101, 0), np.repeat(features, 202, 0), np.repeat(np.arange(101), 2), chunk_rows=chunk_rows
    )
    assert metrics["text_to_image/R@1"] == pytest.approx(1 / 101)
    assert metrics["text_to_image/R@10"] == pytest.approx(10 / 101)
    assert metrics["image_to_text/R@1"] == pytest.approx(2 / 202)
    assert metrics["image_to_text/R@5"] == pytest.approx(1 - math.comb(200, 5) / math.comb(202, 5))
    assert metrics["text_to_image/median_rank"] == pytest.approx((1 + 101) / 2)
    assert metrics["image_to_text/median_rank"] == pytest.approx(1 + 200 / 3)  # the first of 2 among 202


def test_metrics_are_the_same_bits_on_any_mesh_and_in_any_chunks():
    rng = np.random.default_rng(4)
    text_to_image = np.concatenate([np.arange(101), rng.integers(0, 101, 110)])  # 1 to many captions an image
    images = rng.normal(size=(101, 33)).astype(np.float32)[rng.integers(0, 40, 101)]  # many of the same
    texts = images[text_to_image] + rng.normal(size=(211, 33)).astype(np.float32)[rng.integers(0, 20, 211)]
    metrics = [
        retrieval_metrics(images, texts, text_to_image, mesh=make_mesh(axes), chunk_rows=chunk_rows)
        for axes, chunk_rows in (([("x", 1)], 211), ([("x", 2)], 17), ([("x", 8)], 64), ([("x", 2), ("y", 4)], 100))
    ]
    assert metrics[1:] == metrics[:1] * 3
    assert metrics[0] == retrieval_metrics(images, texts, text_to_image)
    assert 0.05 < metrics[0]["text_to_image/R@1"] < 0.95


def test_perfect_model_scores_one_and_length_does_not_matter():
    features = np.random.default_rng(2).normal(size=(23, 8)).astype(np.float32)
    lengths = np.linspace(0.01, 100, 23, dtype=np.float32)[:, None]
    assert set(retrieval_metrics(features, features * lengths, np.arange(23)).values()) == {1.0}  # the ranks too


def test_two_images_with_the_same_caption_share_the_hit():
    images = np.eye(3, dtype=np.float32)
    texts = np.array([[1, 0, 0], [0, 1, 1], [0, 1, 1]], np.float32)  # images 1 and 2 have the same caption
    metrics = retrieval_metrics(images, texts, np.arange(3))
    assert metrics["image_to_text/R@1"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert metrics["text_to_image/R@1"] == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_top_images_are_sorted_and_ties_keep_the_order_of_rows():
    images = np.array([[0, 1], [1, 1], [5, 0], [-1, 0], [1, 0], [0, -1]], np.float32)
    texts = np.array([[2, 0], [0, 3]], np.float32)
    assert top_images(texts, images, k=3).tolist() == [[2, 4, 1], [0, 1, 2]]
    assert top_images(texts, images[:2]).tolist() == [[1, 0], [0, 1]]
    assert top_images(texts, np.tile(np.eye(2, dtype=np.float32), (50, 1))).tolist() == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
    ]


def test_top_images_over_several_chunks():
    rng = np.random.default_rng(3)
    texts, images = rng.normal(size=(600, 4)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)
    best = top_images(texts, images, k=1)[:, 0]
    assert (best == np.argmax(texts @ (images / np.linalg.norm(images, axis=1, keepdims=True)).T, axis=1)).all()


@pytest.mark.parametrize(
    "text_to_image, message",
    [
        ([0, 1, 3], "text_to_image holds 3, which is not in 0..2"),
        ([0, -1, 2], "text_to_image holds -1"),
        ([0, 0, 2], r"1 images have no caption \(first: row 1\)"),
        ([], "text_to_image is empty"),
    ],
)
def test_bad_pairs_are_refused(text_to_image, message):
    features = np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(features, features[: len(text_to_image)], np.array(text_to_image, np.int64))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_not_finite_are_refused(bad):
    features = np.eye(3, dtype=np.float32)
    broken = features.copy()
    broken[1, 2] = bad
    with pytest.raises(ValueError, match="query features hold NaN or infinity"):
        retrieval_metrics(broken, features, np.arange(3))
    with pytest.raises(ValueError, match="candidate features hold NaN or infinity"):
        top_images(features, broken)
