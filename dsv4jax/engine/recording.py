"""Keeps what the engine told its executor and what came back; plays it back; finds where two schedules part.

A recording is a list of `Event`s. As a file it is JSON lines: a header, then one event per line. A prompt is written
once, where its slot is started; arrays are lists of numbers, masks are hexadecimal bytes (little-endian words).
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dsv4jax.engine.plan import Executor, RankResult, Sampled, Speculated, StepPlan, StepResult
from dsv4jax.engine.plan_codec import Prompts, plan_from_json, plan_to_json, take_prompts
from dsv4jax.engine.request import PromptLogprobs

_INTEGERS = ("counts", "verified", "tokens", "top_tokens", "next_drafts")
_HEADER = {"recording": "dsv4jax.engine", "version": 5}


class ReplayDifference(Exception):
    """The engine does not do what was recorded."""


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """One call of an executor. `time` is its clock afterwards; `error` is what it raised instead of working."""

    kind: Literal["dispatch", "wait", "reset"]
    time: float
    plan: StepPlan | None = None
    result: StepResult | None = None
    error: str | None = None


class RecordingExecutor:
    """Passes every call to `executor` and keeps it in `events`, from the engine's first step on."""

    def __init__(self, executor: Executor):
        self.events: list[Event] = []
        self._executor = executor

    def now(self) -> float:
        """The executor's clock."""
        return self._executor.now()

    def dispatch(self, plan: StepPlan) -> None:
        """Keeps the plan and passes it on."""
        try:
            self._executor.dispatch(plan)
        except Exception as error:
            self._keep("dispatch", plan=plan, error=f"{type(error).__name__}: {error}")
            raise
        self._keep("dispatch", plan=plan)

    def wait(self) -> StepResult:
        """Keeps the result and passes it on."""
        try:
            result = self._executor.wait()
        except Exception as error:
            self._keep("wait", error=f"{type(error).__name__}: {error}")
            raise
        self._keep("wait", result=result)
        return result

    def reset(self) -> None:
        """Resets the executor."""
        self._executor.reset()
        self._keep("reset")

    def _keep(self, kind: Literal["dispatch", "wait", "reset"], **what: Any) -> None:
        self.events.append(Event(kind, self.now(), **what))


class ReplayExecutor:
    """Answers as a recording says, as long as it is asked the same; its clock is the recorded one.

    Errors of the recorded executor are raised again as RuntimeError. The first difference raises `ReplayDifference`,
    and so does every call after it, so that an engine that survives failing steps ends here all the same.
    """

    def __init__(self, events: Iterable[Event]):
        self._events = collections.deque(events)
        self._now = 0.0
        self._difference: str | None = None

    @property
    def left(self) -> int:
        """Recorded calls that have not been made yet."""
        return len(self._events)

    def now(self) -> float:
        """The recorded clock after the newest call."""
        return self._now

    def dispatch(self, plan: StepPlan) -> None:
        """Compares the plan with the recorded one."""
        self._next("dispatch", plan)

    def wait(self) -> StepResult:
        """The recorded result."""
        result = self._next("wait").result
        assert result is not None
        return result

    def reset(self) -> None:
        """Nothing to do but to compare."""
        self._next("reset")

    def _next(self, kind: str, plan: StepPlan | None = None) -> Event:
        if self._difference is None:
            self._difference = self._compare(kind, plan)
        if self._difference is not None:
            raise ReplayDifference(self._difference)
        event = self._events.popleft()
        self._now = event.time
        if event.error is not None:
            raise RuntimeError(event.error)
        return event

    def _compare(self, kind: str, plan: StepPlan | None) -> str | None:
        if not self._events:
            return f"{kind} where the recording ends"
        event = self._events[0]
        if event.kind != kind:
            return f"{kind} where the recording has {event.kind}"
        return None if plan is None else plan_difference(event.plan, plan)


def plan_difference(expected: StepPlan, actual: StepPlan) -> str | None:
    """Where two plans differ first, with both values; None if they are equal."""
    difference = _difference(plan_to_json(expected), plan_to_json(actual), f"step {expected.number}")
    # Prompts stand in the JSON form only where their slot is started.
    return difference or _prompt_difference(expected, actual)


