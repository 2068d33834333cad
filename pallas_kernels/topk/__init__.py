"""The k best scores of each row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.device import hopper_obstacle
from pallas_kernels.topk.kernel import MAX_K, topk_pallas
from pallas_kernels.topk.reference import topk_reference


def topk(
    scores: Float[Array, "rows entries"],
    k: int,
    lengths: Int[Array, " rows"] | None = None,
    implementation: str | None = None,
) -> Int32[Array, "rows k"]:
    """Indices of the `k` largest scores of each row in ascending order, then -1 where a row has fewer.

    Ties go to the smaller index; +0 and -0 are equal. NaN and -inf are never selected; +inf is. Entries from `lengths`
    on (all, if None) do not take part. The result is the same on every run.

    Args:
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; fp32, 1 <= k <= 2048; reads the scores once,
        fastest where `entries` is a multiple of 256) or None for what the device supports.

    Raises:
      ValueError: k is negative, or `implementation` is unknown or cannot run here; the message says why.
    """
    if k < 0:
        raise ValueError(f"k = {k}: must not be negative")
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be None, "reference" or "pallas"')
    rows, entries = scores.shape
    obstacle = _obstacle(scores, k)
    if implementation == "pallas" and obstacle:
        raise ValueError(f'implementation = "pallas": {obstacle}')
    if lengths is None:
        lengths = jnp.full((rows,), entries, jnp.int32)
    if implementation == "pallas" or (implementation is None and not obstacle):
        return topk_pallas(scores, lengths.astype(jnp.int32), k)
    return topk_reference(scores, lengths, k)


def _obstacle(scores: Array, k: int) -> str | None:
    """Why the kernel cannot run, or None."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}, the kernel takes float32"
    if not 1 <= k <= MAX_K:
        return f"k = {k}, the kernel takes 1 to {MAX_K}"
    if 0 in scores.shape:
        return f"scores of shape {scores.shape} are empty"
    return hopper_obstacle()
