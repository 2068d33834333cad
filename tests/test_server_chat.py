"""Chat completions: whole responses, streams, and that both say the same."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from server_api import best, break_after_first_chunk, call, context, logprob, reply, text_ids

from dsv4jax.server.chat_completions import chat_completions, render_chat_completion
from dsv4jax.server.completions import completions
from dsv4jax.server.context import AccessRecord
from dsv4jax.server.errors import ApiError

DATA = Path(__file__).parent / "data/chat"
REPLY_CASES = [  # those of plain chat requests; the tests of the parser have all
    case
    for case in json.loads((DATA / "parse.json").read_text(encoding="utf-8"))
    if case["class"] == "wellformed" and case["start"] in ("reasoning", "content") and not case["id"].startswith("json")
]
RENDER_CASES = json.loads((DATA / "render.json").read_text(encoding="utf-8"))

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}}
    for name in ("look", "find")
]
BODY = {"messages": MESSAGES}
OFF = {"thinking": {"type": "disabled"}}
EOS = "<｜end▁of▁sentence｜>"
DSML = "｜DSML｜"


def calls_markup(*calls: tuple[str, str, str]) -> list[str]:
    """The parts of a block of calls, each with one string argument."""
    parts = ["\n\n<", DSML, " calls>\n"]
    for name, key, value in calls:
        parts += ["<", DSML, f' invoke name="{name}">\n', "<", DSML, f' parameter name="{key}" string="true">{value}</']
        parts += [DSML, " parameter>\n</", DSML, " invoke>\n"]
    return [*parts, "</", DSML, " calls>"]


def joined(events: list[dict]) -> dict:
    """The response that a stream amounts to."""
    choices, usage = {}, None
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert {event[key] for key in ("id", "created", "model")} == {events[0][k] for k in ("id", "created", "model")}
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"message": {"tool_calls": []}, "finish_reason": None})
            assert choice["finish_reason"] is None, "a chunk after the last one"
            message, delta = choice["message"], part["delta"]
            assert ("role" in delta) == ("role" not in message), "the role comes first and once"
            assert len({"content", "reasoning", "tool_calls"} & set(delta)) <= 1, "a delta mixes fields"
            assert "role" in delta or not delta or any(delta.values()), "an empty delta"
            message["role"] = message.get("role") or delta["role"]
            for key in ("content", "reasoning", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"]) and piece["function"]["arguments"] == ""
                    message["tool_calls"].append({k: v for k, v in piece.items() if k != "index"})
                else:
                    message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            for key in ("content", "reasoning_content") if part["logprobs"] else ():
                logprobs = choice.setdefault("logprobs", {"content": [], "reasoning_content": []})
                logprobs[key] += part["logprobs"][key]
            choice["token_ids"] = choice.get("token_ids", []) + part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
            assert part["finish_reason"] is None or delta == {}, "the last chunk has no text"
    return {"choices": choices, "usage": usage}


def plain(choice: dict) -> dict:
    """A choice with absent, null and empty alike, and without the random ids of calls."""
    message = {k: v for k, v in choice["message"].items() if v}
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "message": message,
        "logprobs": choice.get("logprobs"),
        "token_ids": choice.get("token_ids", []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


OPEN_CALL = [*calls_markup(("look", "a", "Ulm"))[:9], EOS]
JSON_MODE = OFF | {"response_format": {"type": "json_object"}, "messages": [{"role": "user", "content": "json"}]}
SCRIPTS = {
    "reasoning and answer": ({}, ["Let me think. 🙂\n", "</think>", "\n\nThe answer is 日本 42 🙂.", EOS]),
    "answer only": (OFF, ["Plain text.\n", EOS]),
    "empty answer": (OFF, [EOS]),
    "no end of reasoning": ({}, ["Only thoughts", EOS]),
    "length": ({"max_tokens": 5}, ["Let me think for a long time", "</think>", "Never said"]),
    "length inside a character": (OFF | {"max_tokens": 2}, ["🙂🙂🙂"]),
    "stop string": (OFF | {"stop": ["STOP"]}, ["Before ST", "OP after it goes on", EOS]),
    "stop string across tokens": (OFF | {"stop": ["x", "delta echo"]}, ["alpha delt", "a ech", "o rest", EOS]),
    "stop string included": (OFF | {"stop": "STOP", "include_stop_str_in_output": True}, ["A STOP b", EOS]),
    "stop string almost": (OFF | {"stop": ["ABCD"]}, ["x ABC", EOS]),
    "stop string in reasoning": ({"stop": ["think"]}, ["I think so", "</think>", "Do not think", EOS]),
    "stop id": (OFF | {"stop_token_ids": [70]}, ["Text"]),
    "stop id included": (OFF | {"stop_token_ids": [70], "include_stop_str_in_output": True}, ["Text"]),
    "one call": ({"tools": TOOLS}, ["Hm.", "</think>", "Looking", *calls_markup(("look", "a", 'x "y"\n🙂')), EOS]),
    "two calls": (
        {"tools": TOOLS} | OFF,
        [*calls_markup(("look", "a", "1"), ("find", "b", "two words")), EOS],
    ),
    "calls out of reasoning": ({"tools": TOOLS}, ["Hm.", *calls_markup(("find", "b", "q")), EOS]),
    "first call only": (
        {"tools": TOOLS, "parallel_tool_calls": False} | OFF,
        [*calls_markup(("look", "a", "1"), ("find", "b", "2")), EOS],
    ),
    "cut call": ({"tools": TOOLS, "max_tokens": 30} | OFF, calls_markup(("look", "a", "long " * 20))),
    "call left open": ({"tools": TOOLS} | OFF, OPEN_CALL),
    "call left open at a stop id": ({"tools": TOOLS, "stop_token_ids": [70]} | OFF, OPEN_CALL[:-1]),
    "talk of tools": ({"tools": TOOLS} | OFF, ["Use <", "invoke> or a <", EOS]),
    "ignored end": ({"ignore_eos": True, "max_tokens": 9} | OFF, ["Go", EOS, "on", EOS, "and on and on"]),
    "hidden reasoning": ({"include_reasoning": False}, ["Secret", "</think>", "Public", EOS]),
    "inline reasoning": ({"separate_reasoning": False}, ["Thought", "</think>", "Answer", EOS]),
    "inline reasoning and call": (
        {"separate_reasoning": False, "tools": TOOLS},
        ["Thought", "</think>", *calls_markup(("look", "a", "1")), EOS],
    ),
    "JSON without grammar": (JSON_MODE, ["Here it is:\n```json\n", '{"a": 1}', "\n```", EOS]),
    "JSON without grammar, cut": (JSON_MODE | {"max_tokens": 20}, ['{"a": [1], "b": [2], "c":', " 3" * 50]),
    "JSON without grammar, broken": (JSON_MODE, ['{"a": [1], "b": oops}', EOS]),
    "JSON without grammar, stop string": (JSON_MODE | {"stop": ["END"]}, ['So: {"a": [1]} EN', "D", EOS]),
    "stop string too early": (OFF | {"stop": ["\n"], "min_tokens": 9}, ["One\ntwo and more\nthree", EOS]),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1000,)], ids=str)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_response_says(default_tokenizer, name, sizes):
    options, parts = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts)
    ids += [70, 71] if "stop id" in name else []
    body = BODY | options | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = call(chat_completions, context(default_tokenizer, ids, sizes=(7,), cached=3), body)
    server = context(default_tokenizer, ids, sizes=sizes, cached=3)
    events = call(chat_completions, server, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and not any(event.get("usage") for event in events[:-1])
    stream = joined(events)
    assert plain(stream["choices"][0]) == plain(whole["choices"][0])
    assert stream["usage"] == whole["usage"]
    # What was counted is what came back.
    choice, usage = whole["choices"][0], whole["usage"]
    assert usage["completion_tokens"] == len(choice["token_ids"]) <= len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert choice["token_ids"] == ids[: usage["completion_tokens"]]
    shown = choice["logprobs"]["reasoning_content"] + choice["logprobs"]["content"]
    if "hidden" not in name:
        assert [entry["logprob"] for entry in shown] == [logprob(i) for i in choice["token_ids"]]
    if sizes == (1,) and isinstance(choice["stop_reason"], str):  # the engine goes on for nobody
        assert server.engine.stopped == [(server.engine.requests[0].request_id, 0)]


def test_the_parts_of_a_whole_response(default_tokenizer):
    ids = text_ids(default_tokenizer, "Because.", "</think>", "Yes", EOS)
    server, record = context(default_tokenizer, ids), AccessRecord("req")
    server.engine.cached_tokens = 4
    response = call(chat_completions, server, BODY, record)
    assert response["id"].startswith("chatcmpl-") and response["object"] == "chat.completion"
    assert (response["model"], response["system_fingerprint"]) == ("flash", "fp")
    (choice,) = response["choices"]
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Because.", "reasoning": "Because."}
    assert choice == {
        "index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None
    }  # fmt: skip
    prompt = server.engine.requests[0].prompt.size
    reasoning = len(ids) - 2 - len(text_ids(default_tokenizer, "Yes"))
    assert response["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "total_tokens": prompt + len(ids),
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "prompt_cache_hit_tokens": 4,
        "prompt_cache_miss_tokens": prompt - 4,
    }
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (prompt, 4, len(ids))
    assert 0 <= record.first_token < 60


def test_drafts_are_part_of_the_usage_if_there_were_any(default_tokenizer):
    server = context(default_tokenizer, [*text_ids(default_tokenizer, "</think>Yes")])
    server.engine.drafted, server.engine.accepted = 7, 4
    details = call(chat_completions, server, BODY | {"n": 2, "temperature": 1})["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (8, 6)


@pytest.mark.parametrize(
    ("name", "content", "reasoning", "finish"),
    [
        ("reasoning and answer", "The answer is 日本 42 🙂.", "Let me think. 🙂", ("stop", None)),
        ("empty answer", "", None, ("stop", None)),
        ("no end of reasoning", "", "Only thoughts", ("stop", None)),
        ("stop string", "Before ", None, ("stop", "STOP")),
        ("stop string across tokens", "alpha ", None, ("stop", "delta echo")),
        ("stop string included", "A STOP", None, ("stop", "STOP")),
        ("stop string almost", "x ABC", None, ("stop", None)),
        ("stop string in reasoning", "Do not ", "I think so", ("stop", "think")),
        ("stop id", "Text", None, ("stop", 70)),
        ("calls out of reasoning", None, "Hm.", ("tool_calls", None)),
        ("talk of tools", "Use <invoke> or a <", None, ("stop", None)),
        ("ignored end", "Goonand on a", None, ("length", None)),
        ("hidden reasoning", "Public", None, ("stop", None)),
        ("inline reasoning", "Thought</think>Answer", None, ("stop", None)),
        ("inline reasoning and call", "Thought</think>", None, ("tool_calls", None)),
        ("JSON without grammar", '{"a": 1}', None, ("stop", None)),
        ("JSON without grammar, broken", '{"a": [1], "b": oops}', None, ("stop", None)),
        ("JSON without grammar, stop string", '{"a": [1]}', None, ("stop", "END")),
        ("stop string too early", "One\ntwo and more", None, ("stop", "\n")),
        ("call left open", None, None, ("tool_calls", None)),
        ("call left open at a stop id", None, None, ("tool_calls", 70)),
    ],
)
def test_what_the_message_says(default_tokenizer, name, content, reasoning, finish):
    options, parts = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts) + ([70] if "stop id" in name else [])
    choice = call(chat_completions, context(default_tokenizer, ids), BODY | options)["choices"][0]
    if name != "ignored end":
        assert choice["message"]["content"] == content
    else:
        assert choice["message"]["content"].startswith("Goon") and EOS not in choice["message"]["content"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == reasoning
    assert (choice["finish_reason"], choice["stop_reason"]) == finish


def test_calls_of_a_message(default_tokenizer):
    options, parts = SCRIPTS["two calls"]
    server = context(default_tokenizer, text_ids(default_tokenizer, *parts))
    message = call(chat_completions, server, BODY | options)["choices"][0]["message"]
    assert message["content"] is None
    assert [c["type"] for c in message["tool_calls"]] == ["function", "function"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["look", "find"]
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"a": "1"}, {"b": "two words"}]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    options, parts = SCRIPTS["first call only"]
    server = context(default_tokenizer, text_ids(default_tokenizer, *parts))
    choice = call(chat_completions, server, BODY | options)["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["look"]
    assert choice["finish_reason"] == "tool_calls" and len(server.engine.stopped) == 1


@pytest.mark.parametrize("name", ["call left open", "call left open at a stop id"])
def test_the_arguments_of_a_call_left_open_are_json(default_tokenizer, name):
    options, parts = SCRIPTS[name]
    server = context(default_tokenizer, text_ids(default_tokenizer, *parts) + [70] * ("stop id" in name))
    (made,) = call(chat_completions, server, BODY | options)["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": "Ulm</"}


def test_json_that_the_token_limit_cuts_is_given_as_it_is(default_tokenizer):
    options, parts = SCRIPTS["JSON without grammar, cut"]
    ids = text_ids(default_tokenizer, *parts)
    choice = call(chat_completions, context(default_tokenizer, ids), BODY | options)["choices"][0]
    assert choice["message"]["content"] == default_tokenizer.decode(ids[:20])
    assert choice["finish_reason"] == "length" and "[2]" in choice["message"]["content"]


@pytest.mark.parametrize("wanted", range(14))
def test_tokens_of_the_reasoning_count_for_stop_strings(default_tokenizer, wanted):
    thought = [*text_ids(default_tokenizer, "Hm"), default_tokenizer.control_id("</think>")]
    answer = text_ids(default_tokenizer, "a", "\n", "b", "\n", "c", "\n", EOS)
    body = BODY | {"stop": ["\n"], "min_tokens": wanted}
    response = call(chat_completions, context(default_tokenizer, thought + answer), body)
    ends = [len(thought) + count for count in (2, 4, 6) if len(thought) + count > wanted]
    count = ends[0] if ends else len(thought) + len(answer)
    assert response["usage"]["completion_tokens"] == count > 0
    assert response["choices"][0]["stop_reason"] == ("\n" if ends else None)


@pytest.mark.parametrize("case", REPLY_CASES, ids=lambda case: case["id"])
def test_replies_of_the_reference_become_its_messages(released_tokenizer, case):
    ids = [*case["token_ids"], released_tokenizer.eos_id]
    body = BODY | ({} if case["start"] == "reasoning" else OFF) | ({"tools": TOOLS} if case["tool_calls"] else {})
    body |= {"stop": case["stop"]} if case["stop"] else {}
    response = call(chat_completions, context(released_tokenizer, ids, sizes=(3, 1)), body)
    choice, expected = response["choices"][0], case["expected"]
    assert (choice["message"]["content"] or "") == (expected["content"] or "")
    assert (choice["message"]["reasoning"] or "") == (expected["reasoning"] or "")
    names = [c["function"]["name"] for c in choice["message"].get("tool_calls", [])]
    assert names == [c["name"] for c in expected["tool_calls"]]
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] == (case["reasoning_tokens"] or 0)


@pytest.mark.parametrize("case", [c for c in RENDER_CASES if "prompt" in c["expected"]], ids=lambda case: case["id"])
def test_prompts_equal_the_reference(released_tokenizer, case):
    request, expected = case["request"], case["expected"]
    body = {k: v for k, v in request.items() if k != "model"} | {"return_prompt_text": True}
    if body.get("continue_final_message"):
        body["add_generation_prompt"] = False
    if "deepseek_image" in expected["prompt"]:
        with pytest.raises(ApiError, match="images"):
            call(render_chat_completion, context(released_tokenizer), body)
        return
    rendered = call(render_chat_completion, context(released_tokenizer, limit=10**6), body)
    assert rendered["prompt_text"] == expected["prompt"]
    if "prompt_token_ids" in expected:
        assert rendered["prompt_token_ids"] == expected["prompt_token_ids"]
        assert rendered["count"] == len(expected["prompt_token_ids"])


def test_rendered_is_what_runs(default_tokenizer):
    body = BODY | {"tools": TOOLS, "reasoning_effort": "max", "return_token_ids": True, "return_prompt_text": True}
    rendered = call(render_chat_completion, context(default_tokenizer), body)
    server = context(default_tokenizer, [1])
    whole = call(chat_completions, server, body)
    first = call(chat_completions, server, body | {"stream": True})[0]
    assert rendered["prompt_token_ids"] == whole["prompt_token_ids"] == first["prompt_token_ids"]
    assert rendered["prompt_token_ids"] == server.engine.requests[0].prompt.tolist()
    assert rendered["prompt_text"] == whole["prompt_text"] == first["prompt_text"]


@pytest.mark.parametrize(
    ("options", "request_fields", "tail"),
    [
        ({}, {}, "<think>"),
        ({"default_thinking": False}, {}, "</think>"),
        ({"default_thinking": False}, {"thinking": {"type": "enabled"}}, "<think>"),
        ({"default_thinking": False}, {"chat_template_kwargs": {"enable_thinking": True}}, "<think>"),
        ({"default_thinking": False}, {"reasoning_effort": "low"}, "<think>"),
        ({}, {"reasoning_effort": "none"}, "</think>"),
        ({}, {"chat_template_kwargs": {"thinking": False}}, "</think>"),
    ],
)
def test_the_servers_default_of_thinking(default_tokenizer, options, request_fields, tail):
    body = BODY | request_fields | {"return_prompt_text": True}
    text = call(render_chat_completion, context(default_tokenizer, **options), body)["prompt_text"]
    assert text.endswith("<｜Assistant｜>" + tail)


def test_the_servers_default_effort(default_tokenizer):
    server = context(default_tokenizer, default_effort=20)
    body = BODY | {"return_prompt_text": True}
    assert "Effort: 20 " in call(render_chat_completion, server, body)["prompt_text"]
    assert "Effort: 50 " in call(render_chat_completion, server, body | {"reasoning_effort": "low"})["prompt_text"]


def test_a_partial_answer_is_continued(default_tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "The sky"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False} | OFF
    server = context(default_tokenizer, text_ids(default_tokenizer, " is blue", EOS))
    response = call(chat_completions, server, body)
    assert response["choices"][0]["message"]["content"] == " is blue"
    assert default_tokenizer.decode(server.engine.requests[0].prompt).endswith("</think>The sky")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_share_the_prompt_and_are_counted_together(default_tokenizer, stream):
    def script(request, index):
        return text_ids(default_tokenizer, "</think>", "word " * (index + 1), EOS)

    server = context(default_tokenizer, script, sizes=(2,))
    body = BODY | {"n": 3, "seed": 5, "return_token_ids": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = call(chat_completions, server, body)
    response = joined(response) if stream else response
    (request,) = server.engine.requests
    assert (request.n, request.sampling.seed) == (3, 5)
    ids = [script(None, index) for index in range(3)]
    for index in range(3):
        assert response["choices"][index]["message"]["content"] == "word " * (index + 1)
        assert response["choices"][index]["token_ids"] == ids[index]
    assert response["usage"]["completion_tokens"] == sum(map(len, ids))
    assert response["usage"]["prompt_tokens"] == request.prompt.size


def test_logprobs_of_the_answer(default_tokenizer):
    ids = text_ids(default_tokenizer, "🙂", EOS)
    body = BODY | OFF | {"logprobs": True, "top_logprobs": 3}
    choice = call(chat_completions, context(default_tokenizer, ids), body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == ("🙂" + EOS).encode()
    assert entries[0]["token"].startswith("\\x") and entries[-1]["token"] == EOS
    for entry, token_id in zip(entries, ids, strict=True):
        assert entry["logprob"] == logprob(token_id)
        assert [top["logprob"] for top in entry["top_logprobs"]] == [p for _, p in best(token_id, 3)]
    body |= {"return_tokens_as_token_ids": True}
    entries = call(chat_completions, context(default_tokenizer, ids), body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in ids]
    body = BODY | OFF | {"logprobs": True}
    entries = call(chat_completions, context(default_tokenizer, ids), body)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_logprobs_of_the_prompt(default_tokenizer):
    server = context(default_tokenizer, [1])
    rows = call(chat_completions, server, BODY | {"prompt_logprobs": 2})["prompt_logprobs"]
    prompt = server.engine.requests[0].prompt.tolist()
    assert rows[0] is None and len(rows) == len(prompt)
    for row, token_id in zip(rows[1:], prompt[1:], strict=True):
        assert row[str(token_id)]["logprob"] == logprob(token_id) and len(row) in (2, 3)
        ranks = {str(i): rank for rank, (i, _) in enumerate(best(token_id, 2), 1)}
        for name, entry in row.items():
            assert set(entry) == {"logprob", "rank", "decoded_token"} and entry["rank"] == ranks.get(name)
    assert {len(row) for row in rows[1:]} == {2, 3}


def test_each_chunk_can_carry_the_usage_so_far(default_tokenizer):
    ids = text_ids(default_tokenizer, "One two three four", EOS)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = call(chat_completions, context(default_tokenizer, ids), BODY | OFF | {"stream": True} | options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == len(ids) and events[-1]["choices"] == []


def test_a_slow_stream_is_kept_open_by_comments(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "ab", EOS), ping_seconds=0.05)
    server.engine.pause = 0.3

    async def read():
        body = json.dumps(BODY | OFF | {"stream": True}).encode()
        return [event async for event in await chat_completions(server, body, AccessRecord("r"))]

    events = asyncio.run(read())
    assert events[0] == b": ping\n\n", "the role is not sent before the first token"
    assert events.count(b": ping\n\n") >= 4 and events[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_during_generation(default_tokenizer, stream):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    server.engine.ending = ("error", "the grammar allows no token")
    body = BODY | OFF | {"stream": stream}
    if not stream:
        with pytest.raises(ApiError) as caught:
            call(chat_completions, server, body)
        assert (caught.value.status, caught.value.code) == (500, "internal_error")
        assert caught.value.message == "the grammar allows no token"
    else:
        events = call(chat_completions, server, body)
        assert events[-1]["error"]["code"] == "internal_error" and "choices" in events[-2]
    assert server.engine.open == 0


def test_a_fault_of_the_server_in_a_stream_shows_nothing_of_it(default_tokenizer, caplog):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    break_after_first_chunk(server.engine, "/secret/path")
    events = call(chat_completions, server, BODY | {"stream": True})
    assert len(events) > 1
    assert events[-1] == {
        "error": {"message": "internal error", "type": "internal_error", "param": None, "code": "internal_error"}
    }
    assert "/secret/path" in caplog.text


def test_an_aborted_request_ends_with_an_error(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    server.engine.ending = ("abort", None)
    checks, check = [], server.engine.check
    server.engine.check = lambda request: (checks.append(request), check(request))
    assert call(chat_completions, server, BODY | {"stream": True})[-1]["error"]["code"] == "request_aborted"
    assert len(checks) == 2  # before it ran: a check that fails counts as a request turned away


def test_a_request_that_a_shutdown_cuts_off_says_so(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "Some text"))
    server.engine.pause = 0.01

    async def shut_down():
        task = asyncio.create_task(reply(chat_completions, server, BODY | {"stream": True}))
        while not server.engine.given:
            await asyncio.sleep(0.005)
        server.engine.is_ready, server.engine.ending = False, ("abort", None)
        return await task

    assert asyncio.run(shut_down())[-1]["error"]["type"] == "service_unavailable"


def test_closing_a_stream_aborts_the_request(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))
    server.engine.pause = 0.001

    async def leave(events):
        body = json.dumps(BODY | OFF | {"stream": True}).encode()
        stream = await chat_completions(server, body, AccessRecord("mine"))
        for _ in range(events):
            await anext(stream)
        running = (server.engine.open, server.running.engine_ids("mine"))
        await stream.aclose()
        return running, (server.engine.open, server.running.engine_ids("mine"))

    before, after = asyncio.run(leave(3))
    assert before == (1, [server.engine.requests[0].request_id]) and after == (0, [])
    assert server.engine.given < 50
    before, after = asyncio.run(leave(0))
    assert before == after == (0, [])


def test_cancelling_a_whole_response_aborts_the_request(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))
    server.engine.pause = 0.01

    async def leave():
        task = asyncio.create_task(reply(chat_completions, server, BODY | OFF))
        while server.engine.given < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return server.engine.open

    assert asyncio.run(leave()) == 0 and server.engine.given < 50


def test_a_reader_that_stops_reading_stops_the_flow(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))

    async def read_slowly():
        body = json.dumps(BODY | OFF | {"stream": True}).encode()
        stream = await chat_completions(server, body, AccessRecord("r"))
        await anext(stream)
        await asyncio.sleep(0.1)
        given = server.engine.given
        events = [event async for event in stream]
        return given, len(events)

    given, events = asyncio.run(read_slowly())
    assert given <= 20 and events > 400


def test_names_of_a_request(default_tokenizer):
    server, record = context(default_tokenizer, [1]), AccessRecord("random")
    call(chat_completions, server, BODY | {"request_id": "from-body"}, record)
    assert record.request_id == "from-body"
    record = AccessRecord("from-header", client_named=True)
    call(chat_completions, server, BODY | {"request_id": "from-body"}, record)
    assert record.request_id == "from-header"


def test_requests_with_one_name_run_side_by_side(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 20, EOS))
    server.engine.pause = 0.001

    async def both():
        tasks = [asyncio.create_task(reply(chat_completions, server, BODY, AccessRecord("same"))) for _ in range(2)]
        while server.engine.open < 2:
            await asyncio.sleep(0.001)
        names = server.running.engine_ids("same")
        await asyncio.gather(*tasks)
        return names

    names = asyncio.run(both())
    assert len(set(names)) == 2 and server.running.engine_ids("same") == []


def test_threads_prepare_requests_not_the_event_loop(default_tokenizer):
    """A body of megabytes leaves the event loop free."""
    seen = []

    class Noticing(type(default_tokenizer)):
        def __init__(self):
            self.__dict__.update(default_tokenizer.__dict__)

        def encode(self, *args, **options):
            seen.append(threading.current_thread())
            return super().encode(*args, **options)

    call(chat_completions, context(Noticing(), [1]), BODY)
    assert seen and all(thread is not threading.main_thread() for thread in seen)


@pytest.mark.parametrize("route", [chat_completions, completions])
def test_grammars_that_take_long_hold_up_only_requests_with_grammars(default_tokenizer, route):
    go = threading.Event()

    class SlowGrammars:
        def compile(self, spec, field):
            go.wait(120)
            raise RuntimeError("never used")

    server = context(default_tokenizer, [1], grammars=SlowGrammars())
    body = BODY if route is chat_completions else {"prompt": "Hi"}

    async def run():
        slow = body | {"structured_outputs": {"regex": "a+"}}
        tasks = [asyncio.create_task(reply(route, server, slow)) for _ in range(8)]
        await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(reply(route, server, body), 60)
        finally:
            go.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    assert asyncio.run(run())["usage"]["completion_tokens"] == 1


# ---- constraints -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(default_tokenizer):
    from dsv4jax.engine.grammar import GrammarCompiler

    return GrammarCompiler(default_tokenizer)


def masked_script(tokenizer, prefix: list[int]):
    """Plays `prefix`, then the first token that the mask allows, until end of sentence."""

    def script(request, index):
        mask, ids = request.mask(), []
        while not ids or ids[-1] != tokenizer.eos_id:
            words = mask.next()
            position = len(ids)
            if position < len(prefix):
                ids.append(prefix[position])
            else:
                allowed = [i for i in range(tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1]
                ids.append(tokenizer.eos_id if tokenizer.eos_id in allowed else allowed[0])
            mask.push(ids[-1])
        return ids

    return script


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": {"x": 1}}}}},
        {"structured_outputs": {"json": {"const": {"x": 1}}}},
        {"structured_outputs": {"json": '{"const": {"x": 1}}'}},
        {"structured_outputs": {"regex": r'\{"x": 1\}'}},
        {"response_format": {"type": "regex", "regex": r'\{"x": 1\}'}},
        {"structured_outputs": {"choice": ['{"x": 1}']}},
        {"structured_outputs": {"grammar": 'start: "{\\"x\\": 1}"'}},
    ],
    ids=lambda c: json.dumps(c)[:60],
)
def test_a_constraint_binds_the_answer_and_not_the_reasoning(default_tokenizer, grammars, constraint, thinking):
    prefix = text_ids(default_tokenizer, "Free thoughts {", "</think>") if thinking else []
    script = masked_script(default_tokenizer, prefix)
    body = BODY | constraint | ({} if thinking else OFF)
    message = call(chat_completions, context(default_tokenizer, script, grammars=grammars), body)["choices"][0][
        "message"
    ]
    assert json.loads(message["content"]) == {"x": 1}
    assert message["reasoning"] == ("Free thoughts {" if thinking else None)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_call_is_made(default_tokenizer, grammars, thinking):
    tool = {"name": "find", "parameters": {"type": "object", "properties": {"b": {"const": 5}}, "required": ["b"]}}
    choice = {"type": "function", "function": {"name": "find"}}
    body = BODY | {"tools": [TOOLS[0], {"type": "function", "function": tool}], "tool_choice": choice}
    body |= {"parallel_tool_calls": False} | ({} if thinking else OFF)
    script = masked_script(default_tokenizer, text_ids(default_tokenizer, "Hm", "</think>") if thinking else [])
    choice = call(chat_completions, context(default_tokenizer, script, grammars=grammars), body)["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("find", {"b": 5})
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format.regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "array", "contains": {"type": "string"}}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "regex", "regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"}, "structured_outputs"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": [5], "thinking_token_budget": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "min_tokens": 1} | OFF, "min_tokens"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1} | OFF, "min_tokens"),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused(default_tokenizer, grammars, change, param):
    with pytest.raises(ApiError) as caught:
        call(chat_completions, context(default_tokenizer, [1], grammars=grammars), BODY | change)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", param)


def test_rules_of_tokens_reach_the_mask(default_tokenizer):
    think_end = default_tokenizer.control_id("</think>")
    server = context(default_tokenizer, [think_end, 9, 1])
    body = BODY | {"thinking_token_budget": 0, "allowed_token_ids": [9, think_end, 1], "min_tokens": 2}
    call(chat_completions, server, body)
    mask = server.engine.requests[0].mask()

    def allowed():
        words = mask.next()
        return {i for i in range(default_tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1}

    assert allowed() == {think_end}
    mask.push(think_end)
    assert allowed() == {9, think_end}
    mask.push(9)
    assert allowed() == {9, think_end, 1}
