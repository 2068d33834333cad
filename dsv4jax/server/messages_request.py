"""The request of the Messages protocol as a chat request."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dsv4jax.server.body import Fields, decode_object
from dsv4jax.server.chat_mapping import SHARED_FIELDS, ClientPaths, checked, not_served, text_content, text_part, wrong
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import unsupported
from dsv4jax.server.protocol import ChatFields, read_chat

_ROLES = ("user", "assistant", "system")
_USER_BLOCKS = ("text", "tool_result")
_ASSISTANT_BLOCKS = ("text", "thinking", "tool_use")
_DISPLAYS = ("summarized", "omitted")
_PATHS = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class MessagesRequest(NamedTuple):
    """A request; `shows_thinking` is false if the text of the thinking is left out."""

    fields: ChatFields
    paths: ClientPaths
    shows_thinking: bool


def read_messages(context: ServerContext, body: bytes, record: AccessRecord) -> MessagesRequest:
    """The request in a body; `max_tokens` may be missing.

    Raises:
      ApiError: it is not valid or asks for what this server has not.
    """
    values = decode_object(body)
    fields, paths = Fields(values), ClientPaths(_PATHS)
    if "messages" not in values:
        fields.missing("messages")
    thinking, output = fields.object("thinking"), fields.object("output_config") or {}
    choice = fields.object("tool_choice")
    serial = Fields(choice or {}, "tool_choice", fields.problems).boolean("disable_parallel_tool_use", False)
    inner = Fields(thinking or {}, "thinking", fields.problems)
    display = inner.string("display", _DISPLAYS[0])
    budget = inner.integer("budget_tokens", -1, 2**31 - 1, None)
    fields.object("metadata")
    fields.check()
    if display not in _DISPLAYS:
        raise wrong("thinking.display", display, f"one of {', '.join(_DISPLAYS)}")
    servers = checked("mcp_servers", values.get("mcp_servers", []), list, "a list")
    for name, given in (("container", "container" in values), ("mcp_servers", servers)):
        if given:
            raise unsupported(name, f"{name} is given: this server runs no tools itself")

    names = (*SHARED_FIELDS, "max_tokens")
    chat = {name: values[name] for name in names if name in values}
    chat |= {
        "messages": _messages(values["messages"], values.get("system"), paths),
        "tools": _tools(values.get("tools"), paths),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not serial,
        "stop": _stop(values.get("stop_sequences")),
        "reasoning_effort": output.get("effort"),
        "response_format": _response_format(output.get("format")),
    }
    if thinking is not None:
        chat["thinking"] = {"type": thinking.get("type")}
        if thinking.get("type") == "enabled" and budget is not None:
            chat["thinking_token_budget"] = budget
    with paths.in_errors():
        chat_fields = read_chat(context, {name: value for name, value in chat.items() if value is not None}, record)
    return MessagesRequest(chat_fields, paths, display != "omitted")


def _stop(given: Any) -> Any:
    return given if given is None else checked("stop_sequences", given, list, "a list of strings")


def _response_format(given: Any) -> Any:
    if given is None:
        return None
    kind = checked("output_config.format", given, dict, "an object").get("type")
    if kind != "json_schema":
        raise not_served("output_config.format.type", kind, ("json_schema",))
    return {"type": kind, "json_schema": {"name": "output", "schema": given.get("schema")}}


def _tools(given: Any, paths: ClientPaths) -> list[dict[str, Any]]:
    tools = []
    for i, tool in enumerate(checked("tools", [] if given is None else given, list, "a list of tools")):
        kind = checked(f"tools[{i}]", tool, dict, "an object").get("type")
        if kind not in (None, "custom"):
            raise not_served(f"tools[{i}].type", kind, ("custom",))
        function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        schema = checked(f"tools[{i}].input_schema", tool.get("input_schema"), dict, "a JSON schema")
        tools.append({"type": "function", "function": function | {"parameters": schema}})
        paths.note(f"tools[{i}].function", f"tools[{i}]")
        paths.note(f"tools[{i}].function.parameters", f"tools[{i}].input_schema")
    return tools


def _tool_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind in ("auto", "none"):
        return kind
    if kind == "any":
        return "required"
    if kind != "tool":
        raise wrong("tool_choice.type", kind, "one of auto, any, tool, none")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _messages(given: Any, system: Any, paths: ClientPaths) -> list[dict[str, Any]]:
    """Chat messages. A message of the assistant that comes last is continued."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        paths.note("messages[0]", "system")
        paths.note("messages[0].content", "system")
        messages.append({"role": "system", "content": text_content("system", system, ("text",))})
    given = checked("messages", given, list, "a list of messages")
    for i, message in enumerate(given):
        path = f"messages[{i}]"
        role = checked(path, message, dict, "an object").get("role")
        if role not in _ROLES:
            raise wrong(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
        content = message.get("content")
        first = len(messages)
        if isinstance(content, list) and role == "assistant":
            messages.append(_assistant_message(path, content, first, paths))
        elif isinstance(content, list) and role == "user":
            messages += _user_messages(path, content, first, paths)
        else:
            messages.append({"role": role, "content": text_content(f"{path}.content", content, ("text",))})
        for place in range(first, len(messages)):
            paths.note(f"messages[{place}]", path)
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True
        paths.note(f"messages[{len(messages) - 1}].prefix", f"messages[{len(given) - 1}]")
    return messages


def _block_type(path: str, block: Any, kinds: tuple[str, ...]) -> str:
    kind = checked(path, block, dict, 'an object {"type": ...}').get("type")
    if kind not in kinds:
        raise not_served(f"{path}.type", kind, kinds)
    return kind


def _user_messages(path: str, blocks: list[Any], place: int, paths: ClientPaths) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; text between them stays where it is."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        where = f"{path}.content[{i}]"
        if _block_type(where, block, _USER_BLOCKS) == "text":
            part = {"type": "text", "text": text_part(where, block, ("text",))}
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(part)
            continue
        call_id = checked(f"{where}.tool_use_id", block.get("tool_use_id"), str, "a string")
        content = text_content(f"{where}.content", "" if block.get("content") is None else block["content"], ("text",))
        paths.note(f"messages[{place + len(messages)}].tool_call_id", f"{where}.tool_use_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return messages or [{"role": "user", "content": []}]


def _assistant_message(path: str, blocks: list[Any], place: int, paths: ClientPaths) -> dict[str, Any]:
    thoughts, parts, calls = [], [], []
    for i, block in enumerate(blocks):
        where = f"{path}.content[{i}]"
        kind = _block_type(where, block, _ASSISTANT_BLOCKS)
        if kind == "text":
            parts.append({"type": "text", "text": text_part(where, block, ("text",))})
        elif kind == "thinking":
            thoughts.append(checked(f"{where}.thinking", block.get("thinking"), str, "a string"))
        else:
            call_path = f"messages[{place}].tool_calls[{len(calls)}]"
            paths.note(call_path, where)
            paths.note(f"{call_path}.function", where)
            paths.note(f"{call_path}.function.arguments", f"{where}.input")
            name = checked(f"{where}.name", block.get("name"), str, "a string")
            arguments = json.dumps(checked(f"{where}.input", block.get("input"), dict, "an object"), ensure_ascii=False)
            calls.append(
                {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
            )
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
