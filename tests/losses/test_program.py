"""What the compiled losses hold and send: the promises of docs/loss.md, read from the programs."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from reference import rectangle

from disco_jax.hlo import ARRAY, read_program
from disco_jax.losses import contrastive_loss, sigmoid_loss
from docs.draw_loss import received, received_disco, received_sigmoid

B, D, N = 256, 16, 8
b = B // N


def compiled(mesh, loss=contrastive_loss, scalars=1, dtype=jnp.bfloat16, **settings):
    """Text of the compiled value and gradient, with the batch on its devices as a training step has it."""
    division = rectangle(mesh)
    features = jax.ShapeDtypeStruct(
        (B, D), dtype, sharding=NamedSharding(division["mesh"], PartitionSpec(("rows", "cols")))
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(division["mesh"], PartitionSpec()))
    args = features, features, *[scalar] * scalars
    step = jax.value_and_grad(lambda *args: loss(*args, **division, **settings), argnums=tuple(range(len(args))))
    return jax.jit(step).lower(*args).compile().as_text()


def largest_array(text):
    """Elements of the largest array that the program names."""
    return max(math.prod(int(dim) for dim in dims.split(",") if dim) for _, dims in ARRAY.findall(text))


def products(text):
    """Matrix products in units of b B D multiply-adds."""
    return read_program(text).multiply_adds / (b * B * D)


@pytest.mark.parametrize("mesh", ["8", "2x4", "4x2"])
def test_chunked_never_holds_the_block(mesh):
    r, c = rectangle(mesh)["mesh"].devices.shape
    chunk = 4 * r
    largest = largest_array(compiled(mesh, chunk=chunk))
    assert largest <= b * c * max(chunk, D)  # a tile, or the images of a row of devices
    assert largest <= b * B / 4
    assert largest_array(compiled(mesh, method="block")) == b * B  # the test can fail


def test_disco_holds_whole_blocks():
    assert largest_array(compiled("8", method="disco")) == b * B


@pytest.mark.parametrize(
    "settings, units",
    [({"chunk": 32}, 4), ({"chunk": 60}, 4), ({"method": "block"}, 3), ({"method": "disco"}, 6)],
    ids=["chunk=32", "chunk=60", "block", "disco"],
)
def test_products(settings, units):
    assert products(compiled("8", **settings)) == units
    if settings.get("method") != "disco":
        assert products(compiled("2x4", **settings)) == units


def test_products_of_sigmoid():
    """One pass: loss and gradients of a tile while it is there."""
    assert products(compiled("8", sigmoid_loss, scalars=2, chunk=32)) == 3
    assert products(compiled("2x4", sigmoid_loss, scalars=2, chunk=32)) == 3


SCALAR = 2 * 4 * (N - 1) // N  # bytes of the all-reduce of a float32


@pytest.mark.parametrize("mesh", ["8", "2x4", "4x2"])
@pytest.mark.parametrize("settings", [{"chunk": 32}, {"chunk": 8}, {"method": "block"}], ids=str)
def test_what_travels(settings, mesh):
    """Exactly what docs/loss.md says: one collective more, or one that sends more, fails here."""
    r, c = rectangle(mesh)["mesh"].devices.shape
    expected = received(B, D, r, c, width=4, walks=1 if "method" in settings else 2)
    program = read_program(compiled(mesh, dtype=jnp.float32, **settings))
    assert {x.kind for x in program.collectives} == {"all-gather", "all-to-all", "reduce-scatter", "all-reduce"}
    assert program.bytes_moved == expected + 2 * SCALAR  # the loss, and the gradient of the scale


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_what_travels_for_sigmoid(mesh):
    """One walk, and no statistics."""
    r, c = rectangle(mesh)["mesh"].devices.shape
    program = read_program(compiled(mesh, sigmoid_loss, scalars=2, dtype=jnp.float32, chunk=32))
    assert program.bytes_moved == received_sigmoid(B, D, r, c, width=4) + 3 * SCALAR


def test_what_travels_for_disco():
    """Both features gathered; of both the gradients of all B summed, which each device sends and receives."""
    program = read_program(compiled("8", method="disco", dtype=jnp.float32))
    assert {x.kind for x in program.collectives} == {"all-gather", "all-reduce"}
    expected = received_disco(B, D, N, width=4)
    assert program.bytes_moved == expected + 2 * SCALAR  # the loss, and the gradient of the scale
