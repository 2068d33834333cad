"""What is remembered of a dispatched step, and what its result brings."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from dsv4jax.engine.plan import Sampled, Speculated
from dsv4jax.engine.request import FinishReason
from dsv4jax.engine.sequence import Sequence


@dataclasses.dataclass(eq=False)
class Running:
    """Decoding choices of a dispatched step. A slot's epoch changes when it loses its choice."""

    slots: Int32[np.ndarray, " requests"]
    drafts: Int32[np.ndarray, " requests"]
    """The most drafts that each verifies."""
    epochs: Int64[np.ndarray, " requests"]
    counts: Bool[np.ndarray, " requests"]
    """Whether what is sampled counts: not if the token after it is known."""


@dataclasses.dataclass(eq=False)
class RankInFlight:
    """What a rank has to remember of a dispatched step."""

    prefills: list[tuple[Sequence, int, int, bool]]  # choice, epoch, end, whether its sampled token counts
    decodes: Running | None
    speculation: Running | None
    sequences: list[Sequence]  # all that take part
    first_drafts: list[tuple[int, int]]  # slots and their epochs


@dataclasses.dataclass(eq=False)
class InFlight:
    number: int
    parts: list[RankInFlight]


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


def rows_of(result: Sampled | Speculated, rows: list[int] | Int64[np.ndarray, " rows"]) -> Speculated:
    """The results of some rows; of one token each, and no drafts behind it, if none were run."""
    top_tokens = None if result.top_tokens is None else result.top_tokens[rows]
    top_logprobs = None if result.top_logprobs is None else result.top_logprobs[rows]
    tokens, logprobs = result.tokens[rows], result.logprobs[rows]
    if isinstance(result, Speculated):
        counts, verified, drafts = result.counts[rows], result.verified[rows], result.next_drafts[rows]
        return Speculated(counts, verified, tokens, logprobs, drafts, top_tokens, top_logprobs)
    ones = np.ones(len(rows), np.int32)
    if top_tokens is not None:
        top_tokens, top_logprobs = top_tokens[:, None], top_logprobs[:, None]
    no_drafts = np.zeros((len(rows), 0), np.int32)
    return Speculated(ones, ones - 1, tokens[:, None], logprobs[:, None], no_drafts, top_tokens, top_logprobs)


def take_logprobs(sequence: Sequence, result: Speculated, row: int, count: int) -> None:
    """Appends the log-probabilities of the first `count` tokens of a row, and the best tokens as far as asked for."""
    sequence.logprobs += result.logprobs[row, :count].tolist()
    best = sequence.sampling.top_logprobs
    for column in range(count):
        pairs = ()
        if best:
            ids, values = result.top_tokens[row, column, :best], result.top_logprobs[row, column, :best]
            pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        sequence.top_logprobs.append(pairs)
