"""One chat turn, whatever the protocol: from fields to the engine's request, and from its chunks to reply deltas."""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dsv4jax.chat import (
    ChatError,
    ReplyDelta,
    ReplyParser,
    effective_tools,
    encode_chat,
    image_paths,
    json_content,
    reply_start,
)
from dsv4jax.chat.encode import ASSISTANT, TASK_TOKENS
from dsv4jax.engine.request import GenerationRequest, PromptLogprobs, TokenChunk
from dsv4jax.server.constraints import chat_mask, is_unconstrained_json, mask_threads
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import invalid_value, unsupported
from dsv4jax.server.generation import (
    Prompt,
    TokenQueue,
    Usage,
    build_request,
    check_admission,
    first_prompt_logprobs,
    in_threads,
    merged_chunks,
    text_ids,
)
from dsv4jax.server.logprobs import GeneratedToken
from dsv4jax.server.protocol import ChatFields, ChatTemplate

FinishReason = Literal["stop", "length", "tool_calls"]


class Piece(NamedTuple):
    """A delta of the reply and the tokens that it consumed; its text may be empty if it only consumes tokens."""

    delta: ReplyDelta
    tokens: list[GeneratedToken]


class ReplyStep(NamedTuple):
    """What one engine step changed in choice `index`; `pieces` may be empty. The last step has a finish reason.

    `stop_reason` is the stop string or stop id that ended the choice.
    """

    index: int
    pieces: list[Piece]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass
class ChatTurn:
    """A chat request that is ready to run.

    Attributes:
      response_id: names the response and the engine's request.
      prompt_logprobs: known from the first step on, if asked for.
    """

    fields: ChatFields
    response_id: str
    request: GenerationRequest
    usage: Usage
    choices: "list[_Choice]"
    prompt_logprobs: PromptLogprobs | None = None


def chat_prompt(context: ServerContext, template: ChatTemplate) -> Prompt:
    """Prompt ids, without the generation header if the request says so.

    Raises:
      ApiError: messages, tools or tool choice are not allowed, or there are images.
    """
    try:
        prompt = encode_chat(context.tokenizer, template.messages, **template.options())
    except ChatError as error:
        raise invalid_value(error.param, str(error)) from error
    images = image_paths(template.messages)
    if images:
        raise unsupported(images[0], f"{', '.join(images[:10])}: images are not supported by this server")
    continues = template.continue_final_message or template.messages[-1].get("prefix")
    if template.add_generation_prompt or continues:
        return prompt
    return prompt[: -_header(context, prompt).size]


async def prepare_chat(
    context: ServerContext, read: Callable[[], ChatFields], response_id: str, record: AccessRecord
) -> ChatTurn:
    """Checks everything that can be refused, the engine's admission included.

    Args:
      read: gives the fields; called outside the event loop, as it may parse a long body.
      response_id: unique; also the id of the engine's request.

    Raises:
      ApiError: the request is refused.
    """
    fields = await in_threads(context, read)
    threads = mask_threads(context, fields)
    turn = await in_threads(context, _prepare, context, fields, response_id, record, threads=threads)
    check_admission(context, [turn.request])
    return turn


async def run_chat(context: ServerContext, turn: ChatTurn) -> AsyncGenerator[ReplyStep | None, None]:
    """The steps of all choices as they come; None after `ping_seconds` without one. Closing it aborts the request.

    Raises:
      ApiError: a choice failed or was aborted.
    """
    names = [turn.response_id, turn.usage.record.request_id]
    async with contextlib.aclosing(merged_chunks(context, [turn.request], names)) as chunks:
        async for item in chunks:
            if item is None:
                yield None
                continue
            _, chunk = item
            choice = turn.choices[chunk.index]
            if choice.ended:
                continue
            turn.usage.took(0, chunk)
            turn.prompt_logprobs = first_prompt_logprobs(turn.prompt_logprobs, chunk)
            step = choice.push(chunk, turn.usage)
            if choice.ended and chunk.finish_reason is None:
                context.engine.stop(turn.request.request_id, chunk.index)
            yield step


