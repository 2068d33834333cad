"""The shapes of the released model that tests lower and benchmarks time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """`requests` of `length` consecutive tokens each; a decode step where `length` is at most 6."""

    requests: int
    length: int
    entries: bool = True
    """Whether the layer has compressed entries (512 selected per token), or only its window."""

    @property
    def tokens(self) -> int:
        return self.requests * self.length

    @property
    def tile(self) -> int:
        """Tokens of a tile of the layout."""
        return min(self.length, 16)


HEADS, DIM, PAIRS, WINDOW, SELECTED = 64, 512, 32, 128, 512
SLACK = 8
PAGE_ENTRIES = 32
"""Entries of a page of 64 tokens at ratio 2."""

ARG_SPECS = {
    "1x1": ArgSpec(1, 1),
    "16x1": ArgSpec(16, 1),
    "64x1": ArgSpec(64, 1),
    "256x1": ArgSpec(256, 1),
    "16x6": ArgSpec(16, 6),
    "64x1 window only": ArgSpec(64, 1, entries=False),
    "1x1024": ArgSpec(1, 1024),
    "1x4096": ArgSpec(1, 4096),
    "1x8192": ArgSpec(1, 8192),
}
