"""Runs a workload through an engine in this process, on whichever executor, and records every request.

An open loop has turns that arrive when they arrive; in a closed loop one arrives some time after the end of another.
Both are a `Workload`. There is no client between: a turn is sent when it arrives, and the engine sees it after the step
that is running then. On the virtual clock the host takes no time.
"""

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from tqdm import tqdm

from dsv4jax.bench.traffic.records import UNFINISHED, Measurement, StepRecords
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.records import StepRecord
from dsv4jax.engine.request import GenerationRequest, QueueFull
from dsv4jax.engine.sequence import Sequence
from dsv4jax.sampling_settings import RequestSampling

GREEDY = RequestSampling(temperature=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One request of a workload.

    Args:
      session: "" where there are no sessions.
      turn: 0 is the first of its session.
      arrives: seconds since the run began.
      max_tokens: generated whatever they are; EOS does not end a turn.
      expected_cached_tokens: of the prompt, that an unlimited prefix cache would hold; None if the workload cannot say.
      rank: the data-parallel rank that must run it; None for the one the scheduler chooses.
      drafts: as in `GenerationRequest`.
    """

    session: str
    turn: int
    arrives: float
    prompt: Int32[np.ndarray, " tokens"]
    max_tokens: int
    expected_cached_tokens: int | None = None
    rank: int | None = None
    drafts: int | None = None


class Workload(Protocol):
    """What is asked, and when."""

    def first(self) -> Iterable[Turn]:
        """Turns that wait for no other, ascending by arrival; taken as the run gets to them."""

    def after(self, turn: Turn, output: Int32[np.ndarray, " tokens"], finished: float) -> ListOf[Turn]:
        """What follows a turn, in its session or others; called for each turn, with the same object, when it has ended.

        Args:
          output: none if it failed.
          finished: when it ended, in seconds since the run began; nothing may arrive before.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class OpenLoop:
    """Turns that wait for no other."""

    turns: Iterable[Turn]

    def first(self) -> Iterable[Turn]:
        return self.turns

    def after(self, turn: Turn, output: Int32[np.ndarray, " tokens"], finished: float) -> ListOf[Turn]:
        return ()


@runtime_checkable
class VirtualExecutor(Executor, Protocol):
    """An executor whose clock has to be told that time passes."""

    def advance(self, seconds: float) -> None:
        """Lets time pass."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What came of a workload.

    Attributes:
      measurements: in the order in which requests ended; unfinished ones last.
      steps: of the engine.
      step_ends: when the result of each was there, in seconds since the run began.
      began: the executor's clock at the beginning.
      ended: seconds since then.
      interrupted: whether Ctrl-C ended it. The engine is in no defined state then.
    """

    measurements: list[Measurement]
    steps: list[StepRecord]
    step_ends: list[float]
    began: float
    ended: float
    interrupted: bool


@dataclasses.dataclass(eq=False)
class _Open:
    """A turn in the engine."""

    turn: Turn
    queued: float
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)


def run_engine(
    engine: Engine, executor: Executor, workload: Workload, *, until: float | None = None, progress: bool = True
) -> Run:
    """Runs a workload to its end, until `until`, or until Ctrl-C; what was measured is kept in any case.

    A turn that the engine refuses is a failed request. Of a run that `until` ends, requests that still run or wait are
    aborted and recorded as unfinished, and the engine is idle afterwards.

    Args:
      engine: idle; its own observer is told nothing of the run.
      executor: whose clock counts: the engine's, or the one inside it.
      until: seconds since the beginning at which no further step begins.

    Raises:
      ValueError: the engine is not idle; turns of `first` do not ascend; a turn arrives before the one it follows ends.
    """
    if not engine.idle:
        raise ValueError("engine: must be idle, it has requests")
    with tqdm(desc="requests", unit="request", disable=not progress) as bar:
        return _Driver(engine, executor, workload, bar).run(float("inf") if until is None else until)


