"""Per-thread code of a site, written for a `Machine`, so that the tests can run it on the emulator.

A block has 64 channels of all streams of a group of 32 tokens, one of its warps 32 channels of 16 tokens. Of these,
lane 4g + t holds 8 channels from 8t of tokens g and g + 8. `mma.m16n8k16` wants its operands so, if of every 16 of its
channels numbers 2t, 2t + 1, 2t + 8 and 2t + 9 are four neighbours of the lane.
"""

import dataclasses
from typing import Any

from dsv4jax.config import ModelConfig
from dsv4jax.quant import ceil_div
from pallas_kernels import rows as per_row
from pallas_kernels.hyper_connections.mix import (
    MIXES,
    PLACES,
    STREAMS,
    logit,
    put_mix,
    put_parts,
    scale_and_base,
    total,
)
from pallas_kernels.rows import CHANNELS, WORDS
from pallas_kernels.topk.simt import WARP

CHUNK = 4 * CHANNELS
"""Channels of a warp."""
CHUNKS = 2
SLICE = CHUNK * CHUNKS
"""Channels of a block."""
TILE = 16
"""Tokens of a warp."""
TILES = 2
GROUP = TILE * TILES
"""Tokens of a block."""
THREADS = WARP * CHUNKS * TILES
FN_PARTS = 3
"""Parts of the projection's weights in bfloat16."""
LINES = FN_PARTS * MIXES
FN_WORDS = CHUNKS * STREAMS * LINES * CHUNK // 2
"""Words of the weights of a block's channels."""
SUMS = MIXES + 2
"""What a warp sums up for a token: projections, squares of streams, squares of the collapsed stream."""
SUM_WORDS = TILES * CHUNKS * TILE * SUMS


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call."""

    rows: int
    hidden: int

    @property
    def slices(self) -> int:
        """Blocks of a group of tokens."""
        return self.hidden // SLICE


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Memory of a call: arguments, results, sums of slices that blocks leave for each other, shared memory."""

    streams: Any
    output: Any
    pre: Any
    post: Any
    residual: Any
    fn: Any
    base: Any
    scale: Any
    norm: Any
    counters: Any
    new_streams: Any
    x: Any
    elements: Any
    scales: Any
    new_pre: Any
    new_post: Any
    new_residual: Any
    projection: Any
    squares: Any
    collapsed_squares: Any
    weights: Any
    sums: Any


