"""What the schema of a tool's parameters says: which there are, and which values each one takes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from dsv4jax.engine.json_schema import Document, GrammarError, children_first, shown

# A call remembers them one by one, see `tool_grammar`.
MAX_REQUIRED = 63
# More of them are no tool but an attack: they bound the work.
_MAX_PARTS = 16
_MAX_STRINGS = 200_000


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Which parameters a call has.

    Attributes:
      schemas: of the values, by key.
      required: keys that a call must have.
      least: how many keys a call must have.
      others: the schema of the values if no key is listed and any may be given; None if not.
    """

    schemas: dict[str, Any]
    required: list[str]
    least: int
    others: Any


@dataclasses.dataclass(frozen=True)
class Values:
    """Strings that a schema allows, None for any; and whether it allows values that are no strings."""

    strings: tuple[str, ...] | None
    other: bool

    @property
    def none(self) -> bool:
        """Nothing is allowed."""
        return self.strings == () and not self.other


ANY = Values(None, True)
NOTHING = Values((), False)


def parameters_of(document: Document) -> Parameters:
    """The parameters that `properties` and `required` list at the root, and behind its `$ref` and `allOf`.

    Where some are listed, others cannot be given, whatever `additionalProperties` says.

    Raises:
      GrammarError: a keyword is malformed, or asks for parameters that are listed nowhere else.
    """
    field = document.field
    parts, conditional = _parts(document)
    schemas: dict[str, list[Any]] = {}
    required: dict[str, None] = {}
    least = 0
    for part in parts:
        for key, schema in _properties(part, field).items():
            schemas.setdefault(key, []).append(schema)
        required.update(dict.fromkeys(_required(part, field)))
        least = max(least, _least(part, field))
        types = part.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            raise GrammarError(f"{field}.type", f"{shown(types)}: parameters are an object")
    if len(required) > MAX_REQUIRED:
        raise GrammarError(
            f"{field}.required", f"{len(required)} names are too many: at most {MAX_REQUIRED} are supported"
        )
    for key in required:
        schemas.setdefault(key, [])
    for keyword, part in conditional:
        for key in (*_properties(part, field), *_required(part, field)):
            if key not in schemas:
                raise GrammarError(
                    f"{field}.{keyword}", f"parameter {shown(key)} must be in `properties` of the root too"
                )
    open_parts = [part for part in parts if "additionalProperties" in part]
    for part in open_parts:
        if part["additionalProperties"] is not True and not part.get("patternProperties"):
            for key in schemas.keys() - _properties(part, field).keys():
                schemas[key].append(part["additionalProperties"])
    others = None
    if not schemas:
        for part in parts:
            if part.get("patternProperties"):
                raise GrammarError(f"{field}.patternProperties", "parameters must be listed in `properties`")
        if open_parts and not any(part["additionalProperties"] is False for part in open_parts):
            others = _all_of([part["additionalProperties"] for part in open_parts])
    return Parameters({key: _all_of(found) for key, found in schemas.items()}, list(required), least, others)


def _all_of(schemas: list[Any]) -> Any:
    if len(schemas) == 1:
        return schemas[0]
    return {"allOf": schemas} if schemas else {}


def _parts(document: Document) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """The schemas that hold for all parameters together, and those that may: each of these with the root's keyword."""
    always: list[dict[str, Any]] = []
    conditional: list[tuple[str, dict[str, Any]]] = []
    seen = set()
    waiting: list[tuple[str | None, Any]] = [(None, document.root)]
    for keyword, part in waiting:  # grows
        if not isinstance(part, dict) or (keyword, id(part)) in seen:
            continue
        seen.add((keyword, id(part)))
        if keyword is None:
            always.append(part)
        else:
            conditional.append((keyword, part))
        if len(always) > _MAX_PARTS:
            raise GrammarError(document.field, f"allOf and $ref combine more than {_MAX_PARTS} schemas at the root")
        if isinstance(reference := part.get("$ref"), str):
            waiting.append((keyword, document.required_target(reference)))
        waiting += [(keyword, option) for option in _listed(part, "allOf")]
        for inner in ("anyOf", "oneOf"):
            waiting += [(keyword or inner, option) for option in _listed(part, inner)]
        waiting += [(keyword or inner, part.get(inner)) for inner in ("then", "else")]
        if isinstance(part.get("dependentSchemas"), dict):
            waiting += [(keyword or "dependentSchemas", option) for option in part["dependentSchemas"].values()]
    return always, conditional


