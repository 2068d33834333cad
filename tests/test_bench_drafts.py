"""The measurement of drafting: forced confidences, reliability tables, and the script as a whole."""

import json
import re
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from bench_scripts import load_script, run_script, small_config

from dsv4jax.bench.engines import draft_rates, system
from dsv4jax.bench.engines.draft_rates import MeasuredTimes
from dsv4jax.bench.results.result import Result, load
from dsv4jax.bench.steps.drafts import DraftCase, acceptance, reliability
from dsv4jax.checkpoint.random import random_params
from dsv4jax.config import ModelConfig
from dsv4jax.draft_statistics import step_statistics
from dsv4jax.engine.draft_room import DecodeTimes
from dsv4jax.engine.programs import equal_costs
from dsv4jax.engine.simulated import SimulatedExecutor, constant_tokens, fixed_acceptance
from dsv4jax.numerics import REFERENCE
from sharding import SINGLE


@pytest.fixture
def script(tmp_path):
    """Runs it on the small model; returns the result that it wrote."""
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))

    def run(*arguments: str) -> Result:
        given = [f"--model={tmp_path}", f"--report={tmp_path}", "--implementation=reference", "--ranks=1", *arguments]
        run_script("bench_drafts", *given, random_params=lambda cfg, numerics, layout: random_params(cfg, 3))
        assert "Acceptance by position" in (tmp_path / "speculation.html").read_text()
        return load(tmp_path / "speculation.json")

    return run


@pytest.mark.timeout(300)
def test_the_script_times_plain_fixed_and_adaptive_steps_and_judges_them(script, capsys):
    result = script("--requests=1", "--fixed=2", "--acceptance=1,0.5", "--context=40", "--repeats=3")
    plain, fixed, adaptive = result.rows["steps"]
    assert [row["drafts"] for row in result.rows["steps"]] == ["0", "2", "adaptive"]
    assert not any("error" in row for rows in result.rows.values() for row in rows)
    # Two tokens a step or three, by chance; the law says two and a half, and that is what the speed is of.
    assert 2 <= fixed["tokens_per_request"] <= 3 and fixed["verified_per_request"] == 2
    assert fixed["expected_tokens"] == 2.5 == pytest.approx(fixed["tokens_per_second"] * fixed["milliseconds"] / 1e3)
    assert fixed["times_plain_step"] == pytest.approx(fixed["milliseconds"] / plain["milliseconds"])
    assert fixed["times_plain_rate"] == pytest.approx(fixed["tokens_per_second"] / plain["tokens_per_second"])
    assert fixed["verify_milliseconds"] + fixed["draft_milliseconds"] == pytest.approx(fixed["milliseconds"])
    assert adaptive["costs"]["tokens"] == [1, 2, 3] and 1 <= adaptive["tokens_per_request"] <= 3
    best = max(plain["tokens_per_second"], fixed["tokens_per_second"])
    assert adaptive["times_best_fixed"] == pytest.approx(adaptive["tokens_per_second"] / best)
    told = {"requests": 1, "acceptance": "synthetic"}
    *random, half, sure = result.rows["reliability"]
    second = half["accepted"]
    assert sure == told | {"survival": "0.9 to 1.0", "drafts": 3, "predicted": 1.0, "accepted": 1.0}
    assert half == told | {"survival": "0.5 to 0.6", "drafts": 3, "predicted": 0.5, "accepted": second}
    assert sum(row["drafts"] for row in random) == 6
    assert result.rows["acceptance"][-2:] == [
        told | {"position": n, "drafts": 3, "accepted": share, "given_earlier": share}
        for n, share in ((1, 1.0), (2, second))
    ]
    goals = {row["goal"]: row for row in result.rows["goals"]}
    cycle = goals["1 request, 2 drafts: cycle under 1.35 plain steps"]
    assert cycle["value"] == fixed["times_plain_step"] and cycle["met"] == (cycle["value"] < 1.35)
    assert goals["1 requests, 1 0.5: within 3 % of the best"]["value"] == adaptive["times_best_fixed"]
    ways = {"plain decoding": plain, "drafts 2": fixed, "drafts adaptive": adaptive}
    fastest = max(ways, key=lambda way: ways[way]["tokens_per_second"])
    assert result.verdicts[-1].startswith(f"1 requests, acceptance 1 0.5: {fastest} is the fastest, ")
    assert re.search("reliability.*random weights", capsys.readouterr().out, re.S)


