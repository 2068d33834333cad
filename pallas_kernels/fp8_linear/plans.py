"""How products are cut into blocks: chosen by shape and rows from measurements on an H200."""

import dataclasses

from dsv4jax.quant import ceil_div

STEP = 128
"""Channels of a step: one swizzled line of 128 bytes of the weight, four scale bytes that are read as one word."""
OUTPUTS = 64
"""Outputs of one product of a warpgroup."""
SCALE_WORDS = 64
"""Steps of a warpgroup at most: words of weight scales it keeps per 32 outputs."""
MAX_TILE_ROWS = 96
"""Rows of a block at most; more rows are several tiles, each of which reads the weight again."""
MAX_KERNEL_ROWS = 96
"""Rows up to which the kernel is the faster form."""
FEW_ROWS = 32
"""Up to here a block is 64 outputs wide and bound by the weights; beyond, its x is worth reading less often."""
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Plan:
    """Multiplying warpgroups of a block: `wide` tiles of 64 outputs x `tall` parts of the rows x `deep` turns in the
    steps of 128 channels. One more warpgroup copies."""

    wide: int = 1
    tall: int = 1
    deep: int = 1
    splits: int = 1
    """Blocks that share a tile of outputs, each with its part of the channels."""
    stages: int = 4
    """Steps in flight for each of the `deep` turns."""
    sets: int = 2
    """Products in flight within a warpgroup."""

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.wide * self.tall * self.deep

    @property
    def threads(self) -> int:
        """CUDA threads of a block."""
        return 128 * (self.consumers + 1)


_MEASURED = {
    (1792, 5120): (Plan(deep=2, splits=4, stages=5, sets=4), Plan(tall=2, splits=8, stages=4, sets=1)),
    (32768, 1280): (Plan(deep=1, splits=1, stages=5, sets=4), Plan(tall=2, splits=1, stages=4, sets=1)),
    (5120, 8192): (Plan(deep=2, splits=3, stages=5, sets=4), Plan(wide=2, tall=2, splits=3, stages=6)),
    (4608, 5120): (Plan(deep=1, splits=5, stages=6, sets=4), Plan(wide=2, tall=2, splits=3, stages=6)),
    (5120, 2304): (Plan(deep=2, splits=3, stages=3, sets=4), Plan(tall=2, splits=3, stages=4, sets=1)),
}
"""The fastest plans of those that were tried for weights [out, in], at 8 to 16 and at 96 rows."""


def tile_rows(rows: int, plan: Plan) -> int:
    """Rows of a block: all, if they fit, in parts that are multiples of 8."""
    part = 8 * plan.tall
    return ceil_div(min(rows, MAX_TILE_ROWS), part) * part


def choose_plan(rows: int, out: int, inner: int, grouped: bool = False) -> Plan:
    """The plan of a product with a weight [out, inner]; `grouped` with bfloat16 x.

    Beyond `MAX_KERNEL_ROWS` the plans are not tuned.
    """
    measured = _MEASURED.get((out, inner))
    if measured and not grouped and rows <= MAX_KERNEL_ROWS:
        return measured[rows > FEW_ROWS]
    steps = ceil_div(inner, STEP)
    if rows <= FEW_ROWS:
        # Two blocks fit a multiprocessor. A turn of a few steps would not fill its pipeline.
        splits = _splits(2 * MULTIPROCESSORS // ceil_div(out, OUTPUTS), steps, 6)
        deep = min(2, steps // splits)
        stages = 4 if grouped else max(2, min(5, ceil_div(steps, deep * splits)))
        return Plan(deep=max(deep, 1), splits=splits, stages=stages, sets=4)
    if out % (2 * OUTPUTS) and not grouped:
        blocks = ceil_div(rows, MAX_TILE_ROWS) * ceil_div(out, OUTPUTS)
        return Plan(tall=2, splits=_splits(2 * MULTIPROCESSORS // blocks, steps, 5), stages=4, sets=1)
    splits = _splits(MULTIPROCESSORS // (ceil_div(rows, MAX_TILE_ROWS) * ceil_div(out, 2 * OUTPUTS)), steps, 5)
    if grouped:
        return Plan(wide=2, splits=splits, stages=5)
    return Plan(wide=2, tall=2, splits=splits, stages=6)


def _splits(wanted: int, steps: int, least: int) -> int:
    """About `wanted` blocks with at least `least` steps each, but no more than a warpgroup has room for."""
    return max(1, min(wanted, steps // least), ceil_div(steps, SCALE_WORDS))
