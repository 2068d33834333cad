"""Expert balancing on a synthetic skewed workload: the load of ranks before and after, beside uniform random routing.

    python scripts/bench_balance.py --report out

Loads are recorded in one window of steps; placements made from them are judged on later steps, token by token with the
routing rule of the model. Then the next window follows, with the placement that is in force by then.

The workload: requests in flight, each about one topic, end by chance and are replaced; which topics arrive drifts. How
often a token takes an expert is log-normal per layer and expert, times log-normal per layer, topic and expert. All of
it is synthetic: its spread is chosen so that the load before balancing is about as uneven as has been published.

A row is written for every layer, so that a run that is cut short keeps those it has done; the means over layers follow.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from dsv4jax.balance.balancer import BalanceConfig
from dsv4jax.balance.metrics import uniform_balancedness
from dsv4jax.balance.solver import Solver, rank_loads
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.steps.routing import evenness
from dsv4jax.config import ModelConfig
from sharding.placement import check_slots, chosen_slots, initial_owners, placement_from_owners

_RANKS = flags.DEFINE_integer("ranks", 32, "Ranks that share the experts.", lower_bound=1)
_NODES = flags.DEFINE_integer("nodes", 1, "Nodes that the ranks are spread over.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 72, "Requests per rank.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 40, "Layers of the target.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 13, "Expert slots per rank of the target.", lower_bound=1)
_DRAFT_SLOTS = flags.DEFINE_multi_integer("draft_slots", [5, 6, 8], "Expert slots per rank of the draft, one by one.")
_CYCLES = flags.DEFINE_integer("cycles", 2, "Windows and rearrangements, one after the other.", lower_bound=1)
_JUDGED = flags.DEFINE_integer("judged", 30, "Steps judged in each interval.", lower_bound=1)
_DRIFT = flags.DEFINE_float("drift", 0.5, "Spread of the logarithm of a topic's share of arrivals.", lower_bound=0.0)
_DRIFT_TIME = flags.DEFINE_integer("drift_time", 2000, "Steps in which arrivals forget what they were.", lower_bound=1)
_LIFETIME = flags.DEFINE_integer("lifetime", 300, "Steps that a request takes on average.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the workload.")
_REPORT = command_line.report_flag()

_TOPICS = 64
_RESOLUTION = 1 << 16  # of the probability of an expert


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of one kind, and how their tokens choose experts.

    Args:
      spread, topic_spread: standard deviations of the logarithm of an expert's popularity, and of what a topic makes
        of it.
    """

    name: str
    layers: int
    experts: int
    k: int
    tokens_per_request: int
    slots_per_rank: int
    spread: float
    topic_spread: float


def topics_over_time(rng: np.random.Generator, requests: int, steps: int, drift: float) -> np.ndarray:
    """Topic of each request in each step: int16 [steps, requests]."""
    usual = -0.7 * np.log(np.arange(1, _TOPICS + 1))
    keep = 1 - 1 / _DRIFT_TIME.value
    offset = rng.normal(0, drift, _TOPICS)

    def arrivals(count):
        share = np.exp(usual + offset)
        return rng.choice(_TOPICS, size=count, p=share / share.sum())

    topics = np.empty((steps, requests), np.int16)
    current = arrivals(requests)
    for step in range(steps):
        offset = keep * offset + np.sqrt(1 - keep**2) * rng.normal(0, drift, _TOPICS)
        ended = rng.random(requests) < 1 / _LIFETIME.value
        current[ended] = arrivals(ended.sum())
        topics[step] = current
    return topics


def popularity_tables(rng: np.random.Generator, stack: Stack) -> np.ndarray:
    """Experts of each topic, each as often as it is popular: int16 [topics, resolution]."""
    logits = rng.normal(0, stack.spread, stack.experts)
    logits = logits + rng.normal(0, stack.topic_spread, (_TOPICS, stack.experts))
    cumulative = np.cumsum(np.exp(logits), 1)
    ends = np.round(cumulative / cumulative[:, -1:] * _RESOLUTION).astype(np.int64)
    experts = np.arange(stack.experts, dtype=np.int16)
    return np.stack([np.repeat(experts, np.diff(row, prepend=0)) for row in ends])


