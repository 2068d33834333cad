"""The Responses protocol: prompts, whole responses, streams, and what is refused."""

import asyncio
import json

import deepseek_recipe
import pytest
from hypothesis import given, settings
from json_changes import changed
from named_events import call
from server_api import best, context, logprob, text_ids
from test_server_chat import BODY, EOS, OPEN_CALL, calls_markup
from test_server_chat import TOOLS as CHAT_TOOLS

from dsv4jax.server.chat_completions import chat_completions
from dsv4jax.server.context import AccessRecord
from dsv4jax.server.errors import ApiError
from dsv4jax.server.responses import responses

REQUEST = {"input": "Hi"}
OFF = {"reasoning": {"effort": "none"}}
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]


def user(text):
    return {"role": "user", "content": text}


def reasoning(text):
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(*texts):
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts}


def called(call_id, name="look", arguments='{"a": 1}'):
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id, output="done"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def prompt_of(tokenizer, body, route=responses):
    server = context(tokenizer, [1])
    call(route, server, body)
    return tokenizer.token_bytes(server.engine.requests[0].prompt.tolist()).decode()


HISTORIES = {
    "text": {"input": "Hi"},
    "instructions": {"input": "Hi", "instructions": "Be brief."},
    "roles and parts": {
        "instructions": "One.",
        "input": [
            {
                "role": "developer",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"role": "system", "content": "later"},
        ],
    },
    "answers": {"input": [user("q"), reasoning("hm"), said("A", "B"), user("r"), said("C"), said("D"), user("s")]},
    "reasoning kept for tools": {"tools": TOOLS, "input": [user("q"), reasoning("hm"), said("A"), user("r")]},
    "two turns of reasoning": {
        "tools": TOOLS,
        "input": [user("q"), reasoning("one"), said("A"), reasoning("two"), said("B"), user("r")],
    },
    "summaries do not count": {
        "tools": TOOLS,
        "input": [
            user("q"),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "x"},
            said("A"),
            user("r"),
        ],
    },
    "results in the order of the calls": {
        "tools": TOOLS,
        "input": [
            *(user("q"), reasoning("hm"), said("Looking."), called("1"), called("2", "find", "{}")),
            *(result("2", "second"), result("1", [{"type": "input_text", "text": "first"}]), user("and?")),
        ],
    },
    "thinking off": {"input": [user("q")], **OFF},
    "effort": {"input": [user("q")], "reasoning": {"effort": "max"}},
    "no tools wanted": {"input": "q", "tools": TOOLS, "tool_choice": "none"},
    "schema": {"input": "q", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_prompt_is_that_of_the_reference(default_tokenizer, name):
    body = HISTORIES[name]
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    options = deepseek_recipe.ConversionOptions().with_model_alias("flash", version)
    reference = deepseek_recipe.ResponsesRequest(body | {"model": "flash"}).convert(options)
    rendered = deepseek_recipe.DeepseekV41Encoding().render_conversation(reference.conversation)
    if "text" in body:  # schemas need a backend
        from dsv4jax.engine.grammar import GrammarCompiler

        server = context(default_tokenizer, [1], grammars=GrammarCompiler(default_tokenizer))
    else:
        server = context(default_tokenizer, [1])
    call(responses, server, body)
    assert default_tokenizer.token_bytes(server.engine.requests[0].prompt.tolist()).decode() == rendered.prompt


def test_tools_that_are_not_allowed_are_not_listed(default_tokenizer):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]}
    both = REQUEST | {"tools": TOOLS}
    only = prompt_of(default_tokenizer, REQUEST | {"tools": TOOLS[1:]})
    assert prompt_of(default_tokenizer, both | {"tool_choice": choice}) == only != prompt_of(default_tokenizer, both)


