"""Products of one weight record with rows of FP8, as steps of `kernel`: E2M1 codes become E4M3 in registers."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.moe_experts import feed, ptx
from pallas_kernels.moe_experts.pack import CODE_WORDS, COLS, ROWS, SCALE_WORDS, TOKENS

TABLE = 0x3C383000, 0x4C484440
"""E4M3 of the E2M1 magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6; 8 more in each byte but the first is twice the value."""
TOP_EXPONENT = 6
"""The largest weights of a row are multiplied by 2^6 in their table: 6 becomes 384, of at most 448."""
BATCH = 2
"""Products of 32 input channels that a warpgroup has in flight per step; two steps overlap."""

_INT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=ptx.SCALAR)


def tops():
    """Tops of the two output channels of a thread."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,), return_type=(_INT, _INT))
    def run(_, ring):
        at = ptx.add(ptx.add(ptx.shared(ring), feed.WEIGHT_BYTES), _row())
        return tuple(
            mgpu.FragmentedArray.splat(ptx.load_byte(ptx.add(at, 8 * i)), (), is_signed=True) for i in range(2)
        )

    return run


def _row():
    """The first of the two output channels of a thread."""
    thread = ptx.thread()
    return ptx.add(ptx.mul(ptx.right(thread, 5), 16), ptx.right(ptx.both(thread, 31), 2))


def _accumulator(n: int):
    return plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, layout=plgpu.Layout._WGMMA_ACC_32BIT)


def zeros(n: int):
    @plgpu.inline_mgpu(return_type=_accumulator(n))
    def run(_):
        return ptx.warpgroup_array([ptx.real(0.0)] * (n // 2), n)

    return run


def multiply(blocks: int, wide: bool):
    """acc + one weight record times one slab of the rows."""
    n, groups = blocks * TOKENS, COLS // 32
    accumulator = plgpu.Layout._WGMMA_ACC_32BIT

    @plgpu.inline_mgpu(arg_types=(ptx.REF, ptx.REF, accumulator, ptx.SCALAR, ptx.SCALAR), return_type=_accumulator(n))
    def run(_, ring, rows, acc, *top):
        acc = ptx.warpgroup_values(acc)
        thread = ptx.thread()
        codes = ptx.add(ptx.shared(ring), ptx.mul(thread, 16))
        scales = ptx.add(ptx.shared(ring), 4 * CODE_WORDS)
        scales = ptx.load(ptx.add(scales, ptx.mul(ptx.right(thread, 2), 4 * SCALE_WORDS // 32)), 4, ptx.i32())
        rows = ptx.shared(rows)
        row_scales = ptx.add(ptx.add(rows, TOKENS * COLS), ptx.mul(ptx.both(thread, 3), 16))
        descriptor = _descriptor(ptx.uniform(rows))
        base = [ptx.sub(ptx.scalar(t), TOP_EXPONENT) for t in top]

        def table(group, row):
            if wide:
                return [ptx.const(word) for word in TABLE]
            byte = ptx.byte(scales[group // 4 * 2 + row], group % 4)
            return [
                ptx.add(ptx.mul(byte, each), ptx.sub(ptx.const(word), ptx.mul(base[row], each)))
                for word, each in zip(TABLE, (0x08080800, 0x08080808), strict=True)
            ]

        def issue(start):
            """Products of groups start..start+BATCH."""
            operands = []
            for pair in range(start // 2, (start + BATCH) // 2):
                words = ptx.load(ptx.add(codes, pair * 2048), 4, ptx.i32())
                for group in range(2):
                    tables = [table(2 * pair + group, row) for row in range(2)]
                    for word in words[2 * group : 2 * group + 2]:
                        operands += _e4m3(word, tables)
            operands = ptx.wgmma_fence(operands)
            results = []
            for i in range(BATCH):
                offset = arith.constant(descriptor.type, ir.IntegerAttr.get(descriptor.type, (start + i) * 16))
                results += ptx.wgmma(n, operands[4 * i : 4 * i + 4], arith.addi(descriptor, offset))
            ptx.wgmma_commit()
            return results

        def add(start, results):
            for pair in range(start // 2, (start + BATCH) // 2):
                for b in range(blocks):
                    address = ptx.add(row_scales, b * feed.ACTIVATION_BYTES + pair * 64)
                    factors = ptx.load(address, 4, ir.F32Type.get())
                    for i in range(2):
                        group = 2 * pair + i
                        for j in range(4):
                            index = 4 * b + j
                            part, factor = results[(group - start) * (n // 2) + index], factors[2 * i + j % 2]
                            if wide:
                                part = arith.mulf(part, factor)
                                factor = _e8m0(ptx.byte(scales[group // 4 * 2 + j // 2], group % 4))
                            acc[index] = llvm.intr_fma(part, factor, acc[index])

        results = issue(0)
        for start in range(0, groups, BATCH):
            following = issue(start + BATCH) if start + BATCH < groups else None
            add(start, ptx.wgmma_wait(0 if following is None else 1, results))
            results = following
        return ptx.warpgroup_array(acc, n)

    return run


def _e4m3(word, tables):
    """Two registers of E4M3 from 8 E2M1 codes: those of output channels r and r + 8."""
    magnitudes, sign = ptx.both(word, 0x77777777), 0x80808080
    high = arith.ori(ptx.permute(*tables[0], magnitudes), ptx.both(word, sign))
    low = arith.ori(ptx.permute(*tables[1], ptx.right(magnitudes, 16)), ptx.both(ptx.left(word, 4), sign))
    return high, low


def _e8m0(byte):
    """2^(byte - 127); 0 gives the subnormal number, 255 infinity."""
    return ptx.as_float(arith.maxui(ptx.left(byte, 23), ptx.const(0x00400000)))


def times_tops(n: int):
    """Sums of tables relative to the largest scale of a row, in full."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout._WGMMA_ACC_32BIT, ptx.SCALAR, ptx.SCALAR), return_type=_accumulator(n))
    def run(_, acc, *top):
        factors = [arith.mulf(_e8m0(ptx.scalar(t)), ptx.real(2.0**-TOP_EXPONENT)) for t in top]
        values = [arith.mulf(v, factors[i // 2 % 2]) for i, v in enumerate(ptx.warpgroup_values(acc))]
        return ptx.warpgroup_array(values, n)

    return run


def _descriptor(address):
    """Matrix descriptor of rows without swizzle: 128 bytes from 16 columns to the next, a record from 8 rows to the
    next."""
    i64 = ir.IntegerType.get_signless(64)
    fixed = (128 >> 4) << 16 | (feed.ACTIVATION_BYTES >> 4) << 32
    low = arith.extui(i64, ptx.both(ptx.right(address, 4), 0x3FFF))
    return arith.ori(low, arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))
