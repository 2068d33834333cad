"""`POST /v1/chat/completions` (http_api section 3)."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dsv4jax.chat import ReplyDelta, render_chat
from dsv4jax.chat.encode import THINK_END
from dsv4jax.server.body import decode_object
from dsv4jax.server.chat_core import ChatTurn, Piece, ReplyStep, chat_prompt, prepare_chat, run_chat
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.generation import in_threads
from dsv4jax.server.logprobs import GeneratedToken, chat_logprob, prompt_logprobs
from dsv4jax.server.protocol import ChatFields, read_chat
from dsv4jax.server.sse import Reply, data_events, encode_json


async def chat_completions(context: ServerContext, body: bytes, record: AccessRecord) -> Reply:
    """A JSON body, or the server-sent events of a stream, whose closing aborts the request.

    Raises:
      ApiError: the request is refused, or (without a stream) fails.
    """
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    turn = await prepare_chat(context, lambda: read_chat(context, decode_object(body), record), response_id, record)
    if turn.fields.stream:
        return data_events(_stream(context, turn))
    return await _complete(context, turn)


async def render_chat_completion(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """The prompt that `chat_completions` would run: `POST /v1/chat/completions/render`.

    Raises:
      ApiError: the request is refused.
    """
    return await in_threads(context, _render, context, body, record)


def prompt_text(fields: ChatFields) -> str:
    """The prompt of an accepted request as text."""
    return render_chat(fields.template.messages, **fields.template.options())


def _render(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    fields = read_chat(context, decode_object(body), record)
    prompt = chat_prompt(context, fields.template)
    record.prompt_tokens = prompt.size
    rendered = {"model": fields.model, "count": prompt.size, "prompt_token_ids": prompt.tolist()}
    return encode_json(rendered | ({"prompt_text": prompt_text(fields)} if fields.return_prompt_text else {}))


class _Form:
    """The JSON parts that streams and whole responses share."""

    def __init__(self, context: ServerContext, turn: ChatTurn):
        self.fields = turn.fields
        self._texts = context.token_texts
        self.head = {
            "id": turn.response_id,
            "object": "chat.completion.chunk" if turn.fields.stream else "chat.completion",
            "created": int(time.time()),
            "model": turn.fields.model,
            "system_fingerprint": context.system_fingerprint,
        }
        self._prompt = turn.request.prompt

    def prompt_parts(self) -> dict[str, Any]:
        parts = {}
        if self.fields.return_token_ids:
            parts["prompt_token_ids"] = self._prompt.tolist()
        if self.fields.return_prompt_text:
            parts["prompt_text"] = prompt_text(self.fields)
        return parts

    def logprobs(self, reasoning: list[GeneratedToken], content: list[GeneratedToken]) -> dict[str, Any] | None:
        if self.fields.sampling.top_logprobs < 0:
            return None
        texts, as_id = self._texts, self.fields.tokens_as_token_ids
        return {
            "content": [chat_logprob(texts, token, as_id) for token in content],
            "reasoning_content": [chat_logprob(texts, token, as_id) for token in reasoning],
        }

    def prompt_logprobs(self, turn: ChatTurn) -> dict[str, Any]:
        if self.fields.prompt_logprobs < 0:
            return {}
        prompt = self._prompt.tolist()
        return {
            "prompt_logprobs": prompt_logprobs(self._texts, prompt, turn.prompt_logprobs, self.fields.prompt_logprobs)
        }


class _Reasoning:
    """Where the reasoning of one choice goes: its own field, nowhere, or into the answer."""

    def __init__(self, fields: ChatFields):
        self._hidden = not fields.include_reasoning
        self._inline = fields.include_reasoning and not fields.separate_reasoning
        self._open = False

    def placed(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces to send: hidden reasoning without its text, reasoning inside the answer with `</think>` after."""
        if not (self._hidden or self._inline):
            return pieces
        placed = []
        for piece in pieces:
            delta = piece.delta
            if delta.channel == "reasoning" and self._inline:
                self._open = self._open or bool(delta.text)
                delta = dataclasses.replace(delta, channel="content")
            elif delta.channel == "reasoning":
                delta = dataclasses.replace(delta, text="")
            elif self._open and delta.channel == "content" and delta.text:
                self._open = False
                delta = dataclasses.replace(delta, text=THINK_END + delta.text)
            elif self._open and delta.channel == "tool_call":
                self._open = False
                placed.append(Piece(ReplyDelta("content", THINK_END), []))
            placed.append(Piece(delta, piece.tokens))
        return placed


# ---- whole responses ---------------------------------------------------------------------------------------


