"""The per-thread code of `rows` and `finish` as functions of a kernel body: references and arrays in, arrays out.

`split` is the number of this block in its cluster, of `splits` blocks.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_attention import finish, rows
from pallas_kernels.sparse_attention.assembly import address, array_of, const, plus, times, words_of

HEADS, TILE = finish.HEADS, rows.TILE
ROW, TILED, SCALAR = finish.ROW, finish.TILED, plgpu.Layout.WG_SPLAT(())
REF, TILE_REF = plgpu.RefType(), plgpu.RefType(rows.KEY_TRANSFORMS)


def _value(scalar):
    return scalar.registers.item()


# --- producer


def locate_window(info, ring, step_keys, rows_smem, bias_smem, split, count: int, padded: int):
    """Places of the `count` window keys of this block, filled up to `padded` with invisible ones."""

    @plgpu.inline_mgpu(arg_types=(REF,) * 5 + (SCALAR,))
    def locate(_, info, ring, step_keys, at, bias, split):
        first = times(_value(split), count)
        rows.locate_window(info, ring, step_keys, address(at), address(bias), first, count, padded)

    locate(info, ring, step_keys, rows_smem, bias_smem, split)


def locate_entries(info, selected, page_table, pool, rows_smem, bias_smem, split, count: int, near: int):
    """Places of the `count` selected entries of this block, after `near` window keys."""

    @plgpu.inline_mgpu(arg_types=(REF,) * 6 + (SCALAR,))
    def locate(_, info, selected, page_table, pool, at, bias, split):
        at, bias = plus(address(at), 8 * near), plus(address(bias), 4 * near)
        rows.locate_entries(info, selected, page_table, pool, at, bias, times(_value(split), count), count)

    locate(info, selected, page_table, pool, rows_smem, bias_smem, split)


def fetch(kind: rows.Kind, rows_smem, key):
    """Starts to load the unit of rows that begins at `key`."""

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR), return_type=rows.held(kind.words))
    def read(_, at, key):
        return array_of(kind.fetch(rows.row_address(at, _value(key))), rows.held(kind.words))

    return read(rows_smem, jnp.int32(key))


def place(kind: rows.Kind, tile, unit: int, held):
    """Writes what `fetch` loaded as bf16 to a unit of a key tile."""

    @plgpu.inline_mgpu(arg_types=(TILE_REF, rows.held(kind.words).layout))
    def write(_, tile, held):
        kind.place(address(tile), unit, words_of(held))

    write(tile, held)


# --- from thread to thread of equal number in leader and follower


@plgpu.inline_mgpu(arg_types=(REF, TILED))
def give_scores(_, buffer, x):
    finish.put(address(buffer), 0, words_of(x))


@plgpu.inline_mgpu(arg_types=(REF,), return_type=finish.struct((HEADS, TILE)))
def take_scores(_, buffer):
    return array_of(finish.get(address(buffer), 0, 32), finish.struct((HEADS, TILE)))


@plgpu.inline_mgpu(arg_types=(REF, TILED, ROW, ROW))
def give_weights(_, buffer, p, keep, inverse):
    at = address(buffer)
    finish.put(at, 0, words_of(p))
    finish.put(at, 4, words_of(keep) + words_of(inverse))


WEIGHTS = finish.struct((HEADS, TILE), jnp.bfloat16), finish.struct((HEADS,)), finish.struct((HEADS,))


@plgpu.inline_mgpu(arg_types=(REF,), return_type=WEIGHTS)
def take_weights(_, buffer):
    at = address(buffer)
    factors = finish.get(at, 4, 4)
    words = finish.get(at, 0, 16), factors[:2], factors[2:]
    return tuple(array_of(w, kind) for w, kind in zip(words, WEIGHTS, strict=True))


# --- between the blocks of a cluster


@plgpu.inline_mgpu()
def cluster_barrier(_):
    finish.cluster_barrier()


def send_statistics(buffer, m, total, split, splits: int):
    """Maxima and sums to every block of the cluster."""

    @plgpu.inline_mgpu(arg_types=(REF, ROW, ROW, SCALAR))
    def send(_, buffer, m, total, split):
        finish.send_statistics(address(buffer), (m, total), _value(split), splits)

    send(buffer, m, total, split)


def send_accumulator(buffer, acc, split, half: int, splits: int):
    """To every block of the cluster the columns that it finishes."""

    @plgpu.inline_mgpu(arg_types=(TILE_REF, TILED, SCALAR))
    def send(_, buffer, acc, split):
        finish.send_accumulator(address(buffer), acc, _value(split), const(half), splits)

    send(buffer, acc, split)


def received(buffer, source: int, half: int, splits: int):
    """What block `source` sent to this one."""

    @plgpu.inline_mgpu(arg_types=(TILE_REF,), return_type=finish.columns(splits))
    def read(_, buffer):
        return finish.received(address(buffer), source, const(half), splits)

    return read(buffer)


# --- output


@plgpu.inline_mgpu(arg_types=(REF,), return_type=finish.struct((HEADS,)))
def row_values(_, x):
    return finish.row_values(address(x))


def unrotate(o, turn, first_block, splits: int):
    """See `finish.unrotate`."""

    @plgpu.inline_mgpu(arg_types=(TILED, REF, SCALAR), return_type=finish.columns(splits))
    def run(_, o, turn, first_block):
        return finish.unrotate(o, address(turn), _value(first_block), splits)

    return run(o, turn, first_block)


@plgpu.inline_mgpu(arg_types=(REF, TILED, SCALAR))
def write(_, out, o, first_block):
    finish.write(address(out), o, _value(first_block))
