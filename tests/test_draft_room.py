"""Which of several programs a step with drafts runs in: for how many drafts of each request it has room."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from test_scheduler import Recorder, assert_empty, drain, make
from test_scheduler_drafts import DRAFTING, free

from dsv4jax.batch import DecodeBucket
from dsv4jax.cache import CacheConfig
from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom, smallest, survivals
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.programs import make_buckets
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import SimulatedExecutor, constant_tokens, fixed_acceptance

SLOTS, BLOCK = 2, 3


def make_times(rng, rooms=(0, 1, 3), sizes=(SLOTS,), pages=10):
    """Of programs whose times rise with room and tokens, or are measured badly."""
    times = []
    for requests in sizes:
        fixed, slope, noise = rng.uniform(0, 0.4), rng.uniform(0, 0.3), rng.choice([0, 0.3])
        for room in rooms:
            totals = np.arange(requests * (1 + room) + 1)
            seconds = 1 + fixed * room + slope * totals + noise * rng.random(len(totals))
            times.append(DecodeTimes(requests, pages, room, seconds.astype(np.float32)))
    return times


def monotone(times):
    """Seconds by room, where none may be less than of fewer tokens or less room; one number at a time."""
    found = {}
    for one in sorted(times, key=lambda one: one.drafts):
        found[one.drafts] = seconds = []
        for total, value in enumerate(one.seconds.tolist()):
            smaller = [other[total] for other in [*found.values()][:-1] if total < len(other)]
            seconds.append(max([value, *smaller, *seconds[-1:]]))
    return found


def logits(survival):
    """Confidences that predict these survivals."""
    return special.logit(survival / np.pad(survival[:, :-1], [(0, 0), (1, 0)], constant_values=1)).astype(np.float32)


def make_rows(rng, ranks):
    rows = np.sort(rng.choice(SLOTS * ranks, rng.integers(1, SLOTS * ranks + 1), replace=False))
    limits = rng.integers(0, BLOCK + 1, len(rows)).astype(np.int32)
    minimums = np.where(rng.random(len(rows)) < 0.3, limits, 0).astype(np.int32)
    confidences = (rng.normal(size=(len(rows), BLOCK)) * 2 + rng.normal()).astype(np.float32)
    return rows, limits, minimums, confidences


def choose(times, rows, limits, minimums, confidences, ranks=1):
    """The room after one look at the drafts."""
    room, epochs = DraftRoom(times, SLOTS, ranks), np.zeros(len(rows), np.int64)
    room.observe(rows, epochs, confidences)
    return room.choose(rows, epochs, limits, minimums, 1).drafts


def best_rate(seconds, room, rows, limits, minimums, survival):
    """Of all choices of counts on each rank, by what each rank gains for itself."""
    tokens, slowest = 0.0, 0.0
    for rank in np.unique(rows // SLOTS):
        own, found = np.flatnonzero(rows // SLOTS == rank), []
        for counts in itertools.product(*(range(minimums[i], min(limits[i], room) + 1) for i in own)):
            gained = len(own) + sum(survival[i, :count].sum() for i, count in zip(own, counts, strict=True))
            found.append((gained / seconds[len(own) + sum(counts)], gained, seconds[len(own) + sum(counts)]))
        _, gained, taken = max(found)
        tokens, slowest = tokens + gained, max(slowest, taken)
    return tokens / slowest


@settings(max_examples=200)
@given(ranks=st.integers(1, 3), data_seed=st.integers(0, 2**32))
def test_the_room_is_the_best_of_all_programs_and_counts(ranks, data_seed):
    rng = np.random.default_rng(data_seed)
    times, (rows, limits, minimums, confidences) = make_times(rng), make_rows(rng, ranks)
    room = choose(times, rows, limits, minimums, confidences, ranks)
    if not limits.any():
        assert room == 0
        return
    survival = np.cumprod(special.expit(confidences.astype(np.float64)), axis=1)
    usual = np.broadcast_to(survival.mean(axis=0), survival.shape)
    assert minimums.max() <= room and (room < max(limits) or room == min(k for k in (0, 1, 3) if k >= max(limits)))
    seconds = {k: values for k, values in monotone(times).items() if k >= minimums.max()}
    now, usually = (
        {k: best_rate(seconds[k], k, rows, limits, minimums, s) for k in seconds} for s in (survival, usual)
    )
    # Plain steps must pay more than others now, and a little more as a rule.
    usually |= {0: usually[0] / 1.02} if 0 in usually else {}
    kept = now if now[room] >= max(now.values()) * (1 - 1e-5) and room else usually
    assert kept[room] >= max(kept.values()) * (1 - 1e-5)
    assert kept is now or now[0] >= max(now.values()) * (1 - 1e-5)


@settings(max_examples=200)
@given(place=st.integers(0, BLOCK - 1), data_seed=st.integers(0, 2**32))
def test_more_confidence_never_leaves_less_room(place, data_seed):
    """Of one request; of several, what one may hope for can take the place of another's drafts."""
    rng = np.random.default_rng(data_seed)
    times, confidences = make_times(rng), (rng.normal(size=(1, BLOCK)) * 2).astype(np.float32)
    raised = confidences.copy()
    raised[0, place] += rng.uniform(0, 5)
    limits, minimums = np.int32([rng.integers(1, BLOCK + 1)]), np.int32([0])
    first, second = (choose(times, np.array([0]), limits, minimums, c) for c in (confidences, raised))
    assert first <= second


