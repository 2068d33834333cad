"""The choices that decode in a step, on all ranks at once, and how many drafts each may verify.

With drafts, only the device knows how many tokens the steps in flight bring a choice: each at least one, unless the
choice was at its end, and at most one more than it verifies drafts. The next step is planned for the most: pages for
every draft that may be run. If pages are short, fewer drafts are verified, and pages that turned out to be unneeded are
given back before anybody is preempted. A choice leaves no drafts behind when it loses its slot.

How many drafts have room in a step may follow from what pays, see `draft_room`; a choice with a number of its own has
room for so many in any case.

What a choice may be given is masked, and a mask may change with every token. Where it holds for all tokens in flight
and of the next step, unless one of a few `pause_tokens` is among them, steps overlap, and the device stops behind such
a token until the host has seen it. Otherwise the host waits for the drafts themselves and sends the mask behind each.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

from dsv4jax.engine.draft_room import DraftRoom
from dsv4jax.engine.draft_totals import DraftCounter
from dsv4jax.engine.in_flight import Running
from dsv4jax.engine.plan import NEXT_TOKEN, Decodes, Speculation
from dsv4jax.engine.rank import Failures, Rank
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.slots import Rows, Slots

_PerRow = Int32[np.ndarray, " rows"]


class Decoding:
    """Plans the decoding of all ranks. `counter` is told of drafts that are withheld."""

    def __init__(
        self, cfg: SchedulerConfig, slots: Slots, ranks: list[Rank], counter: DraftCounter, room: DraftRoom | None
    ):
        self._cfg, self._slots, self._ranks, self._counter, self._room = cfg, slots, ranks, counter, room
        self._rank_of_row, self._slot_of_row = np.divmod(np.arange(cfg.ranks * cfg.slots, dtype=np.int32), cfg.slots)
        self._first_rows = np.arange(cfg.ranks + 1) * cfg.slots

    def runnable(self) -> Rows:
        """The choices that are decoding and have tokens left to choose."""
        slots = self._slots
        runnable = slots.decoding & (slots.lengths + slots.unread < slots.ends)
        if self._cfg.tokens_on_host:
            runnable &= slots.unread == 0
        return runnable.nonzero()[0]

    def plan(
        self, rows: Rows, failed: Failures, preempt: Callable[[Sequence], None]
    ) -> tuple[Decodes | Speculation, Running] | None:
        """The next token of those of the runnable choices that are ready, with drafts behind it or without, and the
        state moved to after the step; None if none is ready.

        One program for all: with drafts if a choice anywhere drafts, so that weights are read once, and with room for
        the most that any verifies. In deterministic mode the others do not decide which one. Preempts the worst choices
        of a rank if its pages run out.
        """
        slots, speculate, positions = self._slots, False, self._slots.positions(rows)
        drafts, drafting = np.zeros(len(rows), np.int32), False
        if self._cfg.drafts:
            drafts, drafting = self._with_room(rows, self._wanted_drafts(rows, positions), positions)
        wanted, masked = drafts > 0, slots.masked[rows]
        if masked.any():
            ready = self._fit_masks(rows, masked, drafts, failed)
            rows, drafts, positions, wanted = rows[ready], drafts[ready], positions[ready], wanted[ready]
        if self._cfg.drafts:
            # The host lacks the position of a choice that has more tokens on their way than steps.
            known = slots.ahead[rows] == slots.unread[rows]
            speculate = self._cfg.deterministic or drafting or bool(wanted.any()) or not known.all()
        lacking = np.minimum(positions + 1, slots.ends[rows] - 1) > slots.covered[rows]
        if lacking.any():
            self._grow(rows[lacking], preempt)
            kept = slots.decoding[rows]
            rows, drafts, positions = rows[kept], drafts[kept], positions[kept]
        if speculate:
            drafts = self._on_pages(rows, drafts, positions)
            if masked.any():
                # A step without drafts brings one token: it must not be one that finds its choice in a pause.
                certain = (drafts > 0) | (slots.unread[rows] == 0) | (slots.pause_tokens[rows] < 0).all(axis=1)
                rows, drafts, positions = rows[certain], drafts[certain], positions[certain]
        if not rows.size:
            return None
        told = self._told(rows, drafts, positions, speculate)
        return told, self._dispatched(rows, drafts)

    def _wanted_drafts(self, rows: Rows, positions: _PerRow) -> _PerRow:
        """As many as requests allow."""
        slots = self._slots
        drafts = np.where(slots.again[rows] == 0, slots.most_drafts[rows], 0)
        too_long = positions >= slots.draft_contexts[rows]
        if too_long.any():
            self._counter.withheld["context"] += int(np.count_nonzero(too_long & (drafts > 0)))
            drafts[too_long] = 0
        return drafts

    def _with_room(self, rows: Rows, drafts: _PerRow, positions: _PerRow) -> tuple[_PerRow, bool]:
        """Those of the drafts that have room in the program that pays most, and whether it drafts."""
        if self._room is None:
            return drafts, False
        slots, least = self._slots, np.minimum(self._slots.least_drafts[rows], drafts)
        reach = int(np.minimum(positions + 1 + drafts, slots.ends[rows] - 1).max())
        room = self._room.choose(rows, slots.epochs[rows], drafts, least, -(-reach // self._cfg.page_size))
        return np.minimum(drafts, room.drafts), room.drafting

    def _fit_masks(
        self, rows: Rows, masked: Bool[np.ndarray, " rows"], drafts: _PerRow, failed: Failures
    ) -> Bool[np.ndarray, " rows"]:
        """Which choices have masks that are known, or none; takes away drafts for which there are none."""
        ready = np.ones(len(rows), bool)
        for i in masked.nonzero()[0].tolist():
            sequence = self._slots.sequences[rows[i]]
            allowed = self._ranks[sequence.rank].drafts_for_mask(sequence, int(drafts[i]), failed)
            ready[i], drafts[i] = allowed is not None, allowed or 0
        return ready

    def _grow(self, rows: Rows, preempt: Callable[[Sequence], None]) -> None:
        """A page for each of these choices that is not preempted for one before it."""
        for row in rows.tolist():
            if self._slots.decoding[row]:
                sequence = self._slots.sequences[row]
                self._ranks[sequence.rank].grow(sequence, preempt)

    def _on_pages(self, rows: Rows, drafts: _PerRow, positions: _PerRow) -> _PerRow:
        """The drafts for which there are pages, after taking those that nobody needs more."""
        slots = self._slots
        covered, ends, first = slots.covered[rows], slots.ends[rows] - 1, positions + 1
        wanted = np.minimum(first + drafts, ends)
        lacking = wanted > covered
        if not lacking.any():
            return drafts
        for i in lacking.nonzero()[0].tolist():
            sequence = slots.sequences[rows[i]]
            self._ranks[sequence.rank].grow_for_drafts(sequence, int(wanted[i]))
        covered = slots.covered[rows]
        fitting = np.where(covered >= ends, drafts, np.clip(covered - first, 0, drafts))
        self._counter.withheld["pages"] += int(np.count_nonzero((fitting == 0) & (drafts > 0)))
        return fitting

    def _told(self, rows: Rows, drafts: _PerRow, positions: _PerRow, speculate: bool) -> Decodes | Speculation:
        """What the executor is told."""
        slots, tokens = self._slots, self._tokens(rows, positions, speculate)
        where = self._rank_of_row[rows], self._slot_of_row[rows], self._page_tables(rows)
        if not speculate:
            return Decodes(*where, positions, tokens)
        least = np.minimum(slots.least_drafts[rows], drafts)
        pauses, seen = slots.pause_tokens[rows], slots.lengths[rows] - 1
        return Speculation(*where, positions, slots.ends[rows] - 1, tokens, least, drafts, pauses, seen)

    def _page_tables(self, rows: Rows) -> dict[int, Int32[np.ndarray, "requests pages"]]:
        """Of each rank, as wide as its longest choice."""
        bounds = rows.searchsorted(self._first_rows)
        busy = (bounds[1:] > bounds[:-1]).nonzero()[0]
        widths = np.maximum.reduceat(self._slots.covered[rows], bounds[busy]) // self._cfg.page_size
        columns = (column.tolist() for column in (busy, bounds[busy], bounds[busy + 1], widths))
        return {
            rank: self._slots.page_table[rows[first:end], :width]
            for rank, first, end, width in zip(*columns, strict=True)
        }

    def _tokens(self, rows: Rows, positions: _PerRow, speculate: bool) -> _PerRow:
        """Those that the host must name. With drafts the slot has the newest one, maybe a later one than the host."""
        slots, tokens = self._slots, np.full(len(rows), NEXT_TOKEN, np.int32)
        named = slots.again[rows] > 0 if speculate else slots.unread[rows] == 0
        for i in named.nonzero()[0].tolist():
            tokens[i] = slots.sequences[rows[i]].token(int(positions[i]))
        return tokens

    def _dispatched(self, rows: Rows, drafts: _PerRow) -> Running:
        """The choices of a step, moved to after it."""
        slots, again = self._slots, self._slots.again[rows]
        counts = again <= 1
        if again.any():
            slots.again[rows] = np.maximum(again - 1, 0)
        slots.unread[rows] += counts
        slots.ahead[rows] += counts * (1 + drafts)
        return Running(rows, slots.sequences[rows], drafts, slots.epochs[rows], counts)
