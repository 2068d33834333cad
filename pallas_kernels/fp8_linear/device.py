"""Device code of the FP8 linear for which Pallas has no primitive.

Threads of a warpgroup hold a product [64 outputs, rows of x] as the tensor cores leave it: thread 32w + l has outputs
16w + l/4 and that + 8, and of every 8 rows of x the two from 2(l % 4).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from dsv4jax.quant import BLOCK
from pallas_kernels import rows as per_row
from pallas_kernels.fp8_linear import ptx
from pallas_kernels.fp8_linear.plans import OUTPUTS, SCALE_WORDS, STEP, Plan
from pallas_kernels.topk import simt

GROUPS = STEP // BLOCK
LINES = (plgpu.SwizzleTransform(128),)
PAD = 4
"""Floats after each row of sums in shared memory, against bank conflicts."""
REF, ARRAY, SCALAR = plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
LINED = plgpu.RefType(LINES)


def stage_scales(inner: int, workers: int):
    """Copies the weight scales of this warpgroup's 64 outputs and steps to shared memory, a word per 32 and step."""

    @plgpu.inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR, SCALAR))
    def run(_, scale, words, row, first, count):
        row, first, count = ptx.scalars(row, first, count)
        thread = ptx.rem(ptx.block_thread(), 128)
        half, i = ptx.div(thread, SCALE_WORDS), ptx.rem(thread, SCALE_WORDS)
        word = ptx.add(ptx.mul(ptx.add(row, half), inner // STEP), ptx.add(first, ptx.mul(i, workers)))
        ptx.asm(
            "{ .reg .pred p; .reg .b32 v; setp.lt.u32 p, $2, $3; @p ld.global.nc.b32 v, [$1];"
            " @p st.shared.b32 [$0], v; }",
            [ptx.add(ptx.shared_address(words), ptx.mul(thread, 4)), ptx.global_address(scale, word, 4), i, count],
            constraints="r,l,r,r",
        )
        mgpu.utils.warpgroup_barrier()

    return run


def _own_words(words, i):
    """Address of the scale word of step i for the 32 outputs of this half of the warpgroup."""
    half = ptx.div(ptx.rem(ptx.block_thread(), 128), 64)
    return ptx.add(ptx.shared_address(words), ptx.add(ptx.mul(half, 4 * SCALE_WORDS), ptx.mul(i, 4)))


def _product_type(columns: int):
    return plgpu.ShapeDtypeStruct((OUTPUTS, columns), jnp.float32, layout=ARRAY)


def multiply(plan: Plan, rows: int):
    """acc [64, rows of this part] += the product of one step, as one block of PTX."""
    columns = rows // plan.tall
    registers = columns // 2

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, LINED, REF, REF, *[SCALAR] * 3), return_type=_product_type(columns))
    def run(_, acc, w, x, xs, words, i, tile, side):
        i, tile, side = ptx.scalars(i, tile, side)
        a = ptx.descriptor(ptx.add(ptx.shared_address(w), ptx.mul(tile, OUTPUTS * STEP)))
        b = ptx.descriptor(ptx.add(ptx.shared_address(x), ptx.mul(side, columns * STEP)))
        _, lane = ptx.warp_and_lane()
        xs = ptx.add(ptx.shared_address(xs), ptx.add(ptx.mul(ptx.rem(lane, 4), 8), ptx.mul(side, 4 * columns)))
        text = _step_text(columns, rows, min(plan.sets, GROUPS))
        constraints = ",".join([*map(str, range(registers)), "l", "l", "r", "r"])
        return ptx.array_like(
            acc,
            ptx.asm(text, [*ptx.register_values(acc), a, b, xs, _own_words(words, i)], "f" * registers, constraints),
        )

    return run


