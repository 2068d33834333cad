"""An executor without a device: steps take the time a cost model says, on a virtual clock.

Drafts are accepted as an acceptance model says; the first ones follow the first tokens of a request, as in the model.
Which tokens they are, and which are allowed, is not simulated.
"""

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as ListOf

import numpy as np
from jaxtyping import Float32, Float64, Int32

from dsv4jax.engine.plan import (
    RankPlan,
    RankResult,
    Sampled,
    SlotStart,
    Speculated,
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
_NOTHING = RankResult(None)
AcceptanceModel = Callable[[_PerRequest, _PerRequest], _PerRequest]
"""How many drafts are accepted: (positions, verified drafts) to at most as many."""
ConfidenceModel = Callable[[_PerRequest], Float32[np.ndarray, "requests block"]]
"""Confidences of the drafts behind the newest tokens, from the positions of these."""


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
        ranks = range(len(plan.ranks))
        seconds = np.array([self._prefills(rank) for rank in plan.ranks], np.float64)
        if (decodes := plan.decodes) is not None:
            context, requests = _by_rank(decodes.ranks, ranks, decodes.starts), _by_rank(decodes.ranks, ranks)
            seconds += requests * self.decode_token + context * self.decode_context
        if (speculation := plan.speculation) is not None:
            context = _by_rank(speculation.ranks, ranks, speculation.positions)
            tokens = _by_rank(speculation.ranks, ranks, 1 + speculation.max_drafts)
            seconds += tokens * self.decode_token + context * self.decode_context + self.draft * (tokens > 0)
        seconds += [self.draft if rank.first_drafts else 0.0 for rank in plan.ranks]
        return self.step + float(seconds.max())

    def _prefills(self, plan: RankPlan) -> float:
        return sum(
            (c.end - c.start) * (self.prefill_token + self.prefill_pair * (c.start + c.end) / 2) for c in plan.prefills
        )


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
      confidences: of the drafts of each step, asked for before their acceptance; None tells nothing of them.
    """

    def __init__(
        self,
        cost: CostModel,
        tokens: TokenModel,
        acceptance: AcceptanceModel | None = None,
        block: int = 5,
        confidences: ConfidenceModel | None = None,
    ):
        self._cost, self._tokens = cost, tokens
        self._acceptance, self._block = acceptance or fixed_acceptance([]), block
        self._confidences = confidences or (lambda positions: np.full((len(positions), block), np.nan, np.float32))
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
        self._queue.append((self._device_free, self._result(plan, seconds, gap)))

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

    def _result(self, plan: StepPlan, seconds: float, gap: float) -> StepResult:
        for rank, part in enumerate(plan.ranks):
            if part.starts:
                self._start(rank, part.starts)
        ranks = tuple(self._rank(rank, part) if part.prefills else _NOTHING for rank, part in enumerate(plan.ranks))
        decodes = speculation = None
        if (given := plan.decodes) is not None:
            decodes = self._decode(given.ranks, given.slots, given.starts)
        if (given := plan.speculation) is not None:
            speculation = self._speculate(given.ranks, given.slots, given.ends, given.max_drafts)
        for rank, part in enumerate(plan.ranks):
            if part.first_drafts:
                self._newest[1, rank, list(part.first_drafts)] = self._block
        return StepResult(plan.number, ranks, seconds, gap, decodes, speculation)

    def _rank(self, rank: int, plan: RankPlan) -> RankResult:
        logprobs = tuple(
            _no_logprobs(min(p.end, len(p.tokens) - 1) - p.start, p.prompt_logprobs) if p.prompt_logprobs >= 0 else None
            for p in plan.prefills
        )
        first_drafts = self._drafts(len(plan.first_drafts)) if plan.first_drafts else None
        return RankResult(self._prefill(rank, plan), logprobs, first_drafts)

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
        known = np.arange(self._block) < drafts[:, None]
        confidences = np.where(known, self._confidences(positions), np.float32(np.nan))
        counts = np.where(active, self._acceptance(positions, verified) + 1, 0)
        tokens = np.zeros((len(counts), self._block + 1), np.int32)
        for i in range(int(counts.max(initial=0))):
            tokens[:, i] = self._tokens(ranks, slots, positions + i)
        self._newest[0, ranks, slots], self._newest[1, ranks, slots] = positions + counts, self._block
        logprobs, drafts = np.zeros(tokens.shape, np.float32), self._drafts(len(tokens))
        return Speculated(counts, verified, tokens, logprobs, drafts, confidences, *self._best(tokens.shape))

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


def _by_rank(of: _PerRequest, ranks: range, values: _PerRequest | None = None) -> Float64[np.ndarray, " ranks"]:
    """Sums over the requests of each rank, or how many there are."""
    return np.bincount(of, values, len(ranks)).astype(np.float64)
