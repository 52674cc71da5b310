"""What the losses refuse, in one line with the cure."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import config as jaxtyping_config

from disco_jax.losses import (
    contrastive_loss,
    dense_contrastive_loss,
    dense_sigmoid_loss,
    local_contrastive_loss,
    sigmoid_loss,
)
from disco_jax.mesh import make_mesh

DATA = make_mesh([("data", 8)])
GRID = make_mesh([("a", 2), ("b", 4)])
I8, T8 = np.ones((8, 4), np.float32), np.ones((8, 4), np.float32)
SCALE = np.float32(14.3)


@pytest.fixture(autouse=True)
def untyped():
    """Without the tests' run-time signatures, as users call it."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


def refuses(message, call, *args, **settings):
    with pytest.raises(ValueError, match=message) as error:
        call(*args, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "images, texts, scale, message",
    [
        (I8, T8[:4], SCALE, r"one shape \(B, D\): got float32\[8, 4\] and float32\[4, 4\]"),
        (I8.tolist(), T8.tolist(), SCALE, r"arrays of one shape \(B, D\): got list and list"),
        (None, T8, SCALE, r"arrays of one shape \(B, D\): got NoneType and float32\[8, 4\]"),
        (I8[0], T8[0], SCALE, r"one shape \(B, D\): got float32\[4\] and"),
        (I8[:0], T8[:0], SCALE, r"got float32\[0, 4\] and"),
        (I8.astype(np.int32), T8.astype(np.int32), SCALE, r"one floating-point type, .*: got int32\[8, 4\] and"),
        (I8.astype(np.float16), T8, SCALE, r"one floating-point type, .*: got float16\[8, 4\] and float32\[8, 4\]"),
        (I8.astype(jnp.float8_e4m3fn), T8.astype(jnp.float8_e4m3fn), SCALE, "bfloat16, float16, float32 or float64"),
        (I8, T8, np.ones(1, np.float32), r"logit_scale must be a real scalar: got float32\[1\]"),
        (I8, T8, np.complex64(14), r"logit_scale must be a real scalar: got complex64\[\]"),
        (I8, T8, np.bool_(1), r"logit_scale must be a real scalar: got bool\[\]"),
        (I8, T8, None, "logit_scale must be a real scalar: got NoneType"),
    ],
)
def test_features_and_scale(images, texts, scale, message):
    for loss, others, settings in (
        (contrastive_loss, (), {"mesh": DATA}),
        (dense_contrastive_loss, (), {}),
        (sigmoid_loss, (SCALE,), {"mesh": DATA}),
        (dense_sigmoid_loss, (SCALE,), {}),
    ):
        refuses(message, loss, images, texts, scale, *others, **settings)
    refuses("logit_bias must be a real scalar", sigmoid_loss, I8, T8, SCALE, "-10", mesh=DATA)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"method": "walk"}, "loss method 'walk' is unknown: use one of chunked, block, disco"),
        ({"chunk": 0}, "chunk=0 must be a whole number of at least 1 column"),
        ({"chunk": 1.5}, "chunk=1.5 must be a whole number"),
        ({"chunk": jnp.int32(8)}, "must be a whole number"),
        ({"label_smoothing": jnp.float32(0.1)}, r"must be a number in \[0, 1\], and no array"),
        ({"chunk": 8, "method": "block"}, "chunk=8 is for the 'chunked' method: leave it out for 'block'"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5 must be a number in \[0, 1\]"),
        ({"label_smoothing": float("nan")}, "label_smoothing=nan must be a number in"),
        ({"labels": np.ones(4, int)}, r"an integer for each of the 8 pairs: got int64\[4\]"),
        ({"labels": np.ones(8)}, r"an integer for each of the 8 pairs: got float64\[8\]"),
        ({"labels": [0] * 8}, "an integer for each of the 8 pairs: got list"),
        ({"labels": np.arange(8) << 32}, r"labels of int64 do not fit into 32 bits: number them with np.unique"),
        ({"rows": "model"}, r"name axes \['model'\] that the mesh does not have: it has \('data',\)"),
        ({"cols": "model"}, r"name axes \['model'\] that the mesh does not have"),
        ({"rows": ()}, "must name at least one axis of the mesh"),
        ({"rows": None}, "must be names of mesh axes, or tuples of them"),
        ({"cols": 3}, "must be names of mesh axes, or tuples of them"),
        ({"mesh": None}, "mesh must be a jax.sharding.Mesh, as disco_jax.mesh.make_mesh gives: got NoneType"),
        ({"rows": ("data", "data")}, "must be different mesh axes"),
        ({"cols": "data"}, r"rows='data' and cols='data' must be different mesh axes"),
        ({"method": "disco", "mesh": GRID, "rows": "a", "cols": "b"}, r"divides its similarities over rows alone"),
        ({"method": "disco", "return_metrics": True}, "has no labels and no metrics"),
        ({"method": "disco", "labels": np.arange(8)}, "has no labels and no metrics"),
        ({"method": "disco", "label_smoothing": 0.1}, "the 'disco' loss has no label_smoothing: use 'chunked'"),
    ],
)
def test_settings(settings, message):
    refuses(message, contrastive_loss, I8, T8, SCALE, **{"mesh": DATA, **settings})


def test_batch():
    message = r"a batch of 6 does not divide over the 8 devices of .*: use a multiple of 8"
    refuses(message, contrastive_loss, I8[:6], T8[:6], SCALE, mesh=DATA)
    refuses(message, sigmoid_loss, I8[:6], T8[:6], SCALE, SCALE, mesh=GRID, rows="a", cols="b")


PER_ROW, SHARED = PartitionSpec("data"), PartitionSpec()


@pytest.mark.parametrize(
    "specs, options, message",
    [
        ((SHARED, PER_ROW, SHARED), {}, r"image_features must be each device's own, but are the same along \['data'\]"),
        ((PER_ROW, SHARED, SHARED), {}, "text_features must be each device's own"),
        ((PER_ROW, PER_ROW, SHARED), {"check_vma": False}, "leave jax.shard_map's check_vma on"),
        ((PER_ROW, PER_ROW, PER_ROW), {}, "logit_scale must be the same on all devices"),
    ],
)
def test_inside_a_shard_map(specs, options, message):
    """Where jax's types tell that gradients would be wrong."""

    def local(images, texts, scale):
        return local_contrastive_loss(images, texts, scale.reshape(-1)[0], rows="data")

    mapped = jax.shard_map(local, mesh=DATA, in_specs=specs, out_specs=SHARED, **options)
    images = I8 if specs[0] == PER_ROW else I8[:1]
    texts = T8 if specs[1] == PER_ROW else T8[:1]
    refuses(message, mapped, images, texts, np.full(8, SCALE))


def test_whole_arrays_inside_a_shard_map():
    def local(images, texts):
        return contrastive_loss(images, texts, SCALE, mesh=DATA)

    mapped = jax.shard_map(local, mesh=DATA, in_specs=(PER_ROW, PER_ROW), out_specs=SHARED)
    refuses("inside a jax.shard_map use the function with local_ in its name", mapped, I8, T8)


def test_outside_a_shard_map():
    refuses(re.escape("axis 'data' is not bound"), local_contrastive_loss, jnp.asarray(I8), T8, SCALE, rows="data")
