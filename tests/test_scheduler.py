"""The scheduler against an executor that checks every page, window and token it is given."""

import collections
import dataclasses
import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
from engine_model import EOS, VOCAB, ChainMask, CheckingExecutor, PausingMask, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import RankResult, Sampled, StepResult
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest, PromptLogprobs, QueueFull, RequestTooLarge, TooManyChoices
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.token_mask import MaskError
from dsv4jax.sampling_settings import RequestSampling

SMALL = SchedulerConfig(
    slots=4,
    pages=20,
    max_model_len=64,
    eos_id=EOS,
    replay=ReplayRule(window=6, layers=2, mode="bounded"),
    page_size=4,
    prefill_tokens=16,
    prefill_requests=3,
    tile=2,
    max_admissions=3,
)
EXACT = dataclasses.replace(SMALL, replay=ReplayRule(window=6, layers=2, mode="exact"))


class Recorder:
    """Keeps what the engine reports."""

    def __init__(self):
        self.steps, self.requests, self.rejections = [], [], []

    def step(self, record):
        self.steps.append(record)

    def request(self, record):
        self.requests.append(record)

    def rejected(self, reason):
        self.rejections.append(reason)


def make(cfg=SMALL, depth=2, room=None):
    executor = CheckingExecutor(cfg)
    return Engine(Scheduler(cfg, room), executor, Recorder(), depth=depth), executor


def request(prompt, max_tokens=5, name="r", **options):
    return GenerationRequest(name, np.asarray(prompt, np.int32), max_tokens, **options)


def drain(engine, limit=5000):
    """Steps until the engine is idle; returns what the steps told to have ended."""
    told = []
    for _ in range(limit):
        if engine.idle:
            return told
        told += [s for s in engine.step() if s.finish_reason is not None]
    raise AssertionError(f"not idle after {limit} steps")


def assert_empty(engine):
    engine.scheduler.check_integrity()
    assert engine.stats().used_pages == 0
    assert engine.stats().running == engine.stats().waiting == 0


def prompts():
    """Prompts that share prefixes of every length with each other."""
    base = np.random.default_rng(0).integers(2, VOCAB, 60)

    def build(args):
        shared, own, seed = args
        return np.concatenate([base[:shared], np.random.default_rng(seed).integers(2, VOCAB, own)]).astype(np.int32)

    return st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3)).map(build)


MASKS = st.sampled_from(
    [
        None,
        None,
        functools.partial(ChainMask, waits=False),
        functools.partial(ChainMask, waits=True),
        functools.partial(ChainMask, waits=False, fail_after=3),
        functools.partial(ChainMask, waits=True, fail_after=4),
        functools.partial(ChainMask, waits=False, period=5),
        functools.partial(ChainMask, waits=False, period=4, fail_after=6),
        PausingMask,
        PausingMask,
    ]
)
EVENTS = st.one_of(
    st.tuples(
        st.just("submit"),
        prompts(),
        st.integers(1, 12),
        st.integers(1, 3),
        st.integers(0, 2),
        st.sampled_from("ab"),
        MASKS,
        st.sampled_from([None, None, None, 0, 1, 4]),
        st.sampled_from([None, None, 20]),
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("finish"), st.integers(0, 10), st.sampled_from(["abort", "stop"])),
    st.tuples(st.just("fail"), st.integers(1, 2)),
    st.tuples(st.just("forget")),
)
CONFIGS = st.sampled_from(
    [
        SMALL,
        EXACT,
        dataclasses.replace(EXACT, deterministic=True),
        dataclasses.replace(SMALL, prefix_cache=False),
        dataclasses.replace(SMALL, tokens_on_host=True),
        *(dataclasses.replace(SMALL, ranks=ranks, slots=2, pages=16) for ranks in (2, 4, 8)),
        dataclasses.replace(SMALL, ranks=3, slots=2, pages=16, prefill_context=20),
        dataclasses.replace(SMALL, decode_every=3),
        dataclasses.replace(SMALL, prefill_every=4, max_overtakes=1),
    ]
)


def with_drafts(cfg, drafts):
    return cfg if cfg.tokens_on_host else dataclasses.replace(cfg, drafts=drafts)


