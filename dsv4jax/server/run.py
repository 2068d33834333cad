"""Runs the application with uvicorn: connections, time-outs, signals (http_api section 6)."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4jax.server.config import ServerConfig
from dsv4jax.server.errors import ApiError, unavailable
from dsv4jax.server.http import error_response, headers_too_large

logger = logging.getLogger("dsv4jax.server")

_LINGER_SECONDS = 5.0
_SEND_BUFFER = 1 << 18  # bytes
_OTHER_FILES = 64  # open files besides connections


class Connection(H11Protocol):
    """One HTTP/1.1 connection; adds to uvicorn's the limits that keep a slow or hostile client harmless.

    A client that closes its side of the connection counts as gone, also if it could still read.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._settings: ServerConfig = self.config.app.state.config
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self._settings.max_connections:
            self._refuse(unavailable("too many connections are open", "too_many_connections"))
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._set_read_timer(None)
        self._cancel_write_timer()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.DONE:
            waiting = len(self.conn.trailing_data[0]) + len(data)
            if waiting > self._settings.max_header_bytes:
                self.transport.abort()
                return
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn: what arrived is not HTTP or is too long."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        elif len(self.conn.trailing_data[0]) > self._settings.max_header_bytes:
            self._refuse(headers_too_large(self._settings))
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request", type="invalid_request_error", code=None))

    def _watch_reading(self) -> None:
        if self.transport.is_closing():
            self._set_read_timer(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._set_read_timer(self._settings.header_timeout)  # in the middle of headers
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._set_read_timer(_LINGER_SECONDS)  # answered early; closing at once could lose the answer
        else:
            self._set_read_timer(None)
            if self.conn.their_state is h11.DONE:
                # Requests may wait behind the one being answered. uvicorn stops reading then, and would not see the
                # client go away.
                self.flow.resume_reading()

    def _set_read_timer(self, seconds: float | None) -> None:
        """Closes the connection in `seconds`; a timer that runs already is kept."""
        if seconds is None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(seconds, self.transport.close)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), **error.headers}
        headers["Connection"] = "close"
        lines = [f"HTTP/1.1 {error.status} ", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """Drains before it closes anything: meanwhile new requests are answered 503 and health checks say so."""

    def __init__(self, app: FastAPI):
        config: ServerConfig = app.state.config
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_keep_alive=config.keep_alive_timeout,
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=config.max_header_bytes,
            )
        )
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        logger.info("listening on %s", " ".join(_address(one) for one in sockets))

    def begin_shutdown(self) -> None:
        """Begins to drain; may be called from any thread once the server has started."""
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        state = self._app.state
        logger.info("shutting down: %d requests in progress", state.lifecycle.active)
        try:
            await state.lifecycle.drain(state.config.shutdown_timeout)
            await asyncio.wait_for(state.context.engine.drain(1.0), 5.0)
        except Exception:
            logger.exception("the engine did not end")
        finally:
            self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of uvicorn: the first SIGTERM or SIGINT drains, the second exits at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        seen = 0

        def handle(number: int, frame: object) -> None:
            nonlocal seen
            seen += 1
            if seen > 1:
                os._exit(128 + number)
            if self._loop is None:
                raise SystemExit(0)
            self.begin_shutdown()

        before = [signal.signal(number, handle) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)


def _listen(config: ServerConfig) -> socket.socket:
    if config.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: object = config.uds
    else:
        # asyncio sets TCP_NODELAY only where the protocol is named.
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: what a client that stops reading may hold in the kernel.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"


def _allow_open_files(config: ServerConfig) -> None:
    needed = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(f"max_connections = {config.max_connections}: this process may open only {hard} files")
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serves `create_app`'s application until SIGTERM or SIGINT, then drains; call it in the main thread."""
    _Server(app).run(sockets=[listener])


@contextlib.contextmanager
def loading(config: ServerConfig, listener: socket.socket) -> Iterator[None]:
    """Answers every request with 503 while the body runs, so that health checks see a server that is on its way."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(unavailable("the model is loading", "loading", 5), scope)(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            answer,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_graceful_shutdown=1,
        )
    )
    # Of a duplicate, since uvicorn closes what it was given; who connects in between waits for the real server.
    own = listener.dup()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, name="loading-server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    logger.info("starting: answering 503 on %s", _address(listener))
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket that a server takes its connections from.

    Raises:
      OSError: the address cannot be listened on.
      ValueError: the process may not open as many files as `max_connections` needs.
    """
    _allow_open_files(config)
    listener = _listen(config)
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


class BackgroundServer:
    """Context manager that serves `create_app`'s application in a thread; leaving it drains.

    Attributes:
      port: where it listens on TCP.
      url: address without a trailing slash; the host is the one configured.
    """

    def __init__(self, app: FastAPI):
        self._config: ServerConfig = app.state.config
        self._server = _Server(app)

    def __enter__(self) -> "BackgroundServer":
        self._stack = contextlib.ExitStack()
        listener = self._stack.enter_context(listening(self._config))
        if self._config.uds is None:
            self.port = listener.getsockname()[1]
            scheme = "https" if self._config.ssl_keyfile else "http"
            self.url = f"{scheme}://{self._config.host}:{self.port}"
        listener.listen(2048)  # clients may connect before the thread runs
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name="http-server")
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._server.begin_shutdown()
        self._thread.join()
        self._stack.close()
