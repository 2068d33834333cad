"""Times the real step functions with random weights at released widths, beside ceilings measured in the same run.

    python scripts/bench_steps.py --layers 6 --output benchmarks/steps.json
    python scripts/bench_steps.py --layers 40 --ranks 8 --decode 16x6x131072,16x6x875520 --prefill 8192 \
        --replay bounded --cached_prefix 32768x131072x8192 --profile benchmarks/steps --output benchmarks/steps.json
    python scripts/bench_steps.py --check_flags --output flags.json

Decode runs on a cache of random records, prefill on random tokens. Times are of calls sent one after the other, and of
calls that are waited for (median), after compilation. With `--ranks` the device emulates one rank of many: see
`sharding.exchange`; what the links between devices would take is not in the times.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    decode_batch,
    prefill_batch,
    with_engram_rows,
)
from dsv4jax.bench.costs import step_costs
from dsv4jax.bench.random_state import RandomHostTables, random_cache, random_params
from dsv4jax.bench.replacement import without_own_topk
from dsv4jax.bench.report import picture, stage_lines, table
from dsv4jax.bench.steps import (
    GREEDY,
    PAGE,
    StepCase,
    compare_programs,
    compile_all,
    decode_case,
    numbers_of,
    prefill_bucket,
    prefill_case,
    prefill_chunks,
    profile_step,
    time_step,
)
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.step_flags import VARIANTS
from dsv4jax.steps import decode_step, forward, prefill_step
from pallas_kernels.timing import ceilings
from sharding import emulated_rank
from sharding.exchange import exchange_bytes

_LAYERS = flags.DEFINE_integer("layers", 6, "Layers of the reduced released configuration, 6 to 40.")
_MODEL = flags.DEFINE_string("model", None, "Directory with the config.json of another model, in place of these sizes.")
_EXPERTS = flags.DEFINE_integer("experts", 384, "Routed experts per layer, of all ranks together.")
_RANKS = flags.DEFINE_integer("ranks", 1, "Ranks of which the device emulates one.", 1)
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", 100_000, "Where the prime search for the Engram tables starts.")
_DECODE = flags.DEFINE_list(
    "decode", ["1x1x4096", "8x1x4096", "64x1x4096", "8x1x32768"], "Steps: requests x tokens per request x context."
)
_PREFILL = flags.DEFINE_list("prefill", ["512", "2048"], "Steps: tokens, or tokens x cached tokens.")
_REPLAY = flags.DEFINE_multi_enum(
    "replay", ["exact", "bounded"], ["exact", "bounded"], "Decoder layers over the prompt: all of it, or its end."
)
_CACHED_PREFIX = flags.DEFINE_string(
    "cached_prefix", None, "new tokens x cached tokens x chunk: prefill with each improvement alone and all together."
)
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, ["reference", "pallas"], "Plain JAX or GPU kernels. Default: kernels where they can run."
)
_COMPARE = flags.DEFINE_bool("compare", False, "Also compare prefill + decode with the whole-sequence run.")
_CHECK_FLAGS = flags.DEFINE_bool("check_flags", False, "Only compare outputs and times under step_flags.VARIANTS.")
_PROFILE = flags.DEFINE_string("profile", None, "Directory for a picture of every step by stage; the table is printed.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls per point.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def measured_ceilings() -> dict[str, float]:
    """Copy and matmul rates; by the clock and at small sizes where there is no GPU."""
    if jax.default_backend() == "gpu":
        return ceilings()

    def by_the_clock(fn, argument_sets):
        jax.block_until_ready(fn(*argument_sets[0]))
        begin = time.perf_counter()
        jax.block_until_ready(fn(*argument_sets[0]))
        return (time.perf_counter() - begin) * 1e6

    return ceilings(by_the_clock, 1 << 22, 256)


def run_cases(
    cases: list[StepCase], params: Params, cfg: ModelConfig, numerics: Numerics, limits: dict[str, float]
) -> list[dict]:
    """Times, and with --profile stages, of every case."""
    begin = time.perf_counter()
    layout = emulated_rank(_RANKS.value)
    lowered = [case.lower(params, cfg, numerics, layout) for case in cases]
    programs = compile_all(lowered)
    print(f"{len(cases)} steps compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    records = []
    for case, program in zip(cases, programs, strict=True):
        cache = random_cache(cfg, case.cache_cfg, numerics)
        waited, sent, output = time_step(program, params, cache, case.batch, _REPEATS.value)
        # Each rank's experts stand for those of all ranks.
        load = np.asarray(output.expert_load).reshape(cfg.num_hidden_layers, _RANKS.value, -1).sum(1)
        costs = step_costs(cfg, case.shape)
        floor = sum(cost.floor(limits) for cost in costs.values()) / 1e3
        record = {
            "step": case.name,
            "milliseconds": sent * 1e3,
            "milliseconds_waited_for": waited * 1e3,
            "tokens_per_second": case.shape.tokens / sent,
            "floor_milliseconds": floor,
            "experts_in_use": float((load > 0).sum(1).mean()),
        }
        print(
            f"{case.name:<36}{sent * 1e3:>10.2f} ms{waited * 1e3:>10.2f} waited for{floor:>10.2f} floor"
            f"{case.shape.tokens / sent:>12.0f} tokens/s, {record['experts_in_use']:.1f} of {load.shape[1]} experts",
            flush=True,
        )
        if _PROFILE.value:
            # The last cache was given away.
            spent = profile_step(program, params, random_cache(cfg, case.cache_cfg, numerics), case.batch)
            lines = stage_lines(spent, costs, limits)
            print(table(lines, spent, cfg.num_hidden_layers), flush=True)
            print(f"without a kernel in the step as it runs: {1 - spent.busy / sent / 1e6:.1%}", flush=True)
            launches = sorted(spent.launches.items(), key=lambda item: -item[1][1])
            record |= {
                "stages": [dataclasses.asdict(line) for line in lines],
                "kernels": [
                    {"stage": stage, "name": name, "launches": count, "microseconds": duration}
                    for (stage, name), (count, duration) in launches
                ],
                "busy": spent.busy,
                "span": spent.span,
            }
            file = Path(_PROFILE.value) / f"{re.sub('[^a-z0-9]+', '_', case.name)}.svg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(picture(lines, case.name), encoding="utf-8")
        records.append(record)
    return records


def cached_prefix(
    params: Params, cfg: ModelConfig, numerics: Numerics, new: int, cached: int, chunk: int
) -> list[dict]:
    """Prefill behind a cached prefix: seconds of all chunks, for each of three improvements alone and together.

    The decoder half on the end of the prompt only; Engram tables on the device instead of host memory; `topk` instead
    of XLA's sort, which makes no difference without kernels.
    """
    pages = ceil_div(cached + new, PAGE)
    cache_cfg = CacheConfig(slots=1, pages=pages, page_size=PAGE)
    chunks = prefill_chunks(cfg, new, cached, chunk)
    token_map = np.asarray(params["engram_token_map"])
    host, host_tables = _without_tables(params, cfg), RandomHostTables(cfg)
    setups = [on for on in itertools.product((False, True), repeat=3) if sum(on) in (0, 1, 3)]

    def batches(decoder_cut, on_device):
        bucket = prefill_bucket(min(chunk, new), pages, "bounded" if decoder_cut else "exact")
        for one in chunks:
            batch = prefill_batch(cfg, cache_cfg, [one], bucket)
            yield batch if on_device else with_engram_rows(cfg, batch, token_map, host_tables)

    lowered = []
    cache = jax.eval_shape(lambda: init_cache(cfg, cache_cfg, numerics))
    for decoder_cut, on_device, own_topk in setups:
        with contextlib.nullcontext() if own_topk else without_own_topk():
            batch = next(batches(decoder_cut, on_device))
            given = params if on_device else host
            layout = emulated_rank(_RANKS.value)
            lowered.append(prefill_step.lower(given, cache, batch, cfg=cfg, numerics=numerics, layout=layout))
    records = []
    for (decoder_cut, on_device, own_topk), program in zip(setups, compile_all(lowered), strict=True):
        cache = random_cache(cfg, cache_cfg, numerics)
        for _ in range(2):  # The second time counts.
            begin = time.perf_counter()
            for batch in batches(decoder_cut, on_device):
                cache, output = program(params if on_device else host, cache, batch)
            jax.block_until_ready(output.tokens)
            seconds = time.perf_counter() - begin
        records.append(
            {
                "decoder_cut": decoder_cut,
                "tables_on_device": on_device,
                "own_topk": own_topk,
                "seconds": seconds,
                "tokens_per_second": new / seconds,
            }
        )
        switches = {"decoder cut": decoder_cut, "tables on device": on_device, "own top-k": own_topk}
        names = [name for name, on in switches.items() if on]
        gain = records[0]["seconds"] / seconds - 1
        print(f"{new} behind {cached}: {' + '.join(names) or 'none':<44}{new / seconds:>10.0f} tokens/s {gain:+.1%}")
    return records


def _without_tables(params: Params, cfg: ModelConfig) -> Params:
    layers = dict(params["layers"])
    for i in cfg.engram_layer_ids:
        engram = {name: leaf for name, leaf in layers[i]["engram"].items() if name != "embed"}
        layers[i] = {**layers[i], "engram": engram}
    return {**params, "layers": layers}


def check_flags(params: Params, cfg: ModelConfig, numerics: Numerics) -> list[dict]:
    """Whether `step_flags.VARIANTS` give the same bits, and their times, for a decode and a prefill step.

    A variant that this XLA does not know is told apart from one whose results differ.
    """
    records = []
    for case in (decode_case(cfg, 8, 2, 2048), prefill_case(cfg, 512, 1024, "bounded")):
        lowered = case.lower(params, cfg, numerics, emulated_rank(_RANKS.value))
        programs, unknown = {}, {}
        for name, options in VARIANTS.items():
            try:
                (programs[name],) = compile_all([lowered], options)
            except jax.errors.JaxRuntimeError as error:
                unknown[name] = str(error).splitlines()[0]
        make_cache = functools.partial(random_cache, cfg, case.cache_cfg, numerics)
        equal = compare_programs(programs, params, case.batch, make_cache)
        for name in VARIANTS:
            record = {"step": case.name, "flags": name}
            if name in unknown:
                record["unknown"] = unknown[name]
                print(f"{case.name:<32}{name:<24}not known to this XLA: {unknown[name]}", flush=True)
            else:
                _, sent, _ = time_step(programs[name], params, make_cache(), case.batch, _REPEATS.value)
                record |= {"equal": equal[name], "milliseconds": sent * 1e3}
                same = "same bits" if equal[name] else "DIFFERENT"
                print(f"{case.name:<32}{name:<24}{sent * 1e3:>10.2f} ms  {same}", flush=True)
            records.append(record)
    return records


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


def measure(cfg: ModelConfig) -> dict:
    """Everything that the flags ask for."""
    numerics, why = with_implementation(
        FAST if _NUMERICS.value == "fast" else REFERENCE, _IMPLEMENTATION.value, cfg, PAGE
    )
    decode = [numbers_of("decode", text, (3,)) for text in _DECODE.value]
    prefill = [numbers_of("prefill", text, (1, 2)) for text in _PREFILL.value]
    prefix = numbers_of("cached_prefix", _CACHED_PREFIX.value, (3,)) if _CACHED_PREFIX.value else None
    ranks = _RANKS.value
    if _COMPARE.value and ranks > 1:
        raise app.UsageError(f"--compare with --ranks={ranks}: an emulated rank computes another model")
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(cfg, numerics, emulated_rank(ranks)))
    seconds = time.perf_counter() - begin
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "numerics": _NUMERICS.value,
        "implementation": numerics.implementation,
        "modes": [cfg.mode(i) for i in range(cfg.num_hidden_layers)],
        "experts": cfg.n_routed_experts,
        "emulated_ranks": ranks,
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "drawing_seconds": seconds,
        "ceilings": measured_ceilings(),
    }
    print(f"{numerics.implementation}{f' ({why})' if why else ''}")
    print(f"{report['parameter_bytes'] / 2**30:.1f} GiB drawn in {seconds:.1f} s")
    print(", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in report["ceilings"].items()), flush=True)
    if _CHECK_FLAGS.value:
        return report | {"flags": check_flags(params, cfg, numerics)}
    if ranks > 1:
        report["exchange_bytes_per_layer_and_token"] = exchange_bytes(
            ranks, 1, cfg.hidden_size, cfg.num_experts_per_tok
        )
        print(f"one rank of {ranks}, the exchange by copies on the device", flush=True)
    if _COMPARE.value:
        report["prefill_decode_against_forward"] = compare_with_forward(params, cfg, numerics)
        print(report["prefill_decode_against_forward"], flush=True)
    cases = [decode_case(cfg, *numbers, ranks) for numbers in decode]
    cases += [
        prefill_case(cfg, numbers[0], sum(numbers[1:]), replay, ranks)
        for numbers in prefill
        for replay in _REPLAY.value
    ]
    report["steps"] = run_cases(cases, params, cfg, numerics, report["ceilings"])
    if prefix:
        report["cached_prefix"] = cached_prefix(params, cfg, numerics, *prefix)
    return report


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _MODEL.value:
        cfg = ModelConfig.from_checkpoint(_MODEL.value)
    else:
        sizes = {
            "n_routed_experts": _EXPERTS.value,
            "engram_vocab_size": _ENGRAM.value,
            "dspark_n_routed_experts": ceil_div(8, _RANKS.value) * _RANKS.value,
        }
        cfg = reduced_config(_LAYERS.value, **sizes)
    Path(_OUTPUT.value).write_text(json.dumps(measure(cfg), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
