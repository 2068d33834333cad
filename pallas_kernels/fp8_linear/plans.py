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
REGISTERS = 65536
"""Of a multiprocessor."""
COPYING_REGISTERS = 24
"""Of a thread that copies, where the multiplying ones need more than an equal share: the least there is."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Multiplying warpgroups of a block: `wide` side by side x `deep` turns in the steps of 128 channels. One more
    warpgroup copies."""

    wide: int = 1
    tiles: int = 1
    """Tiles of 64 outputs of a warpgroup: two share the scales of x that a thread reads."""
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
        return self.wide * self.deep

    @property
    def width(self) -> int:
        """Outputs of a block."""
        return OUTPUTS * self.wide * self.tiles

    @property
    def threads(self) -> int:
        """CUDA threads of a block that multiply."""
        return 128 * self.consumers

    def registers(self, rows: int) -> int | None:
        """Registers of a multiplying thread that takes over what the copying warpgroup does not need; None if an equal
        share will do: one of two warpgroups is all a thread can have, one of three takes sums and products for these
        rows."""
        if self.consumers == 1 or (self.consumers == 2 and (self.tiles + self.sets) * rows <= 2 * MAX_TILE_ROWS):
            return None
        share = REGISTERS // (self.threads + 128) // 8 * 8
        return (share * (self.consumers + 1) - COPYING_REGISTERS) // self.consumers // 8 * 8


_MEASURED = {
    (1792, 5120): (Plan(deep=2, splits=4, stages=5, sets=4), Plan(deep=2, splits=4)),
    (32768, 1280): (Plan(stages=5, sets=3), Plan(wide=2, tiles=2, stages=3)),
    (4096, 1280): (Plan(deep=2, stages=5, sets=4), Plan(deep=3, stages=3, sets=1)),
    (5120, 8192): (Plan(deep=2, splits=3, stages=5, sets=4), Plan(tiles=2, deep=2, splits=3, stages=3)),
    (4608, 5120): (Plan(splits=5, stages=6, sets=4), Plan(tiles=2, deep=2, splits=3, stages=3)),
    (5120, 2304): (Plan(deep=2, splits=3, stages=3, sets=4), Plan(deep=3, stages=3, sets=1)),
}
"""The fastest plans of those that were tried for weights [out, in], at 8 to 16 and at 96 rows."""


def tile_rows(rows: int) -> int:
    """Rows of a block: all, if they fit, to a multiple of 8."""
    return ceil_div(min(rows, MAX_TILE_ROWS), 8) * 8


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
    wide = 1 if out % (2 * OUTPUTS) else 2
    blocks = ceil_div(rows, MAX_TILE_ROWS) * ceil_div(out, wide * OUTPUTS)
    splits = _splits(MULTIPROCESSORS // blocks, steps, 5)
    if grouped:
        return Plan(wide=wide, splits=splits, stages=5)
    return Plan(tiles=wide, deep=min(2, steps // splits), splits=splits, stages=3)


def _splits(wanted: int, steps: int, least: int) -> int:
    """About `wanted` blocks with at least `least` steps each, but no more than a warpgroup has room for."""
    return max(1, min(wanted, steps // least), ceil_div(steps, SCALE_WORDS))
