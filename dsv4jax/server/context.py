"""What every route of one server works with."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from dsv4jax.chat.request import DEFAULT_EFFORT
from dsv4jax.engine.records import EngineStats
from dsv4jax.engine.request import GenerationRequest, TokenChunk
from dsv4jax.server.logprobs import TokenTexts
from dsv4jax.tokenizer import Tokenizer

if TYPE_CHECKING:  # its grammar backend is optional
    from dsv4jax.engine.grammar import GrammarCompiler


class Engine(Protocol):
    """The engine as the server sees it.

    Attributes:
      max_model_len: most tokens of prompt and output together.
      vocab_size: number of ids of the model; ids that the tokenizer lacks are never generated.
      is_alive: the engine's loop answered recently.
      is_ready: everything is compiled, a first token was produced, and new requests are taken.
    """

    max_model_len: int
    vocab_size: int

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    def check(self, *requests: GenerationRequest) -> None:
        """Raises RequestTooLarge, QueueFull or EngineStopped if `generate` would for all of them at once."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Runs a request; closing the generator aborts it."""

    def stop(self, request_id: str, index: int) -> None:
        """The caller decided that this choice is complete; no further chunk comes for it."""

    def abort(self, request_ids: Sequence[str]) -> int:
        """Ends requests; each open choice gives a last chunk with finish reason "abort"."""

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout: float) -> None: ...


class RunningRequests:
    """The engine's ids of the requests that run now, by the names that a client knows."""

    def __init__(self):
        self._ids: dict[str, list[str]] = {}

    def engine_ids(self, name: str) -> list[str]:
        """Ids behind the id of a response or a request id; empty if nothing of that name runs."""
        return list(self._ids.get(name, ()))

    @contextlib.contextmanager
    def entered(self, names: Sequence[str], engine_ids: Sequence[str]) -> Iterator[None]:
        """The requests run inside. Two requests of a client may share a name."""
        for name in names:
            self._ids.setdefault(name, []).extend(engine_ids)
        try:
            yield
        finally:
            for name in names:
                for engine_id in engine_ids:
                    self._ids[name].remove(engine_id)
                if not self._ids[name]:
                    del self._ids[name]


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """One server.

    Args:
      grammars: None if no grammar backend is installed: constrained decoding is refused then.
      model_names: names the model is served under; the first is the default.
      threads: for parsing and tokenising.
      created: Unix seconds, of the model.
      default_thinking: whether a chat request that says nothing about it thinks.
      default_effort: effort of a chat request that gives none, 1 to 100.
      default_max_tokens: output limit of a chat request that gives none; None is what the context leaves.
      ping_seconds: a stream that had nothing to send for so long sends a comment.
      grammar_threads: for requests with a grammar, whose compilation may block for seconds.
    """

    engine: Engine
    tokenizer: Tokenizer
    grammars: "GrammarCompiler | None"
    model_names: tuple[str, ...]
    threads: Executor
    created: int
    system_fingerprint: str
    default_thinking: bool = True
    default_effort: int = DEFAULT_EFFORT
    default_max_tokens: int | None = None
    ping_seconds: float = 15.0
    grammar_threads: Executor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="grammars")
    )
    running: RunningRequests = dataclasses.field(default_factory=RunningRequests)

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)


@dataclasses.dataclass
class AccessRecord:
    """What the access log says about one HTTP request; filled in while it is served.

    Attributes:
      request_id: of the header `X-Request-Id`, otherwise random; the body's `request_id` replaces a random one.
      client_named: the header gave the id.
      started: `time.monotonic()` at the start.
      first_token: seconds from there to the first generated token.
    """

    request_id: str
    client_named: bool = False
    started: float = dataclasses.field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
