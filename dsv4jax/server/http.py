"""What surrounds every request: id, log, keys, body, errors, streams, disconnects, shutdown (http_api 2 and 6)."""

import asyncio
import contextlib
import hmac
import logging
import re
import time
import urllib.parse
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4jax.server.config import ServerConfig
from dsv4jax.server.context import AccessRecord, Engine
from dsv4jax.server.error_formats import error_body, error_event
from dsv4jax.server.errors import (
    ApiError,
    internal_error,
    invalid_api_key,
    invalid_value,
    request_too_large,
    unavailable,
    unsupported_media_type,
)

logger = logging.getLogger("dsv4jax.server")

_LOOK_AT_ENGINE_SECONDS = 1.0

CLIENT_GONE = 499  # In the log only: nobody is left to read a status.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGone(Exception):
    """The client closed the connection."""


class Lifecycle:
    """Requests in progress and the way to the end: serving, draining, cut off. Belongs to one event loop."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.draining = False
        self.active = 0
        self.cut_off = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as in progress."""
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def drain(self, seconds: float, grace: float = 2.0) -> None:
        """Lets no new request in, gives running ones `seconds`, then ends them with an error and `grace` to send it."""
        self.draining = True
        for limit in (seconds, grace):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit)
                return
            self.cut_off.set()


def route_path(scope: Scope) -> str:
    """The path without the prefix of a proxy, as the router sees it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def error_response(error: ApiError, scope: Scope) -> Response:
    return Response(error_body(error, route_path(scope)), error.status, error.headers, "application/json")


class RequestMiddleware:
    """Outermost: names the request, answers what is wrong with its headers, and writes the log line."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
        good = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
        record = AccessRecord(given[0], client_named=True) if good else AccessRecord(uuid.uuid4().hex)
        state = scope.setdefault("state", {})
        state["record"] = record
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", _header_safe(record.request_id).encode())]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > self._config.max_header_bytes:
                await error_response(headers_too_large(self._config), scope)(scope, receive, send_with_id)
            elif given and not good:
                problem = invalid_value("X-Request-Id", "X-Request-Id: must be 1 to 256 visible ASCII characters")
                await error_response(problem, scope)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            _log(scope, record, CLIENT_GONE if state.get("client_gone") else status)


class GuardMiddleware:
    """Keys, shutdown, and faults: whatever an endpoint raises unexpectedly becomes a 500 that tells nothing."""

    def __init__(self, app: ASGIApp, config: ServerConfig, lifecycle: Lifecycle, work_paths: frozenset[str]):
        self._app = app
        self._keys = [key.encode() for key in config.api_keys]
        self._lifecycle = lifecycle
        self._work_paths = work_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            if self._lifecycle.draining and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            self._check_key(scope, path)
            if path not in self._work_paths:
                await self._app(scope, receive, watched_send)
            elif self._lifecycle.draining:
                raise unavailable("the server is shutting down", "draining")
            else:
                with self._lifecycle.request():
                    await self._app(scope, receive, watched_send)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, watched_send)
        except Exception:
            logger.exception("%s failed", scope["state"]["record"].request_id)
            if started:
                raise
            await error_response(internal_error(), scope)(scope, receive, watched_send)

    def _check_key(self, scope: Scope, path: str) -> None:
        if not self._keys or scope["method"] == "OPTIONS":
            return
        if path not in self._work_paths and path != "/v1" and not path.startswith("/v1/"):
            return
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # Clients of the Messages protocol have a header of their own.
        given = [bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
        # Every key is compared, so that the time tells neither which one is nearly right nor how many there are.
        matches = [hmac.compare_digest(key, known) for key in given for known in self._keys]
        if not any(matches):
            raise invalid_api_key()


async def read_json_body(request: Request, config: ServerConfig) -> bytes:
    """The request's body.

    Raises:
      ApiError: it is not declared as JSON, is too large (found out without reading it where the length is declared),
        or does not arrive in time.
      ClientGone: the client went away before its end.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise unsupported_media_type(f"Content-Type: must be application/json, is {content_type[:200]!r}")
    limit = config.max_body_bytes
    if int(request.headers.get("content-length", 0)) > limit:
        raise request_too_large(f"the body must be at most {limit} bytes")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise request_too_large(f"the body must be at most {limit} bytes")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body must arrive within {config.body_timeout:g} seconds",
            type="invalid_request_error",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None


async def supervise(work: Awaitable[Any], receive: Receive, lifecycle: Lifecycle, deadline: float) -> Any:
    """Runs `work` to its end and returns what it returns; cancels it when there is no use in waiting any longer.

    Raises:
      ClientGone: the client closed the connection.
      ApiError: 503 when the server ends or the engine does not answer any more, 504 at `deadline` of the monotonic
        clock.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    cut_off = asyncio.ensure_future(lifecycle.cut_off.wait())
    tasks = (task, gone, cut_off)
    try:
        done: set[asyncio.Future] = set()
        while not done:
            limit = min(_LOOK_AT_ENGINE_SECONDS, max(0.0, deadline - time.monotonic()))
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done and time.monotonic() >= deadline:
                raise ApiError(504, "the request took too long", type="timeout_error", code="request_timeout")
            if not done and not lifecycle.engine.is_alive:
                raise unavailable("the engine does not answer", "engine_dead")
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if task in done:
        return task.result()
    if gone in done:
        raise ClientGone
    raise unavailable("the server ended before the request was complete", "shutdown")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events, the `first` and then the others, as the client reads them.

    The next event is asked for when the one before was accepted by the connection, whose buffer is bounded: of a slow
    reader's request the engine gathers the tokens in one chunk. However the stream ends, `events` is closed, which
    aborts what the engine still does for it.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        lifecycle: Lifecycle,
        deadline: float,
        record: AccessRecord,
    ):
        super().__init__(headers=_SSE_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._lifecycle = lifecycle
        self._deadline = deadline
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await supervise(self._pump(send), receive, self._lifecycle, self._deadline)
            except ClientGone:
                scope["state"]["client_gone"] = True
                return
            except ApiError as error:
                await _send_part(send, error_event(error, route_path(scope)))
            except Exception:
                logger.exception("%s failed", self._record.request_id)
                await _send_part(send, error_event(internal_error(), route_path(scope)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await _send_part(send, self._first)
        async for event in self._events:
            await _send_part(send, event)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def headers_too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        431,
        f"the request line and headers must be at most {config.max_header_bytes} bytes",
        type="invalid_request_error",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


def _header_safe(text: str) -> str:
    """A body's `request_id` may hold anything."""
    return text if _REQUEST_ID.fullmatch(text) else urllib.parse.quote(text[:256])


def _log(scope: Scope, record: AccessRecord, status: int) -> None:
    first_token = "-" if record.first_token is None else f"{record.first_token:.3f}"
    logger.info(
        "%s %s %s %d prompt=%d cached=%d output=%d ttft=%s total=%.3f",
        _header_safe(record.request_id),
        scope["method"],
        urllib.parse.quote(scope["path"][:200]),
        status,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        first_token,
        time.monotonic() - record.started,
    )
