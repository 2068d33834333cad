"""Decoding through the engine beside the same step alone, and where the difference comes from.

Requests begin behind a long context without its prefill: their pages are declared to be in the prefix cache, and hold
whatever the cache holds, so that only the window before their end is run. Then steps are timed in five ways, from the
fewest causes of delay to all of them; each difference is the cost of what was added:

| way | added |
|---|---|
| the program alone, calls sent one after the other, every rank with the mean context | |
| the same with each rank's own context | **ranks** wait for the slowest |
| the engine's plans dispatched one after the other, no result read | batches, **dispatch** |
| the same plans, two in flight, the result of each read before the next but one | **readback** of samples |
| the engine | the **host** decides and takes results in between |

With steps in flight most of the last three hide behind the device; only what does not is a difference.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4jax.batch import DecodeTokens, SpeculativeRequest, concatenate_batches
from dsv4jax.bench.engines.system import PAGE, Sizes, System, decode_together, model_system
from dsv4jax.bench.steps.cases import time_step
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.plan import Executor, StepPlan, StepResult
from dsv4jax.engine.records import StepRecord
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling
from sharding import Layout

_PROMPT = 32
_OTHER_STEPS = 16  # before and after those that are timed, with some to spare
_SETTLING = 3
_GREEDY = RequestSampling(temperature=0.0)


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
    """`decode_gap` of requests with short prompts.

    Args:
      requests: of each rank.
      drafts: that each request verifies; 0 for plain decoding.
      forced_acceptance: see `speculative_step`.
    """
    sizes = Sizes(
        ranks=layout.ranks,
        slots=requests,
        max_model_len=decode_length(_PROMPT, steps, drafts),
        prefill_tokens=256,
        drafts=drafts,
    )
    options = dict(forced_acceptance=forced_acceptance, progress=False)
    system = model_system(params, cfg, sizes, numerics, layout, **options)
    row = decode_gap(system, requests=requests, context=_PROMPT, steps=steps)
    system.close()
    return row


def decode_length(context: int, steps: int, drafts: int, skew: float = 0.0) -> int:
    """The `max_model_len` that `decode_gap` needs."""
    return ceil_div(round(context * (1 + skew)), PAGE) * PAGE + (steps + _OTHER_STEPS) * (1 + drafts)


def decode_gap(
    system: System,
    *,
    requests: int,
    context: int,
    steps: int,
    skew: float = 0.0,
    rounds: int = 3,
    inside: Callable[[Executor], Executor] | None = None,
) -> dict[str, Any]:
    """Milliseconds of decode steps in all five ways of the module, and the causes of the gap.

    Each is the least of some rounds, in each of which all are measured in turn. The program of a model is timed on its
    own; that of the simulated executor takes what its steps took.

    Args:
      requests: of each rank.
      context: tokens of their prompts, on average over ranks.
      skew: the first rank's context is less by this share of it, the last one's more, those between in equal steps.
      inside: see `System.engine`; of the engine and of its plans alone.

    Raises:
      ValueError: a skew without ranks, more requests than slots, or a context that leaves no room.
      RuntimeError: not all requests ran at once.
    """
    ranks, drafts = system.config.ranks, system.config.drafts
    if not 0 <= skew < 1 or (skew and ranks == 1):
        raise ValueError(f"skew = {skew}: must be at least 0 and less than 1, and 0 on one rank")
    if requests > system.config.slots:
        raise ValueError(f"requests = {requests}: must be at most slots = {system.config.slots}")
    if decode_length(context, steps, drafts, skew) > system.config.max_model_len:
        raise ValueError(
            f"context = {context}: with {steps} steps beyond max_model_len = {system.config.max_model_len}"
        )
    shares = np.linspace(-skew, skew, ranks) if ranks > 1 else np.zeros(1)
    contexts = [max(1, round(context * (1 + share))) for share in shares.tolist()]
    seconds = np.full(5, np.inf)
    for _ in range(rounds):
        seen = _Seen(inside)
        through, records = _through_engine(system, seen, requests, contexts, steps)
        timed = len(records) - steps
        alone = _alone(system, seen, requests, contexts, steps)
        balanced = alone
        if skew:
            even = _Seen(None)
            if system.programs is None:
                _through_engine(system, even, requests, [context] * ranks, steps)
            balanced = _alone(system, even, requests, [context] * ranks, steps)
        ahead, in_flight = (_replay(system, seen, timed, steps, ahead=ahead) for ahead in (True, False))
        seconds = np.minimum(seconds, [balanced, alone, ahead, in_flight, through])
    balanced, alone, ahead, in_flight, through = seconds.tolist()
    last = records[timed:]
    return {
        "requests_per_rank": requests,
        "context": context,
        "drafts": drafts,
        "skew": skew,
        "engine_milliseconds": through * 1e3,
        "program_milliseconds": alone * 1e3,
        "host_gap_milliseconds": (through - alone) * 1e3,
        "balanced_program_milliseconds": balanced * 1e3,
        "share_of_engine": balanced / through,
        "gap_ranks_milliseconds": (alone - balanced) * 1e3,
        "gap_dispatch_milliseconds": (ahead - alone) * 1e3,
        "gap_readback_milliseconds": (in_flight - ahead) * 1e3,
        "gap_host_milliseconds": (through - in_flight) * 1e3,
        "waits_milliseconds": statistics.mean(record.gap_seconds for record in last) * 1e3,
        "schedule_milliseconds": statistics.mean(record.schedule_seconds for record in last) * 1e3,
        "update_milliseconds": statistics.mean(record.update_seconds for record in last) * 1e3,
        "tokens_per_step": statistics.mean(record.output_tokens for record in last),
    }


class _Seen:
    """Passes every call to the executor and keeps plans and results."""

    def __init__(self, inside: Callable[[Executor], Executor] | None):
        self.inside = inside or (lambda executor: executor)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def __call__(self, executor: Executor) -> "_Seen":
        self._executor = self.inside(executor)
        self.now, self.reset = self._executor.now, self._executor.reset
        return self

    def dispatch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._executor.dispatch(plan)

    def wait(self) -> StepResult:
        self.results.append(self._executor.wait())
        return self.results[-1]


def _through_engine(
    system: System, seen: _Seen, requests: int, contexts: Sequence[int], steps: int
) -> tuple[float, list[StepRecord]]:
    """As `decode_together`."""
    everybody = requests * len(contexts)
    limits = dict(max_admissions=requests, max_waiting=everybody, max_waiting_tokens=requests * sum(contexts))
    engine, executor = system.engine(inside=seen, **limits)
    submit_behind_contexts(engine, system, requests, contexts, system.config.max_model_len - max(contexts))
    return decode_together(engine, executor, everybody, _SETTLING, steps)


def submit_behind_contexts(
    engine: Engine, system: System, requests: int, contexts: Sequence[int], max_tokens: int
) -> None:
    """Submits requests with prompts of `contexts[rank]` tokens, of which all full pages count as cached.

    Raises:
      ValueError: there are too few pages.
    """
    scheduler: Scheduler = engine.scheduler
    for rank, context in enumerate(contexts):
        for i in range(requests):
            prompt = system.prompt(rank, i, tokens=context)
            drafts = system.config.drafts or None
            request = GenerationRequest(
                f"{rank} {i}", prompt, max_tokens, sampling=_GREEDY, ignore_eos=True, rank=rank, drafts=drafts
            )
            scheduler.check(request)
            (sequence,) = scheduler.prepare(request)
            pool = scheduler.ranks[rank].pool
            pages = pool.allocate(len(sequence.page_keys))
            for page, key in zip(pages, sequence.page_keys, strict=True):
                pool.publish(page, key)
            pool.release(pages)
            scheduler.submit([sequence], engine.executor.now())


def _replay(system: System, seen: _Seen, first: int, steps: int, *, ahead: bool) -> float:
    """Seconds of each of the steps from `first` on, dispatched again without the engine.

    Like there, one is in flight before and after them. `ahead`: all are dispatched, and no result is read.
    """
    executor = system.empty_executor()
    run = seen.inside(executor)
    for number, plan in enumerate(seen.plans[: first + 1]):
        run.dispatch(plan)
        if number:
            run.wait()
    begin = executor.now()
    if ahead:
        for plan in seen.plans[first + 1 : first + steps]:
            run.dispatch(plan)
        executor.synchronize()
    else:
        for plan in seen.plans[first + 1 : first + steps + 1]:
            run.dispatch(plan)
            run.wait()
    return (executor.now() - begin) / steps


def _alone(system: System, seen: _Seen, requests: int, contexts: Sequence[int], steps: int) -> float:
    """Seconds of the decode program, calls sent one after the other; what steps took that were simulated."""
    programs, drafts = system.programs, system.config.drafts
    if programs is None:
        return statistics.mean(result.seconds for result in seen.results[-steps:])
    longest = ceil_div(decode_length(max(contexts), steps, drafts), PAGE)
    buckets = programs.buckets
    bucket = buckets.for_verify(requests, longest, drafts) if drafts else buckets.for_decode(requests, longest)
    batches = []
    for context in contexts:
        pages = ceil_div(decode_length(context, steps, drafts), PAGE)
        own = [range(slot * pages, (slot + 1) * pages) for slot in range(requests)]
        if drafts:
            end = pages * PAGE
            rows = [
                SpeculativeRequest(slot, own[slot], end, drafts, drafts, sampling=_GREEDY) for slot in range(requests)
            ]
        else:
            rows = [DecodeTokens([5], context, slot, own[slot], _GREEDY) for slot in range(requests)]
        batches.append(programs.batch(rows, bucket))
    batch = programs.layout.put(concatenate_batches(batches))
    return time_step(programs.step(bucket), system.params, programs.init_cache(), batch, steps // 2)[1]
