"""Hardware files, the cost model on them, and constants from measured steps."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.planning.calibrate import calibrate, calibration_errors, fit_factors
from dsv4jax.bench.planning.cost_model import PARTS, HardwareCost, StepWork
from dsv4jax.bench.planning.hardware import CONSTANTS, GIVEN, STAGES, Hardware, hardware_from_dict, load_hardware
from dsv4jax.bench.planning.published import published_rows
from dsv4jax.bench.results.result import Result
from dsv4jax.bench.steps.costs import Cost, StepShape, step_costs
from dsv4jax.config import ModelConfig
from dsv4jax.engine.plan import Decodes, Prefill, RankPlan, Speculation, StepPlan

CFG = ModelConfig()
H200 = load_hardware("h200")
IDLE = RankPlan((), (), ())


def changed(path: tuple[str, ...], value: object) -> dict:
    """The content of the H200's file with another value at a place; `...` takes the place away."""
    content = json.loads(json.dumps(H200.as_dict()))
    *way, last = path
    place = content
    for name in way:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


# Hardware files


@pytest.mark.parametrize("name", GIVEN)
def test_given_files_say_of_each_number_where_it_comes_from(name, tmp_path):
    hardware = load_hardware(name)
    kinds = {getattr(hardware, constant).kind for constant in CONSTANTS}
    assert ("measured" in kinds) == (name == "h200") and set(hardware.stages) == set(STAGES)
    hardware.save(tmp_path / "mine.json")
    assert load_hardware(tmp_path / "mine.json") == hardware


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_missing_or_negative_constant_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"constants: {name} is missing"):
        hardware_from_dict(changed(("constants", name), ...))
    with pytest.raises(ValueError, match=f"{name} = -1: must be a number"):
        hardware_from_dict(changed(("constants", name, "value"), -1))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("constants", "fp8_rate", "value"), 0, "fp8_rate = 0: must be a number greater than 0"),
        (("constants", "fp8_rate", "value"), "2e15", "fp8_rate = '2e15': must be a number"),
        (("constants", "gap", "value"), float("nan"), "gap = nan: must be a number"),
        (("constants", "gap", "kind"), "guessed", "gap: kind = 'guessed': must be one of"),
        (("constants", "gap", "source"), "", "gap: source = ''"),
        (("constants", "gap", "unit"), "s", "gap: unknown field 'unit'"),
        (("constants", "speed"), {}, "constants: unknown field 'speed'"),
        (("stages", "experts"), ..., "stages: experts is missing"),
        (("stages", "experts", "fp8"), 0.5, "stages: experts: fp8 = 0.5: must be a number at least 1"),
        (("stages", "experts", "fixed"), -1e-6, "stages: experts: fixed = -1e-06: must be a number at least 0"),
        (("stages", "router", "memory"), ..., "stages: router: memory is missing"),
        (("stages", "magic"), H200.as_dict()["stages"]["router"], "stages: unknown stage 'magic'"),
        (("name",), 3, "name = 3: must be a string"),
        (("stages",), [], r"stages = \[\]: must be a mapping"),
    ],
)
def test_a_bad_hardware_file_is_refused_by_field(path, value, message):
    with pytest.raises(ValueError, match=message):
        hardware_from_dict(changed(path, value))


def test_a_file_that_is_none_is_refused_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="hardware = 'h300': must be one of"):
        load_hardware("h300")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad.json: must be JSON"):
        load_hardware(tmp_path / "bad.json")


# The cost model


def cost(ranks: int = 8, hardware: Hardware = H200, **options) -> HardwareCost:
    return HardwareCost(CFG, hardware, ranks, **options)


@settings(max_examples=60)
@given(
    hardware=st.sampled_from(GIVEN),
    ranks=st.sampled_from([1, 2, 8, 32, 72]),
    exchange=st.sampled_from(["gather", "ragged"]),
    requests=st.integers(1, 300),
    tokens=st.integers(1, 6),
    context=st.integers(0, 900_000),
    more=st.integers(1, 400),
    draft=st.booleans(),
)
def test_a_step_with_more_to_do_never_takes_less(hardware, ranks, exchange, requests, tokens, context, more, draft):
    model = cost(ranks, load_hardware(hardware), exchange=exchange)
    before = model.decode(requests, tokens, context, draft)
    for after in (
        model.decode(requests + more, tokens, context, draft),
        model.decode(requests, tokens + 1, context, draft),
        model.decode(requests, tokens, context + more, draft),
    ):
        assert after.seconds >= before.seconds * (1 - 1e-12)
        assert all(after.parts[part] >= before.parts[part] * (1 - 1e-9) for part in PARTS)
    assert model.decode(requests, tokens, context, True).device >= before.device


