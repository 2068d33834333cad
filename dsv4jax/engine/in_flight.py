"""What is remembered of a dispatched step, and what its result brings."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Shaped

from dsv4jax.engine.request import FinishReason
from dsv4jax.engine.sequence import Sequence


class PrefillInFlight(NamedTuple):
    """A chunk of a dispatched step. A slot's epoch changes when it loses its choice."""

    sequence: Sequence
    epoch: int
    end: int
    counts: bool
    """Whether what is sampled counts: not if the token after it is known."""
    drafts: bool
    """Whether first drafts follow it."""


@dataclasses.dataclass(eq=False)
class Running:
    """Decoding choices of a dispatched step, on all ranks."""

    rows: Int64[np.ndarray, " requests"]
    """Their slots, as `Slots` has them."""
    sequences: Shaped[np.ndarray, " requests"]
    drafts: Int32[np.ndarray, " requests"]
    """The most drafts that each verifies."""
    epochs: Int64[np.ndarray, " requests"]
    counts: Bool[np.ndarray, " requests"]
    """As in `PrefillInFlight`."""


@dataclasses.dataclass(eq=False)
class InFlight:
    """What the scheduler has to remember of a dispatched step."""

    number: int
    prefills: tuple[list[PrefillInFlight], ...]
    """Per rank."""
    running: Running | None

    def sequences(self) -> list[Sequence]:
        """All that take part."""
        running = [] if self.running is None else self.running.sequences.tolist()
        return [chunk.sequence for rank in self.prefills for chunk in rank] + running


@dataclasses.dataclass(eq=False)
class Update:
    """What a step's result brought."""

    news: list[Sequence] = dataclasses.field(default_factory=list)
    """Choices with new tokens."""
    tokens: int = 0
    """New tokens of all choices."""
    first_tokens: list[Sequence] = dataclasses.field(default_factory=list)
    finished: list[tuple[Sequence, FinishReason, str | None]] = dataclasses.field(default_factory=list)
    gaps: list[Float64[np.ndarray, " tokens"]] = dataclasses.field(default_factory=list)
    """Seconds since the token before, per token that was not its choice's first."""