def test_requests_do_not_share_the_chance_by_which_their_drafts_stand():
    case = DraftCase(small_config(), REFERENCE, SINGLE, 4, 40, (2,), "shared", 0.0, 3)
    assert len({*map(tuple, case._batch("2").sampling.seed.tolist())}) == 4


def test_a_simulation_runs_the_engine_with_the_times_of_a_result(tmp_path):
    steps = [
        {"requests": 2, "drafts": "0", "milliseconds": 20.0},
        {"requests": 2, "drafts": "1", "milliseconds": 26.0, "draft_milliseconds": 4.0},
        {"requests": 2, "drafts": "1", "milliseconds": 29.0, "draft_milliseconds": 4.0},
        {"requests": 4, "drafts": "2", "milliseconds": 29.0, "draft_milliseconds": 5.0},
        {"requests": 4, "drafts": "adaptive", "milliseconds": 99.0},
        {"requests": 4, "drafts": "2", "error": "out of memory"},
    ]
    times = MeasuredTimes.from_rows(steps)
    assert times == MeasuredTimes({2: 0.02, 4: 0.022, 12: 0.024}, {2: 0.004, 4: 0.005})
    assert [times.seconds(n, k) for n, k in ((4, 0), (3, 1), (8, 1), (1, 0))] == pytest.approx(
        [0.022, 0.0225 + 0.0045, 0.025 + 0.007, 0.019]
    )
    Result("speculation", {}, rows={"steps": steps}).save(tmp_path / "measured.json")
    sizes = ["--rate_requests=1,8", "--rate_steps=60", "--fixed=1,3"]
    laws = ["--acceptance=0.9,0.9,0.9", "--acceptance=0.05,0.05,0.05"]
    arguments = [f"--simulate={tmp_path / 'measured.json'}", f"--report={tmp_path / 'out'}", *sizes, *laws]
    run_script("bench_drafts", *arguments, time=time)
    result = load(tmp_path / "out" / "speculation.json")
    rows = result.rows["rates"]
    assert [row["drafts"] for row in rows] == ["0", "1", "3", "adaptive"] * 4
    chosen = rows[3::4]
    assert [row["best_fixed"] for row in chosen] == ["3", "0", "3", "0"]
    assert all(row["times_best_fixed"] > 0.97 for row in chosen)
    assert rows[2]["milliseconds"] == pytest.approx(1e3 * times.seconds(1, 3))
    assert "1 requests, 0.9 0.9 0.9, through an engine: within 3 % of the best: " in result.verdicts[0]
    # Of a step alone and through an engine: each is judged for itself.
    both = Result("speculation", {}, rows={"steps": [{**row, "drafts": "9"} for row in rows], "rates": rows})
    load_script("bench_drafts")[0].conclude(both)
    judged = [line for line in both.verdicts if line.startswith("8 requests, ") and "is the fastest" in line]
    assert len(judged) == 4 and sum(", through an engine: " in line for line in judged) == 2


def test_rates_on_a_device_are_those_of_programs_with_room_for_each_number(monkeypatch):
    """With an executor that takes a second a step. The law gives 3.5 tokens for three drafts, whatever comes."""
    law = np.float32([1, 1, 0.5])

    class Device(SimulatedExecutor):
        def __init__(self, params, programs):
            cost, confidences = (lambda plan: 1.0), (lambda positions: np.full((len(positions), 3), 9, np.float32))
            super().__init__(cost, constant_tokens(7), fixed_acceptance(law), 3, confidences)
            self.programs = programs

        def warm_up(self, progress):
            assert [b.tokens_per_request for b in self.programs.buckets.verify] == [2, 4]

        def measure_costs(self):
            buckets = (*self.programs.buckets.decode, *self.programs.buckets.verify)
            return [DecodeTimes(b.requests, b.pages, b.tokens_per_request - 1, equal_costs(b)) for b in buckets]

        def set_costs(self, times):
            assert len(times) == 3

        def close(self):
            pass

    def programs(cfg, cache_cfg, buckets, numerics, layout, **options):
        np.testing.assert_array_equal(options["forced_acceptance"], law)
        return mock.Mock(buckets=buckets)

    monkeypatch.setattr(system, "Programs", programs)
    monkeypatch.setattr(system, "JaxExecutor", Device)
    rows = draft_rates.device_rates({}, ModelConfig(), REFERENCE, SINGLE, requests=2, fixed=(1, 3), law=law, steps=10)
    assert [(row["drafts"], row["tokens_per_second"]) for row in rows] == [
        ("0", 2),
        ("1", 4),
        ("3", 7),
        ("adaptive", 7),
    ]
    assert rows[-1]["best_fixed"] == "3" and rows[-1]["times_best_fixed"] == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--acceptance=0.5", "every law must be for 2 drafts"),
        ("--acceptance=0.5,1.5", "--acceptance=0.5,1.5: must be numbers from 0 to 1"),
        ("--fixed=9", "--fixed=9: must be whole numbers from 1 to 4"),
        ("--requests=none", "--requests=none: must be whole numbers from 1 to 4096"),
    ],
)
def test_the_script_refuses_by_name_what_it_cannot_run_before_it_writes_a_file(script, tmp_path, argument, message):
    with pytest.raises(Exception, match=re.escape(message)):
        script("--fixed=2", argument)
    assert not (tmp_path / "speculation.json").exists()


