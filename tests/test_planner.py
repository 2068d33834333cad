"""Plans: what fits, what is best, and sessions simulated with the planner's cost model."""

import dataclasses
import functools
import json

import pytest
from bench_scripts import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.planning.cost_model import HardwareCost
from dsv4jax.bench.planning.hardware import Constant, load_hardware
from dsv4jax.bench.planning.planner import (
    PAGE,
    Plan,
    Sweep,
    Targets,
    Workload,
    device_memory,
    load_workload,
    make_plan,
    pareto_front,
)
from dsv4jax.bench.planning.simulation import Traffic, simulate
from dsv4jax.bench.results.result import load
from dsv4jax.bench.traffic.agents import AgentParameters, Lognormal
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.memory_plan import memory_plan
from dsv4jax.numerics import FAST
from sharding import Layout
from sharding.rules import abstract_mesh, expert_parallel

CFG = ModelConfig()
H200, GB300 = load_hardware("h200"), load_hardware("gb300")
AGENTIC, NONE = Workload(), Targets()
FEW = Sweep(decode_widths=(4, 8, 72), prefill_widths=(4, 8), batches=(1, 16, 4096), drafts=(0, 3), chunks=(2048, 16384))


def plan(hardware=H200, workload=AGENTIC, targets=NONE, sweep=FEW, **changes) -> Plan:
    return make_plan(CFG, hardware, workload, targets, dataclasses.replace(sweep, **changes))


@functools.cache
def all_points():
    return plan().points


def test_only_what_fits_into_memory_is_a_point():
    made = plan()
    assert made.points and made.refused
    for point in made.points:
        for memory in (point.memory, point.prefill.memory):
            assert memory.total <= memory.usable <= 0.9 * H200.memory_bytes.value
        assert point.prefill.prefix_tokens >= 0
    refused = {(one.group, one.size) for one in made.refused}
    assert all(one.memory.total > one.memory.usable for one in made.refused)
    assert ("decode DEP4", "batch 1, 0 drafts") in refused and ("decode DEP72", "batch 4096, 3 drafts") in refused
    assert len(made.points) + sum(one.group.startswith("decode") for one in made.refused) == 3 * 3 * 2
    assert {point.width for point in made.points} == {8, 72}
    wider = dataclasses.replace(H200, memory_bytes=Constant(279e9, "assumed", "test"))
    assert len(plan(wider).points) > len(made.points)
    less = plan(workspace=1e12)
    assert (
        not less.points
        and less.best is None
        and {one.group for one in less.refused} == {"prefill DEP4", "prefill DEP8"}
    )


@pytest.mark.parametrize("ranks", [32])
def test_memory_is_that_of_the_engine_over_so_many_devices(ranks):
    """Weights, tables, pages and slots of a device, as the engine's own plan has them."""
    layout = Layout(abstract_mesh(ranks), expert_parallel())
    cache = CacheConfig(slots=3, pages=3 * 10, page_size=PAGE, drafts="shared")
    whole = memory_plan(CFG, cache, FAST, layout)
    memory = device_memory(CFG, H200, ranks, 3, 10 * PAGE, True, Sweep())
    assert memory.weights == pytest.approx(whole.weights, rel=1e-6)
    assert memory.tables == pytest.approx(whole.tables, rel=1e-6)
    assert memory.pages == whole.pages == 3 * 10 * PAGE * 890
    assert memory.slots == whole.windows + whole.sampling
    assert device_memory(CFG, H200, ranks, 3, 640, True, Sweep(tables_on_device=False)).tables == 0


def test_the_best_comes_first_and_every_run_gives_the_same():
    targets = Targets(ttft=1.0, user_speed=60.0)
    made = plan(targets=targets)
    assert made == plan(targets=targets)
    order = [(bool(point.misses), -point.output_tokens_per_second) for point in made.points]
    assert order == sorted(order) and made.best == made.points[0]
    for point in made.points:
        missed = {"ttft": point.prefill.ttft > 1.0, "user_speed": point.user_speed < 60.0}
        assert set(point.misses) == {name for name, is_so in missed.items() if is_so}
        row = point.as_row()
        assert row["limit"].startswith(point.time.limit[0]) and json.dumps(row)
    assert plan(targets=Targets(user_speed=1e6)).best is None


