"""Number formats of the checkpoint and of the caches: encode, decode, pack (architecture sections 1.4, 5.3, 5.4).

Three cache formats, each a pair `pack_*` / `unpack_*` between values and the bytes of one record, and `qdq_*`, which
is their composition: what a cache returns is by construction what the model's own arithmetic prescribes.

| format | element | scale | record of n channels |
|---|---|---|---|
| fp8    | E4M3 | UE8M0 per 32 | n + n/32 bytes (window key) |
| mxfp4  | E2M1 | UE8M0 per 32 | n/2 + n/32 bytes (index key) |
| nvfp4  | E2M1 | E4M3 per 16  | n/2 + n/16 bytes (compressed entry) |

Elements come first in a record, scales after; of two E2M1 codes in a byte the even channel has the low nibble.
For training the gradient of `qdq_*` is the identity (straight-through); `pack_*` have none.
Groups with NaN or infinity have unspecified content; nothing else is affected by them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
NVFP4_BLOCK = 16


def e8m0_decode(scale: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """UE8M0 bytes as float32: byte b is 2^(b-127), 255 is NaN."""
    return lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)


def e2m1_encode(x: Float[Array, "..."], scale: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """x / scale in E2M1 codes 0..15, nearest, ties to the even code, saturating at 6; the sign of zero survives.

    Compares |x| with midpoint * scale instead of dividing: those products are exact (at most 3 + 4 significant bits),
    while the compiler may turn a division by a broadcast scale into a product with its rounded inverse.
    """
    a = jnp.abs(x)
    ties_down, ties_up = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
    code = sum((a > m * scale).astype(jnp.uint8) for m in ties_down)
    code += sum((a >= m * scale).astype(jnp.uint8) for m in ties_up)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_decode(packed: UInt8[Array, "... n"]) -> Float[Array, "... 2*n"]:
    """Pairs of E2M1 codes to float32; the even channel of a byte is its low nibble."""
    pairs = lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)
    return pairs.astype(jnp.float32).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(code: UInt8[Array, "... n"]) -> UInt8[Array, "... n//2"]:
    """Two 4-bit codes per byte, even index in the low nibble."""
    return code[..., 0::2] | code[..., 1::2] << 4


def pack_fp8(x: Float[Array, "... n"]) -> UInt8[Array, "... bytes"]:
    """E4M3 with one UE8M0 scale per 32 channels; `n` is a multiple of 32."""
    data, scale = _encode_fp8(x)
    return jnp.concatenate([lax.bitcast_convert_type(data, jnp.uint8), _e8m0_encode(scale)], -1)


def unpack_fp8(record: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Float[Array, "... n"]:
    """Inverse of `pack_fp8`, exact in bfloat16."""
    n = record.shape[-1] * BLOCK // (BLOCK + 1)
    data = lax.bitcast_convert_type(record[..., :n], jnp.float8_e4m3fn)
    return _scaled(data.astype(jnp.float32), e8m0_decode(record[..., n:]), dtype)


def qdq_fp8(x: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Quantise to FP8 and back (QDQ_fp8); any `n`, the last group may be partial."""

    def through(y):
        data, scale = _encode_fp8(y)
        return _scaled(data.astype(jnp.float32), scale, x.dtype)

    return _any_width(through, x, BLOCK)


def pack_mxfp4(x: Float[Array, "... n"]) -> UInt8[Array, "... bytes"]:
    """E2M1 with one UE8M0 scale per 32 channels; `n` is a multiple of 32.

    A scale is NaN (byte 255) exactly where a channel of its group is infinite and none is NaN; a group with a NaN has
    unspecified finite values. Normalised and rotated index keys are finite or NaN, so that no cache holds a 255.
    """
    return jnp.concatenate(encode_mxfp4(x), -1)