def test_acceptance_is_told_by_place_and_given_the_drafts_before():
    # Of four requests three verify two drafts and one verifies one; the first is accepted three times, both once.
    counts, accepted, valid = np.int32([2, 2, 2, 1]), np.int32([2, 1, 0, 1]), np.ones(4, bool)
    statistics = step_statistics(jnp.zeros((4, 3)), *map(jnp.asarray, (counts, accepted, valid)))
    first, second = acceptance(statistics)
    assert first == {"position": 1, "drafts": 4, "accepted": 0.75, "given_earlier": 0.75}
    assert (second["position"], second["drafts"], second["accepted"]) == (2, 3, pytest.approx(1 / 3))


def test_a_reliability_table_shows_what_was_predicted_and_what_came_of_it():
    def logit(p):
        return np.log(p / (1 - p))

    # Survivals 0.8 and 0.4 of each request; the first accepts both, the second none, the third is padding.
    confidences = np.tile(logit(np.float32([0.8, 0.5])), (3, 1))
    counts, accepted, valid = np.int32([2, 2, 2]), np.int32([2, 0, 2]), np.array([True, True, False])
    table = reliability(step_statistics(*map(jnp.asarray, (confidences, counts, accepted, valid))))
    assert [(row["survival"], row["drafts"], row["accepted"]) for row in table] == [
        ("0.4 to 0.5", 2, 0.5),
        ("0.8 to 0.9", 2, 0.5),
    ]
    np.testing.assert_allclose([row["predicted"] for row in table], [0.4, 0.8], rtol=1e-5)


def test_acceptance_by_task_is_reported_and_a_task_that_fails_does_not_end_the_others(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"task": "a", "prompt": "1 + 1"}, {"task": "b", "prompt": "x"}, {"task": "a", "prompt": "2 + 2"}]
    path.write_text("\n".join(map(json.dumps, lines)))

    def half_of_the_drafts_stand(params, cfg, prompts, max_tokens, eos_id):
        if len(prompts) == 1:
            raise RuntimeError("out of memory")
        assert all(prompt[0] == 0 and len(prompt) > 1 for prompt in prompts) and max_tokens == 8
        counts, valid = jnp.full(2, 2), jnp.ones(2, bool)
        return step_statistics(jnp.zeros((2, 4)), counts, jnp.int32([2, 0]), valid), None

    run_script(
        "bench_acceptance", f"--prompts={path}", "--max_tokens=8", f"--report={tmp_path}",
        load_params=lambda *_: None, drafts_and_routing=half_of_the_drafts_stand,
    )  # fmt: skip
    result = load(tmp_path / "acceptance.json")
    a, b = result.rows["tasks"]
    assert (a["prompts"], a["verifications"], a["acceptance_length"], a["accepted"]) == (2, 2, 2.0, 0.5)
    # Survivals 0.5 and 0.25 are predicted, and half of both stand.
    assert a["calibration_error"] == pytest.approx(0.25 / 2)
    assert b == {"task": "b", "error": "RuntimeError: out of memory"}
    assert [row["accepted"] for row in result.rows["acceptance"]] == [0.5, 0.5]
    assert [(row["predicted"], row["accepted"]) for row in result.rows["reliability"]] == [(0.25, 0.5), (0.5, 0.5)]
    assert result.verdicts == ["a: 2.00 tokens of a verification; confidences are off by 0.12 on average"]


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"task": "a"}', '{"task": "a", "prompt": ""}', '{"task": 1, "prompt": "x"}']
)
def test_prompts_of_another_form_are_refused_by_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"task": "a", "prompt": "x"}\n' + line + "\n")
    script, _ = load_script("bench_acceptance")
    with pytest.raises(ValueError, match=r"prompts.jsonl: line 2: must be an object with the texts task and prompt"):
        script.read_prompts(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="must have at least one line"):
        script.read_prompts(str(path))
