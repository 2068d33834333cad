"""Recorded loads and the balancedness made of them, against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_placements import random_owners

from dsv4jax.balance.metrics import balancedness, uniform_balancedness, uniform_picks
from dsv4jax.balance.record import clear_record, empty_record, record_load, recorded_loads, set_owners
from dsv4jax.balance.solver import rank_loads

LAYERS, EXPERTS, RANKS, K = 2, 10, 4, 3


def record_all(record, loads):
    for load in loads:
        record = record_load(record, jnp.asarray(load), ranks=RANKS)
    return record


@pytest.mark.parametrize("steps", [0, 1, 6, 7, 16])
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_totals_rings_and_busiest_ranks(steps, rows):
    rng = np.random.default_rng([steps, rows])
    owners = np.stack([random_owners(rng, EXPERTS, RANKS, 4) for _ in range(LAYERS)])
    loads = rng.integers(0, 50, (steps, LAYERS, EXPERTS)).astype(np.int32)
    with_idle = [step for load in loads for step in (load, np.zeros_like(load))]
    record = record_all(empty_record(owners, EXPERTS, 7, rows), with_idle)
    assert int(record.steps) == steps
    np.testing.assert_array_equal(record.totals, loads.sum(0))
    kept = recorded_loads(record)
    if rows == 0:
        np.testing.assert_array_equal(kept, loads.sum(0, keepdims=True)[: min(steps, 1)])
    else:
        stride = math.ceil(7 / rows)
        newest = loads[::stride][-rows:]  # in the order of the ring
        assert sorted(map(bytes, kept)) == sorted(map(bytes, np.ascontiguousarray(newest)))
    at = np.arange(max(0, steps - 7), steps)
    np.testing.assert_array_equal(np.asarray(record.routed)[at % 7], loads[at].sum(-1))
    for layer in range(LAYERS):
        busiest = rank_loads(loads[at, layer], owners[layer], RANKS).max(1) if steps else np.zeros(0)
        np.testing.assert_allclose(np.asarray(record.busiest)[at % 7, layer], busiest, rtol=1e-6)
    found = balancedness(record, ranks=RANKS, experts_per_token=K)
    assert found.steps == min(steps, 7)
    if steps:
        ratios = [rank_loads(loads[at, i], owners[i], RANKS) for i in range(LAYERS)]
        assert found.measured == pytest.approx(np.mean([r.mean(1) / r.max(1) for r in ratios]), rel=1e-5)
    else:
        assert math.isnan(found.measured) and math.isnan(found.uniform)


def test_a_cleared_record_is_like_a_new_one():
    rng = np.random.default_rng(0)
    owners = np.stack([random_owners(rng, EXPERTS, RANKS, 4) for _ in range(LAYERS)])
    old, new = rng.integers(1, 50, (2, 9, LAYERS, EXPERTS)).astype(np.int32)
    used = clear_record(record_all(empty_record(owners, EXPERTS, 7, 3), old))
    fresh = record_all(empty_record(owners, EXPERTS, 7, 3), new[:4])
    used = record_all(used, new[:4])
    np.testing.assert_array_equal(recorded_loads(used), recorded_loads(fresh))
    np.testing.assert_array_equal(used.totals, fresh.totals)
    results = [balancedness(record, ranks=RANKS, experts_per_token=K) for record in (used, fresh)]
    assert results[0] == results[1] and results[0].steps == 4


def test_after_a_change_over_steps_are_judged_by_the_new_owners():
    load = np.tile(np.int32([9, 9, 1, 1]), (2, 1))
    record = record_load(empty_record(np.tile(np.arange(4, dtype=np.int32), (2, 1)), 4, 5, 0), load, ranks=2)
    record = record_load(set_owners(record, np.int32(1), np.int32([0, 2, 1, 3])), load, ranks=2)
    np.testing.assert_array_equal(np.asarray(record.busiest)[:2], [[18, 18], [18, 10]])


def test_layers_without_tokens_are_left_out_and_bytes_are_as_stated():
    owners = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    record = empty_record(owners, EXPERTS, 5, 2)
    load = np.stack([np.full(EXPERTS, 6), np.zeros(EXPERTS)]).astype(np.int32)
    record = record_load(record, jnp.asarray(load), ranks=5)
    assert balancedness(record, ranks=5, experts_per_token=2).measured == 1
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(record))
    assert nbytes == 4 * (2 + 1) * LAYERS * EXPERTS + 8 * 5 * LAYERS + 4 * LAYERS * EXPERTS + 4


@pytest.mark.parametrize("tokens, k, experts, ranks", [(1, 2, 8, 4), (11, 2, 8, 4), (700, 3, 20, 8), (90, 5, 6, 4)])
def test_uniform_control_against_another_way_to_draw(tokens, k, experts, ranks):
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(400):
        picks = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k]
        load = np.bincount(picks.reshape(-1) * ranks // experts, minlength=ranks)
        ratios.append(load.mean() / load.max())
    expected = np.mean(ratios)
    assert uniform_balancedness(np.array([tokens]), k, experts, ranks)[0] == pytest.approx(expected, abs=0.02)


def test_uniform_picks_are_distinct_and_all_sets_equally_likely():
    picks = uniform_picks(np.random.default_rng(2), 20000, 3, 6)
    assert (np.diff(picks, axis=0) > 0).all() and picks.min() == 0 and picks.max() == 5
    sets = np.unique(picks, axis=1, return_counts=True)[1]
    assert len(sets) == 20 and sets.min() > 880 and sets.max() < 1120


def test_uniform_control_of_published_batches_and_of_one_rank():
    """72 requests on each of 32 ranks: 6 tokens each in the target, 5 in the draft."""
    assert uniform_balancedness(np.array([72 * 32 * 6]), 6, 384, 32)[0] == pytest.approx(0.96, abs=0.005)
    assert uniform_balancedness(np.array([72 * 32 * 5]), 3, 128, 32)[0] == pytest.approx(0.94, abs=0.005)
    np.testing.assert_array_equal(uniform_balancedness(np.array([1, 3]), 2, 8, 1), 1)
