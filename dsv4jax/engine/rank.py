"""Slots and pages of one data-parallel rank, and its prefills.

What changes in every step of a choice that decodes stands in `Slots` and is the business of `decoding`.
"""

from collections.abc import Callable

import numpy as np

from dsv4jax.engine.chunking import Chunks
from dsv4jax.engine.in_flight import PrefillInFlight
from dsv4jax.engine.page_pool import PagePool, PrefixHasher
from dsv4jax.engine.plan import Prefill, RankPlan, SlotMask, SlotStart
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.slots import Slots
from dsv4jax.engine.token_mask import Mask, mask_failure, one_mask

_REQUEST_LOAD = 256  # what a running request weighs, in tokens of prefill
_CONTEXT_LOAD = 1 / 64  # and each token in its pages

_IDLE = RankPlan((), (), ())

Failures = list[tuple[Sequence, str]]


class Rank:
    """One rank's slots and pages.

    Args:
      slots: those of all ranks.
    """

    def __init__(self, cfg: SchedulerConfig, number: int, slots: Slots):
        self.number = number
        self.pool = PagePool(cfg.pages)
        self.free_slots = list(range(cfg.slots - 1, -1, -1))
        self.prefilling: list[Sequence] = []
        self.prefix_queries = 0  # prompt tokens looked up, each choice once
        self.prefix_hits = 0  # those of them that no step had to run
        self._cfg = cfg
        self._slots = slots.of_rank(number, cfg.slots)
        self._sequences = self._slots.sequences
        self._new: list[Sequence] = []  # slots to be started in the next step
        self._masks: dict[int, Mask] = {}  # to be sent with the next step

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
        start = self._cfg.replay.start(len(matched) * self._cfg.page_size)
        # Where a token stands in its tile may decide the order of its sums: the same bits need the place of a cold run.
        return start // self._cfg.tile * self._cfg.tile if self._cfg.deterministic else start

    def sequences(self) -> list[Sequence]:
        """The running choices."""
        return [s for s in self._sequences.tolist() if s is not None]

    def match(self, sequence: Sequence) -> list[int] | None:
        """The pages here that hold the choice's prefix; None if it does not fit.

        It fits if a slot is free and the pages for all of its prefill, with one for each running request to grow.
        """
        left = self.pool.available - self.num_running
        if not self.free_slots or left <= 0:
            return None
        matched = self.pool.match(sequence.page_keys) if sequence.request.prompt_logprobs < 0 else []
        needed = self._pages_for(self._prefill_end(sequence) + 1)
        return matched if needed <= left or needed - self.pool.count_held(matched) <= left else None

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
        self._slots.start(slot, sequence, self._cfg)
        self.prefilling.append(sequence)
        self._new.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running choice; what is in flight for it will be ignored."""
        slots, slot = self._slots, sequence.slot
        self.pool.release(sequence.pages)
        slots.sequences[slot] = None
        slots.decoding[slot] = slots.masked[slot] = False
        slots.epochs[slot] += 1
        self._masks.pop(slot, None)
        self.free_slots.append(slot)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self._new:
            self._new.remove(sequence)
        sequence.last_time = float(slots.last_times[slot])
        sequence.slot, sequence.pages, sequence.tokens = -1, [], None

    # Planning.

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
                    pages=self._slots.page_table[sequence.slot, : len(sequence.pages)].copy(),
                    cached=sequence.cached,
                    window_floor=sequence.window_floor,
                    prompt_logprobs=sequence.request.prompt_logprobs,
                )
            )
        return tuple(prefills)

    def take_plan(self, prefills: tuple[Prefill, ...], plain: bool) -> tuple[RankPlan, list[PrefillInFlight]]:
        """The rank's plan, with the state of its prefills moved to after the step.

        Args:
          plain: drafts do not pay now, so that only choices that insist on them get first ones.
        """
        if not (prefills or self._new or self._masks):
            return _IDLE, []
        starts = tuple(
            SlotStart(s.slot, s.tokens, s.prefill_end - len(s.request.prompt), s.sampling, s.request.logit_bias)
            for s in self._new
        )
        masks = tuple(SlotMask(slot, mask) for slot, mask in self._masks.items())
        self._new, self._masks = [], {}
        slots, in_flight, first_drafts = self._slots, [], []
        for chunk in prefills:
            slot = chunk.slot
            sequence = self._sequences[slot]
            counts = chunk.end == sequence.length
            sequence.computed, drafts = chunk.end, False
            if chunk.end == sequence.prefill_end:
                self.prefilling.remove(sequence)
                slots.decoding[slot] = True
                slots.again[slot] = sequence.length - chunk.end
                slots.unread[slot] = slots.ahead[slot] = counts
                if drafts := self._drafts_first(sequence, plain):
                    first_drafts.append(slot)
            in_flight.append(PrefillInFlight(sequence, int(slots.epochs[slot]), chunk.end, counts, drafts))
        return RankPlan(starts, masks, prefills, tuple(first_drafts)), in_flight

    def _drafts_first(self, sequence: Sequence, plain: bool) -> bool:
        """Whether a choice whose prompt has just been dispatched to its end can verify drafts in its next step."""
        slots, slot = self._slots, sequence.slot
        wanted = slots.least_drafts if plain else slots.most_drafts
        wants = wanted[slot] > 0 and slots.again[slot] == 0
        room = min(slots.ends[slot] - 2, slots.draft_contexts[slot]) > slots.lengths[slot]
        return bool(wants and room)

    # For choices that decode.

    def grow(self, sequence: Sequence, preempt: Callable[[Sequence], None]) -> None:
        """One more page for a choice; if there is none, the worst ones are preempted, which it may be itself."""
        while self.pool.available < 1 and not self._give_back():
            victim = max(self.sequences(), key=lambda s: (s.request.priority, s.number))
            preempt(victim)
            if victim is sequence:
                return
        self._add_page(sequence)

    def grow_for_drafts(self, sequence: Sequence, tokens: int) -> None:
        """Pages for that many tokens, as far as there are some that nobody needs more."""
        while tokens > len(sequence.pages) * self._cfg.page_size and self.pool.available > self.num_running:
            self._add_page(sequence)

    def drafts_for_mask(self, sequence: Sequence, drafts: int, failed: Failures) -> int | None:
        """Sends the masks of the next tokens if needed; for how many drafts, None if they cannot be known yet."""
        slots, slot = self._slots, sequence.slot
        unread, ahead = int(slots.unread[slot]), int(slots.ahead[slot])
        slots.pause_tokens[slot] = -1
        if slots.again[slot] > 1:
            return 0
        if not drafts:
            waits = ahead > unread or (unread and sequence.mask.waits_for_tokens)
            return 0 if not waits and self._send_mask(sequence, unread, failed) else None
        left = sequence.mask.unchanged_for - ahead
        if left > drafts or (unread and left > 1):
            pauses = sequence.mask.pause_tokens
            slots.pause_tokens[slot, : len(pauses)] = pauses
            return min(drafts, left - 1) if self._send_mask(sequence, 0, failed) else None
        if unread:
            return None
        known = slots.drafts[slot, : min(drafts, slots.draft_counts[slot])]
        try:
            masks = sequence.mask.along(known.tolist())
        except Exception as error:  # whatever it is, it is no matter of the other choices
            failed.append((sequence, mask_failure(error)))
            return None
        self._set_mask(sequence, one_mask(masks))
        return len(masks) - 1

    def publish(self, sequence: Sequence, confirmed: int, hasher: PrefixHasher) -> None:
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

    def distrust(self, sequence: Sequence) -> None:
        """No page of a choice is reused from now on: it may hold what made its logits undefined."""
        self.pool.withdraw(sequence.pages)
        sequence.published = len(sequence.pages)

    def check_integrity(self) -> None:
        """Raises AssertionError if slots or pages are lost or shared wrongly."""
        running = self.sequences()
        self.pool.check([s.pages for s in running])
        slots = [s.slot for s in running]
        assert sorted([*slots, *self.free_slots]) == list(range(len(self._sequences))), "a slot is lost or given twice"
        assert all(self._sequences[s.slot] is s for s in running), "a slot belongs to another choice"
        assert {s.slot for s in self.prefilling} <= set(slots), "a choice without a slot is in prefill"
        assert not np.any(self._slots.decoding[self.free_slots]), "a free slot decodes"
        assert not np.any(self._slots.masked[self.free_slots]), "a free slot has a mask"

    def _prefill_end(self, sequence: Sequence) -> int:
        return len(sequence.request.prompt) if self._cfg.deterministic else sequence.length

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._cfg.page_size)

    def _give_back(self) -> bool:
        """Frees pages that drafts might have needed; whether there were any."""
        size, slots = self._cfg.page_size, self._slots
        rows = np.flatnonzero(slots.decoding & (slots.again == 0))
        needed = -(-np.minimum(slots.positions(rows) + 1, slots.ends[rows] - 1) // size)
        found = np.flatnonzero(needed * size < slots.covered[rows])
        for slot, count in zip(rows[found].tolist(), needed[found].tolist(), strict=True):
            sequence = self._sequences[slot]
            self.pool.release(sequence.pages[count:])
            del sequence.pages[count:]
            slots.covered[slot] = count * size
        return bool(found.size)

    def _add_page(self, sequence: Sequence) -> None:
        sequence.pages += self.pool.allocate(1)
        self._slots.page_table[sequence.slot, len(sequence.pages) - 1] = sequence.pages[-1]
        self._slots.covered[sequence.slot] = len(sequence.pages) * self._cfg.page_size

    def _send_mask(self, sequence: Sequence, ahead: int, failed: Failures) -> bool:
        """Sends the mask of the token `ahead` of the known ones if it changed; False if it has none."""
        if any(sequence is other for other, _ in failed):
            return False
        try:
            mask = sequence.mask.next(ahead)
        except Exception as error:
            if not ahead:  # the token under way may end the choice
                failed.append((sequence, mask_failure(error)))
            return False
        self._set_mask(sequence, mask)
        return True

    def _set_mask(self, sequence: Sequence, mask: Mask) -> None:
        if mask is not sequence.mask_sent:
            sequence.mask_sent = self._masks[sequence.slot] = mask
