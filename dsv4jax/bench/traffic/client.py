"""A client that puts load on any server that `http_target` can ask, and records every request.

Nothing is tried again. A request that failed or was cut off has no usage, hence no tokens. Token ids say how many
tokens each chunk has; otherwise `spread` does. Where a server counts another number of tokens than the workload,
expected cached tokens are scaled alike.

The client is a bottleneck where requests are sent later than the workload wanted (bodies are made beforehand, without
limit of connections), or where its event loop was late with other things; both are measured all the time.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from dsv4jax.bench.traffic.counting import Percentiles, percentiles
from dsv4jax.bench.traffic.driver import Workload
from dsv4jax.bench.traffic.http_target import Answer, RequestFailed, Target, Usage, ask, output_tokens
from dsv4jax.bench.traffic.records import UNFINISHED, Measurement, spread
from dsv4jax.bench.traffic.sessions import SessionTurn

_TICK = 0.02  # seconds between looks at the event loop


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
        interrupted = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # No time limit of its own: `Target.timeout` bounds the whole request.
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as self._client:
            self._began, cpu = time.monotonic(), time.thread_time()
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
        name, answer, usage, output, error = f"{self._sent}", Answer(), None, np.zeros(0, np.int32), ""
        self._sent += 1
        try:
            async with asyncio.timeout(self._target.timeout):
                await ask(self._client, self._target, body, answer, self._now)
            usage = Usage.read(answer.usage)
            output = output_tokens(self._target, answer, usage)
        except asyncio.CancelledError:
            self._record(name, turn, sent, answer, None, UNFINISHED)
            raise
        except TimeoutError:
            error = f"no end of the answer in {self._target.timeout:g} s"
        except RequestFailed as failure:
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

    def _record(
        self,
        name: str,
        turn: SessionTurn,
        sent: float,
        answer: Answer,
        usage: Usage | None,
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
