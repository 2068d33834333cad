"""The cut of one row by a thread block: per-thread code of `kernel`, written against `kernel.Machine`.

A filter looks for the token at which the weights, added up from the best token on, reach what it needs. Histograms of
the distances from the best logit, first of their upper and then of their lower bits, leave the tokens at one distance.
These weigh the same, so the rest is to count among them, by logit and then by id. Every histogram is a pass over the
row, which the cache holds.
"""

import dataclasses
import functools
import math
from typing import Any

from pallas_kernels.sampling_cut import weights
from pallas_kernels.topk import block
from pallas_kernels.topk.select import score_of, sortable
from pallas_kernels.topk.simt import WARP

BINS = 4096
_BIN_BITS = 12
_TOGETHER = 4
"""Loads of a thread under way, of four logits each."""
_ALL = 0xFFFFFFFF
_BIN, _BEFORE, _SIZE, _SUM = 0, 1, 2, 6
"""Uses of `Scratch.counters` beside those of `block`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; `start` counts elements of `logits`."""

    logits: Any
    start: Any
    vocab: int
    best: Any
    """The largest logit, finite."""


@dataclasses.dataclass(frozen=True)
class Scratch(block.Scratch):
    """Shared memory; the histogram has BINS elements, and the counter _SUM starts at zero."""

    table: Any
    """u32: `weights.TABLE`."""


def initialise(m, scratch: Scratch, table) -> None:
    """Fills the scratch; `table` is in device memory."""
    for first in range(0, BINS, m.threads):
        m.store(scratch.histogram, m.tid + first, m.u32(0))
    with m.when(m.tid < block.COUNTERS):
        m.store(scratch.counters, m.tid, m.u32(0))
    for first in range(0, weights.TABLE.size, m.threads):
        place = m.tid + first
        with m.when(place < weights.TABLE.size):
            m.store(scratch.table, place, m.load(table, place))
    m.sync()


def everything(m, vocab: int):
    """The cut that keeps all."""
    return [m.f32(-math.inf), m.u32(vocab)]


def find_cut(m, row: Row, scratch: Scratch, scale, top_k, top_p):
    """Logit and id of the last token that is kept, as the package's `sampling_cut` says.

    Args:
      top_k, top_p: 0 and 1 ask for nothing.
    """

    def first_k():
        def one(_):
            return m.u32(1)

        return _shorten(m, row, scratch, everything(m, row.vocab), m.f32(weights.UNIT), one, lambda _: top_k)

    cut = m.cond(top_k > 0, first_k, everything(m, row.vocab))

    def first_p():
        def undivided(distance):
            return weights.weight_of(distance, lambda place: m.load(scratch.table, place))

        def add(_logit, distance, _id, total):
            return [total + weights.coarse(undivided(distance))]

        (own,) = _members(m, row, cut, scale, m.f32(0.0), _below(m, m.f32(weights.FARTHEST)))(add, [m.u32(0)])
        warp = m.reduce(own, "add")
        with m.when(m.lane == 0):
            m.atomic_add(scratch.counters, _SUM, warp)
        m.sync()
        bits = m.bit_length(m.load(scratch.counters, _SUM))
        shift = m.where(bits > weights.SUM_BITS, bits - weights.SUM_BITS, m.u32(0))
        half = (m.u32(1) << shift) >> 1

        def weight(distance):
            return (undivided(distance) + half) >> shift

        def share(total):
            wanted = top_p * m.number(total)
            whole = m.whole(wanted)
            whole = m.where(m.number(whole) < wanted, whole + 1, whole)
            whole = m.where(whole < total, whole, total)
            return m.where(whole > 0, whole, m.u32(1))

        return _shorten(m, row, scratch, cut, scale, weight, share)

    return m.cond(top_p < 1.0, first_p, cut)


