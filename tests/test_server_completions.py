"""Raw text completions."""

import asyncio
import json
import time

import numpy as np
import pytest
from server_api import best, call, context, logprob, text_ids

from dsv4jax.server.body import decode_object, decode_token_ids
from dsv4jax.server.completions import completions, render_completion
from dsv4jax.server.context import AccessRecord
from dsv4jax.server.errors import ApiError

EOS = "<｜end▁of▁sentence｜>"
SCRIPTS = {
    "text": ({}, ["Some text 🙂 日本\n", EOS]),
    "no text": ({}, [EOS]),
    "length": ({"max_tokens": 4}, ["Some text that goes on"]),
    "length inside a character": ({"max_tokens": 2}, ["🙂🙂🙂"]),
    "stop string": ({"stop": ["delta echo"]}, ["alpha delt", "a ech", "o rest", EOS]),
    "stop string included": ({"stop": "STOP", "include_stop_str_in_output": True}, ["A STOP b", EOS]),
    "stop string too early": ({"stop": ["\n"], "min_tokens": 9}, ["One\ntwo and more\nthree", EOS]),
    "stop string almost": ({"stop": ["ABCD"]}, ["x ABC", EOS]),
    "markup is text": ({"stop": ["</think>"]}, ["<think>", "So", "</think>", "it", EOS]),
    "stop id": ({"stop_token_ids": [70]}, ["Text"]),
    "ignored end": ({"ignore_eos": True, "max_tokens": 9}, ["Go", EOS, "on", EOS, "and on and on"]),
}


