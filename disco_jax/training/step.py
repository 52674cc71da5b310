"""The training step: two encoders, the contrastive loss over the mesh, one optimizer update.

The encoders and the loss run on each device's own rows inside one `jax.shard_map`, where what travels between devices
is written out; the update is of whole arrays, which the compiler divides as the state is divided.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree, UInt8
from ml_collections import ConfigDict

from disco_jax.encoding import TOWERS
from disco_jax.losses import local_contrastive_loss, local_sigmoid_loss
from disco_jax.losses.walk import vary
from disco_jax.sharding import divided_dims, partition_specs, shardings, total
from disco_jax.training.program import Program, TrainState, without

MAX_LOGIT_SCALE = 100.0  # Radford et al. 2021, section 2.5

Metrics = dict[str, Float[Array, ""]]


def train_step(
    program: Program, state: TrainState, images: UInt8[Array, "B H W 3"], tokens: Int[Array, "B L"]
) -> tuple[TrainState, Metrics]:
    """One update on a global batch that is divided over all axes of the program's mesh; see `update` for the metrics.

    With `config.microbatch` the encoders go over the batch in pieces, and their backward pass computes each piece
    again, so that of all activations only the features are kept; the loss sees the whole batch (GradCache, Gao et al.
    2021, arXiv 2101.06983).
    """
    params = state.params
    value, gradients = jax.shard_map(
        lambda params, step, images, tokens: _loss_and_gradients(program, params, step, images, tokens),
        mesh=program.mesh,
        in_specs=(program.encoder.specs, PartitionSpec(), *[PartitionSpec(program.mesh.axis_names)] * 2),
        out_specs=(PartitionSpec(), gradient_specs(program)),
    )(params, state.step, images, tokens)
    return update(program, state, value, gradients)


def _loss_and_gradients(
    program: Program, params: PyTree, step: Array, images: Array, tokens: Array
) -> tuple[Float[Array, ""], PyTree]:
    """On one device, of its own rows of the batch: the loss of the whole batch, and the gradients of its parameters.

    Gradients are summed over all devices, and divided over them as `gradient_dims` says.
    """
    axes, microbatch = program.mesh.axis_names, program.config.microbatch
    samples, key = sample_places(len(images), axes), step_key(program, step)
    inputs = {"visual": images, "text": tokens}
    towers, scalars = trained_towers(program, params), without(params, TOWERS)
    # From here on each device has gradients of its own: their sum over the devices comes once, at the end.
    towers = jax.tree.map(lambda leaf: vary(leaf, frozenset(axes)), towers)

    def loss_fn(towers: PyTree, scalars: PyTree) -> Float[Array, ""]:
        whole = program.encoder.fetch({**params, **towers})

        def encode_all(tower: str) -> Float[Array, "b D"]:
            def encode(inputs: Array, samples: Array) -> Array:
                return program.encoder.encode(tower, whole, inputs, samples, key)

            if microbatch is None:
                return encode(inputs[tower], samples)
            pieces = (x.reshape(-1, microbatch, *x.shape[1:]) for x in (inputs[tower], samples))
            features = jax.lax.map(lambda piece: jax.checkpoint(encode, prevent_cse=False)(*piece), tuple(pieces))
            return features.reshape(len(samples), -1)

        return features_loss(
            encode_all("visual"), encode_all("text"), scalars, mesh=program.mesh, loss=program.config.loss
        )

    value, (of_towers, of_scalars) = jax.value_and_grad(loss_fn, argnums=(0, 1))(towers, scalars)
    return value, total_gradients(program, of_towers, of_scalars)


def sample_places(local_batch: int, axes: tuple[str, ...]) -> Int[Array, " b"]:
    """On one device: the places of its samples in the global batch."""
    return jax.lax.axis_index(axes) * local_batch + jnp.arange(local_batch)


def step_key(program: Program, step: Int[Array, ""]) -> Key[Array, ""]:
    """The random key of a step."""
    return jax.random.fold_in(jax.random.key(program.config.seed), step)


def trained_towers(program: Program, params: PyTree) -> PyTree:
    """The parameters of the towers that are not locked."""
    return without(params, (*program.locked, *(name for name in params if name not in TOWERS)))


def gradient_dims(program: Program) -> PyTree:
    """Along which dimensions the gradients of the trained parameters are divided (`disco_jax.sharding`)."""
    trained = without(program.abstract_state.params, program.locked)
    return divided_dims(trained, program.mesh.size, program.config.sharding != "replicated")


def gradient_specs(program: Program) -> PyTree:
    """The PartitionSpecs of `gradient_dims`."""
    return partition_specs(gradient_dims(program), program.mesh.axis_names)


def total_gradients(program: Program, of_towers: PyTree, of_scalars: PyTree) -> PyTree:
    """On one device: the gradients of all, from those of its towers; the scalars' come summed from the loss."""
    dims, divided = trained_towers(program, program.encoder.dims), trained_towers(program, gradient_dims(program))
    summed = total(of_towers, dims, divided, program.mesh.axis_names)
    return {**summed, **of_scalars}


