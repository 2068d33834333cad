"""Splitting generated ids into reasoning, answer and tool calls, and text of raw completions."""

import json
import time
from pathlib import Path

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.chat import (
    CompletionText,
    ReplyDelta,
    ReplyParser,
    StopStrings,
    TextReplyParser,
    encode_chat,
    json_content,
)

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data/chat"
DEFAULT_FILE = ROOT / "dsv4jax/default_model/tokenizer.json"
CASES = json.loads((DATA / "parse.json").read_text(encoding="utf-8"))
STREAM_CASES = json.loads((DATA / "stream.json").read_text(encoding="utf-8"))

HEADERS = {
    "reasoning": "<｜Assistant｜><think>",
    "reasoning_continuation": "<｜Assistant｜><think>so far",
    "content": "<｜Assistant｜></think>",
    "content_continuation": "<｜Assistant｜><think>so far</think>and",
    "tool_calls": "<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n",
}
TEXT_STARTS = ["content", "content_continuation", "reasoning", "reasoning_continuation"]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}},
    {"type": "function", "function": {"name": "g"}},
]


def case_ids(cases):
    return [case["id"] for case in cases]


def header(tokenizer, start):
    return tokenizer.encode(HEADERS[start], added_vocabulary=True)


def reply_parser(tokenizer, start, **options):
    return ReplyParser(tokenizer, header(tokenizer, start), **options)


def deltas_of(parser, pushes, reason="stop") -> list[ReplyDelta]:
    deltas = []
    for piece in pushes:
        if not parser.ended:
            deltas += parser.push(piece)
    pushed, last = deltas, parser.finish(reason)
    assert parser.finish(reason) == []
    assert all(d.text or d.channel == "tool_call" for d in [*pushed, *last[:-1]])
    return pushed + last


def message(deltas) -> dict:
    joined = {"reasoning": "", "content": "", "tool_calls": []}
    for d in deltas:
        if d.channel in ("reasoning", "content"):
            assert not joined["tool_calls"] or not d.text, "calls come last"
            joined[d.channel] += d.text
        elif d.channel == "tool_call":
            assert d.index == len(joined["tool_calls"]) and d.id.startswith("call_") and not d.text
            joined["tool_calls"].append({"name": d.name, "arguments": ""})
        else:
            assert d.index == len(joined["tool_calls"]) - 1
            joined["tool_calls"][-1]["arguments"] += d.text
    return joined


def cuts(sequence):
    """The whole, one by one, and every cut in two."""
    yield [sequence]
    yield [sequence[i : i + 1] for i in range(len(sequence))]
    for at in range(1, len(sequence)):
        yield [sequence[:at], sequence[at:]]


def dsml(*invokes: str) -> str:
    """A block of calls, its tags written with {{ }} for the angle and marker of opening and closing tags."""
    return markup("\n\n{{ calls}\n" + "\n".join(invokes) + "\n{{/ calls}")


def markup(text: str) -> str:
    return text.replace("{{/", "</｜DSML｜").replace("{{", "<｜DSML｜").replace("}", ">")


# ---- against the reference -------------------------------------------------------------------------------


def check_case(case, parser, deltas):
    expected, got = json.loads(json.dumps(case["expected"])), message(deltas)
    end = expected.pop("finish_reason")
    assert end == (
        "length" if case["backend_finish"] == "length" else "tool_calls" if parser.tool_calls_seen else "stop"
    )
    if case["id"] in ("json_bare", "json_fenced", "json_with_prose"):
        got["content"] = json.loads(json_content(got["content"]))
        expected["content"] = json.loads(expected["content"])
    if "required_arguments" in case:
        for call, arguments in zip(expected["tool_calls"], case["required_arguments"], strict=True):
            call["arguments"] = arguments
        for call in got["tool_calls"]:
            call["arguments"] = json.loads(call["arguments"])
    if case["class"] == "truncated" and expected["tool_calls"]:
        assert expected["tool_calls"][-1].pop("arguments").startswith(got["tool_calls"][-1].pop("arguments"))
    assert got == expected


@pytest.mark.parametrize("case", CASES, ids=case_ids(CASES))
def test_replies_equal_the_reference_at_every_cut(released_tokenizer, case):
    ids = case["token_ids"]
    tools = TOOLS if case["tool_calls"] else None
    for pushes in cuts(ids):
        parser = reply_parser(released_tokenizer, case["start"], tools=tools, stop=case["stop"])
        deltas = deltas_of(parser, pushes, case["backend_finish"])
        check_case(case, parser, deltas)
        if case.get("reasoning_tokens") is not None:
            assert parser.reasoning_tokens == case["reasoning_tokens"]
        assert sum(d.ids for d in deltas) == len(ids) or parser.ended
        assert parser.ended == bool(case["stop"])
        assert parser.stop_string in (case["stop"] or [None])


