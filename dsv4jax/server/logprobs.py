"""Log-probabilities as clients read them (http_api sections 3.1 and 4)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


class GeneratedToken(NamedTuple):
    """One generated token; `top` are pairs of id and log-probability, best first."""

    id: int
    logprob: float
    top: Sequence[tuple[int, float]]


class TokenTexts:
    """The text of single tokens. Bytes that are not UTF-8 on their own show as `\\xNN`."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of a token."""
        known = self._known.get(token_id)
        if known is None:
            data = self._tokenizer.token_bytes([token_id])
            known = self._known[token_id] = (data.decode("utf-8", errors="backslashreplace"), list(data))
        return known

    def name(self, token_id: int, as_id: bool) -> str:
        """Text of a token, or `token_id:N`."""
        return f"token_id:{token_id}" if as_id else self(token_id)[0]


def finite(logprob: float) -> float:
    """`logprob` with minus infinity as -9999."""
    return max(float(logprob), _LEAST)


def chat_logprob(texts: TokenTexts, token: GeneratedToken, as_id: bool) -> dict[str, Any]:
    """An entry of `logprobs.content`."""
    return {
        **_entry(texts, token.id, token.logprob, as_id),
        "top_logprobs": [_entry(texts, token_id, logprob, as_id) for token_id, logprob in token.top],
    }


def prompt_logprobs(texts: TokenTexts, prompt: Sequence[int], found: PromptLogprobs | None, top: int) -> list[Any]:
    """One object per prompt token, by token id; the first token has none.

    The prompt's own token is in it, without a rank if it is not among the `top` best.
    """
    entries: list[Any] = [None]
    for token_id, logprob, best in prompt_rows(prompt, found, top):
        entry = {
            str(i): {"logprob": finite(p), "rank": rank, "decoded_token": texts(i)[0]}
            for rank, (i, p) in enumerate(best, 1)
        }
        own = {"logprob": finite(logprob), "rank": None, "decoded_token": texts(token_id)[0]}
        entry.setdefault(str(token_id), own)
        entries.append(entry)
    return entries


def prompt_rows(prompt: Sequence[int], found: PromptLogprobs | None, top: int) -> list[GeneratedToken]:
    """Prompt tokens after the first, as if they had been generated, each with its `top` best."""
    if found is None:
        return []
    ids, best = found.top_tokens[:, :top].tolist(), found.top_logprobs[:, :top].tolist()
    return [
        GeneratedToken(token_id, logprob, list(zip(i, p, strict=True)))
        for token_id, logprob, i, p in zip(prompt[1:], found.logprobs.tolist(), ids, best, strict=True)
    ]


def _entry(texts: TokenTexts, token_id: int, logprob: float, as_id: bool) -> dict[str, Any]:
    text, data = texts(token_id)
    return {"token": f"token_id:{token_id}" if as_id else text, "logprob": finite(logprob), "bytes": data}
