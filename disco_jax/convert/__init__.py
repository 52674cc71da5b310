"""Weights in and out: open_clip's and OpenAI's files, Hugging Face CLIPModels, and our own runs."""

from disco_jax.convert.export import export
from disco_jax.convert.source import load
from disco_jax.convert.weights import Weights, write

__all__ = ["Weights", "export", "load", "write"]
