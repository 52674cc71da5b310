"""Features and pictures of a split with bad examples, of a size that divides by nothing."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from disco_jax.data.loader import Preprocessor
from disco_jax.data.scenes import CLASS_NAMES, Scenes
from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.encoding import Encoder, l2_normalize, make_graphdef
from disco_jax.evaluation.evaluator import Evaluator, NoUsableExample, SplitFeatures, example_queries
from disco_jax.evaluation.prompts import Prompts
from disco_jax.mesh import make_mesh
from disco_jax.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from disco_jax.sharding import divided_dims, shardings

MODEL = CLIPConfig(8, VisionConfig(16, 8, 16, 1, 2, 32), TextConfig(16, 1, 2, 32, context_length=24))
BAD = (0, 4)
GOOD = [1, 2, 3, 5, 6, 7, 8, 9, 10]


class SomeBad:
    def __init__(self, size):
        self.scenes = Scenes("held_out", size)

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        example = self.scenes[index]
        return replace(example, image=b"") if index in BAD else example


@pytest.fixture(scope="module")
def preprocessor():
    return Preprocessor(load_tokenizer(), image_size=16, context_length=24)


MESH_AXES = [("data", 4)]


@pytest.fixture(scope="module")
def params():
    quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    return quickly(lambda: nnx.to_pure_dict(nnx.state(CLIP(MODEL, rngs=nnx.Rngs(0)), nnx.Param)))()


def make_encoder(params, divide=False):
    dims = divided_dims(params, 4, divide)
    return Encoder(MODEL, make_graphdef(MODEL, jnp.float32), dims, ("data",), jnp.dtype("float32"), patch_dropout=0.5)


@pytest.mark.parametrize("divide", [False, True])
def test_features_are_those_of_the_usable_examples_in_order(preprocessor, params, divide):
    mesh = make_mesh(MESH_AXES)
    source = SomeBad(11)
    evaluator = Evaluator(make_encoder(params, divide), mesh, preprocessor, batch_size=4, threads=2)
    whole, params = params, jax.device_put(params, shardings(params, mesh, divide))
    features = evaluator.features(params, source)
    assert features.indices.tolist() == GOOD
    assert features.labels.tolist() == [source[i].label for i in GOOD]
    clip = nnx.merge(make_graphdef(MODEL, jnp.float32), whole)
    images = jnp.asarray(np.stack([preprocessor.eval_image(source[i]) for i in GOOD]))
    tokens = jnp.asarray(np.stack([preprocessor.tokens(source[i]) for i in GOOD]))
    np.testing.assert_allclose(features.images, l2_normalize(clip.encode_image(images)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features.texts, l2_normalize(clip.encode_text(tokens)), rtol=1e-4, atol=1e-5)

    assert features.captions == [source[i].caption for i in GOOD]
    assert features.text_to_image.tolist() == list(range(len(GOOD)))
    assert features.dropped == {"image:empty": 2}

    assert evaluator.features(params, source, size=7).indices.tolist() == GOOD[:5]
    middle = evaluator.features(params, source, first=3, size=4)
    assert middle.indices.tolist() == [3, 5, 6]
    np.testing.assert_allclose(middle.images, features.images[2:5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(middle.texts, features.texts[2:5], rtol=1e-4, atol=1e-5)
    assert evaluator.features(params, source, first=9, size=4).indices.tolist() == [9, 10]
    assert "image_to_text/R@1" in evaluator.retrieval(features)
    assert {"top1", "top5"} <= set(evaluator.zero_shot(params, features, Prompts(CLASS_NAMES, ("a {}",))))


def test_a_split_without_a_usable_example_is_an_error(preprocessor, params):
    evaluator = Evaluator(make_encoder(params), make_mesh(MESH_AXES), preprocessor, batch_size=4, threads=2)
    with pytest.raises(NoUsableExample, match="not one usable example"):
        evaluator.features(params, SomeBad(1))


def split_features(images, texts, text_to_image, captions):
    n = len(images)
    keys = [str(i) for i in range(n)]
    labels = np.full(n, -1, np.int32)
    return SplitFeatures(images, texts, text_to_image, labels, np.arange(n), keys, captions, Counter(), Counter())


def test_queries_show_the_best_images_and_mark_those_with_the_same_caption(preprocessor):
    scenes = Scenes("held_out", 6)
    captions = [scenes[i].caption for i in range(6)]
    assert len(set(captions)) == 6
    # Caption i is closest to image i, then i + 1, ...: features on a circle.
    angles = np.arange(6) / 10
    images = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    features = split_features(images, images, np.arange(6), captions)
    queries, pictures, right = example_queries(scenes, features, preprocessor, count=3)
    assert queries == [captions[0], captions[2], captions[5]]
    assert pictures.shape == (3, 5, 16, 16, 3)
    np.testing.assert_array_equal(pictures[2, 0], preprocessor.eval_image(scenes[5]))
    assert right.tolist() == [[True, False, False, False, False]] * 3


def test_of_an_image_with_several_captions_each_is_right(preprocessor):
    images = np.eye(3, dtype=np.float32)
    texts = images[[0, 1, 0, 2]]  # "c" belongs to image 2, but finds image 0 first
    features = split_features(images, texts, np.array([0, 1, 2, 2]), ["a", "b", "c", "d"])
    queries, _, right = example_queries(Scenes("held_out", 3), features, preprocessor)
    assert queries == ["a", "b", "c", "d"]
    assert right.argmax(1).tolist() == [0, 0, 2, 0] and right.sum() == 4
