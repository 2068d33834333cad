"""What one step does, decided by the scheduler, and what came of it; and who carries it out.

Element r of `ranks` belongs to data-parallel rank r and speaks of that rank's slots and pages. What decodes stands
together for all ranks, one rank after the other: few requests of each make many of all, and the host handles them at
once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, Self

import numpy as np
from jaxtyping import Float32, Int32

from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.engine.token_mask import Mask
from dsv4jax.sampling_settings import RequestSampling

NEXT_TOKEN = -1
"""In place of a token id: the token sampled last in the slot, which need not have reached the host."""


@dataclasses.dataclass(frozen=True, eq=False)
class SlotStart:
    """A slot is given to a request, before anything else of the step.

    `tokens` are the prompt and, after a preemption, the `generated` tokens behind it.
    """

    slot: int
    tokens: Int32[np.ndarray, " tokens"]
    generated: int
    sampling: RequestSampling
    logit_bias: Mapping[int, float]


@dataclasses.dataclass(frozen=True, eq=False)
class SlotMask:
    """Tokens allowed from now on in a slot, one bit each, in place of the earlier mask; None allows all.

    With places, row i says what may follow the newest chosen token and i drafts behind it, as far as the step verifies
    any; otherwise the mask is that of all places.
    """

    slot: int
    mask: Mask


@dataclasses.dataclass(frozen=True, eq=False)
class Prefill:
    """Tokens `start..end` of `tokens` to run; what is sampled after them counts if they are the last."""

    slot: int
    tokens: Int32[np.ndarray, " tokens"]
    start: int
    end: int
    pages: Int32[np.ndarray, " pages"]
    cached: int
    window_floor: int
    prompt_logprobs: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class RunningRequests:
    """Requests that decode, on all ranks."""

    ranks: Int32[np.ndarray, " requests"]
    """Not falling."""
    slots: Int32[np.ndarray, " requests"]
    page_tables: Mapping[int, Int32[np.ndarray, "requests pages"]]
    """By rank, of those that have requests here: row i holds the pages of its request i; behind them any value."""

    def of_rank(self, rank: int) -> Self | None:
        """The part of one rank; None if there is none."""
        if rank not in self.page_tables:
            return None
        rows = slice(*self.ranks.searchsorted((rank, rank + 1)).tolist())
        names = [f.name for f in dataclasses.fields(self) if f.name != "page_tables"]
        own = {name: getattr(self, name)[rows] for name in names}
        return type(self)(**own, page_tables={rank: self.page_tables[rank]})


@dataclasses.dataclass(frozen=True, eq=False)
class Decodes(RunningRequests):
    """One token of each running request: `tokens[i]`, a token id or NEXT_TOKEN, at position `starts[i]`."""

    starts: Int32[np.ndarray, " requests"]
    tokens: Int32[np.ndarray, " requests"]


@dataclasses.dataclass(frozen=True, eq=False)
class Speculation(RunningRequests):
    """The newest chosen token of each running request and up to `max_drafts` drafts after it, which the slots hold.

    `tokens[i]` is a token id or NEXT_TOKEN; an id may differ from the token in the slot, and no drafts follow it then.
    Each request gets the accepted drafts and one token more, and the slot new drafts. A request at its end or in a
    pause, which the host may not know yet, gets nothing. Page tables cover `max_drafts` drafts behind `positions`.
    """

    positions: Int32[np.ndarray, " requests"]
    """The largest position that the newest chosen token can have; only the device knows the true one."""
    ends: Int32[np.ndarray, " requests"]
    """Prompt and `max_tokens` less one: no token at this position or beyond is run."""
    tokens: Int32[np.ndarray, " requests"]
    min_drafts: Int32[np.ndarray, " requests"]
    """At least so many are verified, if there are so many; a step that chooses what pays chooses up to `max_drafts`."""
    max_drafts: Int32[np.ndarray, " requests"]
    """The most of these over all ranks decides in which program the step runs: the narrowest that has room."""
    pause_tokens: Int32[np.ndarray, "requests pauses"]
    """Tokens behind which the allowed tokens may change, -1 for none: a request that has chosen one beyond its `seen`
    pauses, and of accepted drafts it is the last one."""
    seen: Int32[np.ndarray, " requests"]
    """Position of the newest chosen token that the host has seen."""


@dataclasses.dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a step besides what decodes."""

    starts: tuple[SlotStart, ...]
    masks: tuple[SlotMask, ...]
    prefills: tuple[Prefill, ...]
    first_drafts: tuple[int, ...] = ()
    """Slots whose prompt ends in this step and that then draft for the next one."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of all ranks, run in this order: slots are started, masks set, prefills, what decodes, first drafts."""

    number: int
    ranks: tuple[RankPlan, ...]
    decodes: Decodes | None = None
    speculation: Speculation | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
    """What was sampled after each prefill of a rank or each of a step's decodes, in the plan's order.

    A `logprobs` entry is NaN where the model's logits were undefined: the token means nothing then. The top entries are
    filled as far as the request's `top_logprobs` asks; they are None if no request of the list asks for any.
    """

    tokens: Int32[np.ndarray, " requests"]
    logprobs: Float32[np.ndarray, " requests"]
    top_tokens: Int32[np.ndarray, "requests top"] | None = None
    top_logprobs: Float32[np.ndarray, "requests top"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Speculated:
    """What came of a `Speculation`, in its order; as in `Sampled`, but places past `counts` hold any value."""

    counts: Int32[np.ndarray, " requests"]
    """Tokens of each request: the accepted drafts and one more; 0 for one that was at its end or in a pause."""
    verified: Int32[np.ndarray, " requests"]
    """Drafts that were verified."""
    tokens: Int32[np.ndarray, "requests tokens"]
    logprobs: Float32[np.ndarray, "requests tokens"]
    next_drafts: Int32[np.ndarray, "requests block"]
    """The drafts behind these tokens, which the slots hold."""
    confidences: Float32[np.ndarray, "requests block"]
    """Of the drafts that the step could verify, not of the next ones: logits of the probability that a draft is
    accepted if those before it are; NaN where there was none."""
    top_tokens: Int32[np.ndarray, "requests tokens top"] | None = None
    top_logprobs: Float32[np.ndarray, "requests tokens top"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RankResult:
    """What came of a rank's part of a step; None where there was nothing to run."""

    prefills: Sampled | None
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
    """Per prefill: of its own tokens, if asked for."""
    first_drafts: Int32[np.ndarray, "requests block"] | None = None
    """Those of the plan's `first_drafts`, in their order."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """Outcome of a step; `seconds` is how long the device was busy with it, as well as the executor can tell."""

    number: int
    ranks: tuple[RankResult, ...]
    seconds: float
    gap_seconds: float = 0.0
    """How long the device had had nothing to do when the step reached it."""
    decodes: Sampled | None = None
    speculation: Speculated | None = None


class Executor(Protocol):
    """Carries out steps in the order they were dispatched."""

    def dispatch(self, plan: StepPlan) -> None:
        """Starts a step and returns without waiting for it."""

    def wait(self) -> StepResult:
        """The result of the oldest dispatched step; raises what the step raised."""

    def now(self) -> float:
        """Seconds of this executor's clock, real or virtual."""

    def reset(self) -> None:
        """After an error: drops what is in flight and every slot's and page's content."""
