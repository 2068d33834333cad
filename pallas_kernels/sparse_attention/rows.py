"""From packed cache rows in memory to bf16 keys in shared memory: per-thread code of the producer warpgroup.

Rows travel in units of 32. Thread (warp, lane) holds of row 8·warp + lane % 8 every fourth 16-byte piece, the first of
which is piece lane // 8. Eight lanes that store together then hold eight different rows, which the 128-byte swizzle of
the key tile spreads over all banks.

Keys are held as value · 2^-8 (`KEY_EXPONENT`): an E2M1 element placed in the bits of a bf16 is value · 2^-126, and
scale · 2^118 is the largest factor that a bf16 can hold for every E4M3 scale. All of it is exact.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.sparse_attention.assembly import address, asm, both, const, load, shl, store, thread, wide

UNIT = 32
KEY_EXPONENT = -8
KEY_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ENTRY_BYTES, WINDOW_BYTES = 288, 528
TILE = 64
HALF = TILE * 256 * 2  # bytes of a key tile that hold the first 256 channels


def held(words: int) -> plgpu.ShapeDtypeStruct:
    """An array that is `words` registers of 32 bits in each thread."""
    n = 128 * words
    return plgpu.ShapeDtypeStruct((n,), jnp.int32, layout=plgpu.Layout.WG_STRIDED((n,), vec_size=4))


def product(a, b):
    """bf16x2 product; subnormal operands count."""
    return asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", a, b)


def bytes_of(a, b, selector: int):
    """Four of the bytes of a (0..3) and b (4..7), the lowest first."""
    return asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", a, b)


# --- units of rows


def fetch_entries(row: ir.Value) -> list[ir.Value]:
    """20 words: four pieces of 32 E2M1 elements, then the two E4M3 scales of each."""
    quarter = arith.shrui(both(thread(), 31), const(3))
    at = _offset(row, shl(quarter, 4))
    scales = _offset(row, shl(quarter, 1))
    words = [w for k in range(4) for w in load(at, 64 * k, "v4.b32")]
    return words + [load(scales, 256 + 8 * k, "u16") for k in range(4)]


def fetch_window(row: ir.Value) -> list[ir.Value]:
    """36 words: eight pieces of 16 E4M3 elements, then all 16 UE8M0 scales of the row."""
    at = _offset(row, shl(arith.shrui(both(thread(), 31), const(3)), 4))
    words = [w for k in range(8) for w in load(at, 64 * k, "v4.b32")]
    return words + load(row, 512, "v4.b32")


def _offset(row, bytes_):
    """row + bytes, or null."""
    zero = const(0, 64)
    return arith.select(arith.cmpi(arith.CmpIPredicate.ne, row, zero), arith.addi(row, wide(bytes_)), zero)


def place_entries(tile: ir.Value, unit: int, words: list[ir.Value]):
    """Writes one unit of entries to rows 32·unit .. of a key tile [2, 64, 256] at a shared address."""
    at, lane, quarter = _place(tile, unit)
    at = arith.addi(at, shl(arith.shrui(quarter, const(1)), 10))
    first = shl(both(quarter, 1), 2)
    places = [arith.addi(at, shl(arith.xori(arith.addi(first, const(i)), lane), 4)) for i in range(4)]
    for k in range(4):
        scales = _entry_scales(words[16 + k])
        for i in range(4):
            store(places[i], HALF * (k // 2) + 2048 * (k % 2), _entry_word(words[4 * k + i], scales[i // 2]))


def _entry_scales(pair):
    """bf16x2 (s, s) · 2^118 of each of two E4M3 scales."""
    text = """{ .reg .b16 h, a, b; .reg .b32 x; .reg .f32 u, v;
    cvt.u16.u32 h, $2; cvt.rn.f16x2.e4m3x2 x, h; mov.b32 {a, b}, x;
    cvt.f32.f16 u, a; cvt.f32.f16 v, b; mul.f32 u, u, 0f7A800000; mul.f32 v, v, 0f7A800000;
    cvt.rn.bf16x2.f32 $0, u, u; cvt.rn.bf16x2.f32 $1, v, v; }"""
    return asm(text, "=r,=r,r", pair, results=2)


def _entry_word(word, scale):
    """Eight E2M1 elements, lowest nibble first, to four bf16x2 in order."""
    out = []
    for i in range(4):  # elements i and i + 4
        bits = arith.ori(both(shl(word, 12 - 4 * i), 0x80008000), both(shl(word, 6 - 4 * i), 0x01C001C0))
        out.append(product(bits, scale))
    a, b, c, d = out
    return [bytes_of(a, b, 0x5410), bytes_of(c, d, 0x5410), bytes_of(a, b, 0x7632), bytes_of(c, d, 0x7632)]


def place_window(tile: ir.Value, unit: int, words: list[ir.Value]):
    """Writes one unit of window rows to rows 32·unit .. of a key tile [2, 64, 256] at a shared address."""
    at, lane, quarter = _place(tile, unit)
    first = shl(quarter, 1)
    places = [arith.addi(at, shl(arith.xori(arith.addi(first, const(i)), lane), 4)) for i in range(2)]
    shift = shl(arith.shrui(quarter, const(1)), 3)
    for k in range(8):
        exponent = both(shl(arith.shrui(words[32 + k // 2], shift), -16 * (k % 2)), 0xFF)
        bits = arith.maxui(shl(exponent, 7), const(0x40))  # 2^-127 is a subnormal bf16
        scale = arith.ori(bits, shl(bits, 16))
        for i in range(2):
            pieces = [_window_pair(words[4 * k + 2 * i + j], h, scale) for j in range(2) for h in range(2)]
            store(places[i], HALF * (k // 4) + 1024 * (k % 4), pieces)


def _window_pair(word, half: int, scale):
    """Two of four E4M3 elements to bf16x2: the bits of an E4M3 in those of a bf16 are value · 2^-120."""
    x = bytes_of(word, const(0), 0x3424 if half else 0x1404)
    bits = arith.ori(both(shl(x, -4), 0x07F007F0), both(x, 0x80008000))
    return product(product(bits, const(0x77807780)), scale)  # 2^112


def _place(tile, unit):
    """Shared address of the row of this thread in a key tile, the row modulo 8, and the quarter."""
    t = thread()
    lane = both(t, 7)
    warp = arith.shrui(t, const(5))
    at = arith.addi(tile, arith.addi(shl(warp, 12), shl(lane, 7)))
    return arith.addi(at, const(unit * 4 * 4096)), lane, arith.shrui(both(t, 31), const(3))


@dataclasses.dataclass(frozen=True)
class Kind:
    """How rows of one format are fetched and placed, and the 32-bit registers that a thread's part of a unit takes."""

    fetch: Callable
    place: Callable
    words: int


