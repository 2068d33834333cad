"""The simulated executor: its clock, and what the policy promises on it."""

import dataclasses
import zlib

import numpy as np
import pytest
from test_scheduler import Recorder, assert_empty

from dsv4jax.bench.traffic.driver import OpenLoop, Turn, run_engine
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import Decodes, Prefill, RankPlan, StepPlan
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor, constant_tokens
from dsv4jax.sampling_settings import RequestSampling

CFG = SchedulerConfig(
    slots=16,
    pages=2000,
    max_model_len=100_000,
    eos_id=1,
    replay=ReplayRule(window=128, layers=4),
    prefill_tokens=512,
)
NO_CONTEXT = LinearCost(step=0.01, prefill_token=1e-4, prefill_pair=0, decode_token=1e-3, decode_context=0)


SEVENS = constant_tokens(7)


def make(cfg=CFG, cost=NO_CONTEXT, tokens=SEVENS):
    executor = SimulatedExecutor(cost, tokens)
    return Engine(Scheduler(cfg), executor, Recorder()), executor


def request(name, tokens, max_tokens, **options):
    prompt = np.random.default_rng(zlib.crc32(name.encode())).integers(2, 1000, tokens).astype(np.int32)
    return GenerationRequest(name, prompt, max_tokens, **options)


def test_cost_of_a_step_is_that_of_its_slowest_rank():
    pages = np.zeros(1, np.int32)
    chunks = (
        Prefill(0, np.zeros(100, np.int32), 10, 30, pages, 0, 0),
        Prefill(1, np.zeros(9, np.int32), 0, 4, pages, 0, 0),
    )
    busy, idle = RankPlan((), (), chunks), RankPlan((), (), ())

    def decodes(rank):
        table = {rank: np.zeros((2, 1), np.int32)}
        return Decodes(np.full(2, rank), np.arange(2), table, np.array([1000, 3000]), np.full(2, -1))

    cost = LinearCost(step=1, prefill_token=10, prefill_pair=100, decode_token=1000, decode_context=10_000)
    expected = 1 + 24 * 10 + 100 * (20 * 20 + 4 * 2) + 2 * 1000 + 4000 * 10_000
    assert cost(StepPlan(0, (busy,), decodes(0))) == pytest.approx(expected)
    assert cost(StepPlan(0, (idle, busy, idle), decodes(1))) == pytest.approx(expected)
    assert cost(StepPlan(0, (idle,))) == 1


def test_the_clock_is_that_of_the_device_and_overlapping_steps_leave_no_gap():
    engine, executor = make()
    (sequence,) = engine.submit(request("r", 500, 10))
    while not engine.idle:
        engine.step()
    assert sequence.first_token == pytest.approx(0.01 + 500e-4)
    assert executor.now() == pytest.approx(0.06 + 9 * 0.011)
    steps = engine.observer.steps
    np.testing.assert_allclose(np.concatenate([s.inter_token_seconds for s in steps]), 0.011)
    assert sum(s.gap_seconds for s in steps) == 0
    assert sum(s.device_seconds for s in steps) == pytest.approx(executor.now())


def test_a_slow_host_shows_as_a_gap_but_an_idle_engine_does_not():
    engine, executor = make()
    engine.submit(request("r", 10, 10))
    for _ in range(4):
        engine.step()
    executor.advance(1.0)
    while not engine.idle:
        engine.step()
    gap = engine.stats().gap_seconds
    assert gap == pytest.approx(1.0 - 0.011)  # one step was in flight meanwhile
    executor.advance(5.0)
    engine.submit(request("s", 10, 10))
    while not engine.idle:
        engine.step()
    assert engine.stats().gap_seconds == pytest.approx(gap)


def run(engine, executor, turns):
    """The requests by their order of arrival."""
    found = run_engine(engine, executor, OpenLoop(turns), progress=False).measurements
    assert_empty(engine)
    return sorted(found, key=lambda m: int(m.request_id))


def turn(arrives, name, tokens, max_tokens):
    return Turn(name, 0, arrives, request(name, tokens, max_tokens).prompt, max_tokens)


