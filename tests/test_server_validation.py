"""What the server refuses, and how it says so."""

import json

import pytest
from server_api import call, context, stopped_engine

from dsv4jax.engine.request import QueueFull, TooManyChoices, TooManyDrafts
from dsv4jax.server.body import MAX_DEPTH, MOST_PROBLEMS
from dsv4jax.server.chat_completions import chat_completions
from dsv4jax.server.completions import completions
from dsv4jax.server.errors import ApiError
from dsv4jax.server.messages import messages
from dsv4jax.server.prompts import MAX_CHOICES
from dsv4jax.server.responses import responses
from dsv4jax.server.tokenize import detokenize

MESSAGES = [{"role": "user", "content": "Hi"}]
PARTIAL = [*MESSAGES, {"role": "assistant", "content": "It is"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BAD_IN_BOTH = [
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"seed": "7"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": ["a", "a" * 1025]}, "stop[1]"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": ["3"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": True}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"logit_bias": []}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": ["a", "a" * 1025]}, "bad_words[1]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**9]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stream": "true"}, "stream"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"return_prompt_text": 1}, "return_prompt_text"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": "high"}, "priority"),
    ({"drafts": -1}, "drafts"),
    ({"drafts": "adaptive"}, "drafts"),
    ({"draft_context": 0.5}, "draft_context"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a" * 129}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "a\0b"}, "cache_salt"),
    ({"request_id": "a\r\nSet-Cookie: x"}, "request_id"),
    ({"request_id": 5}, "request_id"),
    ({"model": 5}, "model"),
]
BAD_IN_CHAT = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": True}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),  # no message says "json"
    ({"reasoning_effort": "banana"}, "reasoning_effort"),
    ({"reasoning_effort": 101}, "reasoning_effort"),
    ({"reasoning_effort": True}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": True}, "thinking"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"reasoning_effort": "x"}}, "chat_template_kwargs.reasoning_effort"),
    ({"chat_template_kwargs": {"drop_thinking": 1}}, "chat_template_kwargs.drop_thinking"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": True}, "thinking_token_budget"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"separate_reasoning": 1}, "separate_reasoning"),
    ({"messages": PARTIAL, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": PARTIAL, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),  # last is a user's
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
]
BAD_IN_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [5, 10**7]}, "prompt[1]"),
    ({"prompt": [[5], [5, -1]]}, "prompt[1][1]"),
    ({"prompt": [5, True]}, "prompt[1]"),
    ({"prompt": [5, 6.0]}, "prompt[1]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"suffix": 5}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 2}, "best_of"),
]
CASES = [(chat_completions, *case) for case in BAD_IN_BOTH + BAD_IN_CHAT] + [
    (completions, *case) for case in BAD_IN_BOTH + BAD_IN_COMPLETIONS
]


def refused(route, server, body) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(route, server, body)
    return caught.value


def base(route) -> dict:
    return {"messages": MESSAGES} if route is chat_completions else {"prompt": "Hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "change", "param"), CASES, ids=[f"{r.__name__}-{json.dumps(c)[:60]}" for r, c, _ in CASES]
)
def test_bad_values_are_refused_with_the_path_of_the_field(default_tokenizer, route, change, param, stream):
    server = context(default_tokenizer)
    if stream and "prompt_logprobs" not in change:
        change = {"stream": True} | change
    error = refused(route, server, base(route) | change)
    assert error.status == 400 and error.type == "invalid_request_error" and error.code == "invalid_value"
    assert error.param == param
    content = json.loads(error.body())["error"]
    assert set(content) == {"message", "type", "param", "code"} and content["message"] == error.message
    assert not server.engine.requests


@pytest.mark.parametrize("route", [chat_completions, completions])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": "x"}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_streams_alone_have_or_lack_is_refused(default_tokenizer, route, change, param):
    error = refused(route, context(default_tokenizer), base(route) | change)
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)


@pytest.mark.parametrize("route", [chat_completions, completions])
def test_null_is_absent_and_unknown_fields_are_ignored(default_tokenizer, route):
    names = {name for change, _ in BAD_IN_BOTH for name in change} | {"tools", "thinking", "logprobs", "best_of"}
    body = (
        base(route) | dict.fromkeys(names) | {"guided_json": {"type": "object"}, "uuid": 5, "user": "u", "store": True}
    )
    server = context(default_tokenizer, [5, default_tokenizer.eos_id])
    assert call(route, server, body)["choices"][0]["finish_reason"] == "stop"
    # Object fields too hold nulls of clients that serialise every option.
    body["stream"], body["stream_options"] = True, {"include_usage": None, "continuous_usage_stats": None}
    assert call(route, server, body)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("route", [chat_completions, completions])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b"\xff", b'{"a": "\xff"}', b'{"a": "\\ud800"}',
     b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b'{"prompt": [1 2]}', b'{"prompt": [01]}', b'{"n": 1} x'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(default_tokenizer, route, body):
    error = refused(route, context(default_tokenizer), body)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    ("route", "text", "param"),
    [
        (chat_completions, b'"temperature": 1e999', "temperature"),
        (chat_completions, b'"seed": ' + b"9" * 5000, "seed"),
        (chat_completions, b'"tools": [{"a": -1e999}]', "tools"),
        (completions, b'"logit_bias": {"5": 1e999}', "logit_bias"),
        (completions, b'"prompt": [1, 1e999]', "prompt"),
        (completions, b'"prompt": ["a", 1e999]', "prompt[1]"),
        (completions, b'"' + b"x" * 5000 + b'": 1e999', "x" * 100),
        (responses, b'"top_p": 1e999', "top_p"),
        (messages, b'"thinking": {"budget_tokens": 1e999}', "thinking"),
        (detokenize, b'"tokens": [1e999]', "tokens"),
    ],
    ids=lambda case: repr(case)[:30] if isinstance(case, bytes) else None,
)
def test_a_number_out_of_range_is_told_by_its_field(default_tokenizer, route, text, param):
    error = refused(route, context(default_tokenizer), b"{" + text + b"}")
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert error.message.startswith(param) and len(error.message) < 500 and "1.8e+308" in error.message


