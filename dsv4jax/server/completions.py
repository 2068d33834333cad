"""`POST /v1/completions`: raw text completion (http_api section 4)."""

import codecs
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from dsv4jax.chat import CompletionText
from dsv4jax.engine.request import GenerationRequest, PromptLogprobs, TokenChunk
from dsv4jax.server.body import decode_object
from dsv4jax.server.constraints import completion_mask, mask_threads
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.generation import (
    TokenQueue,
    Usage,
    build_request,
    check_admission,
    first_prompt_logprobs,
    in_threads,
    merged_chunks,
    text_ids,
)
from dsv4jax.server.logprobs import GeneratedToken, finite, prompt_logprobs, prompt_rows
from dsv4jax.server.prompts import completion_prompts, visible_text
from dsv4jax.server.protocol import CompletionFields, read_completion
from dsv4jax.server.sse import Reply, data_events, encode_json
from dsv4jax.tokenizer import StreamDecoder


async def completions(context: ServerContext, body: bytes, record: AccessRecord) -> Reply:
    """A JSON body, or the server-sent events of a stream, whose closing aborts the request.

    Raises:
      ApiError: the request is refused, or (without a stream) fails.
    """
    fields = await in_threads(context, _read, context, body, record)
    run = await in_threads(context, _prepare, context, fields, record, threads=mask_threads(context, fields))
    check_admission(context, run.requests)
    if run.fields.stream:
        return data_events(_stream(context, run))
    return await _complete(context, run)


