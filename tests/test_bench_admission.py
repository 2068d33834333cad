"""What it costs to admit requests: stages, bursts, a long prompt."""

import dataclasses

import numpy as np
import pytest
from bench_scripts import run_script

from dsv4jax.bench.engines.admission import (
    BurstLoad,
    admission_stages,
    beside_long_prompt,
    list_based_admission,
    run_bursts,
)
from dsv4jax.bench.engines.system import Sizes, simulated_system
from dsv4jax.bench.results.result import load
from dsv4jax.bench.traffic.counting import Window
from dsv4jax.engine.simulated import LinearCost

COST = LinearCost(step=0.01, prefill_token=1e-4, prefill_pair=0, decode_token=0, decode_context=0)


def test_every_stage_of_a_prompt_is_timed(default_tokenizer):
    rows = list(admission_stages(300, default_tokenizer, "some text that is repeated ", repeats=2))
    assert len(rows) == 2
    for row in rows:
        assert row.pop("tokens") == 300 and all(value > 0 for value in row.values())
        assert row["engine_ms"] == pytest.approx(row["hash_ms"] + row["enqueue_ms"] + row["first_plan_ms"])
    assert set(rows[0]) == {
        f"{name}_ms"
        for name in (
            *("parse", "parse_text", "tokenise", "hash", "enqueue", "first_plan", "first_plan_cached"),
            *("list_based", "engine"),
        )
    }


def test_the_engine_of_lists_gives_a_page_to_every_64_tokens():
    assert list_based_admission(list(range(200)), 10).tolist() == [9, 8, 7, 6]


LOAD = BurstLoad(running=2, running_tokens=50, burst=4, prompt_tokens=1000, output_tokens=2, begin=1.0, every=2.0)


def test_new_requests_wait_in_the_queue_with_a_cap_and_side_by_side_without():
    system = simulated_system(Sizes(slots=8, max_model_len=2048, prefill_tokens=512), COST)
    rows = {}
    for cap in (1, 8):
        rows[cap], requests, interrupted = run_bursts(system, LOAD, Window(1.0, 5.0), cap, progress=False)
        assert not interrupted and not rows[cap]["invalid"]
        new = [m for m in requests if m.session == "burst"]
        assert [m.arrived for m in new] == [1.0] * 4 + [3.0] * 4 and rows[cap]["new_requests"] == 8
        # Running ones never end; alone a step takes 10 ms, beside a full share of prefill 61.2.
        assert sum(m.session == "running" and m.finish_reason == "unfinished" for m in requests) == 2
        assert rows[cap]["running_alone_inter_token_max_ms"] == pytest.approx(10)
        assert rows[cap]["running_inter_token_max_ms"] == pytest.approx(61.2)
    # 4,000 tokens in steps of 512: without a cap all end in the last step, with one they end one after the other.
    assert rows[8]["new_queue_max_ms"] == pytest.approx(0, abs=61.2)
    assert rows[1]["new_queue_max_ms"] > rows[8]["new_queue_max_ms"] + 20
    assert rows[1]["new_ttft_p50_ms"] < rows[8]["new_ttft_p50_ms"] - 20
    assert rows[1]["new_ttft_max_ms"] == pytest.approx(rows[8]["new_ttft_max_ms"], abs=65)


def test_running_requests_begin_anew_at_the_end_of_the_context_and_must_leave_slots():
    system = simulated_system(Sizes(slots=3, max_model_len=100, prefill_tokens=512), COST)
    load = dataclasses.replace(LOAD, burst=1, prompt_tokens=20)
    _, requests, _ = run_bursts(system, load, Window(1.0, 2.0), 8, progress=False)
    turns = sorted(m.turn for m in requests if m.session == "running")
    assert turns[-1] >= 2 and turns.count(0) == 2 and turns.count(1) == 2
    with pytest.raises(ValueError, match="running = 2: must be less than 2, all slots"):
        small = dataclasses.replace(system, config=dataclasses.replace(system.config, slots=2))
        run_bursts(small, load, Window(1.0, 2.0), 8)
    for name, tokens in (("running_tokens", 100), ("prompt_tokens", 99)):
        with pytest.raises(ValueError, match=f"{name} = {tokens}.*: must be"):
            run_bursts(system, dataclasses.replace(load, **{name: tokens}), Window(1.0, 2.0), 8)


def test_running_requests_that_fail_do_not_begin_anew():
    system = simulated_system(Sizes(slots=3, pages=1, max_model_len=100, prefill_tokens=512), COST)
    _, requests, _ = run_bursts(
        system, dataclasses.replace(LOAD, burst=1, prompt_tokens=20), Window(1.0, 2.0), 8, progress=False
    )
    assert [m.failed for m in requests if m.session == "running"] == [True, True]


@pytest.mark.parametrize("share", [(256, 1, 1), (256, 3, 1), (256, 1, 3)])
def test_chats_beside_a_long_prompt_never_wait_longer_than_the_policy_promises(share):
    row = beside_long_prompt(8000, 4, *share)
    assert row["inter_token_alone_ms"] < row["inter_token_max_ms"] <= row["bound_ms"]
    assert row["long_ttft_s"] > 8000 * LinearCost().prefill_token and row["chat_ttft_max_ms"] >= 0


def test_the_command(tmp_path, capsys):
    stages = ["--tokens=200", "--tokens=400", "--repeats=2", "--long_prompt=3000", "--chats=2"]
    sizes = ["--running=2", "--burst=2", "--prompt_tokens=300", "--seconds=1.5", "--every=0.5", "--slots=6"]
    caps = ["--max_admissions=1", "--max_admissions=4"]
    run_script("bench_admission", *stages, *sizes, *caps, f"--report={tmp_path}")
    result = load(tmp_path / "admission.json")
    assert [row["tokens"] for row in result.rows["stages"]] == [200, 200, 400, 400]
    assert [row["max_admissions"] for row in result.rows["bursts"]] == [1, 4]
    assert result.ceiling["what"].startswith("assumed: ")
    assert len(result.rows["long_prompt"]) == 5 and result.requests and len(result.control) == 3
    assert len(result.verdicts) == 3 and result.verdicts[0] in capsys.readouterr().out
    assert np.isfinite([row["new_ttft_p50_ms"] for row in result.rows["bursts"]]).all()
