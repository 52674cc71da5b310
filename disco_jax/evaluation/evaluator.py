"""Metrics of a model on a split of the data: features from the devices, scores on the host."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from absl import logging
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree, UInt8

from disco_jax.data.captions import clean_caption
from disco_jax.data.examples import ExampleSource
from disco_jax.data.loader import DropCounter, Preprocessor, eval_batches
from disco_jax.encoding import Encoder
from disco_jax.evaluation.retrieval import retrieval_metrics, top_images
from disco_jax.evaluation.zero_shot import class_embeddings, zero_shot_metrics
from disco_jax.mesh import batch_sharding, global_array, replicated


@dataclass(frozen=True)
class SplitFeatures:
    """Features of the usable examples of a split, one row each, L2-normalised.

    images, texts: float32 [n, D]; labels: int32 [n], -1 where there is none; indices: int [n], places in the source.
    """

    images: Float32[np.ndarray, "n D"]
    texts: Float32[np.ndarray, "n D"]
    labels: Int[np.ndarray, " n"]
    indices: Int[np.ndarray, " n"]


class Evaluator:
    """Retrieval, and zero-shot classification where classes are known, over the devices of a mesh.

    Args:
        encoder: of the model; its patch dropout is for training.
        mesh: the devices; each encodes its share of a batch.
        preprocessor: as in training.
        batch_size: examples at a time over all devices, which it must divide over.
        class_names: what the labels stand for; empty: no zero-shot.
        templates: prompts with a `{}` for the class name.
        threads: that read and decode.
    """

    def __init__(
        self,
        encoder: Encoder,
        mesh: jax.sharding.Mesh,
        preprocessor: Preprocessor,
        *,
        batch_size: int,
        class_names: Sequence[str] = (),
        templates: Sequence[str] = (),
        threads: int = 16,
    ):
        self.preprocessor, self.batch_size, self.threads = preprocessor, batch_size, threads
        self.class_names, self.templates = class_names, templates
        self._sharding = batch_sharding(mesh)

        divided = PartitionSpec(mesh.axis_names)

        def encode(tower: str, params: PyTree, inputs: Array) -> Float[Array, "B D"]:
            on_devices = jax.shard_map(
                lambda params, inputs: encoder.encode(tower, encoder.fetch(params), inputs).astype("float32"),
                mesh=mesh,
                in_specs=(encoder.specs, divided),
                out_specs=divided,
            )
            return on_devices(params, inputs)

        def encode_all(
            params: PyTree, images: Array, tokens: Array, labels: Array, valid: Array
        ) -> tuple[Array, Array, Array, Array]:
            return encode("visual", params, images), encode("text", params, tokens), labels, valid

        # Replicated: every process fetches all rows.
        self._encode = jax.jit(encode_all, out_shardings=replicated(mesh))
        self._encode_text = jax.jit(partial(encode, "text"), out_shardings=replicated(mesh))

    def features(self, params: PyTree, source: ExampleSource, size: int | None = None) -> SplitFeatures:
        """Encodes the first `size` examples of `source` (default: all); bad ones are left out.

        Raises ValueError when none is left.
        """
        parts = []
        drops = DropCounter(limit=1.0)
        with closing(
            eval_batches(source, self.preprocessor, drops, batch_size=self.batch_size, size=size, threads=self.threads)
        ) as batches:
            for batch in batches:
                on_devices = (global_array(self._sharding, part) for part in batch)
                parts.append(jax.device_get(self._encode(params, *on_devices)))
        if drops.dropped:
            logging.warning("In the evaluation data: %s", drops)
        images, texts, labels, valid = (np.concatenate(part) for part in zip(*parts, strict=True))
        if not valid.any():
            raise ValueError("not one usable example in the evaluation data: see the warnings above")
        return SplitFeatures(images[valid], texts[valid], labels[valid], np.flatnonzero(valid))

    def metrics(self, params: PyTree, features: SplitFeatures) -> dict[str, float]:
        """`image_to_text/R@1` and so on, and `zero_shot/top1`, `/top5` where labels and class names are known."""
        metrics = retrieval_metrics(features.images, features.texts, np.arange(len(features.images)))
        labelled = features.labels >= 0
        if self.class_names and labelled.any():
            classes = class_embeddings(
                lambda tokens: jax.device_get(self._encode_text(params, jax.device_put(tokens, self._sharding))),
                self.preprocessor.tokenizer,
                self.class_names,
                self.templates,
                self.preprocessor.context_length,
                batch_size=self.batch_size,
            )
            zero_shot = zero_shot_metrics(features.images[labelled], features.labels[labelled], classes)
            metrics |= {f"zero_shot/{name}": value for name, value in zero_shot.items()}
        return metrics


def example_queries(
    source: ExampleSource, features: SplitFeatures, preprocessor: Preprocessor, count: int = 8
) -> tuple[list[str], UInt8[np.ndarray, "q k H W 3"], Bool[np.ndarray, "q k"]]:
    """Some captions of a split, spread evenly, with the five images that the model finds for each.

    Returns:
        the q captions, different ones where possible; their k = min(5, n) images, best first; and which images are
        right: those whose caption is the same.
    """
    n = len(features.indices)

    def caption(row: int) -> str:
        return clean_caption(source[int(features.indices[row])].caption)

    def spread(rows: list[int], count: int) -> list[int]:
        return [rows[i] for i in np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)]

    # Of a large split only some captions are read.
    distinct = {caption(row): row for row in spread(list(range(n)), 20 * count)}
    rows = spread(list(distinct.values()), count)
    found = top_images(features.texts[rows], features.images).tolist()
    images = [[preprocessor.eval_image(source[int(features.indices[i])]) for i in row] for row in found]
    right = [[caption(i) == caption(query) for i in row] for query, row in zip(rows, found, strict=True)]
    return [caption(row) for row in rows], np.array(images), np.array(right)
