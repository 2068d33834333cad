"""Drives the step functions over several ranks, for tests: what `serving.Server` does on one device."""

import numpy as np
from serving import Request

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    concatenate_batches,
    decode_batch,
    prefill_batch,
)
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.sampling import request_rows
from dsv4jax.steps import decode_step, prefill_step, start_request


class Ranks:
    """Caches of all ranks of a layout. Every method takes a list of requests for each rank."""

    def __init__(self, cfg, params, numerics, layout, *, prefill, decode, slots=3, pages=48, page_size=8, **cache):
        self.cfg, self.params, self.layout = cfg, params, layout
        self.prefill_bucket: PrefillBucket = prefill
        self.decode_bucket: DecodeBucket = decode
        self.cache_cfg = CacheConfig(slots=slots, pages=pages, page_size=page_size, **cache)
        self.static = dict(cfg=cfg, numerics=numerics, layout=layout)
        self.cache = init_cache(cfg, self.cache_cfg, numerics, layout)

    def start(self, requests: list[Request | None]) -> None:
        """Starts at most one request on each rank."""
        rows = []
        for request in requests:
            prompt = np.zeros(0, np.int32) if request is None else request.prompt
            slot = self.cache_cfg.slots if request is None else request.slot
            rows.append((np.int32(slot), *request_rows(prompt, [], {}, self.cfg.vocab_size), np.int32(len(prompt))))
        arguments = [np.stack(values) for values in zip(*rows, strict=True)]
        if self.layout.mesh is None:
            arguments = [a[0] for a in arguments]
        self.cache = start_request(self.cache, *arguments, layout=self.layout)

    def prefill(self, parts: list[list[tuple[Request, int, int]]], **options):
        """Runs positions start..end of prompts."""
        batches = [
            prefill_batch(
                self.cfg,
                self.cache_cfg,
                [
                    PrefillChunk(r.prompt, start, end, r.slot, r.pages, sampling=r.sampling, cached=r.cached)
                    for r, start, end in rank
                ],
                self.prefill_bucket,
            )
            for rank in parts
        ]
        return self._run(prefill_step, batches, options)

    def decode(self, parts: list[list[tuple[Request, int, list[int]]]], **options):
        """Runs tokens from a position on."""
        batches = [
            decode_batch(
                self.cfg,
                self.cache_cfg,
                [DecodeTokens(list(tokens), start, r.slot, r.pages, r.sampling) for r, start, tokens in rank],
                self.decode_bucket,
            )
            for rank in parts
        ]
        return self._run(decode_step, batches, options)

    def _run(self, step, batches, options):
        batch = self.layout.put(concatenate_batches(batches))
        self.cache, output = step(self.params, self.cache, batch, **self.static, **options)
        return output
