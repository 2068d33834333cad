"""Workloads through an engine: what is recorded of them, in open and closed loops."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulated import CFG, NO_CONTEXT, SEVENS

from dsv4jax.bench.traffic.counting import Window, summarize
from dsv4jax.bench.traffic.driver import OpenLoop, Turn, run_engine
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.records import Observer
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import SimulatedExecutor, fixed_acceptance

RANKS = dataclasses.replace(CFG, ranks=2)


class Silent(Observer):
    pass


def make(cfg=CFG, tokens=SEVENS, **options):
    executor = SimulatedExecutor(NO_CONTEXT, tokens, **options)
    return Engine(Scheduler(cfg), executor, Silent()), executor


def ask(arrives, tokens=100, max_tokens=10, seed=0, **options):
    prompt = np.random.default_rng(seed).integers(2, 1000, tokens).astype(np.int32)
    return Turn(options.pop("session", ""), options.pop("turn", 0), arrives, prompt, max_tokens, **options)


class Sessions:
    """Each of so many sessions sends its history again after a second, with ten new tokens."""

    def __init__(self, sessions: int, turns: int):
        self.sessions, self.turns, self.outputs = sessions, turns, []

    def first(self):
        return [ask(0.25 * i, 128, seed=i, session=f"s{i}") for i in range(self.sessions)]

    def after(self, turn, output, finished):
        self.outputs.append((turn, output, finished))
        if turn.turn + 1 == self.turns:
            return []
        prompt = np.concatenate([turn.prompt, output, np.full(10, 5, np.int32)])
        expected = len(turn.prompt) + len(output)
        following = dict(turn=turn.turn + 1, arrives=finished + 1.0, prompt=prompt, expected_cached_tokens=expected)
        return [dataclasses.replace(turn, **following)]


def test_an_open_loop_on_the_virtual_clock():
    engine, executor = make()
    executor.advance(1234.5)  # the run's times are its own
    run = run_engine(engine, executor, OpenLoop([ask(2.0), ask(2.0, seed=1), ask(50.0)]), progress=False)
    first, second, third = sorted(run.measurements, key=lambda m: m.request_id)
    assert run.began == 1234.5 and not run.interrupted and engine.idle
    # A step of 10 ms, 0.1 ms for each token of a prompt and 1 ms for each decoding request.
    assert first.scheduled == pytest.approx(2.0) and first.first_token == pytest.approx(2.03)
    assert second.first_token == pytest.approx(2.03) and second.finished == pytest.approx(2.03 + 9 * 0.012)
    np.testing.assert_allclose(first.chunk_seconds, 2.03 + 0.012 * np.arange(10))
    assert first.chunk_tokens == (1,) * 10 and first.output_tokens == 10 and first.finish_reason == "length"
    # A hit of one page, whose window is run again.
    assert third.cached_tokens == 0 and third.scheduled == pytest.approx(50.0)
    assert run.ended == pytest.approx(third.finished)
    assert len(run.steps) == len(run.step_ends) and run.step_ends[-1] == pytest.approx(run.ended)
    assert sum(step.output_tokens for step in run.steps) == 30
    assert isinstance(engine.observer, Silent)  # the engine's own is there again


def test_a_closed_loop_goes_on_with_what_came_out():
    (engine, executor), sessions = make(RANKS), Sessions(3, 4)
    run = run_engine(engine, executor, sessions, progress=False)
    assert len(run.measurements) == 12
    for (turn, output, finished), m in zip(sessions.outputs, run.measurements, strict=True):
        assert (m.session, m.turn, m.finished) == (turn.session, turn.turn, finished)
        assert output.tolist() == [7] * 10 and m.prompt_tokens == len(turn.prompt) == 128 + 20 * turn.turn
        assert m.expected_cached_tokens == (108 + 20 * turn.turn + 10 if turn.turn else None)
    for session in ("s0", "s1", "s2"):
        turns = [m for m in run.measurements if m.session == session]
        assert [m.turn for m in turns] == [0, 1, 2, 3]
        for before, after in itertools.pairwise(turns):
            assert after.arrived == pytest.approx(before.finished + 1.0)
        # The session's own pages are on its rank; the window before the hit is run again.
        assert len({m.rank for m in turns}) == 1
    summary = summarize(run.measurements, Window(0.0, run.ended), devices=2)
    assert summary.requests == 12 and summary.throughput.output * run.ended == pytest.approx(120)


def test_turns_run_on_the_ranks_they_ask_for():
    engine, executor = make(RANKS)
    turns = [ask(0.0, seed=i, rank=1, max_tokens=3) for i in range(5)] + [ask(0.5, rank=7)]
    run = run_engine(engine, executor, OpenLoop(turns), progress=False)
    *served, refused = run.measurements
    assert [m.rank for m in served] == [1] * 5
    assert refused.failed and refused.error == "rank = 7: must be 0 to 1, or None" and refused.finished == 0.5


def test_a_run_that_is_cut_short_keeps_what_it_has():
    engine, executor = make()
    turns = [ask(0.0, max_tokens=5), ask(0.0, max_tokens=1000), ask(1e9)]
    run = run_engine(engine, executor, OpenLoop(turns), until=1.0, progress=False)
    assert [m.finish_reason for m in run.measurements] == ["length", "unfinished"]
    unfinished = run.measurements[1]
    assert unfinished.finished == run.ended >= 1.0 and unfinished.output_tokens > 50
    assert engine.idle and run_engine(engine, executor, OpenLoop([ask(0.0)]), progress=False).measurements[0].complete


def test_ctrl_c_ends_a_run():
    calls = itertools.count()

    def tokens(rank, slots, positions):
        if next(calls) == 20:
            raise KeyboardInterrupt
        return np.full(len(slots), 7, np.int32)

    engine, executor = make(tokens=tokens)
    run = run_engine(engine, executor, OpenLoop([ask(0.0, max_tokens=5), ask(0.0, max_tokens=50)]), progress=False)
    assert run.interrupted and [m.finish_reason for m in run.measurements] == ["length", "unfinished"]
    assert run.measurements[1].output_tokens == 19  # the step in flight is lost with the 21st


def test_refused_turns_are_failed_requests_and_wrong_workloads_are_errors():
    engine, executor = make(dataclasses.replace(CFG, max_waiting=1, slots=1))
    run = run_engine(engine, executor, OpenLoop([ask(0.0), ask(0.0), ask(0.0, 200_000)]), progress=False)
    full, long, served = run.measurements
    assert full.error.startswith("1 of at most 1 requests are waiting") and "exceed the context" in long.error
    assert served.complete and not full.complete and full.failed
    with pytest.raises(ValueError, match=r"arrives = 1.0: must not be before 2.0"):
        run_engine(engine, executor, OpenLoop([ask(2.0), ask(1.0)]), progress=False)

    class Early(OpenLoop):
        def after(self, turn, output, finished):
            return [dataclasses.replace(turn, arrives=0.0)]

    engine, executor = make()
    with pytest.raises(ValueError, match=r"arrives = 0.0: must not be before"):
        run_engine(engine, executor, Early([ask(0.0)]), progress=False)
    engine.submit(GenerationRequest("r", np.ones(1, np.int32), 1))
    with pytest.raises(ValueError, match="engine: must be idle"):
        run_engine(engine, executor, OpenLoop([]), progress=False)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.booleans(),
    st.floats(0, 1e6),
)
def test_every_turn_is_recorded_once_and_completely(turns, ranks, drafts, began):
    cfg = dataclasses.replace(CFG, ranks=ranks, slots=2, pages=60, max_model_len=1000, drafts=3 * drafts)
    engine, executor = make(cfg, acceptance=fixed_acceptance([0.8, 0.5, 0.5]))
    executor.advance(began)
    asked = [ask(a, n, k, seed=i) for i, (a, n, k) in enumerate(sorted(turns))]
    run = run_engine(engine, executor, OpenLoop(asked), progress=False)
    found = {int(m.request_id): m for m in run.measurements}
    assert sorted(found) == list(range(len(asked))) and len(run.measurements) == len(asked)
    for i, turn in enumerate(asked):
        m = found[i]
        assert m.complete and m.output_tokens == turn.max_tokens and m.prompt_tokens == len(turn.prompt)
        assert (m.arrived, m.queued) == (turn.arrives, turn.arrives) and 0 <= m.rank < ranks
    assert sum(step.output_tokens for step in run.steps) == sum(turn.max_tokens for turn in asked)


def test_on_a_clock_that_does_not_wait_to_be_told():
    class Real:
        """Runs at once."""

        def __init__(self):
            simulated = SimulatedExecutor(NO_CONTEXT, SEVENS)
            self.dispatch, self.wait, self.now = simulated.dispatch, simulated.wait, time.monotonic

    executor = Real()
    engine = Engine(Scheduler(CFG), executor, Silent())
    run = run_engine(engine, executor, OpenLoop([ask(0.02 * i, max_tokens=4) for i in range(3)]), progress=False)
    assert [m.output_tokens for m in run.measurements] == [4, 4, 4]
    for m in run.measurements:
        assert m.arrived < m.queued <= m.scheduled < m.first_token < m.finished == m.chunk_seconds[-1]
