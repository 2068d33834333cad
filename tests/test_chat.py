"""Prompt encoding against the reference, and splitting replies into reasoning and answer."""

import json
from pathlib import Path

import deepseek_recipe
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.chat import (
    CHAT_TOKENS,
    ReplyDelta,
    ReplyParser,
    StopStrings,
    encode_chat,
    render_chat,
    reply_start,
)
from dsv4jax.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data/chat"
DEFAULT_FILE = ROOT / "dsv4jax/default_model/tokenizer.json"
RENDER_CASES = json.loads((DATA / "render.json").read_text(encoding="utf-8"))
REPLY_CASES = json.loads((DATA / "replies.json").read_text(encoding="utf-8"))

HEADERS = {
    "reasoning": "<｜Assistant｜><think>",
    "reasoning_continuation": "<｜Assistant｜><think>so far",
    "content": "<｜Assistant｜></think>",
    "content_continuation": "<｜Assistant｜><think>so far</think>and",
}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def options(request: dict) -> dict:
    thinking = {None: None, "enabled": True, "adaptive": True, "disabled": False}
    given = {k: request[k] for k in ("reasoning_effort", "tools", "tool_choice", "response_format") if k in request}
    return {"thinking": thinking[request.get("thinking", {}).get("type")], **given}


def case_ids(cases):
    return [case["id"] for case in cases]


def with_call(arguments) -> list[dict]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]


# ---- prompts ---------------------------------------------------------------------------------------------

GOOD = [case for case in RENDER_CASES if "prompt" in case["expected"]]
BAD = [case for case in RENDER_CASES if "status" in case["expected"]]


@pytest.mark.parametrize("case", GOOD, ids=case_ids(GOOD))
def test_prompts_equal_the_reference(released_tokenizer, case):
    expected, request = case["expected"], case["request"]
    assert render_chat(request["messages"], **options(request)) == expected["prompt"]
    ids = encode_chat(released_tokenizer, request["messages"], **options(request))
    assert ids.dtype == np.int32 and ids.flags.c_contiguous
    if "prompt_token_ids" in expected:
        assert ids.tolist() == expected["prompt_token_ids"]
    assert reply_start(released_tokenizer, ids) == expected["start"]


@pytest.mark.parametrize("case", BAD, ids=case_ids(BAD))
def test_requests_that_the_reference_refuses_are_refused(default_tokenizer, case):
    with pytest.raises(ValueError, match=r"bad chat request: .|reasoning_effort is \d"):
        encode_chat(default_tokenizer, case["request"]["messages"], **options(case["request"]))


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        (None, 75),
        ("minimal", 50),
        ("ultra", 100),
        (1, 1),
        (100, 100),
        (0.0, 1),
        (0.004, 1),
        (0.5, 50),
        (0.99, 99),
    ],
)
def test_effort_numbers(effort, number):
    prompt = render_chat([{"role": "system", "content": "Reasoning Effort: 75 ("}, USER], reasoning_effort=effort)
    head = "<｜begin▁of▁sentence｜><｜System｜>"
    line = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    assert prompt == head + line.format(number) + "Reasoning Effort: 75 (<｜User｜>Hi<｜Assistant｜><think>"


@pytest.mark.parametrize("effort", ["banana", "", 0, 101, -1, True, 1.0, float("nan"), [75]], ids=repr)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_bad_efforts_are_refused_even_without_thinking(effort, thinking):
    with pytest.raises(ValueError, match=r"reasoning_effort is .* allowed are none, minimal, low"):
        render_chat([USER], thinking=thinking, reasoning_effort=effort)


@pytest.mark.parametrize(
    ("thinking", "effort", "on"),
    [
        (None, None, True),
        (None, "none", False),
        (True, "none", True),
        (False, "max", False),
        (False, None, False),
    ],
)
def test_thinking_switch(thinking, effort, on):
    prompt = render_chat([USER], thinking=thinking, reasoning_effort=effort)
    assert prompt.endswith("<think>" if on else "<｜Assistant｜></think>")
    assert ("Reasoning Effort: 75" in prompt) == on


