"""What a computing warpgroup of `prefill_matmul` does: products with weights that become bfloat16 in registers, and
the rows of a finished unit."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import CODE_WORDS, ROWS, TOKENS
from pallas_kernels.moe_experts.prefill_plan import ROW_BYTES, SLABS, WEIGHT_BYTES, Barriers, PrefillPlan

UPPER_BYTES, LOWER_BYTES = (0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)
"""Of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in bfloat16."""
STAGING_STRIDE, STAGING_ROWS = 48, 16
"""Bytes between rows, and rows, of what a warp transposes at a time."""


def _accumulator(plan: PrefillPlan):
    shape = (ROWS, plan.parts * plan.blocks * TOKENS)
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout._WGMMA_ACC_32BIT)


def zeros(plan: PrefillPlan):
    @plgpu.inline_mgpu(return_type=_accumulator(plan))
    def run(_):
        n = plan.parts * plan.blocks * TOKENS
        return ptx.warpgroup_array([ptx.real(0.0)] * (n // 2), n)

    return run


def multiply(plan: PrefillPlan, size: int):
    """acc + one weight record of each part times four slabs of rows."""
    n, width = size * TOKENS, plan.blocks * TOKENS // 2

    @plgpu.inline_mgpu(
        arg_types=(ptx.REF,) * 3 + (ptx.SCALAR,) * 4 + (plgpu.Layout._WGMMA_ACC_32BIT,),
        return_type=_accumulator(plan),
    )
    def run(_, barriers, weights, rows, w_slot, w_phase, x_slot, x_phase, acc):
        w_slot, w_phase, x_slot, x_phase = (ptx.scalar(v) for v in (w_slot, w_phase, x_slot, x_phase))
        bars, thread = Barriers(plan, barriers), ptx.thread()
        acc = ptx.warpgroup_values(acc)
        acc = [acc[p * width : (p + 1) * width] for p in range(plan.parts)]
        weights, rows = ptx.shared(weights), ptx.shared(rows)
        codes = ptx.add(weights, ptx.mul(thread, 16))
        scale_words = ptx.add(ptx.add(weights, 4 * CODE_WORDS), ptx.mul(ptx.right(thread, 2), 16))

        ptx.barrier_wait(bars.weights_full(w_slot), w_phase)
        scales = [ptx.load(ptx.add(scale_words, p * WEIGHT_BYTES), 4, ptx.i32()) for p in range(plan.parts)]
        previous = None
        for slab in range(SLABS):
            words = [ptx.load(ptx.add(codes, p * WEIGHT_BYTES + slab * 2048), 4, ptx.i32()) for p in range(plan.parts)]
            ptx.barrier_wait(bars.rows_full(x_slot), x_phase)
            descriptor = _descriptor(ptx.add(rows, ptx.mul(x_slot, plan.blocks * ROW_BYTES)))
            for step in range(4):
                group = 2 * slab + step // 2
                operands = []
                for p in range(plan.parts):
                    factors = [_factor(scales[p][group // 4 * 2 + row], group % 4) for row in range(2)]
                    operands += _weights(words[p][step], factors)
                operands = ptx.wgmma_fence(operands)
                here = ptx.add64(descriptor, 2 * step)
                for p in range(plan.parts):
                    acc[p][: n // 2] = _wgmma(n, acc[p][: n // 2], operands[4 * p : 4 * p + 4], here)
                ptx.wgmma_commit()
                ptx.asm("wgmma.wait_group.sync.aligned 1;", "")
                if step == 0 and previous is not None:
                    ptx.warp_arrive(bars.rows_empty(previous))
                    if slab == SLABS - 1:
                        # Only here are the loads of words complete: an arrival does not wait for loads before it,
                        # and a copy is not ordered behind them otherwise.
                        ptx.warp_arrive(bars.weights_empty(w_slot))
            previous = x_slot
            x_slot = ptx.add(x_slot, 1)
            wraps = ptx.equal(x_slot, plan.row_stages)
            x_slot = arith.select(wraps, ptx.const(0), x_slot)
            x_phase = arith.select(wraps, arith.xori(x_phase, ptx.const(1)), x_phase)
        results = ptx.wgmma_wait(0, [v for part in acc for v in part[: n // 2]])
        acc = [results[p * n // 2 : (p + 1) * n // 2] + part[n // 2 :] for p, part in enumerate(acc)]
        ptx.warp_arrive(bars.rows_empty(previous))
        return ptx.warpgroup_array([v for part in acc for v in part], 2 * plan.parts * width)

    return run


def _product(a, b):
    """Two bfloat16 products."""
    return ptx.pure("mul.rn.bf16x2 $0, $1, $2;", [("r", a), ("r", b)])


def _factor(word, byte: int):
    """2^(b - 127), twice, from UE8M0 byte `byte` of a word; b = 0 gives the subnormal number, b = 255 infinity."""
    pair = ptx.mul(ptx.both(ptx.right(word, 8 * byte), 255), 0x00800080)
    return arith.maxui(pair, ptx.const(0x00400040))


def _weights(word, factors):
    """The four registers of an m64k16 A operand from a word of codes and the factors of channels r and r + 8.

    Byte permutations look up the upper and the lower bytes of four magnitudes.
    """
    magnitudes = ptx.both(word, 0x77777777)
    rows = []
    for i, factor in enumerate(factors):
        four = ptx.right(magnitudes, 16 * i)
        upper, lower = (ptx.permute(ptx.const(a), ptx.const(b), four) for a, b in (UPPER_BYTES, LOWER_BYTES))
        upper = arith.ori(upper, ptx.both(ptx.left(word, 4 * i), 0x80808080))
        rows.append([_product(ptx.permute(lower, upper, ptx.const(s)), factor) for s in (0x6240, 0x7351)])
    return [rows[i][j] for j in range(2) for i in range(2)]


def _descriptor(address):
    """Matrix descriptor of rows in the 128-byte swizzle, 1024 bytes from 8 rows to the next."""
    i64 = ir.IntegerType.get_signless(64)
    fixed = 1 << 16 | (ROW_BYTES >> 4) << 32 | 1 << 62
    low = arith.extui(i64, ptx.both(ptx.right(address, 4), 0x3FFF))
    return arith.ori(low, arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))


def _wgmma(n: int, acc, a, descriptor):
    """acc + A B of one m64 x n x k16 product of bfloat16 operands, A in registers."""
    count = n // 2
    take = [f"${i}" for i in range(2 * count + 5)]
    return ptx.asm(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{','.join(take[:count])}}}, "
        f"{{{','.join(take[2 * count : 2 * count + 4])}}}, {take[-1]}, p, 1, 1, 0; }}",
        "f" * count,
        [*(("r", r) for r in a), ("l", descriptor)],
        tied=acc,
    )


def _sixteen(lane, bit: int):
    """16 where that bit of the lane's number is set."""
    return ptx.left(ptx.both(ptx.right(lane, bit), 1), 4)


