"""The mix that a site predicts for one token, by one block (architecture section 2.2)."""

from dsv4jax.config import ModelConfig

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
PARTS = 5
"""Threads that share the sum of a coefficient over the slices."""
PLACES = 128
"""Room for these sums of a row, in shared memory."""


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


def logit(m, sums, start, mean_square, scale, base, cfg: ModelConfig):
    """The logit of the lane's coefficient of a row, from what `put_parts` stored in `sums` from `start` on."""
    k = _coefficient(m)
    projected = total([m.load(sums, start + k + MIXES * part) for part in range(PARTS)])
    return m.fma(projected * m.rsqrt(mean_square + cfg.rms_norm_eps), scale, base)


def put_mix(m, z, results, row, cfg: ModelConfig) -> None:
    """Stores the mix of a row that the lanes' logits `z` make; `results` are pre, post and residual of all rows."""
    pre, post, residual = results
    sigmoid = m.inverse(m.exp(z * -1.0) + 1.0)
    with m.when(m.lane < STREAMS):
        m.store(pre, row * STREAMS + m.lane, sigmoid + cfg.hc_eps)
    with m.when((m.lane >> 2) == 1):
        m.store(post, row * STREAMS + (m.lane & 3), sigmoid * 2.0)
    # Four neighbouring lanes hold a row of the residual mix.
    top = z
    for distance in (1, 2):
        other = m.exchange(top, distance)
        top = m.where(other > top, other, top)
    power = m.exp(z - top)
    sum_ = power
    for distance in (1, 2):
        sum_ = sum_ + m.exchange(sum_, distance)
    entry = m.fma(power, m.inverse(sum_), m.f32(cfg.hc_eps))
    entries = [m.broadcast(entry, 2 * STREAMS + i) for i in range(STREAMS * STREAMS)]
    matrix = _sinkhorn(m, [entries[STREAMS * i :][:STREAMS] for i in range(STREAMS)], cfg.hc_eps, cfg.hc_sinkhorn_iters)
    with m.when(m.lane == 0):
        for i, line in enumerate(matrix):
            m.store4(residual, (row * STREAMS + i) * STREAMS, line)


def _coefficient(m):
    return m.where(m.lane < MIXES, m.lane, m.u32(0))


def total(values):
    """Pairwise sum."""
    values = list(values)
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _sinkhorn(m, matrix, eps: float, iterations: int):
    """Normalises columns and rows in turn, ending with columns; all in the registers of a thread.

    What changes is a divisor of each row and column. With c the matrix so far, c / (sum of c + eps) multiplies the
    divisor d of a column by (sum of c + eps): it becomes eps d + the sum of the matrix over the divisors of the rows.
    """

    def divisors(lines, factors, old):
        """New divisors of `lines` of the matrix, and their inverses; `factors` are of the lines that cross them."""
        new = []
        for line, divisor in zip(lines, old, strict=True):
            a, b, c, d = line
            w, x, y, z = factors
            new.append(m.fma(b, x, m.fma(a, w, divisor * eps)) + m.fma(d, z, c * y))
        return new, [m.inverse(divisor) for divisor in new]

    columns = list(zip(*matrix, strict=True))
    one = [m.f32(1.0)] * STREAMS
    by_column, of_columns = divisors(columns, one, one)

    def rows_then_columns(i, *state):
        by_row, _, by_column, of_columns = (state[k : k + STREAMS] for k in range(0, 4 * STREAMS, STREAMS))
        by_row, of_rows = divisors(matrix, of_columns, by_row)
        by_column, of_columns = divisors(columns, of_rows, by_column)
        return [i + 1, *by_row, *of_rows, *by_column, *of_columns]

    state = [m.u32(1), *one, *one, *by_column, *of_columns]
    state = m.while_loop(lambda i, *_: i < iterations, rows_then_columns, state)
    of_rows, of_columns = state[1 + STREAMS :][:STREAMS], state[1 + 3 * STREAMS :]
    return [
        [r * value * c for value, c in zip(line, of_columns, strict=True)]
        for r, line in zip(of_rows, matrix, strict=True)
    ]
