"""The grammar of a block of tool calls, from the tools' parameter schemas (chat section 2.7).

The result is text in the Lark dialect of `llguidance`, in which `<[7]>` is the token with id 7.
"""

import dataclasses
import json
from typing import Any

# A rule of `llguidance` carries one number of so many bits; they remember which parameters a call has.
_BITS = 64
_ANY = frozenset(("string", "other"))

OPENING = "\n\n<"
LINE = "\n"
QUOTE = '"'


class GrammarError(ValueError):
    """A grammar that cannot be used, found before generation.

    Attributes:
      field: the request's field that holds it.
    """

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool's name and the schema of its parameters, already decoded."""

    name: str
    parameters: dict[str, Any]


def tool_calls_lark(tools: list[Tool], marker_id: int, parallel: bool, json_options: dict[str, Any], field: str) -> str:
    """The grammar of `⏎⏎<｜DSML｜ calls>⏎ … </｜DSML｜ calls>`.

    Names and parameter keys are those of the tools. Parameters come in any order, the required ones all, each one
    once (of more than 63 parameters the last optional ones may repeat). A string is raw text up to its end tag, or
    one of the values that `enum` or `const` allows; other limits on strings (length, pattern, format) are not
    enforced. Other values are JSON of the parameter's schema.

    Args:
      tools: the tools that may be called.
      marker_id: id of `｜DSML｜`.
      parallel: whether more than one call may be made.
      json_options: options of the JSON values.
      field: the request's field that holds the tools, for error messages.

    Raises:
      GrammarError: a schema is malformed, or has keys that cannot be written in a call.
    """
    marker = f"<[{marker_id}]>"
    calls = "call+" if parallel else "call"
    alternatives = " | ".join(f"tool_{i}" for i in range(len(tools)))
    rules = [
        "%llguidance {}",
        f"start: {_text(OPENING)} {marker} {_text(' calls>' + LINE)} {calls} {_text('</')} {marker} {_text(' calls>')}",
        f"call: {_text('<')} {marker} {_text(' invoke name=' + QUOTE)} ({alternatives}) "
        f"{_text('</')} {marker} {_text(' invoke>' + LINE)}",
        # Greedy: the value ends at the last `</` before the marker, which is a token and no text.
        r"RAW: /(?s:.*)<\//",
    ]
    for i, tool in enumerate(tools):
        rules += _tool_rules(i, tool, marker, json_options, f"{field}[{i}].parameters")
    return "\n".join(rules)


def _tool_rules(label: int, tool: Tool, marker: str, json_options: dict[str, Any], field: str) -> list[str]:
    properties = _properties(tool.parameters, field)
    required = tool.parameters.get("required", [])
    if len(required) >= _BITS:
        raise GrammarError(
            f"{field}.required", f"{len(required)} names are too many: at most {_BITS - 1} are supported"
        )
    # Required ones get the lowest bits; the last bit stands for all optional ones that are left over.
    keys = sorted(properties, key=lambda key: key not in required)
    count = f"is_ones([0:{len(required)}])" if required else "ne(_, 0)"
    opening = _text(tool.name + QUOTE + ">" + LINE)
    if not keys:
        return [f"tool_{label}: {opening} {_text(LINE)}"]
    none = "" if required else f"{_text(LINE)} | "
    rules = [
        f"tool_{label}: {opening} ({none}parameters_{label}::0)",
        f'parameters_{label}::_: "" %if {count}',
    ]
    for j in range(len(keys)):
        bit = min(j, _BITS - 1)
        condition = f" %if bit_clear({bit})" if j < _BITS - 1 else ""
        rules.append(f" | parameter_{label}_{j} parameters_{label}::set_bit({bit}){condition}")
    for j, key in enumerate(keys):
        if QUOTE in key or LINE in key:
            raise GrammarError(f"{field}.properties", f"key {key!r}: a call cannot hold quotes or line breaks in it")
        if not isinstance(properties[key], dict | bool):
            raise GrammarError(f"{field}.properties", f"{key!r} is {properties[key]!r}: a schema is needed")
        key_text = _text(f" parameter name={QUOTE}{key}{QUOTE} string={QUOTE}")
        values = _values(properties[key], tool.parameters, json_options)
        rules.append(
            f"parameter_{label}_{j}: {_text('<')} {marker} {key_text} "
            f"({' | '.join(values)}) {marker} {_text(' parameter>' + LINE)}"
        )
    return rules


def _values(schema: Any, root: dict[str, Any], json_options: dict[str, Any]) -> list[str]:
    """How a value may be written: as text, as JSON, or both. Each alternative ends with `</`."""
    values = []
    kinds = _kinds(schema, root)
    if "string" in kinds:
        texts = _allowed_strings(_resolved(schema, root))
        if texts is None:
            values.append(f"{_text('true' + QUOTE + '>')} RAW")
        else:
            values += [_text(f'true">{text}</') for text in texts]
    if "other" in kinds:
        value = schema if isinstance(schema, dict) else {}
        # References in the parameter's schema are relative to the schema of all parameters.
        if "$ref" in json.dumps(value):
            value = {**value, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
        value = json.dumps({**value, "x-guidance": json_options}, ensure_ascii=False)
        values.append(f"{_text('false' + QUOTE + '>')} %json {value} {_text('</')}")
    return values


def _properties(parameters: dict[str, Any], field: str) -> dict[str, Any]:
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise GrammarError(f"{field}.properties", f"an object is needed, not {properties!r}")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise GrammarError(f"{field}.required", f"a list of names is needed, not {required!r}")
    if len(set(required)) != len(required):
        raise GrammarError(f"{field}.required", f"each name may occur once, not as in {required!r}")
    return {**properties, **{key: {} for key in required if key not in properties}}


def _kinds(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """Whether a schema allows strings, other values or both; both when it cannot be told."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or depth > 8:
        return _ANY
    kinds = _ANY
    if "const" in schema:
        kinds &= _kind_of([schema["const"]])
    if isinstance(schema.get("enum"), list):
        kinds &= _kind_of(schema["enum"])
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds &= frozenset("string" if name == "string" else "other" for name in types)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            kinds &= frozenset().union(*(_kinds(option, root, depth + 1) for option in schema[keyword]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= _kinds(part, root, depth + 1)
    return kinds or _ANY


def _kind_of(values: list[Any]) -> frozenset[str]:
    return frozenset("string" if isinstance(value, str) else "other" for value in values)


def _allowed_strings(schema: Any) -> list[str] | None:
    """The strings that `const` or `enum` leave; None without these keywords."""
    if isinstance(schema, dict) and "const" in schema:
        return [schema["const"]]
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return list(dict.fromkeys(value for value in schema["enum"] if isinstance(value, str)))
    return None


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follows `$ref` within the document; a reference that leads nowhere stays for the compiler to refuse."""
    for _ in range(32):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        if not schema["$ref"].startswith("#") or target is None:
            break
        schema = target
    return schema


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
