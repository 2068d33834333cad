"""The two passes over rows around the matmuls of `prefill`: gather with quantisation, and SwiGLU with quantisation.

Both write the packed form of `prefill_plan.pack_rows`. A thread owns 8 channels, so that 4 neighbours hold a group of
32 and 8 write the 128 bytes of a row in one slab.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import TOKENS
from pallas_kernels.moe_experts.prefill_plan import ROW_BYTES, ROW_WORDS, SLAB

THREADS = 512
CHANNELS = 8
"""Channels of a thread: 16 bytes of bfloat16."""
LOG2_E = 1.4426950408889634


def pack_tokens(
    x: BFloat16[Array, "tokens hidden"],
    places: Int32[Array, "tokens k"],
    weights: Float32[Array, "tokens k"],
    rows: int,
) -> tuple[Int32[Array, "slabs blocks words"], Float32[Array, " rows"]]:
    """Copies each token, quantised to FP8 per 32 channels, to its rows, and its weights along.

    Args:
      places: the rows of a token, in 0..rows-1; -1 for none.

    Returns:
      The rows, packed, and their weights. Rows that no token goes to are not written.
    """
    tokens, hidden = x.shape
    k = places.shape[1]
    _check_size(rows, hidden)
    threads = tokens * (hidden // CHANNELS)

    def body(x, places, weights, packed, routing):
        @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 5 + (ptx.SCALAR,))
        def run(_, x, places, weights, packed, routing, block):
            x, places, weights, packed, routing = map(ptx.address, (x, places, weights, packed, routing))
            here, token, column = _place(ptx.scalar(block), threads, hidden // CHANNELS)
            words = ptx.load_global(x, ptx.mul(ptx.add(ptx.mul(token, hidden // CHANNELS), column), 16), 4, ptx.i32())
            chunk = _interleave(_quantise(_unpack(words)))
            for j in range(k):
                entry = ptx.mul(ptx.add(ptx.mul(token, k), j), 4)
                (row,) = ptx.load_global(places, entry, 1, ptx.i32())
                used = arith.andi(here, ptx.less(row, ptx.const(rows)))
                with mgpu.utils.when(used):
                    _store_chunk(packed, chunk, row, column, rows)
                with mgpu.utils.when(arith.andi(used, ptx.equal(column, j))):
                    (weight,) = ptx.load_global(weights, entry, 1, ptx.i32())
                    ptx.store_global(weight, routing, ptx.mul(row, 4))

        run(x, places, weights, packed, routing, lax.axis_index("block"))

    routing = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return _launch(body, threads, (_packed(rows, hidden), routing))(x, places, weights)


def activate(
    gate_up: BFloat16[Array, "rows double"],
    routing: Float32[Array, " rows"],
    *,
    limit: float,
    weighted: bool,
) -> Int32[Array, "slabs blocks words"]:
    """SwiGLU of rows, times their `routing` when `weighted`, rounded to bfloat16 and quantised to FP8 per 32 channels.

    `gate_up` holds 8 channels of the gate, the same 8 of up, and so on. The result is packed.
    """
    rows, double = gate_up.shape
    columns = double // 2 // CHANNELS
    _check_size(rows, double)
    threads = rows * columns

    def body(gate_up, routing, packed):
        @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 3 + (ptx.SCALAR,))
        def run(_, gate_up, routing, packed, block):
            gate_up, routing, packed = map(ptx.address, (gate_up, routing, packed))
            here, row, column = _place(ptx.scalar(block), threads, columns)
            source = ptx.mul(ptx.add(ptx.mul(row, columns), column), 32)
            gate = _unpack(ptx.load_global(gate_up, source, 4, ptx.i32()))
            up = _unpack(ptx.load_global(gate_up, ptx.add(source, 16), 4, ptx.i32()))
            values = [swiglu(g, u, limit) for g, u in zip(gate, up, strict=True)]
            if weighted:
                (weight,) = ptx.load_global(routing, ptx.mul(row, 4), 1, ir.F32Type.get())
                values = [arith.mulf(v, weight) for v in values]
            chunk = _interleave(_quantise([ptx.round_bf16(v) for v in values]))
            with mgpu.utils.when(here):
                _store_chunk(packed, chunk, row, column, rows)

        run(gate_up, routing, packed, lax.axis_index("block"))

    return _launch(body, threads, _packed(rows, double // 2))(gate_up, routing)


def swiglu(gate: ir.Value, up: ir.Value, limit: float) -> ir.Value:
    """silu(min(gate, limit)) * clamp(up, +-limit) of float32 numbers."""
    gate = arith.minimumf(gate, ptx.real(limit))
    up = arith.maximumf(arith.minimumf(up, ptx.real(limit)), ptx.real(-limit))
    exponential = _float_asm("ex2.approx.ftz.f32 $0, $1;", [arith.mulf(gate, ptx.real(-LOG2_E))])
    sigmoid = _float_asm("rcp.approx.ftz.f32 $0, $1;", [arith.addf(exponential, ptx.real(1.0))])
    return arith.mulf(arith.mulf(gate, sigmoid), up)


def quantised_pair(low: ir.Value, high: ir.Value, scale: ir.Value, inverse: ir.Value) -> ir.Value:
    """Two float32 rounded to E4M3 times `scale`, as bfloat16, which is exact."""
    text = (
        "{ .reg .b16 e, l, h; .reg .b32 pair; .reg .f32 x, y; cvt.rn.satfinite.e4m3x2.f32 e, $2, $1; "
        "cvt.rn.f16x2.e4m3x2 pair, e; mov.b32 {l, h}, pair; cvt.f32.f16 x, l; cvt.f32.f16 y, h; "
        "mul.f32 x, x, $3; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x; }"
    )
    operands = [arith.mulf(low, inverse), arith.mulf(high, inverse), scale]
    return llvm.inline_asm(ptx.i32(), operands, text, "=r,f,f,f", has_side_effects=False, asm_dialect=0)


def _launch(body: Callable[..., None], threads: int, out_type: Any) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(-(-threads // THREADS),),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )


def _packed(rows: int, inner: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((inner // SLAB, rows // TOKENS, ROW_WORDS), jnp.int32)


def _check_size(rows: int, inner: int) -> None:
    if inner % SLAB or rows % TOKENS:
        raise ValueError(f"rows of {inner} channels in groups of {SLAB}, {rows} rows in blocks of {TOKENS}")


def _place(block: ir.Value, threads: int, columns: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Whether this thread has work, and its row and column; those of the last one where it has none."""
    index = ptx.add(ptx.mul(block, THREADS), mgpu.utils.thread_idx())
    here = ptx.less(index, ptx.const(threads))
    index = arith.minui(index, ptx.const(threads - 1))
    row = arith.divui(index, ptx.const(columns))
    return here, row, arith.subi(index, ptx.mul(row, columns))