def finish_rows(plan: PrefillPlan, out_channels: int):
    """Writes the rows of a tile as bfloat16. Each warp transposes 16 rows x 16 channels at a time in shared memory."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF, ptx.REF, ptx.SCALAR, plgpu.Layout._WGMMA_ACC_32BIT))
    def run(_, staging, out, blocks, acc):
        blocks, acc, thread = ptx.scalar(blocks), ptx.warpgroup_values(acc), ptx.thread()
        warp, lane = ptx.right(thread, 5), ptx.both(thread, 31)
        buffer = STAGING_ROWS * STAGING_STRIDE
        staging = ptx.add(ptx.shared(staging), ptx.mul(warp, 2 * buffer))
        row = ptx.add(ptx.both(lane, 7), ptx.left(ptx.right(lane, 4), 3))
        put = ptx.add(staging, ptx.add(ptx.mul(row, STAGING_STRIDE), _sixteen(lane, 3)))
        row = ptx.right(lane, 1)
        take = ptx.add(staging, ptx.add(ptx.mul(row, STAGING_STRIDE), _sixteen(lane, 0)))
        stride = 2 * out_channels
        base = ptx.address(out)
        offset = ptx.add(ptx.mul(row, stride), ptx.add(ptx.left(warp, 5), _sixteen(lane, 0)))
        block = ptx.right(lane, 4)
        turn, size = 0, plan.blocks
        for pair in range((size + 1) // 2):
            for p in range(plan.parts):
                values = acc[(p * size + 2 * pair) * 4 :][: 4 * min(2, size - 2 * pair)]
                words = [ptx.to_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
                words += [ptx.const(0)] * (4 - len(words))
                ptx.asm(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                    "",
                    [("r", ptx.add(put, turn * buffer)), *(("r", v) for v in words)],
                )
                ptx.asm("bar.warp.sync 0xffffffff;", "")
                words = ptx.asm(
                    "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", [("r", ptx.add(take, turn * buffer))]
                )
                with mgpu.utils.when(ptx.less(ptx.add(block, 2 * pair), blocks)):
                    target = ptx.add(offset, 16 * pair * stride + p * ROWS * 2)
                    target = arith.addi(base, arith.extui(base.type, target))
                    ptx.asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", [("l", target), *(("r", v) for v in words)])
                turn ^= 1

    return run
