"""Experiment only: routing that is uniform or skewed by construction, to measure what the routing itself costs.

The tokens that come out mean nothing. A token's experts depend on its own router scores in the layer alone, of which
the bits are hashed: not on its batch, and not on its position, which is the same for many tokens of a step.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

ROUTINGS = ("model", "uniform", "skewed")


def forced_scores(scores: Float[Array, "tokens experts"], routing: str) -> Float[Array, "tokens experts"]:
    """Scores whose k largest are k distinct pseudo-random experts of each token; finite whatever `scores` holds.

    Args:
      routing: "uniform": every set of experts is equally likely. "skewed": drawn one after the other without
        replacement, the n-th most popular expert with a probability proportional to 1/n; which expert that is, is a
        fixed permutation, the same in every layer.

    Raises:
      ValueError: another routing.
    """
    experts = scores.shape[1]
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    bits = _mixed(_mixed(bits) + jnp.arange(experts, dtype=jnp.uint32))
    uniform = (bits >> 8).astype(jnp.float32) * 2**-24 + 2**-25
    if routing == "uniform":
        return uniform
    if routing != "skewed":
        raise ValueError(f"numerics.routing = {routing!r}: must be one of {ROUTINGS}")
    # The largest of logarithms of weights with Gumbel noise are draws without replacement.
    place = np.random.default_rng(0).permutation(experts)
    return -jnp.log(-jnp.log(uniform)) - np.log1p(place).astype(np.float32)


def _mixed(x: Array) -> Array:
    """A hash of 32 bits in which every bit of x reaches every bit."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
