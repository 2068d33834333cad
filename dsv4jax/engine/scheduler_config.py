"""Sizes and policy of the scheduler."""

import dataclasses

from dsv4jax.engine.replay import ReplayRule


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and policy.

    Args:
      slots, pages: per rank.
      prefill_tokens, prefill_requests: most prefill work of one step and rank.
      tile: prefill chunks occupy multiples of this many tokens of a step.
      prefill_every, decode_every: while both kinds of work wait, prefill runs in every n-th step and decode in every
        n-th; 1 and 1 mix both in each step. Either bounds how long the other can be held up, so one of them must be 1.
      prefill_context: a token behind this many takes twice as long to prefill as the first of a prompt; None if all
        take the same time. See `chunking`.
      max_admissions: requests started per step, times the number of ranks.
      max_waiting, max_waiting_tokens: beyond them new requests are turned away.
      max_overtakes: how often a waiting request may see a later one admitted first, because it fits or its priority is
        better, before everybody has to wait for it.
      prefix_cache: keep pages of earlier requests for reuse.
      deterministic: results do not depend on what else is running or cached: only pages written by prefill are reused,
        and generated tokens lost to a preemption are run again one by one. Needs `replay.mode` "exact".
      drafts: the most drafts that a request verifies in a step; 0 if the model drafts none.
      tokens_on_host: a token must be known to the host before it can be run, so steps do not overlap.
      namespace: names the model, the cache layout and the tokenizer that page keys belong to.

    Raises:
      ValueError: a value is out of range or contradicts another.
    """

    slots: int
    pages: int
    max_model_len: int
    eos_id: int
    replay: ReplayRule
    ranks: int = 1
    page_size: int = 64
    prefill_tokens: int = 2048
    prefill_requests: int = 8
    tile: int = 16
    prefill_every: int = 1
    decode_every: int = 1
    prefill_context: int | None = None
    max_admissions: int = 8
    max_waiting: int = 2048
    max_waiting_tokens: int = 8_000_000
    max_overtakes: int = 256
    prefix_cache: bool = True
    deterministic: bool = False
    drafts: int = 0
    tokens_on_host: bool = False
    namespace: bytes = b""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name not in ("eos_id", "drafts") and value < 1:
                raise ValueError(f"{field.name} = {value}: must be at least 1")
        if self.prefill_tokens < self.tile * self.prefill_requests:
            raise ValueError(
                f"prefill_tokens = {self.prefill_tokens}: must hold prefill_requests = {self.prefill_requests} tiles of"
                f" {self.tile}"
            )
        if min(self.prefill_every, self.decode_every) > 1:
            raise ValueError(
                f"prefill_every = {self.prefill_every} and decode_every = {self.decode_every}: one of them must be 1"
            )
        if self.prefill_context is not None and self.prefill_context < 1:
            raise ValueError(f"prefill_context = {self.prefill_context}: must be at least 1, or None")
        if self.drafts < 0:
            raise ValueError(f"drafts = {self.drafts}: must be at least 0")
        if self.drafts and self.tokens_on_host:
            raise ValueError(
                f"drafts = {self.drafts}: must be 0 with tokens_on_host, because only the device knows drafted tokens"
            )
        if self.deterministic and self.replay.mode != "exact":
            raise ValueError(f"deterministic: replay must be 'exact', not {self.replay.mode!r}")
