"""Mosaic GPU kernel of `topk`: a cluster of blocks streams one row through shared memory and selects on the fly."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.topk import select, simt

WIDTH = 256
"""A row of the kernel is a whole number of lines of this many scores: the copy engine moves boxes of lines."""
MAX_K = 2048


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut."""

    blocks: int
    """Thread blocks (a cluster) per row, at most 8; tile t belongs to block t % blocks."""
    warpgroups: int = 8
    """Warpgroups of 128 threads per block; a power of 2."""
    tile: int = 16_384
    """Scores per copy; a multiple of 4 per thread in each part."""
    parts: int = 2
    """Parts in which a tile is taken when it has more candidates than the buffer can hold."""
    stages: int = 2
    """Copies in flight."""
    capacity: int = 9216
    """Candidates a block can hold: a multiple of its threads, at least a part + 2 k."""
    resident: int = 132
    """Blocks that run at the same time; they take the remaining rows in turn."""

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def part(self) -> int:
        return self.tile // self.parts

    def obstacle(self, k: int) -> str | None:
        """Why `k` results cannot be selected with this tiling, or None."""
        if self.part * self.parts != self.tile or self.part % (4 * self.threads) or self.tile % WIDTH:
            return "tile is not a multiple of 4 per thread in each part"
        if self.tile < 2 * k or self.capacity % self.threads or self.capacity < max(self.part + 2 * k, self.blocks * k):
            return "tile or capacity are too small"
        if 4 * self.stages * self.tile + 8 * self.capacity + 4 * self.threads > 224 * 1024:
            return "copies and candidates exceed the shared memory"
        return None


def default_tiling(rows: int, entries: int, k: int = 512) -> Tiling:
    """One block on each of 132 multiprocessors where there is enough to read.

    Clusters of 8 blocks are for up to 8 rows: more are not resident together. More results need smaller tiles beside
    their candidates.
    """
    tiling = Tiling(1) if k <= 512 else Tiling(1, tile=8192, parts=1, capacity=16_384)
    most = 8 if rows <= 8 else 4
    blocks = 1
    while blocks < most and rows * blocks * 2 <= tiling.resident and entries // (blocks * 2) >= tiling.tile:
        blocks *= 2
    return dataclasses.replace(tiling, blocks=blocks)


