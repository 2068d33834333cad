"""How an error looks in the protocol of the path that was asked for."""

from typing import Any

import msgspec

from dsv4jax.server.errors import ApiError
from dsv4jax.server.sse import DONE

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"

_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, path: str) -> bytes:
    """The JSON body of an error answer: Anthropic's shape under /v1/messages, otherwise that of http_api section 2."""
    if _is_under(path, MESSAGES_PATH):
        return msgspec.json.encode(_messages_error(error))
    return error.body()


def error_event(error: ApiError, path: str) -> bytes:
    """What ends a stream that fails, end mark included where the protocol has one."""
    if _is_under(path, MESSAGES_PATH):
        return b"event: error\ndata: " + msgspec.json.encode(_messages_error(error)) + b"\n\n"
    if _is_under(path, RESPONSES_PATH):
        details = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        # The protocol has these fields beside the type; SDKs raise an exception if there is an `error` object.
        event = details | {"type": "error", "error": details}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + DONE


def _messages_error(error: ApiError) -> dict[str, Any]:
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": details}


def _is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
