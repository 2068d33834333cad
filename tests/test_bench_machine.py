"""The scripts that time kernels and startups, with what they time replaced: it needs a GPU, or minutes."""

import sys
import types
from unittest import mock

import jax
import pytest
from bench_scripts import load_script, run_script

from dsv4jax.bench.results.result import Result, load
from pallas_kernels.timing import Case


def test_kernels_are_reported_beside_their_floors_and_goals(tmp_path):
    kinds = (("fast", 10.0), ("slow", 4.0), ("without", None))
    cases = [Case(name, lambda: (None, ()), 4e6, 1e6, "bf16", goal) for name, goal in kinds]
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        run_script(
            "bench_kernels", f"--report={tmp_path}", cases=lambda: cases,
            ceilings=lambda: {"copy": 4e12, "bf16": 1e12, "fp8": 2e12}, device_microseconds=lambda *_: 5.0,
        )  # fmt: skip
    result = load(tmp_path / "kernels.json")
    fast, slow, without = result.rows["cases"]
    assert fast == {"case": "fast", "microseconds": 5.0, "floor": pytest.approx(1.0), "goal": 10.0}
    assert without["goal"] is None and slow["case"] == "slow" and result.verdicts == ["1 of 2 goals are met"]
    assert result.ceiling["copy"] == 4e12


def test_peers_that_fail_are_rows_with_their_error_beside_the_others(tmp_path):
    def absent(*_):
        raise ModuleNotFoundError("No module named 'humming'")

    case = Case("case", lambda: (None, ()), 4e6, 1e6, "bf16", 10.0)
    torch = mock.MagicMock(__version__="2.9")
    benchmarks = types.SimpleNamespace(
        DECODE_GOALS={"decode": 1.0}, PREFILL_GOALS={}, decode_gate_up=lambda *_: case,
        cases=lambda: [Case("topk wide", lambda: (None, ()), 1, 1, "bf16", None)],
    )  # fmt: skip
    with mock.patch.dict(sys.modules, torch=torch), mock.patch.object(jax, "default_backend", lambda: "gpu"):
        run_script(
            "bench_peers", f"--report={tmp_path}", experts=benchmarks, topk=benchmarks, TOKENS={"decode": 1},
            SHAPES={"wide": None}, device_microseconds=lambda *_: 5.0, ceilings=lambda: {"copy": 4e12},
            grouped_matmul=lambda *_: 7.0, humming_gate_up=absent, top_k=lambda *_: 9.0,
        )  # fmt: skip
    rows = load(tmp_path / "peers.json").rows["cases"]
    assert [row.get("microseconds") for row in rows] == [5.0, 7.0, None, None, 5.0, 9.0]
    assert rows[0] == {"case": "case", "kernel": "ours", "microseconds": 5.0, "goal": 10.0}
    assert rows[2]["error"] == "ModuleNotFoundError: No module named 'humming'"


def test_startups_are_reported_by_phase_with_repeats_in_one_table(tmp_path):
    phases = {"imports": 1.0, "devices": 0.5, "programs": 2.0, "weights": 0.25, "first token": 0.25}
    started = []

    def child(worker):
        started.append(worker)
        told = {"total": 4.0, "phases": phases, "cpu_seconds": 3.0, "compilations": 0, "compile_seconds": 0.0}
        return {"programs": 2} if worker == "export" else told

    run_script(
        "bench_startup", f"--report={tmp_path}", f"--directory={tmp_path}", "--repeats=2",
        "--skip=compiled, snapshot, cold", _child=child, _read_rate=lambda files: 2e9, _forget=mock.Mock(),
        read_manifest=lambda path: types.SimpleNamespace(environment={"target": "cpu"}), shutil=mock.Mock(),
    )  # fmt: skip
    result = load(tmp_path / "startup.json")
    assert started[0] == "export" and len(started) == 1 + 7 * 2
    assert result.rows["export"] == [{"programs": 2}] and [row["state"] for row in result.rows["reads"]] == [
        "cold",
        "warm",
    ]
    assert result.rows["startups"][0] == {
        "name": "loaded, checkpoint, cold", "total": 4.0, **phases, "cpu_seconds": 3.0, "compilations": 0,
        "compile_seconds": 0.0,
    }  # fmt: skip
    assert result.conditions["environment"] == {"target": "cpu"}
    assert "From the start to the first token" in (tmp_path / "startup.html").read_text()
    assert "loaded, checkpoint, cold: the first token after 4.0 s with 0 GB of weights, 0.00 s of compilation" in (
        result.verdicts
    )
    assert any(line.startswith("loaded, snapshot, warm: goal") and "not judged" in line for line in result.verdicts)


@pytest.mark.parametrize(
    ("total", "compilations", "rate", "judged"),
    [
        (19.0, 0, 6e9, "met; a plain read of the weights takes 10.0 s"),
        (19.0, 1, 6e9, "not met; "),
        (21.0, 0, 6e9, "not met; "),
        (40.0, 0, 2e9, "not met, the disk does not allow it; a plain read of the weights takes 30.0 s"),
    ],
)
def test_startups_are_judged_by_their_goal_and_the_disk(total, compilations, rate, judged):
    row = {"name": "loaded, snapshot, cold", "total": total, "compilations": compilations, "compile_seconds": 0.0}
    reads = [{"state": "cold", "bytes_per_second": rate}]
    result = Result("startup", {}, rows={"startups": [row], "reads": reads})
    line = load_script("bench_startup")[0].verdicts(result, 60_000_000_000)[-1]
    assert f"under 20 s for 60 GB, none compiled: {judged}" in line
