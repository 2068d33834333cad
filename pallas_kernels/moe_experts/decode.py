"""The expert operation for few rows per expert, as four kernels: routing and quantisation, gate and up, down, sum by
token. A token's result does not depend on the others."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from pallas_kernels.moe_experts.kernel import Activation, Plan, expert_gate_up, expert_matmul, shared_bytes
from pallas_kernels.moe_experts.pack import COLS, PackedExperts
from pallas_kernels.moe_experts.prepare import combine, prepare

SHARED_BYTES = 227 * 1024
"""Shared memory of a block."""


def choose_plan(slabs: int, blocks: int) -> Plan | None:
    """The plan for weights of `slabs` x 256 input channels and tiles of up to 8 * `blocks` rows; None if none fits."""
    for consumers in (4, 3, 2):
        if slabs % consumers == 0:
            for stages in range(min(slabs, 16) // consumers * consumers, 0, -consumers):
                plan = Plan(blocks, consumers, stages)
                if shared_bytes(plan, slabs) <= SHARED_BYTES:
                    return plan
    return None


def plans(rows: int, packed: PackedExperts) -> tuple[Plan | None, Plan | None]:
    """Plans of gate/up and down for `rows` routed rows; both have the same tiles."""
    blocks = 1 if rows <= 2 * packed.w13.records.shape[0] else 2
    return choose_plan(packed.w13.records.shape[2], blocks), choose_plan(packed.w2.records.shape[2], blocks)


def obstacle(rows: int, packed: PackedExperts) -> str | None:
    """Why the kernels cannot run for these sizes, or None."""
    sizes = zip(("hidden size", "expert width"), (packed.w13, packed.w2), plans(rows, packed), strict=True)
    for name, weight, plan in sizes:
        if plan is None:
            size = weight.records.shape[2] * COLS
            return f"no plan for {name} {size}: a quarter, a third or half of it must be a multiple of {COLS}"
    return None


@functools.partial(jax.jit, static_argnames=("limit", "fast"))
def moe_experts(
    x: BFloat16[Array, "tokens hidden"],
    experts: Int32[Array, "tokens k"],
    weights: Float32[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    packed: PackedExperts,
    *,
    limit: float,
    fast: bool,
) -> Float32[Array, "tokens hidden"]:
    """See the package's `moe_experts`; `fast`: the routing weight multiplies after the down projection."""
    tokens, k = experts.shape
    if not tokens:
        return jnp.zeros(x.shape, jnp.float32)
    gate_up, down = plans(tokens * k, packed)
    number = packed.w13.records.shape[0]
    experts, valid = experts.astype(jnp.int32), valid.astype(jnp.int32)
    *tiles, records, routing, places = prepare(x, experts, weights.astype(jnp.float32), valid, number, gate_up.blocks)
    z = expert_gate_up(*tiles, records, packed.w13, routing, gate_up, Activation(limit, weighted=not fast))
    y = expert_matmul(*tiles, z, packed.w2, down)
    return combine(y, places, routing, weighted=fast)