def _shorten(m, row: Row, scratch: Scratch, cut, scale, weight, need):
    """The cut at which the weights of what `cut` keeps reach need(their sum).

    Args:
      weight: weight(distance). Distances from FARTHEST on are needed for constant weights of 1 only.
    """

    def bin_of(low, high, number, need):
        def count(_logit, distance, _id):
            value = weight(distance)
            with m.when(value > 0):
                m.atomic_add(scratch.histogram, number(distance), value)
            return []

        _members(m, row, cut, scale, low, _below(m, high))(count, [])
        return _bin_of(m, scratch, need)

    farthest = m.f32(weights.FARTHEST)
    reached, upper, need, _ = bin_of(m.f32(0.0), farthest, lambda d: d >> _BIN_BITS, need)

    def near():
        first = upper << _BIN_BITS
        low, rest = m.number(first), need
        _, lower, rest, size = bin_of(low, low + float(BINS), lambda d: d & (BINS - 1), lambda _: rest)
        low, each = m.number(first + lower), weight(first + lower)
        return [low, _below(m, low + 1.0), m.quotient(rest + each - 1, each), m.quotient(size, each)]

    low, high, need, size = m.cond(reached, near, [farthest, m.f32(math.inf), need, m.u32(_ALL)])
    members = _members(m, row, cut, scale, low, high)

    def logits(visit, carry):
        return members(lambda logit, _distance, _id, *carry: visit(sortable(m, logit), *carry), carry)

    key, need, inside = block.kth_largest(m, scratch, logits, need, m.u32(0))
    last = score_of(m, key)

    def smallest_ids():
        def ids(visit, carry):
            def tied(logit, _distance, i, *carry):
                return m.cond(logit == last, lambda: visit(~i, *carry), list(carry))

            return members(tied, carry)

        return [~block.kth_largest(m, scratch, ids, need, m.u32(0))[0]]

    # With a single logit the search ends before it has counted how many tokens have it.
    inside = m.where(inside < size, inside, size)
    last_id = m.where(last == cut[0], cut[1], m.u32(row.vocab))
    return [last, *m.cond(inside > need, smallest_ids, [last_id])]


def _bin_of(m, scratch: Scratch, need):
    """The bin in which the sum over the bins reaches need(total); empties the histogram.

    Returns whether it does, the bin, what is needed of it and its size; if not, the second and fourth are undefined and
    the third is what the bins lack.
    """
    m.sync()
    each = BINS // m.threads
    bins = [m.tid * each + i for i in range(each)]
    sizes = [m.load(scratch.histogram, b) for b in bins]
    own = m.u32(0)
    for b, size in zip(bins, sizes, strict=True):
        m.store(scratch.histogram, b, m.u32(0))
        own = own + size
    before = block.exclusive_sum(m, scratch, own)
    of_warp = m.load(scratch.warps, m.lane)
    total = m.reduce(m.where(m.lane < m.threads // WARP, of_warp, m.u32(0)), "add")
    need = need(total)
    for b, size in zip(bins, sizes, strict=True):
        with m.when((before < need) & (need <= before + size)):
            m.store(scratch.counters, _BIN, b)
            m.store(scratch.counters, _BEFORE, before)
            m.store(scratch.counters, _SIZE, size)
        before = before + size
    m.sync()
    found, above, size = (m.load(scratch.counters, i) for i in (_BIN, _BEFORE, _SIZE))
    reached = need <= total
    return reached, found, need - m.where(reached, above, total), size


def _members(m, row: Row, cut, scale, low, high):
    """Visits what `cut` keeps of the row at distances from `low` to `high`.

    each(visit, carry) calls carry = visit(logit, distance, id, *carry) for the tokens of this thread.
    """
    last, last_id = cut

    def each(visit, carry):
        def of_four(first, logits, carry):
            far = [(row.best - logit) * scale for logit in logits]
            near = [(x >= low) & (x <= high) for x in far]

            def visited():
                values = carry
                for i, logit in enumerate(logits):
                    index = first + i
                    member = near[i] & (logit >= last) & ((logit != last) | (index <= last_id))
                    seen = functools.partial(visit, logit, m.whole(far[i]), index, *values)
                    values = m.cond(member, seen, values)
                return values

            # Mostly none is.
            return m.cond((first < row.vocab) & (near[0] | near[1] | near[2] | near[3]), visited, carry)

        def step(first, *carry):
            firsts = [first + 4 * m.threads * i for i in range(_TOGETHER)]
            loaded = [m.load4(row.logits, row.start + m.where(f < row.vocab, f, m.u32(0))) for f in firsts]
            carry = list(carry)
            for f, logits in zip(firsts, loaded, strict=True):
                carry = of_four(f, logits, carry)
            return [first + 4 * _TOGETHER * m.threads, *carry]

        return m.while_loop(lambda first, *_: first < row.vocab, step, [m.tid * 4, *carry])[1:]

    return each


def _below(m, x):
    """The next smaller number to a positive one."""
    return m.floats(m.bits(x) - 1)
