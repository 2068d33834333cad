"""From chat messages to prompt ids.

The prompt text comes from DeepSeek's `deepseek-recipe`; this module is the only one that knows the package.
What the chat page requires beyond it (numeric efforts, kept reasoning, forced calls while thinking, tasks, large
integers) is done around it.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import deepseek_recipe
import numpy as np
from jaxtyping import Int32

from dsv4jax.chat.request import (
    DEFAULT_EFFORT,
    TASKS,
    ChatError,
    Message,
    bad_value,
    checked_response_format,
    effective_tools,
    forced_tool_name,
    normal_messages,
    parsed_json,
    place_of_tool,
    shortened,
    to_json,
)
from dsv4jax.tokenizer import BOS, EOS, TokenIds, Tokenizer

SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
TASK_TOKENS = {task: f"<｜{task}｜>" for task in TASKS}
CHAT_TOKENS = (
    *(BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML, LATEST_REMINDER, IMAGE),
    *TASK_TOKENS.values(),
)

ReplyStart = Literal["reasoning", "reasoning_continuation", "content", "content_continuation", "tool_calls"]
Segment = tuple[str, bool]  # text, is it a control token

_EFFORT_LINE = "Reasoning Effort: {} ("
_REFUSED_MESSAGE = re.compile(r"\.(messages\[\d+\]): ")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool = True,
    effort: int = DEFAULT_EFFORT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    drop_thinking: bool = True,
    continue_final_message: bool = False,
) -> Int32[np.ndarray, " tokens"]:
    """Prompt ids of a conversation, generation header included (chat section 2).

    Control tokens are looked up by spelling; all other text is tokenised without the added vocabulary, so no
    message can inject one. Each image part is one `<｜deepseek_image｜>` id, in prompt order, for the caller
    to expand.

    Args:
      tokenizer: holds all of `CHAT_TOKENS`.
      messages: Chat Completions messages. `developer` counts as `system`, `reasoning` as `reasoning_content`;
        `"prefix": True` on a last assistant message continues it; `"task": ...` on a last user message asks
        for that task (section 2.9).
      thinking, effort: as `resolve_thinking` gives them. The effort is from 1 to 100.
      tools: Chat Completions tools; an empty list means none.
      tool_choice: None or "auto", "none", "required" or a named function. A forced call without thinking ends the
        prompt inside the block of calls; with thinking the prompt does not force anything: a grammar has to.
      response_format: Chat Completions response format. "regex" and "structural_tag" add no text.
      drop_thinking: False keeps the reasoning of earlier turns also without tools (section 2.5).
      continue_final_message: continue the last message, which must be an assistant's (section 2.8).

    Raises:
      ChatError: the request is not allowed.
      ValueError: the tokenizer lacks a control token.
    """
    tokenizer.require_control_tokens(CHAT_TOKENS)
    segments = _segments(
        messages, thinking, effort, tools, tool_choice, response_format, drop_thinking, continue_final_message
    )
    return np.concatenate(
        [
            np.array([tokenizer.control_id(text)], np.int32) if is_control else tokenizer.encode(text)
            for text, is_control in segments
        ]
    )


def render_chat(
    messages: Sequence[Message],
    *,
    thinking: bool = True,
    effort: int = DEFAULT_EFFORT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    drop_thinking: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The prompt of `encode_chat` as text, for people and tests.

    Tokenising it again is not safe: a control token and the same spelling typed by a user look alike in it.

    Raises:
      ChatError: the request is not allowed.
    """
    segments = _segments(
        messages, thinking, effort, tools, tool_choice, response_format, drop_thinking, continue_final_message
    )
    return "".join(text for text, _ in segments)


def reply_start(tokenizer: Tokenizer, prompt_ids: TokenIds) -> ReplyStart:
    """Where the reply to a chat prompt begins, read from its last assistant header (chat section 3.1).

    Raises:
      ValueError: the prompt does not end in an open assistant turn or a task.
    """
    ids = np.asarray(prompt_ids, np.int64)
    if ids.size and ids[-1] in [tokenizer.control_id(token) for token in TASK_TOKENS.values()]:
        return "content"
    think, think_end = tokenizer.control_id(THINK), tokenizer.control_id(THINK_END)
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


def _segments(
    messages: Sequence[Message],
    thinking: bool,
    effort: int,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    drop_thinking: bool,
    continue_final_message: bool,
) -> list[Segment]:
    """The prompt as (text, is control token) pairs in order."""
    for name, flag in (("thinking", thinking), ("drop_thinking", drop_thinking)):
        if not isinstance(flag, bool):
            raise bad_value(name, flag, "are True and False")
    if isinstance(effort, bool) or not isinstance(effort, int) or not 1 <= effort <= 100:
        raise bad_value("effort", effort, "are integers from 1 to 100")
    normal = normal_messages(messages, continue_final_message=continue_final_message)
    listed = effective_tools(tools, tool_choice)
    forced = forced_tool_name(tool_choice) is not None
    answer_format = checked_response_format(response_format)
    task = normal[-1].pop("task", None)
    prefix = f"messages[{len(normal) - 1}].prefix"
    if normal[-1].get("prefix") and tools:
        raise ChatError(f"{prefix} is true but there are tools: a partial answer is continued without tools", prefix)
    if normal[-1].get("prefix") and answer_format and answer_format["type"] == "json_object":
        raise ChatError(f"{prefix} is true but response_format.type is 'json_object': allowed is one of both", prefix)
    if task and forced:
        raise bad_value("tool_choice", tool_choice, f"with the task {task!r} are auto and none")

    request: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": normal,
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "tool_choice": "required" if forced and not thinking else "auto",
    }
    if listed:
        request["tools"] = listed
    if answer_format:
        request["response_format"] = answer_format
    body, restored = _protect_large_integers(to_json("messages", request))

    try:
        segments = _render(body)
    except (deepseek_recipe.ConversionError, ValueError) as error:
        message = restored(str(error))  # may hold any value of the client's
        param = _refused_field(request, tools, message)
        message = shortened(message.removeprefix(f".{param}: "))
        raise ChatError(f"{param or 'bad chat request'}: {message}", param) from error
    if thinking:
        segments = _with_effort(segments, effort)
        if not drop_thinking and not listed:
            segments = _with_reasoning(segments, normal)
    if task:
        segments = [*(segments if task == "action" else segments[:-2]), (TASK_TOKENS[task], True)]
    return [(restored(text), is_control) for text, is_control in segments]