TEXT_CASES = [case for case in CASES if "raw_text" in case]


@pytest.mark.parametrize("case", TEXT_CASES, ids=case_ids(TEXT_CASES))
def test_text_replies_equal_the_reference_at_every_cut(case):
    tools = TOOLS if case["tool_calls"] else None
    for pushes in cuts(case["raw_text"]):
        parser = TextReplyParser(case["start"], tools=tools, stop=case["stop"])
        check_case(case, parser, deltas_of(parser, pushes, case["backend_finish"]))


@pytest.mark.parametrize("case", STREAM_CASES, ids=case_ids(STREAM_CASES))
def test_text_is_released_no_later_than_by_the_reference(released_tokenizer, case):
    tools = TOOLS if case["tool_calls"] else None
    parser = reply_parser(released_tokenizer, case["start"], tools=tools, stop=case["stop"])
    deltas, expected = [], {"reasoning": "", "content": ""}
    for token_id, reasoning, content in case["steps"]:
        expected["reasoning"] += reasoning
        expected["content"] += content
        deltas += [] if parser.ended else parser.push([token_id])
        got = message(deltas)
        assert got["reasoning"].startswith(expected["reasoning"]) and got["content"].startswith(expected["content"])


def reference(recipe_tokenizer, start, ids, stop, parse_tool_calls):
    """Reasoning, answer and call names that DeepSeek's stream processor makes of the ids."""
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
        deepseek_recipe.ParsingOptions(
            parse_tool_calls=parse_tool_calls, thinking_initial_stage=stage, stop_sequences=list(stop)
        ),
        recipe_tokenizer,
    )
    chunks = []
    for token_id in ids:
        if not processor.finished:
            chunks += processor.push(deepseek_recipe.InferenceChunk.tokens([token_id]))
    if not processor.finished:
        chunks += processor.push(deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop))
        chunks += processor.finish()
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk.to_json())["choices"]]
    text = {key: "".join(d.get(key) or "" for d in deltas) for key in ("reasoning_content", "content")}
    names = [c["function"]["name"] for d in deltas for c in d.get("tool_calls") or () if "name" in c["function"]]
    return text["reasoning_content"], text["content"], names


@pytest.fixture(scope="module")
def recipe_tokenizer():
    return deepseek_recipe.Tokenizer.from_file(str(DEFAULT_FILE))


# Without "<" before newlines, where the reference keeps one of the newlines that precede a call.
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
    "</",
    "> b",
]
TAGS = [dsml(), markup('{{ invoke name="g"}'), markup("{{/ invoke}"), markup("{{/"), markup("{{ calls}\n")]


@settings(max_examples=250)
@given(
    start=st.sampled_from(TEXT_STARTS),
    pieces=st.lists(st.sampled_from([*PIECES, *TAGS])),
    stop=st.lists(st.sampled_from(["ab", "a\n", "<x", "</x", "bab", "🦜", "the", " "]), max_size=3),
    typed=st.booleans(),
    tools=st.sampled_from([None, TOOLS]),
    data=st.data(),
)
def test_any_reply_is_split_as_by_the_reference(
    default_tokenizer, recipe_tokenizer, start, pieces, stop, typed, tools, data
):
    # With `typed` the spellings are ordinary pieces and must not count as control tokens.
    ids = [i for p in pieces for i in default_tokenizer.encode(p, added_vocabulary=not typed).tolist()]
    *expected, names = reference(recipe_tokenizer, start, ids, stop, tools is not None)
    whole = message(deltas_of(reply_parser(default_tokenizer, start, tools=tools, stop=stop), [ids]))
    assert [whole["reasoning"], whole["content"]] == expected
    # The reference drops a second call whose predecessor has no end tag.
    assert [call["name"] for call in whole["tool_calls"]][: len(names)] == names
    assert bool(whole["tool_calls"]) == bool(names)
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pushes = [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)], strict=True)]
    parser = reply_parser(default_tokenizer, start, tools=tools, stop=stop)
    deltas = deltas_of(parser, pushes)
    assert message(deltas) == whole
    assert parser.ended or sum(d.ids for d in deltas) == len(ids)


