"""Cache writes in plain JAX: the CPU path, and what the kernels are tested against."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32, UInt8

from dsv4jax.model.norm import rms_norm
from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.quant import pack_fp8, pack_mxfp4, pack_nvfp4
from pallas_kernels.fp8_linear.reference import QuantizedActivations, quantize_activations


def query_and_window_key(
    projected: Float[Array, "tokens both"],
    q_norm: Float[Array, " q_lora"],
    kv_norm: Float[Array, " dim"],
    by: Rotation,
    ring: UInt8[Array, "slots places record"] | None,
    places: Int32[Array, " tokens"] | None,
    eps: float,
) -> tuple[Float[Array, "tokens q_lora"], QuantizedActivations, UInt8[Array, "tokens record"], Array | None]:
    """See `pallas_kernels.cache_write`."""
    q, key = jnp.split(projected, [q_norm.shape[0]], axis=1)
    q_latent = rms_norm(q, q_norm, eps)
    records = pack_fp8(rotate(rms_norm(key, kv_norm, eps), by))
    ring = None if ring is None else written(ring, records, places)
    return q_latent, quantize_activations(q_latent), records, ring


def compressed_entry(
    pooled: Float[Array, "tokens dim"],
    norm: Float[Array, " dim"],
    by: Rotation,
    pool: UInt8[Array, "pages per_page record"],
    places: Int32[Array, " tokens"],
    eps: float,
) -> tuple[Float[Array, "tokens dim"], UInt8[Array, "pages per_page record"]]:
    """See `pallas_kernels.cache_write`."""
    latent = rms_norm(pooled, norm, eps)
    return latent, written(pool, pack_nvfp4(rotate(latent, by)), places)


def index_key(
    projected: Float[Array, "tokens dim"],
    norm: BFloat16[Array, " dim"],
    by: Rotation,
    pool: UInt8[Array, "pages per_page record"],
    places: Int32[Array, " tokens"],
    eps: float,
) -> UInt8[Array, "pages per_page record"]:
    """See `pallas_kernels.cache_write`."""
    return written(pool, pack_mxfp4(rotate(rms_norm(projected, norm, eps), by)), places)


def written(
    cache: UInt8[Array, "outer inner record"], records: UInt8[Array, "tokens record"], places: Int32[Array, " tokens"]
) -> UInt8[Array, "outer inner record"]:
    """The cache with the records at their places; places that it does not have are not written."""
    inner = cache.shape[1]
    places = jnp.where(places < 0, cache.shape[0] * inner, places)
    return cache.at[places // inner, places % inner].set(records, mode="drop")
