"""Times the real step functions with random weights at released widths, beside ceilings measured in the same run.

    python scripts/bench_steps.py --layers 6 --report out
    python scripts/bench_steps.py --layers 40 --ranks 8 --decode 1/16/64x1/6x1024/131072/1047552 --prefill= --report out
    python scripts/bench_steps.py --layers 40 --ranks 8 --decode= --prefill 8192 --replay bounded --profile \
        --prompts 32768x131072x8192/2048/32768,32768x0x8192 --report out
    python scripts/bench_steps.py --check_flags --report out

Decode runs on a cache of random records, prefill on random tokens. Times are of calls sent one after the other, and of
calls that are waited for (median), after compilation. With `--ranks` the device emulates one rank of many: see
`sharding.exchange`; what the links between devices would take is not in the times.

Decode steps are the experiment "forward", everything else "prefill". Their files are whole after every row; what fails
is a row with its error, and the rest follows.
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    decode_batch,
    prefill_batch,
)
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result
from dsv4jax.bench.steps.cases import (
    GREEDY,
    PAGE,
    StepCase,
    caught,
    compare_programs,
    compile_apart,
    decode_case,
    prefill_case,
    profile_step,
    time_step,
)
from dsv4jax.bench.steps.ceilings import measured_ceilings
from dsv4jax.bench.steps.costs import Cost, step_costs
from dsv4jax.bench.steps.prefill import OPTIMISATIONS, PromptCase, prompt_cases, prompt_verdicts
from dsv4jax.bench.steps.random_state import RandomHostTables, random_cache, random_params
from dsv4jax.bench.steps.stages import stage_lines, step_verdicts, table
from dsv4jax.bench.steps.trace import Profile
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.step_flags import KERNEL_BY_KERNEL, VARIANTS
from dsv4jax.steps import decode_step, forward, prefill_step
from sharding import emulated_rank
from sharding.exchange import exchange_bytes

_LAYERS = flags.DEFINE_integer("layers", 6, "Layers of the reduced released configuration, 6 to 40.")
_MODEL = flags.DEFINE_string("model", None, "Directory with the config.json of another model, in place of these sizes.")
_EXPERTS = flags.DEFINE_integer("experts", 384, "Routed experts per layer, of all ranks together.")
_RANKS = flags.DEFINE_integer("ranks", 1, "Ranks of which the device emulates one.", 1)
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", 100_000, "Where the prime search for the Engram tables starts.")
_DECODE = flags.DEFINE_list(
    "decode",
    ["1/8/64x1x4096", "8x1x32768"],
    "Steps: requests x tokens per request x context; several like 1/8/64 in a place stand for every combination.",
)
_PREFILL = flags.DEFINE_list("prefill", ["512", "2048"], "Steps: tokens, or tokens x cached tokens.")
_REPLAY = flags.DEFINE_multi_enum(
    "replay", ["exact", "bounded"], ["exact", "bounded"], "Decoder layers over the prompt: all of it, or its end."
)
_PROMPTS = flags.DEFINE_list(
    "prompts",
    [],
    "Whole prompts: new tokens x cached tokens x chunk, with each optimisation alone and one after the other; of"
    " several chunks like 8192/2048, the others with all.",
)
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = command_line.implementation_flag()
_COMPARE = flags.DEFINE_bool("compare", False, "Also compare prefill + decode with the whole-sequence run.")
_CHECK_FLAGS = flags.DEFINE_bool("check_flags", False, "Only compare outputs and times under step_flags.VARIANTS.")
_PROFILE = flags.DEFINE_bool("profile", False, "Also the time and kernels of every stage.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls per point and round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Passes over all points, whose spread is reported.", lower_bound=1)
_REPORT = command_line.report_flag()


def run_cases(result: Result, cases: list[StepCase], params: Params, cfg: ModelConfig, numerics: Numerics) -> None:
    """Times of every case, once in each round, and its stages: with --profile those that were measured."""
    layout = emulated_rank(_RANKS.value)
    begin = time.perf_counter()
    lower = {case: functools.cache(functools.partial(case.lower, params, cfg, numerics, layout)) for case in cases}
    profiled = {("profiled", case): lower[case] for case in cases if _PROFILE.value}
    programs = compile_apart(lower | profiled, dict.fromkeys(profiled, KERNEL_BY_KERNEL))
    print(f"{len(programs)} steps compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    for round_ in range(_ROUNDS.value):
        for case in tqdm(cases, desc=f"round {round_ + 1} of {_ROUNDS.value}", unit="step"):
            measure = functools.partial(time_case, result, case, programs[case], params, cfg, numerics)
            result.attempt("steps", case.names, measure)
    for case in cases:
        rows = [row for row in result.rows["steps"] if row["step"] == case.name and "milliseconds" in row]
        if rows:
            median = statistics.median(row["milliseconds"] for row in rows)
            spent, costs = None, step_costs(cfg, case.shape)
            if _PROFILE.value:
                cache = random_cache(cfg, case.cache_cfg, numerics)
                program = programs["profiled", case]
                spent = caught(functools.partial(profile_step, program, params, cache, case.batch))
            add_stages(result, case.name, median, costs, spent, cfg)


def time_case(
    result: Result, case: StepCase, program: Any, params: Params, cfg: ModelConfig, numerics: Numerics
) -> dict[str, Any]:
    """Times of a step beside its floor."""
    if isinstance(program, Exception):
        raise program
    cache = random_cache(cfg, case.cache_cfg, numerics)
    waited, sent, output = time_step(program, params, cache, case.batch, _REPEATS.value)
    # Each rank's experts stand for those of all ranks.
    load = np.asarray(output.expert_load).reshape(cfg.num_hidden_layers, _RANKS.value, -1).sum(1)
    costs = step_costs(cfg, case.shape)
    return {
        "milliseconds": sent * 1e3,
        "milliseconds_waited_for": waited * 1e3,
        "tokens_per_second": case.shape.tokens / sent,
        "floor_milliseconds": sum(cost.floor(result.ceiling) for cost in costs.values()) / 1e3,
        "experts_in_use": float((load > 0).sum(1).mean()),
        "shape": dataclasses.asdict(case.shape),
    }


def add_stages(
    result: Result,
    step: str,
    milliseconds: float,
    costs: dict[str, Cost],
    spent: Profile | Exception | None,
    cfg: ModelConfig,
) -> None:
    """Rows of a step's stages and, of a profile, its kernels; and what they say about the step."""
    if isinstance(spent, Exception):
        result.add_row("stages", {"step": step, "error": f"{type(spent).__name__}: {spent}"})
        spent = None
    lines = stage_lines(spent, costs, result.ceiling)
    result.add_rows("stages", [{"step": step, **dataclasses.asdict(line)} for line in lines])
    if spent:
        print(f"{step}\n{table(lines, spent, cfg.num_hidden_layers)}", flush=True)
        without = 1 - spent.busy / milliseconds / 1e3
        print(f"without a kernel in the step as it runs: {without:.1%}", flush=True)
        result.add_rows("profiles", [{"step": step, "busy": spent.busy, "span": spent.span}])
        launches = sorted(spent.launches.items(), key=lambda item: -item[1][1])
        kernels = [
            {"step": step, "stage": stage, "name": name, "launches": count, "microseconds": duration}
            for (stage, name), (count, duration) in launches
        ]
        result.add_rows("kernels", kernels)
    result.verdicts += step_verdicts(step, milliseconds, lines, spent)


