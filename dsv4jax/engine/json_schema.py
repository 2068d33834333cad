"""JSON schemas as documents: where references lead, a part as a document of its own, whether values can end."""

import collections
import json
import math
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ONE = frozenset(
    ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
) | {"unevaluatedItems", "unevaluatedProperties"}
_LISTS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_NAMED = frozenset(("dependentSchemas", "patternProperties", "properties"))
# What does not change which values are valid, and what a part as a document of its own has its own of.
_DROPPED = frozenset(
    ("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description")
) | {"example", "examples", "readOnly", "title", "writeOnly", "x-guidance"}


class GrammarError(ValueError):
    """A grammar that cannot be used, found before generation.

    Attributes:
      field: the request's field that holds it.
    """

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field = field


class Document:
    """A decoded schema, and the places in it that its references name."""

    def __init__(self, root: Any, field: str):
        """`field` is the request's field that holds the schema, for error messages."""
        self.root, self.field = root, field
        self._targets: dict[str, Any] = {}

    def target(self, reference: str) -> Any:
        """What is at a JSON pointer behind `#`; None if it leads nowhere, or the reference is of another form."""
        if reference not in self._targets:
            self._targets[reference] = self._find(reference)
        return self._targets[reference]

    def _find(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            return None
        place = self.root
        for part in urllib.parse.unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict):
                place = place.get(part)
            elif isinstance(place, list) and part.isdecimal() and len(part) < 9 and int(part) < len(place):
                place = place[int(part)]
            else:
                return None
        return place

    def required_target(self, reference: str) -> Any:
        """As `target`.

        Raises:
          GrammarError: the reference leads nowhere.
        """
        found = self.target(reference)
        if found is None:
            raise GrammarError(
                self.field, f"$ref {shown(reference)} leads nowhere: '#' and pointers such as '#/$defs/a' are followed"
            )
        return found

    def standalone(self, schema: Any) -> Any:
        """The schema as a document of its own: `$defs` has what references reach from it, and nothing else.

        Annotations are left out.

        Raises:
          GrammarError: a reference leads nowhere, or is relative to another place than the root.
        """
        names: dict[str, str] = {}
        found: list[str] = []

        def name_of(reference: str) -> str:
            if reference not in names:
                names[reference] = str(len(names))
                found.append(reference)
            return f"#/$defs/{names[reference]}"

        copy = self._copy(schema, name_of)
        # Grows while it is read: a target may refer to further ones.
        definitions = {names[reference]: self._copy(self.required_target(reference), name_of) for reference in found}
        return {**copy, "$defs": definitions} if definitions else copy

    def without_annotations(self, schema: Any) -> Any:
        """A copy with the same references, and without what does not change which values are valid.

        Raises:
          GrammarError: a reference is relative to another place than the root.
        """
        return self._copy(schema, lambda reference: reference)

    def _copy(self, schema: Any, name_of: Callable[[str], str]) -> Any:
        if not isinstance(schema, dict):
            return schema
        if "$id" in schema and schema is not self.root and '"$ref"' in json.dumps(schema):
            reason = f"$id {shown(schema['$id'])}: a $ref inside a part with an $id is not followed"
            raise GrammarError(self.field, reason)
        copy = {}
        for keyword, value in schema.items():
            if keyword in _DROPPED:
                continue
            if keyword == "$ref" and isinstance(value, str):
                value = name_of(value)
            elif keyword in _LISTS and isinstance(value, list):
                value = [self._copy(part, name_of) for part in value]
            elif keyword in _NAMED and isinstance(value, dict):
                value = {name: self._copy(part, name_of) for name, part in value.items()}
            elif keyword in _ONE:
                value = self._copy(value, name_of)
            copy[keyword] = value
        return copy


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def children_first(
    schema: Any, children: Callable[[dict[str, Any]], Iterable[Any]], seen: set[int]
) -> Iterator[dict[str, Any]]:
    """The schemas that `children` leads to, each once and after its own children, except where these form a circle.

    Args:
      seen: `id` of schemas that are left out; those that are returned are added.
    """
    stack = [(schema, False)]
    while stack:
        item, children_done = stack.pop()
        if children_done:
            yield item
        elif isinstance(item, dict) and id(item) not in seen:
            seen.add(id(item))
            stack.append((item, True))
            stack.extend((child, False) for child in children(item))


