"""`index_select` on Hopper: kernels that pack queries and score entries, then `topk`, so many tokens at a time.

Few entries: the scores pass through device memory, written once and read once in fp32. That keeps selection, which
needs votes and counters of a whole thread block, out of the score kernel, which has few registers to spare.

Many entries, or blocks to publish: only the largest score of each block of 8 entries is kept. The `k` blocks of best
maximum hold the `k` best entries: each has one that is at least as good as the k-th maximum, entries outside are no
better than that, and those equal to it come later, as ties of blocks go to the smaller too. So the entries of those
blocks are scored again, as if they were a token's candidates, and selected from. Published blocks are the best maxima
but one, and the newest.

Tokens are taken in chunks, so that the scores that exist at a time do not exceed `SCORE_BYTES`, or those of one group
of at most 8 tokens where these are more, and that CUDA can launch them, whatever the number of tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32, UInt8

from pallas_kernels.device import hopper_obstacle
from pallas_kernels.index_select.pack import COLUMNS, DIM, HEADS
from pallas_kernels.index_select.pack_kernel import pack_queries
from pallas_kernels.index_select.scores import BLOCK, ENTRIES, RECORD, default_tiling, scores
from pallas_kernels.topk.kernel import MAX_K, WIDTH, topk_pallas

MANY_ENTRIES = 1 << 18
"""From here on the maxima of blocks are kept instead of scores."""
SCORE_BYTES = 1 << 30
"""Scores that exist at a time."""
MAX_ROWS = 65_535
"""Rows of a launch of `scores`: they are the second dimension of its grid."""


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
    if publish and (block_size != BLOCK or publish > MAX_K + 1):
        return f"publish = {publish} of block_size = {block_size}, the kernel takes up to {MAX_K + 1} of {BLOCK}"
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

    def among(candidates, size):
        return _among(q, weights, pool, page_table[jnp.repeat(tile_requests, tile)], visible, k, candidates, size)

    if candidates is not None:
        return among(candidates, block_size), None
    queries = max(n for n in range(1, COLUMNS + 1) if tile % n == 0)
    table = page_table[jnp.repeat(tile_requests, tile // queries)]
    if not publish and table.shape[1] * pool.shape[1] < MANY_ENTRIES:
        return _by_group(q, weights, pool, table, visible, lambda found, seen: topk_pallas(found, seen, k)), None

    def best(maxima, seen):
        return topk_pallas(maxima, -(-seen // BLOCK), k), _publish(maxima, seen, publish) if publish else None

    blocks, published = _by_group(q, weights, pool, table, visible, best, maxima=True)
    return among(blocks, BLOCK), published


def _publish(
    maxima: Float[Array, "tokens blocks"], visible: Int32[Array, " tokens"], keep: int
) -> Int32[Array, "tokens keep"]:
    """The newest block, which is the last, and of those before it the best."""
    newest = (visible[:, None] - 1) // BLOCK
    others = [topk_pallas(maxima, jnp.maximum(newest[:, 0], 0), keep - 1)] if keep > 1 else []
    found = jnp.concatenate([*others, jnp.full_like(newest, -1)], 1)
    place = jnp.sum(found >= 0, 1, keepdims=True)
    return jnp.where((jnp.arange(keep) == place) & (visible > 0)[:, None], newest, found)


def _among(
    q: BFloat16[Array, "tokens heads dim"],
    weights: BFloat16[Array, "tokens heads"],
    pool: UInt8[Array, "pages per_page record"],
    table: Int32[Array, "tokens places"],
    visible: Int32[Array, " tokens"],
    k: int,
    candidates: Int32[Array, "tokens blocks"],
    size: int,
) -> Int32[Array, "tokens k"]:
    """The best entries of each token in its candidate blocks of `size` entries, ascending and then -1."""
    # Each token has a context of its own: its candidate blocks, in ascending order.
    per_page, first = pool.shape[1], candidates * size
    pages = jnp.take_along_axis(table, first // per_page, 1, mode="clip")
    table = pages * (per_page // size) + first % per_page // size
    table = jnp.where(candidates < 0, 0, table)
    inside = jnp.clip(visible[:, None] - first, 0, size)
    seen = jnp.sum(jnp.where(candidates < 0, 0, inside), 1, dtype=jnp.int32)
    pool = pool.reshape(-1, size, RECORD)
    selected = _by_group(q, weights, pool, table, seen, lambda found, seen: topk_pallas(found, seen, k))
    block = jnp.take_along_axis(candidates, jnp.maximum(selected, 0) // size, 1)
    return jnp.where(selected < 0, -1, block * size + selected % size)


def _by_group(q, weights, pool, table, visible, select, maxima=False):
    """select(scores or `maxima`, visible) of tokens of which each row of the table has equally many."""
    rows, unit = table.shape[0], WIDTH * (BLOCK if maxima else 1)
    width = -(-table.shape[1] * pool.shape[1] // unit) * unit
    queries = q.shape[0] // rows
    arguments = jax.tree.map(lambda a: a.reshape(rows, queries, *a.shape[1:]), (q, weights, visible))

    def some(arguments):
        q, weights, visible, table = arguments
        packed, tiling = pack_queries(q, weights), default_tiling(q.shape[0], queries, width)
        return select(scores(pool, table, visible, *packed, width, tiling, maxima), visible.reshape(-1))

    arguments = *arguments, table
    most = max(1, min(MAX_ROWS, SCORE_BYTES // (4 * queries * (width // BLOCK if maxima else width))))
    if rows <= most:
        return some(arguments)
    at_once = max(n for n in range(1, most + 1) if rows % n == 0)
    parts = jax.tree.map(lambda a: a.reshape(-1, at_once, *a.shape[1:]), arguments)
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), lax.map(some, parts))
