"""Training: the config, the step, the loop."""

from disco_jax.data.loader import TooManyBadExamples
from disco_jax.training.config import ConfigError, default_config
from disco_jax.training.loop import NonFiniteLossError, train
from disco_jax.training.signals import TrainingInterrupted

__all__ = [
    "ConfigError",
    "NonFiniteLossError",
    "TooManyBadExamples",
    "TrainingInterrupted",
    "default_config",
    "train",
]
