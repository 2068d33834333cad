"""Steps to time: their batches, programs and measurements."""

import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    Replay,
    StepBatch,
    concatenate_batches,
    decode_batch,
    prefill_batch,
)
from dsv4jax.bench.steps.costs import StepShape
from dsv4jax.bench.steps.trace import Profile, operation_paths, profile, read_trace
from dsv4jax.cache import Cache, CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import StepOutput, decode_step, prefill_step
from sharding import SINGLE, Layout

PAGE = 64
TILE = 64
"""Of prefill."""
GREEDY = RequestSampling(temperature=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class StepCase:
    """One step at one size."""

    name: str
    sizes: Mapping[str, Any]
    step: Callable[..., Any]
    cache_cfg: CacheConfig
    batch: StepBatch
    shape: StepShape

    @property
    def names(self) -> dict[str, Any]:
        """What tells it from others."""
        return {"step": self.name, **self.sizes}

    def lower(
        self, params: Params, cfg: ModelConfig, numerics: Numerics, layout: Layout = SINGLE
    ) -> jax.stages.Lowered:
        """The step, traced for these parameters; every rank of the layout runs such a batch."""
        cache = cache_shapes(cfg, self.cache_cfg, numerics, layout)
        return self.step.lower(params, cache, self.on_all_ranks(layout), cfg=cfg, numerics=numerics, layout=layout)

    def on_all_ranks(self, layout: Layout) -> StepBatch:
        """The batch for each rank of the layout, on its devices; no two have the same tokens in the same places."""
        batches = [self.batch.replace(tokens=np.roll(self.batch.tokens, rank)) for rank in range(layout.ranks)]
        return layout.put(concatenate_batches(batches))


def cache_shapes(cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics, layout: Layout = SINGLE) -> Cache:
    """Shapes of the cache of all ranks, sharded as on the devices."""
    shapes = jax.eval_shape(functools.partial(init_cache, cfg, cache_cfg, numerics, layout))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.by_rank), shapes)


def decode_case(cfg: ModelConfig, requests: int, tokens: int, context: int, ranks: int = 1) -> StepCase:
    """`tokens` of each request behind `context` ones."""
    pages = ceil_div(context + tokens, PAGE)
    cache_cfg = CacheConfig(slots=requests, pages=pages * requests, page_size=PAGE)
    newest = [list(range(17 + i, 17 + i + tokens)) for i in range(requests)]
    rows = [DecodeTokens(newest[i], context, i, range(i * pages, (i + 1) * pages), GREEDY) for i in range(requests)]
    batch = decode_batch(cfg, cache_cfg, rows, DecodeBucket(requests, pages, tokens))
    n = requests * tokens
    name = f"decode {requests} x {tokens} at {context}"
    sizes = {"requests": requests, "tokens_per_request": tokens, "context": context}
    return StepCase(name, sizes, decode_step, cache_cfg, batch, StepShape(requests, n, context, n, n, ranks))


