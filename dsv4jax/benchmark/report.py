"""A step's stages beside their floors, as table and as picture."""

import dataclasses
from collections.abc import Mapping
from html import escape

from dsv4jax.benchmark.costs import Cost
from dsv4jax.benchmark.trace import OTHER, STAGES, Profile


@dataclasses.dataclass(frozen=True)
class StageLine:
    """One stage of a step."""

    stage: str
    kernels: float
    microseconds: float
    megabytes: float
    gigaflops: float
    floor: float
    """Microseconds."""


def stage_lines(profile: Profile, costs: Mapping[str, Cost], ceilings: Mapping[str, float]) -> list[StageLine]:
    """Every stage that took time or has a cost, in the order of a step.

    Args:
      ceilings: rates `copy`, `fp8` and `bf16` per second.
    """
    lines = []
    for stage in (*STAGES, OTHER):
        cost = costs.get(stage, Cost())
        if stage in profile.kernels or stage in costs:
            kernels, microseconds = profile.kernels.get(stage, 0.0), profile.microseconds.get(stage, 0.0)
            flops = (cost.fp8 + cost.bf16) / 1e9
            lines.append(StageLine(stage, kernels, microseconds, cost.bytes / 1e6, flops, cost.floor(ceilings)))
    return lines


def table(lines: list[StageLine], profile: Profile, layers: int) -> str:
    """The lines as text, with totals, kernels per layer and gaps."""
    header = f"{'stage':<20}{'kernels':>9}{'us':>11}{'share':>8}{'MB':>11}{'GFLOP':>10}{'floor us':>11}{'of floor':>10}"
    total = sum(line.microseconds for line in lines) or 1.0
    rows = [header]
    for line in lines:
        reached = f"{line.floor / line.microseconds:10.0%}" if line.microseconds else f"{'':>10}"
        rows.append(
            f"{line.stage:<20}{line.kernels:>9.1f}{line.microseconds:>11.1f}{line.microseconds / total:>8.1%}"
            f"{line.megabytes:>11.1f}{line.gigaflops:>10.1f}{line.floor:>11.1f}{reached}"
        )
    kernels, floor = sum(line.kernels for line in lines), sum(line.floor for line in lines)
    rows.append(f"{'all':<20}{kernels:>9.1f}{total:>11.1f}{'':>8}{'':>11}{'':>10}{floor:>11.1f}{floor / total:>10.0%}")
    rows.append(
        f"{kernels / layers:.1f} kernels per layer; from first to last {profile.span:.1f} us, of which nothing ran for"
        f" {profile.gaps:.1f} ({profile.gaps / profile.span:.1%})"
    )
    return "\n".join(rows)


def picture(lines: list[StageLine], title: str) -> str:
    """An SVG: a bar per stage as long as its time, its floor in front."""
    left, width, height = 150, 560, 22
    scale = width / max(1e-9, *(max(line.microseconds, line.floor) for line in lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{height * len(lines) + 60}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        '<text x="10" y="40" fill="#555">light: measured, dark: floor from bytes and operations (microseconds)</text>',
    ]
    for i, line in enumerate(lines):
        y = 50 + i * height
        label = f"{line.microseconds:.0f} / {line.floor:.0f}"
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(line.stage)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{line.microseconds * scale:.1f}" height="16" fill="#9ecae1"/>',
            f'<rect x="{left}" y="{y + 6}" width="{line.floor * scale:.1f}" height="8" fill="#08519c"/>',
            f'<text x="{left + max(line.microseconds, line.floor) * scale + 6:.1f}" y="{y + 14}">{label}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
