"""Sparse attention on Hopper (Mosaic GPU): packed rows become bf16 keys on the way to the tensor cores.

A thread block works on one query at a time, or a cluster of blocks shares one query: its 128 window rows and its
selected entries are dealt out evenly. A block has three warpgroups. The producer fetches packed rows into registers, a
tile of 64 keys ahead, and writes them as bf16 to shared memory, two tiles deep. The leader and the follower each own
half of the channels: both multiply their half of the query with their half of the keys; the follower hands its part of
the scores to the leader, who forms the probabilities, with the usual running maximum, and hands them back; both
multiply them with their half of the values. What passes between the two goes from thread to thread of equal number.
Blocks of a cluster exchange accumulators through distributed shared memory, each finishing a part of the channels.
Where there are more queries than blocks, a block takes several in turn, its producer running ahead into the next one.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from dsv4jax.model.layout import TokenLayout
from pallas_kernels.sparse_attention import finish, primitives, rows

HEADS, HALF, TILE = finish.HEADS, finish.HALF, rows.TILE
DIM, PAIRS, WINDOW = 512, 32, 128
STAGES = 2
SPLITS = 1, 2, 4
"""Thread blocks of a cluster that may share one query."""
BLOCKS = 132
"""Thread blocks that run at once, one per multiprocessor of an H100 SXM or H200."""
CLUSTERED = 128
"""The same in clusters of two or four: a group of 18 multiprocessors has no place for a fifth cluster of four."""
VALID = 5
"""Column of `token_info`."""
UNITS = TILE // rows.UNIT
ROW, COLUMN, TILED = finish.ROW, finish.TILED.reduce(0), finish.TILED
LEADER, FOLLOWER, PRODUCER = range(3)


@functools.partial(jax.jit, static_argnames="splits")
def sparse_attention(q, keys, ring, layout, by, sink, pool, selected, *, splits: int | None = None):
    """The package's `sparse_attention` for the released shapes, on a Hopper GPU."""
    if not q.shape[0]:
        return q
    page_table = None if selected is None else layout.page_table
    info = token_info(layout)
    return sparse_attention_kernel(
        q, keys, ring, info, sink, by.cos, by.sin, selected, page_table, pool, splits=splits or best_splits(q.shape[0])
    )


def best_splits(tokens: int) -> int:
    """Thread blocks per query: as many as run at once, since every round of clusters has its own start."""
    return next(splits for splits in (4, 2, 1) if splits == 1 or tokens * splits <= CLUSTERED)


def token_info(layout: TokenLayout) -> Int32[Array, "tokens 8"]:
    """What a block must know of its query: token, position, first visible position, first of the step, slot, validity
    and request. The window of an invalid token begins after it."""
    request, position = layout.requests, layout.positions
    lowest = jnp.maximum(layout.floors[request], jnp.maximum(position - (WINDOW - 1), 0))
    lowest = jnp.where(layout.valid, lowest, position + 1)
    token = jnp.arange(position.shape[0], dtype=jnp.int32)
    columns = token, position, lowest, layout.starts[request], layout.slots[request], layout.valid, request, token
    return jnp.stack([c.astype(jnp.int32) for c in columns], -1)


