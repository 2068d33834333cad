"""Clients that misbehave, while a well-behaved one goes on reading its stream.

Its tokens come every 20 ms. What is promised: the server, its reader and its attackers together spend less than
`WORST_GAP` seconds of processor time between two of them, and half of the time less than `USUAL_GAP`; and it waits for
nothing else as long as `LONGEST_WAIT`, which no slow machine takes.
"""

import contextlib
import json
import resource
import socket
import threading
import time

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, make_app
from waiting import eventually

from dsv4jax.server.run import BackgroundServer

WORST_GAP, USUAL_GAP, LONGEST_WAIT = 2.0, 0.1, 15.0
MIB = 1 << 20
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module", autouse=True)
def many_open_files():
    """Both ends of 2,000 connections are files of this process."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 6000
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, {hard} are allowed")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Reader(threading.Thread):
    """The well-behaved client."""

    def __init__(self, url: str):
        super().__init__()
        self._url = url
        self.times: list[tuple[float, float]] = []
        """Of processor and clock."""
        self.finished = threading.Event()

    def run(self):
        fields = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url + "/v1/completions", json=fields, timeout=60) as response:
            for _ in response.iter_raw():
                self.times.append((time.process_time(), time.monotonic()))
                if self.finished.is_set():
                    return


@contextlib.contextmanager
def attacked(**config):
    """A server with a reading client; at the end, its gaps are as promised and nothing else is left in the server."""
    engine = FakeEngine(tokens_per_second=50, max_model_len=100_000_000)
    app = make_app(engine, **config)
    with BackgroundServer(app) as server:
        reader = Reader(server.url)
        reader.start()
        eventually(lambda: reader.times)
        server.engine, server.app = engine, app
        try:
            yield server
            eventually(lambda: len(engine.running) == 1 and app.state.lifecycle.active == 1)
            wanted = len(reader.times) + 10
            eventually(lambda: len(reader.times) >= wanted)
        finally:
            reader.finished.set()
            reader.join()
        gaps, waits = np.diff(reader.times, axis=0).T
        assert gaps.max() < WORST_GAP, gaps.max()
        assert np.median(gaps) < USUAL_GAP, np.sort(gaps)
        assert waits.max() < LONGEST_WAIT, waits.max()


def connect(server, **options) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60, **options)


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the server closes; a reset ends it too."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


def post(content: bytes, *headers: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + JSON + b"".join(header + b"\r\n" for header in headers)
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def stream_request(max_tokens=3000, **fields) -> bytes:
    return post(
        json.dumps({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **fields}).encode()
    )


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def send_until_answered(connection: socket.socket, parts) -> tuple[bytes, float]:
    """Sends until the server answers; returns the answer's first part and the largest growth of this process."""
    before, growth = resident_bytes(), 0
    connection.settimeout(0)
    for part in parts:
        part = memoryview(part)
        while part:
            with contextlib.suppress(BlockingIOError):
                return connection.recv(65536), growth
            with contextlib.suppress(BlockingIOError):
                part = part[connection.send(part) :]
            growth = max(growth, resident_bytes() - before)
    connection.settimeout(60)
    return connection.recv(65536), growth


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb(declared):
    part = bytes(MIB)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + JSON
    if declared:
        parts = [head + b"Content-Length: %d\r\n\r\n" % (100 * MIB), *[part] * 100]
    else:
        chunk = b"%x\r\n" % MIB + part + b"\r\n"
        parts = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 100]
    with attacked(max_body_bytes=8 * MIB) as server:
        for _ in range(3):
            with connect(server) as connection:
                answer, growth = send_until_answered(connection, parts)
            assert answer.startswith(b"HTTP/1.1 413 ") and b'"code":"request_too_large"' in answer
            assert growth < 40 * MIB


def test_who_goes_on_sending_after_413_is_cut_off():
    with attacked() as server, connect(server) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\n" + JSON + b"Content-Length: 999999999999\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begin < 60:
                connection.sendall(bytes(1000))
                time.sleep(0.01)


def test_who_asks_before_sending_too_much_is_told_so():
    with attacked() as server, connect(server) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n" + JSON
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (65 * MIB))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


BAD_BODIES = {
    "not UTF-8": b'{"prompt": "\xff\xfe\x80"}',
    "nested 100,000 deep": b'{"prompt": ' + b"[" * 100_000,
    "nested and closed": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects nested": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
    "NUL bytes": bytes(100_000),
    "half a surrogate": b'{"prompt": "\\ud800", "max_tokens": 0}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_bodies_made_to_break_the_parser(body):
    with attacked() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request"):
            for _ in range(2):
                response = client.post(path, content=body, headers={"Content-Type": "application/json"})
                assert response.status_code == 400 or (path == "/tokenize" and b"ud800" in body), response.text[:300]
                assert len(response.content) < 5000


def test_wrong_content_types():
    with attacked() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(100):
            response = client.post("/v1/completions", content=b"<a/>", headers={"Content-Type": "text/xml"})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "unsupported_media_type"


def test_2000_idle_connections():
    with attacked() as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(2000)]
        for _ in range(5):
            assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        for connection in idle[::100]:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_more_connections_than_allowed_are_answered():
    with attacked(max_connections=20) as server, contextlib.ExitStack() as stack:
        for _ in range(19):  # the reader has one
            stack.enter_context(connect(server))
        with connect(server) as connection:
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"too_many_connections"' in answer
        stack.close()
        eventually(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 200)


