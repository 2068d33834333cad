"""FP8 linear for few rows on Hopper: FP8 tensor cores, weights straight from shared memory, one scale per 32x32 block.

The weight is the 64-row operand A of `wgmma m64nNk32`, the rows of x are the N columns. Every group of 32 channels has
a product of its own, which is then added to the running sum in fp32 with factor weight scale * activation scale: both
are powers of two, so the only roundings are those of the sums. Where a tile of outputs would leave multiprocessors
idle, several blocks share it: each writes its sums to device memory and the last to arrive adds them in a fixed order.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from dsv4jax.model.rope import Rotation
from dsv4jax.quant import BLOCK, ceil_div
from dsv4jax.weights import Fp8Weight
from pallas_kernels.fp8_linear import device
from pallas_kernels.fp8_linear.plans import COPYING_REGISTERS, OUTPUTS, SCALE_WORDS, STEP, Plan, tile_rows
from pallas_kernels.fp8_linear.reference import QuantizedActivations

COUNTERS = 4096
"""Arrival counters: one size for all calls, so that a program fills a single array of zeros for all of them."""


def obstacle(rows: int, groups: int, outs: tuple[int, ...], inner: int, plan: Plan) -> str | None:
    """Why a product with weights of `outs` rows each does not fit a plan, or None."""
    outputs, total = plan.width, sum(outs)
    for out in outs:
        if inner % STEP or out % (groups * outputs):
            return f"weight [{out}, {inner}]: the kernel takes multiples of [{groups * outputs}, {STEP}]"
    workers = plan.splits * plan.deep
    if ceil_div(inner // STEP, workers) > SCALE_WORDS or workers > inner // STEP:
        return f"weight [{total}, {inner}]: {inner} channels do not fit {plan}"
    if plan.splits > 1 and ceil_div(rows, tile_rows(rows)) * total // outputs > COUNTERS:
        return f"{rows} rows: too many tiles of [{total}, {inner}] share blocks"
    if plan.stages * STEP * outputs < tile_rows(rows) * outputs * 4:
        return f"{rows} rows: the sums do not fit the space of the weight tiles of {plan}"
    return None


@functools.partial(jax.jit, static_argnames=("plan", "heads", "quantize"))
def fp8_matmul(
    x: Float[Array, "rows all_inner"],
    x_scale: Float32[Array, "groups rows"] | None,
    weights: Sequence[Fp8Weight],
    plan: Plan,
    by: Rotation | None = None,
    heads: int = 1,
    quantize: bool = False,
) -> Float[Array, "rows out"] | QuantizedActivations:
    """x wᵀ in bfloat16, the products with several weights side by side.

    x is E4M3 with fp32 scales [in/32, rows] that are powers of two, or bfloat16 without scales. The rows of a weight
    fall into as many groups as x is wider than it; each has its own part of x. Several weights have one group. With
    `by`, the last channels of each of `heads` equal parts of the result are rotated; with `quantize` it is FP8.
    """
    rows = x.shape[0]
    outs, inner = tuple(w.weight.shape[0] for w in weights), weights[0].weight.shape[1]
    out, number = sum(outs), len(weights)
    groups = x.shape[1] // inner
    quantized = x_scale is not None
    if problem := obstacle(rows, groups, outs, inner, plan):
        raise ValueError(problem)
    if quantized and rows % 4:
        x_scale = jnp.pad(x_scale, ((0, 0), (0, -rows % 4)))  # Copies want lines of whole 16 bytes.
    wide, deep, stages, width = plan.wide, plan.deep, plan.stages, plan.width
    height = tile_rows(rows)
    registers = plan.registers(height) if quantized else None  # Products with bfloat16 x are summed where they arise.
    row_tiles, tiles = ceil_div(rows, height), out // width
    workers, steps, slots = plan.splits * deep, inner // STEP, deep * stages
    shared_tiles = row_tiles * tiles * plan.splits if plan.splits > 1 else 1
    lines = 1 if quantized else 2
    line = STEP // lines
    first_tiles = [sum(outs[:i]) // width for i in range(number)]

    def body(*refs):
        inputs, scratch = refs[: -len(results) - len(scratch_types)], refs[-len(scratch_types) :]
        y, sums, *scales_of_y = refs[len(inputs) : len(inputs) + len(results)]
        x, *x_scale = inputs[: 1 + quantized]
        stored, scales = (inputs[1 + quantized + i * number :][:number] for i in range(2))
        counters, *turn = inputs[1 + quantized + 2 * number :]
        ws, xs, own_scales, full, empty, *xss = scratch
        r, n, split, wg = (lax.axis_index(name) for name in ("row_tile", "tile", "split", "warpgroup"))
        these = pl.ds(r * height, height)

        def of_weight(run):
            """Calls run(weight, its scale, tile within it) for the weight to which the tile belongs."""
            for i, (weight, scale) in enumerate(zip(stored, scales, strict=True)):
                first, last = first_tiles[i], (*first_tiles, tiles)[i + 1]
                call = functools.partial(run, weight, scale, n - first if first else n)
                pl.when((n >= first) & (n < last))(call) if number > 1 else call()

        def share(part):
            """First step and number of steps of one of the `deep` turns; every `workers`-th step is its own."""
            first = split * deep + part
            return first, (steps - first + workers - 1) // workers

        def load(part, i):
            slot = part * stages + lax.rem(i, stages)
            k = (share(part)[0] + i * workers) * STEP
            at = full.at[slot]

            def load_weight(weight, scale, tile):
                plgpu.copy_gmem_to_smem(weight.at[pl.ds(tile * width, width), pl.ds(k, STEP)], ws.at[slot], at)

            of_weight(load_weight)
            first = n // (tiles // groups) * inner + k
            for j in range(lines):
                plgpu.copy_gmem_to_smem(x.at[these, pl.ds(first + j * line, line)], xs.at[slot, j], at)
            if quantized:
                plgpu.copy_gmem_to_smem(x_scale[0].at[pl.ds(k // BLOCK, STEP // BLOCK), these], xss[0].at[slot], at)

        def produce():
            if registers:
                plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            def every(i, _):
                for part in range(deep):

                    @pl.when(i < share(part)[1])
                    def _(part=part):
                        slot = part * stages + lax.rem(i, stages)
                        pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                        load(part, i)

            lax.fori_loop(0, share(0)[1], every, None)

        def multiply():
            if registers:
                plgpu.set_max_registers(registers, action="increase")
            part, tile = wg // wide, lax.rem(wg, wide)
            first, count = share(part)
            own = own_scales.at[wg]

            def load_scales(weight, scale, within):
                device.stage_scales(plan, inner)(scale, own, within * wide + tile, first, count)

            of_weight(load_scales)

            def consume(i, acc):
                slot = part * stages + lax.rem(i, stages)
                plgpu.barrier_wait(full.at[slot])
                if quantized:
                    run = device.multiply(plan, height)
                    acc = run(acc, ws.at[slot], xs.at[slot, 0], xss[0].at[slot], own, i, tile)
                else:
                    acc = device.multiply_bf16(plan, height)(acc, ws.at[slot], xs.at[slot], own, i, tile)
                plgpu.barrier_arrive(empty.at[slot])
                return acc

            acc = plgpu.layout_cast(jnp.zeros((OUTPUTS * plan.tiles, height), jnp.float32), plgpu.Layout.WGMMA)
            acc = lax.fori_loop(0, count, consume, acc)
            # The tiles have served: their space takes the sums.
            device.store_sums(plan, height)(acc, ws, part, tile)
            device.finish(plan, rows, height, out, form)(ws, sums, counters, y, *turn, *scales_of_y, r, n, split)

        pl.when(wg == plan.consumers)(produce)
        pl.when(wg < plan.consumers)(multiply)

    form = None if by is None else device.Turned(out // heads, by.cos.shape[1])
    results = [
        jax.ShapeDtypeStruct((rows, out), jnp.float8_e4m3fn if quantize else jnp.bfloat16),
        jax.ShapeDtypeStruct((shared_tiles, height * width), jnp.float32),
    ]
    if quantize:
        form = device.Quantised()
        results.append(jax.ShapeDtypeStruct((out // BLOCK, rows), jnp.float32))
    scratch_types = [
        plgpu.SMEM((slots, width, STEP), jnp.float8_e4m3fn, transforms=device.LINES),
        plgpu.SMEM((slots, lines, height, line), x.dtype, transforms=device.LINES),
        plgpu.SMEM((plan.consumers, 2 * plan.tiles, SCALE_WORDS), jnp.uint32),
        plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        plgpu.Barrier(num_arrivals=wide, num_barriers=slots),
        *([plgpu.SMEM((slots, STEP // BLOCK, height), jnp.float32)] if quantized else []),
    ]
    kernel = plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch_types,
        grid=(row_tiles, tiles, plan.splits),
        grid_names=("row_tile", "tile", "split"),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    # The kernel leaves zeros in the counters, so that they serve every call of a program in turn.
    counters = jnp.zeros((COUNTERS,), jnp.int32)
    arguments = [x, *([x_scale] if quantized else []), *(w.weight for w in weights), *(w.scale for w in weights)]
    y, _, *scale = kernel(*arguments, counters, *([] if by is None else [by.cos, by.sin]))
    return QuantizedActivations(y, *scale) if quantize else y
