"""The training step: two encoders, the contrastive loss over the mesh, one optimizer update."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, UInt8
from ml_collections import ConfigDict

from disco_jax.losses import contrastive_loss, sigmoid_loss
from disco_jax.mesh import batch_sharding, replicated
from disco_jax.models import CLIP, CLIPConfig

MAX_LOGIT_SCALE = 100.0  # Radford et al. 2021, section 2.5


class TrainState(NamedTuple):
    """All that a checkpoint holds. The data needs no state of its own: its batches follow from the step.

    step: int32 scalar, updates made; params: the model's `nnx.Param`s, float32; opt_state: of optax.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: optax.OptState


StepFunction = Callable[
    [TrainState, UInt8[Array, "B H W 3"], Int[Array, "B L"]], tuple[TrainState, dict[str, Float[Array, ""]]]
]


def l2_normalize(features: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Rows of unit length, in float32; a zero row stays zero."""
    features = features.astype(jnp.float32)
    return features * jax.lax.rsqrt(jnp.maximum(jnp.sum(features**2, axis=-1, keepdims=True), 1e-24))


def make_init(model: CLIPConfig, optimizer: optax.GradientTransformation, seed: int) -> Callable[[], TrainState]:
    """A function without arguments that makes the first state; jit it with the wanted shardings."""

    def init() -> TrainState:
        params = nnx.state(CLIP(model, rngs=nnx.Rngs(seed)), nnx.Param)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init


def make_graphdef(model: CLIPConfig, dtype: DTypeLike, *, remat: bool = False) -> nnx.GraphDef[CLIP]:
    """The model without its parameters: `nnx.merge(graphdef, params)` is the model. Allocates nothing."""
    return nnx.graphdef(nnx.eval_shape(lambda: CLIP(model, dtype=dtype, remat=remat, rngs=nnx.Rngs(0))))


def batch_loss(
    clip: CLIP, images: UInt8[Array, "B H W 3"], tokens: Int[Array, "B L"], mesh: jax.sharding.Mesh, loss: ConfigDict
) -> Float[Array, ""]:
    """The loss that `loss`, as `config.loss` of `default_config`, asks for, of a batch over all axes of `mesh`."""
    image_features, text_features = clip.encode_image(images), clip.encode_text(tokens)
    image_features = l2_normalize(image_features).astype(image_features.dtype)
    text_features = l2_normalize(text_features).astype(text_features.dtype)
    scale = jnp.exp(clip.logit_scale[...])
    cols = tuple(axis for axis in mesh.axis_names if axis == "cols" and loss.method != "disco")
    rows = tuple(axis for axis in mesh.axis_names if axis not in cols)
    division: dict[str, Any] = {"mesh": mesh, "rows": rows, "cols": cols, "chunk": loss.chunk}
    if loss.name == "sigmoid":
        assert clip.logit_bias is not None
        bias = clip.logit_bias[...]
        value: Any = sigmoid_loss(image_features, text_features, scale, bias, **division)
    else:
        options = {"method": loss.method, "label_smoothing": loss.label_smoothing}
        value = contrastive_loss(image_features, text_features, scale, **options, **division)
    return value


def make_train_step(
    graphdef: nnx.GraphDef[CLIP],
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    mesh: jax.sharding.Mesh,
    loss: ConfigDict,
    skip_nonfinite: bool = False,
) -> StepFunction:
    """One update on a global batch sharded over all axes of `mesh`.

    The returned function gives the new state and float32 scalars: `loss` (the one that `config.loss` of
    `default_config` describes, given here), `grad_norm` (before clipping), `learning_rate` (of this update: `schedule`
    of the step), and, as they are after the update, `logit_scale` (the multiplier) and `logit_bias` (where there is
    one). With `skip_nonfinite` an update whose loss or gradient is NaN or inf leaves parameters and optimizer as they
    were.
    """

    def step(
        state: TrainState, images: UInt8[Array, "B H W 3"], tokens: Int[Array, "B L"]
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        def loss_fn(params: PyTree) -> Float[Array, ""]:
            return batch_loss(nnx.merge(graphdef, params), images, tokens, mesh, loss)

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, optax.tree.scale(learning_rate, updates))
        params["logit_scale"][...] = jnp.clip(params["logit_scale"][...], 0.0, math.log(MAX_LOGIT_SCALE))
        if skip_nonfinite:
            finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
            )
        metrics = {
            "loss": value,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "logit_scale": jnp.exp(params["logit_scale"][...]),
        }
        if "logit_bias" in params:
            metrics["logit_bias"] = params["logit_bias"][...]
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def compile_step(
    step: StepFunction, state: TrainState, model: CLIPConfig, batch_size: int, mesh: jax.sharding.Mesh
) -> Any:
    """Compiles `step` for the mesh with a donated state; logs the time and the memory per device.

    Args:
        step: from `make_train_step`.
        state: arrays or `jax.ShapeDtypeStruct`s with their shardings.
        model: gives the shapes of the batch.
        batch_size: global.
        mesh: the devices.

    Returns:
        the compiled object, called as `step`; jit would not reuse it.
    """
    side, length = model.vision.image_size, model.text.context_length
    images = jax.ShapeDtypeStruct((batch_size, side, side, 3), jnp.uint8, sharding=batch_sharding(mesh))
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32, sharding=batch_sharding(mesh))
    start = time.monotonic()
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, replicated(mesh)))
    compiled = jitted.lower(state, images, tokens).compile()
    memory = compiled.memory_analysis()
    mib = {name: getattr(memory, f"{name}_size_in_bytes") / 2**20 for name in ("argument", "output", "alias", "temp")}
    logging.info(
        "Compiled the step in %.1f s. Per device: %.1f MiB state and batch, %.1f MiB temporary, %.1f MiB in all",
        time.monotonic() - start,
        mib["argument"],
        mib["temp"],
        mib["argument"] + mib["output"] - mib["alias"] + mib["temp"],
    )
    return compiled