def test_survivals_are_those_of_the_device():
    confidences = np.float32([[2, 0, 1000], [-1000, 5, 5], [3, np.nan, 3]])
    expected = [[special.expit(2), special.expit(2) / 2, special.expit(2) / 2], [0, 0, 0], [special.expit(3), 0, 0]]
    np.testing.assert_allclose(survivals(confidences), expected, rtol=1e-6)


def test_the_smallest_size_that_holds_a_batch_is_taken():
    sizes = [DecodeTimes(n, p, 0, np.ones(n + 1, np.float32)) for n, p in ((2, 50), (8, 10), (8, 50))]
    assert smallest(sizes, 1, 60) is None and smallest(sizes, 9, 1) is None
    assert [smallest(sizes, n, 10) for n in (1, 3)] == [sizes[1], sizes[1]]
    assert [smallest(sizes, n, 11) for n in (1, 3)] == [sizes[0], sizes[2]]
    with pytest.raises(ValueError, match="no times are known of 1 requests over 60 pages"):
        times = make_times(np.random.default_rng(0), pages=50)
        DraftRoom(times, 2, 1).choose(np.array([0]), np.array([0]), np.int32([3]), np.int32([0]), 60)


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="seconds: must be 5 positive finite numbers"):
        DecodeTimes(2, 10, 1, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="seconds: must be 3 positive finite numbers"):
        DecodeTimes(2, 10, 0, np.float32([1, 0, 1]))
    for rooms in ((0,), (1, 3)):
        with pytest.raises(ValueError, match="times of 2 requests: must be of a plain program and some with drafts"):
            DraftRoom(make_times(np.random.default_rng(0), rooms), 2, 1)


def test_predictions_are_means_of_a_choice_and_of_all_for_a_new_one():
    room, rows, one = DraftRoom(make_times(np.random.default_rng(0)), 2, 1), np.array([0, 1]), np.array([1, 1])
    room.observe(rows, one, logits(np.float32([[0.8, 0.4, 0.2], [0.4, 0.2, 0.1]])))
    np.testing.assert_allclose(room.predicted(rows, one), [[0.8, 0.4, 0.2], [0.4, 0.2, 0.1]], rtol=1e-5)
    room.observe(rows[:1], one[:1], logits(np.float32([[0.4, 0.4, 0.4]])))
    np.testing.assert_allclose(room.predicted(rows[:1], one[:1]), [[0.75, 0.4, 0.225]], rtol=1e-5)
    # Another choice in the slot has the mean of all, of which the second result is half.
    np.testing.assert_allclose(room.predicted(rows[:1], one[:1] + 1), [[0.5, 0.35, 0.275]], rtol=1e-5)
    room.observe(rows, one, np.full((2, BLOCK), np.nan, np.float32))
    np.testing.assert_allclose(room.predicted(rows[:1], one[:1]), [[0.75, 0.4, 0.225]], rtol=1e-5)


def steps_of(law, times, tokens=2000):
    """How often each room was taken, None for plain steps, by a request whose drafts are accepted by a law."""
    confidences = special.logit(np.float32(law))
    rooms = collections.Counter()

    def cost(plan):
        if plan.speculation is not None:
            rooms[int(plan.speculation.max_drafts.max())] += 1
        elif plan.decodes is not None:
            rooms[None] += 1
        return 1.0

    cfg = dataclasses.replace(DRAFTING, pages=1200, max_model_len=2100)
    executor = SimulatedExecutor(
        cost, constant_tokens(7), fixed_acceptance(law), 4, lambda positions: np.tile(confidences, (len(positions), 1))
    )
    engine = Engine(Scheduler(cfg, DraftRoom(times, cfg.slots, 1)), executor, Recorder())
    (made,) = engine.submit(free([2, 3, 4], tokens))
    drain(engine)
    assert_empty(engine)
    assert len(made.generated) == tokens
    return rooms


