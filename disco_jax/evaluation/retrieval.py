"""Recall between images and captions, exact and in chunks of rows.

Scores are cosines, so features need not be normalised. They are summed in float64 and rounded to float32: features
that are equal then score equal, whatever the chunk size and the BLAS kernel.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Float32, Float64, Int, Shaped

RECALL_AT = (1, 5, 10)


def retrieval_metrics(
    image_features: Float32[np.ndarray, "n D"],
    text_features: Float32[np.ndarray, "m D"],
    text_to_image: Int[np.ndarray, " m"],
    *,
    chunk_rows: int = 256,
) -> dict[str, float]:
    """Recall at 1, 5 and 10 both ways, from 0 to 1.

    A caption is a hit when its image is among the k best images; an image is a hit when any of its captions is among
    the k best captions. Equal scores count as their mean over all orders of the tied candidates (see `recall_at`), so
    a model that gives every input the same features scores chance, k/n, and not 1.

    Args:
        image_features: one row an image.
        text_features: one row a caption.
        text_to_image: the row of each caption's image; several captions may name one image.
        chunk_rows: queries scored at once; memory grows with `chunk_rows * max(n, m)`.

    Returns:
        `image_to_text/R@1`, `/R@5`, `/R@10` and `text_to_image/R@1`, `/R@5`, `/R@10`.

    Raises:
        ValueError: no images, a caption of an image that is not there, an image without a caption, features that are
            not finite.
    """
    image_ids = np.arange(len(image_features))
    check_ids("text_to_image", text_to_image, len(image_features))
    without = np.setdiff1d(image_ids, text_to_image)
    if len(without):
        raise ValueError(
            f"{len(without)} images have no caption (first: row {without[0]}); leave them out of retrieval"
        )
    recalls = {
        "image_to_text": recall_at(RECALL_AT, image_features, image_ids, text_features, text_to_image, chunk_rows),
        "text_to_image": recall_at(RECALL_AT, text_features, text_to_image, image_features, image_ids, chunk_rows),
    }
    return {f"{way}/R@{k}": value for way, recall in recalls.items() for k, value in recall.items()}


def top_images(
    text_features: Float32[np.ndarray, "m D"], image_features: Float32[np.ndarray, "n D"], k: int = 5
) -> Int[np.ndarray, "m min({k},n)"]:
    """Rows of the k best images of every caption, best first; equal scores in the order of the rows."""
    chunks = [
        np.argsort(-scores, axis=1, kind="stable")[:, :k] for _, scores in _cosines(text_features, image_features, 256)
    ]
    return np.concatenate(chunks)


def recall_at(
    ks: Sequence[int],
    queries: Float32[np.ndarray, "q D"],
    query_ids: Int[np.ndarray, " q"],
    candidates: Float32[np.ndarray, "c D"],
    candidate_ids: Int[np.ndarray, " c"],
    chunk_rows: int = 256,
) -> dict[int, float]:
    """Share of queries with a candidate of their own id among their k best.

    Where the best own candidate ties with others, the query counts as the probability that one of its own comes among
    the first k when the tied ones are put in random order. Every query must have a candidate of its id.
    """
    hits = dict.fromkeys(ks, 0.0)
    for rows, scores in _cosines(queries, candidates, chunk_rows):
        own = query_ids[rows, None] == candidate_ids[None, :]
        best_own = np.where(own, scores, -np.inf).max(axis=1, keepdims=True)
        better = (scores > best_own).sum(axis=1)
        tied = scores == best_own
        own_tied = (tied & own).sum(axis=1)
        others_tied = (tied & ~own).sum(axis=1)
        for k in ks:
            hits[k] += float(_hit_probability(k, better, others_tied, own_tied).sum())
    return {k: value / len(queries) for k, value in hits.items()}


def normalized(features: Shaped[np.ndarray, "*rows D"]) -> Float64[np.ndarray, "*rows D"]:
    """Rows divided by their L2 norm, in float64; a row of zeros stays zero."""
    features = features.astype(np.float64)
    return features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def _cosines(
    queries: Float32[np.ndarray, "q D"], candidates: Float32[np.ndarray, "c D"], chunk_rows: int
) -> Iterator[tuple[slice, Float32[np.ndarray, "r c"]]]:
    for name, features in (("query", queries), ("candidate", candidates)):
        if not np.isfinite(features).all():
            raise ValueError(f"{name} features hold NaN or infinity; the model has diverged")
    columns = normalized(candidates).T
    for start in range(0, len(queries), chunk_rows):
        rows = slice(start, start + chunk_rows)
        yield rows, (normalized(queries[rows]) @ columns).astype(np.float32)


def _hit_probability(
    k: int, better: Int[np.ndarray, " r"], others_tied: Int[np.ndarray, " r"], own_tied: Int[np.ndarray, " r"]
) -> Float[np.ndarray, " r"]:
    places = k - better  # places of the first k left to the tied candidates
    miss = np.ones(len(better))
    for i in range(k):  # the i-th of them goes to another one, given that all before did
        goes_to_other = np.maximum(others_tied - i, 0) / np.maximum(others_tied + own_tied - i, 1)
        miss = np.where(i < places, miss * goes_to_other, miss)
    return 1.0 - miss


def check_ids(name: str, ids: Int[np.ndarray, " q"], count: int) -> None:
    """Raise a ValueError unless every id is in 0..count-1 and there is at least one."""
    if not len(ids):
        raise ValueError(f"{name} is empty; there is nothing to evaluate")
    if ids.min() < 0 or ids.max() >= count:
        wrong = ids[(ids < 0) | (ids >= count)]
        raise ValueError(f"{name} holds {wrong[0]}, which is not in 0..{count - 1} ({len(wrong)} such rows)")
