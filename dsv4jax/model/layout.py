"""Where every token of a step lives: request, slot, position, and the ring and page places it reads and writes."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dsv4jax.batch import StepBatch
from dsv4jax.quant import ceil_div


@flax.struct.dataclass
class TokenLayout:
    """Tokens of a step, flat, in tiles that each belong to one request and hold consecutive positions."""

    positions: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]
    image_mask: Bool[Array, " tokens"]
    tile_requests: Int32[Array, " tiles"]
    slots: Int32[Array, " requests"]
    starts: Int32[Array, " requests"]
    ends: Int32[Array, " requests"]
    floors: Int32[Array, " requests"]
    write_starts: Int32[Array, " requests"]
    page_table: Int32[Array, "requests pages"]
    num_slots: int = flax.struct.field(pytree_node=False)
    tile: int = flax.struct.field(pytree_node=False)
    most_tokens: int | None = flax.struct.field(pytree_node=False, default=None)
    """No request has more tokens in this step; None where that is not known."""

    @property
    def requests(self) -> Int32[Array, " tokens"]:
        """Request of each token."""
        return _per_token(self.tile_requests, self.tile)

    def tiles(self, x: Array) -> Array:
        """[tokens, ...] to [tiles, tile, ...]."""
        return x.reshape(-1, self.tile, *x.shape[1:])

    def ring_places(self, ring: int) -> Int32[Array, " tokens"]:
        """Place of each token in rings of all slots, counted through; out of range for all but each request's newest
        `ring` tokens."""
        return self.write_slots(ring) * ring + self.positions % ring

    def write_slots(self, newest: int) -> Int32[Array, " tokens"]:
        """Slot of each token that is among the `newest` of its request in this step; out of range for all others.

        A ring of n rows is written by its newest n tokens only, so that no two tokens write one row.
        """
        requests = self.requests
        write = self.valid & (self.positions >= self.ends[requests] - newest)
        return jnp.where(write, self.slots[requests], self.num_slots)


def full_layout(batch: StepBatch, decode: bool = False) -> TokenLayout:
    """All tokens of the batch, with the window floor of the encoder half. A decode step has one tile per request."""
    positions, valid, tile_requests = _packed(batch, batch.tokens.shape[0], batch.offsets, batch.starts, batch.lengths)
    return TokenLayout(
        positions=positions,
        valid=valid,
        image_mask=batch.image_mask,
        tile_requests=tile_requests,
        slots=batch.slots,
        starts=batch.starts,
        ends=batch.starts + batch.lengths,
        floors=batch.encoder_floors,
        write_starts=batch.write_starts,
        page_table=batch.page_table,
        num_slots=batch.num_slots,
        tile=batch.tile,
        most_tokens=batch.tile if decode else None,
    )


def block_layout(
    slots: Int32[Array, " requests"],
    positions: Int32[Array, " requests"],
    valid: Bool[Array, " requests"],
    block: int,
    num_slots: int,
) -> TokenLayout:
    """One block of tokens per request, from `positions` on; without pages, for what has no compressed entries."""
    requests = slots.shape[0]
    zeros = jnp.zeros_like(positions)
    return TokenLayout(
        positions=(positions[:, None] + jnp.arange(block, dtype=jnp.int32)).reshape(-1),
        valid=jnp.repeat(valid, block),
        image_mask=jnp.zeros(requests * block, bool),
        tile_requests=jnp.arange(requests, dtype=jnp.int32),
        slots=slots,
        starts=positions,
        ends=positions + block,
        floors=zeros,
        write_starts=zeros,
        page_table=jnp.zeros((requests, 0), jnp.int32),
        num_slots=num_slots,
        tile=block,
    )


def decoder_layout(
    full: TokenLayout, batch: StepBatch, window: int
) -> tuple[TokenLayout, Int32[Array, " tail"] | None]:
    """The tokens the decoder half runs on, and their indices among all tokens; None if these are all.

    In bounded replay only those of the last `window` tokens of a prompt that are in this step (section 9.5), packed
    anew into at most requests · ⌈window/tile⌉ tiles.
    """
    if batch.replay == "exact":
        return full.replace(floors=batch.decoder_floors), None
    tail, take = _tail(full, batch, jnp.clip(batch.decoder_floors, full.starts, full.ends), window)
    return tail.replace(floors=batch.decoder_floors), take


def newest_layout(
    full: TokenLayout, batch: StepBatch, window: int
) -> tuple[TokenLayout, Int32[Array, " newest"] | None]:
    """The last `window` tokens of each request in this step, or some more, and their indices; None if these are all.

    In bounded replay these are the tokens the decoder half runs on.
    """
    if batch.replay == "bounded":
        return decoder_layout(full, batch, window)
    if _tail_rows(full, window) == full.positions.shape[0]:
        return full, None
    return _tail(full, batch, jnp.maximum(full.starts, full.ends - window), window)


def _tail_rows(full: TokenLayout, window: int) -> int:
    """Rows that hold the last `window` tokens of each request, in tiles."""
    return min(full.positions.shape[0], full.slots.shape[0] * ceil_div(window, full.tile) * full.tile)


def _tail(
    full: TokenLayout, batch: StepBatch, starts: Int32[Array, " requests"], window: int
) -> tuple[TokenLayout, Int32[Array, " tail"]]:
    """The tokens from `starts` on, at most `window` of each request, and their indices among all."""
    tokens, tile = full.positions.shape[0], full.tile
    lengths = full.ends - starts
    tiles = (lengths + tile - 1) // tile
    offsets = (jnp.cumsum(tiles) - tiles) * tile
    positions, valid, tile_requests = _packed(batch, _tail_rows(full, window), offsets, starts, lengths)
    of = _per_token(tile_requests, tile)
    take = jnp.clip(batch.offsets[of] + positions - batch.starts[of], 0, tokens - 1)
    tail = full.replace(
        positions=positions,
        valid=valid,
        image_mask=full.image_mask[take],
        tile_requests=tile_requests,
        starts=starts,
    )
    return tail, take


def _packed(batch: StepBatch, rows: int, offsets: Array, starts: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Position and validity of `rows` tokens and request of each tile, given where each request's tokens begin."""
    first = jnp.arange(ceil_div(rows, batch.tile), dtype=jnp.int32) * batch.tile
    tile_requests = jnp.maximum(jnp.sum(offsets <= first[:, None], -1, dtype=jnp.int32) - 1, 0)
    requests = _per_token(tile_requests, batch.tile)
    within = jnp.arange(rows, dtype=jnp.int32) - offsets[requests]
    valid = (within < lengths[requests]) & (batch.slots[requests] < batch.num_slots)
    return starts[requests] + within, valid, tile_requests


