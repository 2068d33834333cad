"""The FastAPI application: every route of the server (http_api section 1)."""

import asyncio
import dataclasses
import importlib.resources
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

import dsv4jax
from dsv4jax.server.body import decode_object
from dsv4jax.server.chat_completions import chat_completions, render_chat_completion
from dsv4jax.server.completions import completions, render_completion
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import ApiError, invalid_value, missing_field, model_not_found, not_found, unavailable
from dsv4jax.server.http import (
    CLIENT_GONE,
    ClientGone,
    EventStream,
    GuardMiddleware,
    Lifecycle,
    RequestMiddleware,
    error_response,
    read_json_body,
    supervise,
)
from dsv4jax.server.messages import count_tokens, messages
from dsv4jax.server.metrics import PrometheusObserver
from dsv4jax.server.responses import responses
from dsv4jax.server.sse import Reply
from dsv4jax.server.tokenize import detokenize, tokenize, tokenizer_info

Handler = Callable[[ServerContext, bytes, AccessRecord], Awaitable[Reply]]


@dataclasses.dataclass(frozen=True)
class Profiler:
    """What /start_profile and /stop_profile call, on a thread of `ServerContext.threads`."""

    start: Callable[[], None]
    stop: Callable[[], None]


async def abort_requests(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """Ends requests: `{"request_ids": [...]}`; ids of responses or of the header X-Request-Id."""
    names = decode_object(body).get("request_ids")
    if names is None:
        raise missing_field("request_ids")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid_value("request_ids", "request_ids: must be a list of strings")
    return _abort(context, names)


async def abort_request(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """Ends one request: `{"rid": ...}`."""
    name = decode_object(body).get("rid")
    if name is None:
        raise missing_field("rid")
    if not isinstance(name, str):
        raise invalid_value("rid", "rid: must be a string")
    return _abort(context, [name])


def _abort(context: ServerContext, names: Sequence[str]) -> bytes:
    engine_ids = dict.fromkeys(one for name in names for one in context.running.engine_ids(name))
    return msgspec.json.encode({"aborted": context.engine.abort(list(engine_ids))})


# Requests that need a key and are refused while the server shuts down. A POST has a JSON body.
WORK_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/render", render_chat_completion),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/completions/render", render_completion),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/abort_requests", abort_requests),
    ("POST", "/abort_request", abort_request),
)


def create_app(
    context: ServerContext, config: ServerConfig, observer: PrometheusObserver, profiler: Profiler | None = None
) -> FastAPI:
    """The application of one server; `app.state` has its `context`, `config` and `lifecycle`.

    `observer` must be the one that the engine reports to. With `config.dev_mode` there are /reset_prefix_cache and,
    given a profiler, /start_profile and /stop_profile.
    """
    lifecycle = Lifecycle(context.engine)
    app = FastAPI(title="dsv4jax", version=dsv4jax.__version__, redirect_slashes=False, redoc_url=None)
    app.state.context, app.state.config, app.state.lifecycle = context, config, lifecycle

    for method, path, handler in WORK_ROUTES:
        _add(app, method, path, _work_endpoint(handler, context, config, lifecycle))
    _add(app, "GET", "/tokenizer_info", _work_endpoint(tokenizer_info, context, config, lifecycle))
    paths = {path for _, path, _ in WORK_ROUTES}
    if config.dev_mode:
        paths |= _add_dev_routes(app, context, profiler)
    _add_models(app, context)
    _add_state(app, context, lifecycle)
    _add_statistics(app, context, lifecycle, observer)

    # Starlette runs the middleware added last first.
    app.add_middleware(GuardMiddleware, config=config, lifecycle=lifecycle, work_paths=frozenset(paths))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    app.add_middleware(RequestMiddleware, config=config)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    return app


def _add(app: FastAPI, method: str, path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
    app.add_api_route(path, endpoint, methods=[method], response_class=Response, name=f"{method} {path}")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _answer_api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope)


