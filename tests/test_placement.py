"""Expert placements: every expert reachable, every id in range, and bad ones refused."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from expert_placements import random_owners, sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.placement import (
    ExpertPlacement,
    check_owners,
    chosen_slots,
    initial_owners,
    owners_of,
    placement_from_owners,
    replica_counts,
)


@settings(max_examples=100)
@given(sizes(), st.integers(0, 2**32 - 1))
def test_every_expert_is_reachable_and_the_way_back_is_exact(size, seed):
    experts, ranks, slots_per_rank = size
    rng = np.random.default_rng(seed)
    owners = np.stack([initial_owners(1, *size)[0], random_owners(rng, *size)])
    placement = placement_from_owners(owners, experts, ranks)
    assert placement.slots.shape == (2, experts, min(ranks, ranks * slots_per_rank - experts + 1))
    np.testing.assert_array_equal(owners_of(placement, ranks, slots_per_rank), owners)
    for layer in range(2):
        for expert in range(experts):
            at = placement.slots[layer, expert]
            assert set(at.tolist()) == set(np.flatnonzero(owners[layer] == expert).tolist())
            assert len(set(at.tolist())) == placement.counts[layer, expert]
            assert len(set((at // slots_per_rank).tolist())) == placement.counts[layer, expert]


def test_without_redundant_slots_expert_e_is_in_slot_e():
    placement = placement_from_owners(initial_owners(3, 12, 4, 3), 12, 4)
    np.testing.assert_array_equal(placement.slots, np.tile(np.arange(12)[:, None], (3, 1, 1)))
    np.testing.assert_array_equal(placement.counts, 1)


@pytest.mark.parametrize("size", [(384, 32, 12), (384, 32, 13), (384, 32, 16), (128, 32, 5), (384, 7, 55), (6, 4, 2)])
def test_the_last_rank_holds_experts_that_exist(size):
    owners = initial_owners(2, *size)
    check_owners(owners, *size[:2])
    counts = replica_counts(owners, size[0])
    assert counts.min() >= 1 and counts.sum() == 2 * size[1] * size[2]


@pytest.mark.parametrize("size", [(12, 5, 2), (4, 2, 5), (4, 0, 4)])
def test_slots_that_do_not_fit_the_experts_are_refused(size):
    with pytest.raises(ValueError, match=rf"{size[1]} ranks of {size[2]} expert slots: {size[0]} experts need"):
        initial_owners(1, *size)


@pytest.mark.parametrize(
    "owners, message",
    [
        ([0, 1, 2, 3, 0], "5 expert slots do not divide over 2 ranks"),
        ([0, 1, 2, 3, 4, 0], "experts [4] do not exist; allowed are 0..3"),
        ([0, 1, 2, 3, -1, 0], "experts [-1] do not exist"),
        ([0, 1, 0, 3, 2, 1], "layer 0 has expert 0 twice on rank 0"),
        ([0, 1, 2, 0, 1, 2], "layer 0 has no slot for experts [3]"),
    ],
)
def test_bad_owners_are_refused(owners, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        placement_from_owners(np.array([owners], np.int32), 4, 2)


@pytest.mark.parametrize(
    "slots, counts, message",
    [
        ([[0], [2]], [1, 1], "0..2; allowed are 0..1"),
        ([[0], [0]], [1, 1], "uses slot 0 2 times"),
        ([[0], [1]], [1, 2], "placement.counts: 1..2; allowed are 1..1"),
    ],
)
def test_bad_placements_are_refused(slots, counts, message):
    placement = ExpertPlacement(np.array([slots], np.int32), np.array([counts], np.int32))
    with pytest.raises(ValueError, match=re.escape(message)):
        owners_of(placement, 2, 1)


def test_tokens_take_replicas_in_turn():
    owners = np.array([[0, 1, 2, 0, 1, 3, 0, 2, 3]], np.int32)
    placement = placement_from_owners(owners, 4, 3)
    experts = jnp.array([[0, 1], [0, 2], [0, 3], [0, 1], [0, 2], [0, 3]])
    chosen = chosen_slots(placement.slots[0], placement.counts[0], experts, jnp.arange(6))
    np.testing.assert_array_equal(chosen, [[0, 1], [3, 7], [6, 5], [0, 4], [3, 2], [6, 8]])
    np.testing.assert_array_equal(owners[0][chosen], experts)
