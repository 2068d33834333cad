"""Cache writes on Hopper: one thread block per token, in place (see `pallas_kernels.rows` for the arithmetic)."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array

from dsv4jax.model.rope import Rotation
from dsv4jax.quant import BLOCK, ceil_div
from pallas_kernels import rows
from pallas_kernels.cache_write import device
from pallas_kernels.fp8_linear.reference import QuantizedActivations
from pallas_kernels.rows import CHANNELS
from pallas_kernels.topk import simt

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
GRANULE = CHANNELS * simt.WARP
"""Channels of a warp."""
RECORD_CHANNELS = 128
"""Records of a multiple of so many channels are whole words."""
MAX_CHANNELS = 1024 * CHANNELS


def obstacle(arrays: dict[str, Array], widths: tuple[int, ...], multiple: int, pairs: int) -> str | None:
    """Why a kernel cannot take rows of these widths, or None."""
    for name, array in arrays.items():
        if array.dtype != jnp.bfloat16:
            return f"{name} is {array.dtype}: must be bfloat16"
    if any(width % multiple for width in widths) or not 0 < sum(widths) <= MAX_CHANNELS:
        return (
            f"rows have {' + '.join(map(str, widths))} channels: must be multiples of {multiple} up to {MAX_CHANNELS}"
        )
    if pairs % (CHANNELS // 2) or 2 * pairs > widths[-1]:
        return f"{pairs} pairs are rotated: must be a multiple of {CHANNELS // 2} within {widths[-1]} channels"
    return None


def query_and_window_key(projected, q_norm, kv_norm, by: Rotation, ring, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    tokens, both = projected.shape
    widths = q_norm.shape[0], kv_norm.shape[0]
    out_type = [
        jax.ShapeDtypeStruct((tokens, widths[0]), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, widths[0]), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((widths[0] // BLOCK, tokens), jnp.float32),
        jax.ShapeDtypeStruct((tokens, widths[1] + widths[1] // BLOCK), jnp.uint8),
    ]
    if ring is None:
        places = jnp.zeros(tokens, jnp.int32)
    code = functools.partial(device.query_and_window_key, widths=widths, pairs=by.cos.shape[1], tokens=tokens, eps=eps)
    arguments = (projected, q_norm, kv_norm, by.cos, by.sin)
    (q_latent, elements, scale, records), ring = _each_token(code, places, arguments, ring, out_type, both)
    return q_latent, QuantizedActivations(elements, scale), records, ring


def compressed_entry(pooled, norm, by: Rotation, pool, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    width = pooled.shape[1]
    code = functools.partial(device.compressed_entry, width=width, pairs=by.cos.shape[1], eps=eps)
    out_type = [jax.ShapeDtypeStruct(pooled.shape, pooled.dtype)]
    (latent,), pool = _each_token(code, places, (pooled, norm, by.cos, by.sin), pool, out_type, width)
    return latent, pool


def index_key(projected, norm, by: Rotation, pool, places, eps: float):
    """See `pallas_kernels.cache_write`."""
    width = projected.shape[1]
    code = functools.partial(device.index_key, width=width, pairs=by.cos.shape[1], eps=eps)
    return _each_token(code, places, (projected, norm, by.cos, by.sin), pool, [], width)[1]


def _each_token(
    code: Callable[..., None],
    places: Array,
    arguments: Sequence[Array],
    cache: Array | None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    channels: int,
) -> tuple[list[Array], Array | None]:
    """Runs `code(machine, token, place, *arguments, cache, *results, sums)` in a block for each token.

    Returns the results and the cache, whose records (its last axis) are written in place.
    """
    tokens = places.shape[0]
    warpgroups = ceil_div(channels // CHANNELS, 4 * simt.WARP)
    inputs = len(arguments)
    held = [] if cache is None else [jax.new_ref(cache)]
    number = 0 if cache is None else cache.shape[0] * cache.shape[1]

    def body(places, *refs):
        def scope(sums):
            @plgpu.inline_mgpu(arg_types=(SCALAR, REF, *(REF,) * (len(refs) + 1)))
            def run(_, token, places, *refs):
                m, token = rows.Machine(128 * warpgroups), simt.scalar(token)
                arrays = [_array(ref) for ref in refs]
                target = (arrays.pop(inputs), m.u32(number)) if held else None
                place = m.load(simt.array(places), token)
                code(m, token, place, *arrays[:inputs], target, *arrays[inputs:])

            run(lax.axis_index("token"), places, *refs, sums)

        pl.run_scoped(scope, plgpu.SMEM((4 * warpgroups,), jnp.float32), collective_axes="warpgroup")

    results = pl.kernel(
        body,
        out_type=list(out_type),
        mesh=plgpu.Mesh(grid=(tokens,), grid_names=("token",), num_threads=warpgroups, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(places, *arguments, *held)
    return results, jax.freeze(held[0]) if held else None


def _array(ref: ir.Value) -> simt.Array:
    """fp32 as it is, everything else as words."""
    return simt.array(ref) if ir.MemRefType(ref.type).element_type == ir.F32Type.get() else rows.words_of(ref)