def _render(body: str) -> list[Segment]:
    """What `deepseek-recipe` makes of a request; raises its ConversionError, or ValueError."""
    special_tokens = deepseek_recipe.SpecialTokens(image=IMAGE)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special_tokens)
    rendered = encoding.render_conversation(_converted(body))
    prompt = rendered.prompt  # a copy at each access
    segments, done = [], 0
    for start, end in rendered.special_ranges:
        control = prompt[start:end]
        if control not in CHAT_TOKENS:  # grounding markup of an earlier answer: text (chat section 2.11)
            continue
        if done < start:
            segments.append((prompt[done:start], False))
        segments.append((control, True))
        done = end
    if done < len(prompt):
        segments.append((prompt[done:], False))
    return segments


def _converted(body: str) -> deepseek_recipe.Conversation:
    options = deepseek_recipe.ConversionOptions().with_special_tokens(deepseek_recipe.SpecialTokens(image=IMAGE))
    return deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation


def _refused_field(request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, message: str) -> str | None:
    """The path of what `deepseek-recipe` refuses in a request, which its message mostly does not tell."""
    if match := _REFUSED_MESSAGE.match(message):
        return match[1]
    alone = {"model": request["model"], "messages": [{"role": "user", "content": "json"}]}
    for tool in request.get("tools", ()):
        if _is_refused(alone | {"tools": [tool]}):
            return f"{place_of_tool(tools, tool)}.function.parameters"
    if "response_format" in request and _is_refused(alone | {"response_format": request["response_format"]}):
        return "response_format.json_schema.schema"
    return "response_format" if "'response_format'" in message else None  # JSON mode without the word


def _is_refused(request: Mapping[str, Any]) -> bool:
    try:
        _converted(to_json("messages", request))
    except (deepseek_recipe.ConversionError, ValueError):
        return True
    return False


def _with_effort(segments: list[Segment], effort: int) -> list[Segment]:
    """Thinking prompts begin with begin of sentence, `<｜System｜>` and the line of the default effort."""
    default = _EFFORT_LINE.format(DEFAULT_EFFORT)
    text, _ = segments[2]
    if not text.startswith(default):
        raise RuntimeError(f"deepseek-recipe {deepseek_recipe.__version__} renders another effort line: {text[:80]!r}")
    return [*segments[:2], (_EFFORT_LINE.format(effort) + text[len(default) :], False), *segments[3:]]


def _with_reasoning(segments: list[Segment], messages: Iterable[Message]) -> list[Segment]:
    """Puts the reasoning of earlier turns before the `</think>` that stands in its place."""
    reasoning = iter(
        [m.get("reasoning_content", "") for m in messages if m["role"] == "assistant" and not m.get("prefix")]
    )
    kept: list[Segment] = []
    for segment in segments:
        if segment == (THINK_END, True) and kept[-1] == (ASSISTANT, True):
            text = next(reasoning)
            kept += [(THINK, True), *([(text, False)] if text else [])]
        kept.append(segment)
    return kept


def _protect_large_integers(body: str) -> tuple[str, Callable[[str], str]]:
    """Replaces integers beyond 64 bits, which `deepseek-recipe` prints as floats, by smaller ones.

    Returns the new body, and what puts the integers back into a text made of it (chat section 2.7).
    """
    if not re.search(r"\d{19}", body):
        return body, lambda text: text
    # Drawn at random, as JSON has escapes: a number that the body holds may not be seen in its text.
    prefix = _random_prefix()
    while prefix in body:
        prefix = _random_prefix()
    originals: dict[str, str] = {}

    def stand_in(digits: str) -> int:
        number = int(digits)
        if -(2**63) <= number < 2**64:
            return number
        short = f"{prefix}{len(originals):09d}"
        originals[short] = digits
        return int(short)

    def protected(arguments: str) -> str:
        parsed = parsed_json(arguments, parse_int=stand_in)
        return to_json("arguments", parsed) if isinstance(parsed, dict) else arguments

    def restored(text: str) -> str:
        return re.sub(rf"{prefix}\d{{9}}", lambda match: originals.get(match[0], match[0]), text)

    request = json.loads(body, parse_int=stand_in)
    _change_arguments(request["messages"], protected)
    return to_json("messages", request), restored


def _random_prefix() -> str:
    """The first ten of the 19 digits of a stand-in, which is below 2**63."""
    return str(10**9 + secrets.randbelow(8 * 10**9))


def _change_arguments(messages: Iterable[Message], change: Callable[[str], str]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = change(call["function"]["arguments"])
