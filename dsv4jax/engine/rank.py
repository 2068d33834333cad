"""Slots and pages of one data-parallel rank, and its part of each step.

While a choice decodes, what changes in every step stands in arrays over slots, so that a step of hundreds of requests
costs the host a few numpy calls and little Python per request.

With drafts, only the device knows how many tokens the steps in flight bring a choice: each at least one, unless the
choice was at its end, and at most one more than it verifies drafts. The next step is planned for the most: pages for
every draft that may be run. If pages are short, fewer drafts are verified, and pages that turned out to be unneeded are
given back before anybody is preempted. A choice leaves no drafts behind when it loses its slot.

What a choice may be given is masked, and a mask may change with every token. Where it holds for all tokens in flight
and of the next step, unless one of a few `pause_tokens` is among them, steps overlap, and the device stops behind such
a token until the host has seen it. Otherwise the host waits for the drafts themselves and sends the mask behind each.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

from dsv4jax.engine.chunking import Chunks
from dsv4jax.engine.draft_totals import DraftTotals
from dsv4jax.engine.in_flight import RankInFlight, Running, Update, rows_of, take_logprobs
from dsv4jax.engine.page_pool import PagePool, PrefixHasher
from dsv4jax.engine.plan import (
    NEXT_TOKEN,
    Decodes,
    Prefill,
    RankPlan,
    RankResult,
    Sampled,
    SlotMask,
    SlotStart,
    Speculated,
    Speculation,
)
from dsv4jax.engine.request import FinishReason
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.token_mask import Mask, MaskError, one_mask
from dsv4jax.sampling_settings import MAX_PAUSE_TOKENS

_REQUEST_LOAD = 256  # what a running request weighs, in tokens of prefill
_CONTEXT_LOAD = 1 / 64  # and each token in its pages

Failures = list[tuple[Sequence, str]]
Chosen = tuple[Int32[np.ndarray, " requests"], Int32[np.ndarray, " requests"], Bool[np.ndarray, " requests"]]
"""Slots of choices that decode in a step, the most drafts that each may verify, and whether each drafts at all."""
_UNDEFINED = "the model's logits were undefined (NaN or infinite)"


class Rank:
    """One rank's slots and pages."""

    def __init__(self, cfg: SchedulerConfig, number: int):
        self.number = number
        self.pool = PagePool(cfg.pages)
        self.free_slots = list(range(cfg.slots - 1, -1, -1))
        self.prefilling: list[Sequence] = []
        self.prefix_queries = 0  # prompt tokens looked up, each choice once
        self.prefix_hits = 0  # those of them that no step had to run
        self.drafts = DraftTotals.zero(cfg.drafts)
        self._cfg = cfg
        self._sequences: list[Sequence | None] = [None] * cfg.slots
        self._masked: set[int] = set()
        self._new: list[Sequence] = []  # slots to be started in the next step
        self._masks: dict[int, Mask] = {}  # to be sent with the next step
        slots = cfg.slots
        self._epoch = np.zeros(slots, np.int64)
        self._decoding = np.zeros(slots, bool)
        self._length = np.zeros(slots, np.int32)  # prompt and generated tokens known to the host
        self._again = np.zeros(slots, np.int32)  # the last ones of these, to be run again one by one
        self._unread = np.zeros(slots, np.int32)  # steps in flight that bring tokens
        self._ahead = np.zeros(slots, np.int32)  # the most tokens they bring
        self._least_drafts = np.zeros(slots, np.int32)
        self._most_drafts = np.zeros(slots, np.int32)
        self._draft_context = np.zeros(slots, np.int32)  # no drafts from this position on
        self._drafts = np.zeros((slots, cfg.drafts), np.int32)  # that the newest step read has left in the slot
        self._draft_count = np.zeros(slots, np.int32)
        self._pause_tokens = np.full((slots, MAX_PAUSE_TOKENS), -1, np.int32)
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
        self._again[slot] = self._unread[slot] = self._ahead[slot] = 0
        drafts = sequence.request.drafts
        self._least_drafts[slot] = drafts or 0
        self._most_drafts[slot] = self._cfg.drafts if drafts is None else drafts
        context = sequence.request.draft_context
        self._draft_context[slot] = self._cfg.max_model_len if context is None else context
        self._draft_count[slot] = 0
        self._pause_tokens[slot] = -1
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
        self._masks.pop(slot, None)
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

    def choose_decodes(self, failed: Failures) -> Chosen:
        """The choices that can run, and how many drafts each may verify."""
        slots = np.flatnonzero(self._runnable()).astype(np.int32)
        drafts = np.where(self._again[slots] == 0, self._most_drafts[slots], 0)
        too_long = self._positions(slots) >= self._draft_context[slots]
        self.drafts.withheld["context"] += int(np.count_nonzero(too_long & (drafts > 0)))
        drafts[too_long] = 0
        ready, wanted = np.ones(len(slots), bool), drafts > 0
        if self._masked:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._masked:
                    allowed = self._drafts_for_mask(slot, int(drafts[row]), failed)
                    ready[row], drafts[row] = allowed is not None, allowed or 0
        return slots[ready], drafts[ready], wanted[ready]

    def must_speculate(self, chosen: Chosen) -> bool:
        """Whether only a step with drafts can run these choices: some draft, or the host lacks their position."""
        slots, _, wanted = chosen
        return bool(np.any(wanted | (self._ahead[slots] != self._unread[slots])))

    def plan_decodes(
        self, chosen: Chosen, speculate: bool, preempt: Callable[[Sequence], None]
    ) -> tuple[Decodes | None, Speculation | None]:
        """One token of each of the choices, and with `speculate` drafts behind it, of some or of all.

        Preempts the worst choices if pages run out.
        """
        (slots, drafts, _), size = chosen, self._cfg.page_size
        needed = np.minimum(self._positions(slots) + 1, self._end[slots] - 1)
        for slot in slots[needed > self._page_count[slots] * size].tolist():
            if self._decoding[slot]:
                self._grow(self._sequences[slot], preempt)
        kept = self._decoding[slots]
        slots, drafts = slots[kept], drafts[kept]
        if speculate:
            drafts = self._drafts_on_pages(slots, drafts)
            # A step without drafts brings one token: it must not be one that finds its choice in a pause.
            certain = (drafts > 0) | (self._unread[slots] == 0) | (self._pause_tokens[slots] < 0).all(axis=1)
            slots, drafts = slots[certain], drafts[certain]
        if not slots.size:
            return None, None
        positions, again = self._positions(slots), self._again[slots]
        tokens = np.where(self._unread[slots] == 0, self._last[slots], NEXT_TOKEN).astype(np.int32)
        # With drafts the slot has the newest token, and maybe a later one than the host.
        tokens[(again == 0) & speculate] = NEXT_TOKEN
        for row in np.flatnonzero(again > 1).tolist():
            tokens[row] = self._sequences[slots[row]].token(int(positions[row]))
        table = self._page_table[slots, : int(self._page_count[slots].max())]
        if not speculate:
            return Decodes(slots, positions, tokens, table), None
        return None, Speculation(
            slots=slots,
            positions=positions,
            ends=self._end[slots] - 1,
            tokens=tokens,
            min_drafts=np.minimum(self._least_drafts[slots], drafts),
            max_drafts=drafts,
            pause_tokens=self._pause_tokens[slots],
            seen=self._length[slots] - 1,
            page_table=table,
        )

    def _drafts_on_pages(
        self, slots: Int32[np.ndarray, " requests"], drafts: Int32[np.ndarray, " requests"]
    ) -> Int32[np.ndarray, " requests"]:
        """The drafts for which there are pages, after taking those that nobody needs more."""
        size, ends = self._cfg.page_size, self._end[slots] - 1
        first = self._positions(slots) + 1
        wanted = np.minimum(first + drafts, ends)
        for row in np.flatnonzero(wanted > self._page_count[slots] * size).tolist():
            while wanted[row] > self._page_count[slots[row]] * size and self.pool.available > self.num_running:
                self._add_page(self._sequences[slots[row]])
        covered = self._page_count[slots] * size
        fitting = np.where(covered >= ends, drafts, np.clip(covered - first, 0, drafts))
        self.drafts.withheld["pages"] += int(np.count_nonzero((fitting == 0) & (drafts > 0)))
        return fitting.astype(np.int32)

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

    def take_plan(
        self, prefills: tuple[Prefill, ...], decodes: Decodes | None, speculation: Speculation | None
    ) -> tuple[RankPlan, RankInFlight]:
        """The rank's plan, with its state moved to after the step."""
        starts = tuple(
            SlotStart(s.slot, s.tokens, s.prefill_end - len(s.request.prompt), s.sampling, s.request.logit_bias)
            for s in self._new
        )
        masks = tuple(SlotMask(slot, mask) for slot, mask in self._masks.items())
        self._new, self._masks = [], {}
        part = RankInFlight([], None, None, [], [])
        first_drafts = []
        for chunk in prefills:
            sequence, slot = self._sequences[chunk.slot], chunk.slot
            counts = chunk.end == sequence.length
            part.prefills.append((sequence, int(self._epoch[slot]), chunk.end, counts))
            part.sequences.append(sequence)
            sequence.computed = chunk.end
            if chunk.end == sequence.prefill_end:
                self.prefilling.remove(sequence)
                self._decoding[slot] = True
                self._again[slot] = sequence.length - chunk.end
                self._unread[slot] = self._ahead[slot] = counts
                if self._drafts_first(sequence):
                    first_drafts.append(slot)
                    part.first_drafts.append((slot, int(self._epoch[slot])))
        for running in (decodes, speculation):
            if running is not None:
                part.sequences += [self._sequences[slot] for slot in running.slots.tolist()]
        if decodes is not None:
            part.decodes = self._dispatched(decodes.slots, np.zeros_like(decodes.slots))
        if speculation is not None:
            part.speculation = self._dispatched(speculation.slots, speculation.max_drafts)
        return RankPlan(starts, masks, prefills, decodes, speculation, tuple(first_drafts)), part

    def _dispatched(self, slots: Int32[np.ndarray, " requests"], drafts: Int32[np.ndarray, " requests"]) -> Running:
        """The choices of a step, moved to after it."""
        counts = self._again[slots] <= 1
        self._again[slots] = np.maximum(self._again[slots] - 1, 0)
        self._unread[slots] += counts
        self._ahead[slots] += counts * (1 + drafts)
        return Running(slots, drafts, self._epoch[slots], counts)

    def _drafts_first(self, sequence: Sequence) -> bool:
        """Whether a choice whose prompt has just been dispatched to its end can verify drafts in its next step."""
        slot = sequence.slot
        wants = self._most_drafts[slot] > 0 and self._again[slot] == 0
        room = min(self._end[slot] - 2, self._draft_context[slot]) > self._length[slot]
        return bool(wants and room)

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
                first = sequence.first_token is None
                if first:
                    sequence.first_token = now
                    update.first_tokens.append(sequence)
                slots = np.array([slot], np.int32)
                self._unread[slots] -= 1
                self._ahead[slots] -= 1
                self._take(slots, rows_of(result.prefills, [row]), now, update, first)
        for row, (slot, epoch) in enumerate(part.first_drafts):
            if self._epoch[slot] == epoch:
                self._keep_drafts(np.array([slot]), result.first_drafts[[row]])
        if part.decodes is not None:
            self._take_running(part.decodes, result.decodes, now, hasher, update)
        if part.speculation is not None:
            self._take_running(part.speculation, result.speculation, now, hasher, update)

    def _take_running(
        self, running: Running, result: Sampled | Speculated, now: float, hasher: PrefixHasher, update: Update
    ) -> None:
        """Takes what decoding choices got that are still there."""
        rows = np.flatnonzero((self._epoch[running.slots] == running.epochs) & running.counts)
        slots = running.slots[rows]
        self._unread[slots] -= 1
        self._ahead[slots] -= 1 + running.drafts[rows]
        outcome = rows_of(result, rows)
        if isinstance(result, Speculated):
            self.drafts.take(outcome.verified, outcome.counts - 1)
            for slot, verified, count in zip(
                slots.tolist(), outcome.verified.tolist(), outcome.counts.tolist(), strict=True
            ):
                if verified:
                    self._sequences[slot].count_drafts(verified, count - 1)
            some = np.flatnonzero(outcome.counts)  # the others were at their end or in a pause
            slots, outcome = slots[some], rows_of(outcome, some)
        self._keep_drafts(slots, outcome.next_drafts)
        full = (self._length[slots] - 1) // self._cfg.page_size
        self._take(slots, outcome, now, update)
        if not self._cfg.deterministic:
            # The newest token has not been run.
            confirmed = self._length[slots] - 1
            for row in np.flatnonzero(confirmed // self._cfg.page_size > full).tolist():
                self._publish(self._sequences[slots[row]], int(confirmed[row]), hasher)

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

    def _positions(self, slots: Int32[np.ndarray, " requests"]) -> Int32[np.ndarray, " requests"]:
        """The largest position that the next token to run of each choice can have."""
        newest = np.minimum(self._length[slots] + self._ahead[slots], self._end[slots]) - 1
        return np.where(self._again[slots] > 0, self._length[slots] - self._again[slots], newest)

    def _runnable(self) -> np.ndarray:
        runnable = self._decoding & (self._length + self._unread < self._end)
        return runnable & (self._unread == 0) if self._cfg.tokens_on_host else runnable

    def _prefill_end(self, sequence: Sequence) -> int:
        return len(sequence.request.prompt) if self._cfg.deterministic else sequence.length

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._cfg.page_size)

    def _grow(self, sequence: Sequence, preempt: Callable[[Sequence], None]) -> None:
        while self.pool.available < 1 and not self._give_back():
            victim = max(self.sequences(), key=lambda s: (s.request.priority, s.number))
            preempt(victim)
            if victim is sequence:
                return
        self._add_page(sequence)

    def _give_back(self) -> bool:
        """Frees pages that drafts might have needed; whether there were any."""
        slots = np.flatnonzero(self._decoding & (self._again == 0))
        needed = -(-np.minimum(self._positions(slots) + 1, self._end[slots] - 1) // self._cfg.page_size)
        found = np.flatnonzero(needed < self._page_count[slots])
        for slot, count in zip(slots[found].tolist(), needed[found].tolist(), strict=True):
            sequence = self._sequences[slot]
            self.pool.release(sequence.pages[count:])
            del sequence.pages[count:]
            self._page_count[slot] = count
        return bool(found.size)

    def _add_page(self, sequence: Sequence) -> None:
        sequence.pages += self.pool.allocate(1)
        self._page_table[sequence.slot, len(sequence.pages) - 1] = sequence.pages[-1]
        self._page_count[sequence.slot] = len(sequence.pages)

    def _drafts_for_mask(self, slot: int, drafts: int, failed: Failures) -> int | None:
        """Sends the masks of the next tokens if needed; for how many drafts, None if they cannot be known yet."""
        sequence, unread, ahead = self._sequences[slot], int(self._unread[slot]), int(self._ahead[slot])
        self._pause_tokens[slot] = -1
        if self._again[slot] > 1:
            return 0
        if not drafts:
            waits = ahead > unread or (unread and sequence.mask.waits_for_tokens)
            return 0 if not waits and self._send_mask(sequence, unread, failed) else None
        left = sequence.mask.unchanged_for - ahead
        if left > drafts or (unread and left > 1):
            pauses = sequence.mask.pause_tokens
            self._pause_tokens[slot, : len(pauses)] = pauses
            return min(drafts, left - 1) if self._send_mask(sequence, 0, failed) else None
        if unread:
            return None
        known = self._drafts[slot, : min(drafts, self._draft_count[slot])]
        try:
            masks = sequence.mask.along(known.tolist())
        except MaskError as error:
            failed.append((sequence, str(error)))
            return None
        self._set_mask(sequence, one_mask(masks))
        return len(masks) - 1

    def _keep_drafts(self, slots: Int32[np.ndarray, " requests"], drafts: Int32[np.ndarray, "requests block"]) -> None:
        """Notes the drafts that slots hold behind their newest token."""
        count = min(drafts.shape[1], self._cfg.drafts)
        self._drafts[slots, :count] = drafts[:, :count]
        self._draft_count[slots] = count

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
        self._set_mask(sequence, mask)
        return True

    def _set_mask(self, sequence: Sequence, mask: Mask) -> None:
        if mask is not sequence.mask_sent:
            sequence.mask_sent = self._masks[sequence.slot] = mask

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

    def _take(
        self, slots: Int32[np.ndarray, " requests"], result: Speculated, now: float, update: Update, first: bool = False
    ) -> None:
        """Appends its new tokens to each slot's choice, up to its end; `first`: there is none before them."""
        place = np.arange(result.tokens.shape[1]) < result.counts[:, None]
        ends = (result.tokens == self._eos[slots, None]) | np.isnan(result.logprobs)
        look = np.any(ends & place, axis=1) | self._check[slots]
        look |= self._length[slots] + result.counts >= self._end[slots]
        tokens, look, taken = result.tokens.tolist(), look.tolist(), np.zeros(len(slots), np.int32)
        for row, (slot, count) in enumerate(zip(slots.tolist(), result.counts.tolist(), strict=True)):
            sequence = self._sequences[slot]
            known = len(sequence.generated)
            if not look[row]:
                sequence.generated += tokens[row][:count]
            else:
                for column in range(count):
                    if np.isnan(result.logprobs[row, column]):
                        update.finished.append((sequence, "error", _UNDEFINED))
                        break
                    sequence.generated.append(tokens[row][column])
                    if self._see_end(sequence, tokens[row][column], update):
                        break
            taken[row] = len(sequence.generated) - known
            if sequence.sampling.top_logprobs >= 0:
                take_logprobs(sequence, result, row, int(taken[row]))
            if taken[row]:
                update.news.append(sequence)
        self._length[slots] += taken
        self._last[slots] = result.tokens[np.arange(len(slots)), result.counts - 1]
        update.tokens += int(taken.sum())
        gaps = now - self._last_time[slots[taken > 0]]
        update.gaps.append(np.concatenate([gaps[first:], np.zeros(max(0, int(taken.sum()) - len(gaps)))]))
        self._last_time[slots] = now

    def _see_end(self, sequence: Sequence, token: int, update: Update) -> bool:
        """Whether the choice ends with its newest token."""
        request = sequence.request
        end: tuple[FinishReason, str | None] | None = None
        if sequence.mask is not None:
            try:
                sequence.mask.push(token)
            except MaskError as error:
                end = "error", str(error)
        if end is None:
            if token == self._cfg.eos_id and not request.ignore_eos:
                end = "stop", None
            elif token in request.stop_token_ids:
                sequence.stop_reason = token
                end = "stop", None
            elif len(sequence.generated) >= request.max_tokens:
                end = "length", None
        if end is not None:
            update.finished.append((sequence, *end))
        return end is not None
