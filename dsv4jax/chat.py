"""The chat format: from messages to prompt ids, and from generated ids back to reasoning and answer text.

The prompt text comes from DeepSeek's `deepseek-recipe`; this module is the only one that knows the package.
What the chat page requires beyond it (developer messages, numeric efforts, large integers) is done around it.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import deepseek_recipe
import numpy as np
from jaxtyping import Int32

from dsv4jax.tokenizer import BOS, EOS, StreamDecoder, TokenIds, Tokenizer, check_ids

SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
CHAT_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML, LATEST_REMINDER, IMAGE)

Message = Mapping[str, Any]
ReplyStart = Literal["reasoning", "reasoning_continuation", "content", "content_continuation", "tool_calls"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, "ultra": 100}
_DEFAULT_EFFORT = 75
_EFFORT_LINE = "Reasoning Effort: {} ("


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool | None = None,
    reasoning_effort: str | int | float | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Mapping[str, Any] | None = None,
) -> Int32[np.ndarray, " tokens"]:
    """Prompt ids of a conversation, generation header included (chat section 2).

    Control tokens are looked up by spelling; all other text is tokenised without the added vocabulary, so no
    message can inject one. Each image part is one `<｜deepseek_image｜>` id, in prompt order, for the caller
    to expand.

    Args:
      tokenizer: holds all of `CHAT_TOKENS`.
      messages: Chat Completions messages. `developer` counts as `system`, `reasoning` as `reasoning_content`;
        `"prefix": True` on a last assistant message continues it.
      thinking: None means on unless the effort is "none"; True or False overrides the effort (section 2.2).
      reasoning_effort: a name, an integer from 1 to 100, or a fraction from 0 to 0.99. None means "high".
      tools: Chat Completions tools; an empty list means none.
      tool_choice: "auto", "none", "required" or a named function. Forcing a call needs thinking off.
      response_format: Chat Completions response format.

    Raises:
      ValueError: the request is not allowed, or the tokenizer lacks a control token.
    """
    tokenizer.require_control_tokens(CHAT_TOKENS)
    segments = _segments(messages, thinking, reasoning_effort, tools, tool_choice, response_format)
    return np.concatenate(
        [
            np.array([tokenizer.control_id(text)], np.int32) if is_control else tokenizer.encode(text)
            for text, is_control in segments
        ]
    )


def render_chat(
    messages: Sequence[Message],
    *,
    thinking: bool | None = None,
    reasoning_effort: str | int | float | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of `encode_chat` as text, for people and tests.

    Tokenising it again is not safe: a control token and the same spelling typed by a user look alike in it.

    Raises:
      ValueError: the request is not allowed.
    """
    segments = _segments(messages, thinking, reasoning_effort, tools, tool_choice, response_format)
    return "".join(text for text, _ in segments)


def reply_start(tokenizer: Tokenizer, prompt_ids: TokenIds) -> ReplyStart:
    """Where the reply to a chat prompt begins, read from its last assistant header (chat section 3.1).

    Raises:
      ValueError: the prompt does not end in an open assistant turn.
    """
    think, think_end = tokenizer.control_id(THINK), tokenizer.control_id(THINK_END)
    ids = np.array(check_ids(prompt_ids, tokenizer.vocab_size), np.int32)
    openers = np.flatnonzero(ids == tokenizer.control_id(ASSISTANT))
    turn = ids[openers[-1] + 1 :] if openers.size else ids[:0]
    if not turn.size or turn[0] not in (think, think_end) or tokenizer.eos_id in turn:
        raise ValueError(f"the prompt does not end in an open assistant turn ({ASSISTANT} and {THINK} or {THINK_END})")
    if tokenizer.control_id(DSML) in turn:
        return "tool_calls"
    if turn[0] == think_end:
        return "content"
    if think_end in turn:
        return "content_continuation"
    return "reasoning" if turn.size == 1 else "reasoning_continuation"


@dataclasses.dataclass(frozen=True)
class ReplyDelta:
    """A piece of the reply: new text of the reasoning or of the answer."""

    channel: Literal["reasoning", "content"]
    text: str


