"""Per-thread code on rows of bfloat16: norm, rotation, and the formats of the caches and of FP8 activations.

A block works on one row. A thread holds CHANNELS consecutive channels as fp32 values: thread number `index` of those
that share the row begins at channel CHANNELS · index. Written for a `Machine`, so that the tests can run it on the
emulator; whole warps call every function. It rounds where `dsv4jax.quant`, `rms_norm` and `rotate` do.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from dsv4jax.quant import BLOCK, NVFP4_BLOCK, ceil_div
from pallas_kernels.topk import simt
from pallas_kernels.topk.simt import WARP, Array, Lane

CHANNELS = 8
WORDS = CHANNELS // 2
"""32-bit words of a thread's channels in bfloat16."""
MAGNITUDE = 0x7FFFFFFF


class Machine(simt.Machine):
    """Per-thread code with the conversions between number formats."""

    def rsqrt(self, x: Lane) -> Lane:
        return _asm("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], ir.F32Type.get())

    def pack_bf16(self, low: Lane, high: Lane) -> Lane:
        """Two fp32 values rounded to bfloat16, in one word."""
        return _asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high])

    def pack_e4m3(self, values: list[Lane]) -> Lane:
        """Four fp32 values rounded to E4M3, saturating at 448, in one word."""
        text = (
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " mov.b32 $0, {a, b}; }"
        )
        return _asm(text, "=r,f,f,f,f", values)

    def unpack_e4m3(self, byte: Lane) -> Lane:
        """fp32 of an E4M3 byte."""
        text = (
            "{ .reg .b16 h, lo, hi; .reg .b32 x; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 x, h; mov.b32 {lo, hi}, x;"
            " cvt.f32.f16 $0, lo; }"
        )
        return _asm(text, "=f,r", [byte], ir.F32Type.get())

    def pack_f16(self, low: Lane, high: Lane) -> Lane:
        """Two fp32 values rounded to float16, in one word."""
        return _asm("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high])

    def divide(self, x: Lane, by: int) -> tuple[Lane, Lane]:
        """Quotient and remainder."""
        by = arith.constant(ir.IntegerType.get_signless(32), by)
        return Lane(arith.divui(x.value, by)), Lane(arith.remui(x.value, by))

    def exchange(self, x: Lane, distance: int) -> Lane:
        """The value of the lane whose number differs in the bit `distance`."""
        return Lane(utils.shfl_bfly(x.value, distance))

    def inverse(self, x: Lane) -> Lane:
        return _asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], ir.F32Type.get())

    def exp2(self, x: Lane) -> Lane:
        return _asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], ir.F32Type.get())

    def add(self, x: Lane, y: Lane) -> Lane:
        """x + y of fp32, not to be contracted with a product."""
        return _asm("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], ir.F32Type.get())

    def row(self, ref: Array, row: Lane, width: int) -> Array:
        """A row of `width` elements; byte offsets may need more than 32 bits."""
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(i64, row.value), arith.constant(i64, width))
        return Array(utils.getelementptr(ref.pointer, [offset], ref.element), ref.element)

    def store_byte(self, ref: Array, index: Lane, value: Lane) -> None:
        """Stores the low byte of a word at a byte index of an array of words."""
        i8 = ir.IntegerType.get_signless(8)
        address = utils.getelementptr(ref.pointer, [index.value], i8)
        llvm.store(arith.trunci(i8, value.value), address, alignment=1)


@dataclasses.dataclass(frozen=True)
class Target:
    """A cache that is written in place."""

    cache: jax.Array
    """[outer, inner, record]"""
    places: jax.Array
    """int32 [rows]: which record each row may write."""


