"""Recall and median rank between images and captions, exact and in chunks of rows."""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from disco_jax.evaluation.ranks import CHUNK_ROWS, check_finite, normalized, ranks

RECALL_AT = (1, 5, 10)


def retrieval_metrics(
    image_features: Float32[np.ndarray, "n D"],
    text_features: Float32[np.ndarray, "m D"],
    text_to_image: Int[np.ndarray, " m"],
    *,
    mesh: Mesh | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> dict[str, float]:
    """Recall at 1, 5 and 10, from 0 to 1, and median rank, from 1, both ways.

    A caption is a hit when its image is among the k best images; an image is a hit when any of its captions is among
    the k best captions; the rank is that of the first such. Equal scores count as their mean over all orders of the
    tied candidates, so a model that gives every input the same features scores chance, k/n, and not 1. Scores are
    cosines, so features need not be normalised (see `disco_jax.evaluation.ranks`).

    Args:
        image_features: one row an image.
        text_features: one row a caption.
        text_to_image: the row of each caption's image; several captions may name one image.
        mesh: the devices, which divide the candidates; default: all. Of several processes each gives the same arrays.
        chunk_rows: queries scored at once; memory on each of N devices grows with `chunk_rows * max(n, m) / N`.

    Returns:
        `image_to_text/R@1`, `/R@5`, `/R@10`, `/median_rank`, and the same of `text_to_image`.

    Raises:
        ValueError: no images, a caption of an image that is not there, an image without a caption, features that are
            not finite or of unequal width.
    """
    image_ids = np.arange(len(image_features))
    check_ids("text_to_image", text_to_image, len(image_features))
    without = np.setdiff1d(image_ids, text_to_image)
    if len(without):
        raise ValueError(
            f"{len(without)} images have no caption (first: row {without[0]}); leave them out of retrieval"
        )
    images, texts = (image_features, image_ids), (text_features, text_to_image)
    metrics: dict[str, float] = {}
    for way, queries, candidates in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        found = ranks(*queries, *candidates, mesh=mesh, chunk_rows=chunk_rows)
        metrics |= {f"{way}/R@{k}": float(found.hit_probability(k).mean()) for k in RECALL_AT}
        metrics[f"{way}/median_rank"] = float(np.median(found.expected_rank()))
    return metrics


def top_images(
    text_features: Float32[np.ndarray, "m D"], image_features: Float32[np.ndarray, "n D"], k: int = 5
) -> Int[np.ndarray, "m min({k},n)"]:
    """Rows of the k best images of every caption, best first; equal scores in the order of the rows."""
    chunks = [
        np.argsort(-scores, axis=1, kind="stable")[:, :k]
        for scores in _cosines(text_features, image_features, CHUNK_ROWS)
    ]
    return np.concatenate(chunks)


def _cosines(
    queries: Float32[np.ndarray, "q D"], candidates: Float32[np.ndarray, "c D"], chunk_rows: int
) -> Iterator[Float32[np.ndarray, "r c"]]:
    check_finite("query", queries)
    check_finite("candidate", candidates)
    columns = normalized(candidates).T
    for start in range(0, len(queries), chunk_rows):
        yield (normalized(queries[start : start + chunk_rows]) @ columns).astype(np.float32)


def check_ids(name: str, ids: Int[np.ndarray, " q"], count: int) -> None:
    """Raise a ValueError unless every id is in 0..count-1 and there is at least one."""
    if not len(ids):
        raise ValueError(f"{name} is empty; there is nothing to evaluate")
    if ids.min() < 0 or ids.max() >= count:
        wrong = ids[(ids < 0) | (ids >= count)]
        raise ValueError(f"{name} holds {wrong[0]}, which is not in 0..{count - 1} ({len(wrong)} such rows)")
