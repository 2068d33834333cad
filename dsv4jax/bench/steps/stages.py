"""A step by stage: measured time beside the fewest bytes and operations, and what that says about the step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from dsv4jax.bench.results.verdicts import limit
from dsv4jax.bench.steps.costs import Cost
from dsv4jax.bench.steps.trace import OTHER, STAGES, Profile

_NAMES = {
    "experts": "expert",
    "hyper_connections": "hyper-connection",
    "attention_input": "attention input",
    "attention_output": "attention output",
    "sparse_attention": "sparse attention",
    "index_select": "index",
    "shared_expert": "shared expert",
    "compress": "compressor",
    "sample": "sampling",
    "embed": "embedding",
}


@dataclasses.dataclass(frozen=True)
class StageLine:
    """One stage of a step; its kernels are None where the step was not profiled."""

    stage: str
    kernels: float | None
    microseconds: float | None
    megabytes: float
    gigaflops: float
    floor_microseconds: float
    bound_by: Literal["reads", "products"]
    """What the floor is of: bytes through memory, or operations."""

    @property
    def name(self) -> str:
        """The stage and what its floor is of, as part of a sentence."""
        return "kernels of no stage" if self.stage == OTHER else f"{_NAMES.get(self.stage, self.stage)} {self.bound_by}"


def stage_lines(profile: Profile | None, costs: Mapping[str, Cost], ceilings: Mapping[str, float]) -> list[StageLine]:
    """Every stage that took time or has a cost, in the order of a step.

    Args:
      profile: None if the step was not profiled.
      ceilings: rates `copy`, `fp8` and `bf16` per second.
    """
    lines = []
    for stage in (*STAGES, OTHER):
        cost = costs.get(stage, Cost())
        if stage in costs or (profile and stage in profile.kernels):
            found = (None, None)
            if profile:
                found = profile.kernels.get(stage, 0.0), profile.microseconds.get(stage, 0.0)
            floor, reads = cost.floor(ceilings), 1e6 * cost.bytes / ceilings["copy"]
            flops, bound = (cost.fp8 + cost.bf16) / 1e9, "reads" if reads >= floor else "products"
            lines.append(StageLine(stage, *found, cost.bytes / 1e6, flops, floor, bound))
    return lines


def step_verdicts(step: str, milliseconds: float, lines: Sequence[StageLine], profile: Profile | None) -> list[str]:
    """What a step is limited by, and how far it is from its floor.

    Args:
      milliseconds: that it takes as it runs.
      profile: None if it was not profiled: then only its floor can be taken apart.
    """
    floor = sum(line.floor_microseconds for line in lines) / 1e3
    distance = f"{step}: takes {milliseconds / floor:.2g} times what its bytes and operations would"
    if profile is None:
        return [f"{distance}; that floor is {limit({line.name: line.floor_microseconds for line in lines}, 'it')}"]
    parts = {line.name: line.microseconds for line in lines}
    waiting = max(0.0, milliseconds * 1e3 - profile.busy)
    return [f"{step}: {limit(parts | {'time without a kernel': waiting}, 'the step')}", distance]


def table(lines: Sequence[StageLine], profile: Profile, layers: int) -> str:
    """The lines of a profiled step as text, with totals, kernels per layer and gaps."""
    header = f"{'stage':<20}{'kernels':>9}{'us':>11}{'share':>8}{'MB':>11}{'GFLOP':>10}{'floor us':>11}{'of floor':>10}"
    total = sum(line.microseconds for line in lines) or 1.0
    rows = [header]
    for line in lines:
        reached = f"{line.floor_microseconds / line.microseconds:10.0%}" if line.microseconds else f"{'':>10}"
        rows.append(
            f"{line.stage:<20}{line.kernels:>9.1f}{line.microseconds:>11.1f}{line.microseconds / total:>8.1%}"
            f"{line.megabytes:>11.1f}{line.gigaflops:>10.1f}{line.floor_microseconds:>11.1f}{reached}"
        )
    kernels, floor = sum(line.kernels for line in lines), sum(line.floor_microseconds for line in lines)
    rows.append(f"{'all':<20}{kernels:>9.1f}{total:>11.1f}{'':>8}{'':>11}{'':>10}{floor:>11.1f}{floor / total:>10.0%}")
    rows.append(
        f"{kernels / layers:.1f} kernels per layer; from first to last {profile.span:.1f} us, of which nothing ran for"
        f" {profile.gaps:.1f} ({profile.gaps / profile.span:.1%})"
    )
    return "\n".join(rows)
