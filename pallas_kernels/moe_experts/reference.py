"""Routed experts in plain JAX: the CPU path, and what kernels are tested against."""

import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, Bool, Float, Int

from dsv4jax.linear import linear
from dsv4jax.numerics import Numerics
from dsv4jax.weights import Weight, select_expert


def swiglu(gate: Float[Array, "*rows n"], up: Float[Array, "*rows n"], limit: float) -> Float[Array, "*rows n"]:
    """silu(min(gate, limit)) · clamp(up, ±limit) in fp32 (architecture section 5.2: the gate is clamped from above
    only)."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def moe_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    numerics: Numerics,
) -> Float[Array, "tokens hidden"]:
    """Σ_k weights_k · expert_k(x) in fp32, summed in ascending order of expert id; exactly zero for invalid tokens.

    Args:
      experts: ids, distinct in a row; those not in 0..E-1 contribute nothing. Rows of invalid tokens may hold anything.
      w1, w3, w2: stacks [E, ...] of gate, up and down weights.
      limit: SwiGLU clamp.
    """
    ascending = jnp.argsort(experts, -1)
    experts, weights = (jnp.take_along_axis(a, ascending, -1) for a in (experts, weights))
    return sum_of_experts(expert_outputs(x, experts, weights, valid, w1, w3, w2, limit=limit, numerics=numerics))


def sum_of_experts(outputs: Float[Array, "tokens k hidden"]) -> Float[Array, "tokens hidden"]:
    """Σ_k in the order of k."""
    return sum(outputs[:, i] for i in range(outputs.shape[1]))


def expert_outputs(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    numerics: Numerics,
) -> Float[Array, "tokens k hidden"]:
    """weights_k · expert_k(x) in fp32 for each k, exactly zero where `moe_experts` says; arguments as there.

    Rows are sorted by expert and cut into tiles that each belong to one expert, so that work and weight traffic follow
    the routing; empty tiles are skipped. No token is dropped whatever the routing.
    """
    tokens, k = experts.shape
    count = w1.weight.shape[0]
    here = valid[:, None] & (experts >= 0) & (experts < count)
    experts = jnp.where(here, experts, count)
    rows = tokens * k
    flat = experts.reshape(rows)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=count + 1)[:count]
    tile = 8 if rows < 8 * count else 64
    group, start, filled = _tiles(sizes, tile, min(rows, count) + rows // tile)

    def run(arguments):
        group, start, filled = arguments
        row = order[jnp.minimum(start + jnp.arange(tile), rows - 1)]

        def compute():
            token = x[row // k]
            gate, up = (linear(token, select_expert(w, group), numerics) for w in (w1, w3))
            z = swiglu(gate, up, limit)
            g = weights.reshape(rows)[row, None]
            if numerics.fast:
                return linear(z.astype(x.dtype), select_expert(w2, group), numerics).astype(jnp.float32) * g
            return linear((z * g).astype(x.dtype), select_expert(w2, group), numerics).astype(jnp.float32)

        y = lax.cond(filled > 0, compute, lambda: jnp.zeros((tile, x.shape[1]), jnp.float32))
        # Places past the end of the group belong to no row.
        return jnp.where(jnp.arange(tile) < filled, row, rows), y

    row, y = lax.map(run, (group, start, filled))
    out = jnp.zeros((rows, x.shape[1]), jnp.float32).at[row.reshape(-1)].set(y.reshape(-1, x.shape[1]), mode="drop")
    return out.reshape(tokens, k, -1)


def _tiles(sizes: Int[Array, " groups"], tile: int, most: int) -> tuple[Array, Array, Array]:
    """Group, first sorted row and number of rows of each of `most` tiles; unused tiles have 0 rows."""
    per_group = (sizes + tile - 1) // tile
    ends = jnp.cumsum(per_group)
    index = jnp.arange(most)
    group = jnp.minimum(jnp.sum(ends <= index[:, None], -1), sizes.shape[0] - 1)
    within = (index - (ends - per_group)[group]) * tile
    start = (jnp.cumsum(sizes) - sizes)[group] + within
    filled = jnp.where(index < ends[-1], jnp.clip(sizes[group] - within, 0, tile), 0)
    return group, start, filled
