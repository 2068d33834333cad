"""The Messages protocol: prompts, whole messages, streams, counting, and what is refused."""

import asyncio
import json

import deepseek_recipe
import pydantic_core
import pytest
from hypothesis import given, settings
from json_changes import changed
from named_events import call
from server_api import break_after_first_chunk, context, text_ids
from test_server_chat import BODY, EOS, OPEN_CALL, calls_markup
from test_server_chat import TOOLS as CHAT_TOOLS

from dsv4jax.server.chat_completions import chat_completions
from dsv4jax.server.context import AccessRecord
from dsv4jax.server.errors import ApiError
from dsv4jax.server.messages import count_tokens, messages

REQUEST = {"max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}]}
OFF = {"thinking": {"type": "disabled"}}
TOOLS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in CHAT_TOOLS]


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*blocks):
    return {"role": "assistant", "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def text(words):
    return {"type": "text", "text": words}


def thinking(words):
    return {"type": "thinking", "thinking": words, "signature": "s"}


def use(call_id, name="look", **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id, content="done", **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def prompt_of(tokenizer, body):
    server = context(tokenizer, [1])
    call(messages, server, REQUEST | body)
    return tokenizer.token_bytes(server.engine.requests[0].prompt.tolist()).decode()


HISTORIES = {
    "text": {"messages": [user("Hi")]},
    "system": {"system": "Be brief.", "messages": [user("Hi")]},
    "parts": {
        "system": [text("a"), text("b") | {"cache_control": {"type": "ephemeral"}}],
        "messages": [user(text("c"), text("d"))],
    },
    "system in the middle": {"messages": [user("a"), {"role": "system", "content": "b"}, user("c")]},
    "answers": {
        "messages": [user("a"), assistant(thinking("hm"), text("b"), text("c")), user("d"), assistant("e"), user("f")]
    },
    "two answers in a row": {"messages": [user("a"), assistant("b"), assistant("c"), user("d")]},
    "reasoning kept for tools": {
        "tools": TOOLS,
        "messages": [user("a"), assistant(thinking("hm"), text("b")), user("c")],
    },
    "calls": {
        "tools": TOOLS,
        "messages": [
            user("q"),
            assistant(thinking("hm"), text("Looking."), use("1", a="x", b=[1, {"c": None}]), use("2", "find")),
            user(result("2", [text("second"), text("part")]), result("1", is_error=True), text("and?")),
        ],
    },
    "results in two messages": {
        "tools": TOOLS,
        "messages": [user("q"), assistant(use("1")), user(result("1")), assistant(use("2")), user(result("2", ""))],
    },
    "thinking off": OFF,
    "thinking on": {"thinking": {"type": "adaptive"}},
    "effort": {"output_config": {"effort": "max"}},
    "no tools wanted": {"tools": TOOLS, "tool_choice": {"type": "none"}},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_prompt_is_that_of_the_reference(default_tokenizer, name):
    body = REQUEST | HISTORIES[name]
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    options = deepseek_recipe.ConversionOptions().with_model_alias("flash", version)
    reference = deepseek_recipe.MessagesRequest(body | {"model": "flash"}).convert(options)
    rendered = deepseek_recipe.DeepseekV41Encoding().render_conversation(reference.conversation)
    assert prompt_of(default_tokenizer, body) == rendered.prompt


def test_an_answer_that_comes_last_is_continued(default_tokenizer):
    prefilled = {"messages": [user("a"), assistant("The answer is")]}
    assert prompt_of(default_tokenizer, prefilled | OFF).endswith("<｜Assistant｜></think>The answer is")
    server = context(default_tokenizer, text_ids(default_tokenizer, " 42.", EOS))
    assert call(messages, server, REQUEST | prefilled)["content"] == [text(" 42.")]


def test_fields_reach_the_engine(default_tokenizer):
    server = context(default_tokenizer, [1], limit=2000)
    fields = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 11, "ignore_eos": True}
    record = AccessRecord("mine", client_named=True)
    call(messages, server, REQUEST | fields | {"metadata": {"user_id": "u"}, "request_id": "r7", "unknown": 1}, record)
    request = server.engine.requests[0]
    sampling = request.sampling
    assert (request.max_tokens, request.ignore_eos, request.n) == (7, True, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 11)
    assert record.request_id == "mine" and record.prompt_tokens == request.prompt.size and record.output_tokens == 1


def test_the_budget_of_thinking_is_kept(default_tokenizer):
    think_end = default_tokenizer.control_id("</think>")
    server = context(default_tokenizer, [think_end, 1])
    call(messages, server, REQUEST | {"thinking": {"type": "enabled", "budget_tokens": 0}})
    words = server.engine.requests[0].mask().next()
    assert [i for i in range(default_tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1] == [think_end]


SCRIPTS = {
    "thinking and answer": ({}, ["Let me think. 🙂\n", "</think>", "\n\nThe answer is 日本 42 🙂.", EOS], "end_turn"),
    "answer only": (OFF, ["Plain text.\n", EOS], "end_turn"),
    "empty answer": (OFF, [EOS], "end_turn"),
    "length": (OFF | {"max_tokens": 3}, ["A long answer that goes on"], "max_tokens"),
    "length in thinking": ({"max_tokens": 3}, ["A long thought that goes on"], "max_tokens"),
    "stop sequence": (OFF | {"stop_sequences": ["x", "STOP"]}, ["Before ST", "OP after", EOS], "stop_sequence"),
    "one call": (
        {"tools": TOOLS},
        ["Hm.", "</think>", "Looking", *calls_markup(("look", "a", 'x "y"\n🙂')), EOS],
        "tool_use",
    ),
    "two calls": (
        OFF | {"tools": TOOLS},
        [*calls_markup(("look", "a", "1"), ("find", "b", "two words")), EOS],
        "tool_use",
    ),
    "large numbers": (
        OFF | {"tools": TOOLS},
        [part.replace('"true">1', f'"false">[{10**30}, 0.1]') for part in calls_markup(("look", "a", "1"))] + [EOS],
        "tool_use",
    ),
    "first call only": (
        OFF | {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [*calls_markup(("look", "a", "1"), ("find", "b", "2")), EOS],
        "tool_use",
    ),
    "call left open": (OFF | {"tools": TOOLS}, OPEN_CALL, "tool_use"),
    "cut call": (
        OFF | {"tools": TOOLS, "max_tokens": 60},
        calls_markup(("look", "a", "1"), ("find", "b", "long " * 40)),
        "max_tokens",
    ),
    "cut before the arguments": (
        OFF | {"tools": TOOLS, "max_tokens": 20},
        calls_markup(("look", "a", "long " * 40)),
        "max_tokens",
    ),
}


def folded(events):
    """The message that the events amount to; checks their order."""
    first, *middle, delta, stop = events
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    block, given = None, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert block is None and event["index"] == len(message["content"])
            block, given = event["content_block"], ""
            assert not (block.get("text") or block.get("thinking") or block.get("input") or block.get("signature"))
            continue
        assert event["index"] == len(message["content"])
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = pydantic_core.from_json(given, allow_partial=True) if given else {}
            message["content"].append(block)
            block = None
            continue
        change = event["delta"]
        if change["type"] == "input_json_delta":
            given += change["partial_json"]
        else:
            key = change["type"].removesuffix("_delta")
            assert change[key]
            block[key] += change[key]
    assert block is None
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(value):
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_ids(item) for key, item in value.items() if key not in ("id", "signature")}


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1000,)], ids=str)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_message_says(default_tokenizer, name, sizes):
    options, parts, stop_reason = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts)
    whole = call(messages, context(default_tokenizer, ids, sizes=(7,), cached=3), REQUEST | options)
    server = context(default_tokenizer, ids, sizes=sizes, cached=3)
    events = call(messages, server, REQUEST | options | {"stream": True})
    assert without_ids(folded(events)) == without_ids(whole)
    assert whole["stop_reason"] == stop_reason
    assert whole["stop_sequence"] == ("STOP" if stop_reason == "stop_sequence" else None)

    chat_options = {"max_tokens": options.get("max_tokens", 1000)} | {
        k: options[k] for k in ("thinking",) if k in options
    }
    chat_options |= {"stop": options["stop_sequences"]} if "stop_sequences" in options else {}
    chat_options |= {"tools": CHAT_TOOLS} if "tools" in options else {}
    chat_options |= {"parallel_tool_calls": False} if "tool_choice" in options else {}
    chat = call(chat_completions, context(default_tokenizer, ids), BODY | chat_options)
    message, usage = chat["choices"][0]["message"], chat["usage"]
    blocks = {
        kind: [one for one in whole["content"] if one["type"] == kind] for kind in ("thinking", "text", "tool_use")
    }
    assert [one["thinking"] for one in blocks["thinking"]] == [t for t in [message["reasoning_content"]] if t]
    assert [one["text"] for one in blocks["text"]] == [t for t in [message["content"]] if t]
    calls = [one["function"] for one in message.get("tool_calls", [])]
    assert [one["name"] for one in blocks["tool_use"]] == [one["name"] for one in calls]
    if stop_reason == "tool_use":
        assert [one["input"] for one in blocks["tool_use"]] == [json.loads(one["arguments"]) for one in calls]
    assert whole["usage"] == {
        "input_tokens": usage["prompt_tokens"] - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }


