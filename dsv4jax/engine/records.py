"""What the engine reports about itself: one record per step, per finished choice, and a snapshot on demand.

Times are seconds of the executor's clock.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from dsv4jax.engine.draft_totals import DraftTotals
from dsv4jax.engine.request import FinishReason


@dataclasses.dataclass(frozen=True, eq=False)
class StepRecord:
    """One step, reported when its result was processed.

    Tokens come in three kinds: `cached_tokens` of prompts were found in the prefix cache, `computed_tokens` of prompts
    were run (a replay after a hit and a recomputation after a preemption included), `output_tokens` were generated.
    """

    number: int
    prefill_requests: int
    decode_requests: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    device_seconds: float
    schedule_seconds: float
    """Host time to decide and dispatch the step."""
    update_seconds: float
    """Host time to process its result."""
    gap_seconds: float
    """Time the device had nothing to do before this step although work was waiting."""
    inter_token_seconds: Float64[np.ndarray, " tokens"]
    """Per output token that was not its choice's first: time since the one before."""


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """One choice that ended. `scheduled` and `first_token` are None if it ended before."""

    request_id: str
    index: int
    n: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    draft_rounds: int
    """Verifications with drafts; the next two are the drafts verified in them, and those accepted."""
    drafted: int
    accepted: int
    preemptions: int
    finish_reason: FinishReason
    arrived: float
    scheduled: float | None
    first_token: float | None
    finished: float


@dataclasses.dataclass(frozen=True)
class RankStats:
    """One data-parallel rank now, and totals of it since the engine started; fields as in `EngineStats`."""

    running: int
    load: float
    """What the scheduler compares ranks by, in tokens of prefill."""
    used_pages: int
    cached_pages: int
    prefix_queries: int
    prefix_hits: int


@dataclasses.dataclass(frozen=True)
class BalanceStats:
    """How even the load of the ranks' experts has been lately, and what was done about it."""

    measured: Mapping[str, float]
    """Per kind of step, "prefill" or "decode": mean load of the ranks / load of the busiest. First drafts of a request
    count as prefill."""
    uniform: Mapping[str, float]
    """The same for uniform random routing of as many tokens: what chance alone leaves."""
    rearrangements: int
    experts_moved: int
    """In the newest rearrangement."""
    failures: int


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """The engine now, and totals since it started."""

    running: int
    waiting: int
    waiting_tokens: int
    slots: int
    pages: int
    used_pages: int
    """Pages of running requests; those of ended ones that only keep a prefix count as free."""
    cached_pages: int
    """Free pages that hold a reusable prefix."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache, each choice once, however often it was preempted."""
    prefix_hits: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    device_seconds: float
    schedule_seconds: float
    update_seconds: float
    gap_seconds: float
    drafts: DraftTotals
    compilations: int
    """Programs compiled after warm-up."""
    ranks: tuple[RankStats, ...]
    balance: Mapping[str, BalanceStats] = dataclasses.field(default_factory=dict)
    """Of "target" and "draft", where experts do not stay where they are."""


class Observer(Protocol):
    """Told by the engine's thread about everything that ends; must be quick and must not raise.

    A class that derives from it need not take what it does not want.
    """

    def step(self, record: StepRecord) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def rejected(self, reason: str) -> None: ...
