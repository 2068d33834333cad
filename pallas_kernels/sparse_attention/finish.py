"""What warpgroups and blocks hand to each other, the un-rotation and the output. Per-thread code.

An array [64, n] lies in a warpgroup in blocks of 8 columns. With r = lane // 4, a thread holds rows r and r + 8 of
16·warp .., and of each block the adjacent columns 2·(lane % 4), 2·(lane % 4) + 1: one rotary pair, one register of two
elements. A column vector [64] has one element in each of the threads that hold its row.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.sparse_attention.assembly import (
    array_of,
    asm,
    both,
    const,
    int_type,
    load,
    load_shared,
    shl,
    store,
    thread,
    wide,
    words_of,
)

HEADS, HALF = 64, 256
TILED = plgpu.Layout.WGMMA
ROW = TILED.reduce(1)
PIECE = 128 * 16


def struct(shape, dtype=jnp.float32) -> plgpu.ShapeDtypeStruct:
    """An array [64, n] or a column vector [64]."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=TILED if len(shape) == 2 else ROW)


def columns(splits: int) -> plgpu.ShapeDtypeStruct:
    """One block's share of the columns of a warpgroup."""
    return struct((HEADS, HALF // splits))


def put(buffer, piece: int, words: list[ir.Value]):
    """Stores words for the thread of the same number in another warpgroup, in pieces of four from number `piece`."""
    at = arith.addi(buffer, shl(thread(), 4))
    for i in range(0, len(words), 4):
        store(at, (piece + i // 4) * PIECE, words[i : i + 4])


def get(buffer, piece: int, count: int) -> list[ir.Value]:
    """Loads what `put` stored."""
    at = arith.addi(buffer, shl(thread(), 4))
    return [w for i in range(count // 4) for w in load_shared(at, (piece + i) * PIECE)]


def row_values(x) -> mgpu.FragmentedArray:
    """A column vector [64] from fp32 in global memory."""
    at = arith.addi(x, wide(shl(_row(), 2)))
    return array_of([load(at, 32 * h, "b32") for h in range(2)], struct((HEADS,)))


def cluster_barrier():
    """All threads of the cluster; what was written to shared memory before it is seen after it."""
    asm("barrier.cluster.arrive.release.aligned;", "~{memory}", results=0, effects=True)
    asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", results=0, effects=True)


def send_accumulator(buffer, acc, source, half, splits: int):
    """Writes to every block of the cluster its share of the columns.

    `buffer` is shared memory of splits x 2 x (32 / splits) pieces: source block, half of the channels, piece.
    """
    words = words_of(acc)
    share = len(words) // splits
    at = _part(buffer, source, half, splits)
    for block in range(splits):
        remote = _remote(at, block)
        for i in range(0, share, 4):
            text = f"st.shared::cluster.v4.b32 [$0 + {i // 4 * PIECE}], {{$1, $2, $3, $4}};"
            part = words[block * share + i : block * share + i + 4]
            asm(text, "r,r,r,r,r,~{memory}", remote, *part, results=0, effects=True)


def received(buffer, source: int, half, splits: int) -> mgpu.FragmentedArray:
    """The share that block `source` of the cluster sent to this one."""
    at = _part(buffer, const(source), half, splits)
    words = [w for i in range(32 // splits) for w in load_shared(at, PIECE * i)]
    return array_of(words, columns(splits))


def send_statistics(buffer, values, source, splits: int):
    """Writes maxima and sums, two column vectors, to `buffer` [splits, 2, 64] of every block."""
    at = arith.addi(buffer, arith.addi(shl(source, 9), shl(_row(), 2)))
    for block in range(splits):
        remote = _remote(at, block)
        for i, array in enumerate(values):
            for h, value in enumerate(words_of(array)):
                text = f"st.shared::cluster.b32 [$0 + {256 * i + 32 * h}], $1;"
                asm(text, "r,r,~{memory}", remote, value, results=0, effects=True)


def unrotate(o, turn, first_block: ir.Value, splits: int) -> mgpu.FragmentedArray:
    """Rotates channels 448..511 back by the angles whose cos [32] and then sin [32] lie in shared memory at `turn`.

    Column block 0 of `o` is block `first_block` of all 64 of the head. The first ones are never among the last 8.
    """
    words = words_of(o)
    for j in range(max(0, 32 // splits - 8), 32 // splits):
        pair = arith.subi(arith.addi(first_block, const(j)), const(56))
        turns = arith.cmpi(arith.CmpIPredicate.sge, pair, const(0))
        at = arith.select(turns, arith.addi(shl(pair, 2), both(thread(), 3)), const(0))
        at = arith.addi(turn, shl(at, 2))
        text = "ld.shared.b32 $0, [$2]; ld.shared.b32 $1, [$2 + 128];"
        c, s = (_float(w) for w in asm(text, "=&r,=r,r,~{memory}", at, results=2, effects=True))
        c, s = arith.select(turns, c, _float(const(0x3F800000))), arith.select(turns, s, _float(const(0)))
        for i in (4 * j, 4 * j + 2):
            even, odd = _float(words[i]), _float(words[i + 1])
            words[i] = _bits(arith.addf(arith.mulf(even, c), arith.mulf(odd, s)))
            words[i + 1] = _bits(arith.subf(arith.mulf(odd, c), arith.mulf(even, s)))
    return array_of(words, struct(o.shape))


def write(out, o, first_block: ir.Value):
    """Writes bf16 columns to a query's output [64, 512] in global memory, from column block `first_block` on.

    Neighbouring threads trade words, so that each stores 8 bytes and four together fill a sector of 32.
    """
    words = words_of(o)  # of each block row r, then row r + 8
    odd = both(thread(), 1)
    is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, const(0))
    column = arith.addi(shl(arith.addi(first_block, odd), 4), shl(both(thread(), 2), 2))
    at = arith.addi(out, wide(arith.addi(shl(_row(), 10), column)))
    for j in range(0, len(words), 4):
        for h in range(2):
            mine, other = words[j + h], words[j + 2 + h]
            sent = arith.select(is_odd, mine, other)
            got = asm("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "=r,r", sent, effects=True)
            pair = arith.select(is_odd, got, mine), arith.select(is_odd, other, got)
            text = f"st.global.v2.b32 [$0 + {8 * j + 8192 * h}], {{$1, $2}};"
            asm(text, "l,r,r,~{memory}", at, *pair, results=0, effects=True)


def _row():
    """The first of the two rows of this thread."""
    t = thread()
    return arith.addi(shl(arith.shrui(t, const(5)), 4), arith.shrui(both(t, 31), const(2)))


def _part(buffer, source, half, splits: int):
    part = arith.addi(arith.muli(source, const(2)), half)
    return arith.addi(buffer, arith.addi(arith.muli(part, const(32 // splits * PIECE)), shl(thread(), 4)))


def _remote(at, block: int):
    """The same shared address in another block of the cluster."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", at, const(block))


def _bits(value):
    return arith.bitcast(int_type(32), value)


def _float(value):
    return arith.bitcast(ir.F32Type.get(), value)