def prefill_case(cfg: ModelConfig, tokens: int, cached: int, replay: Replay, ranks: int = 1) -> StepCase:
    """The last `tokens` of a prompt, `cached` of which are in the cache."""
    (chunk,) = prefill_chunks(cfg, tokens, cached, tokens)
    pages = ceil_div(cached + tokens, PAGE)
    cache_cfg = CacheConfig(slots=1, pages=pages, page_size=PAGE)
    batch = prefill_batch(cfg, cache_cfg, [chunk], prefill_bucket(tokens, pages, replay))
    tail = tokens if replay == "exact" else min(tokens, cfg.sliding_window)
    shape = StepShape(1, tokens, cached + tokens // 2, tail, 1, ranks)
    name, sizes = f"prefill {tokens} at {cached}, {replay}", {"tokens": tokens, "cached": cached, "replay": replay}
    return StepCase(name, sizes, prefill_step, cache_cfg, batch, shape)


def prefill_bucket(tokens: int, pages: int, replay: Replay) -> PrefillBucket:
    """The bucket of `prefill_chunks`."""
    return PrefillBucket(ceil_div(tokens, TILE) * TILE, 1, pages, tile=TILE, replay=replay)


def prefill_chunks(cfg: ModelConfig, new: int, cached: int, chunk: int) -> list[PrefillChunk]:
    """The chunks of a prompt of `cached` + `new` tokens whose first ones are in the cache."""
    prompt = np.random.default_rng(0).integers(3, cfg.vocab_size, cached + new).astype(np.int32)
    starts = range(cached, cached + new, chunk)
    pages = range(ceil_div(cached + new, PAGE))
    return [
        PrefillChunk(prompt, start, min(start + chunk, len(prompt)), 0, pages, cached, cached, GREEDY)
        for start in starts
    ]


def compile_apart(
    lowerings: Mapping[Any, Callable[[], jax.stages.Lowered]],
    options: Mapping[Any, Mapping[str, str | int | bool]] = {},
) -> dict[Any, Any]:
    """Each program, or the exception that its lowering or compilation raised.

    Lowered one after the other, always in the same order: a persistent cache finds programs with kernels by it.

    Args:
      options: what overrides `step_flags.STEP_OPTIONS` for some of the keys.
    """
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        futures = {key: pool.submit(_compiled, caught(lower), options.get(key)) for key, lower in lowerings.items()}
        return {key: future.result() for key, future in futures.items()}


def _compiled(lowered: jax.stages.Lowered | Exception, options: Mapping[str, str | int | bool] | None) -> Any:
    if isinstance(lowered, Exception):
        return lowered
    return caught(functools.partial(lowered.compile, compiler_options=dict(options) if options else None))


def caught(function: Callable[[], Any]) -> Any:
    """What the function returns, or the exception that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def seconds_per_call(call: Callable[[], Any], repeats: int) -> float:
    """Median over three rounds of the time of a call, of `repeats` sent in a row; the first one does not count."""
    jax.block_until_ready(call())
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(repeats):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / repeats)
    return statistics.median(times)


def time_step(
    program: Any, params: Params, cache: Cache, batch: StepBatch, repeats: int
) -> tuple[float, float, StepOutput]:
    """Seconds of a step: median of calls that are waited for, and average of calls sent one after the other; and the
    last output.

    Args:
      batch: on the host, or on the devices of a layout.
    """
    batch = _on_device(batch)
    cache, output = program(params, cache, batch)
    jax.block_until_ready(output.tokens)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        cache, output = program(params, cache, batch)
        jax.block_until_ready(output.tokens)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(repeats):
        cache, output = program(params, cache, batch)
    jax.block_until_ready(output.tokens)
    return statistics.median(times), (time.perf_counter() - begin) / repeats, output


def _on_device(batch: StepBatch) -> StepBatch:
    """The batch on the default device, unless it is on others already."""
    return jax.tree.map(lambda a: a if isinstance(a, jax.Array) else jax.device_put(a), batch)


def profile_step(
    program: Any, params: Params, cache: Cache, batch: StepBatch, steps: int = 3, devices: int = 1
) -> Profile:
    """Time per stage, averaged over some steps and the devices.

    Args:
      program: compiled with `step_flags.KERNEL_BY_KERNEL`, or the exception of that, which is raised.

    Raises:
      RuntimeError: the runs of the step cannot be told apart in the trace.
    """
    if isinstance(program, Exception):
        raise program
    batch, text = _on_device(batch), program.as_text()
    cache, output = program(params, cache, batch)
    jax.block_until_ready((cache, output))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(steps):
                cache, output = program(params, cache, batch)
                jax.block_until_ready((cache, output))
        runs = read_trace(directory, text.split(",", 1)[0].removeprefix("HloModule "))
    if len(runs) != steps * devices:
        raise RuntimeError(
            f"the trace shows {len(runs)} runs of the step, not {steps * devices}: its first kernel is launched often"
        )
    return profile(runs, operation_paths(text))


def compare_programs(
    programs: Mapping[str, Any],
    params: Params,
    batch: StepBatch,
    make_cache: Callable[[], Cache],
    steps: int = 4,
) -> dict[str, bool]:
    """Whether each program gives the outputs and caches of the first, bit for bit.

    Each runs steps on two caches in turn, so that a program which remembers where its arguments were is found out.
    """

    def run(program: Any) -> list[np.ndarray]:
        caches, seen = [make_cache(), make_cache()], []
        for i in range(steps):
            caches[i % 2], output = program(params, caches[i % 2], batch)
            seen += [np.asarray(leaf) for leaf in jax.tree.leaves((output.tokens, output.logprobs, output.logits))]
        return seen + [np.asarray(leaf) for leaf in jax.tree.leaves(caches)]

    results = {name: run(program) for name, program in programs.items()}
    first = next(iter(results.values()))
    return {
        name: all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(result, first, strict=True))
        for name, result in results.items()
    }