@functools.partial(jax.jit, static_argnames="splits")
def sparse_attention_kernel(q, step_keys, ring, info, sink, cos, sin, selected, page_table, pool, *, splits: int):
    """See `sparse_attention`; `info` is `token_info`. Without entries `selected`, `page_table` and `pool` are None."""
    tokens = q.shape[0]
    mine, far = WINDOW // splits, 0 if selected is None else selected.shape[1] // splits
    near = max(mine, TILE)
    near_steps, far_steps = near // TILE, far // TILE
    steps = near_steps + far_steps
    grid = min(tokens, BLOCKS) if splits == 1 else tokens
    if not far:
        selected, page_table, pool = info, info, ring

    def body(q, step_keys, ring, info, sink, cos, sin, selected, page_table, pool, out, **scratch):
        s = types.SimpleNamespace(**scratch)
        block = lax.axis_index("block")
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        wg = lax.axis_index("wg")

        def each_query(run, skip):
            """Calls `run(token, n)` for the block's queries, n counting them, but `skip(token)` for those not valid.

            The first is always run: nothing waits for its validity.
            """

            def turn(i, carry):
                n, valid = carry
                token = block + i * grid
                following = info[lax.min(token + grid, tokens - 1), VALID]
                pl.when(valid != 0)(lambda: run(token, n))
                pl.when(valid == 0)(lambda: skip(token))
                return n + valid, following

            lax.fori_loop(0, lax.div(tokens - block + grid - 1, grid), turn, (jnp.int32(0), jnp.int32(1)))

        # The producer.

        def produce():
            plgpu.set_max_registers(104, action="decrease")
            each_query(produce_query, lambda token: None)

        def produce_query(token, n):
            buffer = lax.rem(n, 2)
            at, bias = s.rows_smem.at[buffer], s.bias_smem.at[buffer]
            pl.when(n == 0)(lambda: load_query(token, buffer))
            primitives.locate_window(info.at[token], ring, step_keys, at, bias, split, mine, near)
            plgpu.commit_smem()
            held = tuple(primitives.fetch(rows.WINDOW, at, u * rows.UNIT) for u in range(UNITS))
            if far:  # These places are read after the next commit.
                primitives.locate_entries(
                    info.at[token], selected.at[token], page_table, pool, at, bias, split, far, near
                )

            def step(i, held, kind, following):
                t = n * steps + i
                slot = lax.rem(t, STAGES)
                pl.when(t >= STAGES)(lambda: plgpu.barrier_wait(s.empty.at[slot]))
                for u in range(UNITS):
                    primitives.place(kind, s.k_smem.at[slot], u, held[u])
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.full.at[slot])

                @pl.when((i == 0) & (n > 0))
                def _():
                    plgpu.barrier_wait(s.scored)
                    load_query(token, buffer)

                if following is None:
                    return ()
                return tuple(primitives.fetch(following, at, (i + 1) * TILE + u * rows.UNIT) for u in range(UNITS))

            def stream(first, count, held, kind, following):
                """Fills `count` tiles with rows of a kind; fetches the first of those that follow."""
                inner = functools.partial(step, kind=kind, following=kind)
                held = lax.fori_loop(first, first + count - 1, inner, held)
                return step(jnp.int32(first + count - 1), held, kind, following)

            held = stream(0, near_steps, held, rows.WINDOW, rows.ENTRIES if far else None)
            if far:
                stream(near_steps, far_steps, held, rows.ENTRIES, None)
            if splits > 1:
                primitives.cluster_barrier()
                primitives.cluster_barrier()

        def load_query(token, buffer):
            for h in range(2):
                plgpu.copy_gmem_to_smem(q.at[token, :, pl.ds(h * HALF, HALF)], s.q_smem.at[h], s.loaded)
            for i, turn in enumerate((cos, sin)):
                plgpu.copy_gmem_to_smem(turn.at[token], s.turn_smem.at[buffer, i], s.loaded)

        # Leader and follower.

        def consume(half):
            plgpu.set_max_registers(200, action="increase")
            first_block = half * (HALF // 8) + split * (HALF // 8 // splits)
            nothing = plgpu.layout_cast(jnp.zeros((HEADS, HALF // splits), jnp.bfloat16), TILED)
            each_query(
                lambda token, n: primitives.write(out.at[token], attend(token, n, half, first_block), first_block),
                lambda token: primitives.write(out.at[token], nothing, first_block),
            )

        def attend(token, n, half, first_block):
            buffer = lax.rem(n, 2)
            plgpu.barrier_wait(s.loaded)
            acc = plgpu.layout_cast(jnp.zeros((HEADS, HALF), jnp.float32), TILED)
            if half == LEADER:
                step = functools.partial(lead, n=n, buffer=buffer, sinks=sinks_of())
                state = _row(-1e30), _row(0.0), _row(0.0)
            else:
                step, state = functools.partial(follow, n=n), (_row(0.0),)
            acc, *state = lax.fori_loop(0, steps, step, (acc, *state))
            o = acc * _rows(state[-1], acc.shape) if splits == 1 else merge(acc, state, half)
            o = o.astype(jnp.bfloat16)
            if half == LEADER:
                return o
            o = primitives.unrotate(o.astype(jnp.float32), s.turn_smem.at[buffer], first_block, splits)
            return o.astype(jnp.bfloat16)

        def sinks_of():
            return primitives.row_values(sink) * math.log2(math.e)

        def scores(i, n, half):
            t = n * steps + i
            slot = lax.rem(t, STAGES)
            plgpu.barrier_wait(s.full.at[slot])
            x = pl.run_scoped(
                lambda x: (plgpu.wgmma(x, s.q_smem.at[half], s.k_smem.at[slot, half].T), x[...])[1],
                plgpu.ACC((HEADS, TILE)),
            )
            pl.when(i == steps - 1)(lambda: plgpu.barrier_arrive(s.scored))
            return x, slot

        def values(acc, keep, p, slot, half):
            acc = acc * _rows(keep, acc.shape)
            acc = pl.run_state(lambda a: plgpu.wgmma(a, p, s.k_smem.at[slot, half]))(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(s.empty.at[slot])
            return acc

        def lead(i, carry, n, buffer, sinks):
            acc, m, total, _ = carry
            x, slot = scores(i, n, LEADER)
            plgpu.barrier_wait(s.handed)
            x = x + primitives.take_scores(s.hand_smem)
            bias = plgpu.layout_cast(s.bias_smem[buffer, pl.ds(i * TILE, TILE)], COLUMN)
            scale = math.log2(math.e) * DIM**-0.5 * 2.0**-rows.KEY_EXPONENT
            x = x * scale + lax.broadcast_in_dim(bias, x.shape, (1,))
            top = jnp.maximum(m, x.max(1))
            p = jnp.exp2(x - _rows(top, x.shape))
            keep = jnp.exp2(m - top)
            total = total * keep + p.sum(1)
            p, inverse = p.astype(jnp.bfloat16), _inverse(total, sinks, top)
            primitives.give_weights(s.hand_smem, p, keep, inverse)
            plgpu.barrier_arrive(s.weighed)
            return values(acc, keep, p, slot, LEADER), top, total, inverse

        def follow(i, carry, n):
            acc, _ = carry
            x, slot = scores(i, n, FOLLOWER)
            primitives.give_scores(s.hand_smem, x)
            plgpu.barrier_arrive(s.handed)
            plgpu.barrier_wait(s.weighed)
            p, keep, inverse = primitives.take_weights(s.hand_smem)
            return values(acc, keep, p, slot, FOLLOWER), inverse

        def merge(acc, state, half):
            primitives.cluster_barrier()
            if half == LEADER:
                primitives.send_statistics(s.stat_smem, *state[:2], split, splits)
            primitives.send_accumulator(s.k_smem, acc, split, half, splits)
            primitives.cluster_barrier()
            tops, sums = ([plgpu.layout_cast(s.stat_smem[i, j], ROW) for i in range(splits)] for j in range(2))
            top = functools.reduce(jnp.maximum, tops)
            weights = [jnp.exp2(t - top) for t in tops]
            total = sum(w * t for w, t in zip(weights, sums, strict=True))
            inverse = _inverse(total, sinks_of(), top)
            parts = [primitives.received(s.k_smem, i, half, splits) for i in range(splits)]
            return sum(part * _rows(w * inverse, part.shape) for part, w in zip(parts, weights, strict=True))

        pl.when(wg == PRODUCER)(produce)
        pl.when(wg == LEADER)(lambda: consume(LEADER))
        pl.when(wg == FOLLOWER)(lambda: consume(FOLLOWER))

    bf16_tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=rows.KEY_TRANSFORMS)
    cluster = dict(cluster=(splits,), cluster_names=("split",)) if splits > 1 else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, HEADS, DIM), jnp.bfloat16),
        scratch_types=dict(
            q_smem=bf16_tile((2, HEADS, HALF)),
            k_smem=bf16_tile((STAGES, 2, TILE, HALF)),
            hand_smem=plgpu.SMEM((8, 128, 4), jnp.float32),
            rows_smem=plgpu.SMEM((2, near + far, 2), jnp.int32),
            bias_smem=plgpu.SMEM((2, near + far), jnp.float32),
            turn_smem=plgpu.SMEM((2, 2, PAIRS), jnp.float32),
            stat_smem=plgpu.SMEM((splits, 2, HEADS), jnp.float32),
            loaded=plgpu.Barrier(num_arrivals=4),
            scored=plgpu.Barrier(num_arrivals=2),
            full=plgpu.Barrier(num_barriers=STAGES),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            handed=plgpu.Barrier(),
            weighed=plgpu.Barrier(),
        ),
        grid=(grid,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        **cluster,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            reduction_scratch_bytes=0,
        ),
    )(q, step_keys, ring, info, sink, cos, sin, selected, page_table, pool)


def _row(value):
    return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), ROW)


def _rows(x, shape):
    return lax.broadcast_in_dim(x, shape, (0,))


def _inverse(total, sinks, top):
    """1 / (sum + sink), with the power of two that keys were held at; 0 where nothing was visible."""
    return jnp.where(total > 0, 2.0**-rows.KEY_EXPONENT / (total + jnp.exp2(sinks - top)), 0.0)
