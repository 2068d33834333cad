"""Attention over window rings and selected packed entries, one latent for all heads, with the un-rotation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dsv4jax.model.layout import TileWindow, TokenLayout
from dsv4jax.model.rope import Rotation
from dsv4jax.numerics import Numerics
from pallas_kernels.device import hopper_obstacle
from pallas_kernels.sparse_attention import kernel, reference, rows

__all__ = ["sparse_attention"]


def sparse_attention(
    q: Float[Array, "tokens heads dim"],
    keys: Array,
    ring: Array,
    layout: TokenLayout,
    windows: TileWindow,
    by: Rotation,
    sink: Float[Array, " heads"],
    pool: Array | None = None,
    selected: Int32[Array, "tokens selected"] | None = None,
    *,
    numerics: Numerics,
    implementation: str | None = None,
) -> Float[Array, "tokens heads dim"]:
    """softmax(q·k / √dim)·k over window keys and selected entries with a valueless sink, un-rotated (section 3.6, 3.7).

    Args:
      q: rotated queries.
      keys: window keys of the tokens of this step, as cached: FP8 records [tokens, 528].
      ring: window keys of earlier tokens [slots, ring, 528], before this step writes to it, at position mod ring.
      layout: where tokens, slots and pages are.
      windows: `tile_windows(layout, window)`. The query at position p reads positions max(floor, p - window + 1) .. p,
        from `keys` where they belong to this step and from `ring` otherwise.
      by: the rotation of each token, whose inverse is applied to the last 2·pairs channels of the result.
      sink: fp32 logit per head, in the denominator only.
      pool: packed entries [pages, entries per page, 288]; None for a layer with a window only.
      selected: entries of the token's request that each token reads, in any order, -1 for none; entry e is in page
        e // (entries per page) of the request.
      implementation: "reference", "pallas", or None for what the device supports.

    Scores and sums are fp32; probabilities are rounded to the type of q for the value product, relative to a running
    maximum in the kernel and to the maximum in the reference. Records that are not visible may hold anything, NaN
    included; a NaN in a visible record makes the result of its token unspecified. Invalid tokens, and tokens that see
    nothing, yield zeros; no tokens yield an empty array.

    Raises:
      ValueError: `implementation` is unknown or cannot run; the message says why.
    """
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    if implementation != "reference":
        obstacle = _obstacle(q, keys, ring, layout, windows, by, pool, selected, numerics)
        if obstacle and implementation == "pallas":
            raise ValueError(f'implementation = "pallas": {obstacle}')
        if not obstacle:
            if selected is not None:
                missing = -selected.shape[1] % (max(kernel.SPLITS) * kernel.TILE)
                selected = jnp.pad(selected, ((0, 0), (0, missing)), constant_values=-1)
            return kernel.sparse_attention(q, keys, ring, layout, by, sink, pool, selected)
    return reference.sparse_attention(q, keys, ring, layout, windows, by, sink, pool, selected, numerics)


def _obstacle(q, keys, ring, layout, windows, by, pool, selected, numerics) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if not numerics.quantize_cache:
        return "numerics.quantize_cache is False: the kernel reads packed records only"
    heads, dim = kernel.HEADS, kernel.DIM
    wanted = [
        ("q", q.shape[1:] == (heads, dim) and q.dtype == jnp.bfloat16, f"bfloat16 [tokens, {heads}, {dim}]", q),
        ("keys", keys.shape[1:] == (rows.WINDOW_BYTES,), f"[tokens, {rows.WINDOW_BYTES}] bytes", keys),
        ("ring", ring.shape[2:] == (rows.WINDOW_BYTES,), f"[slots, ring, {rows.WINDOW_BYTES}] bytes", ring),
        ("cos", by.cos.shape[1:] == (kernel.PAIRS,), f"[tokens, {kernel.PAIRS}]", by.cos),
    ]
    if selected is not None:
        wanted += [("pool", pool.shape[2:] == (rows.ENTRY_BYTES,), f"[pages, entries, {rows.ENTRY_BYTES}] bytes", pool)]
    for name, right, want, x in wanted:
        if not right:
            return f"{name} is {x.dtype} {list(x.shape)}: must be {want}"
    window = windows.positions.shape[1] + 1 - layout.tile
    if window != kernel.WINDOW:
        return f"the window is {window}: must be {kernel.WINDOW}"
    return hopper_obstacle()
