"""Exact ranks of each query's own candidates among all, with the candidates divided over the devices of a mesh.

Scores are cosines, so features need not be normalised. Equal features must score equal wherever they lie, and a sum
in floating point depends on its order: on the chunk, the number of devices, the kernel. So every normalised feature is
split into two whole numbers, of 2^-26 and of 2^-44. Products of these and any partial sum of them stay below 2^53 and
are exact in float64 in every order (Ozaki et al. 2012 split matrices so). What is left out is near 2^-45; the sum is
rounded to 2^-24, float32's step below 1, so that equal cosines of different features tie too.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Float64, Int, Shaped

from disco_jax.mesh import batch_sharding, make_mesh, replicated
from disco_jax.progress import Progress

CHUNK_ROWS = 256
_HIGH, _LOW, _STEPS = 2.0**26, 2.0**18, 2.0**24
_MAX_DIM = 2**16  # the partial sums of more columns could pass 2^53


@dataclass(frozen=True)
class Ranks:
    """Where each query's best own candidate stands; int64 [q].

    better: candidates that score higher. own_tied: own candidates with that very score, at least 1. others_tied: other
    candidates with it. What is drawn from them are means over all orders of the tied candidates.
    """

    better: Int[np.ndarray, " q"]
    others_tied: Int[np.ndarray, " q"]
    own_tied: Int[np.ndarray, " q"]

    def hit_probability(self, k: int) -> Float64[np.ndarray, " q"]:
        """Probability that an own candidate is among the first `k`."""
        places = k - self.better  # places of the first k left to the tied candidates
        miss = np.ones(len(self.better))
        for i in range(k):  # the i-th of them goes to another one, given that all before did
            goes_to_other = np.maximum(self.others_tied - i, 0) / np.maximum(self.others_tied + self.own_tied - i, 1)
            miss = np.where(i < places, miss * goes_to_other, miss)
        return 1.0 - miss

    def expected_rank(self) -> Float64[np.ndarray, " q"]:
        """Mean rank of the first own candidate; the best is 1."""
        return self.better + 1 + self.others_tied / (self.own_tied + 1)


def ranks(
    queries: Float32[np.ndarray, "q D"],
    query_ids: Int[np.ndarray, " q"],
    candidates: Float32[np.ndarray, "c D"],
    candidate_ids: Int[np.ndarray, " c"],
    *,
    mesh: Mesh | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Ranks:
    """Ranks of the candidates with each query's id; the same integers whatever the mesh and the chunk.

    Of several processes each calls it with the same arrays, and gets the same result.

    Args:
        queries, candidates: features, of any length; zeros score 0 with all.
        query_ids: each must be among `candidate_ids`.
        mesh: the candidates are divided over all its axes; default: all devices in a line.
        chunk_rows: queries scored at once; memory on each of N devices grows with `chunk_rows * c / N`, not with q.

    Raises:
        ValueError: no queries or no candidates, features of unequal or more than 2^16 columns or not finite, ids of
            another number than the rows, a query without a candidate, `chunk_rows` below 1.
    """
    _check(queries, query_ids, candidates, candidate_ids, chunk_rows)
    mesh = make_mesh([("devices", -1)]) if mesh is None else mesh
    divided, whole = batch_sharding(mesh), replicated(mesh)
    parts = []
    with jax.enable_x64(True), Progress("queries ranked", len(queries)) as progress:
        # Padding is no candidate, but its id may be one's: a mask tells it.
        size = -(-len(candidates) // mesh.size) * mesh.size
        padded = (_padded(x, size) for x in (*_split(candidates), candidate_ids, np.ones(len(candidates), bool)))
        of_candidates = [_to_devices(divided, x) for x in padded]
        for start in range(0, len(queries), chunk_rows):
            rows = slice(start, start + chunk_rows)
            padded = (_padded(x, chunk_rows) for x in (*_split(queries[rows]), query_ids[rows]))
            of_queries = [_to_devices(whole, x) for x in padded]
            # Fetched before the next chunk goes out: no more than one waits in the devices' memory.
            parts.append(jax.device_get(_count(mesh, *of_queries, *of_candidates)))
            progress.update(chunk_rows)
    return Ranks(*(np.concatenate(part, dtype=np.int64)[: len(queries)] for part in zip(*parts, strict=True)))


def normalized(features: Shaped[np.ndarray, "*rows D"]) -> Float64[np.ndarray, "*rows D"]:
    """Rows divided by their L2 norm, in float64; a row of zeros stays zero."""
    features = features.astype(np.float64)
    return features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def check_finite(name: str, features: Float32[np.ndarray, "n D"]) -> None:
    """Raise a ValueError if a feature of the `name` rows is NaN or infinite."""
    if not np.isfinite(features).all():
        raise ValueError(f"{name} features hold NaN or infinity; the model has diverged")


def _check(
    queries: np.ndarray, query_ids: np.ndarray, candidates: np.ndarray, candidate_ids: np.ndarray, chunk_rows: int
) -> None:
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1: got {chunk_rows}")
    for name, features, ids in (("query", queries, query_ids), ("candidate", candidates, candidate_ids)):
        if not len(features):
            raise ValueError(f"there are no {name} features; there is nothing to evaluate")
        if len(ids) != len(features):
            raise ValueError(f"{len(ids)} {name} ids for {len(features)} rows of {name} features")
        check_finite(name, features)
    if queries.shape[1] != candidates.shape[1]:
        raise ValueError(f"query features have {queries.shape[1]} columns, candidate features {candidates.shape[1]}")
    if queries.shape[1] > _MAX_DIM:
        raise ValueError(f"features of {queries.shape[1]} columns cannot be scored exactly: at most {_MAX_DIM}")
    without = query_ids[~np.isin(query_ids, candidate_ids)]
    if len(without):
        raise ValueError(f"{len(without)} queries have no candidate of their own (first: id {without[0]})")


def _padded(rows: Shaped[np.ndarray, "n ..."], size: int) -> Shaped[np.ndarray, "{size} ..."]:
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


def _to_devices(sharding: NamedSharding, rows: Shaped[np.ndarray, "n ..."]) -> Shaped[Array, "n ..."]:
    with jax.transfer_guard("allow"):  # of several processes jax takes this for an implicit transfer
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def _split(
    features: Float32[np.ndarray, "n D"],
) -> tuple[Float64[np.ndarray, "n D"], Float64[np.ndarray, "n D"]]:
    """Both whole numbers of every normalised feature; on the host, where a row's norm depends on that row only."""
    scaled = normalized(features) * _HIGH
    high = np.round(scaled)
    return high, np.round((scaled - high) * _LOW)


