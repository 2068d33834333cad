"""How evenly the loads of steps fall on ranks, before and after their experts are rearranged."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int32

from dsv4jax.balance.metrics import uniform_balancedness
from dsv4jax.balance.solver import Solver, rank_loads
from sharding.placement import initial_owners

Loads = Int[np.ndarray, "steps layers experts"]


def balancedness_by_step(loads: Loads, owners: Int32[np.ndarray, "layers slots"], ranks: int) -> Float[np.ndarray, "n"]:
    """Mean load of the ranks / load of the busiest, of each step: mean over the layers, which all have tokens.

    An expert's tokens are split evenly over its replicas.
    """
    by_layer = []
    for layer, own in enumerate(owners):
        by_rank = rank_loads(loads[:, layer], own, ranks)
        by_layer.append(evenness(by_rank))
    return np.mean(by_layer, 0)


def evenness(by_rank: Float[np.ndarray, "n ranks"]) -> Float[np.ndarray, "n"]:
    """Mean load of the ranks / load of the busiest."""
    return by_rank.mean(1) / by_rank.max(1)


def rearranged(loads: Loads, solver: Solver, slots_per_rank: int) -> Int32[np.ndarray, "layers slots"]:
    """Where the solver puts the experts of each layer for these loads, from expert p in slot p on."""
    _, layers, experts = loads.shape
    owners = initial_owners(layers, experts, solver.ranks, slots_per_rank)
    return np.stack([solver.solve(loads[:, layer], own) for layer, own in enumerate(owners)])


def judged_steps(
    loads: Loads, recorded: int, solver: Solver, slots_per_rank: int, experts_per_token: int
) -> list[dict[str, Any]]:
    """A row for each step after the recorded ones: balancedness before and after rearranging for the recorded ones.

    `control` is that of uniform random routing of as many tokens, with equally many experts on each rank.

    Raises:
      ValueError: no step is left to judge, or none recorded.
    """
    if not 0 < recorded < len(loads):
        raise ValueError(f"recorded = {recorded}: must be from 1 to {len(loads) - 1}, one less than the steps")
    _, layers, experts = loads.shape
    owners = {
        "before": initial_owners(layers, experts, solver.ranks, slots_per_rank),
        "after": rearranged(loads[:recorded], solver, slots_per_rank),
    }
    later = loads[recorded:]
    found = {name: balancedness_by_step(later, own, solver.ranks) for name, own in owners.items()}
    tokens = later.sum(2).mean(1) / experts_per_token
    found["control"] = uniform_balancedness(tokens, experts_per_token, experts, solver.ranks)
    moved = int(np.sum(owners["before"] != owners["after"]))
    return [
        {"step": recorded + i, **{name: float(one[i]) for name, one in found.items()}, "moved": moved}
        for i in range(len(later))
    ]


def routing_lines(rows: list[Mapping[str, Any]]) -> list[str]:
    """What each routing does to each stack, by the means over the judged steps."""
    lines = []
    judged = [row for row in rows if "before" in row]
    for routing, stack in dict.fromkeys((row["routing"], row["stack"]) for row in judged):
        own = [row for row in judged if (row["routing"], row["stack"]) == (routing, stack)]
        before, after, control = (float(np.mean([row[name] for row in own])) for name in ("before", "after", "control"))
        lines.append(
            f"{routing} routing, {stack}: balancedness {before:.3f} before and {after:.3f} after rearranging; uniform"
            f" routing gives {control:.3f} on average"
        )
    return lines