def each_row(
    code: Callable[..., None],
    number: int,
    arguments: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    channels: int,
    target: Target | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """A kernel with a block for each of `number` rows of `channels` channels.

    Args:
      code: called as code(machine, row, *arguments, target, *results, sums). Arrays are words, or fp32 where they are;
        target is None or the cache, its number of records, and the places; `sums` is fp32 scratch, two per warp.

    Returns:
      The results and the cache.
    """
    warpgroups = ceil_div(channels // CHANNELS, 4 * WARP)
    held = [] if target is None else [target.places, jax.new_ref(target.cache)]
    inputs = len(arguments)

    def body(*refs):
        def scope(sums):
            @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * (len(refs) + 1)))
            def run(_, row, *refs):
                m = Machine(4 * WARP * warpgroups)
                given, kept, made = refs[:inputs], refs[inputs:][: len(held)], refs[inputs + len(held) :]
                into = None
                if target is not None:
                    places, cache = map(_array, kept)
                    into = cache, m.u32(target.cache.shape[0] * target.cache.shape[1]), places
                code(m, simt.scalar(row), *map(_array, given), into, *map(_array, made))

            run(lax.axis_index("row"), *refs, sums)

        pl.run_scoped(scope, plgpu.SMEM((8 * warpgroups,), jnp.float32), collective_axes="warpgroup")

    results = pl.kernel(
        body,
        out_type=list(out_type),
        mesh=plgpu.Mesh(grid=(number,), grid_names=("row",), num_threads=warpgroups, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*arguments, *held)
    return results, None if target is None else jax.freeze(held[1])


def _array(ref: ir.Value) -> Array:
    """fp32 as it is, everything else as words of 32 bits."""
    kind = ir.MemRefType(ref.type).element_type
    return Array(utils.memref_ptr(ref), kind if kind == ir.F32Type.get() else ir.IntegerType.get_signless(32))


def read(m, row, index, threads: int):
    """The channels of a thread from a row of bfloat16 as words; zeros for threads from number `threads` on."""
    present = index < threads
    words = m.load4(row, m.where(present, index, m.u32(0)) * WORDS)
    return unpack(m, [m.where(present, word, m.u32(0)) for word in words])


def write(m, row, index, threads: int, values) -> None:
    """Inverse of `read`."""
    with m.when(index < threads):
        for i in range(WORDS):
            m.store(row, index * WORDS + i, m.pack_bf16(values[2 * i], values[2 * i + 1]))


def unpack(m, words):
    """fp32 values of pairs of bfloat16."""
    return [value for word in words for value in (m.floats(word << 16), m.floats(word & 0xFFFF0000))]


def rounded(m, values):
    """The values rounded to bfloat16."""
    return unpack(m, [m.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)])


def put_square_sum(m, sums, values) -> None:
    """Stores the sum of squares of each warp at its number in `sums` (fp32); a barrier must follow."""
    squares = [value * value for value in values]
    while len(squares) > 1:
        squares = [m.add(a, b) for a, b in zip(squares[::2], squares[1::2], strict=True)]
    (total,) = squares
    distance = WARP // 2
    while distance:
        total = m.add(total, m.exchange(total, distance))
        distance //= 2
    with m.when(m.lane == 0):
        m.store(sums, m.warp, total)


def total(m, sums, warps: range):
    """Sum of what `put_square_sum` stored for some warps."""
    value = m.load(sums, warps.start)
    for warp in warps[1:]:
        value = m.add(value, m.load(sums, warp))
    return value


def normalise(m, values, weight, mean_square, eps: float):
    """The values over the root of their mean square, times the weight of their channels, rounded."""
    factor = m.rsqrt(mean_square + eps)
    return rounded(m, [w * (value * factor) for w, value in zip(weight, values, strict=True)])


