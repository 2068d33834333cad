"""From fields and a prompt to a request of the engine, and its chunks back, merged over the prompts of a body."""

import asyncio
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from jaxtyping import Int32

from dsv4jax.engine.request import (
    EngineStopped,
    GenerationRequest,
    PromptLogprobs,
    QueueFull,
    RequestTooLarge,
    TokenChunk,
)
from dsv4jax.engine.token_mask import TokenMask
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import (
    context_length_exceeded,
    from_engine,
    internal_error,
    invalid_value,
    request_aborted,
)
from dsv4jax.server.logprobs import GeneratedToken
from dsv4jax.server.protocol import GenerationFields

Prompt = Int32[np.ndarray, " tokens"]

_MOST_WAITING = 16  # chunks; what a slow client leaves beyond that, the engine puts together


async def in_threads(
    context: ServerContext, function: Callable[..., Any], *args: Any, threads: Executor | None = None
) -> Any:
    """Runs `function` outside the event loop: bodies may hold a million tokens."""
    return await asyncio.get_running_loop().run_in_executor(threads or context.threads, function, *args)


def build_request(
    context: ServerContext,
    fields: GenerationFields,
    prompt: Prompt,
    engine_id: str,
    *,
    param: str,
    default_max_tokens: int | None,
    mask: Callable[[], TokenMask] | None,
    prompt_logprobs: int,
) -> GenerationRequest:
    """The engine's request, which fits the context.

    Args:
      param: the field that holds the prompt: "messages" or "prompt".
      default_max_tokens: if the fields give none; None is what the context leaves.

    Raises:
      ApiError: the prompt is empty or too long.
    """
    limit = context.engine.max_model_len
    prompt = _truncated(fields, prompt, limit)
    if not prompt.size:
        raise invalid_value(param, f"{param} is empty: it must hold at least one token")
    left = limit - prompt.size
    max_tokens = fields.max_tokens
    if max_tokens is None:
        max_tokens = max(left if default_max_tokens is None else min(default_max_tokens, left), 1)
    generated = max(max_tokens, 1)  # the engine runs a prompt by making a token, even if only the echo is wanted
    if generated > left:
        unasked = "" if max_tokens else ", also for max_tokens = 0"
        raise context_length_exceeded(
            param,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt.size + generated} tokens ({prompt.size} in the {param}, {generated} in the completion{unasked}). "
            f"Please reduce the length of the {param} or completion.",
        )
    if fields.min_tokens > max_tokens:
        message = f"min_tokens is {fields.min_tokens}: it must be at most max_tokens, which is {max_tokens}"
        raise invalid_value("min_tokens", message)
    return GenerationRequest(
        request_id=engine_id,
        prompt=np.ascontiguousarray(prompt),
        max_tokens=generated,
        n=fields.n,
        sampling=fields.sampling,
        logit_bias=fields.logit_bias,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        mask=mask,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        prompt_logprobs=prompt_logprobs,
        drafts=fields.drafts,
        draft_context=fields.draft_context,
    )


def check_admission(context: ServerContext, requests: Sequence[GenerationRequest]) -> None:
    """Raises ApiError if the engine does not take the requests of one body together."""
    try:
        context.engine.check(*requests)
    except (RequestTooLarge, QueueFull, EngineStopped) as error:
        raise from_engine(error) from error


