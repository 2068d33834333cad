"""Device code of the hyper-connection kernels for which Pallas has no primitive: scalars of a thread, whole rows."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
ROW_TILE = 64
CHANNELS = 1024
"""Channels of a row per warpgroup: 8 per thread."""
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT
EIGHT = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=8)
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def f32(value: float):
    return arith.constant(ir.F32Type.get(), float(value))


def block_thread():
    return arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))


def thread():
    """Index of the thread in its warpgroup."""
    return arith.remui(block_thread(), i32(128))


def asm(text: str, operands, result=None, constraints: str = ""):
    """Volatile PTX."""
    kind = result or ir.Type.parse("!llvm.void")
    return llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=True, asm_dialect=0)


def pointer(ref, index, size: int = 4):
    """Address of element `index`: 64 bits in device memory, 32 in shared."""
    shared = mgpu.utils.is_smem_ref(ref)
    kind = ir.IntegerType.get_signless(32 if shared else 64)
    index = index if shared else arith.extui(kind, index)
    offset = arith.muli(index, arith.constant(kind, size))
    return arith.addi(llvm.ptrtoint(kind, mgpu.utils.memref_ptr(ref)), offset)


def load(ref, index):
    space, kind = ("shared", "r") if mgpu.utils.is_smem_ref(ref) else ("global", "l")
    return asm(f"ld.{space}.f32 $0, [$1];", [pointer(ref, index)], ir.F32Type.get(), f"=f,{kind}")


def store(ref, index, value) -> None:
    space, kind = ("shared", "r") if mgpu.utils.is_smem_ref(ref) else ("global", "l")
    asm(f"st.{space}.f32 [$0], $1;", [pointer(ref, index), value], None, f"{kind},f")


def total(values):
    """Pairwise sum."""
    values = list(values)
    while len(values) > 1:
        pairs = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def coefficients(rows: int):
    """The mix of a tile of rows as 24 arrays [64]: pre, post, residual by rows. Rows past the end repeat the last."""
    one = plgpu.ShapeDtypeStruct((ROW_TILE,), jnp.float32, layout=PER_ROW)

    @plgpu.inline_mgpu(arg_types=(REF, REF, REF, SCALAR), return_type=[one] * MIXES)
    def run(_, pre, post, residual, tile):
        warp, lane = arith.divui(thread(), i32(32)), arith.remui(thread(), i32(32))
        row = arith.addi(arith.muli(tile.registers.item(), i32(ROW_TILE)), arith.muli(warp, i32(16)))
        row = arith.addi(row, arith.divui(lane, i32(4)))
        f32_type = ir.F32Type.get()
        four = llvm.StructType.get_literal([f32_type] * STREAMS)
        by_row = []
        for half in range(2):
            own = arith.minui(arith.addi(row, i32(8 * half)), i32(rows - 1))
            values = []
            for ref, count in ((pre, 1), (post, 1), (residual, STREAMS)):
                for k in range(count):
                    at = pointer(ref, arith.addi(arith.muli(own, i32(count)), i32(k)), 4 * STREAMS)
                    text = "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];"
                    loaded = asm(text, [at], four, "=f,=f,=f,=f,l")
                    values += [llvm.extractvalue(f32_type, loaded, [i]) for i in range(STREAMS)]
            by_row.append(values)
        layout = PER_ROW.to_mgpu()
        kind = ir.VectorType.get((1,), f32_type)
        arrays = []
        for values in zip(*by_row, strict=True):
            registers = np.empty(layout.registers_shape((ROW_TILE,)), object)
            registers.flat = [vector.broadcast(kind, value) for value in values]
            arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return arrays

    return run


def sum_squares(workers: int):
    """Sum of squares over a row that the first `workers` warpgroups hold, 8 channels per thread."""

    @plgpu.inline_mgpu(arg_types=(EIGHT, REF), return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR))
    def run(_, x, sums):
        values = [llvm.extractelement(v, i32(i)) for v in x.registers.flat for i in range(v.type.shape[0])]
        square = total(arith.mulf(v, v) for v in values)
        for distance in (16, 8, 4, 2, 1):
            text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
            square = arith.addf(square, asm(text, [square], ir.F32Type.get(), "=f,f"))
        store(sums, arith.divui(block_thread(), i32(32)), square)  # All lanes hold the same value.
        asm(f"bar.sync 15, {128 * workers};", [])
        return mgpu.FragmentedArray.splat(total(load(sums, i32(i)) for i in range(4 * workers)), ())

    return run


def quantize(rows: int, hidden: int):
    """FP8 of a warpgroup's 1024 channels of one row: four neighbouring threads hold a group of 32."""

    @plgpu.inline_mgpu(arg_types=(EIGHT, REF, REF, SCALAR, SCALAR))
    def run(_, y, elements, scales, row, wg):
        (packed,) = y.registers.flat
        words = mgpu.utils.bitcast(packed, ir.VectorType.get((4,), ir.IntegerType.get_signless(32)))
        words = [llvm.extractelement(words, i32(i)) for i in range(4)]
        row, wg = row.registers.item(), wg.registers.item()
        channel = arith.addi(arith.muli(wg, i32(CHANNELS)), arith.muli(thread(), i32(8)))
        at = arith.addi(arith.muli(row, i32(hidden)), channel)
        scale_at = arith.addi(arith.muli(arith.divui(channel, i32(32)), i32(rows)), row)
        operands = [pointer(elements, at, 1), pointer(scales, scale_at), *words, thread()]
        asm(_QUANTIZE, operands, None, "l,l,r,r,r,r,r")

    return run


def _quantize_text() -> str:
    """PTX. Operands: addresses of the elements and of the scale, four words of two bfloat16, the thread."""
    text = "{ .reg .pred p; .reg .b32 m, t, s, lo, hi; .reg .b16 a, b; .reg .f32 f<8>, inv;\n"
    for i in range(4):
        text += f"shl.b32 t, ${2 + i}, 16; mov.b32 f{2 * i}, t;\n"
        text += f"and.b32 t, ${2 + i}, 0xffff0000; mov.b32 f{2 * i + 1}, t;\n"
    # The bits of magnitudes order as integers. At least 1e-4, as the format wants.
    text += "mov.b32 m, 0x38d1b717;\n"
    for i in range(8):
        text += f"mov.b32 t, f{i}; and.b32 t, t, 0x7fffffff; max.u32 m, m, t;\n"
    for step in (1, 2):
        text += f"shfl.sync.bfly.b32 t, m, {step}, 31, 0xffffffff; max.u32 m, m, t;\n"
    # The power of two not below m/448, and its inverse.
    text += (
        "mov.b32 inv, m; mul.rn.f32 inv, inv, 0f3b124925; mov.b32 s, inv;\n"
        "add.u32 s, s, 0x7fffff; and.b32 s, s, 0xff800000; sub.u32 t, 0x7f000000, s; mov.b32 inv, t;\n"
    )
    for i in range(8):
        text += f"mul.rn.f32 f{i}, f{i}, inv;\n"
    for half, word in ((0, "lo"), (4, "hi")):
        for pair, register in ((0, "a"), (2, "b")):
            text += f"cvt.rn.satfinite.e4m3x2.f32 {register}, f{half + pair + 1}, f{half + pair};\n"
        text += f"mov.b32 {word}, {{a, b}};\n"
    text += "st.global.v2.b32 [$0], {lo, hi};\n"
    return text + "and.b32 t, $6, 3; setp.eq.u32 p, t, 0; @p st.global.b32 [$1], s; }"


_QUANTIZE = _quantize_text()
