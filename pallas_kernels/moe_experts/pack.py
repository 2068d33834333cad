"""Memory layout of expert weights, and of activations in decode, as the kernels read them.

Both are cut into records that one bulk copy moves into shared memory, and that need no further rearrangement there.

A weight record holds 64 output channels x 256 input channels: 8192 bytes of E2M1 codes and 512 of scales. Its codes are
four tiles of 64 input channels. In a tile each of the 128 threads of a warpgroup owns four words: its part of the A
operands of two `wgmma.m64nNk32`. A word holds the codes of four input channels of output channels r and r + 8:
magnitudes in the low 3 bits of its nibbles, r first; the sign of channel i of r in bit 8i + 7, of r + 8 in bit 8i + 3.

An activation record holds 8 rows x 256 channels: 2048 bytes of E4M3 in the order of a K-major B operand without
swizzle (16 columns of 8 rows x 16 bytes), then 64 float32 scales [4 pairs of groups, 4 pairs of rows, 2 groups, 2
rows].
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from dsv4jax.weights import Mxfp4Weight

ROWS = 64
"""Output channels of a weight record."""
COLS = 256
"""Input channels of a weight record and of an activation record."""
CODE_WORDS, SCALE_WORDS = ROWS * COLS // 8, ROWS * COLS // 128
WEIGHT_WORDS = CODE_WORDS + SCALE_WORDS
SPAN = 11
"""Exponents that an E4M3 can take over from a weight scale, less one."""
TOKENS = 8
"""Rows of an activation record."""
ACTIVATION_WORDS = TOKENS * COLS // 4 + TOKENS * COLS // 32


@flax.struct.dataclass
class PackedWeight:
    """One linear weight of all experts.

    Attributes:
      records: int32 [experts, out/64, in/256, 2176].
      tops: int32 [experts, out/64, 16]: one byte per output channel, the largest UE8M0 scale byte among the groups of
        the row that hold a nonzero code; 255 in all 64 where a row of the 64 spans more than `SPAN` exponents.
    """

    records: Any
    tops: Any


@flax.struct.dataclass
class PackedExperts:
    """The weights of `moe_experts`: gate and up together, and down."""

    w13: PackedWeight
    w2: PackedWeight


def pack_experts(w1: Mxfp4Weight, w3: Mxfp4Weight, w2: Mxfp4Weight) -> PackedExperts:
    """Records of the gate, up and down weights of all experts, made once at load; pure, for use under `jax.jit`.

    Raises ValueError where the expert width is not a multiple of 256 or the hidden size not one of 256.
    """
    return PackedExperts(pack_gate_up((w1.weight, w1.scale), (w3.weight, w3.scale)), pack_weight(w2.weight, w2.scale))


def unpack_experts(packed: PackedExperts) -> tuple[Mxfp4Weight, Mxfp4Weight, Mxfp4Weight]:
    """Inverse of `pack_experts`: gate, up and down."""
    pair = [a.reshape(a.shape[0], -1, 2, 8, a.shape[-1]) for a in unpack_weight(packed.w13)]
    w1, w3 = (Mxfp4Weight(*(a[:, :, i].reshape(a.shape[0], -1, a.shape[-1]) for a in pair)) for i in range(2))
    return w1, w3, Mxfp4Weight(*unpack_weight(packed.w2))


def pack_weight(codes: UInt8[Array, "experts out half"], scale: UInt8[Array, "experts out groups"]) -> PackedWeight:
    """Records of MXFP4 weights; a permutation of the bits, undone by `unpack_weight`.

    Args:
      codes: two E2M1 codes per byte, even input channel low.
      scale: UE8M0 bytes per 32 input channels.
    """
    experts, out, half = codes.shape
    if out % ROWS or half * 2 % COLS:
        raise ValueError(f"packed weights need multiples of {ROWS} outputs and {COLS} inputs, got {out} and {half * 2}")
    tiles, slabs = out // ROWS, half * 2 // COLS
    nibbles = jnp.stack([codes & 15, codes >> 4], -1)
    # Outputs: tile, warp, r or r + 8, row in the warp. Inputs: slab, tile, group, half, lane, channel.
    nibbles = nibbles.reshape(experts, tiles, 4, 2, 8, slabs, 4, 2, 2, 4, 4).transpose(0, 1, 5, 6, 2, 4, 9, 7, 8, 3, 10)
    signs = nibbles >> 3
    magnitudes = (nibbles & 7).reshape(*nibbles.shape[:-2], 4, 2)
    parts = magnitudes[..., 0] | signs[..., 1, :] << 3 | magnitudes[..., 1] << 4 | signs[..., 0, :] << 7
    parts = parts.reshape(experts, tiles, slabs, CODE_WORDS, 4)
    scales = scale.reshape(experts, tiles, 4, 2, 8, slabs, 2, 4).transpose(0, 1, 5, 2, 4, 6, 3, 7)
    scales = scales.reshape(experts, tiles, slabs, SCALE_WORDS, 4)
    records = lax.bitcast_convert_type(jnp.concatenate([parts, scales], -2), jnp.int32)
    return PackedWeight(records, _tops(codes, scale))


def _tops(codes: UInt8[Array, "experts out half"], scale: UInt8[Array, "experts out groups"]) -> Array:
    experts, out, groups = scale.shape
    used = jnp.any(codes.reshape(experts, out, groups, 16) & 0x77, -1) | (scale == 255)
    top = jnp.max(jnp.where(used, scale, 0), -1).reshape(experts, -1, ROWS)
    lowest = jnp.min(jnp.where(used, scale, 255), -1).reshape(experts, -1, ROWS)
    wide = jnp.any((top > lowest) & (top - lowest > SPAN) | (top == 255), -1, keepdims=True)
    top = jnp.where(wide, jnp.uint8(255), top)
    return lax.bitcast_convert_type(top.reshape(experts, -1, ROWS // 4, 4), jnp.int32)


def unpack_weight(
    packed: PackedWeight,
) -> tuple[UInt8[Array, "experts out half"], UInt8[Array, "experts out groups"]]:
    """Inverse of `pack_weight`."""
    experts, tiles, slabs, _ = packed.records.shape
    parts = lax.bitcast_convert_type(packed.records, jnp.uint8)
    words = parts[..., :CODE_WORDS, :].reshape(experts, tiles, slabs, 4, 4, 8, 4, 2, 2, 4)
    signs = jnp.stack([words >> 7, words >> 3 & 1], -2)
    magnitudes = jnp.stack([words & 7, words >> 4 & 7], -1).reshape(signs.shape)
    nibbles = (magnitudes | signs << 3).transpose(0, 1, 4, 9, 5, 2, 3, 7, 8, 6, 10)
    nibbles = nibbles.reshape(experts, tiles * ROWS, slabs * COLS // 2, 2)
    scale = parts[..., CODE_WORDS:, :].reshape(experts, tiles, slabs, 4, 8, 2, 2, 4).transpose(0, 1, 3, 6, 4, 2, 5, 7)
    scale = scale.reshape(experts, tiles * ROWS, slabs * COLS // 32)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scale


def pack_gate_up(
    gate: tuple[UInt8[Array, "experts width half"], UInt8[Array, "experts width groups"]],
    up: tuple[UInt8[Array, "experts width half"], UInt8[Array, "experts width groups"]],
) -> PackedWeight:
    """Records of the gate and up weights (codes, scales) together: a record holds the same 32 channels of both, and a
    thread that has a gate channel as its r has the same up channel as its r + 8."""

    def mix(g, u):
        experts, width, inner = g.shape
        pairs = jnp.stack([a.reshape(experts, width // 8, 8, inner) for a in (g, u)], 2)
        return pairs.reshape(experts, 2 * width, inner)

    return pack_weight(mix(gate[0], up[0]), mix(gate[1], up[1]))


def pack_activation(
    data: Float[Array, "rows inner"], scale: Float[Array, "rows groups"]
) -> Int32[Array, "blocks slabs words"]:
    """Records of FP8 rows.

    Args:
      data: E4M3 elements; `rows` a multiple of 8, `inner` of 256.
      scale: float32 powers of two per 32 channels.
    """
    rows, inner = data.shape
    blocks, slabs = rows // TOKENS, inner // COLS
    data = lax.bitcast_convert_type(data, jnp.uint8).reshape(blocks, TOKENS, slabs, 16, 4, 4).swapaxes(1, 2)
    words = lax.bitcast_convert_type(data.swapaxes(2, 3), jnp.int32).reshape(blocks, slabs, -1)
    scale = scale.reshape(blocks, 4, 2, slabs, 4, 2).transpose(0, 3, 4, 1, 5, 2).reshape(blocks, slabs, -1)
    return jnp.concatenate([words, lax.bitcast_convert_type(scale, jnp.int32)], -1)


def unpack_activation(
    packed: Int32[Array, "blocks slabs words"],
) -> tuple[Float[Array, "rows inner"], Float[Array, "rows groups"]]:
    """Inverse of `pack_activation`."""
    blocks, slabs, _ = packed.shape
    words, scale = packed[..., : TOKENS * COLS // 4], packed[..., TOKENS * COLS // 4 :]
    data = lax.bitcast_convert_type(words.reshape(blocks, slabs, 16, TOKENS, 4), jnp.float8_e4m3fn)
    data = data.transpose(0, 3, 1, 2, 4, 5).reshape(blocks * TOKENS, slabs * COLS)
    scale = lax.bitcast_convert_type(scale, jnp.float32).reshape(blocks, slabs, 4, 4, 2, 2)
    return data, scale.transpose(0, 3, 5, 1, 2, 4).reshape(blocks * TOKENS, -1)