async def render_completion(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """The prompts that `completions` would run: `POST /v1/completions/render`.

    Raises:
      ApiError: the request is refused.
    """
    return await in_threads(context, _render, context, body, record)


@dataclasses.dataclass
class _Run:
    """A request that is ready: one engine request per prompt, `n` choices each."""

    fields: CompletionFields
    response_id: str
    requests: list[GenerationRequest]
    usage: Usage
    choices: "list[_Choice]"


def _read(context: ServerContext, body: bytes, record: AccessRecord) -> CompletionFields:
    return read_completion(context, decode_object(body, undecoded=("prompt",)), record)


def _prepare(context: ServerContext, fields: CompletionFields, record: AccessRecord) -> _Run:
    prompts = completion_prompts(context, fields)
    response_id = f"cmpl-{uuid.uuid4().hex}"
    echoed_logprobs = fields.sampling.top_logprobs if fields.echo else -1
    mask = completion_mask(context, fields)
    requests = [
        build_request(
            context,
            fields,
            prompt,
            response_id if len(prompts) == 1 else f"{response_id}-{number}",
            param="prompt",
            default_max_tokens=None,
            mask=mask,
            prompt_logprobs=max(fields.prompt_logprobs, echoed_logprobs),
        )
        for number, prompt in enumerate(prompts)
    ]
    usage = Usage(record, sum(request.prompt.size for request in requests))
    echoes = [_Echo(context, fields, request) for request in requests]
    choices = [_Choice(context, fields, echo) for echo in echoes for _ in range(fields.n)]
    return _Run(fields, response_id, requests, usage, choices)


def _render(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    fields = _read(context, body, record)
    prompts = completion_prompts(context, fields)
    record.prompt_tokens = sum(prompt.size for prompt in prompts)
    rendered = [
        {"model": fields.model, "count": prompt.size, "prompt_token_ids": prompt.tolist()}
        | ({"prompt_text": visible_text(context.tokenizer, prompt)} if fields.return_prompt_text else {})
        for prompt in prompts
    ]
    return encode_json(rendered)


# ---- choices -------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What one engine step added to a choice; `offsets` are those of `tokens` if there are log-probabilities."""

    text: str
    tokens: list[GeneratedToken]
    offsets: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Echo:
    """A prompt as the response repeats it."""

    def __init__(self, context: ServerContext, fields: CompletionFields, request: GenerationRequest):
        self.prompt = request.prompt
        self.logprobs: PromptLogprobs | None = None  # known from the first chunk on
        self.text, self.offsets = "", []
        if fields.echo:
            self.text = visible_text(context.tokenizer, request.prompt)
            decoder, offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
            for token_id in request.prompt.tolist():
                self.offsets.append(offset)
                offset += len(decoder.decode(context.tokenizer.token_bytes([token_id])))


class _Choice:
    """Turns the ids of one choice into text."""

    def __init__(self, context: ServerContext, fields: CompletionFields, echo: _Echo):
        self.ended = False
        self.echo = echo
        self._fields = fields
        self._silent_id = context.tokenizer.pad_id
        self._text = CompletionText(
            context.tokenizer,
            stop=fields.stop,
            include_stop_str=fields.include_stop_str,
            min_tokens=fields.min_tokens,
        )
        self._tokens = TokenQueue()
        self._has_logprobs = fields.sampling.top_logprobs >= 0
        self._held = 0  # ids pushed whose text is not out yet
        self._decoder = StreamDecoder(context.tokenizer)  # of the ids whose text is out
        self._offset = len(echo.text)

    def push(self, chunk: TokenChunk, usage: Usage) -> _Step:
        if self._fields.max_tokens == 0:  # the engine made a token only to have run the prompt
            self.ended = True
            return _Step("", [], [], "length")
        keeps_tokens = self._has_logprobs or self._fields.return_token_ids
        if keeps_tokens:
            self._tokens.push(chunk)
        text, consumed = self._text.push(text_ids(self._fields, chunk, self._silent_id))
        self.ended = self._text.ended or chunk.finish_reason is not None
        if self.ended:
            rest, more = self._text.finish()
            text, consumed = text + rest, consumed + more
        self._held += len(chunk.token_ids) - consumed
        usage.add(len(chunk.token_ids) - (self._held if self.ended else 0))
        tokens = self._tokens.take(consumed) if keeps_tokens else []
        offsets = [self._next_offset(token.id) for token in tokens] if self._has_logprobs else []
        if not self.ended:
            return _Step(text, tokens, offsets)
        if chunk.finish_reason == "length" and not self._text.ended:
            return _Step(text, tokens, offsets, "length")
        return _Step(text, tokens, offsets, "stop", self._text.stop_string or chunk.stop_reason)

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.push([token_id]))
        return offset


async def _steps(context: ServerContext, run: _Run) -> AsyncGenerator[tuple[int, _Step] | None, None]:
    """The steps of all choices, with the choice's index in the response."""
    names = [run.response_id, run.usage.record.request_id]
    async with contextlib.aclosing(merged_chunks(context, run.requests, names)) as chunks:
        async for item in chunks:
            if item is None:
                yield None
                continue
            number, chunk = item
            index = number * run.fields.n + chunk.index
            choice = run.choices[index]
            if choice.ended:
                continue
            run.usage.took(number, chunk)
            choice.echo.logprobs = first_prompt_logprobs(choice.echo.logprobs, chunk)
            step = choice.push(chunk, run.usage)
            if choice.ended and chunk.finish_reason is None:
                context.engine.stop(run.requests[number].request_id, chunk.index)
            yield index, step


# ---- responses -----------------------------------------------------------------------------------------------


class _Form:
    """The JSON parts that streams and whole responses share."""

    def __init__(self, context: ServerContext, run: _Run):
        self.fields = run.fields
        self._texts = context.token_texts
        self._tokenizer = context.tokenizer
        self.head = {
            "id": run.response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": run.fields.model,
            "system_fingerprint": context.system_fingerprint,
        }

    def choice(
        self, index: int, text: str, tokens: list[GeneratedToken], offsets: list[int], echo: _Echo | None
    ) -> dict[str, Any]:
        """A choice that begins with the prompt of `echo`, if given and asked for."""
        fields = self.fields
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        rows: list[GeneratedToken | int] = list(tokens)  # a bare id has no log-probability
        if echo is not None and fields.echo:
            choice["text"] = echo.text + text
            if fields.sampling.top_logprobs >= 0:
                prompt = echo.prompt.tolist()
                rows = [prompt[0], *prompt_rows(prompt, echo.logprobs, fields.sampling.top_logprobs), *tokens]
                offsets = echo.offsets + offsets
        if fields.sampling.top_logprobs >= 0:
            choice["logprobs"] = self._logprobs(rows, offsets)
        if echo is not None and fields.return_token_ids:
            choice["prompt_token_ids"] = echo.prompt.tolist()
        if echo is not None and fields.return_prompt_text:
            choice["prompt_text"] = visible_text(self._tokenizer, echo.prompt)
        if fields.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice

    def prompt_logprobs(self, echo: _Echo) -> dict[str, Any]:
        if self.fields.prompt_logprobs < 0:
            return {}
        prompt, top = echo.prompt.tolist(), self.fields.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self._texts, prompt, echo.logprobs, top)}

    def _logprobs(self, rows: list[GeneratedToken | int], offsets: list[int]) -> dict[str, Any]:
        names = [self._name(row.id if isinstance(row, GeneratedToken) else row) for row in rows]
        tokens = [row if isinstance(row, GeneratedToken) else None for row in rows]
        return {
            "tokens": names,
            "token_logprobs": [None if token is None else finite(token.logprob) for token in tokens],
            # The token itself last: its value is the one in `token_logprobs`, whether or not it is among the best.
            "top_logprobs": [
                None
                if token is None
                else {self._name(i): finite(p) for i, p in token.top} | {name: finite(token.logprob)}
                for name, token in zip(names, tokens, strict=True)
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return self._texts.name(token_id, self.fields.tokens_as_token_ids)


async def _complete(context: ServerContext, run: _Run) -> bytes:
    steps: list[list[_Step]] = [[] for _ in run.choices]
    async with contextlib.aclosing(_steps(context, run)) as items:
        async for item in items:
            if item is not None:
                steps[item[0]].append(item[1])
    return await in_threads(context, _response, context, run, steps)


def _response(context: ServerContext, run: _Run, steps: list[list[_Step]]) -> bytes:
    form, choices = _Form(context, run), []
    for index, choice in enumerate(run.choices):
        text = "".join(step.text for step in steps[index])
        tokens = [token for step in steps[index] for token in step.tokens]
        offsets = [offset for step in steps[index] for offset in step.offsets]
        end = steps[index][-1]
        choices.append(
            form.choice(index, text, tokens, offsets, choice.echo)
            | {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
            | form.prompt_logprobs(choice.echo)
        )
    return encode_json(form.head | {"choices": choices, "usage": run.usage.json()})


async def _stream(context: ServerContext, run: _Run) -> AsyncGenerator[bytes | None, None]:
    fields, form = run.fields, _Form(context, run)
    head = encode_json(form.head)[:-1] + b',"choices":['
    repeats_prompt = fields.echo or fields.return_token_ids or fields.return_prompt_text
    silent = [True] * len(run.choices)
    async with contextlib.aclosing(_steps(context, run)) as items:
        async for item in items:
            if item is None:
                yield None
                continue
            index, step = item
            if not step.text and step.finish_reason is None and not (fields.echo and silent[index]):
                continue
            parts = (index, step.text, step.tokens, step.offsets)
            if repeats_prompt and silent[index]:
                choice = await in_threads(context, form.choice, *parts, run.choices[index].echo)
            else:
                choice = form.choice(*parts, None)
            silent[index] = False
            choice |= {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
            end = b',"usage":' + encode_json(run.usage.json()) if fields.continuous_usage else b""
            yield head + encode_json(choice) + b"]" + end + b"}"
    if fields.include_usage:
        yield head + b'],"usage":' + encode_json(run.usage.json()) + b"}"