def _properties(part: dict[str, Any], field: str) -> dict[str, Any]:
    properties = part.get("properties", {})
    if not isinstance(properties, dict):
        raise GrammarError(f"{field}.properties", f"an object is needed, not {shown(properties)}")
    for key, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"{field}.properties", f"{shown(key)} is {shown(schema)}: a schema is needed")
    return properties


def _required(part: dict[str, Any], field: str) -> list[str]:
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise GrammarError(f"{field}.required", f"a list of names is needed, not {shown(required)}")
    if len(set(required)) != len(required):
        raise GrammarError(f"{field}.required", f"each name may occur once, not as in {shown(required)}")
    return required


def _least(part: dict[str, Any], field: str) -> int:
    least = part.get("minProperties", 0)
    if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least < 1e9 or least % 1:
        raise GrammarError(f"{field}.minProperties", f"a whole number from 0 on is needed, not {shown(least)}")
    return int(least)


class ValueKinds:
    """Which values the schemas of a document allow, as far as these keywords tell: `type`, `enum`, `const`, `$ref`,
    `anyOf`, `oneOf`, `allOf`. Each schema is looked at once; they must live as long as this object."""

    def __init__(self, document: Document):
        self._document = document
        self._known: dict[int, Values] = {}
        self._seen: set[int] = set()
        self._strings = 0  # looked at

    def of(self, schema: Any) -> Values:
        """What a schema allows, or more than that.

        Raises:
          GrammarError: a reference leads nowhere, or there are too many strings.
        """
        for item in children_first(schema, self._children, self._seen):
            self._known[id(item)] = self._combined(item)
        return self._value(schema)

    def _children(self, schema: dict[str, Any]) -> Iterator[Any]:
        if isinstance(schema.get("$ref"), str):
            yield self._document.required_target(schema["$ref"])
        for keyword in ("allOf", "anyOf", "oneOf"):
            yield from _listed(schema, keyword)

    def _value(self, schema: Any) -> Values:
        # A schema that is not known yet contains the one that asks.
        return NOTHING if schema is False else self._known.get(id(schema), ANY)

    def _combined(self, schema: dict[str, Any]) -> Values:
        values = ANY
        if "const" in schema:
            values = self._both(values, _listed_values([schema["const"]]))
        if isinstance(schema.get("enum"), list):
            values = self._both(values, _listed_values(schema["enum"]))
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            strings = None if "string" in types else ()
            values = self._both(values, Values(strings, any(name != "string" for name in types)))
        if isinstance(schema.get("$ref"), str):
            values = self._both(values, self._value(self._document.target(schema["$ref"])))
        for part in _listed(schema, "allOf"):
            values = self._both(values, self._value(part))
        for keyword in ("anyOf", "oneOf"):
            if options := _listed(schema, keyword):
                values = self._both(values, self._either([self._value(option) for option in options]))
        return values

    def _both(self, one: Values, two: Values) -> Values:
        strings = one.strings if two.strings is None else two.strings
        if one.strings and two.strings:
            self._count(len(one.strings) + len(two.strings))
            wanted = set(two.strings)
            strings = tuple(text for text in one.strings if text in wanted)
        elif one.strings == ():
            strings = ()
        return Values(strings, one.other and two.other)

    def _either(self, options: list[Values]) -> Values:
        other = any(option.other for option in options)
        if any(option.strings is None for option in options):
            return Values(None, other)
        some = [option.strings for option in options if option.strings]
        if len(some) == 1:
            return Values(some[0], other)
        self._count(sum(map(len, some)))
        return Values(tuple(dict.fromkeys(text for strings in some for text in strings)), other)

    def _count(self, strings: int) -> None:
        self._strings += strings
        if self._strings > _MAX_STRINGS:
            raise GrammarError(self._document.field, "too complex: too many allowed strings are combined")


def _listed_values(values: list[Any]) -> Values:
    strings = dict.fromkeys(value for value in values if isinstance(value, str))
    return Values(tuple(strings), any(not isinstance(value, str) for value in values))


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    return schema[keyword] if isinstance(schema.get(keyword), list) else []
