"""Recordings: the same schedule comes back from a file, and the first difference is named."""

import dataclasses
import json

import numpy as np
import pytest
from engine_model import VOCAB, CheckingExecutor, rollout
from test_scheduler import EXACT, SMALL, Recorder, drain, request

from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import Prefill, RankPlan, RankResult, Sampled, SlotMask, SlotStart, StepPlan, StepResult
from dsv4jax.engine.recording import (
    Event,
    RecordingExecutor,
    ReplayDifference,
    ReplayExecutor,
    load_recording,
    plan_difference,
    save_recording,
    schedule_difference,
)
from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor
from dsv4jax.sampling_settings import RequestSampling


class AlternatingMask:
    """Allows all tokens, then only the lower half, and so on."""

    waits_for_tokens = False
    unchanged_for = 1
    pause_tokens = ()

    def __init__(self):
        self.count = 0
        self.masks = [None, np.array([0x1FFFFFF, 0], np.uint32)]

    def next(self, ahead=0):
        return self.masks[(self.count + ahead) % 2]

    def along(self, drafts):
        return [self.masks[(self.count + i) % 2] for i in range(len(drafts) + 1)]

    def push(self, token):
        self.count += 1


def drive(executor, cfg=SMALL, failures=()):
    """A busy time: shared prefixes, priorities, aborts, masks, preemptions."""
    engine = Engine(Scheduler(cfg), executor, Recorder())
    rng, made = np.random.default_rng(0), []
    base = rng.integers(2, VOCAB, 40)
    for i in range(60):
        if i % 2 == 0:
            prompt = np.concatenate([base[: rng.integers(40)], rng.integers(2, VOCAB, 1 + rng.integers(8))])
            sampling = RequestSampling(seed=i, temperature=0.7)
            options = {"n": 1 + i % 3, "priority": i % 4 // 3, "logit_bias": {3: 1.5, i: -2.0}}
            mask = AlternatingMask if i % 8 == 0 else None
            made += engine.submit(request(prompt, 10, f"r{i}", sampling=sampling, mask=mask, **options))
        if i % 7 == 0:
            engine.finish(made[i // 2], "abort")
        if i in failures:
            executor._executor.fail_next = failures[i]
        for _ in range(i % 3):
            engine.step()
    drain(engine)
    return made


def record(cfg=SMALL, failures=()):
    executor = RecordingExecutor(CheckingExecutor(cfg))
    return executor.events, drive(executor, cfg, failures)


@pytest.fixture(scope="module")
def recorded():
    return record()


def outcome(made):
    return [(s.generated, s.finish_reason, s.first_cached, s.preemptions, s.first_token) for s in made]


@pytest.mark.parametrize(
    "cfg", [SMALL, EXACT, dataclasses.replace(SMALL, ranks=2, pages=16), dataclasses.replace(SMALL, drafts=4)]
)
def test_a_replay_from_a_file_gives_the_same_outcome(tmp_path, cfg):
    events, made = record(cfg)
    save_recording(events, tmp_path / "recording.jsonl")
    loaded = load_recording(tmp_path / "recording.jsonl")
    assert schedule_difference(events, loaded) is None
    replay = ReplayExecutor(loaded)
    again = drive(replay, cfg)
    assert outcome(again) == outcome(made)
    assert replay.left == 0
    assert replay.now() == events[-1].time
    assert all(s.generated == rollout(s.request, s.index) for s in again if s.finish_reason in ("stop", "length"))


def test_failures_are_replayed_too(tmp_path):
    events, made = record(failures={20: 1, 30: 2})
    errors = {e.kind: e.error for e in events if e.error}
    assert errors == {
        "dispatch": "RuntimeError: injected failure in dispatch",
        "wait": "RuntimeError: injected failure in wait",
    }
    assert sum(e.kind == "reset" for e in events) == 2
    save_recording(events, tmp_path / "recording.jsonl")
    again = drive(ReplayExecutor(load_recording(tmp_path / "recording.jsonl")))
    assert outcome(again) == outcome(made)


def test_the_schedule_does_not_depend_on_the_executor(recorded):
    events, made = recorded
    results = [e.result for e in events if e.result]
    sampled = iter([s for r in results for s in (*(rank.prefills for rank in r.ranks), r.decodes) if s])
    simulated = RecordingExecutor(SimulatedExecutor(LinearCost(), lambda rank, slots, positions: next(sampled).tokens))
    again = drive(simulated)
    assert schedule_difference(events, simulated.events) is None
    assert [s.generated for s in again] == [s.generated for s in made]


def test_another_schedule_ends_the_replay_at_the_first_difference(recorded):
    events, _ = recorded
    executor = ReplayExecutor(events)
    with pytest.raises(ReplayDifference, match=r"^step \d+, ranks\[0\], \w+.* recorded, .* now$"):
        drive(executor, dataclasses.replace(SMALL, max_admissions=1))
    with pytest.raises(ReplayDifference):
        executor.wait()
    with pytest.raises(ReplayDifference):
        executor.reset()
    other = RecordingExecutor(CheckingExecutor(SMALL))
    drive(other, dataclasses.replace(SMALL, max_admissions=1))
    assert schedule_difference(events, other.events).startswith("step ")


def test_a_replay_asked_for_more_or_for_something_else_says_so(recorded):
    events, _ = recorded
    last = max(i for i, event in enumerate(events) if event.kind == "dispatch")
    with pytest.raises(ReplayDifference, match="dispatch where the recording ends"):
        drive(ReplayExecutor(events[:last]))
    with pytest.raises(ReplayDifference, match="wait where the recording has dispatch"):
        ReplayExecutor(events).wait()
    steps = events[last].plan.number + 1
    assert schedule_difference(events, events[:last]) == f"{steps} steps and {steps - 1}"
    assert schedule_difference(events[:last], events) == f"{steps - 1} steps and {steps}"


def change(plan, what, **values):
    if what == "decodes":
        return dataclasses.replace(plan, decodes=dataclasses.replace(plan.decodes, **values))
    (rank,) = plan.ranks
    old = getattr(rank, what)
    new = (dataclasses.replace(old[0], **values), *old[1:])
    return dataclasses.replace(plan, ranks=(dataclasses.replace(rank, **{what: new}),))


@pytest.mark.parametrize(
    ("what", "values", "message"),
    [
        ("starts", {"slot": 9}, r"starts\[0\], slot: \d recorded, 9 now"),
        ("starts", {"tokens": np.array([5], np.int32)}, r"starts\[0\], tokens: \d+ entries recorded, 1 now"),
        ("starts", {"generated": 7}, r"starts\[0\], generated: 0 recorded, 7 now"),
        ("starts", {"sampling": RequestSampling(seed=-5)}, r"starts\[0\], sampling, temperature: 0.7 recorded, 1"),
        ("starts", {"logit_bias": {3: 2.5}}, r"starts\[0\], logit_bias: 2 entries recorded, 1 now"),
        ("masks", {"mask": np.array([1, 0], np.uint32)}, r"masks\[0\]\[1\]: 'ffffff0100000000' recorded, '01000000"),
        ("masks", {"mask": None}, r"masks\[0\]\[1\]: 'ffffff0100000000' recorded, None now"),
        ("prefills", {"end": 99}, r"prefills\[0\], end: \d+ recorded, 99 now"),
        ("prefills", {"cached": 99}, r"prefills\[0\], cached: \d+ recorded, 99 now"),
        ("prefills", {"window_floor": 99}, r"prefills\[0\], window_floor: \d+ recorded, 99 now"),
        ("prefills", {"pages": np.array([9], np.int32)}, r"prefills\[0\], pages"),
        ("prefills", {"tokens": np.array([9], np.int32)}, r"prefills\[0\], tokens: not those recorded"),
        ("decodes", {"ranks": np.array([9], np.int32)}, "decodes, ranks"),
        ("decodes", {"slots": np.array([9], np.int32)}, "decodes, slots"),
        ("decodes", {"starts": np.array([9], np.int32)}, "decodes, starts"),
        ("decodes", {"tokens": np.array([9], np.int32)}, "decodes, tokens"),
        ("decodes", {"page_tables": {0: np.array([[9]], np.int32)}}, "decodes, page_tables"),
    ],
)
def test_every_field_of_a_plan_is_compared(recorded, what, values, message):
    events, _ = recorded

    def wanted(plan):
        found = plan.decodes if what == "decodes" else getattr(plan.ranks[0], what)
        return found and (what != "masks" or found[0].mask is not None)

    plan = next(e.plan for e in events if e.plan and wanted(e.plan))
    assert plan_difference(plan, plan) is None
    with pytest.raises(ReplayDifference, match=message):
        ReplayExecutor([Event("dispatch", 0.0, plan)]).dispatch(change(plan, what, **values))


def test_results_come_back_from_a_file_exactly(tmp_path):
    floats = np.array([-0.1, np.nan, -1e-30], np.float32)
    tops = np.ones((3, 20), np.int32), np.full((3, 20), -0.3, np.float32)
    sampled = Sampled(np.array([1, 2, 3], np.int32), floats, *tops)
    parts = (
        PromptLogprobs(floats, np.ones((3, 2), np.int32), np.full((3, 2), -0.7, np.float32)),
        None,
        PromptLogprobs(floats[:0], np.ones((0, 2), np.int32), np.ones((0, 2), np.float32)),
    )
    ranks = RankResult(sampled, parts), RankResult(None)
    result = StepResult(4, ranks, 0.25, 0.5, Sampled(sampled.tokens, floats))
    save_recording([Event("wait", 1.5, result=result)], tmp_path / "r.jsonl")
    (event,) = load_recording(tmp_path / "r.jsonl")
    assert (event.kind, event.time, event.error) == ("wait", 1.5, None)
    assert (event.result.number, event.result.seconds, event.result.gap_seconds) == (4, 0.25, 0.5)
    first, second = event.result.ranks
    assert second.prefills is event.result.speculation is None and second.prompt_logprobs == ()
    logprobs, decodes = first.prompt_logprobs, event.result.decodes
    assert decodes.top_tokens is None and logprobs[1] is None
    np.testing.assert_array_equal(decodes.logprobs, floats)
    for new, old in [(first.prefills, sampled), (logprobs[0], parts[0]), (logprobs[2], parts[2])]:
        for field in dataclasses.fields(old):
            a, b = getattr(new, field.name), getattr(old, field.name)
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(a, b)


def test_a_prompt_is_written_once(tmp_path):
    tokens = np.arange(100_000, dtype=np.int32)
    pages = np.zeros(1, np.int32)

    def plan(number, starts):
        chunk = Prefill(0, tokens, number, number + 1, pages, 0, 0)
        return Event("dispatch", 0.0, StepPlan(number, (RankPlan(starts, (), (chunk,)),)))

    start = SlotStart(0, tokens, 0, RequestSampling(), {})
    events = [plan(0, (start,)), *(plan(i, ()) for i in range(1, 50))]
    save_recording(events, tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").stat().st_size < 8 * len(tokens)
    loaded = load_recording(tmp_path / "r.jsonl")
    assert np.array_equal(loaded[-1].plan.ranks[0].prefills[0].tokens, tokens)
    with pytest.raises(ValueError, match="step 1: slot 0 was not started with these tokens"):
        save_recording(events[1:], tmp_path / "r.jsonl")


def test_masks_come_back_from_a_file(tmp_path):
    mask = np.array([0xDEADBEEF, 1], np.uint32)
    by_place = np.stack([mask, ~mask])
    rank = RankPlan((), (SlotMask(2, mask), SlotMask(3, None), SlotMask(4, by_place)), ())
    save_recording([Event("dispatch", 0.0, StepPlan(0, (rank,)))], tmp_path / "r.jsonl")
    first, second, third = load_recording(tmp_path / "r.jsonl")[0].plan.ranks[0].masks
    assert (first.slot, first.mask.tolist()) == (2, mask.tolist()) and first.mask.dtype == np.uint32
    assert (second.slot, second.mask) == (3, None)
    assert third.mask.tolist() == by_place.tolist() and third.mask.dtype == np.uint32


@pytest.mark.parametrize("header", ["", "{}\n", json.dumps({"recording": "dsv4jax.engine", "version": 1}) + "\n"])
def test_other_files_are_refused(tmp_path, header):
    (tmp_path / "r.jsonl").write_text(header)
    with pytest.raises(ValueError, match=r"r\.jsonl: not a recording of version 5"):
        load_recording(tmp_path / "r.jsonl")
