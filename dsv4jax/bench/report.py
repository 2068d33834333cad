"""What benchmarks report: files that grow row by row, tables, a step's stages beside their floors, reliability."""

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv4jax.bench.costs import Cost
from dsv4jax.bench.trace import OTHER, STAGES, Profile
from dsv4jax.draft_statistics import BINS, DraftStatistics


class Report:
    """A JSON file that is whole after every row, so that a run that is cut short has written what it measured."""

    def __init__(self, path: str, **head: Any):
        devices = jax.devices()
        self.contents: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "devices": [len(devices), devices[0].device_kind],
            "jax": jax.__version__,
            **head,
        }
        self._path = Path(path)
        self._write()

    def add(self, section: str, row: Mapping[str, Any]) -> None:
        """Adds a row, writes the file and prints the row."""
        self.contents.setdefault(section, []).append(dict(row))
        self._write()
        shown = (f"{name} {_text(value)}" for name, value in row.items() if not isinstance(value, (list, dict)))
        print(f"{section}: {', '.join(shown)}", flush=True)

    def attempt(self, section: str, names: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
        """Adds the row `names` with what `measure` returns; if it fails, with its error, so that others can follow."""
        try:
            row = measure()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
        self.add(section, {**names, **row})

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.contents, indent=1) + "\n", encoding="utf-8")


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in aligned columns, one for each name that any row has; lists and the likes are left out."""
    names = list(dict.fromkeys(n for row in rows for n, value in row.items() if not isinstance(value, (list, dict))))
    lines = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


def reliability(statistics: DraftStatistics) -> list[dict[str, Any]]:
    """Reliability table of the confidence head, a row per bin with drafts in it.

    `survival` is the bin, `predicted` the mean survival there, that is the probability that a draft and all before it
    stand, and `accepted` the share that stood: they are equal for a head that knows. Where drafts are chosen by their
    confidences, only those that were chosen count.
    """
    verified, accepted = np.asarray(statistics.bin_verified), np.asarray(statistics.bin_accepted)
    predicted = np.asarray(statistics.predicted)
    return [
        {
            "survival": f"{i / BINS:.1f} to {(i + 1) / BINS:.1f}",
            "drafts": int(verified[i]),
            "predicted": float(predicted[i] / verified[i]),
            "accepted": float(accepted[i] / verified[i]),
        }
        for i in range(BINS)
        if verified[i]
    ]


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
