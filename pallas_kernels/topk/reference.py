"""Plain JAX form of `topk`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

_INFINITY_BITS = 0x7F800000


def topk_reference(
    scores: Float[Array, "rows entries"], lengths: Int[Array, " rows"], k: int
) -> Int32[Array, "rows k"]:
    """See `topk`."""
    entries = scores.shape[1]
    smallest, largest = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    # Integers in the order of the scores: backends differ in what they do to subnormals and to the sign of zero.
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    bits = jnp.where(bits == smallest, 0, bits)
    number = (bits & largest) <= _INFINITY_BITS
    order = bits ^ ((bits >> 31) & largest)
    usable = number & (order > ~_INFINITY_BITS) & (jnp.arange(entries) < lengths[:, None])
    order = jnp.pad(jnp.where(usable, order, smallest), ((0, 0), (0, max(0, k - entries))), constant_values=smallest)
    best, chosen = lax.top_k(order, k)
    chosen = jnp.sort(jnp.where(best > smallest, chosen, largest).astype(jnp.int32), -1)
    return jnp.where(chosen == largest, -1, chosen)
