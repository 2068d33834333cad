"""The placement solver: what it promises for any loads, and how good it is on skewed ones."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from expert_placements import random_owners, sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.balance.solver import Solver, mean_busiest, rank_loads
from sharding.placement import check_owners, chosen_slots, initial_owners, placement_from_owners


def skewed_loads(rng, steps, experts, spread=1.3):
    """Tokens per step and expert, popularity log-normal, some experts idle."""
    popularity = rng.lognormal(0, spread, experts) * (rng.random(experts) < 0.9)
    return rng.poisson(100 * popularity * rng.lognormal(0, 0.3, (steps, experts)))


@st.composite
def problems(draw):
    """(solver, loads, owners in force)."""
    experts, ranks, slots_per_rank = draw(sizes())
    nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = skewed_loads(rng, draw(st.sampled_from([1, 2, 7])), experts)
    return Solver(ranks, nodes), loads, random_owners(rng, experts, ranks, slots_per_rank)


@settings(max_examples=150)
@given(problems())
def test_what_any_solution_promises(problem):
    solver, loads, owners = problem
    before = owners.copy(), loads.copy()
    found = solver.solve(loads, owners)
    check_owners(found[None], loads.shape[1], solver.ranks)  # all placed, replicas on distinct ranks, slots respected
    np.testing.assert_array_equal(owners, before[0], "its arguments stay as they are")
    np.testing.assert_array_equal(loads, before[1])
    np.testing.assert_array_equal(found, solver.solve(loads, owners), "deterministic")
    np.testing.assert_array_equal(found, solver.solve(loads, found), "its own solution moves nothing")
    if not np.array_equal(found, owners):
        busiest = mean_busiest(loads, owners, solver.ranks)
        assert mean_busiest(loads, found, solver.ranks) <= busiest * (1 - solver.tolerance)
    for new, old in zip(found.reshape(solver.ranks, -1), owners.reshape(solver.ranks, -1), strict=True):
        stays = np.isin(old, new)
        np.testing.assert_array_equal(new[stays], old[stays], "an expert that stays on a rank stays in its slot")


@pytest.mark.parametrize("loads", [np.full((3, 24), 7), np.zeros((1, 24), int)], ids=["equal", "idle"])
def test_a_good_placement_moves_nothing(loads):
    owners = initial_owners(1, 24, 4, 6)[0]
    np.testing.assert_array_equal(Solver(4).solve(loads, owners), owners)


def test_one_exchange_is_enough_where_one_is_needed():
    loads = np.array([[9, 9, 1, 1, 5, 5, 5, 5]])
    found = Solver(4).solve(loads, initial_owners(1, 8, 4, 2)[0])
    assert np.sum(found != np.arange(8)) == 2
    np.testing.assert_array_equal(rank_loads(loads, found, 4), [[10, 10, 10, 10]])


def test_the_busiest_expert_gets_the_redundant_slots():
    loads = np.array([[800, 1, 1, 1, 1, 1, 1, 1]])
    found = Solver(4).solve(loads, initial_owners(1, 8, 4, 3)[0])
    assert np.sum(found == 0) == 4
    assert rank_loads(loads, found, 4).max() <= 202.5


def test_loads_per_step_part_experts_that_are_busy_together():
    loads = np.array([[10, 10, 0, 0], [0, 0, 10, 10]] * 5)
    owners = initial_owners(1, 4, 2, 2)[0]
    np.testing.assert_array_equal(Solver(2).solve(loads.mean(0, keepdims=True), owners), owners)
    found = Solver(2).solve(loads, owners)
    np.testing.assert_array_equal(rank_loads(loads, found, 2), 10)


@pytest.mark.parametrize("experts, slots_per_rank", [(384, 13), (128, 5)])
def test_skewed_loads_at_32_ranks_become_even(experts, slots_per_rank):
    loads = skewed_loads(np.random.default_rng(0), 1, experts)
    owners = initial_owners(1, experts, 32, slots_per_rank)[0]
    mean = loads.sum() / 32
    assert mean / mean_busiest(loads, owners, 32) < 0.6
    found = Solver(32).solve(loads, owners)
    assert mean / mean_busiest(loads, found, 32) > 0.97
    assert np.sum(found != owners) < len(owners) // 2


def test_loads_are_evened_between_nodes_with_few_experts_crossing():
    loads = skewed_loads(np.random.default_rng(1), 1, 64)
    owners = initial_owners(1, 64, 16, 5)[0]
    crossing = []
    for nodes in (1, 4):
        found = Solver(16, nodes).solve(loads, owners)
        new, old = found.reshape(4, -1), owners.reshape(4, -1)
        crossing.append(sum(len(set(n) - set(o)) for n, o in zip(new.tolist(), old.tolist(), strict=True)))
        by_node = rank_loads(loads, found, 16).reshape(4, 4).sum(1)
        assert by_node.max() < 1.03 * by_node.mean()
    assert crossing[1] < crossing[0]


def test_the_estimate_is_what_the_routing_rule_gives():
    """Exactly, where every expert's tokens are spread evenly over the token numbers, and else within sampling error."""
    rng = np.random.default_rng(2)
    owners = random_owners(rng, 12, 4, 6)
    placement = placement_from_owners(owners[None], 12, 4)
    slots, counts = placement.slots[0], placement.counts[0]
    period = int(np.lcm.reduce(counts))
    even = np.tile(np.array([3, 0, 7, 11]), (5 * period, 1))
    random = rng.permuted(np.tile(np.arange(12), (60000, 1)), axis=1)[:, :4]
    for experts, rtol in ((even, 1e-12), (random, 0.02)):
        chosen = np.asarray(chosen_slots(slots, counts, jnp.asarray(experts), jnp.arange(len(experts))))
        loads = np.bincount(experts.reshape(-1), minlength=12)[None]
        np.testing.assert_allclose(
            np.bincount(chosen.reshape(-1) // 6, minlength=4), rank_loads(loads, owners, 4)[0], rtol=rtol
        )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Solver(6, nodes=4), "nodes = 4: must be positive and divide ranks = 6"),
        (lambda: Solver(6, tolerance=0.0), "tolerance = 0.0: must be above 0"),
        (lambda: Solver(2).solve(np.zeros((0, 4)), np.arange(4)), "loads (0, 4): must be"),
        (lambda: Solver(2).solve(np.array([[1, 2, -1, 4]]), np.arange(4)), "loads (1, 4): must be"),
        (lambda: Solver(2).solve(np.array([[1, 2, np.nan, 4]]), np.arange(4)), "loads (1, 4): must be"),
        (lambda: Solver(2).solve(np.ones((1, 5)), np.arange(4)), "5 experts need at least 5 slots"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
