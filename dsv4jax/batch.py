"""What one step runs: requests packed into fixed-shape arrays, built on the host in numpy.

Tokens of all requests stand in one flat array. Each request's tokens begin at a multiple of `tile`, so that a tile of
consecutive tokens belongs to one request. Padded rows have slot = number of slots, length 0; padded tokens lie outside
every request's range. Both read nothing that matters and write nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, rows_on_host
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import SamplingParams, sampling_params
from dsv4jax.sampling_settings import MAX_PAUSE_TOKENS, RequestSampling

Replay = Literal["exact", "bounded"]
UNKNOWN = -2
NEXT_TOKEN = -1
"""First token of a request in a decode step: the token its slot's newest step sampled, which never left the device."""


@flax.struct.dataclass
class StepBatch:
    """Arguments of one prefill or decode step, one row per request."""

    tokens: Int32[Any, " tokens"]
    """Token ids; in a decode step the first of a request may be NEXT_TOKEN."""
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
    prompt_targets: Int32[Any, " targets"]
    """The prompt token that follows each token, -1 for none; 0 rows in a bucket without prompt log-probabilities."""
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

    `images` is the number of image-span tokens the batch may hold. With `prompt_logprobs` the step also returns the
    log-probability of every prompt token after its first, which needs exact replay.
    """

    tokens: int
    requests: int
    pages: int
    tile: int = 16
    images: int = 0
    replay: Replay = "exact"
    prompt_logprobs: bool = False

    def __post_init__(self):
        if self.replay not in ("exact", "bounded"):
            raise ValueError(f"replay = {self.replay!r}: must be 'exact' or 'bounded'")
        if self.prompt_logprobs and self.replay != "exact":
            raise ValueError(f"prompt_logprobs = True: needs replay = 'exact', not {self.replay!r}")
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
      prompt: all token ids of the prompt, int32; only those of the chunk and its neighbours are read.
      start, end: positions to run.
      slot, pages: where the request's state lives; pages must cover `end` tokens, those after are ignored.
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
    pages: Sequence[int] | Int32[np.ndarray, " pages"]
    cached: int = 0
    window_floor: int = 0
    sampling: RequestSampling = RequestSampling()
    image_mask: np.ndarray | None = None
    image_embeddings: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class DecodeTokens:
    """Tokens of one running request: the newest chosen token and, after it, drafts to verify.

    Args:
      tokens: NEXT_TOKEN in the first place stands for the token the slot's newest step sampled.
      start: position of the first.
      pages: must cover `start + len(tokens)` tokens, those after are ignored; an int32 array is the fastest.
      history: token ids before `start`, newest first, -1 for image tokens; needed only for Engram tables on the host.
    """

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int] | Int32[np.ndarray, " pages"]
    sampling: RequestSampling = RequestSampling()
    history: Sequence[int] = ()


@flax.struct.dataclass
class SpeculativeBatch:
    """Arguments of a step that drafts or verifies, one row per request; its tokens and their position are in the slots.

    `tile` is the most tokens a request runs: the newest chosen one and the drafts after it.
    """

    slots: Int32[Any, " requests"]
    tokens: Int32[Any, " requests"]
    """The newest chosen token of each, or NEXT_TOKEN for that of its slot."""
    ends: Int32[Any, " requests"]
    """No token at this position or beyond is run."""
    min_drafts: Int32[Any, " requests"]
    max_drafts: Int32[Any, " requests"]
    page_table: Int32[Any, "requests pages"]
    sampling: SamplingParams
    pause_tokens: Int32[Any, "requests pauses"]
    """Tokens behind which a request runs nothing before the host has seen them; -1 for none."""
    seen: Int32[Any, " requests"]
    """Position of the newest chosen token that the host has seen."""
    num_slots: int = flax.struct.field(pytree_node=False, default=0)
    page_size: int = flax.struct.field(pytree_node=False, default=0)
    """Of the cache the batch was made for."""
    tile: int = flax.struct.field(pytree_node=False, default=1)


Batch = TypeVar("Batch", StepBatch, SpeculativeBatch)


@dataclasses.dataclass(frozen=True)
class SpeculativeRequest:
    """One running request in a step that drafts or verifies.

    Args:
      pages: must cover `end` tokens.
      end: where the request ends at the latest, or as far as its pages reach for now. The token at `end` may be chosen
        but is not run: with a prompt of n tokens and m to generate, n + m - 1.
      token: to run in place of the newest chosen token, with no drafts after it: a token that is known from an earlier
        run of the request and may differ from what its slot has chosen.
      max_drafts: drafts to verify at most; fewer are if fewer are there or `end` is near.
      min_drafts: where a step chooses how many pay, no fewer than this; equal to `max_drafts` for a fixed number.
      pause_tokens: tokens behind which the allowed tokens may change, at most `MAX_PAUSE_TOKENS`. One of them is the
        last that a step chooses, and nothing runs behind it before its position is `seen`.
      seen: position of the newest chosen token that the host has seen.
    """

    slot: int
    pages: Sequence[int] | Int32[np.ndarray, " pages"]
    end: int
    max_drafts: int
    min_drafts: int = 0
    sampling: RequestSampling = RequestSampling()
    token: int = NEXT_TOKEN
    pause_tokens: Sequence[int] | Int32[np.ndarray, " pauses"] = ()
    seen: int = 0


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
    ngram = cfg.engram_max_ngram_size - 1
    offsets, space = [], 0
    for row, chunk in enumerate(chunks):
        length = len(chunk.prompt)
        if not 0 <= chunk.start < chunk.end <= length:
            raise ValueError(f"chunk {row}: {chunk.start}..{chunk.end} is not inside a prompt of {length} tokens")
        if not 0 <= chunk.cached <= length:
            raise ValueError(f"chunk {row}: cached = {chunk.cached} is not in 0..{length}, the prompt's length")
        if not 0 <= chunk.window_floor <= chunk.start:
            raise ValueError(f"chunk {row}: window_floor = {chunk.window_floor} is not in 0..{chunk.start}, its start")
        offsets.append(space)
        space += ceil_div(chunk.end - chunk.start, bucket.tile) * bucket.tile
    layout = _layout(
        cfg, cache_cfg, bucket.requests, bucket.tokens, bucket.pages, [c.slot for c in chunks],
        [c.start for c in chunks], [c.end - c.start for c in chunks], offsets, [c.pages for c in chunks],
    )  # fmt: skip
    tokens = np.zeros(bucket.tokens, np.int32)
    targets = np.full(bucket.tokens, -1, np.int32)
    image_mask = np.zeros(bucket.tokens, bool)
    history = np.full((bucket.requests, ngram), -1, np.int32)
    rows = np.zeros((3, bucket.requests), np.int32)
    images: list[np.ndarray] = []
    for row, (chunk, offset) in enumerate(zip(chunks, offsets, strict=True)):
        first = max(0, chunk.start - ngram)
        around = token_ids(chunk.prompt[first : chunk.end + 1], cfg.vocab_size, f"chunk {row}")
        begin, end = chunk.start - first, chunk.end - first
        part = slice(offset, offset + end - begin)
        tokens[part] = around[begin:end]
        before = around[:begin]
        if chunk.image_mask is not None or chunk.image_embeddings is not None:
            mask, embeddings = _image_span(cfg, chunk, row)
            image_mask[part] = mask[chunk.start : chunk.end]
            before = np.where(mask[first : chunk.start], -1, before)
            images.append(embeddings)
        history[row, :begin] = before[::-1]
        # Tokens of a prefix hit run again for their window keys alone; what they predict is not exact.
        known = max(0, chunk.cached - chunk.start)
        following = around[begin + known + 1 : end + 1]
        targets[offset + known : offset + known + len(following)] = following
        floor = decoder_floor(cfg, len(chunk.prompt), bucket.replay, chunk.window_floor)
        rows[:, row] = chunk.cached, chunk.window_floor, floor
    embeddings = np.zeros((bucket.images, cfg.hidden_size), np.float32)
    given = np.concatenate(images) if images else embeddings[:0]
    if len(given) > bucket.images:
        raise ValueError(f"{len(given)} image tokens do not fit a bucket of {bucket.images}")
    embeddings[: len(given)] = given
    return StepBatch(
        tokens=tokens,
        image_mask=image_mask,
        image_embeddings=embeddings,
        **layout,
        history=history,
        write_starts=rows[0],
        encoder_floors=rows[1],
        decoder_floors=rows[2],
        prompt_targets=targets if bucket.prompt_logprobs else targets[:0],
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
    lengths = np.array([len(r.tokens) for r in requests], np.int64)
    if (bad := (lengths < 1) | (lengths > width)).any():
        row = int(bad.argmax())
        raise ValueError(f"request {row}: {lengths[row]} tokens, the bucket takes 1 to {width}")
    layout = _layout(
        cfg, cache_cfg, bucket.requests, bucket.requests * width, bucket.pages, [r.slot for r in requests],
        [r.start for r in requests], lengths, np.arange(len(requests)) * width, [r.pages for r in requests],
    )  # fmt: skip
    tokens = np.zeros((bucket.requests, width), np.int32)
    tokens[np.arange(width) < layout["lengths"][:, None]] = _decode_ids(requests, lengths, cfg.vocab_size)
    starts = layout["starts"]
    history = np.where(np.arange(cfg.engram_max_ngram_size - 1) < starts[:, None], UNKNOWN, -1).astype(np.int32)
    for row, request in enumerate(requests):
        if len(request.history):
            before = np.asarray(request.history[: history.shape[1]], np.int64)
            token_ids(before[before != -1], cfg.vocab_size, f"request {row}: history")
            history[row, : len(before)] = before
    zeros = np.zeros(bucket.requests, np.int32)
    return StepBatch(
        tokens=tokens.reshape(-1),
        image_mask=np.zeros(tokens.size, bool),
        image_embeddings=np.zeros((0, cfg.hidden_size), np.float32),
        **(layout | {"offsets": np.arange(bucket.requests, dtype=np.int32) * width}),
        history=history,
        write_starts=zeros,
        encoder_floors=zeros,
        decoder_floors=zeros,
        prompt_targets=zeros[:0],
        sampling=sampling_params([r.sampling for r in requests], bucket.requests),
        tile=width,
    )


def speculative_batch(
    cfg: ModelConfig, cache_cfg: CacheConfig, requests: Sequence[SpeculativeRequest], bucket: DecodeBucket
) -> SpeculativeBatch:
    """Packs running requests whose tokens and position only the device need know.

    Raises:
      ValueError: the cache is made without drafts, the bucket has more tokens per request than there can be, a request
        wants more drafts than the bucket takes or a given token as well, has more pause tokens than there can be, or as
        `prefill_batch`.
    """
    width = bucket.tokens_per_request
    if cache_cfg.drafts is None:
        raise ValueError("drafts = None: the cache holds no drafts to run")
    limit = min(cache_cfg.slack, cfg.dspark_block_size + 1)
    if width > limit:
        raise ValueError(
            f"tokens_per_request = {width}: at most {limit}, of slack = {cache_cfg.slack} and one more than"
            f" dspark_block_size = {cfg.dspark_block_size}"
        )
    for row, request in enumerate(requests):
        if not 0 <= request.max_drafts < width:
            raise ValueError(f"request {row}: max_drafts = {request.max_drafts} is not in 0..{width - 1}")
        if not 0 <= request.min_drafts <= request.max_drafts:
            raise ValueError(
                f"request {row}: min_drafts = {request.min_drafts} is not in 0..{request.max_drafts}, its max_drafts"
            )
        if len(request.pause_tokens) > MAX_PAUSE_TOKENS:
            raise ValueError(
                f"request {row}: {len(request.pause_tokens)} pause_tokens: at most {MAX_PAUSE_TOKENS} are allowed"
            )
        if request.token != NEXT_TOKEN:
            token_ids([request.token], cfg.vocab_size, f"request {row}: token")
            if request.max_drafts:
                raise ValueError(f"request {row}: max_drafts = {request.max_drafts}: must be 0 with a token given")
    count = len(requests)
    # No token has a known position: what counts is where the requests end.
    layout = _layout(
        cfg, cache_cfg, bucket.requests, bucket.requests * width, bucket.pages, [r.slot for r in requests],
        [r.end for r in requests], np.zeros(count, np.int64), np.arange(count) * width, [r.pages for r in requests],
    )  # fmt: skip
    tokens = np.full(bucket.requests, NEXT_TOKEN, np.int32)
    tokens[:count] = [r.token for r in requests]
    limits = np.zeros((3, bucket.requests), np.int32)
    limits[:, :count] = [[getattr(r, name) for r in requests] for name in ("min_drafts", "max_drafts", "seen")]
    pause_tokens = np.full((bucket.requests, MAX_PAUSE_TOKENS), -1, np.int32)
    for row, request in enumerate(requests):
        pause_tokens[row, : len(request.pause_tokens)] = request.pause_tokens
    return SpeculativeBatch(
        slots=layout["slots"],
        tokens=tokens,
        ends=layout["starts"],
        min_drafts=limits[0],
        max_drafts=limits[1],
        page_table=layout["page_table"],
        sampling=sampling_params([r.sampling for r in requests], bucket.requests),
        pause_tokens=pause_tokens,
        seen=limits[2],
        num_slots=cache_cfg.slots,
        page_size=cache_cfg.page_size,
        tile=width,
    )


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """The batch of several ranks: the arrays of each one after the other. All must be of one bucket."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def _decode_ids(requests: Sequence[DecodeTokens], lengths: np.ndarray, vocab: int) -> np.ndarray:
    """The tokens of all requests in a row; NEXT_TOKEN is allowed as the first of a request."""
    ids = np.array([token for r in requests for token in r.tokens] or [0])[: lengths.sum()]
    allowed = np.zeros(len(ids), bool)
    if ids.dtype.kind in "iu":
        first = np.cumsum(lengths) - lengths
        allowed = (ids >= 0) & (ids < vocab)
        allowed[first] |= ids[first] == NEXT_TOKEN
    if not allowed.all():
        for row, request in enumerate(requests):
            known = request.tokens[1:] if request.tokens[0] == NEXT_TOKEN else request.tokens
            token_ids(known, vocab, f"request {row}")
    return ids


