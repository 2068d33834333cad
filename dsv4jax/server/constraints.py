"""Which tokens a request may generate: from its fields to a mask (http_api section 7)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from dsv4jax.chat.encode import ReplyStart
from dsv4jax.chat.request import forced_tool_name, place_of_tool, shortened
from dsv4jax.engine.token_mask import MaskRules, TokenMask, bad_word_sequences, mask_factory
from dsv4jax.server.context import ServerContext
from dsv4jax.server.errors import ApiError, invalid_value, unsupported
from dsv4jax.server.protocol import ChatFields, GenerationFields

if TYPE_CHECKING:  # its backend is optional
    from dsv4jax.engine.grammar import Grammar, GrammarError

Tools = Sequence[Mapping[str, Any]]


def chat_mask(
    context: ServerContext, fields: ChatFields, tools: Tools, start: ReplyStart
) -> Callable[[], TokenMask] | None:
    """The mask of a chat reply that begins as `start` says; `tools` are those that the prompt lists.

    Raises:
      ApiError: the constraint is contradictory, does not compile or has no backend.
    """
    return _mask(
        context,
        fields,
        _chat_grammar(context, fields, tools, start),
        reasoning_budget=fields.thinking_token_budget,
        in_reasoning=start.startswith("reasoning"),
    )


def completion_mask(context: ServerContext, fields: GenerationFields) -> Callable[[], TokenMask] | None:
    """The mask of a raw completion; raises as `chat_mask`."""
    return _mask(context, fields, _format_grammar(context, fields))


def mask_threads(context: ServerContext, fields: GenerationFields) -> Executor:
    """Where to make the mask: a grammar that takes long to compile holds up only requests with one, too."""
    tools = fields.template.tools if isinstance(fields, ChatFields) else None
    return context.grammar_threads if fields.response_format or fields.structured_outputs or tools else context.threads


def is_unconstrained_json(context: ServerContext, fields: ChatFields, tools: Tools) -> bool:
    """JSON mode that no grammar enforces (chat section 3.6)."""
    wanted = fields.response_format is not None and fields.response_format["type"] == "json_object"
    return wanted and context.grammars is None and not tools


def _mask(
    context: ServerContext, fields: GenerationFields, grammar: "Grammar | None", **reasoning: Any
) -> Callable[[], TokenMask] | None:
    try:
        rules = MaskRules(
            min_tokens=fields.min_tokens,
            stop_token_ids=fields.stop_token_ids,
            allowed_token_ids=fields.allowed_token_ids,
            bad_words=bad_word_sequences(context.tokenizer, fields.bad_words),
            grammar=grammar,
            **reasoning,
        )
        return mask_factory(rules, context.tokenizer, context.engine.vocab_size)
    except ValueError as error:
        names = ("min_tokens", "allowed_token_ids", "bad_words")
        param = next((name for name in names if str(error).startswith(name)), None)
        raise invalid_value(param, shortened(str(error))) from error


def _chat_grammar(context: ServerContext, fields: ChatFields, tools: Tools, start: ReplyStart) -> "Grammar | None":
    forced = forced_tool_name(fields.template.tool_choice) is not None
    if forced and fields.structured_outputs:
        message = "structured_outputs is given: allowed is one of it and a tool_choice that forces a call"
        raise invalid_value("structured_outputs", message)
    if forced and context.grammars is None:
        raise unsupported("tool_choice", "tool_choice forces a call: this server has no grammar backend for that")
    if not tools or fields.structured_outputs or context.grammars is None:
        return _format_grammar(context, fields)

    from dsv4jax.engine.grammar import GrammarError, ToolCalls, ToolSchema

    schemas = [ToolSchema(tool["function"]["name"], _json(tool["function"].get("parameters") or {})) for tool in tools]
    inside = start == "tool_calls"
    calls = ToolCalls(tuple(schemas), required=forced, parallel=fields.parallel_tool_calls, inside_block=inside)
    try:
        return context.grammars.compile(calls, "tools")
    except GrammarError as error:
        raise _refused(error, _path_in_tools(error.field, fields.template.tools, tools)) from error


def _path_in_tools(field: str, given: Tools, listed: Tools) -> str:
    """The path in the request of what is field `field` of the grammar of the listed tools."""
    match = re.fullmatch(r"tools\[(\d+)\]\.(.+)", field)
    return field if match is None else f"{place_of_tool(given, listed[int(match[1])])}.function.{match[2]}"


def _refused(error: "GrammarError", path: str) -> ApiError:
    return invalid_value(path, f"{path}: {shortened(str(error).removeprefix(f'{error.field}: '))}")


def _format_grammar(context: ServerContext, fields: GenerationFields) -> "Grammar | None":
    """The grammar of `structured_outputs` or `response_format`."""
    if fields.structured_outputs and fields.response_format:
        raise invalid_value(
            "structured_outputs", "structured_outputs and response_format are given: allowed is one of them"
        )
    if fields.structured_outputs:
        kind, value = fields.structured_outputs
        field = f"structured_outputs.{kind}"
    elif fields.response_format:
        kind = fields.response_format["type"]
        value = fields.response_format.get(kind)
        field = f"response_format.{kind}"
        if kind == "json_schema":
            kind, value, field = "json", value["schema"], "response_format.json_schema.schema"
        elif kind == "structural_tag":
            value, field = fields.response_format, "response_format"
    else:
        return None
    if context.grammars is None:
        if kind == "json_object":
            return None
        raise unsupported(field, f"{field} is given: this server has no grammar backend")

    from dsv4jax.engine import grammar

    specs: dict[str, Callable[[], Any]] = {
        "json": lambda: grammar.JsonSchema(value if isinstance(value, str) else _json(value)),
        "json_object": grammar.JsonObject,
        "regex": lambda: grammar.Regex(value),
        "choice": lambda: grammar.Choice(tuple(value)),
        "grammar": lambda: grammar.ContextFreeGrammar(value),
        "structural_tag": lambda: grammar.StructuralTag(value if isinstance(value, str) else _json(value)),
    }
    try:
        return context.grammars.compile(specs[kind](), field)
    except grammar.GrammarError as error:
        raise _refused(error, error.field) from error


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
