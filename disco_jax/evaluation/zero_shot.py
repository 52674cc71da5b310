"""Zero-shot classification: every class is the mean of its prompts' text features (CLIP, section 3.1.4)."""

from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from disco_jax.evaluation.ranks import normalized, ranks
from disco_jax.evaluation.retrieval import check_ids


def class_embeddings(
    encode_text: Callable[[np.ndarray], np.ndarray],
    tokenizer: Callable[[Sequence[str], int], np.ndarray],
    class_names: Sequence[str],
    templates: Sequence[str],
    context_length: int,
    *,
    batch_size: int = 256,
) -> Float32[np.ndarray, "C D"]:
    """One L2-normalised vector a class: the mean of its normalised prompts.

    Args:
        encode_text: tokens `[batch_size, context_length]` int32 to features `[batch_size, D]`. It sees this one shape
            only, so it compiles once; the last batch is filled up with prompts whose features are dropped.
        tokenizer: as `disco_jax.data.tokenizer.Tokenizer`.
        class_names: the C names, in the order of the labels.
        templates: prompts with `{}` where the name goes.
        context_length: tokens a prompt.
        batch_size: prompts a call of `encode_text`.

    Raises:
        ValueError: no class names, no templates, a template without `{}`.
    """
    if not class_names or not templates:
        raise ValueError("zero-shot classification needs at least one class name and one prompt template")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"prompt template {template!r} has no {{}} for the class name")
    prompts = [template.replace("{}", name) for name in class_names for template in templates]
    tokens = tokenizer(prompts, context_length)
    features = []
    for start in range(0, len(prompts), batch_size):
        batch = np.arange(start, start + batch_size) % len(prompts)
        features.append(np.asarray(encode_text(tokens[batch]))[: len(prompts) - start])
    by_class = normalized(np.concatenate(features)).reshape(len(class_names), len(templates), -1)
    return normalized(by_class.mean(axis=1)).astype(np.float32)


def zero_shot_metrics(
    image_features: Float32[np.ndarray, "n D"],
    labels: Int[np.ndarray, " n"],
    class_features: Float32[np.ndarray, "C D"],
    *,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Accuracies of naming the class of each image, from 0 to 1.

    Equal scores count as in `retrieval_metrics`: with all features equal, top1 is 1/C.

    Args:
        image_features: one row an image.
        labels: the row of each image's class.
        class_features: one row a class, as `class_embeddings` gives them.
        mesh: as `retrieval_metrics` has it; the classes are divided over its devices.

    Returns:
        `top1` and, where C > 5, `top5`: the share of images whose class is the best or among the five best; and
        `mean_per_class_recall`: the mean of each class's own top1, over the classes that occur.

    Raises:
        ValueError: no images, a label outside 0..C-1, features that are not finite or of unequal width.
    """
    check_ids("labels", labels, len(class_features))
    found = ranks(image_features, labels, class_features, np.arange(len(class_features)), mesh=mesh)
    hits = found.hit_probability(1)
    metrics = {"top1": float(hits.mean())}
    if len(class_features) > 5:
        metrics["top5"] = float(found.hit_probability(5).mean())
    images = np.bincount(labels)
    recalls = np.bincount(labels, weights=hits)[images > 0] / images[images > 0]
    return metrics | {"mean_per_class_recall": float(recalls.mean())}