@settings(max_examples=40)
@given(tokens=st.integers(1, 20_000), context=st.integers(0, 900_000), more=st.integers(1, 20_000), ends=st.booleans())
def test_a_longer_chunk_never_takes_less(tokens, context, more, ends):
    model = cost(4)
    before = model.prefill(tokens, context, ends).device
    assert model.prefill(tokens + more, context, ends).device >= before * (1 - 1e-12)
    assert model.prefill(tokens, context + more, ends).device >= before * (1 - 1e-12)
    assert model.prefill(tokens, context).device >= model.prefill(tokens, context, ends=False).device


@settings(max_examples=40)
@given(
    ranks=st.sampled_from([1, 4, 8, 32]),
    requests=st.integers(1, 128),
    tokens=st.integers(1, 6),
    context=st.integers(0, 900_000),
)
def test_no_step_is_faster_than_the_machine(ranks, requests, tokens, context):
    shape = StepShape(requests, requests * tokens, context, requests * tokens, requests * tokens, ranks)
    costs = step_costs(CFG, shape)
    rates = {"copy": H200.memory_bandwidth.value, "fp8": H200.fp8_rate.value, "bf16": H200.bf16_rate.value}
    floor = 1e-6 * sum(one.floor(rates) for stage, one in costs.items() if stage not in ("dispatch", "combine"))
    for hardware in (H200, H200.at_its_rates()):
        time = cost(ranks, hardware).decode(requests, tokens, context)
        assert time.device - time.parts["exchange"] >= floor * (1 - 1e-9)
    ideal = cost(ranks, H200.at_its_rates()).decode(requests, tokens, context)
    assert ideal.device - ideal.parts["exchange"] <= 2 * floor  # memory and products one after the other
    assert ideal.parts["launches"] == 0 and ideal.host == 0


def test_the_h200_file_gives_the_steps_that_it_was_made_from():
    """From the first kernel to the last; the links are not in the measurement."""
    near, far = (cost().decode(16, 6, context) for context in (131072, 875520))
    chunk = cost().prefill(8192, 4096)
    for time, measured, error in ((near, 23.4e-3, 0.03), (far, 25.5e-3, 0.04), (chunk, 333e-3, 0.12)):
        assert time.device - time.parts["exchange"] == pytest.approx(measured, rel=error)


def work(rows: list[tuple[int, int, int, float, int]], ranks: int, drafting=()) -> StepWork:
    columns = np.array(rows, float).reshape(-1, 5).T
    drafts = np.zeros(ranks)
    drafts[list(drafting)] = 1
    return StepWork(columns[0].astype(int), *columns[1:], drafts)


def test_the_slowest_rank_and_all_tokens_count():
    model = cost(4)
    one, even = (model.step(work(rows, 4)) for rows in ([(2, 6, 6, 5e5, 6)], [(r, 6, 6, 5e5, 6) for r in range(4)]))
    own = ("dense reads", "dense products", "index keys", "attention", "launches")
    assert all(one.parts[part] == pytest.approx(even.parts[part]) for part in own)
    assert one.parts["expert reads"] < even.parts["expert reads"]
    assert one.parts["exchange"] == even.parts["exchange"]  # every rank has room for as many as the busiest one
    nothing = model.step(work([], 4))
    assert nothing.device == 0 and nothing.host == H200.host_step.value
    assert nothing.limit == ("host", 1.0)


@settings(max_examples=40)
@given(data=st.data(), ranks=st.sampled_from([1, 3, 8]))
def test_the_fast_way_gives_the_same_seconds(data, ranks):
    row = st.tuples(
        st.integers(0, ranks - 1), st.integers(1, 300), st.integers(0, 128), st.floats(0, 9e5), st.integers(0, 6)
    )
    rows = [(r, t, min(t, u), c, min(u, lg)) for r, t, u, c, lg in data.draw(st.lists(row, max_size=20))]
    drafting = data.draw(st.sets(st.integers(0, ranks - 1)))
    model, step = cost(ranks, exchange="ragged", balance=0.9), work(rows, ranks, drafting)
    time = model.step(step)
    assert model.seconds(step) == pytest.approx(time.seconds, rel=1e-9)
    assert set(time.parts) == set(PARTS) and min(time.parts.values()) >= 0
    part, share = time.limit
    assert part == "host" or time.parts[part] == max(time.parts.values()) == pytest.approx(share * time.device)


