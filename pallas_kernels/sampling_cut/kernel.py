"""Hopper kernel of `sampling_cut`: a block per row."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float32, Int32

from pallas_kernels.sampling_cut import cut, weights
from pallas_kernels.topk import block, simt

_WARPGROUPS = 8


class Machine(simt.Machine):
    """Per-thread code with conversions and division."""

    def number(self, x: simt.Lane) -> simt.Lane:
        """fp32 of an integer, rounded to nearest."""
        return simt.Lane(arith.uitofp(ir.F32Type.get(), x.value))

    def whole(self, x: simt.Lane) -> simt.Lane:
        """Integer part of an fp32 value in 0 .. 2^32."""
        return simt.Lane(arith.fptoui(ir.IntegerType.get_signless(32), x.value))

    def quotient(self, x: simt.Lane, y: simt.Lane) -> simt.Lane:
        return simt.Lane(arith.divui(x.value, y.value))


def obstacle(rows: int, vocab: int) -> str | None:
    """Why the kernel cannot run, or None."""
    if vocab % 4:
        return f"a vocabulary of {vocab}: the kernel takes multiples of 4"
    if rows * vocab >= 2**31:
        return f"{rows} rows of {vocab}: the kernel takes fewer than 2^31 logits"
    return None


@jax.jit
def sampling_cut(
    logits: Float32[Array, "rows vocab"],
    best: Float32[Array, " rows"],
    scale: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
) -> tuple[Float32[Array, " rows"], Int32[Array, " rows"]]:
    """See `reference.sampling_cut`."""
    rows, vocab = logits.shape
    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(*(ref,) * len(refs), scalar))
        def run(_, *arguments):
            *arrays, row = arguments
            arrays, row = list(map(simt.array, arrays)), simt.scalar(row)
            logits, best, scale, top_k, top_p, table, out, out_ids, *scratch = arrays
            m, scratch = Machine(128 * _WARPGROUPS), cut.Scratch(*scratch)
            asked = m.load(top_k, row), m.load(top_p, row)

            def find():
                cut.initialise(m, scratch, table)
                of_row = cut.Row(logits, row * vocab, vocab, m.load(best, row))
                return cut.find_cut(m, of_row, scratch, m.load(scale, row), *asked)

            last, last_id = m.cond((asked[0] > 0) | (asked[1] < 1.0), find, cut.everything(m, vocab))
            with m.when(m.tid == 0):
                m.store(out, row, last)
                m.store(out_ids, row, last_id)

        run(*refs, lax.axis_index("row"))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        grid=(rows,),
        grid_names=("row",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((cut.BINS,), jnp.int32),
            plgpu.SMEM((2 * simt.WARP,), jnp.int32),
            plgpu.SMEM((block.COUNTERS,), jnp.int32),
            plgpu.SMEM((weights.TABLE.size,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(logits, best, scale, top_k, top_p, jnp.asarray(weights.TABLE.astype("int32")))
