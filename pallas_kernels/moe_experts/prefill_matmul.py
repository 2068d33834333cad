"""FP4 expert matmul for many rows per expert, exact: the weights become bfloat16 in registers.

Reads the weight records of the decode kernel. The weights are the A operand of `wgmma` (64 output channels), in
registers; the rows of an expert, bfloat16, are its N. Rows that come from FP8 with power-of-two scales are exact in
bfloat16, and so is an E2M1 code times its scale: no group needs a sum of its own.

An E2M1 code becomes bfloat16 through byte permutations that look it up; a product with a power of two gives the weight.
A word of a weight record holds for channels r and r + 8 the codes of four input channels; read as an A operand of
m64k16 it puts the even channels of 16 first and the odd ones behind them, and `pack_rows` orders the rows alike.

A block runs on every multiprocessor and takes every 132nd unit; a unit is `consumers` x `parts` x 64 output channels of
one tile of rows. One warpgroup copies weight records of 256 input channels into one ring and rows x 64 input channels
into another; each of the others multiplies its own channels by all rows of the tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.moe_experts import pipeline, ptx
from pallas_kernels.moe_experts import prefill_products as products
from pallas_kernels.moe_experts.pack import ROWS, TOKENS, WEIGHT_WORDS
from pallas_kernels.moe_experts.prefill_plan import ROW_BYTES, ROW_WORDS, SLABS, WEIGHT_BYTES, Barriers, PrefillPlan

PRODUCER_REGISTERS = 24


def expert_matmul_prefill(
    group: Int32[Array, " tiles"],
    block: Int32[Array, " tiles"],
    count: Int32[Array, " tiles"],
    used: Int32[Array, "1"],
    x: Int32[Array, "slabs row_blocks words"],
    w: Int32[Array, "experts channel_tiles records record_words"],
    plan: PrefillPlan,
) -> BFloat16[Array, "rows out"]:
    """y[rows of tile t] = x[rows] w[group[t]]^T in bfloat16; rows of unused tiles are not written.

    Args:
      group: expert of each tile. block: its first block of 8 rows in `x`. count: how many blocks it has, at most
        `plan.blocks`. used: how many tiles there are.
      x: `pack_rows`; w: `pack_weight`.
    """
    out, records = w.shape[1] * ROWS, w.shape[2]
    if out % plan.channels:
        raise ValueError(f"{plan} does not fit {out} output channels")
    body = functools.partial(_body, plan=plan, records=records, channel_tiles=out // plan.channels)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[1] * TOKENS, out), jnp.bfloat16),
        grid=(plan.processors,),
        grid_names=("processor",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            rows=plgpu.SMEM((plan.row_stages, plan.blocks, ROW_WORDS), jnp.int32),
            weights=plgpu.SMEM((plan.weight_stages, plan.consumers, plan.parts, WEIGHT_WORDS), jnp.int32),
            staging=plgpu.SMEM((plan.consumers, 4, 2, products.STAGING_ROWS, products.STAGING_STRIDE // 4), jnp.int32),
            barriers=plgpu.SMEM((2 * (plan.weight_stages + plan.row_stages), 2), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(group, block, count, used, x, w)


def _body(group, block, count, used, x, w, out, *, rows, weights, staging, barriers, plan, records, channel_tiles):
    warpgroup, processor = lax.axis_index("warpgroup"), lax.axis_index("processor")
    units = (used[0] * channel_tiles - processor + plan.processors - 1) // plan.processors
    zero = jnp.int32(0)
    # Filled by one thread and the copies it announces; released by each computing warp.
    arrivals = [n for s in (plan.weight_stages, plan.row_stages) for n in [1] * s + [4 * plan.consumers] * s]
    pipeline.init_barriers(barriers, arrivals)

    def place(step):
        unit = processor + step * plan.processors
        tile = unit // channel_tiles
        return tile, unit - tile * channel_tiles

    @pl.when(warpgroup == plan.consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def unit_step(step, carry):
            tile, channels = place(step)
            expert, row_block, blocks = group[tile], block[tile], count[tile]
            first = channels * (plan.parts * plan.consumers)

            def record_step(record, carry):
                w_slot, w_phase, x_slot, x_phase = carry
                _fetch_weights(plan)(
                    barriers, weights.at[w_slot], w.at[expert, first, record], w_slot, w_phase, jnp.int32(records)
                )
                w_slot, w_phase = pipeline.next_slot(w_slot, w_phase, plan.weight_stages)
                for i in range(SLABS):
                    _fetch_rows(plan)(
                        barriers, rows.at[x_slot], x.at[record * SLABS + i, row_block], x_slot, x_phase, blocks
                    )
                    x_slot, x_phase = pipeline.next_slot(x_slot, x_phase, plan.row_stages)
                return w_slot, w_phase, x_slot, x_phase

            return lax.fori_loop(0, records, record_step, carry)

        lax.fori_loop(0, units, unit_step, (zero,) * 4)

    @pl.when(warpgroup < plan.consumers)
    def _consume():
        plgpu.set_max_registers(pipeline.consumer_registers(plan.consumers, PRODUCER_REGISTERS), action="increase")

        def unit_products(size, carry):
            """The sums of a unit; all sizes keep them in the same registers."""

            def record_step(_, carry):
                w_slot, w_phase, x_slot, x_phase, acc = carry
                acc = products.multiply(plan, size)(
                    barriers, weights.at[w_slot, warpgroup], rows, w_slot, w_phase, x_slot, x_phase, acc
                )
                w_slot, w_phase = pipeline.next_slot(w_slot, w_phase, plan.weight_stages)
                for _ in range(SLABS):
                    x_slot, x_phase = pipeline.next_slot(x_slot, x_phase, plan.row_stages)
                return w_slot, w_phase, x_slot, x_phase, acc

            return lax.fori_loop(0, records, record_step, carry)

        def unit_step(step, carry):
            tile, channels = place(step)
            row_block, blocks = block[tile], count[tile]
            carry = *carry, products.zeros(plan)()
            runs = [functools.partial(unit_products, size) for size in plan.sizes]
            if len(runs) == 1:
                *carry, acc = runs[0](carry)
            else:
                chosen = sum((blocks > size).astype(jnp.int32) for size in plan.sizes[:-1])
                *carry, acc = lax.switch(chosen, runs, carry)
            first = (channels * plan.consumers + warpgroup) * plan.parts * ROWS
            target = out.at[row_block * TOKENS, pl.ds(first, plan.parts * ROWS)]
            products.finish_rows(plan, channel_tiles * plan.channels)(staging.at[warpgroup], target, blocks, acc)
            return tuple(carry)

        lax.fori_loop(0, units, unit_step, (zero,) * 4)


def _fetch_weights(plan: PrefillPlan):
    """Copies one record of every 64 channels of a unit. In the first round every slot is free: the phase before the
    first counts as completed."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 3 + (ptx.SCALAR,) * 3)
    def fetch(_, barriers, weights, w, slot, phase, records):
        with mgpu.utils.when(ptx.equal(ptx.thread(), 0)):
            slot, bars = ptx.scalar(slot), Barriers(plan, barriers)
            full, target, source = bars.weights_full(slot), ptx.shared(weights), ptx.address(w)
            ptx.barrier_wait(bars.weights_empty(slot), arith.xori(ptx.scalar(phase), ptx.const(1)))
            tiles = plan.consumers * plan.parts
            ptx.barrier_expect(full, ptx.const(tiles * WEIGHT_BYTES))
            stride = arith.extui(source.type, ptx.mul(ptx.scalar(records), WEIGHT_BYTES))
            for i in range(tiles):
                ptx.bulk_copy(ptx.add(target, i * WEIGHT_BYTES), source, WEIGHT_BYTES, full)
                source = arith.addi(source, stride)

    return fetch


def _fetch_rows(plan: PrefillPlan):
    """Copies 64 input channels of the rows of a tile."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,) * 3 + (ptx.SCALAR,) * 3)
    def fetch(_, barriers, rows, x, slot, phase, blocks):
        with mgpu.utils.when(ptx.equal(ptx.thread(), 0)):
            slot, bars = ptx.scalar(slot), Barriers(plan, barriers)
            full, size = bars.rows_full(slot), ptx.mul(ptx.scalar(blocks), ROW_BYTES)
            ptx.barrier_wait(bars.rows_empty(slot), arith.xori(ptx.scalar(phase), ptx.const(1)))
            ptx.barrier_expect(full, size)
            ptx.bulk_copy(ptx.shared(rows), ptx.address(x), size, full)

    return fetch
