"""Text generation by the programs of an engine: an engine without a server."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4jax.batch import token_ids
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.draft_totals import DraftTotals
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config, shape_buckets
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.records import Observer, StepRecord
from dsv4jax.engine.replay import Replay
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling

_TILE = 16


def generation_shape(
    cfg: ModelConfig,
    prompts: Sequence[np.ndarray],
    *,
    max_tokens: int,
    numerics: Numerics,
    replay: Replay = "exact",
    drafts: int = 0,
    tables_on_device: bool = True,
    chunk: int = 512,
) -> EngineShape:
    """The shape of an engine that runs these prompts together, with as few programs as will do.

    With exact replay it is a deterministic one: every step verifies drafts, if any does.

    Args:
      drafts: that each request verifies in a step.
      chunk: tokens of prompts per step, a multiple of 16.

    Raises:
      ValueError: no prompt, an empty one, one with ids out of range, or that with `max_tokens` exceeds the model's
        context; another argument out of range.
    """
    if not prompts:
        raise ValueError("prompts: at least one is needed")
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
    if chunk < 1 or chunk % _TILE:
        raise ValueError(f"chunk = {chunk}: must be a positive multiple of {_TILE}")
    if not 0 <= drafts <= cfg.dspark_block_size:
        raise ValueError(f"drafts = {drafts}: must be in 0..{cfg.dspark_block_size}")
    for i, prompt in enumerate(prompts):
        token_ids(prompt, cfg.vocab_size, f"prompt {i}")
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty: at least one token is needed")
        if len(prompt) + max_tokens > cfg.max_position_embeddings:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: with max_tokens = {max_tokens} it exceeds the model's"
                f" context of {cfg.max_position_embeddings} tokens"
            )
    number, lengths = len(prompts), [len(prompt) + max_tokens for prompt in prompts]
    cache = CacheConfig(
        slots=number,
        # Room for drafts behind the last token, so that none is withheld for lack of a page.
        pages=sum(ceil_div(length + drafts, CacheConfig.page_size) for length in lengths),
        drafts="shared" if drafts else None,
    )
    deterministic = replay == "exact"
    buckets = shape_buckets(
        cache,
        prefill_tokens=[min(chunk, sum(ceil_div(len(prompt), _TILE) * _TILE for prompt in prompts))],
        prefill_requests=number,
        decode_requests=[number],
        contexts=[max(lengths)],
        replay=replay,
        deterministic=deterministic,
        drafts=drafts,
    )
    prefill = tuple(bucket for bucket in buckets.prefill if not bucket.prompt_logprobs)
    return EngineShape(
        cache=cache,
        buckets=dataclasses.replace(buckets, prefill=prefill, masks=()),
        numerics=numerics,
        max_model_len=max(lengths),
        replay=replay,
        deterministic=deterministic,
        drafts=drafts,
        tables_on_device=tables_on_device,
    )


class EngineGenerator(Observer):
    """Generates continuations of all prompts in the buckets that programs have.

    Attributes:
      prefill_tokens, prefill_seconds: tokens of prompts that were run, and the time of the steps with any.
      decode_tokens, decode_seconds: tokens that the other steps generated, and their time.
    """

    def __init__(
        self,
        shape: EngineShape,
        programs: Programs,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int,
        sampling: RequestSampling,
        eos_id: int,
        usable_ids: int | None = None,
    ):
        """Checks the prompts; request i takes seed + i, wrapped into the range of a signed 64-bit integer.

        Raises:
          ValueError: a prompt that is empty, has ids out of range, or with `max_tokens` exceeds the context; programs
            whose experts move.
        """
        for name, slots in shape.slots_of_experts.items():
            if slots is not None:
                raise ValueError(f"{name} = {slots}: must be None, nothing moves experts here")
        self.prefill_tokens = self.decode_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        executor = JaxExecutor(params, programs, usable_ids=usable_ids)
        scheduler = Scheduler(scheduler_config(programs.cfg, shape, eos_id))
        self._engine = Engine(scheduler, executor, self)
        self._index = {}
        for i, prompt in enumerate(prompts):
            seed = None if sampling.seed is None else (sampling.seed + i + 2**63) % 2**64 - 2**63
            seeded = dataclasses.replace(sampling, seed=seed)
            ids = token_ids(prompt, programs.cfg.vocab_size, f"prompt {i}")
            request = GenerationRequest(f"{i}", ids, max_tokens, sampling=seeded)
            (sequence,) = self._engine.submit(request)
            self._index[sequence] = i

    def run(self) -> Iterator[tuple[int, list[int], bool]]:
        """Yields (request, its next token ids, whether it has ended) as tokens arrive, requests interleaved.

        Raises:
          RuntimeError: a request ended with an error.
        """
        while not self._engine.idle:
            for sequence in self._engine.step():
                if sequence.error is not None:
                    raise RuntimeError(f"prompt {self._index[sequence]}: {sequence.error}")
                first, sequence.unsent = sequence.unsent, len(sequence.generated)
                yield self._index[sequence], sequence.generated[first:], sequence.finish_reason is not None

    @property
    def drafts(self) -> DraftTotals:
        """What came of drafts so far."""
        return self._engine.stats().drafts

    def step(self, record: StepRecord) -> None:
        """The engine reports a step."""
        if record.prefill_requests:
            self.prefill_tokens += record.computed_tokens
            self.prefill_seconds += record.device_seconds
        else:
            self.decode_tokens += record.output_tokens
            self.decode_seconds += record.device_seconds