def test_thinking_can_be_left_out(default_tokenizer):
    ids = text_ids(default_tokenizer, "Secret", "</think>", "Public", EOS)
    body = REQUEST | {"thinking": {"type": "enabled", "display": "omitted"}}
    whole = call(messages, context(default_tokenizer, ids), body)
    events = call(messages, context(default_tokenizer, ids), body | {"stream": True})
    for message in (whole, folded(events)):
        hidden, shown = message["content"]
        assert hidden["type"] == "thinking" and hidden["thinking"] == "" and hidden["signature"]
        assert shown == text("Public")


def test_the_content_can_be_sent_back(default_tokenizer):
    ids = text_ids(default_tokenizer, "Hm.", "</think>", "Looking", *calls_markup(("look", "a", "1")), EOS)
    server = context(default_tokenizer, ids)
    content = call(messages, server, REQUEST | {"tools": TOOLS})["content"]
    results = [result(block["id"]) for block in content if block["type"] == "tool_use"]
    history = [*REQUEST["messages"], assistant(*content), user(*results)]
    call(messages, server, REQUEST | {"messages": history, "tools": TOOLS})
    first, second = (request.prompt.tolist() for request in server.engine.requests)
    assert second[: len(first) + len(ids)] == first + ids, "the reply is in the prompt as it was generated"