def run_prompts(result: Result, cases: list[PromptCase], params: Params, cfg: ModelConfig, numerics: Numerics) -> None:
    """Prefill of whole prompts, once in each round."""
    layout, host_tables = emulated_rank(_RANKS.value), RandomHostTables(cfg)
    # All are lowered first: those without the own top-k drop what JAX has cached.
    lower = [functools.partial(case.lower, params, cfg, numerics, layout, host_tables) for case in cases]
    lowered = dict(zip(cases, map(caught, lower), strict=True))
    programs = compile_apart({case: functools.partial(lowered.get, case) for case in cases})
    for round_ in range(_ROUNDS.value):
        for case in tqdm(cases, desc=f"round {round_ + 1} of {_ROUNDS.value}", unit="prompt"):
            measure = functools.partial(case.measure, programs[case], params, cfg, numerics, host_tables)
            result.attempt("prompts", case.names, measure)
    result.verdicts += prompt_verdicts(result.rows["prompts"])


def check_flags(result: Result, params: Params, cfg: ModelConfig, numerics: Numerics) -> None:
    """Whether `step_flags.VARIANTS` give the same bits, and their times, for a decode and a prefill step.

    A variant that this XLA does not know is told apart from one whose results differ.
    """
    for case in (decode_case(cfg, 8, 2, 2048), prefill_case(cfg, 512, 1024, "bounded")):
        lower = functools.cache(functools.partial(case.lower, params, cfg, numerics, emulated_rank(_RANKS.value)))
        compiled = compile_apart(dict.fromkeys(VARIANTS, lower), VARIANTS)
        for program in compiled.values():
            if isinstance(program, Exception) and not isinstance(program, jax.errors.JaxRuntimeError):
                raise program
        programs = {name: program for name, program in compiled.items() if not isinstance(program, Exception)}
        make_cache = functools.partial(random_cache, cfg, case.cache_cfg, numerics)
        equal = compare_programs(programs, params, case.batch, make_cache)
        for name, program in compiled.items():
            record = {"step": case.name, "flags": name}
            if name not in programs:
                record["unknown"] = str(program).splitlines()[0]
            else:
                _, sent, _ = time_step(program, params, make_cache(), case.batch, _REPEATS.value)
                record |= {"equal": equal[name], "milliseconds": sent * 1e3}
                if not equal[name]:
                    result.verdicts.append(f"{case.name}: the results under {name} are DIFFERENT bits")
            result.add_row("flags", record)


