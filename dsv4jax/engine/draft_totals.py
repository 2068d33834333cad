"""What came of drafts so far, as the engine counts them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int32, Int64

Withheld = Literal["context", "pages"]
"""Why a request that wants drafts verified none in a step: it is longer than its `draft_context`, or no page was left
for tokens that may be rejected."""


@dataclasses.dataclass(eq=False)
class DraftTotals:
    """Counts since the engine started, over all ranks. The mean acceptance length is 1 + sum(accepted) / rounds."""

    rounds: int
    """Verifications of a request with at least one draft."""
    verified: list[int]
    """Drafts that were verified, by place."""
    accepted: list[int]
    """Of these, accepted; some of these tokens come behind the end of their choice and are dropped."""
    withheld: dict[Withheld, int]
    """Steps in which a request that wants drafts verified none, by reason."""

    @classmethod
    def zero(cls, drafts: int) -> "DraftTotals":
        """Nothing yet, for up to `drafts` drafts per request."""
        return DraftCounter(drafts).totals()


class DraftCounter:
    """Counts what comes of drafts, for up to `drafts` of them per request."""

    def __init__(self, drafts: int):
        self.withheld: dict[Withheld, int] = {"context": 0, "pages": 0}
        self._verified = np.zeros(drafts + 1, np.int64)  # how many requests verified so many drafts in a step
        self._accepted = np.zeros(drafts + 1, np.int64)

    def count(self, verified: Int32[np.ndarray, " requests"], accepted: Int32[np.ndarray, " requests"]) -> None:
        """Counts the requests of a step."""
        self._verified += np.bincount(verified, minlength=len(self._verified))
        self._accepted += np.bincount(accepted, minlength=len(self._accepted))

    def totals(self) -> DraftTotals:
        """The counts as they are now."""
        verified, accepted = (_at_least(counts) for counts in (self._verified, self._accepted))
        return DraftTotals(int(self._verified[1:].sum()), verified, accepted, dict(self.withheld))


def _at_least(counts: Int64[np.ndarray, " numbers"]) -> list[int]:
    """How often a number was at least 1, 2, ..."""
    return counts[:0:-1].cumsum()[::-1].tolist()
