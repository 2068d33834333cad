"""Sessions of agents as a trace: what every turn adds to its prompt, how much it answers, and how long it waits.

A trace file is JSONL. Its first line is `{"format": "dsv4jax sessions", "version": 1}`; each further line is one turn:

    {"session": "a", "turn": 0, "think_seconds": 0.0, "output_tokens": 210, "messages": [
        {"role": "system", "content": "tools of the editor", "tokens": 14000},
        {"role": "user", "content": "task of a", "tokens": 900}]}
    {"session": "a", "turn": 1, "think_seconds": 3.5, "output_tokens": 95, "messages": [
        {"role": "tool", "content": "a 1", "tokens": 4100}]}
    {"session": "a.1", "parent": "a", "parent_turn": 1, "turn": 0, ...}

(each on one line). `messages` are those that the prompt did not have in the turn before; the prompt is all messages of
the session so far with the outputs between them. `content` is a name: messages of the same name begin with the same
tokens, which is how prefixes are shared, and no text needs to be in a file. The messages of role "system" with which a
session begins are the part of its prompt that sessions share. `think_seconds` is the time from the end of what a turn
waits for until it is sent: the turn before, and the sub-agents that started behind that. A line with `parent` is of a
sub-agent, which starts when turn `parent_turn` of its parent has ended. Turns of a session are numbered from 0 and
stand in this order; a parent's turn stands before its sub-agents.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HEADER = {"format": "dsv4jax sessions", "version": 1}
ROLES = ("system", "user", "tool")
_TURN_FIELDS = ("session", "turn", "think_seconds", "output_tokens", "messages")
_CHILD_FIELDS = ("parent", "parent_turn")


@dataclasses.dataclass(frozen=True)
class Message:
    """A part of a prompt.

    Args:
      content: messages of the same name begin with the same tokens.

    Raises:
      ValueError: an unknown role, or no token.
    """

    role: str
    content: str
    tokens: int

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role = {self.role!r}: must be one of {ROLES}")
        if not isinstance(self.content, str):
            raise ValueError(f"content = {self.content!r}: must be a string")
        _require_number("tokens", self.tokens, int, 1)


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """One turn of a session.

    Args:
      messages: those that the prompt did not have before, at least one.
      think_seconds: from the end of what it waits for until it is sent.
      subagents: sessions that start when it has ended; the next turn waits for all of them.

    Raises:
      ValueError: a field is out of range.
    """

    messages: tuple[Message, ...]
    output_tokens: int
    think_seconds: float = 0.0
    subagents: "tuple[Session, ...]" = ()

    def __post_init__(self):
        if not self.messages:
            raise ValueError("messages: must hold at least one")
        _require_number("output_tokens", self.output_tokens, int, 1)
        _require_number("think_seconds", self.think_seconds, (int, float), 0)

    @property
    def input_tokens(self) -> int:
        """Tokens of its messages."""
        return sum(message.tokens for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns, each of which continues the prompt of the one before.

    Raises:
      ValueError: there is no turn.
    """

    name: str
    turns: tuple[TurnPlan, ...]

    def __post_init__(self):
        if not self.turns:
            raise ValueError(f"session {self.name!r}: must have at least one turn")

    def contexts(self) -> list[int]:
        """Tokens of the prompt of every turn."""
        lengths, length = [], 0
        for turn in self.turns:
            length += turn.input_tokens
            lengths.append(length)
            length += turn.output_tokens
        return lengths

    def family(self) -> Iterator["Session"]:
        """The session itself and all its sub-agents."""
        yield self
        for turn in self.turns:
            for subagent in turn.subagents:
                yield from subagent.family()

    def scaled(self, scale: float) -> "Session":
        """The session with all tokens and times times `scale`, and at least one token where there were some."""
        return Session(self.name, tuple(_scaled(turn, scale) for turn in self.turns))


def write_trace(path: str | Path, sessions: Iterable[Session]) -> None:
    """Writes sessions and their sub-agents to a file, which `read_trace` reads back unchanged."""
    with open(path, "w", encoding="utf-8") as file:
        for line in _lines(sessions):
            file.write(json.dumps(line) + "\n")


