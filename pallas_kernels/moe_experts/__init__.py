"""Routed experts: gather, gate/up, SwiGLU, routing weight, down, combine."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4jax.numerics import Numerics
from dsv4jax.weights import Weight
from pallas_kernels.device import hopper_obstacle
from pallas_kernels.moe_experts import decode, prefill, reference
from pallas_kernels.moe_experts.pack import COLS, PackedExperts, pack_experts, unpack_experts
from pallas_kernels.moe_experts.prepare import most_tokens

__all__ = ["PackedExperts", "moe_experts", "most_tokens", "pack_experts", "unpack_experts"]

FEW_ROWS = 20
"""Rows per expert on average up to which the decode form runs: beyond, most experts need a second of its tiles."""


def moe_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    w1: Weight | PackedExperts,
    w3: Weight | None = None,
    w2: Weight | None = None,
    *,
    limit: float,
    numerics: Numerics,
    ranks: int = 1,
) -> Float[Array, "tokens hidden"]:
    """Σ_k weights_k · expert_k(x) in fp32, summed in ascending order of expert id (sections 5.2 and 5.3).

    The result is exactly zero for invalid tokens, whose rows may hold anything, NaN included. No token is dropped
    whatever the routing. No tokens yield an empty array.

    Args:
      experts: ids, distinct in a row; those not in 0..E-1 contribute nothing: their experts are elsewhere.
      w1, w3, w2: for `numerics.implementation` "reference" the stacks [E, ...] of gate, up and down weights; for
        "pallas" one argument, what `pack_experts` makes of them.
      limit: SwiGLU clamp.
      ranks: on average one in so many ids is in 0..E-1; decides which form of the kernel runs.

    "pallas" rounds where the reference does; sums over channels are in another order, and the order differs between its
    two forms: `decode` up to `FEW_ROWS` routed rows (tokens * k) per expert on average, `prefill` beyond. Of weights
    with a NaN scale (byte 255) its result is unspecified.

    Raises:
      ValueError: the weights do not belong to the implementation, or it is unknown or cannot run; the message says why.
    """
    packed = isinstance(w1, PackedExperts)
    match numerics.implementation:
        case "reference":
            if packed:
                raise ValueError('numerics.implementation = "reference": takes w1, w3 and w2, not PackedExperts')
            return reference.moe_experts(x, experts, weights, valid, w1, w3, w2, limit=limit, numerics=numerics)
        case "pallas":
            if not packed:
                raise ValueError('numerics.implementation = "pallas": takes PackedExperts, made by `pack_experts`')
            if why := _obstacle(x, experts, w1, numerics, ranks):
                raise ValueError(f'numerics.implementation = "pallas": {why}')
            form = decode if _is_few(experts, w1, ranks) else prefill
            return form.moe_experts(x, experts, weights, valid, w1, limit=limit, fast=numerics.fast)
    raise ValueError(f'numerics.implementation = {numerics.implementation!r}: must be "reference" or "pallas"')


def _is_few(experts: Array, packed: PackedExperts, ranks: int) -> bool:
    return experts.size <= FEW_ROWS * packed.w13.records.shape[0] * ranks


def _obstacle(x: Array, experts: Array, packed: PackedExperts, numerics: Numerics, ranks: int) -> str | None:
    """Why the kernels cannot run, or None."""
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernels take bfloat16"
    if not numerics.quantize_activations:
        return "quantize_activations = False, the kernels take FP8 activations"
    tokens, k = experts.shape
    number, width = packed.w13.records.shape[0], packed.w2.records.shape[2] * COLS
    if tokens > (most := most_tokens(k, number, x.shape[1], width)):
        return f"{tokens} tokens with {k} experts each, the kernels take at most {most}"
    if _is_few(experts, packed, ranks) and (why := decode.obstacle(experts.size, packed)):
        return why
    return hopper_obstacle()