def unpack_mxfp4(record: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Float[Array, "... n"]:
    """Inverse of `pack_mxfp4`, exact in bfloat16."""
    half = record.shape[-1] * 16 // 17
    return _scaled(e2m1_decode(record[..., :half]), e8m0_decode(record[..., half:]), dtype)


def qdq_mxfp4(x: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Quantise to MXFP4 and back (QDQ_mxfp4); any `n`."""

    def through(y):
        code, scale = _encode_mxfp4(y)
        return _scaled(e2m1_decode(pack_nibbles(code)), scale, x.dtype)

    return _any_width(through, x, BLOCK)


def pack_nvfp4(x: Float[Array, "... n"]) -> UInt8[Array, "... bytes"]:
    """E2M1 with one E4M3 scale per 16 channels; `n` is a multiple of 16."""
    code, scale = _encode_nvfp4(x)
    return jnp.concatenate([pack_nibbles(code), lax.bitcast_convert_type(scale, jnp.uint8)], -1)


def unpack_nvfp4(record: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Float[Array, "... n"]:
    """Inverse of `pack_nvfp4`, exact in bfloat16."""
    half = record.shape[-1] * 8 // 9
    scale = lax.bitcast_convert_type(record[..., half:], jnp.float8_e4m3fn).astype(jnp.float32)
    return _scaled(e2m1_decode(record[..., :half]), scale, dtype)


def qdq_nvfp4(x: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Quantise to NVFP4 and back (QDQ_nvfp4); any `n`."""

    def through(y):
        code, scale = _encode_nvfp4(y)
        return _scaled(e2m1_decode(pack_nibbles(code)), scale.astype(jnp.float32), x.dtype)

    return _any_width(through, x, NVFP4_BLOCK)


def record_bytes_fp8(n: int) -> int:
    """Bytes of one `pack_fp8` record of n channels."""
    return n + n // BLOCK


def record_bytes_mxfp4(n: int) -> int:
    """Bytes of one `pack_mxfp4` record of n channels."""
    return n // 2 + n // BLOCK


def record_bytes_nvfp4(n: int) -> int:
    """Bytes of one `pack_nvfp4` record of n channels."""
    return n // 2 + n // NVFP4_BLOCK


def encode_fp8_blocks(
    x: Float[Array, "rows cols"], block: tuple[int, int]
) -> tuple[Float[Array, "rows cols"], UInt8[Array, "row_blocks col_blocks"]]:
    """E4M3 elements and UE8M0 scales of a weight, which `dequantize_blocks` decodes (section 5.4).

    The scale of a block is the smallest power of two that keeps its elements within the format; edge blocks may be
    partial.
    """
    rows, cols = x.shape
    padded = jnp.pad(x.astype(jnp.float32), [(0, -n % b) for n, b in zip(x.shape, block, strict=True)])
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    amax = jnp.max(jnp.abs(blocks), (1, 3), keepdims=True)
    scale = _power_of_two_above(jnp.maximum(amax, 2.0**-100) * jnp.float32(1 / 448))
    elements = jnp.clip(blocks * _inverse(scale), -448, 448).astype(jnp.float8_e4m3fn)
    return elements.reshape(padded.shape)[:rows, :cols], _e8m0_encode(scale[:, 0, :, 0])


def encode_mxfp4(x: Float[Array, "... n"]) -> tuple[UInt8[Array, "... n//2"], UInt8[Array, "... n//32"]]:
    """E2M1 pairs and UE8M0 scales per 32 channels, apart as a weight has them (section 5.4); 32 divides `n`."""
    code, scale = _encode_mxfp4(x)
    return pack_nibbles(code), _e8m0_encode(scale)


def _encode_fp8(x: Array) -> tuple[Array, Array]:
    """E4M3 elements and fp32 power-of-two scales."""
    groups = _groups(x, BLOCK)
    amax = jnp.max(jnp.abs(groups), -1, keepdims=True)
    scale = _power_of_two_above(jnp.maximum(amax, 1e-4) * jnp.float32(1 / 448))
    data = jnp.clip(groups * _inverse(scale), -448, 448).astype(jnp.float8_e4m3fn)
    return data.reshape(x.shape), scale[..., 0]


def _encode_mxfp4(x: Array) -> tuple[Array, Array]:
    """E2M1 codes and fp32 power-of-two scales."""
    groups = _groups(x, BLOCK)
    amax = jnp.max(jnp.abs(groups), -1, keepdims=True)
    scale = _power_of_two_above(jnp.maximum(amax, 6 * 2.0**-126) * jnp.float32(1 / 6))
    # Scaled first, exactly: midpoint * scale would be subnormal, hence flushed to 0, where the group is all but zero.
    return e2m1_encode(groups * _inverse(scale), jnp.ones_like(scale)).reshape(x.shape), scale[..., 0]


def _encode_nvfp4(x: Array) -> tuple[Array, Array]:
    groups = _groups(x, NVFP4_BLOCK)
    amax = jnp.max(jnp.abs(groups), -1, keepdims=True)
    scale = jnp.minimum(_sixth(jnp.maximum(amax, 6 * 2.0**-9)), 448).astype(jnp.float8_e4m3fn)
    return e2m1_encode(groups, scale.astype(jnp.float32)).reshape(x.shape), scale[..., 0]


def _sixth(v: Array) -> Array:
    """v / 6, correctly rounded, without a division, which XLA turns into a product or, on GPUs, rounds carelessly.

    The leading 12 bits of the quotient times 6 are exact and so is the remainder, whose own rounding is negligible.
    """
    sixth = jnp.float32(1 / 6)
    bits = lax.bitcast_convert_type(v * sixth, jnp.uint32) & jnp.uint32(0xFFFFF000)
    leading = lax.bitcast_convert_type(bits, jnp.float32)
    return leading + (v - 6 * leading) * sixth


def _power_of_two_above(v: Array) -> Array:
    """Smallest power of two >= v, from the bit pattern (v > 0, normal): a mantissa that is not 0 carries over."""
    bits = lax.bitcast_convert_type(v, jnp.uint32) + jnp.uint32(0x7FFFFF)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)


def _inverse(power: Array) -> Array:
    """1 / power of two, exact: the exponent field e becomes 254 - e."""
    return lax.bitcast_convert_type(jnp.uint32(254 << 23) - lax.bitcast_convert_type(power, jnp.uint32), jnp.float32)


def _e8m0_encode(power: Array) -> Array:
    """UE8M0 bytes of fp32 powers of two."""
    return (lax.bitcast_convert_type(power, jnp.uint32) >> 23).astype(jnp.uint8)


def _groups(x: Array, size: int) -> Array:
    if x.shape[-1] % size:
        raise ValueError(f"last axis {x.shape[-1]} is not a multiple of the block of {size} channels")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _scaled(elements: Array, scale: Array, dtype: DTypeLike) -> Array:
    groups = elements.reshape(*scale.shape, elements.shape[-1] // scale.shape[-1])
    return (groups * scale[..., None]).reshape(elements.shape).astype(dtype)


def _any_width(through: Callable[[Array], Array], x: Array, size: int) -> Array:
    n = x.shape[-1]

    def padded(x):
        return through(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % size)]))[..., :n].astype(x.dtype)

    return straight_through(padded, x)


def straight_through(rounding: Callable[[Array], Array], x: Array) -> Array:
    """rounding(x), of the shape and type of x, with the gradient of x itself."""
    rounded = jax.custom_jvp(rounding)
    rounded.defjvp(lambda primals, tangents: (rounding(*primals), *tangents))
    return rounded(x)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def dequantize_blocks(
    elements: Float[Array, "... rows cols"],
    scale: UInt8[Array, "... row_blocks col_blocks"],
    block: tuple[int, int],
    dtype: DTypeLike,
) -> Float[Array, "... rows cols"]:
    """element * 2^(byte-127), one scale per `block` = (rows, cols); edge blocks may be partial (section 5.4).

    The factor of byte 0 is subnormal, which a CPU flushes to 0: it is applied as 2^-126 to half the element.
    """
    rows, cols = elements.shape[-2:]
    elements = elements.astype(jnp.float32)

    def spread(per_block):
        return jnp.repeat(jnp.repeat(per_block, block[0], -2)[..., :rows, :], block[1], -1)[..., :cols]

    scale = spread(scale)
    return (jnp.where(scale == 0, elements / 2, elements) * e8m0_decode(jnp.maximum(scale, 1))).astype(dtype)
