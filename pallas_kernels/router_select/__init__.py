"""The experts of a token and their weights, from its router scores."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.device import hopper_obstacle
from pallas_kernels.router_select import kernel, reference

__all__ = ["router_select"]


def router_select(
    scores: Float32[Array, "tokens experts"],
    bias: Float32[Array, " experts"],
    bias_vl: Float32[Array, " experts"],
    image_mask: Bool[Array, " tokens"],
    k: int,
    scale: float,
    *,
    implementation: str,
) -> tuple[Int32[Array, "tokens k"], Float32[Array, "tokens k"]]:
    """Ids of the k largest scores + bias, best first with ties to the smaller id; and their scores over the sum of
    those, times `scale` (section 5.1).

    NaN counts as larger than any number, -0 as smaller than +0. No tokens yield empty arrays.

    Args:
      bias, bias_vl: for tokens outside and inside images.
      implementation: "reference" or "pallas"; the ids are the same, the weights up to the last bits.

    Raises:
      ValueError: k is not in 1..experts, or the implementation is unknown or cannot run; the message says why.
    """
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"k = {k}: must be in 1..{scores.shape[1]}, the number of experts")
    match implementation:
        case "reference":
            return reference.router_select(scores, bias, bias_vl, image_mask, k, scale)
        case "pallas":
            if why := hopper_obstacle():
                raise ValueError(f'implementation = "pallas": {why}')
            if not scores.shape[0]:
                return jnp.zeros((0, k), jnp.int32), jnp.zeros((0, k), jnp.float32)
            return kernel.router_select(scores, bias, bias_vl, image_mask, k, scale)
    raise ValueError(f'implementation = {implementation!r}: must be "reference" or "pallas"')