def test_a_plan_costs_what_its_closed_form_does():
    model, pages = cost(2), np.zeros((2, 1), np.int32)
    slots, starts = np.arange(2, dtype=np.int32), np.full(2, 9999, np.int32)
    slots, starts, ranks = np.tile(slots, 2), np.tile(starts, 2), np.repeat(np.arange(2, dtype=np.int32), 2)
    plain = Decodes(ranks, slots, {0: pages, 1: pages}, starts, slots)
    assert model(StepPlan(0, (IDLE, IDLE), plain)) == pytest.approx(model.decode(2, 1, 10_000).seconds)
    limits = (starts + 100, slots, np.zeros(4, np.int32), np.full(4, 5, np.int32), np.full((4, 1), -1), starts)
    drafting = Speculation(ranks, slots, plain.page_tables, starts, *limits)
    drafts = model(StepPlan(0, (IDLE, IDLE), None, drafting))
    assert drafts == pytest.approx(model.decode(2, 6, 10_000, draft=True).seconds)
    prompt = np.zeros(4096, np.int32)
    chunks = [Prefill(0, prompt, start, start + 2048, pages[0], 0, 0) for start in (0, 2048)]
    for chunk, context, ends in zip(chunks, (1024, 3072), (False, True), strict=True):
        part = RankPlan((), (), (chunk,))
        assert model(StepPlan(0, (part, part))) == pytest.approx(model.prefill(2048, context, ends).seconds)
        exact = cost(2, replay="exact")
        assert exact(StepPlan(0, (part, part))) == pytest.approx(exact.prefill(2048, context, ends).seconds)
    prefill, one = RankPlan((), (), (chunks[0],)), plain.of_rank(0)
    both = model(StepPlan(0, (dataclasses.replace(prefill, first_drafts=(1,)), IDLE), one))
    assert both > max(model(StepPlan(0, (IDLE, IDLE), one)), model(StepPlan(0, (prefill, IDLE))))
    with pytest.raises(ValueError, match="plan of 1 ranks: this model is of 2"):
        model(StepPlan(0, (IDLE,)))