def _step_text(columns: int, rows: int, sets: int) -> str:
    """PTX of one step. Operands: sums in and out; descriptors of weight and x; addresses of the scales of x and weight.

    `sets` register sets take turns: while the tensor cores fill some, an earlier product is scaled and added.
    """
    registers = columns // 2
    a, b, xs, words = (f"${2 * registers + i}" for i in range(4))
    text = [
        "{ .reg .pred never; .reg .b64 da, db; .reg .b32 w, e; .reg .f32 f;",
        f".reg .f32 p<{sets * registers}>; .reg .f32 s<{columns // 4}>;",
        "setp.ne.b32 never, 0, 0;",
    ]

    def issue(g):
        into = ", ".join(f"p{g % sets * registers + r}" for r in range(registers))
        text.append(
            f"add.s64 da, {a}, {g * BLOCK >> 4}; add.s64 db, {b}, {g * BLOCK >> 4};"
            f" wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{into}}}, da, db, never, 1, 1;"
            " wgmma.commit_group.sync.aligned;"
        )

    def add(g):
        # Scale byte b is the fp32 value with exponent field b.
        distance = 23 - 8 * g
        shift = f"shl.b32 e, w, {distance}" if distance > 0 else f"shr.u32 e, w, {-distance}"
        text.append(f"{shift}; and.b32 e, e, 0x7f800000; mov.b32 f, e;")
        for j in range(columns // 8):
            text.append(f"ld.shared.v2.f32 {{s{2 * j}, s{2 * j + 1}}}, [{xs}+{4 * (g * rows + 8 * j)}];")
        for j in range(columns // 4):
            text.append(f"mul.rn.f32 s{j}, s{j}, f;")
        for r in range(registers):
            product = f"p{g % sets * registers + r}"
            text.append(f"fma.rn.f32 ${r}, {product}, s{r // 4 * 2 + r % 2}, ${r};")

    text.append(f"wgmma.fence.sync.aligned; ld.shared.b32 w, [{words}];")
    for g in range(sets):
        issue(g)
    for g in range(GROUPS):
        text.append(f"wgmma.wait_group.sync.aligned {min(sets, GROUPS - g) - 1};")
        add(g)
        if g + sets < GROUPS:
            text.append("wgmma.fence.sync.aligned;")
            issue(g + sets)
    return "\n".join(text) + "\n}"


def multiply_bf16(plan: Plan, rows: int):
    """acc [64, rows of this part] += the product of one step for bfloat16 x in two lines of 64 channels."""
    columns = rows // plan.tall
    registers = columns // 2

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, LINED, REF, *[SCALAR] * 3), return_type=_product_type(columns))
    def run(_, acc, w, x, words, i, tile, side):
        i, tile, side = ptx.scalars(i, tile, side)
        b = ptx.descriptor(ptx.add(ptx.shared_address(x), ptx.mul(side, columns * STEP)))
        warp, lane = ptx.warp_and_lane()
        # Byte of (row, channel pair) in a swizzled line: 16-byte chunk c of row r lies at c ^ (r mod 8).
        at = ptx.add(ptx.shared_address(w), ptx.add(ptx.mul(tile, OUTPUTS * STEP), ptx.mul(warp, 16 * STEP)))
        at = ptx.add(at, ptx.add(ptx.mul(ptx.div(lane, 4), STEP + 16), ptx.mul(ptx.rem(lane, 4), 2)))
        text = _bf16_step_text(columns, rows, plan.sets)
        constraints = ",".join([*map(str, range(registers)), "r", "l", "r"])
        return ptx.array_like(
            acc, ptx.asm(text, [*ptx.register_values(acc), at, b, _own_words(words, i)], "f" * registers, constraints)
        )

    return run


