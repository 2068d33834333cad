"""What every protocol promises about errors: they name the field as the client knows it, and stay short and cheap."""

import json
import time

import pytest
from json_changes import replacements
from named_events import call
from server_api import context
from test_server_chat import TOOLS
from test_server_messages import EVERYTHING as MESSAGES_BODY
from test_server_responses import EVERYTHING as RESPONSES_BODY

from dsv4jax.server.chat_completions import chat_completions
from dsv4jax.server.chat_mapping import ClientPaths
from dsv4jax.server.completions import completions
from dsv4jax.server.error_formats import error_body
from dsv4jax.server.errors import ApiError, invalid_value
from dsv4jax.server.messages import messages
from dsv4jax.server.responses import responses
from dsv4jax.server.tokenize import tokenize

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
CHAT_BODY = {
    "model": "flash",
    "max_tokens": 3,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Speak json."}]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "hm", "content": "Looking.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
    ],
    "bad_words": ["bad"],
    "chat_template_kwargs": {"thinking": True},
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "stop_token_ids": [9],
    "temperature": 0.5,
    "thinking": {"type": "enabled"},
    "tool_choice": "auto",
    "tools": TOOLS,
}
COMPLETION_BODY = {
    "model": "flash",
    "prompt": ["a", [5, 6]],
    "max_tokens": 3,
    "stop": ["x"],
    "bad_words": ["bad"],
    "logit_bias": {"5": 1},
    "temperature": 0.5,
    "cache_salt": "s",
    "request_id": "r",
}
FORCED = {"type": "function", "function": {"name": "look"}}
BODIES = {
    "chat": (chat_completions, CHAT_BODY),
    "forced": (chat_completions, CHAT_BODY | {"tool_choice": FORCED, "response_format": {"type": "text"}}),
    "tokenize": (tokenize, {name: CHAT_BODY[name] for name in ("messages", "tools", "response_format")}),
    "completions": (completions, COMPLETION_BODY),
    "messages": (messages, MESSAGES_BODY),
    "responses": (responses, RESPONSES_BODY),
}
PATHS = {messages: "/v1/messages", responses: "/v1/responses"}


def refused(route, server, body) -> ApiError | None:
    """How the server refuses a request, if it does."""
    try:
        call(route, server, body)
    except ApiError as error:
        return error
    return None


def is_short(route, error: ApiError) -> bool:
    return len(error_body(error, PATHS.get(route, "/"))) < 4096 and len(error.param or "") < 200


HUGE = {
    "string": "x" * 20_000,
    "paths": "messages[0].stop tools[0].function " * 500,
    "escapes": '"\\\n\0' * 5_000,
    "number": 10**300,
    "list": ["y" * 10_000, ["y" * 10_000]],
    "object": {"z" * 10_000: "y" * 10_000, "type": "y" * 10_000},
    "many": [{"type": "function", "name": f"n{i}"} for i in range(1000)],
}


@pytest.mark.parametrize("huge", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("name", BODIES)
def test_errors_are_short_and_name_a_field_whatever_is_large(default_tokenizer, name, huge):
    route, good = BODIES[name]
    seen = 0
    for path, body, _ in replacements(good, huge):
        error = refused(route, context(default_tokenizer, [1], limit=10**7), body)
        if error is not None:
            seen += 1
            assert is_short(route, error), path
            assert error.param or error.code == "invalid_json", path
    assert seen > 5


@pytest.fixture(scope="module")
def grammars(default_tokenizer):
    from dsv4jax.engine.grammar import GrammarCompiler

    return GrammarCompiler(default_tokenizer)


LONG = "x" * 20_000
TAG = {"begin": LONG, "end": "e", "schema": {}}
BAD_GRAMMARS = {
    "schema": ({"structured_outputs": {"json": json.dumps(LONG)}}, "structured_outputs.json"),
    "no JSON": ({"structured_outputs": {"json": LONG}}, "structured_outputs.json"),
    "keyword": ({"structured_outputs": {"json": {LONG: 1, "not": {}}}}, "structured_outputs.json"),
    "regex": ({"structured_outputs": {"regex": "(" + LONG}}, "structured_outputs.regex"),
    "grammar": ({"structured_outputs": {"grammar": "start: " + LONG}}, "structured_outputs.grammar"),
    "tag": (
        {"structured_outputs": {"structural_tag": {"structures": [TAG], "triggers": ["y" * 20_000]}}},
        "structured_outputs.structural_tag.structures[0].begin",
    ),
    "tool": (
        {
            "tools": [
                TOOLS[0],
                {
                    "type": "function",
                    "function": {
                        "name": "find",
                        "parameters": {"type": "object", "properties": {'"' + LONG: {"type": "string"}}},
                    },
                },
            ]
        },
        "tools[1].function.parameters.properties",
    ),
    "bad word": ({"bad_words": ["\u3000" * 1000]}, "bad_words"),
}


@pytest.mark.parametrize(("change", "param"), BAD_GRAMMARS.values(), ids=BAD_GRAMMARS)
def test_errors_of_grammars_are_short(default_tokenizer, grammars, change, param):
    server = context(default_tokenizer, [1], grammars=grammars)
    error = refused(chat_completions, server, {"messages": [{"role": "user", "content": "Hi"}]} | change)
    assert error.param == param and is_short(chat_completions, error)
    assert error.message.startswith(param)


def deep(levels: int) -> dict:
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


BAD_PARAMETERS = {
    "the grammar's limit": deep(100),
    "deepseek-recipe's limit": deep(130),
    "no schema": {"type": "object", "properties": {"a": {"type": "nope"}}},
    "no object": {"type": "object", "properties": 5},
}
FLAT_TOOLS = [{"name": "look"}, {"name": "find"}, {"name": "bad"}]


def choices_of(protocol: str) -> list:
    """The tool choices of a protocol that list the third of `FLAT_TOOLS`."""
    return {
        "chat": [None, "required", {"type": "function", "function": {"name": "bad"}}],
        "messages": [None, {"type": "any"}, {"type": "tool", "name": "bad"}],
        "responses": [
            *(None, "required", {"type": "function", "name": "bad"}),
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "bad"}]},
        ],
    }[protocol]