def schedule_difference(expected: Iterable[Event], actual: Iterable[Event]) -> str | None:
    """Where the plans of two recordings differ first; None if both have the same steps."""
    plans = [[e.plan for e in events if e.plan is not None] for events in (expected, actual)]
    for left, right in itertools.zip_longest(*plans):
        if left is None or right is None:
            return f"{len(plans[0])} steps and {len(plans[1])}"
        if difference := plan_difference(left, right):
            return difference
    return None


def save_recording(events: Iterable[Event], path: str | Path) -> None:
    """Writes JSON lines.

    Raises:
      ValueError: a prefill belongs to no recorded start of its slot: the recording does not begin with the engine.
    """
    prompts: Prompts = {}
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(_HEADER) + "\n")
        for event in events:
            line = {"kind": event.kind, "time": event.time}
            if event.plan is not None:
                take_prompts(event.plan, prompts)
                line["plan"] = plan_to_json(event.plan)
            if event.result is not None:
                line["result"] = _to_json(event.result)
            if event.error is not None:
                line["error"] = event.error
            file.write(json.dumps(line) + "\n")


def load_recording(path: str | Path) -> list[Event]:
    """Reads what `save_recording` wrote.

    Raises:
      ValueError: the file is none, or of another version.
    """
    events: list[Event] = []
    prompts: Prompts = {}
    with open(path, encoding="utf-8") as file:
        header = file.readline()
        if header != json.dumps(_HEADER) + "\n":
            raise ValueError(f"{path}: not a recording of version {_HEADER['version']}, begins with {header[:80]!r}")
        for line in file:
            event = json.loads(line)
            plan = plan_from_json(event["plan"], prompts) if "plan" in event else None
            result = _result_from_json(event["result"]) if "result" in event else None
            events.append(Event(event["kind"], event["time"], plan, result, event.get("error")))
    return events


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        fields = {f.name: _to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        # A list of no rows does not tell how long they are.
        return fields | {"top": value.top_tokens.shape[1]} if isinstance(value, PromptLogprobs) else fields
    if isinstance(value, tuple):
        return [_to_json(v) for v in value]
    return value


def _result_from_json(result: Any) -> StepResult:
    ranks = []
    for rank in result["ranks"]:
        logprobs = tuple(p and _prompt_logprobs(p) for p in rank["prompt_logprobs"])
        first_drafts = rank["first_drafts"] and _ints(rank["first_drafts"])
        ranks.append(RankResult(_sampled(rank["prefills"]), logprobs, first_drafts))
    speculation = result["speculation"] and Speculated(**_arrays(result["speculation"]))
    decoded = {"decodes": _sampled(result["decodes"]), "speculation": speculation}
    return StepResult(**result | {"ranks": tuple(ranks)} | decoded)


def _sampled(value: Any) -> Sampled | None:
    return value and Sampled(**_arrays(value))


def _arrays(value: dict[str, Any]) -> dict[str, np.ndarray | None]:
    """Arrays of a `Sampled` or `Speculated`."""
    return {name: array and (_ints if name in _INTEGERS else _floats)(array) for name, array in value.items()}


def _prompt_logprobs(value: Any) -> PromptLogprobs:
    shape = len(value["logprobs"]), value["top"]
    return PromptLogprobs(
        _floats(value["logprobs"]),
        _ints(value["top_tokens"]).reshape(shape),
        _floats(value["top_logprobs"]).reshape(shape),
    )


def _ints(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, np.int32)


def _floats(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, np.float32)


def _difference(expected: Any, actual: Any, place: str) -> str | None:
    """The first place where two JSON values differ."""
    if expected == actual:
        return None
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in expected:
            if found := _difference(expected[name], actual[name], f"{place}, {name}"):
                return found
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return f"{place}: {len(expected)} entries recorded, {len(actual)} now"
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            if found := _difference(left, right, f"{place}[{i}]"):
                return found
    return f"{place}: {expected!r} recorded, {actual!r} now"


def _prompt_difference(expected: StepPlan, actual: StepPlan) -> str | None:
    for number, (left, right) in enumerate(zip(expected.ranks, actual.ranks, strict=True)):
        for i, (a, b) in enumerate(zip(left.prefills, right.prefills, strict=True)):
            if not np.array_equal(a.tokens, b.tokens):
                return f"step {expected.number}, ranks[{number}], prefills[{i}], tokens: not those recorded"
    return None
