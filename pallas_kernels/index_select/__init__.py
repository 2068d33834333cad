"""Lightning indexer: which entries a query attends to, from packed index keys (architecture section 4)."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.index_select import kernel, reference

__all__ = ["index_select"]


def index_select(
    q: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    pool: Array,
    page_table: Int32[Array, "requests places"],
    tile_requests: Int32[Array, " tiles"],
    visible: Int32[Array, " tokens"],
    k: int,
    candidates: Int32[Array, "tokens blocks"] | None = None,
    *,
    block_size: int = 8,
    publish: int = 0,
    implementation: str | None = None,
) -> tuple[Int32[Array, "tokens k"], Int32[Array, "tokens published"] | None]:
    """The `k` entries of best score Σ_h relu(q_h · key) · weight_h of each token, and blocks to restrict others to.

    Args:
      q: rotated index queries, which are rounded to MXFP4 here (4.1); that changes nothing where it has been done.
      pool: index keys as cached: MXFP4 records, uint8 [pages, entries per page, 68].
      page_table: pages of each request; entry e is in page e // (entries per page). Page numbers out of range stand for
        pages that no token sees.
      tile_requests: request of each tile of tokens / tiles consecutive tokens.
      visible: each token sees the first so many entries of its request (3.5); 0 for padding.
      candidates: blocks a token may select from, ascending, then -1; None for no restriction.
      block_size: entries per candidate block.
      publish: number of candidate blocks to return (4.4): those of the best maxima, the block of the newest visible
        entry always among them, blocks without a visible entry never; 0 for None. Not together with `candidates`.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs) or None for what the device supports.

    Returns:
      Selected entries, and published blocks, both ascending, then -1 where there are fewer; without tokens or entries
      the results are empty or all -1. Ties go to the smaller index. Entries whose score is NaN are never selected.
      Scores are fp32; the kernel rounds each head's dot product to 11 significant bits before the head is weighted,
      where the released program rounds it to 8.

    Raises:
      ValueError: sizes do not fit, or `implementation` is unknown or cannot run here; the message says why.
    """
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be None, "reference" or "pallas"')
    if k < 0 or publish < 0 or block_size < 1:
        raise ValueError(f"k = {k}, publish = {publish}, block_size = {block_size}: at least 0, 0 and 1")
    if publish and candidates is not None:
        raise ValueError(f"publish = {publish}: a token that is restricted to candidates publishes none")
    if q.shape[0] % max(1, tile_requests.shape[0]):
        raise ValueError(f"{q.shape[0]} tokens are not a whole number for each of {tile_requests.shape[0]} tiles")
    arguments = (q, weights, pool, page_table, tile_requests, visible, k, candidates, block_size, publish)
    if implementation != "reference":
        obstacle = kernel.obstacle(*arguments)
        if obstacle and implementation == "pallas":
            raise ValueError(f'implementation = "pallas": {obstacle}')
        if not obstacle:
            return kernel.index_select(*arguments)
    return reference.index_select(*arguments)