@settings(deadline=None, max_examples=40)
@given(spellings=st.lists(st.sampled_from([*CHAT_TOKENS, "<｜box｜>", "<｜action｜>", " x"]), min_size=1, max_size=4))
def test_typed_control_tokens_stay_text(default_tokenizer, spellings):
    text = "".join(spellings)
    control = [default_tokenizer.control_id(t) for t in (*CHAT_TOKENS, "<｜box｜>", "<｜action｜>")]

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


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [USER, {"role": "function", "content": "x"}],
            r"messages\[1\].role is 'function': allowed are system, developer",
        ),
        (["Hi"], r"messages\[0\] is of type str"),
        (
            [{"role": "user", "content": [{"type": "file"}]}],
            r"messages\[0\].content\[0\].type is 'file': allowed are text",
        ),
        (
            [{"role": "user", "content": "x", "task": "action"}],
            r"messages\[0\].task is 'action': task prompts are not",
        ),
        ([{"role": "user", "content": None}], "bad chat request: .*content"),
        ([{"role": "user", "content": "\ud800"}], "bad chat request: not valid JSON"),
        ([{"role": "user", "content": b"x"}], "bad chat request: not valid JSON"),
    ],
)
def test_bad_messages_are_named(messages, message):
    with pytest.raises(ValueError, match=message):
        render_chat(messages)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice is 'required' but there are no tools"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "bad chat request"),
        ({"response_format": {"type": "xml"}}, "bad chat request: .*xml"),
        ({"thinking": "yes"}, "thinking is 'yes'"),
        ({"tools": [{"type": "web_search"}]}, "bad chat request: .*web_search"),
    ],
)
def test_bad_options_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        render_chat([USER], **bad)


def test_missing_chat_tokens_are_named():
    content = json.loads(DEFAULT_FILE.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        if token["content"] in ("<｜System｜>", "｜DSML｜"):
            token["content"] += "?"
    with pytest.raises(ValueError, match="'<｜System｜>' is missing; '｜DSML｜' is missing"):
        encode_chat(Tokenizer(json.dumps(content)), [USER])


# ---- replies ---------------------------------------------------------------------------------------------


def header(tokenizer, start):
    return tokenizer.encode(HEADERS[start], added_vocabulary=True)


def parse(tokenizer, start, pushes, stop=()):
    """All deltas, and the joined text by channel."""
    parser = ReplyParser(tokenizer, header(tokenizer, start), stop=stop)
    deltas = []
    for ids in pushes:
        deltas += parser.push(ids)
        if parser.ended:
            break
    deltas += parser.finish()
    assert parser.finish() == []
    return deltas, joined((d.channel, d.text) for d in deltas)


def joined(pairs):
    text = {"reasoning": "", "content": ""}
    for channel, piece in pairs:
        text[channel] += piece
    return text


def reference(recipe_tokenizer, start, pushes, stop=()):
    """What DeepSeek's stream processor makes of the same ids: (channel, text) pairs per push and finish."""
    stages = deepseek_recipe.ThinkingInitialStage
    stage = {
        "reasoning": stages.ReasoningStart,
        "reasoning_continuation": stages.ReasoningContinuation,
        "content": None,
        "content_continuation": stages.ContentContinuation,
    }[start]
    conversation = deepseek_recipe.Conversation([deepseek_recipe.UserMessage("Hi")])
    request = deepseek_recipe.ConversationRequest(conversation, deepseek_recipe.ModelVersion.DeepseekV41Flash)
    processor = deepseek_recipe.StreamProcessor(
        deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "id", "model"),
        deepseek_recipe.ParsingOptions(parse_tool_calls=False, thinking_initial_stage=stage, stop_sequences=list(stop)),
        recipe_tokenizer,
    )

    def texts(chunks):
        deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk.to_json())["choices"]]
        keys = {"reasoning_content": "reasoning", "content": "content"}
        return [(channel, d[key]) for d in deltas for key, channel in keys.items() if d.get(key)]

    steps = []
    for ids in pushes:
        steps.append(texts(processor.push(deepseek_recipe.InferenceChunk.tokens(ids))))
        if processor.finished:
            return [*steps, []]
    finish = deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop)
    return [*steps, texts(processor.push(finish)) + texts(processor.finish())]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", REPLY_CASES, ids=case_ids(REPLY_CASES))
def test_replies_equal_the_reference(released_tokenizer, case, size):
    ids = case["token_ids"]
    pushes = [ids[i : i + size] for i in range(0, len(ids), size)]
    deltas, text = parse(released_tokenizer, case["start"], pushes, case["stop"])
    assert text == case["expected"]
    assert all(d.text for d in deltas)


@pytest.fixture(scope="module")
def recipe_tokenizer():
    return deepseek_recipe.Tokenizer.from_file(str(DEFAULT_FILE))


PIECES = [
    "\n",
    "\n\n",
    "</think>",
    "<think>",
    "a",
    "b",
    "ab",
    "the",
    " ",
    "🦜",
    "漢",
    "<｜box｜>",
    "｜DSML｜",
]


