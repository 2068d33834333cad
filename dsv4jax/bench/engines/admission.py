"""What it costs to admit requests: the host's time by stage, and what running requests notice of new ones.

**Stages**: from the bytes of a request to the plan of its first step, for prompts of any length, without a device;
beside them what an engine does that keeps a prompt as a list.

**Bursts**: requests that run all the time, and every few seconds many new ones at once, with different caps on how many
are started in a step. **Long prompt**: chats beside one very long prompt, with different shares of a step for prefill.
"""

import array
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from dsv4jax.bench.engines.system import PAGE, Sizes, System, finish_prefill, simulated_system
from dsv4jax.bench.traffic.counting import Window, inter_token_seconds, percentiles, summarize
from dsv4jax.bench.traffic.driver import Turn, run_engine
from dsv4jax.bench.traffic.records import Measurement
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost
from dsv4jax.server.body import decode_object, decode_token_ids
from dsv4jax.tokenizer import Tokenizer


def admission_stages(tokens: int, tokenizer: Tokenizer, text: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of each stage for a prompt of `tokens`, a row for each repeat.

    `parse` reads the body of a request whose prompt is ids; `parse_text` and `tokenise` take its place for a text.
    `hash` makes the page keys, `enqueue` checks the request and puts it into the queue, `first_plan` admits it and
    makes the first step; `first_plan_cached` does so where the whole prompt is in the prefix cache. `engine` is the sum
    of hash, enqueue and first plan, and `list_based` what takes its place in an engine of lists.

    Args:
      text: any, at least as many characters as some tokens; it is repeated.
    """
    system = simulated_system(
        Sizes(slots=4, pages=2 * (tokens // PAGE + 10), max_model_len=tokens + 1000), LinearCost()
    )
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, tokenizer.vocab_size, tokens).astype(np.int32)
    as_list = prompt.tolist()
    prompt_text = _text_of(tokens, tokenizer, text)
    bodies = [json.dumps({"model": "m", "prompt": p, "max_tokens": 500}).encode() for p in (as_list, prompt_text)]
    cached = _run_through(system, prompt)
    for _ in range(repeats):
        seconds: dict[str, float] = {}
        clock = time.perf_counter
        times = [clock()]
        ids = decode_token_ids(
            decode_object(bodies[0], undecoded=("prompt",))["prompt"], "prompt", tokenizer.vocab_size
        )
        times.append(clock())
        read = decode_object(bodies[1])["prompt"]
        times.append(clock())
        tokenizer.encode(read)
        times.append(clock())
        seconds |= dict(zip(("parse", "parse_text", "tokenise"), np.diff(times).tolist(), strict=True))
        seconds |= _admit(Scheduler(system.config), ids)
        seconds["first_plan_cached"] = _admit(cached, ids)["first_plan"]
        cached.recover(limit=1)  # ends what was admitted, and forgets the prefix
        cached = _run_through(system, prompt)
        begin = clock()
        list_based_admission(as_list, system.config.pages)
        seconds["list_based"] = clock() - begin
        seconds["engine"] = seconds["hash"] + seconds["enqueue"] + seconds["first_plan"]
        yield {"tokens": tokens, **{f"{name}_ms": value * 1e3 for name, value in seconds.items()}}


def _admit(scheduler: Scheduler, ids: Int32[np.ndarray, " tokens"]) -> dict[str, float]:
    """Seconds of the engine's stages."""
    request = GenerationRequest("long", ids, max_tokens=500)
    times = [time.perf_counter()]
    prepared = scheduler.prepare(request)
    times.append(time.perf_counter())
    scheduler.check(request)
    scheduler.submit(prepared, 0.0)
    times.append(time.perf_counter())
    plan, _ = scheduler.schedule(0.0)
    times.append(time.perf_counter())
    assert plan is not None and len(plan.ranks[0].prefills[0].pages) == len(ids) // PAGE + 1
    return dict(zip(("hash", "enqueue", "first_plan"), np.diff(times).tolist(), strict=True))


def _run_through(system: System, prompt: Int32[np.ndarray, " tokens"]) -> Scheduler:
    """A scheduler whose prefix cache holds the prompt."""
    engine, _ = system.engine()
    engine.submit(GenerationRequest("before", prompt, max_tokens=1))
    while not engine.idle:
        engine.step()
    return engine.scheduler


def _text_of(tokens: int, tokenizer: Tokenizer, text: str) -> str:
    """A text of about so many tokens."""
    per_token = len(text) / len(tokenizer.encode(text))
    length = round(tokens * per_token)
    return (text * (length // len(text) + 1))[:length]


def list_based_admission(prompt: list[int], pages: int) -> np.ndarray:
    """What an engine does that keeps a prompt as a list: copies on the way, one hash object and one page at a time.

    Returns the page numbers, ready for the device. Nothing is slowed down on purpose: tokens of a page are packed by
    `array`, and hashing is a C function.
    """
    request_tokens = list(prompt)
    sequence_tokens = list(request_tokens)
    key, cached, blocks = b"", {}, []
    for first in range(0, len(sequence_tokens) - PAGE + 1, PAGE):
        key = hashlib.sha256(key + array.array("i", sequence_tokens[first : first + PAGE]).tobytes()).digest()
        if key not in cached:
            blocks.append(key)
    free, table, holders = list(range(pages)), [], [0] * pages
    for _ in range(-(-len(sequence_tokens) // PAGE)):
        page = free.pop()
        holders[page] += 1
        table.append(page)
    np.array(sequence_tokens[:2048], np.int32)
    return np.array(table, np.int32)


@dataclasses.dataclass(frozen=True)
class BurstLoad:
    """Requests that run all the time, and from `begin` on, every so many seconds, a burst.

    Args:
      running: requests with prompts of `running_tokens`; one that reaches the end of the context begins anew.
      burst: requests with prompts of `prompt_tokens` that arrive at once.
    """

    running: int
    running_tokens: int
    burst: int
    prompt_tokens: int
    output_tokens: int
    begin: float
    every: float
    seed: int = 0

    def check(self, slots: int, max_model_len: int) -> None:
        """Raises ValueError unless the running requests fit and leave one of so many slots for others, which fit."""
        if self.running >= slots:
            raise ValueError(f"running = {self.running}: must be less than {slots}, all slots")
        if self.running_tokens >= max_model_len:
            raise ValueError(f"running_tokens = {self.running_tokens}: must be less than {max_model_len}, the context")
        if self.prompt_tokens + self.output_tokens > max_model_len:
            raise ValueError(
                f"prompt_tokens = {self.prompt_tokens}, output_tokens = {self.output_tokens}: must be at most"
                f" {max_model_len} together, the context"
            )


class Bursts:
    """A workload without end: a `BurstLoad`."""

    def __init__(self, load: BurstLoad, system: System):
        self._load, self._system = load, system

    def first(self) -> Iterable[Turn]:
        load = self._load
        for i in range(load.running):
            output = self._system.config.max_model_len - load.running_tokens
            yield Turn("running", 0, 0.0, self._prompt(0, i, load.running_tokens), output)
        for number in itertools.count():
            for i in range(load.burst):
                prompt = self._prompt(1 + number, i, load.prompt_tokens)
                yield Turn("burst", number, load.begin + number * load.every, prompt, load.output_tokens)

    def after(self, turn: Turn, output: Int32[np.ndarray, " tokens"], finished: float) -> Sequence[Turn]:
        if turn.session == "burst" or not output.size:
            return ()
        return [Turn("running", turn.turn + 1, finished, turn.prompt, turn.max_tokens)]

    def _prompt(self, number: int, index: int, tokens: int) -> np.ndarray:
        return self._system.prompt(self._load.seed, number, index, tokens=tokens)


def run_bursts(
    system: System, load: BurstLoad, window: Window, max_admissions: int, progress: bool = True
) -> tuple[dict[str, Any], list[Measurement], bool]:
    """What running requests and new ones notice, with a cap on how many are started in a step.

    Args:
      window: from the first burst on. Before it the running requests are alone, in a window as long as what remains of
        the time after its half, when they have begun.

    Returns:
      A row; the requests; whether Ctrl-C ended the run.

    Raises:
      ValueError: as `BurstLoad.check`.
    """
    load.check(system.config.slots * system.config.ranks, system.config.max_model_len)
    engine, executor = system.engine(max_admissions=max_admissions)
    run = run_engine(engine, executor, Bursts(load, system), until=window.end, progress=progress)
    running, new = ([m for m in run.measurements if m.session == name] for name in ("running", "burst"))
    alone, beside = (
        percentiles(np.concatenate([np.zeros(0), *(inter_token_seconds(m, w) for m in running)]))
        for w in (Window(window.begin / 2, window.begin), window)
    )
    summary = summarize(new, window, devices=system.config.ranks)
    row: dict[str, Any] = {"max_admissions": max_admissions, "new_requests": summary.requests}
    for name, found in (
        ("running_alone_inter_token", alone),
        ("running_inter_token", beside),
        ("new_ttft", summary.ttft),
        ("new_queue", summary.queue),
        ("new_prefill", summary.prefill),
    ):
        for quantile in ("p50", "p99", "max"):
            row[f"{name}_{quantile}_ms"] = None if found is None else getattr(found, quantile) * 1e3
    row["unfinished"] = summary.excluded.drain
    row["invalid"] = "; ".join(summary.invalid)
    return row, run.measurements, run.interrupted


def beside_long_prompt(
    tokens: int, chats: int, prefill_tokens: int, prefill_every: int = 1, decode_every: int = 1
) -> dict[str, Any]:
    """How `chats` running chats and others that arrive every second fare while a prompt of `tokens` is prefilled.

    Inter-token latencies and times to the first token in virtual milliseconds, with `LinearCost`. `bound_ms` is what
    the policy promises: `decode_every` steps of the longest kind there can be.
    """
    cost, slots = LinearCost(), 2 * chats
    sizes = Sizes(
        slots=slots,
        pages=2 * (tokens // PAGE) + 64 * chats,
        max_model_len=tokens + 1000,
        prefill_tokens=prefill_tokens,
    )
    system = simulated_system(sizes, cost, prefill_every=prefill_every, decode_every=decode_every)
    engine, executor = system.engine()
    records = engine.observer.steps
    rng = np.random.default_rng(0)

    def chat(name: str, output: int) -> GenerationRequest:
        return GenerationRequest(name, rng.integers(2, 1000, 500).astype(np.int32), output, ignore_eos=True)

    for i in range(chats):
        engine.submit(chat(f"running{i}", system.config.max_model_len - 500))
    finish_prefill(engine)
    for _ in range(100):
        engine.step()
    alone = np.concatenate([record.inter_token_seconds for record in records[-50:]])
    begin, first = executor.now(), len(records)
    prompt = rng.integers(2, 1000, tokens).astype(np.int32)
    (long,) = engine.submit(GenerationRequest("long", prompt, max_tokens=2, ignore_eos=True))
    arrived = []
    while long.first_token is None:
        if executor.now() - begin > len(arrived):
            arrived += engine.submit(chat(f"new{len(arrived)}", 20))
        engine.step()
    gaps = np.concatenate([record.inter_token_seconds for record in records[first:]])
    waits = [s.first_token - s.arrived for s in arrived if s.first_token is not None]
    longest_step = (
        cost.step
        + prefill_tokens * (cost.prefill_token + cost.prefill_pair * tokens)
        + slots * (cost.decode_token + cost.decode_context * 2000)
    )
    return {
        "prefill_tokens": prefill_tokens,
        "prefill_every": prefill_every,
        "decode_every": decode_every,
        "inter_token_alone_ms": float(np.median(alone)) * 1e3,
        "inter_token_p50_ms": float(np.median(gaps)) * 1e3,
        "inter_token_p99_ms": float(np.quantile(gaps, 0.99)) * 1e3,
        "inter_token_max_ms": float(gaps.max()) * 1e3,
        "bound_ms": decode_every * longest_step * 1e3,
        "chat_ttft_max_ms": max(waits, default=0.0) * 1e3,
        "long_ttft_s": long.first_token - long.arrived,
    }