def some_room(cfg, seed):
    """Steps in several programs, for drafts that pay or do not; None for as many drafts as there are."""
    if seed is None or not cfg.drafts or cfg.deterministic:
        return None
    rng = np.random.default_rng(seed)
    fixed, step = rng.uniform(0, 0.3, 2)
    pages = -(-cfg.max_model_len // cfg.page_size)
    times = [
        DecodeTimes(
            requests, pages, drafts, np.float32(1 + fixed * drafts + step * np.arange(requests * (1 + drafts) + 1))
        )
        for requests in sorted({1, cfg.slots})
        for drafts in sorted({0, 1, cfg.drafts // 2 + 1, cfg.drafts})
    ]
    return DraftRoom(times, cfg.slots, cfg.ranks, plain_steps=3)


@settings(max_examples=3000)
@given(
    cfg=st.builds(with_drafts, CONFIGS, st.sampled_from([0, 1, 5])),
    depth=st.integers(1, 2),
    room=st.none() | st.integers(0, 100),
    events=st.lists(EVENTS, min_size=5, max_size=40),
)
def test_no_schedule_loses_a_page_a_slot_or_a_token(cfg, depth, room, events):
    engine, executor = make(cfg, depth, some_room(cfg, room))
    open_choices, ended_by_hand, told = [], set(), []
    for count, (kind, *args) in enumerate(events):
        if kind == "submit":
            prompt, max_tokens, n, priority, salt, mask, drafts, context = args
            made = request(
                prompt,
                max_tokens,
                f"r{count}",
                n=n,
                priority=priority,
                cache_salt=salt,
                sampling=RequestSampling(seed=count),
                mask=mask,
                drafts=drafts and min(drafts, cfg.drafts),
                draft_context=context,
            )
            open_choices += engine.submit(made)
            if mask is not None and cfg.drafts:
                executor.futures = [*executor.futures, *([*prompt, *rollout(made, i)] for i in range(n))]
        elif kind == "step":
            for _ in range(args[0]):
                told += [s for s in engine.step() if s.finish_reason is not None]
        elif kind == "finish" and open_choices:
            sequence = open_choices[args[0] % len(open_choices)]
            if sequence.finish_reason is None:
                ended_by_hand.add(id(sequence))
            engine.finish(sequence, args[1])
        elif kind == "fail" and executor.failures_in_a_row < 4:  # a fifth ends the engine
            executor.fail_next = args[0]
        elif kind == "forget":
            engine.scheduler.forget_prefixes()
        engine.scheduler.check_integrity()
    executor.fail_next = 0
    told += drain(engine)
    assert_empty(engine)
    # Every choice that ended by itself was told, once: its reader would wait for ever.
    assert collections.Counter(told) == collections.Counter(s for s in open_choices if id(s) not in ended_by_hand)
    assert executor.resets == executor.failures, "a step failed by itself"
    records = {(r.request_id, r.index): r for r in engine.observer.requests}
    assert len(records) == len(engine.observer.requests) == len(open_choices)
    for sequence in open_choices:
        expected = rollout(sequence.request, sequence.index)
        if id(sequence) in ended_by_hand or (sequence.finish_reason == "error" and "step" in sequence.error):
            assert sequence.generated == expected[: len(sequence.generated)]
        else:
            assert sequence.generated == expected
            whole = len(expected) == sequence.request.max_tokens or expected[-1] == EOS
            assert sequence.finish_reason == ("error" if not whole else "stop" if expected[-1] == EOS else "length")


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = Scheduler(SMALL)
    with pytest.raises(RequestTooLarge, match="60 tokens and max_tokens = 5 exceed the context of 64"):
        scheduler.check(request(range(2, 62), 5))
    scheduler.check(request(range(2, 61), 5))
    few = Scheduler(dataclasses.replace(SMALL, pages=4))
    with pytest.raises(RequestTooLarge, match="need 5 pages of 4 tokens, this engine has 4"):
        few.check(request(range(2, 14), 5))
    few.check(request(range(2, 13), 5))


def test_a_request_that_needs_every_page_runs_beside_others_and_finishes():
    cfg = dataclasses.replace(SMALL, pages=16)
    engine, _ = make(cfg)
    big = engine.submit(request(np.arange(2, 50), 16, "big", ignore_eos=True))
    small = [engine.submit(request([5, 6, i], 8, f"s{i}", ignore_eos=True)) for i in range(2, 12)]
    drain(engine)
    for sequence in [*big, *(s for made in small for s in made)]:
        assert sequence.generated == rollout(sequence.request, 0)
    assert_empty(engine)


def test_the_queue_is_bounded_in_requests_and_tokens():
    cfg = dataclasses.replace(SMALL, max_waiting=3, max_waiting_tokens=20)
    engine, _ = make(cfg)
    for i in range(2):
        engine.submit(request(np.arange(2, 11), 4, f"r{i}"))
    with pytest.raises(QueueFull, match="18 tokens are waiting: 5 more exceed the limit of 20"):
        engine.submit(request(np.arange(2, 7), 4))
    engine.submit(request([2], 4))
    with pytest.raises(QueueFull, match="3 of at most 3 requests are waiting"):
        engine.submit(request([2], 4))
    drain(engine)
    engine.submit(request(np.arange(2, 50), 4))  # an empty queue takes whatever fits the engine
    drain(engine)
    assert_empty(engine)


def test_requests_of_one_body_are_judged_together():
    scheduler = Scheduler(dataclasses.replace(SMALL, max_waiting=3))
    scheduler.check(*[request([2], 4)] * 3)
    scheduler.check(request([2], 4, n=3))
    with pytest.raises(TooManyChoices, match="4 choices are asked for at once, this engine lets 3 wait"):
        scheduler.check(*[request([2], 4, n=2)] * 2)
    with pytest.raises(QueueFull, match="1 of at most 3 requests are waiting"):
        scheduler.check(*[request([2], 4)] * 3, announced_choices=1)


def test_only_as_many_as_needed_are_preempted_and_all_finish():
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56)
    engine, _ = make(cfg)
    made = [engine.submit(request([i + 2] * 5, 40, f"r{i}", ignore_eos=True))[0] for i in range(4)]
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert made[0].preemptions == 0, "the earliest request is never preempted"
    assert engine.scheduler.preemptions > 0
    assert_empty(engine)


def test_small_requests_pass_a_large_one_a_bounded_number_of_times():
    cfg = dataclasses.replace(SMALL, pages=16, max_overtakes=5, max_admissions=1)
    engine, _ = make(cfg)
    engine.submit(request([2] * 16, 40, "runs", ignore_eos=True))
    engine.step()
    large = engine.submit(request(np.arange(2, 50), 8, "large"))[0]
    passed = []
    for i in range(30):
        passed += engine.submit(request([7, i + 2], 3, f"s{i}", ignore_eos=True))
        engine.step()
        engine.step()
    drain(engine)
    before = sum(s.scheduled < large.scheduled for s in passed)
    assert 1 <= before <= 5
    assert large.generated == rollout(large.request, 0)


@pytest.mark.parametrize(("prefill_every", "decode_every"), [(1, 1), (4, 1), (1, 4)])
def test_neither_prefill_nor_decode_is_held_up_longer_than_the_knob_says(prefill_every, decode_every):
    cfg = dataclasses.replace(
        SMALL, pages=64, max_model_len=128, prefill_every=prefill_every, decode_every=decode_every
    )
    engine, executor = make(cfg)
    engine.submit(request([2, 3, 4], 60, "decodes", ignore_eos=True))
    for _ in range(4):
        engine.step()
    begin = len(executor.plans)
    long = engine.submit(request(np.arange(110) % 40 + 2, 2, "long"))[0]
    while long.first_token is None:
        engine.step()
    plans = executor.plans[begin:]
    has_prefill = [bool(p.ranks[0].prefills) for p in plans]
    has_decode = [p.decodes is not None for p in plans]
    together = plans[has_prefill.index(True) : len(plans) - has_prefill[::-1].index(True)]
    assert len(together) == (110 // 16 + 1 - 1) * prefill_every + 1
    longest = max(len(run) for run in "".join("x" if d else "." for d in has_decode).split("x"))
    assert longest == decode_every - 1


def test_prompts_share_the_prefill_budget_so_that_short_ones_pass_long_ones():
    cfg = dataclasses.replace(SMALL, pages=64, max_model_len=128)
    engine, executor = make(cfg)
    engine.submit(request(np.arange(120) % 40 + 2, 2, "long"))
    engine.step()
    short = engine.submit(request([3, 4, 5], 2, "short"))[0]
    steps = 0
    while short.first_token is None:
        engine.step()
        steps += 1
    assert steps <= 3
    chunks = executor.plans[1].ranks[0].prefills
    assert [(c.end - c.start) for c in chunks] in ([3, 12], [12, 3])  # tiles of 2: the short one takes 4 of 16
    drain(engine)


def test_priorities_order_the_queue_and_do_not_starve_anyone():
    cfg = dataclasses.replace(SMALL, slots=1, max_overtakes=4)
    engine, _ = make(cfg)
    low = engine.submit(request([2, 3], 2, "low", priority=5, ignore_eos=True))[0]
    engine.submit(request([2, 4], 2, "first", ignore_eos=True))
    engine.step()
    high = []
    for i in range(12):
        high += engine.submit(request([3, i + 2], 2, f"h{i}", ignore_eos=True))
        engine.step()
    drain(engine)
    assert 1 <= sum(s.scheduled < low.scheduled for s in high) <= 4


def test_a_hit_counts_only_what_no_step_ran_and_each_request_once():
    engine, executor = make(SMALL)
    prompt = np.arange(2, 42)
    engine.submit(request(prompt, 3, "cold"))
    drain(engine)
    assert engine.stats().prefix_hits == 0
    warm = engine.submit(request(prompt, 3, "warm"))[0]
    drain(engine)
    # 10 full pages are found; one window of 6 tokens before their end runs again.
    assert warm.first_cached == 34
    assert (engine.stats().prefix_hits, engine.stats().prefix_queries) == (34, 80)
    assert executor.plans[-1].number == engine.stats().steps - 1
    assert warm.generated == rollout(warm.request, 0)
    salted = engine.submit(request(prompt, 3, "salted", cache_salt="other"))[0]
    drain(engine)
    assert salted.first_cached == 0


def test_preempted_requests_do_not_inflate_the_hit_rate():
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56)
    engine, _ = make(cfg)
    for i in range(4):
        engine.submit(request([i + 2] * 5, 40, f"r{i}", ignore_eos=True))
    drain(engine)
    assert engine.scheduler.preemptions > 0
    assert (engine.stats().prefix_hits, engine.stats().prefix_queries) == (0, 20)


def test_choices_of_one_request_share_the_pages_of_its_prompt():
    cfg = dataclasses.replace(SMALL, pages=64, max_model_len=128)
    engine, executor = make(cfg)
    made = engine.submit(request(np.arange(2, 50), 6, n=3, sampling=RequestSampling(seed=4), ignore_eos=True))
    for _ in range(8):
        engine.step()
    assert made[0].pages[:12] == made[1].pages[:12] == made[2].pages[:12]
    drain(engine)
    assert [s.generated for s in made] == [rollout(made[0].request, i) for i in range(3)]
    assert sum(c.end - c.start for p in executor.plans for c in p.ranks[0].prefills) == 48 + 2 * 6
    assert_empty(engine)


def test_pages_of_an_unfinished_prefill_are_found_only_once_written():
    engine, _ = make(SMALL)
    first = engine.submit(request(np.arange(2, 42), 3, "first"))[0]
    engine.step()
    engine.step()
    assert engine.scheduler.ranks[0].prefilling
    engine.finish(first, "abort")
    second = engine.submit(request(np.arange(2, 42), 3, "second"))[0]
    drain(engine)
    assert second.generated == rollout(second.request, 0)
    assert second.first_cached <= 16
    assert_empty(engine)


def test_steps_overlap_and_their_number_is_bounded():
    engine, executor = make(SMALL)
    engine.submit(request([2, 3], 20, ignore_eos=True))
    seen = []
    while not engine.idle:
        engine.step()
        seen.append(engine.scheduler.steps_in_flight)
    assert max(seen) == 1, "of two dispatched steps the older is finished in the same call"
    tokens = [p.decodes.tokens[0] for p in executor.plans if p.decodes is not None]
    assert tokens == [-1] * 19, "a decode takes its token from the device"


def test_a_failing_step_ends_only_what_keeps_failing():
    engine, executor = make(SMALL)
    made = [engine.submit(request([2, 3, i], 8, f"r{i}", ignore_eos=True))[0] for i in range(3)]
    for _ in range(3):
        engine.step()
    executor.fail_next = 2
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    again = engine.submit(request([2, 3, 4], 8, "again"))[0]
    for _ in range(2):
        executor.fail_next = 1
        engine.step()
    assert again.finish_reason == "error"
    later = engine.submit(request([2, 3, 4], 8, "later"))[0]
    drain(engine)
    assert later.generated == rollout(later.request, 0)
    assert_empty(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots = 0: must be at least 1"),
        ({"prefill_tokens": 4}, "prefill_tokens = 4: must hold prefill_requests = 3 tiles of 2"),
        ({"prefill_every": 2, "decode_every": 2}, "one of them must be 1"),
        ({"prefill_context": 0}, "prefill_context = 0: must be at least 1, or None"),
        ({"ranks": 0}, "ranks = 0: must be at least 1"),
        ({"deterministic": True}, "replay must be 'exact', not 'bounded'"),
    ],
)
def test_contradictory_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(("mode", "first"), [("bounded", 994), ("exact", 1000 - 4 * 5)])
def test_what_runs_again_after_a_hit(mode, first):
    rule = ReplayRule(window=6, layers=4, mode=mode)
    assert rule.start(1000) == first
    assert rule.start(3) == 0


def test_the_worst_priority_is_preempted_first():
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56)
    engine, _ = make(cfg)
    worst = engine.submit(request([2] * 5, 40, "worst", ignore_eos=True, priority=3))[0]
    others = [engine.submit(request([i + 3] * 5, 11, f"r{i}", ignore_eos=True))[0] for i in range(3)]
    drain(engine)
    assert worst.preemptions > 0 and not any(s.preemptions for s in others)
    assert worst.generated == rollout(worst.request, 0)


