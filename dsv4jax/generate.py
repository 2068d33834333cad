"""Text generation for a fixed set of prompts: the smallest loop around the step functions."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    EngramTables,
    PrefillBucket,
    PrefillChunk,
    Replay,
    StepBatch,
    decode_batch,
    prefill_batch,
    token_ids,
    with_engram_rows,
)
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import decode_step, prefill_step, start_request

_TILE = 16


@dataclasses.dataclass
class Timing:
    """Seconds and tokens of a generation; compilation is apart from both phases."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


class Generator:
    """Generates continuations of all prompts at once; `run` may be called once.

    Attributes:
      timing: filled while `run` proceeds.
    """

    def __init__(
        self,
        params: dict[str, Any],
        cfg: ModelConfig,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int,
        sampling: RequestSampling = RequestSampling(),
        stop_ids: Sequence[int] = (),
        usable_ids: int | None = None,
        numerics: Numerics = REFERENCE,
        replay: Replay = "exact",
        tables: EngramTables | None = None,
        chunk: int = 512,
    ):
        """Checks the prompts and lays out the cache.

        Args:
          prompts: int32 token ids, one array per request.
          max_tokens: tokens to generate per request.
          sampling: of every request; request i takes seed + i.
          stop_ids: a request ends after generating one of these.
          usable_ids: ids from here on are never generated (a vocabulary padded beyond the tokenizer).
          tables: Engram tables on the host, for params without them.
          chunk: tokens per prefill step, a multiple of 16.

        Raises:
          ValueError: no prompt, an empty prompt, ids out of range, prompt + max_tokens over the model's context,
            another argument out of range, or params without Engram tables and no tables.
        """
        if not prompts:
            raise ValueError("prompts: at least one is needed")
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
        if chunk < 1 or chunk % _TILE:
            raise ValueError(f"chunk = {chunk}: must be a positive multiple of {_TILE}")
        if usable_ids is not None and not 1 <= usable_ids <= cfg.vocab_size:
            raise ValueError(f"usable_ids = {usable_ids}: must be in 1..{cfg.vocab_size}, the vocabulary")
        if tables is None and "embed" not in params["layers"][cfg.engram_layer_ids[0]]["engram"]:
            raise ValueError("tables: params hold no Engram tables, so they are needed")
        prompts = [token_ids(prompt, cfg.vocab_size, f"prompt {i}") for i, prompt in enumerate(prompts)]
        for i, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {i} is empty: at least one token is needed")
            if len(prompt) + max_tokens > cfg.max_position_embeddings:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens: with max_tokens = {max_tokens} it exceeds the model's"
                    f" context of {cfg.max_position_embeddings} tokens"
                )
        self.timing = Timing()
        self._params, self._cfg, self._numerics, self._tables = params, cfg, numerics, tables
        self._prompts, self._max_tokens, self._stop_ids = prompts, max_tokens, frozenset(stop_ids)
        self._usable_ids = usable_ids
        # Without a seed of its own a request would draw a new one in every step.
        seed = int(np.random.default_rng().integers(2**62)) if sampling.seed is None else sampling.seed
        self._sampling = [dataclasses.replace(sampling, seed=_int64(seed + i)) for i in range(len(prompts))]
        page_size = CacheConfig.page_size
        pages = [ceil_div(len(p) + max_tokens, page_size) for p in prompts]
        ends = np.cumsum(pages)
        self._pages = [range(end - n, end) for n, end in zip(pages, ends, strict=True)]
        self._cache_cfg = CacheConfig(slots=len(prompts), pages=int(ends[-1]), page_size=page_size)
        padded = sum(ceil_div(len(p), _TILE) * _TILE for p in prompts)
        self._prefill = PrefillBucket(
            tokens=min(padded, chunk),
            requests=len(prompts),
            pages=max(pages),
            tile=_TILE,
            replay=replay,
        )
        self._decode = DecodeBucket(requests=len(prompts), pages=max(pages))

    def run(self) -> Iterator[tuple[int, int, float]]:
        """Yields (request, token id, log-probability) as tokens arrive, requests interleaved.

        Raises:
          RuntimeError: called a second time.
        """
        if self.timing.compile_seconds:
            raise RuntimeError("run: a Generator runs once")
        cache = init_cache(self._cfg, self._cache_cfg, self._numerics)
        done = [0] * len(self._prompts)
        started = time.perf_counter()
        with ThreadPoolExecutor(1) as background:
            # Both programs are compiled at once; the first token does not wait for the second.
            decode_program = background.submit(self._compile, decode_step, cache, self._decode_round({}))
            prefill_program = self._compile(prefill_step, cache, self._prefill_round(done)[0])
            self.timing.compile_seconds = time.perf_counter() - started
            for slot, prompt in enumerate(self._prompts):
                mask, counts, bias = request_rows(prompt, (), {}, self._cfg.vocab_size)
                if self._usable_ids is not None:
                    bias[self._usable_ids :] = -np.inf
                cache = start_request(cache, np.int32(slot), mask, counts, bias, np.int32(len(prompt)))

            outputs: dict[int, list[int]] = {}
            while any(n < len(p) for n, p in zip(done, self._prompts, strict=True)):
                batch, chunks = self._prefill_round(done)
                begin = time.perf_counter()
                cache, output = prefill_program(self._params, cache, batch)
                tokens, logprobs = jax.device_get((output.tokens, output.logprobs))
                self.timing.prefill_seconds += time.perf_counter() - begin
                for row, chunk in enumerate(chunks):
                    self.timing.prefill_tokens += chunk.end - chunk.start
                    done[chunk.slot] = chunk.end
                    if chunk.end == len(chunk.prompt):
                        outputs[chunk.slot] = [int(tokens[row, 0])]
                        yield chunk.slot, outputs[chunk.slot][-1], float(logprobs[row, 0])

            begin = time.perf_counter()
            decode_program = decode_program.result()
            self.timing.compile_seconds += time.perf_counter() - begin
        while active := {slot: ids for slot, ids in outputs.items() if self._goes_on(ids)}:
            batch = self._decode_round(active)
            begin = time.perf_counter()
            cache, output = decode_program(self._params, cache, batch)
            tokens, logprobs = jax.device_get((output.tokens, output.logprobs))
            self.timing.decode_seconds += time.perf_counter() - begin
            self.timing.decode_tokens += len(active)
            for row, (slot, ids) in enumerate(active.items()):
                ids.append(int(tokens[row, 0]))
                yield slot, ids[-1], float(logprobs[row, 0])

    def _goes_on(self, ids: Sequence[int]) -> bool:
        return ids[-1] not in self._stop_ids and len(ids) < self._max_tokens

    def _compile(self, step, cache, batch):
        return step.lower(self._params, cache, batch, cfg=self._cfg, numerics=self._numerics).compile()

    def _prefill_round(self, done: Sequence[int]) -> tuple[StepBatch, list[PrefillChunk]]:
        """The next chunks of unfinished prompts, as many as the bucket holds."""
        chunks, space = [], self._prefill.tokens
        for slot, (start, prompt) in enumerate(zip(done, self._prompts, strict=True)):
            end = min(len(prompt), start + space)
            if start < end:
                chunks.append(PrefillChunk(prompt, start, end, slot, self._pages[slot], sampling=self._sampling[slot]))
                space -= ceil_div(end - start, _TILE) * _TILE
        batch = prefill_batch(self._cfg, self._cache_cfg, chunks, self._prefill)
        return self._with_rows(batch), chunks

    def _decode_round(self, outputs: dict[int, list[int]]) -> StepBatch:
        requests = []
        for slot, ids in outputs.items():
            prompt = self._prompts[slot]
            start = len(prompt) + len(ids) - 1
            lookback = self._cfg.engram_max_ngram_size - 1
            before = [*prompt[-lookback:], *ids[-lookback - 1 : -1]][::-1]
            requests.append(DecodeTokens(ids[-1:], start, slot, self._pages[slot], self._sampling[slot], before))
        return self._with_rows(decode_batch(self._cfg, self._cache_cfg, requests, self._decode))

    def _with_rows(self, batch: StepBatch) -> StepBatch:
        if self._tables is None:
            return batch
        return with_engram_rows(self._cfg, batch, np.asarray(self._params["engram_token_map"]), self._tables)


def _int64(value: int) -> int:
    """The value wrapped into the range of a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