def compare_with_forward(params: Params, cfg: ModelConfig, numerics: Numerics, length: int = 600) -> dict[str, float]:
    """Prefill of length - 8 tokens in two chunks, then 8 decode steps, against `forward` over all of them."""
    tokens = np.random.default_rng(1).integers(3, cfg.vocab_size, length).astype(np.int32)
    whole = np.asarray(forward(params, tokens[None], cfg=cfg, numerics=numerics).logits[0, length - 9 :])
    pages, prompt = ceil_div(length, PAGE), tokens[: length - 8]
    cache_cfg = CacheConfig(slots=1, pages=pages, page_size=PAGE)
    cache = init_cache(cfg, cache_cfg, numerics)
    bucket, rows = PrefillBucket(512, 1, pages, tile=64), []
    for start, end in ((0, 333), (333, length - 8)):
        chunk = PrefillChunk(prompt, start, end, 0, range(pages), sampling=GREEDY)
        batch = prefill_batch(cfg, cache_cfg, [chunk], bucket)
        cache, output = prefill_step(params, cache, batch, cfg=cfg, numerics=numerics)
    rows.append(np.asarray(output.logits[0, 0]))
    for p in range(length - 8, length):
        newest = DecodeTokens([int(tokens[p])], p, 0, range(pages), GREEDY)
        batch = decode_batch(cfg, cache_cfg, [newest], DecodeBucket(1, pages))
        cache, output = decode_step(params, cache, batch, cfg=cfg, numerics=numerics)
        rows.append(np.asarray(output.logits[0, 0]))
    difference = np.linalg.norm(np.stack(rows) - whole, axis=-1) / np.linalg.norm(whole, axis=-1)
    return {
        "relative_l2_median": float(np.median(difference)),
        "relative_l2_max": float(difference.max()),
        "argmax_agreement": float((np.stack(rows).argmax(-1) == whole.argmax(-1)).mean()),
    }


_STEP = Axis("step", "ms", log=True)
_KEYS = {"steps": ("step",), "stages": ("step", "stage"), "profiles": ("step",), "flags": ("step", "flags")}
_STAGE_PLOT = Plot("stacked", "What steps consist of", "stages", "step", ("microseconds",), Axis("step"),
                   Axis("time of kernels", "us"), by=("stage",))  # fmt: skip
_FLOOR_PLOT = Plot("stacked", "What their floors consist of", "stages", "step", ("floor_microseconds",), Axis("step"),
                   Axis("floor", "us"), by=("stage",))  # fmt: skip
_CONTROL = {
    "what": "time of the fewest bytes and operations at the ceilings of the run",
    "column": "floor_milliseconds",
}


def forward_result(given: dict[str, Any], limits: dict[str, Any]) -> Result:
    """Of the experiment "forward", empty."""
    by = ("requests", "tokens_per_request")
    return Result(
        "forward",
        given,
        keys={**_KEYS, "steps": ("step", "requests", "tokens_per_request", "context")},
        control=_CONTROL,
        ceiling=limits,
        plots=[
            Plot("line", "Time of a decode step", "steps", "context", ("milliseconds",),
                 Axis("context", "tokens", log=True), _STEP, by=by),
            Plot("line", "Its floor", "steps", "context", ("floor_milliseconds",),
                 Axis("context", "tokens", log=True), _STEP, by=by),
            *([_STAGE_PLOT] if _PROFILE.value else []),
            _FLOOR_PLOT,
        ],
        echo=True,
    )  # fmt: skip


