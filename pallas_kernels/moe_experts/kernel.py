"""FP4 expert matmul for few rows per expert, exact: E2M1 weights times E4M3 activations, both scaled per 32 channels.

The weights are the A operand of `wgmma` (64 output channels), read from registers; the rows of an expert are its N. An
E2M1 code becomes an E4M3 through a byte permutation, which looks its magnitude up in a table of 8 bytes. The table of a
row and group has the weight scale in it, relative to the largest of the row: E4M3 takes 12 exponents in exactly. Rows
that span more (`pack.SPAN`) are computed with a fixed table and multiplied by their scales. Each group of 32 channels
has a product of its own, which is multiplied by the scale of the activation in float32 and added: scales of any spread
are exact.

A block runs on every multiprocessor and works on a contiguous range of units; a unit is 64 output channels of one tile
of rows. One thread copies records of 256 input channels into a ring; the computing warpgroups take them in turn and at
the end of a unit add their sums through shared memory. A slot of the ring always belongs to the same warpgroup. The
rows of a tile stay in shared memory while its units follow each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.moe_experts import feed, pipeline, products
from pallas_kernels.moe_experts.finish import SUM_STRIDE, finish_activation, finish_rows
from pallas_kernels.moe_experts.pack import ACTIVATION_WORDS, COLS, ROWS, TOKENS, PackedWeight

WIDE = 255
"""Top of a row whose scales a table cannot hold."""
PRODUCER_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel is cut.

    `blocks`: tiles have up to 8 * blocks rows. `consumers` computing warpgroups, at least 2; `stages` records in the
    ring, a multiple of `consumers`, at most the records of a unit.
    """

    blocks: int
    consumers: int
    stages: int
    processors: int = 132


@dataclasses.dataclass(frozen=True)
class Activation:
    """What `expert_gate_up` does with the products: clamp of SwiGLU, and whether the routing weight multiplies here."""

    limit: float
    weighted: bool


def expert_matmul(
    group: Int32[Array, " tiles"],
    block: Int32[Array, " tiles"],
    count: Int32[Array, " tiles"],
    used: Int32[Array, "1"],
    x: Int32[Array, "row_blocks slabs words"],
    w: PackedWeight,
    plan: Plan,
) -> BFloat16[Array, "rows out"]:
    """y[rows of tile t] = x[rows] w[group[t]]^T in bfloat16; rows of unused tiles are not written.

    Args:
      group: expert of each tile. block: its first block of 8 rows in `x`. count: how many blocks it has, at most
        `plan.blocks`. used: how many tiles there are.
      x: `pack_activation`; w: `pack_weight`.
    """
    out_type = jax.ShapeDtypeStruct((x.shape[0] * TOKENS, w.records.shape[1] * ROWS), jnp.bfloat16)
    return _run(plan, out_type, finish_rows, (group, block, count, used, x, w.records, w.tops))