CALL_PIECES = [
    *(
        '"',
        "\\",
        "<",
        "</",
        "/",
        ">",
        "\n",
        "é",
        "🦜",
        "x",
        "1",
        "{",
        '{"a": 1}',
        "null",
        "true",
        "</think>",
        "｜DSML｜",
    ),
    *(markup(t) for t in ("{{ calls}", "{{/ calls}", '{{ invoke name="f"}', "{{/ invoke}", "{{/ parameter}")),
    *(markup(f'{{{{ parameter name="{k}" string="{s}"}}') for k in ("a", "input") for s in ("true", "false")),
]


@settings(max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(CALL_PIECES), max_size=14),
    parallel=st.booleans(),
    reason=st.sampled_from(["stop", "length", "abort"]),
    data=st.data(),
)
def test_calls_do_not_depend_on_the_cuts_and_are_json_once_closed(default_tokenizer, pieces, parallel, reason, data):
    text = markup('{{ invoke name="f"}') + "".join(pieces)
    ids = default_tokenizer.encode(text, added_vocabulary=True).tolist()
    options = {"tools": TOOLS, "parallel_tool_calls": parallel}
    parser = reply_parser(default_tokenizer, "tool_calls", **options)
    whole = message(deltas_of(parser, [ids], reason))
    for sequence, make in (
        (ids, lambda: reply_parser(default_tokenizer, "tool_calls", **options)),
        (text, lambda: TextReplyParser("tool_calls", **options)),
    ):
        at = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=6)))
        pushes = [sequence[a:b] for a, b in zip([0, *at], [*at, len(sequence)], strict=True)]
        assert message(deltas_of(make(), pushes, reason)) == whole
    assert parallel or len(whole["tool_calls"]) == 1
    for call in whole["tool_calls"][: None if reason == "stop" or parser.ended else -1]:
        assert isinstance(json.loads(call["arguments"]), dict)


# ---- tool calls --------------------------------------------------------------------------------------------


def calls_of(text, reason="stop", **options):
    parser = TextReplyParser("content", tools=TOOLS, **options)
    deltas = deltas_of(parser, text, reason)
    return message(deltas), parser


def invoke(body: str) -> str:
    return f'{{{{ invoke name="f"}}\n{body}\n{{{{/ invoke}}'


def parameter(key: str, value: str, attribute: str = "") -> str:
    return f'{{{{ parameter name="{key}"{attribute}}}{value}{{{{/ parameter}}'


STRING, OTHER = ' string="true"', ' string="false"'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (parameter("a", "true", STRING), '{"a": "true"}'),
        (parameter("a", "true", OTHER), '{"a": true}'),
        (parameter("a", " x\n", STRING), '{"a": " x\\n"}'),
        (parameter("a", "12345678901234567890123", OTHER), '{"a": 12345678901234567890123}'),
        (parameter("a", "NaN", OTHER), '{"a": "NaN"}'),
        (parameter("a", "", OTHER), '{"a": ""}'),
        (parameter("a", "[" * 5000, OTHER), json.dumps({"a": "[" * 5000})),
        (parameter("a", "Paris"), '{"a": "Paris"}'),
        (parameter("a", "[1]"), '{"a": [1]}'),
        (parameter("a", "</think>", STRING), '{"a": "</think>"}'),
        (parameter("a", "if x <{{ y", STRING), '{"a": "if x <<｜DSML｜ y"}'),
        (parameter('"'[1:] + "k\\", "v", STRING), '{"k\\\\": "v"}'),
        (parameter("", "v", STRING), '{"": "v"}'),
        ('{{ parameter name="a" string="true"/}', '{"a": ""}'),
        ('{{ parameter name="a" {{/ parameter}' + parameter("b", "1", OTHER), '{"b": 1}'),
        ('{{ parameter name="a{{ parameter name="b" string="false"}1{{/ parameter}', '{"b": 1}'),
        ("noise" + parameter("a", "1", OTHER) + "noise", '{"a": 1}'),
        ('{"a": [1, {"b": 2}]}'.replace("}", "\0"), '{"a": [1, {"b": 2}]}'),
        ("no object", "{}"),
        # The whole object inside one parameter that the tool does not have.
        (parameter("arguments", '{"a": 1\0', OTHER), '{"a": 1}'),
        (parameter("input", ' {"b": "x"\0', STRING), '{"b": "x"}'),
        (parameter("input", '{"z": 1\0', OTHER), '{"input": {"z": 1}}'),
        (parameter("input", "word", STRING), '{"input": "word"}'),
        (parameter("input", '{"a": 1\0', OTHER) + parameter("b", "2", OTHER), '{"input": {"a": 1}, "b": 2}'),
        (parameter("a", "1", OTHER) + parameter("input", '{"a": 1\0', OTHER), '{"a": 1, "input": {"a": 1}}'),
    ],
)
def test_arguments(body, arguments):
    text = dsml(invoke(body)).replace("\0", "}")
    got, parser = calls_of("Text\n" + text)
    assert got == {"reasoning": "", "content": "Text", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert parser.tool_calls_seen == 1 and not parser.ended


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (dsml('{{ invoke name="f"/}', '{{ invoke name="f"/}'), ["{}", "{}"]),
        (dsml('{{ invoke name="f"}' + parameter("a", "1", OTHER), invoke("")), ['{"a": 1}', "{}"]),
        (dsml(invoke(""), invoke(""), invoke("")), ["{}", "{}", "{}"]),
        (dsml(invoke("")) + dsml(invoke("")), ["{}"]),
        (markup('{{ calls}<invoke name="f">{{/ invoke}'), ["{}"]),
    ],
)
def test_several_calls(text, arguments):
    got, parser = calls_of(text)
    assert got["tool_calls"] == [{"name": "f", "arguments": a} for a in arguments]
    assert parser.tool_calls_seen == len(arguments)


