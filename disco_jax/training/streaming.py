"""The step whose batch stays in the host's memory: microbatches go to the devices as they are needed.

A loop on the host runs `encode` on every microbatch, which keeps its features; `loss` on all features, which turns them
into gradients; `backward` on every microbatch, which computes it again with the same random keys and adds up the
gradients of the parameters; `update`. While one microbatch is computed the next one travels, and there are never more
than these two on a device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, UInt8

from disco_jax.encoding import TOWERS
from disco_jax.losses.walk import vary
from disco_jax.mesh import batch_sharding, global_array, replicated
from disco_jax.models.transformer import at_least_float32
from disco_jax.sharding import WHOLE
from disco_jax.training.program import Program, TrainState, without
from disco_jax.training.stages import Stage, abstract_batch, compile_stage, device_bytes
from disco_jax.training.step import (
    Metrics,
    features_loss,
    gradient_specs,
    sample_places,
    step_key,
    total_gradients,
    trained_towers,
    update,
)


class StreamedStep:
    """The stages, compiled, and the loop over them."""

    def __init__(self, program: Program, platform: str | None = None):
        self._program = program
        mesh, state = program.mesh, program.abstract_state
        self._microbatch = program.config.microbatch
        self._count = m = program.local_batch // self._microbatch

        own, same = PartitionSpec(mesh.axis_names), PartitionSpec()
        specs, scalars = program.encoder.specs, without(state.params, TOWERS)
        scalars_specs = without(specs, TOWERS)
        # Each device adds up gradients of its own, but of parameters that lie divided, whose gradients are summed over
        # the devices at once.
        dims = trained_towers(program, program.encoder.dims)
        sums_specs = jax.tree.map(lambda spec, dim: own if dim == WHOLE else spec, trained_towers(program, specs), dims)
        sums = jax.tree.map(
            lambda leaf, spec, dim: jax.ShapeDtypeStruct(
                (mesh.size, *leaf.shape) if dim == WHOLE else leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            trained_towers(program, state.params),
            sums_specs,
            dims,
        )
        shape = (mesh.size, m, self._microbatch, program.model.embed_dim)
        feature = jax.ShapeDtypeStruct(shape, program.encoder.dtype, sharding=NamedSharding(mesh, own))
        features = dict.fromkeys(TOWERS, feature)
        features_specs = dict.fromkeys(TOWERS, own)
        value = jax.ShapeDtypeStruct((), at_least_float32(feature.dtype), sharding=replicated(mesh))
        index = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
        batch = dict(zip(TOWERS, abstract_batch(program, self._microbatch * mesh.size), strict=True))
        trained = without(batch, program.locked)  # what the backward pass needs of it
        encoded, replayed = device_bytes(batch), device_bytes(trained)
        state_but_params = device_bytes((state.opt_state, state.ema))

        def on_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
            return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

        encode = on_devices(self._encode, (specs, same, features_specs, own, same), (features_specs, same))
        loss = on_devices(self._loss, (scalars_specs, features_specs), (same, features_specs, scalars_specs))
        backward = on_devices(self._backward, (specs, same, sums_specs, features_specs, own, same), (sums_specs, same))
        total = on_devices(self._total, (sums_specs, scalars_specs), gradient_specs(program))

        def finish(state: TrainState, value: Array, sums: PyTree, scalars: PyTree) -> tuple[TrainState, Metrics]:
            return update(program, state, value, total(sums, scalars))

        stage = partial(compile_stage, platform)
        self.stages: dict[str, Stage] = {
            "encode": stage(
                encode,
                (state.params, state.step, features, batch, index),
                donate=2,
                out=(features, index),
                calls=m,
                inputs=2 * encoded,
                resident=state_but_params + encoded,
            ),
            "loss": stage(
                loss,
                (scalars, features),
                donate=1,
                out=(value, features, scalars),
                inputs=replayed,
                resident=device_bytes(state) + replayed,
            ),
            "backward": stage(
                backward,
                (state.params, state.step, sums, features, trained, index),
                donate=2,
                out=(sums, index),
                calls=m,
                inputs=replayed + encoded,  # the next step's first one may travel
                resident=state_but_params + encoded,
            ),
            "update": stage(
                finish,
                (state, value, sums, scalars),
                donate=0,
                out=(state, replicated(mesh)),
                inputs=encoded,
                resident=encoded,
            ),
        }
        self._no_features, self._no_sums = (
            stage(lambda tree=tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), (), out=tree).compiled
            for tree in (features, sums)
        )

    def _encoder(
        self, step: Array, inputs: dict[str, Array], index: Array
    ) -> Callable[[str, PyTree], Float[Array, "b D"]]:
        """On one device: encodes a microbatch by the name of the tower and the model's parameters."""
        encoder, key = self._program.encoder, step_key(self._program, step)
        places = sample_places(self._program.local_batch, self._program.mesh.axis_names)
        samples = jax.lax.dynamic_slice_in_dim(places, index * self._microbatch, self._microbatch)
        return lambda tower, params: encoder.encode(tower, encoder.fetch(params), inputs[tower], samples, key)

    def _encode(
        self, params: PyTree, step: Array, features: dict[str, Array], inputs: dict[str, Array], index: Array
    ) -> tuple[dict[str, Array], Array]:
        encode = self._encoder(step, inputs, index)
        return {tower: x.at[0, index].set(encode(tower, params)) for tower, x in features.items()}, index + 1

    def _loss(self, scalars: PyTree, features: dict[str, Array]) -> tuple[Array, dict[str, Array], PyTree]:
        def loss_fn(features: dict[str, Array], scalars: PyTree) -> Array:
            program = self._program
            images, texts = (features[tower].reshape(program.local_batch, -1) for tower in TOWERS)
            return features_loss(images, texts, scalars, mesh=program.mesh, loss=program.config.loss)

        value, (of_features, of_scalars) = jax.value_and_grad(loss_fn, argnums=(0, 1))(features, scalars)
        return value, of_features, of_scalars

    def _backward(
        self,
        params: PyTree,
        step: Array,
        sums: PyTree,
        gradients: dict[str, Array],
        inputs: dict[str, Array],
        index: Array,
    ) -> tuple[PyTree, Array]:
        encode, axes = self._encoder(step, inputs, index), frozenset(self._program.mesh.axis_names)
        new = {}
        for tower, sums_of_tower in sums.items():  # one after the other: each has its activations for itself
            own = jax.tree.map(lambda leaf: vary(leaf, axes), params[tower])
            _, pull_back = jax.vjp(lambda own, tower=tower: encode(tower, {**params, tower: own}), own)
            new[tower] = jax.tree.map(
                lambda total, gradient: total + gradient.reshape(total.shape),
                sums_of_tower,
                pull_back(gradients[tower][0, index])[0],
            )
        return new, index + 1

    def _total(self, sums: PyTree, of_scalars: PyTree) -> PyTree:
        of_towers = jax.tree.map(
            lambda total, dim: total[0] if dim == WHOLE else total,
            sums,
            trained_towers(self._program, self._program.encoder.dims),
        )
        return total_gradients(self._program, of_towers, of_scalars)

    def __call__(
        self, state: TrainState, images: UInt8[np.ndarray, "b H W 3"], tokens: Int[np.ndarray, "b L"]
    ) -> tuple[TrainState, Metrics]:
        """Takes over the memory of `state`, and what this process has of a batch; gives what `train_step` does."""
        encode, loss, backward, finish = (stage.compiled for stage in self.stages.values())
        batch = dict(zip(TOWERS, (images, tokens), strict=True))
        features = self._for_each(
            lambda features, *piece: encode(state.params, state.step, features, *piece),
            self._no_features(),
            batch,
            before=state.step,
        )
        value, gradients, of_scalars = loss(without(state.params, TOWERS), features)
        sums = self._for_each(
            lambda sums, *piece: backward(state.params, state.step, sums, gradients, *piece),
            self._no_sums(),
            without(batch, self._program.locked),
            before=value,
        )
        del features, gradients  # their memory is for the update
        result: tuple[TrainState, Metrics] = finish(state, value, sums, of_scalars)
        return result

    def _for_each(self, run: Callable[..., Any], carry: Any, batch: dict[str, np.ndarray], *, before: Array) -> Any:
        """Calls `run` with the carry, and the inputs of the towers and the index of each microbatch.

        before: comes from the stage before.
        """
        sharding, devices = batch_sharding(self._program.mesh), len(self._program.mesh.local_devices)
        pieces = {t: x.reshape(devices, self._count, self._microbatch, *x.shape[1:]) for t, x in batch.items()}
        index = global_array(replicated(self._program.mesh), np.zeros((), np.int32))
        for i in range(self._count):
            # Travels while the one before is computed.
            piece = {t: global_array(sharding, x[:, i].reshape(-1, *x.shape[3:])) for t, x in pieces.items()}
            carry, index = run(carry, piece, index)
            jax.block_until_ready(before)  # the call before: its microbatch has left the devices now
            before = index
        return carry