@pytest.mark.parametrize("parameters", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
@pytest.mark.parametrize(
    ("protocol", "choice"),
    [(protocol, choice) for protocol in ("chat", "messages", "responses") for choice in choices_of(protocol)],
    ids=str,
)
def test_the_parameters_of_a_tool_have_the_clients_path(default_tokenizer, grammars, protocol, choice, parameters):
    schemas = [{"type": "object", "properties": {}}, {"type": "object", "properties": {}}, parameters]
    if protocol == "chat":
        route, body, param = chat_completions, {"messages": [{"role": "user", "content": "q"}]}, "function.parameters"
        functions = [tool | {"parameters": schema} for tool, schema in zip(FLAT_TOOLS, schemas, strict=True)]
        tools = [{"type": "function", "function": function} for function in functions]
    elif protocol == "messages":
        route, body, param = messages, {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}, "input_schema"
        tools = [tool | {"input_schema": schema} for tool, schema in zip(FLAT_TOOLS, schemas, strict=True)]
    else:
        route, body, param = responses, {"input": "q"}, "parameters"
        tools = [
            tool | {"type": "function", "parameters": schema} for tool, schema in zip(FLAT_TOOLS, schemas, strict=True)
        ]
    body |= {"tools": tools} | ({} if choice is None else {"tool_choice": choice})
    error = refused(route, context(default_tokenizer, [1], grammars=grammars), body)
    assert (error.status, error.param) == (400, f"tools[2].{param}")
    assert error.message.startswith(f"tools[2].{param}: ")


@pytest.mark.parametrize("strict", ["yes", 1, True])
def test_strict_has_the_clients_path(default_tokenizer, strict):
    server = context(default_tokenizer, [1])
    tools = [{"name": "f", "input_schema": {"type": "object"}}] * 2
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    body["tools"] = [tools[0], tools[1] | {"name": "g", "strict": strict}]
    assert refused(messages, server, body).param == "tools[1].strict"
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "strict": strict}]
    assert refused(responses, server, {"input": "q", "tools": tools}).param == "tools[1].strict"


