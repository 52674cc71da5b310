"""Model FLOPs of a training step: what its matrix products cost, whatever the hardware does beside them.

As PaLM counts them (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): 2 FLOPs for a multiply-add; the backward pass
costs twice the forward pass; attention counts all pairs of tokens, causal or not; what is computed again to save memory
counts once. Norms, softmax, activations and lookups of embeddings are left out.
"""

from collections.abc import Collection

from disco_jax.models.patch_dropout import count_kept
from disco_jax.models.presets import CLIPConfig, TextConfig, VisionConfig


def forward_flops(model: CLIPConfig, *, patch_dropout: float = 0.0) -> dict[str, int]:
    """FLOPs to encode one image ("visual") and one caption of the full context length ("text").

    Raises ValueError where patch_dropout, the share of an image's patches left out, is not in [0, 1).
    """
    if not 0 <= patch_dropout < 1:
        raise ValueError(f"patch_dropout is {patch_dropout}: give a share of the patches, at least 0 and below 1")
    vision, text = model.vision, model.text
    patches = count_kept(vision, patch_dropout)
    multiply_adds = {
        "visual": patches * 3 * vision.patch_size**2 * vision.width + _transformer(vision, patches + 1),
        "text": _transformer(text, text.context_length),
    }
    projections = {"visual": vision.width * model.embed_dim, "text": text.width * model.embed_dim}  # of one token
    return {tower: 2 * (multiply_adds[tower] + projections[tower]) for tower in multiply_adds}


def step_flops_per_sample(model: CLIPConfig, *, locked: Collection[str] = (), patch_dropout: float = 0.0) -> int:
    """FLOPs to encode one image-text pair in a training step, without the loss.

    A tower in `locked` ("visual", "text") has a forward pass only. The backward pass of the patch embedding is counted
    like any other, although no gradient of the pixels is computed.

    Raises ValueError for an unknown tower, or where patch_dropout is not in [0, 1).
    """
    forward = forward_flops(model, patch_dropout=patch_dropout)
    for tower in locked:
        if tower not in forward:
            raise ValueError(f"locked has the unknown tower {tower!r}: use {', '.join(map(repr, forward))}")
    return sum(flops if tower in locked else 3 * flops for tower, flops in forward.items())


def loss_flops_per_sample(batch_size: int, dim: int) -> int:
    """FLOPs of the loss for one pair of a global batch, with features of size `dim`.

    The mathematical least, of both losses: the similarities to the whole batch and the gradients of both features are
    three products. What a method computes again isn't counted.
    """
    return 2 * 3 * batch_size * dim


def _transformer(sizes: VisionConfig | TextConfig, tokens: int) -> int:
    """Multiply-adds of all blocks."""
    width = sizes.width
    per_token = (
        *(width * 3 * width, width * width),  # queries, keys and values; their output
        *(tokens * width, tokens * width),  # scores, and the weighted sum of the values, of all heads
        *(width * sizes.mlp_width, sizes.mlp_width * width),
    )
    return sizes.layers * tokens * sum(per_token)