def test_fields_reach_the_engine(default_tokenizer):
    server = context(default_tokenizer, [1], limit=2000)
    fields = {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 11, "ignore_eos": True}
    record = AccessRecord("mine")
    call(responses, server, REQUEST | fields | {"stop_token_ids": [9], "request_id": "r7", "unknown": 1}, record)
    request = server.engine.requests[0]
    sampling = request.sampling
    assert (request.max_tokens, request.ignore_eos, request.stop_token_ids, request.n) == (7, True, (9,), 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 11)
    assert record.request_id == "r7" and record.prompt_tokens == request.prompt.size and record.output_tokens == 1
    call(responses, server, REQUEST)
    assert server.engine.requests[1].max_tokens == 2000 - request.prompt.size


SCRIPTS = {
    "reasoning and answer": ({}, ["Let me think. 🙂\n", "</think>", "\n\nThe answer is 日本 42 🙂.", EOS]),
    "answer only": (OFF, ["Plain text.\n", EOS]),
    "empty answer": (OFF, [EOS]),
    "only thoughts": ({}, ["Only thoughts", EOS]),
    "length": (OFF | {"max_output_tokens": 3}, ["A long answer that goes on"]),
    "length in reasoning": ({"max_output_tokens": 3}, ["A long thought that goes on"]),
    "stop string": (OFF | {"stop": ["STOP"]}, ["Before ST", "OP after", EOS]),
    "one call": ({"tools": TOOLS}, ["Hm.", "</think>", "Looking", *calls_markup(("look", "a", 'x "y"\n🙂')), EOS]),
    "two calls": (OFF | {"tools": TOOLS}, [*calls_markup(("look", "a", "1"), ("find", "b", "two words")), EOS]),
    "first call only": (
        OFF | {"tools": TOOLS, "parallel_tool_calls": False},
        [*calls_markup(("look", "a", "1"), ("find", "b", "2")), EOS],
    ),
    "call left open": (OFF | {"tools": TOOLS}, OPEN_CALL),
    "cut call": (OFF | {"tools": TOOLS, "max_output_tokens": 30}, calls_markup(("look", "a", "long " * 20))),
}


def without_ids(value):
    """Without what differs between two runs."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    varying = ("id", "item_id", "call_id", "created_at", "completed_at")
    return {key: without_ids(item) for key, item in value.items() if key not in varying}


def folded(events):
    """The output that the events amount to; checks their order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    items, open_item, text = [], None, None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None and event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress" and not event["item"].get("content")
            open_item, text = event["item"], ""
            continue
        assert event["output_index"] == len(items) and event.get("item_id", open_item["id"]) == open_item["id"]
        if kind == "content_part.added":
            assert event["part"]["text"] == ""
        elif kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind.endswith("text.done"):
            assert event["text"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        else:
            assert kind == "output_item.done" and event["item"]["id"] == open_item["id"]
            items.append(event["item"])
            open_item = None
    assert open_item is None
    return items


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1000,)], ids=str)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_response_says(default_tokenizer, name, sizes):
    options, parts = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts)
    body = REQUEST | options | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = call(responses, context(default_tokenizer, ids, sizes=(7,), cached=3), body)
    events = call(responses, context(default_tokenizer, ids, sizes=sizes, cached=3), body | {"stream": True})
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert folded(events) == events[-1]["response"]["output"]
    assert events[-1]["type"] == f"response.{whole['status']}" and events[0]["response"]["usage"] is None

    chat_options = {"thinking": {"type": "disabled"}} if "reasoning" in options else {}
    chat_options |= {"max_tokens": options["max_output_tokens"]} if "max_output_tokens" in options else {}
    chat_options |= {key: options[key] for key in ("stop", "parallel_tool_calls") if key in options}
    chat_options |= {"tools": CHAT_TOOLS} if "tools" in options else {}
    chat = call(chat_completions, context(default_tokenizer, ids), BODY | chat_options)
    message, usage = chat["choices"][0]["message"], chat["usage"]
    texts = {"reasoning": "", "message": ""}
    for item in whole["output"]:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    assert (texts["reasoning"], texts["message"]) == (message["reasoning_content"] or "", message["content"] or "")
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    functions = [one["function"] for one in message.get("tool_calls", [])]
    assert calls == [(function["name"], function["arguments"]) for function in functions]
    assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert whole["usage"]["output_tokens"] == usage["completion_tokens"]
    assert whole["usage"]["total_tokens"] == usage["total_tokens"]
    reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning_tokens


