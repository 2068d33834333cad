"""Sessions of coding agents at random: shared prefixes, growing histories, sub-agents, pauses, heavy tails.

A session begins with what others begin with as well: the system prompt of its kind of agent with that agent's tools,
and a repository's instructions, both chosen by Zipf's law. Behind them stands its own task. Each turn answers some
tokens and, after a pause in which a tool ran or a human thought, goes on with what that gave. A turn may start
sub-agents: short sessions with a system prompt of their own, whose end their parent waits for.

The defaults follow what is public about such traffic: prompts of about 68K tokens in the median, above 450K at p99,
about 400 output tokens per turn, and 90 to 97 % of all prompt tokens in a cache that forgets nothing.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4jax.bench.traffic.trace_file import Message, Session, TurnPlan


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Numbers whose logarithms are normally distributed, cut off at both ends.

    Args:
      sigma: of the natural logarithm. Without cuts the mean is the median times exp(sigma^2 / 2).

    Raises:
      ValueError: a number is out of range.
    """

    median: float
    sigma: float
    most: float
    least: float = 1.0

    def __post_init__(self):
        for name in ("median", "sigma", "most", "least"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value!r}: must be a number, at least 0")
        if not 0 < self.least <= self.median <= self.most:
            raise ValueError(
                f"least, median, most = {self.least}, {self.median}, {self.most}: must ascend from above 0"
            )

    def draw(self, rng: np.random.Generator) -> float:
        """One number."""
        return min(self.most, max(self.least, self.median * math.exp(self.sigma * rng.standard_normal())))

    def whole(self, rng: np.random.Generator) -> int:
        """One whole number."""
        return max(1, round(self.draw(rng)))


@dataclasses.dataclass(frozen=True)
class AgentParameters:
    """What sessions are made of. Sizes are tokens, times are seconds.

    Args:
      agents: kinds of agents; each has a system prompt with tools.
      system: of one kind of agent.
      repositories: that sessions work on.
      repository: what is said of one of them at the start of a session.
      zipf: kind k of agents, and repository k, are chosen in proportion to 1 / k to this power.
      turns: of a session.
      task: what a session begins with behind the shared prefixes.
      message: what each later turn brings, such as the result of a tool.
      output: of a turn.
      tool_seconds, human_seconds: pause before a later turn, for a tool or for a human.
      human_share: share of later turns that a human is waited for.
      session_seconds: pause between a session and the one that takes its place.
      subagent_share: share of a session's turns that start sub-agents.
      subagents: how many at most; any number up to it is as likely.
      subagent_system, subagent_task, subagent_turns: of sub-agents, in the place of the above.
      max_context: tokens of prompt and output together, at which a session ends.

    Raises:
      ValueError: a field is out of range, or the longest first turn does not fit.
    """

    agents: int = 6
    system: Lognormal = Lognormal(14_000, 0.35, 40_000, 4_000)
    repositories: int = 40
    repository: Lognormal = Lognormal(6_000, 0.9, 40_000, 500)
    zipf: float = 1.0
    turns: Lognormal = Lognormal(21, 0.68, 400)
    task: Lognormal = Lognormal(1_500, 1.2, 60_000, 50)
    message: Lognormal = Lognormal(1_850, 1.4, 120_000, 20)
    output: Lognormal = Lognormal(185, 1.25, 16_000, 4)
    tool_seconds: Lognormal = Lognormal(2.0, 1.3, 600, 0.05)
    human_seconds: Lognormal = Lognormal(45.0, 1.0, 1_800, 2)
    human_share: float = 0.12
    session_seconds: Lognormal = Lognormal(20.0, 1.0, 600, 1)
    subagent_share: float = 0.025
    subagents: int = 3
    subagent_system: Lognormal = Lognormal(7_000, 0.3, 20_000, 2_000)
    subagent_task: Lognormal = Lognormal(800, 0.8, 10_000, 50)
    subagent_turns: Lognormal = Lognormal(7, 0.7, 60)
    max_context: int = 1_000_000

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} = {value!r}: must be a whole number, at least 1")
            if field.type is Lognormal and not isinstance(value, Lognormal):
                raise ValueError(f"{field.name} = {value!r}: must be a distribution")
            if field.type is float and (not isinstance(value, (int, float)) or not 0 <= value < math.inf):
                raise ValueError(f"{field.name} = {value!r}: must be a number, at least 0")
        for name in ("human_share", "subagent_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at most 1")
        longest = self.longest_first_turn
        if longest > self.max_context:
            raise ValueError(f"max_context = {self.max_context}: a first turn may have {longest} tokens")

    @property
    def longest_first_turn(self) -> int:
        """Tokens that the first turn of a session has at most, its output included."""
        own = self.system.most + self.task.most
        sub = self.subagent_system.most + self.subagent_task.most
        return math.ceil(max(own, sub) + self.repository.most + self.output.most)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "AgentParameters":
        """Parameters of which some are given by name, distributions as objects; the others keep their defaults.

        Raises:
          ValueError: an unknown name, or a value that is not allowed.
        """
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"{unknown[0]!r}: unknown, must be one of {list(known)}")
        values = {}
        for name, value in fields.items():
            if known[name] is Lognormal:
                names = [field.name for field in dataclasses.fields(Lognormal)]
                if not isinstance(value, Mapping) or set(value) - set(names):
                    raise ValueError(f"{name} = {value!r}: must be an object with some of {names}")
                try:
                    value = dataclasses.replace(getattr(cls, name), **value)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            values[name] = value
        return cls(**values)