def _prepare(context: ServerContext, fields: ChatFields, response_id: str, record: AccessRecord) -> ChatTurn:
    template = fields.template
    if not (template.add_generation_prompt or template.continue_final_message):
        message = "add_generation_prompt is false: a reply needs it to be true, or continue_final_message: true"
        raise invalid_value("add_generation_prompt", message)
    prompt = chat_prompt(context, template)
    tools = effective_tools(template.tools, template.tool_choice)
    header = _header(context, prompt)
    request = build_request(
        context,
        fields,
        prompt,
        response_id,
        param="messages",
        default_max_tokens=context.default_max_tokens,
        mask=chat_mask(context, fields, tools, reply_start(context.tokenizer, header)),
        prompt_logprobs=fields.prompt_logprobs,
    )
    whole_json = is_unconstrained_json(context, fields, tools)
    choices = [_Choice(context, fields, index, header, tools, whole_json) for index in range(fields.n)]
    return ChatTurn(fields, response_id, request, Usage(record, request.prompt.size), choices)


class _Choice:
    """Parses the ids of one choice."""

    def __init__(
        self,
        context: ServerContext,
        fields: ChatFields,
        index: int,
        header: Prompt,
        tools: Sequence[Mapping[str, Any]],
        whole_json: bool,
    ):
        self.ended = False
        self._fields = fields
        self._index = index
        self._silent_id = context.tokenizer.pad_id
        self._tokens = TokenQueue()
        self._keeps_tokens = fields.return_token_ids or fields.sampling.top_logprobs >= 0
        self._held = 0  # ids pushed that no delta has consumed yet
        self._reasoning = 0
        self._json: list[Piece] | None = [] if whole_json else None
        self._parser = ReplyParser(
            context.tokenizer,
            header,
            tools=tools,
            stop=fields.stop,
            include_stop_str=fields.include_stop_str,
            min_tokens=fields.min_tokens,
            parallel_tool_calls=fields.parallel_tool_calls,
        )

    def push(self, chunk: TokenChunk, usage: Usage) -> ReplyStep:
        parser = self._parser
        if self._keeps_tokens:
            self._tokens.push(chunk)
        deltas = parser.push(text_ids(self._fields, chunk, self._silent_id)) if chunk.token_ids else []
        self.ended = parser.ended or chunk.finish_reason is not None
        reason = "length" if chunk.finish_reason == "length" and not parser.ended else "stop"
        if self.ended:
            deltas += parser.finish(reason)
        pieces = [Piece(d, self._tokens.take(d.ids) if self._keeps_tokens else []) for d in deltas]
        self._count(chunk, sum(d.ids for d in deltas), usage)
        if self._json is not None:
            pieces = self._held_json(pieces, reason)
        if not self.ended:
            return ReplyStep(self._index, pieces)
        if reason == "length":
            return ReplyStep(self._index, pieces, reason)
        reason = "tool_calls" if parser.tool_calls_seen else "stop"
        return ReplyStep(self._index, pieces, reason, parser.stop_string or chunk.stop_reason)

    def _count(self, chunk: TokenChunk, consumed: int, usage: Usage) -> None:
        """Counts ids when they come, but not those after the end of the reply."""
        self._held += len(chunk.token_ids) - consumed
        beyond = self._held if self.ended else 0
        usage.add(len(chunk.token_ids) - beyond, self._parser.reasoning_tokens - self._reasoning)
        self._reasoning = self._parser.reasoning_tokens

    def _held_json(self, pieces: list[Piece], reason: Literal["stop", "length"]) -> list[Piece]:
        """Holds the answer until it ends; strips what is not JSON from a complete one."""
        held = [p for p in pieces if p.delta.channel == "content"]
        self._json += held
        others = [p for p in pieces if p.delta.channel != "content"]
        if not self.ended or not self._json:
            return others
        text = "".join(p.delta.text for p in self._json)
        text = json_content(text) if reason == "stop" else text
        tokens = [token for p in self._json for token in p.tokens]
        return [*others, Piece(ReplyDelta("content", text, len(tokens)), tokens)]


def _header(context: ServerContext, prompt: Prompt) -> Prompt:
    """The end of a chat prompt from the last assistant opener on: all that the reply's parser needs to know."""
    alone = [context.tokenizer.control_id(token) for task, token in TASK_TOKENS.items() if task != "action"]
    if prompt[-1] in alone:  # it stands in the opener's place
        return prompt[-1:]
    openers = np.flatnonzero(prompt == context.tokenizer.control_id(ASSISTANT))
    return prompt[openers[-1] :]
