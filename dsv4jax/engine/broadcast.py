"""One engine over several processes: process 0 plans, every process carries out the same calls in the same order.

Process 0 sends every call of its executor, and a step's plan with it, before it makes the call itself; the others make
the same call. So all run the same programs in the same order, with as many steps in flight.

A step that fails in all processes at the same call (a bad plan, a program that raises) is survived as in a single
process: all are reset together. A step that fails in some of them only has left the others inside a collective or with
another state: the channel fails and all processes end.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4jax.engine.channel import FollowerChannel, LeaderChannel
from dsv4jax.engine.connection import Kind
from dsv4jax.engine.draft_room import DecodeTimes
from dsv4jax.engine.plan import Executor, RankPlan, StepPlan, StepResult
from dsv4jax.engine.plan_codec import PlanDecoder, PlanEncoder

_log = logging.getLogger(__name__)


def share_costs(channel: LeaderChannel | FollowerChannel, times: Sequence[DecodeTimes]) -> list[DecodeTimes]:
    """The times that process 0 has measured, in every process.

    Each process measures others, by which it would choose other drafts to verify. Every process calls this once,
    between `meet` and the first step.

    Args:
      times: measured here; only those of process 0 count.

    Raises:
      ChannelFailure: a process is lost, or process 0 sends something else.
    """
    if isinstance(channel, LeaderChannel):
        fields = [[one.requests, one.pages, one.drafts, one.seconds.tolist()] for one in times]
        channel.broadcast(Kind.COSTS, json.dumps(fields).encode())
        return list(times)
    kind, body = channel.receive()
    if kind is not Kind.COSTS:
        raise channel.fail(f"process 0 sent {kind.name} before COSTS")
    return [DecodeTimes(*sizes, np.array(seconds, np.float32)) for *sizes, seconds in json.loads(body)]


class BroadcastExecutor:
    """Process 0's executor: `inner`, and the same calls in every other process.

    Every call raises ChannelFailure once a process is lost, a call hangs, or a step has failed elsewhere only.
    """

    def __init__(self, inner: Executor, channel: LeaderChannel):
        self._inner, self._channel = inner, channel
        self._encoder = PlanEncoder()
        self._failed = False  # in the last call
        self._in_flight = 0

    def now(self) -> float:
        """The inner executor's clock."""
        return self._inner.now()

    def dispatch(self, plan: StepPlan) -> None:
        """Starts a step everywhere."""
        plan = _with_seeds(plan)
        self._channel.broadcast(Kind.DISPATCH, self._encoder.encode(plan))
        self._call(f"the start of step {plan.number}", lambda: self._inner.dispatch(plan))
        self._in_flight += 1

    def wait(self) -> StepResult:
        """The oldest step's result; the others wait for the same step."""
        self._channel.broadcast(Kind.WAIT)
        result = self._call("a step", self._inner.wait)
        self._in_flight -= 1
        return result

    def reset(self) -> None:
        """Resets all executors; returns when all have done so."""
        with self._channel.watch("a reset"):
            self._channel.broadcast(Kind.RESET, bytes([self._failed]))
            self._inner.reset()
            self._channel.wait_for_all(Kind.RESET_DONE)
        self._failed, self._in_flight = False, 0

    def finish(self) -> None:
        """Waits for the steps in flight, so that all processes can end: none does within a collective."""
        while self._in_flight:
            self.wait()

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            with self._channel.watch(what):
                return call()
        except Exception:
            self._failed = True
            raise


def follow(channel: FollowerChannel, inner: Executor) -> None:
    """Makes process 0's calls on `inner` until process 0 shuts down.

    Raises:
      ChannelFailure: process 0 is lost or has given up, a call hangs, or a step failed here or there only.
    """
    decoder = PlanDecoder()
    failed: str | None = None  # why the last call did
    while True:
        kind, body = channel.receive()
        if kind is Kind.SHUTDOWN:
            return
        if kind is Kind.RESET:
            if bool(body[0]) != (failed is not None):
                reason = "a step failed on process 0 only" if failed is None else _only_here(failed)
                raise channel.fail_unless_lost(reason)
            with channel.watch("a reset"):
                inner.reset()
            failed = None
            channel.send(Kind.RESET_DONE)
            continue
        if failed is not None:
            raise channel.fail_unless_lost(_only_here(failed))
        plan = decoder.decode(body) if kind is Kind.DISPATCH else None
        try:
            if plan is not None:
                with channel.watch(f"the start of step {plan.number}"):
                    inner.dispatch(plan)
            else:
                with channel.watch("a step"):
                    inner.wait()
        except Exception as error:
            _log.exception("a step failed")
            failed = f"{type(error).__name__}: {error}"
            channel.send(Kind.STEP_FAILED, failed.encode())


def _only_here(failed: str) -> str:
    return f"a step failed here only: {failed}"


def _with_seeds(plan: StepPlan) -> StepPlan:
    """The plan with a seed for every request that has none, so that all processes draw the same."""

    def seeded(rank: RankPlan) -> RankPlan:
        if all(start.sampling.seed is not None for start in rank.starts):
            return rank
        starts = []
        for start in rank.starts:
            if start.sampling.seed is None:
                seed = int(np.random.default_rng().integers(2**62))
                start = dataclasses.replace(start, sampling=dataclasses.replace(start.sampling, seed=seed))
            starts.append(start)
        return dataclasses.replace(rank, starts=tuple(starts))

    return dataclasses.replace(plan, ranks=tuple(map(seeded, plan.ranks)))
