"""Sessions in a closed loop, as a workload: a number of them are live, and a turn follows the end of the one before.

Every prompt begins with a marker of the run, so that no run finds what an earlier one left in a server's cache, and
every session has a marker of its own behind the prefixes that it shares. Hence nothing can be found but these prefixes
and the history of the session itself, however often a trace is played.
"""

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32

from dsv4jax.bench.traffic.driver import Turn
from dsv4jax.bench.traffic.trace_file import Message, Session
from dsv4jax.engine.page_pool import PageKey, PrefixHasher

Tokens = Int32[np.ndarray, " tokens"]
MARKER_TOKENS = 8
FIRST_MARKERS = 2 * MARKER_TOKENS
"""Tokens that a session's first turn has more than its plan."""
ASSISTANT = "assistant"


@dataclasses.dataclass(frozen=True, eq=False)
class SessionTurn(Turn):
    """A turn of a session.

    Args:
      parts: role and end of each message in the prompt; of two neighbours the roles differ. Outputs of earlier turns
        have the role "assistant".
    """

    parts: tuple[tuple[str, int], ...] = ()


def content_tokens(name: str, count: int, ids: range) -> Tokens:
    """The first `count` tokens of a content: the same for the same name, whatever else there is."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).integers(ids.start, ids.stop, count, dtype=np.int32)


class UnlimitedCache:
    """A prefix cache that forgets nothing: what is cached in theory.

    Args:
      page_size: tokens of the unit in which prefixes are found.
      replay_tokens: that are run again behind what was found.
      max_tokens: of a prompt and its output.
    """

    def __init__(self, page_size: int, replay_tokens: int, max_tokens: int):
        self.page_size, self._replay = page_size, replay_tokens
        self._hasher = PrefixHasher(page_size, max_tokens)
        self._known: set[PageKey] = set()

    def start(self) -> "CachedPrompt":
        """A prompt that grows."""
        return CachedPrompt(self._hasher.start(""))

    def extend(self, prompt: "CachedPrompt", tokens: Tokens) -> None:
        """Names the full pages of `tokens`, which begins with what `prompt` was told before."""
        first = len(prompt.keys) * self.page_size
        prompt.state, keys = self._hasher.extend(prompt.state, tokens[first:], first)
        prompt.keys += keys

    def expected(self, prompt: "CachedPrompt", tokens: int) -> int:
        """How many of a prompt's first `tokens` tokens need not be run; the last one always is."""
        pages, most = min(prompt.known, len(prompt.keys)), (tokens - 1) // self.page_size
        while pages < min(most, len(prompt.keys)) and prompt.keys[pages] in self._known:
            pages += 1
        return max(0, min(pages, most) * self.page_size - self._replay)

    def publish(self, prompt: "CachedPrompt") -> None:
        """Everything that `prompt` was told is cached from now on."""
        self._known.update(prompt.keys[prompt.known :])
        prompt.known = len(prompt.keys)


@dataclasses.dataclass(eq=False)
class CachedPrompt:
    """Pages of a prompt, and how many of them its own session has published."""

    state: np.ndarray
    keys: list[PageKey] = dataclasses.field(default_factory=list)
    known: int = 0


@dataclasses.dataclass(eq=False)
class _Live:
    """A session that runs. `running` are its sub-agents that run."""

    name: str
    session: Session
    parent: "_Live | None"
    pages: CachedPrompt
    turn: int = 0
    tokens: Tokens = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    parts: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    running: int = 0


