"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info` (http_api section 5)."""

from typing import Any

from dsv4jax.server.body import Fields, decode_object, decode_token_ids, is_list
from dsv4jax.server.chat_core import chat_prompt
from dsv4jax.server.context import AccessRecord, ServerContext
from dsv4jax.server.errors import invalid_value
from dsv4jax.server.generation import Prompt, in_threads
from dsv4jax.server.prompts import visible_text
from dsv4jax.server.protocol import read_model, read_request_id, read_response_format, read_template
from dsv4jax.server.sse import encode_json


async def tokenize(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """Ids of a text, or of a conversation as a chat request would render it.

    Raises:
      ApiError: the request is refused.
    """
    return await in_threads(context, _tokenize, context, body, record)


async def detokenize(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """Text of ids, control tokens spelled out; raises as `tokenize`."""
    return await in_threads(context, _detokenize, context, body, record)


async def tokenizer_info(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    """What a client needs to use the server as its tokenizer."""
    tokenizer = context.tokenizer
    return encode_json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.token(tokenizer.bos_id),
            "eos_token": tokenizer.token(tokenizer.eos_id),
            "pad_token": tokenizer.token(tokenizer.pad_id),
            "add_bos_token": False,
            "add_eos_token": False,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.engine.max_model_len,
            "chat_template": None,
        }
    )


def _tokenize(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    values = decode_object(body)
    fields = Fields(values)
    read_request_id(fields, record)
    read_model(context, fields)
    with_texts = fields.boolean("return_token_strs", False)
    fields.boolean("add_special_tokens", True)  # the tokenizer adds none
    ids = _chat_ids(context, fields) if "messages" in values else _text_ids(context, fields)
    record.prompt_tokens = ids.size
    response: dict[str, Any] = {
        "count": ids.size,
        "max_model_len": context.engine.max_model_len,
        "tokens": ids.tolist(),
    }
    if with_texts:
        response["token_strs"] = [context.tokenizer.token(token_id) for token_id in response["tokens"]]
    return encode_json(response)


def _chat_ids(context: ServerContext, fields: Fields) -> Prompt:
    if "prompt" in fields.values:
        fields.problem(invalid_value("prompt", "prompt and messages are given: allowed is one of them"))
    template = read_template(context, fields, read_response_format(fields))
    fields.check()
    return chat_prompt(context, template)


def _text_ids(context: ServerContext, fields: Fields) -> Prompt:
    text = fields.string("prompt")
    if "prompt" not in fields.values:
        fields.missing("prompt")
    fields.check()
    try:
        return context.tokenizer.encode(text, added_vocabulary=True)
    except ValueError as error:
        raise invalid_value("prompt", f"prompt: {error}") from error


def _detokenize(context: ServerContext, body: bytes, record: AccessRecord) -> bytes:
    values = decode_object(body, undecoded=("tokens",))
    fields = Fields(values)
    read_request_id(fields, record)
    read_model(context, fields)
    tokens = values.get("tokens")
    if tokens is None:
        fields.missing("tokens")
    elif not is_list(tokens):
        fields.problem(invalid_value("tokens", "tokens must be a list of token ids"))
    fields.check()
    ids = decode_token_ids(tokens, "tokens", context.tokenizer.vocab_size)
    return encode_json({"prompt": visible_text(context.tokenizer, ids)})
