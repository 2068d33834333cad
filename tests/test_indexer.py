"""Selection of compressed entries against numpy: scores, top entries, candidate blocks (architecture section 4)."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4jax.model.indexer import candidate_blocks, index_scores, select_top, visible_entries
from dsv4jax.numerics import FAST, REFERENCE

BF16 = ml_dtypes.bfloat16
QUERIES = 5


# The rules once more, one query at a time.


def best(scores, usable, keep):
    """The `keep` usable indices first in the order (-score, index)."""
    index = np.flatnonzero(usable)
    order = np.lexsort((index, -scores[index].astype(np.float64)))
    return index[order[:keep]]


def finite_part(scores, visible):
    """Entries that may be selected."""
    with np.errstate(invalid="ignore"):
        return (np.arange(len(scores)) < visible) & (scores.astype(np.float64) > -np.inf)


def expected_selection(scores, visible, keep):
    rows = np.full((len(scores), keep), -1)
    for row, s, v in zip(rows, scores, visible, strict=True):
        chosen = np.sort(best(s, finite_part(s, v), keep))
        row[: len(chosen)] = chosen
    return rows


def expected_blocks(scores, visible, keep, size):
    blocks = -(-scores.shape[1] // size)
    result = np.zeros((len(scores), blocks), bool)
    for row, s, v in zip(result, scores, visible, strict=True):
        usable = finite_part(s, v)
        maxima = np.full(blocks, -np.inf)
        for i in np.flatnonzero(usable):
            maxima[i // size] = max(maxima[i // size], float(s[i]))
        if v > 0:
            maxima[(v - 1) // size] = np.inf
        row[best(maxima, maxima > -np.inf, keep)] = True
    return result


@functools.cache
def jitted(function, *static):
    return jax.jit(lambda *arrays: function(*arrays, *static))


def select(scores, visible, keep):
    return np.asarray(jitted(select_top, keep)(scores, np.int32(visible)))


def blocks_of(scores, visible, keep, size):
    return np.asarray(jitted(candidate_blocks, keep, size)(scores, np.int32(visible)))


# Top entries.

SPECIAL = st.sampled_from([np.nan, -np.inf, np.inf, 0.0, 1.0, -1.0])
FEW_VALUES = st.integers(-3, 3).map(float)


def score_arrays(entries):
    """Score matrices with many ties, with values no entry may be selected for, and with neither."""
    return st.sampled_from([FEW_VALUES, FEW_VALUES | SPECIAL, st.floats(-100, 100, width=16)]).flatmap(
        lambda elements: hnp.arrays(np.float32, (QUERIES, entries), elements=elements)
    )


def counts(entries):
    return st.lists(st.integers(0, entries), min_size=QUERIES, max_size=QUERIES)


@settings(max_examples=60)
@given(score_arrays(37), counts(37), st.sampled_from([1, 8, 36, 37]))
def test_the_best_visible_entries_are_selected_in_ascending_order(scores, visible, keep):
    np.testing.assert_array_equal(select(scores, visible, keep), expected_selection(scores, visible, keep))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_zeros_of_either_sign_are_a_tie(dtype):
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0]], dtype)
    np.testing.assert_array_equal(select(scores, [5], 3), [[0, 1, 2]])


def orders(entries, rng):
    """Rows in random and in adversarial order."""
    ascending = np.linspace(-4, 4, entries)
    peaks = np.where(np.arange(entries) % 2048 < 3, 9, 0) + np.arange(entries) % 7
    return np.stack([rng.normal(size=entries), ascending, ascending[::-1], np.ones(entries), peaks])


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("entries", [512, 513, 2048, 2049, 10_000])
def test_the_selection_is_exact_at_any_length(entries, dtype):
    scores = orders(entries, np.random.default_rng(entries)).astype(dtype)
    visible = [entries, entries, entries - 1, entries, entries // 2 + 1]
    chosen = select(scores, visible, 512)
    np.testing.assert_array_equal(chosen, expected_selection(scores, visible, 512))
    np.testing.assert_array_equal(chosen[3], np.arange(512), "a constant row keeps its first entries")


def test_the_selection_is_exact_over_262144_entries():
    scores = orders(262_144, np.random.default_rng(0))[[0, 4]].astype(BF16)
    visible = [262_144, 200_001]
    np.testing.assert_array_equal(select(scores, visible, 512), expected_selection(scores, visible, 512))


def test_rows_with_fewer_entries_than_places_end_in_minus_one():
    scores = np.zeros((QUERIES, 600), np.float32)
    chosen = select(scores, [0, 1, 7, 511, 600], 512)
    np.testing.assert_array_equal((chosen >= 0).sum(1), [0, 1, 7, 511, 512])
    for row in chosen:
        used = row[row >= 0]
        np.testing.assert_array_equal(used, np.arange(len(used)))
        assert (row[len(used) :] == -1).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_rows_without_a_finite_score_select_nothing(value):
    scores = np.full((2, 40), value, np.float32)
    scores[1, 11] = -3e38
    np.testing.assert_array_equal(select(scores, [40, 40], 4), [[-1] * 4, [11, -1, -1, -1]])


@settings(max_examples=20)
@given(score_arrays(37), counts(37), st.randoms())
def test_a_query_depends_on_nothing_but_its_own_visible_scores(scores, visible, random):
    """Not on its row, on other rows, on what it does not see or on how far the array goes on."""
    alone = select(scores, visible, 8)
    np.testing.assert_array_equal(select(scores, visible, 8), alone)
    order = random.sample(range(QUERIES), QUERIES)
    np.testing.assert_array_equal(select(scores[order], np.array(visible)[order], 8), alone[order])
    longer = np.pad(scores, ((0, 0), (0, 27)), constant_values=1e9)
    for row, count in zip(longer, visible, strict=True):
        row[count:37] = random.choice([np.inf, np.nan, 5.0])
    np.testing.assert_array_equal(select(longer, visible, 8), alone)


# Candidate blocks.


@settings(max_examples=60)
@given(score_arrays(37), counts(37), st.sampled_from([(1, 4), (2, 4), (3, 5), (9, 8), (12, 3), (40, 1)]))
def test_the_best_blocks_are_candidates(scores, visible, budget):
    # A pinned block and a block of infinite score would be a tie that no rule decides.
    scores[scores == np.inf] = 1e30
    keep, size = budget
    result = blocks_of(scores, visible, keep, size)
    np.testing.assert_array_equal(result, expected_blocks(scores, visible, keep, size))
    seen = np.array(visible) > 0
    newest = (np.array(visible) - 1) // size
    assert result[np.arange(QUERIES), newest][seen].all(), "the block of the newest entry is always kept"
    assert (result.sum(1) <= keep).all(), "and counts towards the budget"
    np.testing.assert_array_equal(result.any(1), seen)


def test_a_half_filled_last_block_is_pinned_whatever_its_scores():
    scores = np.full((2, 22), 5.0, np.float32)
    scores[:, 16:20] = -7.0  # block 4 of size 4, of which entries 16 and 17 are visible
    scores[:, 18:] = np.nan
    scores[1, 16:18] = np.nan
    visible = [18, 18]
    expected = np.zeros((2, 6), bool)
    expected[:, [0, 1, 4]] = True  # two of the tied blocks besides the pinned one
    np.testing.assert_array_equal(blocks_of(scores, visible, 3, 4), expected)


def test_all_blocks_with_a_visible_entry_are_candidates_within_the_budget():
    scores = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    visible = np.array([0, 1, 64, 100])
    expected = np.arange(13) < -(-visible[:, None] // 8)
    for keep in (13, 2048):
        np.testing.assert_array_equal(blocks_of(scores, visible, keep, 8), expected)


@pytest.mark.parametrize("entries", [16_384, 16_385, 20_003])
def test_candidates_at_released_sizes(entries):
    rng = np.random.default_rng(entries)
    scores = np.stack([rng.normal(size=entries), np.linspace(9, 0, entries), np.ones(entries)]).astype(BF16)
    visible = [entries, entries, entries - 3]
    result = blocks_of(scores, visible, 2048, 8)
    np.testing.assert_array_equal(result, expected_blocks(scores, visible, 2048, 8))
    np.testing.assert_array_equal(result.sum(1), [min(2048, -(-v // 8)) for v in visible])


# Scores.

HEADS, DIM, ENTRIES = 16, 128, 30


def operands(seed):
    """Index queries, head weights and keys that survive MXFP4, small enough for exact fp32 sums in any order."""
    rng = np.random.default_rng(seed)
    grid = np.float32([0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6])
    q = rng.choice(grid, (QUERIES, HEADS, DIM)).astype(BF16)
    keys = rng.choice(grid, (ENTRIES, DIM)).astype(BF16)
    weights = (rng.integers(-8, 9, (QUERIES, HEADS)) / 8).astype(BF16)
    return q, weights, keys


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_reference_scores_round_product_term_and_sum(seed):
    q, weights, keys = operands(seed)
    dots = np.einsum("qhd,nd->qhn", q.astype(np.float64), keys.astype(np.float64)).astype(BF16)
    terms = (np.maximum(dots, 0).astype(np.float64) * weights[..., None].astype(np.float64)).astype(BF16)
    expected = terms.astype(np.float64).sum(1).astype(BF16)
    scores = jitted(index_scores, REFERENCE)(q, weights, keys)
    assert scores.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(scores, np.float32), expected.astype(np.float32))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_fast_scores_round_nothing(seed):
    q, weights, keys = (a.astype(np.float64) for a in operands(seed))
    dots = np.einsum("qhd,nd->qhn", q, keys)
    expected = (np.maximum(dots, 0) * weights[..., None]).sum(1)
    scores = jitted(index_scores, FAST)(*operands(seed))
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-4)


def test_reference_and_fast_scores_differ_by_rounding_only():
    rng = np.random.default_rng(1)
    q, weights, keys = (
        rng.normal(size=shape).astype(BF16) for shape in ((QUERIES, HEADS, DIM), (QUERIES, HEADS), (ENTRIES, DIM))
    )
    reference = np.asarray(jitted(index_scores, REFERENCE)(q, weights, keys), np.float32)
    fast = np.asarray(jitted(index_scores, FAST)(q, weights, keys))
    dots = np.einsum("qhd,nd->qhn", q.astype(np.float32), keys.astype(np.float32))
    size = (np.maximum(dots, 0) * np.abs(weights.astype(np.float32))[..., None]).sum(1)
    assert (reference != fast).any()
    assert (np.abs(reference - fast) <= 2.0**-7 * size).all()


def test_the_relu_is_inside_the_sum_over_heads():
    """A head that dislikes an entry adds nothing, it does not subtract; weights keep their sign."""
    q = np.zeros((1, 2, 32), BF16)
    q[0, :, 0] = [1, -1]
    keys = np.zeros((2, 32), BF16)
    keys[:, 0] = [3, -5]
    weights = np.array([[2, -1]], BF16)
    for numerics in (REFERENCE, FAST):
        np.testing.assert_array_equal(np.asarray(jitted(index_scores, numerics)(q, weights, keys)), [[6, -5]])


# Visibility.


@settings(max_examples=50)
@given(hnp.arrays(np.int32, 9, elements=st.integers(0, 1 << 20)), hnp.arrays(bool, 9), st.sampled_from([1, 2]))
def test_an_entry_is_visible_once_its_last_token_is(positions, valid, ratio):
    visible = np.asarray(jitted(visible_entries, ratio)(positions, valid))
    assert (visible[~valid] == 0).all()
    last, first_unseen = ratio * (visible - 1) + ratio - 1, ratio * visible + ratio - 1
    assert ((last <= positions) | (visible == 0))[valid].all()
    assert (first_unseen > positions)[valid].all()


def test_a_partial_group_is_not_visible():
    positions, valid = jnp.arange(5, dtype=jnp.int32), jnp.ones(5, bool)
    np.testing.assert_array_equal(visible_entries(positions, valid, 2), [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(visible_entries(positions, valid, 1), [1, 2, 3, 4, 5])
