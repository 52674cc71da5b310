"""Programs of a very small CLIP, and steps of them."""

import functools

import jax
import numpy as np

from disco_jax.mesh import make_mesh
from disco_jax.models import CLIPConfig, TextConfig, VisionConfig
from disco_jax.training import program as program_module
from disco_jax.training.compiled import compile_step
from disco_jax.training.config import default_config
from disco_jax.training.program import make_program

# What is compiled here runs once or twice.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

MODEL = CLIPConfig(8, VisionConfig(8, 4, 16, 2, 2, 32), TextConfig(16, 2, 2, 32, 6, 56, 49))
B = 16


def batch(seed, B=B, model=MODEL):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 48, (B, 6))
    tokens[:, -1] = model.text.eot_id
    side = model.vision.image_size
    return rng.integers(0, 256, (B, side, side, 3), np.uint8), tokens.astype(np.int32)


def make(devices=8, *, cols=1, model=MODEL, batch_size=B, **changes):
    """`changes` to the config by dotted names with "__" for the dots."""
    config = default_config()
    config.update_from_flattened_dict(
        {
            "batch_size": batch_size,
            "eval.batch_size": batch_size,
            "total_steps": 10,
            "model.dtype": "float32",
            "optimizer.warmup_steps": 2,
            "optimizer.learning_rate": 1e-2,
        }
        | {name.replace("__", "."): value for name, value in changes.items()}
    )
    mesh = make_mesh([("cols", cols), ("rows", devices // cols)])
    original, program_module.model_config = program_module.model_config, lambda *_: model
    try:
        return make_program(config, mesh, model.text.vocab_size, model.text.eot_id)
    finally:
        program_module.model_config = original


def first_state(program):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
    return fast_jit(program.init, out_shardings=shardings)()


def run(program, batches, state=None):
    """The last state and the metrics of each step, on the host."""
    state = first_state(program) if state is None else state
    step = compile_step(program)
    history = []
    for images, tokens in batches:
        state, metrics = step(state, images, tokens)
        history.append(jax.device_get(metrics))
    return jax.device_get(state), history
