"""The expert operation for many tokens: routing, gather with quantisation, gate and up, SwiGLU, down, sum by token."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from pallas_kernels.moe_experts.pack import TOKENS, PackedExperts
from pallas_kernels.moe_experts.prefill_matmul import expert_matmul_prefill
from pallas_kernels.moe_experts.prefill_plan import PrefillPlan
from pallas_kernels.moe_experts.prefill_rows import activate, pack_tokens
from pallas_kernels.moe_experts.prepare import combine, limits

SMALL_TILE_ROWS = 84
"""Average rows per expert below which nearly every expert fits one tile of 96 rows."""
SMALL_TILES = PrefillPlan(12, sizes=(4, 6, 7, 8, 9, 10, 11, 12), parts=1, consumers=4, weight_stages=3, row_stages=8)
LARGE_TILES = PrefillPlan(
    22, sizes=(4, 8, 12, 16, 17, 18, 19, 20, 21, 22), parts=2, consumers=2, weight_stages=2, row_stages=5
)
"""176 rows x 128 channels are what the registers of a warpgroup hold."""


def plan_of(rows: int, number: int) -> PrefillPlan:
    """The plan of both projections, for `rows` routed rows to `number` experts."""
    return SMALL_TILES if rows <= SMALL_TILE_ROWS * number else LARGE_TILES


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
    """See the package's `moe_experts`; `fast`: the routing weight multiplies after the down projection.

    Rows quantised to FP8 and MXFP4 weights are exact in bfloat16, so the products are exact up to the float32 sums.

    Of at most `most_tokens` tokens.
    """
    tokens, k = experts.shape
    if not tokens:
        return jnp.zeros(x.shape, jnp.float32)
    number = packed.w13.records.shape[0]
    plan = plan_of(tokens * k, number)
    experts, weights = experts.astype(jnp.int32), weights.astype(jnp.float32)
    tiles, places, weights = route_rows(experts, weights, valid, number, plan.blocks)
    blocks, _ = limits(tokens, k, number, plan.blocks)
    rows, routing = pack_tokens(x, places, weights, blocks * TOKENS)
    gate_up = expert_matmul_prefill(*tiles, rows, packed.w13.records, plan)
    z = activate(gate_up, routing, limit=limit, weighted=not fast)
    y = expert_matmul_prefill(*tiles, z, packed.w2.records, plan)
    return combine(y, places, routing, weighted=fast)


def route_rows(
    experts: Int32[Array, "tokens k"],
    weights: Float32[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    number: int,
    tile_blocks: int,
) -> tuple[tuple[Array, Array, Array, Array], Int32[Array, "tokens k"], Float32[Array, "tokens k"]]:
    """Where each row goes: sorted by expert, then by token, with every expert at a multiple of 8 rows.

    Returns:
      tiles: expert, first block, blocks of each tile, and how many tiles there are; an expert's tiles have about equal
        sizes of at most `tile_blocks`.
      places: rows of a token in ascending order of expert; -1 for entries that are not computed: those of invalid
        tokens, and ids that are not in 0..number-1.
      weights: in the same order.
    """
    tokens, k = experts.shape
    here = valid[:, None] & (experts >= 0) & (experts < number)
    experts, weights = _ascending(jnp.where(here, experts, number), weights)
    member = jnp.any(experts[:, :, None] == jnp.arange(number), 1)
    through = jnp.cumsum(member.astype(jnp.int32), 0)
    blocks = (through[-1] + TOKENS - 1) // TOKENS
    first = jnp.cumsum(blocks) - blocks
    known = jnp.minimum(experts, number - 1)
    places = first[known] * TOKENS + jnp.take_along_axis(through, known, 1) - 1
    places = jnp.where(experts < number, places, -1)

    tiles = (blocks + tile_blocks - 1) // tile_blocks
    ends = jnp.cumsum(tiles)
    _, most = limits(tokens, k, number, tile_blocks)
    index = jnp.arange(most)
    group = jnp.minimum(jnp.sum(ends <= index[:, None], -1), number - 1)
    within, per = index - (ends - tiles)[group], jnp.maximum(tiles[group], 1)
    start, stop = (i * blocks[group] // per for i in (within, within + 1))
    arrays = (group, first[group] + start, stop - start, ends[-1:])
    return tuple(a.astype(jnp.int32) for a in arrays), places.astype(jnp.int32), weights


def _ascending(experts: Int32[Array, "tokens k"], weights: Float32[Array, "tokens k"]) -> tuple[Array, Array]:
    """Both by ascending expert in each row; by comparison of all pairs, as there are few."""
    k = experts.shape[1]
    before = experts[:, None, :] < experts[:, :, None]
    before |= (experts[:, None, :] == experts[:, :, None]) & (jnp.arange(k) < jnp.arange(k)[:, None])
    take = jnp.sum(before, -1)[:, None, :] == jnp.arange(k)[:, None]
    experts = jnp.sum(jnp.where(take, experts[:, None, :], 0), -1)
    return experts, jnp.sum(jnp.where(take, weights[:, None, :], 0), -1)
