"""What the devices of a `Layout` tell each other within a step: tokens to their experts and back, sums, table rows.

Every function is called on all devices at once, inside `Layout.map`, with the device's own part. Shapes are static and
no token is dropped, whatever the routing. On one device nothing happens.

How tokens reach the experts (`Layout.exchange`):

* `gather`: every rank gets the tokens of all, sums of the contributions are scattered back.
* `all_to_all`: each token travels at most once to each rank. A rank has room for all tokens of every other one.
* `ragged`: the same without sending the room that is not needed (`lax.ragged_all_to_all`).

**Emulated ranks** (`Layout.emulated_ranks`), for benchmarks: one device holds one rank's share of the experts, and its
own tokens stand for those of every rank: they are copied as often as there are ranks, routed with expert ids turned by
one rank's experts each, and the results of all copies are summed. So the experts see the rows that a rank receives
under even routing, and device memory moves the bytes of `gather`; the links between devices are not part of it:
`exchange_bytes` says what they would carry. The result is that of a model whose ranks all hold the same experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from sharding.layout import Layout
from sharding.rules import RANK_AXIS

ExpertFunction = Callable[[Array, Array, Array, Array], Array]
"""(x [rows, hidden], local expert ids [rows, k], weights [rows, k], valid [rows]) to fp32 [rows, ...]; ids that are not
local are >= the number of local experts and contribute exactly zero."""


def routed_experts(
    layout: Layout,
    local_experts: int,
    apply: ExpertFunction,
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
) -> Float[Array, "tokens *result"]:
    """Σ over devices of what `apply` makes of this rank's tokens there, in fp32.

    Args:
      local_experts: experts of each device; expert e is on device e // local_experts.
      apply: runs the experts of the device it is called on.
      experts: ids over all devices, distinct in a row.
    """
    if layout.emulated_ranks > 1:
        return _emulated(layout.emulated_ranks, local_experts, apply, x, experts, weights, valid)
    if layout.devices == 1:
        return apply(x, experts, weights, valid)
    total = layout.devices * local_experts
    first = lax.axis_index(RANK_AXIS) * local_experts

    def apply_here(x, experts, weights, valid):
        return apply(x, (experts - first) % total, weights, valid)

    if not layout.data_parallel:
        return lax.psum(apply_here(x, experts, weights, valid), RANK_AXIS)
    with jax.named_scope("dispatch"):
        records, unpack = _packed_rows((x, experts, weights, valid))
    if layout.exchange == "gather":
        with jax.named_scope("dispatch"):
            rows = unpack(lax.all_gather(records, RANK_AXIS, tiled=True))
        y = apply_here(*rows)
        with jax.named_scope("combine"):
            return lax.psum_scatter(y, RANK_AXIS, tiled=True)
    wanted = jnp.any((experts // local_experts)[:, :, None] == jnp.arange(layout.devices), 1) & valid[:, None]
    if layout.exchange == "all_to_all":
        return _all_to_all(records, wanted, lambda rows, here: _apply_records(apply_here, unpack, rows, here))
    return _ragged(records, wanted, lambda rows, here: _apply_records(apply_here, unpack, rows, here), experts.shape[1])


def _emulated(
    ranks: int, local_experts: int, apply: ExpertFunction, x: Array, experts: Array, weights: Array, valid: Array
) -> Array:
    """One device in the place of one of `ranks` ranks."""
    with jax.named_scope("dispatch"):
        turns = local_experts * jnp.arange(ranks)[:, None, None]
        experts = ((experts + turns) % (ranks * local_experts)).reshape(-1, experts.shape[1])
        rows = [jnp.broadcast_to(a, (ranks, *a.shape)).reshape(-1, *a.shape[1:]) for a in (x, weights, valid)]
        # Like an exchange, it is no part of what comes before and after; XLA would leave the copies out.
        x, weights, valid, experts = lax.optimization_barrier((*rows, experts))
    y = apply(x, experts, weights, valid)
    with jax.named_scope("combine"):
        return lax.optimization_barrier(jnp.sum(y.reshape(ranks, -1, *y.shape[1:]), 0))


def exchange_bytes(ranks: int, tokens: int, hidden: int, k: int) -> tuple[int, int]:
    """Bytes that a rank receives from the others in one layer by `gather` or `all_to_all`, with `tokens` tokens per
    rank: bfloat16 tokens with their routing, and fp32 results."""
    others = (ranks - 1) * tokens
    return others * (2 * hidden + 8 * k + 1), others * 4 * hidden


def rank_of(layout: Layout) -> Int32[Array, ""] | int:
    """Number of this data-parallel rank."""
    return lax.axis_index(RANK_AXIS) if layout.ranks > 1 else 0


def sum_over_devices(layout: Layout, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Σ over devices of partial results, where all devices work on the same requests; otherwise x."""
    return x if layout.devices == 1 or layout.data_parallel else lax.psum(x, RANK_AXIS)


