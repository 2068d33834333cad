"""What one step runs: requests packed into fixed-shape arrays, built on the host in numpy.

Tokens of all requests stand in one flat array. Each request's tokens begin at a multiple of `tile`, so that a tile of
consecutive tokens belongs to one request. Padded rows have slot = number of slots, length 0; padded tokens lie outside
every request's range. Both read nothing that matters and write nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import flax.struct
import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, rows_on_host
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import RequestSampling, SamplingParams, sampling_params

Replay = Literal["exact", "bounded"]
UNKNOWN = -2


@flax.struct.dataclass
class StepBatch:
    """Arguments of one prefill or decode step, one row per request."""

    tokens: Int32[Any, " tokens"]
    image_mask: Bool[Any, " tokens"]
    """True for every position of an image span."""
    image_embeddings: Float[Any, "images hidden"]
    """Embeddings of the image-span tokens of the batch, in the order of their tokens; 0 rows in a text-only bucket."""
    slots: Int32[Any, " requests"]
    starts: Int32[Any, " requests"]
    """Position of the first token."""
    lengths: Int32[Any, " requests"]
    offsets: Int32[Any, " requests"]
    """Index of the first token in `tokens`, a multiple of `tile`, ascending."""
    page_table: Int32[Any, "requests pages"]
    history: Int32[Any, "requests ngram"]
    """Token ids before `starts`, newest first; -1 before the sequence and for image tokens, UNKNOWN if not given. The
    decode step reads its own record instead."""
    write_starts: Int32[Any, " requests"]
    """Compressed entries of earlier tokens are in the pages already and are not written again."""
    encoder_floors: Int32[Any, " requests"]
    """First position whose window keys the encoder half may read."""
    decoder_floors: Int32[Any, " requests"]
    """The same for the decoder half, which runs on no earlier token."""
    sampling: SamplingParams
    engram_rows: tuple[Any, ...] = ()
    """Per Engram layer, stored table rows (values [tokens, columns, dim], scales) when tables stay on the host."""
    num_slots: int = flax.struct.field(pytree_node=False, default=0)
    page_size: int = flax.struct.field(pytree_node=False, default=0)
    """Of the cache the batch was made for."""
    tile: int = flax.struct.field(pytree_node=False, default=1)
    replay: Replay = flax.struct.field(pytree_node=False, default="exact")


@dataclasses.dataclass(frozen=True)
class PrefillBucket:
    """Static shape of a prefill step: `tokens` in all, of `requests` requests, contexts of `pages` pages.

    `images` is the number of image-span tokens the batch may hold.
    """

    tokens: int
    requests: int
    pages: int
    tile: int = 16
    images: int = 0
    replay: Replay = "exact"

    def __post_init__(self):
        if self.replay not in ("exact", "bounded"):
            raise ValueError(f"replay = {self.replay!r}: must be 'exact' or 'bounded'")
        for name in ("tokens", "requests", "pages", "tile"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.images < 0:
            raise ValueError(f"images = {self.images}: must be at least 0")
        if self.tokens % self.tile:
            raise ValueError(f"tokens = {self.tokens}: must be a multiple of tile = {self.tile}")


@dataclasses.dataclass(frozen=True)
class DecodeBucket:
    """Static shape of a decode step: `requests` requests of 1..`tokens_per_request` tokens, contexts of `pages`."""

    requests: int
    pages: int
    tokens_per_request: int = 1

    def __post_init__(self):
        for name in ("requests", "pages", "tokens_per_request"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """A contiguous part of one prompt to run.

    Args:
      prompt: all token ids of the prompt, int32.
      start, end: positions to run.
      slot, pages: where the request's state lives; pages must cover `end` tokens.
      cached: length of the prefix whose pages hold valid entries already (a prefix-cache hit). The window keys behind
        `start` are then missing: `start` must be `replay_start(...)` of the hit in the first chunk.
      window_floor: first position whose window keys this slot holds: 0, or where the replay of a hit began.
      image_mask: True for image-span positions of the prompt; None for a text prompt.
      image_embeddings: [image positions in start..end, hidden].
    """

    prompt: np.ndarray
    start: int
    end: int
    slot: int
    pages: Sequence[int]
    cached: int = 0
    window_floor: int = 0
    sampling: RequestSampling = RequestSampling()
    image_mask: np.ndarray | None = None
    image_embeddings: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class DecodeTokens:
    """Tokens of one running request: the newest chosen token and, after it, drafts to verify.

    Args:
      start: position of the first.
      pages: must cover `start + len(tokens)` tokens.
      history: token ids before `start`, newest first, -1 for image tokens; needed only for Engram tables on the host.
    """

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]
    sampling: RequestSampling = RequestSampling()
    history: Sequence[int] = ()


@runtime_checkable
class EngramTables(Protocol):
    """Engram tables on the host."""

    def lookup(self, rows: Int[np.ndarray, "tokens layers columns"]) -> tuple[Any, ...]:
        """Stored rows per Engram layer: weights [tokens, columns, dim] with their scales."""


def replay_start(cfg: ModelConfig, prompt_length: int, cached: int, encoder: Replay, decoder: Replay) -> int:
    """Where to resume a prompt of which `cached` tokens are in the pages (sections 9.4, 9.7).

    Bounded replay re-runs one window. Exact replay runs what the missing window keys depend on: each layer reaches
    `sliding_window - 1` tokens further back, through the encoder half, and through all layers if the decoder half is to
    be exact too. A decoder half in bounded replay begins at its own floor, which may lie before `cached`.
    """
    if encoder == "bounded":
        return max(0, cached - cfg.sliding_window)
    layers, needed = cfg.num_hidden_layers, cached
    if decoder == "bounded":
        layers, needed = cfg.decoder_start, min(cached, decoder_floor(cfg, prompt_length, decoder))
    return max(0, needed - layers * (cfg.sliding_window - 1))


def decoder_floor(cfg: ModelConfig, prompt_length: int, replay: Replay, window_floor: int = 0) -> int:
    """First prompt position the decoder half runs on: the last window in bounded replay (section 9.5)."""
    return max(window_floor, prompt_length - cfg.sliding_window) if replay == "bounded" else window_floor


def prefill_batch(
    cfg: ModelConfig, cache_cfg: CacheConfig, chunks: Sequence[PrefillChunk], bucket: PrefillBucket
) -> StepBatch:
    """Packs chunks of different requests into one batch of the bucket's shape.

    Raises:
      ValueError: a chunk is empty or lies outside its prompt, its pages do not cover it, ids are out of range, or the
        chunks do not fit the bucket.
    """
    layout = _Layout(cfg, cache_cfg, bucket.requests, bucket.tokens, bucket.pages)
    tokens = np.zeros(bucket.tokens, np.int32)
    image_mask = np.zeros(bucket.tokens, bool)
    ngram = cfg.engram_max_ngram_size - 1
    history = np.full((bucket.requests, ngram), -1, np.int32)
    rows = np.zeros((3, bucket.requests), np.int32)
    images: list[np.ndarray] = []
    offset = 0
    for row, chunk in enumerate(chunks):
        prompt = token_ids(chunk.prompt, cfg.vocab_size, f"chunk {row}")
        if not 0 <= chunk.start < chunk.end <= len(prompt):
            raise ValueError(f"chunk {row}: {chunk.start}..{chunk.end} is not inside a prompt of {len(prompt)} tokens")
        if not 0 <= chunk.cached <= len(prompt):
            raise ValueError(f"chunk {row}: cached = {chunk.cached} is not in 0..{len(prompt)}, the prompt's length")
        if not 0 <= chunk.window_floor <= chunk.start:
            raise ValueError(f"chunk {row}: window_floor = {chunk.window_floor} is not in 0..{chunk.start}, its start")
        layout.add(row, chunk.slot, chunk.start, chunk.end - chunk.start, offset, chunk.pages)
        part = slice(offset, offset + chunk.end - chunk.start)
        tokens[part] = prompt[chunk.start : chunk.end]
        known = prompt
        if chunk.image_mask is not None or chunk.image_embeddings is not None:
            mask, embeddings = _image_span(cfg, chunk, row)
            image_mask[part], known = mask[chunk.start : chunk.end], np.where(mask, -1, prompt)
            images.append(embeddings)
        before = known[max(0, chunk.start - ngram) : chunk.start][::-1]
        history[row, : len(before)] = before
        floor = decoder_floor(cfg, len(prompt), bucket.replay, chunk.window_floor)
        rows[:, row] = chunk.cached, chunk.window_floor, floor
        offset += ceil_div(chunk.end - chunk.start, bucket.tile) * bucket.tile
    embeddings = np.zeros((bucket.images, cfg.hidden_size), np.float32)
    given = np.concatenate(images) if images else embeddings[:0]
    if len(given) > bucket.images:
        raise ValueError(f"{len(given)} image tokens do not fit a bucket of {bucket.images}")
    embeddings[: len(given)] = given
    return StepBatch(
        tokens=tokens,
        image_mask=image_mask,
        image_embeddings=embeddings,
        **layout.arrays(),
        history=history,
        write_starts=rows[0],
        encoder_floors=rows[1],
        decoder_floors=rows[2],
        sampling=sampling_params([c.sampling for c in chunks], bucket.requests),
        tile=bucket.tile,
        replay=bucket.replay,
    )


def decode_batch(
    cfg: ModelConfig, cache_cfg: CacheConfig, requests: Sequence[DecodeTokens], bucket: DecodeBucket
) -> StepBatch:
    """Packs the next tokens of running requests into one batch of the bucket's shape.

    Raises:
      ValueError: as `prefill_batch`.
    """
    width = bucket.tokens_per_request
    layout = _Layout(cfg, cache_cfg, bucket.requests, bucket.requests * width, bucket.pages)
    tokens = np.zeros((bucket.requests, width), np.int32)
    history = np.full((bucket.requests, cfg.engram_max_ngram_size - 1), -1, np.int32)
    for row, request in enumerate(requests):
        count = len(request.tokens)
        if not 1 <= count <= width:
            raise ValueError(f"request {row}: {count} tokens, the bucket takes 1 to {width}")
        ids = token_ids(request.tokens, cfg.vocab_size, f"request {row}")
        layout.add(row, request.slot, request.start, count, row * width, request.pages)
        tokens[row, :count] = ids
        history[row, : request.start] = UNKNOWN
        before = np.asarray(request.history[: history.shape[1]], np.int64)
        known = token_ids(before[before != -1], cfg.vocab_size, f"request {row}: history")
        history[row, : len(before)][before != -1] = known
        history[row, : len(before)][before == -1] = -1
    zeros = np.zeros(bucket.requests, np.int32)
    return StepBatch(
        tokens=tokens.reshape(-1),
        image_mask=np.zeros(tokens.size, bool),
        image_embeddings=np.zeros((0, cfg.hidden_size), np.float32),
        **(layout.arrays() | {"offsets": np.arange(bucket.requests, dtype=np.int32) * width}),
        history=history,
        write_starts=zeros,
        encoder_floors=zeros,
        decoder_floors=zeros,
        sampling=sampling_params([r.sampling for r in requests], bucket.requests),
        tile=width,
    )


def with_engram_rows(
    cfg: ModelConfig, batch: StepBatch, token_map: Int32[np.ndarray, " vocab"], tables: EngramTables
) -> StepBatch:
    """The batch with the table rows of its tokens read from host tables; for params without tables.

    Raises:
      ValueError: a request's history is not given as far back as an n-gram reaches.
    """
    if np.any(batch.history == UNKNOWN):
        raise ValueError(
            f"history: Engram tables on the host need the {batch.history.shape[1]} token ids before a step"
        )
    ids = np.where(batch.image_mask, DEAD, token_map[batch.tokens])
    before = np.where(batch.history < 0, DEAD, token_map[batch.history])
    history = np.full((len(ids), cfg.engram_max_ngram_size), DEAD, np.int32)
    for row in range(len(batch.slots)):
        first, length = batch.offsets[row], batch.lengths[row]
        line = np.concatenate([before[row, ::-1], ids[first : first + length]])
        for back in range(history.shape[1]):
            start = before.shape[1] - back
            history[first : first + length, back] = line[start : start + length]
    return batch.replace(engram_rows=tables.lookup(rows_on_host(cfg, history, int(token_map[cfg.engram_pad_token_id]))))


class _Layout:
    """Places requests into the rows of a batch and checks that they fit."""

    def __init__(self, cfg: ModelConfig, cache_cfg: CacheConfig, requests: int, tokens: int, pages: int):
        self.limit = min(cfg.max_position_embeddings, pages * cache_cfg.page_size)
        self.capacity, self.cache_cfg = tokens, cache_cfg
        self.slots = np.full(requests, cache_cfg.slots, np.int32)
        self.starts = np.zeros(requests, np.int32)
        self.lengths = np.zeros(requests, np.int32)
        self.offsets = np.full(requests, tokens, np.int32)
        self.page_table = np.full((requests, pages), np.iinfo(np.int32).max, np.int32)

    def add(self, row: int, slot: int, start: int, length: int, offset: int, pages: Sequence[int]) -> None:
        end, num_slots, page_size = start + length, self.cache_cfg.slots, self.cache_cfg.page_size
        if row >= len(self.slots):
            raise ValueError(f"more than {len(self.slots)} requests for this bucket")
        if start < 0:
            raise ValueError(f"request {row}: start = {start} is negative")
        if not 0 <= slot < num_slots or slot in self.slots[:row]:
            raise ValueError(f"request {row}: slot {slot} is taken or not below {num_slots}")
        if end > self.limit:
            raise ValueError(f"request {row}: {end} tokens exceed the bucket's context of {self.limit}")
        if offset + length > self.capacity:
            raise ValueError(f"request {row}: the batch does not fit a bucket of {self.capacity} tokens")
        if end > len(pages) * page_size:
            raise ValueError(f"request {row}: {len(pages)} pages of {page_size} do not cover {end} tokens")
        used = ceil_div(end, page_size)
        if outside := [page for page in pages[:used] if not 0 <= page < self.cache_cfg.pages]:
            raise ValueError(f"request {row}: page {outside[0]} is not in 0..{self.cache_cfg.pages - 1}")
        self.slots[row], self.starts[row], self.lengths[row], self.offsets[row] = slot, start, length, offset
        self.page_table[row, :used] = pages[:used]

    def arrays(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name) for name in ("slots", "starts", "lengths", "offsets", "page_table")}
        return arrays | {"num_slots": self.cache_cfg.slots, "page_size": self.cache_cfg.page_size}


def token_ids(ids: Any, vocab: int, what: str) -> Int32[np.ndarray, " tokens"]:
    """A flat array of token ids as int32.

    Raises:
      ValueError: not one-dimensional, not integers, or an id outside 0..vocab-1.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{what}: token ids must be a flat sequence of integers, got {ids.dtype} {ids.shape}")
    bad = ids[(ids < 0) | (ids >= vocab)]
    if bad.size:
        raise ValueError(f"{what}: token id {int(bad[0])} is not in 0..{vocab - 1}")
    return ids.astype(np.int32)


def _image_span(cfg: ModelConfig, chunk: PrefillChunk, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The checked mask of the prompt and embeddings of the chunk's image positions."""
    mask, given = chunk.image_mask, chunk.image_embeddings
    if mask is None or mask.dtype != bool or mask.shape != (len(chunk.prompt),):
        raise ValueError(f"chunk {row}: image_mask must be one bool per prompt token, {len(chunk.prompt)}")
    expected = (int(mask[chunk.start : chunk.end].sum()), cfg.hidden_size)
    given = np.zeros((0, cfg.hidden_size), np.float32) if given is None else given
    if given.shape != expected:
        raise ValueError(f"chunk {row}: image_embeddings {given.shape}, expected {expected} for its image positions")
    return mask, given