async def _answer_http_exception(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        problem = not_found(f"there is no {request.method} {request.url.path[:200]}")
        return error_response(problem, request.scope)
    headers = error.headers or {}
    problem = ApiError(
        error.status_code,
        f"{request.method} is not allowed here, only {headers.get('Allow', '')}",
        type="invalid_request_error",
        code="method_not_allowed",
        headers=headers,
    )
    return error_response(problem, request.scope)


def _work_endpoint(
    handler: Handler, context: ServerContext, config: ServerConfig, lifecycle: Lifecycle
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        record = request.state.record
        try:
            body = await read_json_body(request, config) if request.method == "POST" else b""
            deadline = math.inf if config.request_timeout is None else record.started + config.request_timeout
            work = handler(context, body, record)
            reply = await supervise(work, request.receive, lifecycle, deadline)
            if isinstance(reply, bytes):
                return Response(reply, media_type="application/json")
            # What fails before the first event, such as an admission that others were faster with, has its own status.
            first = await supervise(anext(reply), request.receive, lifecycle, deadline)
        except ClientGone:
            request.state.client_gone = True
            return Response(status_code=CLIENT_GONE)
        return EventStream(first, reply, lifecycle, deadline, record)

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _add_models(app: FastAPI, context: ServerContext) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "dsv4jax",
            "root": name,
            "parent": None,
            "max_model_len": context.engine.max_model_len,
        }

    async def models() -> Response:
        """The served names; the first is the default."""
        return _json({"object": "list", "data": [card(name) for name in context.model_names]})

    async def model(name: str) -> Response:
        if name not in context.model_names:
            raise model_not_found(name)
        return _json(card(name))

    _add(app, "GET", "/v1/models", models)
    _add(app, "GET", "/v1/models/{name:path}", model)


def _add_state(app: FastAPI, context: ServerContext, lifecycle: Lifecycle) -> None:
    async def health() -> Response:
        """200 while the engine answers and requests are taken."""
        if lifecycle.draining:
            raise unavailable("the server is shutting down", "draining")
        if not context.engine.is_alive:
            raise unavailable("the engine does not answer", "engine_dead")
        return Response()

    async def ready() -> Response:
        """200 when a request would be served without waiting for a compilation."""
        await health()
        if not context.engine.is_ready:
            raise unavailable("the engine is warming up", "not_ready")
        return Response()

    async def version() -> Response:
        return _json({"version": dsv4jax.__version__})

    async def load() -> Response:
        """Requests in progress."""
        return _json({"server_load": lifecycle.active})

    for path, endpoint in (("/health", health), ("/ping", health), ("/ready", ready)):
        _add(app, "GET", path, endpoint)
    _add(app, "GET", "/version", version)
    _add(app, "GET", "/load", load)


def _add_statistics(app: FastAPI, context: ServerContext, lifecycle: Lifecycle, observer: PrometheusObserver) -> None:
    registry: CollectorRegistry = observer.registry(context.engine.stats)
    page = importlib.resources.files("dsv4jax.server").joinpath("status.html").read_text("utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def status() -> Response:
        """What the page at / shows."""
        engine = context.engine
        if lifecycle.draining:
            state = "draining"
        elif not engine.is_alive:
            state = "dead"
        else:
            state = "ready" if engine.is_ready else "warming up"
        return _json(
            {
                "model": context.model_names[0],
                "version": dsv4jax.__version__,
                "state": state,
                "requests": lifecycle.active,
                "stats": engine.stats(),
                "steps": observer.recent_steps(),
            }
        )

    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    _add(app, "GET", "/metrics", metrics)
    _add(app, "GET", "/status.json", status)
    _add(app, "GET", "/", index)


def _add_dev_routes(app: FastAPI, context: ServerContext, profiler: Profiler | None) -> set[str]:
    async def reset_prefix_cache() -> Response:
        context.engine.reset_prefix_cache()
        return Response()

    def on_thread(function: Callable[[], None]) -> Callable[[], Awaitable[Response]]:
        async def endpoint() -> Response:
            await asyncio.get_running_loop().run_in_executor(context.threads, function)
            return Response()

        return endpoint

    endpoints = {"/reset_prefix_cache": reset_prefix_cache}
    if profiler is not None:
        endpoints["/start_profile"] = on_thread(profiler.start)
        endpoints["/stop_profile"] = on_thread(profiler.stop)
    for path, endpoint in endpoints.items():
        _add(app, "POST", path, endpoint)
    return set(endpoints)
