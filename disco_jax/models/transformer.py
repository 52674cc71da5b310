"""Pre-LN transformer blocks as OpenAI's CLIP has them, stacked along a leading axis and scanned."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Sigmoid approximation of GELU that OpenAI's weights were trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


@jax.custom_jvp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Phi(x), exact."""
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(
    primals: tuple[Float[Array, "*shape"]], tangents: tuple[Float[Array, "*shape"]]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    # Written out because jax 0.12.0 cannot differentiate its erfc inside a `jax.shard_map`.
    (x,), (tangent,) = primals, tangents
    cdf = jax.lax.erfc(-x * np.sqrt(0.5).astype(x.dtype)) / 2
    density = jnp.exp(-(x**2) / 2) / np.sqrt(2 * np.pi).astype(x.dtype)
    return gelu(x), (cdf + x * density) * tangent


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "quickgelu": quick_gelu,
}

# torch's default for Linear and Conv weights: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
torch_default = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_default_bias(fan_in: int) -> Initializer:
    """Initialiser of a torch Linear's bias: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), float32."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32, out_sharding=None: jax.random.uniform(key, shape, dtype, -bound, bound)


# A function of the parameters of one block, applied where the block is: gathers what lies divided over devices.
FetchBlock: TypeAlias = Callable[[PyTree], PyTree]
# What FetchBlock calls its results, by `jax.ad_checkpoint.checkpoint_name`: they are never kept for the backward pass.
FETCHED = "fetched"

REMATS = ("none", "dots", "full")
ATTENTIONS = ("auto", "xla", "cudnn")


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The type of statistics, sums and embeddings beside products in `dtype`: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def layer_norm(width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm of CLIP: epsilon 1e-5, two-pass variance, at least float32 whatever the compute dtype is."""
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, dtype=at_least_float32(dtype), rngs=rngs)


def check_cudnn_sizes(dtype: DTypeLike, head_width: int) -> None:
    """Raises ValueError, saying why, for what cuDNN's attention computes on no GPU."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"cuDNN's attention computes in bfloat16, not {jnp.dtype(dtype)}: use 'xla'")
    if head_width > 128 or head_width % 8:
        raise ValueError(f"cuDNN's attention needs a head width up to 128 in steps of 8, not {head_width}: use 'xla'")


def check_cudnn(dtype: DTypeLike, head_width: int) -> None:
    """Raises ValueError, saying why, where cuDNN's attention does not work on jax's default devices."""
    check_cudnn_sizes(dtype, head_width)
    device = jax.devices()[0]
    if device.platform != "gpu" or float(getattr(device, "compute_capability", None) or 0) < 8:
        raise ValueError(f"cuDNN's attention needs NVIDIA GPUs from A100 on; this is {device.device_kind}: use 'xla'")


def attention_implementation(attention: str, dtype: DTypeLike, head_width: int) -> Any:
    """ "xla" or "cudnn" for `jax.nn.dot_product_attention`; "auto" is cuDNN where `check_cudnn` finds nothing."""
    if attention != "auto":
        return attention
    try:
        check_cudnn(dtype, head_width)
    except ValueError:
        return "xla"
    return "cudnn"


class KernelInit(NamedTuple):
    """Initialisers of a block's four kernels."""

    in_proj: Initializer
    out_proj: Initializer
    c_fc: Initializer
    c_proj: Initializer


class Attention(nnx.Module):
    """Multi-head self-attention; queries, keys and values in one kernel, softmax at least in float32."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        kernel_init: KernelInit,
        dtype: DTypeLike,
        attention: str,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.causal = causal
        self.implementation = attention_implementation(attention, dtype, width // heads)
        self.in_proj = nnx.Linear(width, 3 * width, kernel_init=kernel_init.in_proj, dtype=dtype, rngs=rngs)
        self.out_proj = nnx.Linear(width, width, kernel_init=kernel_init.out_proj, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b L W"]) -> Float[Array, "b L W"]:
        """Attend over the tokens, in the compute dtype; a causal layer sees only earlier tokens and itself."""
        b, L, W = x.shape
        q, k, v = jnp.moveaxis(self.in_proj(x).reshape(b, L, 3, self.heads, W // self.heads), 2, 0)
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=self.causal, implementation=self.implementation
        )
        if self.implementation == "cudnn" and L % 2:  # jax has cuDNN's gradient for even lengths alone
            q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
            # No token before it sees the one at the end of a causal layer; others must not either.
            lengths = None if self.causal else jnp.full(b, L, jnp.int32)
            attended = attend(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)[:, :L]
        else:
            attended = attend(q, k, v)
        return self.out_proj(attended.reshape(b, L, W))


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
        # Of the activation only its input is kept for the backward pass: computing it again costs next to nothing.
        return self.c_proj(jax.checkpoint(ACTIVATIONS[self.activation], prevent_cse=False)(self.c_fc(x)))


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
        attention: str,
        rngs: nnx.Rngs,
    ):
        self.ln_1 = layer_norm(width, dtype=dtype, rngs=rngs)
        self.attn = Attention(
            width, heads, causal=causal, kernel_init=kernel_init, dtype=dtype, attention=attention, rngs=rngs
        )
        self.ln_2 = layer_norm(width, dtype=dtype, rngs=rngs)
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
        remat: str,
        attention: str,
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
                    attention=attention,
                    rngs=nnx.Rngs(key),
                )
            )

        self.blocks = nnx.merge(*jax.vmap(split_block)(jax.random.split(rngs.params(), layers)))

    def __call__(self, x: Float[Array, "b L W"], fetch_block: FetchBlock | None = None) -> Float[Array, "b L W"]:
        """Apply the blocks in order; x is in the compute dtype."""
        graphdef, params = nnx.split(self.blocks)
        return _scan_blocks(graphdef, nnx.to_pure_dict(params), x, self.remat, fetch_block)


def _keep_all_but_fetched(primitive: Any, *_: Any, **params: Any) -> bool:
    """For `jax.checkpoint`: keeps all but what was fetched, by its name and as it comes from the gather itself."""
    return params.get("name") != FETCHED and "all_gather" not in str(params.get("call_jaxpr", ""))


@functools.partial(jax.jit, static_argnums=(3, 4))  # without a jit around, a fresh scan would compile at each call
def _scan_blocks(
    graphdef: nnx.GraphDef, params: PyTree, x: Float[Array, "b L W"], remat: str, fetch_block: FetchBlock | None
) -> Float[Array, "b L W"]:
    def apply_block(x: Array, params: PyTree) -> tuple[Array, None]:
        block = nnx.merge(graphdef, fetch_block(params) if fetch_block else params)
        return block(x), None

    policies = {
        "none": _keep_all_but_fetched,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": None,
    }
    if remat != "none" or fetch_block:
        apply_block = jax.checkpoint(apply_block, policy=policies[remat], prevent_cse=False)
    return jax.lax.scan(apply_block, x, params)[0]
