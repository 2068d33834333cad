"""Data-parallel attention and expert parallelism over the devices of this machine, beside one device.

    python scripts/bench_parallel.py --report out
    python scripts/bench_parallel.py --sections exchange --exchanges ragged --report ragged
    python scripts/bench_parallel.py --sections steps --decode 64x1x4096 --prefill 2048 --profile --report steps

Random weights at released widths. Three sections: the exchange of tokens alone, beside what plain collectives reach in
the same run; whole steps, on one device with a rank's batch and with the batch of all ranks, and over all devices; and
what the host costs a step of the engine over all devices. Routing is forced, see `dsv4jax.model.forced_routing`.

The JSON file is whole after every row. What fails is a row with its error, and the rest follows.
"""

import dataclasses
import functools
import time
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags

from dsv4jax.balance.metrics import uniform_balancedness
from dsv4jax.bench.engines.host_gap import host_gap
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.steps.cases import (
    PAGE,
    StepCase,
    compile_apart,
    decode_case,
    prefill_case,
    profile_step,
    time_step,
)
from dsv4jax.bench.steps.exchange import ExchangeCase, Links, measure_links
from dsv4jax.bench.steps.random_state import random_cache, random_params
from dsv4jax.bench.steps.routing import evenness
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.compilation_cache import use_compilation_cache
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.model.forced_routing import ROUTINGS
from dsv4jax.numerics import FAST, Numerics
from dsv4jax.packing import param_shapes
from dsv4jax.params import Params
from dsv4jax.step_flags import KERNEL_BY_KERNEL
from sharding import SINGLE, Layout, decode_dep
from sharding.layout import EXCHANGES