@partial(jax.jit, static_argnames="mesh")
def _count(
    mesh: Mesh,
    high: Float[Array, "r D"],
    low: Float[Array, "r D"],
    query_ids: Int[Array, " r"],
    candidates_high: Float[Array, "c D"],
    candidates_low: Float[Array, "c D"],
    candidate_ids: Int[Array, " c"],
    valid: Bool[Array, " c"],
) -> tuple[Int[Array, " r"], Int[Array, " r"], Int[Array, " r"]]:
    """The counts of `Ranks` for one chunk of queries."""
    axes = mesh.axis_names

    def on_device(
        queries: tuple[Array, Array], query_ids: Array, candidates: tuple[Array, Array], ids: Array, valid: Array
    ) -> tuple[Array, Array, Array]:
        rounded = jnp.round(_cosines(*queries, *candidates) * _STEPS).astype(jnp.float32)
        scores = jnp.where(valid, rounded, -jnp.inf)
        own = query_ids[:, None] == ids
        best_own = jax.lax.pmax(jnp.where(own, scores, -jnp.inf).max(axis=1, keepdims=True), axes)
        tied = scores == best_own
        counts = (scores > best_own, tied & ~own, tied & own)
        better, others_tied, own_tied = (jax.lax.psum(x.sum(axis=1, dtype=jnp.int32), axes) for x in counts)
        return better, others_tied, own_tied

    divided, whole = PartitionSpec(axes), PartitionSpec()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(whole, whole, divided, divided, divided), out_specs=whole)
    return mapped((high, low), query_ids, (candidates_high, candidates_low), candidate_ids, valid)


def _cosines(
    high: Float[Array, "r D"],
    low: Float[Array, "r D"],
    candidates_high: Float[Array, "c D"],
    candidates_low: Float[Array, "c D"],
) -> Float[Array, "r c"]:
    cross = high @ candidates_low.T + low @ candidates_high.T
    return (high @ candidates_high.T + cross / _LOW) / _HIGH**2
