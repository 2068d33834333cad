"""Grammars of replies: whatever a mask allows must lead to a valid reply, and nothing hostile may hang or crash."""

import json
import re
import threading
import time

import jsonschema
import numpy as np
import pytest

from dsv4jax.engine import grammar as grammar_module
from dsv4jax.engine.grammar import (
    Choice,
    ContextFreeGrammar,
    GrammarCompiler,
    GrammarError,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
    ToolCalls,
    ToolSchema,
)
from dsv4jax.engine.token_mask import MaskError, MaskRules, TokenMask, mask_factory
from dsv4jax.tokenizer import BOS, PAD

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"const": "Zürich"}}, "required": ["city"]}},
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "order": {"type": "string", "enum": ["up", "down"]},
        "near": {"$ref": "#/$defs/point"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["query", "limit"],
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
}
TOOLS = (ToolSchema("search", json.dumps(SEARCH)), ToolSchema("stop-now"))


@pytest.fixture(scope="module", params=["default", "released"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


@pytest.fixture(scope="module")
def small(default_tokenizer):
    """The compiler of the small vocabulary, for what does not depend on the vocabulary."""
    return GrammarCompiler(default_tokenizer)


def ids_of(words) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def new_mask(tokenizer, grammar, **rules) -> TokenMask:
    return mask_factory(MaskRules(grammar=grammar, **rules), tokenizer, tokenizer.vocab_size)()


def random_reply(mask, tokenizer, seed: int, patience: int = 60, endings: tuple[str, ...] = ()) -> list[int]:
    """Tokens drawn uniformly from the mask; after `patience` of them, those that come nearer to an end."""
    generator = np.random.default_rng(seed)
    reply: list[int] = []
    marker = tokenizer.control_id("｜DSML｜")
    preferred = [tokenizer.encode(text)[0] for text in endings]
    for _ in range(4000):
        words = mask.next()
        allowed = ids_of(words) if words is not None else np.arange(tokenizer.vocab_size)
        assert allowed.size and allowed[-1] < tokenizer.vocab_size
        token = int(generator.choice(allowed))
        if len(reply) > patience:
            if tokenizer.eos_id in allowed:
                token = tokenizer.eos_id
            elif marker in allowed:
                token = marker
            elif generator.random() < 0.7:
                token = int(generator.choice([i for i in preferred if i in allowed] or [token]))
        mask.push(token)
        if token == tokenizer.eos_id:
            assert ids_of(mask.next()).tolist() == [tokenizer.eos_id]
            return reply
        reply.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(reply)[-200:]!r}")


def holds_control_token(tokenizer, reply: list[int]) -> bool:
    control = {
        tokenizer.control_id(t) for t in ("<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜box｜>", BOS, PAD)
    }
    return bool(control & set(reply))


CALL_ENDS = ("</", "<", '"')
JSON_ENDS = ('"', "}", "]", "0", ":", "1")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "schema", [PERSON, True, {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4}]
)
def test_json_schema(tokenizer, compiler, schema, seed):
    grammar = compiler.compile(JsonSchema(json.dumps(schema)), "f")
    reply = random_reply(new_mask(tokenizer, grammar), tokenizer, seed, endings=JSON_ENDS)
    jsonschema.validate(json.loads(tokenizer.decode(reply)), schema)
    assert not holds_control_token(tokenizer, reply)


@pytest.mark.parametrize("seed", range(6))
def test_json_object(tokenizer, compiler, seed):
    grammar = compiler.compile(JsonObject(), "f")
    reply = random_reply(new_mask(tokenizer, grammar), tokenizer, seed, endings=JSON_ENDS)
    assert isinstance(json.loads(tokenizer.decode(reply)), dict)


def test_blanks_between_json_tokens_are_bounded(tokenizer, compiler):
    mask = new_mask(tokenizer, compiler.compile(JsonObject(), "f"))
    space = tokenizer.encode(" ")[0]
    mask.push(int(tokenizer.encode("{")[0]))
    for _ in range(64):
        assert space in ids_of(mask.next())
        mask.push(int(space))
    assert all(tokenizer.token_bytes([i])[:1] in (b'"', b"}") for i in ids_of(mask.next()))


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-z]+", r"(yes|no)!{0,3}", r"[^x]{1,20}", r"é+ü?"])
@pytest.mark.parametrize("seed", range(4))
def test_regex(tokenizer, compiler, pattern, seed):
    grammar = compiler.compile(Regex(pattern), "f")
    text = tokenizer.decode(random_reply(new_mask(tokenizer, grammar), tokenizer, seed))
    assert re.fullmatch(pattern, text)


