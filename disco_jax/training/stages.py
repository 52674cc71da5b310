"""What a compiled step is: one compiled function, or several that a loop on the host calls; and their memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from disco_jax.mesh import batch_sharding
from disco_jax.training.program import Program


class Stage(NamedTuple):
    """A compiled function of a step.

    calls: of it in a step; inputs: bytes of images and tokens on a device while it runs, those that only travel too;
    resident: bytes on a device beside its arguments, of which such inputs are a part.
    """

    compiled: Any
    calls: int
    inputs: int
    resident: int

    @property
    def peak(self) -> int:
        """Bytes on a device while it runs."""
        memory = self.compiled.memory_analysis()
        kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + kept + memory.temp_size_in_bytes + self.resident


def abstract_batch(program: Program, size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of so many images and captions, with their shardings."""
    side, length = program.model.vision.image_size, program.model.text.context_length
    sharding = batch_sharding(program.mesh)
    return (
        jax.ShapeDtypeStruct((size, side, side, 3), jnp.uint8, sharding=sharding),
        jax.ShapeDtypeStruct((size, length), jnp.int32, sharding=sharding),
    )


def compile_stage(
    platform: str | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    out: Any,
    donate: int | tuple[int, ...] = (),
    calls: int = 1,
    inputs: int = 0,
    resident: int = 0,
) -> Stage:
    """Compiles a function for shapes `args`; the compiled object is called as the function, jit would not reuse it.

    out: the shardings of the results, or shapes that have them; calls, inputs, resident: as of `Stage`.
    """
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", leaf), out)
    # What a function does not use is on the devices all the same, and counts.
    lowered = jax.jit(function, donate_argnums=donate, out_shardings=shardings, keep_unused=True).trace(*args)
    if platform is None:
        return Stage(lowered.lower().compile(), calls, inputs, resident)
    # Where no GPU is there to try them on, XLA chooses tiles for its own matrix products that it then cannot compile.
    options = {"xla_gpu_enable_triton_gemm": False}
    return Stage(lowered.lower(lowering_platforms=(platform,)).compile(options), calls, inputs, resident)


def device_bytes(tree: Any) -> int:
    """What one device holds of arrays, or of shapes with shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
