"""What is known of a run: of each request, whoever served it, and of each step of an engine."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from dsv4jax.engine.records import Observer, StepRecord

UNFINISHED = "unfinished"
"""The `finish_reason` of a request that still ran when the measurement ended."""
_INCOMPLETE = frozenset({"error", "abort", "aborted", UNFINISHED})


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One request. Times are seconds since the run began.

    Args:
      request_id: unique in the run.
      session: "" where there are no sessions.
      turn: 0 is the first of its session.
      rank: data-parallel rank that served it; None where that is not known.
      arrived: when the workload wanted it sent.
      sent: when the client sent it. In-process, where no client is between, the same.
      scheduled: when the engine first gave it a slot; None where a server does not say.
      first_token: when its first output came; None if none did.
      finished: when it ended, or when the measurement did.
      cached_tokens: of the prompt, as the server's usage says.
      expected_cached_tokens: as many as the workload makes possible; None where it does not say.
      output_tokens: as the server's usage says, never counted from chunks; 0 for a stream that broke before its usage.
      chunk_seconds, chunk_tokens: when output came, and how many tokens of it. A source that does not say how many
        spreads `output_tokens` evenly over its chunks, earlier ones taking what is left over.
      drafted, accepted: drafts that were verified and that stood.
      finish_reason: as the API has it, such as "length" or "stop"; "error", "aborted" and "unfinished" are no complete
        requests.
      error: what went wrong, "" for nothing.
      queued: when the engine had it in its queue; None where a server does not say.

    Raises:
      ValueError: fields contradict each other.
    """

    request_id: str
    session: str
    turn: int
    rank: int | None
    arrived: float
    sent: float
    scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    expected_cached_tokens: int | None
    output_tokens: int
    chunk_seconds: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    drafted: int
    accepted: int
    finish_reason: str
    error: str = ""
    queued: float | None = None

    def __post_init__(self):
        name, seconds, tokens = f"request {self.request_id!r}", self.chunk_seconds, self.chunk_tokens
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(
                f"{name}: cached_tokens = {self.cached_tokens}: must be 0 to {self.prompt_tokens}, its prompt"
            )
        if len(seconds) != len(tokens):
            raise ValueError(f"{name}: {len(seconds)} chunk_seconds and {len(tokens)} chunk_tokens: must be as many")
        if sum(tokens) != self.output_tokens:
            raise ValueError(f"{name}: chunk_tokens sum to {sum(tokens)}: must be output_tokens = {self.output_tokens}")
        given = (self.arrived, self.sent, self.queued, self.scheduled, self.first_token, *seconds, self.finished)
        times = [time for time in given if time is not None]
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"{name}: times must not descend, are {times[:6]} and later ones")

    @property
    def complete(self) -> bool:
        """Whether it ended by itself and without an error."""
        return not self.failed and self.finish_reason not in _INCOMPLETE

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return bool(self.error) or self.finish_reason == "error"

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` reads it back unchanged."""
        return dataclasses.asdict(self)

    def without_chunks(self) -> dict[str, Any]:
        """As JSON has it, without the times of chunks, which are most of a record."""
        return {name: value for name, value in self.as_dict().items() if not name.startswith("chunk_")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measurement":
        """Inverse of `as_dict`.

        Raises:
          TypeError: a field is missing or unknown.
          ValueError: fields contradict each other.
        """
        chunks = {name: tuple(data[name]) for name in ("chunk_seconds", "chunk_tokens") if name in data}
        return cls(**{**data, **chunks})


def spread(tokens: int, chunks: int) -> tuple[int, ...]:
    """`tokens` over `chunks` evenly, earlier ones taking what is left over: `chunk_tokens` of a source without them."""
    if not chunks:
        return ()
    each, left = divmod(tokens, chunks)
    return tuple(each + (i < left) for i in range(chunks))


@dataclasses.dataclass(eq=False)
class StepRecords(Observer):
    """Keeps the records of an engine's steps.

    Args:
      now: the clock by which steps end.
    """

    now: Callable[[], float]
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    ends: list[float] = dataclasses.field(default_factory=list)
    """When the result of each step was there."""

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.ends.append(self.now())
