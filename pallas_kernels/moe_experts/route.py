"""Where each routed row goes: per-thread code of `prepare`, written against `pallas_kernels.topk.simt.Machine`.

Rows are ordered by expert, then by token; every expert begins at a multiple of 8 rows. Each block counts all rows for
itself, which takes less time than a pass of its own and a wait for it.
"""

import dataclasses
from typing import Any

BLOCK_ROWS = 8
_LOW = 0xFFFF


@dataclasses.dataclass(frozen=True)
class Routing:
    """Arrays of `simt.Array` kind and sizes.

    In: `experts` [tokens * k], `weights` [tokens * k], `valid` [tokens]. Out: `group`, `block`, `count` [tiles], `used`
    [1], `routing` [row_blocks * 8], `places` [tokens * k]. Shared memory: `sizes` [E], `firsts` [E + 1], `own` [k].
    A tile has up to `tile_blocks` blocks of 8 rows.
    """

    experts: Any
    weights: Any
    valid: Any
    group: Any
    block: Any
    count: Any
    used: Any
    routing: Any
    places: Any
    sizes: Any
    firsts: Any
    own: Any
    tokens: int
    k: int
    number: int
    tile_blocks: int


def route(m, r: Routing, token) -> None:
    """Finds the rows of one token, in `own` (all ones where there is none); writes its `places`, ascending by expert,
    and its `routing`. The block of token 0 also writes the tiles."""
    _count(m, r, token)
    _scan(m, r)
    _place(m, r, token)
    with m.when(token == 0):
        _list_tiles(m, r)
    m.sync()


def _count(m, r, token):
    """sizes[e] = rows of expert e + 2^16 * those of tokens before `token`."""
    for start in range(0, r.number, m.threads):
        with m.when(m.tid + start < r.number):
            m.store(r.sizes, m.tid + start, m.u32(0))
    m.sync()

    def count_token(t):
        chosen = [m.load(r.experts, t * r.k + j) for j in range(r.k)]
        valid = m.load(r.valid, t) != 0
        one = m.where(t < token, m.u32(0x10001), m.u32(1))
        for expert in chosen:
            with m.when(valid & (expert < r.number)):
                m.atomic_add(r.sizes, expert, one)
        return [t + m.threads]

    m.while_loop(lambda t: t < r.tokens, count_token, [m.tid])
    m.sync()


def _blocks(m, r, expert):
    return ((m.load(r.sizes, expert) & _LOW) + (BLOCK_ROWS - 1)) >> 3


def _scan(m, r):
    """firsts[e] = first block of expert e + 2^16 * its first tile; firsts[E] = how many there are."""
    with m.when(m.warp == 0):
        total = m.u32(0)
        for start in range(0, r.number, 32):
            expert = m.lane + start
            [blocks] = m.cond(expert < r.number, lambda e=expert: [_blocks(m, r, e)], [m.u32(0)])
            # x / n as a product: exact for x < 2^14.
            tiles = ((blocks + (r.tile_blocks - 1)) * -(-(1 << 17) // r.tile_blocks)) >> 17
            own = blocks | (tiles << 16)
            sums = own
            for distance in (1, 2, 4, 8, 16):
                below = m.shift_up(sums, distance)
                sums = sums + m.where(m.lane >= distance, below, m.u32(0))
            with m.when(expert < r.number):
                m.store(r.firsts, expert, total + sums - own)
            total = total + m.broadcast(sums, 31)
        with m.when(m.lane == 0):
            m.store(r.firsts, r.number, total)
    m.sync()


def _place(m, r, token):
    with m.when(m.tid < r.k):
        chosen = [m.load(r.experts, token * r.k + j) for j in range(r.k)]
        expert = m.load(r.experts, token * r.k + m.tid)
        here = (m.load(r.valid, token) != 0) & (expert < r.number)

        def find():
            return [(m.load(r.firsts, expert) & _LOW) * BLOCK_ROWS + (m.load(r.sizes, expert) >> 16)]

        [place] = m.cond(here, find, [m.u32(0xFFFFFFFF)])
        order = m.u32(0)
        for j, other in enumerate(chosen):
            before = (other < expert) | ((other == expert) & (m.tid > j))
            order = order + m.where(before, m.u32(1), m.u32(0))
        m.store(r.own, m.tid, place)
        m.store(r.places, token * r.k + order, place)
        with m.when(here):
            m.store(r.routing, place, m.load(r.weights, token * r.k + m.tid))


def _list_tiles(m, r):
    for start in range(0, r.number, m.threads):
        expert = m.tid + start
        with m.when(expert < r.number):
            first = m.load(r.firsts, expert)
            blocks = _blocks(m, r, expert)

            def tile(number, done, expert=expert, first=first, blocks=blocks):
                left = blocks - done
                m.store(r.group, number, expert)
                m.store(r.block, number, (first & _LOW) + done)
                m.store(r.count, number, m.where(left < r.tile_blocks, left, m.u32(r.tile_blocks)))
                return [number + 1, done + r.tile_blocks]

            m.while_loop(lambda _, done, blocks=blocks: done < blocks, tile, [first >> 16, m.u32(0)])
    with m.when(m.tid == 0):
        m.store(r.used, 0, m.load(r.firsts, r.number) >> 16)
