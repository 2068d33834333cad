"""Streaming selection of the k best (score, index) pairs of a row by one thread block or one cluster.

A block keeps a buffer of candidates in shared memory and a threshold below which nothing can be selected any more. It
appends what lies above the threshold and, whenever the buffer might not hold another part of a tile, drops all but
about the best k and raises the threshold to the last of them. Indices arrive in ascending order, so a later score equal
to the threshold loses its tie and `>` is exact. This needs one pass over the scores and no assumption about them: a bad
order only means that the buffer is trimmed more often.

All functions are per-thread code for a `Machine`; every thread of the block calls them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from pallas_kernels.topk import block
from pallas_kernels.topk.block import COUNTERS

_KEPT, _TOTAL = 6, 7
"""Uses of `Buffer.counters` beside those of `block` and the first three, which count the candidates of consecutive
tiles."""
_GROUPS = 1024
"""The first threshold of a row comes from the maxima of about this many groups of scores, or of twice k if more."""
_TOGETHER = 8
"""Scores of a thread that are compared before the warp votes on whether one of them is a candidate."""
_FEW = 4
"""Threads of a warp up to which each stores its candidates on its own."""

_NEGATIVE_INFINITY_KEY = 0x007FFFFF
_NEGATIVE_ZERO_KEY = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Buffer(block.Scratch):
    """Candidates and scratch in shared memory; the histogram has threads + 1 elements, the first three counters start
    at zero."""

    scores: Any
    """u32 [capacity]: bits of the scores."""
    indices: Any
    """u32 [capacity]"""
    capacity: int
    """Candidates it can hold: at least 2 k more than a part of a tile has scores (see `append_large`), and k for each
    block of a cluster; a multiple of the number of threads."""


def initialise(m, buffer: Buffer) -> None:
    m.store(buffer.histogram, m.tid, m.u32(0))
    with m.when(m.tid < COUNTERS):
        m.store(buffer.counters, m.tid, m.u32(0))
    m.sync()


def sortable(m, x):
    """Unsigned keys in the order of float32 scores, with one zero."""
    bits = m.bits(x)
    bits = m.where(bits == 0x80000000, m.u32(0), bits)
    return bits ^ m.where(bits >= 0x80000000, m.u32(0xFFFFFFFF), m.u32(0x80000000))


def score_of(m, key):
    """Inverse of `sortable`."""
    return m.floats(key ^ m.where(key >= 0x80000000, m.u32(0x80000000), m.u32(0xFFFFFFFF)))


def append(m, buffer: Buffer, scores, index_of: Callable, length, count, threshold, slot, k: int):
    """Adds the scores above the threshold to the buffer; returns the new count and threshold. NaN is never above.

    Args:
      scores: this thread's elements of the tile.
      index_of: index_of(i) is the index of scores[i] in the row, ascending in i and over the tiles.
      length: scores with an index from here on do not take part.
      count, threshold: candidates so far, and what they must exceed; 0 and -inf at the start of a row.
      slot: number of the tile modulo 3: a counter is cleared one tile after its last reader, one before its next use.
    """
    scores = m.cond(
        index_of(len(scores) - 1) >= length,
        lambda: [m.where(index_of(i) < length, x, m.f32(-math.inf)) for i, x in enumerate(scores)],
        scores,
    )
    [threshold] = m.cond(
        (count == 0) & (threshold == -math.inf),
        lambda: [_first_threshold(m, buffer, scores, k)],
        [threshold],
    )
    for start in range(0, len(scores), _TOGETHER):
        numbers = range(start, min(start + _TOGETHER, len(scores)))
        above = [scores[i] > threshold for i in numbers]
        some = above[0]
        for a in above[1:]:
            some = some | a
        lanes = m.popcount(m.ballot(some))
        with m.when(lanes > 0):

            def element(i, start=start):
                return m.bits(scores[start + i]), index_of(start + i)

            few = lanes <= _FEW
            with m.when(few):
                _store_few(m, buffer, slot, count, above, element)
            with m.when(~few):
                _store_many(m, buffer, slot, count, above, element)
    m.sync()
    count = count + m.load(buffer.counters, slot)
    with m.when(m.tid == 0):
        m.store(buffer.counters, m.where(slot == 0, m.u32(2), slot - 1), m.u32(0))
    return [count, threshold]


def append_large(m, buffer: Buffer, part: Callable, parts: int, length, count, threshold, slot, k: int):
    """`append` for a tile of which the buffer might not hold all; returns the next slot, the count and the threshold.

    Args:
      part: part(p) returns the `scores` and `index_of` of a part of the tile, of which the buffer holds capacity - 2 k.
        Called with numbers and within a loop, p = 0 to parts - 1.
      slot: where the last append counted; the next one takes (slot + 1) % 3.
    """

    def next_slot(slot):
        return m.where(slot == 2, m.u32(0), slot + 1)

    pieces = [part(m.u32(p)) for p in range(parts)]
    each = len(pieces[0][0])
    scores = [x for piece, _ in pieces for x in piece]
    slot = next_slot(slot)
    total, threshold = append(
        m, buffer, scores, lambda i: pieces[i // each][1](i % each), length, count, threshold, slot, k
    )

    def again(p, slot, count, threshold):
        slot = next_slot(slot)
        count, threshold = append(m, buffer, *part(p), length, count, threshold, slot, k)
        limit = m.u32(buffer.capacity - each * m.threads)
        return [p + 1, slot, *trim(m, buffer, count, threshold, limit, m.u32(k // 8), k)]

    def in_parts():
        # The candidates from before the tile are still in place.
        return m.while_loop(lambda p, *_: p < parts, again, [m.u32(0), slot, count, threshold])[1:]

    return m.cond(total > buffer.capacity, in_parts, [slot, total, threshold])


def trim(m, buffer: Buffer, count, threshold, limit, slack, k: int):
    """If there are more than `limit` >= k + slack candidates, keeps the best k and up to `slack` more and raises the
    threshold; returns the count and the threshold."""
    return m.cond(count > limit, lambda: _keep_best(m, buffer, count, slack, k), [count, threshold])


def finish(m, buffer: Buffer, out, start, rank, blocks: int, count, k: int) -> None:
    """Writes the best k of all candidates of the cluster to out[start:], ascending, then -1.

    Each block holds at most capacity / blocks candidates; a block that works alone at most k.
    """
    if blocks > 1:
        count = _gather(m, buffer, rank, blocks, count)
        count, _ = trim(m, buffer, count, m.f32(0.0), m.u32(k), m.u32(0), k)
    with m.when(rank == 0):
        _emit(m, buffer, out, start, count, k)


def _gather(m, buffer: Buffer, rank, blocks: int, count):
    """Moves the candidates of a cluster into the buffer of block 0; returns their number there, 0 in other blocks."""
    with m.when(m.tid == 0):
        m.store(buffer.counters, _TOTAL, count)
    m.cluster_sync()
    before, total = m.u32(0), m.u32(0)
    for peer in range(blocks):
        held = m.load(m.peer(buffer.counters, peer), _TOTAL)
        before = before + m.where(rank > peer, held, m.u32(0))
        total = total + held
    with m.when(rank > 0):
        for start in range(0, buffer.capacity // blocks, m.threads):
            place = m.tid + start
            with m.when(place < count):
                for array in (buffer.scores, buffer.indices):
                    m.store(m.peer(array, 0), before + place, m.load(array, place))
    m.cluster_sync()
    return m.where(rank == 0, total, m.u32(0))


def _emit(m, buffer: Buffer, out, start, count, k: int) -> None:
    """Writes the `count` <= k indices of the buffer to out[start:], ascending, then -1."""
    places = [m.tid + first for first in range(0, k, m.threads)]
    held = [place < count for place in places]
    indices = [m.load(buffer.indices, place) for place in places]
    low, high = block.extremes(m, buffer, _candidates(m, count, lambda place: m.load(buffer.indices, place)))
    shift = block.digit_shift(m, high - low)
    buckets = [m.where(h, (index - low) >> shift, m.u32(0)) for h, index in zip(held, indices, strict=True)]
    for h, place in zip(held, places, strict=True):
        with m.when(~h & (place < k)):
            m.store(out, start + place, m.u32(0xFFFFFFFF))
    # Counting sort by bucket, whose order inside is arbitrary, then a rank inside the bucket.
    orders = []
    for h, bucket in zip(held, buckets, strict=True):
        orders += m.cond(h, lambda bucket=bucket: [m.atomic_add(buffer.histogram, bucket, m.u32(1))], [m.u32(0)])
    m.sync()
    size = m.load(buffer.histogram, m.tid)
    before = block.exclusive_sum(m, buffer, size)
    m.store(buffer.histogram, m.tid, before)
    with m.when(m.tid == 0):
        m.store(buffer.histogram, m.threads, count)
    m.sync()
    firsts = [m.load(buffer.histogram, bucket) for bucket in buckets]
    lasts = [m.load(buffer.histogram, bucket + 1) for bucket in buckets]
    for h, first, order, index in zip(held, firsts, orders, indices, strict=True):
        with m.when(h):
            m.store(buffer.scores, first + order, index)
    m.sync()

    for h, first, last, index in zip(held, firsts, lasts, indices, strict=True):

        def smaller(position, rank, index=index):
            return [position + 1, rank + m.where(m.load(buffer.scores, position) < index, m.u32(1), m.u32(0))]

        with m.when(h):
            _, rank = m.while_loop(lambda position, _, last=last: position < last, smaller, [first, first])
            m.store(out, start + rank, index)
    m.sync()
    m.store(buffer.histogram, m.tid, m.u32(0))


def _first_threshold(m, buffer: Buffer, scores, k: int):
    """A threshold that at least k scores of the tile exceed, if it has that many.

    With scores split into groups, at least k scores reach the k-th largest of the groups' maxima. Random scores let
    only a few more than k through.
    """
    groups = min(len(scores), max(1, max(_GROUPS, 2 * k) // m.threads))
    keys = []
    for group in range(groups):
        best = m.f32(-math.inf)
        for x in scores[group::groups]:
            best = m.where(x > best, x, best)
        keys.append(sortable(m, best))

    def each(visit, carry):
        for key in keys:
            carry = visit(key, *carry)
        return carry

    low, _, _ = block.kth_largest(m, buffer, each, m.u32(k), m.u32(k // 16))
    # Those equal to the threshold must still pass.
    below = low - 1
    below = m.where(below == _NEGATIVE_ZERO_KEY, m.u32(_NEGATIVE_ZERO_KEY - 1), below)
    below = m.where(below < _NEGATIVE_INFINITY_KEY, m.u32(_NEGATIVE_INFINITY_KEY), below)
    return score_of(m, below)


def _keep_best(m, buffer: Buffer, count, slack, k: int):
    """Reduces `count` > k + slack candidates to the best k and up to `slack` more; returns their number and a threshold
    that k of them reach, so that no later score need be kept that merely equals it."""

    def key(place):
        return sortable(m, m.floats(m.load(buffer.scores, place)))

    low, need, inside = block.kth_largest(m, buffer, _candidates(m, count, key), m.u32(k), slack)

    def smallest_indices():
        # More than needed in the last digit: they are equal, and the smaller indices win.
        def inverse(place):
            return m.where(key(place) == low, ~m.load(buffer.indices, place), m.u32(0))

        return [block.kth_largest(m, buffer, _candidates(m, count, inverse), need, m.u32(0))[0]]

    tie = inside > need + slack
    [bound] = m.cond(tie, smallest_indices, [m.u32(0)])
    with m.when(m.tid == 0):
        m.store(buffer.counters, _KEPT, m.u32(0))

    def move(start):
        # What one step writes lies before what the next one reads.
        place = m.tid + start
        bits, index = m.load(buffer.scores, place), m.load(buffer.indices, place)
        x = sortable(m, m.floats(bits))
        chosen = (place < count) & (x >= low) & ((x > low) | (~index >= bound))
        m.sync()
        with m.when(m.any(chosen)):
            _store_many(m, buffer, _KEPT, m.u32(0), [chosen], lambda _: (bits, index))
        return [start + m.threads]

    m.while_loop(lambda start: start < count, move, [m.u32(0)])
    m.sync()
    return [m.where(tie, m.u32(k), m.u32(k) - need + inside), score_of(m, low)]


def _candidates(m, count, value: Callable):
    """Visits value(place) for all places of the buffer in use, each from one thread."""

    def each(visit, carry):
        def step(place, *carry):
            return [place + m.threads, *visit(value(place), *carry)]

        return m.while_loop(lambda place, *_: place < count, step, [m.tid, *carry])[1:]

    return each


def _store_few(m, buffer: Buffer, counter, base, chosen, element: Callable) -> None:
    """Writes the chosen elements to the buffer from `base` + the counter on, which it advances by their number even
    where the buffer is full. For each thread on its own: cheap while few have any."""
    for i, c in enumerate(chosen):
        with m.when(c):
            _put(m, buffer, base + m.atomic_add(buffer.counters, counter, m.u32(1)), *element(i))


def _store_many(m, buffer: Buffer, counter, base, chosen, element: Callable) -> None:
    """As `_store_few`, with one addition to the counter for the whole warp."""
    number = m.u32(0)
    for c in chosen:
        number = m.where(c, number + 1, number)
    lanes_below = (m.u32(1) << m.lane) - 1
    before, total = m.u32(0), m.u32(0)
    for bit in range(len(chosen).bit_length()):
        votes = m.ballot((number & (1 << bit)) != 0)
        before = before + (m.popcount(votes & lanes_below) << bit)
        total = total + (m.popcount(votes) << bit)
    place = base + m.warp_atomic_add(buffer.counters, counter, total) + before
    for i, c in enumerate(chosen):
        with m.when(c):
            _put(m, buffer, place, *element(i))
        place = m.where(c, place + 1, place)


def _put(m, buffer: Buffer, place, bits, index) -> None:
    with m.when(place < buffer.capacity):
        m.store(buffer.scores, place, bits)
        m.store(buffer.indices, place, index)