def test_what_the_token_limit_cuts_is_incomplete(default_tokenizer):
    options, parts = SCRIPTS["length"]
    response = call(responses, context(default_tokenizer, text_ids(default_tokenizer, *parts)), REQUEST | options)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][-1]["status"] == "incomplete" and response["completed_at"] is None


def test_the_output_can_be_the_next_input(default_tokenizer):
    ids = text_ids(default_tokenizer, "Hm.", "</think>", "Looking", *calls_markup(("look", "a", "1")), EOS)
    server = context(default_tokenizer, ids)
    output = call(responses, server, REQUEST | {"tools": TOOLS})["output"]
    results = [result(item["call_id"]) for item in output if item["type"] == "function_call"]
    call(responses, server, {"input": [user("Hi"), *output, *results], "tools": TOOLS})
    first, second = (request.prompt.tolist() for request in server.engine.requests)
    assert second[: len(first) + len(ids)] == first + ids, "the reply is in the prompt as it was generated"


def test_settings_are_repeated(default_tokenizer):
    given = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "tool_choice": "none",
        "tools": TOOLS,
        "top_p": 0.5,
        "user": "u",
    }
    response = call(
        responses, context(default_tokenizer, [1]), REQUEST | given | {"store": True, "reasoning": {"effort": "low"}}
    )
    assert {key: response[key] for key in given} == given
    assert response["model"] == "flash" and response["object"] == "response" and response["id"].startswith("resp_")
    assert (response["store"], response["reasoning"]["effort"], response["error"]) == (False, "low", None)


def test_logprobs_are_those_of_the_answer(default_tokenizer):
    ids = text_ids(default_tokenizer, "Hm", "</think>", "Yes", EOS)
    answer = text_ids(default_tokenizer, "</think>", "Yes")  # as in a chat completion, the mark belongs to the answer
    body = REQUEST | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    output = call(responses, context(default_tokenizer, ids), body)["output"]
    entries = output[1]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in entries] == [logprob(token_id) for token_id in answer]
    expected = [[p for _, p in best(token_id, 2)] for token_id in answer]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries] == expected
    output = call(responses, context(default_tokenizer, ids), REQUEST)["output"]
    assert output[1]["content"][0]["logprobs"] == []


def test_drafts_are_part_of_the_usage_if_there_were_any(default_tokenizer):
    server = context(default_tokenizer, [*text_ids(default_tokenizer, "</think>Yes")])
    server.engine.drafted, server.engine.accepted = 7, 4
    details = call(responses, server, REQUEST)["usage"]["output_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 3)


# Constraints


@pytest.fixture(scope="module")
def grammars(default_tokenizer):
    from dsv4jax.engine.grammar import GrammarCompiler

    return GrammarCompiler(default_tokenizer)


def test_constraints_reach_the_engine(default_tokenizer, grammars):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for extra in (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "find"}},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "find"}]}},
    ):
        server = context(default_tokenizer, [1], grammars=grammars)
        call(responses, server, REQUEST | OFF | extra)
        assert server.engine.requests[0].mask is not None
    prompt = default_tokenizer.token_bytes(server.engine.requests[0].prompt.tolist()).decode()
    assert prompt.endswith("<｜DSML｜ calls>\n") and '"name": "look"' not in prompt


