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
IN_FLIGHT = 24
"""Vectors of four sums that a thread reads before it uses the first."""
LINES = (plgpu.SwizzleTransform(128),)
REF, ARRAY, SCALAR = plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
LINED = plgpu.RefType(LINES)


def stage_scales(plan: Plan, inner: int):
    """Copies the weight scales of this warpgroup's outputs and steps to shared memory, a word per 32 and step."""
    workers = plan.splits * plan.deep

    @plgpu.inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR, SCALAR))
    def run(_, scale, words, place, first, count):
        place, first, count = ptx.scalars(place, first, count)
        thread = ptx.rem(ptx.block_thread(), 128)
        half, i = ptx.div(thread, SCALE_WORDS), ptx.rem(thread, SCALE_WORDS)
        row = ptx.add(ptx.mul(place, 2 * plan.tiles), half)
        word = ptx.add(ptx.mul(row, inner // STEP), ptx.add(first, ptx.mul(i, workers)))
        to, of = ptx.add(ptx.shared_address(words), ptx.mul(thread, 4)), ptx.global_address(scale, word, 4)
        for tile in range(plan.tiles):
            ptx.asm(
                "{ .reg .pred p; .reg .b32 v; setp.lt.u32 p, $2, $3;"
                f" @p ld.global.nc.b32 v, [$1+{tile * 2 * inner // BLOCK}];"
                f" @p st.shared.b32 [$0+{tile * 2 * 4 * SCALE_WORDS}], v; }}",
                [to, of, i, count],
                constraints="r,l,r,r",
            )
        mgpu.utils.warpgroup_barrier()

    return run


def _own_words(words, i):
    """Address of the scale word of step i for the 32 outputs of this half of the warpgroup."""
    half = ptx.div(ptx.rem(ptx.block_thread(), 128), 64)
    return ptx.add(ptx.shared_address(words), ptx.add(ptx.mul(half, 4 * SCALE_WORDS), ptx.mul(i, 4)))


def _sums(plan: Plan, rows: int):
    return plgpu.ShapeDtypeStruct((OUTPUTS * plan.tiles, rows), jnp.float32, layout=ARRAY)


def multiply(plan: Plan, rows: int):
    """acc [outputs of this warpgroup, rows] += the product of one step, as one block of PTX."""
    registers = plan.tiles * rows // 2

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, LINED, REF, REF, SCALAR, SCALAR), return_type=_sums(plan, rows))
    def run(_, acc, w, x, xs, words, i, tile):
        i, tile = ptx.scalars(i, tile)
        a = ptx.descriptor(ptx.add(ptx.shared_address(w), ptx.mul(tile, plan.tiles * OUTPUTS * STEP)))
        b = ptx.descriptor(ptx.shared_address(x))
        _, lane = ptx.warp_and_lane()
        xs = ptx.add(ptx.shared_address(xs), ptx.mul(ptx.rem(lane, 4), 8))
        constraints = ",".join([*map(str, range(registers)), "l", "l", "r", "r"])
        operands = [*ptx.register_values(acc), a, b, xs, _own_words(words, i)]
        return ptx.array_like(acc, ptx.asm(_step_text(plan, rows), operands, "f" * registers, constraints))

    return run


