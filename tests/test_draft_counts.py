import itertools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from dsv4jax import draft_counts
from dsv4jax.draft_counts import StepCosts, choose_draft_counts
from dsv4jax.draft_statistics import BINS, DraftStatistics, step_statistics, zero_statistics

REQUESTS, DRAFTS = 4, 3
TOTALS = REQUESTS * (1 + DRAFTS) + 1
predict = jax.jit(draft_counts.survivals)
choose = jax.jit(choose_draft_counts, static_argnames="drawn_at_random")


def survivals(confidences):
    return np.cumprod(special.expit(confidences.astype(np.float64)), axis=1)


def rate(counts, confidences, limits, costs):
    """Expected tokens per second of a choice."""
    expected = sum(survivals(confidences)[b, : counts[b]].sum() for b in range(len(counts)))
    present = np.sum(limits >= 0)
    return (present + expected) / np.maximum.accumulate(costs)[present + np.sum(counts)]


def best_rate(confidences, limits, costs, minimums):
    ranges = [range(max(low, 0), max(limit, 0) + 1) for low, limit in zip(minimums, limits, strict=True)]
    return max(rate(np.array(counts), confidences, limits, costs) for counts in itertools.product(*ranges))


def make_costs(rng, kind):
    totals = np.arange(TOTALS)
    if kind == "line":
        costs = 1 + rng.uniform(0, 0.3) * totals
    elif kind == "stairs":
        costs = 1 + rng.uniform(0, 1) * (totals // rng.integers(2, 6))
    elif kind == "concave":
        costs = 1 + np.sqrt(totals) * rng.uniform(0, 1)
    elif kind == "flat":
        costs = np.ones(TOTALS)
    else:  # measured badly: not monotone
        costs = rng.uniform(1, 3, TOTALS)
    return costs.astype(np.float32)


def make_batch(rng):
    confidences = (rng.normal(size=(REQUESTS, DRAFTS)) * 2 + rng.normal()).astype(np.float32)
    limits = rng.integers(-1, DRAFTS + 1, REQUESTS).astype(np.int32)
    limits[rng.integers(REQUESTS)] = DRAFTS
    minimums = np.where(rng.random(REQUESTS) < 0.3, rng.integers(0, DRAFTS + 1, REQUESTS), 0)
    return confidences, limits, np.minimum(minimums, np.maximum(limits, 0)).astype(np.int32)


KINDS = st.sampled_from(["line", "stairs", "concave", "flat", "noise"])


@settings(max_examples=150)
@given(kind=KINDS, data_seed=st.integers(0, 2**32))
def test_no_choice_promises_more(kind, data_seed):
    rng = np.random.default_rng(data_seed)
    confidences, limits, minimums = make_batch(rng)
    costs = make_costs(rng, kind)
    counts = np.asarray(choose(confidences, limits, costs, minimums, drawn_at_random=False))
    assert np.all((minimums <= counts) & (counts <= np.maximum(limits, 0)))
    np.testing.assert_allclose(
        rate(counts, confidences, limits, costs), best_rate(confidences, limits, costs, minimums), rtol=1e-5
    )


def has_a_say(data_seed, drawn_at_random):
    """Whether a draft's own verification changes with the confidences after it, which depend on it."""
    rng = np.random.default_rng(data_seed)
    confidences, limits, minimums = make_batch(rng)
    # Where one more draft does not pay but two do, the second one's confidence decides about the first.
    costs = (1 + rng.uniform(0, 0.4) * (np.arange(TOTALS) // rng.integers(2, 5))).astype(np.float32)
    request, draft = rng.integers(REQUESTS), rng.integers(DRAFTS)
    limits[request], minimums[request] = DRAFTS, 0
    confidences[np.arange(REQUESTS) != request] -= 3
    counts = []
    for later in (-6, 6):
        confidences[request, draft + 1 :] = later
        counts.append(np.asarray(choose(confidences, limits, costs, minimums, drawn_at_random=drawn_at_random)))
        assert np.all((minimums <= counts[-1]) & (counts[-1] <= np.maximum(limits, 0)))
    return min(counts[0][request], draft + 1) != min(counts[1][request], draft + 1)


@settings(max_examples=200)
@given(data_seed=st.integers(0, 2**32))
def test_a_causal_choice_gives_a_draft_no_say_in_its_own_verification(data_seed):
    assert not has_a_say(data_seed, drawn_at_random=True)


def test_the_best_of_all_choices_would_give_it_one():
    assert sum(has_a_say(seed, drawn_at_random=False) for seed in range(100)) > 3


def test_little_is_lost_by_not_asking_the_draft_itself():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        confidences, limits, minimums = make_batch(rng)
        costs = make_costs(rng, rng.choice(["line", "stairs", "concave"]))
        counts = np.asarray(choose(confidences, limits, costs, minimums, drawn_at_random=True))
        ratios.append(rate(counts, confidences, limits, costs) / best_rate(confidences, limits, costs, minimums))
    assert np.mean(ratios) > 0.98


@pytest.mark.parametrize("drawn_at_random", [True, False])
def test_simple_cases(drawn_at_random):
    def counts(confidences, limits, costs):
        confidences, limits = np.array(confidences, np.float32), np.array(limits, np.int32)
        return choose(confidences, limits, np.array(costs, np.float32), drawn_at_random=drawn_at_random).tolist()

    likely, unlikely = [9.0] * DRAFTS, [-9.0] * DRAFTS
    all_likely = [likely] * REQUESTS
    slope = 1 + 0.1 * np.arange(TOTALS)
    assert counts(all_likely, [3, 1, 0, -1], slope) == [3, 1, 0, 0]
    assert counts([likely, unlikely, likely, unlikely], [3] * 4, slope) == [3, 0, 3, 0]
    assert (
        counts(all_likely, [3] * 4, np.maximum(np.arange(TOTALS), 1)) == [0] * 4
    )  # twice the tokens take twice the time
    assert counts(all_likely, [-1] * 4, slope) == [0] * 4
    # Room for two more tokens: the most probable ones, from the front.
    room = np.where(np.arange(TOTALS) <= 6, 1, 100)
    assert counts([[1, 9, 9], [2, 9, 9], [0, 9, 9], [-9, 9, 9]], [3] * 4, room) == [0, 2, 0, 0]
    assert counts([[2, -9, 9], [2, -9, 9], [2, -9, 9], [2, -9, 9]], [3] * 4, room) == [1, 1, 0, 0]
    # A confidence that is not a number promises nothing, however cheap.
    free = np.ones(TOTALS)
    assert counts([[9, np.nan, 9], [np.nan, 9, 9], likely, likely], [3] * 4, free) == [1, 0, 3, 3]


def test_a_short_cost_table_is_refused():
    with pytest.raises(ValueError, match="cost_table has 16 entries: 4 requests with 3 drafts need 17"):
        choose(np.zeros((4, 3), np.float32), np.zeros(4, np.int32), np.ones(16, np.float32), drawn_at_random=True)


def test_step_costs():
    costs = StepCosts(tokens=(2, 4, 8), verify_seconds=(1.0, 2.0, 2.0), draft_seconds=0.5)
    np.testing.assert_array_equal(costs.table(), np.float32([1.5, 1.5, 1.5, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5]))


@pytest.mark.parametrize(
    ("tokens", "verify_seconds", "draft_seconds", "message"),
    [
        ((), (), 1.0, "verify_seconds must have one entry for each of tokens, at least one: got 0 for 0"),
        ((1, 2), (1.0,), 1.0, "got 1 for 2"),
        ((2, 2), (1.0, 1.0), 1.0, "tokens must be increasing integers from 1 on, got (2, 2)"),
        ((0, 2), (1.0, 1.0), 1.0, "tokens must be increasing integers from 1 on, got (0, 2)"),
        ((1,), (0.0,), 1.0, "verify_seconds must be positive and finite, got (0.0,)"),
        ((1,), (1.0,), float("nan"), "draft_seconds must be positive and finite, got nan"),
    ],
)
def test_bad_step_costs_are_refused(tokens, verify_seconds, draft_seconds, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StepCosts(tokens, verify_seconds, draft_seconds)


@settings(max_examples=20)
@given(data_seed=st.integers(0, 2**32))
def test_statistics_of_steps_add_up(data_seed):
    rng = np.random.default_rng(data_seed)
    total, expected = zero_statistics(DRAFTS), zero_statistics(DRAFTS)
    expected = {name: np.array(value, np.float64) for name, value in vars(expected).items()}
    for _ in range(3):
        confidences = (rng.normal(size=(REQUESTS, DRAFTS)) * 3).astype(np.float32)
        counts = rng.integers(0, DRAFTS + 1, REQUESTS).astype(np.int32)
        accepted = rng.integers(0, counts + 1).astype(np.int32)
        valid = rng.random(REQUESTS) < 0.8
        step = jax.jit(step_statistics)(confidences, counts, accepted, valid)
        total = jax.tree.map(np.add, total, step)
        predicted = np.asarray(predict(confidences))
        np.testing.assert_allclose(predicted, survivals(confidences), rtol=1e-4)
        for b in np.flatnonzero(valid):
            expected["rounds"] += counts[b] > 0
            for j in range(counts[b]):
                survival = predicted[b, j]
                i = min(int(survival * BINS), BINS - 1)
                expected["verified"][j] += 1
                expected["accepted"][j] += j < accepted[b]
                expected["predicted"][i] += survival
                expected["bin_verified"][i] += 1
                expected["bin_accepted"][i] += j < accepted[b]
    assert isinstance(total, DraftStatistics)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(total, name), value, rtol=1e-5, err_msg=name)
