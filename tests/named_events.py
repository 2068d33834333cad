"""Reads streams of named events."""

import asyncio
import json

from dsv4jax.server.context import AccessRecord


def parsed(text: str) -> list[dict]:
    """The data of each event; checks that its name is its type."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def call(route, server, body, record=None):
    """The JSON of a whole response, or the events of a stream."""

    async def reply():
        answer = await route(server, json.dumps(body).encode(), record or AccessRecord("r1"))
        if isinstance(answer, bytes):
            return json.loads(answer)
        return parsed("".join([event.decode() async for event in answer]))

    return asyncio.run(reply())
