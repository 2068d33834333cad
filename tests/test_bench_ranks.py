"""Ranks that step together: what their steps cost, who waits, and what lag and slow hosts lose."""

import dataclasses
import itertools

import numpy as np
import pytest
from bench_scripts import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.engines.placement import balanced_chunks, hot_prefix, placement, traffic
from dsv4jax.bench.engines.rank_work import WORK, StepCost, WorkExecutor, fit_step_cost
from dsv4jax.bench.engines.ranks import Load, MirroredRanks, loss, run_lag, run_slow_hosts
from dsv4jax.bench.engines.system import Sizes, simulated_system
from dsv4jax.bench.results.result import load as load_result
from dsv4jax.bench.traffic.counting import Window
from dsv4jax.bench.traffic.driver import OpenLoop, Turn, run_engine
from dsv4jax.engine.simulated import LinearCost, fixed_acceptance

COST = LinearCost(step=4e-3, prefill_token=2e-5, prefill_pair=1e-9, decode_token=1e-4, decode_context=1e-7)
LOAD = Load(requests=2, prompt_tokens=400, output_tokens=40, seconds=4.0, warm_up=1.0)


def make(ranks=2, cost=COST, **options):
    return simulated_system(Sizes(ranks=ranks, slots=4, max_model_len=2048, prefill_tokens=512), cost, **options)


@settings(max_examples=40)
@given(
    st.lists(st.floats(0, 2), min_size=len(WORK), max_size=len(WORK)),
    st.floats(0.1, 5),
    st.integers(2, 4),
    st.integers(0, 2**31),
)
def test_a_cost_is_found_again_and_says_who_waits(per_unit, step, ranks, seed):
    rng = np.random.default_rng(seed)
    same = np.repeat(rng.random((40, 1, len(WORK))), ranks, axis=1)
    found = fit_step_cost(same, step + same[:, 0] @ np.array(per_unit))
    assert (found.step, *found.work) == pytest.approx((step, *per_unit), abs=1e-6) and found.error < 1e-6
    np.testing.assert_allclose(found.waiting(same), 0, atol=1e-9)
    work = rng.random((30, ranks, len(WORK)))
    waiting, own = found.waiting(work), found.of_ranks(work)
    assert (waiting >= 0).all() and (waiting < 1).all()
    # A rank's own part, its waiting and what every step takes are the whole.
    total = (found.step + own.max(axis=1)).sum()
    np.testing.assert_allclose(own.sum(axis=0) + waiting * total + len(work) * found.step, total, rtol=1e-9)


def test_only_steps_whose_ranks_do_the_same_can_be_fitted():
    with pytest.raises(ValueError, match="steps: there must be one"):
        fit_step_cost(np.zeros((0, 2, len(WORK))), np.zeros(0))
    work = np.ones((3, 2, len(WORK)))
    work[1, 1, 2] = 2
    with pytest.raises(ValueError, match="work: all ranks of a step must do the same"):
        fit_step_cost(work, np.ones(3))
    assert StepCost(0.0, (1.0,) * len(WORK)).waiting(np.zeros((0, 2, len(WORK)))).tolist() == [0, 0]


def test_the_work_of_a_step_is_what_its_plan_says():
    cfg = dict(prefix_cache=False)
    for acceptance in (None, fixed_acceptance([0.5, 0.5])):
        sizes = Sizes(ranks=2, slots=4, max_model_len=2048, prefill_tokens=512, drafts=2 * (acceptance is not None))
        seen = []
        engine, executor = simulated_system(sizes, COST, acceptance).engine(
            inside=lambda executor, seen=seen: seen.append(WorkExecutor(executor)) or seen[0], **cfg
        )
        prompt = np.arange(3, 803, dtype=np.int32)
        run_engine(engine, executor, OpenLoop([Turn("", 0, 0.0, prompt, 5, rank=1)]), progress=False)
        work = dict(zip(WORK, seen[0].work[:, 1].T, strict=True))
        assert work["prefill"].tolist()[:3] == [1, 1, 0] and work["prefill_token"].sum() == 800
        assert work["prefill_pair"].sum() == pytest.approx(800**2 / 2)
        assert work["decode_token"][2] == (1 if acceptance is None else 3) and work["decode_context"][2] == 800
        assert not seen[0].work[:, 0].any()
        # The cost of the simulated executor is of this form; with drafts it takes something more for them.
        if acceptance is None:
            cost = StepCost(
                COST.step, (0, COST.prefill_token, COST.prefill_pair, COST.decode_token, COST.decode_context)
            )
            np.testing.assert_allclose(cost.step + cost.of_ranks(seen[0].work).max(axis=1), seen[0].seconds)


