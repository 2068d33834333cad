"""Constants of a machine from measured steps: how much slower than its floor each stage of a step is."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import lsq_linear

from dsv4jax.bench.costs import Cost

_LEAST = np.array([1.0, 1.0, 1.0, 0.0])
_FIXED = 10e-6
"""Seconds per layer by which `fixed` weighs as much as a factor by 1."""


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
    ridge = 1e-3 * np.eye(4)
    least = _LEAST / scale
    system = np.concatenate([relative, ridge])
    target = np.concatenate([np.ones(len(points)) - relative @ least, np.zeros(4)])
    solution = lsq_linear(system, target, (0, np.inf), method="bvls").x
    return tuple((scale * (least + solution)).tolist())