async def merged_chunks(
    context: ServerContext, requests: Sequence[GenerationRequest], names: Sequence[str]
) -> AsyncGenerator[tuple[int, TokenChunk] | None, None]:
    """Runs requests and gives their chunks with the number of the request as they come.

    None stands for `ping_seconds` without a chunk. Closing the generator aborts what still runs. `names` are those
    that a client may abort the requests by.

    Raises:
      ApiError: the engine refused a request, or a choice failed or was aborted.
    """
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[int, TokenChunk]] = deque()
    room = asyncio.Event()
    room.set()
    wake: asyncio.Future[None] | None = None
    running = len(requests)
    failure: BaseException | None = None
    idle_since, ping_due = loop.time(), False

    def wake_up() -> None:
        if wake is not None and not wake.done():
            wake.set_result(None)

    def tick() -> None:
        nonlocal timer, ping_due
        due = idle_since + context.ping_seconds
        if loop.time() >= due:
            ping_due, due = True, loop.time() + context.ping_seconds
            wake_up()
        timer = loop.call_at(due, tick)

    async def pump(number: int, request: GenerationRequest) -> None:
        async with contextlib.aclosing(context.engine.generate(request)) as chunks:
            async for chunk in chunks:
                waiting.append((number, chunk))
                wake_up()
                if len(waiting) >= _MOST_WAITING:
                    room.clear()
                    await room.wait()

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal running, failure
        running -= 1
        failure = failure or (None if task.cancelled() else task.exception())
        wake_up()

    timer = loop.call_at(idle_since + context.ping_seconds, tick)
    tasks = [asyncio.create_task(pump(number, request)) for number, request in enumerate(requests)]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        with context.running.entered(names, [request.request_id for request in requests]):
            while True:
                while waiting:
                    number, chunk = waiting.popleft()
                    if not waiting:
                        room.set()
                    if chunk.finish_reason in ("error", "abort"):
                        raise _failure(context, chunk)
                    yield number, chunk
                    idle_since = loop.time()
                if failure is not None:
                    raise failure
                if not running:
                    return
                if ping_due:
                    ping_due = False
                    yield None
                    continue
                wake = loop.create_future()
                await wake
    except (RequestTooLarge, QueueFull, EngineStopped) as error:
        raise from_engine(error) from error
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass
class Usage:
    """Token counts of a response while it is made; also kept in the access record.

    Attributes:
      prompt_tokens: over all prompts, each once, however many choices it has.
    """

    record: AccessRecord
    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def __post_init__(self):
        self.record.prompt_tokens = self.prompt_tokens
        self._cached: dict[int, int] = {}
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}  # by prompt and choice: verified, accepted

    def took(self, number: int, chunk: TokenChunk) -> None:
        """Notes a chunk of a prompt before its tokens are counted."""
        if chunk.token_ids and self.record.first_token is None:
            self.record.first_token = time.monotonic() - self.record.started
        # Choices share the prompt: what one of them computed was computed.
        cached = min(self._cached.get(number, chunk.cached_tokens), chunk.cached_tokens)
        if self._cached.get(number) != cached:
            self._cached[number] = cached
            self.record.cached_tokens = sum(self._cached.values())
        if chunk.drafted:
            self._drafts[number, chunk.index] = chunk.drafted, chunk.accepted

    def add(self, completion_tokens: int, reasoning_tokens: int = 0) -> None:
        self.completion_tokens += completion_tokens
        self.reasoning_tokens += reasoning_tokens
        self.record.output_tokens = self.completion_tokens

    @property
    def predictions(self) -> dict[str, int]:
        """Accepted and rejected drafts, to stand among the details of the output tokens; empty if there were none."""
        if not self._drafts:
            return {}
        drafted, accepted = map(sum, zip(*self._drafts.values(), strict=True))
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    def json(self) -> dict[str, Any]:
        cached = self.record.cached_tokens
        details = {"reasoning_tokens": self.reasoning_tokens} | self.predictions
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details,
            "prompt_cache_hit_tokens": cached,
            "prompt_cache_miss_tokens": self.prompt_tokens - cached,
        }


class TokenQueue:
    """The generated tokens of one choice that no text has consumed yet, in order."""

    def __init__(self):
        self._tokens: deque[GeneratedToken] = deque()

    def push(self, chunk: TokenChunk) -> None:
        logprobs = chunk.logprobs or (0.0,) * len(chunk.token_ids)
        tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        self._tokens.extend(map(GeneratedToken, chunk.token_ids, logprobs, tops))

    def take(self, count: int) -> list[GeneratedToken]:
        return [self._tokens.popleft() for _ in range(count)]


def text_ids(fields: GenerationFields, chunk: TokenChunk, silent_id: int) -> tuple[int, ...]:
    """The chunk's ids whose text is output: `silent_id` takes the place of a stop token that is not."""
    if chunk.stop_reason is None or fields.include_stop_str:
        return chunk.token_ids
    return (*chunk.token_ids[:-1], silent_id)


def first_prompt_logprobs(known: PromptLogprobs | None, chunk: TokenChunk) -> PromptLogprobs | None:
    return chunk.prompt_logprobs if known is None else known


def _truncated(fields: GenerationFields, prompt: Prompt, limit: int) -> Prompt:
    """The last tokens of the prompt, as many as `truncate_prompt_tokens` allows."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(limit - max(fields.max_tokens or 1, 1), 0)
    return prompt[max(prompt.size - keep, 0) :]


def _failure(context: ServerContext, chunk: TokenChunk) -> Exception:
    if chunk.finish_reason == "error":
        return internal_error(chunk.error or "generation failed")
    if not context.engine.is_ready:  # it takes no more requests, and has aborted this one itself
        return from_engine(EngineStopped("the server is shutting down"))
    return request_aborted()