@functools.partial(jax.jit, static_argnames=("k", "tiling"))
def topk_pallas(
    scores: Float[Array, "rows entries"], lengths: Int32[Array, " rows"], k: int, tiling: Tiling | None = None
) -> Int32[Array, "rows k"]:
    """See `topk`. `entries` is padded to a multiple of WIDTH, which copies the scores unless it is one already.

    Without a tiling, a row that is alone and long takes two rounds, as a cluster would use 8 multiprocessors only; its
    entries are padded to a multiple of 64 WIDTH.
    """
    rows, entries = scores.shape
    if tiling is None and rows == 1 and entries > 1 << 19 and k <= 512:
        return _in_two_rounds(scores, lengths, k)
    tiling = tiling or default_tiling(rows, entries, k)
    if obstacle := tiling.obstacle(k):
        raise ValueError(f"{tiling} for k = {k}: {obstacle}")
    blocks, tile, stages = tiling.blocks, tiling.tile, tiling.stages
    scores = jnp.pad(scores, ((0, 0), (0, -entries % WIDTH))).reshape(rows, -1, WIDTH)
    threads = tiling.threads
    clusters = min(rows, tiling.resident // blocks)
    # Candidates a block may have left when its part of the row has been read.
    final = tiling.capacity // blocks if blocks > 1 else k

    def body(scores, lengths, out, ring, candidates, indices, histogram, warps, counters, arrived):
        cluster, rank = lax.axis_index("cluster"), lax.axis_index("block")
        leader = lax.axis_index("warpgroup") == 0
        scratch = (candidates, indices, histogram, warps, counters)

        def length_of(row):
            return lax.clamp(0, lengths[row], entries)

        def tiles_of(row):
            """Tiles of this block in a row; at least one, so that every row has a step."""
            tiles = lax.div(length_of(lax.min(row, rows - 1)) + (tile - 1), tile)
            return lax.max(lax.div(tiles - rank + (blocks - 1), blocks), 1)

        def fetch(number, cursor):
            """Starts copy `number` of this block, which is the tile at the cursor; returns the next cursor."""
            row, t, tiles = cursor
            stage = lax.rem(number, stages)

            @pl.when(leader & (row < rows))
            def _():
                lines = pl.ds((t * blocks + rank) * (tile // WIDTH), tile // WIDTH)
                plgpu.copy_gmem_to_smem(scores.at[row, lines], ring.at[stage], arrived.at[stage])

            def next_row():
                return row + clusters, jnp.int32(0), tiles_of(row + clusters)

            return lax.cond(t + 1 == tiles, next_row, lambda: (row, t + 1, tiles))

        def select_row(i, carry):
            row = cluster + i * clusters
            length = length_of(row)
            tiles = tiles_of(row)

            def step(t, carry):
                number, cursor, slot, count, threshold = carry
                stage = lax.rem(number, stages)
                plgpu.barrier_wait(arrived.at[stage])
                first = (t * blocks + rank) * tile
                slot, count, threshold = _append(
                    threads, tiling, k, ring.at[stage], first, length, slot, count, threshold, *scratch
                )
                cursor = fetch(number + stages, cursor)
                last = t + 1 == tiles
                limit = jnp.where(last, final, tiling.capacity - tiling.part)
                slack = jnp.where(last, final - k, k // 8)
                count, threshold = _trim(threads, tiling, k, count, threshold, limit, slack, *scratch)
                return number + 1, cursor, slot, count, threshold

            start = (*carry, jnp.int32(0), jnp.float32(-math.inf))
            number, cursor, slot, count, _ = lax.fori_loop(0, tiles, step, start)
            _finish(threads, tiling, k, out, row, rank, count, *scratch)
            return number, cursor, slot

        cursor = (cluster, jnp.int32(0), tiles_of(cluster))
        for number in range(stages):
            cursor = fetch(jnp.int32(number), cursor)
        _setup(threads, tiling, *scratch)
        my_rows = lax.div(rows - cluster + (clusters - 1), clusters)
        lax.fori_loop(0, my_rows, select_row, (jnp.int32(0), cursor, jnp.int32(0)))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=tiling.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, tile // WIDTH, WIDTH), jnp.float32),
            plgpu.SMEM((tiling.capacity,), jnp.int32),
            plgpu.SMEM((tiling.capacity,), jnp.int32),
            plgpu.SMEM((threads + simt.WARP,), jnp.int32),
            plgpu.SMEM((2 * simt.WARP,), jnp.int32),
            plgpu.SMEM((select.COUNTERS,), jnp.int32),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(scores, lengths)


def _in_two_rounds(scores: Float[Array, "1 entries"], lengths: Int32[Array, " 1"], k: int) -> Int32[Array, "1 k"]:
    """`topk_pallas` of a row cut into 64: the best k of each part, then the best k of those."""
    parts = 64
    # With about 16 thousand scores per part, a tile of the default size would leave every other block idle.
    tiling = Tiling(2, tile=8192, parts=1)
    entries = scores.shape[1]
    scores = jnp.pad(scores, ((0, 0), (0, -entries % (parts * WIDTH)))).reshape(parts, -1)
    size = scores.shape[1]
    starts = jnp.arange(parts, dtype=jnp.int32) * size
    found = topk_pallas(scores, jnp.clip(jnp.minimum(lengths, entries) - starts, 0, size), k, tiling)
    best_of_parts = jnp.where(found < 0, -math.inf, jnp.take_along_axis(scores, found, 1)).reshape(1, -1)
    # Places ascend with the indices in the row, so that ties still go to the smaller index.
    places = topk_pallas(best_of_parts, jnp.full((1,), parts * k, jnp.int32), k, dataclasses.replace(tiling, blocks=8))
    indices = (found + starts[:, None]).reshape(1, -1)
    return jnp.where(places < 0, -1, jnp.take_along_axis(indices, places, 1))


_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())
_I32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
_F32 = plgpu.ShapeDtypeStruct((), jnp.float32, layout=_SCALAR)


def _buffer(tiling: Tiling, scratch) -> select.Buffer:
    candidates, indices, *rest = map(simt.array, scratch)
    return select.Buffer(*rest, scores=candidates, indices=indices, capacity=tiling.capacity)


def _setup(threads, tiling, *scratch):
    @plgpu.inline_mgpu(arg_types=(_REF,) * 5, return_type=None)
    def run(_, *scratch):
        select.initialise(simt.Machine(threads), _buffer(tiling, scratch))

    run(*scratch)


def _append(threads, tiling, k, *arguments):
    @plgpu.inline_mgpu(arg_types=(_REF, *(_SCALAR,) * 5, *(_REF,) * 5), return_type=(_I32, _I32, _F32))
    def run(_, tile, first, length, slot, count, threshold, *scratch):
        m = simt.Machine(threads)
        tile = simt.array(tile)
        first, length, slot, count, threshold = map(simt.scalar, (first, length, slot, count, threshold))

        def part(p):
            start = p * tiling.part + m.tid * 4
            scores = [x for offset in range(0, tiling.part, 4 * threads) for x in m.load4(tile, start + offset)]
            return scores, lambda i: first + start + (i // 4 * 4 * threads + i % 4)

        buffer = _buffer(tiling, scratch)
        state = select.append_large(m, buffer, part, tiling.parts, length, count, threshold, slot, k)
        return tuple(map(simt.result, state))

    return run(*arguments)


def _trim(threads, tiling, k, *arguments):
    @plgpu.inline_mgpu(arg_types=((_SCALAR,) * 4 + (_REF,) * 5), return_type=(_I32, _F32))
    def run(_, count, threshold, limit, slack, *scratch):
        state = map(simt.scalar, (count, threshold, limit, slack))
        state = select.trim(simt.Machine(threads), _buffer(tiling, scratch), *state, k)
        return tuple(map(simt.result, state))

    return run(*arguments)


def _finish(threads, tiling, k, *arguments):
    @plgpu.inline_mgpu(arg_types=(_REF, *(_SCALAR,) * 3, *(_REF,) * 5), return_type=None)
    def run(_, out, row, rank, count, *scratch):
        row, rank, count = map(simt.scalar, (row, rank, count))
        buffer = _buffer(tiling, scratch)
        select.finish(simt.Machine(threads), buffer, simt.array(out), row * k, rank, tiling.blocks, count, k)

    run(*arguments)