def test_layouts_cost_what_they_carry():
    gather, ragged = (cost(32, load_hardware("gb300"), exchange=name) for name in ("gather", "ragged"))
    assert ragged.decode(16, 6, 1000).parts["exchange"] < gather.decode(16, 6, 1000).parts["exchange"]
    assert cost(1).decode(16, 6, 1000).parts["exchange"] == 0
    inside, outside = (cost(ranks).decode(16, 6, 1000).parts["exchange"] for ranks in (8, 16))
    assert outside > 2 * inside  # half of the others are behind the network
    reads = [cost(ranks).decode(64, 6, 1000).parts["expert reads"] for ranks in (4, 8, 32)]
    assert reads == sorted(reads, reverse=True)
    even, skewed = (cost(8, balance=balance).decode(64, 6, 1000) for balance in (1.0, 0.5))
    assert skewed.parts["expert products"] == pytest.approx(2 * even.parts["expert products"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks = 0: must be 1 to n_routed_experts = 384"),
        ({"ranks": 385}, "ranks = 385"),
        ({"exchange": "pigeon"}, "exchange = 'pigeon': must be one of"),
        ({"balance": 0.0}, "balance = 0.0: must be greater than 0 and at most 1"),
        ({"draft_balance": 1.5}, "draft_balance = 1.5"),
        ({"replay": "none"}, "replay = 'none': must be 'exact' or 'bounded'"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        cost(**options)


# Calibration

CEILING = {"what": "measured", "copy": 4e12, "fp8": 1.5e15, "bf16": 0.8e15}
SHAPES = {
    "few": StepShape(8, 8, 4096, 8, 8, 8),
    "drafts": StepShape(16, 96, 131072, 96, 96, 8),
    "far": StepShape(16, 96, 875520, 96, 96, 8),
    "many": StepShape(64, 384, 4096, 384, 384, 8),
    "chunk": StepShape(1, 8192, 4096, 128, 1, 8),
}


def measured_steps(factors: tuple[float, ...], shapes=SHAPES) -> Result:
    result = Result("forward", {"command": "bench_steps.py", "date": "today"}, ceiling=dict(CEILING))
    memory, fp8, bf16, fixed = factors
    for name, shape in shapes.items():
        costs = step_costs(CFG, shape)
        floor = sum(one.floor(CEILING) for one in costs.values()) / 1e3
        shape_and_floor = {"shape": dataclasses.asdict(shape), "floor_milliseconds": floor}
        result.add_row("steps", {"step": name, "milliseconds": 1.0, **shape_and_floor})
        for stage, one in costs.items():
            seconds = memory * one.bytes / CEILING["copy"] + fixed * one.layers
            seconds += fp8 * one.fp8 / CEILING["fp8"] + bf16 * one.bf16 / CEILING["bf16"]
            result.add_row("stages", {"step": name, "stage": stage, "microseconds": 1e6 * seconds})
    return result


def test_constants_are_found_again_in_the_steps_that_they_make():
    result = measured_steps((1.25, 2.5, 1.5, 12e-6))
    result.add_rows("stages", [{"step": "few", "stage": "other", "microseconds": 3.0}, {"step": "few", "error": "x"}])
    found = calibrate(H200, result, CFG)
    assert found.memory_bandwidth.value == 4e12 and found.fp8_rate.kind == "measured"
    assert found.link_bandwidth == H200.link_bandwidth and found.stages["draft_context"] == H200.stages["draft_context"]
    for row in calibration_errors(found, result, CFG):
        assert abs(row["error"]) < 0.01
    experts = found.stages["experts"]
    assert (experts.memory, experts.fp8, experts.bf16) == pytest.approx((1.25, 2.5, 1.5), rel=0.02)
    assert hardware_from_dict(found.as_dict()) == found


@settings(max_examples=30)
@given(
    points=st.lists(
        st.tuples(st.floats(1e6, 1e12), st.floats(0, 1e15), st.floats(0, 1e15), st.floats(1e-6, 1)), min_size=1
    )
)
def test_fitted_factors_are_never_faster_than_the_machine(points):
    found = fit_factors([(Cost(b, f, h, 1), seconds) for b, f, h, seconds in points], CEILING)
    assert min(found[:3]) >= 1 and found[3] >= 0


def test_what_measurements_leave_open_stays_as_it_is():
    memory, fp8, bf16, fixed = fit_factors([(Cost(bytes=4e9, layers=1), 2e-3)], CEILING)
    assert (fp8, bf16) == (1, 1) and memory + fixed * 1e3 == pytest.approx(2, rel=0.01)


def test_a_result_without_what_is_needed_is_refused():
    result = measured_steps((1, 1, 1, 0), {"few": SHAPES["few"]})
    for change, message in (
        ({"experiment": "decode"}, "experiment = 'decode': must be 'forward'"),
        ({"ceiling": {"copy": 1.0, "bf16": 1.0}}, "ceiling: fp8 = None: must be a rate greater than 0"),
        ({"rows": {**result.rows, "stages": []}}, "stages: no time of any stage"),
        ({"rows": {**result.rows, "steps": [{"step": "few"}]}}, "steps: 'few': shape = None: must be a mapping with"),
        ({"rows": {**result.rows, "steps": []}}, "stages: step 'few': must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(H200, dataclasses.replace(result, **change), CFG)
    with pytest.raises(ValueError, match=r"steps: 'few': floor_milliseconds = .*must be the one that was measured"):
        calibrate(H200, result, dataclasses.replace(CFG, moe_intermediate_size=1024))
    with pytest.raises(ValueError, match="points: 0 seconds: must be greater than 0"):
        fit_factors([(Cost(bytes=1.0), 0.0)], CEILING)


# Published figures


def test_every_published_figure_has_our_value_and_its_error():
    rows = published_rows(CFG)
    assert {row["published"] for row in rows} >= {
        13.4, 6.0, 10.0, 8.93, 9.53, 64_400, 53_300, -5.9, -13.6, 13.84, 17.57, -1.1, 29.6, 890,
    }  # fmt: skip
    for row in rows:
        assert row["error"] == pytest.approx(row["ours"] / row["published"] - 1)
        if row["at_rates"] is not None:
            slower = row["ours"] <= row["at_rates"] if row["unit"] == "tokens/s" else row["ours"] >= row["at_rates"]
            assert slower, row
    assert next(row["ours"] for row in rows if row["published"] == 890) == 890
