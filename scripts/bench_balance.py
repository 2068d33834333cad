"""Expert balancing on a synthetic skewed workload: the load of ranks before and after, beside uniform random routing.

    python scripts/bench_balance.py --output balance.json

Loads are recorded in one window of steps; placements made from them are judged on later steps, token by token with the
routing rule of the model. Then the next window follows, with the placement that is in force by then.

The workload: requests in flight, each about one topic, end by chance and are replaced; which topics arrive drifts. How
often a token takes an expert is log-normal per layer and expert, times log-normal per layer, topic and expert. All of
it is synthetic: its spread is chosen so that the load before balancing is about as uneven as has been published.
"""

import dataclasses
import datetime
import json
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

from dsv4jax.balance.balancer import BalanceConfig
from dsv4jax.balance.metrics import uniform_balancedness
from dsv4jax.balance.solver import Solver, rank_loads
from dsv4jax.config import ModelConfig
from sharding.placement import chosen_slots, initial_owners, placement_from_owners

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
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_REPORTED = ("ranks", "nodes", "requests", "layers", "judged", "drift", "drift_time", "lifetime", "seed")
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


def balancedness(experts: list[np.ndarray], owners: np.ndarray, stack: Stack, ranks: int) -> float:
    """Mean over steps of mean load / load of the busiest rank, by the slots that the tokens really take."""
    placement = placement_from_owners(owners[None], stack.experts, ranks)
    tokens = len(experts[0]) // ranks
    index = np.add.outer(np.arange(ranks), np.arange(tokens)).reshape(-1)
    ratios = []
    for picks in experts:
        slots = np.asarray(_slots_of(placement.slots[0], placement.counts[0], jax.numpy.asarray(picks), index))
        load = np.bincount(slots.reshape(-1) // (len(owners) // ranks), minlength=ranks)
        ratios.append(load.mean() / load.max())
    return float(np.mean(ratios))


def layer_results(
    rng: np.random.Generator, stack: Stack, topics: np.ndarray, cfg: BalanceConfig, solver: Solver
) -> Iterator[dict[str, float]]:
    """What happens to one layer in each cycle."""
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
        result = {"before": balancedness(judged, owners["steps"], stack, ranks)}
        if stack.experts % ranks == 0:
            result["no_redundant_slots"] = balancedness(judged, plain, stack, ranks)
        for form, given in (("mean", loads.mean(0, keepdims=True)), ("steps", loads)):
            at = time.perf_counter()
            found = solver.solve(given, owners[form])
            result[f"{form}_seconds"] = time.perf_counter() - at
            result[f"{form}_moved"] = int(np.sum(found != owners[form]))
            owners[form] = found
            result[form] = balancedness(judged, found, stack, ranks)
            result[f"{form}_recorded"] = float(np.mean(_evenness(rank_loads(loads, found, ranks))))
        result["steps_first_half"] = balancedness(judged[:half], owners["steps"], stack, ranks) if half else np.nan
        yield result


def _evenness(by_rank: np.ndarray) -> np.ndarray:
    return by_rank.mean(1) / by_rank.max(1)


def main(_argv: list[str]) -> None:
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
    requests = ranks * _REQUESTS.value
    rng = np.random.default_rng(_SEED.value)
    topics = topics_over_time(
        rng, requests, (_CYCLES.value - 1) * cfg.interval + cfg.window + cfg.interval, _DRIFT.value
    )
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "jax": jax.__version__},
        "cpus": os.cpu_count(),
        "flags": {name: flags.FLAGS[name].value for name in _REPORTED},
        "stacks": {},
    }
    print("| stack | cycle | no redundant slots | before | after, mean | after, steps | first half | control "
          "| moved, mean | moved, steps | slots | solver ms per layer |\n|---|" + "---:|" * 11)  # fmt: skip
    for stack in stacks:
        # The same popularities whatever the slots, but others in every layer.
        streams = [np.random.default_rng([_SEED.value, layer, stack.experts]) for layer in range(stack.layers)]
        progress = tqdm(streams, desc=stack.name, unit="layer")
        results = [list(layer_results(stream, stack, topics, cfg, solver)) for stream in progress]
        tokens = np.array([requests * stack.tokens_per_request])
        control = float(uniform_balancedness(tokens, stack.k, stack.experts, ranks)[0])
        rows = []
        for cycle in range(_CYCLES.value):
            row = {key: float(np.mean([layer[cycle][key] for layer in results])) for key in results[0][cycle]}
            rows.append(row | {"control": control})
            print(f"| {stack.name} | {cycle + 1} | {row.get('no_redundant_slots', np.nan):.3f} | {row['before']:.3f} "
                  f"| {row['mean']:.3f} | {row['steps']:.3f} | {row['steps_first_half']:.3f} | {control:.3f} "
                  f"| {row['mean_moved']:.1f} | {row['steps_moved']:.1f} | {ranks * stack.slots_per_rank} "
                  f"| {1000 * row['steps_seconds']:.0f} |", flush=True)  # fmt: skip
        report["stacks"][stack.name] = rows
    if _OUTPUT.value:
        with open(_OUTPUT.value, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    app.run(main)
