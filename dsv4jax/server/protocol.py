"""The fields of generation requests: types, ranges and defaults (http_api sections 3 and 4)."""

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dsv4jax.chat.request import ChatError, checked_response_format, resolve_thinking
from dsv4jax.sampling_settings import MAX_TOP_LOGPROBS, RequestSampling
from dsv4jax.server.body import Fields, is_integer
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import invalid_value, model_not_found, unsupported

logger = logging.getLogger("dsv4jax.server")

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
# Both are looked for at every token.
MAX_BAD_WORDS = 128
MAX_STRING_CHARACTERS = 1024
_COMPLETION_TOKENS = 16
_INT64 = (-(2**63), 2**63 - 1)
_INT32_MAX = 2**31 - 1
_FLOAT32 = np.finfo(np.float32)
_STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclasses.dataclass(frozen=True)
class GenerationFields:
    """What chat and raw completions have in common; None stands for an absent field.

    Attributes:
      max_tokens: as given; None is the route's default.
      sampling: `top_logprobs` is -1 without logprobs; the seed is always set.
      structured_outputs: the kind of constraint and its value.
      prompt_logprobs: -1 for none.
      drafts, draft_context: as in `GenerationRequest`.
    """

    model: str
    max_tokens: int | None
    n: int
    sampling: RequestSampling
    logit_bias: Mapping[int, float]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str: bool
    ignore_eos: bool
    min_tokens: int
    bad_words: tuple[str, ...]
    allowed_token_ids: tuple[int, ...] | None
    prompt_logprobs: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    response_format: Mapping[str, Any] | None
    structured_outputs: tuple[str, Any] | None
    return_token_ids: bool
    tokens_as_token_ids: bool
    return_prompt_text: bool
    truncate_prompt_tokens: int | None
    priority: int
    cache_salt: str
    drafts: int | None
    draft_context: int | None


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """What the prompt of a chat request is made of; the chat format checks messages, tools and tool choice."""

    messages: Any
    tools: Any
    tool_choice: Any
    response_format: Mapping[str, Any] | None
    thinking: bool
    effort: int
    drop_thinking: bool
    continue_final_message: bool
    add_generation_prompt: bool

    def options(self) -> dict[str, Any]:
        """Options of `encode_chat` and `render_chat`."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("messages", "add_generation_prompt")}


@dataclasses.dataclass(frozen=True)
class ChatFields(GenerationFields):
    """A chat request."""

    template: ChatTemplate
    parallel_tool_calls: bool
    thinking_token_budget: int | None
    include_reasoning: bool
    separate_reasoning: bool


@dataclasses.dataclass(frozen=True)
class CompletionFields(GenerationFields):
    """A raw completion request; `prompt` is still JSON text."""

    prompt: msgspec.Raw
    suffix: str | None
    echo: bool


def read_chat(context: ServerContext, values: Mapping[str, Any], record: AccessRecord) -> ChatFields:
    """The fields of a chat request; `values` is its JSON object without nulls.

    Raises:
      ApiError: fields are missing or wrong.
    """
    fields = Fields(values)
    read_request_id(fields, record)
    if "messages" not in values:
        fields.missing("messages")
    with_logprobs = fields.boolean("logprobs", False)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    if top_logprobs and not with_logprobs:
        fields.wrong("top_logprobs", top_logprobs, "0 or absent without logprobs: true")
    max_tokens = fields.integer("max_tokens", 1, _INT32_MAX, None)
    max_tokens = fields.integer("max_completion_tokens", 1, _INT32_MAX, max_tokens)
    common = _read_common(context, fields, top_logprobs if with_logprobs else -1, max_tokens)
    budget = fields.integer("thinking_token_budget", -1, _INT32_MAX, -1)
    fields.boolean("skip_special_tokens", True)  # the tokens that it would show are never part of a message
    chat = {
        "template": read_template(context, fields, common["response_format"]),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "thinking_token_budget": None if budget < 0 else budget,
        "include_reasoning": fields.boolean("include_reasoning", True),
        "separate_reasoning": fields.boolean("separate_reasoning", True),
    }
    fields.check()
    return ChatFields(**common, **chat)


def read_completion(context: ServerContext, values: Mapping[str, Any], record: AccessRecord) -> CompletionFields:
    """The fields of a raw completion request; `values` is its JSON object without nulls, `prompt` undecoded.

    Raises:
      ApiError: fields are missing or wrong.
    """
    fields = Fields(values)
    read_request_id(fields, record)
    if "prompt" not in values:
        fields.missing("prompt")
    echo = fields.boolean("echo", False)
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, _INT32_MAX, _COMPLETION_TOKENS)
    common = _read_common(context, fields, fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, -1), max_tokens)
    best_of = fields.integer("best_of", 1, MAX_CHOICES, common["n"])
    if best_of != common["n"]:
        fields.wrong("best_of", best_of, f"equal to n, which is {common['n']}")
    suffix = fields.string("suffix")
    if not fields.boolean("skip_special_tokens", True):
        message = "skip_special_tokens is false: the text never shows begin and end of sentence and padding"
        fields.problem(unsupported("skip_special_tokens", message))
    fields.check()
    return CompletionFields(**common, prompt=values["prompt"], suffix=suffix, echo=echo)


def read_template(context: ServerContext, fields: Fields, response_format: Mapping[str, Any] | None) -> ChatTemplate:
    """The fields of a chat request that its prompt depends on."""
    values = fields.values
    template = fields.object("chat_template_kwargs") or {}
    thinking = fields.object("thinking")
    effort = values.get("reasoning_effort", template.get("reasoning_effort"))
    silent = thinking is None and effort is None and not {"thinking", "enable_thinking"} & template.keys()
    on, number = context.default_thinking, context.default_effort
    try:
        resolved = resolve_thinking(
            thinking=thinking, reasoning_effort=values.get("reasoning_effort"), chat_template_kwargs=template
        )
        on, number = (on if silent else resolved[0]), (number if effort is None else resolved[1])
    except ChatError as error:
        fields.problem(invalid_value(error.param, str(error)))
    continues = fields.boolean("continue_final_message", False)
    generates = fields.boolean("add_generation_prompt", True)
    if continues and generates:
        fields.wrong("continue_final_message", True, "false unless add_generation_prompt is false")
    return ChatTemplate(
        messages=values.get("messages"),
        tools=values.get("tools"),
        tool_choice=values.get("tool_choice"),
        response_format=response_format,
        thinking=on,
        effort=number,
        drop_thinking=template.get("drop_thinking", True),
        continue_final_message=continues,
        add_generation_prompt=generates,
    )


def read_model(context: ServerContext, fields: Fields) -> str:
    name = fields.string("model", context.model_names[0])
    if name not in context.model_names:
        fields.problem(model_not_found(name))
    return name


def read_request_id(fields: Fields, record: AccessRecord) -> None:
    """Takes over the body's `request_id`, unless the header gave one."""
    name = fields.string("request_id")
    if name is None:
        return
    if not (1 <= len(name) <= 128 and name.isascii() and name.isprintable()):  # it becomes a header
        fields.wrong("request_id", name, "1 to 128 printable ASCII characters")
    elif not record.client_named:
        record.request_id = name