def test_a_mask_that_fails_ends_only_its_own_choice():
    engine, _ = make(SMALL)
    good = engine.submit(request([2, 3], 9, "good", mask=functools.partial(ChainMask, waits=True), ignore_eos=True))[0]
    never = engine.submit(request([2, 4], 9, "never", mask=functools.partial(ChainMask, waits=False, fail_after=0)))[0]
    late = engine.submit(
        request([2, 5], 9, "late", mask=functools.partial(ChainMask, waits=False, fail_after=4), ignore_eos=True)
    )[0]
    drain(engine)
    assert (good.finish_reason, good.generated) == ("length", rollout(good.request, 0))
    assert (never.finish_reason, never.generated, never.error) == ("error", [], "no mask any more")
    assert (late.finish_reason, late.generated) == ("error", rollout(late.request, 0))
    assert len(late.generated) == 4
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("method", "drafts"), [("next", 0), ("next", 3), ("push", 0), ("push", 3), ("along", 3)])
def test_whatever_a_mask_raises_ends_only_its_own_choice(method, drafts, waits, depth):
    """And shows its client nothing of it: no step fails, and nobody starts anew."""
    engine, executor = make(dataclasses.replace(SMALL, drafts=drafts), depth)

    class Broken(ChainMask):
        def check(self, name):
            if name == method and self.count >= 3:
                raise ZeroDivisionError("in a library")

        def next(self, ahead=0):
            self.check("next")
            return super().next(ahead)

        def push(self, token):
            self.check("push")
            super().push(token)

        def along(self, drafts):
            self.check("along")
            return super().along(drafts)

    mask = functools.partial(Broken, waits=waits)
    broken = engine.submit(request([2, 3], 9, "broken", mask=mask, ignore_eos=True))[0]
    others = [
        engine.submit(request([2, 4 + i], 12, f"r{i}", mask=made, ignore_eos=True))[0]
        for i, made in enumerate((None, functools.partial(ChainMask, waits=True), None))
    ]
    executor.futures = [[*s.request.prompt, *rollout(s.request, 0)] for s in others]
    drain(engine)
    assert (broken.finish_reason, broken.error) == ("error", "the rules for its tokens failed")
    whole = rollout(dataclasses.replace(broken.request, mask=functools.partial(ChainMask, waits=waits)), 0)
    assert broken.generated == whole[: len(broken.generated)] and 1 <= len(broken.generated) <= 4
    assert [s.generated for s in others] == [rollout(s.request, 0) for s in others]
    assert executor.resets == 0 and engine.stats().preemptions == 0
    assert_empty(engine)


