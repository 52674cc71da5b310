"""What a config trains on a mesh. The trainer and the planner make it with the same function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree
from ml_collections import ConfigDict

from disco_jax.encoding import TOWERS, Encoder, make_graphdef
from disco_jax.models import CLIP, CLIPConfig
from disco_jax.models.flops import loss_flops_per_sample, step_flops_per_sample
from disco_jax.models.transformer import check_cudnn
from disco_jax.sharding import abstract, divided_dims, shardings
from disco_jax.training.config import ConfigError, model_config
from disco_jax.training.optimizer import make_optimizer, make_schedule


class TrainState(NamedTuple):
    """All that a checkpoint holds. The data needs no state of its own: its batches follow from the step.

    step: int32 scalar, updates made; params: the model's, nested dicts of float32 arrays; opt_state: of optax, of the
    parameters that are trained; ema: running average of those, None without `config.ema_decay`.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: optax.OptState
    ema: PyTree


def averaged(state: TrainState) -> PyTree:
    """All parameters of the model, those that are trained as running averages."""
    return {**state.params, **state.ema}


@dataclass(frozen=True)
class Program:
    """The parts of a training step; `abstract_state` has the shapes, dtypes and shardings of the training state."""

    config: ConfigDict
    mesh: Mesh
    model: CLIPConfig
    encoder: Encoder
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    abstract_state: TrainState

    @property
    def local_batch(self) -> int:
        """Pairs of a batch on each device."""
        return self.config.batch_size // self.mesh.size

    @property
    def locked(self) -> tuple[str, ...]:
        """The towers that are not trained."""
        return locked_towers(self.config)

    @property
    def flops_per_sample(self) -> int:
        """Model FLOPs of a step for each pair of the batch: of both towers and the loss, computed once."""
        towers = step_flops_per_sample(self.model, locked=self.locked, patch_dropout=self.config.model.patch_dropout)
        return towers + loss_flops_per_sample(self.config.batch_size, self.model.embed_dim)

    @property
    def init(self) -> Callable[[], TrainState]:
        """Makes the first state; jit it with the shardings of `abstract_state`."""
        return make_init(self.config, self.model, self.optimizer)


def locked_towers(config: ConfigDict) -> tuple[str, ...]:
    """Names of the towers that the config leaves as they start."""
    return tuple(tower for tower, lock in zip(TOWERS, (config.lock_image, config.lock_text), strict=True) if lock)


def without(params: PyTree, names: tuple[str, ...]) -> PyTree:
    """The parameters but for some groups of the first level."""
    return {name: group for name, group in params.items() if name not in names}


def make_init(
    config: ConfigDict, model: CLIPConfig, optimizer: optax.GradientTransformation
) -> Callable[[], TrainState]:
    """A function without arguments that makes the first state."""

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(CLIP(model, rngs=nnx.Rngs(config.seed)), nnx.Param))
        trained = without(params, locked_towers(config))
        ema = None if config.ema_decay is None else jax.tree.map(jnp.copy, trained)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained), ema)

    return init


def make_program(config: ConfigDict, mesh: Mesh, vocab_size: int, eot_id: int) -> Program:
    """The program of a config on a mesh, for a tokenizer; allocates nothing on the devices.

    Raises `ConfigError` for sizes that don't fit the mesh.
    """
    check_sizes(config, mesh.size)
    model = model_config(config, vocab_size, eot_id)
    if config.model.attention == "cudnn":
        for tower in (model.vision, model.text):
            try:
                check_cudnn(config.model.dtype, tower.width // tower.heads)
            except ValueError as error:
                raise ConfigError(f"config.model.attention='cudnn': {error}") from None
    optimizer = make_optimizer(config.optimizer)
    state = jax.eval_shape(make_init(config, model, optimizer))
    divide_state, divide_params = config.sharding != "replicated", config.sharding == "fsdp"
    abstract_state = TrainState(
        abstract(state.step, shardings(state.step, mesh, divide=False)),
        abstract(state.params, shardings(state.params, mesh, divide_params)),
        abstract(state.opt_state, shardings(state.opt_state, mesh, divide_state)),
        abstract(state.ema, shardings(state.ema, mesh, divide_state)),
    )
    dtype = jnp.dtype(config.model.dtype)
    encoder = Encoder(
        model,
        make_graphdef(model, dtype, remat=config.model.remat, attention=config.model.attention),
        divided_dims(state.params, mesh.size, divide_params),
        mesh.axis_names,
        dtype,
        config.model.patch_dropout,
    )
    schedule = make_schedule(config.optimizer, config.total_steps)
    return Program(config, mesh, model, encoder, optimizer, schedule, abstract_state)


def check_sizes(config: ConfigDict, devices: int) -> None:
    """Raises `ConfigError` for batches and microbatches that do not divide over so many devices."""
    for name, size in (("batch_size", config.batch_size), ("eval.batch_size", config.eval.batch_size)):
        if size % devices:
            raise ConfigError(
                f"config.{name}={size} does not divide over the {devices} devices of the mesh: use a multiple"
            )
    local, microbatch = config.batch_size // devices, config.microbatch
    if microbatch is not None and local % microbatch:
        raise ConfigError(
            f"config.microbatch={microbatch} does not divide the {local} samples that each of {devices} devices has of "
            f"config.batch_size={config.batch_size}: use a divisor of {local}"
        )