def _read_common(context: ServerContext, fields: Fields, top_logprobs: int, max_tokens: int | None) -> dict[str, Any]:
    values, vocab_size = fields.values, context.tokenizer.vocab_size
    temperature = fields.number("temperature", 0, 2, 1.0)
    n = fields.integer("n", 1, MAX_CHOICES, 1)
    if n > 1 and temperature == 0:
        fields.wrong("n", n, "1 with temperature 0: all choices would be the same")
    stream = fields.boolean("stream", False)
    options = fields.object("stream_options")
    if options is not None and not stream:
        fields.problem(invalid_value("stream_options", "stream_options is given: it needs stream: true"))
    options = Fields(options or {}, "stream_options", fields.problems)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS, -1)
    if prompt_logprobs >= 0 and stream:
        fields.wrong("prompt_logprobs", prompt_logprobs, "absent with stream: true")
    min_tokens = fields.integer("min_tokens", 0, _INT32_MAX, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        fields.wrong("min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")
    allowed = fields.token_ids("allowed_token_ids", vocab_size)
    if values.get("allowed_token_ids") == []:
        fields.wrong("allowed_token_ids", [], "a list of at least one token id")
    if removed := sorted(name for name in values if name.startswith("guided_")):
        logger.warning("ignored fields that structured_outputs has replaced: %s", repr(removed)[:200])
    fields.boolean("spaces_between_special_tokens", True)  # byte-level tokens: there are no spaces to leave out
    sampling = RequestSampling(
        temperature=temperature,
        top_k=max(fields.integer("top_k", -1, _INT32_MAX, 0), 0),
        top_p=fields.number("top_p", 0, 1, 1.0, above=True),
        min_p=fields.number("min_p", 0, 1, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=fields.number("repetition_penalty", float(_FLOAT32.tiny), float(_FLOAT32.max), 1.0),
        seed=fields.integer("seed", *_INT64, secrets.randbits(62)),
        top_logprobs=top_logprobs,
    )
    return {
        "model": read_model(context, fields),
        "max_tokens": max_tokens,
        "n": n,
        "sampling": sampling,
        "logit_bias": _read_logit_bias(fields, vocab_size),
        "stop": _read_stop(fields),
        "stop_token_ids": fields.token_ids("stop_token_ids", vocab_size),
        "include_stop_str": fields.boolean("include_stop_str_in_output", False),
        "ignore_eos": fields.boolean("ignore_eos", False),
        "min_tokens": min_tokens,
        "bad_words": fields.strings("bad_words", most=MAX_BAD_WORDS, longest=MAX_STRING_CHARACTERS),
        "allowed_token_ids": allowed or None,
        "prompt_logprobs": prompt_logprobs,
        "stream": stream,
        "include_usage": options.boolean("include_usage", False),
        "continuous_usage": options.boolean("continuous_usage_stats", False),
        "response_format": read_response_format(fields),
        "structured_outputs": _read_structured_outputs(fields),
        "return_token_ids": fields.boolean("return_token_ids", False),
        "tokens_as_token_ids": fields.boolean("return_tokens_as_token_ids", False),
        "return_prompt_text": fields.boolean("return_prompt_text", False),
        "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens", -1, _INT32_MAX, None),
        "priority": fields.integer("priority", *_INT64, 0),
        "cache_salt": _read_cache_salt(fields),
        "drafts": fields.integer("drafts", 0, _INT32_MAX, None),
        "draft_context": fields.integer("draft_context", 0, _INT32_MAX, None),
    }


def _read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in (fields.object("logit_bias") or {}).items():
        where = f"logit_bias.{key[:20]}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            fields.wrong("logit_bias", key, f"an object whose keys are token ids from 0 to {vocab_size - 1}")
        elif not (is_integer(value) or isinstance(value, float)):
            fields.wrong(where, value, "a number from -100 to 100")
        else:
            bias[int(key)] = float(min(max(value, -100), 100))
    return bias


def _read_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop")
    if not isinstance(stop, str):
        return fields.strings("stop", most=MAX_STOP_STRINGS, longest=MAX_STRING_CHARACTERS)
    if not 1 <= len(stop) <= MAX_STRING_CHARACTERS:
        fields.wrong("stop", stop, f"a string of 1 to {MAX_STRING_CHARACTERS} characters, or a list of such")
    return (stop,)


def _read_cache_salt(fields: Fields) -> str:
    salt = fields.string("cache_salt")
    if salt is not None and not (1 <= len(salt) <= 128 and not set(salt) & set("@/\\\0")):
        fields.wrong("cache_salt", salt, "1 to 128 characters without @, /, \\ and NUL")
    return salt or ""


def read_response_format(fields: Fields) -> Mapping[str, Any] | None:
    """The response format, unless it is plain text."""
    given = fields.object("response_format")
    if given is None or given.get("type") == "text":
        return None
    try:
        checked_response_format(given)
    except ChatError as error:
        fields.problem(invalid_value(error.param, str(error)))
        return None
    if given["type"] == "regex" and not (isinstance(given.get("regex"), str) and given["regex"]):
        fields.wrong("response_format.regex", given.get("regex"), "a regular expression")
    return given


def _read_structured_outputs(fields: Fields) -> tuple[str, Any] | None:
    given = fields.object("structured_outputs")
    if given is None:
        return None
    kinds = [kind for kind in _STRUCTURED_KINDS if kind in given]
    if len(kinds) != 1:
        allowed = f"an object with exactly one of {', '.join(_STRUCTURED_KINDS)}, and has {len(kinds)}"
        fields.wrong("structured_outputs", given, allowed)
        return None
    kind, inner = kinds[0], Fields(given, "structured_outputs", fields.problems)
    if kind in ("regex", "grammar"):
        if inner.string(kind, "") == "":
            inner.wrong(kind, given[kind], "a string that is not empty")
    elif kind == "choice":
        inner.strings(kind)
        if given[kind] == []:
            inner.wrong(kind, [], "a list of at least one string")
    elif kind == "json" and not isinstance(given["json"], str | dict | bool):
        inner.wrong(kind, given["json"], "a JSON schema")
    elif kind == "structural_tag" and not isinstance(given[kind], str | dict):
        inner.wrong(kind, given[kind], "a structural tag")
    elif kind == "json_object" and given[kind] is not True:
        inner.wrong(kind, given[kind], "true")
    return kind, given[kind]
