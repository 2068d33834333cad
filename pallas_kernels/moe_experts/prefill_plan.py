"""How the prefill matmul is cut, the form of its rows, and the barriers of its rings."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.moe_experts import ptx
from pallas_kernels.moe_experts.pack import COLS, ROWS, TOKENS, WEIGHT_WORDS

SLAB = 64
"""Input channels of a copy of rows."""
SLABS = COLS // SLAB
ROW_WORDS = TOKENS * SLAB // 2
"""Words of 8 rows x 64 input channels."""
WEIGHT_BYTES, ROW_BYTES = 4 * WEIGHT_WORDS, 4 * ROW_WORDS


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """How a kernel is cut.

    `blocks`: tiles have up to 8 * blocks rows, and `sizes` lists the numbers of blocks that have code of their own, in
    ascending order, the last being `blocks`. `parts` x 64 channels per computing warpgroup. `weight_stages` records per
    warpgroup part and `row_stages` copies of rows are in flight.
    """

    blocks: int
    sizes: tuple[int, ...]
    parts: int
    consumers: int
    weight_stages: int
    row_stages: int
    processors: int = 132

    @property
    def channels(self) -> int:
        return ROWS * self.parts * self.consumers


def pack_rows(x: BFloat16[Array, "rows inner"]) -> Int32[Array, "slabs blocks words"]:
    """Rows as the kernel copies them: 64 channels x 8 rows together, in each 16 channels the even before the odd ones,
    in the order of the 128-byte swizzle of `wgmma`. `prefill_rows` writes this form directly.
    """
    rows, inner = x.shape
    x = x.reshape(rows // TOKENS, TOKENS, inner // SLAB, 4, 8, 2)
    x = x.transpose(2, 0, 1, 3, 5, 4).reshape(inner // SLAB, rows // TOKENS, TOKENS, 8, 8)
    place = jnp.arange(8)[:, None] ^ jnp.arange(8)
    x = jnp.take_along_axis(x, place[None, None, :, :, None], 3)
    return lax.bitcast_convert_type(x.reshape(inner // SLAB, rows // TOKENS, ROW_WORDS, 2), jnp.int32)


class Barriers:
    """Addresses of the barriers: full and empty ones of the weight ring, then of the row ring."""

    def __init__(self, plan: PrefillPlan, ref: ir.Value):
        self.plan, self.base = plan, ptx.shared(ref)

    def at(self, start: int, slot: ir.Value) -> ir.Value:
        return ptx.add(ptx.add(self.base, 8 * start), ptx.left(slot, 3))

    def weights_full(self, slot: ir.Value) -> ir.Value:
        return self.at(0, slot)

    def weights_empty(self, slot: ir.Value) -> ir.Value:
        return self.at(self.plan.weight_stages, slot)

    def rows_full(self, slot: ir.Value) -> ir.Value:
        return self.at(2 * self.plan.weight_stages, slot)

    def rows_empty(self, slot: ir.Value) -> ir.Value:
        return self.at(2 * self.plan.weight_stages + self.plan.row_stages, slot)
