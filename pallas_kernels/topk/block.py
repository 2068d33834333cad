"""Extremes, running sums and order statistics of values that the threads of a block hold.

Per-thread code for a `Machine` (see `simt`); every thread of the block calls these functions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.topk.simt import WARP

COUNTERS = 8
"""Elements of `Scratch.counters`."""
_DIGIT, _ABOVE, _INSIDE = 3, 4, 5
"""Uses of `Scratch.counters` here; the others are the caller's."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory."""

    histogram: Any
    """u32 [threads] or more, zero between uses."""
    warps: Any
    """u32 [64]: one value per warp, twice."""
    counters: Any
    """u32 [COUNTERS]"""


def kth_largest(m, scratch: Scratch, each: Callable, need, slack):
    """Finds where the `need`-th largest value lies, digit by digit.

    Args:
      each: each(visit, carry) calls carry = visit(value, *carry) for the values of this thread and returns the last.

    Returns (low, need, inside): of the `inside` values in the last digit, which starts at `low`, `need` belong to the
    largest ones. Either there are at most `slack` more than that, or they are all equal to `low`.
    """
    low, high = extremes(m, scratch, each)

    def unresolved(low, span, need, inside):
        return (inside > need + slack) & (span != 0)

    def next_digit(low, span, need, inside):
        shift = digit_shift(m, span)

        def count(value):
            distance = value - low
            with m.when(distance <= span):
                m.atomic_add(scratch.histogram, distance >> shift, m.u32(1))
            return []

        each(count, [])
        m.sync()
        digit = m.u32(m.threads - 1) - m.tid
        size = m.load(scratch.histogram, digit)
        m.store(scratch.histogram, digit, m.u32(0))
        above = exclusive_sum(m, scratch, size)
        with m.when((above < need) & (need <= above + size)):
            m.store(scratch.counters, _DIGIT, digit)
            m.store(scratch.counters, _ABOVE, above)
            m.store(scratch.counters, _INSIDE, size)
        m.sync()
        low = low + (m.load(scratch.counters, _DIGIT) << shift)
        need = need - m.load(scratch.counters, _ABOVE)
        return [low, (m.u32(1) << shift) - 1, need, m.load(scratch.counters, _INSIDE)]

    low, _, need, inside = m.while_loop(unresolved, next_digit, [low, high - low, need, m.u32(0xFFFFFFFF)])
    return low, need, inside


def digit_shift(m, span):
    """The smallest shift that brings 0..span below the number of threads."""
    bits = m.bit_length(span)
    digits = m.threads.bit_length() - 1
    return m.where(bits > digits, bits - digits, m.u32(0))


def _inclusive_sum(m, x):
    """Sum of x over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = x + m.where(m.lane >= distance, m.shift_up(x, distance), m.u32(0))
    return x


def exclusive_sum(m, scratch: Scratch, x):
    """Sum of x over the threads before this one."""
    inclusive = _inclusive_sum(m, x)
    with m.when(m.lane == WARP - 1):
        m.store(scratch.warps, m.warp, inclusive)
    m.sync()
    total = m.load(scratch.warps, m.lane)
    before = m.reduce(m.where(m.lane < m.warp, total, m.u32(0)), "add")
    return before + inclusive - x


def extremes(m, scratch: Scratch, each: Callable):
    """Smallest and largest value of the block."""

    def both(x, low, high):
        return [m.where(x < low, x, low), m.where(x > high, x, high)]

    low, high = each(both, [m.u32(0xFFFFFFFF), m.u32(0)])
    low, high = m.reduce(low, "umin"), m.reduce(high, "umax")
    with m.when(m.lane == 0):
        m.store(scratch.warps, m.warp, low)
        m.store(scratch.warps, m.warp + WARP, high)
    m.sync()
    existing = m.lane < m.threads // WARP
    low = m.where(existing, m.load(scratch.warps, m.lane), m.u32(0xFFFFFFFF))
    high = m.where(existing, m.load(scratch.warps, m.lane + WARP), m.u32(0))
    m.sync()  # the next call may store before others have loaded
    return m.reduce(low, "umin"), m.reduce(high, "umax")