def test_a_mirror_does_the_same_on_every_rank_and_a_lag_the_same_later():
    system = make(3)
    for lag in (0.0, 1.0):
        engine, executor = system.engine(prefix_cache=False)
        run = run_engine(engine, executor, MirroredRanks(LOAD, system, lag), until=3.0, progress=False)
        by_rank = [sorted((m for m in run.measurements if m.rank == r), key=lambda m: m.turn) for r in range(3)]
        asked = [[(m.turn, m.prompt_tokens) for m in of_rank] for of_rank in by_rank]
        assert len(asked[0]) > 6
        if lag:
            assert asked[1] == asked[0][: len(asked[1])] and len(asked[2]) < len(asked[1]) < len(asked[0])
            assert [min(m.arrived for m in of_rank) for of_rank in by_rank] == [0.0, 1.0, 2.0]
        else:
            assert asked[0] == asked[1] == asked[2]
            assert [m.finished for m in by_rank[0]] == [m.finished for m in by_rank[2]]
        assert all(m.cached_tokens == 0 for m in run.measurements)


def test_what_a_lag_loses_is_explained_by_ranks_that_wait():
    system, window = make(), LOAD.window(0.5, 2)
    assert window == Window(1.5, 4.0)
    mirror, lagged = (run_lag(system, LOAD, lag, window, progress=False) for lag in (0.0, 0.5))
    found = loss(mirror, lagged)
    assert found.cost.step == pytest.approx(COST.step) and found.cost_error < 1e-6
    assert found.both > 0.05 and found.by_imbalance == pytest.approx(found.both, abs=0.05)
    assert len(found.waiting) == 2 and np.mean(found.waiting) == pytest.approx(found.by_imbalance)
    nothing = loss(mirror, mirror)
    assert nothing.both == nothing.by_imbalance == 0
    for of in (mirror, lagged):
        assert of.step_seconds == pytest.approx(of.device_seconds.mean(), rel=0.02)  # the host takes no time
        assert of.row(2)["invalid"] == "" and of.row(2)["requests"] > 0


def test_loads_that_cannot_be_measured_are_refused():
    with pytest.raises(ValueError, match=r"seconds = 4.0: must be more than 11.0, when the last rank is warm"):
        LOAD.window(5.0, 3)
    with pytest.raises(ValueError, match="requests = 5: must be at most slots = 4"):
        run_lag(make(), dataclasses.replace(LOAD, requests=5), 0.0, Window(1.0, 2.0))
    with pytest.raises(ValueError, match=r"prompt_tokens = 1340, output_tokens = 40: .* at most max_model_len = 2048"):
        run_lag(make(), dataclasses.replace(LOAD, prompt_tokens=1340), 0.0, Window(1.0, 2.0))
    with pytest.raises(ValueError, match="slow = 3: must be 0 to 2"):
        run_slow_hosts(make(), LOAD, delay=0.1, slow=3)


def test_requests_that_fail_are_not_followed_by_others():
    system = make()
    load = dataclasses.replace(LOAD, prompt_tokens=10_000)
    run = run_engine(*system.engine(), MirroredRanks(load, system, 0.0), progress=False)
    assert len(run.measurements) == 4 and all(m.failed for m in run.measurements)


