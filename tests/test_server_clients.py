"""Clients that people have, unmodified, against a real server (http_api section 9)."""

import asyncio
import json
import re
import shutil
import subprocess
import time

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel
from server_api import best, logprob
from talking_server import ANSWER, PARAMETERS, THOUGHT, serving
from waiting import eventually

from dsv4jax.engine.request import QueueFull

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ARGUMENTS = {"city": "Ulm", "days": 3}
OFF = {"thinking": {"type": "disabled"}}


class Person(BaseModel):
    name: str
    age: int


def asked(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(default_tokenizer):
    from dsv4jax.engine.grammar import GrammarCompiler

    with serving(default_tokenizer, GrammarCompiler(default_tokenizer)) as server:
        yield server


@pytest.fixture
def slow(default_tokenizer):
    """A server whose long answers take a minute."""
    with serving(default_tokenizer, shutdown_timeout=0.1) as server:
        server.engine.pause = 0.2
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


# The OpenAI client: chat


def test_openai_chat(client):
    done = client.chat.completions.create(model="flash", messages=asked("Hi"), seed=1, max_completion_tokens=200)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == (ANSWER, THOUGHT, None)
    assert done.choices[0].finish_reason == "stop" and done.object == "chat.completion" and done.model == "flash"
    usage = done.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    body = {"chat_template_kwargs": {"thinking": False}, "top_k": 5}
    done = client.chat.completions.create(model="flash", messages=asked("Hi"), extra_body=body)
    assert (done.choices[0].message.content, done.choices[0].message.reasoning_content) == (ANSWER, None)


def test_openai_chat_stream(client):
    options = {"model": "flash", "messages": asked("Hi")}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert deltas[0].role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == client.chat.completions.create(**options).usage


def test_openai_chat_stream_helper(client):
    with client.chat.completions.stream(model="flash", messages=asked("the weather?"), tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_completion().choices[0]
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= set(kinds)
    assert done.finish_reason == "tool_calls" and done.message.content == "Looking."
    assert json.loads(done.message.tool_calls[0].function.arguments) == ARGUMENTS


def test_openai_tools_and_their_results(client):
    options = {"model": "flash", "tools": [WEATHER]}
    message = client.chat.completions.create(messages=asked("the weather?"), **options).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)

    calls = {}
    for chunk in client.chat.completions.create(messages=asked("the weather?"), stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or ():
            known = calls.setdefault(piece.index, {"arguments": ""})
            known |= {"id": piece.id, "name": piece.function.name} if piece.id else {}
            known["arguments"] += piece.function.arguments
    assert list(calls) == [0] and calls[0]["name"] == "weather" and json.loads(calls[0]["arguments"]) == ARGUMENTS

    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    done = client.chat.completions.create(messages=[*asked("q"), message, result], **options)
    assert done.choices[0].message.content == ANSWER

    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        done = client.chat.completions.create(messages=asked("the weather?"), tool_choice=choice, **options)
        assert done.choices[0].finish_reason == "tool_calls"


def test_openai_structured_output(client):
    done = client.chat.completions.parse(model="flash", messages=asked("json"), response_format=Person)
    assert done.choices[0].message.parsed == Person(name="Ada", age=36)
    tool = openai.pydantic_function_tool(Person, name="weather")  # strict, with its own schema
    done = client.chat.completions.parse(model="flash", messages=asked("Hi"), tools=[tool])
    assert done.choices[0].message.content == ANSWER


def test_openai_logprobs_and_choices(client):
    done = client.chat.completions.create(
        model="flash", messages=asked("Hi"), logprobs=True, top_logprobs=3, n=3, extra_body=OFF
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    for choice in done.choices:
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).startswith(ANSWER.encode())
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert done.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in done.choices)


# The OpenAI client: completions, models, errors


def test_openai_completions_and_models(client):
    names = [model.id for model in client.models.list()]
    assert names == ["flash", "other"] and client.models.retrieve("other").id == "other"
    done = client.completions.create(model="other", prompt=["a", "b"], max_tokens=9, n=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3] and done.model == "other"
    assert done.choices[3].text.startswith("choice 1") and done.usage.completion_tokens == 36
    pieces = list(client.completions.create(model="flash", prompt="a", max_tokens=9, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text
    echoed = client.completions.create(model="flash", prompt="a b", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert echoed.text == "a b" and echoed.logprobs.token_logprobs[0] is None


def test_openai_errors(client, server, default_tokenizer):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="flash", messages=asked("Hi"), temperature=9, stream=True)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="gpt", messages=asked("Hi"))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="flash", input="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(model="flash", messages=asked("word " * 5000))
    server.engine.refusals = [QueueFull("the queue is full", 1)]
    with pytest.raises(openai.RateLimitError):
        create(model="flash", messages=asked("Hi"))
    server.engine.ending = ("error", "generation failed")
    try:
        with pytest.raises(openai.InternalServerError):
            create(model="flash", messages=asked("Hi"))
        with pytest.raises(openai.APIError, match="generation failed"):
            list(create(model="flash", messages=asked("Hi"), stream=True))
        with pytest.raises(openai.APIError, match="generation failed"):
            list(client.responses.create(model="flash", input="Hi", stream=True))
    finally:
        server.engine.ending = None


def test_openai_keys_and_limits(default_tokenizer):
    with serving(default_tokenizer, api_keys=("secret",), max_body_bytes=2000) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.responses.create(input="Hi", model="flash").output_text == ANSWER
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(model="flash", messages=asked("x" * 3000))
            assert caught.value.status_code == 413
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").chat.completions.create(model="flash", messages=asked("Hi"))
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            options = {"model": "flash", "max_tokens": 100, "messages": asked("Hi")}
            assert client.messages.create(**options).content[-1].text == ANSWER
            with pytest.raises(anthropic.ContentTooLargeError) as caught:
                client.messages.create(**options | {"messages": asked("x" * 3000)})
            assert caught.value.body["error"]["type"] == "request_too_large"
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.with_options(api_key="wrong").messages.create(**options)
            assert caught.value.body["error"]["type"] == "authentication_error"
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
        ):
            response = httpx.post(f"{server.url}/v1/messages", json=options, headers=headers, timeout=60)
            assert response.status_code == status, "clients before this one have a header of their own"


def test_openai_retries_when_told_to_wait(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client:
        server.engine.refusals = [QueueFull("the queue is full", 1)]
        begin = time.monotonic()
        assert client.chat.completions.create(model="flash", messages=asked("Hi")).choices[0].message.content == ANSWER
        assert time.monotonic() - begin > 0.9


def test_openai_time_limit_and_leaving_early(slow):
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "flash", "messages": asked("a long one")}
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**options, timeout=0.2)
        eventually(lambda: slow.engine.open == 0)
        stream = client.chat.completions.create(**options, stream=True)
        next(iter(stream))
        assert slow.engine.open == 1
        stream.close()
        eventually(lambda: slow.engine.open == 0)
        with client.responses.create(model="flash", input="a long one", stream=True) as stream:
            next(iter(stream))
            assert slow.engine.open == 1
        eventually(lambda: slow.engine.open == 0)


