"""Server-sent events (http_api section 3.2)."""

import contextlib
import logging
from collections.abc import AsyncGenerator

from dsv4jax.server.errors import ApiError, internal_error

logger = logging.getLogger("dsv4jax.server")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


async def server_sent_events(payloads: AsyncGenerator[bytes | None, None]) -> AsyncGenerator[bytes, None]:
    """Frames JSON texts as events, and None as a comment; an error becomes the last event before the end mark.

    Raises:
      ApiError: nothing was sent yet, so that the answer can still have a status of its own.
    """
    begun = False
    try:
        async with contextlib.aclosing(payloads):
            async for payload in payloads:
                begun = True
                yield PING if payload is None else b"data: " + payload + b"\n\n"
    except ApiError as error:
        if not begun:
            raise
        yield b"data: " + error.body() + b"\n\n"
    except Exception:
        if not begun:
            raise
        logger.exception("a stream failed")
        yield b"data: " + internal_error().body() + b"\n\n"
    yield DONE
