"""A scripted engine behind the server's routes."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dsv4jax.engine.request import EngineStopped, GenerationRequest, PromptLogprobs, RequestTooLarge, TokenChunk
from dsv4jax.server.context import AccessRecord, ServerContext

THREADS = ThreadPoolExecutor(2)
Script = Callable[[GenerationRequest, int], Sequence[int]]


def logprob(token_id: int) -> float:
    return float(np.float32(-(token_id % 11) / 7))


def best(token_id: int, count: int) -> list[tuple[int, float]]:
    """The `count` best alternatives at a place where `token_id` was chosen: it is among them if it is even."""
    ids = [token_id, token_id + 1, *range(3, 25)] if token_id % 2 == 0 else [i for i in range(3, 30) if i != token_id]
    return [(i, logprob(token_id) if i == token_id else -0.125 * rank) for rank, i in enumerate(ids[:count])]


class ScriptedEngine:
    """Plays token ids in chunks of given sizes; ends choices at EOS, at stop ids and at the token limit."""

    is_alive = is_ready = True

    def __init__(self, script: Script, *, eos_id: int, vocab_size: int, sizes: Sequence[int] = (1,), limit: int = 4096):
        self.script, self.sizes = script, sizes
        self.max_model_len, self.vocab_size, self.eos_id = limit, vocab_size, eos_id
        self.refusal: Exception | None = None  # of check and generate
        self.ending: tuple[str, str | None] | None = None  # finish reason and error instead of the script's end
        self.pause = 0.0  # seconds before each chunk
        self.cached_tokens = self.drafted = self.accepted = 0
        self.requests: list[GenerationRequest] = []
        self.stopped: list[tuple[str, int]] = []
        self.given = 0  # tokens
        self.open = 0  # running iterators

    def check(self, *requests):
        if self.refusal is not None:
            raise self.refusal
        if any(r.prompt.size + r.max_tokens > self.max_model_len for r in requests):
            raise RequestTooLarge("too large")

    def stop(self, request_id, index):
        self.stopped.append((request_id, index))

    def abort(self, request_ids):
        self.ending = ("abort", None)
        return len(request_ids)

    async def generate(self, request):
        self.check(request)
        self.requests.append(request)
        self.open += 1
        try:
            plays = {i: self._chunks(request, i) for i in range(request.n)}
            while plays:
                for index in list(plays):
                    await asyncio.sleep(self.pause)
                    if (request.request_id, index) in self.stopped:
                        del plays[index]
                        continue
                    chunk = next(plays[index])
                    self.given += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish_reason is not None:
                        del plays[index]
        finally:
            self.open -= 1

    def _chunks(self, request, index):
        ids, reason, stop_id = self._played(request, index)
        first, sizes = True, itertools.cycle(self.sizes)
        while ids or first:
            size = next(sizes)
            part, ids = tuple(ids[:size]), ids[size:]
            top = request.sampling.top_logprobs
            end = not ids and self.ending is None
            yield TokenChunk(
                index=index,
                token_ids=part,
                logprobs=tuple(map(logprob, part)) if top >= 0 else (),
                top_logprobs=tuple(tuple(best(i, top)) for i in part) if top >= 0 else (),
                prompt_logprobs=_prompt_logprobs(request) if first else None,
                cached_tokens=self.cached_tokens,
                drafted=self.drafted,
                accepted=self.accepted,
                finish_reason=reason if end else None,
                stop_reason=stop_id if end and reason == "stop" else None,
            )
            first = False
        if self.ending is not None:
            yield TokenChunk(index=index, finish_reason=self.ending[0], error=self.ending[1])

    def _played(self, request, index):
        ids = list(self.script(request, index))[: request.max_tokens]
        for position, token_id in enumerate(ids):
            if token_id == self.eos_id and not request.ignore_eos:
                return ids[: position + 1], "stop", None
            if token_id in request.stop_token_ids:
                return ids[: position + 1], "stop", token_id
        return ids, "length", None


def _prompt_logprobs(request):
    if request.prompt_logprobs < 0:
        return None
    rows = [best(i, request.prompt_logprobs) for i in request.prompt[1:].tolist()]
    shape = (len(rows), request.prompt_logprobs)
    return PromptLogprobs(
        logprobs=np.array([logprob(i) for i in request.prompt[1:].tolist()], np.float32),
        top_tokens=np.array([[i for i, _ in row] for row in rows], np.int32).reshape(shape),
        top_logprobs=np.array([[p for _, p in row] for row in rows], np.float32).reshape(shape),
    )


def context(
    tokenizer, script: Script | Sequence[int] = (), *, grammars=None, sizes=(1,), limit=4096, cached=0, **options
):
    """A server of the given tokenizer whose engine plays `script`, and finds `cached` tokens of each prompt cached."""
    ids = script if callable(script) else lambda request, index: script
    engine = ScriptedEngine(ids, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size, sizes=sizes, limit=limit)
    engine.cached_tokens = cached
    return ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        grammars=grammars,
        model_names=("flash", "other"),
        threads=THREADS,
        created=1,
        system_fingerprint="fp",
        **options,
    )


async def reply(route, server, body, record=None):
    """The JSON of a whole response, or the list of a stream's payloads without the end mark."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await route(server, body, record or AccessRecord("r1"))
    if isinstance(answer, bytes):
        return json.loads(answer)
    events = "".join([event.decode() async for event in answer]).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def call(route, server, body, record=None):
    return asyncio.run(reply(route, server, body, record))


def text_ids(tokenizer, *parts: str) -> list[int]:
    """Ids of parts; a part that is a control token's spelling is the token."""
    ids = []
    for part in parts:
        is_control = part.startswith(("<｜", "<think", "</think", "｜")) and part.endswith((">", "｜"))
        ids += [tokenizer.control_id(part)] if is_control else tokenizer.encode(part).tolist()
    return ids


def break_after_first_chunk(engine: ScriptedEngine, message: str) -> None:
    """Lets the engine raise where no stream can still get a status of its own."""
    whole = engine.generate

    async def generate(request):
        async for chunk in whole(request):
            yield chunk
            raise RuntimeError(message)

    engine.generate = generate


def stopped_engine() -> EngineStopped:
    return EngineStopped("the server is shutting down")
