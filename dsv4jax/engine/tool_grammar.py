"""The grammar of a block of tool calls, from the tools' parameter schemas (chat section 2.7).

The result is text in the Lark dialect of `llguidance`, in which `<[7]>` is the token with id 7.
"""

import dataclasses
import json
from typing import Any

from dsv4jax.engine.json_schema import Document, GrammarError, check_values_end, shown
from dsv4jax.engine.tool_schema import MAX_REQUIRED, ValueKinds, Values, parameters_of

# A rule of `llguidance` carries one number of so many bits; they remember which parameters a call has.
_BITS = MAX_REQUIRED + 1
# Of the result, and of what is compared to find equal parts of it. What references reach counts once for each
# parameter that reaches it, so that this can be far more than the schemas have.
MAX_CHARACTERS = 8 << 20

OPENING = "\n\n<"
LINE = "\n"
QUOTE = '"'


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool's name and the schema of its parameters, already decoded."""

    name: str
    parameters: dict[str, Any]


def tool_calls_lark(tools: list[Tool], marker_id: int, parallel: bool, json_options: dict[str, Any], field: str) -> str:
    """The grammar of `⏎⏎<｜DSML｜ calls>⏎ … </｜DSML｜ calls>`.

    Names and parameter keys are those of the tools; a tool that lists no parameter and has `additionalProperties` takes
    any key. Parameters come in any order, the required ones all, as many as `minProperties` asks for, each one once (of
    more than 63 parameters the last optional ones may repeat, and so may those of any key). A string is
    raw text up to its end tag, or one of the values that `enum` or `const` allows, also behind references, `allOf`,
    `anyOf` and `oneOf`; other limits on strings (length, pattern, format) are not enforced. Other values are JSON of
    the parameter's schema.

    Args:
      tools: the tools that may be called.
      marker_id: id of `｜DSML｜`.
      parallel: whether more than one call may be made.
      json_options: options of the JSON values.
      field: the request's field that holds the tools, for error messages.

    Raises:
      GrammarError: a schema is malformed, has keys that cannot be written in a call, asks for parameters that it does
        not list, or has values without end; or the grammar is longer than `MAX_CHARACTERS`.
    """
    rules = _Rules(marker_id, json_options, field)
    calls = "call+" if parallel else "call"
    alternatives = " | ".join(f"tool_{i}" for i in range(len(tools)))
    marker = rules.marker
    rules.add("%llguidance {}")
    rules.add(
        f"start: {lark_string(OPENING)} {marker} {lark_string(' calls>' + LINE)} {calls} "
        f"{lark_string('</')} {marker} {lark_string(' calls>')}"
    )
    rules.add(
        f"call: {lark_string('<')} {marker} {lark_string(' invoke name=' + QUOTE)} ({alternatives}) "
        f"{lark_string('</')} {marker} {lark_string(' invoke>' + LINE)}"
    )
    # Greedy: the value ends at the last `</` before the marker, which is a token and no text.
    rules.add(r"RAW: /(?s:.*)<\//")
    rules.add(r'KEY: /[^"\n]+/')
    for i, tool in enumerate(tools):
        rules.add_tool(i, tool, f"{field}[{i}].parameters")
    return "\n".join(rules.lines)