REFUSED = {
    "no input": ({"input": None}, "input", "missing_field"),
    "empty input": ({"input": []}, "input", "invalid_value"),
    "input of numbers": ({"input": 5}, "input", "invalid_value"),
    "item that is no object": ({"input": [user("q"), "x"]}, "input[1]", "invalid_value"),
    "role": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    "content": ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input[0].content[0].type",
        "unsupported",
    ),
    "part without text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "invalid_value",
    ),
    "stored item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported"),
    "call without name": ({"input": [called("1", name=None)]}, "input[0].name", "invalid_value"),
    "call without result": (
        {"input": [user("q"), reasoning("hm"), called("1"), called("2"), result("1")]},
        "input[3]",
        "invalid_value",
    ),
    "two calls of one id": ({"input": [called("1"), called("1"), result("1")]}, "input[1].call_id", "invalid_value"),
    "result of no call": ({"input": [user("q"), result("9")]}, "input[1].call_id", "invalid_value"),
    "earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported"),
    "conversation": ({"conversation": "c"}, "conversation", "unsupported"),
    "prompt template": ({"prompt": {"id": "p"}}, "prompt", "unsupported"),
    "background": ({"background": True}, "background", "unsupported"),
    "truncation": ({"truncation": "auto"}, "truncation", "unsupported"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]", "unsupported"),
    "built-in tool": ({"tools": [TOOLS[0], {"type": "web_search"}]}, "tools[1].type", "unsupported"),
    "tool name": (
        {"tools": [{"type": "function", "name": "a b", "parameters": None}]},
        "tools[0].name",
        "invalid_value",
    ),
    "choice of a built-in tool": (
        {"tools": TOOLS, "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
        "unsupported",
    ),
    "choice of an unknown tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        "invalid_value",
    ),
    "unknown allowed tool": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    "mode of allowed tools": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [{"name": "look"}]}},
        "tool_choice.mode",
        "invalid_value",
    ),
    "forced call without backend": (OFF | {"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "unsupported"),
    "schema without backend": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        "text.format.schema",
        "unsupported",
    ),
    "format without schema": (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format",
        "invalid_value",
    ),
    "kind of format": ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
    "JSON mode without the word": ({"text": {"format": {"type": "json_object"}}}, "text.format", "invalid_value"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    "token limit": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "temperature": ({"temperature": True}, "temperature", "invalid_value"),
    "instructions": ({"instructions": ["x"]}, "instructions", "invalid_value"),
    "too long": ({"max_output_tokens": 5000}, "input", "context_length_exceeded"),
    "model": ({"model": "gpt"}, "model", "model_not_found"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_refused_before_the_first_byte(default_tokenizer, name, stream):
    change, param, code = REFUSED[name]
    server = context(default_tokenizer, [1])
    with pytest.raises(ApiError) as caught:
        call(responses, server, REQUEST | change | {"stream": stream})
    error = caught.value
    assert (error.param, error.code) == (param, code)
    assert error.status == (404 if code == "model_not_found" else 400) and not server.engine.requests
    if code == "invalid_value":
        assert param in error.message


EVERYTHING = {
    "model": "flash",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "q"},
        *(reasoning("hm"), said("Looking."), called("1"), result("1", [{"type": "input_text", "text": "r"}])),
    ],
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 3,
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "store": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "tools": TOOLS,
    "top_logprobs": 2,
    "truncation": "disabled",
}


@given(changed(EVERYTHING))
@settings(max_examples=300)
def test_whatever_is_wrong_is_answered(default_tokenizer, body):
    try:
        call(responses, context(default_tokenizer, [1]), body)
    except ApiError as error:
        assert error.status in (400, 404)


def test_all_wrong_fields_are_told_by_their_names(default_tokenizer):
    with pytest.raises(ApiError) as caught:
        call(responses, context(default_tokenizer), REQUEST | {"temperature": 3, "max_output_tokens": "x"})
    assert "temperature is 3" in caught.value.message and "max_output_tokens is" in caught.value.message


# Failures


def test_a_failure_in_a_stream_ends_it_with_an_error(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    server.engine.ending = ("error", "the grammar allows no token")
    last = call(responses, server, REQUEST | {"stream": True})[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", "internal_error", "the grammar allows no token")
    assert last["error"]["code"] == "internal_error" and server.engine.open == 0


def test_closing_a_stream_aborts_the_request(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))
    server.engine.pause = 0.001

    async def leave():
        events = await responses(server, json.dumps(REQUEST | {"stream": True}).encode(), AccessRecord("r"))
        for _ in range(5):
            await anext(events)
        assert server.engine.open == 1
        await events.aclose()

    asyncio.run(leave())
    assert server.engine.open == 0 and server.engine.given < 100
