"""Slots and pages of one data-parallel rank, and its part of each step.

While a choice decodes, what changes in every step stands in arrays over slots, so that a step of hundreds of requests
costs the host a few numpy calls and little Python per request.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from dsv4jax.engine.chunking import Chunks
from dsv4jax.engine.page_pool import PagePool, PrefixHasher
from dsv4jax.engine.plan import NEXT_TOKEN, Decodes, Prefill, RankPlan, RankResult, Sampled, SlotMask, SlotStart
from dsv4jax.engine.request import FinishReason
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.token_mask import MaskError

_REQUEST_LOAD = 256  # what a running request weighs, in tokens of prefill
_CONTEXT_LOAD = 1 / 64  # and each token in its pages

Failures = list[tuple[Sequence, str]]
_UNDEFINED = "the model's logits were undefined (NaN or infinite)"


@dataclasses.dataclass(eq=False)
class RankInFlight:
    """What a rank has to remember of a dispatched step. A slot's epoch changes when it loses its choice."""

    prefills: list[tuple[Sequence, int, int, bool]]  # choice, epoch, end, whether its sampled token counts
    slots: Int32[np.ndarray, " decodes"]
    starts: Int32[np.ndarray, " decodes"]
    epochs: Int64[np.ndarray, " decodes"]
    counts: Bool[np.ndarray, " decodes"]  # whether the sampled token counts
    sequences: list[Sequence]  # all that take part


@dataclasses.dataclass(eq=False)
class InFlight:
    number: int
    parts: list[RankInFlight]


@dataclasses.dataclass(eq=False)
class Update:
    """What a step's result brought."""

    news: list[Sequence] = dataclasses.field(default_factory=list)
    """Choices with a new token."""
    first_tokens: list[Sequence] = dataclasses.field(default_factory=list)
    finished: list[tuple[Sequence, FinishReason, str | None]] = dataclasses.field(default_factory=list)
    gaps: list[Float64[np.ndarray, " tokens"]] = dataclasses.field(default_factory=list)
    """Seconds since the token before, per token that was not its choice's first."""


