"""Probabilities relative to the best token as integers, equal bit for bit wherever they are computed.

The distance of a logit from the best one, in halvings of the probability, is a number with 19 binary places. Its weight
is 2^28 times 2^-distance: from a table of 512 values per halving, linear between them, which is off by 3 parts in 10
million, less than rounding in the logits themselves. Only integers are added and multiplied, because a compiler may
contract floating-point operations.

The weights of a row, whose sum may need 45 bits, are divided by the power of two that brings the sum below 2^30. That
is chosen by the sum of their `coarse` values, in which nothing can overflow either.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

FRACTION = 19
"""Binary places of a distance."""
FARTHEST = float(2**24 - 2**12)
"""Largest distance: what is farther away counts as this far, and weighs nothing."""
UNIT = 2.0**FRACTION * math.log2(math.e)
"""Distance of logits that differ by 1, at temperature 1."""

_WITHIN = 10
"""Binary places of a distance that the table does not have."""
_STEPS = 1 << FRACTION - _WITHIN
TABLE = np.round(2.0 ** (28 - np.arange(_STEPS + 1) / _STEPS)).astype(np.uint32)

_COARSE = 14
"""Bits of a weight that its coarse value leaves out."""
SUM_BITS = 30 - _COARSE
"""Of the sum of coarse values there are this many bits after the division."""


def scale(temperature: Float32[Array, " rows"]) -> Float32[Array, " rows"]:
    """Distance of logits that differ by 1; finite for the smallest temperatures too."""
    return jnp.minimum(UNIT / temperature, np.finfo(np.float32).max)


def weight_of(distance, read):
    """Weight of a token, undivided; read(i) is TABLE[i]. For arrays and for per-thread code."""
    place = (distance >> _WITHIN) & (_STEPS - 1)
    high, low = read(place), read(place + 1)
    return (high - (((high - low) * (distance & (2**_WITHIN - 1))) >> _WITHIN)) >> (distance >> FRACTION)


def coarse(weight):
    """The weight in units of 2^14, rounded up."""
    return (weight + (2**_COARSE - 1)) >> _COARSE
