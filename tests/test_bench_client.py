"""The client that puts load on servers: ours, and one that does everything wrong."""

import asyncio
import functools
import signal
import time

import numpy as np
import pytest
from bench_scripts import run_script
from fake_engine import FakeEngine, make_app
from hand_made_server import END, STREAM, HandMadeServer, event, response, text_event, usage_event
from talking_server import serving

from dsv4jax.bench.results.result import load
from dsv4jax.bench.traffic.client import run_http
from dsv4jax.bench.traffic.counting import Window, summarize
from dsv4jax.bench.traffic.http_target import Target, find_model, words
from dsv4jax.bench.traffic.sessions import SessionWorkload
from dsv4jax.bench.traffic.trace_file import Message, Session, TurnPlan
from dsv4jax.server.run import BackgroundServer


def sessions(count, turns=3, output=6):
    shared = Message("system", "agent", 40)
    for i in range(count):
        first = TurnPlan((shared, Message("user", f"task {i}", 30)), output)
        yield Session(
            f"s{i}", (first, *(TurnPlan((Message("tool", f"{i} {k}", 20),), output) for k in range(1, turns)))
        )


def workload(count=3, live=2, turns=3, output=6, cls=SessionWorkload, **options):
    fields = {"ids": range(300, 800), "max_context": 4096, "page_size": 16, "from_the_middle": False}
    return functools.partial(cls, sessions(count, turns, output), live=live, **{**fields, **options})


def drive(url, loop, api="tokens", until=60.0, model="toy", return_ids=True, timeout=60.0, **options):
    target = Target(url, model, api, return_ids, fields={"ignore_eos": True}, timeout=timeout)
    return run_http(target, loop(stand_ins=target.stand_ins), until=until, progress=False, **options)


@pytest.fixture
def fake():
    with BackgroundServer(make_app(FakeEngine(tokens_per_second=2000))) as server:
        yield server


# ---- our server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["tokens", "text", "chat"])
def test_sessions_run_to_their_end_and_usage_counts(fake, api):
    run = drive(fake.url, workload(count=5, live=2), api)
    assert len(run.measurements) == 15 and not run.interrupted and not run.gave_up and run.reports_cached
    assert {m.error for m in run.measurements} == {""}
    for m in run.measurements:
        assert (m.output_tokens, sum(m.chunk_tokens), m.finish_reason) == (6, 6, "length")
        assert m.arrived <= m.sent <= m.first_token <= m.finished and m.scheduled is None
        planned = 86 + 26 * m.turn
        assert m.prompt_tokens == planned if api == "tokens" else m.prompt_tokens > planned
        # What the workload expects is in its own tokens.
        assert m.turn == 0 or 0.5 < m.expected_cached_tokens / m.prompt_tokens < 1
    assert sorted((m.session, m.turn) for m in run.measurements)[:3] == [("0/s0", k) for k in range(3)]
    summary = summarize(run.measurements, Window(0, run.ended), devices=1, client_lag=run.loop_lag.p99)
    assert summary.requests == 15 and "cache hit rate 0.0%" in summary.invalid[0]  # the fake caches nothing


def test_counts_and_ids_of_each_chunk_and_drafts_and_cached_tokens_are_the_servers(default_tokenizer):
    with serving(default_tokenizer, sizes=(3, 1)) as server:
        server.engine.cached_tokens, server.engine.drafted, server.engine.accepted = 30, 8, 5
        server.engine.script = lambda request, index: range(400, 500)
        seen = []

        class Watched(SessionWorkload):
            def after(self, turn, output, finished):
                seen.append((turn, output))
                return super().after(turn, output, finished)

        run = drive(server.url, workload(count=1, live=1, turns=2, output=9, cls=Watched), model="flash")
    first, second = run.measurements
    assert first.chunk_tokens == (3, 1, 3, 1, 1) and first.output_tokens == 9
    assert (first.cached_tokens, first.drafted, first.accepted) == (30, 8, 5)
    (turn, output), (following, _) = seen
    assert output.tolist() == list(range(400, 409))
    np.testing.assert_array_equal(following.prompt[: len(turn.prompt) + 9], np.concatenate([turn.prompt, output]))
    assert second.prompt_tokens == len(following.prompt)


