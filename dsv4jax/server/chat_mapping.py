"""From the request of another protocol to a chat request, and errors of the chat request back.

The request converters of `deepseek-recipe` are not used: they give conversations of their own instead of messages, take
silently what they do not serve (earlier responses, built-in tools), and their errors do not name fields.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4jax.server.body import shown
from dsv4jax.server.errors import ApiError, invalid_value, unsupported

# Fields that have the same name and meaning in every protocol; most of them extend it.
SHARED_FIELDS = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("structured_outputs", "chat_template_kwargs", "thinking_token_budget"),
    *("priority", "cache_salt", "request_id", "truncate_prompt_tokens", "drafts", "draft_context"),
)

_PATH = re.compile(r"(?<![\w.\]])[a-z]\w*(?:\[\d+\]|\.[A-Za-z_]\w*)*")
_STEP = re.compile(r"\[\d+\]|\.?\w+")


class ClientPaths:
    """Which fields of the client's request became the fields of the chat request; those not named kept their path."""

    def __init__(self, paths: Mapping[str, str]):
        self._paths = dict(paths)
        self._longest = max(map(len, paths), default=0)  # of the paths in the chat request

    def note(self, chat_path: str, path: str) -> None:
        self._paths[chat_path] = path
        self._longest = max(self._longest, len(chat_path))

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """An ApiError from inside names the client's fields."""
        try:
            yield
        except ApiError as error:
            param = None if error.param is None else self._client_path(error.param)
            message = "; ".join(map(self._renamed, error.message.split("; ")))
            raise ApiError(
                error.status, message, type=error.type, code=error.code, param=param, headers=error.headers
            ) from error

    def _renamed(self, problem: str) -> str:
        """A path stands at the start, or is told from a word by its dots, brackets and underscores."""

        def renamed(match: re.Match[str]) -> str:
            is_path = match.start() == 0 or any(mark in match[0] for mark in "._[")
            return self._client_path(match[0]) if is_path else match[0]

        return _PATH.sub(renamed, problem)

    def _client_path(self, chat_path: str) -> str:
        """The path with the longest of its beginnings that has become another one replaced."""
        client_path = chat_path
        for step in _STEP.finditer(chat_path):
            if step.end() > self._longest:  # the path may be anything that a client wrote
                break
            known = self._paths.get(chat_path[: step.end()])
            if known is not None:
                client_path = known + chat_path[step.end() :]
        return client_path


def wrong(path: str, value: Any, allowed: str) -> ApiError:
    return invalid_value(path, f"{path} is {shown(value)}: it must be {allowed}")


def checked(path: str, value: Any, kind: type, allowed: str) -> Any:
    """`value`, which must be a `kind`."""
    if not isinstance(value, kind):
        raise wrong(path, value, allowed)
    return value


def text_content(path: str, content: Any, kinds: tuple[str, ...]) -> str | list[dict[str, str]]:
    """Text, or a list of text parts of the given kinds, as chat content."""
    if isinstance(content, str):
        return content
    parts = checked(path, content, list, "a string or a list of content parts")
    return [{"type": "text", "text": text_part(f"{path}[{i}]", part, kinds)} for i, part in enumerate(parts)]


def text_part(path: str, part: Any, kinds: tuple[str, ...]) -> str:
    """The text of a part, which must be of one of the given kinds."""
    kind = checked(path, part, dict, 'an object {"type": ...}').get("type")
    if kind not in kinds:
        raise not_served(f"{path}.type", kind, kinds)
    return checked(f"{path}.text", part.get("text"), str, "a string")


def not_served(path: str, value: Any, served: tuple[str, ...]) -> ApiError:
    return unsupported(path, f"{path} is {shown(value)}: this server supports {', '.join(served)}")
