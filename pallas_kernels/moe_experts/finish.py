"""The end of a unit of `kernel`: sums of its warpgroups are added through shared memory, and the result is written."""

import functools

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from pallas_kernels.moe_experts import feed, ptx
from pallas_kernels.moe_experts.pack import ROWS, TOKENS

SUM_STRIDE = ROWS + 4
"""Words between the rows of a partial sum in shared memory, so that accumulator stores meet no bank twice."""
CONSUMERS_BARRIER = 9
"""Hardware barrier of the computing warpgroups; Mosaic uses 0..warpgroups."""


def _exchange(consumers: int, b: int, sums, acc, warpgroup, reader, split: int):
    """Hands the sums of a warpgroup for 8 rows to the warps that finish them; the row of this warp, and its lane.

    Channels of the low rows of a fragment go `split` places behind those of the high rows.
    """
    thread = ptx.thread()
    warp, lane = ptx.right(thread, 5), ptx.both(thread, 31)
    channel = ptx.add(ptx.mul(warp, 16 if split == 8 else 8), ptx.right(lane, 2))
    row = ptx.add(ptx.mul(warpgroup, TOKENS), ptx.left(ptx.both(lane, 3), 1))
    target = ptx.add(sums, ptx.left(ptx.add(ptx.mul(row, SUM_STRIDE), channel), 2))
    for j, value in enumerate(ptx.warpgroup_values(acc)[4 * b : 4 * b + 4]):
        ptx.store(value, ptx.add(target, 4 * (j % 2 * SUM_STRIDE + j // 2 * split)))
    ptx.asm(f"barrier.sync {CONSUMERS_BARRIER}, {128 * consumers};", "")
    return ptx.add(ptx.mul(reader, 4), warp), lane


def _total(consumers: int, source, count: int):
    """Sum over the warpgroups of `count` neighbouring words, in a fixed order."""
    parts = [ptx.load(ptx.add(source, c * TOKENS * SUM_STRIDE * 4), count, ir.F32Type.get()) for c in range(consumers)]
    return [functools.reduce(arith.addf, column) for column in zip(*parts, strict=True)]


def finish_rows(consumers, blocks, b, sums, acc, warpgroup, reader, row_block, channels, refs):
    """Writes 8 rows of 64 channels as bfloat16: a warp writes one row."""
    (out,) = refs
    width = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(ptx.REF, ptx.REF, plgpu.Layout._WGMMA_ACC_32BIT, *(ptx.SCALAR,) * 4))
    def finish(_, sums, out, acc, *scalars):
        warpgroup, reader, row_block, channels = map(ptx.scalar, scalars)
        sums = ptx.shared(sums)
        row, lane = _exchange(consumers, b, sums, acc, warpgroup, reader, 8)
        with mgpu.utils.when(ptx.less(row, ptx.const(TOKENS))):
            source = ptx.add(sums, ptx.add(ptx.mul(row, 4 * SUM_STRIDE), ptx.mul(lane, 8)))
            word = ptx.to_bf16x2(*_total(consumers, source, 2))
            row = ptx.add(ptx.mul(row_block, TOKENS), row)
            place = ptx.add(ptx.mul(row, 2 * width), ptx.add(ptx.mul(channels, 2 * ROWS), ptx.mul(lane, 4)))
            ptx.store_global(word, ptx.address(out), place)

    finish(sums, out, acc, warpgroup, reader, row_block, channels)


def finish_activation(consumers, blocks, b, sums, acc, warpgroup, reader, row_block, channels, refs, *, activation):
    """Writes 32 channels of 8 rows of SwiGLU, one group of an activation record: a warp has a row, a lane a channel."""
    routing, out = refs
    slabs = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 3 + (plgpu.Layout._WGMMA_ACC_32BIT,) + (ptx.SCALAR,) * 4)
    def finish(_, sums, routing, out, acc, *scalars):
        warpgroup, reader, row_block, channels = map(ptx.scalar, scalars)
        sums = ptx.shared(sums)
        row, lane = _exchange(consumers, b, sums, acc, warpgroup, reader, 32)
        with mgpu.utils.when(ptx.less(row, ptx.const(TOKENS))):
            source = ptx.add(sums, ptx.add(ptx.mul(row, 4 * SUM_STRIDE), ptx.mul(lane, 4)))
            gate, up = (ptx.round_bf16(_total(consumers, ptx.add(source, 128 * i), 1)[0]) for i in range(2))
            z = _swiglu(gate, up, activation.limit)
            if activation.weighted:
                place = ptx.mul(ptx.add(ptx.mul(row_block, TOKENS), row), 4)
                z = arith.mulf(z, ptx.load_global(ptx.address(routing), place, 1, ir.F32Type.get())[0])
            z = ptx.round_bf16(z)
            largest = ptx.absolute(z)
            for distance in (16, 8, 4, 2, 1):
                largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
            scale, inverse = ptx.fp8_scale(largest)
            element = ptx.to_e4m3(arith.mulf(z, inverse))
            base, group = ptx.address(out), ptx.both(channels, 7)
            record = ptx.add(ptx.mul(row_block, slabs), ptx.right(channels, 3))
            record = ptx.mul(record, feed.ACTIVATION_BYTES)
            place = ptx.add(ptx.mul(group, 256), ptx.add(ptx.mul(ptx.right(lane, 4), 128), ptx.mul(row, 16)))
            ptx.store_global(element, base, ptx.add(record, ptx.add(place, ptx.both(lane, 15))))
            with mgpu.utils.when(ptx.equal(lane, 0)):
                ptx.store_global(scale, base, ptx.add(record, ptx.scale_offset(group, row)))

    finish(sums, routing, out, acc, warpgroup, reader, row_block, channels)


def _swiglu(gate, up, limit: float):
    limit = ptx.real(limit)
    gate = arith.minimumf(gate, limit)
    up = arith.minimumf(arith.maximumf(up, arith.negf(limit)), limit)
    sigmoid = arith.divf(ptx.real(1.0), arith.addf(ptx.real(1.0), math.exp(arith.negf(gate))))
    return arith.mulf(arith.mulf(gate, sigmoid), up)
