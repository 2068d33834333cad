"""`pack_queries` as a kernel, with the quantisation before it: one thread block per token."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int32, UInt8

from pallas_kernels import rows
from pallas_kernels.index_select.pack import COLUMNS, DIM, HEADS, KEY_EXPONENT
from pallas_kernels.rows import CHANNELS

SHARING = DIM // CHANNELS
"""Threads of a head."""


@jax.jit
def pack_queries(
    q: BFloat16[Array, "groups queries heads dim"], weights: BFloat16[Array, "groups queries heads"]
) -> tuple[UInt8[Array, "groups rows dim"], Int32[Array, "groups 32 8"]]:
    """See `pack.pack_queries`; rounds q to MXFP4 before."""
    groups, queries = q.shape[:2]
    tokens = groups * queries
    out_type = [
        jax.ShapeDtypeStruct((groups, queries * HEADS, DIM), jnp.uint8),
        jax.ShapeDtypeStruct((groups, 32, 8), jnp.int32),
    ]
    arguments = q.reshape(tokens, HEADS * DIM), weights.reshape(tokens, HEADS)
    code = functools.partial(device_code, queries=queries)
    (elements, lanes), _ = rows.each_row(code, tokens, arguments, out_type, HEADS * DIM)
    return elements, lanes


def device_code(m, token, q, weights, _, elements, lanes, scaled, *, queries: int):
    """The code of a thread block; `m` is a `rows.Machine`. 16 neighbouring threads share a head."""
    own = m.row(q, token, HEADS * DIM // 2)
    values = rows.qdq_mxfp4(m, rows.read(m, own, m.tid, HEADS * SHARING))
    power = _power_of_two_below(m, rows.largest(m, values, SHARING)) * 0.25
    inverse = _inverse(m, power)
    quarters = [m.pack_e4m3([value * inverse for value in values[i : i + 4]]) for i in (0, 4)]
    head, place = m.tid >> (SHARING.bit_length() - 1), m.tid & (SHARING - 1)
    target = m.row(elements, token, HEADS * DIM // 4)
    for part, word in enumerate(quarters):
        # Channel 32l + 8w + 4p + i goes to 32w + 16p + 4l + i, in chunks of 16 that are swizzled.
        chunk = ((place & 3) * 2 + part) ^ (head & 7)
        m.store(target, head * (DIM // 4) + chunk * 4 + (place >> 2), word)

    pair = m.load(m.row(weights, token, HEADS // 2), head >> 1)
    weight = m.floats(m.where((head & 1) == 0, pair << 16, pair & 0xFFFF0000))
    with m.when(place == 0):
        m.store(scaled, head, weight * power)
    m.sync()
    with m.when(m.warp == 0):
        _put_lanes(m, token, lanes, m.load(scaled, m.lane), queries)


def _put_lanes(m, token, lanes, scaled, queries: int):
    """Writes what one query adds to the words of its group; lane = head. The first query fills up for missing ones."""
    factor = _power_of_two_below(m, rows.largest(m, [scaled], 32)) * 2.0**-13
    half = scaled * _inverse(m, factor)
    other = m.exchange(half, 1)
    group, query = m.divide(token, queries)
    target = m.row(lanes, group, 32 * 8)
    with m.when((m.lane & 1) == 0):
        lane = query * 4 + ((m.lane >> 1) & 3)
        m.store(target, lane * 8 + (m.lane >> 3), m.pack_f16(half, other))
    factor = m.bits(factor * 2.0**-KEY_EXPONENT)
    with m.when(m.lane < 8):
        m.store(target, (m.lane * 4 + (query >> 1)) * 8 + 4 + (query & 1), factor)
    with m.when(query == 0):
        for word in (6, 7):
            m.store(target, m.lane * 8 + word, m.u32(0))
        with m.when(m.lane >= 4 * queries):
            for word in range(4):
                m.store(target, m.lane * 8 + word, m.u32(0))
        for missing in range(queries, COLUMNS):
            with m.when(m.lane < 8):
                m.store(target, m.lane * 32 + (missing // 2 * 8 + 4 + missing % 2), m.u32(0))


def _power_of_two_below(m, bits):
    """Largest power of two <= a magnitude given by its bits, at least 2^-100."""
    least = (127 - 100) << 23
    return m.floats(m.where(bits > least, bits, m.u32(least)) & 0xFF800000)


def _inverse(m, power):
    """1 / power of two."""
    return m.floats(m.u32(254 << 23) - m.bits(power))
