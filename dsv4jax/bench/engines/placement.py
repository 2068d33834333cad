"""The scheduler's policies over ranks, on the virtual clock: which rank takes a request, what chunks of equal time
gain, and how traffic of many short conversations fares."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dsv4jax.bench.engines.system import PAGE, Sizes, simulated_system
from dsv4jax.bench.traffic.counting import Window, summarize
from dsv4jax.bench.traffic.driver import OpenLoop, Run, Turn, run_engine
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost

_COST = LinearCost()


class HitsFirst(Scheduler):
    """Control: the rank with the longest cached prefix, whatever its load."""

    def choose(self, fits, loads):
        return max(fits, key=lambda fit: (len(fit[1]), -loads[fit[0].number]))


class LoadOnly(Scheduler):
    """Control: the rank with the least load, whatever it has cached."""

    def choose(self, fits, loads):
        return min(fits, key=lambda fit: loads[fit[0].number])


def hot_prefix(tokens: int, rate: float, count: int) -> Iterator[Turn]:
    """Nine of ten requests begin with the same `tokens` tokens."""
    rng, now = np.random.default_rng(0), 0.0
    shared = _tokens(rng, tokens)
    for _ in range(count):
        now += rng.exponential(1 / rate)
        own = _tokens(rng, int(rng.integers(200, 800)))
        prompt = np.concatenate([shared, own]) if rng.random() < 0.9 else own
        yield Turn("", 0, now, prompt, int(rng.integers(150, 600)))


def conversations(users: int, first: int, rate: float, count: int) -> Iterator[Turn]:
    """Users at random add some hundred tokens to what they sent before, which began with about `first` tokens."""
    rng, now = np.random.default_rng(0), 0.0
    sent = [_tokens(rng, int(rng.integers(first // 2, 2 * first))) for _ in range(users)]
    for _ in range(count):
        now += rng.exponential(1 / rate)
        user = int(rng.integers(users))
        sent[user] = np.concatenate([sent[user], _tokens(rng, int(rng.integers(150, 600)))])
        yield Turn("", 0, now, sent[user], int(rng.integers(150, 600)))


def poisson_traffic(seconds: float, rate: float) -> Iterator[Turn]:
    """Requests of 200 to 4000 prompt tokens; half of them continue one of the last 64 prompts."""
    rng, now, earlier = np.random.default_rng(0), 0.0, []
    while (now := now + rng.exponential(1 / rate)) < seconds:
        prompt = _tokens(rng, int(np.exp(rng.uniform(np.log(200), np.log(4000)))))
        if earlier and rng.random() < 0.5:
            prompt = np.concatenate([earlier[rng.integers(len(earlier))], prompt])[:16000]
        earlier = [*earlier[-63:], prompt]
        yield Turn("", 0, now, prompt, int(rng.integers(20, 400)))


def placement(ranks: int, requests: int = 150, progress: bool = True) -> Iterator[dict[str, Any]]:
    """How ways to choose a rank fare with one hot prefix and with many conversations; rates grow with the ranks.

    Args:
      requests: per rank.
    """
    system = simulated_system(Sizes(ranks=ranks, slots=64, pages=16384, max_model_len=65536), _COST)
    count = requests * ranks
    scenarios = {
        "hot prefix 20,000": lambda: hot_prefix(20_000, 4 * ranks, count),
        "conversations 2,000": lambda: conversations(25 * ranks, 2000, 7 * ranks, count),
        "conversations 8,000": lambda: conversations(12 * ranks, 8000, 5 * ranks, count),
    }
    for scenario, turns in scenarios.items():
        for policy in (Scheduler, HitsFirst, LoadOnly):
            run = run_engine(*system.engine(scheduler=policy), OpenLoop(turns()), progress=progress)
            yield {"traffic": scenario, "rule": policy.__name__, **_served(run, ranks), "virtual_s": run.ended}


def balanced_chunks(ranks: int, tokens: int, short: int = 4000) -> Iterator[dict[str, Any]]:
    """A prompt of `tokens` on one rank while all ranks always have prompts of `short` tokens to run, with equal chunks
    and with chunks of equal time."""
    sizes = Sizes(ranks=ranks, slots=64, pages=2 * (tokens // PAGE) + 4096, max_model_len=tokens + 1000)
    for context in (None, round(_COST.prefill_token / _COST.prefill_pair)):
        engine, executor = simulated_system(sizes, _COST, prefill_context=context).engine()
        rng, count, steps = np.random.default_rng(0), 0, 0
        (long,) = engine.submit(GenerationRequest("long", _tokens(rng, tokens), 1, ignore_eos=True))
        while long.first_token is None:
            while engine.scheduler.num_waiting + engine.scheduler.num_running < 3 * ranks:
                engine.submit(GenerationRequest(f"s{count}", _tokens(rng, short), 1, ignore_eos=True))
                count += 1
            engine.step()
            steps += 1
        ended = count - (engine.scheduler.num_waiting + engine.scheduler.num_running)
        yield {
            "chunks": "equal time" if context else "equal tokens",
            "prompts_per_s": ended / executor.now(),
            "long_ttft_s": long.first_token,
            "step_ms": engine.stats().device_seconds / steps * 1e3,
        }


def traffic(seconds: float, rate: float, ranks: int, progress: bool = True) -> dict[str, Any]:
    """A time of Poisson traffic on the virtual clock, and how long the host took to simulate it."""
    system = simulated_system(Sizes(ranks=ranks, slots=64, pages=8192, max_model_len=16384), _COST)
    engine, executor = system.engine()
    begin = time.perf_counter()
    run = run_engine(engine, executor, OpenLoop(poisson_traffic(seconds, rate)), progress=progress)
    host = time.perf_counter() - begin
    engine.scheduler.check_integrity()
    return {
        "virtual_s": run.ended,
        "host_s": host,
        "speedup": run.ended / host,
        "steps": len(run.steps),
        "host_ms_per_step": host / len(run.steps) * 1e3,
        "preemptions": engine.scheduler.preemptions,
        **_served(run, ranks),
    }


def _served(run: Run, ranks: int) -> dict[str, Any]:
    """Columns of a run as a whole."""
    summary = summarize(run.measurements, Window(0.0, run.ended), devices=ranks)
    return {
        "requests": summary.requests,
        "turned_away": summary.excluded.incomplete,
        "hit_rate": summary.hit_rate,
        **summary.throughput.as_dict(),
        "ttft_p50_ms": summary.ttft.p50 * 1e3,
        "ttft_p99_ms": summary.ttft.p99 * 1e3,
        "inter_token_p50_ms": summary.inter_token.p50 * 1e3,
        "inter_token_p99_ms": summary.inter_token.p99 * 1e3,
    }


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(2, 1000, count).astype(np.int32)
