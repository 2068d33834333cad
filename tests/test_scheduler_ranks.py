"""What the scheduler promises over several ranks that step together: placement, spread, chunks."""

import dataclasses
import itertools

import numpy as np
import pytest
from engine_model import EOS, CheckingExecutor, rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import SMALL, Recorder, assert_empty, drain, make, prompts, request

from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import RankPlan
from dsv4jax.engine.recording import RecordingExecutor, plan_difference, schedule_difference
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor, constant_tokens

LARGE = SchedulerConfig(
    slots=64, pages=20_000, max_model_len=500_000, eos_id=EOS, replay=ReplayRule(window=128, layers=4), ranks=8
)
EMPTY = RankPlan((), (), ())


def simulated(cfg=LARGE, cost=None):
    executor = SimulatedExecutor(cost or LinearCost(), constant_tokens(7))
    return Engine(Scheduler(cfg), executor, Recorder()), executor


def ask(name, prompt, max_tokens=50, **options):
    return GenerationRequest(name, np.asarray(prompt, np.int32), max_tokens, ignore_eos=True, **options)


def fresh(rng, tokens):
    return rng.integers(2, 1000, tokens).astype(np.int32)


def running(engine):
    return [rank.running for rank in engine.stats().ranks]


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 8),
    traffic=st.lists(st.tuples(prompts(), st.integers(1, 12), st.integers(0, 3)), min_size=3, max_size=20),
)
def test_the_same_requests_are_placed_and_run_the_same_way_each_time(ranks, traffic):
    def run():
        cfg = dataclasses.replace(SMALL, ranks=ranks, slots=2, pages=16)
        executor = RecordingExecutor(CheckingExecutor(cfg))
        engine = Engine(Scheduler(cfg), executor, Recorder())
        for i, (prompt, tokens, steps) in enumerate(traffic):
            engine.submit(request(prompt, tokens, f"r{i}"))
            for _ in range(steps):
                engine.step()
        drain(engine)
        return executor.events

    assert schedule_difference(run(), run()) is None


@settings(max_examples=60)
@given(ranks=st.integers(1, 8), lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=60))
def test_ranks_differ_by_no_more_than_one_request(ranks, lengths):
    """Without hits, the load of two ranks differs by at most the largest request's; equal ones are dealt evenly."""
    cfg = dataclasses.replace(LARGE, ranks=ranks, max_admissions=64, prefix_cache=False)
    for chosen in (lengths, [lengths[0]] * len(lengths)):
        engine, _ = simulated(cfg)
        for i, length in enumerate(chosen):
            engine.submit(ask(f"r{i}", np.full(length, 5)))
        engine.scheduler._admit(0.0)
        ranks_now = engine.stats().ranks
        loads, numbers = [r.load for r in ranks_now], [r.running for r in ranks_now]
        assert sum(numbers) == len(lengths)
        assert max(loads) - min(loads) <= max(chosen) * (1 + 1 / 32) + 260
        if chosen is not lengths:
            assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize("tokens", [2000, 10_000])
def test_a_hot_prefix_draws_requests_until_its_rank_has_that_much_more_to_do_and_then_spreads(tokens):
    rng = np.random.default_rng(0)
    prefix = fresh(rng, tokens)
    engine, _ = simulated()
    engine.submit(ask("first", prefix, 1))
    drain(engine)
    made = []
    for i in range(256):
        own = fresh(rng, 100)
        made += engine.submit(ask(f"r{i}", np.concatenate([prefix, own]), 2000))
        engine.step()
        lead = np.ptp([rank.load for rank in engine.stats().ranks])
        assert lead <= tokens + 1000, "a rank is ahead by more than the prefix is worth"
    assert [s.rank for s in made[:5]] == [0] * 5, "while its rank has little to do, a hit decides"
    ranks = engine.stats().ranks
    assert min(rank.prefix_hits for rank in ranks) > tokens, "the prefix is found on every rank"
    assert min(running(engine)) >= 16
    computed = sum(len(s.request.prompt) - s.first_cached for s in made)
    assert computed < 20 * tokens + 256 * (100 + 128 + 64), "the prefix is run about once per rank"


def test_a_conversation_stays_where_its_pages_are_while_loads_are_alike():
    rng = np.random.default_rng(1)
    engine, _ = simulated()
    histories = [fresh(rng, 3000) for _ in range(24)]
    homes = []
    for _turn in range(4):
        made, homes = [], [*homes, []]
        for i, history in enumerate(histories):
            made += engine.submit(ask(f"c{i}", history))
            while made[-1].rank < 0:
                engine.step()
            homes[-1].append(made[-1].rank)
            while made[-1].first_token is None:
                engine.step()
        drain(engine)
        histories = [np.concatenate([s.request.prompt, s.generated, fresh(rng, 200)]) for s in made]
    assert all(homes[0] == later for later in homes[1:])
    assert set(homes[0]) == set(range(8))


def parts(executor, rank):
    """The rank's part of each step, on its own."""
    return [
        dataclasses.replace(plan, ranks=(plan.ranks[rank],), decodes=plan.decodes and plan.decodes.of_rank(rank))
        for plan in executor.plans
    ]