def test_one_slow_host_costs_what_all_slow_hosts_cost_and_a_step_in_flight_hides_it():
    system, load = make(cost=LinearCost(0.01, 0, 0, 0, 0)), dataclasses.replace(LOAD, seconds=2.0, warm_up=0.5)

    def step_ms(delay, slow, depth):
        run, waits = run_slow_hosts(system, load, delay=delay, slow=slow, depth=depth, progress=False)
        return run.step_seconds * 1e3, waits["hosts_waiting_ms_per_step"], waits["devices_idle_ms_per_step"]

    near = dict(abs=0.2)  # not all delays are in the window
    assert step_ms(0.0, 0, 2) == pytest.approx((10, 0, 0), **near)
    assert step_ms(0.004, 1, 2) == pytest.approx((10, 2, 0), **near)
    assert step_ms(0.004, 1, 1) == pytest.approx((14, 2, 4), **near)
    assert step_ms(0.025, 1, 2) == pytest.approx((25, 12.5, 15), **near)
    assert step_ms(0.025, 2, 2) == pytest.approx((25, 0, 15), **near)
    run, _ = run_slow_hosts(system, load, delay=0.025, slow=2, every=4, progress=False)
    # In 1 - (3/4)^2 of the steps one host or both are late.
    assert run.step_seconds * 1e3 == pytest.approx(10 + 15 * 7 / 16, abs=1.5)


def test_policies_over_ranks():
    rows = list(itertools.islice(placement(2, requests=4, progress=False), 3))
    assert [row["rule"] for row in rows] == ["Scheduler", "HitsFirst", "LoadOnly"]
    assert all(row["requests"] == 8 and row["hit_rate"] > 0.3 for row in rows)
    turns = list(hot_prefix(100, 1.0, 40))
    assert 25 < sum(np.array_equal(t.prompt[:100], turns[0].prompt[:100]) for t in turns if len(t.prompt) > 100) <= 40
    equal_tokens, equal_time = balanced_chunks(2, 20_000, short=600)
    assert equal_time["prompts_per_s"] >= equal_tokens["prompts_per_s"] * 0.95
    row = traffic(10.0, 2.0, 2, progress=False)
    assert row["requests"] > 10 and row["virtual_s"] > 5 and row["output_tokens_per_second"] > 0


def test_the_command(tmp_path, capsys):
    options = [
        "--ranks=2",
        "--seconds=3",
        "--slow_seconds=2",
        "--warm_up=0.5",
        "--lag=0.5",
        "--requests=2",
        "--repeats=2",
    ]
    sizes = ["--prompt_tokens=300", "--output_tokens=20", "--delay_ms=20", f"--report={tmp_path}"]
    run_script("bench_ranks", *options, *sizes)
    ranks, slow = (load_result(tmp_path / f"{name}.json") for name in ("ranks", "slow_rank"))
    assert [row["lag_s"] for row in ranks.rows["runs"]] == [0, 0.5, 0, 0.5] and len(ranks.rows["loss"]) == 2
    assert ranks.ceiling["what"].startswith("assumed: ")
    assert ranks.control["lag_s"] == 0 and ranks.requests[0]["lag_s"] == 0 and not ranks.interrupted
    assert "loses" in ranks.verdicts[0] and ranks.verdicts[0] in capsys.readouterr().out
    rows = {(r["steps_in_flight"], r["slow_ranks"], r["delay_ms"]): r for r in slow.rows["slow_rank"]}
    assert len(rows) == 6 and rows[2, 0, 0]["tokens_per_second_lost"] == 0
    assert rows[1, 1, 20.0]["step_ms_more"] == pytest.approx(20, rel=0.2)
    for name in ("ranks", "slow_rank"):
        assert (tmp_path / f"{name}.html").read_text().startswith("<!doctype html>")


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch):
    runs = []

    def interrupted(*arguments, **options):
        runs.append(run_engine(*arguments, **options))
        return dataclasses.replace(runs[-1], interrupted=len(runs) == 2)

    monkeypatch.setattr("dsv4jax.bench.engines.ranks.run_engine", interrupted)
    options = ["--ranks=2", "--sections=lag", "--seconds=2", "--warm_up=0.5", "--lag=0.5", "--requests=1"]
    with pytest.raises(SystemExit):
        run_script("bench_ranks", *options, "--prompt_tokens=300", "--output_tokens=20", f"--report={tmp_path}")
    result = load_result(tmp_path / "ranks.json")
    assert result.interrupted and len(result.rows["runs"]) == 1 and "loss" not in result.rows
    assert {request["lag_s"] for request in result.requests} == {0.0, 0.5}
    assert "Interrupted" in (tmp_path / "ranks.html").read_text()
