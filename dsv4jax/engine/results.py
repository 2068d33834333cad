"""What the results of a step bring its choices: tokens, their end, pages to be reused."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from dsv4jax.engine.draft_room import DraftRoom
from dsv4jax.engine.draft_totals import DraftCounter
from dsv4jax.engine.in_flight import InFlight, PrefillInFlight, Running, Update
from dsv4jax.engine.page_pool import PrefixHasher
from dsv4jax.engine.plan import RankResult, Sampled, Speculated, StepResult
from dsv4jax.engine.rank import Rank
from dsv4jax.engine.request import FinishReason
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.slots import Rows, Slots
from dsv4jax.engine.token_mask import mask_failure

_UNDEFINED = "the model's logits were undefined (NaN or infinite)"


@dataclasses.dataclass(eq=False)
class _Got:
    """What some choices, on whichever ranks, got from a step; tokens past `counts` are any."""

    rows: Rows
    sequences: Shaped[np.ndarray, " rows"]
    counts: Int32[np.ndarray, " rows"]
    verified: Int32[np.ndarray, " rows"]
    """Drafts; counts - 1 of them were accepted if any were verified."""
    tokens: Int32[np.ndarray, "rows tokens"]
    logprobs: Float32[np.ndarray, "rows tokens"]
    places: Int64[np.ndarray, " rows"]
    """Where the result of each is in `part`."""
    part: Sampled | Speculated

    def where(self, chosen: Bool[np.ndarray, " rows"]) -> "_Got":
        """That of the chosen ones."""
        if chosen.all():
            return self
        columns = (self.rows, self.sequences, self.counts, self.verified, self.tokens, self.logprobs, self.places)
        return _Got(*(column[chosen] for column in columns), self.part)

    def best(self, row: int, count: int, most: int) -> list[tuple[tuple[int, float], ...]]:
        """The `most` best tokens in place of each of the first `count` tokens of a row, with log-probabilities."""
        if not most:
            return [()] * count
        place, shape = int(self.places[row]), (self.tokens.shape[1], -1)
        ids = self.part.top_tokens[place].reshape(shape)[:count, :most].tolist()
        values = self.part.top_logprobs[place].reshape(shape)[:count, :most].tolist()
        return [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


class Results:
    """Takes the results of steps. `counter` is told what came of drafts, `room` what was predicted of them."""

    def __init__(
        self,
        cfg: SchedulerConfig,
        slots: Slots,
        ranks: list[Rank],
        counter: DraftCounter,
        room: DraftRoom | None,
        hasher: PrefixHasher,
    ):
        self._cfg, self._slots, self._ranks, self._hasher = cfg, slots, ranks, hasher
        self._counter, self._room = counter, room

    def take(self, flight: InFlight, result: StepResult, now: float) -> Update:
        """Takes the result of a step."""
        update = Update()
        for rank, chunks, own in zip(self._ranks, flight.prefills, result.ranks, strict=True):
            if chunks:
                self._take_prefills(rank, chunks, own, now, update)
        if flight.running is not None:
            self._take_running(flight.running, result.decodes or result.speculation, now, update)
        return update

    def _take_prefills(
        self, rank: Rank, chunks: list[PrefillInFlight], result: RankResult, now: float, update: Update
    ) -> None:
        slots, sampled, drafted = self._slots, result.prefills, 0
        for place, (sequence, epoch, end, counts, drafts) in enumerate(chunks):
            row = rank.number * self._cfg.slots + sequence.slot
            drafted += drafts
            if sequence.slot < 0 or slots.epochs[row] != epoch:
                continue
            if math.isnan(sampled.logprobs[place]):  # between chunks, too: its pages are not to be found
                self._end_undefined(sequence, update)
                continue
            if sequence.request.prompt_logprobs >= 0 and sequence.first_token is None:
                sequence.prompt_logprobs.append(result.prompt_logprobs[place])
            rank.publish(sequence, end, self._hasher)
            if drafts and slots.masked[row]:
                slots.keep_drafts(np.array([row]), result.first_drafts[drafted - 1 : drafted])
            if counts:
                first = sequence.first_token is None
                if first:
                    sequence.first_token = now
                    update.first_tokens.append(sequence)
                rows, places = np.array([row]), np.array([place])
                tokens, logprobs = sampled.tokens[places, None], sampled.logprobs[places, None]
                one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
                slots.unread[rows] -= 1
                slots.ahead[rows] -= 1
                got = _Got(rows, slots.sequences[rows], one, zero, tokens, logprobs, places, sampled)
                self._take(got, now, update, first)

    def _take_running(self, running: Running, part: Sampled | Speculated, now: float, update: Update) -> None:
        """Takes what decoding choices got that are still there."""
        slots, size, tokens, logprobs = self._slots, self._cfg.page_size, part.tokens, part.logprobs
        drafted, places = isinstance(part, Speculated), np.arange(len(tokens))
        if drafted:
            counts, verified = part.counts, part.verified
        else:
            counts, verified = np.ones(len(tokens), np.int32), np.zeros(len(tokens), np.int32)
            tokens, logprobs = tokens[:, None], logprobs[:, None]
        got = _Got(running.rows, running.sequences, counts, verified, tokens, logprobs, places, part)
        got = got.where((slots.epochs[running.rows] == running.epochs) & running.counts)
        slots.unread[got.rows] -= 1
        slots.ahead[got.rows] -= 1 + running.drafts[got.places]
        if drafted:
            got = got.where(got.counts > 0)  # the others were at their end or in a pause
            self._counter.count(got.verified, got.counts - 1)
            if self._room is not None and got.rows.size:
                self._room.observe(got.rows, slots.epochs[got.rows], part.confidences[got.places])
        masked = slots.masked[got.rows]
        if masked.any():
            places = got.places[masked]
            drafts = part.next_drafts[places] if drafted else np.zeros((len(places), 0), np.int32)
            slots.keep_drafts(got.rows[masked], drafts)
        lengths = slots.lengths[got.rows]
        self._take(got, now, update)
        if not self._cfg.deterministic:
            # The newest token has not been run.
            full = (lengths - 1) // size < (slots.lengths[got.rows] - 1) // size
            for i in full.nonzero()[0].tolist():
                sequence = got.sequences[i]
                self._ranks[sequence.rank].publish(sequence, sequence.length - 1, self._hasher)

    def _take(self, got: _Got, now: float, update: Update, first: bool = False) -> None:
        """Appends to each choice its new tokens, up to its end; `first`: there is none before them."""
        slots, rows, sequences, taken = self._slots, got.rows, got.sequences, got.counts
        lengths = slots.lengths[rows]
        # Tokens past the counts may make one look in vain.
        ends = ((got.tokens == slots.eos[rows, None]) | np.isnan(got.logprobs)).any(axis=1)
        look = ends | slots.watched[rows] | (lengths + taken >= slots.ends[rows])
        unwatched = got
        if look.any():
            taken, unwatched = taken.copy(), got.where(~look)
            for i in look.nonzero()[0].tolist():
                taken[i] = self._take_watched(got, i, update)
        _append(unwatched)
        slots.lengths[rows] = lengths + taken
        gaps = now - slots.last_times[rows]
        slots.last_times[rows] = now
        if not taken.all():
            sequences, gaps = sequences[taken > 0], gaps[taken > 0]
        total = int(taken.sum())
        update.news += sequences.tolist()
        update.tokens += total
        update.gaps.append(gaps[first:])
        if total > len(gaps):  # tokens of one step come together
            update.gaps.append(np.zeros(total - len(gaps)))

    def _take_watched(self, got: _Got, row: int, update: Update) -> int:
        """Appends the new tokens of a row up to the end of its choice; returns how many."""
        sequence, count = got.sequences[row], int(got.counts[row])
        known, logprobs = len(sequence.generated), got.logprobs[row, :count].tolist()
        for token, logprob in zip(got.tokens[row, :count].tolist(), logprobs, strict=True):
            if math.isnan(logprob):
                self._end_undefined(sequence, update)
                break
            sequence.generated.append(token)
            if self._see_end(sequence, token, update):
                break
        if got.verified[row]:
            sequence.count_drafts(int(got.verified[row]), count - 1)
        taken, most = len(sequence.generated) - known, sequence.sampling.top_logprobs
        if most >= 0:
            sequence.logprobs += logprobs[:taken]
            sequence.top_logprobs += got.best(row, taken, most)
        return taken

    def _end_undefined(self, sequence: Sequence, update: Update) -> None:
        update.finished.append((sequence, "error", _UNDEFINED))
        self._ranks[sequence.rank].distrust(sequence)

    def _see_end(self, sequence: Sequence, token: int, update: Update) -> bool:
        """Whether the choice ends with its newest token."""
        request = sequence.request
        end: tuple[FinishReason, str | None] | None = None
        if sequence.mask is not None:
            try:
                sequence.mask.push(token)
            except Exception as error:  # whatever it is, it is no matter of the other choices
                end = "error", mask_failure(error)
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


def _append(got: _Got) -> None:
    """Gives each choice its tokens, where nothing has to be looked at."""
    sequences = got.sequences.tolist()
    if got.tokens.shape[1] == 1:
        for sequence, token in zip(sequences, got.tokens[:, 0].tolist(), strict=True):
            sequence.generated.append(token)
        return
    columns = (column.tolist() for column in (got.tokens, got.counts, got.verified))
    for sequence, tokens, count, verified in zip(sequences, *columns, strict=True):
        sequence.generated += tokens[:count]
        if verified:
            sequence.count_drafts(verified, count - 1)
