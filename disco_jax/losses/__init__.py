"""Contrastive losses of paired features."""

from disco_jax.losses.contrastive import contrastive_loss
from disco_jax.losses.dense import dense_contrastive_loss

__all__ = ["contrastive_loss", "dense_contrastive_loss"]