def prefill_result(given: dict[str, Any], limits: dict[str, Any]) -> Result:
    """Of the experiment "prefill", empty."""
    order = ", ".join(OPTIMISATIONS).replace("_", " ")
    speed, by = Axis("speed", "tokens/s"), ("new", "cached", "chunk")
    return Result(
        "prefill",
        given,
        keys={**_KEYS, "steps": ("step", "tokens", "cached", "replay"), "prompts": (*by, "optimisations")},
        control={**_CONTROL, "prompts": "optimisations: none", "order of cumulative optimisations": order},
        ceiling=limits,
        plots=[
            Plot("bar", "Whole prompts", "prompts", "optimisations", ("tokens_per_second",), Axis("optimisations"),
                 speed, by=by),
            Plot("line", "Single steps", "steps", "tokens", ("tokens_per_second",), Axis("tokens", log=True),
                 speed, by=("cached", "replay")),
            *([_STAGE_PLOT] if _PROFILE.value else []),
            _FLOOR_PLOT,
        ],
        echo=True,
    )  # fmt: skip


def measure(cfg: ModelConfig) -> None:
    """Everything that the flags ask for."""
    numerics, why = with_implementation(
        FAST if _NUMERICS.value == "fast" else REFERENCE, _IMPLEMENTATION.value, cfg, PAGE
    )
    ranks = _RANKS.value
    decode = [
        decode_case(cfg, *sizes, ranks)
        for text in _DECODE.value
        for sizes in command_line.sizes_of("decode", text, (3,))
    ]
    prefill = [
        prefill_case(cfg, tokens, sum(cached), replay, ranks)
        for text in _PREFILL.value
        for tokens, *cached in command_line.sizes_of("prefill", text, (1, 2))
        for replay in _REPLAY.value
    ]
    prompts = []
    for text in _PROMPTS.value:
        sizes = command_line.sizes_of("prompts", text, (3,), may_be_zero=(1,))
        for prompt in dict.fromkeys(one[:2] for one in sizes):
            prompts += prompt_cases(*prompt, [one[2] for one in sizes if one[:2] == prompt])
    if _COMPARE.value and ranks > 1:
        raise ValueError(f"--compare: must not be given with --ranks={ranks}, an emulated rank computes another model")
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(cfg, numerics, emulated_rank(ranks)))
    seconds = time.perf_counter() - begin
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    limits = measured_ceilings()
    given = conditions(
        model=_MODEL.value or f"released widths, {cfg.num_hidden_layers} layers, {cfg.n_routed_experts} experts",
        layout=f"one rank of {ranks}, the exchange by copies on the device" if ranks > 1 else "one device",
        flags=flag_values(globals()),
        seed=0,
        devices=jax.devices(),
        numerics=_NUMERICS.value,
        implementation=numerics.implementation,
        modes=[cfg.mode(i) for i in range(cfg.num_hidden_layers)],
        experts=cfg.n_routed_experts,
        emulated_ranks=ranks,
        parameter_bytes=size,
        drawing_seconds=seconds,
    )
    if ranks > 1:
        dispatch, combine = exchange_bytes(ranks, 1, cfg.hidden_size, cfg.num_experts_per_tok)
        given["exchange_bytes_per_layer_and_token"] = [dispatch, combine]
    print(f"{numerics.implementation}{f' ({why})' if why else ''}, {given['layout']}")
    print(f"{size / 2**30:.1f} GiB drawn in {seconds:.1f} s")
    rates = {name: rate for name, rate in limits.items() if name != "what"}
    print(", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in rates.items()), flush=True)
    if decode or _CHECK_FLAGS.value or _COMPARE.value:
        with reported(_REPORT.value, forward_result(given, limits)) as result:
            if _CHECK_FLAGS.value:
                return check_flags(result, params, cfg, numerics)
            if _COMPARE.value:
                result.add_row("prefill_decode_against_forward", compare_with_forward(params, cfg, numerics))
            if decode:
                run_cases(result, decode, params, cfg, numerics)
    if prefill or prompts:
        with reported(_REPORT.value, prefill_result(given, limits)) as result:
            if prefill:
                run_cases(result, prefill, params, cfg, numerics)
            if prompts:
                run_prompts(result, prompts, params, cfg, numerics)


def main() -> None:
    if _MODEL.value:
        cfg = ModelConfig.from_checkpoint(_MODEL.value)
    else:
        sizes = {
            "n_routed_experts": _EXPERTS.value,
            "engram_vocab_size": _ENGRAM.value,
            "dspark_n_routed_experts": ceil_div(8, _RANKS.value) * _RANKS.value,
        }
        cfg = reduced_config(_LAYERS.value, **sizes)
    measure(cfg)


if __name__ == "__main__":
    command_line.run(main)
