"""Tool calls under a grammar: whatever the mask allows is valid by the tool's schema, for every kind of schema."""

import json
import time
import tracemalloc

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import CALL_ENDS, ids_of, new_mask, random_reply

from dsv4jax.engine import tool_grammar
from dsv4jax.engine.grammar import (
    MAX_CHARACTERS,
    Choice,
    GrammarCompiler,
    GrammarError,
    JsonSchema,
    StructuralTag,
    ToolCalls,
    ToolSchema,
)
from dsv4jax.engine.json_schema import Document, check_values_end
from dsv4jax.engine.token_mask import MaskError
from dsv4jax.engine.tool_grammar import Tool, tool_calls_lark

TAG = "｜DSML｜"
LINE = "\n"


@pytest.fixture(scope="module")
def small(default_tokenizer):
    return GrammarCompiler(default_tokenizer)


def calls(*parameters, **options):
    """A required call of tools with these schemas of parameters."""
    tools = tuple(ToolSchema(f"t{i}", json.dumps(p)) for i, p in enumerate(parameters))
    return ToolCalls(tools, required=True, **options)


def lark(*parameters):
    return tool_calls_lark([Tool(f"t{i}", p) for i, p in enumerate(parameters)], 7, True, {"lenient": True}, "tools")


def call_text(arguments, name="t0"):
    lines = ""
    for key, value in arguments.items():
        kind, text = ("true", value) if isinstance(value, str) else ("false", json.dumps(value))
        lines += f'<{TAG} parameter name="{key}" string="{kind}">{text}</{TAG} parameter>\n'
    return f'\n\n<{TAG} calls>\n<{TAG} invoke name="{name}">\n{lines or LINE}</{TAG} invoke>\n</{TAG} calls>'


def accepts(tokenizer, grammar, arguments, name="t0"):
    """Whether a call with these arguments can be written."""
    mask = new_mask(tokenizer, grammar)
    try:
        for i, text in enumerate(call_text(arguments, name).split(TAG)):
            for token in [tokenizer.control_id(TAG)] * (i > 0) + tokenizer.encode(text).tolist():
                mask.push(token)
    except MaskError:
        return False
    return tokenizer.eos_id in ids_of(mask.next())


NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
    "required": ["name"],
    "additionalProperties": False,
}
COLOR = {"type": "string", "enum": ["red", "blue"]}


def color(schema):
    return {"type": "object", "properties": {"c": schema}, "$defs": {"C": COLOR}, "additionalProperties": False}


def number(reference, **root):
    """A parameter `a`: a list of what is referred to."""
    items = {"type": "array", "items": {"$ref": reference}, "maxItems": 2}
    return {"type": "object", "properties": {"a": items}, "additionalProperties": False, **root}