def _bf16_step_text(columns: int, rows: int, sets: int) -> str:
    """PTX of one step. Operands: sums in and out; address of the weight, descriptor of x, address of the weight scales.

    The weight passes through registers and becomes bfloat16 there: the seven bits of exponent and mantissa of E4M3, set
    four lower in a bfloat16, are the value times 2^-120, subnormals included, and a product with 2^120 * scale is
    exact. That factor is a bfloat16 for scale bytes up to 134, a scale of 2^7.
    """
    registers = columns // 2
    acc = ", ".join(f"${i}" for i in range(registers))
    w, b, words = (f"${2 * registers + i}" for i in range(3))
    text = [
        "{ .reg .pred always; .reg .b64 db; .reg .b32 word, e, at, t, s; .reg .b16 h;",
        f".reg .b32 a<{4 * sets}>;",
        f"setp.eq.b32 always, 0, 0; ld.shared.b32 word, [{words}];",
        "wgmma.fence.sync.aligned;",
    ]
    for j in range(STEP // 16):
        operand = [f"a{4 * (j % sets) + i}" for i in range(4)]
        if j >= sets:
            text.append(f"wgmma.wait_group.sync.aligned {sets - 1};")
        if j % 2 == 0:
            text.append(f"bfe.u32 e, word, {4 * j}, 8; add.u32 e, e, 120; shl.b32 e, e, 7; prmt.b32 s, e, e, 0x1010;")
        text.append(f"xor.b32 at, {w}, {16 * j};")
        for a, offset in zip(operand, (0, 8 * STEP, 8, 8 * STEP + 8), strict=True):
            text.append(
                f"ld.shared.u16 h, [at+{offset}]; cvt.u32.u16 t, h; prmt.b32 t, t, 0, 0x1404;"
                f" shr.u32 {a}, t, 4; and.b32 {a}, {a}, 0x07f007f0;"
                f" lop3.b32 {a}, t, 0x80008000, {a}, 0xea; mul.rn.bf16x2 {a}, {a}, s;"
            )
        line, within = divmod(32 * j, 128)
        text.append(
            f"add.s64 db, {b}, {(line * rows * 128 + within) >> 4}; wgmma.fence.sync.aligned;"
            f" wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{acc}}}, {{{', '.join(operand)}}}, db,"
            " always, 1, 1, 0; wgmma.commit_group.sync.aligned;"
        )
    text.append("wgmma.wait_group.sync.aligned 0;")
    return "\n".join(text) + "\n}"


def store_sums(plan: Plan, rows: int):
    """Writes acc to sums[part, row, 64 * tile + output] once all multiplying warpgroups are done with the tiles."""
    stride = OUTPUTS * plan.wide + PAD
    columns = rows // plan.tall

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, SCALAR, SCALAR, SCALAR))
    def run(_, acc, sums, part, tile, side):
        part, tile, side = ptx.scalars(part, tile, side)
        ptx.asm(f"bar.sync 15, {128 * plan.consumers};")
        warp, lane = ptx.warp_and_lane()
        row = ptx.add(ptx.mul(ptx.rem(lane, 4), 2), ptx.mul(side, columns))
        output = ptx.add(ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4)), ptx.mul(tile, OUTPUTS))
        place = ptx.add(ptx.mul(ptx.add(ptx.mul(part, rows), row), stride), output)
        base = ptx.add(ptx.shared_address(sums), ptx.mul(place, 4))
        for i, value in enumerate(ptx.register_values(acc)):
            # Register order: of each 8 rows, two rows of the first output, then of the second.
            j, half, e = i // 4, i // 2 % 2, i % 2
            offset = 4 * ((8 * j + e) * stride + 8 * half)
            ptx.asm(f"st.shared.f32 [$0+{offset}], $1;", [base, value], constraints="r,f")

    return run


@dataclasses.dataclass(frozen=True)
class Turned:
    """The result of a row is cut into vectors of `width` channels, whose last 2·pairs are rotated by cos and sin
    [rows, pairs]."""

    width: int
    pairs: int
    references: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class Quantised:
    """The result is FP8, with fp32 scales [groups, rows]."""

    references: ClassVar[int] = 1


