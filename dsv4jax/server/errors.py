"""Errors that a client sees: one exception, one JSON shape (http_api section 2)."""

from collections.abc import Mapping

import msgspec

from dsv4jax.engine.request import EngineStopped, QueueFull, RequestTooLarge, TooManyChoices, TooManyDrafts


class ApiError(Exception):
    """Ends a request with an HTTP status and an error body.

    Attributes:
      status: HTTP status.
      type, code, param: as in the body; `param` is the dotted path of the field to blame.
      headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body, which is also the data of an error event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def _bad_request(message: str, code: str, param: str | None) -> ApiError:
    return ApiError(400, message, type="invalid_request_error", code=code, param=param)


def invalid_json(message: str) -> ApiError:
    return _bad_request(message, "invalid_json", None)


def unsupported_media_type(message: str) -> ApiError:
    return _bad_request(message, "unsupported_media_type", None)


def invalid_value(param: str | None, message: str) -> ApiError:
    return _bad_request(message, "invalid_value", param)


def missing_field(param: str) -> ApiError:
    return _bad_request(f"{param} is missing", "missing_field", param)


def unsupported(param: str, message: str) -> ApiError:
    return _bad_request(message, "unsupported", param)


def context_length_exceeded(param: str | None, message: str) -> ApiError:
    return _bad_request(message, "context_length_exceeded", param)


def request_aborted() -> ApiError:
    return _bad_request("the request was aborted", "request_aborted", None)


def invalid_api_key() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: Authorization: Bearer KEY",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str) -> ApiError:
    message = f"the model {name[:200]!r} does not exist"
    return ApiError(404, message, type="not_found_error", code="model_not_found", param="model")


def not_found(message: str) -> ApiError:
    return ApiError(404, message, type="not_found_error", code="not_found")


def request_too_large(message: str) -> ApiError:
    return ApiError(413, message, type="invalid_request_error", code="request_too_large")


def queue_full(message: str, retry_after: int) -> ApiError:
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    headers = {"Retry-After": str(retry_after)}
    return ApiError(503, message, type="service_unavailable", code=code, headers=headers)


def internal_error(message: str = "internal error") -> ApiError:
    return ApiError(500, message, type="internal_error", code="internal_error")


def from_engine(error: RequestTooLarge | QueueFull | EngineStopped) -> ApiError:
    """What the engine says when it does not take a request."""
    if isinstance(error, QueueFull):
        return queue_full(str(error), error.retry_after)
    if isinstance(error, EngineStopped):
        return unavailable(str(error), "engine_stopped")
    if isinstance(error, TooManyChoices):
        return invalid_value("n", str(error))
    if isinstance(error, TooManyDrafts):
        return invalid_value("drafts", str(error))
    return context_length_exceeded(None, str(error))