def test_choice_reaches_every_choice(tokenizer, compiler):
    choices = ("a", "ab", "", 'say "</think>"', "漢字\n", "back\\slash")
    grammar = compiler.compile(Choice(choices), "f")
    seen = set()
    for text in choices:
        mask = new_mask(tokenizer, grammar)
        for token in tokenizer.encode(text).tolist():
            mask.push(token)
        mask.push(tokenizer.eos_id)
    for seed in range(30):
        seen.add(tokenizer.decode(random_reply(new_mask(tokenizer, grammar), tokenizer, seed)))
    assert seen <= set(choices) and len(seen) >= 4


@pytest.mark.parametrize(
    "text", ['root ::= "sum " digits ("+" digits)*\ndigits ::= [0-9]+', 'start: "sum " N ("+" N)*\nN: /[0-9]+/']
)
def test_context_free_grammar(tokenizer, compiler, text):
    grammar = compiler.compile(ContextFreeGrammar(text), "f")
    for seed in range(4):
        reply = tokenizer.decode(random_reply(new_mask(tokenizer, grammar), tokenizer, seed))
        assert re.fullmatch(r"sum \d+(\+\d+)*", reply)


def test_a_grammar_with_end_of_sentence_inside_does_not_end_there(default_tokenizer, small):
    eos = default_tokenizer.eos_id
    grammar = small.compile(ContextFreeGrammar(f'start: "a" <[{eos}]> "b"'), "f")
    mask = new_mask(default_tokenizer, grammar)
    mask.push(int(default_tokenizer.encode("a")[0]))
    with pytest.raises(MaskError, match="allows no token"):
        mask.next()