def rotate(m, values, cos, sin, index, width: int, pairs: int):
    """Rotates the last 2·pairs channels of the row as adjacent pairs, rounds.

    Args:
      cos, sin: fp32 of each pair.
    """
    first = (width - 2 * pairs) // CHANNELS
    turns = index >= first
    place = m.where(turns & (index < width // CHANNELS), index - first, m.u32(0)) * WORDS
    turned = []
    for i, (c, s) in enumerate(zip(m.load4(cos, place), m.load4(sin, place), strict=True)):
        even, odd = values[2 * i], values[2 * i + 1]
        turned += _turned(m, even, odd, c, s)
    return [m.where(turns, new, old) for new, old in zip(rounded(m, turned), values, strict=True)]


def rotated_four(m, values, cos, sin, channel, width: int, pairs: int):
    """Two words of four fp32 values, rounded to bfloat16, rotated as `rotate` does, and rounded again.

    Args:
      cos, sin: fp32 of each pair of the row.
      channel: of the first value within its vector of `width` channels; a multiple of 4.
    """
    words = [m.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(2)]
    first = width - 2 * pairs

    def turn():
        pair = (channel - first) >> 1
        turned = []
        for i, (even, odd) in enumerate(zip(*[iter(unpack(m, words))] * 2, strict=True)):
            turned.append(_turned(m, even, odd, m.load(cos, pair + i), m.load(sin, pair + i)))
        return [m.pack_bf16(*pair) for pair in turned]

    return m.cond(channel >= first, turn, words)


def _turned(m, even, odd, cos, sin):
    """A pair after its rotation."""
    return m.add(even * cos, odd * sin * -1.0), m.add(even * sin, odd * cos)


def swiglu(m, gate, up, limit: float):
    """silu(min(gate, limit)) · clamp(up, ±limit) of fp32 values, rounded."""
    top, bottom = m.f32(limit), m.f32(-limit)
    z = []
    for g, u in zip(gate, up, strict=True):
        g = m.where(g < limit, g, top)
        u = m.where(u < limit, m.where(u > -limit, u, bottom), top)
        z.append(g * m.inverse(m.exp2(g * -math.log2(math.e)) + 1.0) * u)
    return rounded(m, z)


def largest(m, values, lanes: int):
    """Bits of the largest magnitude among `lanes` neighbouring threads."""
    top = m.bits(values[0]) & MAGNITUDE
    for value in values[1:]:
        top = _larger(m, top, m.bits(value) & MAGNITUDE)
    distance = lanes // 2
    while distance:
        top = _larger(m, top, m.exchange(top, distance))
        distance //= 2
    return top


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A thread's channels in a format of the caches."""

    words: list
    """Elements in words, the first channel in the lowest bits."""
    scale: Any
    """Byte of the scale of their block."""
    block: int
    """Channels that share a scale."""


def fp8(m, values) -> Encoded:
    """As `pack_fp8`."""
    words, scale = _fp8(m, values)
    return Encoded(words, scale >> 23, BLOCK)


def mxfp4(m, values) -> Encoded:
    """As `pack_mxfp4`."""
    word, scale = _mxfp4(m, values)
    return Encoded([word], scale >> 23, BLOCK)


def qdq_mxfp4(m, values):
    """The values after a round trip through MXFP4."""
    word, scale = _mxfp4(m, values)
    decoded = []
    for i in range(CHANNELS):
        code = (word >> (4 * i)) & 7
        # Two bits of exponent and one of mantissa, in those of fp32; 0 and 0.5 have no leading one.
        small = m.where(code == 1, m.u32(0x3F000000), m.u32(0))
        bits = m.where(code < 2, small, (code << 22) + (126 << 23))
        sign = ((word >> (4 * i)) & 8) << 28
        decoded.append(m.floats(bits | sign) * m.floats(scale))
    return decoded


def _mxfp4(m, values):
    """A word of E2M1 codes, and the bits of the scale of their group of 32."""
    top = m.floats(largest(m, values, BLOCK // CHANNELS))
    least = 6 * 2.0**-126
    scale = _power_of_two_above(m, m.where(top > least, top, m.f32(least)) * (1 / 6))
    inverse = m.floats(m.u32(254 << 23) - scale)
    return _codes(m, [value * inverse for value in values], lambda midpoint: midpoint), scale


def nvfp4(m, values) -> Encoded:
    """As `pack_nvfp4`."""
    top = m.floats(largest(m, values, NVFP4_BLOCK // CHANNELS))
    least = 6 * 2.0**-9
    v = m.where(top > least, top, m.f32(least))
    # v / 6, correctly rounded: see `dsv4jax.quant`.
    leading = m.floats(m.bits(v * (1 / 6)) & 0xFFFFF000)
    sixth = m.add(leading, m.add(v, leading * -6.0) * (1 / 6))
    byte = m.pack_e4m3([sixth, m.f32(0.0), m.f32(0.0), m.f32(0.0)]) & 0xFF
    scale = m.unpack_e4m3(byte)
    return Encoded([_codes(m, values, lambda midpoint: scale * midpoint)], byte, NVFP4_BLOCK)


def put_record(m, record, index, threads: int, encoded: Encoded) -> None:
    """Writes a row's record, an array of words: the elements, then the scales."""
    count, sharing = len(encoded.words), encoded.block // CHANNELS
    with m.when(index < threads):
        for i, word in enumerate(encoded.words):
            m.store(record, index * count + i, word)
        with m.when((index & (sharing - 1)) == 0):
            place = (index >> (sharing.bit_length() - 1)) + 4 * count * threads
            m.store_byte(record, place, encoded.scale)


def put_activations(m, elements, scales, index, threads: int, row, rows: int, values) -> None:
    """Writes a row as `quantize_activations` does: `elements` of the row, `scales` fp32 [groups, rows] of all rows."""
    words, scale = _fp8(m, values)
    with m.when(index < threads):
        for i in range(2):
            m.store(elements, index * 2 + i, words[i])
        with m.when((index & 3) == 0):
            m.store(scales, (index >> 2) * rows + row, m.floats(scale))


def quantised_four(m, values):
    """A word of E4M3 elements of four fp32 values, rounded to bfloat16 before, and the bits of the fp32 scale of the
    group of 32 that they form with those of seven neighbours."""
    (word,), scale = _fp8(m, rounded(m, values))
    return word, scale


def _fp8(m, values):
    """Words of E4M3 elements, and the bits of the fp32 scale of their group of 32."""
    top = m.floats(largest(m, values, BLOCK // len(values)))
    scale = _power_of_two_above(m, m.where(top > 1e-4, top, m.f32(1e-4)) * (1 / 448))
    inverse = m.floats(m.u32(254 << 23) - scale)
    scaled = [value * inverse for value in values]
    return [m.pack_e4m3(scaled[i : i + 4]) for i in range(0, len(scaled), 4)], scale


def _larger(m, x, y):
    return m.where(x > y, x, y)


def _power_of_two_above(m, v):
    """Bits of the smallest power of two >= v."""
    return (m.bits(v) + 0x7FFFFF) & 0xFF800000


def _codes(m, values, threshold):
    """E2M1 codes of eight values in one word, the first in the lowest bits; `threshold` scales a midpoint."""
    ties_down = [threshold(midpoint) for midpoint in (0.25, 1.25, 2.5, 5.0)]
    ties_up = [threshold(midpoint) for midpoint in (0.75, 1.75, 3.5)]
    word = m.u32(0)
    for i, value in enumerate(values):
        bits = m.bits(value)
        magnitude = m.floats(bits & MAGNITUDE)
        code = (bits >> 28) & 8
        one, none = m.u32(1), m.u32(0)
        for t in ties_down:
            code = code + m.where(magnitude > t, one, none)
        for t in ties_up:
            code = code + m.where(magnitude >= t, one, none)
        word = word | (code << (4 * i))
    return word


def _asm(text: str, constraints: str, operands: list[Lane], kind: ir.Type | None = None) -> Lane:
    kind = kind or ir.IntegerType.get_signless(32)
    values = [x.value for x in operands]
    return Lane(llvm.inline_asm(kind, values, text, constraints, has_side_effects=False, asm_dialect=0))
