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

The `custom_vjp` is outside the `shard_map`s, so that nothing is differentiated through a collective: every sum over
devices is one written below.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

Axes: TypeAlias = tuple[str, ...]
Saved: TypeAlias = tuple[Array, ...]
REPLICATED = PartitionSpec()


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def disco_contrastive_loss(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""],
    mesh: Mesh,
    rows: Axes,
) -> Float[Array, ""]:
    """The loss of `contrastive_loss`, which checks the inputs.

    Args:
        image_features: L2-normalised rows, any float type.
        text_features: the same shape and type.
        logit_scale: the multiplier s, float32 (float64 for float64 features).
        mesh: the devices.
        rows: the mesh axes that divide the batch.
    """
    loss, _ = _forward_rule(image_features, text_features, logit_scale, mesh, rows)
    return loss


@partial(jax.jit, static_argnums=(3, 4))  # for callers without jit: one program instead of one for each operation
def _forward_rule(
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    logit_scale: Float[Array, ""],
    mesh: Mesh,
    rows: Axes,
) -> tuple[Float[Array, ""], Saved]:
    per_row = PartitionSpec(rows)
    forward = jax.shard_map(
        partial(_forward_on_device, rows=rows),
        mesh=mesh,
        in_specs=(per_row, per_row, REPLICATED),
        out_specs=(REPLICATED, (REPLICATED, REPLICATED, per_row, per_row)),
    )
    loss, gathered_and_statistics = forward(image_features, text_features, logit_scale)
    # The blocks are not saved: the backward rule multiplies them again, unless XLA sees both rules and shares them.
    return loss, (image_features, text_features, logit_scale, *gathered_and_statistics)


@partial(jax.jit, static_argnums=(0, 1))
def _backward_rule(mesh: Mesh, rows: Axes, saved: Saved, cotangent: Float[Array, ""]) -> tuple[Array, Array, Array]:
    per_row = PartitionSpec(rows)
    backward = jax.shard_map(
        partial(_backward_on_device, rows=rows),
        mesh=mesh,
        in_specs=(REPLICATED, per_row, per_row, REPLICATED, REPLICATED, REPLICATED, per_row, per_row),
        out_specs=(per_row, per_row, REPLICATED),
    )
    return backward(cotangent, *saved)


disco_contrastive_loss.defvjp(_forward_rule, _backward_rule)


def _forward_on_device(
    images: Float[Array, "b D"], texts: Float[Array, "b D"], scale: Float[Array, ""], *, rows: Axes
) -> tuple[Float[Array, ""], Saved]:
    """The loss; and for the backward rule all features, and the log-sum-exp of each row of device n's two blocks."""
    all_images = jax.lax.all_gather(images, rows, tiled=True, to="invarying")  # (B, D), the same on every device
    all_texts = jax.lax.all_gather(texts, rows, tiled=True, to="invarying")

    image_logits = scale * _matmul(images, all_texts.T)  # (b, B)
    text_logits = scale * _matmul(texts, all_images.T)
    positives = _own_positions(len(images), rows)[:, None]  # the column where each row meets its partner
    image_lse = jax.nn.logsumexp(image_logits, axis=1)  # (b,)
    text_lse = jax.nn.logsumexp(text_logits, axis=1)

    image_losses = image_lse - jnp.take_along_axis(image_logits, positives, axis=1)[:, 0]  # cross-entropies, (b,)
    text_losses = text_lse - jnp.take_along_axis(text_logits, positives, axis=1)[:, 0]
    loss = jax.lax.psum(jnp.sum(image_losses + text_losses), rows) / (2 * len(all_images))
    return loss, (all_images, all_texts, image_lse, text_lse)


def _backward_on_device(
    cotangent: Float[Array, ""],
    images: Float[Array, "b D"],
    texts: Float[Array, "b D"],
    scale: Float[Array, ""],
    all_images: Float[Array, "B D"],
    all_texts: Float[Array, "B D"],
    image_lse: Float[Array, " b"],
    text_lse: Float[Array, " b"],
    *,
    rows: Axes,
) -> tuple[Float[Array, "b D"], Float[Array, "b D"], Float[Array, ""]]:
    """The gradients of device n's own features, and of the scale."""
    image_similarities = _matmul(images, all_texts.T)  # (b, B)
    text_similarities = _matmul(texts, all_images.T)
    targets = jax.nn.one_hot(
        _own_positions(len(images), rows), len(all_images), dtype=image_similarities.dtype
    )  # (b, B)

    # 2B times the gradient of the logits: softmax minus target. 1 / (2B) comes last, in float32: no underflow.
    image_errors = jnp.exp(scale * image_similarities - image_lse[:, None]) - targets  # (b, B)
    text_errors = jnp.exp(scale * text_similarities - text_lse[:, None]) - targets
    factor = cotangent / (2 * len(all_images))
    scale_gradient = factor * jax.lax.psum(
        jnp.sum(image_errors * image_similarities) + jnp.sum(text_errors * text_similarities), rows
    )

    image_errors, text_errors = image_errors.astype(images.dtype), text_errors.astype(texts.dtype)

    # Intra-device: my features as rows of my own two blocks.
    intra_images = _matmul(image_errors, all_texts)  # dL1_n/dI_n, (b, D)
    intra_texts = _matmul(text_errors, all_images)  # dL2_n/dT_n

    # Inter-device: everybody's features as columns of my two blocks, (B, D), summed over the devices.
    inter_images = jax.lax.psum(_matmul(text_errors.T, texts), rows)  # sum over m of dL2_m/dI
    inter_texts = jax.lax.psum(_matmul(image_errors.T, images), rows)  # sum over m of dL1_m/dT

    image_gradient = factor * scale * (intra_images + _own_rows(inter_images, len(images), rows))
    text_gradient = factor * scale * (intra_texts + _own_rows(inter_texts, len(texts), rows))
    return image_gradient.astype(images.dtype), text_gradient.astype(texts.dtype), scale_gradient


def _matmul(left: Float[Array, "m k"], right: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """The product of two matrices in their own type, added up in float32 (float64 for float64)."""
    accumulator = jnp.promote_types(left.dtype, jnp.float32)
    # "highest": GPUs would round float32 factors to TF32; of no effect on bfloat16.
    return jnp.matmul(left, right, precision="highest", preferred_element_type=accumulator)


def _own_positions(b: int, rows: Axes) -> Int[Array, " b"]:
    """Where device n's b rows are among all B."""
    return jax.lax.axis_index(rows) * b + jnp.arange(b, dtype=jnp.int32)


def _own_rows(everybodys: Float[Array, "B D"], b: int, rows: Axes) -> Float[Array, "b D"]:
    """Device n's b of the B rows."""
    return jax.lax.dynamic_slice_in_dim(everybodys, jax.lax.axis_index(rows) * b, b)
