"""Requests to servers of OpenAI's completions or chat completions, and what comes back.

| api | endpoint | prompt | outputs in the history |
|---|---|---|---|
| tokens | /v1/completions | token ids | those of the server, which it gives with `return_token_ids` |
| text | /v1/completions | words | the workload's own |
| chat | /v1/chat/completions | words, in messages | the workload's own |

Words are a fixed mapping of ids, about a token each for most tokenizers.

Requests are streamed. Token counts are those of the `usage` that ends a stream; an answer without it is an error, and
so is one that breaks off.
"""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Literal

import httpx
import numpy as np

from dsv4jax.bench.traffic.sessions import ASSISTANT, SessionTurn, Tokens

Api = Literal["tokens", "text", "chat"]
_PATHS = {"tokens": "completions", "text": "completions", "chat": "chat/completions"}
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"
    " what all were we when your can said there use an each which she do how their if will up other about out many then"
    " them these so some her would make like him into time has look two more write go see number no way could people my"
    " than first water been call who oil its now find long down day did get come made may part"
).split()
_MOST_OF_ERROR = 300  # characters


@dataclasses.dataclass(frozen=True)
class Target:
    """A server.

    Args:
      url: with or without the /v1 at its end.
      model: as requests name it.
      return_ids: whether "tokens" asks for the ids of outputs; servers repeat those of the prompt as well. If not, the
        history has the workload's own in their place.
      fields: further fields of every request, such as {"ignore_eos": true}.
      timeout: seconds a request may take.

    Raises:
      ValueError: a field is out of range.
    """

    url: str
    model: str
    api: Api = "tokens"
    return_ids: bool = True
    api_key: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}: must begin with http:// or https://")
        if self.api not in _PATHS:
            raise ValueError(f"api = {self.api!r}: must be one of {tuple(_PATHS)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout}: must be above 0")
        own = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "return_token_ids"}
        if taken := sorted(own & set(self.fields)):
            raise ValueError(f"fields: {taken[0]!r} is set by the client")

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return f"{_base(self.url)}/{_PATHS[self.api]}"

    @property
    def stand_ins(self) -> bool:
        """Whether only the number of output tokens comes back."""
        return self.api != "tokens" or not self.return_ids

    @property
    def headers(self) -> dict[str, str]:
        return _headers(self.api_key)

    def body(self, turn: SessionTurn) -> bytes:
        """The request of a turn."""
        fields = dict(self.fields) | {"model": self.model, "max_tokens": turn.max_tokens, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if self.api == "chat":
            fields["messages"] = [
                {"role": role if role in ("system", ASSISTANT) else "user", "content": words(part)}
                for role, part in _parts(turn)
            ]
        elif self.api == "text":
            fields["prompt"] = words(turn.prompt)
        else:
            fields["prompt"] = turn.prompt.tolist()
            if self.return_ids:
                fields["return_token_ids"] = True
        return json.dumps(fields).encode()


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What a server says about a model; None where it does not say."""

    name: str
    max_context: int | None


def find_model(url: str, api_key: str = "", name: str | None = None) -> ServedModel:
    """The model `name` of a server, or its first one.

    Raises:
      ValueError: the server cannot be reached, or has no such model.
    """
    try:
        reply = httpx.get(f"{_base(url)}/models", headers=_headers(api_key), timeout=30, trust_env=False)
        reply.raise_for_status()
        models = {model["id"]: model.get("max_model_len") for model in reply.json()["data"]}
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"url = {url!r}: no list of models: {type(error).__name__}: {error}") from None
    if not models or name not in (None, *models):
        raise ValueError(f"model = {name!r}: must be one of {sorted(models)}")
    name = next(iter(models)) if name is None else name
    return ServedModel(name, models[name])


def words(tokens: Tokens) -> str:
    """A word for each token, each with a blank in front."""
    return "".join(f" {_WORDS[i % len(_WORDS)]}" for i in tokens.tolist())


class RequestFailed(Exception):
    """Ends a request with an error."""


@dataclasses.dataclass
class Answer:
    """What has come of a request so far."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # of chunks with output
    ids: list[list[int]] = dataclasses.field(default_factory=list)  # of each of them
    finish_reason: str | None = None
    usage: Any = None

    def take(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            raise RequestFailed(f"error in the stream: {json.dumps(event['error'])[:_MOST_OF_ERROR]}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            names = ("content", "reasoning_content", "reasoning", "tool_calls")
            ids = choice.get("token_ids") or []
            if choice.get("text") or ids or any(delta.get(name) for name in names):
                self.seconds.append(now)
                self.ids.append(ids)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens as a server counts them. `cached` is None where it does not say; some leave it out instead of a zero."""

    prompt: int
    cached: int | None
    output: int
    drafted: int
    accepted: int

    @classmethod
    def read(cls, found: Any) -> "Usage":
        """Raises RequestFailed unless the counts are possible."""
        try:
            cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens")
            details = found.get("completion_tokens_details") or {}
            accepted, rejected = (details.get(f"{name}_prediction_tokens") or 0 for name in ("accepted", "rejected"))
            usage = cls(found["prompt_tokens"], cached, found["completion_tokens"], accepted + rejected, accepted)
            numbers = usage.prompt, usage.cached or 0, usage.output, rejected, accepted
            possible = all(type(n) is int and n >= 0 for n in numbers) and numbers[1] <= usage.prompt
        except (AttributeError, LookupError, TypeError):
            possible = False
        if not possible:
            raise RequestFailed(f"usage makes no sense: {json.dumps(found)[:_MOST_OF_ERROR]}")
        if not usage.output:
            raise RequestFailed("the answer has no output tokens")
        return usage


async def ask(client: httpx.AsyncClient, target: Target, body: bytes, answer: Answer, now: Callable[[], float]) -> None:
    """Sends a request and fills `answer` while it comes, with times that `now` gives.

    Raises:
      RequestFailed, httpx.HTTPError, AttributeError, LookupError, TypeError, ValueError: there is no whole answer.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **target.headers}
    async with client.stream("POST", target.endpoint, content=body, headers=headers) as response:
        kind = response.headers.get("content-type", "")
        if response.status_code != 200 or not kind.startswith("text/event-stream"):
            text = (await response.aread()).decode("utf-8", errors="replace")
            raise RequestFailed(f"HTTP {response.status_code}, {kind or 'no content type'}: {text[:_MOST_OF_ERROR]}")
        async for event in _events(response.aiter_raw()):
            answer.take(event, now())
    if answer.finish_reason is None:
        raise RequestFailed("the stream ended without finish_reason")
    if answer.usage is None:
        raise RequestFailed("the stream ended without usage: the server must know stream_options.include_usage")


def output_tokens(target: Target, answer: Answer, usage: Usage) -> Tokens:
    """The answer's tokens, or zeros in their place where the history has others.

    Raises:
      RequestFailed: the ids are missing.
    """
    if target.stand_ins:
        return np.zeros(usage.output, np.int32)
    ids = [i for chunk in answer.ids for i in chunk]
    if len(ids) != usage.output:
        raise RequestFailed(
            f"{len(ids)} token ids for {usage.output} output tokens: the server must know return_token_ids, or"
            " not be asked for them"
        )
    return np.array(ids, np.int32)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events up to [DONE]; the rest is read, so that the connection serves again."""
    left, ended = b"", False
    async for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            ended |= data == b"[DONE]"
            if data and not ended:
                yield json.loads(data)


def _parts(turn: SessionTurn) -> Iterator[tuple[str, Tokens]]:
    begin = 0
    for role, end in turn.parts:
        yield role, turn.prompt[begin:end]
        begin = end


def _base(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