def test_cached_tokens_are_told_apart(default_tokenizer):
    server = context(default_tokenizer, [1])
    server.engine.cached_tokens = 5
    usage = call(messages, server, REQUEST)["usage"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] + 5 == server.engine.requests[0].prompt.size
    assert call(messages, server, REQUEST | {"stream": True})[0]["message"]["usage"]["cache_read_input_tokens"] == 5


def test_drafts_are_part_of_the_usage_if_there_were_any(default_tokenizer):
    server = context(default_tokenizer, [*text_ids(default_tokenizer, "</think>Yes")])
    server.engine.drafted, server.engine.accepted = 7, 4
    whole = call(messages, server, REQUEST)["usage"]
    last = call(messages, server, REQUEST | {"stream": True})[-2]["usage"]
    for details in (whole["output_tokens_details"], last["output_tokens_details"]):
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 3)


@pytest.mark.parametrize("name", ["text", "calls", "system"])
def test_counted_tokens_are_those_of_the_prompt(default_tokenizer, name):
    server = context(default_tokenizer, [1])
    body = {"messages": REQUEST["messages"]} | HISTORIES[name]
    record = AccessRecord("r")
    assert list(call(count_tokens, server, body, record)) == ["input_tokens"] and not server.engine.requests
    call(messages, server, REQUEST | body)
    assert record.prompt_tokens == server.engine.requests[0].prompt.size
    with pytest.raises(ApiError) as caught:
        call(count_tokens, server, {"messages": [{"role": "user"}]})
    assert caught.value.param == "messages[0].content"


# Constraints