def with_engram_rows(
    cfg: ModelConfig, batch: StepBatch, token_map: Int32[np.ndarray, " vocab"], tables: EngramTables
) -> StepBatch:
    """The batch with the table rows of its tokens read from host tables; for params without tables.

    Raises:
      ValueError: a token is NEXT_TOKEN, or a request's history is not given as far back as an n-gram reaches.
    """
    if np.any(batch.tokens == NEXT_TOKEN):
        raise ValueError("tokens: NEXT_TOKEN is known on the device only, Engram tables on the host need token ids")
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


def _layout(
    cfg: ModelConfig,
    cache_cfg: CacheConfig,
    rows: int,
    capacity: int,
    columns: int,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int] | np.ndarray,
    offsets: Sequence[int] | np.ndarray,
    page_lists: Sequence[Any],
) -> dict[str, Any]:
    """The fields of a batch that place its requests, padded to `rows`, after checks that they fit.

    Args:
      rows, capacity, columns: requests, tokens and pages per request of the bucket.
    """
    count, num_slots, page_size = len(slots), cache_cfg.slots, cache_cfg.page_size
    if count > rows:
        raise ValueError(f"more than {rows} requests for this bucket")

    def refuse(bad: np.ndarray, message: Callable[[int], str]) -> None:
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"request {row}: {message(row)}")

    slot, start, length, offset = (np.array(a, np.int64) for a in (slots, starts, lengths, offsets))
    end = start + length
    refuse(start < 0, lambda row: f"start = {start[row]} is negative")
    bad_slot = (slot < 0) | (slot >= num_slots)
    if len(set(slots)) < count:
        bad_slot |= np.array([s in slots[:row] for row, s in enumerate(slots)])
    refuse(bad_slot, lambda row: f"slot {slot[row]} is taken or not below {num_slots}")
    limit = min(cfg.max_position_embeddings, columns * page_size)
    refuse(end > limit, lambda row: f"{end[row]} tokens exceed the bucket's context of {limit}")
    refuse(offset + length > capacity, lambda row: f"the batch does not fit a bucket of {capacity} tokens")
    given = np.array([len(pages) for pages in page_lists], np.int64)
    refuse(end > given * page_size, lambda row: f"{given[row]} pages of {page_size} do not cover {end[row]} tokens")
    used = (-(-end // page_size)).astype(np.int32)
    parts = [pages[:n] for pages, n in zip(page_lists, used.tolist(), strict=True)]
    numbers = np.concatenate(parts or [np.zeros(0, np.int32)])
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        flat = np.array([np.ndim(part) == 1 and np.asarray(part).dtype.kind in "iu" for part in parts])
        refuse(~flat, lambda row: f"pages must be a flat sequence of integers, got {np.asarray(parts[row]).dtype}")
    outside = (numbers < 0) | (numbers >= cache_cfg.pages)
    if outside.any():
        first = int(outside.argmax())
        row = int(np.searchsorted(np.cumsum(used), first, side="right"))
        raise ValueError(f"request {row}: page {numbers[first]} is not in 0..{cache_cfg.pages - 1}")
    page_table = np.full((rows, columns), np.iinfo(np.int32).max, np.int32)
    page_table[:count][np.arange(columns, dtype=np.int32) < used[:, None]] = numbers

    def padded(values: np.ndarray, fill: int) -> np.ndarray:
        out = np.full(rows, fill, np.int32)
        out[:count] = values
        return out

    return {
        "slots": padded(slot, num_slots),
        "starts": padded(start, 0),
        "lengths": padded(length, 0),
        "offsets": padded(offset, capacity),
        "page_table": page_table,
        "num_slots": num_slots,
        "page_size": page_size,
    }


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
