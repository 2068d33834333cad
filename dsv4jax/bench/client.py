"""A client that puts load on any server of OpenAI's completions or chat completions, and records every request.

| api | endpoint | prompt | outputs in the history |
|---|---|---|---|
| tokens | /v1/completions | token ids | those of the server, which it gives with `return_token_ids` |
| text | /v1/completions | words | the workload's own |
| chat | /v1/chat/completions | words, in messages | the workload's own |

Words are a fixed mapping of ids, about a token each for most tokenizers. Where a server counts another number of tokens
than the workload, expected cached tokens are scaled alike.

Requests are streamed. Token counts are those of the `usage` that ends a stream; an answer without it is an error, and
so is one that breaks off. Nothing is tried again. A request that failed or was cut off has no usage, hence no tokens.
Token ids say how many tokens each chunk has; otherwise `spread` does.

The client is a bottleneck where requests are sent later than the workload wanted (bodies are made beforehand, without
limit of connections), or where its event loop was late with other things; both are measured all the time.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, Literal

import httpx
import numpy as np
from tqdm import tqdm

from dsv4jax.bench.counting import Percentiles, percentiles
from dsv4jax.bench.driver import Workload
from dsv4jax.bench.records import UNFINISHED, Measurement, spread
from dsv4jax.bench.sessions import ASSISTANT, SessionTurn, Tokens

Api = Literal["tokens", "text", "chat"]
_PATHS = {"tokens": "completions", "text": "completions", "chat": "chat/completions"}
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"
    " what all were we when your can said there use an each which she do how their if will up other about out many then"
    " them these so some her would make like him into time has look two more write go see number no way could people my"
    " than first water been call who oil its now find long down day did get come made may part"
).split()
_TICK = 0.02  # seconds between looks at the event loop
_MOST_OF_ERROR = 300  # characters


@dataclasses.dataclass(frozen=True)
class Target:
    """A server.

    Args:
      url: with or without the /v1 at its end.
      model: as requests name it.
      fields: further fields of every request, such as {"ignore_eos": true}.
      timeout: seconds a request may take.

    Raises:
      ValueError: a field is out of range.
    """

    url: str
    model: str
    api: Api = "tokens"
    api_key: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}: must begin with http:// or https://")
        if self.api not in _PATHS:
            raise ValueError(f"api = {self.api!r}: must be one of {tuple(_PATHS)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout}: must be above 0")
        own = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "return_token_ids"}
        if taken := sorted(own & set(self.fields)):
            raise ValueError(f"fields: {taken[0]!r} is set by the client")

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return f"{_base(self.url)}/{_PATHS[self.api]}"

    @property
    def headers(self) -> dict[str, str]:
        return _headers(self.api_key)

    def body(self, turn: SessionTurn) -> bytes:
        """The request of a turn."""
        fields = dict(self.fields) | {"model": self.model, "max_tokens": turn.max_tokens, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if self.api == "chat":
            fields["messages"] = [
                {"role": role if role in ("system", ASSISTANT) else "user", "content": words(part)}
                for role, part in _parts(turn)
            ]
        elif self.api == "text":
            fields["prompt"] = words(turn.prompt)
        else:
            fields |= {"prompt": turn.prompt.tolist(), "return_token_ids": True}
        return json.dumps(fields).encode()


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What a server says about a model; None where it does not say."""

    name: str
    max_context: int | None


def find_model(url: str, api_key: str = "", name: str | None = None) -> ServedModel:
    """The model `name` of a server, or its first one.

    Raises:
      ValueError: the server cannot be reached, or has no such model.
    """
    try:
        reply = httpx.get(f"{_base(url)}/models", headers=_headers(api_key), timeout=30, trust_env=False)
        reply.raise_for_status()
        models = {model["id"]: model.get("max_model_len") for model in reply.json()["data"]}
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"url = {url!r}: no list of models: {type(error).__name__}: {error}") from None
    if not models or name not in (None, *models):
        raise ValueError(f"model = {name!r}: must be one of {sorted(models)}")
    name = next(iter(models)) if name is None else name
    return ServedModel(name, models[name])


def words(tokens: Tokens) -> str:
    """A word for each token, each with a blank in front."""
    return "".join(f" {_WORDS[i % len(_WORDS)]}" for i in tokens.tolist())


@dataclasses.dataclass(frozen=True, eq=False)
class HttpRun:
    """What came of a workload.

    Attributes:
      measurements: in the order in which requests ended; unfinished ones last.
      ended: seconds since the run began.
      interrupted: whether Ctrl-C ended it.
      gave_up: why the client ended it, "" if it did not.
      loop_lag: seconds by which the event loop was late.
      busy: share of the time in which the client's thread computed.
      reports_cached: whether any answer said how many tokens of its prompt were cached. If not, nothing is expected.
    """

    measurements: list[Measurement]
    ended: float
    interrupted: bool
    gave_up: str
    loop_lag: Percentiles | None
    busy: float
    reports_cached: bool


