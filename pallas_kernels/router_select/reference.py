"""Selection of experts in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32


def router_select(
    scores: Float32[Array, "tokens experts"],
    bias: Float32[Array, " experts"],
    bias_vl: Float32[Array, " experts"],
    image_mask: Bool[Array, " tokens"],
    k: int,
    scale: float,
) -> tuple[Int32[Array, "tokens k"], Float32[Array, "tokens k"]]:
    """See the package's `router_select`."""
    _, experts = lax.top_k(scores + jnp.where(image_mask[:, None], bias_vl, bias), k)
    return experts, routing_weights(scores, experts, scale)


def routing_weights(
    scores: Float32[Array, "tokens experts"], experts: Int32[Array, "tokens k"], scale: float
) -> Float32[Array, "tokens k"]:
    """The scores of the picked experts over their sum, times `scale`."""
    picked = jnp.take_along_axis(scores, experts, -1)
    return picked / (jnp.sum(picked, -1, keepdims=True) + 1e-20) * scale
