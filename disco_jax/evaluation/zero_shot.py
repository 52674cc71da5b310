"""Zero-shot classification: every class is the mean of its prompts' text features (CLIP, section 3.1.4)."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, Int

from disco_jax.evaluation.retrieval import check_ids, normalized, recall_at


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
) -> dict[str, float]:
    """Share of images whose class is the best (`top1`) or among the five best (`top5`, where C > 5), from 0 to 1.

    Equal scores count as in `retrieval_metrics`: with all features equal, top1 is 1/C.

    Raises:
        ValueError: no images, a label outside 0..C-1, features that are not finite.
    """
    check_ids("labels", labels, len(class_features))
    ks = (1, 5) if len(class_features) > 5 else (1,)
    recall = recall_at(ks, image_features, labels, class_features, np.arange(len(class_features)))
    return {f"top{k}": value for k, value in recall.items()}