WINDOW = Kind(fetch_window, place_window, 36)
ENTRIES = Kind(fetch_entries, place_entries, 20)


# --- where the keys of a query are


def locate_window(info, ring, step_keys, rows, bias, first: ir.Value, count: int, padded: int):
    """Row addresses (0: not visible) and score offsets of window keys first .. first + count of one query.

    `info` is a row of `kernel.token_info`; key j is position p - 127 + j. `padded` places (<= 128) are written.
    """
    t = thread()
    token, position, lowest, start, slot = (_at(info, const(i)) for i in range(5))
    back = arith.subi(const(127), arith.addi(first, t))  # how far behind the query
    key = arith.subi(position, back)
    _, ring_rows, width = ir.MemRefType(ring.type).shape
    in_ring = _row(ring, arith.addi(arith.muli(slot, const(ring_rows)), arith.remui(key, const(ring_rows))), width)
    in_step = _row(step_keys, arith.subi(token, back), width)
    row = arith.select(arith.cmpi(arith.CmpIPredicate.sge, key, start), in_step, in_ring)
    visible = arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, key, lowest), arith.cmpi(arith.CmpIPredicate.ult, t, const(count))
    )
    _put(rows, bias, t, row, visible, padded)


def locate_entries(info, selected, page_table, pool, rows, bias, first: ir.Value, count: int):
    """The same for selected entries first .. first + count of one query, through the page table of its request."""
    t = thread()
    per_page, width = ir.MemRefType(pool.type).shape[1:]
    valid, request = _at(info, const(5)), _at(info, const(6))
    pages = address(page_table)
    stride = ir.MemRefType(page_table.type).shape[1]
    for i in range(0, count, 128):
        key = arith.addi(t, const(i))
        entry = _at(selected, arith.addi(first, key))
        visible = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, entry, const(0)), arith.cmpi(arith.CmpIPredicate.ne, valid, const(0))
        )
        entry = arith.select(visible, entry, const(0))
        place = arith.addi(arith.muli(request, const(stride)), arith.divui(entry, const(per_page)))
        page = load(arith.addi(pages, wide(shl(place, 2))), 0, "b32")
        at = arith.addi(arith.muli(page, const(per_page)), arith.remui(entry, const(per_page)))
        _put(rows, bias, key, _row(pool, at, width), visible, count)


def _at(ref, index) -> ir.Value:
    """One 32-bit element of a row in global memory."""
    return load(arith.addi(address(ref), wide(shl(index, 2))), 0, "b32")


def _row(ref, index, width: int):
    return arith.addi(address(ref), arith.muli(wide(index), const(width, 64)))


def _put(rows, bias, key, row, visible, count: int):
    row = arith.select(visible, row, const(0, 64))
    offset = arith.select(visible, const(0), const(0xFF800000))  # -inf
    text = """{ .reg .pred p; setp.lt.u32 p, $2, $5;
    @p st.shared.b64 [$0], $3; @p st.shared.b32 [$1], $4; }"""
    at = arith.addi(rows, shl(key, 3)), arith.addi(bias, shl(key, 2))
    asm(text, "r,r,r,l,r,r,~{memory}", *at, key, row, offset, const(count), results=0, effects=True)


def row_address(rows, key: ir.Value) -> ir.Value:
    """Address of the row that this thread reads for the unit that begins at `key`."""
    t = thread()
    mine = arith.addi(shl(arith.shrui(t, const(5)), 3), both(t, 7))
    at = arith.addi(address(rows), shl(arith.addi(key, mine), 3))
    low, high = asm("ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r,~{memory}", at, results=2, effects=True)
    return arith.ori(wide(low), arith.shli(wide(high), const(32, 64)))
