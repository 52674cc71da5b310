"""The DisCo-CLIP loss: exact, with O(B^2 / N) similarities on each of N devices instead of O(B^2).

Source: Chen, Qi, Wang and Zhang, "DisCo-CLIP: A Distributed Contrastive Loss for Memory Efficient CLIP Training",
CVPR 2023, arXiv 2304.08480. Read this file beside its method section and Figure 2.

Device n holds the features I_n and T_n of b = B / N images and texts, and gathers everybody's: I and T, (B, D). With
the scale s, it computes two b x B blocks of logits and, of each, its rows' share of the loss L = sum over n of
(L1_n + L2_n):

    image block  s I_n T^t, row i is image i against all texts    L1_n = sum of its rows' cross-entropies / (2B)
    text block   s T_n I^t, row i is text i against all images    L2_n = the same

I_n makes the rows of device n's own image block, and columns in the text block of every device m. Its gradient is

    intra-device   dL1_n/dI_n + dL2_n/dI_n          both from this device's own two blocks
    inter-device   sum over m != n of dL2_m/dI_n    from the text blocks of the others, who computed it as they went

and the same for T_n with image and text, L1 and L2 exchanged. The paper's all_reduce is `jax.lax.psum`: each device
computes dL2_m/dI of all B images in one product, `psum` adds over m, and each device keeps its own b rows. The sum runs
over m = n too, and so brings the second intra-device term along.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from disco_jax.losses.walk import Axes, matmul

Saved: TypeAlias = tuple[Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def disco_loss(
    images: Float[Array, "b D"], texts: Float[Array, "b D"], scale: Float[Array, ""], axes: Axes
) -> Float[Array, ""]:
    """Device n's share, L1_n + L2_n, of the loss; called inside a `jax.shard_map`.

    Args:
        images: this device's own, L2-normalised, any float type.
        texts: their texts.
        scale: the multiplier s, in the type of the logits: float32 (float64 for float64 features).
        axes: the mesh axes that divide the batch.
    """
    return _forward(images, texts, scale, axes)[0]


def _forward(
    images: Float[Array, "b D"], texts: Float[Array, "b D"], scale: Float[Array, ""], axes: Axes
) -> tuple[Float[Array, ""], Saved]:
    all_images = jax.lax.all_gather(images, axes, tiled=True)  # (B, D), the same on every device
    all_texts = jax.lax.all_gather(texts, axes, tiled=True)

    image_logits = scale * matmul(images, all_texts.T)  # (b, B)
    text_logits = scale * matmul(texts, all_images.T)
    positives = _own_positions(len(images), axes)[:, None]  # the column where each row meets its partner
    image_lse = jax.nn.logsumexp(image_logits, axis=1)  # (b,)
    text_lse = jax.nn.logsumexp(text_logits, axis=1)

    image_losses = image_lse - jnp.take_along_axis(image_logits, positives, axis=1)[:, 0]  # cross-entropies, (b,)
    text_losses = text_lse - jnp.take_along_axis(text_logits, positives, axis=1)[:, 0]
    loss = jnp.sum(image_losses + text_losses) / (2 * len(all_images))
    # The blocks are not saved: the backward rule multiplies them again, unless XLA sees both rules and shares them.
    return loss, (images, texts, scale, all_images, all_texts, image_lse, text_lse)


def _backward(axes: Axes, saved: Saved, cotangent: Float[Array, ""]) -> tuple[Array, Array, Array]:
    images, texts, scale, all_images, all_texts, image_lse, text_lse = saved
    image_similarities = matmul(images, all_texts.T)  # (b, B)
    text_similarities = matmul(texts, all_images.T)
    targets = jax.nn.one_hot(
        _own_positions(len(images), axes), len(all_images), dtype=image_similarities.dtype
    )  # (b, B)

    # 2B times the gradient of the logits: softmax minus target. 1 / (2B) comes last, in float32: no underflow.
    image_errors = jnp.exp(scale * image_similarities - image_lse[:, None]) - targets  # (b, B)
    text_errors = jnp.exp(scale * text_similarities - text_lse[:, None]) - targets
    factor = cotangent / (2 * len(all_images))
    scale_gradient = factor * (jnp.sum(image_errors * image_similarities) + jnp.sum(text_errors * text_similarities))

    image_errors, text_errors = image_errors.astype(images.dtype), text_errors.astype(texts.dtype)

    # Intra-device: my features as rows of my own two blocks.
    intra_images = matmul(image_errors, all_texts)  # dL1_n/dI_n, (b, D)
    intra_texts = matmul(text_errors, all_images)  # dL2_n/dT_n

    # Inter-device: everybody's features as columns of my two blocks, (B, D), summed over the devices.
    inter_images = jax.lax.psum(matmul(text_errors.T, texts), axes)  # sum over m of dL2_m/dI
    inter_texts = jax.lax.psum(matmul(image_errors.T, images), axes)  # sum over m of dL1_m/dT

    image_gradient = factor * scale * (intra_images + _own_rows(inter_images, len(images), axes))
    text_gradient = factor * scale * (intra_texts + _own_rows(inter_texts, len(texts), axes))
    return image_gradient.astype(images.dtype), text_gradient.astype(texts.dtype), scale_gradient


disco_loss.defvjp(_forward, _backward)


def _own_positions(b: int, axes: Axes) -> Int[Array, " b"]:
    """Where device n's b rows are among all B."""
    return jax.lax.axis_index(axes) * b + jnp.arange(b, dtype=jnp.int32)


def _own_rows(everybodys: Float[Array, "B D"], b: int, axes: Axes) -> Float[Array, "b D"]:
    """Device n's b of the B rows."""
    return jax.lax.dynamic_slice_in_dim(everybodys, jax.lax.axis_index(axes) * b, b)