def test_openai_async(slow):
    async def use():
        async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
            slow.engine.pause = 0
            create = client.chat.completions.create
            done = await asyncio.gather(*[create(model="flash", messages=asked("Hi")) for _ in range(8)])
            assert {one.choices[0].message.content for one in done} == {ANSWER}
            assert len({one.id for one in done}) == 8
            texts = []
            async for chunk in await create(model="flash", messages=asked("Hi"), stream=True, extra_body=OFF):
                texts.append(chunk.choices[0].delta.content or "")
            assert "".join(texts) == ANSWER
            async with client.responses.stream(model="flash", input="Hi") as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_response()).output_text == ANSWER
            slow.engine.pause = 0.2
            task = asyncio.create_task(create(model="flash", messages=asked("a long one")))
            while not slow.engine.open:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(use())
    eventually(lambda: slow.engine.open == 0)


# The OpenAI client: responses


def test_openai_responses(client):
    response = client.responses.create(model="flash", input="Hi", instructions="Be brief.", store=True)
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert response.output_text == message.content[0].text == ANSWER
    assert (response.status, response.error, response.instructions) == ("completed", None, "Be brief.")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.input_tokens_details.cached_tokens == 0
    response = client.responses.create(model="flash", input="Hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parsed = client.responses.parse(model="flash", input="json", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)


def test_openai_responses_stream(client):
    events = list(client.responses.create(model="flash", input="Hi", stream=True))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
    assert events[-1].response.output_text == ANSWER

    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    with client.responses.stream(model="flash", input="the weather?", tools=[tool]) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call = response.output[-1]
    assert json.loads(call.arguments) == json.loads(done[0].arguments) == ARGUMENTS

    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [*asked("q"), *client.responses.create(model="flash", input="the weather?", tools=[tool]).output]
    history[-1].call_id = call.call_id
    answer = client.responses.create(model="flash", input=[*history, output], tools=[tool])
    assert answer.output_text == ANSWER

    with client.responses.stream(model="flash", input="json", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_openai_responses_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="flash", input="Hi", previous_response_id="resp_1", stream=True)
    assert (caught.value.code, caught.value.param) == ("unsupported", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


# The Anthropic client


def test_anthropic_messages(claude):
    options = {"model": "flash", "max_tokens": 200}
    done = claude.messages.create(messages=asked("Hi"), system="Be brief.", **options)
    thought, text = done.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", THOUGHT, ANSWER) and thought.signature
    assert (done.stop_reason, done.role, done.type) == ("end_turn", "assistant", "message")
    assert done.usage.input_tokens > 0 and done.usage.cache_read_input_tokens == 0
    assert done.usage.output_tokens > done.usage.output_tokens_details.thinking_tokens > 0
    done = claude.messages.create(messages=asked("Hi"), thinking={"type": "disabled"}, stop_sequences=["日"], **options)
    assert (done.stop_reason, done.stop_sequence, done.content[0].text) == ("stop_sequence", "日", "Grüße aus ")
    done = claude.messages.create(messages=asked("Hi"), model="flash", max_tokens=2)
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 2
    parsed = claude.messages.parse(messages=asked("json"), output_format=Person, **options)
    assert parsed.parsed_output == Person(name="Ada", age=36)


def test_anthropic_stream(claude):
    options = {"model": "flash", "max_tokens": 200, "messages": asked("Hi")}
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        streamed = stream.get_final_message()
    whole = claude.messages.create(**options)
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].thinking == THOUGHT and streamed.content[0].signature
    assert (streamed.content[1].text, streamed.stop_reason) == (whole.content[1].text, whole.stop_reason)
    assert streamed.usage.model_dump() == whole.usage.model_dump()
    names = [event.type for event in claude.messages.create(stream=True, **options)]
    assert (names[0], names[-2], names[-1]) == ("message_start", "message_delta", "message_stop")


def test_anthropic_tools(claude):
    tool = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
    options = {"model": "flash", "max_tokens": 200, "tools": [tool]}
    done = claude.messages.create(messages=asked("the weather?"), **options)
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use"]
    use = done.content[-1]
    assert (use.name, use.input, done.stop_reason) == ("weather", ARGUMENTS, "tool_use")
    with claude.messages.stream(messages=asked("the weather?"), **options) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        assert stream.get_final_message().content[-1].input == ARGUMENTS == json.loads("".join(pieces))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]}
    history = [*asked("q"), {"role": "assistant", "content": done.content}, result]
    assert claude.messages.create(messages=history, **options).content[-1].text == ANSWER
    choice = {"type": "tool", "name": "weather"}
    done = claude.messages.create(messages=asked("the weather?"), tool_choice=choice, **options)
    assert done.stop_reason == "tool_use"
    count = claude.messages.count_tokens(messages=history, model="flash", tools=[tool]).input_tokens
    assert count == claude.messages.create(messages=history, **options).usage.input_tokens