def finish(plan: Plan, rows: int, height: int, out: int, form: Turned | Quantised | None):
    """Adds up what the warpgroups stored and writes y; of several blocks to a tile, the last to get here does.

    What the form of the result needs beside y stands behind it: cos and sin, or the scales.
    """
    width = OUTPUTS * plan.wide
    stride, quads = width + PAD, height * width // 4
    beside = (REF,) * (form.references if form else 0)

    @plgpu.inline_mgpu(arg_types=(LINED, REF, REF, REF, *beside, SCALAR, SCALAR, SCALAR))
    def run(_, stored, sums, counters, y, *rest):
        *beside, r, n, split = rest
        r, n, split = ptx.scalars(r, n, split)
        base = ptx.shared_address(stored)
        block = ptx.add(ptx.mul(r, out // width), n)

        def each_quad(action):
            """Runs action(index, row of x, column of y) for the fours of outputs that this thread takes."""
            for first in range(0, quads, plan.threads):
                index = ptx.add(ptx.block_thread(), first)
                row, quad = ptx.div(index, width // 4), ptx.rem(index, width // 4)
                inside = arith.cmpi(arith.CmpIPredicate.ult, index, ptx.i32(quads))
                if isinstance(form, Quantised):  # Whole warps work out scales, of rows that do not exist too.
                    with mgpu.utils.when(inside):
                        action(index, row, quad)
                    continue
                with mgpu.utils.when(arith.andi(inside, exists(row))):
                    action(index, row, quad)

        def exists(row):
            row_of_x = ptx.add(ptx.mul(r, height), row)
            return arith.cmpi(arith.CmpIPredicate.ult, row_of_x, ptx.i32(rows))

        def of_block(row, quad):
            place = ptx.add(base, ptx.add(ptx.mul(row, 4 * stride), ptx.mul(quad, 16)))
            load = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            places = (ptx.add(place, 4 * part * height * stride) for part in range(plan.deep))
            return _total(ptx.asm(load, [p], "ffff", "r") for p in places)

        def of_split(index, s):
            element = ptx.add(ptx.mul(ptx.add(ptx.mul(block, plan.splits), s), quads), index)
            return ptx.global_address(sums, element, 16)

        def write(row, quad, four):
            column = ptx.add(ptx.mul(n, width), ptx.mul(quad, 4))
            row_of_y = ptx.add(ptx.mul(r, height), row)
            element = ptx.add(ptx.mul(row_of_y, out), column)
            values = [simt.Lane(x) for x in four]
            match form:
                case Turned():
                    m = per_row.Machine(plan.threads)
                    cos, sin = (m.row(simt.array(ref), simt.Lane(row_of_y), form.pairs) for ref in beside)
                    channel = simt.Lane(ptx.rem(column, form.width))
                    words = per_row.rotated_four(m, values, cos, sin, channel, form.width, form.pairs)
                    at = ptx.global_address(y, element, 2)
                    ptx.asm("st.global.v2.b32 [$0], {$1, $2};", [at, *(w.value for w in words)], constraints="l,r,r")
                    return
                case Quantised():
                    m = per_row.Machine(plan.threads)
                    word, scale = per_row.quantised_four(m, values)
                    place = ptx.add(ptx.mul(ptx.div(column, BLOCK), rows), row_of_y)
                    places = ptx.global_address(y, element, 1), ptx.global_address(beside[0], place, 4)
                    with mgpu.utils.when(exists(row)):
                        ptx.asm("st.global.b32 [$0], $1;", [places[0], word.value], constraints="l,r")
                        with m.when((m.lane & 7) == 0):
                            ptx.asm("st.global.b32 [$0], $1;", [places[1], scale.value], constraints="l,r")
                    return
            ptx.asm(
                "{ .reg .b32 lo, hi; cvt.rn.bf16x2.f32 lo, $2, $1; cvt.rn.bf16x2.f32 hi, $4, $3;"
                " st.global.v2.b32 [$0], {lo, hi}; }",
                [ptx.global_address(y, element, 2), *four],
                constraints="l,f,f,f,f",
            )

        def store(index, row, quad):
            store = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
            ptx.asm(store, [of_split(index, split), *of_block(row, quad)], constraints="l,f,f,f,f")

        def add_splits(index, row, quad):
            load = "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];"
            fours = [ptx.asm(load, [of_split(index, ptx.i32(s))], "ffff", "l") for s in range(plan.splits)]
            write(row, quad, _total(fours))

        ptx.asm("bar.sync 0;")
        if plan.splits == 1:
            each_quad(lambda _, row, quad: write(row, quad, of_block(row, quad)))
            return
        each_quad(store)
        # The barrier orders the block's writes before the count, and the count before the reads of the last block.
        # The counter goes from splits - 1 back to 0.
        (last,) = ptx.asm(
            "{ .reg .pred p, q; .reg .b32 before; mov.b32 before, 0; setp.eq.u32 p, $2, 0; bar.sync 0;"
            f" @p fence.acq_rel.gpu; @p atom.acq_rel.gpu.global.inc.u32 before, [$1], {plan.splits - 1};"
            f" @p fence.acq_rel.gpu; setp.eq.u32 q, before, {plan.splits - 1}; bar.red.or.pred q, 0, q;"
            " selp.b32 $0, 1, 0, q; }",
            [ptx.global_address(counters, block, 4), ptx.block_thread()],
            "r",
            "l,r",
        )
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ne, last, ptx.i32(0))):
            each_quad(add_splits)

    return run


def _total(fours):
    """Sum of lists of four in their order."""
    total = None
    for four in fours:
        total = four if total is None else [arith.addf(a, b) for a, b in zip(total, four, strict=True)]
    return total