def draw_experts(rng: np.random.Generator, tables: np.ndarray, topics: np.ndarray, k: int) -> np.ndarray:
    """k distinct experts of each token, drawn one after the other: int16 [tokens, k]."""
    base, flat = topics.astype(np.int64) * _RESOLUTION, tables.reshape(-1)
    experts = np.empty((len(topics), k), np.int16)
    for j in range(k):
        again = np.arange(len(topics))
        while len(again):
            experts[again, j] = flat[base[again] + rng.integers(_RESOLUTION, size=len(again))]
            again = again[(experts[again, j : j + 1] == experts[again, :j]).any(1)]
    return experts


_slots_of = jax.jit(chosen_slots)


def balancedness(experts: list[np.ndarray], owners: np.ndarray, stack: Stack, ranks: int) -> np.ndarray:
    """Mean load / load of the busiest rank of each step, by the slots that the tokens really take."""
    placement = placement_from_owners(owners[None], stack.experts, ranks)
    tokens = len(experts[0]) // ranks
    index = np.add.outer(np.arange(ranks), np.arange(tokens)).reshape(-1)
    ratios = []
    for picks in experts:
        slots = np.asarray(_slots_of(placement.slots[0], placement.counts[0], jax.numpy.asarray(picks), index))
        load = np.bincount(slots.reshape(-1) // (len(owners) // ranks), minlength=ranks)
        ratios.append(load.mean() / load.max())
    return np.array(ratios)


def layer_results(
    rng: np.random.Generator, stack: Stack, topics: np.ndarray, cfg: BalanceConfig, solver: Solver
) -> Iterator[tuple[dict[str, float], dict[str, np.ndarray]]]:
    """What happens to one layer in each cycle: numbers of the whole cycle, and balancedness of each judged step."""
    ranks, tables = solver.ranks, popularity_tables(rng, stack)

    def draw(step):
        return draw_experts(rng, tables, np.repeat(topics[step], stack.tokens_per_request), stack.k)

    first = initial_owners(1, stack.experts, ranks, stack.slots_per_rank)[0]
    plain = np.arange(stack.experts, dtype=np.int32)
    owners = {"mean": first, "steps": first}
    for cycle in range(_CYCLES.value):
        start = cycle * cfg.interval
        recorded = range(start, start + cfg.window, cfg.window // cfg.vectors)
        loads = np.stack([np.bincount(draw(step).reshape(-1), minlength=stack.experts) for step in recorded])
        begin = start + cfg.window
        judged = [draw(step) for step in np.linspace(begin, begin + cfg.interval - 1, _JUDGED.value).astype(int)]
        half = len(judged) // 2
        by_step = {"before": balancedness(judged, owners["steps"], stack, ranks)}
        if stack.experts % ranks == 0:
            by_step["no_redundant_slots"] = balancedness(judged, plain, stack, ranks)
        result = {}
        for form, given in (("mean", loads.mean(0, keepdims=True)), ("steps", loads)):
            at = time.perf_counter()
            found = solver.solve(given, owners[form])
            result[f"{form}_seconds"] = time.perf_counter() - at
            result[f"{form}_moved"] = int(np.sum(found != owners[form]))
            owners[form] = found
            by_step[form] = balancedness(judged, found, stack, ranks)
            result[f"{form}_recorded"] = float(np.mean(evenness(rank_loads(loads, found, ranks))))
        result |= {name: float(ratios.mean()) for name, ratios in by_step.items()}
        if half:
            result["steps_first_half"] = float(by_step["steps"][:half].mean())
        yield result, by_step


def main() -> None:
    cfg, model, ranks = BalanceConfig(), ModelConfig(), _RANKS.value
    solver = Solver(ranks, _NODES.value)
    draft = dict(layers=model.num_nextn_predict_layers, experts=model.dspark_n_routed_experts,
                 k=model.dspark_num_experts_per_tok, tokens_per_request=model.dspark_block_size,
                 spread=1.2, topic_spread=0.6)  # fmt: skip
    stacks = [
        Stack("target", _LAYERS.value, model.n_routed_experts, model.num_experts_per_tok,
              model.dspark_block_size + 1, _SLOTS.value, spread=1.6, topic_spread=0.6),
        *(Stack(f"draft, {n} slots", slots_per_rank=n, **draft) for n in _DRAFT_SLOTS.value),
    ]  # fmt: skip
    for flag, stack in zip((_SLOTS, *[_DRAFT_SLOTS] * len(_DRAFT_SLOTS.value)), stacks, strict=True):
        with command_line.about(flag):
            check_slots(stack.experts, ranks, stack.slots_per_rank)
    requests = ranks * _REQUESTS.value
    rng = np.random.default_rng(_SEED.value)
    topics = topics_over_time(
        rng, requests, (_CYCLES.value - 1) * cfg.interval + cfg.window + cfg.interval, _DRIFT.value
    )
    given = conditions(
        model="expert counts of the released model; loads and routing are drawn",
        layout=f"{ranks} ranks on {_NODES.value} nodes, virtual",
        flags=flag_values(globals()),
        seed=_SEED.value,
        devices=jax.devices(),
    )
    placements = ("no_redundant_slots", "before", "mean", "steps")
    result = Result(
        "balance",
        given,
        keys={"layers": ("stack", "layer", "cycle"), "stacks": ("stack", "cycle"), "by_step": ("stack", "step")},
        control={"what": "column control: uniform random routing of as many tokens, equally many experts on each rank"},
        ceiling={"what": "balancedness 1: all ranks have the same load"},
        plots=[
            Plot("bar", "Balancedness by placement", "stacks", "stack", (*placements, "control"), Axis("experts of"),
                 Axis("mean load / load of the busiest rank"), by=("cycle",)),
            *(Plot("line", f"Balancedness of {stack.name} by step", "by_step", "step", ("before", "steps", "control"),
                   Axis("step"), Axis("mean load / load of the busiest rank"), where={"stack": stack.name})
              for stack in stacks),
        ],
    )  # fmt: skip
    with reported(_REPORT.value, result):
        for stack in stacks:
            tokens = np.array([requests * stack.tokens_per_request])
            control = float(uniform_balancedness(tokens, stack.k, stack.experts, ranks)[0])
            run_stack(result, stack, topics, cfg, solver, control)
        print(text_table(result.rows["stacks"]))


def run_stack(
    result: Result, stack: Stack, topics: np.ndarray, cfg: BalanceConfig, solver: Solver, control: float
) -> None:
    """All layers of a stack, then their means."""
    # The same popularities whatever the slots, but others in every layer.
    streams = [np.random.default_rng([_SEED.value, layer, stack.experts]) for layer in range(stack.layers)]
    cycles: list[list[dict[str, np.ndarray]]] = [[] for _ in range(_CYCLES.value)]
    for layer, stream in enumerate(tqdm(streams, desc=stack.name, unit="layer")):
        for cycle, (numbers, by_step) in enumerate(layer_results(stream, stack, topics, cfg, solver)):
            result.add_row("layers", {"stack": stack.name, "layer": layer, "cycle": cycle + 1, **numbers})
            cycles[cycle].append(by_step)
    slots = solver.ranks * stack.slots_per_rank
    for cycle, layers in enumerate(cycles):
        rows = [row for row in result.rows["layers"] if (row["stack"], row["cycle"]) == (stack.name, cycle + 1)]
        means = {
            name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name not in ("stack", "layer")
        }
        summary = {"stack": stack.name, **means, "cycle": cycle + 1, "control": control, "slots": slots}
        result.add_row("stacks", summary)
        steps = np.linspace(cfg.window, cfg.window + cfg.interval - 1, _JUDGED.value).astype(int) + cycle * cfg.interval
        by_step = {name: np.mean([layer[name] for layer in layers], 0) for name in layers[0]}
        result.add_rows(
            "by_step",
            [
                {"stack": stack.name, "step": step, **{name: ratios[i] for name, ratios in by_step.items()}}
                | {"control": control}
                for i, step in enumerate(steps)
            ],
        )
        result.verdicts.append(verdict(summary))


_NEAR = 0.02
"""How far below the control balancing may end to have reached it."""


def verdict(row: dict[str, Any]) -> str:
    """What rearranging has made of a stack in a cycle."""
    short = row["control"] - row["steps"]
    reached = "reached" if short <= _NEAR else "not reached"
    return (
        f"{row['stack']}, cycle {row['cycle']}: balancedness from {row['before']:.3f} to {row['steps']:.3f};"
        f" uniform routing gives {row['control']:.3f}: {reached} within {_NEAR}"
    )


if __name__ == "__main__":
    command_line.run(main)
