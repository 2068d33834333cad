"""The PTX that the expert kernels need and Pallas has no primitive for, as functions of MLIR values.

Pallas barriers count one arrival per thread and its copies go through tensor maps; the rings of the matmuls want one
arrival per warp and flat bulk copies.
"""

from collections.abc import Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.moe_experts.pack import COLS, TOKENS

SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def const(value: int) -> ir.Value:
    """A 32-bit constant, given as an unsigned number."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - (1 << 32) if value >= 1 << 31 else value))


def add(a: ir.Value, b: ir.Value | int) -> ir.Value:
    return arith.addi(a, const(b) if isinstance(b, int) else b)


def sub(a: ir.Value, b: ir.Value | int) -> ir.Value:
    return arith.subi(a, const(b) if isinstance(b, int) else b)


def mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, const(b))


def both(a: ir.Value, mask: int) -> ir.Value:
    return arith.andi(a, const(mask))


def left(a: ir.Value, bits: int) -> ir.Value:
    return arith.shli(a, const(bits)) if bits else a


def right(a: ir.Value, bits: int) -> ir.Value:
    return arith.shrui(a, const(bits)) if bits else a


def as_float(a: ir.Value) -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), a)


def as_bits(a: ir.Value) -> ir.Value:
    return arith.bitcast(i32(), a)


def real(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def absolute(a: ir.Value) -> ir.Value:
    return as_float(both(as_bits(a), 0x7FFFFFFF))


def round_bf16(a: ir.Value) -> ir.Value:
    """A float32 rounded to bfloat16, as float32."""
    return arith.extf(ir.F32Type.get(), arith.truncf(ir.BF16Type.get(), a))


def permute(low: ir.Value, high: ir.Value, selector: ir.Value) -> ir.Value:
    """Each of four nibbles of `selector`, below 8, picks one of the eight bytes."""
    return pure("prmt.b32 $0, $1, $2, $3;", [("r", low), ("r", high), ("r", selector)])


def uniform(a: ir.Value) -> ir.Value:
    """A value that all lanes of a warp have; the compiler then may keep it in a uniform register."""
    return nvvm.shfl_sync(const(0xFFFFFFFF), a, const(0), const(31), nvvm.ShflKind.idx)


def byte(a: ir.Value, index: int) -> ir.Value:
    return permute(a, const(0), const(0x4440 + index))


def to_bf16x2(low: ir.Value, high: ir.Value) -> ir.Value:
    return pure("cvt.rn.bf16x2.f32 $0, $2, $1;", [("f", low), ("f", high)])


def to_e4m3(value: ir.Value) -> ir.Value:
    """The E4M3 byte nearest to a float32 of at most 448 in size."""
    text = "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, $1, $1; cvt.u32.u16 $0, pair; }"
    return arith.trunci(ir.IntegerType.get_signless(8), pure(text, [("f", value)]))


def to_e4m3x4(values: Sequence[ir.Value]) -> ir.Value:
    """The E4M3 bytes nearest to four float32, at most 448 in size, in a word."""
    text = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return pure(text, [("f", v) for v in values])


def fp8_scale(largest: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The FP8 scale of a group, a power of two, from its largest absolute value; and its inverse."""
    scale = arith.mulf(arith.maximumf(largest, real(1e-4)), real(1 / 448))
    scale = both(add(as_bits(scale), 0x7FFFFF), 0xFF800000)
    return as_float(scale), as_float(arith.subi(const(254 << 23), scale))


def equal(a: ir.Value, b: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, const(b))


def less(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def add64(a: ir.Value, b: int) -> ir.Value:
    return arith.addi(a, arith.constant(a.type, ir.IntegerAttr.get(a.type, b)))


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """The value of a scalar argument of `inline_mgpu`."""
    return array.registers.item()


def asm(text: str, outputs: str, inputs: Sequence[tuple[str, ir.Value]] = (), tied: Sequence[ir.Value] = ()):
    """Volatile PTX; `outputs` one letter per result (f, r). `tied` values enter and leave in the result registers."""
    kinds = {"f": ir.F32Type.get(), "r": i32()}
    constraints = [f"={o}" for o in outputs] + [str(i) for i in range(len(tied))] + [kind for kind, _ in inputs]
    results = [kinds[o] for o in outputs]
    if not results:
        result = ir.Type.parse("!llvm.void")
    else:
        result = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    value = llvm.inline_asm(
        result,
        [*tied, *(v for _, v in inputs)],
        text,
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )
    if len(results) > 1:
        return [llvm.extractvalue(kind, value, [i]) for i, kind in enumerate(results)]
    return [value] if results else []


def pure(text: str, inputs: Sequence[tuple[str, ir.Value]]) -> ir.Value:
    """PTX that only computes one 32-bit word."""
    constraints = ",".join(["=r", *(kind for kind, _ in inputs)])
    return llvm.inline_asm(i32(), [v for _, v in inputs], text, constraints, has_side_effects=False, asm_dialect=0)


def shared(ref: ir.Value) -> ir.Value:
    """32-bit address of an array in shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def address(ref: ir.Value) -> ir.Value:
    """64-bit address of an array in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


def _global_pointer(base: ir.Value, offset: ir.Value) -> ir.Value:
    target = arith.addi(base, arith.extui(ir.IntegerType.get_signless(64), offset))
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), target)


