"""Which tokens run again after a prefix hit to rebuild the window keys that pages do not hold (sections 9.4, 9.7)."""

import dataclasses
from typing import Literal

Replay = Literal["exact", "bounded"]


@dataclasses.dataclass(frozen=True)
class ReplayRule:
    """How far back a hit is re-run.

    `bounded` re-runs one window, an approximation. `exact` re-runs what the missing window keys depend on: each layer
    reaches `window` - 1 tokens further back.
    """

    window: int
    layers: int
    mode: Replay = "bounded"

    def start(self, cached: int) -> int:
        """First position to run when `cached` tokens are in the pages."""
        return max(0, cached - (self.window if self.mode == "bounded" else self.layers * (self.window - 1)))
