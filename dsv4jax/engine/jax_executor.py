"""The executor that runs the model: plans to step batches, results back, nothing in between but dispatch."""

import collections
import dataclasses
import time

import jax
import numpy as np
from tqdm import tqdm

from dsv4jax.batch import DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.cache import init_cache
from dsv4jax.engine.plan import (
    Decodes,
    Prefill,
    RankResult,
    Sampled,
    SlotMask,
    SlotStart,
    StepPlan,
    StepResult,
)
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import StepOutput

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(eq=False)
class _Dispatched:
    plan: StepPlan
    prefill: StepOutput | None
    decode: StepOutput | None
    offsets: np.ndarray  # of the prefill chunks in their batch
    at: float


class CompileCounter:
    """Counts compilations in this process from its creation on, until it is closed."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def close(self) -> None:
        """Counts no further."""
        jax.monitoring.unregister_event_duration_listener(self._seen)

    def _seen(self, event: str, _seconds: float, **_: object) -> None:
        self.count += event == _COMPILE_EVENT


class JaxExecutor:
    """Runs plans of one rank on the default device.

    Args:
      usable_ids: token ids from here on are never chosen (a vocabulary padded beyond the tokenizer).
      strict: a step during which anything was compiled fails; for tests of the promise that nothing is.
    """

    def __init__(self, params: Params, programs: Programs, *, usable_ids: int | None = None, strict: bool = False):
        self._params, self._programs = params, programs
        self._usable_ids = programs.cfg.vocab_size if usable_ids is None else usable_ids
        self._strict = strict
        self._tokens_on_host = programs.tables is not None
        self._queue: collections.deque[_Dispatched] = collections.deque()
        self.compilations = CompileCounter()
        self.reset()

    def close(self) -> None:
        """Ends the counting of compilations, which otherwise goes on for as long as the process."""
        self.compilations.close()

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def reset(self) -> None:
        """Empties the cache and drops what is in flight."""
        self._queue.clear()
        programs = self._programs
        slots = programs.cache_cfg.slots
        self._cache = None  # freed before the new one is made
        self._cache = init_cache(programs.cfg, programs.cache_cfg, programs.numerics)
        self._sampling = [RequestSampling(temperature=0.0, seed=0)] * slots
        self._history = [()] * slots  # newest token ids that were run, newest first; for Engram tables on the host
        self._free_since = time.monotonic()

    def warm_up(self, progress: bool = True) -> None:
        """Runs every program once on nothing, so that the first request pays for no first execution.

        Raises what a program raises, such as a lack of memory.
        """
        programs = self._programs
        buckets = [*programs.buckets.prefill, *programs.buckets.decode]
        for bucket in tqdm(buckets, desc="warming up", unit="program", disable=not progress):
            build = prefill_batch if isinstance(bucket, PrefillBucket) else decode_batch
            batch = programs.with_rows(build(programs.cfg, programs.cache_cfg, [], bucket))
            self._cache, output = programs.step(bucket)(self._params, self._cache, batch)
            jax.block_until_ready(output.tokens)
        self._start(SlotStart(0, np.zeros(1, np.int32), 0, RequestSampling(temperature=0.0, seed=0), {}))
        for rows in programs.buckets.masks:
            self._set_masks((SlotMask(0, None),) * rows)
        self.compilations.count = 0
        self._free_since = time.monotonic()

    def dispatch(self, plan: StepPlan) -> None:
        """Starts a step. The one rank's arrays go to the device as they are, results start their way back."""
        compiled = self.compilations.count
        at = time.monotonic()
        (rank,) = plan.ranks
        for start in rank.starts:
            self._start(start)
        if rank.masks:
            self._set_masks(rank.masks)
        prefill, offsets = self._prefill(rank.prefills) if rank.prefills else (None, np.zeros(0, np.int32))
        decode = self._decode(rank.decodes) if rank.decodes is not None else None
        self._queue.append(_Dispatched(plan, prefill, decode, offsets, at))
        if self._strict and self.compilations.count > compiled:
            raise RuntimeError(f"step {plan.number} compiled {self.compilations.count - compiled} programs")

    def wait(self) -> StepResult:
        """The oldest step's result; blocks until the device is done with it."""
        step = self._queue.popleft()
        (rank,) = step.plan.ranks
        prefills = decodes = None
        logprobs = ()
        if step.prefill is not None:
            wanted = [self._sampling[p.slot].top_logprobs for p in rank.prefills]
            prefills = _sampled(step.prefill, len(rank.prefills), max(wanted))
            if rank.prefills[0].prompt_logprobs >= 0:
                logprobs = _prompt_logprobs(step.prefill, rank.prefills, step.offsets)
            else:
                logprobs = (None,) * len(rank.prefills)
        if step.decode is not None:
            wanted = [self._sampling[slot].top_logprobs for slot in rank.decodes.slots.tolist()]
            decodes = _sampled(step.decode, len(rank.decodes.slots), max(wanted))
        end = time.monotonic()
        gap = max(0.0, step.at - self._free_since)
        seconds = end - max(step.at, self._free_since)
        self._free_since = end
        return StepResult(step.plan.number, (RankResult(prefills, decodes, logprobs),), seconds, gap)

    def _start(self, start: SlotStart) -> None:
        programs = self._programs
        length = len(start.tokens)
        prompt, outputs = np.split(start.tokens, [length - start.generated])
        mask, counts, bias = request_rows(prompt, outputs, start.logit_bias, programs.cfg.vocab_size)
        bias[self._usable_ids :] = -np.inf
        self._cache = programs.start_request(self._cache, np.int32(start.slot), mask, counts, bias, np.int32(length))
        sampling = start.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=int(np.random.default_rng().integers(2**62)))
        self._sampling[start.slot] = sampling

    def _set_masks(self, masks: tuple[SlotMask, ...]) -> None:
        programs = self._programs
        words = ceil_div(programs.cfg.vocab_size, 32)
        rows = min(n for n in programs.buckets.masks if n >= len(masks))
        slots = np.full(rows, programs.cache_cfg.slots, np.int32)
        values = np.full((rows, words), 0xFFFFFFFF, np.uint32)
        for row, mask in enumerate(masks):
            slots[row] = mask.slot
            if mask.mask is not None:
                values[row] = mask.mask
        self._cache = programs.set_allowed_tokens(rows)(self._cache, slots, values)

    def _prefill(self, chunks: tuple[Prefill, ...]) -> tuple[StepOutput, np.ndarray]:
        programs = self._programs
        buckets = programs.buckets
        tile = buckets.prefill[0].tile
        size = programs.cache_cfg.page_size
        bucket = buckets.for_prefill(
            sum(ceil_div(c.end - c.start, tile) * tile for c in chunks),
            len(chunks),
            max(ceil_div(c.end, size) for c in chunks),
            chunks[0].prompt_logprobs >= 0,
        )
        rows = [
            PrefillChunk(
                c.tokens,
                c.start,
                c.end,
                c.slot,
                c.pages,
                cached=c.cached,
                window_floor=c.window_floor,
                sampling=self._sampling[c.slot],
            )
            for c in chunks
        ]
        batch = programs.with_rows(prefill_batch(programs.cfg, programs.cache_cfg, rows, bucket))
        self._cache, output = programs.step(bucket)(self._params, self._cache, batch)
        for c in chunks:
            self._history[c.slot] = tuple(c.tokens[max(0, c.end - self._lookback) : c.end].tolist()[::-1])
        _start_copies(output)
        return output, batch.offsets

    def _decode(self, decodes: Decodes) -> StepOutput:
        programs = self._programs
        slots, starts, tokens = decodes.slots.tolist(), decodes.starts.tolist(), decodes.tokens.tolist()
        needed = ceil_div(max(starts) + 1, programs.cache_cfg.page_size)
        bucket = programs.buckets.for_decode(len(slots), needed)
        history = [self._history[slot] for slot in slots] if self._tokens_on_host else [()] * len(slots)
        rows = [
            DecodeTokens((token,), start, slot, pages, self._sampling[slot], before)
            for token, start, slot, pages, before in zip(
                tokens, starts, slots, decodes.page_table, history, strict=True
            )
        ]
        batch = programs.with_rows(decode_batch(programs.cfg, programs.cache_cfg, rows, bucket))
        self._cache, output = programs.step(bucket)(self._params, self._cache, batch)
        if self._tokens_on_host:
            for slot, token in zip(slots, tokens, strict=True):
                self._history[slot] = (token, *self._history[slot])[: self._lookback]
        _start_copies(output)
        return output

    @property
    def _lookback(self) -> int:
        return self._programs.cfg.engram_max_ngram_size - 1