COLORS_ALLOWED, COLORS_REFUSED = [{"c": "red"}, {"c": "blue"}, {}], [{"c": "pink"}, {"c": "re"}, {"c": 3}]
NUMBERS_ALLOWED, NUMBERS_REFUSED = [{"a": []}, {"a": [3]}], [{"a": ["x"]}, {"a": [[]]}, {"a": 3}]
SCHEMAS = {
    # References to any place of the document.
    "ref to the root": (
        NODE,
        [{"name": "x"}, {"name": "x", "children": [{"name": "y"}]}],
        [{"name": "x", "children": [[]]}, {"name": "x", "children": [{}]}, {"children": []}],
    ),
    "ref to another parameter": (
        {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "array", "items": {"$ref": "#/properties/b"}}},
        },
        NUMBERS_ALLOWED,
        NUMBERS_REFUSED,
    ),
    "ref into a definition": (
        number(
            "#/$defs/o/properties/x", **{"$defs": {"o": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
        ),
        NUMBERS_ALLOWED,
        NUMBERS_REFUSED,
    ),
    "ref into a list": (
        number("#/$defs/u/anyOf/1", **{"$defs": {"u": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}),
        NUMBERS_ALLOWED,
        NUMBERS_REFUSED,
    ),
    "ref with escapes": (
        number("#/definitions/a~1b%20c", definitions={"a/b c": {"type": "integer"}}),
        NUMBERS_ALLOWED,
        NUMBERS_REFUSED,
    ),
    "ref to a ref beside keywords": (
        number("#/$defs/a", **{"$defs": {"a": {"$ref": "#/$defs/b", "minimum": 2}, "b": {"type": "integer"}}}),
        NUMBERS_ALLOWED,
        [*NUMBERS_REFUSED, {"a": [1]}],
    ),
    "refs in a circle": (
        number(
            "#/$defs/a",
            **{
                "$defs": {
                    "a": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/b"}}]},
                    "b": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]},
                }
            },
        ),
        [{"a": [3]}, {"a": [[True]]}, {"a": [[[3]]]}],
        [{"a": [True]}, {"a": [[3]]}, {"a": [[[True]]]}],
    ),
    "what only looks like a reference": (
        {
            "type": "object",
            "properties": {
                "$ref": {"type": "integer"},
                "default": {"const": {"$ref": "#/nowhere"}},
                "title": {"type": "object", "properties": {"description": {"type": "integer"}}, "maxProperties": 1},
            },
            "additionalProperties": False,
        },
        [{"$ref": 3}, {"default": {"$ref": "#/nowhere"}}, {"title": {"description": 3}}],
        [{"$ref": True}, {"default": {"$ref": "#"}}, {"title": {"description": True}}],
    ),
    # Parameters that the root does not list itself.
    "ref at the root": (
        {"$ref": "#/$defs/N", "$defs": {"N": NODE | {"properties": {"name": {"type": "string"}}}}},
        [{"name": "x"}],
        [{}, {"name": 3}],
    ),
    "allOf at the root": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "allOf": [
                {"properties": {"b": {"type": "integer", "minimum": 3}}, "required": ["a"]},
                {"properties": {"b": {"maximum": 5}}},
                {"allOf": [{"required": ["b"]}]},
            ],
        },
        [{"a": 1, "b": 4}, {"b": 3, "a": 1}],
        [{}, {"a": 1}, {"b": 4}, {"a": 1, "b": 2}, {"a": 1, "b": 6}],
    ),
    "a closed part of allOf": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "allOf": [{"properties": {"a": {}}, "additionalProperties": False}],
        },
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "alternatives of required keys": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "minProperties": 1,
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "required but described by additionalProperties": (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
        [{"a": 3}],
        [{}, {"a": "x"}, {"a": True}],
    ),
    "required and not described": ({"type": "object", "required": ["a"]}, [{"a": 3}, {"a": "x"}, {"a": None}], [{}]),
    "forbidden": (
        {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}},
        [{}, {"b": 3}],
        [{"a": 3}, {"a": "x"}],
    ),
    "nothing": ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [{"a": 3}]),
    # Parameters of any name, and a number of them.
    "a map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a b": 3, "é": 4}], [{"a": "x"}]),
    "a map of at least two": (
        {"type": "object", "additionalProperties": COLOR, "minProperties": 2},
        [{"a": "red", "b": "blue"}, {"a": "red", "b": "red", "c": "red"}],
        [{}, {"a": "red"}, {"a": "red", "b": "pink"}],
    ),
    "anything": ({"type": "object", "additionalProperties": True}, [{}, {"a": "x"}, {"b": [3]}], []),
    "at least two of three": (
        {
            "type": "object",
            "properties": {key: {"type": "integer"} for key in "abc"},
            "required": ["b"],
            "additionalProperties": False,
            "minProperties": 2,
        },
        [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"c": 1, "a": 1, "b": 1}],
        [{}, {"b": 1}, {"a": 1, "c": 1}],
    ),
    # Strings that are listed, behind every keyword.
    "enum": (color(COLOR), COLORS_ALLOWED, COLORS_REFUSED),
    "enum behind ref": (color({"$ref": "#/$defs/C"}), COLORS_ALLOWED, COLORS_REFUSED),
    "enum with a default": (
        color({"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}),
        COLORS_ALLOWED,
        COLORS_REFUSED,
    ),
    "enum or null": (
        color({"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}),
        [*COLORS_ALLOWED, {"c": None}],
        COLORS_REFUSED,
    ),
    "enum and null in type": (
        color({"type": ["string", "null"], "enum": ["red", "blue", None]}),
        [*COLORS_ALLOWED, {"c": None}],
        COLORS_REFUSED,
    ),
    "constants": (color({"oneOf": [{"const": "red"}, {"const": "blue"}]}), COLORS_ALLOWED, COLORS_REFUSED),
    "enums that meet": (
        color({"allOf": [{"enum": ["red", "blue", "pink", 3]}, {"anyOf": [{"$ref": "#/$defs/C"}, {"enum": ["x"]}]}]}),
        COLORS_ALLOWED,
        [*COLORS_REFUSED, {"c": "x"}],
    ),
    "enums within enums": (
        color({"anyOf": [{"anyOf": [{"const": "red"}]}, {"allOf": [{"allOf": [{"$ref": "#/$defs/C"}]}]}]}),
        COLORS_ALLOWED,
        COLORS_REFUSED,
    ),
    "a number that must be a listed string": (
        color({"type": "integer", "allOf": [{"$ref": "#/$defs/C"}]}),
        [{}],
        [{"c": 3}, {"c": "red"}],
    ),
    "enum or any string": (
        color({"anyOf": [{"$ref": "#/$defs/C"}, {"type": "string"}]}),
        [{"c": "red"}, {"c": "pink"}],
        [{"c": 3}],
    ),
    "enum in a circle": (
        color({"anyOf": [{"$ref": "#/$defs/C"}, {"type": "array", "items": {"$ref": "#/properties/c"}}]}),
        [*COLORS_ALLOWED, {"c": [["red"]]}],
        [*COLORS_REFUSED, {"c": [["pink"]]}],
    ),
    "control characters": (
        {"type": "object", "properties": {"a\x7f": {"enum": ["\x7f", "\x00\x1f", "\u2028"]}}, "required": ["a\x7f"]},
        [{"a\x7f": "\x7f"}, {"a\x7f": "\x00\x1f"}, {"a\x7f": "\u2028"}],
        [{"a": "\x7f"}, {"a\x7f": "\x1f"}],
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_can_be_written_if_its_arguments_are_valid(default_tokenizer, small, name):
    schema, valid, invalid = SCHEMAS[name]
    grammar = small.compile(calls(schema), "tools")
    for arguments in valid:
        jsonschema.validate(arguments, schema)
        assert accepts(default_tokenizer, grammar, arguments), arguments
    for arguments in invalid:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(arguments, schema)
        assert not accepts(default_tokenizer, grammar, arguments), arguments


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_written_is_valid(default_tokenizer, small, name, seed):
    schema = SCHEMAS[name][0]
    grammar = small.compile(calls(schema, parallel=False), "tools")
    mask = new_mask(default_tokenizer, grammar)
    text = default_tokenizer.decode(random_reply(mask, default_tokenizer, seed, endings=(*CALL_ENDS, "]", "}", "3")))
    arguments = {}
    for part in text.split(f"<{TAG} parameter name=")[1:]:
        head, _, value = part.partition(">")
        key, _, string = head[1:].partition('" string="')
        value = value.rpartition(f"</{TAG} parameter>")[0]
        arguments[key] = value if string == 'true"' else json.loads(value)
    jsonschema.validate(arguments, schema)


def test_a_tool_of_any_name_is_written_as_it_is(default_tokenizer, small):
    names = ("plain", "d\x7fel", "back\\slash", "é漢")
    tools = tuple(ToolSchema(name) for name in names)
    grammar = small.compile(ToolCalls(tools, required=True), "tools")
    for name in names:
        assert accepts(default_tokenizer, grammar, {}, name)


def test_a_choice_may_hold_every_character(default_tokenizer, small):
    choices = [chr(i) for i in (*range(0xA0), 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF)]
    grammar = small.compile(Choice(tuple(choices)), "f")
    for text in choices:
        mask = new_mask(default_tokenizer, grammar)
        for token in default_tokenizer.encode(text).tolist():
            mask.push(token)
        assert ids_of(mask.next()).tolist() == [default_tokenizer.eos_id]


@pytest.mark.parametrize(
    ("schema", "field", "reason"),
    [
        ({"type": "string"}, ".type", "'string': parameters are an object"),
        ({"$ref": "#/$defs/a"}, "", "$ref '#/$defs/a' leads nowhere"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "", "$ref '#/$defs/a' leads nowhere"),
        ({"properties": {"a": {"items": {"$ref": "#/items"}}}}, "", "$ref '#/items' leads nowhere"),
        ({"properties": {"a": {"items": {"$ref": "http://localhost/x"}}}}, "", "$ref 'http://localhost/x' leads"),
        ({"properties": {"a": {"$ref": "#/$defs/u/2"}}, "$defs": {"u": [{}, {}]}}, "", "'#/$defs/u/2' leads nowhere"),
        (
            {"properties": {"a": {"$id": "x", "items": {"$ref": "#/y"}}}},
            "",
            "$id 'x': a $ref inside a part with an $id",
        ),
        ({"anyOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, ".anyOf", "parameter 'a' must be in"),
        ({"properties": {"a": {}}, "oneOf": [{"required": ["b"]}]}, ".oneOf", "parameter 'b' must be in"),
        ({"allOf": [{"if": {}, "then": {"properties": {"a": {}}}}]}, ".then", "parameter 'a' must be in"),
        ({"if": {}, "else": {"allOf": [{"required": ["a"]}]}}, ".else", "parameter 'a' must be in"),
        ({"dependentSchemas": {"x": {"required": ["a"]}}}, ".dependentSchemas", "parameter 'a' must be in"),
        ({"patternProperties": {"^x": {}}}, ".patternProperties", "must be listed in `properties`"),
        ({"minProperties": 1}, ".minProperties", "1 parameters are asked for: 0 can be given"),
        ({"properties": {"a": {}, "b": False}, "minProperties": 2}, ".minProperties", "1 can be given"),
        ({"properties": {f"{i}": {} for i in range(70)}, "minProperties": 64}, ".minProperties", "at most 63"),
        ({"minProperties": "1"}, ".minProperties", "a whole number from 0 on is needed, not '1'"),
        ({"minProperties": float("nan")}, ".minProperties", "a whole number from 0 on is needed"),
        ({"properties": {"a": {"type": "integer", "enum": ["1"]}}, "required": ["a"]}, ".properties", "no value of it"),
        ({"required": ["a"], "additionalProperties": False}, ".properties", "'a' is required, but no value of it"),
        ({"allOf": [{"allOf": [{"properties": {"a": 3}}]}]}, ".properties", "'a' is 3: a schema is needed"),
        ({"allOf": [{} for _ in range(30)]}, "", "more than 16 schemas at the root"),
        ({"required": ["a" * 5000], "additionalProperties": False}, ".properties", "aaa... is required"),
    ],
)
def test_parameters_that_no_call_could_give_are_refused_by_keyword(small, schema, field, reason):
    with pytest.raises(GrammarError) as caught:
        small.compile(calls(schema), "tools")
    assert caught.value.field == f"tools[0].parameters{field}"
    assert reason in str(caught.value) and len(str(caught.value)) < 300


# Values without end.

OBJECT = {"type": "object", "required": ["a"]}
ENDLESS = [
    ("#", {**OBJECT, "properties": {"a": {"$ref": "#"}}}),
    ("#", {**OBJECT, "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}),
    ("#", {**OBJECT, "properties": {"a": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}}}),
    ("#", {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}}),
    ("#", {**OBJECT, "properties": {"a": {"oneOf": [{"allOf": [{"$ref": "#"}, {"type": "object"}]}]}}}),
    ("#", {**OBJECT, "additionalProperties": {"$ref": "#"}}),
    ("#/$defs/m", {"properties": {"x": {"$ref": "#/$defs/m"}}, "$defs": {
        "m": {"type": "object", "additionalProperties": {"$ref": "#/$defs/m"}, "minProperties": 1}}}),
    ("#/$defs/b", {"properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/b"}}}, "$defs": {
        "b": {**OBJECT, "properties": {"a": {"$ref": "#/$defs/c"}}},
        "c": {"type": ["array", "object"], "items": {"$ref": "#/$defs/b"}, "minItems": 2,
              "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}}}}),
    ("#/$defs/r", {"properties": {"x": {"$ref": "#/$defs/r"}}, "$defs": {"r": {"$ref": "#/$defs/r"}}}),
]  # fmt: skip
FINITE = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {**OBJECT, "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {**OBJECT, "properties": {"a": {"properties": {"b": {"$ref": "#/properties/a"}}, "required": ["b"]}}},
    {**OBJECT, "properties": {"a": {"type": ["object", "null"], "properties": {"a": {"$ref": "#/properties/a"}},
                                    "required": ["a"]}}},
    {**OBJECT, "properties": {"a": {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}}},
    {**OBJECT, "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"unused": {"$ref": "#/$defs/unused"}, "a": {}}},
]  # fmt: skip


@pytest.mark.parametrize(("reference", "schema"), ENDLESS)
def test_values_without_end_are_refused_by_name(small, reference, schema):
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    for spec, field in (
        (JsonSchema(json.dumps(schema)), "f"),
        (calls({}, schema), "f[1].parameters"),
        (StructuralTag(json.dumps(tag)), "f.structures[0].schema"),
    ):
        with pytest.raises(GrammarError) as caught:
            small.compile(spec, "f")
        assert caught.value.field == field
        assert f"no value of {reference!r} can end" in str(caught.value)


def test_a_reference_that_is_relative_to_an_inner_id_is_not_judged(small):
    thing = {**OBJECT, "properties": {"a": {"$ref": "#/$defs/n"}}}
    inner = {"$id": "http://localhost/inner", **thing, "$defs": {"n": {"type": "integer"}}}
    small.compile(JsonSchema(json.dumps({"items": {"$ref": "#/$defs/i"}, "$defs": {"i": inner, "n": thing}})), "f")
    small.compile(calls({"properties": {"a": {"$id": "http://localhost/a", "type": "integer"}}}), "tools")


@pytest.mark.parametrize("schema", FINITE)
def test_values_that_may_end_are_not_refused(small, schema):
    small.compile(calls(schema), "f")
    small.compile(JsonSchema(json.dumps(schema)), "f")


def schemas(names):
    reference = st.sampled_from(names).map(lambda name: {"$ref": f"#/$defs/{name}"})
    leaves = st.sampled_from([{"type": "integer"}, {}, True, {"enum": [3]}]) | reference
    members = st.dictionaries(st.sampled_from("ab"), leaves, max_size=2)
    required = st.lists(st.sampled_from("ab"), unique=True)
    listed = st.lists(leaves, min_size=1, max_size=2)
    return st.one_of(
        leaves,
        st.builds(lambda m, r, o: {"type": "object", "properties": m, "required": r, "additionalProperties": o},
                  members, required, leaves),
        st.builds(lambda i, n, t: {"type": t, "items": i, "minItems": n},
                  leaves, st.integers(0, 2), st.sampled_from(["array", ["array", "null"]])),
        st.builds(lambda k, o: {k: o}, st.sampled_from(["anyOf", "oneOf", "allOf"]), listed),
    )  # fmt: skip


def can_end(schema, root, levels):
    """Whether a value ends that is nested at most so many levels deep, references counted."""
    if schema in (True, {}) or "enum" in schema or schema.get("type") in ("integer", ["array", "null"]):
        return True
    if levels == 0:
        return False

    def inner(part):
        return can_end(part, root, levels - 1)

    if "$ref" in schema:
        return inner(root["$defs"][schema["$ref"][-1]])
    if "allOf" in schema:
        return all(map(inner, schema["allOf"]))
    if schema.get("type") == "object":
        return all(inner(schema["properties"].get(k, schema["additionalProperties"])) for k in schema["required"])
    if schema.get("type") == "array":
        return schema["minItems"] == 0 or inner(schema["items"])
    return any(map(inner, schema.get("anyOf", schema.get("oneOf"))))


@settings(max_examples=500)
@given(definitions=st.fixed_dictionaries({name: schemas("ABC") for name in "ABC"}))
def test_what_is_refused_for_its_end_is_what_has_no_finite_value(definitions):
    root = {"$defs": definitions, "properties": {name: {"$ref": f"#/$defs/{name}"} for name in definitions}}
    endless = [name for name in definitions if not can_end(definitions[name], root, 8)]
    try:
        check_values_end(Document(root, "f"))
    except GrammarError as error:
        assert any(f"'#/$defs/{name}'" in str(error) for name in endless)
    else:
        assert not endless


def test_an_end_that_is_missing_by_several_keywords_leaves_the_mask_usable(default_tokenizer, small):
    """Nothing finds it; the reply ends with `max_tokens`."""
    endless = {"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": {"$ref": "#"}}}]}
    mask = new_mask(default_tokenizer, small.compile(JsonSchema(json.dumps(endless)), "f"))
    for _ in range(40):
        for token in default_tokenizer.encode('{"a":').tolist():
            assert default_tokenizer.eos_id not in ids_of(mask.next())
            mask.push(token)


# Size and time.


def doubling(keyword, levels=200, width=9):
    names = [f"#/$defs/a{i}" for i in range(levels)]
    definitions = {f"a{i}": {keyword: [{"$ref": names[i + 1]}] * width} for i in range(levels - 1)}
    return {"$defs": {**definitions, f"a{levels - 1}": {"enum": ["x"]}}, "properties": {"p": {"$ref": names[0]}}}


def circle(keyword, size=30):
    options = [{"$ref": f"#/$defs/a{j}"} for j in range(size)]
    definitions = {f"a{i}": {keyword: [*options, {"type": "integer"}]} for i in range(size)}
    return {"$defs": definitions, "properties": {"p": {"$ref": "#/$defs/a0"}}}


def chain(link, length):
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}, i) for i in range(length)}
    return {"$defs": {**definitions, f"a{length}": {"enum": ["x"]}}, "properties": {"p": {"$ref": "#/$defs/a0"}}}


LARGE = {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(3000)}}
LONG = {"type": "integer", "description": "x" * 200_000}
MANY = range(3000)
HOSTILE = {
    "circle": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
    **{f"doubling {k}": doubling(k) for k in ("anyOf", "oneOf", "allOf")},
    **{f"circle of {k}": circle(k) for k in ("anyOf", "oneOf", "allOf")},
    "chain of references": chain(lambda next_, i: next_, 15_000),
    "chain of alternatives": chain(lambda next_, i: {"anyOf": [next_, {"const": f"v{i}"}]}, 10_000),
    "chain of alternatives to a long list": {
        **(alternatives := chain(lambda next_, i: {"anyOf": [next_, {"const": f"v{i}"}]}, 5000)),
        "$defs": {**alternatives["$defs"], "a5000": {"enum": [f"w{i}" for i in range(40_000)]}},
    },
    "chain of objects": chain(lambda next_, i: {"type": "object", "properties": {"b": next_}}, 8_000),
    "large definition": {"$defs": {"a": LARGE}, "properties": {f"k{i}": {"$ref": "#/$defs/a"} for i in MANY}},
    "large definition, different parameters": {
        "$defs": {"a": LARGE}, "properties": {f"k{i}": {"$ref": "#/$defs/a", "minimum": i} for i in MANY}
    },
    "large definition by other names": {
        "$defs": {"a": LARGE, **{f"b{i}": {"$ref": "#/$defs/a"} for i in MANY}},
        "properties": {f"k{i}": {"$ref": f"#/$defs/b{i}"} for i in MANY},
    },
    "long description": {"$defs": {"a": LONG}, "properties": {f"k{i}": {"$ref": "#/$defs/a"} for i in MANY}},
    "parts at the root": {"allOf": [{"additionalProperties": {"minimum": i}} for i in range(16)],
                          "properties": {f"k{i}": {} for i in range(20_000)}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_the_work_for_hostile_parameters_is_bounded(name):
    schema = HOSTILE[name]
    assert len(json.dumps(schema)) < MAX_CHARACTERS
    start = time.process_time()
    try:
        assert len(lark(schema)) <= tool_grammar.MAX_CHARACTERS
    except GrammarError as error:
        assert len(str(error)) < 300
    assert time.process_time() - start < 5


def test_rules_are_refused_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(tool_grammar, "MAX_CHARACTERS", 1 << 20)  # tracing makes it slow
    for name in ("large definition, different parameters", "large definition by other names"):
        schema = HOSTILE[name]
        tracemalloc.start()
        with pytest.raises(GrammarError, match="too large: more than 1048576 characters of rules"):
            lark(schema)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 << 20


def test_only_definitions_that_are_reached_are_copied():
    names = {"one": {"$ref": "#/$defs/two"}, "two": {"type": "integer", "maximum": 222}, "three": {"maximum": 333}}
    text = lark({"$defs": names, "properties": {"a": {"$ref": "#/$defs/one"}, "b": {"type": "object"}}})
    assert text.count("222") == 1 and "333" not in text
    text = lark({"$defs": names, "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}})
    assert "222" not in text and "333" not in text


def test_a_large_definition_is_copied_once_for_parameters_that_say_the_same():
    text = lark(HOSTILE["large definition"])
    assert text.count("a2999") == 1 and all(f'name=\\"k{i}\\"' in text for i in MANY)


@pytest.mark.parametrize("vocabulary", ["default_tokenizer", "released_tokenizer"])
def test_a_long_list_of_ordinary_tools_is_served(vocabulary, request):
    kinds = [
        {"type": "string", "description": "What it is about, in a sentence or two, or empty"},
        {"type": "integer", "minimum": 1, "description": "How many of them"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "string", "enum": ["first", "second"]},
        {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}], "default": None},
    ]
    place = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}
    tools = tuple(
        ToolSchema(
            f"server_{i}_tool",
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"parameter_{i}_{j}": kinds[j % 5] for j in range(8)},
                    "required": [f"parameter_{i}_0"],
                    "$defs": {"place": place},
                }
            ),
        )
        for i in range(300)
    )
    assert 200_000 < sum(len(tool.parameters) for tool in tools) < 300_000
    tokenizer = request.getfixturevalue(vocabulary)
    grammar = GrammarCompiler(tokenizer).compile(ToolCalls(tools, required=True), "tools")
    arguments = {"parameter_7_4": {"city": "x", "zip": 3}, "parameter_7_0": "y"}
    assert accepts(tokenizer, grammar, arguments, "server_7_tool")
    assert not accepts(tokenizer, grammar, {"parameter_8_0": "y"}, "server_7_tool")


def test_the_limit_on_tools_counts_what_the_client_sent(small):
    tools = tuple(ToolSchema(f"t{i}", json.dumps({"description": "x" * 100_000})) for i in range(11))
    with pytest.raises(GrammarError) as caught:
        small.compile(ToolCalls(tools), "tools")
    sent = sum(len(tool.name) + len(tool.parameters) for tool in tools)
    assert str(caught.value) == f"tools: {sent} characters are too many: at most {MAX_CHARACTERS} are allowed"
    small.compile(ToolCalls(tools[:10]), "tools")


def test_more_rules_than_the_compiler_takes_are_refused_in_words(small):
    parameters = {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    with pytest.raises(GrammarError, match=r"^tools: too large or too complex: the compiler gives up$"):
        small.compile(calls(parameters), "tools")
