"""One choice of a request while the engine works on it."""

import dataclasses

import numpy as np
from jaxtyping import Int32, UInt64

from dsv4jax.engine.page_pool import PageKey
from dsv4jax.engine.request import FinishReason, GenerationRequest, PromptLogprobs
from dsv4jax.engine.token_mask import Mask, TokenMask
from dsv4jax.sampling_settings import RequestSampling


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """State of one choice: what was asked, where it runs, how far it is, what came out.

    Once all of prefill is dispatched, the rank's arrays know its position; see `Rank`.

    Attributes:
      number: order of arrival.
      leader: the request's choice 0, whose prompt pages this one waits for; None for choice 0.
      followers: choices that wait for this one.
      slot, rank: where it runs; slot is -1 while it does not, and rank then the last one it had, -1 before the first.
      generated, logprobs, top_logprobs: tokens known to the host, and what is known of them if asked for.
      page_state, page_keys: hash state behind the last hashed page, and the keys up to it.
      tokens: what prefill runs: the prompt, after a preemption with generated tokens behind it.
      prefill_end: tokens to run in prefill; later ones are decoded one at a time.
      cached: tokens whose pages were found in the prefix cache.
      computed: prefill tokens whose step was dispatched.
      published: pages offered to the prefix cache.
      mask_sent: the mask that the slot has on the device.
      overtaken: later arrivals admitted before this one while it waited.
      first_cached: prompt tokens that no step ran, when first admitted; -1 before.
      failures: steps that failed with it.
      last_time: when its newest token came, as of its last preemption.
      draft_rounds, drafted, accepted: verifications with drafts, the drafts verified in them, and those accepted.
      unsent: index of the first generated token that the caller has not taken.
    """

    request: GenerationRequest
    index: int
    number: int
    arrived: float
    sampling: RequestSampling
    mask: TokenMask | None
    page_state: UInt64[np.ndarray, "2"]
    page_keys: list[PageKey]
    leader: "Sequence | None" = None
    followers: "list[Sequence]" = dataclasses.field(default_factory=list)
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    slot: int = -1
    rank: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: Int32[np.ndarray, " tokens"] | None = None
    prefill_end: int = 0
    cached: int = 0
    computed: int = 0
    window_floor: int = 0
    published: int = 0
    last_prefill: int = -1
    mask_sent: Mask = None
    overtaken: int = 0
    first_cached: int = -1
    preemptions: int = 0
    failures: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_time: float = 0.0
    draft_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    unsent: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        """Prompt and generated tokens known to the host."""
        return len(self.request.prompt) + len(self.generated)

    def count_drafts(self, verified: int, accepted: int) -> None:
        """Counts a verification."""
        self.draft_rounds += 1
        self.drafted += verified
        self.accepted += accepted

    def token(self, position: int) -> int:
        """The known token at a position."""
        prompt = self.request.prompt
        return int(prompt[position]) if position < len(prompt) else self.generated[position - len(prompt)]

    def tokens_between(self, first: int, end: int) -> Int32[np.ndarray, " tokens"]:
        """The known tokens of positions first..end - 1."""
        prompt = self.request.prompt
        generated = self.generated[max(0, first - len(prompt)) : max(0, end - len(prompt))]
        return np.concatenate([prompt[first:end], np.array(generated, np.int32)])