class _Driver:
    def __init__(self, engine: Engine, executor: Executor, workload: Workload, bar: tqdm):
        self._engine, self._executor, self._workload, self._bar = engine, executor, workload, bar
        self._began = executor.now()
        self._first = self._ascending(workload.first())
        self._waiting: list[tuple[float, int, Turn]] = []  # turns that have not arrived yet, by arrival
        self._numbers = itertools.count()
        self._open: dict[Sequence, _Open] = {}
        self._measurements: list[Measurement] = []
        self._take_first()

    def run(self, until: float) -> Run:
        engine, interrupted = self._engine, False
        observer, engine.observer = engine.observer, (seen := StepRecords(self._executor.now))
        try:
            while (now := self._now()) < until and (self._waiting or not engine.idle):
                if engine.idle and self._waiting[0][0] > now:
                    now = min(self._waiting[0][0], until)
                    self._let_pass(now - self._now())
                self._submit(now)
                if not engine.idle:
                    self._take(engine.step())
        except KeyboardInterrupt:
            interrupted = True
        finally:
            engine.observer = observer
        ended = self._now()
        for sequence, opened in self._open.items():
            self._measurements.append(self._measurement(sequence, opened, ended, UNFINISHED))
        if not interrupted:
            for sequence in self._open:
                engine.finish(sequence, "abort")
            while not engine.idle:
                engine.step()
        ends = [end - self._began for end in seen.ends]
        return Run(self._measurements, seen.steps, ends, self._began, ended, interrupted)

    def _now(self) -> float:
        return self._executor.now() - self._began

    def _let_pass(self, seconds: float) -> None:
        if isinstance(self._executor, VirtualExecutor):
            self._executor.advance(max(0.0, seconds))
        else:
            time.sleep(max(0.0, seconds))

    def _ascending(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        last = 0.0
        for turn in turns:
            if turn.arrives < last:
                raise ValueError(
                    f"arrives = {turn.arrives}: must not be before {last}, where the turn before it arrives"
                )
            last = turn.arrives
            yield turn

    def _take_first(self) -> None:
        """Lets the next of the first turns wait for its arrival."""
        if (turn := next(self._first, None)) is not None:
            heapq.heappush(self._waiting, (turn.arrives, next(self._numbers), turn))
        self._next_first = turn

    def _submit(self, now: float) -> None:
        """Gives the engine what has arrived."""
        while self._waiting and self._waiting[0][0] <= now:
            _, number, turn = heapq.heappop(self._waiting)
            if turn is self._next_first:
                self._take_first()
            self._submit_one(number, turn)

    def _submit_one(self, number: int, turn: Turn) -> None:
        scheduler, begin = self._engine.scheduler, self._executor.now()
        try:
            request = GenerationRequest(
                f"{number}",
                turn.prompt,
                turn.max_tokens,
                sampling=GREEDY,
                ignore_eos=True,
                rank=turn.rank,
                drafts=turn.drafts,
            )
            scheduler.check(request)
        except (QueueFull, ValueError) as error:
            self._refused(number, turn, f"{error}")
            return
        (sequence,) = scheduler.prepare(request)
        scheduler.submit([sequence], self._began + turn.arrives)
        # What the host did before this request is not its admission, it waited meanwhile.
        self._open[sequence] = _Open(turn, turn.arrives + (self._executor.now() - begin))

    def _refused(self, number: int, turn: Turn, error: str) -> None:
        now = max(self._now(), turn.arrives)
        self._measurements.append(
            Measurement(
                request_id=f"{number}",
                session=turn.session,
                turn=turn.turn,
                rank=None,
                arrived=turn.arrives,
                sent=turn.arrives,
                scheduled=None,
                first_token=None,
                finished=now,
                prompt_tokens=len(turn.prompt),
                cached_tokens=0,
                expected_cached_tokens=turn.expected_cached_tokens,
                output_tokens=0,
                chunk_seconds=(),
                chunk_tokens=(),
                drafted=0,
                accepted=0,
                finish_reason="error",
                error=error,
            )
        )
        self._follow(turn, np.zeros(0, np.int32), now)

    def _take(self, news: list[Sequence]) -> None:
        """Records new tokens and ends."""
        now = self._now()
        for sequence in news:
            opened = self._open[sequence]
            if new := len(sequence.generated) - sequence.unsent:
                opened.seconds.append(now)
                opened.tokens.append(new)
                sequence.unsent += new
            if sequence.finish_reason is not None:
                del self._open[sequence]
                self._measurements.append(self._measurement(sequence, opened, now, sequence.finish_reason))
                self._bar.update()
                failed = sequence.finish_reason == "error"
                self._follow(opened.turn, np.array([] if failed else sequence.generated, np.int32), now)

    def _follow(self, turn: Turn, output: np.ndarray, now: float) -> None:
        for following in self._workload.after(turn, output, now):
            if following.arrives < now:
                raise ValueError(
                    f"arrives = {following.arrives}: must not be before {now}, where the turn before ended"
                )
            heapq.heappush(self._waiting, (following.arrives, next(self._numbers), following))

    def _measurement(self, sequence: Sequence, opened: _Open, finished: float, reason: str) -> Measurement:
        turn, seconds = opened.turn, np.array(opened.seconds)
        scheduled, known = sequence.scheduled, opened.queued
        # Times from sums in another order: rounding must not let them descend.
        if scheduled is not None:
            scheduled = known = max(scheduled - self._began, known)
        seconds = np.maximum(seconds, known).tolist()
        return Measurement(
            request_id=sequence.request.request_id,
            session=turn.session,
            turn=turn.turn,
            rank=None if sequence.rank < 0 else sequence.rank,
            arrived=turn.arrives,
            sent=turn.arrives,
            scheduled=scheduled,
            first_token=seconds[0] if seconds else None,
            finished=max(finished, known),
            prompt_tokens=len(turn.prompt),
            cached_tokens=max(sequence.first_cached, 0),
            expected_cached_tokens=turn.expected_cached_tokens,
            output_tokens=sum(opened.tokens),
            chunk_seconds=tuple(seconds),
            chunk_tokens=tuple(opened.tokens),
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            finish_reason=reason,
            error=sequence.error or "",
            queued=opened.queued,
        )
