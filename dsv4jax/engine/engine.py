"""The loop: schedule, dispatch, and finish the step before on the host while the device works."""

import collections
import dataclasses
import logging
import time
from collections.abc import Mapping

import numpy as np

from dsv4jax.engine.plan import Executor, StepPlan
from dsv4jax.engine.records import BalanceStats, EngineStats, Observer, RankStats, RequestRecord, StepRecord
from dsv4jax.engine.request import FinishReason, GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.sequence import Sequence

_log = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 5
_TOTALS = (
    *("cached_tokens", "computed_tokens", "output_tokens"),
    *("device_seconds", "schedule_seconds", "update_seconds", "gap_seconds"),
)  # fields of a step that are added up


@dataclasses.dataclass(eq=False)
class _Dispatched:
    plan: StepPlan
    cached_tokens: int
    schedule_seconds: float
    after_idle: bool


class Engine:
    """Drives a scheduler and an executor. Not thread safe; `AsyncEngine` gives it a thread.

    Args:
      observer: may be replaced between two steps.
      depth: steps dispatched and not yet finished on the host, at most.
      max_failures: a choice ends with an error after this many failed steps.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, observer: Observer, depth: int = 2, max_failures: int = 2
    ):
        if not 1 <= depth <= 2:
            raise ValueError(f"depth = {depth}: must be 1 or 2, masks are known one token ahead")
        self.scheduler, self.executor = scheduler, executor
        self.observer, self._depth, self._max_failures = observer, depth, max_failures
        self._in_flight: collections.deque[_Dispatched] = collections.deque()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._steps = 0
        self._failures = 0  # since a step succeeded
        self._was_idle = True
        self._untold: list[Sequence] = []  # choices that have ended since `step` returned last

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return not (self._in_flight or self.scheduler.num_running or self.scheduler.num_waiting)

    def submit(self, request: GenerationRequest) -> list[Sequence]:
        """Takes a request that `Scheduler.check` accepts; returns its choices."""
        self.scheduler.check(request)
        sequences = self.scheduler.prepare(request)
        self.scheduler.submit(sequences, self.executor.now())
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a choice from outside, whatever its state."""
        if sequence.finish_reason is None:
            self.scheduler.finish(sequence, reason)
            self._record([sequence])

    def step(self) -> list[Sequence]:
        """Dispatches the next step and finishes the oldest one as far as the depth demands.

        Returns the choices that have new tokens or have ended by themselves; [] also if there was nothing to do. A step
        that fails is logged, and its requests start anew; choices that had ended before it failed are returned as well.

        Raises:
          Exception: what the step raised, if the ones before it failed as well.
        """
        try:
            news = self._step()
        except Exception:
            self._failures += 1
            if self._failures == _MAX_FAILURES_IN_A_ROW:
                raise
            _log.exception("a step failed: running requests start anew")
            self._recover()
            news = []
        ended, self._untold = self._untold, []
        return list(dict.fromkeys([*news, *ended])) if ended else news

    def stats(self, compilations: int = 0, balance: Mapping[str, BalanceStats] | None = None) -> EngineStats:
        """The engine now."""
        scheduler = self.scheduler
        ranks = tuple(
            RankStats(
                running=rank.num_running,
                load=rank.load,
                used_pages=rank.pool.num_pages - rank.pool.available,
                cached_pages=rank.pool.kept,
                prefix_queries=rank.prefix_queries,
                prefix_hits=rank.prefix_hits,
            )
            for rank in scheduler.ranks
        )
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            slots=scheduler.cfg.slots * len(ranks),
            pages=scheduler.cfg.pages * len(ranks),
            used_pages=sum(rank.used_pages for rank in ranks),
            cached_pages=sum(rank.cached_pages for rank in ranks),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            **self._totals,
            drafts=scheduler.drafts.totals(),
            compilations=compilations,
            ranks=ranks,
            balance=balance or {},
        )

    def _step(self) -> list[Sequence]:
        begin = time.perf_counter()
        hits = self.scheduler.prefix_hits
        plan, news = None, []
        if self.scheduler.steps_in_flight < self._depth:
            plan, failed = self.scheduler.schedule(self.executor.now())
            self._ended(failed)
        if plan is not None:
            self._in_flight.append(_Dispatched(plan, self.scheduler.prefix_hits - hits, 0.0, self._was_idle))
            self.executor.dispatch(plan)
            self._in_flight[-1].schedule_seconds = time.perf_counter() - begin
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            news = self._finish_oldest()
        self._was_idle = self.idle
        return news

    def _finish_oldest(self) -> list[Sequence]:
        result = self.executor.wait()
        begin = time.perf_counter()
        dispatched = self._in_flight.popleft()
        update = self.scheduler.update(result, self.executor.now())
        self._ended([sequence for sequence, _, _ in update.finished])
        plan = dispatched.plan
        chunks = [chunk for rank in plan.ranks for chunk in rank.prefills]
        record = StepRecord(
            number=result.number,
            prefill_requests=len(chunks),
            decode_requests=sum(len(part.slots) for part in (plan.decodes, plan.speculation) if part is not None),
            cached_tokens=dispatched.cached_tokens,
            computed_tokens=sum(chunk.end - chunk.start for chunk in chunks),
            output_tokens=update.tokens,
            device_seconds=result.seconds,
            schedule_seconds=dispatched.schedule_seconds,
            update_seconds=time.perf_counter() - begin,
            gap_seconds=0.0 if dispatched.after_idle else result.gap_seconds,
            inter_token_seconds=np.concatenate([np.zeros(0), *update.gaps]),
        )
        self._steps += 1
        self._failures = 0
        for name in _TOTALS:
            self._totals[name] += getattr(record, name)
        self.observer.step(record)
        return update.news

    def _recover(self) -> None:
        self._in_flight.clear()
        self.executor.reset()
        self._ended(self.scheduler.recover(self._max_failures))

    def _ended(self, sequences: list[Sequence]) -> None:
        self._untold += sequences
        self._record(sequences)

    def _record(self, sequences: list[Sequence]) -> None:
        now = self.executor.now()
        for s in sequences:
            record = RequestRecord(
                request_id=s.request.request_id,
                index=s.index,
                n=s.request.n,
                prompt_tokens=len(s.request.prompt),
                cached_tokens=max(s.first_cached, 0),
                output_tokens=len(s.generated),
                max_tokens=s.request.max_tokens,
                draft_rounds=s.draft_rounds,
                drafted=s.drafted,
                accepted=s.accepted,
                preemptions=s.preemptions,
                finish_reason=s.finish_reason,
                arrived=s.arrived,
                scheduled=s.scheduled,
                first_token=s.first_token,
                finished=now,
            )
            self.observer.request(record)