class ReplyParser:
    """Splits generated ids into reasoning and answer text while they arrive (chat section 3).

    The deltas joined do not depend on how the ids are cut. Only the control token `</think>` ends the
    reasoning; the same spelling made of ordinary pieces is text. Tool calls are not parsed: their markup
    stays in the answer.

    Attributes:
      ended: True once end of sentence or a stop string was seen: nothing more is part of the reply.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: TokenIds, *, stop: Sequence[str] = ()):
        """Starts where `prompt_ids` ends; the answer (not the reasoning) ends before a string of `stop`.

        Raises:
          ValueError: the prompt is no chat prompt or forces a tool call, or a stop string is empty.
        """
        start = reply_start(tokenizer, prompt_ids)
        if start == "tool_calls":
            raise ValueError("the prompt forces a tool call; the reply has neither reasoning nor answer text")
        self.ended = False
        self._tokenizer = tokenizer
        self._think_end = tokenizer.control_id(THINK_END)
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopStrings(stop)
        self._in_reasoning = start.startswith("reasoning")
        self._at_start = not start.endswith("continuation")  # leading newlines are dropped
        self._held_newlines = 0  # of the reasoning: dropped if `</think>` follows

    def push(self, ids: TokenIds) -> list[ReplyDelta]:
        """The deltas that become certain with `ids`; ids after the end of the reply are ignored.

        Raises:
          ValueError: an id is outside the vocabulary, or the reply ended in an earlier call.
        """
        if self.ended:
            raise ValueError("the reply has ended: no further ids can be pushed")
        deltas: list[ReplyDelta] = []
        for token_id in check_ids(ids, self._tokenizer.vocab_size):
            if token_id == self._tokenizer.eos_id:
                self.ended = True
            elif token_id == self._think_end:
                deltas += self._close_reasoning() if self._in_reasoning else self._drop_stray_close()
            else:
                deltas += self._take(self._decoder.push([token_id]))
            if self.ended:
                break
        return _joined(deltas)

    def finish(self) -> list[ReplyDelta]:
        """Ends the reply and returns everything held back; an incomplete character becomes one U+FFFD."""
        self.ended = True
        if self._stop.matched:
            return []
        return _joined(self._take(self._decoder.finish()) + self._release())

    def _take(self, text: str) -> list[ReplyDelta]:
        if not self._in_reasoning:
            released = self._stop.push(text)
            self.ended = self.ended or self._stop.matched
            return self._delta(released)
        body = text.rstrip("\n")
        held, self._held_newlines = self._held_newlines, len(text) - len(body)
        if body:
            return self._delta("\n" * held + body)
        self._held_newlines += held
        return []

    def _release(self) -> list[ReplyDelta]:
        held = self._stop.release() + "\n" * self._held_newlines
        self._held_newlines = 0
        return self._delta(held)

    def _close_reasoning(self) -> list[ReplyDelta]:
        deltas = self._take(self._decoder.finish())
        self._held_newlines = 0
        self._in_reasoning, self._at_start = False, True
        return deltas

    def _drop_stray_close(self) -> list[ReplyDelta]:
        deltas = self._take(self._decoder.finish())
        if not self._stop.matched:
            deltas += self._release()
            self._at_start = False
        return deltas

    def _delta(self, text: str) -> list[ReplyDelta]:
        if self._at_start:
            text = text.lstrip("\n")
        if not text:
            return []
        self._at_start = False
        return [ReplyDelta("reasoning" if self._in_reasoning else "content", text)]


class StopStrings:
    """Cuts a stream of text before the stop string that completes first, however the text is cut.

    Of stop strings that complete together, the first in the list counts. Holds back exactly the text that may
    still become a stop string.

    Attributes:
      matched: True once a stop string was found.
    """

    def __init__(self, stop: Sequence[str]):
        """Raises ValueError if `stop` is a string itself or holds anything but non-empty strings."""
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop is {stop!r}: it must be a sequence of non-empty strings")
        self.matched = False
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be output. Nothing follows once `matched` is set."""
        text = self._held + text
        ends = {at + len(s): at for s in reversed(self._stop) if (at := text.find(s)) >= 0}
        if ends:
            self.matched, self._held = True, ""
            return text[: ends[min(ends)]]
        longest = max(map(len, self._stop), default=1) - 1
        held = next((k for k in range(min(longest, len(text)), 0, -1) if self._may_start(text[-k:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def release(self) -> str:
        """The held text, which no longer can become a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, tail: str) -> bool:
        return any(s.startswith(tail) for s in self._stop)


def _joined(deltas: Iterable[ReplyDelta]) -> list[ReplyDelta]:
    groups = itertools.groupby(deltas, key=lambda delta: delta.channel)
    return [ReplyDelta(channel, "".join(delta.text for delta in group)) for channel, group in groups]


def _segments(
    messages: Sequence[Message],
    thinking: bool | None,
    reasoning_effort: str | int | float | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any],
    response_format: Mapping[str, Any] | None,
) -> list[tuple[str, bool]]:
    """The prompt as (text, is control token) pairs in order."""
    effort = _effort_number(reasoning_effort)
    if thinking not in (None, True, False):
        raise ValueError(f"thinking is {thinking!r}: allowed are True, False and None")
    thinking = effort is not None if thinking is None else thinking
    if not tools and tool_choice not in ("auto", "none"):
        raise ValueError(f"tool_choice is {tool_choice!r} but there are no tools: allowed are 'auto' and 'none'")
    request = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [_message(i, message) for i, message in enumerate(messages)],
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "tool_choice": tool_choice,
    }
    if tools:
        request["tools"] = list(tools)
    if response_format is not None:
        request["response_format"] = response_format
    body, originals = _protect_large_integers(_to_json(request))

    segments = _render(body)
    if thinking:
        default = _EFFORT_LINE.format(_DEFAULT_EFFORT)
        text, _ = segments[2]
        if not text.startswith(default):
            raise RuntimeError(
                f"deepseek-recipe {deepseek_recipe.__version__} renders another effort line: {text[:80]!r}"
            )
        segments[2] = (_EFFORT_LINE.format(effort or _DEFAULT_EFFORT) + text[len(default) :], False)
    for stand_in, original in originals.items():
        segments = [(text.replace(stand_in, original), is_control) for text, is_control in segments]
    return segments


def _render(body: str) -> list[tuple[str, bool]]:
    special_tokens = deepseek_recipe.SpecialTokens(image=IMAGE)
    options = deepseek_recipe.ConversionOptions().with_special_tokens(special_tokens)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special_tokens)
    try:
        conversation = deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation
    except (deepseek_recipe.ConversionError, ValueError) as error:
        raise ValueError(f"bad chat request: {error}") from error
    rendered = encoding.render_conversation(conversation)
    segments, done = [], 0
    for start, end in rendered.special_ranges:
        control = rendered.prompt[start:end]
        if control not in CHAT_TOKENS:  # grounding markup of an earlier answer: text (chat section 2.11)
            continue
        if done < start:
            segments.append((rendered.prompt[done:start], False))
        segments.append((control, True))
        done = end
    if done < len(rendered.prompt):
        segments.append((rendered.prompt[done:], False))
    return segments


def _effort_number(effort: str | int | float | None) -> int | None:
    """The number of the effort line (chat section 2.2); None for "none"."""
    if effort is None:
        return _DEFAULT_EFFORT
    if effort == "none":
        return None
    if isinstance(effort, str) and effort in _EFFORTS:
        return _EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    if isinstance(effort, float) and 0 <= effort <= 0.99:
        return max(1, round(100 * effort))
    raise ValueError(
        f"reasoning_effort is {effort!r}: allowed are none, {', '.join(_EFFORTS)}, an integer from 1 to 100 "
        "or a fraction from 0 to 0.99"
    )


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message in the form that `deepseek-recipe` reads (chat sections 2.3 to 2.5, 2.7)."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is of type {type(message).__name__}: it must be an object")
    message = dict(message)
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}: allowed are {', '.join(_ROLES)}")
    if role == "developer":
        message["role"] = "system"
    if message.get("task") is not None:
        raise ValueError(f"{where}.task is {message['task']!r}: task prompts are not supported")
    if (reasoning := message.pop("reasoning", None)) is not None:
        message["reasoning_content"] = reasoning
    if isinstance(message.get("content"), list | tuple):
        message["content"] = [_content_part(f"{where}.content[{i}]", part) for i, part in enumerate(message["content"])]
    return _with_arguments(message, _arguments_text)


def _content_part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text"):
        return {**part, "type": "text"}
    if kind == "image_url":
        return dict(part)
    if kind == "input_image":
        image = {key: part[key] for key in ("detail",) if key in part}
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), **image}}
    raise ValueError(f"{where}.type is {kind!r}: allowed are text, input_text, output_text, image_url and input_image")


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with `change` applied to the arguments of its calls; malformed calls stay as they are."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or function.get("arguments") is None:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    if not isinstance(message.get("tool_calls"), list | tuple):
        return dict(message)
    return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}


def _arguments_text(arguments: Any) -> str:
    """`arguments` as JSON text: an object is printed, an object that was encoded twice is decoded once."""
    if not isinstance(arguments, str):
        return _to_json(arguments)
    inner = _parsed_json(arguments)
    return inner if isinstance(inner, str) and isinstance(_parsed_json(inner), dict) else arguments


def _protect_large_integers(body: str) -> tuple[str, dict[str, str]]:
    """Replaces integers beyond 64 bits, which `deepseek-recipe` prints as floats, by unused smaller ones.

    Returns the new body and stand-in -> original digits (chat section 2.7).
    """
    if not re.search(r"\d{19}", body):
        return body, {}
    originals: dict[str, str] = {}
    unused = (n for n in itertools.count(10**18) if str(n) not in body)

    def stand_in(digits: str) -> int:
        number = int(digits)
        if -(2**63) <= number < 2**64:
            return number
        number = next(unused)
        originals[str(number)] = digits
        return number

    def protected_arguments(arguments: str) -> str:
        parsed = _parsed_json(arguments, stand_in)
        return _to_json(parsed) if isinstance(parsed, dict) else arguments

    request = json.loads(body, parse_int=stand_in)
    request["messages"] = [_with_arguments(message, protected_arguments) for message in request["messages"]]
    return _to_json(request), originals


def _to_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"bad chat request: not valid JSON: {error}") from error
    return text


def _parsed_json(text: str, parse_int: Callable[[str], int] = int) -> Any:
    """The value of a JSON text, or None if it is not JSON or too large for Python and the recipe alike."""
    try:
        return json.loads(text, parse_int=parse_int, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value