def test_models_and_keys(fake):
    assert find_model(fake.url) == find_model(f"{fake.url}/v1/", name="toy")
    found = find_model(fake.url)
    assert (found.name, found.max_context) == ("toy", 4096)
    with pytest.raises(ValueError, match=r"model = 'x': must be one of \['org/toy', 'toy'\]"):
        find_model(fake.url, name="x")
    with BackgroundServer(make_app(FakeEngine(2000), api_keys=("secret",))) as server:
        with pytest.raises(ValueError, match="no list of models: HTTPStatusError"):
            find_model(server.url)
        assert find_model(server.url, "secret").name == "toy"
        assert drive(server.url, workload(count=1, live=1)).measurements[0].error.startswith("HTTP 401")
        target = Target(server.url, "toy", api_key="secret")
        assert not run_http(target, workload(count=1, live=1)(), until=60, progress=False).measurements[0].error


def test_the_script_runs_sessions_at_a_server(fake, tmp_path, monkeypatch):
    monkeypatch.delenv("DSV4JAX_API_KEY", raising=False)
    arguments = ["--scale=0.01", "--live=4", "--seconds=5", "--warm_up_seconds=0.1", f"--report={tmp_path}"]
    run_script("bench_agents", f"--url={fake.url}", *arguments)
    result = load(tmp_path / "agents.json")
    assert result.conditions["model"] == f"toy at {fake.url}"
    assert result.requests and result.rows["summary"][0]["error_share"] == 0
    assert any("not valid: cache hit rate" in line for line in result.verdicts)
    assert any("client: event loop late by" in line for line in result.verdicts)


# ---- a server that does it wrong -----------------------------------------------------------------------------


def test_output_tokens_come_from_usage_and_never_from_chunks():
    async def reply(request, writer):
        writer.write(STREAM + text_event("a") + text_event("b") + text_event("c", "stop") + usage_event(50, 17))
        writer.write(event("[DONE]") + END)

    with HandMadeServer(reply) as server:
        run = drive(server.url, workload(count=1, live=1, turns=2), "text", model="odd")
    first, second = run.measurements
    assert (first.output_tokens, first.chunk_tokens, first.prompt_tokens) == (17, (6, 6, 5), 50)
    assert (first.finish_reason, first.error) == ("stop", "") and not run.reports_cached
    # It never says what was cached, so that nothing is expected, and a hit rate of 0 is no verdict.
    assert first.expected_cached_tokens is second.expected_cached_tokens is None
    assert len(server.requests[1]["prompt"].split()) == 86 + 17 + 20


def test_a_server_that_leaves_out_zeros_still_reports_what_is_cached():
    async def reply(request, writer):
        cached = {"prompt_tokens_details": {"cached_tokens": 64}} if len(server.requests) > 1 else {}
        writer.write(STREAM + text_event("a", "stop") + usage_event(80, 3, **cached) + END)

    with HandMadeServer(reply) as server:
        run = drive(server.url, workload(count=1, live=1, turns=2), "text", model="odd")
    assert [m.cached_tokens for m in run.measurements] == [0, 64] and run.reports_cached
    assert all(m.expected_cached_tokens is not None for m in run.measurements)


def test_an_answer_without_text_came_when_it_ended():
    async def reply(request, writer):
        writer.write(STREAM + text_event("", "stop") + usage_event(80, 3) + END)

    with HandMadeServer(reply) as server:
        (m,) = drive(server.url, workload(count=1, live=1, turns=1), "text", model="odd").measurements
    assert m.output_tokens == 3 and m.chunk_tokens == (3,) and m.first_token == m.chunk_seconds[0] <= m.finished


def test_chats_are_sent_as_messages_whose_roles_alternate():
    async def reply(request, writer):
        delta = {"delta": {"role": "assistant", "content": ""}}
        parts = [delta, {"delta": {"reasoning_content": "h"}}, {"delta": {"content": "i"}, "finish_reason": "stop"}]
        events = b"".join(event({"choices": [part]}) for part in parts)
        writer.write(STREAM + events + usage_event(9, 4) + event("[DONE]") + END)

    with HandMadeServer(reply) as server:
        run = drive(server.url, workload(count=1, live=1, turns=2), "chat", model="odd")
    assert [m.chunk_tokens for m in run.measurements] == [(2, 2), (2, 2)]  # the first event has no output
    second = server.requests[1]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert [len(m["content"].split()) for m in second["messages"]] == [48, 38, 4, 20]
    assert server.requests[0]["messages"] == second["messages"][:2]
    assert second["stream_options"] == {"include_usage": True} and second["ignore_eos"] and second["max_tokens"] == 6


