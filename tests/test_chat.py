"""Prompts of chat requests, and requests that are refused."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.chat import (
    CHAT_TOKENS,
    ChatError,
    effective_tools,
    encode_chat,
    image_paths,
    render_chat,
    reply_start,
    resolve_thinking,
)
from dsv4jax.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data/chat"
DEFAULT_FILE = ROOT / "dsv4jax/default_model/tokenizer.json"
RENDER_CASES = json.loads((DATA / "render.json").read_text(encoding="utf-8"))

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def options(request: dict) -> dict:
    template = request.get("chat_template_kwargs", {})
    switches = {key: request.get(key) for key in ("thinking", "reasoning_effort", "chat_template_kwargs")}
    thinking, effort = resolve_thinking(**switches)
    given = {
        k: request[k] for k in ("tools", "tool_choice", "response_format", "continue_final_message") if k in request
    }
    return {"thinking": thinking, "effort": effort, "drop_thinking": template.get("drop_thinking", True), **given}


def case_ids(cases):
    return [case["id"] for case in cases]


def with_call(arguments) -> list[dict]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]


# ---- prompts ---------------------------------------------------------------------------------------------

GOOD = [case for case in RENDER_CASES if "prompt" in case["expected"]]
BAD = [case for case in RENDER_CASES if "status" in case["expected"]]
# The hosted API refuses this one; here a grammar enforces the call after the reasoning (chat section 2.6).
FORCED_WHILE_THINKING = "tool_choice_required_thinking_error"


@pytest.mark.parametrize("case", GOOD, ids=case_ids(GOOD))
def test_prompts_equal_the_reference(released_tokenizer, case):
    expected, request = case["expected"], case["request"]
    assert render_chat(request["messages"], **options(request)) == expected["prompt"]
    ids = encode_chat(released_tokenizer, request["messages"], **options(request))
    assert ids.dtype == np.int32 and ids.flags.c_contiguous
    if "prompt_token_ids" in expected:
        assert ids.tolist() == expected["prompt_token_ids"]
    assert reply_start(released_tokenizer, ids) == expected["start"]
    images = np.count_nonzero(ids == released_tokenizer.control_id("<｜deepseek_image｜>"))
    assert len(image_paths(request["messages"])) == images


@pytest.mark.parametrize("case", BAD, ids=case_ids(BAD))
def test_requests_that_the_reference_refuses_are_refused(default_tokenizer, case):
    if case["id"] == FORCED_WHILE_THINKING:
        assert render_chat(case["request"]["messages"], **options(case["request"])).endswith("<｜Assistant｜><think>")
        return
    with pytest.raises(ChatError) as error:
        encode_chat(default_tokenizer, case["request"]["messages"], **options(case["request"]))
    field = error.value.param.replace("[", ".").replace("]", "").split(".")
    value = case["request"]
    for key in field[:2]:  # the path leads into the request
        value = value[int(key) if isinstance(value, list) else key]
    assert error.value.param in str(error.value)


EFFORTS = [(None, 75), ("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100)]
EFFORTS += [("ultra", 100), (1, 1), (42, 42), (100, 100), (0.0, 1), (0.004, 1), (0.5, 50), (0.99, 99)]


@pytest.mark.parametrize(("effort", "number"), EFFORTS)
def test_effort_numbers(effort, number):
    thinking, resolved = resolve_thinking(reasoning_effort=effort)
    assert thinking
    assert resolve_thinking(chat_template_kwargs={"reasoning_effort": effort}) == (True, number)
    prompt = render_chat([{"role": "system", "content": "Reasoning Effort: 75 ("}, USER], effort=resolved)
    head = "<｜begin▁of▁sentence｜><｜System｜>"
    line = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    assert prompt == head + line.format(number) + "Reasoning Effort: 75 (<｜User｜>Hi<｜Assistant｜><think>"


@pytest.mark.parametrize("effort", ["banana", "", 0, 101, -1, True, 1.0, float("nan"), [75]], ids=repr)
@pytest.mark.parametrize("kind", ["enabled", "disabled"])
def test_bad_efforts_are_refused_even_without_thinking(effort, kind):
    for where in ("reasoning_effort", "chat_template_kwargs.reasoning_effort"):
        field, *inner = where.split(".")
        with pytest.raises(ChatError, match=r"reasoning_effort is .* allowed are none, minimal, low") as error:
            resolve_thinking(thinking={"type": kind}, **{field: {inner[0]: effort} if inner else effort})
        assert error.value.param == where


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, 75)),
        ({"reasoning_effort": "none"}, (False, 75)),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, (True, 75)),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, (True, 50)),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, (False, 100)),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, (False, 75)),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, (False, 75)),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "max"}, (False, 100)),
        ({"chat_template_kwargs": {"thinking": False, "enable_thinking": True}}, (True, 75)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, 75)),
        ({"chat_template_kwargs": {"unknown": 1}}, (True, 75)),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, (False, 75)),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}, "reasoning_effort": "low"}, (True, 50)),
    ],
    ids=repr,
)
def test_which_field_decides_about_thinking(fields, expected):
    assert resolve_thinking(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"drop_thinking": 0}}, "chat_template_kwargs.drop_thinking"),
    ],
    ids=repr,
)
def test_bad_thinking_fields_are_named(fields, param):
    with pytest.raises(ChatError, match=f"{param} is .*: allowed") as error:
        resolve_thinking(**fields)
    assert error.value.param == param


@settings(max_examples=40)
@given(spellings=st.lists(st.sampled_from([*CHAT_TOKENS, "<｜box｜>", " x"]), min_size=1, max_size=4))
def test_typed_control_tokens_stay_text(default_tokenizer, spellings):
    text = "".join(spellings)
    control = [default_tokenizer.control_id(t) for t in (*CHAT_TOKENS, "<｜box｜>")]

    def conversation(typed):
        messages = with_call(json.dumps({"key": typed}))
        messages[0] = {"role": "user", "content": typed}
        messages[1] |= {"reasoning": typed, "content": typed}
        messages[2] = messages[2] | {"content": typed}
        tool = {"type": "function", "function": {"name": "f", "description": typed}}
        return encode_chat(default_tokenizer, [{"role": "developer", "content": typed}, *messages], tools=[tool])

    typed, plain = conversation(text), conversation("y")
    assert typed[np.isin(typed, control)].tolist() == plain[np.isin(plain, control)].tolist()
    assert default_tokenizer.decode(typed).count(text) >= 6


def test_large_integers_are_kept():
    huge, low, fits = 2**64, -(2**63) - 1, 2**64 - 1
    arguments = f'{{"a": {huge}, "b": [{low}, 1.50, "{huge}"], "c": {fits}, "d": "1000000000000000000"}}'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": huge}}}
    prompt = render_chat(with_call(arguments), tools=[tool])
    assert f'"parameters": {{"type": "object", "maximum": {huge}}}' in prompt
    assert f'<｜DSML｜ parameter name="a" string="false">{huge}</｜DSML｜ parameter>' in prompt
    assert f'<｜DSML｜ parameter name="b" string="false">[{low}, 1.5, "{huge}"]</｜DSML｜ parameter>' in prompt
    assert f'name="c" string="false">{fits}<' in prompt
    assert 'name="d" string="true">1000000000000000000<' in prompt


DIGITS = st.integers(10**17, 10**22).map(str)


@settings(max_examples=100)
@given(
    numbers=st.lists(st.integers(-(10**40), 10**40) | st.integers(10**17, 10**19), min_size=1, max_size=5),
    words=st.lists(st.one_of(DIGITS, st.sampled_from(["1000000000000000000", "-1000000000000000001"])), max_size=3),
    escaped=st.booleans(),
)
def test_every_integer_and_every_digit_is_kept(numbers, words, escaped):
    def written(word):  # JSON may spell any character with an escape
        return '"' + "".join(f"\\u{ord(c):04x}" if escaped else c for c in word) + '"'

    arguments = f'{{"n": {json.dumps(numbers)}, "w": [{", ".join(map(written, words))}]}}'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": {"n": numbers}}}}
    prompt = render_chat(with_call(arguments), tools=[tool])
    assert f'name="n" string="false">{json.dumps(numbers)}<' in prompt
    assert f'name="w" string="false">{json.dumps(words)}<' in prompt
    assert f'"default": {{"n": {json.dumps(numbers)}}}' in prompt


def test_many_large_integers_take_linear_time():
    numbers = [10**20 + i for i in range(30_000)]
    started = time.process_time()
    prompt = render_chat(with_call(json.dumps({"a": numbers})), tools=[TOOL])
    assert time.process_time() - started < 3  # about 0.1 s; quadratic work takes 20 s
    assert json.dumps(numbers) in prompt


@pytest.mark.parametrize("number", [2**64, -(10**30), 10**60])
def test_an_error_shows_the_integer_that_was_given(number):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": number}}}
    with pytest.raises(ChatError, match=f" {number} is not of type"):
        render_chat([USER], tools=[bad])


def test_long_histories_take_linear_time():
    messages = [USER]
    for i in range(600):
        call, answer = with_call('{"a": "b"}')[1:]
        call["tool_calls"][0]["id"] = answer["tool_call_id"] = str(i)
        messages += [call, answer | {"content": "wörd " * 400}]
    started = time.process_time()
    prompt = render_chat(messages)
    assert time.process_time() - started < 5  # about 0.1 s; quadratic work takes 20 s
    assert prompt.count("wörd") == 600 * 400


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 18446744073709551616, "b": 1e400}', '{"a": 18446744073709551616', "[" * 10**5],
    ids=["overflowing", "unclosed", "deep"],
)
def test_arguments_that_are_not_json_stay_text(arguments):
    expected = f'<｜DSML｜ parameter name="arguments" string="true">{arguments}</｜DSML｜ parameter>'
    assert expected in render_chat(with_call(arguments), tools=[TOOL])


def test_arguments_may_be_an_object_or_encoded_twice():
    prompts = {render_chat(with_call(a), tools=[TOOL]) for a in ({"a": 1}, '{"a": 1}', '"{\\"a\\": 1}"')}
    assert len(prompts) == 1
    assert '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>' in prompts.pop()


def test_part_types_of_the_responses_api():
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "https://img.example/a.png"},
    ]
    assert render_chat([{"role": "user", "content": parts}], thinking=False).endswith(
        "<｜User｜>see\n\n<｜deepseek_image｜><｜Assistant｜></think>"
    )


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("task", ["action", "query", "authority", "domain", "title", "read_url"])
def test_tasks(default_tokenizer, task, thinking):
    messages = [USER, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "more", "task": task}]
    think = "<think>" if thinking else "</think>"
    tail = f"<｜Assistant｜>{think}<｜action｜>" if task == "action" else f"<｜{task}｜>"
    assert render_chat(messages, thinking=thinking).endswith("yo<｜end▁of▁sentence｜><｜User｜>more" + tail)
    ids = encode_chat(default_tokenizer, messages, thinking=thinking)
    assert ids[-1] == default_tokenizer.control_id(f"<｜{task}｜>")
    assert reply_start(default_tokenizer, ids) == "content"


def test_kept_reasoning_of_every_turn():
    turns = [
        {"role": "assistant", "content": "a", "reasoning": "first"},
        USER,
        {"role": "assistant", "content": "b"},
        USER,
        {"role": "assistant", "content": "c", "reasoning": "now", "prefix": True},
    ]
    prompt = render_chat([USER, *turns], drop_thinking=False)
    end = "<｜end▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
    assert prompt.endswith(f"<｜Assistant｜><think>first</think>a{end}<think></think>b{end}<think>now</think>c")
    without = render_chat([USER, *turns], thinking=False, drop_thinking=False)
    assert without.endswith(f"<｜Assistant｜></think>a{end}</think>b{end}</think>c")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}], ids=["any", "named"])
def test_forced_calls(default_tokenizer, choice):
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    calls = encode_chat(default_tokenizer, [USER], thinking=False, tools=tools, tool_choice=choice)
    assert default_tokenizer.decode(calls).endswith("</think>\n\n<｜DSML｜ calls>\n")
    assert reply_start(default_tokenizer, calls) == "tool_calls"
    free = render_chat([USER], tools=tools, tool_choice=choice)
    assert free.endswith("<｜User｜>Hi<｜Assistant｜><think>")
    assert ('"name": "f"' in free) == (choice == "required") and '"name": "g"' in free
    assert [t["function"]["name"] for t in effective_tools(tools, choice)] == ["f", "g"][choice != "required" :]


def test_many_tools_are_checked_in_linear_time():
    many = [{"type": "function", "function": {"name": f"function_{i}"}} for i in range(60_000)]
    started = time.process_time()
    assert effective_tools(many) == many
    assert time.process_time() - started < 3  # about 0.3 s; quadratic work takes 20 s
    with pytest.raises(ChatError, match=r"function_9 and 59990 more$"):
        effective_tools(many, {"type": "function", "function": {"name": "g"}})


def test_no_tools_after_choice_none():
    assert render_chat([USER], tools=[TOOL], tool_choice="none") == render_chat([USER])
    assert effective_tools([TOOL], "none") == effective_tools([], None) == effective_tools(None, "auto") == []


def test_a_tool_result_may_answer_once_only():
    twice = [*with_call("{}"), {"role": "tool", "tool_call_id": "c1", "content": "again"}]
    with pytest.raises(ChatError, match=r"messages\[3\].tool_call_id is 'c1'"):
        render_chat(twice)
    with pytest.raises(ChatError, match=r"messages\[1\].tool_calls\[0\] with id 'c1' has no result"):
        render_chat([*with_call("{}")[:2], USER, with_call("{}")[2]])


def test_a_reminder_of_several_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<｜latest_reminder｜>a\n\nb<｜Assistant｜>" in render_chat(
        [USER, {"role": "latest_reminder", "content": parts}]
    )


def part(**fields):
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, fields]}]


def call(**fields):
    good = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [USER, {"role": "assistant", "tool_calls": [{**good, **fields}]}]


BAD_MESSAGES = [
    ("Hi", "messages", "is a list"),
    (["Hi"], "messages[0]", "is an object"),
    ([{"content": "x"}], "messages[0].role", "are system, developer"),
    ([USER, {"role": "function", "content": "x"}], "messages[1].role", "are system, developer"),
    ([{"role": "user", "content": None}], "messages[0].content", "is a string or a list of parts"),
    ([{"role": "user", "content": b"x"}], "messages[0].content", "is a string or a list of parts"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content", "not valid Unicode"),
    (
        [USER, {"role": "assistant", "reasoning": "r"}],
        "messages[1].content",
        "only on an assistant message with tool_calls",
    ),
    ([USER, {"role": "assistant", "content": "", "reasoning": 1}], "messages[1].reasoning", "is a string"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "is an object"),
    (part(type="file"), "messages[0].content[1].type", "are text"),
    (part(type="text"), "messages[0].content[1].text", "is a string"),
    (part(type="image_url"), "messages[0].content[1].image_url", "is an object"),
    (part(type="image_url", image_url={"url": 5}), "messages[0].content[1].image_url.url", "is a string"),
    (part(type="image_url", image_url={}), "messages[0].content[1].image_url.url", "is a string"),
    (part(type="image_url", image_url={"url": "zzz"}), "messages[0]", "Unsupported image_url"),
    (part(type="input_image", image_url="data:,", detail="x"), "messages[0].content[1].image_url.detail", "are auto"),
    (part(type="input_image", image_url="data:,", detail=""), "messages[0].content[1].image_url.detail", "are auto"),
    ([USER, {"role": "assistant", "content": "", "tool_calls": []}], "messages[1].tool_calls", "at least one call"),
    ([{**USER, "tool_calls": call()[1]["tool_calls"]}], "messages[0].tool_calls", "on assistant messages"),
    (call(id=None), "messages[1].tool_calls[0].id", "is a string"),
    (
        [USER, {"role": "assistant", "tool_calls": call()[1]["tool_calls"] * 2}],
        "messages[1].tool_calls[1].id",
        "is an id that no other call of the message has",
    ),
    (call(type="x"), "messages[1].tool_calls[0]", '"type": "function"'),
    (call(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name", "is a string"),
    (call(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments", "is a JSON text or an object"),
    (call(), "messages[1].tool_calls[0]", "has no result"),
    ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id", "is a string"),
    ([{"role": "user", "content": "x", "task": "dance"}], "messages[0].task", "are action, query"),
    ([{"role": "user", "content": "x", "task": "query"}, USER], "messages[0].task", "on the last message only"),
    ([{"role": "user", "content": "x", "prefix": True}], "messages[0].prefix", "on the last message only"),
    ([USER, {"role": "assistant", "content": "x", "prefix": "yes"}], "messages[1].prefix", "are true and false"),
]


@pytest.mark.parametrize(("messages", "param", "allowed"), BAD_MESSAGES, ids=[case[1] for case in BAD_MESSAGES])
def test_bad_messages_are_named(messages, param, allowed):
    with pytest.raises(ChatError) as error:
        render_chat(messages)
    assert error.value.param == param
    assert allowed in str(error.value) and param in str(error.value)


def tools(**function):
    return {"tools": [TOOL, {"type": "function", "function": {"name": "g", **function}}]}


BAD_OPTIONS = [
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice", "are auto, none, required and"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}, **tools()}, "tool_choice.function.name", "f, g"),
    ({"tools": TOOL}, "tools", "is a list"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is an object"),
    (tools(name="a b"), "tools[1].function.name", "are letters"),
    (tools(name="f"), "tools[1].function.name", "no other tool has"),
    (tools(name="a" * 129), "tools[1].function.name", "at most 128 characters"),
    (tools(description=5), "tools[1].function.description", "is a string"),
    (tools(description=False), "tools[1].function.description", "is a string"),
    (tools(strict="yes"), "tools[1].function.strict", "are true and false"),
    (tools(strict=0), "tools[1].function.strict", "are true and false"),
    (tools(strict=True), "tools[1].function.strict", "all tools are strict or none is"),
    (tools(parameters={"type": "array"}), "tools[1].function.parameters", '"type": "object"'),
    (tools(parameters={"type": "object", "x": float("nan")}), "tools[1].function", "not valid JSON"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "are text, json_object"),
    ({"response_format": "text"}, "response_format.type", "are text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", '"schema"'),
    ({"response_format": {"type": "json_object"}}, "response_format", "word 'json'"),
    ({"thinking": "yes"}, "thinking", "are True and False"),
    ({"drop_thinking": None}, "drop_thinking", "are True and False"),
    ({"effort": 0}, "effort", "integers from 1 to 100"),
    ({"continue_final_message": True}, "continue_final_message", "only an assistant message"),
]


@pytest.mark.parametrize(("bad", "param", "allowed"), BAD_OPTIONS, ids=[repr(case[0])[:40] for case in BAD_OPTIONS])
def test_bad_options_are_named(bad, param, allowed):
    with pytest.raises(ChatError) as error:
        render_chat([USER], **bad)
    assert error.value.param == param
    assert allowed in str(error.value) and param in str(error.value)


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# What DeepSeek's package refuses without saying where it is. Values that look like paths must not be taken for one.
BAD_SCHEMAS = {
    "type": {"type": "object", "properties": {"a": {"type": "nope"}}},
    "no object": {"type": "object", "properties": 5},
    "word": {"type": "object", "properties": {"a": "messages[3].content"}},
    "keys": {"type": "object", "properties": {"tools[7]": 5}},
    "reference": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    "pattern": {"type": "object", "properties": {"a": {"pattern": "("}}},
    "deep": {"type": "object", "properties": {"a": nested(100)}} | {"x": nested(125)},
    "large": {"type": "object", "properties": {"a": "response_format " * 10_000}},
}
STRICT_SCHEMAS = {
    "untyped": {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
    "open": {"type": "object", "properties": {}, "required": [], "additionalProperties": True},
    "properties": {"type": "object", "properties": "tools[9]"},
}


@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "bad"}}], ids=str)
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(
    ("schema", "strict"),
    [*((one, None) for one in BAD_SCHEMAS.values()), *((one, True) for one in STRICT_SCHEMAS.values())],
    ids=[*BAD_SCHEMAS, *STRICT_SCHEMAS],
)
def test_a_schema_that_the_reference_refuses_is_named(schema, strict, place, choice):
    good = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    functions = [{"name": f"good_{i}", "parameters": good} for i in range(2)]
    functions.insert(place, {"name": "bad", "parameters": schema})
    tools = [{"type": "function", "function": function | {"strict": strict}} for function in functions]
    with pytest.raises(ChatError) as error:
        render_chat([USER], tools=tools, tool_choice=choice, response_format={"type": "json_object"}, thinking=False)
    assert error.value.param == f"tools[{place}].function.parameters"
    assert str(error.value).startswith(error.value.param) and len(str(error.value)) < 300


@pytest.mark.parametrize("schema", BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_response_schema_that_the_reference_refuses_is_named(schema):
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(ChatError) as error:
        render_chat([USER], tools=[TOOL], response_format=answer_format)
    assert error.value.param == "response_format.json_schema.schema"
    assert str(error.value).startswith(error.value.param) and len(str(error.value)) < 300


@pytest.mark.parametrize("kind", ["text", "regex", "structural_tag"])
def test_formats_without_text(kind):
    assert render_chat([USER], response_format={"type": kind}) == render_chat([USER])


def test_missing_chat_tokens_are_named():
    content = json.loads(DEFAULT_FILE.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        if token["content"] in ("<｜System｜>", "｜DSML｜"):
            token["content"] += "?"
    with pytest.raises(ValueError, match="'<｜System｜>' is missing; '｜DSML｜' is missing"):
        encode_chat(Tokenizer(json.dumps(content)), [USER])


@pytest.mark.parametrize(
    "prompt", ["", "Hi", "<｜User｜>Hi<｜Assistant｜>", "<｜Assistant｜></think>a<｜end▁of▁sentence｜>"]
)
def test_a_prompt_without_an_open_turn_is_refused(default_tokenizer, prompt):
    with pytest.raises(ValueError, match="does not end in an open assistant turn"):
        reply_start(default_tokenizer, default_tokenizer.encode(prompt, added_vocabulary=True))
