"""`index_select` on Hopper: kernels that pack queries and score entries, then `topk`, so many tokens at a time.

The scores do pass through device memory, written once and read once in fp32. For one query that is 4 bytes per key of
68 each way: 6% of the key bytes written and 6% read again (35% each way for six queries). It keeps selection, which
needs votes and counters of a whole thread block, out of the score kernel, which has few registers to spare. Tokens are
taken in chunks, so that the scores that exist at a time do not exceed `SCORE_BYTES`, or those of one group of at most 8
tokens where these are more, whatever the number of tokens.

Published blocks are the reference's computation on the kernel's scores, with `lax.top_k`: `topk` keeps at most 512.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.device import hopper_obstacle
from pallas_kernels.index_select import reference
from pallas_kernels.index_select.pack import COLUMNS, DIM, HEADS
from pallas_kernels.index_select.pack_kernel import pack_queries
from pallas_kernels.index_select.scores import BLOCK, ENTRIES, RECORD, default_tiling, scores
from pallas_kernels.topk.kernel import MAX_K, WIDTH, topk_pallas

MANY_ENTRIES = 1 << 16
"""From here on the maxima of blocks are stored instead of scores, and the entries of the best blocks scored again."""
SCORE_BYTES = 1 << 30
"""Scores that exist at a time."""


def obstacle(q, weights, pool, page_table, tile_requests, visible, k, candidates, block_size, publish) -> str | None:
    """Why the kernel cannot run, or None."""
    if q.shape[1:] != (HEADS, DIM):
        return f"queries of {q.shape[1:]} (heads, channels), the kernel takes {(HEADS, DIM)}"
    if q.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        return f"queries and weights are {q.dtype} and {weights.dtype}, the kernel takes bfloat16"
    if pool.dtype != jnp.uint8 or pool.shape[2] != RECORD:
        return f"keys are {pool.dtype} {pool.shape[2:]}, the kernel takes records of {RECORD} bytes"
    if pool.shape[1] % 8 or (ENTRIES % pool.shape[1] and pool.shape[1] % ENTRIES):
        return f"{pool.shape[1]} entries per page, the kernel takes 8, 16, 32 or a multiple of {ENTRIES}"
    if (candidates is not None) and (block_size % 8 or ENTRIES % block_size or pool.shape[1] % block_size):
        return f"block_size = {block_size}, the kernel takes 8, 16, 32 or 64, which must divide a page"
    if not 1 <= k <= MAX_K:
        return f"k = {k}, the kernel takes 1 to {MAX_K}"
    if 0 in q.shape or 0 in pool.shape or 0 in page_table.shape:
        return "there are no tokens or no entries"
    return hopper_obstacle()


@functools.partial(jax.jit, static_argnames=("k", "block_size", "publish"))
def index_select(
    q, weights, pool, page_table, tile_requests, visible, k, candidates, block_size, publish
) -> tuple[Int32[Array, "tokens k"], Int32[Array, "tokens published"] | None]:
    """See `pallas_kernels.index_select`."""
    tile = q.shape[0] // tile_requests.shape[0]
    if candidates is None:
        queries = max(n for n in range(1, COLUMNS + 1) if tile % n == 0)
        table = page_table[jnp.repeat(tile_requests, tile // queries)]
        seen = visible
    else:
        # Each token has a context of its own: its candidate blocks, in ascending order.
        queries, per_page = 1, pool.shape[1]
        first = candidates * block_size
        pages = jnp.take_along_axis(page_table[jnp.repeat(tile_requests, tile)], first // per_page, 1, mode="clip")
        table = pages * (per_page // block_size) + first % per_page // block_size
        table = jnp.where(candidates < 0, 0, table)
        pool = pool.reshape(-1, block_size, RECORD)
        inside = jnp.clip(visible[:, None] - first, 0, block_size)
        seen = jnp.sum(jnp.where(candidates < 0, 0, inside), 1, dtype=jnp.int32)
    groups = q.shape[0] // queries
    entries = table.shape[1] * pool.shape[1]
    by_maxima = candidates is None and block_size == BLOCK and pool.shape[1] % BLOCK == 0 and entries >= MANY_ENTRIES
    width = -(-table.shape[1] * pool.shape[1] // WIDTH) * WIDTH

    def some(groups):
        q, weights, table, seen = groups
        packed, tiling = pack_queries(q, weights), default_tiling(q.shape[0], queries, width)
        found = scores(pool, table, seen, *packed, width, tiling, maxima=by_maxima)
        seen = seen.reshape(-1)
        if by_maxima:
            # Blocks that are not written lie behind the last one that the group sees.
            blocks = -(-seen // BLOCK)
            found = jnp.where(jnp.arange(found.shape[1]) < blocks[:, None], found, -jnp.inf) if publish else found
            published = reference.publish_best(found, seen, publish, BLOCK) if publish else None
            return topk_pallas(found, blocks, k), published
        published = reference.publish_blocks(found, seen, publish, block_size) if publish else None
        return topk_pallas(found, seen, k), published

    by_group = jax.tree.map(lambda a: a.reshape(groups, queries, *a.shape[1:]), (q, weights, seen))
    arguments = (by_group[0], by_group[1], table, by_group[2])
    most = max(1, SCORE_BYTES // (4 * queries * (width // BLOCK if by_maxima else width)))
    if groups <= most:
        selected, published = some(arguments)
    else:
        at_once = max(n for n in range(1, most + 1) if groups % n == 0)
        parts = jax.tree.map(lambda a: a.reshape(-1, at_once, *a.shape[1:]), arguments)
        selected, published = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), lax.map(some, parts))
    if by_maxima:
        # The best `k` blocks hold the best `k` entries, ties included: each has one that is no worse than any outside.
        selected, _ = index_select(q, weights, pool, page_table, tile_requests, visible, k, selected, block_size, 0)
    if candidates is not None:
        block = jnp.take_along_axis(candidates, jnp.maximum(selected, 0) // block_size, 1)
        selected = jnp.where(selected < 0, -1, block * block_size + selected % block_size)
    return selected, published
