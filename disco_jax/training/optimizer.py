"""AdamW with warm-up and cosine, as OpenAI trained CLIP (Radford et al. 2021, table 18)."""

import optax
from ml_collections import ConfigDict

from disco_jax.models import decay_mask


def make_schedule(optimizer: ConfigDict, total_steps: int) -> optax.Schedule:
    """Learning rate of a step: linear from 0 over `warmup_steps`, then a cosine to 0 at `total_steps`."""
    return optax.warmup_cosine_decay_schedule(0.0, optimizer.learning_rate, optimizer.warmup_steps, total_steps)


def make_optimizer(optimizer: ConfigDict) -> optax.GradientTransformation:
    """AdamW whose decoupled weight decay spares gains, biases, the logit scale and the class and position embeddings.

    Its updates are for a learning rate of 1: the step multiplies them by the schedule, so that the one clock is the
    step, also past updates that were skipped. `optimizer` is `config.optimizer` of `default_config`.
    """
    adamw = optax.adamw(
        1.0,
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mask=decay_mask,
    )
    if optimizer.grad_clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(optimizer.grad_clip), adamw)