def test_constraints_reach_the_engine(default_tokenizer):
    from dsv4jax.engine.grammar import GrammarCompiler

    grammars = GrammarCompiler(default_tokenizer)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for extra in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "find"}},
    ):
        server = context(default_tokenizer, [1], grammars=grammars)
        call(messages, server, REQUEST | OFF | extra)
        assert server.engine.requests[0].mask is not None
    prompt = default_tokenizer.token_bytes(server.engine.requests[0].prompt.tolist()).decode()
    assert prompt.endswith("<｜DSML｜ calls>\n") and '"name": "look"' not in prompt


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = {
    "no messages": ({"messages": None}, "messages", "missing_field"),
    "empty messages": ({"messages": []}, "messages", "invalid_value"),
    "message that is no object": ({"messages": ["x"]}, "messages[0]", "invalid_value"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "content": ({"system": "s", "messages": [user("a"), {"role": "user"}]}, "messages[1].content", "invalid_value"),
    "image": ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1].type", "unsupported"),
    "image in a result": (
        {"messages": [user("a"), assistant(use("1")), user(result("1", [IMAGE]))]},
        "messages[2].content[0].content[0].type",
        "unsupported",
    ),
    "text of a block": ({"messages": [user(text(5))]}, "messages[0].content[0].text", "invalid_value"),
    "hidden thinking": (
        {"messages": [user("a"), assistant({"type": "redacted_thinking", "data": "x"}), user("b")]},
        "messages[1].content[0].type",
        "unsupported",
    ),
    "call without result": (
        {"system": "s", "messages": [user("a"), assistant(text("b"), use("1")), user("c")]},
        "messages[1].content[1]",
        "invalid_value",
    ),
    "two calls of one id": (
        {"messages": [user("a"), assistant(use("1"), use("1")), user(result("1"))]},
        "messages[1].content[1].id",
        "invalid_value",
    ),
    "result of no call": (
        {"system": "s", "messages": [user(text("x"), result("9"))]},
        "messages[0].content[1].tool_use_id",
        "invalid_value",
    ),
    "input of a call": (
        {"messages": [user("a"), assistant(use("1") | {"input": "x"}), user(result("1"))]},
        "messages[1].content[0].input",
        "invalid_value",
    ),
    "continuation with tools": (
        {"tools": TOOLS, "system": "s", "messages": [user("a"), assistant("b")]},
        "messages[1]",
        "invalid_value",
    ),
    "system": ({"system": 5}, "system", "invalid_value"),
    "server tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported"),
    "tool without schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "invalid_value"),
    "schema of a tool": (
        {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
        "tools[0].input_schema",
        "invalid_value",
    ),
    "tool name": ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name", "invalid_value"),
    "kind of choice": ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type", "invalid_value"),
    "choice of an unknown tool": (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice.name",
        "invalid_value",
    ),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
    "forced call without backend": (
        OFF | {"tools": TOOLS, "tool_choice": {"type": "any"}},
        "tool_choice",
        "unsupported",
    ),
    "serial": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
        "invalid_value",
    ),
    "thinking": ({"thinking": {"type": "some"}}, "thinking.type", "invalid_value"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "invalid_value"),
    "display": ({"thinking": {"type": "enabled", "display": "some"}}, "thinking.display", "invalid_value"),
    "effort": ({"output_config": {"effort": "huge"}}, "output_config.effort", "invalid_value"),
    "format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "unsupported"),
    "schema without backend": (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format.schema",
        "unsupported",
    ),
    "stop sequences": ({"stop_sequences": "x"}, "stop_sequences", "invalid_value"),
    "empty stop sequence": ({"stop_sequences": ["a", ""]}, "stop_sequences[1]", "invalid_value"),
    "token limit": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "temperature": ({"temperature": "hot"}, "temperature", "invalid_value"),
    "container": ({"container": "c"}, "container", "unsupported"),
    "too long": ({"max_tokens": 5000}, "messages", "context_length_exceeded"),
    "model": ({"model": "claude"}, "model", "model_not_found"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_refused_before_the_first_byte(default_tokenizer, name, stream):
    change, param, code = REFUSED[name]
    server = context(default_tokenizer, [1])
    with pytest.raises(ApiError) as caught:
        call(messages, server, REQUEST | change | {"stream": stream})
    error = caught.value
    assert (error.param, error.code) == (param, code)
    assert error.status == (404 if code == "model_not_found" else 400) and not server.engine.requests
    if code == "invalid_value":
        assert param in error.message


EVERYTHING = {
    "model": "flash",
    "max_tokens": 3,
    "system": [text("a")],
    "messages": [
        user("q"),
        assistant(thinking("hm"), text("Looking."), use("1", a="x")),
        user(result("1", [text("r")]), text("and?")),
    ],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [TOOLS[0] | {"type": "custom", "description": "d"}],
}


@given(changed(EVERYTHING))
@settings(max_examples=300)
def test_whatever_is_wrong_is_answered(default_tokenizer, body):
    try:
        call(messages, context(default_tokenizer, [1]), body)
    except ApiError as error:
        assert error.status in (400, 404)


# Failures


def test_a_failure_in_a_stream_ends_it_with_an_error(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    server.engine.ending = ("error", "the grammar allows no token")
    last = call(messages, server, REQUEST | {"stream": True})[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert last["error"]["message"] == "the grammar allows no token" and server.engine.open == 0


def test_a_fault_of_the_server_in_a_stream_shows_nothing_of_it(default_tokenizer, caplog):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    break_after_first_chunk(server.engine, "/secret/path")
    *_, event = call(messages, server, REQUEST | {"stream": True})
    assert event["error"]["message"] == "internal error" and "/secret/path" in caplog.text


def test_a_slow_stream_is_kept_open_by_comments(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "ab", EOS), ping_seconds=0.05)
    server.engine.pause = 0.3

    async def read():
        body = json.dumps(REQUEST | OFF | {"stream": True}).encode()
        return [event async for event in await messages(server, body, AccessRecord("r"))]

    events = asyncio.run(read())
    assert events[0] == b": ping\n\n" and events.count(b": ping\n\n") >= 4


def test_closing_a_stream_aborts_the_request(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))
    server.engine.pause = 0.001

    async def leave():
        events = await messages(server, json.dumps(REQUEST | {"stream": True}).encode(), AccessRecord("r"))
        for _ in range(5):
            await anext(events)
        assert server.engine.open == 1
        await events.aclose()

    asyncio.run(leave())
    assert server.engine.open == 0 and server.engine.given < 100
