"""Tokenising over HTTP: what a client counts is what the server feeds."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_api import call, context, text_ids

from dsv4jax.server.chat_completions import chat_completions
from dsv4jax.server.completions import completions
from dsv4jax.server.errors import ApiError
from dsv4jax.server.tokenize import detokenize, tokenize, tokenizer_info

CASES = json.loads((Path(__file__).parent / "data/chat/tokenize.json").read_text(encoding="utf-8"))
TOOL = {"type": "function", "function": {"name": "f", "description": "does"}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <｜User｜> there"}]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"][:20]))
def test_texts_equal_the_reference(released_tokenizer, case):
    server = context(released_tokenizer)
    response = call(tokenize, server, {"prompt": case["text"], "add_special_tokens": False})
    assert response["tokens"] == case["ids_with_added_vocab"] and response["count"] == len(response["tokens"])
    assert response["max_model_len"] == server.engine.max_model_len and "token_strs" not in response


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [TOOL]},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "max"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
    ],
    ids=lambda o: json.dumps(o)[:40],
)
def test_a_conversation_counts_what_chat_feeds(default_tokenizer, options):
    if "response_format" in options:
        from dsv4jax.engine.grammar import GrammarCompiler

        server = context(default_tokenizer, [1], grammars=GrammarCompiler(default_tokenizer))
    else:
        server = context(default_tokenizer, [1])
    counted = call(tokenize, server, {"messages": MESSAGES} | options)
    call(chat_completions, server, {"messages": MESSAGES} | options)
    assert counted["tokens"] == server.engine.requests[0].prompt.tolist()


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        ({}, "<｜Assistant｜><think>"),
        ({"thinking": {"type": "disabled"}}, "<｜Assistant｜></think>"),
    ],
)
def test_without_the_generation_prompt(default_tokenizer, options, removed):
    server = context(default_tokenizer)
    whole = call(tokenize, server, {"messages": MESSAGES} | options)["tokens"]
    cut = call(tokenize, server, {"messages": MESSAGES, "add_generation_prompt": False} | options)["tokens"]
    assert default_tokenizer.token_bytes(whole) == default_tokenizer.token_bytes(cut) + removed.encode()


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("task", ["action", "query", "authority", "domain", "title", "read_url"])
def test_a_task_is_part_of_the_generation_prompt(default_tokenizer, task, thinking):
    messages = [*MESSAGES, {"role": "user", "content": "more", "task": task}]
    body = {"messages": messages, "thinking": {"type": thinking}}
    whole = call(tokenize, context(default_tokenizer), body)["tokens"]
    cut = call(tokenize, context(default_tokenizer), body | {"add_generation_prompt": False})["tokens"]
    messages[-1] = {"role": "user", "content": "more"}
    assert cut == call(tokenize, context(default_tokenizer), body | {"add_generation_prompt": False})["tokens"]
    assert whole[: len(cut)] == cut and default_tokenizer.token_bytes(cut).endswith(b"more")
    think = "<think>" if thinking == "enabled" else "</think>"
    header = [f"<｜Assistant｜>{think}"] if task == "action" else []
    assert default_tokenizer.token_bytes(whole[len(cut) :]).decode() == "".join([*header, f"<｜{task}｜>"])


def test_a_continued_message(default_tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "So"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ids = call(tokenize, context(default_tokenizer), body)["tokens"]
    assert default_tokenizer.decode(ids).endswith("<think></think>So")


def test_token_strings_are_those_of_the_vocabulary(default_tokenizer):
    response = call(tokenize, context(default_tokenizer), {"prompt": " a 🙂<think>", "return_token_strs": True})
    assert response["token_strs"] == [default_tokenizer.token(i) for i in response["tokens"]]
    assert response["token_strs"][-1] == "<think>"


@settings(max_examples=30)
@given(text=st.text(max_size=50))
def test_round_trip(default_tokenizer, text):
    server = context(default_tokenizer)
    ids = call(tokenize, server, {"prompt": text})["tokens"]
    assert call(detokenize, server, {"tokens": ids})["prompt"] == text


def test_detokenising_shows_control_tokens(default_tokenizer):
    spelled = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜end▁of▁sentence｜>"
    ids = text_ids(default_tokenizer, "<｜begin▁of▁sentence｜>", "<｜User｜>", "Hi", "<｜end▁of▁sentence｜>")
    assert call(detokenize, context(default_tokenizer), {"tokens": ids}) == {"prompt": spelled}


def test_what_vllm_bench_does_to_random_prompts(default_tokenizer):
    server = context(default_tokenizer, [1])
    ids = list(range(30, 60))
    text = call(detokenize, server, {"model": "flash", "tokens": ids})["prompt"]
    body = {"model": "flash", "prompt": text, "add_special_tokens": False}
    aligned = call(tokenize, server, body)["tokens"]
    again = call(detokenize, server, {"model": "flash", "tokens": aligned})["prompt"]
    assert again == text
    assert call(completions, server, {"prompt": text})["usage"]["prompt_tokens"] == len(aligned)


def test_tokenizer_info(default_tokenizer):
    info = call(tokenizer_info, context(default_tokenizer), b"")
    assert (info["bos_token"], info["eos_token"]) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    assert info["chat_template"] is None and info["model_max_length"] == 4096
    assert {"tokenizer_class", "pad_token"} <= set(info)


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        (tokenize, {}, 400, "prompt"),
        (tokenize, {"prompt": 5}, 400, "prompt"),
        (tokenize, {"prompt": ["a"]}, 400, "prompt"),
        (tokenize, {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        (tokenize, {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        (tokenize, {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        (tokenize, {"prompt": "a", "model": "gpt"}, 404, "model"),
        (tokenize, {"messages": []}, 400, "messages"),
        (tokenize, {"messages": MESSAGES, "continue_final_message": True}, 400, "continue_final_message"),
        (tokenize, {"messages": MESSAGES, "tools": 5}, 400, "tools"),
        (detokenize, {}, 400, "tokens"),
        (detokenize, {"tokens": "a"}, 400, "tokens"),
        (detokenize, {"tokens": [5, 10**6]}, 400, "tokens[1]"),
        (detokenize, {"tokens": [5, -1]}, 400, "tokens[1]"),
        (detokenize, {"tokens": [5, True]}, 400, "tokens[1]"),
        (detokenize, {"tokens": [5], "model": "gpt"}, 404, "model"),
    ],
)
def test_bad_requests(default_tokenizer, route, body, status, param):
    with pytest.raises(ApiError) as caught:
        call(route, context(default_tokenizer), body)
    assert (caught.value.status, caught.value.param) == (status, param)


def test_nothing_has_no_tokens(default_tokenizer):
    server = context(default_tokenizer)
    assert call(tokenize, server, {"prompt": ""})["tokens"] == []
    assert call(detokenize, server, {"tokens": []}) == {"prompt": ""}
