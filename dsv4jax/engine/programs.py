"""The compiled programs of an engine: every step in every shape it may need, built before any request arrives."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

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
from dsv4jax.engine.draft_room import DecodeTimes, smallest
from dsv4jax.numerics import Numerics
from dsv4jax.packing import param_shapes
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.step_flags import STEP_OPTIONS
from dsv4jax.steps import decode_step, prefill_step, set_allowed_tokens, start_request
from pallas_kernels.moe_experts import most_tokens
from sharding import SINGLE, ExpertPlacement, Layout
from sharding.placement import initial_owners, placement_from_owners


@dataclasses.dataclass(frozen=True)
class DraftBucket:
    """Shape of a step that drafts only."""

    requests: int


Bucket = PrefillBucket | DecodeBucket | DraftBucket
ProgramKey = Bucket | tuple[int, int] | Literal["cache", "start"]
"""Which program of an engine: the step of a bucket, `set_allowed_tokens` of so many rows and of masks for so many
places, or one of the other two."""


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes of an engine's steps, for each rank; `masks` are row counts of `set_allowed_tokens`."""

    prefill: tuple[PrefillBucket, ...]
    decode: tuple[DecodeBucket, ...]
    masks: tuple[int, ...]
    verify: tuple[DecodeBucket, ...] = ()
    """Of steps that verify drafts, with more than one token per request; none in an engine without drafts.

    The same sizes for each number of tokens per request, so that a step may have room for more or fewer drafts.
    """
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

    def for_decode(self, requests: int, pages: int) -> DecodeBucket:
        """The smallest bucket that holds a batch without drafts.

        Raises:
          ValueError: none does.
        """
        if (bucket := smallest(self.decode, requests, pages)) is None:
            raise ValueError(f"no decode bucket holds {requests} requests over {pages} pages")
        return bucket

    def for_verify(self, requests: int, pages: int, drafts: int) -> DecodeBucket:
        """The bucket with room for so many drafts of each request, but not for more than need be, and of these the
        smallest that holds a batch.

        Raises:
          ValueError: none does.
        """
        widths = sorted({b.tokens_per_request for b in self.verify if b.tokens_per_request > drafts})
        fits = [b for b in self.verify if b.tokens_per_request in widths[:1]]
        if (bucket := smallest(fits, requests, pages)) is None:
            raise ValueError(f"no verify bucket holds {requests} requests with {drafts} drafts over {pages} pages")
        return bucket


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
    fewer_drafts: Sequence[int] = (),
) -> Buckets:
    """All combinations of sizes.

    Args:
      prefill_tokens, decode_requests: sizes of prefill and decode steps.
      contexts: lengths in tokens up to which a step's requests may reach; the last is the engine's `max_model_len`.
      bounded: prefill runs the decoder half on the end of a prompt only (section 9.5).
      prompt_logprobs: also programs that return them, in the largest prefill size.
      drafts: the most drafts that a request verifies in a step; 0 for no programs with drafts.
      fewer_drafts: other numbers of drafts, for which there are narrower programs too.
    """
    pages = sorted({ceil_div(c, cache_cfg.page_size) for c in contexts})
    replay = "bounded" if bounded else "exact"
    prefill = [PrefillBucket(t, prefill_requests, p, tile, replay=replay) for t in prefill_tokens for p in pages]
    if prompt_logprobs:
        largest = max(prefill_tokens)
        prefill += [PrefillBucket(largest, prefill_requests, p, tile, prompt_logprobs=True) for p in pages]
    sizes = [(n, p) for n in decode_requests for p in pages]
    rooms = sorted({*fewer_drafts, drafts}) if drafts else []
    return Buckets(
        prefill=tuple(prefill),
        decode=tuple(DecodeBucket(n, p) for n, p in sizes),
        masks=tuple(sorted({min(8**i, cache_cfg.slots) for i in range(cache_cfg.slots.bit_length() + 1)})),
        verify=tuple(DecodeBucket(n, p, tokens_per_request=1 + room) for room in rooms for n, p in sizes),
        draft=(DraftBucket(prefill_requests),) if drafts else (),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jitted function, and the shapes (types, shardings) of its arguments that it is to be compiled for."""

    function: Any
    arguments: tuple[Any, ...]
    """Of parameters, cache and batch, or of the cache and others, as the function takes them."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of arrays by keyword."""
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the function is compiled with, see `dsv4jax.step_flags`."""

    def lower(self) -> jax.stages.Lowered:
        """Traces the function."""
        return _lower(self.function, *self.arguments, **self.options, **self.static)


def list_programs(
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
) -> dict[ProgramKey, Program]:
    """Every program of an engine, from shapes alone; arguments as those of `Programs`.

    Raises:
      ValueError: a prefill bucket has more tokens than the kernels can address.
    """
    if numerics.implementation == "pallas":
        _check_prefill_tokens(cfg, buckets, layout, expert_slots)
    slots = {"expert_slots": expert_slots, "draft_expert_slots": draft_expert_slots}
    if params is None:
        params = param_shapes(cfg, numerics, layout, tables_on_device=tables is None, **slots)
    empty_cache = functools.partial(init_cache, cfg, cache_cfg, numerics, layout)
    cache = _shapes(jax.eval_shape(empty_cache), layout)
    static: dict[str, Any] = {"cfg": cfg, "numerics": numerics, "layout": layout}
    placements = {name: _placement_shapes(layout, *sizes) for name, sizes in moving_experts(cfg, **slots).items()}
    programs: dict[ProgramKey, Program] = {"cache": Program(jax.jit(empty_cache, out_shardings=layout.by_rank), ())}
    for bucket in buckets.steps:
        batches = batch_shapes(cfg, cache_cfg, bucket, layout, tables, token_map)
        options: dict[str, Any] = {name: placements[name] for name in placement_names(bucket) if name in placements}
        if bucket in buckets.verify:
            options["step_seconds"] = equal_costs(bucket)
        programs[bucket] = Program(step_function(bucket), (params, cache, batches), options, static, STEP_OPTIONS)
    row = np.int32(0), *request_rows(np.zeros(1, np.int32), (), {}, cfg.vocab_size), np.int32(1)
    start = _shapes(start_rows([row] * layout.ranks, layout), layout)
    programs["start"] = Program(start_request, (cache, *start), static={"layout": layout})
    words = ceil_div(cfg.vocab_size, 32)
    for n, places in mask_programs(cfg, cache_cfg, buckets):
        rows = np.zeros(layout.ranks * n, np.int32), np.zeros((layout.ranks * n, places, words), np.uint32)
        arguments = cache, *_shapes(rows, layout)
        programs[n, places] = Program(set_allowed_tokens, arguments, static={"layout": layout})
    return programs


def mask_programs(cfg: ModelConfig, cache_cfg: CacheConfig, buckets: Buckets) -> list[tuple[int, int]]:
    """Rows, and places with masks of their own, of each program of `set_allowed_tokens`."""
    return [*itertools.product(buckets.masks, sorted({1, mask_places(cfg, cache_cfg)}))]


def moving_experts(
    cfg: ModelConfig, expert_slots: int | None, draft_expert_slots: int | None
) -> dict[str, tuple[int, int, int]]:
    """Layers, experts and slots of a rank, by the placement that says where the experts are; of those that move."""
    sizes = {
        "placement": (cfg.num_hidden_layers, cfg.n_routed_experts, expert_slots),
        "draft_placement": (cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts, draft_expert_slots),
    }
    return {name: (layers, experts, slots) for name, (layers, experts, slots) in sizes.items() if slots is not None}


def compile_programs(
    lowered: Mapping[ProgramKey, Callable[[], jax.stages.Lowered]], progress: bool = True
) -> dict[ProgramKey, Any]:
    """Compiles what the functions lower, several programs at a time.

    They are lowered one after the other: kernels carry numbers in the order of their lowering, and a persistent cache
    finds a program again only if these are the same.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        futures = {key: pool.submit(lower().compile) for key, lower in lowered.items()}
        waiting = tqdm(futures.items(), desc="compiling", unit="program", disable=not progress)
        return {key: future.result() for key, future in waiting}


class Programs:
    """The programs of an engine for a model, compiled from shapes alone: weights need not be loaded.

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
        compiled: Mapping[ProgramKey, Any] | None = None,
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
          compiled: the programs, from `dsv4jax.export`; then nothing is traced and nothing compiled.
        """
        self.cfg, self.cache_cfg, self.buckets, self.numerics = cfg, cache_cfg, buckets, numerics
        self.layout, self.tables, self._token_map = layout, tables, token_map
        self._nothing = {b: self.batch([], b) for b in buckets.steps}
        # Until they are measured, all totals cost the same: then every draft that may be accepted is verified.
        self._step_seconds = {b: equal_costs(b) for b in buckets.verify}
        self._forced = {} if forced_acceptance is None else {"forced_acceptance": forced_acceptance}
        if compiled is None:
            listed = list_programs(
                cfg, cache_cfg, buckets, numerics, layout, tables, token_map, params, expert_slots, draft_expert_slots
            )
            for bucket in buckets.verify:
                options = {**listed[bucket].options, **self._forced}
                listed[bucket] = dataclasses.replace(listed[bucket], options=options)
            compiled = compile_programs({key: program.lower for key, program in listed.items()}, progress)
        self._compiled = dict(compiled)
        self.mask_places = mask_places(cfg, cache_cfg)
        analyses = [program.memory_analysis() for program in self._compiled.values()]
        self.workspace_bytes = max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    @property
    def compiled(self) -> Mapping[ProgramKey, Any]:
        """Every program."""
        return self._compiled

    def step(self, bucket: Bucket) -> Callable[..., tuple[Cache, Any]]:
        """The program of a bucket: of (params, cache, batch), with slots for experts also of `placement_names`."""
        program = self._compiled[bucket]
        costs = self._step_seconds.get(bucket)
        return program if costs is None else functools.partial(program, step_seconds=costs, **self._forced)

    def set_costs(self, times: DecodeTimes) -> None:
        """Sets what steps of a program with drafts cost, by which they choose how many drafts to verify.

        Of several processes all must set the same: each rank chooses by what its own process was given.

        Raises:
          ValueError: there is no such program.
        """
        bucket = DecodeBucket(times.requests, times.pages, tokens_per_request=1 + times.drafts)
        if bucket not in self._step_seconds:
            raise ValueError(
                f"no verify bucket is of {times.requests} requests with {times.drafts} drafts over {times.pages} pages"
            )
        self._step_seconds[bucket] = times.seconds

    def batch(self, requests: Sequence[Any], bucket: Bucket) -> StepBatch | SpeculativeBatch:
        """A rank's batch: of `PrefillChunk`s, of `DecodeTokens`, or with drafts of `SpeculativeRequest`s."""
        return make_batch(self.cfg, self.cache_cfg, requests, bucket, self.tables, self._token_map)

    def nothing(self, bucket: Bucket) -> StepBatch | SpeculativeBatch:
        """The batch of a rank without work."""
        return self._nothing[bucket]

    def start_rows(self, rows: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
        """Arguments of `start_request` after the cache, from those of each rank."""
        return start_rows(rows, self.layout)

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


def make_batch(
    cfg: ModelConfig,
    cache_cfg: CacheConfig,
    requests: Sequence[Any],
    bucket: Bucket,
    tables: EngramTables | None = None,
    token_map: np.ndarray | None = None,
) -> StepBatch | SpeculativeBatch:
    """A rank's batch, see `Programs.batch`."""
    if isinstance(bucket, DraftBucket):
        # Its requests run no token, so that they need no pages.
        return speculative_batch(cfg, cache_cfg, requests, DecodeBucket(bucket.requests, pages=1))
    if isinstance(bucket, DecodeBucket) and bucket.tokens_per_request > 1:
        return speculative_batch(cfg, cache_cfg, requests, bucket)
    make = prefill_batch if isinstance(bucket, PrefillBucket) else decode_batch
    batch = make(cfg, cache_cfg, requests, bucket)
    # With the Engram rows of its tokens, if the tables are on the host.
    return batch if tables is None else with_engram_rows(cfg, batch, token_map, tables)


def batch_shapes(
    cfg: ModelConfig,
    cache_cfg: CacheConfig,
    bucket: Bucket,
    layout: Layout,
    tables: EngramTables | None = None,
    token_map: np.ndarray | None = None,
) -> StepBatch | SpeculativeBatch:
    """Shapes and shardings of the batch of all ranks in a bucket."""
    nothing = make_batch(cfg, cache_cfg, [], bucket, tables, token_map)
    return _shapes(concatenate_batches([nothing] * layout.ranks), layout)


def start_rows(rows: Sequence[tuple[np.ndarray, ...]], layout: Layout) -> tuple[np.ndarray, ...]:
    """Arguments of `start_request` after the cache, from those of each rank."""
    return rows[0] if layout.mesh is None else tuple(map(np.stack, zip(*rows, strict=True)))


def equal_costs(bucket: DecodeBucket) -> np.ndarray:
    """Costs of steps with drafts by which every total of verified tokens costs the same."""
    return np.ones(bucket.requests * bucket.tokens_per_request + 1, np.float32)


def cost_table(bucket: DecodeBucket, seconds: Mapping[int, float]) -> np.ndarray:
    """Seconds of steps of a bucket by the tokens that a rank runs, from those of some numbers of tokens, ascending."""
    totals = np.arange(bucket.requests * bucket.tokens_per_request + 1)
    return np.interp(totals, [*seconds], [*seconds.values()]).astype(np.float32)


def step_function(bucket: Bucket) -> Any:
    """The step that runs in a bucket."""
    if isinstance(bucket, PrefillBucket):
        return prefill_step
    if isinstance(bucket, DraftBucket):
        return draft_step
    return speculative_step if bucket.tokens_per_request > 1 else decode_step


def _lower(function: Any, *args: Any, **static: Any) -> Any:
    return function.lower(*args, **static)


def _check_prefill_tokens(cfg: ModelConfig, buckets: Buckets, layout: Layout, expert_slots: int | None) -> None:
    """Raises ValueError for a bucket that is too large for the experts of a device, which may be sent all its tokens by
    every rank."""
    number = expert_slots or ceil_div(cfg.n_routed_experts, layout.expert_devices)
    ranks = layout.ranks * layout.emulated_ranks
    most = most_tokens(cfg.num_experts_per_tok, number, cfg.hidden_size, cfg.moe_intermediate_size)
    for bucket in buckets.prefill:
        if ranks * bucket.tokens > most:
            raise ValueError(
                f"prefill_tokens = {bucket.tokens}: must be at most {most // ranks}, so that the expert kernels can"
                f" address the rows of {ranks} ranks together"
            )


def _placement_shapes(layout: Layout, layers: int, experts: int, slots: int) -> ExpertPlacement:
    one = placement_from_owners(initial_owners(1, experts, layout.ranks, slots), experts, layout.ranks)

    def of_all_layers(a: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, *a.shape[1:]), a.dtype, sharding=layout.on_all)

    return jax.tree.map(of_all_layers, one)


def _shapes(arrays: Any, layout: Layout) -> Any:
    """Shapes of arrays that hold the parts of all ranks along axis 0."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.by_rank), arrays)
