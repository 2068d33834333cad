"""What a layer writes to the caches: from projections to packed records, in place (architecture sections 3.1 to 4.1).

Of all operations: `by` is the rotation of each token; `places` says which record of the cache, counted through its
first two axes, a token writes. A negative or too large place writes nothing; no two tokens may share one. Other records
stay as they are, and the cache is updated in place where its old state is not used any more. Values are rounded to
bfloat16 where the reference rounds. A row with NaN or infinity gives unspecified values in its own results only.
Without tokens the results are empty and the cache as it was.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from dsv4jax.model.rope import Rotation
from dsv4jax.quant import record_bytes_fp8, record_bytes_mxfp4, record_bytes_nvfp4
from pallas_kernels.cache_write import kernel, reference
from pallas_kernels.device import hopper_obstacle
from pallas_kernels.fp8_linear.reference import QuantizedActivations

__all__ = ["compressed_entry", "index_key", "query_and_window_key"]


def query_and_window_key(
    projected: Float[Array, "tokens both"],
    q_norm: Float[Array, " q_lora"],
    kv_norm: Float[Array, " dim"],
    by: Rotation,
    ring: UInt8[Array, "slots places record"] | None = None,
    places: Int32[Array, " tokens"] | None = None,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens q_lora"], QuantizedActivations, UInt8[Array, "tokens record"], Array | None]:
    """Everything between the projections `wq_a`, `wkv` and the next ones: norms, rotation, quantisation, window write.

    Args:
      projected: wq_a(x) and wkv(x), side by side.
      q_norm, kv_norm: norm weights of the two parts.
      ring: window keys of all slots, FP8 records of 33/32 dim bytes; None to write none.
      places: see above; None without a ring.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; bfloat16, both widths multiples of 256, together
        at most 8192), or None for what the device supports.

    Returns:
      The normalised low-rank query (3.1), the same in FP8, the FP8 record of each token's window key (3.2), the ring.

    Raises:
      ValueError: sizes do not fit, or `implementation` is unknown or cannot run; the message says why.
    """
    widths = q_norm.shape[0], kv_norm.shape[0]
    if projected.shape[1] != sum(widths):
        raise ValueError(
            f"projected has {projected.shape[1]} channels: must be {widths[0]} + {widths[1]}, as the norms"
        )
    _check(projected.shape[0], by, ring, places, record_bytes_fp8(widths[1]))
    arrays = dict(projected=projected, q_norm=q_norm, kv_norm=kv_norm)
    if _use_kernel(implementation, arrays, widths, kernel.GRANULE, by):
        return kernel.query_and_window_key(projected, q_norm, kv_norm, by, ring, places, eps)
    return reference.query_and_window_key(projected, q_norm, kv_norm, by, ring, places, eps)


def compressed_entry(
    pooled: Float[Array, "tokens dim"],
    norm: Float[Array, " dim"],
    by: Rotation,
    pool: UInt8[Array, "pages per_page record"],
    places: Int32[Array, " tokens"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens dim"], UInt8[Array, "pages per_page record"]]:
    """Normalises pooled latents, and stores their rotated form as NVFP4 records (3.4).

    Args:
      pool: compressed entries, records of 9/16 dim bytes.
      implementation: as in `query_and_window_key`; the kernel takes dim a multiple of 128 up to 8192.

    Returns:
      The normalised latents, not rotated, and the pool.

    Raises:
      ValueError: sizes do not fit, or `implementation` is unknown or cannot run; the message says why.
    """
    _check(pooled.shape[0], by, pool, places, record_bytes_nvfp4(norm.shape[0]))
    if _use_kernel(implementation, dict(pooled=pooled, norm=norm), norm.shape, kernel.RECORD_CHANNELS, by):
        return kernel.compressed_entry(pooled, norm, by, pool, places, eps)
    return reference.compressed_entry(pooled, norm, by, pool, places, eps)


def index_key(
    projected: Float[Array, "tokens dim"],
    norm: Float[Array, " dim"],
    by: Rotation,
    pool: UInt8[Array, "pages per_page record"],
    places: Int32[Array, " tokens"],
    *,
    eps: float,
    implementation: str | None = None,
) -> UInt8[Array, "pages per_page record"]:
    """Normalises and rotates projected latents, and stores them as MXFP4 records (4.1).

    Args:
      pool: index keys, records of 17/32 dim bytes.
      implementation: as in `compressed_entry`.

    Returns:
      The pool.

    Raises:
      ValueError: sizes do not fit, or `implementation` is unknown or cannot run; the message says why.
    """
    _check(projected.shape[0], by, pool, places, record_bytes_mxfp4(norm.shape[0]))
    if _use_kernel(implementation, dict(projected=projected, norm=norm), norm.shape, kernel.RECORD_CHANNELS, by):
        return kernel.index_key(projected, norm, by, pool, places, eps)
    return reference.index_key(projected, norm, by, pool, places, eps)


def _check(tokens: int, by: Rotation, cache: Array | None, places: Array | None, record: int) -> None:
    """Raises ValueError where rotations, places or records are not those of the tokens."""
    if by.cos.shape[0] != tokens:
        raise ValueError(f"by has {by.cos.shape[0]} rotations: must be one for each of {tokens} tokens")
    if cache is None:
        return
    if cache.dtype != jnp.uint8 or cache.shape[2:] != (record,):
        raise ValueError(f"the cache holds {cache.dtype} records of {cache.shape[2:]}: must be {record} bytes")
    if places is None or places.shape != (tokens,):
        raise ValueError(
            f"places are {None if places is None else places.shape}: must be one for each of {tokens} tokens"
        )


def _use_kernel(
    implementation: str | None, arrays: dict[str, Array], widths: tuple[int, ...], multiple: int, by: Rotation
) -> bool:
    """Whether the kernel runs."""
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    if implementation == "reference":
        return False
    obstacle = kernel.obstacle(arrays, widths, multiple, by.cos.shape[-1]) or hopper_obstacle()
    if obstacle and implementation == "pallas":
        raise ValueError(f'implementation = "pallas": {obstacle}')
    return not obstacle and by.cos.shape[0] > 0