@pytest.mark.parametrize("schema", [*BAD_PARAMETERS.values(), {"type": "nope"}], ids=[*BAD_PARAMETERS, "type"])
def test_the_schema_of_an_answer_has_the_clients_path(default_tokenizer, grammars, schema):
    server = context(default_tokenizer, [1], grammars=grammars)
    question = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    chat_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for route, body, param in (
        (chat_completions, question | {"response_format": chat_format}, "response_format.json_schema.schema"),
        (
            messages,
            question | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
        (
            responses,
            {"input": "q", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            "text.format.schema",
        ),
    ):
        error = refused(route, server, body)
        assert (error.status, error.param) == (400, param) and error.message.startswith(f"{param}: ")


MAY_BE_TEXT = ("content", "system", "output", "input", "prompt")
IGNORED = ("annotations", "summary")


@pytest.mark.parametrize("name", [name for name in BODIES if name != "forced"])
def test_what_is_empty_or_false_is_not_taken_for_a_list_or_an_object(default_tokenizer, name):
    route, good = BODIES[name]
    good = good | {"tools": good["tools"][:1]} if "tools" in good else good  # those that the prompt lists
    seen = 0
    for empty in (False, 0, "", [], {}):
        for path, body, replaced in replacements(good, empty):
            last = path.rpartition(".")[2]
            if not isinstance(replaced, list | dict) or type(replaced) is type(empty) or last in IGNORED:
                continue
            if empty == "" and last in MAY_BE_TEXT and not isinstance(replaced, dict):
                continue
            if empty is False and ".properties." in path:  # a schema
                continue
            error = refused(route, context(default_tokenizer, [1]), body)
            assert error is not None, (path, empty)
            assert error.status == 400 and error.code in ("invalid_value", "unsupported")
            assert error.param.startswith(path) or path.startswith(error.param), (path, empty, error.param)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("route", "change", "param"),
    [
        (messages, {"thinking": {}}, "thinking.type"),
        (messages, {"thinking": {"type": "disabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        (messages, {"tool_choice": {}}, "tool_choice.type"),
        (messages, {"container": {}}, "container"),
        (messages, {"container": ""}, "container"),
        (messages, {"mcp_servers": {}}, "mcp_servers"),
        (messages, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (messages, {"tools": [MESSAGES_BODY["tools"][0] | {"type": ""}]}, "tools[0].type"),
        (messages, {"tools": [MESSAGES_BODY["tools"][0] | {"description": False}]}, "tools[0].description"),
        (responses, {"tool_choice": {"type": "allowed_tools", "tools": [{"name": "look"}]}}, "tool_choice.mode"),
        (
            responses,
            {"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [{"name": "look"}]}},
            "tool_choice.mode",
        ),
        (
            responses,
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["look"]}]}},
            "tool_choice.tools[0].name",
        ),
        (responses, {"input": [{"type": "", "role": "user", "content": "x"}]}, "input[0].type"),
        (responses, {"input": [{"type": "reasoning", "content": ""}]}, "input[0].content"),
        (chat_completions, {"thinking": {}}, "thinking.type"),
    ],
    ids=lambda case: json.dumps(case)[:60] if isinstance(case, dict) else None,
)
def test_values_of_a_wrong_type_are_named(default_tokenizer, route, change, param):
    good = {messages: MESSAGES_BODY, responses: RESPONSES_BODY, chat_completions: CHAT_BODY}[route]
    error = refused(route, context(default_tokenizer, [1]), good | change)
    assert (error.status, error.param) == (400, param)


def test_no_servers_of_tools_are_none(default_tokenizer):
    assert refused(messages, context(default_tokenizer, [1]), MESSAGES_BODY | {"mcp_servers": []}) is None


def test_long_names_cost_no_time(default_tokenizer):
    use = {"type": "tool_use", "id": "a" + ".a" * 50_000, "name": "f", "input": {}}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}]}
    started = time.process_time()
    error = refused(messages, context(default_tokenizer), body)
    assert time.process_time() - started < 2  # quadratic work takes a minute, on the event loop
    assert error.param == "messages[1].content[0]"


def test_paths_become_the_clients():
    paths = ClientPaths({"stop": "stop_sequences"})
    for i in range(1000):
        paths.note(f"tools[{i}].function", f"tools[{i}]")
    paths.note("tools[7].function.parameters", "tools[7].input_schema")
    tail = ".a" * 200_000
    for chat_path, path in {
        "tools[7].function.parameters.properties": "tools[7].input_schema.properties",
        "tools[8].function.parameters": "tools[8].parameters",
        "tools[8].functions": "tools[8].functions",
        "tools[8]": "tools[8]",
        "stop[1]": "stop_sequences[1]",
        "stopped": "stopped",
        "stop" + tail: "stop_sequences" + tail,
        "other" + tail: "other" + tail,
    }.items():
        started = time.process_time()
        with pytest.raises(ApiError) as caught, paths.in_errors():
            raise invalid_value(chat_path, f"{chat_path} is wrong; {chat_path} is")
        assert time.process_time() - started < 2
        assert (caught.value.param, caught.value.message) == (path, f"{path} is wrong; {path} is")


def test_many_allowed_tools_take_linear_time(default_tokenizer):
    tools = [{"type": "function", "name": f"function_{i}"} for i in range(30_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    started = time.process_time()
    error = refused(responses, context(default_tokenizer, [1]), {"input": "q", "tools": tools, "tool_choice": choice})
    assert time.process_time() - started < 5  # about 1 s; quadratic work takes 15 s
    assert error.code == "context_length_exceeded"
