"""The two small kernels around the expert matmuls: routing with gather and quantisation, and the weighted sum."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import ACTIVATION_WORDS, COLS, TOKENS
from pallas_kernels.moe_experts.route import Routing, route
from pallas_kernels.topk import simt

ACTIVATION_BYTES = 4 * ACTIVATION_WORDS
CHANNELS = 8
"""Channels of a thread: 16 bytes of bfloat16."""


def limits(tokens: int, k: int, number: int, tile_blocks: int) -> tuple[int, int]:
    """Most blocks of 8 rows and most tiles that a routing can need."""
    rows = tokens * k
    touched = min(rows, number)
    return touched + (rows - touched) // TOKENS, touched + (rows - touched) // (TOKENS * tile_blocks)


def most_tokens(k: int, number: int, hidden: int, width: int) -> int:
    """The most tokens, each of `k` of `number` experts, whose rows the kernels can address, whatever the routing.

    They count bytes in 32 bits: of bfloat16 rows of the `hidden` channels of a token, or of gate and up of an expert's
    `width`, and of fp32 results.
    """
    largest = (1 << 32) - 1
    blocks = largest // (2 * max(hidden, 2 * width) * TOKENS)
    # As `limits` has it: each expert may need a block for a single row.
    rows = blocks if blocks < number else number + (blocks - number) * TOKENS + TOKENS - 1
    return min(rows // k, largest // (4 * hidden))


def prepare(
    x: BFloat16[Array, "tokens hidden"],
    experts: Int32[Array, "tokens k"],
    weights: Float32[Array, "tokens k"],
    valid: Int32[Array, " tokens"],
    number: int,
    tile_blocks: int,
) -> tuple[Array, ...]:
    """Tiles, activation records of x, routing weights by row, and the rows of each token.

    Returns:
      group, block, count, used, records, routing: arguments of `kernel.expert_gate_up`.
      places: [tokens, k], the rows of a token in ascending order of expert, -1 for entries that are not computed:
        those of invalid tokens, and ids that are not in 0..number-1.
    """
    tokens, hidden = x.shape
    k = experts.shape[1]
    blocks, tiles = limits(tokens, k, number, tile_blocks)
    threads = min(-(-hidden // CHANNELS // 128) * 128, 1024)
    i32 = jnp.int32
    out_type = (
        jax.ShapeDtypeStruct((tiles,), i32),
        jax.ShapeDtypeStruct((tiles,), i32),
        jax.ShapeDtypeStruct((tiles,), i32),
        jax.ShapeDtypeStruct((1,), i32),
        jax.ShapeDtypeStruct((blocks, hidden // COLS, ACTIVATION_WORDS), i32),
        jax.ShapeDtypeStruct((blocks * TOKENS,), jnp.float32),
        jax.ShapeDtypeStruct((tokens, k), i32),
    )

    def body(x, experts, weights, valid, *refs):
        @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 14 + (ptx.SCALAR,))
        def run(_, x, experts, weights, valid, group, block, count, used, records, routing, places, *rest):
            *shared, token = rest
            m, token = simt.Machine(threads), simt.scalar(token)
            values = [_read(ptx.address(x), token, c, hidden) for c in _columns(m, hidden)]
            arrays = (experts, weights, valid, group, block, count, used, routing, places, *shared)
            r = Routing(*map(simt.array, arrays), tokens, k, number, tile_blocks)
            route(m, r, token)
            own = [m.load(r.own, j) for j in range(k)]
            for column, words in zip(_columns(m, hidden), values, strict=True):
                with m.when(column < hidden):
                    elements, scale = _quantise(words)
                    for place in own:
                        with m.when(place < blocks * TOKENS):
                            _write(m, ptx.address(records), place, column, hidden, elements, scale)

        run(x, experts, weights, valid, *refs, lax.axis_index("token"))

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(tokens,),
        grid_names=("token",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((number,), i32), plgpu.SMEM((number + 1,), i32), plgpu.SMEM((k,), i32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(x, experts, weights, valid)


def _columns(m, hidden):
    return [m.tid * CHANNELS + start for start in range(0, hidden, m.threads * CHANNELS)]


def _read(base, token, column, hidden):
    """Four words of a row of bfloat16; past its end, of another one."""
    last = simt.Lane(arith.minui(column.value, ptx.const(hidden - CHANNELS)))
    return ptx.load_global(base, ((token * hidden + last) * 2).value, 4, ptx.i32())


def _quantise(words):
    """Two words of E4M3 elements and the scale of the group of 32 that four threads hold."""
    values = []
    for word in words:
        values += [ptx.as_float(ptx.left(word, 16)), ptx.as_float(ptx.both(word, 0xFFFF0000))]
    largest = ptx.absolute(values[0])
    for value in values[1:]:
        largest = arith.maximumf(largest, ptx.absolute(value))
    for distance in (1, 2):
        largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
    scale, inverse = ptx.fp8_scale(largest)
    values = [arith.mulf(v, inverse) for v in values]
    return [ptx.to_e4m3x4(values[:4]), ptx.to_e4m3x4(values[4:])], scale


def _write(m, base, place, column, hidden, elements, scale):
    record = (place >> 3) * (hidden // COLS) + (column >> 8)
    row, within = place & 7, column & (COLS - 1)
    at = record * ACTIVATION_BYTES
    ptx.store_global(ptx.vector_of(elements), base, (at + (within >> 4) * 128 + row * 16 + (within & 8)).value)
    with m.when((m.tid & 3) == 0):
        ptx.store_global(scale, base, ptx.add(at.value, ptx.scale_offset((within >> 5).value, row.value)))


def combine(
    y: BFloat16[Array, "rows hidden"],
    places: Int32[Array, "tokens k"],
    routing: Float32[Array, " rows"],
    weighted: bool,
) -> Float32[Array, "tokens hidden"]:
    """Sum of the rows of each token in the order of `places`, each times its `routing` when `weighted`; -1 adds
    nothing."""
    tokens, k = places.shape
    rows, hidden = y.shape
    threads = 128  # Small blocks: many tokens are under way at a time.

    def body(y, places, routing, out):
        @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 4 + (ptx.SCALAR,))
        def run(_, y, places, routing, out, token):
            m, token = simt.Machine(threads), simt.scalar(token)
            places, routing = simt.array(places), simt.array(routing)
            own = [m.load(places, token * k + j) for j in range(k)]
            here = [place < rows for place in own]

            def read_words(place, column):
                return [simt.Lane(word) for word in _read(ptx.address(y), place, column, hidden)]

            if weighted:
                safe = [m.where(h, place, m.u32(0)) for h, place in zip(here, own, strict=True)]
                factors = [m.load(routing, place) for place in safe]
            for column in _columns(m, hidden):
                with m.when(column < hidden):
                    # Where experts are spread over devices, most of a token's places are elsewhere.
                    parts = [
                        m.cond(h, lambda place=place, column=column: read_words(place, column), [m.u32(0)] * 4)
                        for h, place in zip(here, own, strict=True)
                    ]
                    sums = [m.f32(0.0)] * CHANNELS
                    for j, words in enumerate(parts):
                        for i, word in enumerate(words):
                            pair = ptx.left(word.value, 16), ptx.both(word.value, 0xFFFF0000)
                            for half, bits in enumerate(pair):
                                value = simt.Lane(ptx.as_float(bits))
                                value = value * factors[j] if weighted else value
                                index = 2 * i + half
                                sums[index] = m.where(here[j], sums[index] + value, sums[index])
                    for half in range(0, CHANNELS, 4):
                        vector = ptx.vector_of([s.value for s in sums[half : half + 4]])
                        ptx.store_global(vector, ptx.address(out), ((token * hidden + column + half) * 4).value)

        run(y, places, routing, out, lax.axis_index("token"))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
        grid=(tokens,),
        grid_names=("token",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(y, places, routing)
