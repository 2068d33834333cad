"""Cache writes on Hopper: one thread block per token, in place (see `pallas_kernels.rows` for the arithmetic)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dsv4jax.model.rope import Rotation
from dsv4jax.quant import BLOCK
from pallas_kernels import rows
from pallas_kernels.cache_write import device
from pallas_kernels.fp8_linear.reference import QuantizedActivations
from pallas_kernels.rows import CHANNELS
from pallas_kernels.topk import simt

GRANULE = CHANNELS * simt.WARP
"""Channels of a warp."""
RECORD_CHANNELS = 128
"""Records of a multiple of so many channels are whole words."""
MAX_CHANNELS = 1024 * CHANNELS


def obstacle(arrays: dict[str, Array], widths: tuple[int, ...], multiple: int, pairs: int) -> str | None:
    """Why a kernel cannot take rows of these widths, or None."""
    for name, array in arrays.items():
        if array.dtype != jnp.bfloat16:
            return f"{name} is {array.dtype}: must be bfloat16"
    if any(width % multiple for width in widths) or not 0 < sum(widths) <= MAX_CHANNELS:
        return (
            f"rows have {' + '.join(map(str, widths))} channels: must be multiples of {multiple} up to {MAX_CHANNELS}"
        )
    if pairs % (CHANNELS // 2) or 2 * pairs > widths[-1]:
        return f"{pairs} pairs are rotated: must be a multiple of {CHANNELS // 2} within {widths[-1]} channels"
    return None


@functools.partial(jax.jit, static_argnames="eps")
def query_and_window_key(projected, q_norm, kv_norm, by: Rotation, ring, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    tokens, both = projected.shape
    widths = q_norm.shape[0], kv_norm.shape[0]
    out_type = [
        jax.ShapeDtypeStruct((tokens, widths[0]), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, widths[0]), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((widths[0] // BLOCK, tokens), jnp.float32),
        jax.ShapeDtypeStruct((tokens, widths[1] + widths[1] // BLOCK), jnp.uint8),
    ]
    code = functools.partial(device.query_and_window_key, widths=widths, pairs=by.cos.shape[1], tokens=tokens, eps=eps)
    target = None if ring is None else rows.Target(ring, places)
    arguments = (projected, q_norm, kv_norm, by.cos, by.sin)
    (q_latent, elements, scale, records), ring = rows.each_row(code, tokens, arguments, out_type, both, target)
    return q_latent, QuantizedActivations(elements, scale), records, ring


@functools.partial(jax.jit, static_argnames="eps")
def compressed_entry(pooled, norm, by: Rotation, pool, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    width = pooled.shape[1]
    code = functools.partial(device.compressed_entry, width=width, pairs=by.cos.shape[1], eps=eps)
    out_type = [jax.ShapeDtypeStruct(pooled.shape, pooled.dtype)]
    arguments, target = (pooled, norm, by.cos, by.sin), rows.Target(pool, places)
    (latent,), pool = rows.each_row(code, pooled.shape[0], arguments, out_type, width, target)
    return latent, pool


@functools.partial(jax.jit, static_argnames="eps")
def index_key(projected, norm, by: Rotation, pool, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    width = projected.shape[1]
    code = functools.partial(device.index_key, width=width, pairs=by.cos.shape[1], eps=eps)
    arguments, target = (projected, norm, by.cos, by.sin), rows.Target(pool, places)
    return rows.each_row(code, projected.shape[0], arguments, [], width, target)[1]