def test_structural_tag(tokenizer, compiler):
    tag = {
        "structures": [
            {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=two>", "schema": {"const": "x"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    grammar = compiler.compile(StructuralTag(json.dumps(tag)), "f")
    mask = new_mask(tokenizer, grammar)
    for token in tokenizer.encode("free text < and <f=").tolist():
        mask.push(token)
    assert tokenizer.eos_id not in ids_of(mask.next())
    starts = {tokenizer.token_bytes([i])[:1] for i in ids_of(mask.next())}
    assert starts == {b"o", b"t"}
    for token in tokenizer.encode('two>"x"</f> after').tolist():
        mask.push(token)
    assert tokenizer.eos_id in ids_of(mask.next())


def check_calls(text: str, parallel: bool) -> list[tuple[str, dict]]:
    """Reads a block of calls by the text of chat section 2.7 and validates the arguments."""
    tag = "｜DSML｜"
    block = re.fullmatch(rf"\n\n<{tag} calls>\n(.*)</{tag} calls>", text, re.DOTALL)
    assert block, text
    # Values end at the control token: in the random texts the spelling of ordinary tokens does not occur.
    parameter = rf'<{tag} parameter name="([a-z]+)" string="(true|false)">(.*?)</{tag} parameter>\n'
    call = rf'<{tag} invoke name="([a-z-]+)">\n((?:{parameter})+|\n)</{tag} invoke>\n'
    assert re.fullmatch(f"(?:{call})+", block[1], re.DOTALL), text
    calls = []
    for match in re.finditer(call, block[1], re.DOTALL):
        arguments = {}
        for key, string, value in re.findall(parameter, match[2], re.DOTALL):
            assert key not in arguments
            arguments[key] = value if string == "true" else json.loads(value)
        jsonschema.validate(arguments, SEARCH if match[1] == "search" else {"maxProperties": 0})
        calls.append((match[1], arguments))
    assert parallel or len(calls) == 1
    return calls


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_required_calls(tokenizer, compiler, parallel, seed):
    grammar = compiler.compile(ToolCalls(TOOLS, required=True, parallel=parallel), "tools")
    reply = random_reply(new_mask(tokenizer, grammar), tokenizer, seed, endings=CALL_ENDS)
    check_calls(tokenizer.decode(reply), parallel)


def test_calls_in_any_order_and_all_values(tokenizer, compiler):
    grammar = compiler.compile(ToolCalls(TOOLS, required=True), "tools")
    keys, names = set(), set()
    first = set()
    for seed in range(40):
        reply = random_reply(new_mask(tokenizer, grammar), tokenizer, seed, patience=25, endings=CALL_ENDS)
        for name, arguments in check_calls(tokenizer.decode(reply), True):
            names.add(name)
            keys |= arguments.keys()
            first |= set(list(arguments)[:1])
    assert names == {"search", "stop-now"} and keys == set(SEARCH["properties"]) and len(first) > 2


@pytest.mark.parametrize("seed", range(4))
def test_calls_when_the_prompt_ends_inside_the_block(tokenizer, compiler, seed):
    grammar = compiler.compile(ToolCalls(TOOLS[:1], required=True, inside_block=True), "tools")
    reply = random_reply(new_mask(tokenizer, grammar), tokenizer, seed, endings=CALL_ENDS)
    calls = check_calls("\n\n<｜DSML｜ calls>\n" + tokenizer.decode(reply), True)
    assert {name for name, _ in calls} == {"search"}


def test_calls_are_optional_with_auto(tokenizer, compiler):
    grammar = compiler.compile(ToolCalls(TOOLS), "tools")
    marker = tokenizer.control_id("｜DSML｜")
    mask = new_mask(tokenizer, grammar)
    for token in [*tokenizer.encode("Free <｜DSML｜ text").tolist(), marker]:
        assert mask.next() is None
        mask.push(token)
    head = tokenizer.encode("\n\n<").tolist()
    for token in head:
        mask.push(token)
    assert mask.next() is None and mask.waits_for_tokens
    mask.push(marker)
    assert tokenizer.eos_id not in ids_of(mask.next())
    reply = random_reply(mask, tokenizer, 1, endings=CALL_ENDS)
    check_calls(tokenizer.decode([*head, marker, *reply]), True)


def test_string_values_are_raw_text_up_to_the_control_token(tokenizer, compiler):
    grammar = compiler.compile(ToolCalls(TOOLS, required=True), "tools")
    marker = tokenizer.control_id("｜DSML｜")
    mask = new_mask(tokenizer, grammar)

    def push(text):
        for token in tokenizer.encode(text, added_vocabulary=False).tolist():
            mask.push(token)

    def tag(before, after):
        push(before)
        mask.push(marker)
        push(after)

    tag("\n\n<", " calls>\n")
    tag("<", ' invoke name="search">\n')
    tag("<", ' parameter name="query" string="true">')
    push('a "quoted" </｜DSML｜ parameter>\n line, {"x": 1} </b> 漢')
    assert marker not in ids_of(mask.next())
    tag("</", " parameter>\n")
    assert tokenizer.encode("</")[0] not in ids_of(mask.next())  # `limit` is required
    tag("<", ' parameter name="limit" string="false">7')
    tag("</", " parameter>\n")
    tag("</", " invoke>\n")
    tag("</", " calls>")
    assert ids_of(mask.next()).tolist() == [tokenizer.eos_id]


def test_many_parameters(default_tokenizer, small):
    properties = {f"k{i}": {"type": "integer"} for i in range(100)}
    spec = {"properties": properties, "required": [f"k{i}" for i in range(60, 63)]}
    grammar = small.compile(ToolCalls((ToolSchema("t", json.dumps(spec)),), required=True), "tools")
    text = default_tokenizer.decode(
        random_reply(new_mask(default_tokenizer, grammar), default_tokenizer, 3, endings=CALL_ENDS)
    )
    assert {"k60", "k61", "k62"} <= set(re.findall(r'name="(k\d+)"', text))


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (JsonSchema("{"), "f", "not JSON"),
        (JsonSchema("3"), "f", "a schema is an object or true"),
        (JsonSchema('{"type": "strng"}'), "f", "strng"),
        (JsonSchema('{"uniqueItems": true, "type": "array"}'), "f", "uniqueItems"),
        (JsonSchema('{"$ref": "http://localhost/x"}'), "f", "does not fetch"),
        (JsonSchema('{"$ref": "#"}'), "f", "no value of '#' can end"),
        (ContextFreeGrammar("start: start"), "f", "no text matches"),
        (JsonSchema('{"const": "\\ud800"}'), "f", "Unicode"),
        (Regex("(?=a)b"), "f", "look-around"),
        (Regex("("), "f", "unclosed group"),
        (Choice(()), "f", "at least one choice"),
        (ContextFreeGrammar("start: nope"), "f", "nope"),
        (ContextFreeGrammar("root ::= ((("), "f", "GBNF"),
        (StructuralTag('{"format": {}}'), "f", "structures"),
        (
            StructuralTag('{"structures": [{"begin": "a", "end": "b"}], "triggers": ["x"]}'),
            "f.structures[0].begin",
            "x",
        ),
        (ToolCalls(()), "f", "at least one tool"),
        (ToolCalls((ToolSchema("t", "[]"),)), "f[0].parameters", "an object is needed"),
        (ToolCalls((ToolSchema("t", '{"properties": 3}'),)), "f[0].parameters.properties", "3"),
        (ToolCalls((ToolSchema("t", '{"properties": {"a": 3}}'),)), "f[0].parameters.properties", "'a' is 3"),
        (ToolCalls((ToolSchema("t", '{"properties": {"a\\"": {}}}'),)), "f[0].parameters.properties", "quotes"),
        (ToolCalls((ToolSchema("t", '{"required": "a"}'),)), "f[0].parameters.required", "'a'"),
        (
            ToolCalls((ToolSchema("t", json.dumps({"required": [str(i) for i in range(64)]})),)),
            "f[0].parameters.required",
            "64 names are too many",
        ),
    ],
)
def test_errors_name_the_field(small, spec, field, reason):
    with pytest.raises(GrammarError, match=re.escape(reason)) as caught:
        small.compile(spec, "f")
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")


def chain(link, length: int) -> str:
    schema = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return json.dumps({"$defs": {**schema, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema('{"items":' * 70 + "{}" + "}" * 70),
        JsonSchema('{"items":' * 100_000 + "{}" + "}" * 100_000),
        JsonSchema(json.dumps({"description": "x" * 2_000_000})),
        JsonSchema(chain(lambda ref: {"$ref": ref}, 20_000)),
        JsonSchema(chain(lambda ref: {"type": "array", "items": {"$ref": ref}, "minItems": 1}, 5_000)),
        JsonSchema('{"type": "integer", "multipleOf": 99999989}'),
        JsonSchema(json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b.*c.{{{i}}}"} for i in range(40)]})),
        JsonSchema(
            json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(20)]})
        ),
        Regex("a{2000000000}"),
        Regex("(" * 100_000 + "a" + ")" * 100_000),
        ContextFreeGrammar("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(20_000)) + '\na20000: "x"'),
        ContextFreeGrammar("start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(200)) + '\nA200: "x"'),
        ContextFreeGrammar("root ::= " + "(" * 5000),
        ToolCalls((ToolSchema("t", '{"properties": {"n": {"type": "integer", "multipleOf": 99999989}}}'),)),
    ],
    ids=lambda spec: f"{type(spec).__name__}-{str(spec)[:50]}",
)
def test_hostile_grammars_are_refused_in_time(small, monkeypatch, spec):
    monkeypatch.setattr(grammar_module, "PROBE_SECONDS", 1.5)
    start = time.monotonic()
    with pytest.raises(GrammarError):
        small.compile(spec, "f")
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}", "(.*a){30}", "(a?){3000}a{3000}", r"(\p{L}+\p{N}+){500}"])
def test_hostile_patterns_fail_for_their_owner_only(default_tokenizer, small, pattern):
    """They compile, and may fail later; every step stays short, and another choice goes on."""
    tokenizer = default_tokenizer
    other = new_mask(tokenizer, small.compile(Choice(("fine",)), "f"))
    start = time.monotonic()
    try:
        mask = new_mask(tokenizer, small.compile(Regex(pattern), "f"))
        for _ in range(50):
            allowed = [i for i in ids_of(mask.next()).tolist() if i != tokenizer.eos_id]
            mask.push(allowed[len(allowed) // 2])
    except (MaskError, GrammarError) as error:
        assert str(error)
    assert time.monotonic() - start < 60
    for token in tokenizer.encode("fine").tolist():
        other.push(token)
    assert ids_of(other.next()).tolist() == [tokenizer.eos_id]


def test_cache_is_bounded_and_shared_by_threads(default_tokenizer, monkeypatch):
    compiler = GrammarCompiler(default_tokenizer, cache_size=2)
    first = compiler.compile(Choice(("a",)), "f")
    assert compiler.compile(Choice(("a",)), "other field") is first
    for text in ("b", "c"):
        compiler.compile(Choice((text,)), "f")
    assert compiler.compile(Choice(("a",)), "f") is not first

    replies, errors = [], []

    def work(seed):
        try:
            for i in range(10):
                grammar = compiler.compile(Choice(("a", "b")), "f")
                mask = new_mask(default_tokenizer, grammar)
                replies.append(default_tokenizer.decode(random_reply(mask, default_tokenizer, seed * 10 + i)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(replies) == 40 and set(replies) == {"a", "b"}


def test_choices_do_not_share_state(default_tokenizer, small):
    factory = mask_factory(
        MaskRules(grammar=small.compile(Choice(("ab", "cd")), "f")), default_tokenizer, default_tokenizer.vocab_size
    )
    one, two = factory(), factory()
    one.push(int(default_tokenizer.encode("a")[0]))
    assert default_tokenizer.encode("c")[0] in ids_of(two.next())
    with pytest.raises(MaskError):
        one.push(int(default_tokenizer.encode("c")[0]))
    two.push(int(default_tokenizer.encode("c")[0]))