def total_over_ranks(layout: Layout, x: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Σ over the ranks, equal on all of them."""
    return lax.psum(x, RANK_AXIS) if layout.ranks > 1 else x


def table_rows(layout: Layout, table: Any, rows: Int[Array, "tokens columns"]) -> Any:
    """Rows of arrays whose axis 0 is spread over the devices in equal parts, bit for bit.

    Args:
      table: pytree of this device's part of the arrays.
      rows: numbers in the whole arrays.
    """
    if layout.devices == 1:
        return jax.tree.map(lambda a: a[rows], table)
    part = jax.tree.leaves(table)[0].shape[0]
    if layout.data_parallel:
        rows = lax.all_gather(rows, RANK_AXIS, tiled=True)
    local = rows - lax.axis_index(RANK_AXIS) * part
    here = (local >= 0) & (local < part)

    def one(a: Array) -> Array:
        # One device contributes, the others zero bits: a sum of integers loses nothing.
        bits = lax.bitcast_convert_type(a[jnp.clip(local, 0, part - 1)], _UNSIGNED[a.dtype.itemsize])
        bits = jnp.where(here.reshape(*here.shape, *(1,) * (bits.ndim - 2)), bits, 0)
        if layout.data_parallel:
            bits = lax.psum_scatter(bits, RANK_AXIS, tiled=True)
        else:
            bits = lax.psum(bits, RANK_AXIS)
        return lax.bitcast_convert_type(bits, a.dtype)

    return jax.tree.map(one, table)


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _packed_rows(arrays: tuple[Array, ...]) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """The arrays [rows, ...] as bytes [rows, n], so that they travel together, and the function that undoes it."""

    def to_bytes(a: Array) -> Array:
        a = a.astype(jnp.uint8) if a.dtype == bool else a
        return lax.bitcast_convert_type(a, jnp.uint8).reshape(a.shape[0], -1)

    parts = [to_bytes(a) for a in arrays]
    ends = [sum(p.shape[1] for p in parts[: i + 1]) for i in range(len(parts))]

    def unpack(records: Array) -> tuple[Array, ...]:
        values = []
        for a, end, part in zip(arrays, ends, parts, strict=True):
            raw = records[:, end - part.shape[1] : end].reshape(records.shape[0], *a.shape[1:], -1)
            one = a.dtype.itemsize == 1
            values.append(raw[..., 0].astype(a.dtype) if one else lax.bitcast_convert_type(raw, a.dtype))
        return tuple(values)

    return jnp.concatenate(parts, 1), unpack


def _apply_records(apply: ExpertFunction, unpack: Callable, rows: Array, here: Array) -> Array:
    x, experts, weights, valid = unpack(rows)
    return apply(x, experts, weights, valid & here)


def _all_to_all(records: Array, wanted: Array, apply: Callable[[Array, Array], Array]) -> Array:
    """Each rank gets a place for every token of every rank, filled for those it is wanted for."""
    tokens, ranks = wanted.shape
    with jax.named_scope("dispatch"):
        sent = jnp.broadcast_to(records, (ranks, *records.shape))
        got = lax.all_to_all(sent, RANK_AXIS, 0, 0)
        here = lax.all_to_all(wanted.T, RANK_AXIS, 0, 0)
    y = apply(got.reshape(ranks * tokens, -1), here.reshape(-1))
    with jax.named_scope("combine"):
        back = lax.all_to_all(y.reshape(ranks, tokens, *y.shape[1:]), RANK_AXIS, 0, 0)
        return sum(back[r] for r in range(ranks))


def _ragged(records: Array, wanted: Array, apply: Callable[[Array, Array], Array], k: int) -> Array:
    """Each rank gets the tokens it is wanted for, packed; the places behind them are not sent."""
    tokens, ranks = wanted.shape
    copies = tokens * min(k, ranks)
    with jax.named_scope("dispatch"):
        sizes = jnp.sum(wanted, 0, dtype=jnp.int32)
        starts = jnp.cumsum(sizes) - sizes
        # Places of a token's copies among the rows to send, which are sorted by receiving rank.
        places = jnp.where(wanted, starts + jnp.cumsum(wanted, 0) - 1, copies)
        token = jnp.zeros(copies, jnp.int32).at[places].set(jnp.arange(tokens)[:, None], mode="drop")

        matrix = lax.all_gather(sizes, RANK_AXIS)  # [sender, receiver]
        me = lax.axis_index(RANK_AXIS)
        before = jnp.cumsum(matrix, 0) - matrix
        received = matrix[:, me]
        room = ranks * tokens
        got = _ragged_all_to_all(
            records[token], jnp.zeros((room, records.shape[1]), records.dtype), starts, sizes, before[me], received
        )
        here = jnp.arange(room) < jnp.sum(received)
    y = apply(got, here)
    with jax.named_scope("combine"):
        # What came from rank s, behind what came from those before it, to where s keeps its copies for me.
        starts_of_all = jnp.cumsum(matrix, 1) - matrix
        back = _ragged_all_to_all(
            y, jnp.zeros((copies, *y.shape[1:]), y.dtype), before[:, me], received, starts_of_all[:, me], sizes
        )
        return sum(back.at[places[:, r]].get(mode="fill", fill_value=0) for r in range(ranks))


def _ragged_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Int32[Array, " ranks"],
    send_sizes: Int32[Array, " ranks"],
    output_offsets: Int32[Array, " ranks"],
    recv_sizes: Int32[Array, " ranks"],
) -> Array:
    """`lax.ragged_all_to_all`, which XLA does not have on the CPU: there every rank gathers all and takes its part."""

    def on_cpu():
        def all_ranks(a):
            return lax.all_gather(a, RANK_AXIS)

        me = lax.axis_index(RANK_AXIS)
        rows = all_ranks(operand)
        first, size, to = (all_ranks(a)[:, me] for a in (input_offsets, send_sizes, output_offsets))
        distance = jnp.arange(operand.shape[0]) - first[:, None]
        mine = (distance >= 0) & (distance < size[:, None])
        place = jnp.where(mine, to[:, None] + distance, output.shape[0])
        return output.at[place.reshape(-1)].set(rows.reshape(-1, *operand.shape[1:]), mode="drop")

    def elsewhere():
        return lax.ragged_all_to_all(
            operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name=RANK_AXIS
        )

    return lax.platform_dependent(cpu=on_cpu, default=elsewhere)
