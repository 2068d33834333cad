"""Rotary embedding of the text stack: plain and YaRN frequencies, adjacent pairs, last channels (section 3.3)."""

import math

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsv4jax.config import ModelConfig


@flax.struct.dataclass
class Rotation:
    """cos and sin of the phase of each position and channel pair, fp32 [..., pairs]."""

    cos: Float[Array, "... pairs"]
    sin: Float[Array, "... pairs"]

    def inverse(self) -> "Rotation":
        """The rotation by the negative position."""
        return Rotation(self.cos, -self.sin)


def frequencies(cfg: ModelConfig, compressed: bool) -> np.ndarray:
    """fp32 frequency of each pair: plain `rope_theta`, or `compress_rope_theta` with YaRN for compressed layers."""
    dim = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # fp32 powers of numpy are not correctly rounded; one unit in the last place turns by 0.03 rad at position 10^6.
    plain = np.float32(1) / (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    if not compressed:
        return plain
    scaling = cfg.rope_scaling

    def pair_of(rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    return (plain / np.float32(scaling.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rotation(cfg: ModelConfig, positions: Int[Array, "..."], compressed: bool) -> Rotation:
    """Phases fp32(position) · frequency, formed and reduced in fp32."""
    phase = positions.astype(jnp.float32)[..., None] * frequencies(cfg, compressed)
    return Rotation(jnp.cos(phase), jnp.sin(phase))


def rotate(x: Float[Array, "... n"], by: Rotation) -> Float[Array, "... n"]:
    """Rotates the last 2·pairs channels of x as adjacent pairs in fp32, rounds to the type of x."""
    width = 2 * by.cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = jnp.stack([even * by.cos - odd * by.sin, even * by.sin + odd * by.cos], -1).reshape(tail.shape)
    return jnp.concatenate([head, turned.astype(x.dtype)], -1)
