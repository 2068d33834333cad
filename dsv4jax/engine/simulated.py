"""An executor without a device: steps take the time a cost model says, on a virtual clock.

Drafts are accepted as an acceptance model says; the first ones follow the first tokens of a request, as in the model.
Which tokens they are, and which are allowed, is not simulated.
"""

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import TypeVar

import numpy as np
from jaxtyping import Int32

from dsv4jax.engine.plan import (
    Decodes,
    RankPlan,
    RankResult,
    Sampled,
    SlotStart,
    Speculated,
    Speculation,
    StepPlan,
    StepResult,
)
from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.sampling_settings import MAX_TOP_LOGPROBS

CostModel = Callable[[StepPlan], float]
"""Seconds a step keeps the device busy."""
_PerRequest = Int32[np.ndarray, " requests"]
TokenModel = Callable[[_PerRequest, _PerRequest, _PerRequest], _PerRequest]
"""Token ids sampled after positions: (ranks, slots, positions) to ids. Called for the prefills of each rank, then the
decodes of all, then for each token of a step with drafts."""
_Part = TypeVar("_Part", Decodes, Speculation)
_Result = TypeVar("_Result", Sampled, Speculated)
_SIMULATED = {Decodes: ("slots", "starts"), Speculation: ("slots", "ends", "max_drafts")}
"""What of a plan is looked at."""
_NOTHING = RankResult(None, None)
AcceptanceModel = Callable[[_PerRequest, _PerRequest], _PerRequest]
"""How many drafts are accepted: (positions, verified drafts) to at most as many."""


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds of a step; of several ranks the slowest counts. The defaults are round numbers, not a measurement.

    Args:
      step: of every step, whatever it does.
      prefill_token: per token of a prompt.
      prefill_pair: per token of a prompt and token before it.
      decode_token: per running request.
      decode_context: per running request and token before it.
      draft: of a draft round, whatever it drafts.
    """

    step: float = 4e-3
    prefill_token: float = 2e-5
    prefill_pair: float = 1e-10
    decode_token: float = 2e-5
    decode_context: float = 2e-9
    draft: float = 5e-4

    def __call__(self, plan: StepPlan) -> float:
        return self.step + max(self._rank(rank) for rank in plan.ranks)

    def _rank(self, plan: RankPlan) -> float:
        seconds = sum(
            (c.end - c.start) * (self.prefill_token + self.prefill_pair * (c.start + c.end) / 2) for c in plan.prefills
        )
        if plan.decodes is not None:
            context = float(plan.decodes.starts.sum(dtype=np.int64))
            seconds += len(plan.decodes.slots) * self.decode_token + context * self.decode_context
        if plan.speculation is not None:
            context = float(plan.speculation.positions.sum(dtype=np.int64))
            tokens = len(plan.speculation.slots) + int(plan.speculation.max_drafts.sum())
            seconds += tokens * self.decode_token + context * self.decode_context + self.draft
        return seconds + (self.draft if plan.first_drafts else 0.0)


def constant_tokens(token: int) -> TokenModel:
    """Always the same token."""
    return lambda ranks, slots, positions: np.full(len(slots), token, np.int32)


def fixed_acceptance(probabilities: ListOf[float], seed: int = 0) -> AcceptanceModel:
    """Draft i is accepted with probability i of the list if those before it are; drafts beyond the list never."""
    generator = np.random.default_rng(seed)

    def accepted(positions: _PerRequest, verified: _PerRequest) -> _PerRequest:
        stands = generator.random((len(positions), len(probabilities))) < probabilities
        stands &= np.arange(len(probabilities)) < verified[:, None]
        return np.cumprod(stands, axis=1).sum(axis=1, dtype=np.int32)

    return accepted


class SimulatedExecutor:
    """Runs plans on a virtual clock; time passes only in `wait` and `advance`, and the host takes none.

    Args:
      acceptance: of the drafts of each step; None accepts none.
      block: how many drafts a draft round makes.
    """

    def __init__(self, cost: CostModel, tokens: TokenModel, acceptance: AcceptanceModel | None = None, block: int = 5):
        self._cost, self._tokens = cost, tokens
        self._acceptance, self._block = acceptance or fixed_acceptance([]), block
        # Position of the newest token of each slot, and drafts behind it; both as far as slots were started.
        self._newest: Int32[np.ndarray, "2 ranks slots"] = np.zeros((2, 0, 0), np.int32)
        self._best_asked = False  # whether a request has asked for the best tokens
        self._now = 0.0
        self._device_free = 0.0
        self._queue: collections.deque[tuple[float, StepResult]] = collections.deque()

    def now(self) -> float:
        """The virtual clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass, as a host at work or an idle engine does."""
        self._now += seconds

    def dispatch(self, plan: StepPlan) -> None:
        """Queues the step behind the ones in flight."""
        begin = max(self._now, self._device_free)
        gap = begin - self._device_free
        seconds = self._cost(plan)
        self._device_free = begin + seconds
        self._queue.append((self._device_free, StepResult(plan.number, self._results(plan), seconds, gap)))

    def wait(self) -> StepResult:
        """The oldest step's result, at the time it is there."""
        end, result = self._queue.popleft()
        self._now = max(self._now, end)
        return result

    def synchronize(self) -> None:
        """Waits until the device has done every step, without a look at results."""
        self._now = max(self._now, self._device_free)

    def reset(self) -> None:
        """Drops what is in flight."""
        self._queue.clear()
        self._device_free = self._now

    def _results(self, plan: StepPlan) -> tuple[RankResult, ...]:
        for rank, part in enumerate(plan.ranks):
            if part.starts:
                self._start(rank, part.starts)
        prefills = [self._prefill(rank, part) if part.prefills else None for rank, part in enumerate(plan.ranks)]
        decodes = self._of_all_ranks([part.decodes for part in plan.ranks], self._decode)
        speculations = self._of_all_ranks([part.speculation for part in plan.ranks], self._speculate)
        results = [_NOTHING] * len(plan.ranks)
        for rank, part in enumerate(plan.ranks):
            if not (part.prefills or part.decodes or part.speculation):
                continue
            if part.first_drafts:
                self._newest[1, rank, list(part.first_drafts)] = self._block
            logprobs = tuple(
                _no_logprobs(min(p.end, len(p.tokens) - 1) - p.start, p.prompt_logprobs)
                if p.prompt_logprobs >= 0
                else None
                for p in part.prefills
            )
            first_drafts = self._drafts(len(part.first_drafts)) if part.first_drafts else None
            results[rank] = RankResult(prefills[rank], decodes[rank], logprobs, speculations[rank], first_drafts)
        return tuple(results)

    def _of_all_ranks(self, plans: ListOf[_Part | None], run: Callable[..., _Result]) -> list[_Result | None]:
        """What `run` makes of the parts of a step that all ranks have at once, and each of them its own of it.

        One call for all, because a step of many ranks has few requests of each.
        """
        busy = [rank for rank, plan in enumerate(plans) if plan is not None]
        results: list[_Result | None] = [None] * len(plans)
        if not busy:
            return results
        counts = [len(plans[rank].slots) for rank in busy]
        names = _SIMULATED[type(plans[busy[0]])]
        columns = [np.concatenate([getattr(plans[rank], name) for rank in busy]) for name in names]
        whole, end = run(np.repeat(busy, counts), *columns), 0
        fields = list(vars(whole).values())
        for rank, count in zip(busy, counts, strict=True):
            first, end = end, end + count
            results[rank] = type(whole)(*(None if field is None else field[first:end] for field in fields))
        return results

    def _prefill(self, rank: int, plan: RankPlan) -> Sampled:
        slots = np.array([p.slot for p in plan.prefills], np.int32)
        return self._decode(np.full(len(slots), rank), slots, np.array([p.end - 1 for p in plan.prefills], np.int32))

    def _speculate(
        self, ranks: _PerRequest, slots: _PerRequest, ends: _PerRequest, max_drafts: _PerRequest
    ) -> Speculated:
        """All drafts that the plan allows are verified."""
        positions, drafts = self._newest[:, ranks, slots]
        active = positions < ends
        verified = np.where(active, np.minimum(np.minimum(max_drafts, drafts), ends - positions - 1), 0)
        counts = np.where(active, self._acceptance(positions, verified) + 1, 0)
        tokens = np.zeros((len(counts), self._block + 1), np.int32)
        for i in range(int(counts.max(initial=0))):
            tokens[:, i] = self._tokens(ranks, slots, positions + i)
        self._newest[0, ranks, slots], self._newest[1, ranks, slots] = positions + counts, self._block
        logprobs, drafts = np.zeros(tokens.shape, np.float32), self._drafts(len(tokens))
        return Speculated(counts, verified, tokens, logprobs, drafts, *self._best(tokens.shape))

    def _drafts(self, requests: int) -> Int32[np.ndarray, "requests block"]:
        return np.zeros((requests, self._block), np.int32)

    def _decode(self, ranks: _PerRequest, slots: _PerRequest, starts: _PerRequest) -> Sampled:
        tokens = self._tokens(ranks, slots, starts)
        self._newest[0, ranks, slots], self._newest[1, ranks, slots] = starts + 1, 0
        return Sampled(tokens, np.zeros(len(slots), np.float32), *self._best(tokens.shape))

    def _best(self, shape: tuple[int, ...]) -> tuple[np.ndarray | None, np.ndarray | None]:
        if not self._best_asked:
            return None, None
        return np.zeros((*shape, MAX_TOP_LOGPROBS), np.int32), np.zeros((*shape, MAX_TOP_LOGPROBS), np.float32)

    def _start(self, rank: int, starts: tuple[SlotStart, ...]) -> None:
        self._best_asked |= any(start.sampling.top_logprobs >= 0 for start in starts)
        _, ranks, slots = self._newest.shape
        more = max(0, rank + 1 - ranks), max(0, max(start.slot for start in starts) + 1 - slots)
        self._newest = np.pad(self._newest, [(0, 0), *((0, count) for count in more)])


def _no_logprobs(rows: int, top: int) -> PromptLogprobs:
    zeros = np.zeros((rows, top), np.float32)
    return PromptLogprobs(np.zeros(rows, np.float32), zeros.astype(np.int32), zeros)
