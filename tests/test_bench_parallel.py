"""The measurements over several virtual devices, in processes of their own."""

import json

import pytest
from checkpoint_files import run_python

PROGRAM = """
import json, sys
from bench_scripts import run_script, small_config
from dsv4jax.checkpoint.random import random_params

path, *given = sys.argv[1:]
with open(path + "/config.json", "w") as file:
    json.dump(small_config().to_dict(), file)
run_script("bench_parallel", "--model=" + path, "--output=" + path + "/out.json", "--implementation=reference",
           "--link_megabytes=1", "--repeats=1", *given,
           random_params=lambda cfg, numerics, layout: random_params(cfg, 3, layout))
"""


def run(path, devices: int, *arguments: str) -> dict:
    """What the script wrote."""
    run_python(PROGRAM, path, *arguments, devices=devices)
    return json.loads((path / "out.json").read_text())


def test_exchanges_alone_over_eight_devices(tmp_path):
    ways = [f"--exchanges={way}" for way in ("gather", "all_to_all", "ragged")]
    report = run(tmp_path, 8, "--sections=exchange", "--exchange_tokens=4", *ways)
    (links,) = report["links"]
    assert links["all_gather_gigabytes_per_second"] > 0 and links["reduce_scatter_microseconds"] > 0
    rows = {row["exchange"]: row for row in report["exchange"]}
    assert list(rows) == ["gather", "all_to_all", "ragged"] and not any("error" in row for row in rows.values())
    # Two experts of eight per token on eight devices: at most two of the seven others want it.
    assert rows["gather"]["megabytes"] == rows["all_to_all"]["megabytes"] >= 7 / 2 * rows["ragged"]["megabytes"] > 0
    for row in rows.values():
        assert row["share_of_bandwidth"] == pytest.approx(row["floor_microseconds"] / row["microseconds"])


@pytest.mark.timeout(300)
def test_steps_and_engine_over_two_devices_beside_one(tmp_path):
    sizes = ["--decode=2x1x40", "--prefill=", "--exchange_tokens=2", "--engine_requests=2", "--engine_steps=4"]
    report = run(tmp_path, 2, "--routing=uniform", "--exchanges=gather", *sizes)
    assert [(row["devices"], row["tokens"]) for row in report["steps"]] == [(1, 2), (1, 4), (2, 4)]
    assert not any("error" in row for section in ("exchange", "steps", "engine") for row in report[section])
    for row in report["steps"]:
        assert 0 < row["balancedness"] <= 1 and 0 < row["uniform_control"] <= 1 and 1 <= row["experts_in_use"] <= 8
    alone = report["exchange"][0]["microseconds"] * 2 / 1e3
    assert report["steps"][2]["exchange_alone_milliseconds"] == pytest.approx(alone)
    (engine,) = report["engine"]
    assert engine["tokens_per_step"] == 4 and engine["requests_per_rank"] == 2
    through, alone = engine["engine_milliseconds"], engine["program_milliseconds"]
    assert engine["host_gap_milliseconds"] == pytest.approx(through - alone)
