"""Hyper-connection site of a decode step on Hopper: two kernels between two sublayers.

`expand_and_project` works on slices of channels for all rows: it is bound by reading and writing the streams.
`finish_rows` works on one row per block: everything that needs a whole row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Mix, Residual
from dsv4jax.quant import BLOCK, ceil_div
from pallas_kernels.fp8_linear.reference import QuantizedActivations
from pallas_kernels.hyper_connections import device
from pallas_kernels.hyper_connections.device import CHANNELS, MIXES, ROW_TILE, STREAMS
from pallas_kernels.hyper_connections.mix import SCRATCH, predict
from pallas_kernels.hyper_connections.reference import Site, SiteWeights

WIDTH = 32
"""Channels of a slice."""
MAX_HIDDEN = 7 * CHANNELS


@functools.partial(jax.jit, static_argnames="cfg")
def hyper_connection_site(residual: Residual, weights: SiteWeights, cfg: ModelConfig) -> Site:
    """See `pallas_kernels.hyper_connections`."""
    rows, n, hidden = residual.streams.shape
    flat = residual.streams.reshape(rows, n * hidden)
    # Copies take tiles of 8 rows.
    flat, output = (jnp.pad(a, ((0, -rows % 8), (0, 0))) for a in (flat, residual.output))
    flat, u, projection, squares = expand_and_project(flat, output, residual.mix, weights.fn)
    x, quantized, mix = finish_rows(rows, u, projection, squares, weights, cfg)
    return flat[:rows].reshape(rows, n, hidden), x, quantized, mix


def expand_and_project(streams, y, mix: Mix, fn):
    """Expands with the previous site's mix, collapses with its carried part, projects on this site's fn.

    Args:
      streams: [rows, 4 * hidden] bf16.
      y: [rows, hidden] bf16, output of the sublayer between the two sites.
      fn: [72, 4 * hidden] bf16 of `split_fp32`.

    Returns:
      streams [rows, 4 * hidden] bf16, collapsed [rows, hidden] bf16, projections by slice [padded, slices, 24] fp32 and
      squares by slice [slices, padded] fp32.
    """
    rows, flat = streams.shape
    hidden = flat // STREAMS
    slices, tiles = hidden // WIDTH, ceil_div(rows, ROW_TILE)

    def body(x, y, pre, post, residual, fn, new_x, u, projection, squares, xs, ys, fs, loaded):
        t, c = lax.axis_index("tile"), lax.axis_index("slice")
        these = pl.ds(t * ROW_TILE, ROW_TILE)

        def columns(s):
            return pl.ds(s * hidden + c * WIDTH, WIDTH)

        for s in range(STREAMS):
            plgpu.copy_gmem_to_smem(x.at[these, columns(s)], xs.at[s], loaded)
            plgpu.copy_gmem_to_smem(fn.at[:, columns(s)], fs.at[s], loaded)
        plgpu.copy_gmem_to_smem(y.at[these, columns(0)], ys, loaded)
        values = device.coefficients(mix.pre.shape[0])(pre, post, residual, t)
        values = [lax.broadcast_in_dim(value, (ROW_TILE, WIDTH), (0,)) for value in values]
        pre, post, residual = values[:STREAMS], values[STREAMS : 2 * STREAMS], values[2 * STREAMS :]
        plgpu.barrier_wait(loaded)

        def read(ref):
            return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA).astype(jnp.float32)

        old, sub = [read(xs.at[s]) for s in range(STREAMS)], read(ys)

        def project(acc):
            total = square = None
            for j in range(STREAMS):
                carried = residual[j] * old[0]
                for i in range(1, STREAMS):
                    carried = carried + residual[STREAMS * i + j] * old[i]
                new = (post[j] * sub + carried).astype(jnp.bfloat16)
                xs[j] = new
                for part in range(3):
                    plgpu.wgmma(acc, new, fs.at[j, pl.ds(part * MIXES, MIXES)].T)
                wide = new.astype(jnp.float32)
                square = wide * wide if square is None else square + wide * wide
                total = pre[j] * wide if total is None else total + pre[j] * wide
            ys[...] = total.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for s in range(STREAMS):
                plgpu.copy_smem_to_gmem(xs.at[s], new_x.at[these, columns(s)])
            plgpu.copy_smem_to_gmem(ys, u.at[these, columns(0)])
            squares[c, these] = jnp.sum(square, 1)
            plgpu.wgmma_wait(0)
            projection[these, c] = acc[...]
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(project, plgpu.ACC((ROW_TILE, MIXES)))

    lines = plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(2 * WIDTH)
    bf16, f32 = jnp.bfloat16, jnp.float32
    padded = tiles * ROW_TILE
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, flat), bf16),
            jax.ShapeDtypeStruct((rows, hidden), bf16),
            jax.ShapeDtypeStruct((padded, slices, MIXES), f32),
            jax.ShapeDtypeStruct((slices, padded), f32),
        ],
        scratch_types=[
            plgpu.SMEM((STREAMS, ROW_TILE, WIDTH), bf16, transforms=lines),
            plgpu.SMEM((ROW_TILE, WIDTH), bf16, transforms=lines),
            plgpu.SMEM((STREAMS, 3 * MIXES, WIDTH), bf16, transforms=lines),
            plgpu.Barrier(num_arrivals=2 * STREAMS + 1),
        ],
        grid=(tiles, slices),
        grid_names=("tile", "slice"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(streams, y, mix.pre, mix.post, mix.residual, fn)


def finish_rows(rows: int, u, projection, squares, weights: SiteWeights, cfg: ModelConfig):
    """Everything of a site that needs a whole row; one block per row.

    Args:
      u, projection, squares: of `expand_and_project`, with at least `rows` rows.

    Returns:
      normalised u [rows, hidden] bf16, the same in FP8, and the mix this site predicts.
    """
    hidden = u.shape[1]
    padded, slices, _ = projection.shape
    workers = hidden // CHANNELS
    eps = cfg.rms_norm_eps

    def body(u, norm, projection, squares, base, scale, x, elements, scales, pre, post, residual, sums, scratch):
        row, wg = lax.axis_index("row"), lax.axis_index("warpgroup")

        @pl.when(wg < workers)
        def _():
            these = pl.ds(wg * CHANNELS, CHANNELS)
            own = plgpu.layout_cast(u.at[row, these][...], device.EIGHT).astype(jnp.float32)
            factor = plgpu.layout_cast(norm.at[these][...], device.EIGHT).astype(jnp.float32)
            square = device.sum_squares(workers)(own, sums)
            y = (factor * (own * lax.rsqrt(square * (1 / hidden) + eps))).astype(jnp.bfloat16)
            x[row, these] = y
            device.quantize(rows, hidden)(y, elements, scales, row, wg)

        @pl.when(wg == workers)
        def _():
            run = predict(slices, padded, STREAMS * hidden, eps, cfg.hc_eps, cfg.hc_sinkhorn_iters)
            run(projection, squares, base, scale, pre, post, residual, scratch, row)

    f32 = jnp.float32
    x, elements, scales, *mix = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, hidden), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, hidden), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((hidden // BLOCK, rows), f32),
            jax.ShapeDtypeStruct((rows, STREAMS), f32),
            jax.ShapeDtypeStruct((rows, STREAMS), f32),
            jax.ShapeDtypeStruct((rows, STREAMS, STREAMS), f32),
        ],
        scratch_types=[plgpu.SMEM((32,), f32), plgpu.SMEM((SCRATCH,), f32)],
        grid=(rows,),
        grid_names=("row",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(u, weights.norm, projection, squares, weights.base, weights.scale)
    return x, QuantizedActivations(elements, scales), Mix(*mix)
