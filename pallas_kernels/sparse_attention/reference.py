"""Sparse attention in plain JAX: the CPU path, and what the kernel is tested against (architecture section 3)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsv4jax.cache import COMPRESSED_ENTRY, WINDOW_KEY
from dsv4jax.model.layout import TileWindow, TokenLayout, over_tiles
from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.numerics import Numerics


def sparse_attention(
    q: Float[Array, "tokens heads dim"],
    keys: Array,
    ring: Array,
    layout: TokenLayout,
    windows: TileWindow,
    by: Rotation,
    sink: Float[Array, " heads"],
    pool: Array | None,
    selected: Int32[Array, "tokens selected"] | None,
    numerics: Numerics,
) -> Float[Array, "tokens heads dim"]:
    """See the package's `sparse_attention`: one tile of consecutive tokens of a request at a time."""
    chosen = None if selected is None else layout.tiles(selected)

    def one_tile(tile):
        q, window, request, chosen = tile
        step, kept = keys[window.step_index], ring[window.slots, window.positions % ring.shape[1]]
        near = WINDOW_KEY.load(jnp.where(window.in_step[:, None], step, kept), numerics)
        far = seen = None
        if chosen is not None:
            page = layout.page_table[request][jnp.maximum(chosen, 0) // pool.shape[1]]
            far = COMPRESSED_ENTRY.load(pool[page, chosen % pool.shape[1]], numerics)
            seen = (chosen >= 0) & jnp.any(window.visible, -1, keepdims=True)
        return attention(q, near, window.visible, far, seen, sink)

    count = windows.positions.shape[1] + (0 if selected is None else selected.shape[-1])
    size = layout.tile * count * 4 * (q.shape[1] + q.shape[2])
    o = over_tiles(one_tile, (layout.tiles(q), windows, layout.tile_requests, chosen), size).reshape(q.shape)
    return rotate(o, jax.tree.map(lambda a: a[:, None], by.inverse()))


def attention(
    q: Float[Array, "queries heads dim"],
    near: Float[Array, "keys dim"],
    near_visible: Bool[Array, "queries keys"],
    far: Float[Array, "queries selected dim"] | None,
    far_visible: Bool[Array, "queries selected"] | None,
    sink: Float[Array, " heads"],
) -> Float[Array, "queries heads dim"]:
    """Softmax over window keys, selected entries and a valueless sink, scale dim^-½ (section 3.6).

    Probabilities are rounded to the type of q for the value product, the denominator sums them unrounded. Keys that are
    not visible may hold anything; a query that sees nothing yields zeros.
    """

    def dot(spec, a, b):
        return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    near = jnp.where(jnp.any(near_visible, 0)[:, None], near, 0)
    scores = dot("qhd,kd->qhk", q, near)
    visible = near_visible
    if far is not None:
        far = jnp.where(far_visible[..., None], far, 0)
        scores = jnp.concatenate([scores, dot("qhd,qkd->qhk", q, far)], -1)
        visible = jnp.concatenate([near_visible, far_visible], -1)
    visible = visible[:, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, -1, keepdims=True), -1e30)
    p = jnp.where(visible, jnp.exp(scores - top), 0)
    total = jnp.sum(p, -1) + jnp.exp(sink - top[..., 0])
    p = p.astype(q.dtype)
    width = near.shape[0]
    value = dot("qhk,kd->qhd", p[..., :width], near)
    if far is not None:
        value = value + dot("qhk,qkd->qhd", p[..., width:], far)
    seen = jnp.any(visible, -1, keepdims=True)
    return jnp.where(seen, value / total[..., None], 0).astype(q.dtype)
