"""What the score kernel reads instead of queries and head weights: E4M3 elements, float16 weights, one scale each."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

HEADS, DIM = 32, 128
KEY_EXPONENT = 3
"""The kernel's keys are E2M1 elements x 2^3 in the group of largest scale: at most 48, and `pack_queries` makes queries
smaller than 8, so that a dot product of 128 channels stays below the largest float16."""
COLUMNS = 8
"""Queries that can share a step of the kernel."""


def pack_queries(
    q: Float[Array, "groups queries heads dim"], weights: Float[Array, "groups queries heads"]
) -> tuple[UInt8[Array, "groups rows dim"], Int32[Array, "groups 32 8"]]:
    """Queries for the tensor cores, and what each lane of a warp needs for the weighted sum over heads.

    Elements: E4M3 of q / 2^e with 4 <= max |q / 2^e| < 8 per head. Exact unless the scales inside a head differ by more
    than 2^8; the error is at most 2^-10 then, 2^-12 of the largest element. Channels are in the order in which the
    kernel unpacks keys, rows are swizzled.

    Words per lane: 4 pairs of float16 weights x 2^e, scaled to at most 2^14 per query (operand B of `mma.m16n8k16` for
    heads 0..15 and 16..31, column = query), and the fp32 factors of the results of two queries.
    """
    groups, queries = q.shape[:2]
    q = q.astype(jnp.float32)
    power = _power_of_two_below(jnp.max(jnp.abs(q), -1)) * 0.25
    elements = q * (1 / power)[..., None]
    # Channel 32l + 8w + 4p + i of a record is unpacked to 32w + 16p + 4l + i.
    elements = jnp.moveaxis(elements.reshape(*q.shape[:-1], 4, 4, 2, 4), -4, -2)
    elements = lax.bitcast_convert_type(elements.reshape(groups, -1, DIM).astype(jnp.float8_e4m3fn), jnp.uint8)

    scaled = weights.astype(jnp.float32) * power
    factor = _power_of_two_below(jnp.max(jnp.abs(scaled), -1)) * 2.0**-13
    half = (scaled * (1 / factor)[..., None]).astype(jnp.float16)
    pad = ((0, 0), (0, COLUMNS - queries))
    half = jnp.pad(half, (*pad, (0, 0)))
    # Head 16s + 8h + 2l + i is half i of word 2s + h of lane 4 query + l.
    pairs = half.reshape(groups, COLUMNS, 2, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5)
    pairs = lax.bitcast_convert_type(pairs, jnp.int32).reshape(groups, 32, 4)
    factor = jnp.pad(factor * 2.0**-KEY_EXPONENT, pad).reshape(groups, 1, 4, 2)
    factor = jnp.broadcast_to(factor, (groups, 8, 4, 2)).reshape(groups, 32, 2)
    factor = lax.bitcast_convert_type(factor, jnp.int32)
    return swizzle(elements), jnp.concatenate([pairs, factor, jnp.zeros_like(factor)], -1)


def swizzle(rows: UInt8[Array, "groups rows 128"]) -> UInt8[Array, "groups rows 128"]:
    """16-byte chunk c of row r moves to c ^ (r % 8)."""
    groups, count = rows.shape[:2]
    chunks = rows.reshape(groups, count // 8, 8, 8, 16)
    order = jnp.arange(8)[:, None] ^ jnp.arange(8)
    return jnp.take_along_axis(chunks, order[None, None, :, :, None], 3).reshape(rows.shape)


def _power_of_two_below(x: Array) -> Array:
    """Largest power of two <= x, at least 2^-100."""
    bits = lax.bitcast_convert_type(jnp.maximum(x, 2.0**-100), jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)
