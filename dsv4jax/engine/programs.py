"""The compiled programs of an engine: every step in every shape it may need, built before any request arrives."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32
from tqdm import tqdm

from dsv4jax.batch import (
    DecodeBucket,
    EngramTables,
    PrefillBucket,
    SpeculativeBatch,
    StepBatch,
    concatenate_batches,
    decode_batch,
    prefill_batch,
    speculative_batch,
    with_engram_rows,
)
from dsv4jax.cache import Cache, CacheConfig, init_cache, mask_places
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.packing import param_shapes
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import decode_step, prefill_step, set_allowed_tokens, start_request
from sharding import SINGLE, ExpertPlacement, Layout
from sharding.placement import initial_owners, placement_from_owners


@dataclasses.dataclass(frozen=True)
class DraftBucket:
    """Shape of a step that drafts only."""

    requests: int


Bucket = PrefillBucket | DecodeBucket | DraftBucket


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes of an engine's steps, for each rank; `masks` are row counts of `set_allowed_tokens`."""

    prefill: tuple[PrefillBucket, ...]
    decode: tuple[DecodeBucket, ...]
    masks: tuple[int, ...]
    verify: tuple[DecodeBucket, ...] = ()
    """Of steps that verify drafts, with more than one token per request; none in an engine without drafts."""
    draft: tuple[DraftBucket, ...] = ()
    """Of the first draft round of requests."""

    @property
    def steps(self) -> tuple[Bucket, ...]:
        """Every bucket of a step."""
        return (*self.prefill, *self.decode, *self.verify, *self.draft)

    def for_prefill(self, tokens: int, requests: int, pages: int, prompt_logprobs: bool) -> PrefillBucket:
        """The smallest bucket that holds a batch of `tokens` (whole tiles).

        Raises:
          ValueError: none does.
        """
        fits = [
            b
            for b in self.prefill
            if b.tokens >= tokens
            and b.requests >= requests
            and b.pages >= pages
            and b.prompt_logprobs == prompt_logprobs
        ]
        if not fits:
            raise ValueError(
                f"no prefill bucket holds {tokens} tokens of {requests} requests over {pages} pages"
                f" {'with' if prompt_logprobs else 'without'} prompt log-probabilities"
            )
        return min(fits, key=lambda b: (b.tokens * b.pages, b.tokens))

    def for_decode(self, requests: int, pages: int, drafts: bool = False) -> DecodeBucket:
        """The smallest bucket that holds a batch, with or without drafts.

        Raises:
          ValueError: none does.
        """
        fits = [b for b in (self.verify if drafts else self.decode) if b.requests >= requests and b.pages >= pages]
        if not fits:
            kind = "verify" if drafts else "decode"
            raise ValueError(f"no {kind} bucket holds {requests} requests over {pages} pages")
        return min(fits, key=lambda b: (b.requests * b.pages, b.requests))


def make_buckets(
    cache_cfg: CacheConfig,
    *,
    prefill_tokens: Sequence[int],
    prefill_requests: int,
    decode_requests: Sequence[int],
    contexts: Sequence[int],
    bounded: bool = False,
    prompt_logprobs: bool = True,
    tile: int = 16,
    drafts: int = 0,
) -> Buckets:
    """All combinations of sizes.

    Args:
      prefill_tokens, decode_requests: sizes of prefill and decode steps.
      contexts: lengths in tokens up to which a step's requests may reach; the last is the engine's `max_model_len`.
      bounded: prefill runs the decoder half on the end of a prompt only (section 9.5).
      prompt_logprobs: also programs that return them, in the largest prefill size.
      drafts: the most drafts that a request verifies in a step; 0 for no programs with drafts.
    """
    pages = sorted({ceil_div(c, cache_cfg.page_size) for c in contexts})
    replay = "bounded" if bounded else "exact"
    prefill = [PrefillBucket(t, prefill_requests, p, tile, replay=replay) for t in prefill_tokens for p in pages]
    if prompt_logprobs:
        largest = max(prefill_tokens)
        prefill += [PrefillBucket(largest, prefill_requests, p, tile, prompt_logprobs=True) for p in pages]
    sizes = [(n, p) for n in decode_requests for p in pages]
    return Buckets(
        prefill=tuple(prefill),
        decode=tuple(DecodeBucket(n, p) for n, p in sizes),
        masks=tuple(sorted({min(8**i, cache_cfg.slots) for i in range(cache_cfg.slots.bit_length() + 1)})),
        verify=tuple(DecodeBucket(n, p, tokens_per_request=1 + drafts) for n, p in sizes if drafts),
        draft=(DraftBucket(prefill_requests),) if drafts else (),
    )