def check_values_end(document: Document) -> None:
    """Refuses a schema in which a value can only be written without end, such as an object that must hold its like.

    Whatever has a finite value passes; of those that have none, what is endless only by several keywords together
    (two parts of an `allOf`, say) is not found.

    Raises:
      GrammarError: a part of the schema has no finite value.
    """
    # A schema has a finite value if, of every group that it demands, one alternative has: all schemas in it do. This
    # is solved from the innermost schemas outwards; what is never reached has none.
    rules: list[list[Any]] = []  # what follows, and from how many facts more
    needed_by: collections.defaultdict[Any, list[int]] = collections.defaultdict(list)
    finite: set[Any] = set()
    facts: list[Any] = []

    def add_rule(head: Any, body: list[Any]) -> None:
        for fact in body:
            needed_by[fact].append(len(rules))
        rules.append([head, len(body)])
        if not body:
            facts.append(head)

    references: dict[str, Any] = {}

    def children(schema: dict[str, Any]) -> Iterator[Any]:
        if isinstance(reference := schema.get("$ref"), str) and document.target(reference) is not None:
            references[reference] = document.target(reference)
            yield references[reference]
        for keyword in ("additionalProperties", "items"):
            yield schema.get(keyword)
        for keyword in ("allOf", "anyOf", "items", "oneOf", "prefixItems"):
            yield from _list(schema, keyword)
        for keyword in ("patternProperties", "properties"):
            yield from _dict(schema, keyword).values()

    for schema in children_first(document.root, children, set()):
        if "$id" in schema and schema is not document.root:
            return  # references in it start there, not at the root
        groups = _demands(document, schema)
        add_rule(id(schema), [(id(schema), i) for i in range(len(groups))])
        for i, alternatives in enumerate(groups):
            for alternative in alternatives:
                add_rule((id(schema), i), [id(part) for part in alternative if isinstance(part, dict)])
    while facts:
        fact = facts.pop()
        if fact not in finite:
            finite.add(fact)
            for i in needed_by[fact]:
                rules[i][1] -= 1
                if rules[i][1] == 0:
                    facts.append(rules[i][0])
    for reference, schema in references.items():
        if isinstance(schema, dict) and id(schema) not in finite:
            raise GrammarError(
                document.field, f"no value of {shown(reference)} can end: each must hold a further one, without end"
            )


def _demands(document: Document, schema: dict[str, Any]) -> list[list[list[Any]]]:
    """Groups of alternatives: of every group, all schemas of one alternative need a finite value."""
    groups = [[[part]] for part in _list(schema, "allOf")]
    if isinstance(reference := schema.get("$ref"), str):
        groups.append([[document.target(reference)]])
    groups += [[[part] for part in _list(schema, keyword)] for keyword in ("anyOf", "oneOf") if _list(schema, keyword)]
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if types and "enum" not in schema and "const" not in schema and all(name in ("array", "object") for name in types):
        groups.append([_items(schema) if name == "array" else _members(schema) for name in types])
    return groups


def _items(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    first = _list(schema, "prefixItems") or _list(schema, "items")
    least = _number(schema, "minItems")
    if least > len(first):
        return [*first, schema.get("items")]
    return first[: math.ceil(least)]


def _members(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the members that an object must have."""
    properties = _dict(schema, "properties")
    others = None if _dict(schema, "patternProperties") else schema.get("additionalProperties")
    names = [name for name in _list(schema, "required") if isinstance(name, str)]
    if not names and not properties and _number(schema, "minProperties") > 0:
        return [others]
    return [properties.get(name, others) for name in names]


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    return schema[keyword] if isinstance(schema.get(keyword), list) else []


def _number(schema: dict[str, Any], keyword: str) -> float:
    """A number from 0 on."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and value > 0 else 0


def _dict(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return schema[keyword] if isinstance(schema.get(keyword), dict) else {}
