"""Mosaic GPU kernel of the index scores: packed MXFP4 keys in, fp32 scores out.

A warpgroup takes 64 entries at a time. Keys are the left operand of the FP8 tensor cores and are unpacked from shared
memory into registers: an E2M1 element and the scale of its group, relative to the largest scale of the entry, make
an E4M3 element. Queries are the right operand, 32 columns (heads) each. The weighted sum over heads is a second matrix
product, of relu(dot) in float16 and the head weights.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.index_select import ptx
from pallas_kernels.index_select.pack import DIM, HEADS, KEY_EXPONENT
from pallas_kernels.topk import simt

BLOCK = 8
"""Entries of a block of `maxima`."""
ENTRIES = 64
"""Entries of one step."""
RECORD = 68
"""Bytes of a key: 64 of elements, 4 of scales."""
NARROW = 8
"""Scales of an entry that differ by at most 2^8 need no look at the table."""
PROCESSORS = 132
"""Multiprocessors of an H200."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    blocks: int
    """Thread blocks per row of the page table."""
    warpgroups: int
    stages: int = 4
    """Steps in flight per warpgroup."""


def default_tiling(rows: int, queries: int, width: int) -> Tiling:
    """The tiling of least work on the busiest of 132 multiprocessors; of several the one with most warpgroups.

    A block costs what it takes to start, about as much as two steps of its warpgroups. The number of warpgroups is what
    the registers allow; with one query they allow two blocks of 4 or one of 8 on a multiprocessor.
    """
    choices = (8, 4) if queries == 1 else (4,) if queries == 2 else (3,) if queries <= 6 else (2,)
    best = None
    for warpgroups in choices:
        together = choices[0] // warpgroups
        most = max(1, width // (ENTRIES * warpgroups * 4))
        fewest = min(most, max(1, PROCESSORS * together // rows))
        for blocks in range(fewest, most + 1):
            steps = -(-width // (ENTRIES * warpgroups * blocks))
            work = -(-rows * blocks // PROCESSORS) * warpgroups * (steps + 2)
            if best is None or work < best[0]:
                best = work, Tiling(blocks, warpgroups)
    return best[1]


def key_tables() -> np.ndarray:
    """Words 2d, 2d + 1: E4M3 of the 8 E2M1 magnitudes x 2^(3 - d), for a scale 2^d below the largest of the entry."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** (KEY_EXPONENT - np.arange(32))[:, None]
    return table.astype(jnp.float8_e4m3fn).view(np.int32).reshape(-1)


def scores(
    pool: UInt8[Array, "pages per_page record"],
    table: Int32[Array, "rows places"],
    visible: Int32[Array, "rows queries"],
    elements: UInt8[Array, "rows columns dim"],
    lanes: Int32[Array, "rows 32 8"],
    width: int,
    tiling: Tiling,
    maxima: bool = False,
) -> Float[Array, "results width_or_blocks"]:
    """Scores of the entries that some query of the row sees; the others are not written.

    With `maxima`, instead of scores the largest of each block of BLOCK entries of those that the query sees, NaN left
    out; -inf where there is none. Blocks behind the last entry that some query of the row sees are not written.

    Args:
      pool: MXFP4 records; entries per page as `kernel.obstacle` allows.
      table: pages of each row; page numbers are clamped to the pool, so that any number is safe where nothing is seen.
      visible: each query sees the first so many entries; clamped to what the table holds.
      elements: queries of each row, from `pack_queries`, with `lanes`.
      width: entries of a row of the result, a multiple of 64; result row = row * queries + query.

    Keys are exact unless scales of an entry differ by more than about 2^11, then rounded to 2^-12 of the largest. Each
    head's dot product is rounded to float16. A scale byte of 255 (NaN) is not recognised: the cache never holds one,
    see `quant.pack_mxfp4`.
    """
    queries = elements.shape[1] // HEADS
    pages, size = pool.shape[:2]
    rows, places = table.shape
    pieces = max(1, ENTRIES // size)
    size = min(size, ENTRIES)
    parts = pool.shape[1] // size
    # Copies are whole lines and a multiple of 128 bytes: at small sizes a piece brings some bytes of the next.
    line = 4 * size
    pitch = -(-size * RECORD // 128) * 128
    pool = pool.reshape(-1, line)
    warpgroups, stages = tiling.warpgroups, tiling.stages
    stride = tiling.blocks * warpgroups

    def body(pool, table, most, visible, elements, lanes, tables, out, ring, b, words, lookup, arrived, ready):
        row, block = lax.axis_index("row"), lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup")
        worker = block * warpgroups + warpgroup
        tiles = lax.div(lax.min(most[row], places * size * parts) + (ENTRIES - 1), ENTRIES)
        steps = lax.div(tiles - worker + (stride - 1), stride)

        def pages_of(t):
            """Where the pieces of step t are in the pool."""
            first = (worker + t * stride) * pieces
            found = []
            for i in range(pieces):
                place = lax.min(first + i, places * parts - 1)
                page = table[row, lax.div(place, parts)]
                found.append(lax.clamp(0, page, pages - 1) * parts + lax.rem(place, parts))
            return tuple(found)

        def fetch(t, found):
            slot = warpgroup * stages + lax.rem(t, stages)
            for i, page in enumerate(found):
                lines = pool.at[pl.ds(page * (size * RECORD // line), pitch // line)]
                plgpu.copy_gmem_to_smem(lines, ring.at[slot, i], arrived.at[slot])

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(elements.at[row], b, ready)
            plgpu.copy_gmem_to_smem(lanes.at[row], words, ready)
            plgpu.copy_gmem_to_smem(tables, lookup, ready)

        for t in range(stages):
            pl.when(t < steps)(functools.partial(lambda t: fetch(t, pages_of(t)), t))
        plgpu.barrier_wait(ready)

        def step(t, found):
            slot = warpgroup * stages + lax.rem(t, stages)
            plgpu.barrier_wait(arrived.at[slot])
            following = pages_of(t + stages + 1)
            first = (worker + t * stride) * ENTRIES
            _step(queries, size, pitch, width, maxima, out, ring.at[slot], b, words, lookup, visible, row, first)

            @pl.when(t + stages < steps)
            def _():
                fetch(t + stages, found)

            return following

        lax.fori_loop(0, steps, step, pages_of(stages))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows * queries, width // BLOCK if maxima else width), jnp.float32),
        grid=(rows, tiling.blocks),
        grid_names=("row", "block"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((warpgroups * stages, pieces, pitch // line, line), jnp.uint8),
            plgpu.SMEM((queries * HEADS, DIM), jnp.uint8),
            plgpu.SMEM((32, 8), jnp.int32),
            plgpu.SMEM((64,), jnp.int32),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=warpgroups * stages),
            plgpu.Barrier(num_arrivals=3),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(pool, table, visible.max(1), visible, elements, lanes, jnp.asarray(key_tables()))


_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _step(queries, size, pitch, width, maxima, *arguments):
    """Scores of 64 entries by one warpgroup: from its buffer in shared memory to the results in device memory."""

    @plgpu.inline_mgpu(arg_types=(*(_REF,) * 6, *(_SCALAR,) * 2), return_type=None)
    def run(_, out, ring, b, words, lookup, visible, row, first):
        m = ptx.Machine(128)
        out, ring, b, words, lookup, visible = map(simt.array, (out, ring, b, words, lookup, visible))
        ring = simt.Array(ring.pointer, lookup.element)
        row, first = simt.scalar(row), simt.scalar(first)
        entry = (m.warp & 3) * 16 + (m.lane >> 2)
        places = [place_of(entry + 8 * i, size, pitch) for i in range(2)]
        a, factors = unpack_keys(m, ring, lookup, places)
        utils.warpgroup_barrier()
        products = m.dots(a, b, queries * HEADS)
        quad = m.lane & 3
        own = m.load4(words, m.lane * 8)
        scales = [m.floats(m.load(words, m.lane * 8 + 4 + i)) for i in range(2)]
        # Query i is column i of its product: element i % 2 of lane i // 2 of each four.
        results = [[None] * 2 for _ in range(2)]
        for i in range(queries):
            c = [m.f32(0.0)] * 4
            for s in range(2):
                d = products[16 * i + 8 * s : 16 * i + 8 * s + 8]
                heads = [m.pack_relu(d[2 * j], d[2 * j + 1]) for j in range(4)]
                c = m.weighted(heads, own[2 * s : 2 * s + 2], c)
            for half in range(2):
                value, before = c[2 * half + i % 2], results[half][i % 2]
                results[half][i % 2] = value if before is None else m.where(quad == i // 2, value, before)
        for j in range(min(2, queries)):
            query = quad * 2 + j
            values = [results[half][j] * (factors[half] * scales[j]) for half in range(2)]
            if maxima:
                own = row * queries + m.where(query < queries, query, m.u32(0))
                seen = m.load(visible, own)
                for half in range(2):
                    at = first + entry + 8 * half
                    best = block_maximum(m, values[half], at < seen)
                    with m.when((query < queries) & (m.lane < 4)):
                        m.store(out, own * (width // BLOCK) + (at >> 3), best)
                continue
            with m.when(query < queries):
                start = (row * queries + query) * width + first
                for half in range(2):
                    m.store(out, start + entry + 8 * half, values[half])

    run(*arguments)


def block_maximum(m, value, usable):
    """The largest usable value, no NaN, of the eight lanes of equal number modulo 4: those of a block of entries."""
    best = m.where(usable, value, m.f32(-math.inf))
    for distance in (4, 8, 16):
        best = m.maximum(best, m.exchange(best, distance))
    return m.maximum(best, m.f32(-math.inf))


def place_of(entry, size, pitch):
    """Word of an entry's record in a step's buffer."""
    if size == ENTRIES:
        return entry * (RECORD // 4)
    shift = size.bit_length() - 1
    return (entry >> shift) * (pitch // 4) + (entry & (size - 1)) * (RECORD // 4)


def unpack_keys(m, ring, lookup, places):
    """This thread's part of 64 keys as left operand of `ptx.dots`, and the largest scale of its two entries, fp32.

    Args:
      ring: u32, records.
      lookup: u32, `key_tables`.
      places: word at which each of the two entries begins.
    """
    quad = m.lane & 3
    zero = m.u32(0)
    tops, exponents, bottom = [], [], []
    for place in places:
        scales = m.load(ring, place + 16)
        e = [m.permute(scales, zero, m.u32(0x4440 + g)) for g in range(4)]
        tops.append(_extreme(m, e, lambda x, y: x > y))
        bottom.append(_extreme(m, e, lambda x, y: x < y))
        exponents.append(e)
    fast, slow = [], []
    for top, e in zip(tops, exponents, strict=True):
        low, high = m.u32(0x54504800) - top * 0x08080800, m.u32(0x64605C58) - top * 0x08080808
        for x in e:
            fast += [x * 0x08080800 + low, x * 0x08080808 + high]

    def look_up():
        for top, e in zip(tops, exponents, strict=True):
            for x in e:
                down = top - x
                index = m.where(down < 31, down, m.u32(31)) * 2
                slow.extend([m.load(lookup, index), m.load(lookup, index + 1)])
        return slow

    wide = (tops[0] - bottom[0] > NARROW) | (tops[1] - bottom[1] > NARROW)
    tables = m.cond(m.any(wide), look_up, fast)
    a = [None] * 16
    for half, place in enumerate(places):
        for g in range(4):
            low, high = tables[8 * half + 2 * g : 8 * half + 2 * g + 2]
            w = m.load(ring, place + quad + 4 * g)
            codes, even = w & 0x77777777, w << 4
            for part in range(2):
                magnitude = m.permute(low, high, codes >> 16 if part else codes)
                # The sign of an even channel is bit 7 of a byte of `even`, of an odd one that of a byte of `w`.
                signs = m.permute(even, w, m.u32((0x5140, 0x7362)[part]))
                a[4 * g + 2 * part + half] = magnitude | (signs & 0x80808080)
    return a, [m.floats(top << 23) for top in tops]


def _extreme(m, values, better):
    best = values[0]
    for x in values[1:]:
        best = m.where(better(x, best), x, best)
    return best