class Programs:
    """Compiles every bucket for a model, from shapes alone: weights need not be loaded.

    A program runs a step of all ranks of the layout, each with a batch of the same bucket.

    Attributes:
      mask_places: for how many tokens of a step a slot has masks of their own.
      workspace_bytes: the most temporary memory any program takes on a device, besides arguments and results.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        cache_cfg: CacheConfig,
        buckets: Buckets,
        numerics: Numerics,
        layout: Layout = SINGLE,
        tables: EngramTables | None = None,
        token_map: np.ndarray | None = None,
        params: Params | None = None,
        expert_slots: int | None = None,
        draft_expert_slots: int | None = None,
        forced_acceptance: Float32[np.ndarray, " drafts"] | None = None,
        progress: bool = True,
    ):
        """Compiles.

        Args:
          cache_cfg, buckets: of one rank.
          layout: devices, and how they share the work.
          tables, token_map: Engram tables on the host, and `params["engram_token_map"]` for them; not with drafts.
          params: parameters whose shapes to compile for; None for those of a checkpoint, packed if `numerics` want it.
          expert_slots, draft_expert_slots: of each rank, for the experts of a backbone layer and of a draft stage; the
            steps of these then take an `ExpertPlacement`. None for experts that stay where they are.
          forced_acceptance: for benchmarks only, of every step with drafts; see `speculative_step`.
        """
        self.cfg, self.cache_cfg, self.buckets, self.numerics = cfg, cache_cfg, buckets, numerics
        self.layout, self.tables, self._token_map = layout, tables, token_map
        slots = {"expert_slots": expert_slots, "draft_expert_slots": draft_expert_slots}
        if params is None:
            params = param_shapes(cfg, numerics, layout, tables_on_device=tables is None, **slots)
        empty_cache = functools.partial(init_cache, cfg, cache_cfg, numerics, layout)
        cache = _shapes(jax.eval_shape(empty_cache), layout)
        self._nothing = {b: self.batch([], b) for b in buckets.steps}
        # Until they are measured, all totals cost the same: then every draft that may be accepted is verified.
        self._step_seconds = {b: np.ones(b.requests * b.tokens_per_request + 1, np.float32) for b in buckets.verify}
        self._forced = {} if forced_acceptance is None else {"forced_acceptance": forced_acceptance}
        static: dict[str, Any] = {"cfg": cfg, "numerics": numerics, "layout": layout}
        stacks = {
            "placement": (cfg.num_hidden_layers, cfg.n_routed_experts, expert_slots),
            "draft_placement": (cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts, draft_expert_slots),
        }
        stacks = {name: sizes for name, sizes in stacks.items() if sizes[-1] is not None}
        placements = {name: _placement_shapes(layout, *sizes) for name, sizes in stacks.items()}
        jobs: dict[Any, Callable[[], Any]] = {
            "cache": functools.partial(_lower, jax.jit(empty_cache, out_shardings=layout.by_rank))
        }
        for bucket, batch in self._nothing.items():
            batches = _shapes(concatenate_batches([batch] * layout.ranks), layout)
            options = {name: shapes for name, shapes in placements.items() if name in placement_names(bucket)}
            if bucket in self._step_seconds:
                options |= {"step_seconds": self._step_seconds[bucket], **self._forced}
            jobs[bucket] = functools.partial(_lower, _step(bucket), params, cache, batches, **options, **static)
        row = np.int32(0), *request_rows(np.zeros(1, np.int32), (), {}, cfg.vocab_size), np.int32(1)
        start = _shapes(self.start_rows([row] * layout.ranks), layout)
        jobs["start"] = functools.partial(_lower, start_request, cache, *start, layout=layout)
        self.mask_places, words = mask_places(cfg, cache_cfg), ceil_div(cfg.vocab_size, 32)
        for n, places in itertools.product(buckets.masks, sorted({1, self.mask_places})):
            rows = np.zeros(layout.ranks * n, np.int32), np.zeros((layout.ranks * n, places, words), np.uint32)
            jobs[n, places] = functools.partial(
                _lower, set_allowed_tokens, cache, *_shapes(rows, layout), layout=layout
            )
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            # Lowered one after the other: kernels carry numbers in the order of their lowering, and a persistent
            # cache finds a program again only if these are the same.
            futures = {key: pool.submit(job().compile) for key, job in jobs.items()}
            waiting = tqdm(futures.items(), desc="compiling", unit="program", disable=not progress)
            self._compiled = {key: future.result() for key, future in waiting}
        analyses = [program.memory_analysis() for program in self._compiled.values()]
        self.workspace_bytes = max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    def step(self, bucket: Bucket) -> Callable[..., tuple[Cache, Any]]:
        """The program of a bucket: of (params, cache, batch), with slots for experts also of `placement_names`."""
        program = self._compiled[bucket]
        costs = self._step_seconds.get(bucket)
        return program if costs is None else functools.partial(program, step_seconds=costs, **self._forced)

    def set_costs(self, bucket: DecodeBucket, seconds: Mapping[int, float]) -> None:
        """Sets what steps with drafts cost, by which they choose how many drafts to verify.

        Args:
          seconds: of steps of this bucket, by the tokens that a rank verifies in them.
        """
        totals = np.arange(len(self._step_seconds[bucket]))
        self._step_seconds[bucket] = np.interp(totals, [*seconds], [*seconds.values()]).astype(np.float32)

    def batch(self, requests: Sequence[Any], bucket: Bucket) -> StepBatch | SpeculativeBatch:
        """A rank's batch: of `PrefillChunk`s, of `DecodeTokens`, or with drafts of `SpeculativeRequest`s."""
        if isinstance(bucket, DraftBucket):
            # Its requests run no token, so that they need no pages.
            return speculative_batch(self.cfg, self.cache_cfg, requests, DecodeBucket(bucket.requests, pages=1))
        if isinstance(bucket, DecodeBucket) and bucket.tokens_per_request > 1:
            return speculative_batch(self.cfg, self.cache_cfg, requests, bucket)
        make = prefill_batch if isinstance(bucket, PrefillBucket) else decode_batch
        batch = make(self.cfg, self.cache_cfg, requests, bucket)
        # With the Engram rows of its tokens, if the tables are on the host.
        return batch if self.tables is None else with_engram_rows(self.cfg, batch, self._token_map, self.tables)

    def nothing(self, bucket: Bucket) -> StepBatch | SpeculativeBatch:
        """The batch of a rank without work."""
        return self._nothing[bucket]

    def start_rows(self, rows: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
        """Arguments of `start_request` after the cache, from those of each rank."""
        return rows[0] if self.layout.mesh is None else tuple(map(np.stack, zip(*rows, strict=True)))

    @property
    def init_cache(self) -> Callable[[], Cache]:
        """`cache.init_cache` for all ranks."""
        return self._compiled["cache"]

    @property
    def start_request(self) -> Callable[..., Cache]:
        """`steps.start_request`, for one request of each rank."""
        return self._compiled["start"]

    def set_allowed_tokens(self, rows: int, places: int) -> Callable[..., Cache]:
        """`steps.set_allowed_tokens` for a row count of `buckets.masks` on each rank, and 1 or `mask_places` masks."""
        return self._compiled[rows, places]


def placement_names(bucket: Bucket) -> tuple[str, ...]:
    """The placements, as keywords, of the experts that a step in the bucket runs."""
    if isinstance(bucket, DraftBucket):
        return ("draft_placement",)
    verifies = isinstance(bucket, DecodeBucket) and bucket.tokens_per_request > 1
    return ("placement", "draft_placement") if verifies else ("placement",)


def _step(bucket: Bucket) -> Any:
    """The step that runs in a bucket."""
    if isinstance(bucket, PrefillBucket):
        return prefill_step
    if isinstance(bucket, DraftBucket):
        return draft_step
    return speculative_step if bucket.tokens_per_request > 1 else decode_step


def _lower(function: Any, *args: Any, **static: Any) -> Any:
    return function.lower(*args, **static)


def _placement_shapes(layout: Layout, layers: int, experts: int, slots: int) -> ExpertPlacement:
    one = placement_from_owners(initial_owners(1, experts, layout.ranks, slots), experts, layout.ranks)

    def of_all_layers(a: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, *a.shape[1:]), a.dtype, sharding=layout.on_all)

    return jax.tree.map(of_all_layers, one)


def _shapes(arrays: Any, layout: Layout) -> Any:
    """Shapes of arrays that hold the parts of all ranks along axis 0."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.by_rank), arrays)
