"""Contrastive losses of paired features."""

from disco_jax.losses.contrastive import contrastive_loss, local_contrastive_loss
from disco_jax.losses.dense import dense_contrastive_loss, dense_sigmoid_loss
from disco_jax.losses.in_batch import InBatchMetrics
from disco_jax.losses.sigmoid import local_sigmoid_loss, sigmoid_loss

__all__ = [
    "InBatchMetrics",
    "contrastive_loss",
    "dense_contrastive_loss",
    "dense_sigmoid_loss",
    "local_contrastive_loss",
    "local_sigmoid_loss",
    "sigmoid_loss",
]