async def no_usage(request, writer):
    writer.write(STREAM + text_event("a", "stop") + event("[DONE]") + END)


async def no_finish(request, writer):
    writer.write(STREAM + text_event("a") + usage_event() + event("[DONE]") + END)


async def cut(request, writer):
    writer.write(STREAM + text_event("a") + text_event("b"))


async def cut_in_an_event(request, writer):
    writer.write(STREAM + text_event("a") + b"20\r\ndata: {")


async def too_many(request, writer):
    writer.write(response("429 Too Many Requests", b'{"error": {"message": "queue full"}}', "application/json"))


async def broken(request, writer):
    writer.write(response("500 Internal Server Error", b"oops", "text/plain"))


async def not_a_stream(request, writer):
    writer.write(response("200 OK", b'{"choices": []}', "application/json"))


async def error_in_the_stream(request, writer):
    writer.write(STREAM + text_event("a") + event({"error": {"message": "out of memory"}}) + END)


async def no_json(request, writer):
    writer.write(STREAM + event("hello") + END)


async def no_object(request, writer):
    writer.write(STREAM + event("[1, 2]") + END)


async def nothing(request, writer):
    pass


async def odd_usage(request, writer):
    details = {"prompt_tokens_details": {"cached_tokens": 11}}
    writer.write(STREAM + text_event("a", "stop") + usage_event(10, 3, **details) + END)


async def odder_usage(request, writer):
    writer.write(STREAM + text_event("a", "stop") + event({"choices": [], "usage": [1]}) + END)


async def no_output(request, writer):
    writer.write(STREAM + text_event("", "stop") + usage_event(10, 0) + END)


async def hangs(request, writer):
    writer.write(STREAM + text_event("a"))
    await writer.drain()
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (no_usage, "the stream ended without usage: the server must know stream_options.include_usage"),
        (no_finish, "the stream ended without finish_reason"),
        (cut, "RemoteProtocolError: peer closed connection"),
        (cut_in_an_event, "RemoteProtocolError: peer closed connection"),
        (too_many, 'HTTP 429, application/json: {"error": {"message": "queue full"}}'),
        (broken, "HTTP 500, text/plain: oops"),
        (not_a_stream, "HTTP 200, application/json: "),
        (error_in_the_stream, 'error in the stream: {"message": "out of memory"}'),
        (no_json, "JSONDecodeError: "),
        (no_object, "AttributeError: "),
        (nothing, "RemoteProtocolError: Server disconnected"),
        (odd_usage, 'usage makes no sense: {"prompt_tokens": 10, "completion_tokens": 3, '),
        (odder_usage, "usage makes no sense: [1]"),
        (no_output, "the answer has no output tokens"),
    ],
)
def test_a_wrong_answer_is_an_error_that_ends_its_session_alone(reply, message):
    async def every_second(request, writer):
        if len(server.requests) % 2:
            return await reply(request, writer)
        ids = {"token_ids": [400, 401, 402]}
        writer.write(STREAM + text_event("abc", "stop", **ids) + usage_event() + event("[DONE]") + END)

    with HandMadeServer(every_second) as server:
        run = drive(server.url, workload(count=4, live=1, turns=2), model="odd")
    failed = [m for m in run.measurements if m.failed]
    # Of every session the first turn fails, or it succeeds and the second one fails.
    assert len(failed) == 4 and len(server.requests) == len(run.measurements) and not run.gave_up
    assert all(m.error.startswith(message) and m.finish_reason == "error" for m in failed)
    assert {(m.prompt_tokens, m.output_tokens, m.chunk_tokens) for m in failed} == {(0, 0, ())}
    assert all(m.complete for m in run.measurements if m not in failed)
    summary = summarize(run.measurements, Window(0, run.ended + 1), devices=1)
    assert any("of the requests failed: 1.0% are allowed" in reason for reason in summary.invalid)


def test_an_answer_without_end_is_an_error():
    with HandMadeServer(hangs) as server:
        (m,) = drive(server.url, workload(count=1, live=1), model="odd", timeout=0.2).measurements
    assert (m.error, m.output_tokens) == ("no end of the answer in 0.2 s", 0)


