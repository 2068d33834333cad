"""Routing of the same batch by the model, uniformly at random and skewed: how even the load of ranks is, step by step.

    python scripts/bench_routing.py --report out
    python scripts/bench_routing.py --layers 6 --ranks 32 --slots 13 --draft_slots 5 --requests 64 --context 4096 \
        --report out

Target and draft run on one device; their experts are divided over ranks by counting. The solver of the balancer places
experts by the first steps; the steps after these are judged with the experts where they were and where it puts them.
Requests stand behind a context of random records: the model's own routing is that of such states, not of text. What the
routing costs in time is measured by `bench_parallel.py`.
"""

import dataclasses
import functools

import command_line
import jax
from absl import flags
from tqdm import tqdm

from dsv4jax.balance.solver import Solver
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.steps.cases import PAGE, caught, compile_apart
from dsv4jax.bench.steps.drafts import DraftCase
from dsv4jax.bench.steps.random_state import random_params
from dsv4jax.bench.steps.routing import judged_steps, routing_lines
from dsv4jax.checkpoint.load import load_params
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.compilation_cache import use_compilation_cache
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.model.forced_routing import ROUTINGS
from dsv4jax.numerics import FAST
from dsv4jax.packing import pack_params
from sharding import SINGLE
from sharding.placement import check_slots

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the embedded model.")
_LAYERS = flags.DEFINE_integer("layers", None, "Instead of a checkpoint: random weights of so many layers.", 6)
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks that the experts are divided over.", 2)
_SLOTS = flags.DEFINE_integer("slots", None, "Expert slots of a rank. Default: one more than needed.", 1)
_DRAFT_SLOTS = flags.DEFINE_integer("draft_slots", None, "The same for the draft.", 1)
_REQUESTS = flags.DEFINE_integer("requests", 16, "Requests of all ranks together.", 1)
_CONTEXT = flags.DEFINE_integer("context", 128, "Tokens of each request in the cache.", 1)
_DRAFTS = flags.DEFINE_integer("drafts", None, "Drafts that each request verifies. Default: all.", 1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of the requests: greedy ones may repeat themselves.", 0.0)
_RECORDED = flags.DEFINE_integer("recorded", 16, "Steps by which experts are placed.", 1)
_JUDGED = flags.DEFINE_integer("judged", 16, "Steps after these that are judged.", 1)
_IMPLEMENTATION = command_line.implementation_flag()
_CACHE = command_line.compile_cache_flag()
_REPORT = command_line.report_flag()


def main() -> None:
    use_compilation_cache(_CACHE.value)
    path = command_line.model_path(_MODEL.value)
    if _LAYERS.value:
        cfg = reduced_config(_LAYERS.value, engram_vocab_size=100_000)
    else:
        cfg = ModelConfig.from_checkpoint(path)
    drafts = _DRAFTS.value or cfg.dspark_block_size
    if drafts > cfg.dspark_block_size:
        raise ValueError(f"--drafts={drafts}: must be from 1 to {cfg.dspark_block_size}")
    stacks = {
        "target": (cfg.n_routed_experts, cfg.num_experts_per_tok, _SLOTS.value),
        "draft": (cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok, _DRAFT_SLOTS.value),
    }
    slots = {name: given or -(-experts // _RANKS.value) + 1 for name, (experts, _, given) in stacks.items()}
    for flag, (name, (experts, _, _)) in zip((_SLOTS, _DRAFT_SLOTS), stacks.items(), strict=True):
        with command_line.about(flag):
            check_slots(experts, _RANKS.value, slots[name])
    numerics, _ = with_implementation(FAST, _IMPLEMENTATION.value, cfg, PAGE)
    if _LAYERS.value:
        params = random_params(cfg, numerics)
    else:
        params = load_params(path, cfg)
        params = pack_params(params, SINGLE) if numerics.implementation == "pallas" else params
    cases = {
        routing: DraftCase(
            cfg, dataclasses.replace(numerics, routing=routing), SINGLE, _REQUESTS.value, _CONTEXT.value, (drafts,),
            "shared", _TEMPERATURE.value, _RECORDED.value + _JUDGED.value,
        )
        for routing in ROUTINGS
    }  # fmt: skip
    given = conditions(
        model=f"random weights of {_LAYERS.value} layers" if _LAYERS.value else _MODEL.value or "the embedded model",
        layout=f"one device, experts counted over {_RANKS.value} ranks",
        flags=flag_values(globals()),
        seed=0,
        devices=jax.devices(),
        implementation=numerics.implementation,
        expert_slots_per_rank=slots,
    )
    axes = Axis("step"), Axis("mean load / load of the busiest rank")
    result = Result(
        "routing",
        given,
        keys={"by_step": ("routing", "stack", "step")},
        control={"what": "column control: uniform random routing of as many tokens, equally many experts on each rank"},
        ceiling={"what": "balancedness 1: all ranks have the same load"},
        plots=[
            Plot("line", f"Balancedness of the {stack}, {routing} routing", "by_step", "step",
                 ("before", "after", "control"), *axes, where={"routing": routing, "stack": stack})
            for routing in ROUTINGS for stack in stacks
        ],
    )  # fmt: skip
    with reported(_REPORT.value, result):
        way = str(drafts)
        lowerings = {routing: functools.partial(case.lower, way, params) for routing, case in cases.items()}
        programs = compile_apart(lowerings)
        for routing, case in tqdm(cases.items(), unit="routing"):
            loads = programs[routing]
            if not isinstance(loads, Exception):
                loads = caught(functools.partial(case.loads, programs[routing], params))
            if isinstance(loads, Exception):
                result.add_row("by_step", {"routing": routing, "error": f"{type(loads).__name__}: {loads}"})
                continue
            for name, (_, k, _) in stacks.items():
                solver = Solver(_RANKS.value)
                rows = judged_steps(loads[name], _RECORDED.value, solver, slots[name], k)
                result.add_rows("by_step", [{"routing": routing, "stack": name, **row} for row in rows])
        result.verdicts += routing_lines(result.rows["by_step"])
        print(text_table(result.rows["by_step"]))
        print("\n".join(result.verdicts))


if __name__ == "__main__":
    command_line.run(main)