def test_tokens_and_devices_add_up():
    workload = Workload(context=50_000, cached=0.9, output=300)
    for point in plan(workload=workload).points:
        turns = point.output_tokens_per_second / workload.output
        assert point.computed_tokens_per_second == pytest.approx(turns * 5000)
        assert point.cached_tokens_per_second == pytest.approx(turns * 45_000)
        decode = turns * workload.output / point.decode_tokens_per_second
        assert decode + point.prefill_share == pytest.approx(1)
        assert point.user_speed <= point.decode_tokens_per_second / point.batch
        assert point.prefill.ttft >= point.prefill.time.seconds


def test_a_tighter_target_for_the_first_token_is_met_by_other_prefill():
    free, tight = (plan(GB300, targets=Targets(ttft=ttft)).points[0].prefill for ttft in (None, 0.3))
    assert tight.ttft <= 0.3 < free.ttft and tight.tokens_per_second < free.tokens_per_second
    soonest = plan(GB300, targets=Targets(ttft=1e-3)).points[0]
    assert soonest.misses == ("ttft",) and soonest.prefill.ttft <= tight.ttft


def test_prefill_waits_longer_the_busier_it_is():
    times = [plan(utilization=load).points[0].prefill.ttft for load in (0.1, 0.5, 0.9)]
    assert times == sorted(times) and times[2] > 2 * times[0]
    chunks = [plan(chunks=(chunk,)).points[0].prefill for chunk in (2048, 16384)]
    # 3,400 new tokens and a replayed window: two steps of half as many, or one with those of four requests.
    assert chunks[0].ttft > 2 * chunks[0].time.seconds and chunks[1].tokens_per_second > chunks[0].tokens_per_second


