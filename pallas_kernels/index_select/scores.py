"""Mosaic GPU kernel of the index scores: packed MXFP4 keys in, fp32 scores or their maxima out.

A warpgroup takes 64 entries at a time. Keys are the left operand of the FP8 tensor cores and are unpacked from shared
memory into registers: an E2M1 element and the scale of its group, relative to the largest scale of the entry, make
an E4M3 element. Queries are the right operand, 32 columns (heads) each. The weighted sum over heads is a second matrix
product, of relu(dot) in float16 and the head weights.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
STEP = ENTRIES * RECORD
"""Bytes of one step."""
PROCESSORS = 132
"""Multiprocessors of an H200."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    blocks: int
    """Thread blocks per row of the page table."""
    warpgroups: int
    stages: int = 4
    """Steps in flight per warpgroup."""
    ahead: bool = False
    """Whether keys are unpacked while the products of the step before run; takes 40 more registers."""


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
                best = work, Tiling(blocks, warpgroups, ahead=queries > 1)
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
    rows, places = table.shape
    work = Work(
        queries=elements.shape[1] // HEADS,
        pages=pool.shape[0],
        places=places,
        piece=min(pool.shape[1], ENTRIES),
        parts=max(1, pool.shape[1] // ENTRIES),
        width=width // BLOCK if maxima else width,
        maxima=maxima,
        tiling=tiling,
    )
    warpgroups, stages = tiling.warpgroups, tiling.stages

    def body(*refs):
        row, block, warpgroup = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("warpgroup")
        _body(work, *refs, row, block, warpgroup)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows * work.queries, work.width), jnp.float32),
        grid=(rows, tiling.blocks),
        grid_names=("row", "block"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((warpgroups * stages, STEP // 4), jnp.int32),
            plgpu.SMEM((work.queries * HEADS, DIM), jnp.uint8),
            plgpu.SMEM((32, 8), jnp.int32),
            plgpu.SMEM((64,), jnp.int32),
            plgpu.SMEM((warpgroups * stages + 1, 2), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(pool, table, visible, elements, lanes, jnp.asarray(key_tables()))


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes of a call: `places` pages of a row of the table; a step copies pieces of `piece` entries, `parts` of which
    make a page; `width` results of a row."""

    queries: int
    pages: int
    places: int
    piece: int
    parts: int
    width: int
    maxima: bool
    tiling: Tiling

    @property
    def pieces(self) -> int:
        """Pieces of a step."""
        return ENTRIES // self.piece


_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _body(work: Work, *arguments):
    @plgpu.inline_mgpu(arg_types=(*(_REF,) * 12, *(_SCALAR,) * 3))
    def run(_, *arguments):
        refs, scalars = arguments[:12], arguments[12:]
        device_code(ptx.Machine(128), work, *map(simt.array, refs), *map(simt.scalar, scalars))

    run(*arguments)


def device_code(
    m, work, pool, table, visible, elements, lanes, tables, out, ring, b, words, lookup, barriers, row, block,
    warpgroup,
):  # fmt: skip
    """The code of a thread block."""
    tiling, queries = work.tiling, work.queries
    warpgroups, stages = tiling.warpgroups, tiling.stages
    stride = tiling.blocks * warpgroups
    worker = block * warpgroups + warpgroup
    arrived = m.address(barriers)
    ready = arrived + 8 * warpgroups * stages
    m.init_barriers(arrived, warpgroups * stages + 1)
    arrived = arrived + warpgroup * (8 * stages)
    own = warpgroup * (stages * STEP // 4)
    target = m.address(ring) + own * 4
    # Each warpgroup has another of its warps fetch, so that the schedulers share that work.
    warp = m.warp & 3
    fetches = warp == (warpgroup & 3)

    with m.when(m.tid == 0):
        m.expect(ready, queries * HEADS * DIM + 4 * (256 + 64))
        m.copy(m.address(b), elements, row, queries * HEADS * DIM, queries * HEADS * DIM, ready)
        m.copy(m.address(words), lanes, row, 4 * 256, 4 * 256, ready)
        m.copy(m.address(lookup), tables, m.u32(0), 1, 4 * 64, ready)

    entries, seen = work.places * work.piece * work.parts, m.u32(0)
    for query in range(queries):
        limit = m.load(visible, row * queries + query)
        seen = m.where(limit > seen, limit, seen)
    tiles = (m.where(seen < entries, seen, m.u32(entries)) + (ENTRIES - 1)) >> 6
    steps = m.where(tiles > worker, m.quotient(tiles - worker + (stride - 1), stride)[0], m.u32(0))

    def located(t):
        """Place in the table of this lane's piece of step t, and which part of the page it is."""
        place = (worker + t * stride) * work.pieces + m.where(m.lane < work.pieces, m.lane, m.u32(0))
        last = work.places * work.parts - 1
        place = m.where(place < last, place, m.u32(last))
        return (place, m.u32(0)) if work.parts == 1 else m.quotient(place, work.parts)

    def page_of(t):
        return m.load(table, row * work.places + located(t)[0])

    def fetch(t, slot, page):
        barrier, size = arrived + slot * 8, work.piece * RECORD
        page = m.where(page < work.pages, page, m.where(page >> 31 == 0, m.u32(work.pages - 1), m.u32(0)))
        with m.when(m.lane == 0):
            m.expect(barrier, STEP)
        with m.when(m.lane < work.pieces):
            piece = page * work.parts + located(t)[1]
            m.copy(target + slot * STEP + m.lane * size, pool, piece, size, size, barrier)

    def start(t):
        with m.when(steps > t):
            fetch(m.u32(t), m.u32(t), page_of(m.u32(t)))

    with m.when(fetches):
        for t in range(stages):
            start(t)
    [page] = m.cond(fetches, lambda: [page_of(m.u32(stages))], [m.u32(0)])
    m.wait(ready, m.u32(0))

    entry = warp * 16 + (m.lane >> 2)
    limits = [m.u32(0)] * 2
    if work.maxima:
        limits = [m.load(visible, row * queries + m.where(q < queries, q, m.u32(0))) for q in _columns(m, queries)]

    def take(t, slot, phase, page):
        """This thread's part of the keys of step t; their place becomes that of step t + stages."""
        with m.when(t < steps):
            m.wait(arrived + slot * 8, phase)
        first = own + slot * (STEP // 4) + entry * (RECORD // 4)
        a, factors = unpack_keys(m, ring, lookup, first)
        m.sync_warpgroup(warpgroup + 1)

        def refill():
            m.hold()
            with m.when(t + stages < steps):
                fetch(t + stages, slot, page)
            # Used one step later: nothing waits for it here.
            return [page_of(t + (stages + 1))]

        [following] = m.cond(fetches, refill, [m.u32(0)])
        wraps = slot == stages - 1
        following = [m.where(wraps, m.u32(0), slot + 1), m.where(wraps, phase ^ 1, phase), following]
        return [*a, *factors], following

    def finish(t, products, factors):
        own_words = m.load4(words, m.lane * 8)
        scales = [m.floats(m.load(words, m.lane * 8 + 4 + i)) for i in range(2)]
        results = weighted_sums(m, queries, m.finish_dots(0, products), own_words)
        values = [[results[half][j] * (factors[half] * scales[j]) for j in range(min(2, queries))] for half in range(2)]
        store = store_maxima if work.maxima else store_scores
        store(m, work, out, row, (worker + t * stride) * ENTRIES + entry, values, limits)

    def step(t, *state):
        if tiling.ahead:
            keys, place = list(state[:-3]), state[-3:]
            products = m.start_dots(keys[:16], b, HEADS * queries)
            following, place = take(t + 1, *place)
        else:
            keys, place = take(t, *state)
            products, following = m.start_dots(keys[:16], b, HEADS * queries), []
        finish(t, products, keys[16:])
        return [t + 1, *following, *place]

    place = [m.u32(0), m.u32(0), page]
    keys, place = take(m.u32(0), *place) if tiling.ahead else ([], place)
    m.while_loop(lambda t, *_: t < steps, step, [m.u32(0), *keys, *place])


def _columns(m, queries):
    """The queries, of at most two, of which this thread has results."""
    return [(m.lane & 3) * 2 + j for j in range(min(2, queries))]


def weighted_sums(m, queries, products, own_words):
    """Σ relu(dot) x weight for the two entries of a thread and two queries: [half][j]."""
    quad = m.lane & 3
    # Query i is column i of its product: element i % 2 of lane i // 2 of each four.
    results = [[None] * 2 for _ in range(2)]
    for i in range(queries):
        c = [m.f32(0.0)] * 4
        for s in range(2):
            d = products[16 * i + 8 * s :][:8]
            heads = [m.pack_relu(d[2 * j], d[2 * j + 1]) for j in range(4)]
            c = m.weighted(heads, own_words[2 * s : 2 * s + 2], c)
        for half in range(2):
            value, before = c[2 * half + i % 2], results[half][i % 2]
            results[half][i % 2] = value if before is None else m.where(quad == i // 2, value, before)
    return results


def store_scores(m, work, out, row, entry, values, _):
    for j, query in enumerate(_columns(m, work.queries)):
        with m.when(query < work.queries):
            start = (row * work.queries + query) * work.width + entry
            for half in range(2):
                m.store(out, start + BLOCK * half, values[half][j])


def store_maxima(m, work, out, row, entry, values, limits):
    quad, columns = m.lane & 3, len(values[0])
    usable = [[entry + BLOCK * half < limit for limit in limits] for half in range(2)]
    kept = [[m.where(usable[half][j], values[half][j], m.f32(-math.inf)) for j in range(columns)] for half in range(2)]
    best = block_maxima(m, kept)
    query = quad * 2 + ((m.lane >> 3) & 1) if columns == 2 else quad
    leads = (m.lane & (4 if columns == 2 else 12)) == 0
    block = (entry >> 3) + (m.lane >> 4)
    with m.when(leads & (query < work.queries)):
        m.store(out, (row * work.queries + query) * work.width + block, best)


def block_maxima(m, values):
    """The largest, no NaN, of [half][j] over the eight lanes of equal number modulo 4, those of a block of entries: of
    half lane // 16 and, where there are two, j = lane // 8 % 2."""

    def split(low, high, distance):
        upper = (m.lane & distance) != 0
        return m.maximum(m.where(upper, high, low), m.exchange(m.where(upper, low, high), distance))

    best = [split(low, high, 16) for low, high in zip(*values, strict=True)]
    best = split(*best, 8) if len(best) == 2 else m.maximum(best[0], m.exchange(best[0], 8))
    best = m.maximum(best, m.exchange(best, 4))
    return m.maximum(best, m.f32(-math.inf))


def unpack_keys(m, ring, lookup, place):
    """This thread's part of 64 keys as left operand of the products, and the largest scale of its two entries, fp32.

    A thread has a whole group of 32 channels of each of its entries, so that it needs one table for each.

    Args:
      ring: u32, records.
      lookup: u32, `key_tables`.
      place: word at which the first of its two entries begins; the other is BLOCK entries behind.
    """
    quad = m.lane & 3
    starts = 0, BLOCK * (RECORD // 4)
    both = m.load_near(ring, place, [start + 16 for start in starts])
    words = m.load_near(ring, place + quad * 4, [start + word for start in starts for word in range(4)])
    # The upper byte of each half belongs to an entry: all four scales of it in turn, then that of this thread's group.
    tops = m.larger_halves(
        m.larger_halves(m.permute(*both, m.u32(0x5410)), m.permute(*both, m.u32(0x7632))),
        m.larger_halves(m.permute(*both, m.u32(0x4501)), m.permute(*both, m.u32(0x6723))),
    )
    upper = 0xFF00FF00
    tops = tops & upper
    down = tops - (m.permute(*both, quad * 0x1111 + 0x4400) & upper)
    downs = [(down >> 8) & 0xFF, down >> 24]
    fast = []
    for d in downs:
        fast += [m.u32(0x54504800) - d * 0x08080800, m.u32(0x64605C58) - d * 0x08080808]

    def look_up():
        slow = []
        for d in downs:
            index = m.where(d < 31, d, m.u32(31)) * 2
            slow += [m.load(lookup, index), m.load(lookup, index + 1)]
        return slow

    # A scale at most 2^7 below the largest needs no look at the table.
    tables = m.cond(m.any((down & 0xF800F800) != 0), look_up, fast)
    a = [None] * 16
    for half in range(2):
        low, high = tables[2 * half : 2 * half + 2]
        for word, w in enumerate(words[4 * half : 4 * half + 4]):
            codes, even = w & 0x77777777, w << 4
            for part in range(2):
                magnitude = m.permute(low, high, codes >> 16 if part else codes)
                # The sign of an even channel is bit 7 of a byte of `even`, of an odd one that of a byte of `w`.
                signs = m.permute(even, w, m.u32((0x5140, 0x7362)[part]))
                a[4 * word + 2 * part + half] = magnitude | (signs & 0x80808080)
    return a, [m.floats((tops & 0xFF00) << 15), m.floats((tops & 0xFF000000) >> 1)]