def _start_copies(output: StepOutput) -> None:
    output.tokens.copy_to_host_async()
    output.logprobs.copy_to_host_async()


def _sampled(output: StepOutput, rows: int, top: int) -> Sampled:
    """The first token of each row, with the best ones if any request asks for them (`top` > 0)."""
    tokens, logprobs = np.asarray(output.tokens)[:rows, 0], np.asarray(output.logprobs)[:rows, 0]
    if top <= 0:
        return Sampled(tokens, logprobs)
    return Sampled(tokens, logprobs, np.asarray(output.top_tokens)[:rows, 0], np.asarray(output.top_logprobs)[:rows, 0])


def _prompt_logprobs(
    output: StepOutput, chunks: tuple[Prefill, ...], offsets: np.ndarray
) -> tuple[PromptLogprobs, ...]:
    arrays = [np.asarray(a) for a in (output.prompt_logprobs, output.prompt_top_tokens, output.prompt_top_logprobs)]
    results = []
    for chunk, offset in zip(chunks, offsets.tolist()[: len(chunks)], strict=True):
        rows = slice(offset, offset + min(chunk.end, len(chunk.tokens) - 1) - chunk.start)
        logprobs, ids, values = (a[rows] for a in arrays)
        results.append(PromptLogprobs(logprobs, ids[:, : chunk.prompt_logprobs], values[:, : chunk.prompt_logprobs]))
    return tuple(results)
