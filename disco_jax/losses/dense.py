"""CLIP's loss on one device, as its formula reads: the reference for every other form."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dense_contrastive_loss(
    image_features: Float[Array, "B D"], text_features: Float[Array, "B D"], logit_scale: Float[Array, ""]
) -> Float[Array, ""]:
    """CLIP's symmetric cross-entropy over all B x B similarities (Radford et al. 2021, arXiv 2103.00020, Figure 3).

    Args:
        image_features: L2-normalised rows, any float type; computed in float32 (float64 stays float64).
        text_features: the same; row i is the caption of image i.
        logit_scale: what the similarities are multiplied by (not its logarithm).

    Returns:
        The mean over the batch of both directions, float32 (or float64).

    Raises:
        ValueError: the inputs are not two float arrays of one shape (B, D) and one type, and a float scalar.
    """
    check_features(image_features, text_features, logit_scale)
    dtype = jnp.promote_types(image_features.dtype, jnp.float32)
    images, texts, scale = (jnp.asarray(x, dtype) for x in (image_features, text_features, logit_scale))
    logits = scale * jnp.matmul(images, texts.T, precision="highest")  # GPUs would round float32 factors to TF32
    positives = jnp.diagonal(logits)
    image_to_text = jnp.mean(jax.nn.logsumexp(logits, axis=1) - positives)
    text_to_image = jnp.mean(jax.nn.logsumexp(logits, axis=0) - positives)
    return (image_to_text + text_to_image) / 2


def check_features(image_features: Array, text_features: Array, logit_scale: Array) -> None:
    """Refuse what no contrastive loss can take.

    Raises:
        ValueError: as `dense_contrastive_loss` says.
    """
    images, texts = (f"{x.dtype}{list(x.shape)}" for x in (image_features, text_features))
    if image_features.ndim != 2 or image_features.shape != text_features.shape or not image_features.size:
        raise ValueError(f"image and text features must have one shape (B, D): got {images} and {texts}")
    if image_features.dtype != text_features.dtype or not jnp.issubdtype(image_features.dtype, jnp.floating):
        raise ValueError(f"image and text features must have one floating-point type: got {images} and {texts}")
    scale_type, scale_shape = jnp.result_type(logit_scale), jnp.shape(logit_scale)
    if scale_shape or not jnp.issubdtype(scale_type, jnp.floating):
        raise ValueError(f"logit_scale must be a floating-point scalar: got {scale_type}{list(scale_shape)}")
