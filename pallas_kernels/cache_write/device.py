"""What a thread block does with one token. Per-thread code for a `rows.Machine`.

Arrays are words of 32 bits; rotations, scales and `sums`, which has an element per warp, are fp32.
"""

from dsv4jax.quant import ceil_div
from pallas_kernels import rows
from pallas_kernels.rows import CHANNELS
from pallas_kernels.topk.simt import WARP


def query_and_window_key(
    m, token, projected, q_norm, kv_norm, cos, sin, cache, q_latent, elements, scales, records, sums,
    *, widths: tuple[int, int], pairs: int, tokens: int, eps: float,
):  # fmt: skip
    """The first warps take the query, the next ones the window key. `cache` is None where nothing is to be written."""
    q_width, width = widths
    q_threads, threads = q_width // CHANNELS, (q_width + width) // CHANNELS
    q_warps, warps = q_threads // WARP, threads // WARP
    is_query = m.warp < q_warps
    key_index = m.tid - q_threads
    values = rows.read(m, m.row(projected, token, (q_width + width) // 2), m.tid, threads)
    weights = rows.read(m, q_norm, m.tid, q_threads), rows.read(m, kv_norm, key_index, width // CHANNELS)
    weight = [m.where(is_query, q, key) for q, key in zip(*weights, strict=True)]
    rows.put_square_sum(m, sums, values)
    m.sync()
    means = (
        rows.total(m, sums, range(q_warps)) * (1 / q_width),
        rows.total(m, sums, range(q_warps, warps)) * (1 / width),
    )
    values = rows.normalise(m, values, weight, m.where(is_query, *means), eps)
    with m.when(is_query):
        rows.write(m, m.row(q_latent, token, q_width // 2), m.tid, q_threads, values)
        own = m.row(elements, token, q_width // 4)
        rows.put_activations(m, own, scales, m.tid, q_threads, token, tokens, values)
    with m.when((m.warp >= q_warps) & (m.warp < warps)):
        turns = m.row(cos, token, pairs), m.row(sin, token, pairs)
        key = rows.fp8(m, rows.rotate(m, values, *turns, key_index, width, pairs))
        size = (width + width // rows.BLOCK) // 4
        rows.put_record(m, m.row(records, token, size), key_index, threads - q_threads, key)
        if cache is not None:
            _write(m, cache, token, size, key_index, threads - q_threads, key)


def compressed_entry(m, token, pooled, norm, cos, sin, cache, latent, sums, *, width: int, pairs: int, eps: float):
    """The normalised latent, and its rotated form as an NVFP4 record."""
    values = _normalised(m, token, pooled, norm, sums, width, eps)
    rows.write(m, m.row(latent, token, width // 2), m.tid, width // CHANNELS, values)
    _write_rotated(m, rows.nvfp4, token, values, cos, sin, cache, width, pairs)


def index_key(m, token, projected, norm, cos, sin, cache, sums, *, width: int, pairs: int, eps: float):
    """The normalised and rotated key as an MXFP4 record."""
    values = _normalised(m, token, projected, norm, sums, width, eps)
    _write_rotated(m, rows.mxfp4, token, values, cos, sin, cache, width, pairs)


def _normalised(m, token, x, norm, sums, width, eps):
    threads = width // CHANNELS
    values = rows.read(m, m.row(x, token, width // 2), m.tid, threads)
    weight = rows.read(m, norm, m.tid, threads)
    rows.put_square_sum(m, sums, values)
    m.sync()
    mean = rows.total(m, sums, range(ceil_div(threads, WARP))) * (1 / width)
    return rows.normalise(m, values, weight, mean, eps)


def _write_rotated(m, encode, token, values, cos, sin, cache, width, pairs):
    values = rows.rotate(m, values, m.row(cos, token, pairs), m.row(sin, token, pairs), m.tid, width, pairs)
    encoded = encode(m, values)
    size = (width // 2 + width // encoded.block) // 4
    _write(m, cache, token, size, m.tid, width // CHANNELS, encoded)


def _write(m, cache, token, size, index, threads, encoded):
    """Writes a record of `size` words to the token's place in the cache, given as its array, its number of places and
    the places of the tokens."""
    array, number, places = cache
    place = m.load(places, token)
    with m.when(place < number):
        rows.put_record(m, m.row(array, place, size), index, threads, encoded)