_SECTIONS = flags.DEFINE_multi_enum(
    "sections", ["exchange", "steps", "engine"], ["exchange", "steps", "engine"], "What to measure; may be repeated."
)
_DEVICES = flags.DEFINE_integer("devices", None, "Devices to use, at least 2. Default: all there are.")
_LAYERS = flags.DEFINE_integer("layers", 6, "Layers of the reduced released configuration, 6 to 40.")
_MODEL = flags.DEFINE_string("model", None, "Directory with the config.json of another model, in place of these sizes.")
_EXPERTS = flags.DEFINE_integer("experts", 384, "Routed experts per layer, of all ranks together.")
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", 100_000, "Where the prime search for the Engram tables starts.")
_IMPLEMENTATION = command_line.implementation_flag()
_EXCHANGES = flags.DEFINE_multi_enum(
    "exchanges", ["gather", "all_to_all"], EXCHANGES, "Ways of exchange to time alone; the first is that of the steps."
)
_EXCHANGE_TOKENS = flags.DEFINE_multi_integer(
    "exchange_tokens", [16, 96, 384, 2048, 8192], "Tokens of each rank in exchanges alone, beside those of the steps."
)
_LINK = flags.DEFINE_integer("link_megabytes", 256, "Per device, of the collectives that measure the links.", 1)
_DECODE = flags.DEFINE_list("decode", ["64x1x4096"], "Steps: requests per rank x tokens per request x context.")
_PREFILL = flags.DEFINE_list("prefill", ["2048"], "Steps: tokens per rank.")
_ROUTING = flags.DEFINE_multi_enum("routing", ["model", "uniform", "skewed"], ROUTINGS, "Routings of the steps.")
_PROFILE = flags.DEFINE_bool("profile", False, "Also the time of dispatch and combine within steps over all devices.")
_REQUESTS = flags.DEFINE_multi_integer("engine_requests", [16], "Requests per rank in the engine.")
_STEPS = flags.DEFINE_integer("engine_steps", 60, "Steps of the engine that are timed.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls per point.", lower_bound=1)
_CACHE = command_line.compile_cache_flag()
_REPORT = command_line.report_flag()


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step on the devices of a layout."""

    case: StepCase
    layout: Layout
    routing: str

    @property
    def names(self) -> dict[str, Any]:
        """What tells it from others; the step is what each rank runs."""
        return {"step": self.case.name, "devices": self.layout.devices, "routing": self.routing}

    def numerics(self, numerics: Numerics) -> Numerics:
        """With the routing of this step."""
        return dataclasses.replace(numerics, routing=self.routing)

    def lower(self, cfg: ModelConfig, numerics: Numerics) -> jax.stages.Lowered:
        """Its program, from shapes alone."""
        numerics = self.numerics(numerics)
        return self.case.lower(param_shapes(cfg, numerics, self.layout), cfg, numerics, self.layout)


def placed_steps(cfg: ModelConfig, layout: Layout) -> list[PlacedStep]:
    """Every step that the flags ask for: those of one device first."""
    ranks, alone, together = layout.ranks, [], []
    for routing in _ROUTING.value:
        for text in _DECODE.value:
            for requests, *rest in command_line.sizes_of("decode", text, (3,)):
                cases = [decode_case(cfg, n, *rest) for n in (requests, ranks * requests)]
                alone += [PlacedStep(case, SINGLE, routing) for case in cases]
                together.append(PlacedStep(decode_case(cfg, requests, *rest, ranks), layout, routing))
        for text in _PREFILL.value:
            for (tokens,) in command_line.sizes_of("prefill", text, (1,)):
                cases = [prefill_case(cfg, n, 0, "exact") for n in (tokens, ranks * tokens)]
                alone += [PlacedStep(case, SINGLE, routing) for case in cases]
                together.append(PlacedStep(prefill_case(cfg, tokens, 0, "exact", ranks), layout, routing))
    return alone + together


def is_profiled(placed: PlacedStep) -> bool:
    """Whether the time of each stage is wanted too."""
    return _PROFILE.value and placed.layout.ranks > 1 and placed.routing == _ROUTING.value[0]


def measure_step(
    placed: PlacedStep, program: Any, profiled: Any, params: Params, cfg: ModelConfig, numerics: Numerics, ranks: int
) -> dict[str, Any]:
    """Time of a step, and how even the load of so many ranks is that its tokens make.

    Args:
      profiled: the program kernel by kernel, if `is_profiled`.
    """
    if isinstance(program, Exception):
        raise program
    case, layout = placed.case, placed.layout
    batch = case.on_all_ranks(layout)

    def cache():
        return random_cache(cfg, case.cache_cfg, numerics, layout)

    waited, sent, output = time_step(program, params, cache(), batch, _REPEATS.value)
    load = np.asarray(output.expert_load)
    by_rank, k = load.reshape(len(load), ranks, -1).sum(2), cfg.num_experts_per_tok
    tokens = case.shape.tokens * layout.ranks
    row = {
        "tokens": tokens,
        "milliseconds": sent * 1e3,
        "milliseconds_waited_for": waited * 1e3,
        "tokens_per_second": tokens / sent,
        "balancedness": float(np.mean(evenness(by_rank))),
        "uniform_control": float(uniform_balancedness(load.sum(1) / k, k, cfg.n_routed_experts, ranks).mean()),
        "experts_in_use": float((load > 0).sum(1).mean()),
    }
    if is_profiled(placed):
        try:
            spent = profile_step(profiled, params, cache(), batch, devices=layout.devices)
            row |= {f"{stage}_microseconds": spent.microseconds.get(stage, 0.0) for stage in ("dispatch", "combine")}
            row |= {"busy_microseconds": spent.busy, "stages": dict(spent.microseconds)}
        except Exception as error:  # The times above stand.
            row["profile_error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
    return row


def run(result: Result, steps: list[PlacedStep], cfg: ModelConfig, numerics: Numerics, layout: Layout) -> None:
    """All sections, compiled together."""
    sections, kind = _SECTIONS.value, _EXCHANGES.value[0]
    exchanges: list[ExchangeCase] = []
    if "exchange" in sections:
        together = {step.case.shape.tokens for step in steps if step.layout.ranks > 1}
        exchanges = [
            ExchangeCase(dataclasses.replace(layout, exchange=exchange), tokens)
            for exchange in _EXCHANGES.value
            for tokens in sorted({*_EXCHANGE_TOKENS.value, *(together if exchange == kind else ())})
        ]
    begin = time.perf_counter()
    lowerings = {case: functools.partial(case.lower, cfg) for case in exchanges}
    lowerings |= {step: functools.cache(functools.partial(step.lower, cfg, numerics)) for step in steps}
    profiled = {("profiled", step): lowerings[step] for step in steps if is_profiled(step)}
    programs = compile_apart(lowerings | profiled, dict.fromkeys(profiled, KERNEL_BY_KERNEL))
    result.add_row("compilation", {"programs": len(programs), "seconds": time.perf_counter() - begin})

    if exchanges:
        run_exchanges(result, exchanges, programs, cfg, layout)
    alone = {
        row["tokens_per_rank"]: row["microseconds"] * cfg.num_hidden_layers / 1e3
        for row in result.rows.get("exchange", [])
        if row["exchange"] == kind and "microseconds" in row
    }
    for one in (SINGLE, layout):
        engine = one == layout and "engine" in sections
        if engine or any(step.layout == one for step in steps):
            params = draw(result, cfg, numerics, one)
            on_layout = [step for step in steps if step.layout == one]
            run_steps(result, on_layout, programs, alone, params, cfg, numerics, layout, engine)
            del params  # before others are drawn


def run_steps(
    result: Result,
    steps: list[PlacedStep],
    programs: dict[Any, Any],
    exchange_alone: dict[int, float],
    params: Params,
    cfg: ModelConfig,
    numerics: Numerics,
    layout: Layout,
    engine: bool,
) -> None:
    """The steps on the devices that hold the parameters, and the engine.

    Args:
      exchange_alone: milliseconds of a step's exchanges by themselves, by the tokens of a rank.
      layout: of all devices.
    """
    for step in steps:
        names = dict(step.names)
        if step.layout.ranks > 1 and step.case.shape.tokens in exchange_alone:
            names["exchange_alone_milliseconds"] = exchange_alone[step.case.shape.tokens]
        both = programs[step], programs.get(("profiled", step))
        measure = functools.partial(measure_step, step, *both, params, cfg, numerics, layout.ranks)
        result.attempt("steps", names, measure)
    for requests in _REQUESTS.value if engine else ():
        measure = functools.partial(host_gap, params, cfg, numerics, layout, requests=requests, steps=_STEPS.value)
        result.attempt("engine", {"devices": layout.devices}, measure)


def run_exchanges(
    result: Result, cases: list[ExchangeCase], programs: dict[Any, Any], cfg: ModelConfig, layout: Layout
) -> None:
    """What plain collectives reach, then every case."""
    links: Links | None = None

    def measured() -> dict[str, float]:
        nonlocal links
        links = measure_links(layout, _LINK.value, _REPEATS.value)
        gigabytes = {f"{name}_gigabytes_per_second": rate / 1e9 for name, rate in links.bandwidth.items()}
        return gigabytes | {f"{name}_microseconds": seconds * 1e6 for name, seconds in links.latency.items()}

    result.attempt("links", {"devices": layout.devices}, measured)
    if links is None:
        return
    for case in cases:
        measure = functools.partial(case.measure, programs[case], cfg, links, _REPEATS.value)
        result.attempt("exchange", case.names, measure)


def draw(result: Result, cfg: ModelConfig, numerics: Numerics, layout: Layout) -> Params:
    """Random parameters on the devices of a layout."""
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(cfg, numerics, layout))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - begin
    result.add_row("parameters", {"devices": layout.devices, "gibibytes": size / 2**30, "seconds": seconds})
    return params


def empty_result(given: dict[str, Any]) -> Result:
    """What is filled."""
    time_axis, steps = Axis("time", "ms"), ("devices", "routing")
    return Result(
        "parallel",
        given,
        keys={
            "links": ("devices",),
            "exchange": ("exchange", "tokens_per_rank"),
            "steps": ("step", *steps),
            "engine": ("devices", "requests_per_rank"),
        },
        control={"what": "uniform routing of the same batch; column uniform_control is its expected balancedness"},
        ceiling={"what": "floor_microseconds of exchanges: bytes at the rate of plain collectives in the same run"},
        plots=[
            Plot("bar", "Time of a step", "steps", "step", ("milliseconds",), Axis("step"), time_axis, by=steps),
            Plot("bar", "Balancedness", "steps", "step", ("balancedness", "uniform_control"), Axis("step"),
                 Axis("mean load / load of the busiest rank"), by=steps),
            Plot("line", "Exchanges alone", "exchange", "tokens_per_rank", ("microseconds", "floor_microseconds"),
                 Axis("tokens of a rank", log=True), Axis("time", "us", log=True), by=("exchange",)),
        ],
        echo=True,
    )  # fmt: skip


def routing_verdicts(steps: list[dict[str, Any]]) -> list[str]:
    """What the routing costs steps over all devices, beside uniform routing of the same batch."""
    lines = []
    found = {(row["step"], row["devices"], row["routing"]): row for row in steps if "milliseconds" in row}
    for (step, devices, routing), row in found.items():
        control = found.get((step, devices, "uniform"))
        if control is not None and routing != "uniform" and devices > 1:
            lines.append(
                f"{step}, {devices} devices: {routing} routing takes"
                f" {row['milliseconds'] / control['milliseconds']:.2f} times uniform routing; balancedness"
                f" {row['balancedness']:.2f} against {control['balancedness']:.2f}"
            )
        if "exchange_alone_milliseconds" in row:
            share = row["exchange_alone_milliseconds"] / row["milliseconds"]
            lines.append(f"{step}, {devices} devices, {routing}: exchanges alone take {share:.0%} of the step's time")
    return lines


def main() -> None:
    use_compilation_cache(_CACHE.value)
    most = len(jax.devices())
    devices = most if _DEVICES.value is None else _DEVICES.value
    if not 2 <= devices <= most:
        raise ValueError(f"--devices={devices}: must be from 2 to {most}, the devices there are")
    layout = dataclasses.replace(decode_dep(devices), exchange=_EXCHANGES.value[0])
    if _MODEL.value:
        cfg = ModelConfig.from_checkpoint(_MODEL.value)
    else:
        cfg = reduced_config(
            _LAYERS.value,
            n_routed_experts=_EXPERTS.value,
            engram_vocab_size=_ENGRAM.value,
            dspark_n_routed_experts=8 * layout.devices,
        )
    numerics, why = with_implementation(FAST, _IMPLEMENTATION.value, cfg, PAGE)
    steps = placed_steps(cfg, layout) if "steps" in _SECTIONS.value else []
    given = conditions(
        model=_MODEL.value or f"released widths, {cfg.num_hidden_layers} layers, {cfg.n_routed_experts} experts",
        layout=f"{layout.devices} ranks, one per device",
        flags=flag_values(globals()),
        seed=0,
        devices=jax.devices(),
        implementation=numerics.implementation,
        modes=[cfg.mode(i) for i in range(cfg.num_hidden_layers)],
        experts=cfg.n_routed_experts,
        exchange_of_the_steps=_EXCHANGES.value[0],
    )
    print(f"{numerics.implementation}{f' ({why})' if why else ''}, {layout.devices} devices", flush=True)
    with reported(_REPORT.value, empty_result(given)) as result:
        run(result, steps, cfg, numerics, layout)
        for section in ("links", "exchange", "steps", "engine"):
            if section in result.rows:
                print(f"\n{section}\n{text_table(result.rows[section])}")
        result.verdicts += routing_verdicts(result.rows.get("steps", []))


if __name__ == "__main__":
    command_line.run(main)
