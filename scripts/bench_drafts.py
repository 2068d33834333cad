"""Times drafting and verifying with synthetic acceptance, beside plain decoding.

    python scripts/bench_drafts.py --report out
    python scripts/bench_drafts.py --requests 1,64 --acceptance 0.9,0.8,0.7,0.6,0.5 --report out
    python scripts/bench_drafts.py --simulate out/speculation.json --rate_requests 1,8,16,64 --report simulated

One device in the place of one rank of `--ranks`, with random weights at released widths and a cache of random records;
what the links between devices would take is not in the times. For each number of requests: plain decoding, a draft
round alone, steps with fixed numbers of drafts, and steps that choose how many to verify by costs measured in the same
run. What is verified, accepted and drafted is computed as in serving; then draft j is accepted with the probability
that `--acceptance` gives it, and confidences say so. The time of verification is that of a step without its draft
round. Tokens per second are those that the law gives on average for the drafts that were verified: what comes of a few
steps is chance.

Reliability tables say how well confidences predicted acceptance: once without synthetic acceptance, which with random
weights says nothing about the released model, and once with it, where both columns must agree.

`--rate_requests` runs an engine, from the scheduler to the device: tokens per second with each fixed number of drafts
and with steps that choose among programs with room for none or for each of these numbers, by times measured at the
start. With `--simulate` this is all that runs, on the simulated executor, with the times of an earlier report.

The JSON file is whole after every row. What fails is a row with its error, and the rest follows.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags

from dsv4jax.bench.engines.draft_rates import MeasuredTimes, device_rates, simulated_rates
from dsv4jax.bench.engines.host_gap import host_gap
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, load, text_table
from dsv4jax.bench.steps.cases import PAGE, caught, compile_apart
from dsv4jax.bench.steps.drafts import DraftCase, acceptance, reliability
from dsv4jax.bench.steps.random_state import random_params
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.compilation_cache import use_compilation_cache
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, Numerics
from dsv4jax.params import Params
from sharding import Layout, emulated_rank

_REQUESTS = flags.DEFINE_list("requests", ["1", "8", "16", "64"], "Requests of the rank.")
_FIXED = flags.DEFINE_list("fixed", ["3", "5"], "Fixed numbers of drafts; adaptive steps verify up to the largest.")
_ACCEPTANCE = flags.DEFINE_multi_string(
    "acceptance",
    ["0.8,0.7,0.6,0.5,0.4"],
    "Probability that each draft is accepted if those before it are; may be repeated for several laws.",
)
_CONTEXT = flags.DEFINE_integer("context", 131072, "Tokens of each request in the cache.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the requests; 0 is greedy.", lower_bound=0.0)
_NOISE = flags.DEFINE_enum("noise", "shared", ["shared", "own"], "See `CacheConfig.drafts`.")
_LAYERS = flags.DEFINE_integer("layers", 40, "Layers of the reduced released configuration, 6 to 40.")
_MODEL = flags.DEFINE_string("model", None, "Directory with the config.json of another model, in place of these sizes.")
_RANKS = flags.DEFINE_integer("ranks", 8, "Ranks of which the device emulates one.", lower_bound=1)
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", 100_000, "Where the prime search for the Engram tables starts.")
_IMPLEMENTATION = command_line.implementation_flag()
_ENGINE = flags.DEFINE_multi_integer("engine_requests", [], "Also the host gap of an engine with so many requests.")
_STEPS = flags.DEFINE_integer("engine_steps", 60, "Steps of the engine that are timed.", lower_bound=2)
_RATES = flags.DEFINE_list("rate_requests", None, "Also tokens per second through an engine of so many requests.")
_RATE_STEPS = flags.DEFINE_integer("rate_steps", 500, "Steps of each of these that count.", lower_bound=2)
_SIMULATE = flags.DEFINE_string(
    "simulate", None, "Result of an earlier run: --rate_requests on the simulated executor with its times, no device."
)
_SPREAD = flags.DEFINE_float(
    "spread", 0.0, "With --simulate: how far the logits of a law move from time to time (standard deviation).", 0.0
)
_COST_NOISE = flags.DEFINE_float(
    "cost_noise",
    0.0,
    "With --simulate: relative error of the times that choices are made by (standard deviation).",
    0.0,
)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed steps per point.", lower_bound=1)
_CACHE = command_line.compile_cache_flag()
_REPORT = command_line.report_flag()
_IN_ENGINE = ", through an engine"


@dataclasses.dataclass(frozen=True)
class Asked:
    """Fixed numbers of drafts, laws of acceptance and numbers of requests that the flags ask for."""

    fixed: tuple[int, ...]
    laws: list[np.ndarray]
    requests: list[int]
    rate_requests: list[int]


def asked_for(cfg: ModelConfig) -> Asked:
    """What the flags ask for.

    Raises:
      ValueError: it is not possible, by the flag's name.
    """
    numbers = command_line.numbers
    fixed = tuple(sorted(set(numbers("fixed", _FIXED.value, 1, cfg.dspark_block_size))))
    laws = [np.float32(numbers("acceptance", text.split(","), 0, 1, float)) for text in _ACCEPTANCE.value]
    for text, law in zip(_ACCEPTANCE.value, laws, strict=True):
        if len(law) < max(fixed):
            raise ValueError(f"--acceptance={text}: every law must be for {max(fixed)} drafts")
    requests = numbers("requests", _REQUESTS.value, 1, 4096)
    rate_requests = [] if _RATES.value is None else numbers("rate_requests", _RATES.value, 1, 4096)
    return Asked(fixed, [law[: max(fixed)] for law in laws], requests, rate_requests)


def measure_load(
    result: Result, case: DraftCase, programs: dict[str, Any], params: Params, laws: list[np.ndarray]
) -> None:
    """All rows of one number of requests."""
    names, seconds = {"requests": case.requests}, {}

    def program(way: str) -> Any:
        if isinstance(programs[way], Exception):
            raise programs[way]
        return programs[way]

    def plain() -> dict[str, Any]:
        seconds["plain"] = case.plain_seconds(program("plain"), params)
        return {"milliseconds": seconds["plain"] * 1e3, "tokens_per_second": case.requests / seconds["plain"]}

    def draft() -> dict[str, Any]:
        seconds["draft"] = case.draft_seconds(program("draft"), params)
        return {"milliseconds": seconds["draft"] * 1e3}

    result.attempt("steps", {**names, "drafts": "0"}, plain)
    result.attempt("draft_rounds", names, draft)
    if len(seconds) < 2:
        return  # Nothing to hold the others against.

    def speculate(way: str, law: np.ndarray, table: np.ndarray | None = None) -> dict[str, Any]:
        run = case.speculate(program(way), params, way, law, table)
        return {
            "milliseconds": run.seconds * 1e3,
            "draft_milliseconds": seconds["draft"] * 1e3,
            "verify_milliseconds": (run.seconds - seconds["draft"]) * 1e3,
            "tokens_per_request": run.tokens / case.requests,
            "expected_tokens": run.expected_tokens / case.requests,
            "verified_per_request": run.verified / case.requests,
            "tokens_per_second": run.expected_tokens / run.seconds,
            "times_plain_rate": run.expected_tokens / run.seconds * seconds["plain"] / case.requests,
            "times_plain_step": run.seconds / seconds["plain"],
        }

    def adaptive(law: np.ndarray) -> dict[str, Any]:
        costs = case.costs(program("adaptive"), params, law, seconds["draft"])
        row = speculate("adaptive", law, costs.table())
        others = [
            other["tokens_per_second"]
            for other in result.rows["steps"]
            if other["requests"] == case.requests and other.get("law", label) == label and "tokens_per_second" in other
        ]
        return row | {"times_best_fixed": row["tokens_per_second"] / max(others), "costs": dataclasses.asdict(costs)}

    for law in laws:
        label = " ".join(f"{p:g}" for p in law)
        for k in case.fixed:
            fixed = {**names, "drafts": str(k), "law": label}
            result.attempt("steps", fixed, functools.partial(speculate, str(k), law))
        result.attempt("steps", {**names, "drafts": "adaptive", "law": label}, functools.partial(adaptive, law))

    most = str(max(case.fixed))
    for kind, law in (("random weights", -np.ones_like(laws[0])), ("synthetic", laws[0])):
        told = {**names, "acceptance": kind}
        run = caught(lambda law=law: case.speculate(program(most), params, most, law))
        if isinstance(run, Exception):
            result.add_row("acceptance", {**told, "error": f"{type(run).__name__}: {run}"})
            continue
        result.add_rows("acceptance", [{**told, **row} for row in acceptance(run.statistics)])
        result.add_rows("reliability", [{**told, **row} for row in reliability(run.statistics)])


def measure_rates(result: Result, asked: Asked, rates: Callable[..., list[dict[str, Any]]]) -> None:
    """Rows of tokens per second through an engine; `rates` takes the requests and the law."""
    for requests in asked.rate_requests:
        for law in asked.laws:
            names = {"requests": requests, "law": " ".join(f"{p:g}" for p in law)}
            rows = caught(lambda requests=requests, law=law: rates(requests=requests, law=law))
            if isinstance(rows, Exception):
                rows = [{"error": f"{type(rows).__name__}: {rows}"}]
            result.add_rows("rates", [{**names, **row} for row in rows])


def goals(result: Result) -> list[dict[str, Any]]:
    """Whether a cycle of one request takes less than 1.35 plain steps, and choosing is within 3 % of the best."""
    found = []
    steps, rates = result.rows.get("steps", []), result.rows.get("rates", [])
    for row, where in [*((row, "") for row in steps), *((row, _IN_ENGINE) for row in rates)]:
        if row["requests"] == 1 and row["drafts"].isdecimal() and "times_plain_step" in row:
            value, goal = row["times_plain_step"], f"1 request, {row['drafts']} drafts: cycle under 1.35 plain steps"
            found.append({"goal": goal, "value": value, "met": value < 1.35})
        if "times_best_fixed" in row:
            goal = f"{row['requests']} requests, {row['law']}{where}: within 3 % of the best"
            value = row["times_best_fixed"]
            found.append({"goal": goal, "value": value, "met": value >= 0.97})
    return found


def speed_verdicts(steps: list[dict[str, Any]], where: str = "") -> list[str]:
    """Which way is the fastest for each number of requests and law of acceptance."""
    lines = []
    for requests, law in dict.fromkeys((row["requests"], row["law"]) for row in steps if "law" in row):
        ways = [row for row in steps if row["requests"] == requests and row.get("law", law) == law]
        ways = [row for row in ways if "tokens_per_second" in row]
        if len(ways) > 1:
            best, plain = max(ways, key=lambda row: row["tokens_per_second"]), ways[0]
            gain = best["tokens_per_second"] / plain["tokens_per_second"]
            what = "plain decoding" if best is plain else f"drafts {best['drafts']}"
            lines.append(f"{requests} requests, acceptance {law}{where}: {what} is the fastest, {gain:.2f} times plain")
    return lines


def empty_result(given: dict[str, Any]) -> Result:
    """What is filled."""
    requests, speed = Axis("requests", log=True), Axis("speed", "tokens/s")
    share, by = Axis("share of drafts"), ("requests", "acceptance")
    return Result(
        "speculation",
        given,
        keys={
            "steps": ("requests", "drafts", "law"),
            "draft_rounds": ("requests",),
            "acceptance": (*by, "position"),
            "reliability": (*by, "survival"),
            "rates": ("requests", "drafts", "law"),
            "engine": ("requests_per_rank", "drafts"),
        },
        control={"what": "plain decoding of the same requests: drafts 0; for adaptive steps the best fixed number"},
        ceiling={"what": "all drafts accepted: one token more than there are drafts, of every verification"},
        plots=[
            Plot("line", "Speed by load", "steps", "requests", ("tokens_per_second",), requests, speed,
                 by=("drafts", "law")),
            Plot("stacked", "Where the time of a step goes", "steps", "drafts",
                 ("draft_milliseconds", "verify_milliseconds"), Axis("drafts"), Axis("time", "ms"), by=("requests",)),
            Plot("line", "Speed of an engine by load", "rates", "requests", ("tokens_per_second",), requests, speed,
                 by=("drafts", "law")),
            Plot("line", "Acceptance by position", "acceptance", "position", ("accepted",), Axis("position"), share,
                 by=by),
            Plot("line", "Reliability of confidences", "reliability", "predicted", ("predicted", "accepted"),
                 Axis("predicted survival"), share, by=by),
        ],
        echo=True,
    )  # fmt: skip


def simulate() -> None:
    """Rates with the times of an earlier run."""
    asked = asked_for(ModelConfig())
    times = MeasuredTimes.from_rows(load(_SIMULATE.value).rows.get("steps", []))
    given = conditions(
        model="none: times of steps as measured", layout="one rank", flags=flag_values(globals()), seed=0
    )
    options = {"steps": _RATE_STEPS.value, "spread": _SPREAD.value, "noise": _COST_NOISE.value}
    with reported(_REPORT.value, empty_result(given)) as result:
        measure_rates(result, asked, functools.partial(simulated_rates, times, fixed=asked.fixed, **options))
        conclude(result)


def run(result: Result, cfg: ModelConfig, numerics: Numerics, layout: Layout, asked: Asked) -> None:
    """Compiles everything, then measures one number of requests after the other."""
    fixed, laws = asked.fixed, asked.laws
    cases = [
        DraftCase(cfg, numerics, layout, n, _CONTEXT.value, fixed, _NOISE.value, _TEMPERATURE.value, _REPEATS.value)
        for n in asked.requests
    ]
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(cfg, numerics, layout))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    result.add_row("parameters", {"gibibytes": size / 2**30, "seconds": time.perf_counter() - begin})
    begin = time.perf_counter()
    programs = compile_apart(
        {(case.requests, way): functools.partial(case.lower, way, params) for case in cases for way in case.ways}
    )
    result.add_row("compilation", {"programs": len(programs), "seconds": time.perf_counter() - begin})
    for case in cases:
        measure_load(result, case, {way: programs[case.requests, way] for way in case.ways}, params, laws)
    on_device = functools.partial(device_rates, params, cfg, numerics, layout, fixed=fixed, steps=_RATE_STEPS.value)
    measure_rates(result, asked, on_device)
    for requests in _ENGINE.value:
        for drafts in (0, max(fixed)):
            law = laws[0][:drafts] if drafts else None
            measure = functools.partial(
                host_gap, params, cfg, numerics, layout, requests=requests, steps=_STEPS.value, drafts=drafts,
                forced_acceptance=law,
            )  # fmt: skip
            result.attempt("engine", {}, measure)


def main() -> None:
    if _SIMULATE.value:
        simulate()
        return
    use_compilation_cache(_CACHE.value)
    if _MODEL.value:
        cfg = ModelConfig.from_checkpoint(_MODEL.value)
    else:
        cfg = reduced_config(_LAYERS.value, engram_vocab_size=_ENGRAM.value)
    asked = asked_for(cfg)
    numerics, why = with_implementation(FAST, _IMPLEMENTATION.value, cfg, PAGE)
    given = conditions(
        model=_MODEL.value or f"released widths, {cfg.num_hidden_layers} layers",
        layout=f"one rank of {_RANKS.value}, the exchange by copies on the device",
        flags=flag_values(globals()),
        seed=1,
        devices=jax.devices(),
        implementation=numerics.implementation,
        layers=cfg.num_hidden_layers,
        emulated_ranks=_RANKS.value,
        context=_CONTEXT.value,
        noise=_NOISE.value,
        temperature=_TEMPERATURE.value,
    )
    print(f"{numerics.implementation}{f' ({why})' if why else ''}, one rank of {_RANKS.value}", flush=True)
    with reported(_REPORT.value, empty_result(given)) as result:
        run(result, cfg, numerics, emulated_rank(_RANKS.value), asked)
        conclude(result)


def conclude(result: Result) -> None:
    """Prints tables, and judges."""
    for section in ("steps", "acceptance", "reliability", "rates", "engine"):
        if section in result.rows:
            print(f"\n{section}\n{text_table(result.rows[section])}")
    for row in goals(result):
        result.add_row("goals", row)
        result.verdicts.append(f"{row['goal']}: {row['value']:.3g}, {'met' if row['met'] else 'not met'}")
    result.verdicts += speed_verdicts(result.rows.get("steps", []))
    result.verdicts += speed_verdicts(result.rows.get("rates", []), _IN_ENGINE)


if __name__ == "__main__":
    command_line.run(main)
