"""What came of drafts so far, as the engine counts them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int32

Withheld = Literal["context", "pages"]
"""Why a request that wants drafts verified none in a step: it is longer than its `draft_context`, or no page was left
for tokens that may be rejected."""


@dataclasses.dataclass(eq=False)
class DraftTotals:
    """Counts since the engine started; `a + b` is that of two ranks.

    The mean acceptance length is 1 + sum(accepted) / rounds.
    """

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
        return cls(0, [0] * drafts, [0] * drafts, {"context": 0, "pages": 0})

    def take(self, verified: Int32[np.ndarray, " requests"], accepted: Int32[np.ndarray, " requests"]) -> None:
        """Counts a step's requests."""
        self.rounds += int(np.count_nonzero(verified))
        for place in range(len(self.verified)):
            self.verified[place] += int(np.count_nonzero(verified > place))
            self.accepted[place] += int(np.count_nonzero(accepted > place))

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        return DraftTotals(
            self.rounds + other.rounds,
            [a + b for a, b in zip(self.verified, other.verified, strict=True)],
            [a + b for a, b in zip(self.accepted, other.accepted, strict=True)],
            {reason: count + other.withheld[reason] for reason, count in self.withheld.items()},
        )
