"""The mix that a site predicts for one row, by one warpgroup (architecture section 2.2)."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dsv4jax.quant import ceil_div
from pallas_kernels.hyper_connections.device import (
    MIXES,
    REF,
    SCALAR,
    STREAMS,
    asm,
    f32,
    i32,
    load,
    store,
    thread,
    total,
)

PARTS = 5
"""Threads that share the sum of a coefficient over the slices: 5 x 24 of the 128."""
SQUARES, LOGITS, SCRATCH = 128, 256, 512
"""Places in the scratch array behind the partial sums, and its size."""


def predict(slices: int, padded: int, flat: int, norm_eps: float, hc_eps: float, iterations: int):
    """Sums over the slices in a fixed order, then sigmoids and Sinkhorn."""

    @plgpu.inline_mgpu(arg_types=(REF,) * 8 + (SCALAR,))
    def run(_, projection, squares, base, scale, pre, post, residual, scratch, row):
        row, own = row.registers.item(), thread()
        less = arith.CmpIPredicate.ult
        each = ceil_div(slices, PARTS)

        def sum_over(slots, last, at):
            """Sum of at(slice) over those of `slots` below `last`."""
            values = []
            for slot in slots:
                inside = arith.cmpi(less, slot, last)
                value = at(arith.minui(slot, i32(slices - 1)))
                values.append(arith.select(inside, value, f32(0.0)))
            return total(values)

        with mgpu.utils.when(arith.cmpi(less, own, i32(PARTS * MIXES))):
            k, part = arith.remui(own, i32(MIXES)), arith.divui(own, i32(MIXES))
            first = arith.muli(part, i32(each))
            last = arith.minui(arith.addi(first, i32(each)), i32(slices))
            line = arith.muli(row, i32(slices))

            def projected(c):
                return load(projection, arith.addi(arith.muli(arith.addi(line, c), i32(MIXES)), k))

            def squared(c):
                return load(squares, arith.addi(arith.muli(c, i32(padded)), row))

            mine = [arith.addi(first, i32(i)) for i in range(each)]
            store(scratch, own, sum_over(mine, last, projected))
            turns = range(0, slices, PARTS * MIXES)
            mine = [arith.addi(own, i32(i)) for i in turns]
            store(scratch, arith.addi(own, i32(SQUARES)), sum_over(mine, i32(slices), squared))
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.when(arith.cmpi(less, own, i32(MIXES))):
            m = total(load(scratch, arith.addi(own, i32(MIXES * part))) for part in range(PARTS))
            square = total(load(scratch, i32(SQUARES + i)) for i in range(PARTS * MIXES))
            mean = arith.addf(arith.mulf(square, f32(1 / flat)), f32(norm_eps))
            statistic = asm("rsqrt.approx.ftz.f32 $0, $1;", [mean], ir.F32Type.get(), "=f,f")
            kind = arith.minui(arith.divui(own, i32(STREAMS)), i32(2))
            z = arith.mulf(arith.mulf(m, statistic), load(scale, kind))
            store(scratch, arith.addi(own, i32(LOGITS)), arith.addf(z, load(base, own)))
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.when(arith.cmpi(less, own, i32(1))):
            z = [load(scratch, i32(LOGITS + k)) for k in range(MIXES)]
            sigmoid = [_inverse(arith.addf(f32(1.0), _exp(arith.negf(v)))) for v in z[: 2 * STREAMS]]
            values = (
                (pre, [arith.addf(v, f32(hc_eps)) for v in sigmoid[:STREAMS]]),
                (post, [arith.mulf(f32(2.0), v) for v in sigmoid[STREAMS:]]),
                (residual, _sinkhorn(z[2 * STREAMS :], hc_eps, iterations)),
            )
            for target, numbers in values:
                for k, number in enumerate(numbers):
                    store(target, arith.addi(arith.muli(row, i32(len(numbers))), i32(k)), number)

    return run


def _exp(x):
    """e^x to about 2 units in the last place: 2^t with t = x log2(e), corrected by what the rounding of t lost."""
    text = (
        "{ .reg .f32 t, r; mul.rn.f32 t, $1, 0f3fb8aa3b; neg.f32 r, t; fma.rn.f32 r, $1, 0f3fb8aa3b, r;"
        " fma.rn.f32 r, $1, 0f32a57060, r; mul.rn.f32 r, r, 0f3f317218; ex2.approx.ftz.f32 t, t;"
        " fma.rn.f32 $0, t, r, t; }"
    )
    return asm(text, [x], ir.F32Type.get(), "=f,f")


def _inverse(x):
    return asm("rcp.approx.ftz.f32 $0, $1;", [x], ir.F32Type.get(), "=f,f")


def _sinkhorn(logits, eps: float, iterations: int):
    """Softmax rows plus eps, then columns and rows in turn, ending with columns; all in the registers of a thread."""
    c = []
    for i in range(STREAMS):
        row = logits[STREAMS * i : STREAMS * (i + 1)]
        top = row[0]
        for value in row[1:]:
            top = arith.maximumf(top, value)
        powers = [_exp(arith.subf(value, top)) for value in row]
        factor = _inverse(total(powers))
        c.extend(arith.addf(arith.mulf(p, factor), f32(eps)) for p in powers)

    def normalise(c, stride, step):
        """Divides the four lines whose entries are `stride` apart and whose starts are `step` apart by their sums."""
        new = list(c)
        for line in range(STREAMS):
            places = [line * step + k * stride for k in range(STREAMS)]
            factor = _inverse(arith.addf(total(c[p] for p in places), f32(eps)))
            for p in places:
                new[p] = arith.mulf(c[p], factor)
        return new

    c = normalise(c, STREAMS, 1)
    for _ in range(iterations - 1):
        c = normalise(normalise(c, 1, STREAMS), STREAMS, 1)
    return c