def times_of(*seconds):
    """Of steps with room for 0, 1, 2 and 4 drafts, whatever they run."""
    rooms = (0, 1, 2, 4)
    return [
        DecodeTimes(4, 600, k, np.full(4 * (1 + k) + 1, s, np.float32)) for k, s in zip(rooms, seconds, strict=True)
    ]


def test_an_engine_runs_the_program_that_pays_most():
    # 2.28 tokens for two drafts, 2.64 for four, 1.8 for one.
    times, law = times_of(1.0, 1.3, 1.4, 2.0), [0.8, 0.6, 0.5, 0.5]
    rooms = steps_of(law, times)
    assert rooms[2] > 0.98 * rooms.total()
    assert steps_of([0.95] * 4, times)[4] > 350


def test_where_drafts_do_not_pay_plain_steps_run_and_few_look_whether_they_would_again():
    rooms = steps_of([0.1] * 4, times_of(1.0, 1.3, 1.4, 2.0), 1500)
    # Two times some drafts are looked at, until the results are there.
    assert rooms[None] > 0.95 * rooms.total() and 2 * 8 <= rooms[0] <= 2 * 14


def test_a_request_has_room_for_the_drafts_it_insists_on():
    engine, executor = make(DRAFTING, room=DraftRoom(times_of(1.0, 9.0, 10.0, 11.0), 4, 1))
    executor.acceptance = 0.5
    mixed = [engine.submit(free([2, i], 40, f"r{i}", drafts=drafts))[0] for i, drafts in ((2, None), (3, 2), (4, 0))]
    drain(engine)
    fixed, others = mixed[1], (mixed[0], mixed[2])
    assert fixed.drafted / fixed.draft_rounds > 1.8, "of two, but for its last tokens"
    speculations = [p.speculation for p in executor.plans if p.speculation is not None]
    together = [s for s in speculations if len(s.slots) == 3]
    # Before anything was seen, all drafts are taken to stand.
    assert {int(s.max_drafts.max()) for s in together[3:]} == {2}
    assert others[0].drafted > 0, "what runs beside it has the same room"
    assert others[1].drafted == 0
    assert executor.plans[-1].decodes is not None, "once it has ended, no drafts pay"


def test_once_drafts_pay_again_a_look_finds_it_and_a_bad_moment_does_not_end_them():
    times, rows, one = times_of(1.0, 1.3, 1.4, 2.0), np.array([0]), np.array([1])
    room, limits, none = DraftRoom(times, 4, 1, plain_steps=3), np.int32([4]), np.int32([0])

    def step(survival=None):
        if survival is not None:
            room.observe(rows, one, logits(np.float32([[survival**i for i in range(1, 5)]])))
        return room.choose(rows, one, limits, none, 1)

    good = [step(0.8) for _ in range(60)]
    assert {r.drafts for r in good} == {2}
    assert {step(0.1).drafts for _ in range(10)} <= {1, 2}, "usually they pay"
    while step(0.1).drafts:
        pass
    assert [step().drafting for _ in range(4)] == [False, False, True, True], "nothing is seen: a look begins"
    looks = [step(0.9) for _ in range(8)]
    assert all(r.drafting for r in looks) and looks[-1].drafts > 0


def test_a_step_runs_in_the_narrowest_program_with_room_for_its_drafts():
    sizes = {"prefill_tokens": [16], "prefill_requests": 1, "decode_requests": [2, 8], "contexts": [64, 640]}
    buckets = make_buckets(CacheConfig(slots=8, pages=80, drafts="shared"), **sizes, drafts=5, fewer_drafts=[1, 3])
    assert len(buckets.verify) == 3 * len(buckets.decode) == 12
    for drafts, width in ((0, 2), (1, 2), (2, 4), (3, 4), (5, 6)):
        assert buckets.for_verify(3, 1, drafts) == DecodeBucket(8, 1, width)
    assert buckets.for_verify(2, 2, 4) == DecodeBucket(2, 10, 6)
    for batch in ((9, 1, 1), (1, 11, 1), (1, 1, 6)):
        with pytest.raises(ValueError, match="no verify bucket holds"):
            buckets.for_verify(*batch)
