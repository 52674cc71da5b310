"""What no loss here can take is refused with the cure, while the program is traced."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from disco_jax.losses.walk import Axes, varying_axes

METHODS = ("chunked", "block", "disco")


def check_features(image_features: Array, text_features: Array, **scalars: Array) -> None:
    """Refuse features that are no pairs of one float type, and scale and bias that are no float scalars.

    Raises:
        ValueError: names what is wrong.
    """
    images, texts = (f"{x.dtype}{list(x.shape)}" for x in (image_features, text_features))
    if image_features.ndim != 2 or image_features.shape != text_features.shape or not image_features.size:
        raise ValueError(f"image and text features must have one shape (B, D): got {images} and {texts}")
    if image_features.dtype != text_features.dtype or not jnp.issubdtype(image_features.dtype, jnp.floating):
        raise ValueError(f"image and text features must have one floating-point type: got {images} and {texts}")
    for name, scalar in scalars.items():
        if jnp.shape(scalar) or not jnp.issubdtype(jnp.result_type(scalar), jnp.floating):
            got = f"{jnp.result_type(scalar)}{list(jnp.shape(scalar))}"
            raise ValueError(f"{name} must be a floating-point scalar: got {got}")


def check_labels(labels: Array | None, pairs: int) -> None:
    """Refuse labels that are not one integer for each pair. Raises ValueError."""
    if labels is not None and (labels.shape != (pairs,) or not jnp.issubdtype(labels.dtype, jnp.integer)):
        raise ValueError(
            f"labels must be an integer for each of the {pairs} pairs: got {labels.dtype}{list(labels.shape)}"
        )


def check_chunk(chunk: int | None) -> None:
    """Refuse a tile without columns. Raises ValueError."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 column, or None for the default")


def check_method(method: str, chunk: int | None, label_smoothing: float) -> None:
    """Refuse an unknown form of CLIP's loss, and settings that it does not have. Raises ValueError."""
    if method not in METHODS:
        raise ValueError(f"loss method {method!r} is unknown: use one of {', '.join(METHODS)}")
    if chunk is not None and method != "chunked":
        raise ValueError(f"chunk={chunk} is for the 'chunked' method: leave it out for {method!r}")
    check_chunk(chunk)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1]")
    if method == "disco" and label_smoothing:
        raise ValueError("the 'disco' loss has no label_smoothing: use 'chunked' or 'block'")


def axis_names(rows: str | Axes, cols: str | Axes | None) -> tuple[Axes, Axes]:
    """`rows` and `cols` as tuples of different axis names. Raises ValueError."""
    rows = (rows,) if isinstance(rows, str) else tuple(rows)
    cols = (cols,) if isinstance(cols, str) else tuple(cols or ())
    if len({*rows, *cols}) < len(rows) + len(cols):
        raise ValueError(f"rows={rows!r} and cols={cols!r} must be different mesh axes")
    return rows, cols


def check_mesh(mesh: Mesh, rows: Axes, cols: Axes, pairs: int) -> Axes:
    """The axes that divide a batch of so many pairs, in the mesh's order.

    Raises:
        ValueError: axes that the mesh lacks, or a batch that does not divide.
    """
    if not rows or not {*rows, *cols} <= set(mesh.axis_names):
        raise ValueError(f"rows={rows!r} and cols={cols!r} must be axes of the mesh, which has {mesh.axis_names!r}")
    axes = tuple(axis for axis in mesh.axis_names if axis in rows + cols)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if pairs % devices:
        raise ValueError(
            f"a batch of {pairs} does not divide over the {devices} devices of {axes!r}: use a multiple of {devices}"
        )
    return axes


def check_inside_shard_map(axes: Axes, image_features: Array, text_features: Array, scalars: dict[str, Array]) -> None:
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
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        missing = [axis for axis in axes if axis not in varying_axes(features)]
        if missing:
            raise ValueError(
                f"{name} must be each device's own, but are the same along {missing}: divide them in in_specs, and "
                "leave jax.shard_map's check_vma on (without it gradients can be wrong by a factor unnoticed)"
            )
    for name, scalar in scalars.items():
        if varying_axes(scalar) & set(axes):
            raise ValueError(f"{name} must be the same on all devices: give it the in_spec PartitionSpec()")
