"""From our parameters to the named tensors of other projects, and back.

Ours lie stacked over the blocks of a tower, and kernels are [in, out]; theirs are apart, and weights are [out, in].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import PyTree

from disco_jax.convert.tensors import Tensors, check_tensors
from disco_jax.models import CLIP, CLIPConfig

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
_PATCHES, _PROJECTIONS = "visual.patch_embedding.kernel", ("visual.projection.kernel", "text.projection.kernel")


def flatten(params: PyTree) -> dict[str, np.ndarray]:
    """Nested dicts as one, by dotted names."""
    flat: dict[str, np.ndarray] = traverse_util.flatten_dict(params, sep=".")
    return flat


def unflatten(flat: Mapping[str, np.ndarray]) -> PyTree:
    """The reverse of `flatten`."""
    return traverse_util.unflatten_dict(dict(flat), sep=".")


def abstract_params(model: CLIPConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters of a model, by dotted names."""
    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(CLIP(model, rngs=nnx.Rngs(0)), nnx.Param)))
    return dict(traverse_util.flatten_dict(params, sep="."))


@dataclass(frozen=True)
class Layout:
    """How a project names and shapes the tensors of a CLIP.

    parameters: their names of single parameters; modules: replacements in the names of the others, in order, with `{}`
    for a block's number; linear_projections: the projections are weights of linear layers, [out, in]; inputs: what they
    call the joint projection to queries, keys and values, or the three of them.
    """

    parameters: Mapping[str, str]
    modules: Sequence[tuple[str, str]]
    linear_projections: bool
    inputs: Mapping[str, Sequence[str]]

    def to_tensors(self, params: PyTree) -> Tensors:
        """Their tensors of our parameters: views where that can be."""
        tensors: Tensors = {}
        for name, value in flatten(params).items():
            blocks = value if ".blocks." in name else [value]
            for block, names in zip(blocks, self._names(name, len(blocks)), strict=True):
                parts = np.split(block, len(names), axis=-1) if len(names) > 1 else [block]
                tensors |= {theirs: self._turned(name, part) for theirs, part in zip(names, parts, strict=True)}
        return tensors

    def from_tensors(self, tensors: Tensors, model: CLIPConfig, source: object) -> PyTree:
        """Our parameters of their tensors; raises ValueError where these are not exactly the model's."""
        ours = abstract_params(model)
        zeros = {name: np.broadcast_to(np.float32(0), leaf.shape) for name, leaf in ours.items()}
        check_tensors(tensors, {name: x.shape for name, x in self.to_tensors(unflatten(zeros)).items()}, source)
        flat = {}
        for name, leaf in ours.items():
            parts = [
                [self._turned_back(name, tensors[theirs]) for theirs in names]
                for names in self._names(name, leaf.shape[0] if ".blocks." in name else 1)
            ]
            blocks = [block[0] if len(block) == 1 else np.concatenate(block, axis=-1) for block in parts]
            flat[name] = np.ascontiguousarray(np.stack(blocks)).reshape(leaf.shape)
        return unflatten(flat)

    def _names(self, name: str, blocks: int) -> list[list[str]]:
        """Their names of our parameter: for each block those of its parts."""
        if name in self.parameters:
            return [[self.parameters[name]]]
        module, _, leaf = name.rpartition(".")
        parts = [f"{module}.{_LEAVES.get(leaf, leaf)}"]
        if module.endswith("in_proj"):
            parts = [f"{module.removesuffix('in_proj')}{theirs}" for theirs in self.inputs[leaf]]
        for ours, theirs in self.modules:
            parts = [part.replace(ours, theirs) for part in parts]
        return [[part.format(block) for part in parts] for block in range(blocks)]

    def _turned(self, name: str, value: np.ndarray) -> np.ndarray:
        if name == _PATCHES:
            side = math.isqrt(len(value) // 3)
            return value.reshape(side, side, 3, -1).transpose(3, 2, 0, 1)
        return value.T if self._is_turned(name) else value

    def _turned_back(self, name: str, value: np.ndarray) -> np.ndarray:
        if name == _PATCHES:
            return value.transpose(2, 3, 1, 0).reshape(-1, len(value))
        return value.T if self._is_turned(name) else value

    def _is_turned(self, name: str) -> bool:
        return name.endswith(".kernel") and (self.linear_projections or name not in _PROJECTIONS)