def store_global(value: ir.Value, base: ir.Value, offset: ir.Value) -> None:
    """Stores a scalar or a vector `offset` bytes behind `base`, a multiple of its size."""
    llvm.store(value, _global_pointer(base, offset), alignment=_size(value.type))


def load_global(base: ir.Value, offset: ir.Value, count: int, kind: ir.Type) -> list[ir.Value]:
    """`count` neighbouring 32-bit words of global memory."""
    words = llvm.load(ir.VectorType.get((count,), kind), _global_pointer(base, offset), alignment=4 * count)
    return [vector.extract(words, [], [i]) for i in range(count)]


def _size(kind: ir.Type) -> int:
    """Bytes of a scalar or of a vector of 32-bit words."""
    if isinstance(kind, ir.VectorType):
        return 4 * kind.shape[0]
    return 4 if isinstance(kind, ir.F32Type) else ir.IntegerType(kind).width // 8


def vector_of(values: Sequence[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), list(values))


def load(address: ir.Value, count: int, kind: ir.Type) -> list[ir.Value]:
    """`count` neighbouring 32-bit words of shared memory."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
    words = llvm.load(ir.VectorType.get((count,), kind), pointer, alignment=4 * count)
    return [vector.extract(words, [], [i]) for i in range(count)]


def load_byte(address: ir.Value) -> ir.Value:
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
    return arith.extui(i32(), llvm.load(ir.IntegerType.get_signless(8), pointer))


def scale_offset(group: ir.Value, row: ir.Value) -> ir.Value:
    """Where an activation record has the scale of a group and row."""
    place = add(left(right(group, 1), 6), left(right(row, 1), 4))
    return add(add(place, left(both(group, 1), 3)), add(left(both(row, 1), 2), TOKENS * COLS))


def store(value: ir.Value, address: ir.Value) -> None:
    llvm.store(value, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address), alignment=4)


def thread() -> ir.Value:
    """Index of the thread in its warpgroup."""
    return both(mgpu.utils.thread_idx(), 127)


def barrier_init(address: ir.Value, arrivals: int) -> None:
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "", [("r", address)])


def barrier_wait(address: ir.Value, parity: ir.Value) -> None:
    """Returns once the phase of that parity has completed."""
    asm(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }",
        "",
        [("r", address), ("r", parity)],
    )


def barrier_arrive(address: ir.Value) -> None:
    """Arrives. Does not wait for loads of this thread that nothing has used yet, and copies are not ordered behind
    them: use what was loaded from a place before giving the place back."""
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "", [("r", address)])


def barrier_expect(address: ir.Value, size: ir.Value) -> None:
    """Arrives, and announces `size` bytes of copies."""
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", [("r", address), ("r", size)])


def warp_arrive(address: ir.Value) -> None:
    """One arrival of a warp, once all its threads are here."""
    asm("bar.warp.sync 0xffffffff;", "")
    with mgpu.utils.when(equal(both(thread(), 31), 0)):
        barrier_arrive(address)


def bulk_copy(destination: ir.Value, source: ir.Value, size: ir.Value | int, barrier: ir.Value) -> None:
    """Flat copy from global (64-bit address) to shared memory that completes on `barrier`."""
    operands = [("r", destination), ("l", source), ("r", barrier)]
    if not isinstance(size, int):
        operands.append(("r", size))
        size = "$3"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    asm(f"{copy} [$0], [$1], {size}, [$2];", "", operands)


def wgmma(n: int, a: Sequence[ir.Value], descriptor: ir.Value) -> list[ir.Value]:
    """D = A B of one m64 x n x k32 product of E4M3 operands, A in registers; D is valid after `wgmma_wait`."""
    count = n // 2
    take = [f"${i}" for i in range(count + 5)]
    return asm(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{','.join(take[:count])}}}, "
        f"{{{','.join(take[count : count + 4])}}}, {take[-1]}, p, 1, 1; }}",
        "f" * count,
        [*(("r", r) for r in a), ("l", descriptor)],
    )


def wgmma_fence(registers: Sequence[ir.Value]) -> list[ir.Value]:
    """Orders the writes of `registers` before the products that read them."""
    return asm("wgmma.fence.sync.aligned;", "r" * len(registers), tied=registers)


def wgmma_commit() -> None:
    asm("wgmma.commit_group.sync.aligned;", "")


def wgmma_wait(pending: int, results: Sequence[ir.Value]) -> list[ir.Value]:
    """Waits until at most `pending` later groups run; `results` may be read from what it returns."""
    return asm(f"wgmma.wait_group.sync.aligned {pending};", "f" * len(results), tied=results)


def warpgroup_array(values: Sequence[ir.Value], n: int) -> mgpu.FragmentedArray:
    """A [64, n] float32 array in the accumulator layout from the registers of each thread, in PTX order."""
    layout = plgpu.Layout._WGMMA_ACC_32BIT.to_mgpu()
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.empty(layout.registers_shape((64, n)), dtype=object)
    registers.flat = [vector.broadcast(kind, v) for v in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def warpgroup_values(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Inverse of `warpgroup_array`."""
    return [vector.extract(v, [], [0]) for v in array.registers.flat]