class SessionWorkload:
    """A `Workload` of sessions, of which `live` run at a time; sub-agents run besides them.

    A session ends with its last turn, with one that failed, or before the turn that would not fit `max_context`; then
    the next one takes its place, as long as there are any.

    Args:
      sessions: as many as there are to run, or without end.
      ids: from which prompts are made.
      max_context: tokens of prompt and output together.
      page_size, replay_tokens: of the server's prefix cache, for `Turn.expected_cached_tokens`: see `UnlimitedCache`. A
        prompt counts as cached when its request has ended.
      run: prompts of runs with different numbers share nothing.
      ramp_seconds: over which the first sessions start.
      from_the_middle: the first sessions start at a turn chosen at random, with the history that they would have had,
        so that the mix of contexts is soon that of a long run.
      cold_first_turns: no part of a session's first turn is cached: its own marker is before the shared prefixes too.
      stand_ins: histories have tokens of the workload's own in the place of outputs, as many; for servers that give no
        tokens back. They are not expected to be cached.

    Raises:
      ValueError: a field is out of range; by `first` and `after`, a session whose first turn does not fit.
    """

    def __init__(
        self,
        sessions: Iterator[Session],
        *,
        live: int,
        ids: range,
        max_context: int,
        page_size: int = 64,
        replay_tokens: int = 0,
        run: int = 0,
        ramp_seconds: float = 0.0,
        from_the_middle: bool = True,
        cold_first_turns: bool = False,
        stand_ins: bool = False,
    ):
        for name, value, least in (("live", live, 1), ("page_size", page_size, 1), ("replay_tokens", replay_tokens, 0)):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        if ids.step != 1 or not 0 <= ids.start < ids.stop - 1:
            raise ValueError(f"ids = {ids}: must be at least two ascending ids")
        if not ramp_seconds >= 0:
            raise ValueError(f"ramp_seconds = {ramp_seconds}: must be at least 0")
        self._sessions, self._count, self._ids, self._run = iter(sessions), live, ids, run
        self._max_context, self._ramp_seconds = max_context, ramp_seconds
        self._from_the_middle, self._cold, self._stand_ins = from_the_middle, cold_first_turns, stand_ins
        self._cache = UnlimitedCache(page_size, replay_tokens, max_context)
        self._live: dict[str, _Live] = {}
        self._played = 0

    def first(self) -> Iterator[SessionTurn]:
        """The first turns of the first sessions."""
        for i in range(self._count):
            session = next(self._sessions, None)
            if session is None:
                return
            live = self._begin(session, None)
            if self._from_the_middle:
                self._skip(live)
            yield self._next_turn(live, i * self._ramp_seconds / self._count)

    def after(self, turn: Turn, output: Tokens, finished: float) -> list[SessionTurn]:
        """What follows a turn that ended at `finished` with these tokens, none if it failed."""
        live = self._live[turn.session]
        if not output.size:
            return self._end(live, finished)
        self._answer(live, output)
        plan = live.session.turns[live.turn]
        live.turn += 1
        if not plan.subagents:
            return self._go_on(live, finished)
        live.running = len(plan.subagents)
        begun = [self._begin(session, live) for session in plan.subagents]
        return [self._next_turn(one, finished + self._think(one)) for one in begun]

    def _begin(self, session: Session, parent: _Live | None) -> _Live:
        live = _Live(f"{self._played}/{session.name}", session, parent, self._cache.start())
        self._played += 1
        first = FIRST_MARKERS + session.turns[0].input_tokens + session.turns[0].output_tokens
        if first > self._max_context:
            raise ValueError(
                f"session {session.name!r}: its first turn has {first} tokens with its output, max_context is"
                f" {self._max_context}"
            )
        self._live[live.name] = live
        return live

    def _think(self, live: _Live) -> float:
        return live.session.turns[live.turn].think_seconds

    def _skip(self, live: _Live) -> None:
        """Goes to a turn that fits, chosen at random, without running those before it."""
        turns, contexts = live.session.turns, live.session.contexts()
        fits = sum(
            FIRST_MARKERS + context + turn.output_tokens <= self._max_context
            for context, turn in zip(contexts, turns, strict=True)
        )
        drawn = content_tokens(f"start of {live.name}", 1, range(0, 1 << 30))
        for turn in turns[: int(drawn[0]) % fits]:
            self._ask(live)
            self._add(live, ASSISTANT, self._stand_in(live, turn.output_tokens))
            live.turn += 1

    def _next_turn(self, live: _Live, arrives: float) -> SessionTurn:
        self._ask(live)
        self._cache.extend(live.pages, live.tokens)
        return SessionTurn(
            session=live.name,
            turn=live.turn,
            arrives=arrives,
            prompt=live.tokens,
            max_tokens=live.session.turns[live.turn].output_tokens,
            expected_cached_tokens=self._cache.expected(live.pages, len(live.tokens)),
            parts=tuple(live.parts),
        )

    def _go_on(self, live: _Live, now: float) -> list[SessionTurn]:
        if live.turn < len(live.session.turns):
            plan = live.session.turns[live.turn]
            if len(live.tokens) + plan.input_tokens + plan.output_tokens <= self._max_context:
                return [self._next_turn(live, now + plan.think_seconds)]
        return self._end(live, now)

    def _end(self, live: _Live, now: float) -> list[SessionTurn]:
        del self._live[live.name]
        if live.parent is not None:
            live.parent.running -= 1
            return [] if live.parent.running else self._go_on(live.parent, now)
        session = next(self._sessions, None)
        if session is None:
            return []
        begun = self._begin(session, None)
        return [self._next_turn(begun, now + self._think(begun))]

    def _ask(self, live: _Live) -> None:
        """Adds the messages of the session's turn to its history."""
        messages = list(live.session.turns[live.turn].messages)
        if live.turn == 0:
            shared = sum(1 for _ in _leading_system(messages))
            own = Message("system" if self._cold else "user", f"session {self._run} {live.name}", MARKER_TOKENS)
            messages.insert(0 if self._cold else shared, own)
            messages.insert(0, Message("system", f"run {self._run}", MARKER_TOKENS))
        for message in messages:
            self._add(live, message.role, content_tokens(message.content, message.tokens, self._ids))

    def _answer(self, live: _Live, output: Tokens) -> None:
        """Adds the output of the session's turn; all that was run of it is cached."""
        self._cache.publish(live.pages)
        if self._stand_ins:
            output = self._stand_in(live, len(output))
        self._add(live, ASSISTANT, output)
        if not self._stand_ins:
            self._cache.extend(live.pages, live.tokens[:-1])
            self._cache.publish(live.pages)

    def _stand_in(self, live: _Live, count: int) -> Tokens:
        return content_tokens(f"output {live.name} {live.turn}", count, self._ids)

    def _add(self, live: _Live, role: str, tokens: Tokens) -> None:
        live.tokens = np.concatenate([live.tokens, tokens])
        if live.parts and live.parts[-1][0] == role:
            live.parts.pop()
        live.parts.append((role, len(live.tokens)))


def _leading_system(messages: list[Message]) -> Iterator[Message]:
    for message in messages:
        if message.role != "system":
            return
        yield message
