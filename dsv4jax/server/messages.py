"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Messages protocol over the chat core.

Requests are mapped in `messages_request`. Events and messages are written here and not by `deepseek-recipe`, whose
generators parse the output on their own: the reply is already parsed when it comes here.
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pydantic_core

from dsv4jax.server.chat_core import ChatTurn, ReplyStep, chat_prompt, prepare_chat, run_chat
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.error_formats import MESSAGES_PATH
from dsv4jax.server.generation import Usage, in_threads
from dsv4jax.server.messages_request import MessagesRequest, read_messages
from dsv4jax.server.reply_blocks import Block, BlockChange, ReplyBlocks, named_events, whole_reply
from dsv4jax.server.sse import Reply, encode_json

Event = tuple[str, bytes]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(context: ServerContext, body: bytes, record: AccessRecord) -> Reply:
    """A message, or the events of a stream, whose closing aborts the request.

    Raises:
      ApiError: the request is refused, or (without a stream) fails.
    """
    request = await in_threads(context, read_messages, context, body, record)
    with request.paths.in_errors():
        turn = await prepare_chat(context, lambda: request.fields, f"msg_{uuid.uuid4().hex}", record)
    form = _Form(request, turn)
    if request.fields.stream:
        return named_events(_stream(context, turn, form), MESSAGES_PATH)
    last = await whole_reply(context, turn, form.blocks)
    return await in_threads(context, _whole, form, last)


async def count_tokens(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """How long the prompt of a message would be: `{"input_tokens": ...}`.

    Raises:
      ApiError: the request is refused.
    """
    return await in_threads(context, _count, context, body, record)


def _count(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    request = read_messages(context, body, record)
    with request.paths.in_errors():
        record.prompt_tokens = chat_prompt(context, request.fields.template).size
    return encode_json({"input_tokens": record.prompt_tokens})


def _whole(form: "_Form", last: ReplyStep) -> bytes:
    content = [form.content(block) for block in form.blocks.blocks]
    return encode_json(form.message() | {"content": content} | form.ending(last))


async def _stream(context: ServerContext, turn: ChatTurn, form: "_Form") -> AsyncGenerator[Event | None, None]:
    started = False
    async with contextlib.aclosing(run_chat(context, turn)) as steps:
        async for step in steps:
            if step is None:
                yield None
                continue
            if not started:
                started = True
                yield _event("message_start", message=form.message())
            for change in form.blocks.changes(step):
                for event in form.events(change):
                    yield event
            if step.finish_reason is not None:
                ending = form.ending(step)
                usage = ending.pop("usage")
                yield _event("message_delta", delta=ending, usage=usage)
                yield _event("message_stop")


def _event(name: str, **parts: Any) -> Event:
    return name, encode_json({"type": name, **parts})


class _Form:
    """The JSON parts of one message."""

    def __init__(self, request: MessagesRequest, turn: ChatTurn):
        self.blocks = ReplyBlocks()
        self._turn = turn
        self._shows_thinking = request.shows_thinking

    def message(self) -> dict[str, Any]:
        """The message before its first block."""
        return {
            "id": self._turn.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._turn.fields.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._turn.usage),
        }

    def ending(self, last: ReplyStep) -> dict[str, Any]:
        """What the last step adds to the message."""
        matched = last.stop_reason if isinstance(last.stop_reason, str) else None
        reason = _STOP_REASONS[last.finish_reason]
        return {
            "stop_reason": "stop_sequence" if matched is not None and reason == "end_turn" else reason,
            "stop_sequence": matched,
            "usage": _usage(self._turn.usage),
        }

    def content(self, block: Block) -> dict[str, Any]:
        """A complete block. Arguments that end too early are completed as clients complete those of a stream."""
        if block.kind == "content":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            thinking = block.text if self._shows_thinking else ""
            return {"type": "thinking", "thinking": thinking, "signature": self._signature}
        given = pydantic_core.from_json(block.text, allow_partial=True) if block.text else {}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}

    def events(self, change: BlockChange) -> Iterator[Event]:
        """The events of a change of a block."""
        block = change.block
        if change.kind == "open":
            empty = {
                "content": {"type": "text", "text": ""},
                "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
                "call": {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}},
            }
            yield _event("content_block_start", index=block.index, content_block=empty[block.kind])
        elif change.kind == "add":
            if block.kind != "reasoning" or self._shows_thinking:
                kind, key = {
                    "content": ("text_delta", "text"),
                    "reasoning": ("thinking_delta", "thinking"),
                    "call": ("input_json_delta", "partial_json"),
                }[block.kind]
                yield _event("content_block_delta", index=block.index, delta={"type": kind, key: change.text})
        else:
            if block.kind == "reasoning":
                delta = {"type": "signature_delta", "signature": self._signature}
                yield _event("content_block_delta", index=block.index, delta=delta)
            yield _event("content_block_stop", index=block.index)

    @property
    def _signature(self) -> str:
        """Clients keep a block of thinking only with one; it is not checked when it comes back."""
        return self._turn.response_id


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.record.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens} | usage.predictions,
    }
