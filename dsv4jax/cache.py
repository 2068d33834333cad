"""The state of running requests: pages of compressed entries and index keys, window rings, open groups (design 4).

One page covers `page_size` tokens of one request for all KV sources at once. Everything else is kept per slot; a slot
belongs to one running request. Rings are addressed by position modulo their length and longer than what a query may
read by `slack` rows, so that up to `slack` unverified tokens can be run and taken back by moving the length back.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int, Int32

from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.quant import (
    pack_fp8,
    pack_mxfp4,
    pack_nvfp4,
    qdq_fp8,
    qdq_mxfp4,
    qdq_nvfp4,
    record_bytes_fp8,
    record_bytes_mxfp4,
    record_bytes_nvfp4,
    unpack_fp8,
    unpack_mxfp4,
    unpack_nvfp4,
)
from dsv4jax.sampling import SamplingState, init_sampling_state
from sharding import SINGLE, Layout

DraftNoise = Literal["shared", "own"]


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes of the cache of one rank.

    Raises:
      ValueError: a size is not allowed; the message names it.
    """

    slots: int
    pages: int
    page_size: int = 64
    """Tokens per page; a multiple of 2, so that no ratio-2 group crosses a page."""
    slack: int = 8
    """Tokens one decode step may run per request, all but the first of which may be rejected later."""
    drafts: DraftNoise | None = None
    """Whether the draft stages run, and with which noise requests that sample are drafted for: what the model's own
    tokens will be drawn with ("shared"), or noise of their own ("own"), for which the cache keeps what drafts are drawn
    from. `dsv4jax.verification` says what follows. The cache then has the rings of the stages and their results, and
    every step keeps these up."""

    def __post_init__(self):
        for name in ("slots", "pages", "page_size", "slack"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.drafts not in (None, "shared", "own"):
            raise ValueError(f"drafts = {self.drafts!r}: must be None, 'shared' or 'own'")
        if self.page_size % 2:
            raise ValueError(f"page_size = {self.page_size}: must be a multiple of 2")


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How one kind of cached vector is stored: packed bytes, or plain values when cache quantisation is off."""

    pack: Callable[[Array], Array]
    unpack: Callable[[Array, DTypeLike], Array]
    round: Callable[[Array], Array]
    """Values to what `unpack` makes of their record, in their own type, with a gradient."""
    record_bytes: Callable[[int], int]

    def rounded(self, x: Array, numerics: Numerics) -> Array:
        """Values [..., n] as they come back from a cache."""
        return self.round(x) if numerics.quantize_cache else x.astype(numerics.dtype)

    def store(self, x: Array, numerics: Numerics) -> Array:
        """Values [..., n] to records."""
        return self.pack(x) if numerics.quantize_cache else x.astype(numerics.dtype)

    def load(self, record: Array, numerics: Numerics) -> Array:
        """Records to values [..., n] in the type of the run."""
        return self.unpack(record, numerics.dtype) if numerics.quantize_cache else record

    def empty(self, shape: tuple[int, ...], n: int, numerics: Numerics) -> Array:
        """Zeroed records [*shape, width] of n channels."""
        if numerics.quantize_cache:
            return jnp.zeros((*shape, self.record_bytes(n)), jnp.uint8)
        return jnp.zeros((*shape, n), numerics.dtype)


WINDOW_KEY = RecordFormat(pack_fp8, unpack_fp8, qdq_fp8, record_bytes_fp8)
COMPRESSED_ENTRY = RecordFormat(pack_nvfp4, unpack_nvfp4, qdq_nvfp4, record_bytes_nvfp4)
INDEX_KEY = RecordFormat(pack_mxfp4, unpack_mxfp4, qdq_mxfp4, record_bytes_mxfp4)


@flax.struct.dataclass
class DraftState:
    """What is drafted for the request in each slot. Its newest chosen token is `SamplingState.next_tokens`."""

    positions: Int32[Array, " slots"]
    """Of the newest chosen token, which has not been run yet."""
    counts: Int32[Array, " slots"]
    """Drafts that follow that token: the block size after a draft round, 0 after every other step."""
    tokens: Int32[Array, "slots block"]
    logits: Float32[Array, "slots block vocab"] | None
    """What each draft was drawn from; None where the noise is shared."""
    confidences: Float32[Array, "slots block"]
    """Logit of the probability that a draft is accepted if those before it are."""

    def without_drafts(self, slots: Int32[Array, " requests"], positions: Int32[Array, " requests"]) -> "DraftState":
        """After a step that leaves the newest chosen token of some slots at `positions`."""
        return self.replace(
            positions=self.positions.at[slots].set(positions, mode="drop"),
            counts=self.counts.at[slots].set(0, mode="drop"),
        )


@flax.struct.dataclass
class Cache:
    """All device state. Records are bytes: 288 B entries, 68 B index keys, 528 B window keys at released widths."""

    entries: tuple[Array, ...]
    """Per KV source [pages, page_size / ratio, record]."""
    index_keys: tuple[Array, ...]
    """Per KV source [pages, page_size / ratio, record]."""
    windows: tuple[Array, ...]
    """Per backbone layer [slots, ring, record]."""
    open_groups: tuple[Array, ...]
    """Per ratio-2 source [slots, ring, 2, head_dim] fp32: v and s of the first token of a group, at group % ring."""
    draft_windows: tuple[Array, ...]
    """Per draft stage [slots, ring, record], at position % ring; empty in a cache without drafts."""
    ngram_ids: Int[Array, "slots ring"]
    """Compressed ids of the newest tokens, DEAD for image tokens, at position % ring."""
    sampling: SamplingState
    drafts: DraftState | None
    """None in a cache without drafts."""

    @property
    def num_slots(self) -> int:
        """Slots; any larger slot number marks a padded row."""
        return self.ngram_ids.shape[0]

    def without_drafts(self, slots: Int32[Array, " requests"], positions: Int32[Array, " requests"]) -> "Cache":
        """`DraftState.without_drafts`, if there are drafts at all."""
        return self if self.drafts is None else self.replace(drafts=self.drafts.without_drafts(slots, positions))


def init_cache(
    cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics = REFERENCE, layout: Layout = SINGLE
) -> Cache:
    """An empty cache on the devices of the layout: `cache_cfg` for each rank, one after the other along axis 0."""
    if layout.mesh is not None:
        make = functools.partial(_empty, cfg, _of_all_ranks(cache_cfg, layout), numerics)
        return jax.jit(make, out_shardings=layout.by_rank)()
    cache = _empty(cfg, cache_cfg, numerics)
    if isinstance(cache.ngram_ids, jax.core.Tracer):
        return cache
    # Tied to its device, as parameters and what steps return are: otherwise a step would be compiled a second time for
    # the cache that it returned the first time.
    return jax.device_put(cache, cache.ngram_ids.sharding)


def _empty(cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics) -> Cache:
    slots, slack = cache_cfg.slots, cache_cfg.slack
    ratios = [cfg.ratio(source) for source in cfg.kv_source_layer_ids]
    pools = [(cache_cfg.pages, cache_cfg.page_size // ratio) for ratio in ratios]
    window = (slots, cfg.sliding_window + slack)
    # The open group of the newest committed token and every group that `slack` more tokens open.
    groups = (slots, slack // 2 + 1, 2, cfg.head_dim)
    ngram_ring = cfg.engram_max_ngram_size - 1 + slack
    stages = cfg.num_nextn_predict_layers if cache_cfg.drafts else 0
    return Cache(
        entries=tuple(COMPRESSED_ENTRY.empty(pool, cfg.head_dim, numerics) for pool in pools),
        index_keys=tuple(INDEX_KEY.empty(pool, cfg.index_head_dim, numerics) for pool in pools),
        windows=tuple(WINDOW_KEY.empty(window, cfg.head_dim, numerics) for _ in range(cfg.num_hidden_layers)),
        open_groups=tuple(jnp.zeros(groups, jnp.float32) for ratio in ratios if ratio == 2),
        draft_windows=tuple(WINDOW_KEY.empty(window, cfg.head_dim, numerics) for _ in range(stages)),
        ngram_ids=jnp.full((slots, ngram_ring), DEAD, jnp.int32),
        sampling=init_sampling_state(slots, cfg.vocab_size, ngram_ring, mask_places(cfg, cache_cfg)),
        drafts=_init_drafts(cfg, cache_cfg) if cache_cfg.drafts else None,
    )


def mask_places(cfg: ModelConfig, cache_cfg: CacheConfig) -> int:
    """For how many tokens of a step a slot has masks of their own: the newest chosen one, and each draft if any."""
    return 1 + (cfg.dspark_block_size if cache_cfg.drafts else 0)


def _init_drafts(cfg: ModelConfig, cache_cfg: CacheConfig) -> DraftState:
    slots = cache_cfg.slots
    block = (slots, cfg.dspark_block_size)
    return DraftState(
        positions=jnp.zeros(slots, jnp.int32),
        counts=jnp.zeros(slots, jnp.int32),
        tokens=jnp.zeros(block, jnp.int32),
        logits=jnp.zeros((*block, cfg.vocab_size), jnp.float32) if cache_cfg.drafts == "own" else None,
        confidences=jnp.zeros(block, jnp.float32),
    )


def _of_all_ranks(cache_cfg: CacheConfig, layout: Layout) -> CacheConfig:
    return dataclasses.replace(cache_cfg, slots=cache_cfg.slots * layout.ranks, pages=cache_cfg.pages * layout.ranks)


def page_bytes_per_token(cfg: ModelConfig, numerics: Numerics = REFERENCE) -> float:
    """Bytes of pages per token: 890 for the released model (section 1.4)."""
    one_page = CacheConfig(slots=1, pages=1)
    cache = jax.eval_shape(lambda: init_cache(cfg, one_page, numerics))
    return sum(a.size * a.dtype.itemsize for a in (*cache.entries, *cache.index_keys)) / one_page.page_size


def replace_at(items: tuple[Array, ...], index: int, value: Array) -> tuple[Array, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])
