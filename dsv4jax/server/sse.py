"""Server-sent events (http_api section 3.2)."""

import contextlib
import logging
from collections.abc import AsyncGenerator

from dsv4jax.server.errors import ApiError, internal_error

logger = logging.getLogger("dsv4jax.server")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


async def server_sent_events(payloads: AsyncGenerator[bytes | None, None]) -> AsyncGenerator[bytes, None]:
    """Frames JSON texts as events, and None as a comment; an error becomes the last event before the end mark."""
    try:
        async with contextlib.aclosing(payloads):
            async for payload in payloads:
                yield PING if payload is None else b"data: " + payload + b"\n\n"
    except ApiError as error:
        yield b"data: " + error.body() + b"\n\n"
    except Exception:
        logger.exception("a stream failed")
        yield b"data: " + internal_error().body() + b"\n\n"
    yield DONE