class Rank:
    """One rank's slots and pages."""

    def __init__(self, cfg: SchedulerConfig, number: int):
        self.number = number
        self.pool = PagePool(cfg.pages)
        self.free_slots = list(range(cfg.slots - 1, -1, -1))
        self.prefilling: list[Sequence] = []
        self.prefix_queries = 0  # prompt tokens looked up, each choice once
        self.prefix_hits = 0  # those of them that no step had to run
        self._cfg = cfg
        self._sequences: list[Sequence | None] = [None] * cfg.slots
        self._masked: set[int] = set()
        self._new: list[Sequence] = []  # slots to be started in the next step
        self._masks: list[SlotMask] = []
        slots = cfg.slots
        self._epoch = np.zeros(slots, np.int64)
        self._decoding = np.zeros(slots, bool)
        self._position = np.zeros(slots, np.int32)  # next to run
        self._length = np.zeros(slots, np.int32)  # prompt and generated tokens known to the host
        self._unread = np.zeros(slots, np.int32)  # sampled tokens the host does not know yet
        self._end = np.zeros(slots, np.int32)  # prompt + max_tokens
        self._last = np.zeros(slots, np.int32)  # last known token
        self._eos = np.zeros(slots, np.int32)  # ends the choice; -1 if none does
        self._check = np.zeros(slots, bool)  # more than EOS and length to look at after each token
        self._last_time = np.zeros(slots)
        self._page_count = np.zeros(slots, np.int32)
        self._page_table = np.zeros((slots, -(-cfg.max_model_len // cfg.page_size)), np.int32)

    # Admission.

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self.free_slots)

    @property
    def load(self) -> float:
        """The work here, in tokens of prefill: those left to run, and a share for each running request."""
        left = sum(s.prefill_end - s.computed for s in self.prefilling)
        held = (self.pool.num_pages - self.pool.available) * self._cfg.page_size
        return left + _REQUEST_LOAD * self.num_running + _CONTEXT_LOAD * held

    def saved_tokens(self, matched: list[int]) -> int:
        """How many tokens need not be run behind the pages that `match` found."""
        return self._cfg.replay.start(len(matched) * self._cfg.page_size)

    def sequences(self) -> list[Sequence]:
        """The running choices."""
        return [s for s in self._sequences if s is not None]

    def match(self, sequence: Sequence) -> list[int] | None:
        """The pages here that hold the choice's prefix; None if it does not fit.

        It fits if a slot is free and the pages for all of its prefill, with one for each running request to grow.
        """
        if not self.free_slots or self.num_running >= self.pool.available:
            return None
        matched = self.pool.match(sequence.page_keys) if sequence.request.prompt_logprobs < 0 else []
        needed = self._pages_for(self._prefill_end(sequence) + 1) - self.pool.count_held(matched)
        return matched if needed + self.num_running <= self.pool.available else None

    def admit(self, sequence: Sequence, matched: list[int], now: float) -> None:
        """Gives a slot and pages to a choice that fits, behind the pages that `match` found."""
        end = self._prefill_end(sequence)
        slot = self.free_slots.pop()
        prompt = sequence.request.prompt
        known = prompt
        if end > len(prompt):
            known = np.concatenate([prompt, np.array(sequence.generated, np.int32)])
        self.pool.hold(matched)
        sequence.pages = matched + self.pool.allocate(self._pages_for(end + 1) - len(matched))
        sequence.rank, sequence.slot, sequence.tokens, sequence.prefill_end = self.number, slot, known, end
        sequence.cached = len(matched) * self._cfg.page_size
        sequence.window_floor = self.saved_tokens(matched)
        sequence.computed = sequence.window_floor
        sequence.published = len(matched)
        sequence.mask_sent = None
        if sequence.first_token is None:
            sequence.prompt_logprobs.clear()
        if sequence.first_cached < 0:
            sequence.first_cached, sequence.scheduled = sequence.window_floor, now
            self.prefix_queries += len(prompt)
            self.prefix_hits += sequence.first_cached
        self._sequences[slot] = sequence
        self._decoding[slot] = False
        self._length[slot] = sequence.length
        self._unread[slot] = 0
        self._end[slot] = len(prompt) + sequence.request.max_tokens
        self._last[slot] = sequence.token(sequence.length - 1)
        self._eos[slot] = -1 if sequence.request.ignore_eos else self._cfg.eos_id
        self._check[slot] = bool(sequence.request.stop_token_ids) or sequence.mask is not None
        self._last_time[slot] = sequence.last_time
        self._page_count[slot] = len(sequence.pages)
        self._page_table[slot, : len(sequence.pages)] = sequence.pages
        self.prefilling.append(sequence)
        self._new.append(sequence)
        if sequence.mask is not None:
            self._masked.add(slot)

    def remove(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running choice; what is in flight for it will be ignored."""
        slot = sequence.slot
        self.pool.release(sequence.pages)
        self._sequences[slot] = None
        self._decoding[slot] = False
        self._epoch[slot] += 1
        self._masked.discard(slot)
        self._masks = [mask for mask in self._masks if mask.slot != slot]
        self.free_slots.append(slot)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self._new:
            self._new.remove(sequence)
        sequence.last_time = float(self._last_time[slot])
        sequence.slot, sequence.rank, sequence.pages, sequence.tokens = -1, -1, [], None

    # Planning.

    def wants_decode(self) -> bool:
        """Whether a choice is decoding and has tokens left to choose."""
        return bool(np.any(self._runnable()))

    def plan_decodes(self, preempt: Callable[[Sequence], None], failed: Failures) -> Decodes | None:
        """One token of each choice that can run; preempts the worst choices if pages run out."""
        slots = np.flatnonzero(self._runnable())
        if self._masked:
            slots = slots[[slot not in self._masked or self._mask_ready(slot, failed) for slot in slots.tolist()]]
        for slot in slots[self._position[slots] >= self._page_count[slots] * self._cfg.page_size].tolist():
            if self._decoding[slot]:
                self._grow(self._sequences[slot], preempt)
        slots = slots[self._decoding[slots]].astype(np.int32)
        if not slots.size:
            return None
        starts = self._position[slots]
        known = starts < self._length[slots]
        tokens = np.where(known, self._last[slots], NEXT_TOKEN).astype(np.int32)
        for row in np.flatnonzero(starts < self._length[slots] - 1).tolist():
            tokens[row] = self._sequences[slots[row]].token(int(starts[row]))
        width = int(self._page_count[slots].max())
        return Decodes(slots, starts, tokens, self._page_table[slots, :width])

    def ready_prefills(self, failed: Failures) -> list[Sequence]:
        """The choices whose prefill can go on."""
        return [s for s in self.prefilling if s.mask is None or self._send_mask(s, 0, failed)]

    def plan_prefills(self, chunks: Chunks, step: int) -> tuple[Prefill, ...]:
        """What the chunks are to the executor."""
        prefills = []
        for sequence, end in chunks:
            sequence.last_prefill = step
            prefills.append(
                Prefill(
                    slot=sequence.slot,
                    tokens=sequence.tokens,
                    start=sequence.computed,
                    end=end,
                    pages=self._page_table[sequence.slot, : len(sequence.pages)].copy(),
                    cached=sequence.cached,
                    window_floor=sequence.window_floor,
                    prompt_logprobs=sequence.request.prompt_logprobs,
                )
            )
        return tuple(prefills)

    def take_plan(self, prefills: tuple[Prefill, ...], decodes: Decodes | None) -> tuple[RankPlan, RankInFlight]:
        """The rank's plan, with its state moved to after the step."""
        starts = tuple(
            SlotStart(s.slot, s.tokens, s.prefill_end - len(s.request.prompt), s.sampling, s.request.logit_bias)
            for s in self._new
        )
        masks = tuple(self._masks)
        self._new, self._masks = [], []
        nothing = np.zeros(0, np.int32)
        part = RankInFlight([], nothing, nothing, nothing.astype(np.int64), nothing.astype(bool), [])
        for chunk in prefills:
            sequence = self._sequences[chunk.slot]
            counts = chunk.end == sequence.length
            part.prefills.append((sequence, int(self._epoch[chunk.slot]), chunk.end, counts))
            part.sequences.append(sequence)
            sequence.computed = chunk.end
            if chunk.end == sequence.prefill_end:
                self.prefilling.remove(sequence)
                self._decoding[chunk.slot] = True
                self._position[chunk.slot] = chunk.end
                self._unread[chunk.slot] = counts
        if decodes is not None:
            slots = decodes.slots
            part.slots, part.starts, part.epochs = slots, decodes.starts, self._epoch[slots]
            part.counts = decodes.starts == self._length[slots] + self._unread[slots] - 1
            part.sequences += [self._sequences[slot] for slot in slots.tolist()]
            self._position[slots] += 1
            self._unread[slots] += part.counts
        return RankPlan(starts, masks, prefills, decodes), part

    # Results.

    def update(self, part: RankInFlight, result: RankResult, now: float, hasher: PrefixHasher, update: Update) -> None:
        """Takes a step's result: tokens, finished choices, pages to be reused."""
        for row, (sequence, epoch, end, counts) in enumerate(part.prefills):
            slot = sequence.slot
            if slot < 0 or self._epoch[slot] != epoch:
                continue
            if sequence.request.prompt_logprobs >= 0 and sequence.first_token is None:
                sequence.prompt_logprobs.append(result.prompt_logprobs[row])
            self._publish(sequence, end, hasher)
            if counts:
                if sequence.first_token is None:
                    sequence.first_token = now
                    update.first_tokens.append(sequence)
                else:
                    update.gaps.append(now - self._last_time[[slot]])
                self._take(np.array([slot], np.int32), _row(result.prefills, row), now, update)
        if not part.slots.size:
            return
        alive = self._epoch[part.slots] == part.epochs
        written = part.slots[alive]
        positions = part.starts[alive] + 1
        for row in np.flatnonzero(positions % self._cfg.page_size == 0).tolist():
            if not self._cfg.deterministic:
                self._publish(self._sequences[written[row]], int(positions[row]), hasher)
        rows = np.flatnonzero(alive & part.counts)
        slots = part.slots[rows]
        update.gaps.append(now - self._last_time[slots])
        self._take(slots, _row(result.decodes, rows), now, update)

    def check_integrity(self) -> None:
        """Raises AssertionError if slots or pages are lost or shared wrongly."""
        running = self.sequences()
        self.pool.check([s.pages for s in running])
        slots = [s.slot for s in running]
        assert sorted([*slots, *self.free_slots]) == list(range(len(self._sequences))), "a slot is lost or given twice"
        assert all(self._sequences[s.slot] is s for s in running), "a slot belongs to another choice"
        assert {s.slot for s in self.prefilling} <= set(slots), "a choice without a slot is in prefill"
        assert not np.any(self._decoding[self.free_slots]), "a free slot decodes"
        assert self._masked <= set(slots), "a free slot has a mask"

    def _runnable(self) -> np.ndarray:
        runnable = self._decoding & (self._length + self._unread < self._end)
        return runnable & (self._unread == 0) if self._cfg.tokens_on_host else runnable

    def _prefill_end(self, sequence: Sequence) -> int:
        return len(sequence.request.prompt) if self._cfg.deterministic else sequence.length

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._cfg.page_size)

    def _grow(self, sequence: Sequence, preempt: Callable[[Sequence], None]) -> None:
        while self.pool.available < 1:
            victim = max(self.sequences(), key=lambda s: (s.request.priority, s.number))
            preempt(victim)
            if victim is sequence:
                return
        sequence.pages += self.pool.allocate(1)
        self._page_table[sequence.slot, len(sequence.pages) - 1] = sequence.pages[-1]
        self._page_count[sequence.slot] = len(sequence.pages)

    def _mask_ready(self, slot: int, failed: Failures) -> bool:
        """Sends the mask of the next token if needed; False if it cannot be known yet."""
        sequence, unread = self._sequences[slot], int(self._unread[slot])
        if self._position[slot] < self._length[slot] - 1:
            return True
        if unread and sequence.mask.waits_for_tokens:
            return False
        return self._send_mask(sequence, unread, failed)

    def _send_mask(self, sequence: Sequence, ahead: int, failed: Failures) -> bool:
        """Sends the mask of the token `ahead` of the known ones if it changed; False if it has none."""
        if any(sequence is other for other, _ in failed):
            return False
        try:
            mask = sequence.mask.next(ahead)
        except MaskError as error:
            if not ahead:  # the token under way may end the choice
                failed.append((sequence, str(error)))
            return False
        if mask is not sequence.mask_sent:
            self._masks.append(SlotMask(sequence.slot, mask))
            sequence.mask_sent = mask
        return True

    def _publish(self, sequence: Sequence, confirmed: int, hasher: PrefixHasher) -> None:
        """Offers completely written pages up to a position for reuse."""
        size = self._cfg.page_size
        if not self._cfg.prefix_cache:
            return
        if (first := len(sequence.page_keys) * size) + size <= confirmed:
            tokens = sequence.tokens_between(first, confirmed)
            sequence.page_state, keys = hasher.extend(sequence.page_state, tokens, first)
            sequence.page_keys += keys
        for i in range(sequence.published, confirmed // size):
            self.pool.publish(sequence.pages[i], sequence.page_keys[i])
        sequence.published = max(sequence.published, confirmed // size)

    def _take(self, slots: np.ndarray, sampled: Sampled, now: float, update: Update) -> None:
        """Appends one sampled token to each slot's choice and sees which choices end."""
        self._unread[slots] -= 1
        self._length[slots] += 1
        self._last[slots] = sampled.tokens
        self._last_time[slots] = now
        undefined = np.isnan(sampled.logprobs)
        ended = (sampled.tokens == self._eos[slots]) | (self._length[slots] >= self._end[slots])
        look = ended | undefined | self._check[slots]
        tokens, logprobs, look = sampled.tokens.tolist(), sampled.logprobs.tolist(), look.tolist()
        for row, (slot, token) in enumerate(zip(slots.tolist(), tokens, strict=True)):
            sequence = self._sequences[slot]
            if look[row] and undefined[row]:
                update.finished.append((sequence, "error", _UNDEFINED))
                continue
            sequence.generated.append(token)
            update.news.append(sequence)
            if sequence.sampling.top_logprobs >= 0:
                sequence.logprobs.append(logprobs[row])
                best = sequence.sampling.top_logprobs
                pairs = ()
                if best:
                    ids, values = sampled.top_tokens[row, :best], sampled.top_logprobs[row, :best]
                    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
                sequence.top_logprobs.append(pairs)
            if look[row]:
                self._see_end(sequence, token, update)

    def _see_end(self, sequence: Sequence, token: int, update: Update) -> None:
        request = sequence.request
        if sequence.mask is not None:
            try:
                sequence.mask.push(token)
            except MaskError as error:
                update.finished.append((sequence, "error", str(error)))
                return
        if token == self._cfg.eos_id and not request.ignore_eos:
            update.finished.append((sequence, "stop", None))
        elif token in request.stop_token_ids:
            sequence.stop_reason = token
            update.finished.append((sequence, "stop", None))
        elif len(sequence.generated) >= request.max_tokens:
            update.finished.append((sequence, "length", None))


def _row(sampled: Sampled, rows: int | np.ndarray) -> Sampled:
    """The results of one row or several, as arrays."""
    rows = np.atleast_1d(rows)
    top_tokens = None if sampled.top_tokens is None else sampled.top_tokens[rows]
    top_logprobs = None if sampled.top_logprobs is None else sampled.top_logprobs[rows]
    return Sampled(sampled.tokens[rows], sampled.logprobs[rows], top_tokens, top_logprobs)
