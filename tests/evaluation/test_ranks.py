"""Ranks against exact rational arithmetic, on meshes and chunks that divide nothing."""

import itertools
import socket
import subprocess
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config as jaxtyping_config

from disco_jax.evaluation import ranks as ranks_module
from disco_jax.evaluation.ranks import Ranks, normalized, ranks
from disco_jax.mesh import batch_sharding, make_mesh, replicated

MESHES = [make_mesh(axes) for axes in ([("x", 1)], [("x", 2)], [("x", 8)], [("x", 4), ("y", 2)])]


def exact_counts(queries, query_ids, candidates, candidate_ids):
    """better, others_tied, own_tied of every query, of cosines that are compared without rounding."""

    def compared(a, b):  # sign and square of the cosine
        a, b = [Fraction(float(x)) for x in a], [Fraction(float(x)) for x in b]
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        lengths = sum(x * x for x in a) * sum(x * x for x in b)
        return dot * abs(dot) / lengths if lengths else Fraction(0)

    known = {}
    counts = []
    for query, own_id in zip(queries, query_ids, strict=True):
        scores = []
        for candidate in candidates:
            pair = query.tobytes(), candidate.tobytes()
            if pair not in known:
                known[pair] = compared(query, candidate)
            scores.append(known[pair])
        best = max(score for score, id_ in zip(scores, candidate_ids, strict=True) if id_ == own_id)
        tied = [id_ == own_id for score, id_ in zip(scores, candidate_ids, strict=True) if score == best]
        counts.append((sum(score > best for score in scores), tied.count(False), tied.count(True)))
    return np.array(counts).T


def arrays(found: Ranks):
    return np.stack([found.better, found.others_tied, found.own_tied])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("chunk_rows", [5, 64, 256])
def test_ranks_are_exact_on_any_mesh_and_in_any_chunks(mesh, chunk_rows):
    rng = np.random.default_rng(0)
    distinct = rng.normal(size=(9, 7)).astype(np.float32)
    queries, candidates = distinct[rng.integers(0, 9, 67)], distinct[rng.integers(0, 9, 101)]
    candidate_ids = rng.integers(-20, 20, 101) * 10**11
    query_ids = rng.choice(candidate_ids, 67)
    with jax.transfer_guard("disallow"):  # as the training loop has it
        found = arrays(ranks(queries, query_ids, candidates, candidate_ids, mesh=mesh, chunk_rows=chunk_rows))
    expected = exact_counts(queries, query_ids, candidates, candidate_ids)
    assert (expected.max(axis=1) > [50, 3, 1]).all()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int64 and not jax.config.jax_enable_x64


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_few_candidates_and_many_devices(data):
    c = data.draw(st.sampled_from([1, 3, 11]))
    q = data.draw(st.integers(1, 9))
    vector = st.tuples(*[st.integers(-2, 2)] * 3)
    queries = np.array(data.draw(st.lists(vector, min_size=q, max_size=q)), np.float32)
    candidates = np.array(data.draw(st.lists(vector, min_size=c, max_size=c)), np.float32)
    candidate_ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=c, max_size=c)))
    query_ids = np.array(data.draw(st.lists(st.sampled_from(candidate_ids.tolist()), min_size=q, max_size=q)))
    mesh, chunk_rows = data.draw(st.sampled_from(MESHES[:3])), data.draw(st.sampled_from([1, 4]))
    found = ranks(queries, query_ids, candidates, candidate_ids, mesh=mesh, chunk_rows=chunk_rows)
    np.testing.assert_array_equal(arrays(found), exact_counts(queries, query_ids, candidates, candidate_ids))


def test_padding_never_counts_where_all_scores_are_below_its_own():
    queries, candidates = np.ones((2, 3), np.float32), -np.ones((3, 3), np.float32)
    found = ranks(queries, np.array([0, 5]), candidates, np.array([0, 0, 5]), mesh=MESHES[2])
    assert arrays(found).tolist() == [[0, 0], [1, 2], [2, 1]]


@pytest.mark.parametrize("better, others, own", [*itertools.product([0, 1, 4], range(4), range(1, 4))])
def test_ties_are_means_over_all_their_orders(better, others, own):
    orders = list(itertools.permutations([False] * others + [True] * own))
    first = np.array([better + 1 + order.index(True) for order in orders])
    one = Ranks(*(np.array([x]) for x in (better, others, own)))
    assert one.expected_rank() == pytest.approx([first.mean()])
    for k in (1, 2, 5, 50):
        assert one.hit_probability(k) == pytest.approx([(first <= k).mean()])


