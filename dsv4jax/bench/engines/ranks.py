"""The same requests on every data-parallel rank: at once, one rank after the other, and with slow hosts.

All ranks run a step together, which lasts as long as its slowest rank. **Mirror**: every rank runs the same requests at
the same time, so that no step has a slower rank. **Lag**: rank r begins r times `lag` later. Each rank still does the
same, only at other times; what the tokens per second lose is lost to imbalance in time. The prefix cache is off.

Both are counted in the same window, which begins when the last rank of the lag has run for a while. What steps cost is
fitted to those of the mirror, where every rank is the slowest one; by it, ranks of the lag wait for each other for a
share of the time, which is the part of the loss that imbalance explains.

**Slow host**: before each step some ranks' hosts are late. The step begins when the last one has dispatched it; a delay
that is shorter than the step before it is hidden behind that, if two steps are in flight.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from dsv4jax.bench.engines.rank_work import StepCost, WorkExecutor, fit_step_cost
from dsv4jax.bench.engines.system import System
from dsv4jax.bench.traffic.counting import Throughput, Window, summarize, throughput
from dsv4jax.bench.traffic.driver import Run, Turn, VirtualExecutor, run_engine
from dsv4jax.engine.plan import Executor, StepPlan, StepResult


@dataclasses.dataclass(frozen=True)
class Load:
    """What each rank runs: so many requests at any time, one after the other from an endless list.

    Args:
      requests: of a rank, at the same time.
      prompt_tokens, output_tokens: on average; each is 0.5 to 1.5 times as many, evenly distributed.
      seconds: of a run.
      warm_up: seconds of it which do not count, after the last rank began.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    warm_up: float
    seed: int = 0

    def check(self, slots: int, max_model_len: int) -> None:
        """Raises ValueError unless a rank of so many slots can run all requests, the longest one included."""
        if self.requests > slots:
            raise ValueError(f"requests = {self.requests}: must be at most slots = {slots}")
        if round(1.5 * self.prompt_tokens) + round(1.5 * self.output_tokens) > max_model_len:
            raise ValueError(
                f"prompt_tokens = {self.prompt_tokens}, output_tokens = {self.output_tokens}: 1.5 times both, as the"
                f" longest request has, must be at most max_model_len = {max_model_len}"
            )

    def window(self, lag: float, ranks: int) -> Window:
        """What counts of runs of so many ranks with this lag and less.

        Raises:
          ValueError: nothing does.
        """
        begin = lag * (ranks - 1) + self.warm_up
        if begin >= self.seconds:
            raise ValueError(f"seconds = {self.seconds}: must be more than {begin}, when the last rank is warm")
        return Window(begin, self.seconds)


class MirroredRanks:
    """A workload: the list of a `Load` on each rank, rank r beginning r times `lag` later."""

    def __init__(self, load: Load, system: System, lag: float):
        self._load, self._system, self._lag = load, system, lag
        self._next = [load.requests] * system.config.ranks  # of each rank's list

    def first(self) -> Iterable[Turn]:
        ranks, requests = range(self._system.config.ranks), range(self._load.requests)
        return (self._turn(rank, i, rank * self._lag) for rank, i in itertools.product(ranks, requests))

    def after(self, turn: Turn, output: Int32[np.ndarray, " tokens"], finished: float) -> Sequence[Turn]:
        if not output.size:  # it failed, as the next one would
            return ()
        number = self._next[turn.rank]
        self._next[turn.rank] += 1
        return [self._turn(turn.rank, number, finished)]

    def _turn(self, rank: int, number: int, arrives: float) -> Turn:
        load = self._load
        shares = np.random.default_rng((load.seed, number)).uniform(0.5, 1.5, 2)
        tokens, output = (
            max(1, round(share * mean))
            for share, mean in zip(shares, (load.prompt_tokens, load.output_tokens), strict=True)
        )
        prompt = self._system.prompt(load.seed, number, tokens=tokens)
        return Turn(f"rank {rank}", number, arrives, prompt, output, rank=rank)


@dataclasses.dataclass(frozen=True, eq=False)
class RanksRun:
    """A run, its steps that count, and what counts of it."""

    run: Run
    steps: WorkExecutor
    inside: np.ndarray
    """Whether each step ended in the window."""
    window: Window
    tokens: Throughput

    @property
    def work(self) -> np.ndarray:
        """Of the steps that count, as `WorkExecutor` has it."""
        return self.steps.work[: len(self.inside)][self.inside]

    @property
    def device_seconds(self) -> np.ndarray:
        """Of the steps that count."""
        return self.steps.seconds[: len(self.inside)][self.inside]

    @property
    def step_seconds(self) -> float:
        """Mean time from the end of a step to that of the next, in the window."""
        ends = np.array(self.run.step_ends)[self.inside]
        return float(ends[-1] - ends[0]) / max(1, len(ends) - 1) if len(ends) else 0.0

    def row(self, ranks: int) -> dict[str, Any]:
        """Columns of a table."""
        summary = summarize(self.run.measurements, self.window, devices=ranks)
        return {
            "ranks": ranks,
            "requests": summary.requests,
            **{f"{name}_per_rank": value for name, value in self.tokens.per(ranks).as_dict().items()},
            "user_speed_inter_token_tokens_per_second": summary.user_speed_inter_token,
            "user_speed_end_to_end_tokens_per_second": summary.user_speed_end_to_end,
            "ttft_p50_ms": summary.ttft and summary.ttft.p50 * 1e3,
            "steps": int(self.inside.sum()),
            "step_ms": self.step_seconds * 1e3,
            "invalid": "; ".join(summary.invalid),
        }


