"""RMS normalisation of the text stack (architecture section 2.1)."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from dsv4jax.weights import declare_array


def rms_norm(x: Float[Array, "*rows n"], weight: Float[Array, " n"], eps: float) -> Float[Array, "*rows n"]:
    """w · x/√(mean(x²)+eps) in fp32 with one rounding, to the type of x, after the weight."""
    x32 = x.astype(jnp.float32)
    normal = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + eps)
    return (weight.astype(jnp.float32) * normal).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS normalisation with a BF16 weight."""

    def __init__(self, size: int, eps: float, axis: str | None = None):
        self.weight = declare_array((size,), "BF16", (axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        return rms_norm(x, self.weight[...], self.eps)