def _per_token(per_tile: Int32[Array, " tiles"], tile: int) -> Int32[Array, " tokens"]:
    return jnp.broadcast_to(per_tile[:, None], (per_tile.shape[0], tile)).reshape(-1)


@flax.struct.dataclass
class TileWindow:
    """The window keys a tile of queries reads: positions first-(window-1) .. first+tile-1."""

    in_step: Bool[Array, "tiles keys"]
    step_index: Int32[Array, "tiles keys"]
    slots: Int32[Array, " tiles"]
    positions: Int32[Array, "tiles keys"]
    visible: Bool[Array, "tiles tile keys"]


def tile_windows(layout: TokenLayout, window: int) -> TileWindow:
    """Sources and visibility of window keys: query p reads max(floor, p-window+1) .. p (section 3.5)."""
    first = layout.tiles(layout.positions)[:, 0]
    request = layout.tile_requests
    offsets = jnp.arange(1 - window, layout.tile, dtype=jnp.int32)
    keys = first[:, None] + offsets
    index = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None] * layout.tile + offsets
    queries = layout.tiles(layout.positions)[..., None]
    visible = (keys[:, None] <= queries) & (keys[:, None] > queries - window)
    visible &= (keys >= layout.floors[request][:, None])[:, None]
    return TileWindow(
        in_step=keys >= layout.starts[request][:, None],
        step_index=jnp.clip(index, 0, layout.positions.shape[0] - 1),
        slots=layout.slots[request],
        positions=keys,
        visible=visible & layout.tiles(layout.valid)[..., None],
    )


def over_tiles(fn: Callable[[Any], Any], tiles: Any, bytes_per_tile: int, limit: int = 1 << 30) -> Any:
    """Maps `fn` over the leading axis of the arrays in `tiles`, as many tiles at once as stay below `limit` bytes."""
    count = jax.tree.leaves(tiles)[0].shape[0]
    at_once = max(1, min(count, limit // max(1, bytes_per_tile)))
    if at_once == count:
        return jax.vmap(fn)(tiles)
    return jax.lax.map(fn, tiles, batch_size=at_once)


def last_tokens(x: Float[Array, "tokens *n"], layout: TokenLayout) -> Float[Array, "requests *n"]:
    """The value at each request's last token of the step; unspecified for requests without tokens."""
    last = layout.ends - 1 - layout.starts
    first_tile = jnp.sum(layout.tile_requests < jnp.arange(layout.slots.shape[0])[:, None], -1)
    return x[jnp.clip(first_tile * layout.tile + last, 0, x.shape[0] - 1)]
