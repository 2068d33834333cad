"""Hyper-connection site on Hopper: one kernel between two sublayers.

A token's row is in the hands of several blocks, each with a slice of its channels. They need sums over the whole row in
the middle of the kernel: for these they leave their shares in device memory and wait for each other. Blocks of a group
of tokens have consecutive numbers, and the device starts blocks in the order of their numbers: with room for all blocks
of a group, those of the oldest unfinished group are all started sooner or later, and no block waits for ever.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Mix, Residual
from dsv4jax.quant import BLOCK, ceil_div
from pallas_kernels.fp8_linear.reference import QuantizedActivations
from pallas_kernels.hyper_connections.device import Machine
from pallas_kernels.hyper_connections.reference import Site, SiteWeights
from pallas_kernels.hyper_connections.site import (
    FN_WORDS,
    GROUP,
    MIXES,
    SLICE,
    SUM_WORDS,
    THREADS,
    Arrays,
    Shape,
    run_site,
)
from pallas_kernels.topk import simt

CHANNELS = 1024
"""Hidden sizes are multiples of this."""
MAX_HIDDEN = 7 * CHANNELS
COUNTERS = 4096
"""Arrival counters: as many in each call, so that a program fills a single array of zeros for all of them."""


def least_multiprocessors(hidden: int) -> int:
    """With how many multiprocessors all blocks of a group run at the same time: two fit one."""
    return ceil_div(hidden // SLICE, 2)


@functools.partial(jax.jit, static_argnames="cfg")
def hyper_connection_site(residual: Residual, weights: SiteWeights, cfg: ModelConfig) -> Site:
    """See `pallas_kernels.hyper_connections`."""
    rows, n, hidden = residual.streams.shape
    shape = Shape(rows, hidden)
    groups = ceil_div(rows, GROUP)
    ref = plgpu.RefType()

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(ref,) * len(refs) + (plgpu.Layout.WG_SPLAT(()),))
        def run(_, *arguments):
            *arrays, block = arguments
            run_site(Machine(THREADS), Arrays(*map(_array, arrays)), shape, cfg, simt.scalar(block))

        run(*refs, lax.axis_index("block"))

    bf16, f32 = jnp.bfloat16, jnp.float32
    padded = groups * GROUP
    streams, x, elements, scales, pre, post, mix, *_ = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, n, hidden), bf16),
            jax.ShapeDtypeStruct((rows, hidden), bf16),
            jax.ShapeDtypeStruct((rows, hidden), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((hidden // BLOCK, rows), f32),
            jax.ShapeDtypeStruct((rows, n), f32),
            jax.ShapeDtypeStruct((rows, n), f32),
            jax.ShapeDtypeStruct((rows, n, n), f32),
            jax.ShapeDtypeStruct((padded, shape.slices, MIXES), f32),
            jax.ShapeDtypeStruct((padded, shape.slices), f32),
            jax.ShapeDtypeStruct((padded, shape.slices), f32),
        ],
        scratch_types=[
            plgpu.SMEM((FN_WORDS,), jnp.uint32),
            plgpu.SMEM((SUM_WORDS,), f32),
        ],
        grid=(groups * shape.slices,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(
        residual.streams,
        residual.output,
        residual.mix.pre,
        residual.mix.post,
        residual.mix.residual,
        weights.fn,
        weights.base,
        weights.scale,
        weights.norm,
        jnp.zeros((max(COUNTERS, groups),), jnp.int32),
    )
    return streams, x, QuantizedActivations(elements, scales), Mix(pre, post, mix)


def _array(ref: ir.Value) -> simt.Array:
    """fp32 as it is, everything else as words of 32 bits."""
    array = simt.array(ref)
    word = ir.IntegerType.get_signless(32)
    return array if array.element == ir.F32Type.get() else simt.Array(array.pointer, word)