def run_lag(system: System, load: Load, lag: float, window: Window, progress: bool = True) -> RanksRun:
    """A run; the mirror with no lag. Raises as `Load.check`."""
    return _measured(system, load, lag, window, lambda executor: executor, progress=progress)


def _measured(
    system: System,
    load: Load,
    lag: float,
    window: Window,
    inside: Callable[[Executor], Executor],
    depth: int = 2,
    progress: bool = True,
) -> RanksRun:
    load.check(system.config.slots, system.config.max_model_len)
    engine, executor = system.engine(
        inside=lambda executor: WorkExecutor(inside(executor)), depth=depth, prefix_cache=False
    )
    run = run_engine(engine, executor, MirroredRanks(load, system, lag), until=load.seconds, progress=progress)
    ends = np.array(run.step_ends)
    counted = (window.begin < ends) & (ends <= window.end)
    steps: WorkExecutor = engine.executor
    return RanksRun(run, steps, counted, window, throughput(run.measurements, window))


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a lagged run loses beside the mirrored one, as shares of the mirrored one's tokens per second."""

    computed_input: float
    output: float
    both: float
    by_imbalance: float
    """Of `both`, the share of time in which ranks wait for the slowest, less that of the mirror."""
    waiting: tuple[float, ...]
    """That share of each rank."""
    cost: StepCost
    cost_error: float
    """Mean of |fitted - measured| over the mean of measured seconds of the lagged run's steps."""

    def row(self) -> dict[str, Any]:
        """Columns of a table."""
        return {
            "lost_computed_input": self.computed_input,
            "lost_output": self.output,
            "lost": self.both,
            "lost_by_imbalance": self.by_imbalance,
            "lost_otherwise": self.both - self.by_imbalance,
            **{f"waiting_of_rank_{rank}": share for rank, share in enumerate(self.waiting)},
            "fit_error_mirror": self.cost.error,
            "fit_error_lag": self.cost_error,
        }


def loss(mirror: RanksRun, lagged: RanksRun) -> Loss:
    """Compares two runs of one window."""
    cost = fit_step_cost(mirror.work, mirror.device_seconds)
    waiting = cost.waiting(lagged.work)
    fitted = cost.step + cost.of_ranks(lagged.work).max(axis=1)
    a, b = mirror.tokens, lagged.tokens
    both = (a.computed_input + a.output, b.computed_input + b.output)
    return Loss(
        computed_input=1 - b.computed_input / a.computed_input,
        output=1 - b.output / a.output,
        both=1 - both[1] / both[0],
        by_imbalance=float(waiting.mean() - cost.waiting(mirror.work).mean()),
        waiting=tuple(waiting.tolist()),
        cost=cost,
        cost_error=float(np.abs(fitted - lagged.device_seconds).mean() / lagged.device_seconds.mean()),
    )


class SlowHosts:
    """Passes every call to `executor`, before each step after a delay of the slowest host.

    In one process one host dispatches for all ranks, so that it stands for the slowest of theirs.

    Args:
      late: seconds by which each rank's host is late with a step, by the number of the step.
    """

    def __init__(self, executor: Executor, late: Callable[[int], np.ndarray]):
        self._executor, self._late = executor, late
        self.others_waited = 0.0
        """Seconds for which hosts that were not the slowest waited for it, on average over ranks."""

    def now(self) -> float:
        return self._executor.now()

    def dispatch(self, plan: StepPlan) -> None:
        late = self._late(plan.number)
        slowest = float(late.max())
        self.others_waited += float((slowest - late).mean())
        if isinstance(self._executor, VirtualExecutor):
            self._executor.advance(slowest)
        else:
            time.sleep(slowest)
        self._executor.dispatch(plan)

    def wait(self) -> StepResult:
        return self._executor.wait()

    def reset(self) -> None:
        self._executor.reset()


def run_slow_hosts(
    system: System,
    load: Load,
    *,
    delay: float,
    slow: int,
    every: int = 1,
    depth: int = 2,
    progress: bool = True,
) -> tuple[RanksRun, dict[str, Any]]:
    """A mirrored run in which the hosts of the first `slow` ranks are late with one step of `every`, each with others.

    Args:
      depth: steps in flight.

    Raises:
      ValueError: more slow ranks than there are; or as `Load.check`.

    Returns:
      The run, and of each step in milliseconds: by how much the slowest host was late, how long others waited for it on
      average, and for how long the devices had nothing to do.
    """
    ranks = system.config.ranks
    if not 0 <= slow <= ranks:
        raise ValueError(f"slow = {slow}: must be 0 to {ranks}, the number of ranks")
    rng = np.random.default_rng((load.seed, 1))

    def late(step: int) -> np.ndarray:
        return delay * ((np.arange(ranks) < slow) & (rng.random(ranks) < 1 / every))

    made: list[SlowHosts] = []

    def inside(executor: Executor) -> Executor:
        made.append(SlowHosts(executor, late))
        return made[0]

    measured = _measured(system, load, 0.0, load.window(0.0, ranks), inside, depth, progress)
    steps = [record for record, counts in zip(measured.run.steps, measured.inside, strict=True) if counts]
    return measured, {
        "hosts_waiting_ms_per_step": made[0].others_waited / max(1, len(measured.run.steps)) * 1e3,
        "devices_idle_ms_per_step": sum(record.gap_seconds for record in steps) / max(1, len(steps)) * 1e3,
    }
