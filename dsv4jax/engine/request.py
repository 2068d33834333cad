"""What the engine is asked for and what it answers: token ids in, token ids out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from dsv4jax.engine.token_mask import TokenMask
from dsv4jax.sampling_settings import MAX_TOP_LOGPROBS, RequestSampling

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Args:
      request_id: unique among the requests in the engine.
      prompt: one contiguous int32 array, at least one id; it is shared, never copied or changed.
      max_tokens: most tokens to generate per choice; prompt and these must fit the context.
      n: choices; their pages of the prompt are shared. Choice i samples with seed + i.
      logit_bias: token id to -100..100.
      stop_token_ids: end a choice like EOS does.
      ignore_eos: EOS is an ordinary token.
      mask: makes the rules of which tokens may be chosen, once per choice; None allows all.
      priority: lower is scheduled first.
      rank: the data-parallel rank that must run it; None for the one the scheduler chooses.
      cache_salt: requests share cached prefixes only within one salt.
      prompt_logprobs: -1 for none, k for the log-probability of every prompt token and of the k best instead; such a
        request reads no cached prefix.
      drafts: how many drafts to verify in a step: None for as many as pay, as the engine sees it, 0 for none, k for
        always k, as far as there are so many.
      draft_context: no drafts once the prompt and generated tokens are more than this; None for no limit.

    Raises:
      ValueError: a field is out of range.
    """

    request_id: str
    prompt: Int32[np.ndarray, " tokens"]
    max_tokens: int
    n: int = 1
    sampling: RequestSampling = RequestSampling()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    mask: Callable[[], TokenMask] | None = None
    priority: int = 0
    rank: int | None = None
    cache_salt: str = ""
    prompt_logprobs: int = -1
    drafts: int | None = None
    draft_context: int | None = None

    def __post_init__(self):
        prompt = self.prompt
        if not isinstance(prompt, np.ndarray) or prompt.dtype != np.int32 or prompt.ndim != 1:
            raise ValueError("prompt: must be a one-dimensional int32 array")
        if not prompt.size or not prompt.flags.c_contiguous:
            raise ValueError(f"prompt: must be contiguous and hold at least one token, has {prompt.size}")
        for name, least in (("max_tokens", 1), ("n", 1), ("prompt_logprobs", -1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")
        for name in ("drafts", "draft_context"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0, or None")
        if self.prompt_logprobs > MAX_TOP_LOGPROBS:
            raise ValueError(f"prompt_logprobs = {self.prompt_logprobs}: must be at most {MAX_TOP_LOGPROBS}")


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Row i belongs to prompt token i + 1, given the tokens before it; raw distribution, natural logarithm."""

    logprobs: Float32[np.ndarray, " tokens"]
    top_tokens: Int32[np.ndarray, "tokens top"]
    top_logprobs: Float32[np.ndarray, "tokens top"]


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """What one step gave one choice of a request.

    `logprobs` and `top_logprobs` (pairs of id and log-probability, best first) have one entry per token if the request
    asked for them, else none. `cached_tokens` are prompt tokens that no step ran. `drafted` and `accepted` are the
    choice's drafts that were verified so far, and accepted. `stop_reason` is the stop token id, None for EOS. `error`
    says why a choice ended with finish_reason "error".
    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


class RequestTooLarge(ValueError):
    """The request can never fit this engine."""


class TooManyDrafts(RequestTooLarge):
    """More drafts per step than this engine makes."""


class TooManyChoices(RequestTooLarge):
    """More choices at once than this engine lets wait."""


class QueueFull(Exception):
    """Too many requests or tokens are waiting: try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The engine is draining, has ended, or has failed."""
