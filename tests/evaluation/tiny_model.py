"""A very small CLIP at random weights, and evaluators of it on some of the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from disco_jax.convert import Weights
from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.evaluate import make_evaluator, on_devices
from disco_jax.mesh import make_mesh
from disco_jax.models import CLIP, CLIPConfig, TextConfig, VisionConfig

MODEL = CLIPConfig(8, VisionConfig(16, 8, 16, 1, 2, 32), TextConfig(16, 1, 2, 32, context_length=24))


@functools.cache
def weights():
    init = jax.jit(
        lambda: nnx.to_pure_dict(nnx.state(CLIP(MODEL, rngs=nnx.Rngs(0)), nnx.Param)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return Weights(MODEL, jax.device_get(init()), "at random")


@functools.cache
def evaluator(devices, batch_size=8):
    """And its parameters."""
    mesh = make_mesh([("rows", devices)])
    made = make_evaluator(weights(), load_tokenizer(), mesh, batch_size=batch_size, threads=2)
    return made, on_devices(weights().params, mesh)


def encoded(preprocessor, *, images=(), texts=()):
    """Features as the model itself gives them."""
    clip = weights().clip()
    if len(images):
        return np.asarray(clip.encode_image(jnp.stack([preprocessor.eval_image(example) for example in images])))
    return np.asarray(clip.encode_text(jnp.asarray(preprocessor.tokenizer(texts, preprocessor.context_length))))