def run_site(m, a: Arrays, shape: Shape, cfg: ModelConfig, block) -> None:
    """A site for the tokens and channels of a block; the blocks of a group wait for each other."""
    slices, hidden = shape.slices, shape.hidden
    group, slice_ = m.divide(block, slices)
    tile, chunk = m.divide(m.warp, CHUNKS)
    g, t = m.lane >> 2, m.lane & 3
    first = group * GROUP
    channel = slice_ * SLICE + chunk * CHUNK + t * CHANNELS
    # Where a lane's share of the weights begins in shared memory, in lines of 16 words. The tiles share the copies.
    line_words = CHUNK // 2
    lane_place = (chunk * (STREAMS * LINES) + g) * line_words + t * WORDS
    copies = [(j, line) for j in range(0, STREAMS, TILES) for line in range(0, LINES, 8)]
    offsets = [((j * LINES + line) * line_words, (line * STREAMS + j) * hidden // 2) for j, line in copies]
    at = (g * (STREAMS * hidden) + tile * hidden + channel) >> 1
    m.copy_fours(a.weights, lane_place + tile * (LINES * line_words), a.fn, at, offsets)

    own = [first + tile * TILE + g + 8 * half for half in range(2)]
    inside = [row < shape.rows for row in own]
    tokens = [m.where(known, row, m.u32(shape.rows - 1)) for known, row in zip(inside, own, strict=True)]
    new, collapsed, squares = zip(*(_settle(m, a, hidden, token, channel) for token in tokens), strict=True)

    m.wait_for_copies(total([square for pair in squares for square in pair]))
    m.sync()
    products = [[m.f32(0.0)] * 4 for _ in range(LINES // 8)]
    for j in range(STREAMS):
        for n in range(LINES // 8):
            b = m.load4(a.weights, lane_place + (j * LINES + 8 * n) * line_words)
            for k in (0, 2):
                left = [new[0][j][k], new[1][j][k], new[0][j][k + 1], new[1][j][k + 1]]
                products[n] = m.multiply(left, b[k : k + 2], products[n])
    # The smallest part first.
    projected = [
        [low + middle + high for high, middle, low in zip(*products[n :: MIXES // 8], strict=True)]
        for n in range(MIXES // 8)
    ]
    _share_sums(m, a, shape, first, slice_, projected, squares)

    m.arrive(a.counters, group)
    for row, known, streams in zip(own, inside, new, strict=True):
        with m.when(known):
            for j, words in enumerate(streams):
                m.store4(a.new_streams, ((row * STREAMS + j) * hidden + channel) >> 1, words)
    weight = per_row.unpack(m, m.load4(a.norm, channel >> 1))
    mixed = first + slice_ + m.warp * slices
    mixes = (mixed < first + GROUP) & (mixed < shape.rows)
    scale, base = scale_and_base(m, a.scale, a.base)
    m.wait(a.counters, group, slices)

    for i in range(ceil_div(GROUP, slices)):
        row = first + slice_ + i * slices
        with m.when((row < first + GROUP) & (row < shape.rows)):
            put_parts(m, a.projection, a.sums, i * PLACES, row, slices)
    square_of_mix = _sum_over_slices(m, a.squares, m.where(mixes, mixed, first), slices, m.lane, WARP)
    row_squares = [_sum_over_slices(m, a.collapsed_squares, row, slices, t, 4) for row in own]
    for row, known, words, square in zip(own, inside, collapsed, row_squares, strict=True):
        values = per_row.normalise(m, per_row.unpack(m, words), weight, square * (1 / hidden), cfg.rms_norm_eps)
        encoded = per_row.fp8(m, values)
        with m.when(known):
            at = row * hidden + channel
            words = [m.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(WORDS)]
            m.store4(a.x, at >> 1, words)
            for i, word in enumerate(encoded.words):
                m.store(a.elements, (at >> 2) + i, word)
            with m.when(t == 0):
                m.store(a.scales, (channel >> 5) * shape.rows + row, m.floats(encoded.scale << 23))
    m.sync()
    with m.when(mixes):
        z = logit(m, a.sums, m.warp * PLACES, square_of_mix * (1 / (STREAMS * hidden)), scale, base, cfg)
        put_mix(m, z, (a.new_pre, a.new_post, a.new_residual), mixed, cfg)
    with m.when(m.tid == THREADS - 1):
        m.leave(a.counters, group, slices)


def _settle(m, a: Arrays, hidden: int, token, channel):
    """A lane's channels of a token: new streams and their collapse in words, and the sums of squares of both."""
    pre, post = m.load4(a.pre, token * STREAMS), m.load4(a.post, token * STREAMS)
    residual = [m.load4(a.residual, (token * STREAMS + i) * STREAMS) for i in range(STREAMS)]
    old = [m.load4(a.streams, ((token * STREAMS + i) * hidden + channel) >> 1) for i in range(STREAMS)]
    output = m.load4(a.output, (token * hidden + channel) >> 1)
    new, collapsed = [[] for _ in range(STREAMS)], []
    square, collapsed_square = m.f32(0.0), m.f32(0.0)
    for word in range(WORDS):
        before, added = [per_row.unpack(m, [old[i][word]]) for i in range(STREAMS)], per_row.unpack(m, [output[word]])
        sums = [None, None]
        for j in range(STREAMS):
            pair = []
            for e in range(2):
                carried = residual[0][j] * before[0][e]
                for i in range(1, STREAMS):
                    carried = m.fma(residual[i][j], before[i][e], carried)
                pair.append(m.fma(post[j], added[e], carried))
            new[j].append(m.pack_bf16(*pair))
            for e, value in enumerate(per_row.unpack(m, [new[j][word]])):
                square = m.fma(value, value, square)
                sums[e] = pre[j] * value if sums[e] is None else m.fma(pre[j], value, sums[e])
        collapsed.append(m.pack_bf16(*sums))
        for value in per_row.unpack(m, [collapsed[word]]):
            collapsed_square = m.fma(value, value, collapsed_square)
    return new, collapsed, (square, collapsed_square)


def _share_sums(m, a: Arrays, shape: Shape, first, slice_, projected, squares) -> None:
    """Adds up the warps' sums over the channels of the block, and leaves them in device memory."""
    g, t = m.lane >> 2, m.lane & 3
    for half in range(2):
        line = (m.warp * TILE + g + 8 * half) * SUMS
        for n, four in enumerate(projected):
            for e in range(2):
                m.store(a.sums, line + t * 2 + (8 * n + e), four[2 * half + e])
        for i, square in enumerate(squares[half]):
            for distance in (1, 2):
                square = square + m.exchange(square, distance)
            with m.when(t == 0):
                m.store(a.sums, line + MIXES + i, square)
    m.sync()

    def of_block(row, k):
        """Sum k of a token of the group."""
        line = (row >> 4) * (CHUNKS * TILE) + (row & (TILE - 1))
        return total([m.load(a.sums, (line + chunk * TILE) * SUMS + k) for chunk in range(CHUNKS)])

    for i in range(0, GROUP * MIXES, THREADS):
        row, k = m.divide(m.tid + i, MIXES)
        m.store(a.projection, ((first + row) * shape.slices + slice_) * MIXES + k, of_block(row, k))
    for i, squares in enumerate((a.squares, a.collapsed_squares)):
        row = m.tid - i * GROUP
        with m.when(row < GROUP):
            m.store(squares, (first + row) * shape.slices + slice_, of_block(row, m.u32(MIXES + i)))


def _sum_over_slices(m, sums, row, slices: int, index, threads: int):
    """Sum of a token's squares over the slices, by neighbouring threads of which `index` says which this is."""
    values = []
    for i in range(0, slices, 4 * threads):
        at = index * 4 + i
        known = at < slices
        four = m.load4(sums, row * slices + m.where(known, at, m.u32(0)))
        values.append(m.where(known, total(four), m.f32(0.0)))
    value, distance = total(values), threads // 2
    while distance:
        value = value + m.exchange(value, distance)
        distance //= 2
    return value