def read_parameters(path: str | Path) -> AgentParameters:
    """Parameters from a JSON file: see `AgentParameters.from_dict`.

    Raises:
      ValueError: the file is not JSON, or as `from_dict`; with the path.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("must be a JSON object")
        return AgentParameters.from_dict(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def generate_sessions(parameters: AgentParameters, seed: int) -> Iterator[Session]:
    """Sessions without end; the n-th depends on the parameters, the seed and n alone."""
    world = _World(parameters, seed)
    for number in itertools.count():
        yield world.session(number)


@dataclasses.dataclass(frozen=True)
class TraceStatistics:
    """Of the turns of sessions, sub-agents included."""

    sessions: int
    subagents: int
    turns: int
    context_p50: float
    context_p99: float
    context_most: int
    input_tokens: float
    """Mean of what a turn adds to its prompt."""
    output_tokens: float
    """Mean of a turn."""
    cached_share: float
    """Of all prompt tokens, those that stood in a turn that ended before, or in a prefix that a session before it
    began with: what a cache without limits and without pages would hold."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def trace_statistics(sessions: Sequence[Session]) -> TraceStatistics:
    """Statistics of sessions that run one after the other.

    Raises:
      ValueError: there are none.
    """
    if not sessions:
        raise ValueError("sessions: there are none")
    family = [one for session in sessions for one in session.family()]
    turns = [turn for session in family for turn in session.turns]
    contexts = np.array([length for session in family for length in session.contexts()])
    seen: set[tuple[str, ...]] = set()
    cached = 0
    for session in family:
        prefix: tuple[str, ...] = ()
        for message in itertools.takewhile(lambda m: m.role == "system", session.turns[0].messages):
            prefix = (*prefix, message.content)
            cached += message.tokens if prefix in seen else 0
            seen.add(prefix)
        lengths = session.contexts()
        # The last output token of a turn is run by none of its steps.
        before = zip(lengths, session.turns, strict=True)
        cached += sum(length + turn.output_tokens - 1 for length, turn in itertools.islice(before, len(lengths) - 1))
    p50, p99 = np.quantile(contexts, [0.5, 0.99]).tolist()
    return TraceStatistics(
        sessions=len(sessions),
        subagents=len(family) - len(sessions),
        turns=len(turns),
        context_p50=p50,
        context_p99=p99,
        context_most=int(contexts.max()),
        input_tokens=float(np.mean([turn.input_tokens for turn in turns])),
        output_tokens=float(np.mean([turn.output_tokens for turn in turns])),
        cached_share=cached / int(contexts.sum()),
    )


class _World:
    """What sessions have in common: sizes of system prompts and repositories, and how likely each is."""

    def __init__(self, parameters: AgentParameters, seed: int):
        self._parameters, self._seed = parameters, seed
        rng = np.random.default_rng([seed, 0])
        self._systems = [parameters.system.whole(rng) for _ in range(parameters.agents)]
        self._subagent_systems = [parameters.subagent_system.whole(rng) for _ in range(parameters.agents)]
        self._repositories = [parameters.repository.whole(rng) for _ in range(parameters.repositories)]

    def session(self, number: int) -> Session:
        p, rng = self._parameters, np.random.default_rng([self._seed, 1, number])
        name = f"s{number}"
        agent, repository = self._zipf(rng, p.agents), self._zipf(rng, p.repositories)
        shared = Message("system", f"repository {repository}", self._repositories[repository])
        first = (Message("system", f"agent {agent}", self._systems[agent]), shared)
        turns = self._turns(rng, name, first, p.task, p.turns.whole(rng), p.session_seconds.draw(rng))
        for number, turn in enumerate(turns[:-1]):  # what they found goes into the turn after
            if rng.random() < p.subagent_share:
                count = int(rng.integers(p.subagents)) + 1
                started = tuple(self._subagent(rng, f"{name}.{number}.{i}", agent, shared) for i in range(count))
                turns[number] = dataclasses.replace(turn, subagents=started)
        return Session(name, tuple(turns))

    def _subagent(self, rng: np.random.Generator, name: str, agent: int, shared: Message) -> Session:
        p = self._parameters
        first = (Message("system", f"sub-agent {agent}", self._subagent_systems[agent]), shared)
        return Session(name, tuple(self._turns(rng, name, first, p.subagent_task, p.subagent_turns.whole(rng), 0.0)))

    def _turns(
        self,
        rng: np.random.Generator,
        name: str,
        first: tuple[Message, ...],
        task: Lognormal,
        count: int,
        think_seconds: float,
    ) -> list[TurnPlan]:
        p = self._parameters
        messages = (*first, Message("user", f"{name} task", task.whole(rng)))
        turns, length = [], 0
        while len(turns) < count:
            turn = TurnPlan(messages, p.output.whole(rng), think_seconds)
            length += turn.input_tokens + turn.output_tokens
            if length > p.max_context:
                break
            turns.append(turn)
            human = rng.random() < p.human_share
            think_seconds = (p.human_seconds if human else p.tool_seconds).draw(rng)
            messages = (Message("user" if human else "tool", f"{name} {len(turns)}", p.message.whole(rng)),)
        return turns

    def _zipf(self, rng: np.random.Generator, count: int) -> int:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -self._parameters.zipf
        return int(rng.choice(count, p=weights / weights.sum()))
