"""CLIP: a vision transformer and a causal text transformer into one space (Radford et al. 2021, section 2.4)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal, xavier_uniform
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from disco_jax.models.presets import CLIPConfig
from disco_jax.models.transformer import (
    FetchBlock,
    KernelInit,
    Transformer,
    at_least_float32,
    layer_norm,
    torch_default,
)

# Of the RGB values in [0, 1] of OpenAI's training images.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionTransformer(nnx.Module):
    """Image tower. As in OpenAI's code, linear layers and the patch kernel start as torch makes them."""

    def __init__(self, config: CLIPConfig, *, dtype: DTypeLike, remat: str, attention: str, rngs: nnx.Rngs):
        vision = config.vision
        width = vision.width
        tokens = (vision.image_size // vision.patch_size) ** 2 + 1
        init = normal(width**-0.5)
        self.image_size = vision.image_size
        self.patch_size = vision.patch_size
        self.dtype = dtype
        self.patch_embedding = nnx.Linear(
            3 * vision.patch_size**2, width, use_bias=False, kernel_init=torch_default, dtype=dtype, rngs=rngs
        )
        self.class_embedding = nnx.Param(init(rngs.params(), (width,)))
        self.position_embedding = nnx.Param(init(rngs.params(), (tokens, width)))
        self.ln_pre = layer_norm(width, dtype=dtype, rngs=rngs)
        self.transformer = Transformer(
            width,
            vision.layers,
            vision.heads,
            vision.mlp_width,
            causal=False,
            activation=config.activation,
            kernel_init=KernelInit(xavier_uniform(), torch_default, torch_default, torch_default),
            dtype=dtype,
            remat=remat,
            attention=attention,
            rngs=rngs,
        )
        self.ln_post = layer_norm(width, dtype=dtype, rngs=rngs)
        self.projection = nnx.Linear(width, config.embed_dim, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)

    def embed(
        self, images: Float[Array, "b H W 3"], kept_patches: Int[Array, "b k"] | None = None
    ) -> Float[Array, "b L width"]:
        """What the transformer takes, in the compute dtype, of normalised images; see CLIP.encode_image."""
        size = self.image_size
        if images.shape[1:] != (size, size, 3):
            raise ValueError(
                f"images have shape {images.shape}, the model takes (b, {size}, {size}, 3): "
                f"resize them with eval_transform(image, {size})"
            )
        # A convolution whose stride is its kernel's size, as one matrix product: faster than the convolution on CPU.
        b, p, side = images.shape[0], self.patch_size, size // self.patch_size
        pixels = images.reshape(b, side, p, side, p, 3).swapaxes(2, 3).reshape(b, side**2, 3 * p**2)
        class_position, positions = jnp.split(self.position_embedding[...], [1])
        if kept_patches is not None:
            pixels = jnp.take_along_axis(pixels, kept_patches[:, :, None], axis=1)
            positions = positions[kept_patches]
        # Embeddings are added in float32, so that their gradients are summed over the batch in float32.
        patches = self.patch_embedding(pixels).astype(at_least_float32(self.dtype)) + positions
        class_token = jnp.broadcast_to(self.class_embedding[...] + class_position, (b, 1, patches.shape[-1]))
        return self.ln_pre(jnp.concatenate([class_token, patches], axis=1)).astype(self.dtype)

    def transform(self, x: Float[Array, "b L width"], fetch_block: FetchBlock | None = None) -> Float[Array, "b D"]:
        """Features, in the compute dtype and not normalised, of what `embed` gives."""
        x = self.transformer(x, fetch_block)
        return self.projection(self.ln_post(x[:, 0]))

    def __call__(self, images: Float[Array, "b H W 3"]) -> Float[Array, "b D"]:
        """Encode normalised images; features are not L2-normalised, in the compute dtype.

        Raises ValueError where the images have another size than the model's.
        """
        return self.transform(self.embed(images))


class TextTransformer(nnx.Module):
    """Text tower, with OpenAI's initialisation."""

    def __init__(self, config: CLIPConfig, *, dtype: DTypeLike, remat: str, attention: str, rngs: nnx.Rngs):
        text = config.text
        width = text.width
        proj_init = normal(width**-0.5 * (2 * text.layers) ** -0.5)
        self.context_length = text.context_length
        self.eot_id = text.eot_id
        self.dtype = dtype
        self.token_embedding = nnx.Embed(
            text.vocab_size, width, embedding_init=normal(0.02), dtype=at_least_float32(dtype), rngs=rngs
        )
        self.position_embedding = nnx.Param(normal(0.01)(rngs.params(), (text.context_length, width)))
        self.transformer = Transformer(
            width,
            text.layers,
            text.heads,
            text.mlp_width,
            causal=True,
            activation=config.activation,
            kernel_init=KernelInit(normal(width**-0.5), proj_init, normal((2 * width) ** -0.5), proj_init),
            dtype=dtype,
            remat=remat,
            attention=attention,
            rngs=rngs,
        )
        self.ln_final = layer_norm(width, dtype=dtype, rngs=rngs)
        self.projection = nnx.Linear(
            width, config.embed_dim, use_bias=False, kernel_init=normal(width**-0.5), dtype=dtype, rngs=rngs
        )

    def __call__(self, tokens: Int[Array, "b L"], *, fetch_block: FetchBlock | None = None) -> Float[Array, "b D"]:
        """Encode token ids, see CLIP.encode_text."""
        if tokens.ndim != 2 or tokens.shape[1] > self.context_length:
            raise ValueError(
                f"tokens have shape {tokens.shape}, the model takes (b, L) with L <= {self.context_length}: "
                f"tokenize with context_length={self.context_length}"
            )
        # Looked up in float32, so that the gradients of a frequent token are summed in float32.
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        x = self.transformer(x.astype(self.dtype), fetch_block)
        eot = jnp.argmax(tokens == self.eot_id, axis=-1)
        pooled = jnp.take_along_axis(x, eot[:, None, None], axis=1)[:, 0]
        return self.projection(self.ln_final(pooled))


class CLIP(nnx.Module):
    """Both towers and the temperature. Parameters are float32; matrix products are in `dtype`.

    `visual` and `text` are the towers. `logit_scale` is the log of the factor on the cosine similarities, a float32
    scalar; `logit_bias`, added to the products, is one too, or None where the config has none. LayerNorm and softmax
    are at least in float32. `remat` says what of a block the backward pass computes again instead of keeping it:
    "none", "dots" (all but its products with weights) or "full". `attention` is the implementation of
    `jax.nn.dot_product_attention`: "xla", "cudnn", or "auto", which is cuDNN's where it works.
    """

    def __init__(
        self,
        config: CLIPConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
        rngs: nnx.Rngs,
    ):
        self.visual = VisionTransformer(config, dtype=dtype, remat=remat, attention=attention, rngs=rngs)
        self.text = TextTransformer(config, dtype=dtype, remat=remat, attention=attention, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.asarray(config.init_logit_scale, jnp.float32))
        bias = config.init_logit_bias
        self.logit_bias = None if bias is None else nnx.Param(jnp.asarray(bias, jnp.float32))

    def encode_image(
        self,
        images: UInt8[Array, "b H W 3"],
        *,
        kept_patches: Int[Array, "b k"] | None = None,
        fetch_block: FetchBlock | None = None,
    ) -> Float[Array, "b D"]:
        """Encode RGB images, 0 to 255; features are not L2-normalised, in the compute dtype.

        With `kept_patches` only these patches of each image are seen (`disco_jax.models.patch_dropout`).
        `fetch_block` is applied to the parameters of each block where it is computed.

        Raises ValueError where the images are not uint8 or have another size than the model's.
        """
        if images.dtype != jnp.uint8:
            raise ValueError(
                f"encode_image takes uint8 pixels (0 to 255), got {images.dtype}: pass the pixels as they are, "
                "or normalised images to clip.visual"
            )

        # Of the pixels, the backward pass keeps the bytes alone.
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def embed(images: Array) -> Array:
            dtype = at_least_float32(self.visual.dtype)
            normalised = (images.astype(dtype) / 255 - jnp.array(IMAGE_MEAN, dtype)) / jnp.array(IMAGE_STD, dtype)
            return self.visual.embed(normalised, kept_patches)

        return self.visual.transform(embed(images), fetch_block)

    def encode_text(self, tokens: Int[Array, "b L"], *, fetch_block: FetchBlock | None = None) -> Float[Array, "b D"]:
        """Encode token ids; features are not L2-normalised, in the compute dtype.

        Each row must hold the end-of-text id: its features are taken at the first one. What comes after it has no
        influence, so rows may be cut to any L that keeps it. An id outside the vocabulary gives NaN. `fetch_block` is
        that of `encode_image`. Raises ValueError where L is above the context length.
        """
        return self.text(tokens, fetch_block=fetch_block)
