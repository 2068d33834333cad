"""A little assembler for per-thread code: MLIR values of 32 bits, memory access, and the registers behind arrays."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector


def int_type(bits: int):
    return ir.IntegerType.get_signless(bits)


def const(value: int, bits: int = 32) -> ir.Value:
    wrapped = value - (1 << bits) if value >= 1 << bits - 1 else value
    return arith.constant(int_type(bits), ir.IntegerAttr.get(int_type(bits), wrapped))


def asm(text: str, constraints: str, *operands: ir.Value, results: int = 1, effects: bool = False):
    """PTX with `results` 32-bit results: none, one value or a list."""
    word = int_type(32)
    ty = None if not results else word if results == 1 else llvm.StructType.get_literal([word] * results)
    out = llvm.inline_asm(ty, list(operands), text, constraints, has_side_effects=effects, asm_dialect=0)
    return [llvm.extractvalue(word, out, [i]) for i in range(results)] if results > 1 else out


def shl(x, n: int):
    """x shifted left, or right without sign for a negative n."""
    return arith.shli(x, const(n)) if n > 0 else arith.shrui(x, const(-n)) if n else x


def plus(x, n: int):
    return arith.addi(x, const(n))


def times(x, n: int):
    return arith.muli(x, const(n))


def both(x, mask: int):
    return arith.andi(x, const(mask))


def wide(x):
    """To 64 bits, without sign."""
    return arith.extui(int_type(64), x)


def thread() -> ir.Value:
    """Index of the thread in its warpgroup."""
    return both(arith.index_cast(int_type(32), gpu.thread_id(gpu.Dimension.x)), 127)


def address(ref: ir.Value) -> ir.Value:
    """Address of a reference: 64 bits in global memory, 32 bits in shared."""
    return llvm.ptrtoint(int_type(32 if mgpu.utils.is_smem_ref(ref) else 64), mgpu.utils.memref_ptr(ref))


def load(row: ir.Value, offset: int, kind: str):
    """Four words ("v4.b32"), one ("b32") or two bytes ("u16") of global memory at row + offset; 0 if row is null."""
    n = 4 if kind.startswith("v4") else 1
    out = [f"${i}" for i in range(n)]
    zero = " ".join(f"mov.b32 {o}, 0;" for o in out)
    target = f"{{{', '.join(out)}}}" if n > 1 else out[0]
    text = f"{{ .reg .pred p; setp.ne.b64 p, ${n}, 0; {zero} @p ld.global.nc.{kind} {target}, [${n} + {offset}]; }}"
    return asm(text, ",".join(["=&r"] * n + ["l"]), row, results=n, effects=True)


def store(at, offset: int, words):
    """Writes four words to shared memory at `at` + offset."""
    text = f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
    asm(text, "r,r,r,r,r,~{memory}", at, *words, results=0, effects=True)


def load_shared(at, offset: int) -> list[ir.Value]:
    """Four words of shared memory at `at` + offset."""
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm(text, "=r,=r,=r,=r,r,~{memory}", at, results=4, effects=True)


def words_of(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """The 32-bit words of this thread."""
    words = []
    for r in array.registers.flat:
        n = ir.VectorType(r.type).shape[0] * mgpu.utils.bitwidth(array.mlir_dtype) // 32
        r = vector.bitcast(ir.VectorType.get((n,), int_type(32)), r)
        words += [vector.extract(r, [], [i]) for i in range(n)]
    return words


def array_of(words: list[ir.Value], kind: plgpu.ShapeDtypeStruct) -> mgpu.FragmentedArray:
    """Inverse of `words_of` for an array of 16-bit or 32-bit floats or int32."""
    layout, element = kind.layout.to_mgpu(), mgpu.utils.dtype_to_ir_type(kind.dtype)
    out = np.empty(layout.registers_shape(kind.shape), dtype=object)
    n = len(words) // out.size
    ty = ir.VectorType.get((n * 32 // mgpu.utils.bitwidth(element),), element)
    for i in range(out.size):
        vec = vector.from_elements(ir.VectorType.get((n,), int_type(32)), words[n * i : n * (i + 1)])
        out.flat[i] = vector.bitcast(ty, vec)
    signed = True if isinstance(element, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=signed)
