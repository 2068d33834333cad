"""Host cost and policy of the engine without a device: the scheduler on a simulated executor.

    python scripts/bench_engine.py --output engine.json

Prints tables: host time per step, admission of a very long prompt beside a list-based one, inter-token latency of chats
beside such a prompt, and an hour of traffic on the virtual clock. With --ranks, host time and traffic are those of so
many ranks, and two more tables say how ways to place requests on ranks compare, and what chunks of equal time gain.
"""

import array
import dataclasses
import datetime
import gc
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from tqdm import tqdm

from dsv4jax.engine.engine import Engine
from dsv4jax.engine.page_pool import PrefixHasher
from dsv4jax.engine.plan import StepPlan
from dsv4jax.engine.records import RequestRecord, StepRecord
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor, constant_tokens, run_traffic

_REQUESTS = flags.DEFINE_multi_integer("requests", [1, 64, 256, 1024], "Running requests of the host cost table.")
_PROMPT = flags.DEFINE_integer("prompt", 855_000, "Tokens of the very long prompt.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Runs of each host time; the least is reported.", lower_bound=1)
_HOURS = flags.DEFINE_float("hours", 1.0, "Virtual hours of traffic.", lower_bound=0.0)
_RATE = flags.DEFINE_float("rate", 2.0, "Requests per virtual second of the traffic.", lower_bound=0.01)
_RANKS = flags.DEFINE_integer("ranks", 1, "Data-parallel ranks.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_EOS = 1
_PAGE = 64
_REPLAY = ReplayRule(window=128, layers=43)
_TOKENS = constant_tokens(100)
_COST = LinearCost()


@dataclasses.dataclass
class Totals:
    """An observer that keeps what the tables need."""

    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    requests: list[RequestRecord] = dataclasses.field(default_factory=list)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def rejected(self, reason: str) -> None:
        raise AssertionError(f"the benchmark does not expect rejections: {reason}")


class Silent(Totals):
    """An observer that keeps nothing."""

    def step(self, record: StepRecord) -> None:
        pass

    def request(self, record: RequestRecord) -> None:
        pass


def simulated_engine(
    cfg: SchedulerConfig, cost: Callable[[StepPlan], float] = _COST
) -> tuple[Engine, SimulatedExecutor, Totals]:
    """An engine without a device, its executor and its observer."""
    executor, totals = SimulatedExecutor(cost, _TOKENS), Totals()
    return Engine(Scheduler(cfg), executor, totals), executor, totals


def host_cost(requests: int, repeats: int, steps: int = 200, long_prompt: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Milliseconds of host time of a decode step of `requests` requests, one of them behind `long_prompt` tokens.

    The device takes no time. A new page is needed, and a finished one hashed, in one of 64 steps of each request.
    Returns the least mean over `repeats` runs of `steps` steps, and median and maximum of the steps of that run.
    """
    length = max(4096, long_prompt + 65536)
    slots = -(-requests // ranks) + (ranks > 1)  # the rank of the long prompt may have fewer requests than others
    cfg = SchedulerConfig(
        ranks=ranks,
        slots=slots,
        pages=slots * 64 + length // _PAGE,
        max_model_len=length,
        eos_id=_EOS,
        replay=_REPLAY,
        prefill_tokens=65536,
        max_admissions=256,
    )
    engine = Engine(Scheduler(cfg), SimulatedExecutor(lambda plan: 0.0, _TOKENS), Silent())
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, requests)
    if long_prompt:
        lengths[0] = long_prompt
    for i, tokens in enumerate(lengths.tolist()):
        prompt = rng.integers(2, 1000, tokens).astype(np.int32)
        engine.submit(GenerationRequest(f"r{i}", prompt, max_tokens=2500 + steps * repeats, ignore_eos=True))
        if long_prompt and not i:
            finish_prefill(engine)
    finish_prefill(engine)
    runs = []
    for _ in range(repeats):
        gc.collect()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        runs.append(times)
    assert engine.scheduler.num_running == requests
    best = min(runs, key=sum)
    return {
        "requests": requests,
        "long_prompt": long_prompt,
        "mean_ms": statistics.mean(best) * 1e3,
        "median_ms": statistics.median(best) * 1e3,
        "max_ms": max(best) * 1e3,
    }


def finish_prefill(engine: Engine) -> None:
    """Steps until every request decodes."""
    while engine.scheduler.waiting or any(rank.prefilling for rank in engine.scheduler.ranks):
        engine.step()


def naive_admission(prompt: list[int], pages: int) -> np.ndarray:
    """What an engine does that keeps a prompt as a list: copies on the way, one hash object and one page at a time.

    Returns the page numbers, ready for the device. Nothing is slowed down on purpose: tokens of a page are packed by
    `array`, and hashing is a C function.
    """
    request_tokens = list(prompt)
    sequence_tokens = list(request_tokens)
    key, cached, blocks = b"", {}, []
    for first in range(0, len(sequence_tokens) - _PAGE + 1, _PAGE):
        key = hashlib.sha256(key + array.array("i", sequence_tokens[first : first + _PAGE]).tobytes()).digest()
        if key not in cached:
            blocks.append(key)
    free, table, holders = list(range(pages)), [], [0] * pages
    for _ in range(-(-len(sequence_tokens) // _PAGE)):
        page = free.pop()
        holders[page] += 1
        table.append(page)
    np.array(sequence_tokens[:2048], np.int32)
    return np.array(table, np.int32)


def admission(tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds from a prompt of `tokens` (an int32 array) to the plan of its first step, least of `repeats`.

    `cold`: nothing is cached. `warm`: the whole prompt is. `naive`: the list-based way, from a list, for one cold
    admission.
    """
    cfg = SchedulerConfig(
        slots=4, pages=2 * (tokens // _PAGE + 2), max_model_len=tokens + 1000, eos_id=_EOS, replay=_REPLAY
    )
    prompt = np.random.default_rng(0).integers(2, 129_000, tokens).astype(np.int32)
    parts: dict[str, list[float]] = {"hash": [], "cold": [], "warm": [], "naive": []}

    def admit(engine: Engine) -> float:
        scheduler = engine.scheduler
        begin = time.perf_counter()
        request = GenerationRequest("long", prompt, max_tokens=500)
        scheduler.check(request)
        scheduler.submit(scheduler.prepare(request), 0.0)
        plan, _ = scheduler.schedule(0.0)
        seconds = time.perf_counter() - begin
        assert plan is not None and len(plan.ranks[0].prefills[0].pages) == tokens // _PAGE + 1
        return seconds

    as_list = prompt.tolist()
    hasher = PrefixHasher(_PAGE, tokens)
    for _ in range(repeats):
        parts["cold"].append(admit(simulated_engine(cfg)[0]))
        begin = time.perf_counter()
        hasher.extend(hasher.start(""), prompt, 0)
        parts["hash"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        naive_admission(as_list, cfg.pages)
        parts["naive"].append(time.perf_counter() - begin)
    engine, _, _ = simulated_engine(cfg)
    engine.submit(GenerationRequest("first", prompt, max_tokens=1))
    while not engine.idle:
        engine.step()
    for _ in range(repeats):
        parts["warm"].append(admit(engine))
        engine.scheduler.recover(limit=1)  # ends what was admitted, and forgets the prefix
        engine.submit(GenerationRequest("again", prompt, max_tokens=1))
        while not engine.idle:
            engine.step()
    least = {f"{name}_ms": min(times) * 1e3 for name, times in parts.items()}
    return {"tokens": tokens, **least, "naive_to_cold": least["naive_ms"] / least["cold_ms"]}


def fairness(
    tokens: int, chats: int, prefill_tokens: int, prefill_every: int = 1, decode_every: int = 1
) -> dict[str, Any]:
    """How `chats` running chats and others that arrive every second fare while a prompt of `tokens` is prefilled.

    Inter-token latencies and times to the first token in virtual milliseconds, with `LinearCost`.

    `bound_ms` is what the policy promises: `decode_every` steps of the longest kind there can be.
    """
    cfg = SchedulerConfig(
        slots=2 * chats,
        pages=2 * (tokens // _PAGE) + 64 * chats,
        max_model_len=tokens + 1000,
        eos_id=_EOS,
        replay=_REPLAY,
        prefill_tokens=prefill_tokens,
        prefill_every=prefill_every,
        decode_every=decode_every,
    )
    cost = LinearCost()
    engine, executor, totals = simulated_engine(cfg, cost)
    rng = np.random.default_rng(0)

    def chat(name: str, output: int) -> GenerationRequest:
        return GenerationRequest(name, rng.integers(2, 1000, 500).astype(np.int32), output, ignore_eos=True)

    for i in range(chats):
        engine.submit(chat(f"running{i}", cfg.max_model_len - 500))
    finish_prefill(engine)
    for _ in range(100):
        engine.step()
    alone = np.concatenate([record.inter_token_seconds for record in totals.steps[-50:]])
    begin, first = executor.now(), len(totals.steps)
    long = engine.submit(
        GenerationRequest("long", rng.integers(2, 1000, tokens).astype(np.int32), max_tokens=2, ignore_eos=True)
    )[0]
    arrived = []
    while long.first_token is None:
        if executor.now() - begin > len(arrived):
            arrived += engine.submit(chat(f"new{len(arrived)}", 20))
        engine.step()
    gaps = np.concatenate([record.inter_token_seconds for record in totals.steps[first:]])
    waits = [s.first_token - s.arrived for s in arrived if s.first_token is not None]
    longest_step = (
        cost.step
        + prefill_tokens * (cost.prefill_token + cost.prefill_pair * tokens)
        + cfg.slots * (cost.decode_token + cost.decode_context * 2000)
    )
    return {
        "prefill_tokens": prefill_tokens,
        "prefill_every": prefill_every,
        "decode_every": decode_every,
        "itl_alone_ms": float(np.median(alone)) * 1e3,
        "itl_median_ms": float(np.median(gaps)) * 1e3,
        "itl_p99_ms": float(np.quantile(gaps, 0.99)) * 1e3,
        "itl_max_ms": float(gaps.max()) * 1e3,
        "bound_ms": decode_every * longest_step * 1e3,
        "chat_ttft_max_ms": max(waits, default=0.0) * 1e3,
        "long_ttft_s": long.first_token - long.arrived,
    }


def poisson_traffic(seconds: float, rate: float, seed: int = 0) -> Iterator[tuple[float, GenerationRequest]]:
    """Conversations: a request has 200 to 4000 prompt tokens; half of them continue one of the last 64 prompts."""
    rng, now, earlier = np.random.default_rng(seed), 0.0, []
    count = 0
    while (now := now + rng.exponential(1 / rate)) < seconds:
        prompt = rng.integers(2, 1000, int(np.exp(rng.uniform(np.log(200), np.log(4000))))).astype(np.int32)
        if earlier and rng.random() < 0.5:
            prompt = np.concatenate([earlier[rng.integers(len(earlier))], prompt])[:16000]
        earlier = [*earlier[-63:], prompt]
        yield now, GenerationRequest(f"t{count}", prompt, int(rng.integers(20, 400)), ignore_eos=True)
        count += 1


def traffic(hours: float, rate: float, ranks: int = 1, slots: int = 64, pages: int = 8192) -> dict[str, Any]:
    """A time of Poisson traffic on the virtual clock, and how long the host took to simulate it."""
    cfg = SchedulerConfig(slots=slots, pages=pages, max_model_len=16384, eos_id=_EOS, replay=_REPLAY, ranks=ranks)
    engine, executor, totals = simulated_engine(cfg)
    requests = list(poisson_traffic(hours * 3600, rate))
    begin = time.perf_counter()
    choices = run_traffic(engine, executor, tqdm(requests, desc="simulating traffic", unit="request"))
    host = time.perf_counter() - begin
    engine.scheduler.check_integrity()
    stats, seconds = engine.stats(), executor.now()
    first = [s.first_token - s.arrived for s in choices]
    gaps = np.concatenate([record.inter_token_seconds for record in totals.steps])
    return {
        "virtual_s": seconds,
        "host_s": host,
        "speedup": seconds / host,
        "requests": len(requests),
        "turned_away": len(requests) - len(choices),
        "steps": stats.steps,
        "host_ms_per_step": host / stats.steps * 1e3,
        "preemptions": stats.preemptions,
        "hit_rate": stats.prefix_hits / stats.prefix_queries,
        "cached_tokens_per_s": stats.cached_tokens / seconds,
        "computed_tokens_per_s": stats.computed_tokens / seconds,
        "output_tokens_per_s": stats.output_tokens / seconds,
        "ttft_median_ms": statistics.median(first) * 1e3,
        "ttft_p99_ms": float(np.quantile(first, 0.99)) * 1e3,
        "itl_median_ms": float(np.median(gaps)) * 1e3,
        "itl_p99_ms": float(np.quantile(gaps, 0.99)) * 1e3,
    }


class HitsFirst(Scheduler):
    """Control: the rank with the longest cached prefix, whatever its load."""

    def choose(self, fits, loads):
        return max(fits, key=lambda fit: (len(fit[1]), -loads[fit[0].number]))


class LoadOnly(Scheduler):
    """Control: the rank with the least load, whatever it has cached."""

    def choose(self, fits, loads):
        return min(fits, key=lambda fit: loads[fit[0].number])


def hot_prefix(tokens: int, rate: float, count: int, seed: int = 0) -> Iterator[tuple[float, GenerationRequest]]:
    """Nine of ten requests begin with the same `tokens` tokens."""
    rng, now = np.random.default_rng(seed), 0.0
    shared = rng.integers(2, 1000, tokens).astype(np.int32)
    for i in range(count):
        now += rng.exponential(1 / rate)
        own = rng.integers(2, 1000, int(rng.integers(200, 800))).astype(np.int32)
        prompt = np.concatenate([shared, own]) if rng.random() < 0.9 else own
        yield now, GenerationRequest(f"h{i}", prompt, int(rng.integers(150, 600)), ignore_eos=True)


def conversations(users: int, first: int, rate: float, count: int, seed: int = 0) -> Iterator[tuple[float, Any]]:
    """Users at random add some hundred tokens to what they sent before, which began with about `first` tokens."""
    rng, now = np.random.default_rng(seed), 0.0
    sent = [rng.integers(2, 1000, int(rng.integers(first // 2, 2 * first))).astype(np.int32) for _ in range(users)]
    for i in range(count):
        now += rng.exponential(1 / rate)
        user = int(rng.integers(users))
        sent[user] = np.concatenate([sent[user], rng.integers(2, 1000, int(rng.integers(150, 600))).astype(np.int32)])
        yield now, GenerationRequest(f"c{i}", sent[user], int(rng.integers(150, 600)), ignore_eos=True)


def placement(ranks: int) -> list[dict[str, Any]]:
    """How ways to choose a rank fare with one hot prefix and with many conversations; rates grow with the ranks."""
    cfg = SchedulerConfig(slots=64, pages=16384, max_model_len=65536, eos_id=_EOS, replay=_REPLAY, ranks=ranks)
    scenarios = {
        "hot prefix 20,000": list(hot_prefix(20_000, 4 * ranks, 150 * ranks)),
        "conversations 2,000": list(conversations(25 * ranks, 2000, 7 * ranks, 150 * ranks)),
        "conversations 8,000": list(conversations(12 * ranks, 8000, 5 * ranks, 150 * ranks)),
    }
    rows = []
    for scenario, requests in scenarios.items():
        for policy in (Scheduler, HitsFirst, LoadOnly):
            executor, totals = SimulatedExecutor(_COST, _TOKENS), Totals()
            engine = Engine(policy(cfg), executor, totals)
            choices = run_traffic(engine, executor, tqdm(requests, desc=scenario, unit="request"))
            stats = engine.stats()
            first = [s.first_token - s.arrived for s in choices]
            gaps = np.concatenate([record.inter_token_seconds for record in totals.steps])
            rows.append(
                {
                    "traffic": scenario,
                    "rule": policy.__name__,
                    "hit_rate": stats.prefix_hits / stats.prefix_queries,
                    "ttft_median_ms": statistics.median(first) * 1e3,
                    "ttft_p99_ms": float(np.quantile(first, 0.99)) * 1e3,
                    "itl_median_ms": float(np.median(gaps)) * 1e3,
                    "itl_p99_ms": float(np.quantile(gaps, 0.99)) * 1e3,
                    "virtual_s": executor.now(),
                }
            )
    return rows


def balanced_chunks(ranks: int, tokens: int) -> list[dict[str, Any]]:
    """A prompt of `tokens` on one rank while all ranks always have prompts of 4000 tokens to run, with equal chunks and
    with chunks of equal time."""
    rows = []
    for context in (None, round(_COST.prefill_token / _COST.prefill_pair)):
        cfg = SchedulerConfig(
            slots=64,
            pages=2 * (tokens // _PAGE) + 4096,
            max_model_len=tokens + 1000,
            eos_id=_EOS,
            replay=_REPLAY,
            ranks=ranks,
            prefill_context=context,
        )
        engine, executor, totals = simulated_engine(cfg)
        rng, count = np.random.default_rng(0), 0
        prompt = rng.integers(2, 1000, tokens).astype(np.int32)
        (long,) = engine.submit(GenerationRequest("long", prompt, 1, ignore_eos=True))
        while long.first_token is None:
            while engine.scheduler.num_waiting + engine.scheduler.num_running < 3 * ranks:
                short = rng.integers(2, 1000, 4000).astype(np.int32)
                engine.submit(GenerationRequest(f"s{count}", short, 1, ignore_eos=True))
                count += 1
            engine.step()
        rows.append(
            {
                "chunks": "equal time" if context else "equal tokens",
                "prompts_per_s": (len(totals.requests) - 1) / executor.now(),
                "long_ttft_s": long.first_token,
                "step_median_ms": float(np.median([record.device_seconds for record in totals.steps])) * 1e3,
            }
        )
    return rows


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A Markdown table with a column per key."""
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'---:|' * len(rows[0])}")
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    repeats, tokens, ranks = _REPEATS.value, _PROMPT.value, _RANKS.value
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "ranks": ranks,
    }
    rows = [host_cost(n, repeats, ranks=ranks) for n in _REQUESTS.value]
    rows += [host_cost(n, repeats, long_prompt=tokens, ranks=ranks) for n in _REQUESTS.value]
    results["host_cost"] = rows
    print_table("Host time per decode step, device time zero", rows)
    results["admission"] = admission(tokens, repeats)
    print_table("Admission of a long prompt", [results["admission"]])
    knobs = [(512, 1, 1), (2048, 1, 1), (8192, 1, 1), (2048, 4, 1), (2048, 1, 4)]
    results["fairness"] = [fairness(tokens, 32, *knob) for knob in knobs]
    print_table(f"32 chats beside a prompt of {tokens:,} tokens, virtual time", results["fairness"])
    if _HOURS.value:
        results["traffic"] = traffic(_HOURS.value, _RATE.value, ranks)
        print_table("Traffic, virtual time", [results["traffic"]])
    if ranks > 1:
        results["placement"] = placement(ranks)
        print_table("Ways to place requests on ranks, virtual time", results["placement"])
        results["balanced_chunks"] = balanced_chunks(ranks, tokens)
        print_table(f"Prompts of 4,000 tokens beside one of {tokens:,}, virtual time", results["balanced_chunks"])
    if _OUTPUT.value:
        with open(_OUTPUT.value, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    app.run(main)