def test_only_the_first_call_counts_without_parallel_calls(default_tokenizer):
    first = markup("{{ calls}\n" + invoke(parameter("a", "1", OTHER)))[: -len(" invoke>")]
    ids = default_tokenizer.encode(first, added_vocabulary=True).tolist()
    rest = default_tokenizer.encode(markup(" invoke}\n" + invoke("")), added_vocabulary=True).tolist()
    for pushes in ([ids + rest], [ids], [[i] for i in ids + rest]):
        parser = reply_parser(default_tokenizer, "content", tools=TOOLS, parallel_tool_calls=False)
        deltas = deltas_of(parser, pushes)
        assert parser.ended and parser.tool_calls_seen == 1
        assert message(deltas)["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}'}]
        assert sum(d.ids for d in deltas) == len(ids)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{{ invoke name="f"', ""),
        ('{{ invoke name="f"}' + parameter("a", "1", STRING), '{"a": "1"'),
        ('{{ invoke name="f"}{{ parameter name="a" string="true"}12<', '{"a": "12<'),
        ('{{ invoke name="f"}{{ parameter name="a" string="false"}12', '{"a": 12'),
        ('{{ invoke name="f"}{{ parameter name="input" string="true"}x"', '{"input": "x\\"'),
        ('{{ invoke name="f"}' + parameter("input", "1", OTHER), '{"input": 1'),
    ],
)
def test_a_call_that_is_cut_keeps_its_arguments_so_far(text, arguments):
    for reason in ("length", "abort"):
        (call,) = calls_of(markup("{{ calls}" + text), reason)[0]["tool_calls"]
        assert call == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{{ invoke name="f"', "{}"),
        ('{{ invoke name="f"}' + parameter("a", "1", STRING), '{"a": "1"}'),
        ('{{ invoke name="f"}' + parameter("a", "1", STRING) + '{{ parameter name="b', '{"a": "1"}'),
        ('{{ invoke name="f"}{{ parameter name="a" string="true"}12<', '{"a": "12<"}'),
        ('{{ invoke name="f"}{{ parameter name="a" string="false"}12', '{"a": 12}'),
        ('{{ invoke name="f"}{{ parameter name="a" string="false"}[1, 2', '{"a": "[1, 2"}'),
        ('{{ invoke name="f"}' + parameter("input", '{"a": 1\0', OTHER), '{"a": 1}'),
        ('{{ invoke name="f"}{"a": 1\0<', '{"a": 1}'),
        ('{{ invoke name="f"}{"a": ', "{}"),
    ],
)
def test_a_call_that_the_model_leaves_open_is_closed(text, arguments):
    got, _ = calls_of(markup("{{ calls}" + text).replace("\0", "}"))
    assert got["tool_calls"] == [{"name": "f", "arguments": arguments}]


def test_a_second_call_without_an_end_of_the_first_is_the_end_without_parallel_calls():
    text = dsml('{{ invoke name="f"}\n{{ invoke name="f"}', "{{/ invoke}")
    for pushes in cuts(text):
        parser = TextReplyParser("content", tools=TOOLS, parallel_tool_calls=False)
        assert message(deltas_of(parser, pushes))["tool_calls"] == [{"name": "f", "arguments": "{}"}]
        assert parser.ended and parser.tool_calls_seen == 1


def test_calls_are_streamed_as_they_arrive():
    parser = TextReplyParser("content", tools=TOOLS)
    assert parser.push("Hi\n\n<") == [ReplyDelta("content", "Hi")]
    assert parser.push('｜DSML｜ calls>\n<｜DSML｜ invoke name="g') == []
    (opened,) = parser.push('">')
    assert (opened.channel, opened.name, opened.index, opened.text) == ("tool_call", "g", 0, "")
    assert parser.push('\n<｜DSML｜ parameter name="a" string="true">') == [ReplyDelta("arguments", '{"a": "', index=0)]
    assert parser.push('say "x') == [ReplyDelta("arguments", 'say \\"x', index=0)]
    assert parser.push("y</") == [ReplyDelta("arguments", "y", index=0)]
    assert parser.push("p") == [ReplyDelta("arguments", "</p", index=0)]


def test_every_call_of_a_reply_has_its_own_id():
    deltas = deltas_of(TextReplyParser("content", tools=TOOLS), [dsml(*[invoke("")] * 20)])
    assert len({d.id for d in deltas if d.channel == "tool_call"}) == 20


@pytest.mark.parametrize("start", TEXT_STARTS)
@pytest.mark.parametrize("stop", [[], ["<｜x"], ["\n\n<", "<x"]], ids=["", "an angle", "newlines"])
def test_markup_without_tools_stays_text(start, stop):
    """Also where a stop string holds back what may be the beginning of a tag."""
    text = "Say" + dsml(invoke(""))
    for pushes in cuts(text):
        parser = TextReplyParser(start, stop=stop)
        got = message(deltas_of(parser, pushes))
        channel = start.split("_")[0]
        ends = channel == "content" and "\n\n<" in stop
        assert got == {"reasoning": "", "content": "", "tool_calls": []} | {channel: "Say" if ends else text}
        assert parser.tool_calls_seen == 0


@pytest.mark.parametrize("attribute", [STRING, OTHER])
def test_long_arguments_take_linear_time(attribute):
    text = markup("{{ calls}\n" + invoke(parameter("a", "<" + "ab \n" * 25_000 + '"', attribute)))
    for start in ("content", "reasoning"):
        parser, deltas = TextReplyParser(start, tools=TOOLS), []
        started = time.process_time()
        for character in text:
            deltas += parser.push(character)
        assert time.process_time() - started < 5  # about 1 s; quadratic work takes minutes
        arguments = "".join(d.text for d in deltas if d.channel == "arguments")
        assert len(json.loads(arguments)["a"]) == 100_002


@pytest.mark.parametrize("start", ["content", "reasoning"])
def test_long_runs_of_newlines_take_linear_time(start):
    started = time.process_time()
    parser = TextReplyParser(start, tools=TOOLS)
    got = message(deltas_of(parser, "x" + "\n" * 100_000 + "y"))
    assert time.process_time() - started < 5
    assert len(got[start]) == 100_002


# ---- ids, ends and stop strings ------------------------------------------------------------------------------


def test_which_ids_a_delta_consumes(default_tokenizer):
    def ids(text):
        return default_tokenizer.encode(text, added_vocabulary=True).tolist()

    parser = reply_parser(default_tokenizer, "reasoning", tools=TOOLS, stop=["XYZ"])
    bird = ids("🦜")
    assert len(bird) > 1 and len(ids("\n")) == len(ids("<")) == len(ids("X")) == 1
    assert parser.push(ids("\n")) == []
    assert parser.push(bird) == [ReplyDelta("reasoning", "🦜", 1 + len(bird))]
    assert parser.push(ids("\n")) == []
    assert parser.push(ids("<")) == []
    assert parser.push(ids("a")) == [ReplyDelta("reasoning", "\n<a", 3)]
    assert parser.reasoning_tokens == len(bird) + 3
    assert parser.push(ids("\n</think>\n")) == []
    assert parser.push(ids("a")) == [ReplyDelta("content", "a", 4)]
    assert parser.push(ids("X")) == []
    assert parser.push(ids("X")) == [ReplyDelta("content", "X", 1)]  # the second one is held
    assert parser.push(ids("b")) == [ReplyDelta("content", "Xb", 2)]
    call, *arguments = parser.push(ids(markup("\n{{ calls}\n" + invoke(""))))
    assert (call.channel, call.ids) == ("tool_call", len(ids(markup('\n{{ calls}\n{{ invoke name="f"'))))
    assert [d.text for d in arguments] == ["{}"]
    end = [default_tokenizer.eos_id]
    assert parser.push(end) == []
    (rest,) = parser.finish("stop")
    assert (rest.channel, rest.text) == ("content", "")
    assert rest.ids == len(ids(" invoke>")) + 1
    assert parser.reasoning_tokens == len(bird) + 3


def test_control_ids_without_text_end_nothing(default_tokenizer):
    eos, bos, pad = default_tokenizer.eos_id, default_tokenizer.bos_id, default_tokenizer.pad_id
    text = default_tokenizer.encode("never closed").tolist()
    parser = reply_parser(default_tokenizer, "reasoning")
    assert parser.push([bos, *text, pad, eos, *text]) == [
        ReplyDelta("reasoning", "never closed" * 2, 2 * len(text) + 3)
    ]
    assert not parser.ended and parser.reasoning_tokens == 2 * len(text)


def test_a_reply_cut_inside_a_character_shows_one_replacement(default_tokenizer):
    ids = default_tokenizer.encode("ok 🦜").tolist()[:-1]
    for start in TEXT_STARTS:
        deltas = deltas_of(reply_parser(default_tokenizer, start), [[i] for i in ids])
        channel = start.split("_")[0]
        assert message(deltas)[channel] == "ok \ufffd"
        assert deltas[-1].text == "\ufffd"
        assert "\ufffd" not in "".join(d.text for d in deltas[:-1])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", ["reasoning", "content"])
def test_stop_strings_end_the_answer_only(default_tokenizer, start, include):
    text = ("r END</think>" if start == "reasoning" else "") + "\n\nabc\nEND\n"
    ids = default_tokenizer.encode(text, added_vocabulary=True).tolist()
    for pushes in cuts(ids):
        parser = reply_parser(default_tokenizer, start, tools=TOOLS, stop=["no", "\nEND"], include_stop_str=include)
        got = message(deltas_of(parser, pushes))
        assert got["content"] == ("abc\nEND" if include else "abc")
        assert got["reasoning"] == ("r END" if start == "reasoning" else "")
        assert parser.ended and parser.stop_string == "\nEND"
    with pytest.raises(ValueError, match="reply has ended"):
        parser.push(ids)


def test_newlines_after_a_stray_end_of_reasoning_are_content():
    assert message(deltas_of(TextReplyParser("content"), "\n</think>\nx"))["content"] == "\nx"


def test_dropped_newlines_are_no_stop_string():
    parser = TextReplyParser("reasoning", stop=["\n"])
    assert message(deltas_of(parser, "r\n</think>\n\none\ntwo"))["content"] == "one"


def test_stop_strings_do_not_count_in_calls():
    text = "go" + dsml(invoke(parameter("a", "STOP", STRING)))
    got, parser = calls_of(text, stop=["STOP", "<｜"])
    assert got["content"] == "go" and got["tool_calls"] == [{"name": "f", "arguments": '{"a": "STOP"}'}]
    assert parser.stop_string is None


def test_a_forced_call_starts_inside_the_block(default_tokenizer):
    prompt = encode_chat(
        default_tokenizer, [{"role": "user", "content": "Hi"}], thinking=False, tools=TOOLS, tool_choice="required"
    )
    parser = ReplyParser(default_tokenizer, prompt, tools=TOOLS)
    ids = default_tokenizer.encode(markup(invoke("")), added_vocabulary=True)
    assert message(deltas_of(parser, [ids]))["tool_calls"] == [{"name": "f", "arguments": "{}"}]


@pytest.mark.parametrize("bad", ["END", [""], [1]])
def test_bad_stop_strings_are_refused(default_tokenizer, bad):
    with pytest.raises(ValueError, match="sequence of non-empty strings"):
        reply_parser(default_tokenizer, "content", stop=bad)
    with pytest.raises(ValueError, match="sequence of non-empty strings"):
        CompletionText(default_tokenizer, stop=bad)


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "matched"),
    [
        (["MNOPQ"], ["KL", "MN", "OP", "Q"], ["KL", "", "", ""], "MNOPQ"),
        (["MNOPQ"], ["KL", "MN", "OP", "R"], ["KL", "", "", "MNOPR"], None),
        (["delta echo"], ["a del", "ta ech", "o b"], ["a ", "", ""], "delta echo"),
        (["halt"], ["now halting"], ["now "], "halt"),
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["b", "ab"], ["xab"], ["xa"], "b"),
        (["ab", "b"], ["xab"], ["x"], "ab"),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
    ],
)
def test_stop_strings(stop, pieces, expected, matched):
    matcher = StopStrings(stop)
    assert [matcher.push(piece) for piece in pieces] == expected
    assert matcher.matched == matched
    including = StopStrings(stop, include=True)
    assert "".join(map(including.push, pieces)) == "".join(expected) + (matched or "")


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
        if matcher.matched is None:
            output += matcher.push(text[at : at + size])
            at += size
            assert matcher.matched or len(text[:at]) - len(output) < max(map(len, stop), default=1)
    assert output + matcher.release() == kept
    assert (matcher.matched is not None) == bool(completed)