class _Rules:
    """The rules so far: refused as soon as they are too long."""

    def __init__(self, marker_id: int, json_options: dict[str, Any], field: str):
        self.marker = f"<[{marker_id}]>"
        self.lines: list[str] = []
        self._json_options, self._field = json_options, field
        self._characters = 0
        self._values: dict[str, str] = {}

    def add(self, line: str) -> None:
        """Adds a line.

        Raises:
          GrammarError: there is too much.
        """
        self._count(len(line) + 1)
        self.lines.append(line)

    def add_tool(self, label: int, tool: Tool, field: str) -> None:
        """Adds the rules of a tool, `tool_<label>` and those it needs.

        Raises:
          GrammarError: see `tool_calls_lark`.
        """
        document = Document(tool.parameters, field)
        check_values_end(document)
        parameters = parameters_of(document)
        required, least = parameters.required, parameters.least
        kinds = ValueKinds(document)
        allowed = {key: kinds.of(schema) for key, schema in parameters.schemas.items()}
        for key in allowed:
            if QUOTE in key or LINE in key:
                raise GrammarError(
                    f"{field}.properties", f"key {shown(key)}: a call cannot hold quotes or line breaks in it"
                )
            if key in required and allowed[key].none:
                raise GrammarError(f"{field}.properties", f"{shown(key)} is required, but no value of it is allowed")
        # Required ones get the lowest bits; the last bit stands for all optional ones that are left over.
        keys = sorted((key for key in allowed if not allowed[key].none), key=lambda key: key not in required)
        opening = lark_string(tool.name + QUOTE + ">" + LINE)
        none = "" if required or least else f"{lark_string(LINE)} | "
        if parameters.others is not None and not kinds.of(parameters.others).none:
            value = self._value(document.standalone(parameters.others), kinds.of(parameters.others))
            name = f"{lark_string(' parameter name=' + QUOTE)} KEY {lark_string(QUOTE + ' string=' + QUOTE)}"
            self.add(f"parameter_{label}: {lark_string('<')} {self.marker} {name} {value}")
            self.add(f"tool_{label}: {opening} ({none}parameter_{label}{{{max(least, 1)},}})")
            return
        if least > min(len(keys), _BITS - 1):
            limit = f"{len(keys)} can be given" if least > len(keys) else f"at most {_BITS - 1} are supported"
            raise GrammarError(f"{field}.minProperties", f"{least} parameters are asked for: {limit}")
        if not keys:
            self.add(f"tool_{label}: {opening} {lark_string(LINE)}")
            return
        self.add(f"tool_{label}: {opening} ({none}parameters_{label}::0)")
        self._add_sequence(label, len(keys), len(required), least)
        values: dict[str, str] = {}
        for j, key in enumerate(keys):
            schema = parameters.schemas[key]
            text = json.dumps(document.without_annotations(schema))
            self._count(len(text))
            if text not in values:
                values[text] = self._value(document.standalone(schema), allowed[key])
            name = lark_string(f" parameter name={QUOTE}{key}{QUOTE} string={QUOTE}")
            self.add(f"parameter_{label}_{j}: {lark_string('<')} {self.marker} {name} {values[text]}")

    def _add_sequence(self, label: int, keys: int, required: int, least: int) -> None:
        """Parameters in any order: the required ones, which come first in the list of keys, and `least` in all."""
        enough = f"is_ones([0:{required}])" if required else "ne(_, 0)"
        if least > required:
            enough = f"and({enough}, bit_count_ge(_, {least}))"
        self.add(f'parameters_{label}::_: "" %if {enough}')
        for j in range(keys):
            bit = min(j, _BITS - 1)
            condition = f" %if bit_clear({bit})" if j < _BITS - 1 else ""
            self.add(f" | parameter_{label}_{j} parameters_{label}::set_bit({bit}){condition}")

    def _value(self, schema: Any, allowed: Values) -> str:
        """The name of the rule of a value and the end of its parameter; many parameters have the same.

        A value may be written as text, as JSON, or both.
        """
        ways = []
        if allowed.strings is None:
            ways.append(f"{lark_string('true' + QUOTE + '>')} RAW")
        else:
            ways += [lark_string(f"true{QUOTE}>{text}</") for text in allowed.strings]
        if allowed.other:
            schema = {**(schema if isinstance(schema, dict) else {}), "x-guidance": self._json_options}
            text = json.dumps(schema, ensure_ascii=False)
            ways.append(f"{lark_string('false' + QUOTE + '>')} %json {text} {lark_string('</')}")
        value = " | ".join(ways)
        self._count(len(value))
        if value not in self._values:
            self._values[value] = f"value_{len(self._values)}"
            self.add(f"{self._values[value]}: ({value}) {self.marker} {lark_string(' parameter>' + LINE)}")
        return self._values[value]

    def _count(self, characters: int) -> None:
        self._characters += characters
        if self._characters > MAX_CHARACTERS:
            raise GrammarError(
                self._field,
                f"too large: more than {MAX_CHARACTERS} characters of rules; what parameters refer to counts for each",
            )


def lark_string(text: str) -> str:
    """The text as a literal of the Lark dialect, which is that of JSON without DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
