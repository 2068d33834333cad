"""The engine in a thread of its own, and its asyncio side: requests in, streams of token chunks out."""

import asyncio
import collections
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf

import numpy as np

from dsv4jax.engine.engine import Engine
from dsv4jax.engine.records import BalanceStats, EngineStats, Observer
from dsv4jax.engine.request import (
    EngineStopped,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    QueueFull,
    RequestTooLarge,
    TokenChunk,
)
from dsv4jax.engine.sequence import Sequence

_log = logging.getLogger(__name__)
_HEARTBEAT = 1.0
_LONG_PROMPT = 16384


class _Stream:
    """One request on its way to its reader.

    `seen` is written by the engine's thread only: per choice, how many tokens there are, and why it ended. Reading late
    loses nothing and holds nobody up: the tokens wait in their choice and come as one chunk.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.open: dict[int, Sequence] = {}  # empty until the choices are prepared
        self.submitted = self.aborted = False
        self.seen: dict[int, tuple[int, FinishReason | None]] = {}
        self.loop = loop
        self.news = asyncio.Event()
        self._timer = loop.call_later(_HEARTBEAT, self._look_again)

    def close(self) -> None:
        """Nobody reads any more."""
        self._timer.cancel()

    def _look_again(self) -> None:
        # A silent engine must be noticed; a timeout around each wait would cost more than the rest of a chunk.
        self.news.set()
        self._timer = self.loop.call_later(_HEARTBEAT, self._look_again)


class AsyncEngine:
    """Serves an `Engine` to coroutines.

    Args:
      engine: owned by this object's thread from `start` on.
      observer: is told about requests that are turned away.
      max_model_len, vocab_size: of the model, for whoever builds requests.
      health_timeout: seconds without a sign of life after which the engine counts as dead.
      compilations, balance: asked for statistics, from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        *,
        max_model_len: int,
        vocab_size: int,
        health_timeout: float = 60.0,
        compilations: Callable[[], int] = lambda: 0,
        balance: Callable[[], Mapping[str, BalanceStats]] = dict,
    ):
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._engine, self._observer = engine, observer
        self._health_timeout, self._compilations, self._balance = health_timeout, compilations, balance
        self._lock = threading.Condition()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._announced_choices = self._announced_tokens = 0  # of requests not yet in the scheduler
        self._streams: dict[str, _Stream] = {}
        self._stream_of: dict[Sequence, _Stream] = {}  # the engine thread's
        self._heartbeat = time.monotonic()
        self._ready = self._draining = self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._heartbeat = time.monotonic()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's loop gave a sign of life lately."""
        if self._failure is not None or not self._thread.is_alive():
            return False
        return time.monotonic() - self._heartbeat < self._health_timeout

    @property
    def is_ready(self) -> bool:
        """Whether a token was produced since the start and new requests are taken."""
        return self._ready and self.is_alive and not self._draining

    async def warm_up(self) -> None:
        """Produces a token, which makes the engine ready.

        Raises:
          EngineStopped: it could not.
        """
        request = GenerationRequest("warm-up", np.zeros(1, np.int32), max_tokens=2, ignore_eos=True)
        reason = None
        async for chunk in self.generate(request):
            reason = chunk.finish_reason
        if reason != "length":
            raise EngineStopped(f"no token could be produced: the first request ended with {reason!r}")
        self._ready = True

    def check(self, *requests: GenerationRequest) -> None:
        """Whether `generate` would take the requests now, all of them.

        Raises:
          RequestTooLarge, QueueFull, EngineStopped: it would not.
          ValueError: a token id or a bias is out of range, which would fail the step of all requests.
        """
        for request in requests:
            _check_values(request, self.vocab_size)
        try:
            with self._lock:
                self._check(requests)
        except RequestTooLarge:
            self._observer.rejected("too_large")
            raise
        except QueueFull:
            self._observer.rejected("queue_full")
            raise
        except EngineStopped:
            self._observer.rejected("stopped")
            raise

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Chunks of all choices until each has ended; closing the iterator aborts the rest.

        Raises:
          RequestTooLarge, QueueFull, EngineStopped: before anything starts; the last also when the engine dies.
          ValueError: the request id is in use, or as `check`.
        """
        self.check(request)
        if request.request_id in self._streams:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = _Stream(loop)
        with self._lock:
            self._announce(request, 1)
        try:
            if len(request.prompt) < _LONG_PROMPT:
                sequences = self._engine.scheduler.prepare(request)
            else:
                sequences = await loop.run_in_executor(None, self._engine.scheduler.prepare, request)
            if stream.aborted:
                for index in range(request.n):
                    yield TokenChunk(index=index, finish_reason="abort")
                return
            stream.open = {s.index: s for s in sequences}
            stream.submitted = True
            self._command(lambda: self._submit(sequences, stream))
            async for chunk in self._chunks(stream):
                yield chunk
        finally:
            stream.close()
            del self._streams[request.request_id]
            self._finish(stream, stream.open.values(), "abort")
            if not stream.submitted:
                with self._lock:
                    self._announce(request, -1)

    def stop(self, request_id: str, index: int) -> None:
        """Ends a choice as complete: its reader saw all it wanted. No chunk follows for it."""
        stream = self._streams.get(request_id)
        if stream is not None and index in stream.open:
            self._finish(stream, [stream.open.pop(index)], "stop")
            stream.news.set()

    def abort(self, request_ids: ListOf[str]) -> int:
        """Ends requests; their readers get finish_reason "abort". Returns how many were there."""
        found = [self._streams[i] for i in request_ids if i in self._streams]
        for stream in found:
            stream.aborted = True
            self._finish(stream, stream.open.values(), "abort")
        return len(found)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._command(self._engine.scheduler.forget_prefixes)

    def stats(self) -> EngineStats:
        """The engine now."""
        return self._engine.stats(self._compilations(), self._balance())

    async def drain(self, timeout: float) -> None:
        """Takes no more requests, lets the running ones end for up to `timeout` seconds, aborts the rest, and stops."""
        self._draining = True
        end = time.monotonic() + timeout
        while self._streams and time.monotonic() < end and self.is_alive:
            await asyncio.sleep(0.05)
        self.abort(list(self._streams))
        end = time.monotonic() + 5
        while self._streams and time.monotonic() < end and self.is_alive:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stops the thread after the step it is in; readers that still wait get EngineStopped."""
        self._draining = self._stopping = True
        self._command(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for stream in self._streams.values():
            stream.loop.call_soon_threadsafe(stream.news.set)

    async def _chunks(self, stream: _Stream) -> AsyncIterator[TokenChunk]:
        while stream.open:
            await stream.news.wait()
            stream.news.clear()
            for index, sequence in list(stream.open.items()):
                if index not in stream.open:  # stopped by the reader of the chunk before
                    continue
                count, reason = stream.seen.get(index, (0, None))
                if count > sequence.unsent or reason is not None:
                    if reason is not None:
                        del stream.open[index]
                    yield _chunk(sequence, count, reason)
            if stream.open and (self._stopping or not self.is_alive):
                raise EngineStopped("the engine has stopped" if self._stopping else "the engine does not answer")

    def _finish(self, stream: _Stream, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        if ended := list(sequences):
            self._command(lambda: self._end(ended, reason))

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    def _announce(self, request: GenerationRequest, sign: int) -> None:
        self._announced_choices += sign * request.n
        self._announced_tokens += sign * len(request.prompt)

    def _check(self, requests: ListOf[GenerationRequest]) -> None:
        if self._draining or self._stopping:
            raise EngineStopped("the server is shutting down")
        if not self.is_alive:
            raise EngineStopped("the engine does not answer")
        self._engine.scheduler.check(
            *requests, announced_choices=self._announced_choices, announced_tokens=self._announced_tokens
        )

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            checked = False  # since the engine ran last
            while not self._stopping:
                self._heartbeat = time.monotonic()
                self._take_commands()
                if not self._engine.idle:
                    self._deliver(self._engine.step())
                    checked = False
                    continue
                with self._lock:
                    called = bool(self._commands) or self._lock.wait(_HEARTBEAT)
                if not called and not checked:
                    self._engine.scheduler.check_integrity()
                    checked = True
        except BaseException as failure:
            _log.exception("the engine has failed")
            self._failure = failure
            self._deliver(list(self._stream_of))

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _submit(self, sequences: list[Sequence], stream: _Stream) -> None:
        for sequence in sequences:
            self._stream_of[sequence] = stream
        with self._lock:
            self._announce(sequences[0].request, -1)
            self._engine.scheduler.submit(sequences, self._engine.executor.now())

    def _end(self, sequences: list[Sequence], reason: FinishReason) -> None:
        ended = [s for s in sequences if s in self._stream_of]
        for sequence in ended:
            self._engine.finish(sequence, reason)
        self._deliver(ended)

    def _deliver(self, sequences: list[Sequence]) -> None:
        """Tells the readers, with one call into each event loop."""
        waiting: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for sequence in sequences:
            stream = self._stream_of.get(sequence)
            if stream is None:
                continue
            stream.seen[sequence.index] = (len(sequence.generated), sequence.finish_reason)
            if sequence.finish_reason is not None:
                del self._stream_of[sequence]
            waiting.setdefault(stream.loop, []).append(stream)
        for loop, streams in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake, streams)
            except RuntimeError:  # the reader's event loop is closed
                _log.warning("%d readers are gone with their event loop", len(streams))


def _check_values(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValueError for what the executor could not pack."""
    prompt = request.prompt
    if not 0 <= prompt.min() <= prompt.max() < vocab_size:
        place = int(np.flatnonzero((prompt < 0) | (prompt >= vocab_size))[0])
        raise ValueError(f"prompt[{place}] = {prompt[place]}: must be from 0 to {vocab_size - 1}")
    for token, value in request.logit_bias.items():
        if not (0 <= token < vocab_size and -100 <= value <= 100):
            raise ValueError(f"logit_bias[{token}] = {value}: must be -100 to 100 for a token below {vocab_size}")


def _wake(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.news.set()


def _chunk(sequence: Sequence, count: int, reason: FinishReason | None) -> TokenChunk:
    first, sequence.unsent = sequence.unsent, count
    wants = sequence.sampling.top_logprobs >= 0
    prompt_logprobs = None
    if first == 0 and count and sequence.prompt_logprobs:
        parts = sequence.prompt_logprobs
        prompt_logprobs = PromptLogprobs(
            *(np.concatenate([getattr(p, name) for p in parts]) for name in ("logprobs", "top_tokens", "top_logprobs"))
        )
    return TokenChunk(
        index=sequence.index,
        token_ids=tuple(sequence.generated[first:count]),
        logprobs=tuple(sequence.logprobs[first:count]) if wants else (),
        top_logprobs=tuple(sequence.top_logprobs[first:count]) if wants else (),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=max(sequence.first_cached, 0),
        drafted=sequence.drafted,
        accepted=sequence.accepted,
        finish_reason=reason,
        stop_reason=sequence.stop_reason if reason == "stop" else None,
        error=sequence.error,
    )
