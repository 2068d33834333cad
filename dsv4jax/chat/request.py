"""What a chat request may contain: checks that name the field, and the normal form that the encoder reads."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

DEFAULT_EFFORT = 75
TASKS = ("action", "query", "authority", "domain", "title", "read_url")

_EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, "ultra": 100}
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_FORMATS = ("text", "json_object", "json_schema", "regex", "structural_tag")
_IMAGE_DETAILS = ("auto", "low", "high", "original")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_MAX_TOOL_NAME = 128  # of deepseek-recipe
_MOST_SHOWN = 100
_MOST_NAMES = 10


class ChatError(ValueError):
    """A chat request that is not allowed.

    Attributes:
      param: dotted path of the field, such as `messages[2].content`; None if no single field is to blame.
    """

    def __init__(self, message: str, param: str | None):
        super().__init__(message)
        self.param = param


def shortened(text: str, most: int = 200) -> str:
    """At most `most` characters of a text that may be the client's, for an error message."""
    return text if len(text) <= most else text[:most] + "..."


def bad_value(param: str, value: Any, allowed: str) -> ChatError:
    """An error that names the field, its value (shortened) and what is allowed."""
    return ChatError(f"{param} is {_shown(value)}: allowed {allowed}", param)


def _shown(value: Any) -> str:
    return shortened(repr(value), _MOST_SHOWN)


# ---- thinking and effort -----------------------------------------------------------------------------------