PIECE_TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "🦜", "\n", " the", "bab"]), max_size=12)
STOPS = st.lists(st.sampled_from(["ab", "b", "ba", "🦜a", "the\n", "bab"]), min_size=1, max_size=3)


def first_end(tokenizer, ids, stop, min_tokens) -> int | None:
    """Number of ids after which the text holds a stop string that one after the first `min_tokens` ids completes."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        ends = [end for s in stop for end in range(len(before) + 1, len(text) + 1) if text[:end].endswith(s)]
        if ends and count > min_tokens:
            return count
        before = text
    return None


@settings(max_examples=200)
@given(pieces=PIECE_TEXTS, stop=STOPS, min_tokens=st.integers(0, 12), thought=st.booleans(), data=st.data())
def test_stop_strings_do_not_count_before_so_many_tokens(default_tokenizer, pieces, stop, min_tokens, thought, data):
    ids = [i for piece in pieces for i in default_tokenizer.encode(piece).tolist()]
    end = first_end(default_tokenizer, ids, stop, min_tokens)
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pushes = [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)], strict=True)]
    completion, shown, consumed = CompletionText(default_tokenizer, stop=stop, min_tokens=min_tokens), "", 0
    for push in pushes:
        if not completion.ended:
            text, count = completion.push(push)
            shown, consumed = shown + text, consumed + count
    text, count = completion.finish()
    shown, consumed = shown + text, consumed + count
    assert completion.ended == (end is not None) and consumed == (len(ids) if end is None else end)
    text = default_tokenizer.decode(ids)
    assert text.startswith(shown) if completion.ended else shown == text

    # In a chat, reasoning counts: with as many tokens of it as are wanted at least, any stop string ends the answer.
    thoughts = default_tokenizer.encode("ab" if thought else "", added_vocabulary=True).tolist()
    thoughts = [*(thoughts * 12), default_tokenizer.control_id("</think>")]
    answer = [i for i in ids if i != default_tokenizer.encode("\n").tolist()[0]]  # which a chat drops at the start
    end = first_end(default_tokenizer, answer, stop, max(min_tokens - len(thoughts), 0))
    parser = reply_parser(default_tokenizer, "reasoning", stop=stop, min_tokens=min_tokens)
    deltas = deltas_of(parser, [thoughts, *([i] for i in answer)])
    assert parser.ended == (end is not None)
    assert sum(d.ids for d in deltas) == len(thoughts) + (len(answer) if end is None else end)


def test_text_that_cannot_become_a_stop_string_is_not_held_while_none_counts():
    matcher = StopStrings(["ab", "wxyz"])
    matcher.enabled = False
    assert matcher.push("ab") == "ab" and matcher.push("wxyz") == "wxyz" and matcher.push("wxy") == ""
    matcher.enabled = True
    assert matcher.push("z") == "" and matcher.matched == "wxyz"


# ---- raw completions and JSON answers ------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    text=st.lists(st.sampled_from(["a", "b", "ab", "🦜", "漢", "\n", "<think>", " the"])).map("".join),
    stop=st.lists(st.sampled_from(["ab", "\n\n", "🦜a", "the<"]), max_size=2),
    include=st.booleans(),
    cut_end=st.booleans(),
    data=st.data(),
)
def test_completions_do_not_depend_on_the_cuts(default_tokenizer, text, stop, include, cut_end, data):
    ids = default_tokenizer.encode(text, added_vocabulary=True).tolist()[: -1 if cut_end else None]
    shown = default_tokenizer.decode(ids)
    expected = StopStrings(stop, include=include)
    kept = expected.push(shown) + expected.release()
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    completion, got, counted = CompletionText(default_tokenizer, stop=stop, include_stop_str=include), "", 0
    for a, b in zip([0, *at], [*at, len(ids)], strict=True):
        if not completion.ended:
            piece, count = completion.push(ids[a:b])
            assert piece or not count
            if piece and not count:  # the rest of an id's text, of which a part is out already
                assert default_tokenizer.decode(ids[:counted]).startswith(got + piece)
            got, counted = got + piece, counted + count
            assert default_tokenizer.decode(ids[:counted]).startswith(got.rstrip("\ufffd")) or completion.ended
    piece, count = completion.finish()
    assert got + piece == kept
    assert completion.stop_string == expected.matched
    assert counted + count == len(ids) if not completion.ended else counted + count <= len(ids)


def test_the_rest_of_an_ids_text_is_freed_without_a_further_id(default_tokenizer):
    """An id belongs to the output that shows its first character; a stop string may hold the others back."""
    completion = CompletionText(default_tokenizer, stop=["the<", "🦜a"])
    the, parrot = default_tokenizer.encode(" the").tolist(), default_tokenizer.encode("🦜").tolist()
    assert len(the) == 1
    assert completion.push(the) == (" ", 1)
    assert completion.push(parrot) == ("the", 0)
    assert completion.finish() == ("🦜", len(parrot))


def test_ids_of_a_completion_ride_with_the_text_that_frees_them(default_tokenizer):
    completion = CompletionText(default_tokenizer, stop=["XYZ"])
    a, x, y, b = (default_tokenizer.encode(c).tolist() for c in "aXYb")
    assert completion.push(a + x) == ("a", 1)
    assert completion.push(y) == ("", 0)
    assert completion.push(b) == ("XYb", 3)
    assert completion.push([default_tokenizer.eos_id]) == ("", 0)
    assert completion.finish() == ("", 1)
    stopped = CompletionText(default_tokenizer, stop=["X"])
    stopped.push(x)
    with pytest.raises(ValueError, match="text has ended"):
        stopped.push(a)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (' {"a": 1}\n', ' {"a": 1}\n'),
        ("12", "12"),
        ('```json\n{"a": [1]}\n```', '{"a": [1]}'),
        ('Here [note]:\n```\n{"a": "}"}\n``` Bye {', '{"a": "}"}'),
        ('See [1]: {"a": 1, "b": 2} done', '{"a": 1, "b": 2}'),
        ("no value", "no value"),
        ("", ""),
        ("{" * 100_000, "{" * 100_000),
        ("[" * 100_000, "[" * 100_000),
        ('Take [note] or {"x": "]"} or [1', '{"x": "]"}'),
        ('[x, {"a": 1}] {"b": 2}', '{"b": 2}'),
        (f'It is {{"a": {"1" * 5000}}}.', f'{{"a": {"1" * 5000}}}'),
        ('"{"', '"{"'),
    ],
    ids=range(14),
)
def test_json_inside_an_answer(content, expected):
    assert json_content(content) == expected


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{}', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"{', max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.lists(JSON_VALUES, min_size=1, max_size=4), st.sampled_from(["", "Sure: ", "```json\n"]), st.data())
def test_a_broken_answer_is_not_replaced_by_a_value_inside_it(values, before, data):
    written = json.dumps(values)
    cut = written[: data.draw(st.integers(1, len(written) - 1))]
    items = [json.dumps(value) for value in values]
    items[data.draw(st.integers(0, len(items) - 1))] = "oops"
    for broken in (cut, f"[{', '.join(items)}]", f'{{"a": oops, "b": {written}}}', f"{{a: {written}}}"):
        assert json_content(before + broken) == before + broken


@pytest.mark.parametrize(
    "content",
    ["[1," * 900 + "1," * 300_000, "[1,x]" * 60_000, '["a' * 100_000, '["\\"' * 100_000, "{ " * 300_000, "[[" * 200_000,
     ("[1," * 500 + "9" * 5000) * 50, '{"a":' * 50_000 + "[x" + "]" * 50_000, ("[" + " " * 1000) * 500],
    ids=range(9),
)  # fmt: skip
def test_looking_for_json_takes_linear_time(content):
    started = time.process_time()
    assert json_content(content) == content
    assert time.process_time() - started < 2  # at most 0.2 s