def test_anthropic_errors(claude, server):
    options = {"model": "flash", "max_tokens": 100, "messages": asked("Hi")}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            claude.messages.create(**options, extra_body={"temperature": 9}, stream=stream)
        assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.body["error"]["param"] == "temperature"
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**options | {"model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    server.engine.refusals = [QueueFull("the queue is full", 1)]
    with pytest.raises(anthropic.RateLimitError):
        claude.messages.create(**options)
    server.engine.ending = ("error", "generation failed")
    try:
        with pytest.raises(anthropic.InternalServerError):
            claude.messages.create(**options)
        with pytest.raises(anthropic.APIStatusError, match="generation failed"):
            list(claude.messages.create(**options, stream=True))
    finally:
        server.engine.ending = None


def test_anthropic_async_and_leaving_early(slow):
    async def use():
        async with anthropic.AsyncAnthropic(base_url=slow.url, api_key="none", max_retries=0) as client:
            options = {"model": "flash", "max_tokens": 900}
            with pytest.raises(anthropic.APITimeoutError):
                await client.messages.create(messages=asked("a long one"), timeout=0.2, **options)
            async with client.messages.stream(messages=asked("a long one"), **options) as stream:
                async for event in stream:
                    if event.type == "content_block_delta":
                        break
                assert slow.engine.open
            await asyncio.to_thread(eventually, lambda: not slow.engine.open)
            slow.engine.pause = 0
            async with client.messages.stream(messages=asked("Hi"), **options) as stream:
                assert await stream.get_final_text() == ANSWER

    asyncio.run(use())


def test_a_server_that_ends_tells_the_stream(default_tokenizer):
    with serving(default_tokenizer, shutdown_timeout=0.1) as server:
        server.engine.pause = 0.02
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = client.messages.create(model="flash", max_tokens=900, messages=asked("a long one"), stream=True)
            next(iter(stream))
            server._server.begin_shutdown()
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(stream)
    assert caught.value.body["error"]["type"] == "overloaded_error"


# curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server):
    def curl(path, *options, body=None):
        data = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        command = ["curl", "-sS", "-w", "\n%{http_code} %{content_type}", *options, *data, server.url + path]
        out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        text, _, status = out.rpartition("\n")
        return text, status

    body = {"messages": asked("Hi")} | OFF
    text, status = curl("/v1/chat/completions", body=body)
    assert status == "200 application/json" and json.loads(text)["choices"][0]["message"]["content"] == ANSWER
    text, status = curl("/v1/chat/completions", "-N", body=body | {"stream": True})
    assert status == "200 text/event-stream; charset=utf-8"
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])
    text, status = curl("/v1/messages", "-N", body=body | {"max_tokens": 50, "stream": True})
    assert re.findall("^event: (.*)$", text, re.M)[-1] == "message_stop" and "[DONE]" not in text
    text, status = curl("/v1/responses", "-N", body={"input": "Hi", "stream": True})
    assert re.findall("^event: (.*)$", text, re.M)[-1] == "response.completed"
    text, status = curl("/v1/chat/completions", body={"messages": []})
    assert status == "400 application/json" and json.loads(text)["error"]["param"] == "messages"
    text, status = curl("/v1/messages", body={"messages": []})
    assert status == "400 application/json" and json.loads(text)["type"] == "error"
    text, status = curl("/v1/chat/completions", "-d", "{}", "-H", "Content-Type: text/plain")
    assert status == "400 application/json" and json.loads(text)["error"]["code"] == "unsupported_media_type"
    assert curl("/health")[1].startswith("200")


