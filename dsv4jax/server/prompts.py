"""Prompts of raw completions: texts or token ids, with or without a suffix (http_api section 4)."""

import re

import msgspec
import numpy as np

from dsv4jax.server.body import decode_list, decode_token_ids, decode_value, is_list, is_string, shown
from dsv4jax.server.context import ServerContext
from dsv4jax.server.errors import invalid_value, unsupported
from dsv4jax.server.generation import Prompt
from dsv4jax.server.protocol import CompletionFields
from dsv4jax.tokenizer import Tokenizer

MAX_CHOICES = 4096  # of all prompts together
_SEVERAL = re.compile(rb'\[\s*["\[]')
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


def visible_text(tokenizer: Tokenizer, ids: Prompt) -> str:
    """The text of ids with every control token spelled out."""
    return tokenizer.token_bytes(ids).decode("utf-8", errors="replace")


def completion_prompts(context: ServerContext, fields: CompletionFields) -> list[Prompt]:
    """One array of ids per prompt of the body, at least one id each.

    Raises:
      ApiError: names the prompt, and the index of an id, that is not allowed.
    """
    if _SEVERAL.match(memoryview(fields.prompt)):  # not decoded first: a list of a million ids is no such list
        items = decode_list(fields.prompt)
        if len(items) * fields.n > MAX_CHOICES:
            raise invalid_value(
                "prompt",
                f"prompt is a list of {len(items)} prompts with n = {fields.n} choices each: allowed are {MAX_CHOICES} "
                "choices together",
            )
        return [_prompt(context, fields, item, f"prompt[{i}]") for i, item in enumerate(items)]
    return [_prompt(context, fields, fields.prompt, "prompt")]


def _prompt(context: ServerContext, fields: CompletionFields, text: msgspec.Raw, param: str) -> Prompt:
    if is_list(text):
        ids = decode_token_ids(text, param, context.tokenizer.vocab_size)
    elif is_string(text):
        ids = _encoded(context, decode_value(text, param), param)
    else:
        allowed = "a string, a list of token ids, or a list of such"
        raise invalid_value(param, f"{param} is {shown(decode_value(text, param))}: it must be {allowed}")
    if not ids.size:
        raise invalid_value(param, f"{param} is empty: it must hold at least one token")
    return ids if fields.suffix is None else _with_suffix(context, ids, fields.suffix)


def _encoded(context: ServerContext, text: str, param: str) -> Prompt:
    try:
        return context.tokenizer.encode(text, added_vocabulary=True)
    except ValueError as error:
        raise invalid_value(param, f"{param}: {error}") from error


def _with_suffix(context: ServerContext, prefix: Prompt, suffix: str) -> Prompt:
    """The prompt that asks for what belongs between two texts."""
    try:
        begin, hole, end = (
            np.array([context.tokenizer.control_id(token)], np.int32) for token in (FIM_BEGIN, FIM_HOLE, FIM_END)
        )
    except ValueError as error:
        raise unsupported("suffix", f"suffix is given: the tokenizer cannot fill in the middle ({error})") from error
    return np.concatenate([begin, prefix, hole, _encoded(context, suffix, "suffix"), end])