def _step_text(plan: Plan, rows: int) -> str:
    """PTX of one step. Operands: sums in and out; descriptors of weight and x; addresses of the scales of x and weight.

    `sets` register sets take turns: while the tensor cores fill some, an earlier product is scaled and added.
    """
    tiles, each = plan.tiles, rows // 2
    products = [(g, tile) for g in range(GROUPS) for tile in range(tiles)]
    sets = min(plan.sets, len(products))
    a, b, xs, words = (f"${tiles * rows + i}" for i in range(4))
    text = [
        f"{{ .reg .pred never; .reg .b64 da, db; .reg .b32 w<{tiles}>, e; .reg .f32 f, m<{rows // 4}>;",
        f".reg .f32 p<{sets * each}>; .reg .f32 s<{rows // 4}>;",
        "setp.ne.b32 never, 0, 0; wgmma.fence.sync.aligned;",
    ]

    def issue(q):
        g, tile = products[q]
        into = ", ".join(f"p{q % sets * each + r}" for r in range(each))
        text.append(
            f"add.s64 da, {a}, {(tile * OUTPUTS * STEP + g * BLOCK) >> 4}; add.s64 db, {b}, {g * BLOCK >> 4};"
            f" wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3 {{{into}}}, da, db, never, 1, 1;"
            " wgmma.commit_group.sync.aligned;"
        )

    def load_scales(g):
        for j in range(rows // 8):
            text.append(f"ld.shared.v2.f32 {{s{2 * j}, s{2 * j + 1}}}, [{xs}+{4 * (g * rows + 8 * j)}];")

    def add(q):
        g, tile = products[q]
        # Scale byte b is the fp32 value with exponent field b.
        distance = 23 - 8 * g
        shift = f"shl.b32 e, w{tile}, {distance}" if distance > 0 else f"shr.u32 e, w{tile}, {-distance}"
        text.append(f"{shift}; and.b32 e, e, 0x7f800000; mov.b32 f, e;")
        for j in range(rows // 4):
            text.append(f"mul.rn.f32 m{j}, s{j}, f;")
        for r in range(each):
            acc = f"${tile * each + r}"
            text.append(f"fma.rn.f32 {acc}, p{q % sets * each + r}, m{r // 4 * 2 + r % 2}, {acc};")

    for tile in range(tiles):
        text.append(f"ld.shared.b32 w{tile}, [{words}+{tile * 2 * 4 * SCALE_WORDS}];")
    for q in range(sets):
        issue(q)
    for q, (g, tile) in enumerate(products):
        if tile == 0:
            load_scales(g)
        text.append(f"wgmma.wait_group.sync.aligned {min(sets, len(products) - q) - 1};")
        add(q)
        if q + sets < len(products):
            text.append("wgmma.fence.sync.aligned;")
            issue(q + sets)
    return "\n".join(text) + "\n}"


def multiply_bf16(plan: Plan, rows: int):
    """acc [64, rows] += the product of one step for bfloat16 x in two lines of 64 channels."""
    registers = rows // 2

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, LINED, REF, SCALAR, SCALAR), return_type=_sums(plan, rows))
    def run(_, acc, w, x, words, i, tile):
        i, tile = ptx.scalars(i, tile)
        b = ptx.descriptor(ptx.shared_address(x))
        warp, lane = ptx.warp_and_lane()
        # Byte of (row, channel pair) in a swizzled line: 16-byte chunk c of row r lies at c ^ (r mod 8).
        at = ptx.add(ptx.shared_address(w), ptx.add(ptx.mul(tile, OUTPUTS * STEP), ptx.mul(warp, 16 * STEP)))
        at = ptx.add(at, ptx.add(ptx.mul(ptx.div(lane, 4), STEP + 16), ptx.mul(ptx.rem(lane, 4), 2)))
        text = _bf16_step_text(rows, plan.sets)
        constraints = ",".join([*map(str, range(registers)), "r", "l", "r"])
        return ptx.array_like(
            acc, ptx.asm(text, [*ptx.register_values(acc), at, b, _own_words(words, i)], "f" * registers, constraints)
        )

    return run


def _bf16_step_text(rows: int, sets: int) -> str:
    """PTX of one step. Operands: sums in and out; address of the weight, descriptor of x, address of the weight scales.

    The weight passes through registers and becomes bfloat16 there: the seven bits of exponent and mantissa of E4M3, set
    four lower in a bfloat16, are the value times 2^-120, subnormals included, and a product with 2^120 * scale is
    exact. That factor is a bfloat16 for scale bytes up to 134, a scale of 2^7.
    """
    registers = rows // 2
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
            f" wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{acc}}}, {{{', '.join(operand)}}}, db,"
            " always, 1, 1, 0; wgmma.commit_group.sync.aligned;"
        )
    text.append("wgmma.wait_group.sync.aligned 0;")
    return "\n".join(text) + "\n}"


def store_sums(plan: Plan, rows: int):
    """Writes acc to sums[part, row, output] once all multiplying warpgroups are done with the tiles.

    Against bank conflicts, output o of row r lies at o ^ 8 (r / 2 mod 4).
    """

    @plgpu.inline_mgpu(arg_types=(ARRAY, LINED, SCALAR, SCALAR))
    def run(_, acc, sums, part, tile):
        part, tile = ptx.scalars(part, tile)
        _barrier(plan)
        warp, lane = ptx.warp_and_lane()
        row = ptx.add(ptx.mul(part, rows), ptx.mul(ptx.rem(lane, 4), 2))
        output = ptx.add(ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4)), ptx.mul(tile, plan.tiles * OUTPUTS))
        base = ptx.add(ptx.shared_address(sums), ptx.mul(row, 4 * plan.width))
        bases = []
        for half in range(2):
            place = arith.xori(ptx.add(output, 8 * half), ptx.mul(ptx.rem(lane, 4), 8))
            bases.append(ptx.add(base, ptx.mul(place, 4)))
        for i, value in enumerate(ptx.register_values(acc)):
            # Register order: tile after tile, of each 8 rows, two rows of the first output, then of the second.
            t, j, half, e = i // (rows // 2), i % (rows // 2) // 4, i // 2 % 2, i % 2
            offset = 4 * ((8 * j + e) * plan.width + OUTPUTS * t)
            ptx.asm(f"st.shared.f32 [$0+{offset}], $1;", [bases[half], value], constraints="r,f")

    return run