@pytest.mark.parametrize("failure", [1, 2], ids=["dispatch", "wait"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
def test_a_choice_that_ends_while_a_step_is_made_is_told_even_if_that_step_fails(failure, depth, waits):
    engine, executor = make(SMALL, depth)

    class FailsWithItsStep(ChainMask):
        def next(self, ahead=0):
            try:
                return super().next(ahead)
            except MaskError:
                executor.fail_next = failure if ahead == 0 else 0
                raise

    mask = functools.partial(FailsWithItsStep, waits=waits, fail_after=3)
    made = engine.submit(request([2, 3], 9, "fails", mask=mask, ignore_eos=True))
    made += engine.submit(request([2, 4], 9, "runs", ignore_eos=True))
    told = drain(engine)
    assert executor.failures == 1
    assert sorted((s.request.request_id, s.finish_reason) for s in told) == [("fails", "error"), ("runs", "length")]
    assert [len(s.generated) for s in made] == [3, 9]
    assert_empty(engine)


def test_choices_that_end_in_a_step_are_told_even_if_its_record_cannot_be_kept():
    class Failing(Recorder):
        def step(self, record):
            super().step(record)
            if record.number == 4:
                raise OSError("disk full")

    engine = Engine(Scheduler(SMALL), CheckingExecutor(SMALL), Failing())
    made = engine.submit(request([2, 3], 5, "ends", ignore_eos=True)) + engine.submit(
        request([2, 4], 9, "runs", ignore_eos=True)
    )
    assert collections.Counter(drain(engine)) == collections.Counter(made)
    assert_empty(engine)


class RefusingMask(ChainMask):
    """Finds fault with the third token."""

    def push(self, token):
        super().push(token)
        if self.count == 3:
            raise MaskError("not this token")


def test_a_token_that_the_mask_refuses_ends_its_choice():
    engine, _ = make(SMALL)
    made = engine.submit(request([2, 3], 9, mask=lambda: RefusingMask(waits=False), ignore_eos=True))[0]
    drain(engine)
    assert (made.finish_reason, made.error, len(made.generated)) == ("error", "not this token", 3)
    assert_empty(engine)


def test_a_stop_token_ends_a_choice_and_is_named():
    free = request([2, 3], 12, ignore_eos=True)
    stop = rollout(free, 0)[5]
    engine, _ = make(SMALL)
    made = engine.submit(dataclasses.replace(free, stop_token_ids=(stop,)))[0]
    drain(engine)
    assert (made.generated, made.finish_reason, made.stop_reason) == (rollout(made.request, 0), "stop", stop)


class Altering(CheckingExecutor):
    """Changes results on their way back."""

    alter = staticmethod(lambda plan, result: result)

    def dispatch(self, plan):
        super().dispatch(plan)
        self._queue[-1] = self.alter(plan, self._queue[-1])


def test_undefined_logits_end_only_the_choice_that_has_them():
    executor = Altering(SMALL)
    engine = Engine(Scheduler(SMALL), executor, Recorder())
    made = [engine.submit(request([2, 3, i], 8, f"r{i}", ignore_eos=True))[0] for i in range(3)]

    def alter(plan, result):
        decodes = result.decodes
        if decodes is not None and plan.number == 3:
            decodes.logprobs[plan.decodes.slots == made[1].slot] = np.nan
        return result

    executor.alter = alter
    drain(engine)
    assert (made[1].finish_reason, "undefined" in made[1].error) == ("error", True)
    assert made[1].generated == rollout(made[1].request, 0)[: len(made[1].generated)]
    assert len(made[1].generated) == 3
    assert all(s.generated == rollout(s.request, 0) for s in (made[0], made[2]))
    assert_empty(engine)


@pytest.mark.parametrize(
    ("kind", "warm"), [("first chunk", False), *((k, w) for k in ("last chunk", "decode") for w in (False, True))]
)
def test_pages_of_a_choice_with_undefined_logits_are_not_found_again(kind, warm):
    """Whoever wrote them: what they hold would spoil every later request with that prefix."""
    executor = Altering(SMALL)
    engine, prompt = Engine(Scheduler(SMALL), executor, Recorder()), np.arange(2, 38)
    if warm:
        engine.submit(request(prompt, 3, "owner", ignore_eos=True))
        drain(engine)
    bad = engine.submit(request(prompt, 12, "bad", ignore_eos=True))[0]

    def alter(plan, result):
        chunks = plan.ranks[0].prefills
        if chunks and kind == ("last chunk" if chunks[0].end == len(prompt) else "first chunk"):
            result.ranks[0].prefills.logprobs[:] = np.nan
        elif kind == "decode" and len(bad.generated) > 6:
            result.decodes.logprobs[:] = np.nan
        return result

    executor.alter = alter
    drain(engine)
    assert (bad.finish_reason, bad.first_cached > 0) == ("error", warm)
    executor.alter = lambda plan, result: result
    assert engine.stats().cached_pages == 0
    again = engine.submit(request(prompt, 3, "again", ignore_eos=True))[0]
    drain(engine)
    assert (again.first_cached, again.generated) == (0, rollout(again.request, 0))
    assert_empty(engine)


def test_prompt_logprobs_cover_the_prompt_once_without_hits_and_in_steps_of_their_own():
    cfg = dataclasses.replace(SMALL, pages=64)
    executor = Altering(cfg)
    engine = Engine(Scheduler(cfg), executor, Recorder())

    def alter(plan, result):
        (rank,), (outcome,) = plan.ranks, result.ranks
        assert len({c.prompt_logprobs >= 0 for c in rank.prefills}) <= 1, "programs with and without are mixed"
        parts = tuple(
            PromptLogprobs(np.arange(c.start, min(c.end, len(c.tokens) - 1), dtype=np.float32), None, None)
            if c.prompt_logprobs >= 0
            else None
            for c in rank.prefills
        )
        return dataclasses.replace(result, ranks=(dataclasses.replace(outcome, prompt_logprobs=parts),))

    executor.alter = alter
    prompt = np.arange(2, 42)
    engine.submit(request(prompt, 3, "warm"))
    drain(engine)
    asks = engine.submit(request(prompt, 3, "asks", n=2, prompt_logprobs=0, ignore_eos=True))
    plain = engine.submit(request(prompt[::-1].copy(), 3, "plain"))[0]
    engine.step()
    engine.step()
    executor.fail_next = 2  # its prefill starts anew
    drain(engine)
    for sequence in asks:
        assert sequence.first_cached == 0
        np.testing.assert_array_equal(np.concatenate([p.logprobs for p in sequence.prompt_logprobs]), np.arange(39))
        assert sequence.generated == rollout(sequence.request, sequence.index)
    assert plain.generated == rollout(plain.request, 0)
    assert executor.resets == executor.failures == 1


def test_time_between_tokens_spans_a_preemption():
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56)
    engine, _ = make(cfg)
    made = [engine.submit(request([i + 2] * 5, 40, f"r{i}", ignore_eos=True))[0] for i in range(4)]
    drain(engine)
    gaps = np.concatenate([record.inter_token_seconds for record in engine.observer.steps])
    ends = {r.request_id: r.finished - r.first_token for r in engine.observer.requests}
    assert len(gaps) == 4 * 39
    assert gaps.sum() == pytest.approx(sum(ends.values()))
    assert any(s.preemptions for s in made)


def test_a_prefix_is_sought_on_every_rank_and_load_is_spread():
    cfg = dataclasses.replace(SMALL, ranks=3, pages=40)
    engine, _ = make(cfg)
    prompt = np.arange(2, 42)
    ranks = set()
    for i in range(3):
        made = engine.submit(request([i + 2] * 20, 20, f"f{i}", ignore_eos=True))[0]
        engine.step()
        ranks.add(made.rank)
    assert ranks == {0, 1, 2}
    drain(engine)
    engine.submit(request([9] * 30, 30, "busy", ignore_eos=True))
    engine.step()
    cold = engine.submit(request(prompt, 3, "cold"))[0]
    engine.step()
    home = cold.rank
    assert home == 1
    drain(engine)
    warm = engine.submit(request(prompt, 3, "warm"))[0]
    engine.step()
    assert (warm.rank, warm.first_cached) == (home, 34)
    drain(engine)


def test_idle_means_that_no_step_is_in_flight():
    engine, executor = make(SMALL)
    made = engine.submit(request([2, 3], 30, ignore_eos=True))[0]
    engine.step()
    engine.step()
    engine.finish(made, "abort")
    assert not engine.idle
    drain(engine)
    assert engine.scheduler.steps_in_flight == 0 and not executor._queue


def test_engine_and_server_are_host_only():
    """They import neither JAX nor the model; only the executor of the steps does."""
    code = (
        "import sys, dsv4jax.engine.async_engine, dsv4jax.engine.recording, dsv4jax.engine.simulated\n"
        "import dsv4jax.engine.broadcast\n"
        "import dsv4jax.server.app\n"
        "print([m for m in ('jax', 'flax', 'dsv4jax.model', 'dsv4jax.steps') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_pages_that_a_running_request_shares_are_not_counted_again():
    cfg = dataclasses.replace(SMALL, pages=16)
    engine, _ = make(cfg)
    first = engine.submit(request(np.arange(2, 42), 12, "first", ignore_eos=True))[0]
    while first.first_token is None:
        engine.step()
    second = engine.submit(request(np.arange(2, 42), 4, "second", ignore_eos=True))[0]
    engine.step()
    assert second.slot >= 0 and second.pages[:10] == first.pages[:10]
    drain(engine)
    assert [s.generated for s in (first, second)] == [rollout(s.request, 0) for s in (first, second)]


def test_a_request_waits_while_the_running_ones_would_have_no_page_to_grow():
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56)
    engine, _ = make(cfg)
    running = [engine.submit(request([i + 2] * 9, 3, f"r{i}", ignore_eos=True))[0] for i in range(3)]  # 3 pages each
    engine.step()
    waits = engine.submit(request([9] * 9, 3, "waits", ignore_eos=True))[0]
    engine.step()
    assert engine.scheduler.ranks[0].pool.available == 5 and waits.slot < 0
    drain(engine)
    assert waits.scheduled >= min(r.finished for r in engine.observer.requests)
    assert not any(s.preemptions for s in (*running, waits))


def test_deterministic_reruns_of_generated_tokens_are_decoded_one_by_one():
    cfg = dataclasses.replace(EXACT, pages=14, max_model_len=56, deterministic=True)
    engine, executor = make(cfg)
    made = [engine.submit(request([i + 2] * 5, 40, f"r{i}", ignore_eos=True))[0] for i in range(4)]
    drain(engine)
    assert any(s.preemptions for s in made)
    chunks = [c for p in executor.plans for c in p.ranks[0].prefills]
    assert all(c.end <= 5 and len(c.tokens) == 5 for c in chunks)
    assert not any(start.generated for p in executor.plans for start in p.ranks[0].starts)
    assert all(s.generated == rollout(s.request, 0) for s in made)


def test_only_pages_written_by_prefill_are_reused_when_deterministic():
    for deterministic, cached in ((True, 12), (False, 36)):
        cfg = dataclasses.replace(
            EXACT, replay=ReplayRule(window=1, layers=1, mode="exact"), deterministic=deterministic
        )
        engine, _ = make(cfg)
        first = engine.submit(request(np.arange(2, 14), 27, "first", ignore_eos=True))[0]
        drain(engine)
        again = np.concatenate([np.arange(2, 14), first.generated])
        second = engine.submit(request(again, 3, "second"))[0]
        drain(engine)
        assert second.first_cached == cached


def test_more_prompts_than_one_step_takes_get_their_turns():
    cfg = dataclasses.replace(SMALL, slots=6, pages=200, max_model_len=128, max_admissions=6)
    engine, executor = make(cfg)
    for i in range(6):
        engine.submit(request(np.full(100, i + 2), 2, f"r{i}"))
    for _ in range(12):
        engine.step()
    slots = [{c.slot for c in p.ranks[0].prefills} for p in executor.plans[:12]]
    assert all(one | other == set(range(6)) for one, other in itertools.pairwise(slots))


def test_more_steps_in_flight_than_the_engine_uses_are_kept_apart():
    """The scheduler sets no limit: a choice may be in a slot again while steps of its former life are in flight."""
    cfg = dataclasses.replace(SMALL, pages=14, max_model_len=56, prefill_tokens=6)
    engine, _ = make(cfg)
    engine._depth = 4
    made = [engine.submit(request([i + 2] * (5 + 7 * i), 20, f"r{i}", ignore_eos=True))[0] for i in range(4)]
    drain(engine)
    assert any(s.preemptions for s in made)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert_empty(engine)


def test_only_what_took_part_in_a_failing_step_is_blamed():
    cfg = dataclasses.replace(SMALL, slots=6, pages=200, max_model_len=128, max_admissions=6)
    engine, executor = make(cfg, depth=1)
    made = [engine.submit(request(np.full(100, i + 2), 2, f"r{i}"))[0] for i in range(6)]
    engine.step()
    executor.fail_next = 2
    engine.step()
    took_part = {c.slot for c in executor.plans[-1].ranks[0].prefills}
    assert len(took_part) == 3
    assert sorted(s.failures for s in made) == [0, 0, 0, 1, 1, 1]
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)


