"""The HTTP shell of the server: routes, errors, keys, CORS, states, streams and disconnects, shutdown."""

import contextlib
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine import FakeEngine, make_app
from waiting import eventually

import dsv4jax
from dsv4jax.engine.request import EngineStopped, QueueFull
from dsv4jax.server.app import Profiler
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.run import BackgroundServer, listening

COMPLETIONS = "/v1/completions"
CHATS = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
)


def body(max_tokens=5, **fields):
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **fields}


@contextlib.contextmanager
def running(engine=None, profiler=None, **config):
    """A server and a client of it."""
    engine = engine or FakeEngine()
    with BackgroundServer(make_app(engine, profiler, **config)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            client.engine, client.server = engine, server
            yield client


@pytest.fixture(scope="module")
def client():
    with running() as client:
        yield client


def error_of(response, status):
    """The error of a response of that status; checks the shape of http_api section 2."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def events_of(response):
    """The data of each event of a stream that was read to its end."""
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]


# Routes and errors


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/nothing", "/v1", "/v1/completions/", "//v1/models", "/%2e%2e/x", "/start_profile"]
)
def test_unknown_paths_are_404(client, path):
    error = error_of(client.post(path, json={}), 404)
    assert (error["type"], error["code"], error["param"]) == ("not_found_error", "not_found", None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("POST", "/health", "GET"),
        ("PUT", "/v1/models", "GET"),
    ],
)
def test_wrong_methods_are_405(client, method, path, allowed):
    response = client.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_other_content_types_are_400(client, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    error = error_of(client.post(COMPLETIONS, content=json.dumps(body()), headers=headers), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_content_types_are_served(client, content_type):
    response = client.post(COMPLETIONS, content=json.dumps(body()), headers={"Content-Type": content_type})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"nul", b'"a"', b'{"prompt": "\xff\xfe"}', b'{"a": ' * 100_000])
def test_a_body_that_is_no_json_object_is_400(client, path, content):
    error = error_of(client.post(path, content=content, headers={"Content-Type": "application/json"}), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")


def chunks_of(size):
    for _ in range(size // 1000):
        yield b" " * 1000


def test_bodies_above_the_limit_are_413():
    with running(max_body_bytes=5000) as client:
        headers = {"Content-Type": "application/json"}
        for content in (b" " * 5001, chunks_of(6000)):
            error = error_of(client.post(COMPLETIONS, content=content, headers=headers), 413)
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
        text = json.dumps(body())
        assert client.post(COMPLETIONS, content=text + " " * (5000 - len(text)), headers=headers).status_code == 200


def test_a_body_that_does_not_arrive_is_408():
    with running(body_timeout=0.2) as client, raw(client) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 408")


@contextlib.contextmanager
def raw(client):
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=60) as connection:
        yield connection


def read_all(connection) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_an_internal_fault_tells_nothing_of_itself(client, caplog):
    client.engine.failure = RuntimeError("secret of /home/somebody at 0x7f00")
    try:
        for stream in (False, True):
            response = client.post(COMPLETIONS, json=body(stream=stream))
            error = error_of(response, 500)
            assert (error["type"], error["code"]) == ("internal_error", "internal_error")
            assert "secret" not in response.text and "/home" not in response.text
    finally:
        client.engine.failure = None
    assert "secret" in caplog.text  # the operator sees it


@pytest.mark.parametrize(
    ("failure", "status", "type", "retry_after"),
    [
        (QueueFull("64 requests are waiting", 3), 429, "rate_limit_error", "3"),
        (EngineStopped("the engine has failed"), 503, "service_unavailable", "1"),
    ],
)
def test_what_the_engine_does_not_admit(client, failure, status, type, retry_after):
    client.engine.failure = failure
    try:
        response = client.post(COMPLETIONS, json=body(stream=True))
    finally:
        client.engine.failure = None
    assert error_of(response, status)["type"] == type
    assert response.headers["retry-after"] == retry_after


def test_a_stream_that_others_were_faster_than_gets_429():
    """The queue may fill up between the check of a request and its start."""
    engine = FakeEngine()
    engine.check = lambda request: None
    whole = engine.generate

    async def generate(request):
        raise QueueFull("64 requests are waiting", 3)
        async for chunk in whole(request):
            yield chunk

    engine.generate = generate
    with running(engine) as client:
        for path, fields in ((COMPLETIONS, body()), *CHATS):
            response = client.post(path, json=fields | {"stream": True})
            assert response.status_code == 429 and response.headers["retry-after"] == "3", response.text
            assert response.headers["content-type"] == "application/json"


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["toy", "org/toy"]
    assert set(listed["data"][0]) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert client.get("/v1/models/org/toy").json() == listed["data"][1]
    error = error_of(client.get("/v1/models/other"), 404)
    assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")


def test_small_routes(client):
    assert client.get("/version").json() == {"version": dsv4jax.__version__}
    assert client.get("/tokenizer_info").json()["eos_token"]
    assert COMPLETIONS in client.get("/openapi.json").json()["paths"]
    tokens = client.post("/tokenize", json={"prompt": "One day"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "One day"


def test_the_openai_client_works(client):
    with openai.OpenAI(base_url=client.server.url + "/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.models.list().data[0].id == "toy"
        done = sdk.completions.create(model="toy", prompt="a", max_tokens=3, extra_body={"ignore_eos": True})
        assert done.usage.completion_tokens == 3
        pieces = list(sdk.completions.create(model="toy", prompt="a", max_tokens=3, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == done.choices[0].text
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.completions.create(model="other", prompt="a")
        assert caught.value.code == "model_not_found"


# States


def test_health_and_readiness_follow_the_engine():
    with running() as client:
        assert [client.get(path).status_code for path in ("/health", "/ping", "/ready")] == [200, 200, 200]
        assert client.get("/health").content == b""
        client.engine.is_ready = False
        assert client.get("/health").status_code == 200
        assert error_of(client.get("/ready"), 503)["code"] == "not_ready"
        client.engine.is_alive = False
        for path in ("/health", "/ping", "/ready"):
            response = client.get(path)
            assert error_of(response, 503)["code"] == "engine_dead"
            assert response.headers["retry-after"] == "1"
        assert client.get("/status.json").json()["state"] == "dead"


def test_load_counts_requests_in_progress(client):
    eventually(lambda: client.get("/load").json() == {"server_load": 0})
    with client.stream("POST", COMPLETIONS, json=body(1000, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        assert client.get("/load").json() == {"server_load": 1}
    eventually(lambda: client.get("/load").json() == {"server_load": 0})


def test_dev_mode_adds_its_routes():
    calls = []
    profiler = Profiler(lambda: calls.append("start"), lambda: calls.append("stop"))
    paths = ("/reset_prefix_cache", "/start_profile", "/stop_profile")
    with running(profiler=profiler) as client:
        assert [client.post(path).status_code for path in paths] == [404, 404, 404]
    with running(profiler=profiler, dev_mode=True, api_keys=("k",)) as client:
        assert [client.post(path).status_code for path in paths] == [401, 401, 401]
        client.headers["Authorization"] = "Bearer k"
        assert [client.post(path).status_code for path in paths] == [200, 200, 200]
        assert calls == ["start", "stop"] and client.engine.cache_resets == 1
    with running(dev_mode=True) as client:
        assert [client.post(path).status_code for path in paths] == [200, 404, 404]


# Keys, CORS, ids, log


@pytest.fixture(scope="module")
def locked():
    with running(api_keys=("first", "second"), allowed_origins=("https://a.example",)) as client:
        yield client


@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/models", "/v1/nothing", "/tokenize", "/detokenize", "/abort_requests", "/abort_request"]
)
@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", "Bearer first2", "Basic first", "first", "Bearer fírst"]
)
def test_a_key_is_needed(locked, path, value):
    headers = {"Authorization": value.encode()} if value is not None else {}
    response = locked.post(path, headers=headers, json={})
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Bearer first", "bearer second", "BEARER  first"])
def test_every_key_opens(locked, value):
    assert locked.post(COMPLETIONS, headers={"Authorization": value}, json=body()).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/version", "/load", "/", "/status.json"])
def test_open_paths_need_no_key(locked, path):
    assert locked.get(path).status_code == 200


def test_cors(client, locked):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = client.options(COMPLETIONS, headers={"Origin": "https://b.example", **ask})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in preflight.headers
    assert locked.options(COMPLETIONS, headers={"Origin": "https://a.example", **ask}).status_code == 200
    assert locked.options(COMPLETIONS, headers={"Origin": "https://b.example", **ask}).status_code == 400
    assert error_of(locked.options(COMPLETIONS), 405)
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        refused = locked.get("/v1/models", headers={"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers.get("access-control-allow-origin") == allowed


def test_request_ids_are_echoed(client):
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    first, second = (client.get("/nothing").headers["x-request-id"] for _ in range(2))
    assert first and first != second
    assert client.post(COMPLETIONS, json=body(request_id="bodys")).headers["x-request-id"] == "bodys"
    for bad in ("x" * 257, "a b", "", "\x7f\xe9".encode("latin-1")):
        error = error_of(client.get("/health", headers={"X-Request-Id": bad}), 400)
        assert error["param"] == "X-Request-Id"


def test_a_request_id_in_the_body_cannot_add_headers(client):
    response = client.post(COMPLETIONS, json=body(request_id="a\r\nSet-Cookie: b=c"))
    assert "set-cookie" not in response.headers
    assert response.status_code in (200, 400)


def test_one_log_line_per_request_without_its_text(client, caplog):
    caplog.set_level(logging.INFO, "dsv4jax.server")
    client.post(COMPLETIONS, json=body(4, prompt="marker text"), headers={"X-Request-Id": "logged"})
    client.get("/v1/models/marker?marker", headers={"X-Request-Id": "unlucky"})
    eventually(lambda: "unlucky" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == "dsv4jax.server"]
    (served,) = [line for line in lines if line.startswith("logged ")]
    assert re.fullmatch(
        r"logged POST /v1/completions 200 prompt=\d+ cached=0 output=4 ttft=0\.\d{3} total=0\.\d{3}", served
    )
    (missed,) = [line for line in lines if line.startswith("unlucky ")]
    assert re.fullmatch(r"unlucky GET /v1/models/marker 404 prompt=0 cached=0 output=0 ttft=- total=0\.\d{3}", missed)
    assert "marker text" not in caplog.text


def test_two_servers_in_one_process_share_nothing():
    with running() as one, running(api_keys=("k",)) as other:
        assert one.post(COMPLETIONS, json=body()).status_code == 200
        assert other.post(COMPLETIONS, json=body()).status_code == 401
        generated = [
            re.search(r"^vllm:generation_tokens_total.* (\S+)$", c.get("/metrics").text, re.M)[1] for c in (one, other)
        ]
        assert generated == ["5.0", "0.0"]


# Streams and disconnects


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_stream_arrives_as_it_is_generated(client, path):
    fields = {"max_tokens": 10, "ignore_eos": True, "stream": True}
    fields |= {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    with client.stream("POST", path, json=fields | {"max_tokens": 3000}) as response:
        lines = response.iter_lines()
        next(lines)
        assert client.engine.running  # for another minute
    eventually(lambda: not client.engine.running)
    with client.stream("POST", path, json=fields) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_engine(client, caplog, stream):
    caplog.set_level(logging.INFO, "dsv4jax.server")
    with raw(client) as connection:
        text = json.dumps(body(3000, stream=stream)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nX-Request-Id: lost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        eventually(lambda: client.engine.running)
        if stream:
            connection.recv(100)
    eventually(lambda: not client.engine.running)
    eventually(lambda: "lost POST /v1/completions 499" in caplog.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [("/abort_requests", "request_ids"), ("/abort_request", "rid")])
def test_abort_by_request_id(client, call, stream):
    path, field = call
    result = []
    thread = threading.Thread(
        target=lambda: result.append(
            httpx.post(
                client.server.url + COMPLETIONS,
                json=body(3000, stream=stream),
                headers={"X-Request-Id": "victim"},
                timeout=60,
            )
        )
    )
    thread.start()
    eventually(lambda: client.engine.running)
    value = ["victim", "unknown"] if field == "request_ids" else "victim"
    assert client.post(path, json={field: value}).json() == {"aborted": 1}
    thread.join(60)
    assert result and "abort" in result[0].text
    assert client.post(path, json={field: value}).json() == {"aborted": 0}
    assert error_of(client.post(path, json={}), 400)["param"] == field
    assert error_of(client.post(path, json={field: 5}), 400)["param"] == field


def test_a_request_may_not_take_longer_than_allowed():
    with running(request_timeout=1.5) as client:
        assert error_of(client.post(COMPLETIONS, json=body(3000)), 504)["code"] == "request_timeout"
        events = events_of(client.post(COMPLETIONS, json=body(3000, stream=True)))
        assert json.loads(events[-2])["error"]["code"] == "request_timeout" and events[-1] == "[DONE]"
        eventually(lambda: not client.engine.running)
        assert client.post(COMPLETIONS, json=body(5)).status_code == 200


def test_the_time_of_a_request_begins_with_its_first_byte():
    with running(request_timeout=5) as client, raw(client) as connection:
        data = json.dumps(body(3000, stream=True)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data[:5])
        time.sleep(1.5)
        connection.sendall(data[5:])
        answer = read_all(connection)
        assert b"request_timeout" in answer
        assert answer.count(b"data: ") < 200  # of the 250 of five seconds, 20 ms each


def test_waiting_requests_get_errors_when_the_engine_dies():
    with running() as client:
        threading.Timer(0.3, setattr, (client.engine, "is_alive", False)).start()
        assert error_of(client.post(COMPLETIONS, json=body(3000)), 503)["code"] == "engine_dead"
        events = events_of(client.post(COMPLETIONS, json=body(3000, stream=True)))
        assert json.loads(events[-2])["error"]["code"] == "engine_dead" and events[-1] == "[DONE]"
        eventually(lambda: not client.engine.running)


def test_an_idle_connection_is_closed_in_time():
    assert ServerConfig().keep_alive_timeout >= 65
    with running(keep_alive_timeout=0.3) as client:
        for request in (b"", b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"):
            begin = time.monotonic()
            with raw(client) as connection:
                connection.sendall(request)
                read_all(connection)
            assert 0.2 < time.monotonic() - begin < 30


def test_answers_are_sent_without_delay(client):
    times = []
    for _ in range(20):
        begin = time.monotonic()
        client.get("/version")
        times.append(time.monotonic() - begin)
    assert min(times[1:]) < 0.03  # 40 ms if the system may hold small packets back


# Addresses


def test_it_listens_on_a_unix_socket(tmp_path):
    path = str(tmp_path / "server.sock")
    with BackgroundServer(make_app(FakeEngine(), uds=path)):
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://local", timeout=60) as client:
            assert client.post(COMPLETIONS, json=body()).status_code == 200
    assert not Path(path).exists()


def test_it_serves_https(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("needs a certificate: the openssl program is not installed")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=a"
    subprocess.run(make.split(), check=True, capture_output=True)
    with BackgroundServer(make_app(FakeEngine(), ssl_keyfile=key, ssl_certfile=certificate)) as server:
        assert server.url.startswith("https://")
        assert httpx.get(server.url + "/version", verify=False, timeout=60).status_code == 200


def test_a_proxy_may_serve_it_below_a_path():
    with running(root_path="/models/toy", api_keys=("k",)) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200
        assert client.get("/").status_code == 200


def test_a_port_in_use_is_an_error_before_anything_starts():
    with running() as client:
        with pytest.raises(OSError, match=f"cannot listen on .*{client.server.port}"):
            with listening(ServerConfig(port=client.server.port)):
                pass


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"max_body_bytes": 0},
        {"max_connections": -1},
        {"keep_alive_timeout": 0},
        {"request_timeout": float("nan")},
        {"shutdown_timeout": -1},
        {"ssl_keyfile": "a"},
        {"root_path": "a"},
        {"root_path": "/a/"},
        {"api_keys": ("",)},
        {"api_keys": ("é",)},
        {"allow_credentials": True},
    ],
)
def test_bad_settings_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerConfig(**fields)


# Shutdown


class Process:
    """A server in its own process."""

    def __init__(self, **flags):
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        program = Path(__file__).with_name("fake_engine.py")
        self.process = subprocess.Popen([sys.executable, program, *arguments], stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on (\S+)", line):
                self.url = "http://" + found[1]
                break
        else:
            raise AssertionError("".join(self.log))
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self, seconds):
        return self.process.wait(seconds)


def stream_in_thread(url, max_tokens):
    """Streams in a thread; returns the thread and the list its response goes to, once the first token is there."""
    result, began = [], threading.Event()

    def run():
        with httpx.stream("POST", url + COMPLETIONS, json=body(max_tokens, stream=True), timeout=60) as response:
            text = ""
            for piece in response.iter_text():
                began.set()
                text += piece
            result.append(text)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    return thread, result


def test_an_idle_server_ends_at_once_on_sigterm():
    with Process() as server, httpx.Client(timeout=60) as client:
        assert client.get(server.url + "/health").status_code == 200  # and keeps its connection
        server.terminate()
        assert server.exit_code(25) == 0


def test_running_streams_finish_and_new_requests_are_refused_after_sigterm():
    with Process() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        streams = [stream_in_thread(server.url, 300) for _ in range(10)]
        server.terminate()
        eventually(lambda: client.get("/health").status_code == 503)
        refused = client.post(COMPLETIONS, json=body())
        assert error_of(refused, 503)["code"] == "draining"
        assert refused.headers["connection"] == "close" and refused.headers["retry-after"]
        assert client.get("/status.json").json()["state"] == "draining"
        assert server.exit_code(25) == 0
        for thread, result in streams:
            thread.join(60)
            assert '"finish_reason":"length"' in result[0].replace(" ", "") and result[0].endswith("data: [DONE]\n\n")


def test_streams_past_the_time_get_an_error_event():
    with Process(shutdown_timeout=0.5) as server:
        streams = [stream_in_thread(server.url, 3000) for _ in range(3)]
        unfinished = []
        thread = threading.Thread(
            target=lambda: unfinished.append(httpx.post(server.url + COMPLETIONS, json=body(3000), timeout=60))
        )
        thread.start()
        eventually(lambda: httpx.get(server.url + "/load", timeout=60).json() == {"server_load": 4})
        server.terminate()
        assert server.exit_code(25) == 0
        for one, result in streams:
            one.join(60)
            *_, error, done, rest = result[0].split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "service_unavailable"
            assert (done, rest) == ("data: [DONE]", "")
        thread.join(60)
        assert error_of(unfinished[0], 503)["code"] == "shutdown"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(second):
    with Process() as server:
        thread, _ = stream_in_thread_quietly(server.url)
        server.terminate()
        eventually(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 503)
        server.process.send_signal(second)
        assert server.exit_code(25) == 128 + second
        thread.join(60)


def stream_in_thread_quietly(url):
    """A long stream whose end does not matter."""
    began = threading.Event()

    def run():
        with contextlib.suppress(httpx.HTTPError):
            with httpx.stream("POST", url + COMPLETIONS, json=body(3000, stream=True), timeout=60) as response:
                for _ in response.iter_raw():
                    began.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    return thread, began
