"""Drives the step functions the way an engine would, for tests: slots, pages, chunks, drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    SpeculativeRequest,
    decode_batch,
    prefill_batch,
    speculative_batch,
    with_engram_rows,
)
from dsv4jax.cache import Cache, CacheConfig, init_cache
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import decode_step, prefill_step, start_request

GREEDY = RequestSampling(temperature=0.0)


@dataclasses.dataclass
class Request:
    """One request in a slot."""

    prompt: np.ndarray
    slot: int
    pages: list[int]
    sampling: RequestSampling = GREEDY
    cached: int = 0
    window_floor: int = 0
    image_mask: np.ndarray | None = None
    image_embeddings: np.ndarray | None = None
    """One row per image position of the prompt."""


class Server:
    """A cache with fixed buckets. `poison` fills everything a request does not own with NaN."""

    def __init__(
        self,
        cfg,
        params,
        numerics,
        *,
        prefill,
        decode,
        slots=3,
        pages=64,
        page_size=8,
        poison=False,
        tables=None,
        **cache,
    ):
        self.cfg, self.params, self.numerics, self.tables = cfg, params, numerics, tables
        self.prefill_bucket, self.decode_bucket = prefill, decode
        self.cache_cfg = CacheConfig(slots=slots, pages=pages, page_size=page_size, **cache)
        self.cache = init_cache(cfg, self.cache_cfg, numerics)
        if poison:
            self.cache = poisoned(self.cache)

    def start(self, request: Request, generated: int = 0) -> None:
        """The last `generated` tokens of the prompt were generated before a preemption."""
        length = len(request.prompt)
        cut = length - generated
        rows = request_rows(request.prompt[:cut], request.prompt[cut:], {}, self.cfg.vocab_size)
        self.cache = start_request(self.cache, np.int32(request.slot), *rows, np.int32(length))

    def prefill(self, *parts: tuple[Request, int, int], collect: bool = False):
        """Runs positions start..end of each request's prompt in one step."""
        chunks = []
        for request, start, end in parts:
            images = None
            if request.image_mask is not None:
                before = int(request.image_mask[:start].sum())
                images = request.image_embeddings[before : before + int(request.image_mask[start:end].sum())]
            chunks.append(
                PrefillChunk(
                    request.prompt,
                    start,
                    end,
                    request.slot,
                    request.pages,
                    cached=request.cached,
                    window_floor=request.window_floor,
                    sampling=request.sampling,
                    image_mask=request.image_mask,
                    image_embeddings=images,
                )
            )
        batch = self.rows(prefill_batch(self.cfg, self.cache_cfg, chunks, self.prefill_bucket))
        self.cache, output = prefill_step(
            self.params, self.cache, batch, cfg=self.cfg, numerics=self.numerics, collect=collect
        )
        return output

    def decode(self, *parts: tuple[Request, int, list[int]], history=()):
        """Runs tokens of each request from a position on in one step."""
        requests = [
            DecodeTokens(list(tokens), start, r.slot, r.pages, r.sampling, history) for r, start, tokens in parts
        ]
        batch = self.rows(decode_batch(self.cfg, self.cache_cfg, requests, self.decode_bucket))
        self.cache, output = decode_step(self.params, self.cache, batch, cfg=self.cfg, numerics=self.numerics)
        return output

    def draft(self, *requests: Request):
        """A draft round for each request."""
        self.cache, output = draft_step(
            self.params,
            self.cache,
            self._speculative(*((r, 0) for r in requests)),
            cfg=self.cfg,
            numerics=self.numerics,
        )
        return output

    def speculate(
        self, *parts: tuple[Request, int], end: int | None = None, min_drafts=0, tokens=None, pauses=None, **options
    ):
        """Verifies up to a number of drafts of each request, and drafts anew."""
        batch = self._speculative(*parts, end=end, min_drafts=min_drafts)
        if tokens is not None:
            batch = batch.replace(tokens=tokens)
        if pauses is not None:
            batch = batch.replace(pause_tokens=pauses[0], seen=pauses[1])
        static = {"cfg": self.cfg, "numerics": self.numerics}
        self.cache, output = speculative_step(self.params, self.cache, batch, **static, **options)
        return output

    def _speculative(self, *parts: tuple[Request, int], end: int | None = None, min_drafts: int = 0):
        size = self.cache_cfg.page_size
        requests = [
            SpeculativeRequest(
                r.slot, r.pages, len(r.pages) * size if end is None else end, drafts, min_drafts, r.sampling
            )
            for r, drafts in parts
        ]
        return speculative_batch(self.cfg, self.cache_cfg, requests, self.decode_bucket)

    def rows(self, batch):
        if self.tables is None:
            return batch
        return with_engram_rows(self.cfg, batch, np.asarray(self.params["engram_token_map"]), self.tables)

    def prefill_all(self, request: Request, cuts: list[int] = (), start: int = 0):
        """Runs a whole prompt cut at the given positions; returns the last step's output."""
        ends = [*(c for c in sorted(set(cuts)) if start < c < len(request.prompt)), len(request.prompt)]
        for begin, end in zip([start, *ends[:-1]], ends, strict=True):
            output = self.prefill((request, begin, end))
        return output


def poisoned(cache: Cache) -> Cache:
    """Every record NaN: as values, or as bytes whose scale is NaN. Ids out of the vocabulary in the id rings."""

    def spoil(a):
        return jnp.full_like(a, 255 if a.dtype == jnp.uint8 else jnp.nan)

    spoiled = {
        name: jax.tree.map(spoil, getattr(cache, name))
        for name in ("entries", "index_keys", "windows", "open_groups", "draft_windows")
    }
    return cache.replace(**spoiled, ngram_ids=jnp.full_like(cache.ngram_ids, 7))


SMALL_PREFILL = PrefillBucket(tokens=48, requests=3, pages=16, tile=4)
SMALL_DECODE = DecodeBucket(requests=3, pages=16, tokens_per_request=6)