@pytest.mark.parametrize("tokens", [6, 7])
def test_a_mask_made_for_a_preempted_choice_does_not_reach_the_next_one_in_its_slot(tokens):
    cfg = dataclasses.replace(SMALL, slots=2, pages=5, max_model_len=20)
    engine, _ = make(cfg)
    made = [
        engine.submit(request([2] * size, 12, name, ignore_eos=True, priority=priority, mask=mask))[0]
        for name, size, priority, mask in (
            ("better", 4, 0, functools.partial(ChainMask, waits=True)),
            ("worse", tokens, 1, functools.partial(ChainMask, waits=False)),
        )
    ]
    engine.step()
    assert all(s.slot >= 0 for s in made)
    made += [engine.submit(request([3, i], 3, f"next{i}", ignore_eos=True))[0] for i in range(2, 5)]
    drain(engine)
    assert made[1].preemptions > 0
    assert all(s.generated == rollout(s.request, 0) for s in made)


def test_a_step_of_a_former_life_does_not_count():
    scheduler = Scheduler(SMALL)
    made = scheduler.prepare(request([2, 3, 4], 5, ignore_eos=True))
    scheduler.submit(made, 0.0)
    first, _ = scheduler.schedule(0.0)
    scheduler._preempt(made[0])
    second, _ = scheduler.schedule(0.0)
    assert made[0].slot >= 0 and second.ranks[0].prefills
    for number, token in ((first.number, 7), (second.number, 8)):
        sampled = Sampled(np.array([token], np.int32), np.zeros(1, np.float32))
        scheduler.update(StepResult(number, (RankResult(sampled),), 1.0), 1.0)
    assert made[0].generated == [8]