@settings(max_examples=50)
@given(values=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=12))
def test_the_front_has_the_points_that_no_other_beats(values):
    base = all_points()[0]
    points = [dataclasses.replace(base, user_speed=float(a), output_tokens_per_second=float(b)) for a, b in values]
    front = {(p.user_speed, p.output_tokens_per_second) for p in pareto_front(points)}
    beaten = {(a, b) for a, b in values if any((c, d) != (a, b) and c >= a and d >= b for c, d in values)}
    assert front == set(values) - beaten
    assert len(pareto_front(points)) == len(front)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(context=0), "context = 0: must be a whole number of at least 1"),
        (lambda: Workload(cached=1.0), "cached = 1.0: must be at least 0 and less than 1"),
        (lambda: Workload(acceptance=(0.5, 1.1)), "acceptance = 1.1: must be 0 to 1"),
        (lambda: Targets(ttft=0.0), "ttft = 0.0: must be greater than 0"),
        (lambda: Targets(user_speed=-1.0), "user_speed = -1.0"),
        (lambda: Sweep(batches=()), "batches: must be at least one number"),
        (lambda: Sweep(decode_widths=(0,)), "decode_widths = 0: must be a whole number of at least 1"),
        (lambda: Sweep(drafts=(-1,)), "drafts = -1: must be a whole number of at least 0"),
        (lambda: Sweep(utilization=1.0), "utilization = 1: must be less than 1"),
        (lambda: Sweep(fraction=1.5), "fraction = 1.5: must be greater than 0 and at most 1"),
        (lambda: Sweep(workspace=-1.0), "workspace = -1.0: must be at least 0"),
        (lambda: plan(drafts=(6,)), "drafts = 6: must be at most 5"),
        (lambda: plan(workload=Workload(acceptance=(0.5,))), "drafts = 3: must be at most 1"),
        (lambda: plan(decode_widths=(385,)), "ranks = 385: must be 1 to n_routed_experts = 384"),
        (lambda: Traffic(live=0), "live = 0: must be at least 1"),
        (lambda: Traffic(seconds=0), "seconds = 0: must be greater than 0"),
    ],
)
def test_bad_values_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_workload_comes_from_a_file(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text('{"context": 1000, "acceptance": [0.5, 0.25]}')
    assert load_workload(path) == Workload(context=1000, acceptance=(0.5, 0.25))
    assert Workload(acceptance=(0.5, 0.25)).tokens_per_step(2) == 1 + 0.5 + 0.125
    for text, message in (
        ('{"kontext": 1}', "unknown field 'kontext'"),
        ("{", "must be JSON"),
        ("[1]", "must be a JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_workload(path)


# Simulation

SMALL, SOON = Lognormal(40, 0.2, 60, 20), Lognormal(0.1, 0.2, 1, 0.05)
AGENTS = AgentParameters(
    system=SMALL, repository=SMALL, task=SMALL, message=SMALL, output=SMALL, subagent_system=SMALL, subagent_task=SMALL,
    turns=Lognormal(5, 0.2, 8), tool_seconds=SOON, human_seconds=SOON,
    session_seconds=SOON, max_context=2000,
)  # fmt: skip


def test_sessions_run_on_the_scheduler_at_the_models_pace():
    model = HardwareCost(CFG, GB300, 4)
    traffic = Traffic(live=6, seconds=2.0, slots=4, prefill_tokens=512, acceptance=(0.8, 0.5), agents=AGENTS)
    run, summary = simulate(model, traffic, Sweep(tables_on_device=False), progress=False)
    assert summary.requests > 10 and run.ended == pytest.approx(2.0, rel=0.1)
    least, most = model.decode(1, 1, 100).seconds, model.decode(6, 3, 2000, draft=True).seconds
    plain = [step.device_seconds for step in run.steps if step.decode_requests and not step.prefill_requests]
    assert plain and all(0.9 * least < seconds <= most for seconds in plain)
    again, _ = simulate(model, traffic, Sweep(tables_on_device=False), progress=False)
    assert [m.as_dict() for m in again.measurements] == [m.as_dict() for m in run.measurements]


def test_a_device_without_room_for_the_longest_request_is_refused():
    with pytest.raises(ValueError, match=r"pages = 0: 135 GB hold 0 tokens beside the rest, a request may have 2000"):
        simulate(HardwareCost(CFG, H200, 2), Traffic(slots=1, agents=AGENTS), Sweep(), progress=False)


# The script


def run_plan_script(tmp_path, *arguments):
    sweep = ("--decode_widths=8,16", "--prefill_widths=8", "--batches=1,4", "--drafts=0,1", "--chunks=2048")
    run_script("plan", *sweep, f"--report={tmp_path}", *arguments)
    return load(tmp_path / "plan.json")


def test_the_script_ranks_deployments_and_draws_the_front(tmp_path, capsys):
    result = run_plan_script(tmp_path, "--hardware=gb300", "--user_speed=1", "--ttft=10")
    rows = result.rows["points"]
    assert [row["place"] for row in rows] == list(range(1, 2 * 2 * 2 + 1)) and any(row["on_front"] for row in rows)
    assert {plot.kind for plot in result.plots} == {"pareto"} and result.control["step_ms"] < rows[0]["step_ms"]
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page and "decode: " in page and "tokens/s" in capsys.readouterr().out


def test_the_script_calibrates_simulates_and_refuses(tmp_path):
    agents = tmp_path / "agents.json"
    small = {"median": 40, "sigma": 0.2, "most": 60, "least": 20}
    names = ("system", "repository", "task", "message", "output", "subagent_system", "subagent_task")
    agents.write_text(json.dumps({"max_context": 2000, **dict.fromkeys(names, small)}))
    result = run_plan_script(
        tmp_path, "--hardware=h200", "--simulate_hours=0.0005", "--ranks=8", "--live=3", "--slots=2",
        f"--agents={agents}", f"--save_hardware={tmp_path / 'mine.json'}",
    )  # fmt: skip
    assert result.rows["simulation"][0]["steps"] > 0 and result.rows["latencies"]
    assert load_hardware(tmp_path / "mine.json") == H200
    with pytest.raises(ValueError, match="--batches=1,many: must be whole numbers"):
        run_plan_script(tmp_path, "--batches=1,many")
