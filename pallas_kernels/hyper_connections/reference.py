"""Hyper-connection site in plain JAX: the CPU path, and what the kernel is tested against."""

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Mix, Residual, collapse, predict_mix
from dsv4jax.model.norm import rms_norm
from pallas_kernels.fp8_linear.reference import QuantizedActivations, quantize_activations

Site = tuple[
    Float[Array, "tokens streams hidden"],
    Float[Array, "tokens hidden"],
    QuantizedActivations,
    Mix,
]
"""What a site returns: settled streams, input of the sublayer, the same in FP8, the mix predicted here."""


@flax.struct.dataclass
class SiteWeights:
    """Weights of a site and of the norm behind it, as the kernel reads them."""

    fn: BFloat16[Array, "3*mixes flat"]
    """The projection in three parts, `split_fp32`."""
    base: Float32[Array, " mixes"]
    scale: Float32[Array, "3"]
    norm: Float[Array, " hidden"]


def split_fp32(x: Float32[Array, "rows columns"]) -> BFloat16[Array, "3*rows columns"]:
    """High, middle and low part of finite numbers, whose sum is x exactly (as far as the low part is no subnormal)."""
    parts, rest = [], x
    for _ in range(3):
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return jnp.concatenate(parts)


def join_fp32(parts: BFloat16[Array, "parts columns"]) -> Float32[Array, "parts//3 columns"]:
    """Inverse of `split_fp32`."""
    high, middle, low = jnp.split(parts.astype(jnp.float32), 3)
    return high + (middle + low)


def hyper_connection_site(residual: Residual, weights: SiteWeights, cfg: ModelConfig) -> Site:
    """See `pallas_kernels.hyper_connections`."""
    streams = residual.settled()
    x = rms_norm(collapse(streams, residual.mix.pre), weights.norm, cfg.rms_norm_eps)
    mix = predict_mix(streams, join_fp32(weights.fn), weights.base, weights.scale, cfg)
    return streams, x, quantize_activations(x), mix