def resolve_thinking(
    *,
    thinking: Mapping[str, Any] | None = None,
    reasoning_effort: str | int | float | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[bool, int]:
    """Whether the model thinks, and its effort from 1 to 100, from three request fields (chat section 2.2).

    The `thinking` object decides; without it effort "none" turns thinking off; without both the switches
    `thinking` and `enable_thinking` of `chat_template_kwargs` count, and thinking is on by default. An effort
    in `chat_template_kwargs` counts where `reasoning_effort` is absent. Every field is checked, used or not.

    Raises:
      ChatError: a field has a value that is not allowed.
    """
    if thinking is not None and not isinstance(thinking, Mapping):
        raise bad_value("thinking", thinking, 'is an object {"type": ...}')
    kind = None if thinking is None else thinking.get("type")
    if thinking is not None and kind not in ("enabled", "adaptive", "disabled"):
        raise bad_value("thinking.type", kind, "are enabled, adaptive and disabled")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise bad_value("chat_template_kwargs", chat_template_kwargs, "is an object")
    template = {k: v for k, v in (chat_template_kwargs or {}).items() if v is not None}
    switches = [template[key] for key in ("thinking", "enable_thinking") if key in template]
    for key in ("thinking", "enable_thinking", "drop_thinking"):
        if not isinstance(template.get(key, True), bool):
            raise bad_value(f"chat_template_kwargs.{key}", template[key], "are true and false")

    efforts = [
        _effort_number("reasoning_effort", reasoning_effort),
        _effort_number("chat_template_kwargs.reasoning_effort", template.get("reasoning_effort")),
    ]
    effort = next((effort for effort in efforts if effort is not None), DEFAULT_EFFORT)
    if kind is not None:
        on = kind != "disabled"
    else:
        on = effort != 0 and (not switches or any(switches))
    return on, effort or DEFAULT_EFFORT


def _effort_number(param: str, effort: Any) -> int | None:
    """The number of an effort; 0 for "none", None if absent."""
    if effort is None:
        return None
    if effort == "none":
        return 0
    if isinstance(effort, str) and effort in _EFFORTS:
        return _EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    if isinstance(effort, float) and 0 <= effort <= 0.99:
        return max(1, round(100 * effort))
    names = ", ".join(_EFFORTS)
    raise bad_value(param, effort, f"are none, {names}, an integer from 1 to 100 or a fraction from 0 to 0.99")


# ---- messages ----------------------------------------------------------------------------------------------


def image_paths(messages: Sequence[Message]) -> list[str]:
    """Dotted paths of the image parts of checked messages, in message order."""
    return [
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(messages)
        if isinstance(message["content"] if "content" in message else None, list | tuple)
        for j, part in enumerate(message["content"])
        if part["type"] in _IMAGE_PARTS
    ]


def normal_messages(messages: Any, *, continue_final_message: bool = False) -> list[dict[str, Any]]:
    """Checked messages (chat sections 2.3, 2.4, 2.8) in one form.

    `developer` becomes `system`, `reasoning` becomes `reasoning_content`, Responses part types become those of
    Chat Completions, fields that mean nothing here and null fields are left out.

    Raises:
      ChatError: names the first message that is not allowed, and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise bad_value("messages", messages, "is a list of at least one message")
    normal = [_normal_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    last = len(normal) - 1
    if continue_final_message:
        if normal[last]["role"] != "assistant":
            raise ChatError(
                f"continue_final_message is true but messages[{last}].role is {normal[last]['role']!r}: "
                "only an assistant message can be continued",
                "continue_final_message",
            )
        normal[last]["prefix"] = True
    for i, message in enumerate(normal):
        if message.get("prefix") and (i != last or message["role"] != "assistant"):
            raise bad_value(f"messages[{i}].prefix", True, "on the last message only, which must be an assistant's")
        if "task" in message and i != last:
            raise bad_value(f"messages[{i}].task", message["task"], "on the last message only")
    _check_tool_results(normal)
    return normal


def _normal_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise bad_value(where, message, "is an object")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in _ROLES:
        raise bad_value(f"{where}.role", role, f"are {', '.join(_ROLES)}")
    normal: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = _normal_calls(f"{where}.tool_calls", given["tool_calls"]) if "tool_calls" in given else None
    if calls and role != "assistant":
        raise bad_value(f"{where}.tool_calls", calls, f"on assistant messages, not on those of role {role}")
    if "content" in given:
        normal["content"] = _normal_content(f"{where}.content", given["content"], role)
    elif not calls:
        allowed = "is a string or a list of parts; it may be missing only on an assistant message with tool_calls"
        raise bad_value(f"{where}.content", None, allowed)
    if calls:
        normal["tool_calls"] = calls
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):  # the last one given wins
            if key in given:
                normal["reasoning_content"] = _checked_text(f"{where}.{key}", given[key])
    if role == "tool":
        normal["tool_call_id"] = _checked_text(f"{where}.tool_call_id", given.get("tool_call_id"))
    if "prefix" in given:
        if not isinstance(given["prefix"], bool):
            raise bad_value(f"{where}.prefix", given["prefix"], "are true and false")
        normal["prefix"] = given["prefix"]
    if "task" in given:
        if role != "user" or given["task"] not in TASKS:
            raise bad_value(f"{where}.task", given["task"], f"on a user message are {', '.join(TASKS)}")
        normal["task"] = given["task"]
    return normal


def _normal_content(where: str, content: Any, role: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return _checked_text(where, content)
    if not isinstance(content, list | tuple):
        raise bad_value(where, content, "is a string or a list of parts")
    parts = [_normal_part(f"{where}[{i}]", part) for i, part in enumerate(content)]
    images = [i for i, part in enumerate(parts) if part["type"] == "image_url"]
    if images and role not in ("system", "developer", "user", "tool"):
        raise bad_value(f"{where}[{images[0]}].type", "image_url", f"in a message of role {role} is text")
    # The reference takes the text of a reminder as a string only.
    return "\n\n".join(part["text"] for part in parts) if role == "latest_reminder" else parts


def _normal_part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise bad_value(where, part, 'is an object {"type": ...}')
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _checked_text(f"{where}.text", part.get("text"))}
    if kind not in _IMAGE_PARTS:
        raise bad_value(f"{where}.type", kind, f"are {', '.join(_TEXT_PARTS + _IMAGE_PARTS)}")
    image = part.get("image_url")
    if isinstance(image, str):
        image = {"url": image, "detail": part.get("detail")}
    if not isinstance(image, Mapping):
        raise bad_value(f"{where}.image_url", image, 'is an object {"url": ...}')
    url = {"url": _checked_text(f"{where}.image_url.url", image.get("url"))}
    detail = image.get("detail")
    if detail is None:
        return {"type": "image_url", "image_url": url}
    if detail not in _IMAGE_DETAILS:
        raise bad_value(f"{where}.image_url.detail", detail, f"are {', '.join(_IMAGE_DETAILS)}")
    return {"type": "image_url", "image_url": url | {"detail": detail}}


def _normal_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not calls:
        raise bad_value(where, calls, "is a list of at least one call")
    normal, ids = [], set()
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise bad_value(f"{where}[{i}]", call, 'is {"id", "type": "function", "function": {"name", "arguments"}}')
        call_id = _checked_text(f"{where}[{i}].id", call.get("id"))
        if call_id in ids:
            raise bad_value(f"{where}[{i}].id", call_id, "is an id that no other call of the message has")
        ids.add(call_id)
        name = _checked_text(f"{where}[{i}].function.name", function.get("name"))
        arguments = _arguments_text(f"{where}[{i}].function.arguments", function.get("arguments"))
        normal.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return normal


def _arguments_text(where: str, arguments: Any) -> str:
    """Arguments as JSON text: an object is printed, an object that was encoded twice is decoded once."""
    if arguments is None:
        raise bad_value(where, arguments, "is a JSON text or an object")
    if not isinstance(arguments, str):
        return to_json(where, arguments)
    inner = parsed_json(_checked_text(where, arguments))
    return inner if isinstance(inner, str) and isinstance(parsed_json(inner), dict) else arguments


def _check_tool_results(messages: list[dict[str, Any]]) -> None:
    """Every call is answered by the tool messages that follow it directly, once, in any order."""
    open_calls: dict[str, str] = {}  # call id -> path of the call
    for i, message in enumerate([*messages, {"role": "end"}]):
        if message["role"] == "tool":
            if open_calls.pop(message["tool_call_id"], None) is None:
                allowed = "is the id of a call of the assistant message before it that has no result yet"
                raise bad_value(f"messages[{i}].tool_call_id", message["tool_call_id"], allowed)
        elif open_calls:
            call_id, path = next(iter(open_calls.items()))
            raise ChatError(f"{path} with id {_shown(call_id)} has no result: tool messages must follow directly", path)
        for j, call in enumerate(message.get("tool_calls", ())):
            open_calls[call["id"]] = f"messages[{i}].tool_calls[{j}]"


# ---- tools and response format -------------------------------------------------------------------------------


def effective_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None = None
) -> list[Mapping[str, Any]]:
    """The tools that the prompt lists and whose calls are parsed (chat section 2.6): none after "none".

    Raises:
      ChatError: a tool or the choice is not allowed.
    """
    if tools is not None and not isinstance(tools, list | tuple):
        raise bad_value("tools", tools, "is a list of tools")
    names = _checked_tool_names(tools or [])
    name = forced_tool_name(tool_choice)
    if not names and name is not None:
        raise ChatError(
            f"tool_choice is {_shown(tool_choice)} but there are no tools: allowed are auto, none", "tool_choice"
        )
    if name and name not in names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise bad_value(
            "tool_choice.function.name", name, f"are the names of tools: {', '.join(names[:_MOST_NAMES])}{more}"
        )
    if tool_choice == "none":
        return []
    return [tool for tool, n in zip(tools or [], names, strict=True) if not name or n == name]


def forced_tool_name(tool_choice: str | Mapping[str, Any] | None) -> str | None:
    """None if the model may answer without a call, "" if it must call some tool, otherwise the tool's name.

    Raises:
      ChatError: the choice is not allowed.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    if tool_choice == "required":
        return ""
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not (isinstance(name, str) and name and tool_choice.get("type") == "function"):
        allowed = 'are auto, none, required and {"type": "function", "function": {"name": ...}}'
        raise bad_value("tool_choice", tool_choice, allowed)
    return name


def _checked_tool_names(tools: Sequence[Any]) -> list[str]:
    names: dict[str, None] = {}  # in order
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise bad_value(f"{where}.type", kind, "is function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise bad_value(f"{where}.function", function, "is an object")
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise bad_value(f"{where}.function.name", name, "are letters, digits, _ and -")
        if len(name) > _MAX_TOOL_NAME:
            raise bad_value(f"{where}.function.name", name, f"is a name of at most {_MAX_TOOL_NAME} characters")
        if name in names:
            raise bad_value(f"{where}.function.name", name, "is a name that no other tool has")
        for key, kind, allowed in (("description", str, "is a string"), ("strict", bool, "are true and false")):
            if function.get(key) is not None and not isinstance(function[key], kind):
                raise bad_value(f"{where}.function.{key}", function[key], allowed)
        parameters = function.get("parameters")
        if parameters is not None and not (isinstance(parameters, Mapping) and parameters.get("type") == "object"):
            raise bad_value(f"{where}.function.parameters", parameters, 'is a JSON schema with "type": "object"')
        to_json(f"{where}.function", function)
        names[name] = None
    strict = [bool(tool["function"].get("strict")) for tool in tools]
    if len(set(strict)) > 1:
        param = f"tools[{strict.index(not strict[0])}].function.strict"
        raise bad_value(param, not strict[0], f"is {strict[0]}, as in tools[0]: all tools are strict or none is")
    return list(names)


def place_of_tool(tools: Sequence[Mapping[str, Any]], effective: Mapping[str, Any]) -> str:
    """The path in the request of a tool that `effective_tools` gave."""
    return next(f"tools[{i}]" for i, tool in enumerate(tools) if tool is effective)


def checked_response_format(response_format: Any) -> Mapping[str, Any] | None:
    """The format if it adds text to the prompt (chat section 2.9), otherwise None.

    Raises:
      ChatError: the format is not allowed.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _FORMATS:
        raise bad_value("response_format.type", kind, f"are {', '.join(_FORMATS)}")
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
            raise bad_value("response_format.json_schema", schema, 'is {"name": ..., "schema": {...}}')
        to_json("response_format.json_schema.schema", schema["schema"])
        return {"type": kind, "json_schema": {"name": "schema", "schema": schema["schema"]}}
    return None


# ---- JSON ----------------------------------------------------------------------------------------------------


def _checked_text(where: str, text: Any) -> str:
    if not isinstance(text, str):
        raise bad_value(where, text, "is a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(f"{where} is not valid Unicode: {error}", where) from error
    return text


def to_json(where: str, value: Any) -> str:
    """`value` as JSON text.

    Raises:
      ChatError: it has no JSON form or holds a lone surrogate.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{where} is not valid JSON: {error}", where) from error
    return text


def parsed_json(text: str, **hooks: Any) -> Any:
    """The value of a JSON text, or None if it is not JSON, has a number without a finite value or is too deep."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite, **hooks)
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    value = float(number)
    if value - value != 0:
        raise ValueError(f"{number} is not a finite number")
    return value
