"""Features of a split of the data, from the devices, and the metrics of a model on it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import jax
import numpy as np
from absl import logging
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PyTree, UInt8

from disco_jax.data.examples import ExampleSource
from disco_jax.data.loader import NO_LABEL, DropCounter, Preprocessor, eval_batches
from disco_jax.encoding import Encoder
from disco_jax.evaluation.prompts import Prompts
from disco_jax.evaluation.retrieval import retrieval_metrics, top_images
from disco_jax.evaluation.zero_shot import class_embeddings, zero_shot_metrics
from disco_jax.mesh import batch_sharding, gather_json, global_array, replicated
from disco_jax.progress import Progress


class NoUsableExample(ValueError):
    """Every example was dropped."""


class NonFiniteFeatures(ArithmeticError):
    """The model gives NaN or infinity."""


@dataclass(frozen=True)
class SplitFeatures:
    """Features of the n usable examples of a split and of their m captions, L2-normalised, on every process.

    images: float32 [n, D]; texts: float32 [m, D]; text_to_image: int [m], the row of each caption's image; labels:
    int32 [n], -1 where there is none; indices: int [n], places in the source; keys: n names; captions: m clean texts;
    dropped, dropped_captions: how many were not usable, by reason; of captions, those beside good ones.
    """

    images: Float32[np.ndarray, "n D"]
    texts: Float32[np.ndarray, "m D"]
    text_to_image: Int[np.ndarray, " m"]
    labels: Int[np.ndarray, " n"]
    indices: Int[np.ndarray, " n"]
    keys: Sequence[str]
    captions: Sequence[str]
    dropped: Counter[str]
    dropped_captions: Counter[str]

    @property
    def labelled(self) -> Bool[np.ndarray, " n"]:
        """Which examples have a label."""
        return self.labels != NO_LABEL


class Evaluator:
    """Encodes examples over the devices of a mesh, and scores them.

    Args:
        encoder: of the model; its patch dropout is for training.
        mesh: the devices; each encodes its share of a batch.
        preprocessor: as in training.
        batch_size: images or texts at a time over all devices, which it must divide over.
        threads: that read and decode.
    """

    def __init__(
        self,
        encoder: Encoder,
        mesh: jax.sharding.Mesh,
        preprocessor: Preprocessor,
        *,
        batch_size: int,
        threads: int = 16,
    ):
        self.preprocessor, self.batch_size, self.threads, self.mesh = preprocessor, batch_size, threads, mesh
        self._sharding, self._embed_dim = batch_sharding(mesh), encoder.model.embed_dim
        divided = PartitionSpec(mesh.axis_names)

        def encode(tower: str, params: PyTree, inputs: Array) -> Float[Array, "B D"]:
            on_devices = jax.shard_map(
                lambda params, inputs: encoder.encode(tower, encoder.fetch(params), inputs).astype("float32"),
                mesh=mesh,
                in_specs=(encoder.specs, divided),
                out_specs=divided,
            )
            return on_devices(params, inputs)

        # Replicated: every process fetches all rows.
        self._encode_image = jax.jit(partial(encode, "visual"), out_shardings=replicated(mesh))
        self._encode_text = jax.jit(partial(encode, "text"), out_shardings=replicated(mesh))

    def features(
        self,
        params: PyTree,
        source: ExampleSource,
        *,
        first: int = 0,
        size: int | None = None,
        captions: int | None = None,
        progress: Progress | None = None,
    ) -> SplitFeatures:
        """Encodes `size` examples of `source` from `first` on (default: all); bad ones are left out.

        Their images first, then the captions of all, in batches of one shape; the features are those of one process on
        any number of them. Raises `NoUsableExample` and `NonFiniteFeatures`.

        Args:
            captions: at most so many good ones of each example (default: all), which needs one; 0: none, only images.
            progress: counts the examples; by default one of its own.
        """
        size = len(source) - first if size is None else min(size, len(source) - first)
        drops = DropCounter(limit=1.0)
        features: list[np.ndarray] = []
        rows: list[tuple[int, int, str, Sequence[str]]] = []  # of this process
        batches = eval_batches(
            source,
            self.preprocessor,
            drops,
            batch_size=self.batch_size,
            first=first,
            size=size,
            captions=captions,
            threads=self.threads,
        )
        own = Progress("images encoded", size) if progress is None else nullcontext(progress)
        with closing(batches), own as counter:
            for batch in batches:
                encoded = self._encode_image(params, global_array(self._sharding, batch.images))
                good = batch.indices >= 0
                columns = (batch.indices, batch.labels, batch.keys, batch.captions)
                rows += zip(*(column[good].tolist() for column in columns), strict=True)
                features.append(jax.device_get(encoded))
                counter.update(self.batch_size)
        parts = gather_json([rows, drops.dropped, drops.captions])
        rows = sorted((row for part in parts for row in part[0]), key=itemgetter(0))
        dropped, dropped_captions = (sum((Counter(part[i]) for part in parts), Counter()) for i in (1, 2))
        for what, lost in (("examples", dropped), ("captions", dropped_captions)):
            if lost:
                reasons = ", ".join(f"{count} {reason}" for reason, count in lost.most_common())
                logging.warning("In the evaluation data: dropped %d %s (%s)", lost.total(), what, reasons)
        if not rows:
            raise NoUsableExample("not one usable example in the evaluation data: see the warnings above")
        indices, labels, keys, of_images = zip(*rows, strict=True)
        texts = [caption for of_image in of_images for caption in of_image]
        image_features = np.concatenate(features)[np.array(indices) - first]
        text_features = self.encode_texts(params, texts)
        if not (np.isfinite(image_features).all() and np.isfinite(text_features).all()):
            raise NonFiniteFeatures("the features hold NaN or inf")
        return SplitFeatures(
            images=image_features,
            texts=text_features,
            text_to_image=np.repeat(np.arange(len(rows)), [len(of_image) for of_image in of_images]),
            labels=np.array(labels, np.int32),
            indices=np.array(indices),
            keys=keys,
            captions=texts,
            dropped=dropped,
            dropped_captions=dropped_captions,
        )

    def encode_texts(self, params: PyTree, texts: Sequence[str]) -> Float32[np.ndarray, "m D"]:
        """Features of texts, the same on every process; each process tokenizes its rows."""
        local = self.batch_size // jax.process_count()
        first = jax.process_index() * local
        length = self.preprocessor.context_length
        features = [np.zeros((0, self._embed_dim), np.float32)]
        with Progress("captions encoded", len(texts)) as progress:
            for start in range(0, len(texts), self.batch_size):
                batch = texts[start : start + self.batch_size]
                tokens = np.zeros((local, length), np.int32)
                mine = batch[first : first + local]
                tokens[: len(mine)] = self.preprocessor.tokenizer(mine, length)
                encoded = self._encode_text(params, global_array(self._sharding, tokens))
                features.append(jax.device_get(encoded)[: len(batch)])
                progress.update(len(batch))
        return np.concatenate(features)

    def class_features(self, params: PyTree, prompts: Prompts) -> Float32[np.ndarray, "C D"]:
        """One vector for each class; see `class_embeddings`."""

        def encode(tokens: Int32[np.ndarray, "B L"]) -> Float32[np.ndarray, "B D"]:
            progress.update(self.batch_size)
            encoded: np.ndarray = jax.device_get(self._encode_text(params, jax.device_put(tokens, self._sharding)))
            return encoded

        with Progress("prompts encoded", len(prompts.names) * len(prompts.templates)) as progress:
            return class_embeddings(
                encode,
                self.preprocessor.tokenizer,
                prompts.names,
                prompts.templates,
                self.preprocessor.context_length,
                batch_size=self.batch_size,
            )

    def retrieval(self, features: SplitFeatures) -> dict[str, float]:
        """`image_to_text/R@1` and so on; see `retrieval_metrics`."""
        return retrieval_metrics(features.images, features.texts, features.text_to_image, mesh=self.mesh)

    def zero_shot(self, params: PyTree, features: SplitFeatures, prompts: Prompts) -> dict[str, float]:
        """`top1` and so on, of the examples that have a label; see `zero_shot_metrics`."""
        labelled = features.labelled
        if not labelled.any():
            raise ValueError("not one usable example has a label")
        classes = self.class_features(params, prompts)
        return zero_shot_metrics(features.images[labelled], features.labels[labelled], classes, mesh=self.mesh)


def example_queries(
    source: ExampleSource, features: SplitFeatures, preprocessor: Preprocessor, count: int = 8
) -> tuple[list[str], UInt8[np.ndarray, "q k H W 3"], Bool[np.ndarray, "q k"]]:
    """Some captions of a split, spread evenly, with the five images that the model finds for each.

    Returns:
        the q captions, different ones where possible; their k = min(5, n) images, best first; and which images are
        right: those that have that very caption.
    """
    rows = list({caption: row for row, caption in enumerate(features.captions)}.values())
    rows = [rows[i] for i in np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)]
    queries = [features.captions[row] for row in rows]
    found = top_images(features.texts[rows], features.images).tolist()
    images = [[preprocessor.eval_image(source[int(features.indices[i])]) for i in row] for row in found]
    captioned = set(zip(features.captions, features.text_to_image.tolist(), strict=True))
    right = [[(query, i) in captioned for i in row] for query, row in zip(queries, found, strict=True)]
    return queries, np.array(images), np.array(right)
