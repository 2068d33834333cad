"""Integer arithmetic, addresses and PTX for the device code of the FP8 linear."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector


def i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def add(a, b):
    return arith.addi(a, i32(b) if isinstance(b, int) else b)


def mul(a, b: int):
    return arith.muli(a, i32(b))


def div(a, b: int):
    return arith.divui(a, i32(b))


def rem(a, b: int):
    return arith.remui(a, i32(b))


def block_thread():
    return arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))


def warp_and_lane():
    """Warp of the warpgroup, and lane."""
    thread = rem(block_thread(), 128)
    return div(thread, 32), rem(thread, 32)


def shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def global_address(ref, element, size: int):
    """Address of an element of an array in device memory."""
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, element), arith.constant(i64, size))
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), offset)


def asm(text: str, operands=(), results: str = "", constraints: str = "") -> list:
    """Volatile PTX; `results` has a letter per result (f, r), `constraints` those of the operands."""
    kinds = {"f": ir.F32Type.get(), "r": ir.IntegerType.get_signless(32)}
    types = [kinds[letter] for letter in results]
    if not types:
        kind = ir.Type.parse("!llvm.void")
    else:
        kind = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    constraints = ",".join([*(f"={letter}" for letter in results), *([constraints] if constraints else [])])
    value = llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=True, asm_dialect=0)
    if len(types) > 1:
        return [llvm.extractvalue(t, value, [i]) for i, t in enumerate(types)]
    return [value] if types else []


def scalars(*arrays):
    return [array.registers.item() for array in arrays]


def register_values(acc):
    return [vector.extract(pair, [], [e]) for pair in acc.registers.flat for e in range(2)]


def array_like(like, values):
    """The registers `values` as an array like `like`."""
    pairs = np.empty(like.registers.size, object)
    for k in range(pairs.size):
        pairs[k] = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), values[2 * k : 2 * k + 2])
    return mgpu.FragmentedArray(_registers=pairs.reshape(like.registers.shape), _layout=like.layout, _is_signed=None)


def descriptor(address):
    """`wgmma` descriptor of rows in swizzled lines of 128 bytes, eight rows after eight rows."""
    i64 = ir.IntegerType.get_signless(64)
    start = arith.shrui(arith.andi(address, i32(0x3FFFF)), i32(4))
    return arith.ori(arith.extui(i64, start), arith.constant(i64, (1024 >> 4) << 32 | 1 << 62))
