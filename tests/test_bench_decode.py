"""Decoding through the engine beside its program: each cause of delay is found as what it is."""

import dataclasses
import functools

import numpy as np
import pytest
from bench_scripts import run_script

from dsv4jax.bench.engines.host_cost import host_cost
from dsv4jax.bench.engines.host_gap import decode_gap, decode_length, submit_behind_contexts
from dsv4jax.bench.engines.system import Sizes, finish_prefill, simulated_system
from dsv4jax.bench.results.result import load
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost, fixed_acceptance

COST = LinearCost(step=0.01, prefill_token=0, prefill_pair=0, decode_token=0, decode_context=1e-6, draft=0)
CAUSES = ("ranks", "dispatch", "readback", "host")


def make(ranks=2, cost=COST, context=4096, drafts=0, skew=0.5):
    length = decode_length(context, 8, drafts, skew)
    acceptance = fixed_acceptance([0.5] * drafts) if drafts else None
    return simulated_system(Sizes(ranks=ranks, slots=4, max_model_len=length, drafts=drafts), cost, acceptance)


class Slow:
    """Takes its time before it dispatches, or after it has waited."""

    def __init__(self, executor, dispatching=0.0, waiting=0.0):
        self.executor, self.dispatching, self.waiting = executor, dispatching, waiting
        self.now, self.reset = executor.now, executor.reset

    def dispatch(self, plan):
        self.executor.advance(self.dispatching)
        self.executor.dispatch(plan)

    def wait(self):
        result = self.executor.wait()
        self.executor.advance(self.waiting)
        return result


def causes(row):
    parts = {cause: row[f"gap_{cause}_milliseconds"] for cause in CAUSES}
    assert sum(parts.values()) == pytest.approx(row["engine_milliseconds"] - row["balanced_program_milliseconds"])
    assert row["share_of_engine"] == pytest.approx(row["balanced_program_milliseconds"] / row["engine_milliseconds"])
    return [parts[cause] for cause in CAUSES]


def test_an_engine_that_costs_nothing_has_no_gap():
    row = decode_gap(make(cost=LinearCost(0.01, 0, 0, 0, 0)), requests=4, context=4096, steps=8)
    assert causes(row) == pytest.approx([0, 0, 0, 0], abs=1e-9)
    assert row["engine_milliseconds"] == pytest.approx(10) and row["tokens_per_step"] == 8


def test_prompts_may_be_more_than_a_queue_would_take_from_clients():
    system = make(cost=LinearCost(0.01, 0, 0, 0, 0), context=4096)
    limited = dataclasses.replace(system.config, max_waiting=1, max_waiting_tokens=5000)
    row = decode_gap(dataclasses.replace(system, config=limited), requests=4, context=4096, steps=8, rounds=1)
    assert row["tokens_per_step"] == 8


def test_longer_contexts_of_one_rank_make_the_other_wait():
    row = decode_gap(make(), requests=4, context=4096, steps=8, skew=0.5)
    # Four requests of the last rank are behind 2,048 tokens more than the mean, a microsecond each.
    assert causes(row) == pytest.approx([4 * 2.048, 0, 0, 0], abs=1e-6)
    assert decode_gap(make(), requests=4, context=4096, steps=8)["gap_ranks_milliseconds"] == 0


@pytest.mark.parametrize("cause", ["dispatch", "readback", "host"])
def test_a_slow_part_of_the_host_is_found_as_what_it_is(cause, monkeypatch):
    system, inside = make(cost=LinearCost(0.01, 0, 0, 0, 0)), None
    if cause == "dispatch":  # 25 ms for a batch cannot hide behind a step of 10
        inside = functools.partial(Slow, dispatching=0.025)
    elif cause == "readback":
        inside = functools.partial(Slow, waiting=0.025)
    else:
        executors, update = [], Scheduler.update
        system = dataclasses.replace(
            system, empty_executor=lambda made=system.empty_executor: executors.append(made()) or executors[-1]
        )

        def slow_update(self, result, now):
            executors[-1].advance(0.025)
            return update(self, result, now)

        monkeypatch.setattr(Scheduler, "update", slow_update)
    row = decode_gap(system, requests=4, context=512, steps=8, rounds=1, inside=inside)
    found = dict(zip(CAUSES, causes(row), strict=True))
    assert found.pop(cause) == pytest.approx(15, abs=3)
    assert all(abs(value) < 3 for value in found.values())


def test_requests_begin_behind_their_contexts_without_a_prefill_of_them():
    for drafts in (0, 2):
        system = make(drafts=drafts)
        engine, _ = system.engine()
        submit_behind_contexts(engine, system, 4, [4096, 1000], 20)
        first = engine.scheduler
        finish_prefill(engine)
        for rank, context in zip(first.ranks, (4096, 1000), strict=True):
            assert rank.num_running == 4
            for sequence in rank.sequences():
                pages = context // 64 * 64
                assert sequence.cached == pages and sequence.first_cached == pages - 128
        assert engine.scheduler.prefix_hits == 4 * (4096 - 128) + 4 * (960 - 128)
        while not engine.idle:
            engine.step()
        first.check_integrity()


def test_with_drafts():
    row = decode_gap(make(drafts=2), requests=4, context=1024, steps=8)
    assert row["drafts"] == 2 and 8 < row["tokens_per_step"] < 24
    assert causes(row)[0] == 0 and causes(row)[1:] == pytest.approx([0, 0, 0], abs=0.5)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(skew=1.0), "skew = 1.0: must be at least 0"),
        (dict(requests=5), "requests = 5: must be at most slots = 4"),
        (dict(context=10_000), "context = 10000: with 8 steps beyond max_model_len"),
    ],
)
def test_impossible_points_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        decode_gap(make(), **{**dict(requests=4, context=4096, steps=8), **options})
    with pytest.raises(ValueError, match="and 0 on one rank"):
        decode_gap(make(ranks=1), requests=1, context=64, steps=8, skew=0.1)


def test_host_time_of_a_step():
    rows = list(host_cost(6, 2, repeats=2, steps=5, long_prompt=3000))
    assert len(rows) == 2 and all(0 < row["median_ms"] <= row["max_ms"] for row in rows)
    assert rows[0]["long_prompt"] == 3000 and rows[0]["ranks"] == 2


def test_the_command(tmp_path, capsys):
    points = [
        "--points=2x512,4x2048",
        "--executor=simulated",
        "--ranks=2",
        "--skew=0.5",
        "--steps=4",
        "--rounds=2",
        "--repeats=2",
    ]
    host = ["--sections=gap", "--sections=host", "--host_requests=4"]
    run_script("bench_decode", *points, *host, "--acceptance=0.8,0.5", f"--report={tmp_path}")
    result = load(tmp_path / "decode.json")
    assert [row["point"] for row in result.rows["gap"]] == ["2 x 512"] * 2 + ["4 x 2048"] * 2
    assert [row["requests"] for row in result.rows["host"]] == [4, 4]
    assert len(result.verdicts) == 2 and result.verdicts[1] in capsys.readouterr().out
    assert result.conditions["model"] == "simulated" and result.control["requests_per_rank"] == 4
    assert result.ceiling["what"].startswith("assumed: ")
    assert np.all([row["gap_ranks_milliseconds"] >= 0 for row in result.rows["gap"]])
