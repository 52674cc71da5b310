"""Pre-LN transformer blocks as OpenAI's CLIP has them, stacked along a leading axis and scanned."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Sigmoid approximation of GELU that OpenAI's weights were trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "quickgelu": quick_gelu,
}

# torch's default for Linear and Conv weights: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
torch_default = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_default_bias(fan_in: int) -> Initializer:
    """Initialiser of a torch Linear's bias: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), float32."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32, out_sharding=None: jax.random.uniform(key, shape, dtype, -bound, bound)


def layer_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm of CLIP: epsilon 1e-5, two-pass variance, float32 whatever the compute dtype is."""
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, dtype=jnp.float32, rngs=rngs)


class KernelInit(NamedTuple):
    """Initialisers of a block's four kernels."""

    in_proj: Initializer
    out_proj: Initializer
    c_fc: Initializer
    c_proj: Initializer


class Attention(nnx.Module):
    """Multi-head self-attention; queries, keys and values in one kernel, softmax in float32."""

    def __init__(
        self, width: int, heads: int, *, causal: bool, kernel_init: KernelInit, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.heads = heads
        self.causal = causal
        self.in_proj = nnx.Linear(width, 3 * width, kernel_init=kernel_init.in_proj, dtype=dtype, rngs=rngs)
        self.out_proj = nnx.Linear(width, width, kernel_init=kernel_init.out_proj, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b L W"]) -> Float[Array, "b L W"]:
        """Attend over the tokens, in the compute dtype; a causal layer sees only earlier tokens and itself."""
        b, L, W = x.shape
        q, k, v = jnp.moveaxis(self.in_proj(x).reshape(b, L, 3, self.heads, W // self.heads), 2, 0)
        return self.out_proj(jax.nn.dot_product_attention(q, k, v, is_causal=self.causal).reshape(b, L, W))


class MLP(nnx.Module):
    """Two linear layers with the activation between them."""

    def __init__(
        self,
        width: int,
        mlp_width: int,
        *,
        activation: str,
        kernel_init: KernelInit,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.c_fc = linear(width, mlp_width, kernel_init=kernel_init.c_fc, bias_init=torch_default_bias(width))
        self.c_proj = linear(mlp_width, width, kernel_init=kernel_init.c_proj, bias_init=torch_default_bias(mlp_width))

    def __call__(self, x: Float[Array, "b L W"]) -> Float[Array, "b L W"]:
        """Apply the layers to each token, in the compute dtype."""
        return self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x)))


class Block(nnx.Module):
    """One pre-LN residual block: x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        *,
        causal: bool,
        activation: str,
        kernel_init: KernelInit,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.ln_1 = layer_norm(width, rngs=rngs)
        self.attn = Attention(width, heads, causal=causal, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
        self.ln_2 = layer_norm(width, rngs=rngs)
        self.mlp = MLP(width, mlp_width, activation=activation, kernel_init=kernel_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b L W"]) -> Float[Array, "b L W"]:
        """Apply the block; the residual stream keeps its dtype."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nnx.Module):
    """A stack of blocks. Every parameter under `blocks` has one leading axis, of size `layers`."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        mlp_width: int,
        *,
        causal: bool,
        activation: str,
        kernel_init: KernelInit,
        dtype: DTypeLike,
        remat: bool,
        rngs: nnx.Rngs,
    ):
        self.remat = remat

        def split_block(key: Array) -> tuple[nnx.GraphDef, PyTree]:
            return nnx.split(
                Block(
                    width,
                    heads,
                    mlp_width,
                    causal=causal,
                    activation=activation,
                    kernel_init=kernel_init,
                    dtype=dtype,
                    rngs=nnx.Rngs(key),
                )
            )

        self.blocks = nnx.merge(*jax.vmap(split_block)(jax.random.split(rngs.params(), layers)))

    def __call__(self, x: Float[Array, "b L W"]) -> Float[Array, "b L W"]:
        """Apply the blocks in order; x is in the compute dtype."""
        graphdef, params = nnx.split(self.blocks)
        return _scan_blocks(graphdef, params, x, self.remat)


@functools.partial(jax.jit, static_argnums=3)  # outside of a jit, a scan with a fresh body would compile at each call
def _scan_blocks(
    graphdef: nnx.GraphDef, params: PyTree, x: Float[Array, "b L W"], remat: bool
) -> Float[Array, "b L W"]:
    def apply_block(x: Array, params: PyTree) -> tuple[Array, None]:
        return nnx.merge(graphdef, params)(x), None

    return jax.lax.scan(jax.checkpoint(apply_block) if remat else apply_block, x, params)[0]
