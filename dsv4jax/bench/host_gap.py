"""What the host costs a step: the engine's steps beside the same program called again and again."""

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from dsv4jax.batch import DecodeTokens, SpeculativeRequest, concatenate_batches
from dsv4jax.bench.steps import PAGE, time_step
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.records import Observer, StepRecord
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling
from sharding import Layout

_PROMPT = 32
_TILE = 16
_OTHER_STEPS = 16  # before and after those that are timed, with some to spare


@dataclasses.dataclass
class _Steps(Observer):
    """Keeps the records of steps."""

    records: list[StepRecord] = dataclasses.field(default_factory=list)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def rejected(self, reason: str) -> None:
        raise AssertionError(f"the benchmark does not expect rejections: {reason}")


def host_gap(
    params: Params,
    cfg: ModelConfig,
    numerics: Numerics,
    layout: Layout,
    *,
    requests: int,
    steps: int,
    drafts: int = 0,
    forced_acceptance: np.ndarray | None = None,
) -> dict[str, Any]:
    """Times of decode steps in milliseconds: through the engine, two steps in flight, and of the program alone.

    Args:
      requests: of each rank, with short prompts.
      drafts: that each request verifies; 0 for plain decoding.
      forced_acceptance: see `speculative_step`.
    """
    length = _PROMPT + (steps + _OTHER_STEPS) * (1 + drafts)
    pages = ceil_div(length, PAGE)
    # A request is admitted where a page more than its prompt needs is free.
    all_pages = requests * (pages + 1)
    cache_cfg = CacheConfig(slots=requests, pages=all_pages, page_size=PAGE, drafts="shared" if drafts else None)
    prefill = dict(prefill_tokens=8 * max(_PROMPT, _TILE), prefill_requests=8)
    buckets = make_buckets(
        cache_cfg,
        prefill_tokens=[prefill["prefill_tokens"]],
        prefill_requests=prefill["prefill_requests"],
        decode_requests=[requests],
        contexts=[length],
        bounded=True,
        prompt_logprobs=False,
        tile=_TILE,
        drafts=drafts,
    )
    if drafts:
        buckets = dataclasses.replace(buckets, decode=())
    programs = Programs(
        cfg, cache_cfg, buckets, numerics, layout, params=params, forced_acceptance=forced_acceptance, progress=False
    )
    executor, seen = JaxExecutor(params, programs), _Steps()
    executor.warm_up(progress=False)
    scheduler = Scheduler(
        SchedulerConfig(
            slots=requests,
            pages=cache_cfg.pages,
            max_model_len=length,
            eos_id=1,
            replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers),
            ranks=layout.ranks,
            page_size=PAGE,
            tile=_TILE,
            max_admissions=requests,
            drafts=drafts,
            **prefill,
        )
    )
    engine, rng, greedy = Engine(scheduler, executor, seen), np.random.default_rng(0), RequestSampling(temperature=0.0)
    for i in range(requests * layout.ranks):
        prompt = rng.integers(3, cfg.vocab_size, _PROMPT).astype(np.int32)
        engine.submit(
            GenerationRequest(
                f"r{i}", prompt, length - _PROMPT, sampling=greedy, ignore_eos=True, drafts=drafts or None
            )
        )
    while scheduler.waiting or any(rank.prefilling for rank in scheduler.ranks):
        engine.step()
    for _ in range(3):
        engine.step()
    first, wall = len(seen.records), []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        wall.append(time.perf_counter() - begin)
    records = seen.records[first:]
    executor.close()
    if wrong := [r.decode_requests for r in records if r.decode_requests != requests * layout.ranks]:
        raise RuntimeError(f"a step decoded {wrong[0]} of {requests * layout.ranks} requests: not all ran at once")
    alone = _program_alone(params, programs, requests, length, steps)
    through = statistics.mean(wall)
    return {
        "requests_per_rank": requests,
        "drafts": drafts,
        "engine_milliseconds": through * 1e3,
        "program_milliseconds": alone * 1e3,
        "host_gap_milliseconds": (through - alone) * 1e3,
        "waits_milliseconds": statistics.mean(record.gap_seconds for record in records) * 1e3,
        "schedule_milliseconds": statistics.mean(record.schedule_seconds for record in records) * 1e3,
        "update_milliseconds": statistics.mean(record.update_seconds for record in records) * 1e3,
        "tokens_per_step": statistics.mean(record.output_tokens for record in records),
    }


def _program_alone(params: Params, programs: Programs, requests: int, length: int, steps: int) -> float:
    """Seconds of the decode program, calls sent one after the other."""
    greedy, pages = RequestSampling(temperature=0.0), ceil_div(length, PAGE)
    own = [range(slot * pages, (slot + 1) * pages) for slot in range(requests)]
    if programs.buckets.verify:
        (bucket,) = programs.buckets.verify
        drafts = bucket.tokens_per_request - 1
        rows = [
            SpeculativeRequest(slot, own[slot], length, drafts, drafts, sampling=greedy) for slot in range(requests)
        ]
    else:
        (bucket,) = programs.buckets.decode
        rows = [DecodeTokens([5], _PROMPT, slot, own[slot], greedy) for slot in range(requests)]
    layout = programs.layout
    batch = layout.put(concatenate_batches([programs.batch(rows, bucket)] * layout.ranks))
    return time_step(programs.step(bucket), params, programs.init_cache(), batch, steps // 2)[1]
