"""Hopper kernel of `router_select`: a warp per token, four tokens per block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.router_select.select import Selection, select
from pallas_kernels.topk import simt

TOKENS = 4
"""Tokens of a block."""


class _Machine(simt.Machine):
    def divide(self, x: simt.Lane, y: simt.Lane) -> simt.Lane:
        return simt.Lane(arith.divf(x.value, y.value))


@functools.partial(jax.jit, static_argnames=("k", "scale"))
def router_select(
    scores: Float32[Array, "tokens experts"],
    bias: Float32[Array, " experts"],
    bias_vl: Float32[Array, " experts"],
    image_mask: Bool[Array, " tokens"],
    k: int,
    scale: float,
) -> tuple[Int32[Array, "tokens k"], Float32[Array, "tokens k"]]:
    """See the package's `router_select`."""
    tokens, experts = scores.shape
    ref = plgpu.RefType()

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(ref,) * 6 + (plgpu.Layout.WG_SPLAT(()),))
        def run(_, *arguments):
            *arrays, block = arguments
            m = _Machine(32 * TOKENS)
            token = simt.scalar(block) * TOKENS + m.warp
            with m.when(token < tokens):
                select(m, Selection(*map(simt.array, arrays), experts, k, scale), token)

        run(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, k), jnp.int32), jax.ShapeDtypeStruct((tokens, k), jnp.float32)),
        grid=(-(-tokens // TOKENS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(scores, bias, bias_vl, image_mask.astype(jnp.int32))