# Benchmarks and evaluations


def test_a_benchmark_like_that_of_vllm(server):
    """The requests of `vllm bench serve`, and how it counts."""

    async def one(http, number, prompt):
        options = {"stream": True, "stream_options": {"include_usage": True}, "repetition_penalty": 1.0}
        options |= {"ignore_eos": True, "model": "flash"}
        if number % 2:
            path, limit = "/v1/completions", {"prompt": prompt, "max_tokens": 16, "logprobs": None}
        else:
            content = [{"type": "text", "text": prompt}]
            path = "/v1/chat/completions"
            limit = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 16}
        headers = {"x-request-id": f"bench-{number}"}
        begin, times, usage = time.perf_counter(), [], None
        async with http.stream("POST", path, json=options | limit, headers=headers) as response:
            assert response.status_code == 200 and response.headers["x-request-id"] == f"bench-{number}"
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if event["choices"]:
                    choice = event["choices"][0]
                    delta = choice.get("delta", {})
                    if choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"):
                        times.append(time.perf_counter() - begin)
                elif event.get("usage"):
                    usage = event["usage"]
        return times, usage

    async def bench():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "flash"
            body = {"model": "flash", "prompt": "some random words", "add_special_tokens": False}
            tokens = (await http.post("/tokenize", json=body)).json()["tokens"][:4]
            text = (await http.post("/detokenize", json={"model": "flash", "tokens": tokens})).json()["prompt"]
            results = await asyncio.gather(*[one(http, number, f"{text} {number}") for number in range(20)])
            return results, (await http.get("/metrics")).text

    results, metrics = asyncio.run(bench())
    for times, usage in results:
        assert times and times == sorted(times) and 0 < usage["completion_tokens"] <= 16 and usage["prompt_tokens"]
    assert "vllm:num_requests_running" in metrics


def test_an_evaluation_like_that_of_lm_eval(server, default_tokenizer):
    """Log-likelihoods by echo as `local-completions` of lm-eval asks for them, and its remote tokenizer."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        info = http.get("/tokenizer_info").json()
        assert info["eos_token"] and info["model_max_length"] and info["chat_template"] is None
        texts = ["The sky is blue", "Two and two make four", "x"]
        prompts = []
        for text in texts:
            body = {"prompt": text, "add_special_tokens": False}
            prompts.append(http.post("/tokenize", json=body).json()["tokens"])
            assert http.post("/detokenize", json={"tokens": prompts[-1]}).json()["prompt"] == text
        body = {"model": "flash", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
        answer = http.post("/v1/completions", json=body | {"echo": True}).json()
        for prompt, choice in zip(prompts, sorted(answer["choices"], key=lambda one: one["index"]), strict=True):
            found = choice["logprobs"]
            assert len(found["token_logprobs"]) == len(prompt) + 1, "the prompt and one token"
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            columns = (found[name][1:-1] for name in ("token_logprobs", "top_logprobs", "tokens"))
            for token_id, value, top, text in zip(prompt[1:], *columns, strict=True):
                assert value == logprob(token_id) == top[text]
                greedy = value == max(top.values())
                assert greedy == (logprob(token_id) >= max(p for _, p in best(token_id, 1)))
        body = {"model": "flash", "prompt": prompts[0], "max_tokens": 8, "temperature": 0, "stop": ["goes"], "seed": 1}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "choice 0 "
        body = {
            "model": "flash",
            "messages": asked("Hi"),
            "max_tokens": 50,
            "temperature": 0,
            "stop": ["日"],
            "seed": 1,
        }
        message = http.post("/v1/chat/completions", json=body | OFF).json()["choices"][0]["message"]
        assert message["content"] == "Grüße aus "