class _Message:
    """One choice while it grows."""

    def __init__(self):
        self.texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self.tokens: dict[str, list[GeneratedToken]] = {"reasoning": [], "content": []}
        self.token_ids: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.finish: tuple[str | None, str | int | None] = (None, None)

    def add(self, step: ReplyStep, pieces: list[Piece]) -> None:
        for piece in pieces:
            delta = piece.delta
            self.token_ids += [token.id for token in piece.tokens]
            self.tokens["reasoning" if delta.channel == "reasoning" else "content"] += piece.tokens
            if delta.channel == "tool_call":
                self.calls.append(_call(delta))
            elif delta.channel == "arguments":
                self.calls[-1]["function"]["arguments"].append(delta.text)
            else:
                self.texts[delta.channel].append(delta.text)
        if step.finish_reason is not None:
            self.finish = (step.finish_reason, step.stop_reason)


async def _complete(context: ServerContext, turn: ChatTurn) -> bytes:
    fields, form = turn.fields, _Form(context, turn)
    messages = [_Message() for _ in turn.choices]
    reasoning = [_Reasoning(fields) for _ in turn.choices]
    async with contextlib.aclosing(run_chat(context, turn)) as steps:
        async for step in steps:
            if step is not None:
                messages[step.index].add(step, reasoning[step.index].placed(step.pieces))
    return await in_threads(context, _response, form, turn, messages)


def _response(form: _Form, turn: ChatTurn, messages: list[_Message]) -> bytes:
    return encode_json(
        {
            **form.head,
            "choices": [_choice(form, index, message) for index, message in enumerate(messages)],
            "usage": turn.usage.json(),
            **form.prompt_parts(),
            **form.prompt_logprobs(turn),
        }
    )


def _choice(form: _Form, index: int, message: _Message) -> dict[str, Any]:
    reasoning = "".join(message.texts["reasoning"]) or None
    content = "".join(message.texts["content"])
    if message.calls:
        content = content or None
    for call in message.calls:
        call["function"]["arguments"] = "".join(call["function"]["arguments"])
    shown = message.tokens["reasoning"] if form.fields.include_reasoning else []
    finish_reason, stop_reason = message.finish
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
            **({"tool_calls": message.calls} if message.calls else {}),
        },
        "logprobs": form.logprobs(shown, message.tokens["content"]),
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        **({"token_ids": message.token_ids} if form.fields.return_token_ids else {}),
    }


def _call(delta: ReplyDelta) -> dict[str, Any]:
    return {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": []}}


# ---- streams -----------------------------------------------------------------------------------------------


async def _stream(context: ServerContext, turn: ChatTurn) -> AsyncGenerator[bytes | None, None]:
    fields, form = turn.fields, _Form(context, turn)
    streams = [_ChoiceStream(form) for _ in turn.choices]
    head = encode_json(form.head)[:-1] + b',"choices":['
    first_parts = {}
    if fields.return_token_ids or fields.return_prompt_text:
        first_parts = await in_threads(context, form.prompt_parts)
    async with contextlib.aclosing(run_chat(context, turn)) as steps:
        async for step in steps:
            if step is None:
                yield None
                continue
            for choice in streams[step.index].choices(step):
                end = b"]"
                if fields.continuous_usage:
                    end += b',"usage":' + encode_json(turn.usage.json())
                if first_parts:
                    end += b"," + encode_json(first_parts)[1:-1]
                    first_parts = {}
                yield head + encode_json(choice) + end + b"}"
    if fields.include_usage:
        yield head + b'],"usage":' + encode_json(turn.usage.json()) + b"}"


class _ChoiceStream:
    """The chunks of one choice."""

    def __init__(self, form: _Form):
        self._form = form
        self._reasoning = _Reasoning(form.fields)
        self._started = False
        self._unsent: list[Piece] = []  # without text: their tokens ride with the next chunk

    def choices(self, step: ReplyStep) -> list[dict[str, Any]]:
        """The `choices` entries to send for a step, one per chunk."""
        entries = []
        if not self._started:
            self._started = True
            entries.append(self._entry(step.index, {"role": "assistant", "content": ""}, []))
        for piece in self._reasoning.placed(step.pieces):
            if not piece.delta.text and piece.delta.channel != "tool_call":
                self._unsent.append(piece)
                continue
            entries.append(self._entry(step.index, _delta(piece.delta), [*self._unsent, piece]))
            self._unsent = []
        if step.finish_reason is not None:
            last = self._entry(step.index, {}, self._unsent)
            entries.append(last | {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason})
        return entries

    def _entry(self, index: int, delta: dict[str, Any], pieces: list[Piece]) -> dict[str, Any]:
        form, fields = self._form, self._form.fields
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if fields.sampling.top_logprobs >= 0 and pieces:
            reasoning = [t for p in pieces if p.delta.channel == "reasoning" for t in p.tokens]
            content = [t for p in pieces if p.delta.channel != "reasoning" for t in p.tokens]
            entry["logprobs"] = form.logprobs(reasoning if fields.include_reasoning else [], content)
        if fields.return_token_ids:
            entry["token_ids"] = [token.id for piece in pieces for token in piece.tokens]
        return entry


def _delta(delta: ReplyDelta) -> dict[str, Any]:
    if delta.channel == "content":
        return {"content": delta.text}
    if delta.channel == "reasoning":
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    if delta.channel == "tool_call":
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