def read_trace(path: str | Path) -> list[Session]:
    """Sessions of a trace file that are nobody's sub-agents, in the order of their first turns.

    Raises:
      ValueError: a line is not as the module says, by its number.
    """
    turns: dict[str, list[TurnPlan]] = {}
    parents: dict[str, tuple[str, int]] = {}
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                fields = json.loads(text)
                if number > 1:
                    _read_turn(fields, turns, parents)
                elif fields != HEADER:
                    raise ValueError(f"must be {json.dumps(HEADER)}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not turns:
        raise ValueError(f"{path}: holds no session")
    sessions = {}
    for name in reversed(turns):  # sub-agents before their parents
        found = Session(name, tuple(turns[name]))
        if name not in parents:
            sessions[name] = found
            continue
        parent, turn = parents[name]
        plan = turns[parent][turn]
        turns[parent][turn] = dataclasses.replace(plan, subagents=(found, *plan.subagents))
    return list(reversed(sessions.values()))


def _lines(sessions: Iterable[Session], parent: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    if parent is None:
        yield HEADER
    for session in sessions:
        for number, turn in enumerate(session.turns):
            yield {
                "session": session.name,
                **(parent or {}),
                "turn": number,
                "think_seconds": turn.think_seconds,
                "output_tokens": turn.output_tokens,
                "messages": [dataclasses.asdict(message) for message in turn.messages],
            }
            yield from _lines(turn.subagents, {"parent": session.name, "parent_turn": number})


def _read_turn(fields: Any, turns: dict[str, list[TurnPlan]], parents: dict[str, tuple[str, int]]) -> None:
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    allowed = {*_TURN_FIELDS, *_CHILD_FIELDS}
    if wrong := sorted((set(fields) - allowed) | (set(_TURN_FIELDS) - set(fields))):
        raise ValueError(
            f"{wrong[0]!r} is {'unknown' if wrong[0] in fields else 'missing'}: a turn has {sorted(_TURN_FIELDS)}, that"
            f" of a sub-agent {sorted(_CHILD_FIELDS)} as well"
        )
    name, parent = fields["session"], (fields.get("parent"), fields.get("parent_turn"))
    if not isinstance(name, str):
        raise ValueError(f"session = {name!r}: must be a string")
    known = turns.get(name, [])
    if fields["turn"] != len(known):
        raise ValueError(f"turn = {fields['turn']!r} of session {name!r}: must be {len(known)}, they are in order")
    if known and parents.get(name, (None, None)) != parent:
        raise ValueError(f"parent = {parent[0]!r}, parent_turn = {parent[1]!r}: differ from those of turn 0")
    if not known and parent != (None, None):
        ended = turns.get(parent[0], []) if isinstance(parent[0], str) else []
        if type(parent[1]) is not int or parent[1] not in range(len(ended)):
            raise ValueError(f"parent = {parent[0]!r}, parent_turn = {parent[1]!r}: must be a turn of a line above")
        parents[name] = parent
    if not isinstance(fields["messages"], list):
        raise ValueError("messages: must be a list")
    messages = tuple(_message(message) for message in fields["messages"])
    turn = TurnPlan(messages, fields["output_tokens"], fields["think_seconds"])
    turns.setdefault(name, []).append(turn)


def _message(fields: Any) -> Message:
    names = [field.name for field in dataclasses.fields(Message)]
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise ValueError(f"messages: {fields!r}: must be objects with {names}")
    return Message(**fields)


def _require_number(name: str, value: Any, kind: type | tuple[type, ...], least: float) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < float("inf"):
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} = {value!r}: must be {wanted}, at least {least}")


def _scaled(turn: TurnPlan, scale: float) -> TurnPlan:
    return TurnPlan(
        tuple(dataclasses.replace(m, tokens=max(1, round(m.tokens * scale))) for m in turn.messages),
        max(1, round(turn.output_tokens * scale)),
        turn.think_seconds * scale,
        tuple(subagent.scaled(scale) for subagent in turn.subagents),
    )
