"""The compiled step: in one piece, or streamed."""

import time
from functools import partial

import jax
import numpy as np
from absl import logging
from jaxtyping import Int, UInt8

from disco_jax.mesh import batch_sharding, global_array, replicated
from disco_jax.training.program import Program, TrainState
from disco_jax.training.stages import abstract_batch, compile_stage, device_bytes
from disco_jax.training.step import Metrics, train_step
from disco_jax.training.streaming import StreamedStep


class WholeStep:
    """`train_step` in one piece: the whole batch lies on the devices, and with `prefetch` the next one too."""

    def __init__(self, program: Program, platform: str | None = None):
        state, batch = program.abstract_state, abstract_batch(program, program.config.batch_size)
        self._prefetch = program.config.prefetch
        next_batch = device_bytes(batch) if self._prefetch else 0
        self._sharding = batch_sharding(program.mesh)
        self.stages = {
            "step": compile_stage(
                platform,
                partial(train_step, program),
                (state, *batch),
                donate=0,
                out=(state, replicated(program.mesh)),
                inputs=device_bytes(batch) + next_batch,
                resident=next_batch,
            )
        }

    def __call__(
        self, state: TrainState, images: UInt8[np.ndarray, "b H W 3"], tokens: Int[np.ndarray, "b L"]
    ) -> tuple[TrainState, Metrics]:
        """Takes over the memory of `state`, and what this process has of a batch; gives what `train_step` does."""
        if not self._prefetch:
            jax.block_until_ready(state.step)  # then the batch before has left the devices
        on_devices = (global_array(self._sharding, part) for part in (images, tokens))
        result: tuple[TrainState, Metrics] = self.stages["step"].compiled(state, *on_devices)
        return result


def compile_step(program: Program, platform: str | None = None) -> WholeStep | StreamedStep:
    """Compiles the step of a program, for `platform` ("cuda") where its devices are absent; logs time and memory."""
    start = time.monotonic()
    step = (StreamedStep if program.config.stream_inputs else WholeStep)(program, platform)
    seconds = time.monotonic() - start
    for name, stage in step.stages.items():
        memory = stage.compiled.memory_analysis()
        logging.info(
            "Compiled %s: per device %.1f MiB of arguments, %.1f MiB temporary, %.1f MiB in all",
            name,
            memory.argument_size_in_bytes / 2**20,
            memory.temp_size_in_bytes / 2**20,
            stage.peak / 2**20,
        )
    logging.info("Compiling took %.1f s", seconds)
    return step