def test_traffic_arrives_at_its_times_and_a_full_queue_turns_it_away():
    engine, executor = make(dataclasses.replace(CFG, slots=1, max_waiting=2))
    arrivals = [turn(0.0, "a", 100, 50), *(turn(1.0, f"b{i}", 100, 5) for i in range(5)), turn(30.0, "late", 100, 5)]
    found = run(engine, executor, arrivals)
    assert [m.session for m in found if m.finish_reason == "length"] == ["a", "b0", "b1", "late"]
    assert [m.arrived for m in found] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 30.0]
    assert found[-1].first_token == pytest.approx(30.02)
    assert all("of at most 2 requests are waiting" in m.error for m in found if m.finish_reason != "length")


def test_a_request_that_arrives_during_a_step_waits_for_it():
    engine, executor = make()
    first, second = run(engine, executor, [turn(0.0, "a", 5000, 5), turn(0.001, "b", 16, 5)])
    assert second.arrived == 0.001
    assert second.first_token > 0.01 + 512e-4  # the step under way and the one behind it come first
    assert second.first_token < first.first_token


def test_an_hour_of_traffic_is_conserved():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1.8, 2000))
    traffic = [turn(t, f"r{i}", int(rng.integers(20, 2000)), int(rng.integers(1, 8))) for i, t in enumerate(times)]
    engine, executor = make()
    found = run(engine, executor, traffic)
    assert 3300 < executor.now() < 3900
    stats = engine.stats()
    assert stats.output_tokens == sum(t.max_tokens for t in traffic) == sum(m.output_tokens for m in found)
    assert stats.computed_tokens + stats.cached_tokens == sum(len(t.prompt) for t in traffic)
    assert all(m.arrived <= m.scheduled <= m.first_token for m in found)


@pytest.mark.parametrize(("prefill_every", "decode_every"), [(1, 1), (3, 1), (1, 3)])
def test_a_very_long_prompt_delays_a_chat_by_a_bounded_time(prefill_every, decode_every):
    """Between two tokens of a chat there are at most `decode_every` steps, none of more than `prefill_tokens`."""
    tokens, chats = 60_000, 6
    cfg = dataclasses.replace(CFG, prefill_every=prefill_every, decode_every=decode_every)
    cost = LinearCost()
    engine, _ = make(cfg, cost)
    for i in range(chats):
        engine.submit(request(f"chat{i}", 300, 5000))
    while engine.scheduler.waiting or engine.scheduler.ranks[0].prefilling:
        engine.step()
    engine.step()
    begin = len(engine.observer.steps)
    (long,) = engine.submit(request("long", tokens, 4))
    later = []
    while long.first_token is None:
        if len(later) < 5:
            later += engine.submit(request(f"later{len(later)}", 300, 3))
        engine.step()
    gaps = np.concatenate([s.inter_token_seconds for s in engine.observer.steps[begin:]])
    longest_step = (
        cost.step
        + cfg.prefill_tokens * (cost.prefill_token + cost.prefill_pair * tokens)
        + cfg.slots * (cost.decode_token + cost.decode_context * 6000)
    )
    assert gaps.max() <= decode_every * longest_step
    assert gaps.max() > 0.5 * decode_every * (longest_step - cost.step)
    assert all(s.finish_reason == "length" for s in later), "chats that came later went past the long prompt"


def test_logprobs_come_in_the_shapes_that_were_asked_for():
    engine, _ = make()
    (sequence,) = engine.submit(
        request("r", 1000, 3, prompt_logprobs=2, sampling=RequestSampling(temperature=0.0, top_logprobs=4))
    )
    while not engine.idle:
        engine.step()
    assert sum(len(part.logprobs) for part in sequence.prompt_logprobs) == 999
    assert {part.top_tokens.shape[1] for part in sequence.prompt_logprobs} == {2}
    assert [len(top) for top in sequence.top_logprobs] == [4, 4, 4]


def test_a_reset_drops_what_is_in_flight():
    executor = SimulatedExecutor(NO_CONTEXT, constant_tokens(7))
    nothing = RankPlan((), (), ())
    executor.dispatch(StepPlan(0, (nothing,)))
    executor.reset()
    executor.dispatch(StepPlan(1, (nothing,)))
    assert (executor.wait().number, executor.now()) == (1, pytest.approx(0.01))
