"""Reads the golden models (open_clip's, random weights) into ours."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from disco_jax import convert
from disco_jax.models import CLIP, CLIPConfig

GOLDEN = Path(__file__).parents[1] / "golden"


# The backend's optimisations take most of the compile time of these small programs.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def method(config: CLIPConfig, name: str, dtype=jnp.float32) -> Callable[[nnx.State, jax.Array], jax.Array]:
    """A method of the model (or `visual`), compiled, as a function of the parameters and the input."""
    graphdef, _ = abstract_clip(config, dtype)
    return fast_jit(lambda params, inputs: getattr(nnx.merge(graphdef, params), name)(inputs))


@functools.cache
def abstract_clip(config: CLIPConfig, dtype=jnp.float32) -> tuple[nnx.GraphDef, nnx.State]:
    """The graph of a model and the shapes of its parameters; nothing is initialised."""
    return jax.eval_shape(lambda: nnx.split(CLIP(config, dtype=dtype, rngs=nnx.Rngs(0))))


def load(name: str) -> tuple[CLIPConfig, nnx.State, dict[str, np.ndarray]]:
    """The config and the parameters of a golden model, and its golden inputs and features."""
    weights = load_golden(name)
    params = nnx.state(weights.clip())
    return weights.model, params, dict(np.load(GOLDEN / f"{name}.npz"))


def load_golden(name: str) -> convert.Weights:
    """The weights of open_clip's golden models."""
    meta = json.loads((GOLDEN / f"{name}.json").read_text())
    return convert.load(
        GOLDEN / f"{name}.safetensors",
        activation="quickgelu" if meta["quick_gelu"] else "gelu",
        vision_heads=meta["vision"]["heads"],
        text_heads=meta["text"]["heads"],
    )
