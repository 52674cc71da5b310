"""The first state of a run: at random, or from weights that are there already (`config.init_from`)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import traverse_util
from jaxtyping import Float

from disco_jax.models import CLIPConfig
from disco_jax.training.config import ConfigError
from disco_jax.training.program import Program, TrainState, without

PROJECTIONS = ("visual.projection.kernel", "text.projection.kernel")


@dataclass(frozen=True)
class Initial:
    """Parameters to start from.

    values: float32 arrays by dotted names, in the shapes of the program's parameters; those that are left out start as
    without weights. notes: lines on what was adapted.
    """

    values: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def read_initial(program: Program) -> Initial | None:
    """The weights that `config.init_from` names, fitted to the program's model; None where it names none.

    Raises:
        ConfigError: the weights are of a model of other sizes, or for another tokenizer.
        FileNotFoundError, ValueError, ImportError: as `disco_jax.convert.load` does.
    """
    from disco_jax.convert import load  # it reads our own runs too, and imports this package for that

    config = program.config
    if config.init_from is None:
        return None
    try:
        weights = load(config.init_from, like=program.model)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"config.init_from: {error}") from error
    if weights.tokenizer is not None and config.data.tokenizer is None:
        raise ConfigError(
            f"config.init_from={config.init_from} has a tokenizer of its own: "
            f"set config.data.tokenizer={weights.tokenizer}"
        )
    check_same_sizes(weights.model, program.model, config.init_from, config.model.name)
    values = dict(traverse_util.flatten_dict(weights.params, sep="."))
    shapes = traverse_util.flatten_dict(program.abstract_state.params, sep=".")
    notes = [*weights.notes, *_fit(values, {name: leaf.shape for name, leaf in shapes.items()})]
    return Initial(values, tuple(notes))


def check_same_sizes(found: CLIPConfig, wanted: CLIPConfig, source: str, name: str) -> None:
    """Raises ConfigError where weights don't fit the transformers of the model, whatever its inputs and outputs."""
    free = {"image_size", "context_length"}
    different = [
        f"{tower}.{field.name} is {getattr(ours, field.name)}, of the weights {getattr(theirs, field.name)}"
        for tower, ours, theirs in (("vision", wanted.vision, found.vision), ("text", wanted.text, found.text))
        for field in dataclasses.fields(ours)
        if field.name not in free and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if wanted.activation != found.activation:
        different.append(f"activation is {wanted.activation}, of the weights {found.activation}")
    if different:
        raise ConfigError(
            f"config.init_from={source} does not fit config.model.name={name!r}: {'; '.join(different)}: "
            "choose the model, the patch size and the tokenizer of the weights"
        )


def _fit(values: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Resizes and drops `values` until they fit into `shapes`; says what it did."""
    notes = []
    image, text = "visual.position_embedding", "text.position_embedding"
    if values[image].shape != shapes[image]:
        old, values[image] = values[image], resize_image_positions(values[image], shapes[image][0])
        notes.append(f"image position embeddings resized from {len(old) - 1} to {shapes[image][0] - 1} patches")
    if values[text].shape != shapes[text]:
        old, values[text] = values[text], resize_text_positions(values[text], shapes[text][0])
        notes.append(f"text position embeddings resized from {len(old)} to {shapes[text][0]} tokens")
    if any(values[name].shape != shapes[name] for name in PROJECTIONS):
        dims = values[PROJECTIONS[0]].shape[1], shapes[PROJECTIONS[0]][1]
        notes.append(f"both projections start at random: the weights have {dims[0]} features, the model {dims[1]}")
        for name in PROJECTIONS:
            del values[name]
    if "logit_bias" in values.keys() - shapes.keys():
        del values["logit_bias"]
        notes.append("the weights' logit bias is left out: config.loss.name='contrastive' has none")
    if "logit_bias" in shapes.keys() - values.keys():
        notes.append("the logit bias starts as the sigmoid loss has it: the weights have none")
    assert {name: value.shape for name, value in values.items()}.items() <= dict(shapes).items()
    return notes


def resize_image_positions(positions: Float[np.ndarray, "L W"], length: int) -> Float[np.ndarray, "{length} W"]:
    """Position embeddings of a class token and a square of patches for another square, bicubic with antialiasing."""
    old, new = (round((count - 1) ** 0.5) for count in (len(positions), length))
    square = positions[1:].reshape(old, old, -1)
    resized = jax.image.resize(jnp.asarray(square), (new, new, square.shape[-1]), "cubic", antialias=True)
    return np.concatenate([positions[:1], np.asarray(resized).reshape(new * new, -1)])


def resize_text_positions(positions: Float[np.ndarray, "L W"], length: int) -> Float[np.ndarray, "{length} W"]:
    """The first `length` position embeddings; further ones repeat the last.

    So texts that fit into both lengths keep their features: a position means the same token as before.
    """
    further = np.repeat(positions[-1:], max(0, length - len(positions)), axis=0)
    return np.concatenate([positions[:length], further])


def first_state(program: Program, initial: Initial | None) -> TrainState:
    """The state before the first step, laid out on the devices as the program wants it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
    # Runs once: the time to compile it is what counts.
    quickly: dict[str, Any] = {"xla_backend_optimization_level": 0}
    state = jax.jit(program.init, out_shardings=shardings, compiler_options=quickly)()
    if initial is None:
        return state
    for note in initial.notes:
        logging.info("Weights to start from: %s", note)
    flat = traverse_util.flatten_dict(state.params, sep=".")
    for name, value in initial.values.items():
        # Not device_put: it would compare the values of all processes.
        flat[name] = jax.make_array_from_callback(value.shape, flat[name].sharding, value.__getitem__)
    params = traverse_util.unflatten_dict(flat, sep=".")
    ema = state.ema
    if ema is not None:
        trained = without(params, program.locked)
        ema = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings.ema)(trained)
    logging.info("Started from the weights of %s", program.config.init_from)
    return state._replace(params=params, ema=ema)
