"""Inputs, and the comparison with the dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from disco_jax.mesh import make_mesh


def features(B, D=16, dtype=jnp.float64, seed=0):
    """Pairs that resemble each other a little, L2-normalised."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(B, D))
    texts = images + 2 * rng.normal(size=(B, D))
    return tuple(jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype) for x in (images, texts))


def value_and_gradients(loss, *args, cotangent=1.0, **settings):
    """The loss, and its gradients times `cotangent`, which is what the backward rule is given."""

    def weighted(*args):
        value = loss(*args, **settings)
        return cotangent * value, value

    argnums = tuple(range(len(args)))
    gradients, value = jax.jit(jax.grad(weighted, argnums=argnums, has_aux=True))(*args)
    return jax.device_get((value, gradients))


def relative_errors(got, want):
    """Of each array, in the 2-norm; of zeros (one pair has no gradient) the absolute error."""
    pairs = [(np.asarray(g, np.float64), np.asarray(w, np.float64)) for g, w in zip(got, want, strict=True)]
    return [float(np.linalg.norm(g - w) / (np.linalg.norm(w) or 1)) for g, w in pairs]


def assert_equal(loss, dense, args, *, tolerance=1e-12, dense_settings=None, **settings):
    """Value and all gradients of `loss` are those of `dense`, under a cotangent that is not 1."""
    value, gradients = value_and_gradients(loss, *args, cotangent=-2.5, **settings)
    expected_value, expected = value_and_gradients(dense, *args, cotangent=-2.5, **(dense_settings or {}))
    np.testing.assert_allclose(value, expected_value, rtol=tolerance)
    assert max(relative_errors(gradients, expected)) < tolerance


# Name: sizes of the axes "rows" and "cols".
MESHES = {
    "1": (1, 1),
    "2": (2, 1),
    "4": (4, 1),
    "8": (8, 1),
    "2x2": (2, 2),
    "2x4": (2, 4),
    "4x2": (4, 2),
    "1x8": (1, 8),
}


def rectangle(name):
    """A mesh and the settings that divide the loss over it."""
    r, c = MESHES[name]
    return {"mesh": make_mesh([("rows", r), ("cols", c)]), "rows": "rows", "cols": "cols" if "x" in name else None}
