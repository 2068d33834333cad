"""For how many drafts of each request a step has room: in which of several programs it runs.

A program with room for few drafts is quicker than one for many, whatever they verify of them, and a plain step is the
quickest. Which one promises the most tokens per second follows from measured times and from how likely drafts are to be
accepted, as in `draft_counts`. The confidences of the drafts that a step will verify are on the device, where they
decide how many of those that have room are verified. The host has the confidences of earlier steps, whose results it
has read; running means of the survivals they predict tell it what to expect of each place. They come from steps that
have decided about their drafts, so that no draft has a say in whether there is room for it.

All ranks run one program. Each verifies what pays for itself, and the step lasts as long as its slowest rank.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

_WEIGHT = 1 / 8  # of the newest survivals in the running mean of a choice
_USUAL_WEIGHT = 1 / 64  # and in that of all choices in the long run
_LOOKS = 8  # results with confidences after which plain steps go on, if they do
_MARGIN = 1.02  # by which drafts must pay more than none, or none more than some, to change between them

_PerRow = Int32[np.ndarray, " rows"]


class _Sized(Protocol):
    requests: int
    pages: int


SizedT = TypeVar("SizedT", bound=_Sized)


def smallest(programs: Iterable[SizedT], requests: int, pages: int) -> SizedT | None:
    """The smallest of several shapes that holds so many requests and pages per request; None if none does."""
    fits = [program for program in programs if program.requests >= requests and program.pages >= pages]
    return min(fits, key=lambda program: (program.requests * program.pages, program.requests), default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeTimes:
    """What steps of one program take.

    Raises ValueError on construction unless there is a time for each total, positive and finite.
    """

    requests: int
    pages: int
    drafts: int
    """Of a request, for which there is room; 0 for the plain program."""
    seconds: Float32[np.ndarray, " totals"]
    """By the tokens that a rank runs, from 0 to all that there is room for."""

    def __post_init__(self):
        totals = self.requests * (1 + self.drafts) + 1
        if self.seconds.shape != (totals,) or not np.all((self.seconds > 0) & np.isfinite(self.seconds)):
            raise ValueError(f"seconds: must be {totals} positive finite numbers, got {self.seconds}")


def survivals(confidences: Float32[np.ndarray, "rows drafts"]) -> Float32[np.ndarray, "rows drafts"]:
    """As `draft_counts.survivals`, in numpy."""
    with np.errstate(over="ignore"):
        product = np.cumprod(1 / (1 + np.exp(-confidences)), axis=1, dtype=np.float32)
    return np.nan_to_num(product)


def expected_rate(
    survival: Float32[np.ndarray, "ranks requests drafts"],
    optional: Bool[np.ndarray, "ranks requests drafts"],
    tokens: Float32[np.ndarray, " ranks"],
    used: Int64[np.ndarray, " ranks"],
    seconds: Float32[np.ndarray, " totals"],
) -> float:
    """Tokens per second that a step promises whose ranks verify what pays best for each.

    Args:
      survival: of the drafts of each request, not rising along the last axis.
      optional: drafts that may be verified or not.
      tokens: expected on each rank without these.
      used: tokens that each rank runs without these.
      seconds: by the tokens that a rank runs, not falling.
    """
    gains = np.where(optional, survival, 0).reshape(len(used), -1)
    gains.sort(axis=1)
    expected = np.empty((len(used), 1 + gains.shape[1]), np.float32)
    expected[:, 0] = 0
    gains[:, ::-1].cumsum(axis=1, out=expected[:, 1:])
    expected += tokens[:, None]
    counts = np.count_nonzero(optional, axis=(1, 2))[:, None]
    chosen = np.arange(expected.shape[1])
    times = seconds[used[:, None] + np.minimum(chosen, counts)]
    # Behind the last optional draft there is nothing more to expect, in the same time.
    best = np.arange(len(used)), np.argmax(expected / times, axis=1)
    return float(expected[best].sum() / times[best].max())


@dataclasses.dataclass(frozen=True)
class Room:
    """What a step with drafts is to be."""

    drafts: int
    """The most that a request verifies."""
    drafting: bool
    """Whether new drafts are made."""


class DraftRoom:
    """Chooses the room of one step after another.

    Args:
      times: of plain programs and of those with drafts, in the same sizes.
      slots: of a rank; rows are the slots of all ranks, rank by rank.
      plain_steps: without drafts, after which some steps draft only to see whether drafts would pay again.

    Raises:
      ValueError: there is no plain program or none with drafts in some size.
    """

    def __init__(self, times: Sequence[DecodeTimes], slots: int, ranks: int, plain_steps: int = 512):
        sizes: dict[tuple[int, int], dict[int, Float32[np.ndarray, " totals"]]] = {}
        for one in sorted(times, key=lambda one: one.drafts):
            sizes.setdefault((one.requests, one.pages), {})[one.drafts] = one.seconds
        self._sizes = [_Size(*size, _monotone(programs)) for size, programs in sizes.items()]
        for size in self._sizes:
            if 0 not in size.seconds or len(size.seconds) < 2:
                raise ValueError(f"times of {size.requests} requests: must be of a plain program and some with drafts")
        self._slots, self._most_plain_steps = slots, plain_steps
        block = max(one.drafts for one in times)
        self._survivals = np.ones((slots * ranks, block), np.float32)
        self._epochs = np.full(slots * ranks, -1, np.int64)  # of the choice that survivals are of
        self._usual = np.ones(block, np.float32)  # survivals of all choices in the long run
        self._seen = 0  # results with confidences
        self.plain = False  # whether the newest step was to be one without drafts
        self._plain_steps = 0  # of them since drafts were looked at
        self._looks = 0

    def observe(
        self,
        rows: Int64[np.ndarray, " rows"],
        epochs: Int64[np.ndarray, " rows"],
        confidences: Float32[np.ndarray, "rows block"],
    ) -> None:
        """Takes what a step has predicted of drafts that it has decided about, NaN where there was none.

        Args:
          epochs: change when a slot loses its choice.
        """
        there = ~np.isnan(confidences[:, 0])
        if not there.any():
            return
        rows, epochs = rows[there], epochs[there]
        found = survivals(confidences[there, : len(self._usual)])
        known = self.predicted(rows, epochs)
        self._seen += 1
        # A few looks must tell what many plain steps have not seen.
        weight = _WEIGHT if self.plain else _USUAL_WEIGHT
        self._usual += max(weight, 1 / self._seen) * (found.mean(axis=0) - self._usual)
        self._survivals[rows] = known + _WEIGHT * (found - known) if self._seen > 1 else found
        self._epochs[rows] = epochs
        self._looks += self.plain
        if self._looks == _LOOKS:
            self._plain_steps = self._looks = 0

    def predicted(
        self, rows: Int64[np.ndarray, " rows"], epochs: Int64[np.ndarray, " rows"]
    ) -> Float32[np.ndarray, "rows block"]:
        """Survivals of the next drafts of each choice; the usual ones if nothing was seen of it lately."""
        return np.where((self._epochs[rows] == epochs)[:, None], self._survivals[rows], self._usual)

    def choose(
        self,
        rows: Int64[np.ndarray, " rows"],
        epochs: Int64[np.ndarray, " rows"],
        limits: _PerRow,
        minimums: _PerRow,
        pages: int,
    ) -> Room:
        """The room that promises the most tokens per second; of equally good ones the smallest.

        There is room for every draft of `minimums`. Plain steps are chosen if drafts pay less now and usually. After
        many of them some steps draft without verifying, because otherwise nothing would be seen of drafts.

        Args:
          rows: that run, ascending.
          limits: the most drafts that each may verify.
          minimums: drafts that are verified in any case, at most `limits`.
          pages: for so many drafts, of the longest request.
        """
        if not limits.any():
            return Room(0, False)
        batch = _Batch.of(rows // self._slots, limits, minimums, len(self._usual))
        size = smallest(self._sizes, batch.optional.shape[1], pages)
        if size is None:
            raise ValueError(f"no times are known of {batch.optional.shape[1]} requests over {pages} pages")
        best = batch.best(self.predicted(rows, epochs), size)
        if not best:
            # Moments pass, but plain steps do not see what comes after.
            best = batch.best(self._usual, size, _MARGIN if self.plain else 1 / _MARGIN)
        if best:
            self.plain, self._plain_steps = False, 0
            return Room(best, True)
        if not self.plain:
            self.plain, self._looks = True, 0
            self._epochs[:] = -1  # what was seen will be old
        self._plain_steps += 1
        return Room(0, self._plain_steps > self._most_plain_steps)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    """Which drafts of a step's requests may be verified, and which are in any case; each rank in a row of its own."""

    optional: Bool[np.ndarray, "ranks requests drafts"]
    required: Bool[np.ndarray, "ranks requests drafts"]
    present: Int64[np.ndarray, " ranks"]
    at: tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]
    """Where each request is."""
    least: int
    """The most drafts of a request that are required."""
    most: int
    """The most that are allowed."""

    @classmethod
    def of(cls, ranks: Int64[np.ndarray, " rows"], limits: _PerRow, minimums: _PerRow, block: int) -> "_Batch":
        present = np.bincount(ranks)
        present = present[present > 0]
        first, place = present.cumsum() - present, np.arange(block)
        at = np.arange(len(present)).repeat(present), np.arange(len(ranks)) - first.repeat(present)
        optional, required = np.zeros((2, len(present), int(present.max()), block), bool)
        required[at] = place < minimums[:, None]
        optional[at] = (place < limits[:, None]) & ~required[at]
        return cls(optional, required, present, at, int(minimums.max()), int(limits.max()))

    def best(self, survival: Float32[np.ndarray, "..."], size: "_Size", plain: float = 1.0) -> int:
        """For how many drafts the program has room that promises the most tokens per second; it holds what is required.

        Args:
          survival: of the drafts of each request, or the same of all.
          plain: what the tokens of the plain program are worth.
        """
        by_rank = np.zeros(self.optional.shape, np.float32)
        by_rank[self.at] = survival
        tokens = self.present + (by_rank * self.required).sum(axis=(1, 2))
        used = self.present + np.count_nonzero(self.required, axis=(1, 2))
        rates = {}
        for drafts, seconds in size.seconds.items():
            if drafts >= self.least:
                optional = self.optional[..., :drafts]
                rates[drafts] = expected_rate(by_rank[..., :drafts], optional, tokens, used, seconds)
            if drafts >= self.most:
                break
        if 0 in rates:
            rates[0] *= plain
        return max(rates, key=rates.__getitem__)


@dataclasses.dataclass(frozen=True, eq=False)
class _Size:
    requests: int
    pages: int
    seconds: Mapping[int, Float32[np.ndarray, " totals"]]
    """By drafts, ascending."""


def _monotone(programs: Mapping[int, Float32[np.ndarray, " totals"]]) -> dict[int, Float32[np.ndarray, " totals"]]:
    """Times by drafts, ascending; none is less than that of fewer tokens or less room, as it can be by chance only."""
    found, before = {}, np.zeros(0, np.float32)
    for drafts, seconds in programs.items():
        seconds = np.maximum.accumulate(seconds)
        seconds[: len(before)] = np.maximum(seconds[: len(before)], before)
        before = np.maximum.accumulate(seconds)
        found[drafts] = before
    return found