def _barrier(plan: Plan):
    """Waits for the multiplying warpgroups."""
    ptx.asm(f"bar.sync 15, {plan.threads};")


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
    width = plan.width
    quads = height * width // 4
    beside = (REF,) * (form.references if form else 0)

    @plgpu.inline_mgpu(arg_types=(LINED, REF, REF, REF, *beside, SCALAR, SCALAR, SCALAR))
    def run(_, stored, sums, counters, y, *rest):
        *beside, r, n, split = rest
        r, n, split = ptx.scalars(r, n, split)
        base = ptx.shared_address(stored)
        block = ptx.add(ptx.mul(r, out // width), n)

        def each_quad(values, use):
            """Runs use(values(index), index, row of x, column of y) for the fours of outputs that this thread takes.

            The values of several are asked for before the first are used.
            """
            places = [ptx.add(ptx.block_thread(), first) for first in range(0, quads, plan.threads)]
            each = max(1, IN_FLIGHT // plan.splits)
            for batch in (places[i : i + each] for i in range(0, len(places), each)):
                clipped = [arith.minui(index, ptx.i32(quads - 1)) for index in batch]
                for index, four in zip(batch, [values(index) for index in clipped], strict=True):
                    row, quad = ptx.div(index, width // 4), ptx.rem(index, width // 4)
                    inside = arith.cmpi(arith.CmpIPredicate.ult, index, ptx.i32(quads))
                    # Whole warps work out scales, of rows that do not exist too.
                    wanted = inside if isinstance(form, Quantised) else arith.andi(inside, exists(row))
                    with mgpu.utils.when(wanted):
                        use(four, index, row, quad)

        def exists(row):
            row_of_x = ptx.add(ptx.mul(r, height), row)
            return arith.cmpi(arith.CmpIPredicate.ult, row_of_x, ptx.i32(rows))

        def of_block(index):
            row, quad = ptx.div(index, width // 4), ptx.rem(index, width // 4)
            turned = arith.xori(quad, ptx.mul(ptx.rem(ptx.div(row, 2), 4), 2))
            place = ptx.add(base, ptx.add(ptx.mul(row, 4 * width), ptx.mul(turned, 16)))
            load = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            places = (ptx.add(place, 4 * part * height * width) for part in range(plan.deep))
            return _total(ptx.asm(load, [p], "ffff", "r") for p in places)

        def of_split(index, s):
            element = ptx.add(ptx.mul(ptx.add(ptx.mul(block, plan.splits), s), quads), index)
            return ptx.global_address(sums, element, 16)

        def write(four, _, row, quad):
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

        def store(four, index, *_):
            store = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
            ptx.asm(store, [of_split(index, split), *four], constraints="l,f,f,f,f")

        def of_splits(index):
            load = "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];"
            return [ptx.asm(load, [of_split(index, ptx.i32(s))], "ffff", "l") for s in range(plan.splits)]

        _barrier(plan)
        if plan.splits == 1:
            each_quad(of_block, write)
            return
        each_quad(of_block, store)
        # The barrier orders the block's writes before the count, and the count before the reads of the last block.
        # The counter goes from splits - 1 back to 0.
        (last,) = ptx.asm(
            "{ .reg .pred p, q; .reg .b32 before; mov.b32 before, 0; setp.eq.u32 p, $2, 0;"
            f" bar.sync 15, {plan.threads};"
            f" @p fence.acq_rel.gpu; @p atom.acq_rel.gpu.global.inc.u32 before, [$1], {plan.splits - 1};"
            f" @p fence.acq_rel.gpu; setp.eq.u32 q, before, {plan.splits - 1};"
            f" bar.red.or.pred q, 15, {plan.threads}, q; selp.b32 $0, 1, 0, q; }}",
            [ptx.global_address(counters, block, 4), ptx.block_thread()],
            "r",
            "l,r",
        )
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ne, last, ptx.i32(0))):
            each_quad(of_splits, lambda fours, *place: write(_total(fours), *place))

    return run


def _total(fours):
    """Sum of lists of four in their order."""
    total = None
    for four in fours:
        total = four if total is None else [arith.addf(a, b) for a, b in zip(total, four, strict=True)]
    return total