def expert_gate_up(
    group: Int32[Array, " tiles"],
    block: Int32[Array, " tiles"],
    count: Int32[Array, " tiles"],
    used: Int32[Array, "1"],
    x: Int32[Array, "row_blocks slabs words"],
    w: PackedWeight,
    routing: Float32[Array, " rows"],
    plan: Plan,
    activation: Activation,
) -> Int32[Array, "row_blocks z_slabs words"]:
    """Activation records of SwiGLU(gate, up), times the routing weight of the row when `activation.weighted`.

    Args:
      w: `pack_gate_up`. Others as in `expert_matmul`.
    """
    width = w.records.shape[1] * ROWS // 2
    if width % COLS:
        raise ValueError(f"expert width {width} is not a multiple of {COLS}")
    out_type = jax.ShapeDtypeStruct((x.shape[0], width // COLS, ACTIVATION_WORDS), jnp.int32)
    finish = functools.partial(finish_activation, activation=activation)
    return _run(plan, out_type, finish, (group, block, count, used, x, w.records, w.tops, routing))


def shared_bytes(plan: Plan, slabs: int) -> int:
    """Shared memory of a block; every array may be padded to the next KiB."""
    arrays = (
        plan.stages * feed.SLOT_BYTES,
        slabs * plan.blocks * feed.ACTIVATION_BYTES,
        2 * plan.consumers * TOKENS * SUM_STRIDE * 4,
        2 * plan.stages * 8,
    )
    return sum(-(-size // 1024) * 1024 for size in arrays)


def _run(plan, out_type, finish, operands):
    slabs, channel_tiles = operands[4].shape[1], operands[5].shape[1]
    # The slab of a new tile overwrites the old one when the record `stages` before it has been read.
    fits = plan.consumers >= 2 and slabs % plan.consumers == plan.stages % plan.consumers == 0 and plan.stages <= slabs
    if not fits:
        raise ValueError(f"{plan} does not fit {slabs} slabs")
    body = functools.partial(_body, plan=plan, slabs=slabs, channel_tiles=channel_tiles, finish=finish)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(plan.processors,),
        grid_names=("processor",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            ring=plgpu.SMEM((plan.stages, feed.SLOT_BYTES // 4), jnp.int32),
            rows=plgpu.SMEM((slabs, plan.blocks, ACTIVATION_WORDS), jnp.int32),
            sums=plgpu.SMEM((2, plan.consumers, TOKENS, SUM_STRIDE), jnp.float32),
            barriers=plgpu.SMEM((2 * plan.stages, 2), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*operands)


def _body(group, block, count, used, x, w, tops, *refs, ring, rows, sums, barriers, plan, slabs, channel_tiles, finish):
    stages, consumers = plan.stages, plan.consumers
    warpgroup, processor = lax.axis_index("warpgroup"), lax.axis_index("processor")
    units = used[0] * channel_tiles
    first, last = processor * units // plan.processors, (processor + 1) * units // plan.processors
    zero = jnp.int32(0)
    # Filled by one thread and the copies it announces; released by the 4 warps that read it.
    pipeline.init_barriers(barriers, [1] * stages + [4] * stages)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        shape = feed.Shape(stages, consumers, slabs, channel_tiles, plan.blocks)
        feed.feed(shape, group, block, count, x, w, tops, ring, rows, barriers, first, last)

    @pl.when(warpgroup < consumers)
    def _consume():
        plgpu.set_max_registers(pipeline.consumer_registers(consumers, PRODUCER_REGISTERS), action="increase")

        def run(row_block, channels, top, turn, phase, parity, *, blocks, wide):
            zeros = products.zeros(blocks * TOKENS)()

            def slab_step(step, carry):
                turn, phase, acc = carry
                slot = turn * consumers + warpgroup
                pipeline.wait(barriers.at[slot], phase)
                acc = products.multiply(blocks, wide)(ring.at[slot], rows.at[step * consumers + warpgroup], acc, *top)
                if stages < slabs:
                    pipeline.release(barriers.at[stages + slot])
                else:
                    # This frees the slab of the rows as well, whose scales were loaded last.
                    pipeline.release_after(barriers.at[stages + slot], acc)
                return *pipeline.next_slot(turn, phase, stages // consumers), acc

            turn, phase, acc = lax.fori_loop(0, slabs // consumers, slab_step, (turn, phase, zeros))
            if not wide:
                acc = products.times_tops(blocks * TOKENS)(acc, *top)
            for b in range(blocks):
                # Each block of rows has other warps that finish it than the one before.
                reader = lax.rem(warpgroup + 2 * parity, consumers)
                finish(consumers, blocks, b, sums.at[parity], acc, warpgroup, reader, row_block + b, channels, refs)
                parity = parity ^ 1
            return turn, phase, parity

        def unit_step(unit, carry):
            turn, phase, _ = carry
            tile = unit // channel_tiles
            slot = turn * consumers + warpgroup
            pipeline.wait(barriers.at[slot], phase)
            top = products.tops()(ring.at[slot])
            kinds = [(b + 1, wide) for wide in (False, True) for b in range(plan.blocks)]
            arguments = block[tile], unit - tile * channel_tiles, top
            runs = [functools.partial(run, *arguments, blocks=b, wide=wide) for b, wide in kinds]
            return lax.switch(count[tile] - 1 + jnp.where(top[0] == WIDE, plan.blocks, 0), runs, *carry)

        lax.fori_loop(first, last, unit_step, (zero, zero, zero))
