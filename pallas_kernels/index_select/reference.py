"""Plain JAX form of `index_select`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from dsv4jax.quant import qdq_mxfp4, unpack_mxfp4
from pallas_kernels.topk.reference import topk_reference


def index_select(
    q, weights, pool, page_table, tile_requests, visible, k, candidates, block_size, publish
) -> tuple[Int32[Array, "tokens k"], Int32[Array, "tokens published"] | None]:
    """See `pallas_kernels.index_select`. One tile at a time."""
    tiles = tile_requests.shape[0]

    def one_tile(tile):
        q, weights, visible, request, candidates = tile
        keys = unpack_mxfp4(pool[page_table[request]], jnp.float32)
        scores = index_scores(qdq_mxfp4(q), weights, keys.reshape(-1, q.shape[-1]))
        published = publish_blocks(scores, visible, publish, block_size) if publish else None
        if candidates is not None:
            blocks = -(-scores.shape[1] // block_size)
            allowed = jnp.zeros((scores.shape[0], blocks + 1), bool)
            allowed = allowed.at[jnp.arange(scores.shape[0])[:, None], candidates].set(True)[:, :blocks]
            allowed = jnp.repeat(allowed, block_size, -1)[:, : scores.shape[1]]
            scores = jnp.where(allowed, scores, -jnp.inf)
        return topk_reference(scores, visible, k), published

    if 0 in q.shape or 0 in pool.shape or 0 in page_table.shape:
        none = jnp.full((q.shape[0], max(k, publish)), -1, jnp.int32)
        return none[:, :k], none[:, :publish] if publish else None
    q, weights, visible, candidates = jax.tree.map(
        lambda a: a.reshape(tiles, -1, *a.shape[1:]), (q, weights, visible, candidates)
    )
    selected = lax.map(one_tile, (q, weights, visible, tile_requests, candidates))
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), selected)


def index_scores(
    q: Float[Array, "queries heads dim"], weights: Float[Array, "queries heads"], keys: Float[Array, "entries dim"]
) -> Float[Array, "queries entries"]:
    """Σ_h relu(q_h · k) · w_h in fp32 (section 4.2, without its roundings)."""
    dots = jnp.einsum("qhd,nd->qhn", q, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(dots) * weights[..., None].astype(jnp.float32), 1)


def publish_blocks(
    scores: Float[Array, "queries entries"], visible: Int32[Array, " queries"], keep: int, size: int
) -> Int32[Array, "queries keep"]:
    """The `keep` blocks of best maximum with a visible entry, that of the newest always among them (section 4.4)."""
    scores = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % size)))
    usable = (jnp.arange(scores.shape[1]) < visible[:, None]) & (scores > -jnp.inf)
    best = jnp.where(usable, scores, -jnp.inf).reshape(scores.shape[0], -1, size).max(-1)
    newest = (visible[:, None] - 1) // size
    best = jnp.where((jnp.arange(best.shape[1]) == newest) & (visible > 0)[:, None], jnp.inf, best)
    return topk_reference(best, jnp.full(best.shape[:1], best.shape[1]), keep)
