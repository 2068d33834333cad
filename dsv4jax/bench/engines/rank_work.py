"""What each rank has to do in each step, what a step costs by it, and how long ranks wait for the slowest."""

import dataclasses

import numpy as np
import scipy.optimize
from jaxtyping import Float64

from dsv4jax.engine.plan import Executor, StepPlan, StepResult

WORK = ("prefill", "prefill_token", "prefill_pair", "decode_token", "decode_context")
"""Units of a rank's work: whether it has prompts (their program takes a time of its own, however full it is), tokens of
prompts, pairs of these with tokens before them, tokens that are decoded or verified, and tokens before these."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a step: `step` whatever it does, and `work` per unit of each kind of the slowest rank.

    `error` is the mean of |fitted - measured| over the mean of measured, where it was fitted.
    """

    step: float
    work: tuple[float, ...]
    error: float = 0.0

    def of_ranks(self, work: Float64[np.ndarray, "steps ranks kinds"]) -> Float64[np.ndarray, "steps ranks"]:
        """Seconds of each rank's own part; the step takes `step` more than the largest."""
        return work @ np.array(self.work)

    def waiting(self, work: Float64[np.ndarray, "steps ranks kinds"]) -> Float64[np.ndarray, " ranks"]:
        """The share of the time of all steps in which each rank has done its part and waits for the slowest."""
        own = self.of_ranks(work)
        longest = own.max(axis=1, keepdims=True)
        total = float((self.step + longest).sum())
        return (longest - own).sum(axis=0) / total if total else np.zeros(work.shape[1])


def fit_step_cost(work: Float64[np.ndarray, "steps ranks kinds"], seconds: Float64[np.ndarray, " steps"]) -> StepCost:
    """The cost that fits measured steps best (non-negative least squares), of steps whose ranks all do the same.

    Raises:
      ValueError: there are no steps, or ranks of one do not do the same.
    """
    if not len(work):
        raise ValueError("steps: there must be one at least")
    if not np.array_equal(work, np.broadcast_to(work[:, :1], work.shape)):
        raise ValueError("work: all ranks of a step must do the same")
    columns = np.column_stack([np.ones(len(work)), work[:, 0]])
    scale = np.where(columns.max(axis=0) > 0, columns.max(axis=0), 1.0)
    found = scipy.optimize.nnls(columns / scale, seconds)[0] / scale
    error = float(np.abs(columns @ found - seconds).mean() / seconds.mean())
    return StepCost(float(found[0]), tuple(found[1:].tolist()), error)


class WorkExecutor:
    """Passes every call to `executor` and keeps the work and the seconds of each step."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._work: list[list[tuple[float, ...]]] = []
        self._seconds: list[float] = []

    @property
    def work(self) -> Float64[np.ndarray, "steps ranks kinds"]:
        """Of the steps whose results are there."""
        return np.array(self._work[: len(self._seconds)], np.float64)

    @property
    def seconds(self) -> Float64[np.ndarray, " steps"]:
        """How long the device was busy with each."""
        return np.array(self._seconds)

    def now(self) -> float:
        return self._executor.now()

    def dispatch(self, plan: StepPlan) -> None:
        self._work.append([work_of(plan, rank) for rank in range(len(plan.ranks))])
        self._executor.dispatch(plan)

    def wait(self) -> StepResult:
        result = self._executor.wait()
        self._seconds.append(result.seconds)
        return result

    def reset(self) -> None:
        """Forgets the steps that are in flight."""
        del self._work[len(self._seconds) :]
        self._executor.reset()


def work_of(plan: StepPlan, rank: int) -> tuple[float, ...]:
    """What a rank does in a step, in the order of `WORK`. Of drafts as many count as may be verified."""
    chunks = plan.ranks[rank].prefills
    prefill = sum(chunk.end - chunk.start for chunk in chunks)
    pairs = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) / 2 for chunk in chunks)
    tokens = context = 0.0
    if plan.decodes is not None and (decodes := plan.decodes.of_rank(rank)) is not None:
        tokens, context = len(decodes.slots), float(decodes.starts.sum(dtype=np.int64))
    if plan.speculation is not None and (speculation := plan.speculation.of_rank(rank)) is not None:
        tokens += len(speculation.slots) + int(speculation.max_drafts.sum())
        context += float(speculation.positions.sum(dtype=np.int64))
    return float(prefill > 0), float(prefill), pairs, float(tokens), context