def features_loss(
    image_features: Float[Array, "b D"],
    text_features: Float[Array, "b D"],
    scalars: PyTree,
    *,
    mesh: Mesh,
    loss: ConfigDict,
) -> Float[Array, ""]:
    """On one device, of its own features: the loss of the whole batch that `loss`, as `config.loss`, asks for."""
    cols = tuple(axis for axis in mesh.axis_names if axis == "cols" and loss.method != "disco")
    rows = tuple(axis for axis in mesh.axis_names if axis not in cols)
    division: dict[str, Any] = {"rows": rows, "cols": cols, "chunk": loss.chunk}
    scale = jnp.exp(scalars["logit_scale"])
    if loss.name == "sigmoid":
        value: Any = local_sigmoid_loss(image_features, text_features, scale, scalars["logit_bias"], **division)
    else:
        options = {"method": loss.method, "label_smoothing": loss.label_smoothing}
        value = local_contrastive_loss(image_features, text_features, scale, **options, **division)
    return value


def update(
    program: Program, state: TrainState, value: Float[Array, ""], gradients: PyTree
) -> tuple[TrainState, Metrics]:
    """The next state, of whole arrays, and float32 scalars.

    These are `loss` (the given value), `grad_norm` (before clipping), `learning_rate` (of this update: the schedule at
    the step), and, as they are after the update, `logit_scale` (the multiplier) and `logit_bias` (where there is one).
    With `config.on_nonfinite="skip"` an update whose loss or gradient is NaN or inf leaves all but the step as it was.
    """
    config = program.config
    old = without(state.params, program.locked)
    if config.sharding != "replicated":  # each device updates what its share of the optimizer's state is for
        old = jax.lax.with_sharding_constraint(old, shardings(old, program.mesh, divide=True))
    grad_norm = optax.tree.norm(gradients)
    updates, opt_state = program.optimizer.update(gradients, state.opt_state, old)
    learning_rate = jnp.asarray(program.schedule(state.step), jnp.float32)
    new = optax.apply_updates(old, optax.tree.scale(learning_rate, updates))
    new["logit_scale"] = jnp.clip(new["logit_scale"], 0.0, math.log(MAX_LOGIT_SCALE))
    ema = state.ema
    if ema is not None:
        ema = optax.incremental_update(new, ema, 1 - config.ema_decay)
    if config.on_nonfinite == "skip":
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        new, opt_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (new, opt_state, ema), (old, state.opt_state, state.ema)
        )
    metrics = {
        "loss": value,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "logit_scale": jnp.exp(new["logit_scale"]),
    }
    if "logit_bias" in new:
        metrics["logit_bias"] = new["logit_bias"]
    return TrainState(state.step + 1, {**state.params, **new}, opt_state, ema), metrics
