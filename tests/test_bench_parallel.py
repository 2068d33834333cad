"""The measurements over several virtual devices, in processes of their own."""

import pytest
from bench_scripts import load_script, run_script
from checkpoint_files import run_python

from dsv4jax.bench.results.result import Result, load

PROGRAM = """
import json, sys
from bench_scripts import run_script, small_config
from dsv4jax.checkpoint.random import random_params

path, *given = sys.argv[1:]
with open(path + "/config.json", "w") as file:
    json.dump(small_config().to_dict(), file)
run_script("bench_parallel", "--model=" + path, "--report=" + path, "--implementation=reference",
           "--link_megabytes=1", "--repeats=1", *given,
           random_params=lambda cfg, numerics, layout: random_params(cfg, 3, layout))
"""


def run(path, devices: int, *arguments: str) -> Result:
    """What the script wrote."""
    run_python(PROGRAM, path, *arguments, devices=devices)
    return load(path / "parallel.json")


def test_exchanges_alone_over_eight_devices(tmp_path):
    ways = [f"--exchanges={way}" for way in ("gather", "all_to_all", "ragged")]
    result = run(tmp_path, 8, "--sections=exchange", "--exchange_tokens=4", *ways)
    (links,) = result.rows["links"]
    assert links["all_gather_gigabytes_per_second"] > 0 and links["reduce_scatter_microseconds"] > 0
    rows = {row["exchange"]: row for row in result.rows["exchange"]}
    assert list(rows) == ["gather", "all_to_all", "ragged"] and not any("error" in row for row in rows.values())
    # Two experts of eight per token on eight devices: at most two of the seven others want it.
    assert rows["gather"]["megabytes"] == rows["all_to_all"]["megabytes"] >= 7 / 2 * rows["ragged"]["megabytes"] > 0
    for row in rows.values():
        assert row["share_of_bandwidth"] == pytest.approx(row["floor_microseconds"] / row["microseconds"])


@pytest.mark.timeout(300)
def test_steps_and_engine_over_two_devices_beside_one(tmp_path):
    sizes = ["--decode=2x1x40", "--prefill=", "--exchange_tokens=2", "--engine_requests=2", "--engine_steps=4"]
    result = run(tmp_path, 2, "--routing=uniform", "--exchanges=gather", *sizes)
    assert [(row["devices"], row["tokens"]) for row in result.rows["steps"]] == [(1, 2), (1, 4), (2, 4)]
    assert not any("error" in row for section in ("exchange", "steps", "engine") for row in result.rows[section])
    for row in result.rows["steps"]:
        assert 0 < row["balancedness"] <= 1 and 0 < row["uniform_control"] <= 1 and 1 <= row["experts_in_use"] <= 8
    alone = result.rows["exchange"][0]["microseconds"] * 2 / 1e3
    assert result.rows["steps"][2]["exchange_alone_milliseconds"] == pytest.approx(alone)
    (engine,) = result.rows["engine"]
    assert engine["tokens_per_step"] == 4 and engine["requests_per_rank"] == 2
    through, alone = engine["engine_milliseconds"], engine["program_milliseconds"]
    assert engine["host_gap_milliseconds"] == pytest.approx(through - alone)


def test_routings_are_judged_beside_uniform_routing_of_the_same_step():
    def row(routing, milliseconds, balancedness, devices=8, **more):
        names = {"step": "decode", "devices": devices, "routing": routing}
        return names | {"milliseconds": milliseconds, "balancedness": balancedness} | more

    script, _ = load_script("bench_parallel")
    rows = [
        row("uniform", 10.0, 0.9, exchange_alone_milliseconds=2.5),
        row("skewed", 15.0, 0.4),
        row("model", 10.0, 0.8, 1),
    ]
    failed = {"step": "decode", "devices": 8, "routing": "model", "error": "out of memory"}
    assert script.routing_verdicts([*rows, failed]) == [
        "decode, 8 devices, uniform: exchanges alone take 25% of the step's time",
        "decode, 8 devices: skewed routing takes 1.50 times uniform routing; balancedness 0.40 against 0.90",
    ]


def test_balancing_is_judged_before_and_after_and_beside_uniform_routing(tmp_path):
    sizes = ["--ranks=4", "--requests=1", "--layers=1", "--slots=97", "--draft_slots=33", "--judged=2", "--cycles=1"]
    run_script("bench_balance", f"--report={tmp_path}", *sizes)
    result = load(tmp_path / "balance.json")
    assert [row["stack"] for row in result.rows["layers"]] == ["target"] + ["draft, 33 slots"] * 3
    target, draft = result.rows["stacks"]
    layers = [row["steps"] for row in result.rows["layers"][1:]]
    assert draft["steps"] == pytest.approx(sum(layers) / 3) and target["control"] < 1 and target["slots"] == 388
    by_step = [row for row in result.rows["by_step"] if row["stack"] == "target"]
    assert len(by_step) == 2 and target["before"] == pytest.approx(sum(row["before"] for row in by_step) / 2)
    script, _ = load_script("bench_balance")
    row = {"stack": "target", "cycle": 1, "before": 0.31, "control": 0.96}
    for steps, reached in ((0.941, "reached"), (0.939, "not reached")):
        assert script.verdict({**row, "steps": steps}).endswith(f"uniform routing gives 0.960: {reached} within 0.02")
    assert "Balancedness of draft, 33 slots by step" in (tmp_path / "balance.html").read_text()