def test_scores_are_the_same_bits_in_any_order_of_the_sum():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(40, 1023)).astype(np.float32)
    units, parts = normalized(features), ranks_module._split(features)
    with jax.enable_x64(True):
        cosines = jax.jit(ranks_module._cosines)
        scores = np.asarray(cosines(*parts, *parts))
        for _ in range(3):
            order = rng.permutation(1023)
            shuffled = [part[:, order] for part in parts]
            np.testing.assert_array_equal(cosines(*(part[:7] for part in shuffled), *shuffled), scores[:7])
    assert not np.array_equal(units[:, order] @ units[:, order].T, units @ units.T)  # as plain sums are not
    np.testing.assert_allclose(scores, units @ units.T, rtol=0, atol=2.0**-43)


def test_one_program_whose_memory_divides_over_the_devices_serves_any_number_of_queries():
    rng = np.random.default_rng(2)
    candidates, ids = rng.normal(size=(1000, 6)).astype(np.float32), np.arange(1000)
    before = ranks_module._count._cache_size()
    for q in (1, 31, 500):
        ranks(candidates[:q], ids[:q], candidates, ids, mesh=MESHES[2], chunk_rows=32)
    assert ranks_module._count._cache_size() == before + 1

    def temporaries(mesh):  # bytes on each device
        with jax.enable_x64(True):
            arguments = [
                jax.ShapeDtypeStruct((rows, *tail), kind, sharding=sharding)
                for rows, sharding in ((32, replicated(mesh)), (80_000, batch_sharding(mesh)))
                for tail, kind in (((6,), "float64"), ((6,), "float64"), ((), "int64"), ((), "bool"))
            ]
            compiled = ranks_module._count.lower(mesh, *arguments[:3], *arguments[4:]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = temporaries(MESHES[0])
    assert whole <= 40 * 32 * 80_000
    assert temporaries(MESHES[2]) < whole / 7


FEATURES, IDS = np.ones((3, 2), np.float32), np.arange(3)


@pytest.mark.parametrize(
    "queries, query_ids, candidates, candidate_ids, settings, message",
    [
        (FEATURES, IDS, FEATURES, IDS, {"chunk_rows": 0}, "chunk_rows must be at least 1: got 0"),
        (FEATURES[:0], IDS[:0], FEATURES, IDS, {}, "no query features"),
        (FEATURES, IDS, FEATURES[:0], IDS[:0], {}, "no candidate features"),
        (FEATURES, IDS, FEATURES, IDS[:2], {}, "2 candidate ids for 3 rows of candidate features"),
        (FEATURES, IDS, FEATURES[:, :1], IDS, {}, "query features have 2 columns, candidate features 1"),
        (FEATURES * np.float32(np.nan), IDS, FEATURES, IDS, {}, "query features hold NaN or infinity"),
        (FEATURES, IDS + 2, FEATURES, IDS, {}, r"2 queries have no candidate of their own \(first: id 3\)"),
        (
            np.ones((1, 2**16 + 1), np.float32),
            IDS[:1],
            np.ones((1, 2**16 + 1), np.float32),
            IDS[:1],
            {},
            "at most 65536",
        ),
    ],
)
def test_what_cannot_be_ranked_is_refused(queries, query_ids, candidates, candidate_ids, settings, message):
    jaxtyping_config.update("jaxtyping_disable", True)  # as users call it
    try:
        with pytest.raises(ValueError, match=message) as error:
            ranks(queries, query_ids, candidates, candidate_ids, **settings)
        assert "\n" not in str(error.value)
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)


PROCESS = """
import sys
import jax, numpy as np
from disco_jax.evaluation.ranks import ranks
from disco_jax.mesh import initialize_processes, simulate_cpu_devices

simulate_cpu_devices(2)
initialize_processes(sys.argv[1], 2, int(sys.argv[2]))
rng = np.random.default_rng(3)
queries, candidates = (rng.integers(-2, 3, (n, 3)).astype(np.float32) for n in (13, 7))
with jax.transfer_guard("disallow"):
    found = ranks(queries, np.arange(13) % 7, candidates, np.arange(7), chunk_rows=5)
assert len(jax.devices()) == 4
print([x.tolist() for x in (found.better, found.others_tied, found.own_tied)])
"""


def test_two_processes_get_the_same():
    rng = np.random.default_rng(3)
    queries, candidates = (rng.integers(-2, 3, (n, 3)).astype(np.float32) for n in (13, 7))
    expected = exact_counts(queries, np.arange(13) % 7, candidates, np.arange(7)).tolist()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen([sys.executable, "-c", PROCESS, address, str(index)], stdout=-1, stderr=-1, text=True)
        for index in range(2)
    ]
    try:
        for process in started:
            out, err = process.communicate()
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == str(expected)
    finally:
        for process in started:
            process.kill()
