"""What no loss here can take is refused with the cure, while the program is traced."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from disco_jax.losses.walk import Axes, varying_axes

METHODS = ("chunked", "block", "disco")


def check_features(image_features: Array, text_features: Array, **scalars: Array | float) -> None:
    """Refuse features that are no pairs of one float type, and a scale and bias that are no real scalars.

    Raises:
        ValueError: names what is wrong.
    """
    images, texts = _described(image_features), _described(text_features)
    shape, dtype = np.shape(image_features), getattr(image_features, "dtype", None)
    if dtype is None or len(shape) != 2 or shape != np.shape(text_features) or 0 in shape:
        raise ValueError(f"image and text features must be arrays of one shape (B, D): got {images} and {texts}")
    if dtype != getattr(text_features, "dtype", None) or dtype not in (jnp.bfloat16, "float16", "float32", "float64"):
        raise ValueError(
            "image and text features must have one floating-point type, bfloat16, float16, float32 or float64: "
            f"got {images} and {texts}"
        )
    for name, scalar in scalars.items():
        real = isinstance(scalar, numbers.Real) or (hasattr(scalar, "dtype") and jnp.isrealobj(scalar))
        if np.shape(scalar) or not real or _described(scalar).startswith("bool"):
            raise ValueError(f"{name} must be a real scalar: got {_described(scalar)}")


def check_labels(labels: Array | None, pairs: int) -> None:
    """Refuse labels that are not one integer for each pair, or that jax would cut to 32 bits. Raises ValueError."""
    if labels is None:
        return
    dtype = getattr(labels, "dtype", None)
    if dtype is None or np.shape(labels) != (pairs,) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"labels must be an array of an integer for each of the {pairs} pairs: got {_described(labels)}"
        )
    if isinstance(labels, np.ndarray) and (labels != labels.astype(jax.dtypes.canonicalize_dtype(dtype))).any():
        raise ValueError(
            f"labels of {dtype} do not fit into 32 bits: number them with np.unique(labels, return_inverse=True)[1], "
            "or set jax_enable_x64"
        )


def check_chunk(chunk: int | None) -> None:
    """Refuse what is no number of columns. Raises ValueError."""
    if chunk is not None and (not isinstance(chunk, numbers.Integral) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk={chunk!r} must be a whole number of at least 1 column, or None for the default")


def check_label_smoothing(label_smoothing: float) -> None:
    """Refuse what is no share. Raises ValueError."""
    if not isinstance(label_smoothing, numbers.Real) or not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be a number in [0, 1], and no array")


def check_method(method: str, chunk: int | None, label_smoothing: float) -> None:
    """Refuse an unknown form of CLIP's loss, and settings that it does not have. Raises ValueError."""
    if method not in METHODS:
        raise ValueError(f"loss method {method!r} is unknown: use one of {', '.join(METHODS)}")
    check_chunk(chunk)
    check_label_smoothing(label_smoothing)
    if chunk is not None and method != "chunked":
        raise ValueError(f"chunk={chunk} is for the 'chunked' method: leave it out for {method!r}")
    if method == "disco" and label_smoothing:
        raise ValueError("the 'disco' loss has no label_smoothing: use 'chunked' or 'block'")


def axis_names(rows: str | Axes, cols: str | Axes | None) -> tuple[Axes, Axes]:
    """`rows` and `cols` as tuples of different axis names. Raises ValueError."""
    named = []
    for axes in (rows, () if cols is None else cols):
        axes = (axes,) if isinstance(axes, str) else axes
        if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
            raise ValueError(f"rows={rows!r} and cols={cols!r} must be names of mesh axes, or tuples of them")
        named.append(tuple(axes))
    if len({*named[0], *named[1]}) < len(named[0]) + len(named[1]):
        raise ValueError(f"rows={rows!r} and cols={cols!r} must be different mesh axes")
    return named[0], named[1]


def check_mesh(mesh: Mesh, rows: Axes, cols: Axes, pairs: int) -> Axes:
    """The axes that divide a batch of so many pairs, in the mesh's order.

    Raises:
        ValueError: no mesh, axes that it lacks, a batch that does not divide, or the inside of a shard_map.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as disco_jax.mesh.make_mesh gives: got {_described(mesh)}")
    if not rows:
        raise ValueError(f"rows={rows!r} must name at least one axis of the mesh, which has {mesh.axis_names!r}")
    missing = [axis for axis in rows + cols if axis not in mesh.axis_names]
    if missing:
        raise ValueError(f"rows and cols name axes {missing} that the mesh does not have: it has {mesh.axis_names!r}")
    axes = tuple(axis for axis in mesh.axis_names if axis in rows + cols)
    if set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError("this is for whole arrays: inside a jax.shard_map use the function with local_ in its name")
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if pairs % devices:
        raise ValueError(
            f"a batch of {pairs} does not divide over the {devices} devices of {axes!r}: use a multiple of {devices}"
        )
    return axes


def check_inside_shard_map(axes: Axes, features: dict[str, Array], scalars: dict[str, Array | float]) -> None:
    """Refuse what would give wrong gradients inside a `jax.shard_map`, where jax's types tell it.

    Raises:
        ValueError: axes that are not bound, features that are the same on all devices (or types that don't tell, as
            with check_vma=False), scalars that differ.
    """
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"axis {axis!r} is not bound: call this inside a jax.shard_map over a mesh that has it"
            ) from None
    for name, array in features.items():
        missing = [axis for axis in axes if axis not in varying_axes(array)]
        if missing:
            raise ValueError(
                f"{name} must be each device's own, but are the same along {missing}: divide them in in_specs, and "
                "leave jax.shard_map's check_vma on (without it gradients can be wrong by a factor unnoticed)"
            )
    for name, scalar in scalars.items():
        if varying_axes(scalar) & set(axes):
            raise ValueError(f"{name} must be the same on all devices: give it the in_spec PartitionSpec()")


def _described(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    return type(x).__name__ if dtype is None else f"{dtype}{list(np.shape(x))}"
