"""The mix that a site predicts for one token, by one block (architecture section 2.2)."""

from dsv4jax.config import ModelConfig
from pallas_kernels.hyper_connections.arg_specs import STREAMS

MIXES = STREAMS * (2 + STREAMS)
PARTS = 5
"""Threads that share the sum of a coefficient over the slices."""


def put_parts(m, projection, sums, start: int, row, slices: int) -> None:
    """Each of 5 x 24 threads adds up its part of a coefficient's slices of a row, and stores the sum in `sums`
    from `start` on; a barrier must follow."""
    each = -(-slices // PARTS)
    part, k = m.divide(m.tid, MIXES)
    with m.when(part < PARTS):
        values = []
        for i in range(each):
            at = part * each + i
            inside = at < slices
            at = m.where(inside, at, m.u32(0))
            value = m.load(projection, (row * slices + at) * MIXES + k)
            values.append(m.where(inside, value, m.f32(0.0)))
        m.store(sums, m.tid + start, total(values))


def scale_and_base(m, scale, base):
    """Scale and base of the coefficient of which the lane has the number."""
    k = _coefficient(m)
    return m.load(scale, m.where(k < 2 * STREAMS, k >> 2, m.u32(2))), m.load(base, k)


def logits(m, sums, start, mean_square, scale, base, cfg: ModelConfig):
    """The 24 logits of a row, in every lane of a warp, from what `put_parts` stored in `sums` from `start` on."""
    k = _coefficient(m)
    projected = total([m.load(sums, start + k + MIXES * part) for part in range(PARTS)])
    logit = m.fma(projected * m.rsqrt(mean_square + cfg.rms_norm_eps), scale, base)
    return [m.broadcast(logit, i) for i in range(MIXES)]


def put_mix(m, z, results, row, cfg: ModelConfig) -> None:
    """Stores the mix of a row that the logits `z` make; `results` are pre, post and residual of all rows."""
    sigmoid = [m.inverse(m.exp(v * -1.0) + 1.0) for v in z[: 2 * STREAMS]]
    pre = [v + cfg.hc_eps for v in sigmoid[:STREAMS]]
    post = [v * 2.0 for v in sigmoid[STREAMS:]]
    residual = _sinkhorn(m, z[2 * STREAMS :], cfg.hc_eps, cfg.hc_sinkhorn_iters)
    with m.when(m.lane == 0):
        m.store4(results[0], row * STREAMS, pre)
        m.store4(results[1], row * STREAMS, post)
        for i in range(STREAMS):
            m.store4(results[2], (row * STREAMS + i) * STREAMS, residual[STREAMS * i :][:STREAMS])


def _coefficient(m):
    return m.where(m.lane < MIXES, m.lane, m.u32(0))


def total(values):
    """Pairwise sum."""
    values = list(values)
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _sinkhorn(m, logits, eps: float, iterations: int):
    """Softmax rows plus eps, then columns and rows in turn, ending with columns; all in the registers of a thread."""
    c = []
    for i in range(STREAMS):
        row = logits[STREAMS * i : STREAMS * (i + 1)]
        top = row[0]
        for value in row[1:]:
            top = m.where(value > top, value, top)
        powers = [m.exp(value - top) for value in row]
        factor = m.inverse(total(powers))
        c.extend(p * factor + eps for p in powers)

    def normalise(c, stride, step):
        """Divides the four lines whose entries are `stride` apart and whose starts are `step` apart by their sums."""
        new = list(c)
        for line in range(STREAMS):
            places = [line * step + k * stride for k in range(STREAMS)]
            factor = m.inverse(total(c[p] for p in places) + eps)
            for p in places:
                new[p] = c[p] * factor
        return new

    def rows_then_columns(i, *c):
        return [i + 1, *normalise(normalise(c, 1, STREAMS), STREAMS, 1)]

    c = normalise(c, STREAMS, 1)
    return m.while_loop(lambda i, *_: i < iterations - 1, rows_then_columns, [m.u32(0), *c])[1:]