def joined(events: list[dict]) -> dict[int, dict]:
    choices = {}
    for event in events:
        assert event["object"] == "text_completion" and event["id"] == events[0]["id"]
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "token_ids": []})
            assert choice["finish_reason"] is None and (part["text"] or part["finish_reason"])
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids", [])
            for key, values in (part["logprobs"] or {}).items():
                choice.setdefault("logprobs", {}).setdefault(key, []).extend(values)
            choice |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
    return choices


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1000,)], ids=str)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_response_says(default_tokenizer, name, sizes, echo):
    options, parts = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts) + ([70, 71] if name == "stop id" else [])
    body = {"prompt": "Once 🙂", "logprobs": 2, "return_token_ids": True, "echo": echo, "max_tokens": 100} | options
    whole = call(completions, context(default_tokenizer, ids, sizes=(7,), cached=2), body)
    server = context(default_tokenizer, ids, sizes=sizes, cached=2)
    events = call(completions, server, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    choice, stream = whole["choices"][0], joined(events[:-1])[0]
    assert stream == {key: choice[key] for key in stream}
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert choice["token_ids"] == ids[: len(choice["token_ids"])]
    if sizes == (1,) and isinstance(choice["stop_reason"], str):  # the engine goes on for nobody
        assert server.engine.stopped == [(server.engine.requests[0].request_id, 0)]
    lengths = {len(values) for values in choice["logprobs"].values()}
    assert lengths == {len(choice["token_ids"]) + (whole["usage"]["prompt_tokens"] if echo else 0)}


@pytest.mark.parametrize(
    ("name", "text", "finish"),
    [
        ("text", "Some text 🙂 日本\n", ("stop", None)),
        ("no text", "", ("stop", None)),
        ("stop string", "alpha ", ("stop", "delta echo")),
        ("stop string included", "A STOP", ("stop", "STOP")),
        ("stop string almost", "x ABC", ("stop", None)),
        ("markup is text", "<think>So", ("stop", "</think>")),
        ("stop id", "Text", ("stop", 70)),
    ],
)
def test_what_the_text_is(default_tokenizer, name, text, finish):
    options, parts = SCRIPTS[name]
    ids = text_ids(default_tokenizer, *parts) + ([70, 71] if name == "stop id" else [])
    record = AccessRecord("r")
    body = {"prompt": "Once", "max_tokens": 100} | options
    response = call(completions, context(default_tokenizer, ids), body, record)
    choice = response["choices"][0]
    assert response["id"].startswith("cmpl-") and choice["text"] == text and choice["logprobs"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == finish
    assert record.output_tokens == response["usage"]["completion_tokens"] and record.first_token is not None


def test_sixteen_tokens_by_default(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 100))
    assert call(completions, server, {"prompt": "a"})["usage"]["completion_tokens"] == 16


def test_prompts_of_every_form(default_tokenizer):
    ids = text_ids(default_tokenizer, "Hello")
    server = context(default_tokenizer, [1])
    for prompt in ("Hello", ["Hello"], ids, [ids]):
        call(completions, server, {"prompt": prompt})
    assert [r.prompt.tolist() for r in server.engine.requests] == [ids] * 4
    assert all(r.prompt.dtype == np.int32 and r.prompt.flags.c_contiguous for r in server.engine.requests)
    # Spellings of control tokens are those tokens here, and no begin of sentence is added.
    call(completions, server, {"prompt": "<｜User｜>Hello</think>"})
    assert server.engine.requests[-1].prompt.tolist() == text_ids(default_tokenizer, "<｜User｜>", "Hello", "</think>")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_in_one_body(default_tokenizer, stream):
    def script(request, index):
        return text_ids(default_tokenizer, f"{request.prompt.size}-{index}", EOS)

    prompts = [[5], [5, 6], [5, 6, 7]]
    server, record = context(default_tokenizer, script), AccessRecord("mine")
    body = {"prompt": prompts, "n": 2, "seed": 1, "stream": stream}
    response = call(completions, server, body, record)
    choices = joined(response) if stream else dict(enumerate(response["choices"]))
    assert [choices[i]["text"] for i in range(6)] == ["1-0", "1-1", "2-0", "2-1", "3-0", "3-1"]
    assert all(stream or choice["index"] == index for index, choice in choices.items())
    assert record.prompt_tokens == 6
    assert record.output_tokens == sum(len(script(r, i)) for r in server.engine.requests for i in range(2))
    assert len({request.request_id for request in server.engine.requests}) == 3


def test_fill_in_the_middle(default_tokenizer):
    try:
        tokens = text_ids(default_tokenizer, "<｜fim▁begin｜>", "a", "<｜fim▁hole｜>", "b", "<｜fim▁end｜>")
    except ValueError:
        tokens = None
    server = context(default_tokenizer, [1])
    if tokens is None:
        with pytest.raises(ApiError) as caught:
            call(completions, server, {"prompt": "a", "suffix": "b"})
        assert (caught.value.code, caught.value.param) == ("unsupported", "suffix")
    else:
        call(completions, server, {"prompt": "a", "suffix": "b"})
        assert server.engine.requests[0].prompt.tolist() == tokens


def test_fill_in_the_middle_with_the_released_vocabulary(released_tokenizer):
    server = context(released_tokenizer)
    (rendered,) = call(render_completion, server, {"prompt": "a", "suffix": "b"})
    assert rendered["prompt_token_ids"] == text_ids(
        released_tokenizer, "<｜fim▁begin｜>", "a", "<｜fim▁hole｜>", "b", "<｜fim▁end｜>"
    )


# ---- echo and log-probabilities ------------------------------------------------------------------------------


def test_loglikelihood_requests_of_lm_eval(default_tokenizer):
    """As its `local-completions` client sends them, with its reading of the answer."""
    contexts, continuations = ["The 🙂 sky is", "Two"], [" blue", " and two"]
    pairs = zip(contexts, continuations, strict=True)
    ids = [text_ids(default_tokenizer, a) + text_ids(default_tokenizer, b) for a, b in pairs]
    body = {"prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    response = call(completions, context(default_tokenizer, [9]), body)
    for choice, prompt, first in zip(
        sorted(response["choices"], key=lambda c: c["index"]),
        ids,
        [len(text_ids(default_tokenizer, a)) for a in contexts],
        strict=True,
    ):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        values = logprobs["token_logprobs"][first:-1]
        assert values == [logprob(i) for i in prompt[first:]]
        for value, top, token_id in zip(values, logprobs["top_logprobs"][first:-1], prompt[first:], strict=True):
            greedy = max(top.values()) == value
            assert greedy == (max(dict(best(token_id, 1)).values()) <= logprob(token_id))
            assert value in top.values()


def test_echo_comes_first_and_offsets_point_into_the_text(default_tokenizer):
    prompt, ids = "Say 🙂 it: <｜User｜>", text_ids(default_tokenizer, "日本 yes", EOS)
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 50}
    choice = call(completions, context(default_tokenizer, ids, sizes=(2,)), body)["choices"][0]
    assert choice["text"] == prompt + "日本 yes"
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\\x" in token or token == EOS or choice["text"].startswith(token, offset)
    assert offsets[tokens.index(" it")] == prompt.index(" it") if " it" in tokens else True
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("logprobs", [None, 2])
def test_nothing_but_the_prompt(default_tokenizer, logprobs):
    ids = text_ids(default_tokenizer, "Just this")
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    response = call(completions, context(default_tokenizer, [9]), body)
    (choice,) = response["choices"]
    assert choice["text"] == "Just this" and choice["finish_reason"] == "length"
    assert response["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, *map(logprob, ids[1:])]
        names = [default_tokenizer.decode([i]) for i in ids]
        for name, token_id, top in zip(names[1:], ids[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
            assert top[name] == logprob(token_id) and len(top) in (2, 3)


def test_a_prompt_of_one_token_has_no_logprobs(default_tokenizer):
    body = {"prompt": [9], "echo": True, "max_tokens": 0, "logprobs": 1}
    assert call(completions, context(default_tokenizer, [9]), body)["choices"][0]["logprobs"]["top_logprobs"] == [None]


def test_minus_infinity_is_a_number(default_tokenizer):
    server = context(default_tokenizer, [9, 1])
    chunks = server.engine._chunks

    def hopeless(request, index):
        import dataclasses

        for chunk in chunks(request, index):
            yield dataclasses.replace(chunk, logprobs=(float("-inf"),) * len(chunk.token_ids))

    server.engine._chunks = hopeless
    choice = call(completions, server, {"prompt": "a", "logprobs": 1})["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0] * 2


@pytest.mark.parametrize("wanted", range(9))
def test_stop_strings_count_after_as_many_tokens_as_are_wanted(default_tokenizer, wanted):
    ids = text_ids(default_tokenizer, "a", "\n", "b", "\n", "c", "\n", EOS)
    body = {"prompt": "x", "stop": ["\n"], "min_tokens": wanted}
    response = call(completions, context(default_tokenizer, ids), body)
    count = next((count for count in (2, 4, 6) if count > wanted), len(ids))
    choice = response["choices"][0]
    assert response["usage"]["completion_tokens"] == count
    assert choice["text"] == ("a\nb\nc\n" if count == len(ids) else "a\nb\nc"[: count - 1])
    assert choice["stop_reason"] == (None if count == len(ids) else "\n")


# ---- long prompts --------------------------------------------------------------------------------------------


def test_a_million_ids_become_one_array_quickly():
    ids = np.random.default_rng(0).integers(0, 129280, 855_000)
    body = b'{"model": "flash", "prompt": [' + ", ".join(map(str, ids.tolist())).encode() + b'], "max_tokens": 1}'
    started = time.process_time()
    parsed = decode_token_ids(decode_object(body, undecoded=("prompt",))["prompt"], "prompt", 129280)
    seconds = time.process_time() - started
    assert parsed.dtype == np.int32 and parsed.flags.c_contiguous and (parsed == ids).all()
    started = time.process_time()
    json.loads(body)
    assert seconds < time.process_time() - started, "slower than the standard library without any check"


@pytest.mark.parametrize("text", [b"[ ]", b"[\n]", b"[[1], [ ]]"])
def test_an_empty_list_of_ids_is_empty_however_it_is_written(default_tokenizer, text):
    with pytest.raises(ApiError) as caught:
        call(completions, context(default_tokenizer, [1]), b'{"prompt": ' + text + b"}")
    assert caught.value.status == 400 and "is empty" in caught.value.message


def test_blanks_around_ids_mean_nothing(default_tokenizer):
    server = context(default_tokenizer, [1])
    call(completions, server, b'{"prompt": [ 5,\n\t6 ]}')
    assert server.engine.requests[0].prompt.tolist() == [5, 6]


@pytest.mark.parametrize("bad", [129280, -1, 2**31, 2**63, 10**30])
def test_the_index_of_a_bad_id_is_named(bad):
    text = decode_object(b'{"prompt": [' + b"1," * 70_000 + str(bad).encode() + b"]}", undecoded=("prompt",))["prompt"]
    with pytest.raises(ApiError, match=str(bad)) as caught:
        decode_token_ids(text, "prompt", 129280)
    assert caught.value.param == "prompt[70000]"


def test_closing_a_stream_aborts_every_prompt(default_tokenizer):
    server = context(default_tokenizer, text_ids(default_tokenizer, "word " * 500))
    server.engine.pause = 0.001

    async def leave():
        body = json.dumps({"prompt": ["a", "b", "c"], "max_tokens": 400, "stream": True}).encode()
        stream = await completions(server, body, AccessRecord("mine"))
        for _ in range(5):
            await anext(stream)
        running = server.engine.open, len(server.running.engine_ids("mine"))
        await stream.aclose()
        return running, server.engine.open

    assert asyncio.run(leave()) == ((3, 3), 0)
