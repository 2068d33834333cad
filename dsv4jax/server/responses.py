"""`POST /v1/responses`: the Responses protocol over the chat core.

Requests are mapped in `responses_request`. Events and response objects are written here and not by `deepseek-recipe`,
whose generators parse the output on their own: the reply is already parsed when it comes here.
"""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from dsv4jax.server.chat_core import ChatTurn, ReplyStep, prepare_chat, run_chat
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.error_formats import RESPONSES_PATH
from dsv4jax.server.generation import Usage, in_threads
from dsv4jax.server.logprobs import GeneratedToken, chat_logprob
from dsv4jax.server.reply_blocks import Block, BlockChange, ReplyBlocks, named_events, whole_reply
from dsv4jax.server.responses_request import ResponsesRequest, read_responses
from dsv4jax.server.sse import Reply, encode_json

Event = tuple[str, bytes]

_ID_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}


async def responses(context: ServerContext, body: bytes, record: AccessRecord) -> Reply:
    """A response object, or the events of a stream, whose closing aborts the request.

    Raises:
      ApiError: the request is refused, or (without a stream) fails.
    """
    request = await in_threads(context, read_responses, context, body, record)
    with request.paths.in_errors():
        turn = await prepare_chat(context, lambda: request.fields, f"resp_{uuid.uuid4().hex}", record)
    form = _Form(context, request, turn)
    if request.fields.stream:
        return named_events(_stream(context, turn, form), RESPONSES_PATH)
    last = await whole_reply(context, turn, form.blocks)
    return await in_threads(context, lambda: encode_json(form.ended(last)))


async def _stream(context: ServerContext, turn: ChatTurn, form: "_Form") -> AsyncGenerator[Event | None, None]:
    started = False
    async with contextlib.aclosing(run_chat(context, turn)) as steps:
        async for step in steps:
            if step is None:
                yield None
                continue
            if not started:
                started = True
                for name in ("response.created", "response.in_progress"):
                    yield form.event(name, response=form.response("in_progress"))
            for change in form.blocks.changes(step):
                events = form.events(change)
                if change.kind == "close":  # holds all of the block
                    events = await in_threads(context, list, events)
                for event in events:
                    yield event
            if step.finish_reason is not None:
                yield await in_threads(context, form.last_event, step)


class _Form:
    """The JSON parts of one response."""

    def __init__(self, context: ServerContext, request: ResponsesRequest, turn: ChatTurn):
        self.blocks = ReplyBlocks()
        self._texts = context.token_texts
        self._turn = turn
        self._echo = request.echo
        self._with_logprobs = request.fields.sampling.top_logprobs >= 0
        self._as_id = request.fields.tokens_as_token_ids
        self._created = int(time.time())
        self._sequence = 0

    def event(self, kind: str, **parts: Any) -> Event:
        data = encode_json({"type": kind, "sequence_number": self._sequence, **parts})
        self._sequence += 1
        return kind, data

    def response(self, status: str) -> dict[str, Any]:
        """The response object while it is made."""
        return {
            "id": self._turn.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._turn.fields.model,
            "output": [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
        }

    def ended(self, last: ReplyStep) -> dict[str, Any]:
        """The response object after its last step."""
        cut = last.finish_reason == "length"
        return self.response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": [self._item(block, "incomplete" if block.cut else "completed") for block in self.blocks.blocks],
            "usage": _usage(self._turn.usage),
        }

    def last_event(self, last: ReplyStep) -> Event:
        response = self.ended(last)
        return self.event(f"response.{response['status']}", response=response)

    def events(self, change: BlockChange) -> Iterator[Event]:
        """The events of a change of a block."""
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        text_name = {
            "reasoning": "response.reasoning_text",
            "content": "response.output_text",
            "call": "response.function_call_arguments",
        }[block.kind]
        if change.kind == "open":
            begun = dataclasses.replace(block, texts=[], tokens=[])  # the step may have added to it already
            item = self._item(begun, "in_progress")
            yield self.event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self.event("response.content_part.added", **place, part=self._part(begun))
        elif change.kind == "add":
            logprobs = {"logprobs": self._logprobs(change.tokens)} if block.kind == "content" else {}
            yield self.event(f"{text_name}.delta", **place, delta=change.text, **logprobs)
        else:
            item = self._item(block, "incomplete" if block.cut else "completed")
            if block.kind == "call":
                yield self.event(f"{text_name}.done", **place, name=block.name, arguments=item["arguments"])
            else:
                part = item["content"][0]
                logprobs = {"logprobs": part["logprobs"]} if block.kind == "content" else {}
                yield self.event(f"{text_name}.done", **place, text=part["text"], **logprobs)
                yield self.event("response.content_part.done", **place, part=part)
            yield self.event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return item | {"type": "function_call"} | call
        content = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._turn.response_id.removeprefix('resp_')}_{block.index}"

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.tokens)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        return [chat_logprob(self._texts, token, self._as_id) for token in tokens]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.record.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens} | usage.predictions,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
