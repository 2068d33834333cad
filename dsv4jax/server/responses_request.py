"""The request of the Responses protocol as a chat request.

One response is stateless: what refers to an earlier one or to stored data is refused, and so are built-in tools.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsv4jax.server.body import Fields, decode_object
from dsv4jax.server.chat_mapping import SHARED_FIELDS, ClientPaths, checked, not_served, text_content, text_part, wrong
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import unsupported
from dsv4jax.server.protocol import ChatFields, read_chat

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_MODES = ("auto", "required")
_STATEFUL = ("previous_response_id", "conversation", "prompt", "context_management")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_PATHS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "logprobs": "include",
}


@dataclasses.dataclass(frozen=True)
class ResponsesRequest:
    """A request; `echo` are the settings that its response repeats."""

    fields: ChatFields
    paths: ClientPaths
    echo: Mapping[str, Any]


def read_responses(context: ServerContext, body: bytes, record: AccessRecord) -> ResponsesRequest:
    """The request in a body.

    Raises:
      ApiError: it is not valid or asks for what this server has not.
    """
    values = decode_object(body)
    fields, paths = Fields(values), ClientPaths(_PATHS)
    if "input" not in values:
        fields.missing("input")
    instructions = fields.string("instructions")
    reasoning, text = fields.object("reasoning") or {}, fields.object("text") or {}
    metadata = fields.object("metadata") or {}
    include = fields.strings("include")
    background = fields.boolean("background", False)
    fields.boolean("store", False)
    truncation = fields.string("truncation", "disabled")
    fields.check()

    for name in _STATEFUL:
        if name in values:
            raise unsupported(name, f"{name} is given: this server keeps nothing between requests")
    if background:
        raise unsupported("background", "background is true: this server only answers directly")
    if truncation != "disabled":
        raise not_served("truncation", truncation, ("disabled",))
    for i, name in enumerate(include):
        if name not in _INCLUDES:
            raise not_served(f"include[{i}]", name, _INCLUDES)

    tools, tool_choice = _tools(values.get("tools"), values.get("tool_choice"), paths)
    chat = {
        name: values[name] for name in (*SHARED_FIELDS, "stop", "thinking", "parallel_tool_calls") if name in values
    }
    chat |= {
        "messages": _messages(values["input"], instructions, paths),
        "tools": tools,
        "tool_choice": tool_choice,
        "max_completion_tokens": values.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _response_format(text.get("format")),
        "logprobs": _LOGPROBS in include or bool(values.get("top_logprobs")),
        "top_logprobs": values.get("top_logprobs"),
    }
    with paths.in_errors():
        chat_fields = read_chat(context, {name: value for name, value in chat.items() if value is not None}, record)
    sampling = chat_fields.sampling
    echo = {
        "instructions": instructions,
        "max_output_tokens": chat_fields.max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": chat_fields.parallel_tool_calls,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": text.get("format", {"type": "text"})},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": values.get("tools", []),
        "top_logprobs": max(sampling.top_logprobs, 0),
        "top_p": sampling.top_p,
        "user": values.get("user"),
    }
    return ResponsesRequest(chat_fields, paths, echo)


def _response_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _tools(given: Any, choice: Any, paths: ClientPaths) -> tuple[Any, Any]:
    """Tools and tool choice as a chat request has them."""
    tools = []
    for i, tool in enumerate(checked("tools", [] if given is None else given, list, "a list of tools")):
        kind = checked(f"tools[{i}]", tool, dict, "an object").get("type")
        if kind != "function":
            raise not_served(f"tools[{i}].type", kind, ("function",))
        tools.append((i, tool))
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed = checked("tool_choice.tools", choice.get("tools"), list, "a list of tools")
            known = {name for _, tool in tools if isinstance(name := tool.get("name"), str)}
            names = set()
            for i, tool in enumerate(allowed):
                name = tool.get("name") if isinstance(tool, dict) else None
                if not isinstance(name, str) or name not in known:
                    raise wrong(f"tool_choice.tools[{i}].name", name, "the name of a tool")
                names.add(name)
            tools = [(i, tool) for i, tool in tools if isinstance(tool.get("name"), str) and tool["name"] in names]
            choice = choice.get("mode")
            if choice not in _MODES:
                raise wrong("tool_choice.mode", choice, f"one of {', '.join(_MODES)}")
            paths.note("tool_choice", "tool_choice.mode")
        elif kind == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
            paths.note("tool_choice.function", "tool_choice")
        else:
            raise not_served("tool_choice.type", kind, ("function", "allowed_tools"))
    for place, (i, _) in enumerate(tools):
        paths.note(f"tools[{place}]", f"tools[{i}]")
        paths.note(f"tools[{place}].function", f"tools[{i}]")
    functions = [{key: value for key, value in tool.items() if key != "type"} for _, tool in tools]
    return [{"type": "function", "function": function} for function in functions], choice


def _messages(given: Any, instructions: str | None, paths: ClientPaths) -> list[dict[str, Any]]:
    history = _History(paths)
    if instructions is not None:
        history.add("instructions", {"role": "system", "content": instructions})
    if isinstance(given, str):
        history.add("input", {"role": "user", "content": given})
    else:
        for i, item in enumerate(checked("input", given, list, "a string or a list of items")):
            _add_item(history, f"input[{i}]", checked(f"input[{i}]", item, dict, "an object"))
    return history.messages


class _History:
    """Chat messages out of items: reasoning, text and calls in a row are one message of the assistant."""

    def __init__(self, paths: ClientPaths):
        self.messages: list[dict[str, Any]] = []
        self._paths = paths
        self._turn: dict[str, Any] | None = None  # the assistant's message that further items may join

    def add(self, path: str, message: dict[str, Any]) -> None:
        self._paths.note(f"messages[{len(self.messages)}]", path)
        self.messages.append(message)
        self._turn = None

    def add_result(self, path: str, call_id: str, content: Any) -> None:
        place = f"messages[{len(self.messages)}]"
        self.add(path, {"role": "tool", "tool_call_id": call_id, "content": content})
        self._paths.note(f"{place}.tool_call_id", f"{path}.call_id")
        self._paths.note(f"{place}.content", f"{path}.output")

    def add_reasoning(self, path: str, text: str) -> None:
        if self._turn is not None and (self._turn["content"] or self._turn.get("tool_calls")):
            self._turn = None
        turn = self._assistant(path)
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def add_text(self, path: str, content: str | list[dict[str, str]]) -> None:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        self._assistant(path)["content"] += parts

    def add_call(self, path: str, call_id: str, function: dict[str, str]) -> None:
        calls = self._assistant(path).setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._paths.note(place, path)
        self._paths.note(f"{place}.id", f"{path}.call_id")
        self._paths.note(f"{place}.function", path)
        calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self, path: str) -> dict[str, Any]:
        turn = self._turn
        if turn is None:
            turn = {"role": "assistant", "content": []}
            self.add(path, turn)
            self._turn = turn
        return turn


def _add_item(history: _History, path: str, item: Mapping[str, Any]) -> None:
    kind = "message" if item.get("type") is None else item["type"]
    if kind not in _ITEMS:
        raise not_served(f"{path}.type", kind, _ITEMS)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise wrong(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
        content = text_content(f"{path}.content", item.get("content"), _TEXT_PARTS)
        if role == "assistant":
            history.add_text(path, content)
        else:
            history.add(path, {"role": role, "content": content})
    elif kind == "reasoning":
        # Only the text itself counts: this server gives neither summaries nor encrypted content.
        content = [] if item.get("content") is None else item["content"]
        parts = checked(f"{path}.content", content, list, "a list of content parts")
        texts = [text_part(f"{path}.content[{i}]", part, ("reasoning_text", "text")) for i, part in enumerate(parts)]
        history.add_reasoning(path, "\n".join(texts))
    else:
        call_id = checked(f"{path}.call_id", item.get("call_id"), str, "a string")
        if kind == "function_call":
            function = {key: checked(f"{path}.{key}", item.get(key), str, "a string") for key in ("name", "arguments")}
            history.add_call(path, call_id, function)
        else:
            history.add_result(path, call_id, text_content(f"{path}.output", item.get("output"), _TEXT_PARTS))
