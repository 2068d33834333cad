"""Sessions of agents: the generator's statistics, trace files, and what the closed loop asks and expects."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from bench_scripts import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.results.result import load
from dsv4jax.bench.traffic.agents import (
    AgentParameters,
    Lognormal,
    generate_sessions,
    read_parameters,
    trace_statistics,
)
from dsv4jax.bench.traffic.driver import run_engine
from dsv4jax.bench.traffic.sessions import FIRST_MARKERS, MARKER_TOKENS, SessionWorkload, content_tokens
from dsv4jax.bench.traffic.trace_file import HEADER, Message, Session, TurnPlan, read_trace, write_trace
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.records import Observer
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor

IDS = range(100, 700)
SHARED = (Message("system", "agent", 100), Message("system", "repository", 60))


def take(count, seed=0, parameters=None, scale=1.0):
    made = generate_sessions(parameters or AgentParameters(), seed)
    return [session.scaled(scale) for session in itertools.islice(made, count)]


def plan(name, tokens=50, output=10, think=1.0, subagents=()):
    return TurnPlan((Message("tool", name, tokens),), output, think, tuple(subagents))


def session(name, turns=3, **options):
    first = TurnPlan((*SHARED, Message("user", f"{name} task", 40)), 10, 5.0)
    return Session(name, (first, *(plan(f"{name} {i}", **options) for i in range(1, turns))))


def workload(sessions, **options):
    fields = {"live": 1, "ids": IDS, "max_context": 4096, "page_size": 16, "from_the_middle": False}
    return SessionWorkload(iter(sessions), **{**fields, **options})


def answer(turn, token=7):
    return np.full(turn.max_tokens, token, np.int32)


# ---- the generator -------------------------------------------------------------------------------------------


def test_defaults_reproduce_public_statistics():
    found = trace_statistics(take(700))
    assert found.context_p50 == pytest.approx(68_000, rel=0.07)
    assert 450_000 < found.context_p99 < 700_000
    assert found.output_tokens == pytest.approx(400, rel=0.06)
    assert 0.90 < found.cached_share < 0.97
    assert found.context_most <= 1_000_000 and found.subagents > 300


def test_sessions_depend_on_seed_and_number_alone():
    assert take(6) == take(6) == take(12)[:6]
    assert take(3, seed=1) != take(3)


def test_scale_scales_tokens_and_times_and_keeps_the_structure():
    full, small = take(40), take(40, scale=0.01)
    for large, little in zip(full, small, strict=True):
        turns = [[turn for one in session.family() for turn in one.turns] for session in (large, little)]
        for a, b in zip(*turns, strict=True):
            assert b.output_tokens == max(1, round(a.output_tokens / 100))
            assert b.think_seconds == pytest.approx(a.think_seconds / 100)
            assert [m.content for m in a.messages] == [m.content for m in b.messages]
    assert trace_statistics(small).context_p50 == pytest.approx(trace_statistics(full).context_p50 / 100, rel=0.02)


def test_statistics_of_a_trace_count_shared_prefixes_and_histories():
    found = trace_statistics([session("a", turns=2), session("b", turns=1)])
    # a: 200 and 260 tokens, of which 209 (the last output token was not run); b: 200, of which the prefix.
    assert (found.turns, found.context_most) == (3, 260)
    assert found.cached_share == pytest.approx((209 + 160) / (200 + 260 + 200))
    with pytest.raises(ValueError, match="sessions: there are none"):
        trace_statistics([])


def test_parameters_come_from_a_file_by_name(tmp_path):
    path = tmp_path / "parameters.json"
    path.write_text('{"agents": 2, "output": {"median": 100}, "human_share": 0}')
    found = read_parameters(path)
    assert found == dataclasses.replace(
        AgentParameters(), agents=2, output=dataclasses.replace(AgentParameters.output, median=100), human_share=0
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent": 2}, "'agent': unknown"),
        ({"agents": 0}, "agents = 0: must be a whole number, at least 1"),
        ({"agents": 1.5}, "agents = 1.5: must be a whole number"),
        ({"human_share": 1.5}, "human_share = 1.5: must be at most 1"),
        ({"zipf": -1}, "zipf = -1: must be a number, at least 0"),
        ({"zipf": "1"}, "zipf = '1': must be a number"),
        ({"turns": 5}, "turns = 5: must be an object"),
        ({"turns": {"mean": 5}}, "turns = {'mean': 5}: must be an object with some of"),
        ({"turns": {"median": 500}}, "turns: least, median, most = 1.0, 500, 400: must ascend"),
        ({"turns": {"sigma": "x"}}, "turns: sigma = 'x': must be a number"),
        ({"max_context": 50_000}, "max_context = 50000: a first turn may have"),
        ([], "must be a JSON object"),
    ],
)
def test_wrong_parameters_are_refused_by_name(tmp_path, fields, message):
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError) as caught:
        read_parameters(path)
    assert str(caught.value).startswith(f"{path}: {message}")


# ---- trace files ---------------------------------------------------------------------------------------------


def test_a_trace_file_gives_back_sessions_and_their_subagents(tmp_path):
    path = tmp_path / "trace.jsonl"
    middle = Session("p.0", (plan("q", subagents=[session("p.0.0")]),))
    nested = Session("p", (plan("p 0", subagents=[middle]), plan("r")))
    several = Session("m", (plan("m 0", subagents=[session("m.0"), session("m.1")]), plan("m 1")))
    sessions = [*take(60), nested, several]
    write_trace(path, sessions)
    assert read_trace(path) == sessions
    assert json.loads(path.read_text().splitlines()[0]) == HEADER


def test_the_example_of_the_docs_is_a_trace(tmp_path):
    page = (Path(__file__).parent.parent / "docs/bench/agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```\n(\{\"format.*?)```", page, re.S)
    (tmp_path / "trace.jsonl").write_text(example)
    (found,) = read_trace(tmp_path / "trace.jsonl")
    assert [one.name for one in found.family()] == ["a", "a.1"] and found.contexts() == [14_900, 19_210]


def turn_line(**changed):
    fields = {
        "session": "a",
        "turn": 0,
        "think_seconds": 0,
        "output_tokens": 5,
        "messages": [{"role": "user", "content": "x", "tokens": 3}],
    }
    return {name: value for name, value in {**fields, **changed}.items() if value is not ...}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "must be a JSON object"),
        (turn_line(extra=1), "'extra' is unknown"),
        (turn_line(output_tokens=...), "'output_tokens' is missing"),
        (turn_line(turn=2), "turn = 2 of session 'a': must be 1"),
        (turn_line(session="b", turn=True), "turn = True of session 'b': must be 0"),
        (turn_line(session=3), "session = 3: must be a string"),
        (turn_line(session="b", output_tokens=0), "output_tokens = 0: must be a whole number, at least 1"),
        (turn_line(session="b", think_seconds=-1), "think_seconds = -1: must be a number, at least 0"),
        (turn_line(session="b", think_seconds=float("nan")), "think_seconds = nan: must be a number"),
        (turn_line(session="b", messages=[]), "messages: must hold at least one"),
        (turn_line(session="b", messages={}), "messages: must be a list"),
        (turn_line(session="b", messages=[{"role": "user"}]), "messages: {'role': 'user'}: must be objects with"),
        (
            turn_line(session="b", messages=[{"role": "bot", "content": "x", "tokens": 3}]),
            "role = 'bot': must be one of",
        ),
        (
            turn_line(session="b", messages=[{"role": "user", "content": "x", "tokens": 0}]),
            "tokens = 0: must be a whole number, at least 1",
        ),
        (turn_line(session="b", parent="c", parent_turn=0), "parent = 'c', parent_turn = 0: must be a turn of a line"),
        (turn_line(session="b", parent="a", parent_turn=1), "parent = 'a', parent_turn = 1: must be a turn of a line"),
        (turn_line(session="b", parent="a"), "parent = 'a', parent_turn = None: must be a turn of a line"),
        (turn_line(turn=1, parent="a", parent_turn=0), "parent = 'a', parent_turn = 0: differ from those of turn 0"),
    ],
)
def test_wrong_lines_are_refused_by_number(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (HEADER, turn_line(), line)))
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3: {message}")


def test_other_files_are_no_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    for text, message in (('{"a": 1}\n', "line 1: must be"), ("x", "line 1: Expecting"), ("", "holds no session")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)
    with pytest.raises(ValueError, match="must have at least one turn"):
        Session("a", ())


# ---- the closed loop -----------------------------------------------------------------------------------------


@given(name=st.text(), counts=st.tuples(st.integers(0, 300), st.integers(0, 300)), low=st.integers(0, 9))
@settings(max_examples=15)
def test_a_content_is_the_same_as_far_as_it_goes(name, counts, low):
    ids = range(low, low + 50)
    short, long = (content_tokens(name, count, ids) for count in sorted(counts))
    np.testing.assert_array_equal(short, long[: len(short)])
    assert long.dtype == np.int32 and all(i in ids for i in long.tolist())


def test_a_prompt_is_the_history_with_outputs_and_the_new_messages():
    loop = workload([session("a")])
    (first,) = loop.first()
    # Marker of the run, shared prefix, marker of the session, its task.
    assert len(first.prompt) == FIRST_MARKERS + 200 and (first.turn, first.max_tokens, first.arrives) == (0, 10, 0.0)
    shared = [content_tokens(message.content, message.tokens, IDS) for message in SHARED]
    np.testing.assert_array_equal(first.prompt[MARKER_TOKENS : MARKER_TOKENS + 160], np.concatenate(shared))
    assert first.parts == (("system", MARKER_TOKENS + 160), ("user", FIRST_MARKERS + 200))
    (second,) = loop.after(first, answer(first), 3.0)
    assert (second.session, second.turn, second.arrives) == (first.session, 1, 4.0)
    expected = np.concatenate([first.prompt, answer(first), content_tokens("a 1", 50, IDS)])
    np.testing.assert_array_equal(second.prompt, expected)
    assert second.parts == (*first.parts, ("assistant", len(first.prompt) + 10), ("tool", len(expected)))


def test_a_session_that_ended_or_failed_is_followed_by_the_next_one():
    loop = workload([session("a", turns=1), session("b"), session("c")], live=2, ramp_seconds=8.0)
    a, b = loop.first()
    assert (a.arrives, b.arrives) == (0.0, 4.0)
    (c,) = loop.after(a, answer(a), 1.0)
    assert "c" in c.session and (c.turn, c.arrives) == (0, 1.0 + 5.0)
    assert loop.after(b, np.zeros(0, np.int32), 7.0) == []  # failed, and there is no other session
    (c1,) = loop.after(c, answer(c), 8.0)
    assert c1.session == c.session


def test_a_session_ends_before_it_outgrows_the_context():
    loop = workload([session("a", turns=50)], max_context=FIRST_MARKERS + 210 + 60 * 2)
    turns = list(loop.first())
    while following := loop.after(turns[-1], answer(turns[-1]), float(len(turns))):
        turns += following
    assert [len(turn.prompt) + turn.max_tokens - FIRST_MARKERS for turn in turns] == [210, 270, 330]
    with pytest.raises(ValueError, match="session 'a': its first turn has 226 tokens"):
        list(workload([session("a")], max_context=225).first())


def test_subagents_run_at_once_and_their_parent_waits_for_the_last_one():
    children = [session("a.0", turns=1), session("a.1", turns=2)]
    begin = dataclasses.replace(session("a").turns[0], subagents=tuple(children))
    loop = workload([Session("a", (begin, plan("a 1", think=2.0)))])
    (first,) = loop.first()
    one, two = loop.after(first, answer(first), 10.0)
    assert [turn.arrives for turn in (one, two)] == [15.0, 15.0] and one.session != two.session
    assert loop.after(one, answer(one), 16.0) == []
    (more,) = loop.after(two, answer(two), 17.0)
    assert more.session == two.session and more.turn == 1
    (second,) = loop.after(more, np.zeros(0, np.int32), 30.0)  # failed: its parent goes on all the same
    assert (second.session, second.turn, second.arrives) == (first.session, 1, 32.0)


def test_no_two_sessions_or_runs_share_more_than_they_should():
    def first_prompts(**options):
        loop = workload([session("a", turns=1)] * 2, **options)  # one trace, played twice
        (one,) = loop.first()
        (two,) = loop.after(one, answer(one), 0.0)
        return one.prompt, two.prompt

    def common(a, b):
        return int(np.argmin(np.append(a == b, False)))

    one, two = first_prompts()
    other, _ = first_prompts(run=1)
    cold_one, cold_two = first_prompts(cold_first_turns=True)
    assert MARKER_TOKENS + 160 <= common(one, two) < FIRST_MARKERS + 160
    assert common(one, other) < MARKER_TOKENS
    assert MARKER_TOKENS <= common(cold_one, cold_two) < FIRST_MARKERS


def test_sessions_that_start_in_the_middle_have_their_history():
    def starts(**options):
        loops = [workload([session(f"a{i}", turns=6)], from_the_middle=True, **options) for i in range(40)]
        return [next(loop.first()) for loop in loops]

    turns = starts()
    assert {turn.turn for turn in turns} == set(range(6))
    assert all(len(turn.prompt) == FIRST_MARKERS + 200 + 60 * turn.turn for turn in turns)
    assert {turn.turn for turn in starts(max_context=FIRST_MARKERS + 210 + 60)} == {0, 1}


def test_expected_cached_tokens_are_full_pages_of_what_ended_before():
    def asked(**options):
        loop = workload([session("a", turns=2), session("b", turns=1)], live=1, **options)
        (first,) = loop.first()
        (second,) = loop.after(first, answer(first), 1.0)
        (other,) = loop.after(second, answer(second), 2.0)
        return [turn.expected_cached_tokens for turn in (first, second, other)]

    # 216 tokens and 9 of 10 output tokens were run; the other session shares 168.
    assert asked() == [0, 224, 160]
    assert asked(replay_tokens=20) == [0, 204, 140]
    assert asked(page_size=1) == [0, 225, 168]
    assert asked(stand_ins=True) == [0, 208, 160]
    assert asked(cold_first_turns=True) == [0, 224, 0]


def test_stand_ins_take_the_place_of_outputs():
    loop = workload([session("a")], stand_ins=True)
    (first,) = loop.first()
    (second,) = loop.after(first, answer(first), 1.0)
    written = second.prompt[len(first.prompt) : len(first.prompt) + 10]
    assert len(second.prompt) == len(first.prompt) + 60 and not (written == 7).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"live": 0}, "live = 0: must be at least 1"),
        ({"page_size": 0}, "page_size = 0"),
        ({"replay_tokens": -1}, "replay_tokens = -1"),
        ({"ramp_seconds": -1.0}, "ramp_seconds = -1.0"),
        ({"ids": range(5, 6)}, "ids = range"),
        ({"ids": range(-1, 6)}, "ids = range"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        workload([session("a")], **options)


# ---- through the engine --------------------------------------------------------------------------------------


class Silent(Observer):
    def rejected(self, reason):
        raise AssertionError(reason)


def simulated(slots, pages, max_model_len, ranks=1):
    cfg = SchedulerConfig(
        slots=slots,
        pages=pages,
        page_size=16,
        max_model_len=max_model_len,
        eos_id=1,
        replay=ReplayRule(window=24, layers=4),
        ranks=ranks,
    )

    def tokens(rank, slots, positions):
        return (100 + positions % 600).astype(np.int32)

    executor = SimulatedExecutor(LinearCost(), tokens)
    return Engine(Scheduler(cfg), executor, Silent()), executor


@pytest.mark.parametrize("scale", [0.005, 0.02])
def test_the_engine_caches_what_a_cache_that_forgets_nothing_would(scale):
    length = round(1_000_000 * scale) + FIRST_MARKERS
    engine, executor = simulated(slots=16, pages=200_000, max_model_len=length)
    sessions = (one.scaled(scale) for one in generate_sessions(AgentParameters(), 3))
    loop = SessionWorkload(
        sessions, live=4, ids=IDS, max_context=length, page_size=16, replay_tokens=24, ramp_seconds=5.0
    )
    run = run_engine(engine, executor, loop, until=12.0, progress=False)
    done = [m for m in run.measurements if m.complete]
    assert len(done) > 50 and len({m.session for m in done}) > 8 and not any(m.failed for m in run.measurements)
    # More is possible: a prefix counts in theory when its request has ended, in the engine when it was computed.
    assert all(m.cached_tokens >= m.expected_cached_tokens for m in done)
    cached, expected = sum(m.cached_tokens for m in done), sum(m.expected_cached_tokens for m in done)
    assert expected > 0 and cached <= 1.03 * expected


def test_a_cache_that_is_too_small_shows():
    length = 5_000 + FIRST_MARKERS
    engine, executor = simulated(slots=8, pages=length // 16 + 1, max_model_len=length)
    sessions = (one.scaled(0.005) for one in generate_sessions(AgentParameters(), 3))
    loop = SessionWorkload(sessions, live=24, ids=IDS, max_context=length, page_size=16, replay_tokens=24)
    done = [m for m in run_engine(engine, executor, loop, until=6.0, progress=False).measurements if m.complete]
    assert sum(m.cached_tokens for m in done) < 0.8 * sum(m.expected_cached_tokens for m in done)


def script(tmp_path, *arguments):
    run_script("bench_agents", f"--report={tmp_path}", *arguments)
    return load(tmp_path / "agents.json")


def test_the_script_reports_a_simulated_run(tmp_path, capsys):
    result = script(tmp_path, "--scale=0.01", "--live=3", "--seconds=8", "--seed=2", "--hardware=h200")
    assert result.conditions["seed"] == 2 and result.conditions["flags"]["live"] == 3
    (row,) = result.rows["summary"]
    assert row["valid"] and row["requests"] > 50 and row["cached_share"] >= row["expected_cached_share"] - 0.01
    assert result.control["cached_share"] == row["expected_cached_share"] and result.verdicts[0] == "valid"
    assert result.ceiling["what"] == "constants of NVIDIA H200"
    cached, computed, output, together = (r["tokens_per_second"] for r in result.rows["throughput"])
    assert together == pytest.approx(cached + computed + output) and output > 0
    assert {r["of"] for r in result.rows["latencies"]} >= {"ttft", "queue", "prefill", "decode", "inter_token"}
    counted = sum(r["requests"] for r in result.rows["contexts"])
    assert counted == row["requests"] <= len(result.requests)
    assert {plot.table for plot in result.plots} <= {*result.rows, "requests"}
    for plot in result.plots:
        rows = result.requests if plot.table == "requests" else result.rows[plot.table]
        assert {plot.x, *plot.y} <= set(rows[0])
    assert "valid" in capsys.readouterr().out and (tmp_path / "agents.html").stat().st_size > 1000


def test_the_script_writes_and_runs_a_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    run_script("bench_agents", f"--write_trace={trace}", "--sessions=3")
    assert read_trace(trace) == take(3)
    result = script(tmp_path, f"--trace={trace}", "--scale=0.01", "--live=8", "--seconds=100", "--sessions=8")
    assert result.conditions["parameters"] is None
    assert len({r["session"].partition("/")[0] for r in result.requests if "." not in r["session"]}) == 8


def test_the_script_keeps_what_was_measured_before_ctrl_c(tmp_path, monkeypatch):
    def interrupted(engine, executor, loop, **options):
        class Interrupting(SessionWorkload):
            ended = 0

            def after(self, *args):
                self.ended += 1
                if self.ended == 30:
                    raise KeyboardInterrupt
                return super().after(*args)

        loop.__class__ = Interrupting
        return run_engine(engine, executor, loop, **options)

    monkeypatch.setattr("dsv4jax.bench.traffic.driver.run_engine", interrupted)
    with pytest.raises(SystemExit):
        script(tmp_path, "--scale=0.01", "--live=3", "--seconds=60", "--warm_up_seconds=0.1")
    result = load(tmp_path / "agents.json")
    assert result.interrupted and len(result.requests) >= 30 and result.rows["summary"][0]["requests"] > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale=0.1", "--max_model_len=4096"], "--scale=0.1: a first turn may have .* must be at most 0.02"),
        (["--ids=5"], "--ids=5: must be two ascending token ids"),
        (["--ids=5,3"], "--ids=5,3: must be two ascending token ids"),
        (["--api=chat"], "--api: needs --url"),
        (["--url=http://127.0.0.1:1", "--executor=model"], "--executor: must not be given with --url"),
        (["--trace=x", "--parameters=y"], "--parameters: must not be given with --trace"),
        (["--write_trace=x"], "--write_trace: needs --sessions"),
        (["--url=http://127.0.0.1:1"], "url = 'http://127.0.0.1:1': no list of models"),
        (["--url=http://127.0.0.1:1", "--fields=x"], "--fields=x: must be JSON"),
    ],
)
def test_the_script_refuses_before_it_runs(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        script(tmp_path, *arguments)


def test_lognormal_numbers_have_their_median_and_their_ends():
    rng = np.random.default_rng(0)
    law = Lognormal(100, 1.0, 500, 20)
    drawn = [law.whole(rng) for _ in range(4000)]
    assert np.median(drawn) == pytest.approx(100, rel=0.08) and min(drawn) == 20 and max(drawn) == 500