def _unpack(words: Sequence[ir.Value]) -> list[ir.Value]:
    """The bfloat16 numbers of words, as float32."""
    return [ptx.as_float(half) for word in words for half in (ptx.left(word, 16), ptx.both(word, 0xFFFF0000))]


def _quantise(values: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
    """The even and the odd ones of 8 channels, quantised with the scale of the group that 4 threads share."""
    largest = ptx.absolute(values[0])
    for value in values[1:]:
        largest = arith.maximumf(largest, ptx.absolute(value))
    for distance in (1, 2):
        largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
    scale, inverse = ptx.fp8_scale(largest)
    even, odd = (
        [quantised_pair(values[i], values[i + 2], scale, inverse) for i in (start, start + 4)] for start in (0, 1)
    )
    return even, odd


def _interleave(pairs: tuple[list[ir.Value], list[ir.Value]]) -> list[ir.Value]:
    """16 bytes: of the 16 channels of two neighbours the even ones in the first, the odd ones in the second."""
    even, odd = pairs
    second = arith.cmpi(arith.CmpIPredicate.ne, ptx.both(mgpu.utils.thread_idx(), 1), ptx.const(0))
    received = [mgpu.utils.shfl_bfly(arith.select(second, e, o), 1) for e, o in zip(even, odd, strict=True)]
    low = [arith.select(second, r, e) for r, e in zip(received, even, strict=True)]
    high = [arith.select(second, o, r) for r, o in zip(received, odd, strict=True)]
    return low + high


def _store_chunk(packed: ir.Value, chunk: Sequence[ir.Value], row: ir.Value, column: ir.Value, rows: int) -> None:
    """Writes 16 bytes at column of a row, in the order of the 128-byte swizzle."""
    within = ptx.both(row, TOKENS - 1)
    block = ptx.add(ptx.mul(ptx.right(column, 3), rows // TOKENS), ptx.right(row, 3))
    place = arith.xori(ptx.both(column, 7), within)
    offset = ptx.add(ptx.mul(block, ROW_BYTES), ptx.add(ptx.left(within, 7), ptx.left(place, 4)))
    ptx.store_global(ptx.vector_of(chunk), packed, offset)


def _float_asm(text: str, inputs: Sequence[ir.Value]) -> ir.Value:
    constraints = ",".join(["=f", *("f" for _ in inputs)])
    return llvm.inline_asm(ir.F32Type.get(), list(inputs), text, constraints, has_side_effects=False, asm_dialect=0)