@pytest.mark.parametrize("route", [chat_completions, completions])
def test_a_missing_prompt_has_its_own_code(default_tokenizer, route):
    error = refused(route, context(default_tokenizer), {})
    assert error.code == "missing_field" and error.param in base(route)


def test_what_a_completion_cannot_do_is_refused_and_in_chat_makes_no_difference(default_tokenizer):
    error = refused(completions, context(default_tokenizer), {"prompt": "a", "skip_special_tokens": False})
    assert (error.status, error.code, error.param) == (400, "unsupported", "skip_special_tokens")
    assert call(
        chat_completions, context(default_tokenizer, [1]), base(chat_completions) | {"skip_special_tokens": False}
    )


def test_too_many_prompts_are_refused(default_tokenizer):
    for count, n in ((MAX_CHOICES + 1, 1), (MAX_CHOICES // 128 + 1, 128)):  # choices take memory before any runs
        body = {"prompt": ["a"] * count, "n": n}
        assert refused(completions, context(default_tokenizer), body).param == "prompt"


@pytest.mark.parametrize("depth", [MAX_DEPTH, 600, *range(940, 1001, 2), 100_000])
@pytest.mark.parametrize(
    ("route", "text"),
    [
        (chat_completions, '"messages": [{"role": "user", "content": "Hi"}], "tool_choice": %s'),
        (chat_completions, '"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"json": %s}'),
        (responses, '"input": "Hi", "user": %s'),
        (responses, '"input": "Hi", "metadata": {"a": %s}'),
    ],
)
def test_a_body_nested_too_deeply_is_refused(default_tokenizer, route, text, depth):
    for nested in ('{"a": ' * depth + "1" + "}" * depth, "[" * depth + "]" * depth):
        with pytest.raises(ApiError) as caught:
            call(route, context(default_tokenizer, [1]), b"{" + (text % nested).encode() + b"}")
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_fields_that_vllm_removed_are_named_in_the_log(default_tokenizer, caplog):
    call(chat_completions, context(default_tokenizer, [1]), base(chat_completions) | {"guided_regex": "a+"})
    assert "guided_regex" in caplog.text


def test_several_problems_come_together_and_long_values_are_cut(default_tokenizer):
    wrong = {name: "x" * 5000 for name in ("temperature", "top_p", "top_k", "n", "seed", "min_p", "stream", "echo")}
    wrong |= dict.fromkeys(("ignore_eos", "min_tokens", "max_tokens", "frequency_penalty", "priority"), "y" * 500)
    error = refused(completions, context(default_tokenizer), {"prompt": "Hi"} | wrong)
    assert "temperature" in error.message and "top_p" in error.message
    assert error.message.count("it must be") == MOST_PROBLEMS and "3 more problems" in error.message
    assert "x" * 200 in error.message and "x" * 201 not in error.message


@pytest.mark.parametrize("route", [chat_completions, completions])
def test_an_unknown_model_is_not_found(default_tokenizer, route):
    error = refused(route, context(default_tokenizer), base(route) | {"model": "gpt"})
    assert (error.status, error.type, error.code, error.param) == (404, "not_found_error", "model_not_found", "model")
    assert call(route, context(default_tokenizer, [1]), base(route) | {"model": "other"})["model"] == "other"
    assert call(route, context(default_tokenizer, [1]), base(route))["model"] == "flash"


@pytest.mark.parametrize("route", [chat_completions, completions])
def test_a_prompt_beyond_the_context_is_refused(default_tokenizer, route):
    name = next(iter(base(route)))
    prompt = call_prompt_size(default_tokenizer, route)
    error = refused(route, context(default_tokenizer, limit=prompt + 4), base(route) | {"max_tokens": 5})
    assert (error.code, error.param) == ("context_length_exceeded", name)
    assert error.message == (
        f"This model's maximum context length is {prompt + 4} tokens. However, you requested {prompt + 5} tokens "
        f"({prompt} in the {name}, 5 in the completion). Please reduce the length of the {name} or completion."
    )
    assert call(route, context(default_tokenizer, [1], limit=prompt + 5), base(route) | {"max_tokens": 5})
    error = refused(route, context(default_tokenizer, limit=prompt), base(route) | {"max_tokens": 1})
    assert error.code == "context_length_exceeded"


def test_an_echo_needs_room_for_one_token(default_tokenizer):
    prompt = call_prompt_size(default_tokenizer, completions)
    body = base(completions) | {"max_tokens": 0, "echo": True}
    error = refused(completions, context(default_tokenizer, limit=prompt), body)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert f"({prompt} in the prompt, 1 in the completion, also for max_tokens = 0)" in error.message
    assert call(completions, context(default_tokenizer, [1], limit=prompt + 1), body)


def call_prompt_size(tokenizer, route) -> int:
    return call(route, context(tokenizer, [1]), base(route))["usage"]["prompt_tokens"]


def test_without_a_limit_chat_may_use_what_the_context_leaves(default_tokenizer):
    server = context(default_tokenizer, [1], limit=500)
    call(chat_completions, server, base(chat_completions))
    request = server.engine.requests[0]
    assert request.max_tokens == 500 - request.prompt.size
    server = context(default_tokenizer, [1], limit=500, default_max_tokens=7)
    call(chat_completions, server, base(chat_completions))
    call(chat_completions, server, base(chat_completions) | {"max_tokens": 20, "max_completion_tokens": 9})
    assert [r.max_tokens for r in server.engine.requests] == [7, 9]


def test_as_many_tokens_as_are_wanted_at_least_must_fit(default_tokenizer):
    prompt = call_prompt_size(default_tokenizer, chat_completions)
    server = context(default_tokenizer, [1], limit=prompt + 9)
    assert call(chat_completions, server, base(chat_completions) | {"min_tokens": 9})
    assert refused(chat_completions, server, base(chat_completions) | {"min_tokens": 10}).param == "min_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_refused_before_the_first_byte(default_tokenizer, stream):
    server, body = context(default_tokenizer), {"messages": MESSAGES, "stream": stream}
    server.engine.refusal = QueueFull("too many requests wait", retry_after=3)
    error = refused(chat_completions, server, body)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "queue_full")
    assert error.headers["Retry-After"] == "3"
    server.engine.refusal = TooManyChoices("3 choices are asked for at once, this engine lets 2 wait")
    error = refused(chat_completions, server, body)
    assert (error.status, error.code, error.param) == (400, "invalid_value", "n")
    server.engine.refusal = TooManyDrafts("drafts = 7: this engine makes at most 5")
    error = refused(chat_completions, server, body)
    assert (error.status, error.code, error.param) == (400, "invalid_value", "drafts")
    server.engine.refusal = stopped_engine()
    error = refused(chat_completions, server, body)
    assert (error.status, error.type) == (503, "service_unavailable")
    assert "Retry-After" in error.headers


def test_images_are_refused_with_their_path(default_tokenizer):
    content = [{"type": "text", "text": "look"}, IMAGE]
    messages = [*MESSAGES, {"role": "user", "content": content}]
    error = refused(chat_completions, context(default_tokenizer), {"messages": messages})
    assert (error.status, error.code, error.param) == (400, "unsupported", "messages[1].content[1]")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_constraints_need_a_grammar_backend(default_tokenizer, change, param):
    error = refused(chat_completions, context(default_tokenizer), {"messages": MESSAGES} | change)
    assert (error.status, error.code, error.param) == (400, "unsupported", param)


def test_everything_that_steers_sampling_reaches_the_engine(default_tokenizer):
    server = context(default_tokenizer, [1])
    body = base(completions) | {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "presence_penalty": 1, "frequency_penalty": -2,
        "repetition_penalty": 1.5, "seed": -5, "n": 3, "logprobs": 4, "logit_bias": {"7": 1000, "8": -1000.0, "9": 2.5},
        "stop_token_ids": [4], "ignore_eos": True, "priority": -3, "cache_salt": "mine", "max_tokens": 30,
        "prompt_logprobs": 2, "drafts": 3, "draft_context": 1000,
    }  # fmt: skip
    call(completions, server, body)
    (request,) = server.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 0, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -2, 1.5)
    assert (sampling.seed, sampling.top_logprobs, request.n, request.max_tokens) == (-5, 4, 3, 30)
    assert request.logit_bias == {7: 100, 8: -100, 9: 2.5} and request.stop_token_ids == (4,) and request.ignore_eos
    assert (request.priority, request.cache_salt, request.prompt_logprobs) == (-3, "mine", 2)
    assert (request.drafts, request.draft_context) == (3, 1000)


def test_a_request_without_a_seed_gets_one_of_its_own(default_tokenizer):
    server = context(default_tokenizer, [1])
    for _ in range(3):
        call(completions, server, base(completions))
    seeds = {request.sampling.seed for request in server.engine.requests}
    assert len(seeds) == 3 and None not in seeds


def test_prompts_are_cut_from_the_left_when_asked_to(default_tokenizer):
    server = context(default_tokenizer, [1], limit=20)
    ids = list(range(3, 33))
    for keep, left in ((4, ids[-4:]), (-1, ids[-15:]), (15, ids[-15:])):
        body = {"prompt": ids, "max_tokens": 5, "truncate_prompt_tokens": keep}
        assert call(completions, server, body)["usage"]["prompt_tokens"] == len(left)
        assert server.engine.requests[-1].prompt.tolist() == left
    assert refused(completions, server, {"prompt": ids, "truncate_prompt_tokens": 0}).param == "prompt"