def test_missing_token_ids_are_an_error_unless_they_are_not_wanted():
    async def reply(request, writer):
        writer.write(STREAM + text_event("abc", "stop") + usage_event() + event("[DONE]") + END)

    with HandMadeServer(reply) as server:
        (m,) = drive(server.url, workload(count=1, live=1, turns=1), model="odd").measurements
        run = drive(server.url, workload(count=1, live=1), model="odd", return_ids=False)
    assert m.error.startswith("0 token ids for 3 output tokens: the server must know return_token_ids")
    assert [bool(m.error) for m in run.measurements] == [False] * 3
    assert ["return_token_ids" in request for request in server.requests] == [True, False, False, False]
    assert len(server.requests[-1]["prompt"]) == 86 + 2 * 23


def test_a_server_that_only_fails_is_given_up():
    with HandMadeServer(broken) as server:
        run = drive(server.url, workload(count=100, live=1), model="odd", most_failures=3)
    assert len(run.measurements) == len(server.requests) == 3
    assert run.gave_up == "3 requests in a row failed, the last one: HTTP 500, text/plain: oops"
    gone = drive(server.url, workload(count=100, live=1), model="odd", most_failures=2)
    assert all(m.error.startswith("ConnectError: ") for m in gone.measurements) and gone.gave_up


def test_what_runs_at_the_end_may_end_but_not_forever():
    async def slow(request, writer):
        writer.write(STREAM + text_event("a"))
        await writer.drain()
        await asyncio.sleep(3.0)
        writer.write(text_event("b", "stop") + usage_event() + event("[DONE]") + END)

    def ends(**options):
        with HandMadeServer(slow) as server:
            run = drive(server.url, workload(count=9, live=2), "text", until=1.5, model="odd", **options)
        return [m.finish_reason for m in run.measurements], run

    assert ends()[0] == ["stop", "stop"]
    reasons, run = ends(drain_seconds=0.0)
    assert reasons == ["unfinished", "unfinished"] and not run.interrupted
    assert {(m.output_tokens, m.error, m.complete) for m in run.measurements} == {(0, "", False)}


@pytest.fixture
def terminal():
    """SIGINT does what it does in a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_what_was_measured(fake, terminal):
    class Interrupting(SessionWorkload):
        ended = 0

        def after(self, turn, output, finished):
            self.ended += 1
            if self.ended == 5:
                signal.raise_signal(signal.SIGINT)
            return super().after(turn, output, finished)

    run = drive(fake.url, workload(count=500, live=3, cls=Interrupting))
    assert run.interrupted and 5 <= len(run.measurements) < 100
    assert sum(m.complete for m in run.measurements) >= 5
    assert {m.finish_reason for m in run.measurements} <= {"length", "unfinished"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_client_that_is_the_bottleneck_says_so(fake):
    class Busy(SessionWorkload):
        def after(self, turn, output, finished):
            time.sleep(0.2)
            return super().after(turn, output, finished)

    run = drive(fake.url, workload(count=2, live=2, turns=2, cls=Busy))
    assert run.loop_lag.max > 0.1  # it slept in the event loop
    summary = summarize(run.measurements, Window(0, run.ended), devices=1, client_lag=run.loop_lag.max)
    assert any("the client was late by" in reason for reason in summary.invalid)


def test_an_error_of_the_workload_ends_the_run(fake):
    class Wrong(SessionWorkload):
        def after(self, turn, output, finished):
            raise LookupError("a mistake")

    with pytest.raises(LookupError, match="a mistake"):
        drive(fake.url, workload(cls=Wrong))


def test_words_are_one_for_each_token():
    ids = np.arange(300, 800, dtype=np.int32)
    assert len(words(ids).split()) == 500 and len(set(words(ids).split())) > 90
    assert words(ids[:7]) + words(ids[7:]) == words(ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:80"}, "url = 'localhost:80': must begin with http"),
        ({"api": "responses"}, "api = 'responses': must be one of"),
        ({"timeout": 0}, "timeout = 0: must be above 0"),
        ({"fields": {"stream": False}}, "fields: 'stream' is set by the client"),
    ],
)
def test_wrong_targets_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Target(**{"url": "http://x", "model": "toy", **fields})
