"""What came of drafts so far, as the engine counts them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int32, Int64

Withheld = Literal["mask", "context", "pages"]
"""Why a request that wants drafts verified none in a step: its mask may change with the next token, it is longer than
its `draft_context`, or no page was left for tokens that may be rejected."""


@dataclasses.dataclass(eq=False)
class DraftTotals:
    """Counts since the engine started; `a + b` is that of two ranks.

    The mean acceptance length is 1 + sum(accepted) / rounds.
    """

    rounds: int
    """Verifications of a request with at least one draft."""
    verified: Int64[np.ndarray, " drafts"]
    """Drafts that were verified, by place."""
    accepted: Int64[np.ndarray, " drafts"]
    """Of these, accepted; some of these tokens come behind the end of their choice and are dropped."""
    withheld: dict[Withheld, int]
    """Steps in which a request that wants drafts verified none, by reason."""

    @classmethod
    def zero(cls, drafts: int) -> "DraftTotals":
        """Nothing yet, for up to `drafts` drafts per request."""
        return cls(0, np.zeros(drafts, np.int64), np.zeros(drafts, np.int64), {"mask": 0, "context": 0, "pages": 0})

    def take(self, verified: Int32[np.ndarray, " requests"], accepted: Int32[np.ndarray, " requests"]) -> None:
        """Counts a step's requests."""
        place = np.arange(len(self.verified))
        self.rounds += int(np.count_nonzero(verified))
        self.verified += np.sum(place < verified[:, None], axis=0)
        self.accepted += np.sum(place < accepted[:, None], axis=0)

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        return DraftTotals(
            self.rounds + other.rounds,
            self.verified + other.verified,
            self.accepted + other.accepted,
            {reason: count + other.withheld[reason] for reason, count in self.withheld.items()},
        )
