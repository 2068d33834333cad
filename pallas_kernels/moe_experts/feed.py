"""What feeds the expert matmul: one thread that copies weight records, and the rows of each new tile, into a ring."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import ACTIVATION_WORDS, ROWS, WEIGHT_WORDS
from pallas_kernels.topk import simt

WEIGHT_BYTES, ACTIVATION_BYTES = 4 * WEIGHT_WORDS, 4 * ACTIVATION_WORDS
SLOT_BYTES = WEIGHT_BYTES + ROWS
"""A weight record, and behind the first that a warpgroup has of a unit the tops of its output channels."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a kernel: `stages` slots of the ring, `consumers` computing warpgroups, `slabs` records of a unit,
    `channel_tiles` units of a tile, `blocks` most blocks of 8 rows of a tile."""

    stages: int
    consumers: int
    slabs: int
    channel_tiles: int
    blocks: int


def feed(shape: Shape, *arguments) -> None:
    """Copies the records of units first..last, one slab after the other."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 9 + (ptx.SCALAR,) * 2)
    def run(_, group, block, count, x, w, tops, ring, rows, barriers, first, last):
        m = simt.Machine(128)
        tables = [simt.array(a) for a in (group, block, count)]
        sources = [simt.Lane(ptx.address(a)) for a in (x, w, tops)]
        targets = [simt.Lane(ptx.shared(a)) for a in (ring, rows, barriers)]
        with m.when((m.tid & 127) == 0):
            _feed(m, shape, *tables, *sources, *targets, simt.scalar(first), simt.scalar(last))

    run(*arguments)


def _feed(m, shape, group, block, count, x, w, tops, ring, rows, barriers, first, last):
    slabs, stages = shape.slabs, shape.stages

    def unit_step(unit, slot, phase, previous):
        tile = simt.Lane(arith.divui(unit.value, ptx.const(shape.channel_tiles)))
        place = m.load(group, tile) * shape.channel_tiles + unit - tile * shape.channel_tiles
        first_record = w + _wide(place) * (slabs * WEIGHT_BYTES)
        unit_tops = tops + _wide(place) * ROWS
        first_rows = x + _wide(m.load(block, tile)) * (slabs * ACTIVATION_BYTES)
        fresh = m.where(tile != previous, m.load(count, tile), m.u32(0))

        def slab_step(slab, slot, phase):
            full = barriers + slot * 8
            # In the first round every slot is free: the phase before the first counts as completed.
            ptx.barrier_wait((full + 8 * stages).value, (phase ^ 1).value)
            target = ring + slot * SLOT_BYTES
            size = m.where(slab < shape.consumers, m.u32(SLOT_BYTES), m.u32(WEIGHT_BYTES))
            ptx.barrier_expect(full.value, (size + fresh * ACTIVATION_BYTES).value)
            record = first_record + _wide(slab * WEIGHT_BYTES)
            ptx.bulk_copy(target.value, record.value, WEIGHT_BYTES, full.value)
            with m.when(slab < shape.consumers):
                ptx.bulk_copy((target + WEIGHT_BYTES).value, unit_tops.value, ROWS, full.value)
            for b in range(shape.blocks):
                with m.when(fresh > b):
                    target = rows + (slab * shape.blocks + b) * ACTIVATION_BYTES
                    source = first_rows + _wide((slab + b * slabs) * ACTIVATION_BYTES)
                    ptx.bulk_copy(target.value, source.value, ACTIVATION_BYTES, full.value)
            around = slot == stages - 1
            return [slab + 1, m.where(around, m.u32(0), slot + 1), m.where(around, phase ^ 1, phase)]

        _, slot, phase = m.while_loop(lambda slab, *_: slab < slabs, slab_step, [m.u32(0), slot, phase])
        return [unit + 1, slot, phase, tile]

    start = [first, m.u32(0), m.u32(0), m.u32(0xFFFFFFFF)]
    m.while_loop(lambda unit, *_: unit < last, unit_step, start)


def _wide(a):
    return simt.Lane(arith.extui(ir.IntegerType.get_signless(64), a.value))