@settings(deadline=None, max_examples=300)
@given(
    start=st.sampled_from(sorted(HEADERS)),
    pieces=st.lists(st.sampled_from(PIECES)),
    stop=st.lists(st.sampled_from(["ab", "a\n", "bab", "\n", "🦜", "the"]), max_size=3),
    typed=st.booleans(),
)
def test_any_reply_is_split_as_by_the_reference(default_tokenizer, recipe_tokenizer, start, pieces, stop, typed):
    # With `typed` the spellings are ordinary pieces and must not count as control tokens.
    ids = [i for p in pieces for i in default_tokenizer.encode(p, added_vocabulary=not typed).tolist()]
    expected = joined(pair for step in reference(recipe_tokenizer, start, [[i] for i in ids], stop) for pair in step)
    assert parse(default_tokenizer, start, [[i] for i in ids], stop)[1] == expected
    assert parse(default_tokenizer, start, [ids], stop)[1] == expected
    assert parse(default_tokenizer, start, [ids[:3], ids[3:7], ids[7:]], stop)[1] == expected


@pytest.mark.parametrize("start", ["reasoning", "content"])
def test_text_is_released_as_early_as_by_the_reference(default_tokenizer, recipe_tokenizer, start):
    ids = default_tokenizer.encode("\n\none\n\ntwo 🦜\n</think>\nthree EN\n\n END", added_vocabulary=True)
    pushes = [[i] for i in ids.tolist()]
    parser = ReplyParser(default_tokenizer, header(default_tokenizer, start), stop=["END"])
    for ids, expected in zip(pushes, reference(recipe_tokenizer, start, pushes, ["END"]), strict=False):
        assert joined((d.channel, d.text) for d in parser.push(ids)) == joined(expected)


def test_end_of_sequence_ends_the_reply_and_is_never_text(default_tokenizer):
    eos, bos, pad = default_tokenizer.eos_id, default_tokenizer.bos_id, default_tokenizer.pad_id
    text = default_tokenizer.encode("never closed").tolist()
    parser = ReplyParser(default_tokenizer, header(default_tokenizer, "reasoning"))
    assert parser.push([bos, *text, pad, eos, *text]) == [ReplyDelta("reasoning", "never closed")]
    assert parser.ended and parser.finish() == []
    with pytest.raises(ValueError, match="reply has ended"):
        parser.push(text)


def test_a_reply_cut_inside_a_character_shows_one_replacement(default_tokenizer):
    ids = default_tokenizer.encode("ok 🦜").tolist()[:-1]
    for start in HEADERS:
        deltas, text = parse(default_tokenizer, start, [[i] for i in ids])
        channel = start.split("_")[0]
        assert text[channel] == "ok \ufffd"
        assert deltas[-1] == ReplyDelta(channel, "\ufffd")
        assert "\ufffd" not in "".join(d.text for d in deltas[:-1])


@pytest.mark.parametrize(
    "prompt", ["", "Hi", "<｜User｜>Hi<｜Assistant｜>", "<｜Assistant｜></think>a<｜end▁of▁sentence｜>"]
)
def test_a_prompt_without_an_open_turn_is_refused(default_tokenizer, prompt):
    with pytest.raises(ValueError, match="does not end in an open assistant turn"):
        ReplyParser(default_tokenizer, default_tokenizer.encode(prompt, added_vocabulary=True))


def test_a_forced_tool_call_is_refused(default_tokenizer):
    prompt = encode_chat(default_tokenizer, [USER], thinking=False, tools=[TOOL], tool_choice="required")
    with pytest.raises(ValueError, match="forces a tool call"):
        ReplyParser(default_tokenizer, prompt)


@pytest.mark.parametrize("bad", ["END", [""], [1]])
def test_bad_stop_strings_are_refused(default_tokenizer, bad):
    with pytest.raises(ValueError, match="sequence of non-empty strings"):
        ReplyParser(default_tokenizer, header(default_tokenizer, "content"), stop=bad)


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["MNOPQ"], ["KL", "MN", "OP", "Q"], ["KL", "", "", ""]),
        (["MNOPQ"], ["KL", "MN", "OP", "R"], ["KL", "", "", "MNOPR"]),
        (["delta echo"], ["a del", "ta ech", "o b"], ["a ", "", ""]),
        (["halt"], ["now halting"], ["now "]),
        (["abcd", "bc"], ["abcd"], ["a"]),
        (["b", "ab"], ["xab"], ["xa"]),
        (["ab", "b"], ["xab"], ["x"]),
        (["aab"], ["aaa", "b"], ["a", ""]),
    ],
)
def test_stop_strings(stop, pieces, expected):
    matcher = StopStrings(stop)
    assert [matcher.push(piece) for piece in pieces] == expected


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_stop_strings_do_not_depend_on_the_cuts(text, stop, sizes):
    completed = [text[:end].removesuffix(s) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    kept = completed[0] if completed else text
    matcher, output, at = StopStrings(stop), "", 0
    for size in sizes * 20:
        if not matcher.matched:
            output += matcher.push(text[at : at + size])
            at += size
            assert matcher.matched or len(text[:at]) - len(output) < max(map(len, stop), default=1)
    assert output + matcher.release() == kept
    assert matcher.matched == bool(completed)
