"""Optimizers by name and learning-rate schedules; by default AdamW with a cosine, as OpenAI trained CLIP.

Radford et al. 2021 (arXiv 2103.00020), table 18.
"""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from disco_jax.models import decay_mask

# Adafactor factors the two largest dimensions of an array, if both reach this bound. Of a kernel stacked over layers
# these are its inputs and outputs, so that each layer is factored by itself. Of stacked biases and gains they are
# layers and width, which must not be factored, so that the bound is above any number of layers; big_vision's 32 is not.
MIN_FACTORED_DIM = 128
MAX_SECOND_MOMENT_DECAY = 0.999  # Zhai et al. 2022 (arXiv 2106.04560), section 3.4


def make_schedule(optimizer: ConfigDict, total_steps: int) -> optax.Schedule:
    """Learning rate of a step, as `config.optimizer` asks for: linear from 0 over `warmup_steps`, then its schedule.

    "cosine" ends with 0 at `total_steps`, "constant" stays at `learning_rate`, and "rsqrt" is
    learning_rate / sqrt(1 + (step - warmup_steps) / rsqrt_timescale) (Zhai et al. 2022, section 3.5). Over the last
    `cooldown_steps` any of them is multiplied by a line from 1 to 0. Raises ValueError for an unknown schedule.
    """
    schedule = _warmed_up(optimizer, total_steps)
    if not optimizer.cooldown_steps:
        return schedule
    line = optax.linear_schedule(1.0, 0.0, optimizer.cooldown_steps, total_steps - optimizer.cooldown_steps)
    return lambda step: schedule(step) * line(step)


def _warmed_up(optimizer: ConfigDict, total_steps: int) -> optax.Schedule:
    """The schedule without cooldown."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps

    def rsqrt(step: ArrayLike) -> Array:  # of the steps after warm-up; asked for those before too, and not used then
        return peak / jnp.sqrt(1 + jnp.maximum(step, 0) / float(optimizer.rsqrt_timescale))

    match optimizer.schedule:
        case "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total_steps)
        case "constant":  # optax.warmup_constant_schedule stays at 0 without a warm-up
            return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), lambda _: peak], [warmup])
        case "rsqrt":
            return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), rsqrt], [warmup])
    raise ValueError(f"schedule {optimizer.schedule!r} is unknown: use one of cosine, constant, rsqrt")


def make_optimizer(optimizer: ConfigDict) -> optax.GradientTransformation:
    """The optimizer that `config.optimizer` asks for, after clipping to its `grad_clip`.

    "adamw", "lion" (Chen et al. 2023, arXiv 2302.06675), which wants a learning rate 3 to 10 times smaller and a weight
    decay as much larger, or "adafactor" with momentum, as for large vision transformers (Zhai et al. 2022). The weight
    decay of all is decoupled, times the learning rate, and spares gains, biases, the logit scale and bias, and the
    class and position embeddings.

    The updates are for a learning rate of 1: the step multiplies them by the schedule, so that the one clock is the
    step, also past updates that were skipped. Parameters may be any part of the model's. Raises ValueError for an
    unknown name.
    """
    # Its state has one form, with clipping and without: a run may begin to clip when it goes on.
    clip = optax.identity() if optimizer.grad_clip is None else optax.clip_by_global_norm(optimizer.grad_clip)
    return optax.chain(clip, _named(optimizer))


def _named(optimizer: ConfigDict) -> optax.GradientTransformation:
    """The optimizer without clipping."""
    betas = {"b1": optimizer.beta1, "b2": optimizer.beta2}
    decay = {"weight_decay": optimizer.weight_decay, "mask": decay_mask}
    match optimizer.name:
        case "adamw":
            return optax.adamw(1.0, **betas, eps=optimizer.eps, **decay)
        case "lion":
            return optax.lion(1.0, **betas, **decay)
        case "adafactor":
            return optax.chain(
                _scale_by_adafactor(optimizer.beta1),
                optax.add_decayed_weights(**decay),
                optax.scale_by_learning_rate(1.0),
            )
    raise ValueError(f"optimizer {optimizer.name!r} is unknown: use one of adamw, lion, adafactor")


def _scale_by_adafactor(momentum: float) -> optax.GradientTransformation:
    """Gradients over the root of factored second moments, then averaged in float32 with `momentum`, if it isn't 0.

    Put together here because `optax.adafactor` cannot bound the decay of the second moments, which would stand still
    in long runs.
    """
    scale = optax.scale_by_factored_rms(
        decay_rate=0.8, min_dim_size_to_factor=MIN_FACTORED_DIM, decay_rate_fn=_second_moment_decay
    )
    if not momentum:
        return scale
    return optax.chain(scale, optax.ema(momentum, debias=False, accumulator_dtype=jnp.float32))


def _second_moment_decay(updates: ArrayLike, exponent: float) -> Float[Array, ""]:
    """Decay of the second moments after so many updates: Shazeer and Stern 2018 (arXiv 1804.04235), section 7."""
    return jnp.minimum(MAX_SECOND_MOMENT_DECAY, 1 - jnp.asarray(updates + 1, jnp.float32) ** -exponent)