def run_http(
    target: Target,
    workload: Workload,
    *,
    until: float,
    drain_seconds: float = 60.0,
    most_failures: int = 10,
    progress: bool = True,
) -> HttpRun:
    """Runs a workload against a server until its end, `until`, or Ctrl-C; what was measured is kept in any case.

    Args:
      until: seconds since the beginning from which on nothing is sent. What runs then may end.
      drain_seconds: how long it may take; later it is cut off and unfinished.
      most_failures: so many failed requests in a row, and the run is given up.
    """
    return asyncio.run(_Load(target, workload, until, drain_seconds, most_failures, progress).run())


class _Failure(Exception):
    """Ends a request with an error."""


@dataclasses.dataclass
class _Answer:
    """What has come of a request so far."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # of chunks with output
    ids: list[list[int]] = dataclasses.field(default_factory=list)  # of each of them
    finish_reason: str | None = None
    usage: Any = None

    def take(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            raise _Failure(f"error in the stream: {json.dumps(event['error'])[:_MOST_OF_ERROR]}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            names = ("content", "reasoning_content", "reasoning", "tool_calls")
            ids = choice.get("token_ids") or []
            if choice.get("text") or ids or any(delta.get(name) for name in names):
                self.seconds.append(now)
                self.ids.append(ids)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclasses.dataclass(frozen=True)
class _Usage:
    """Tokens as a server counts them. `cached` is None where it does not say; some leave it out instead of a zero."""

    prompt: int
    cached: int | None
    output: int
    drafted: int
    accepted: int

    @classmethod
    def read(cls, found: Any) -> "_Usage":
        """Raises _Failure unless the counts are possible."""
        try:
            cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens")
            details = found.get("completion_tokens_details") or {}
            accepted, rejected = (details.get(f"{name}_prediction_tokens") or 0 for name in ("accepted", "rejected"))
            usage = cls(found["prompt_tokens"], cached, found["completion_tokens"], accepted + rejected, accepted)
            numbers = usage.prompt, usage.cached or 0, usage.output, rejected, accepted
            possible = all(type(n) is int and n >= 0 for n in numbers) and numbers[1] <= usage.prompt
        except (AttributeError, LookupError, TypeError):
            possible = False
        if not possible:
            raise _Failure(f"usage makes no sense: {json.dumps(found)[:_MOST_OF_ERROR]}")
        if not usage.output:
            raise _Failure("the answer has no output tokens")
        return usage


class _Load:
    def __init__(
        self,
        target: Target,
        workload: Workload,
        until: float,
        drain_seconds: float,
        most_failures: int,
        progress: bool,
    ):
        self._target, self._workload = target, workload
        self._until, self._drain_seconds, self._most_failures = until, drain_seconds, most_failures
        self._bar = tqdm(desc="requests", unit="request", disable=not progress)
        self._measurements: list[Measurement] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight: set[asyncio.Task[None]] = set()  # those that have sent their request
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None
        self._sent = self._failures = 0
        self._gave_up = ""
        self._reports_cached = False
        self._late: list[float] = []

    async def run(self) -> HttpRun:
        self._began, interrupted = time.monotonic(), False
        cpu = time.thread_time()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # No time limit of its own: `Target.timeout` bounds the whole request.
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as self._client:
            watch = asyncio.create_task(self._watch())
            self._add_task(self._start_first())
            try:
                await self._until_the_end()
            except asyncio.CancelledError:
                interrupted = True  # Ctrl-C cancels the main task, once
            finally:
                ended, busy = self._now(), time.thread_time() - cpu
                tasks = [watch, *self._tasks]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._bar.close()
        return HttpRun(
            measurements=[self._without_expectation(m) for m in self._measurements],
            ended=ended,
            interrupted=interrupted,
            gave_up=self._gave_up,
            loop_lag=percentiles(self._late),
            busy=busy / max(ended, 1e-9),
            reports_cached=self._reports_cached,
        )

    async def _until_the_end(self) -> None:
        """Waits while turns are to be sent or run; raises what a task raised."""
        while not self._gave_up:
            now, sending = self._now(), self._now() < self._until
            end = self._until if sending else self._until + self._drain_seconds
            if now >= end or not (self._tasks if sending else self._in_flight):
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end - now):
                    await self._changed.wait()
            if self._broken is not None:
                raise self._broken

    def _add_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._in_flight.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
        self._changed.set()

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _watch(self) -> None:
        """Notes again and again how late the event loop is."""
        while True:
            due = time.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            self._late.append(max(0.0, time.monotonic() - due))

    async def _start_first(self) -> None:
        for turn in self._workload.first():
            self._start(turn)
            await asyncio.sleep(max(0.0, turn.arrives - self._now() - 1.0))  # one second ahead of its arrival

    def _start(self, turn: SessionTurn) -> None:
        if turn.arrives < self._until:
            self._add_task(self._turn(turn))

    async def _turn(self, turn: SessionTurn) -> None:
        body = await asyncio.to_thread(self._target.body, turn)
        await asyncio.sleep(max(0.0, turn.arrives - self._now()))
        sent = max(self._now(), turn.arrives)
        if sent >= self._until:
            return
        self._in_flight.add(asyncio.current_task())
        name, answer, usage, output, error = f"{self._sent}", _Answer(), None, np.zeros(0, np.int32), ""
        self._sent += 1
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._request(body, answer)
            usage = _Usage.read(answer.usage)
            output = self._output(answer, usage)
        except asyncio.CancelledError:
            self._record(name, turn, sent, answer, None, UNFINISHED)
            raise
        except TimeoutError:
            error = f"no end of the answer in {self._target.timeout:g} s"
        except _Failure as failure:
            error = f"{failure}"
        except (httpx.HTTPError, AttributeError, LookupError, TypeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error:
            self._record(name, turn, sent, answer, None, "error", error)
            self._failures += 1
        else:
            self._record(name, turn, sent, answer, usage, answer.finish_reason)
            self._failures, self._reports_cached = 0, self._reports_cached or usage.cached is not None
        self._bar.update()
        if self._failures == self._most_failures:
            self._gave_up = f"{self._failures} requests in a row failed, the last one: {error}"
            return
        for following in self._workload.after(turn, output, self._now()):
            self._start(following)

    async def _request(self, body: bytes, answer: _Answer) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **self._target.headers}
        async with self._client.stream("POST", self._target.endpoint, content=body, headers=headers) as response:
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith("text/event-stream"):
                text = (await response.aread()).decode("utf-8", errors="replace")
                raise _Failure(f"HTTP {response.status_code}, {kind or 'no content type'}: {text[:_MOST_OF_ERROR]}")
            async for event in _events(response.aiter_raw()):
                answer.take(event, self._now())
        if answer.finish_reason is None:
            raise _Failure("the stream ended without finish_reason")
        if answer.usage is None:
            raise _Failure("the stream ended without usage: the server must know stream_options.include_usage")

    def _output(self, answer: _Answer, usage: _Usage) -> Tokens:
        """The answer's tokens, or zeros in their place where the history has others."""
        if self._target.api != "tokens":
            return np.zeros(usage.output, np.int32)
        ids = [i for chunk in answer.ids for i in chunk]
        if len(ids) != usage.output:
            raise _Failure(
                f"{len(ids)} token ids for {usage.output} output tokens: the server must know return_token_ids, the api"
                " 'text' does without"
            )
        return np.array(ids, np.int32)

    def _record(
        self,
        name: str,
        turn: SessionTurn,
        sent: float,
        answer: _Answer,
        usage: _Usage | None,
        reason: str,
        error: str = "",
    ) -> None:
        """Records a request; without usage it has no tokens."""
        finished = self._now()
        first = answer.seconds[0] if answer.seconds else None
        seconds, counts, expected = [], [], turn.expected_cached_tokens
        if usage is not None:
            # Where nothing that can be seen came, all came with the end.
            seconds, counts = answer.seconds or [finished], [len(ids) for ids in answer.ids]
            if sum(counts) != usage.output:
                counts = spread(usage.output, len(seconds))
            first = seconds[0]
            if expected is not None:
                expected = round(expected * usage.prompt / len(turn.prompt))
        self._measurements.append(
            Measurement(
                request_id=name,
                session=turn.session,
                turn=turn.turn,
                rank=None,
                arrived=turn.arrives,
                sent=sent,
                scheduled=None,
                first_token=first,
                finished=finished,
                prompt_tokens=usage.prompt if usage else 0,
                cached_tokens=(usage.cached or 0) if usage else 0,
                expected_cached_tokens=expected,
                output_tokens=usage.output if usage else 0,
                chunk_seconds=tuple(seconds),
                chunk_tokens=tuple(counts),
                drafted=usage.drafted if usage else 0,
                accepted=usage.accepted if usage else 0,
                finish_reason=reason,
                error=error,
            )
        )

    def _without_expectation(self, measurement: Measurement) -> Measurement:
        if self._reports_cached:
            return measurement
        return dataclasses.replace(measurement, expected_cached_tokens=None)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events up to [DONE]; what follows is read, so that the connection serves again."""
    left, ended = b"", False
    async for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            ended |= data == b"[DONE]"
            if data and not ended:
                yield json.loads(data)


def _parts(turn: SessionTurn) -> Iterator[tuple[str, Tokens]]:
    begin = 0
    for role, end in turn.parts:
        yield role, turn.prompt[begin:end]
        begin = end


def _base(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
