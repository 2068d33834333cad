"""Selections as masks: what `select_top` and `candidate_blocks` choose, without a sort.

A sort of every row of scores costs more on a GPU than the layer it serves. The score of rank k is found by bisection
over its 32 bits, each step of which counts.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


def top_mask(
    scores: Float[Array, "*rows entries"],
    visible: Int[Array, " queries"],
    keep: int,
    allowed: Bool[Array, "*rows entries"] | None = None,
) -> Bool[Array, "*rows entries"]:
    """The entries that `select_top` returns, of the `allowed` ones.

    Args:
      scores: finite; the axis before the last is that of `visible`.
    """
    usable = jnp.arange(scores.shape[-1]) < visible[:, None]
    return _best(scores, jnp.broadcast_to(usable if allowed is None else usable & allowed, scores.shape), keep)


def candidate_mask(
    scores: Float[Array, "*rows entries"], visible: Int[Array, " queries"], keep: int, size: int
) -> Bool[Array, "*rows entries"]:
    """The entries in the blocks that `candidate_blocks` returns."""
    entries = scores.shape[-1]
    usable = jnp.arange(entries) < visible[:, None]
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, -entries % size)]
    best = jnp.pad(jnp.where(usable, scores.astype(jnp.float32), -jnp.inf), padding, constant_values=-jnp.inf)
    best = best.reshape(*scores.shape[:-1], -1, size).max(-1)
    blocks = jnp.arange(best.shape[-1])
    best = jnp.where(blocks == ((visible - 1) // size)[:, None], jnp.inf, best)
    usable = jnp.broadcast_to(blocks <= ((visible - 1) // size)[:, None], best.shape)
    return jnp.repeat(_best(best, usable, keep), size, -1)[..., :entries]


def _best(scores: Array, usable: Bool[Array, "..."], keep: int) -> Bool[Array, "..."]:
    """The `keep` largest usable scores of each row; ties go to the smaller index."""
    order = jnp.where(usable, _ordered_bits(scores.astype(jnp.float32)), 0)

    def bit(i, bound):
        """`bound` is the largest number of its upper bits that at least `keep` of the row reach."""
        higher = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.sum(order >= higher, -1, keepdims=True) >= keep
        return jnp.where(enough, higher, bound)

    bound = lax.fori_loop(0, 32, bit, jnp.zeros((*order.shape[:-1], 1), jnp.uint32))
    above = order > bound
    tied = (order == bound) & usable
    room = keep - jnp.sum(above, -1, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, -1) <= room))


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Positive numbers in the order of finite or infinite x, with one zero."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
