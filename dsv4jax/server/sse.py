"""Server-sent events (http_api section 3.2)."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import msgspec

from dsv4jax.server.errors import ApiError, internal_error

logger = logging.getLogger("dsv4jax.server")

Reply = bytes | AsyncGenerator[bytes, None]
"""What a route answers: a JSON body, or a stream of events whose closing aborts the request."""

Payload = TypeVar("Payload")

encode_json = msgspec.json.Encoder().encode

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


async def event_stream(
    payloads: AsyncGenerator[Payload | None, None],
    frame: Callable[[Payload], bytes],
    failure: Callable[[ApiError], bytes],
) -> AsyncGenerator[bytes, None]:
    """Frames payloads as events, and None as a comment; an error becomes the last event, as `failure` has it.

    Raises:
      ApiError: nothing was sent yet, so that the answer can still have a status of its own.
    """
    begun = False
    try:
        async with contextlib.aclosing(payloads):
            async for payload in payloads:
                begun = True
                yield PING if payload is None else frame(payload)
    except ApiError as error:
        if not begun:
            raise
        yield failure(error)
    except Exception:
        if not begun:
            raise
        logger.exception("a stream failed")
        yield failure(internal_error())


async def data_events(payloads: AsyncGenerator[bytes | None, None]) -> AsyncGenerator[bytes, None]:
    """JSON texts as events without names, with the end mark of the OpenAI protocol behind them.

    Raises:
      ApiError: as `event_stream`.
    """
    async with contextlib.aclosing(event_stream(payloads, _data, lambda error: _data(error.body()))) as events:
        async for event in events:
            yield event
    yield DONE


def _data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
