"""From a loss inside a `jax.shard_map` to one of whole arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from disco_jax.losses import checks
from disco_jax.losses.walk import Axes


def over_mesh(
    on_device: Callable[..., Any],
    mesh: Mesh,
    image_features: Float[Array, "B D"],
    text_features: Float[Array, "B D"],
    scalars: dict[str, Array | float],
    labels: Int[Array, " B"] | None,
    *,
    rows: Axes,
    cols: Axes,
    **options: Any,
) -> Any:
    """Checks whole arrays, and gives the rows of each device of `mesh` to `on_device`; its results are the same on all.

    Args:
        on_device: takes features, labels, scalars and options, all but the features by name.
        mesh, rows, cols: as `contrastive_loss` has them.
        image_features, text_features, labels: divided over the devices of `rows` and `cols`.
        scalars: by their names.
        options: hashable.

    Raises:
        ValueError: arrays or a mesh that do not fit.
    """
    checks.check_features(image_features, text_features, **scalars)
    checks.check_labels(labels, len(image_features))
    axes = checks.check_mesh(mesh, rows, cols, len(image_features))
    fixed = tuple({"rows": rows, "cols": cols, **options}.items())
    return _over_mesh(on_device, mesh, axes, fixed, (image_features, text_features), scalars, labels)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # for callers without jit: one program instead of one an operation
def _over_mesh(
    on_device: Callable[..., Any],
    mesh: Mesh,
    axes: Axes,
    options: tuple[tuple[str, Any], ...],
    features: tuple[Array, Array],
    scalars: dict[str, Array | float],
    labels: Array | None,
) -> Any:
    divided = PartitionSpec(axes)
    mapped = jax.shard_map(
        lambda features, scalars, labels: on_device(*features, labels=labels, **scalars, **dict(options)),
        mesh=mesh,
        in_specs=(divided, PartitionSpec(), divided),
        out_specs=PartitionSpec(),
    )
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:  # as jax.make_mesh has them by default: along these, shard_map moves no array unasked
        spec = PartitionSpec(tuple(axis for axis in axes if axis in explicit))
        features, labels = jax.sharding.reshard((features, labels), NamedSharding(mesh, spec))
        scalars = jax.sharding.reshard(scalars, NamedSharding(mesh, PartitionSpec()))
    return mapped(features, scalars, labels)