@settings(max_examples=60)
@given(ranks=st.integers(2, 8), after=st.integers(1, 12), data=st.data())
def test_requests_that_end_on_one_rank_change_nothing_on_the_others(ranks, after, data):
    cfg = dataclasses.replace(SMALL, ranks=ranks, slots=3, max_admissions=8)
    aborted = data.draw(st.integers(0, ranks - 1))

    def run(abort):
        engine, executor = make(cfg)
        made = [engine.submit(request(np.arange(i, i + 15) % 47 + 2, 12, f"r{i}"))[0] for i in range(2 * ranks)]
        for _ in range(after):
            engine.step()
        for sequence in made:
            if abort and sequence.rank == aborted:
                engine.finish(sequence, "abort")
        drain(engine)
        assert_empty(engine)
        assert all(s.generated == rollout(s.request, 0) for s in made if s.finish_reason != "abort")
        return executor

    with_abort, without = run(True), run(False)
    for rank in set(range(ranks)) - {aborted}:
        for expected, actual in itertools.zip_longest(parts(without, rank), parts(with_abort, rank)):
            if expected is None or actual is None:  # one engine had more steps to do, on other ranks
                rest = expected or actual
                assert vars(rest.ranks[0]) == vars(EMPTY) and rest.decodes is None
            else:
                assert plan_difference(expected, actual) is None


def test_ranks_without_work_have_an_empty_part_in_each_step():
    engine, executor = make(dataclasses.replace(SMALL, ranks=5))
    engine.submit(request([2, 3, 4], 6, ignore_eos=True))
    drain(engine)
    assert all(len(plan.ranks) == 5 for plan in executor.plans)
    for plan in executor.plans:
        assert all(vars(rank) == vars(EMPTY) for rank in plan.ranks[1:])
        assert plan.decodes is None or plan.decodes.page_tables.keys() == {0}


def test_a_rank_that_is_full_leaves_requests_to_the_others_even_if_they_hit_there():
    engine, _ = simulated(dataclasses.replace(LARGE, ranks=2, slots=2))
    prefix = fresh(np.random.default_rng(3), 5000)
    engine.submit(ask("first", prefix, 1))
    drain(engine)
    made = [engine.submit(ask(f"r{i}", [*prefix, i]))[0] for i in range(2, 5)]
    engine.step()
    assert [(s.rank, s.first_cached > 0) for s in made] == [(0, True), (0, True), (1, False)]


def test_prompts_with_and_without_log_probabilities_take_turns_on_whatever_ranks_they_are():
    """One step runs one program: each kind runs in every second step while both are there."""
    cfg = dataclasses.replace(SMALL, ranks=4, pages=200, max_model_len=256)
    engine, executor = make(cfg)
    made = [engine.submit(request([i + 2] * 150, 3, f"r{i}", prompt_logprobs=0 if i == 2 else -1))[0] for i in range(4)]
    newcomers = 0
    while any(s.first_token is None for s in made):
        made += engine.submit(request([7, newcomers % 40 + 2, 3], 2, f"n{newcomers}"))
        newcomers += 1
        engine.step()
        assert newcomers < 60
        if newcomers == 30:
            break
    kinds = [{p.prompt_logprobs >= 0 for r in plan.ranks for p in r.prefills} for plan in executor.plans[:19]]
    assert all(len(kind) == 1 for kind in kinds)
    assert kinds[:18] == [{False}, {True}] * 9 or kinds[:18] == [{True}, {False}] * 9
    drain(engine)


def chunk_costs(plan, context):
    """Time of each rank's prefill, in tokens at the start of a prompt."""
    return [
        sum((c.end - c.start) * (1 + (c.start + c.end) / 2 / context) for c in rank.prefills) for rank in plan.ranks
    ]


class Plans(SimulatedExecutor):
    """Keeps the plans."""

    def __init__(self):
        super().__init__(LinearCost(), constant_tokens(7))
        self.plans = []

    def dispatch(self, plan):
        self.plans.append(plan)
        super().dispatch(plan)


def busy_beside_a_long_prompt(prefill_context):
    """One rank runs a prompt of 300,000 tokens while all others have short prompts to run at all times."""
    executor = Plans()
    engine = Engine(Scheduler(dataclasses.replace(LARGE, prefill_context=prefill_context)), executor, Recorder())
    rng = np.random.default_rng(2)
    (long,) = engine.submit(ask("long", fresh(rng, 300_000), 1))
    engine.step()
    shorts = []
    while long.first_token is None:
        while engine.stats().waiting + engine.stats().running < 24:
            shorts += engine.submit(ask(f"s{len(shorts)}", fresh(rng, 4000), 1))
        engine.step()
    done = sum(s.first_token is not None and s.first_token <= long.first_token for s in shorts)
    return executor.plans, done / long.first_token, long.first_token


def test_a_rank_deep_in_a_long_prompt_does_not_hold_up_the_others():
    context = round(LinearCost().prefill_token / LinearCost().prefill_pair)
    plans, balanced, long_balanced = busy_beside_a_long_prompt(context)
    _, plain, long_plain = busy_beside_a_long_prompt(None)
    assert balanced > 1.25 * plain, "short prompts per second"
    assert long_balanced < 1.2 * long_plain, "the long prompt pays for more steps only"
    full = [chunk_costs(plan, context) for plan in plans[1:-30] if plan.ranks[1].prefills]
    together = [np.ptp(costs) / max(costs) for costs in full if min(costs) > 2000]
    assert len(together) > 50
    assert np.median(together) < 0.05, "ranks with work for the whole step finish together"


def test_a_request_waits_for_the_rank_that_it_asks_for_and_others_pass_it():
    cfg = dataclasses.replace(LARGE, ranks=2, slots=1)
    engine, _ = simulated(cfg)
    first, second = (engine.submit(ask(name, range(2, 20), rank=1))[0] for name in ("first", "second"))
    engine.step()
    assert (first.rank, second.slot) == (1, -1)
    (other,) = engine.submit(ask("other", range(2, 20)))
    drain(engine)
    assert (first.rank, second.rank, other.rank) == (1, 1, 0) and other.scheduled < second.scheduled
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank = {rank}: must be 0 to 1, or None"):
            engine.submit(ask("wrong", range(2, 20), rank=rank))
