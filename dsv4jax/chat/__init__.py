"""The chat format: from messages to prompt ids, and from generated ids back to a message."""

from dsv4jax.chat.encode import CHAT_TOKENS, encode_chat, render_chat, reply_start
from dsv4jax.chat.parse import ReplyDelta, ReplyParser, TextReplyParser
from dsv4jax.chat.request import ChatError, effective_tools, image_paths, resolve_thinking
from dsv4jax.chat.text import CompletionText, StopStrings, json_content

__all__ = [
    "CHAT_TOKENS",
    "ChatError",
    "CompletionText",
    "ReplyDelta",
    "ReplyParser",
    "StopStrings",
    "TextReplyParser",
    "effective_tools",
    "encode_chat",
    "image_paths",
    "json_content",
    "render_chat",
    "reply_start",
    "resolve_thinking",
]
