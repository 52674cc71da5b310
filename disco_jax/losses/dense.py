"""The losses on one device, as their formulas read: the reference for every other form."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from disco_jax.losses.checks import check_features, check_label_smoothing, check_labels


def dense_contrastive_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""] | float,
    *,
    label_smoothing: float = 0.0,
    labels: Int[Array, " B"] | None = None,
) -> Float[Array, ""]:
    """CLIP's symmetric cross-entropy over all B x B similarities (Radford et al. 2021, arXiv 2103.00020, Figure 3).

    Args:
        image_features: L2-normalised rows, any float type; computed in float32 (float64 stays float64).
        text_features: the same; row i is the caption of image i.
        logit_scale: what the similarities are multiplied by (not its logarithm).
        label_smoothing: share of each target that is spread over all B columns.
        labels: pairs with equal labels are positives of each other, in equal shares.

    Returns:
        The mean over the batch of both directions, float32 (or float64).

    Raises:
        ValueError: the inputs are not two float arrays of one shape (B, D) and one type, a real scalar, a share, and B
            integers.
    """
    check_features(image_features, text_features, logit_scale=logit_scale)
    check_label_smoothing(label_smoothing)
    similarities = _similarities(image_features, text_features)
    logits = jnp.asarray(logit_scale, similarities.dtype) * similarities
    positive = _positive(labels, len(logits))
    targets = positive / jnp.sum(positive, axis=1, keepdims=True)
    targets = (1 - label_smoothing) * targets + label_smoothing / len(logits)
    image_to_text = jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(targets * logits, axis=1))
    text_to_image = jnp.mean(jax.nn.logsumexp(logits, axis=0) - jnp.sum(targets * logits, axis=0))
    return (image_to_text + text_to_image) / 2


def dense_sigmoid_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    labels: Int[Array, " B"] | None = None,
) -> Float[Array, ""]:
    """SigLIP's sum over all pairs, divided by the batch size (Zhai et al. 2023, arXiv 2303.15343, Algorithm 1).

    Arguments and errors are those of `dense_contrastive_loss`; logit_bias is added to the scaled similarities.
    """
    check_features(image_features, text_features, logit_scale=logit_scale, logit_bias=logit_bias)
    similarities = _similarities(image_features, text_features)
    scale, bias = (jnp.asarray(x, similarities.dtype) for x in (logit_scale, logit_bias))
    logits = scale * similarities + bias
    signs = jnp.where(_positive(labels, len(logits)), 1, -1)
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=1))


def _similarities(image_features: Float[Array, "B D"], text_features: Float[Array, "B D"]) -> Float[Array, "B B"]:
    dtype = jnp.promote_types(image_features.dtype, jnp.float32)
    images, texts = jnp.asarray(image_features, dtype), jnp.asarray(text_features, dtype)
    return jnp.matmul(images, texts.T, precision="highest")  # GPUs would round float32 factors to TF32


def _positive(labels: Int[Array, " B"] | None, B: int) -> Bool[Array, "B B"]:
    check_labels(labels, B)
    labels = jnp.arange(B) if labels is None else labels
    return labels[:, None] == labels[None, :]
