"""Reads the golden models (open_clip's, random weights) into ours."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from disco_jax.models import CLIP, CLIPConfig, TextConfig, VisionConfig

GOLDEN = Path(__file__).parents[1] / "golden"
OPEN_CLIP_NAMES = {  # ours to open_clip's, applied in order
    "text.projection.kernel": "text_projection",
    "visual.projection.kernel": "visual.proj",
    "visual.patch_embedding": "visual.conv1",
    "text.": "",
    "position_embedding": "positional_embedding",
    "in_proj.kernel": "in_proj_weight",
    "in_proj.bias": "in_proj_bias",
    ".kernel": ".weight",
    ".scale": ".weight",
    ".embedding": ".weight",
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32"
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[start + begin : start + end], "<f4").reshape(entry["shape"])
    return tensors


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
    meta = json.loads((GOLDEN / f"{name}.json").read_text())
    sizes = {tower: {"mlp_width": 4 * meta[tower]["width"]} | meta[tower] for tower in ("vision", "text")}
    config = CLIPConfig(
        meta["embed_dim"],
        VisionConfig(**sizes["vision"]),
        TextConfig(**sizes["text"], eot_id=meta["text"]["vocab_size"] - 1),
        "quickgelu" if meta["quick_gelu"] else "gelu",
    )
    tensors = read_safetensors(GOLDEN / f"{name}.safetensors")

    def read(path: jax.tree_util.KeyPath, ours: jax.ShapeDtypeStruct) -> jax.Array:
        key = ours_key = ".".join(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        for old, new in OPEN_CLIP_NAMES.items():
            key = key.replace(old, new)
        if "blocks." in key:
            names = [key.replace("blocks.", f"resblocks.{layer}.") for layer in range(ours.shape[0])]
            value = np.stack([tensors.pop(layer_name) for layer_name in names])
        else:
            value = tensors.pop(key)
        if key == "visual.conv1.weight":
            value = value.transpose(2, 3, 1, 0).reshape(ours.shape)
        elif ours_key.endswith(".kernel") and not ours_key.endswith("projection.kernel"):
            value = value.swapaxes(-1, -2)
        assert value.shape == ours.shape, ours_key
        return jnp.asarray(value)

    params = jax.tree_util.tree_map_with_path(read, abstract_clip(config)[1])
    assert not tensors, f"not read: {list(tensors)}"
    return config, params, dict(np.load(GOLDEN / f"{name}.npz"))