def test_headers_that_never_end():
    with attacked(header_timeout=0.5) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(200)]
        begin, open_ones = time.monotonic(), set(slow)
        for connection in slow:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ")
            connection.setblocking(False)
        while open_ones and time.monotonic() - begin < 15:
            time.sleep(0.05)
            for connection in list(open_ones):
                try:
                    connection.send(b"a")
                    if connection.recv(100) == b"":
                        open_ones.discard(connection)
                except BlockingIOError:
                    pass
                except ConnectionError:
                    open_ones.discard(connection)
        assert not open_ones  # by default they have 20 s


@pytest.mark.parametrize("size", [70_000, 200_000, 2_000_000])
def test_headers_too_large(size):
    with attacked() as server, connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * size + b"\r\n\r\n")
        answer = read_all(connection)
        # The answer may be lost to a client that is still sending.
        assert (not answer and size > 100_000) or (
            answer.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in answer
        )


def test_a_slow_reader_is_waited_for_without_growth():
    with attacked(write_timeout=6) as server:
        before = resident_bytes()
        readers = [connect(server) for _ in range(4)]
        for connection in readers:
            connection.sendall(stream_request(50_000_000, stop_token_ids=[FakeEngine.FLOOD]))
        eventually(lambda: chunks_in(server, 0.3) < 100)  # nothing but what the well-behaved client reads
        assert len(server.engine.running) == 5
        assert resident_bytes() - before < 20 * MIB
        eventually(lambda: len(server.engine.running) == 1)  # cut off after write_timeout
        for connection in readers:
            connection.close()


def chunks_in(server, seconds):
    before = server.engine.chunks
    time.sleep(seconds)
    return server.engine.chunks - before


def test_who_reads_slowly_but_reads_is_not_cut_off():
    with attacked(write_timeout=4) as server, connect(server) as connection:
        connection.sendall(stream_request(10_000, stop_token_ids=[FakeEngine.FLOOD]))
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(50_000)
            assert part
            received = received[-100:] + part
            time.sleep(0.15)


def test_half_closed_connections():
    with attacked() as server:
        half_closed = [connect(server) for _ in range(50)]
        for connection in half_closed:
            connection.sendall(stream_request())
        eventually(lambda: len(server.engine.running) == 51)
        for connection in half_closed:
            connection.shutdown(socket.SHUT_WR)
        eventually(lambda: len(server.engine.running) == 1)
        for connection in half_closed:
            read_all(connection)  # ends: the server has closed its side
            connection.close()


def test_dropped_connections_leave_nothing():
    with attacked() as server:
        for _ in range(10):
            dropped = [connect(server) for _ in range(100)]
            for number, connection in enumerate(dropped):
                connection.sendall(stream_request(stream=bool(number % 2)))
            for number, connection in enumerate(dropped):
                if number % 4 == 0:  # without a goodbye
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
        eventually(lambda: len(server.engine.running) == 1)
        eventually(lambda: len(server.app.state.context.running._ids) <= 3)  # names of the reader's request


def test_pipelined_requests_are_answered_in_order():
    with attacked() as server, connect(server) as connection:
        one = b"GET /v1/models/%d HTTP/1.1\r\nHost: a\r\n\r\n"
        connection.sendall(
            b"".join(one % number for number in range(50))
            + b"GET /version HTTP/1.1\r\nConnection: close\r\nHost: a\r\n\r\n"
        )
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"404"] * 50 + [b"200"]
        assert all(b"'%d'" % number in answer for number, answer in enumerate(answers[:50]))


@pytest.mark.parametrize("stream", [False, True])
def test_who_pipelines_and_leaves_is_noticed(stream):
    with attacked() as server:
        connection = connect(server)
        connection.sendall(stream_request(stream=stream))
        eventually(lambda: len(server.engine.running) == 2)
        connection.sendall(stream_request(stream=stream))
        time.sleep(0.1)
        connection.close()
        eventually(lambda: len(server.engine.running) == 1)


def test_who_pipelines_without_end_is_cut_off():
    with attacked() as server, connect(server) as connection:
        with pytest.raises(ConnectionError):
            connection.sendall(stream_request() + stream_request() * 100_000)
        eventually(lambda: len(server.engine.running) == 1)


NOT_HTTP = {
    "noise": bytes(range(256)) * 10,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "no version": b"GET /\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "negative length": b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "broken chunk": b"POST /tokenize HTTP/1.1\r\nHost: a\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "space before colon": b"GET /health HTTP/1.1\r\nHost: a\r\nX : a\r\n\r\n",
}


@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=NOT_HTTP)
def test_what_is_not_http_is_400_and_closed(sent):
    with attacked() as server:
        for _ in range(20):
            with connect(server) as connection:
                connection.sendall(sent)
                answer = read_all(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 400 "), answer[:300]
            if answer:
                assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {
                    "message",
                    "type",
                    "param",
                    "code",
                }
