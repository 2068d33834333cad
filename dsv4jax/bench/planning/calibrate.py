"""Constants of a machine from measured steps: how much slower than its rates each stage of a step is."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from dsv4jax.bench.planning.hardware import STAGES, Constant, Hardware, StageFactors
from dsv4jax.bench.results.result import Result, is_number
from dsv4jax.bench.steps.costs import Cost, StepShape, step_costs
from dsv4jax.config import ModelConfig

_LEAST = np.array([1.0, 1.0, 1.0, 0.0])
_FIXED = 10e-6
"""Seconds per layer by which `fixed` weighs as much as a factor by 1."""


def calibrate(hardware: Hardware, result: Result, cfg: ModelConfig) -> Hardware:
    """The hardware with the rates and stage factors that a measurement of forward steps found; the rest as it was.

    Stages that were not measured keep their factors, as do links, gaps and the host, of which such steps say nothing.

    Args:
      result: of `bench_steps.py --profile`, of several shapes: factors that one shape leaves open stay at 1.
      cfg: of the model that ran.

    Raises:
      ValueError: the result is of another experiment or model, or lacks what is needed; names it.
    """
    if result.experiment != "forward":
        raise ValueError(f"experiment = {result.experiment!r}: must be 'forward'")
    ceilings = result.ceiling or {}
    for name in ("copy", "fp8", "bf16"):
        if not ceilings.get(name, 0) > 0:
            raise ValueError(f"ceiling: {name} = {ceilings.get(name)!r}: must be a rate greater than 0")
    steps = [row for row in result.rows.get("steps", []) if "error" not in row]
    shapes = {row["step"]: _shape(row) for row in steps}
    costs = {step: step_costs(cfg, shape) for step, shape in shapes.items()}
    for row in steps:
        _require_model(row, costs[row["step"]], ceilings)
    measured = collections.defaultdict(list)
    for row in result.rows.get("stages", []):
        if row["step"] not in shapes:
            raise ValueError(f"stages: step {row['step']!r}: must be one of {tuple(shapes)}")
        if _is_measured(row):
            measured[row["stage"], row["step"]].append(row["microseconds"])
    if not measured:
        raise ValueError("stages: no time of any stage; steps must have been profiled")
    points = collections.defaultdict(list)
    for (stage, step), microseconds in measured.items():
        if stage in costs[step]:
            points[stage].append((costs[step][stage], 1e-6 * statistics.median(microseconds)))
    source = f"{result.conditions.get('command', 'bench_steps.py')}, {result.conditions.get('date', 'no date')}"
    stages = dict(hardware.stages)
    for stage, found in points.items():
        factors = fit_factors(found, ceilings)
        stages[stage] = StageFactors(*factors, "measured", f"{source}: fitted to {len(found)} steps")
    rates = {"memory_bandwidth": "copy", "fp8_rate": "fp8", "bf16_rate": "bf16"}
    constants = {name: Constant(float(ceilings[rate]), "measured", source) for name, rate in rates.items()}
    return dataclasses.replace(hardware, name=f"{hardware.name}, calibrated", stages=stages, **constants)


def calibration_errors(hardware: Hardware, result: Result, cfg: ModelConfig) -> list[dict[str, Any]]:
    """Each profiled step of a result: what its stages took, what they take by the hardware's factors, and the error of
    that. Raises as `calibrate`."""
    rows = []
    rounds = {row["step"]: row for row in result.rows.get("steps", []) if "error" not in row}
    for row in rounds.values():
        measured = collections.defaultdict(list)
        for one in result.rows.get("stages", []):
            if one["step"] == row["step"] and _is_measured(one):
                measured[one["stage"]].append(one["microseconds"])
        if not measured:
            continue
        costs = step_costs(cfg, _shape(row))
        microseconds = sum(statistics.median(found) for found in measured.values())
        ours = 1e6 * sum(sum(hardware.stage_seconds(stage, costs.get(stage, Cost()))) for stage in measured)
        errors = {"measured_ms": microseconds / 1e3, "model_ms": ours / 1e3, "error": ours / microseconds - 1}
        rows.append({"step": row["step"], **errors})
    return rows


def fit_factors(points: Sequence[tuple[Cost, float]], ceilings: Mapping[str, float]) -> tuple[float, ...]:
    """(memory, fp8, bf16, fixed) of `StageFactors` that come nearest to measured seconds, relative errors squared.

    What the points leave open stays as near to 1, 1, 1 and 0 as it can.

    Args:
      points: what a stage had to do, and seconds it took.
      ceilings: see `Cost.floor`.

    Raises:
      ValueError: no points, or one without time.
    """
    if not points:
        raise ValueError("points: must be at least one")
    rows, seconds = [], np.array([measured for _, measured in points])
    if not (seconds > 0).all():
        raise ValueError(f"points: {seconds.min():g} seconds: must be greater than 0")
    for cost, _ in points:
        rows.append(
            [cost.bytes / ceilings["copy"], cost.fp8 / ceilings["fp8"], cost.bf16 / ceilings["bf16"], cost.layers]
        )
    scale = np.array([1.0, 1.0, 1.0, _FIXED])
    relative = np.array(rows) * scale / seconds[:, None]
    least = _LEAST / scale
    # A weak pull towards the least factors decides what is open.
    system = np.concatenate([relative, 1e-5 * np.eye(4)])
    target = np.concatenate([1 - relative @ least, np.zeros(4)])
    solution = lsq_linear(system, target, (0, np.inf), method="bvls").x
    return tuple((scale * (least + solution)).tolist())


def _is_measured(row: Mapping[str, Any]) -> bool:
    """Whether a row of a profile has a time of a stage that hardware has factors of."""
    return row.get("stage") in STAGES and (row.get("microseconds") or 0) > 0


def _require_model(row: Mapping[str, Any], costs: Mapping[str, Cost], ceilings: Mapping[str, float]) -> None:
    """Raises ValueError unless the floor of a measured step is that of the model that these costs are of."""
    found, ours = row.get("floor_milliseconds"), sum(cost.floor(ceilings) for cost in costs.values()) / 1e3
    if not is_number(found) or not math.isclose(found, ours, rel_tol=1e-6):
        raise ValueError(
            f"steps: {row['step']!r}: floor_milliseconds = {found!r}: must be {ours:.6g}, as of the given model, which"
            " must be the one that was measured"
        )


def _shape(row: Mapping[str, Any]) -> StepShape:
    try:
        return StepShape(**row["shape"])
    except (KeyError, TypeError):
        names = [field.name for field in dataclasses.fields(StepShape)]
        raise ValueError(
            f"steps: {row.get('step')!r}: shape = {row.get('shape')!r}: must be a mapping with {tuple(names)}"
        ) from None
