"""Prefill of whole prompts in chunks, with each optimisation alone and one after the other."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dsv4jax.batch import StepBatch, prefill_batch, with_engram_rows
from dsv4jax.bench.results.result import Row
from dsv4jax.bench.steps.cases import PAGE, cache_shapes, prefill_bucket, prefill_chunks
from dsv4jax.bench.steps.random_state import RandomHostTables, random_cache
from dsv4jax.bench.steps.replacement import without_own_topk
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.steps import prefill_step
from sharding import Layout

OPTIMISATIONS = ("decoder_cut", "tables_on_device", "own_topk")
"""In the order in which they are added: the decoder half on the end of the prompt only; Engram tables on the device
instead of host memory; `topk` instead of XLA's sort, which makes no difference without kernels."""
ALL = frozenset(OPTIMISATIONS)


def setups() -> list[frozenset[str]]:
    """None, each alone, and cumulatively in their order up to all."""
    alone = [frozenset({one}) for one in OPTIMISATIONS]
    return [frozenset(), *alone, *(frozenset(OPTIMISATIONS[:n]) for n in range(2, len(OPTIMISATIONS) + 1))]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptCase:
    """The `new` last tokens of a prompt in chunks; `cached` ones before them are in the cache."""

    new: int
    cached: int
    chunk: int
    optimisations: frozenset[str]

    @property
    def names(self) -> dict[str, Any]:
        """What tells it from others."""
        sizes = {"new": self.new, "cached": self.cached, "chunk": self.chunk}
        added = [one for one in OPTIMISATIONS if one in self.optimisations]
        return sizes | {"optimisations": " + ".join(added).replace("_", " ") or "none"}

    @property
    def _cache_cfg(self) -> CacheConfig:
        return CacheConfig(slots=1, pages=ceil_div(self.cached + self.new, PAGE), page_size=PAGE)

    def batches(self, params: Params, cfg: ModelConfig, host_tables: RandomHostTables) -> Iterator[StepBatch]:
        """One for each chunk."""
        replay = "bounded" if "decoder_cut" in self.optimisations else "exact"
        bucket = prefill_bucket(min(self.chunk, self.new), self._cache_cfg.pages, replay)
        token_map = np.asarray(params["engram_token_map"])
        for one in prefill_chunks(cfg, self.new, self.cached, self.chunk):
            batch = prefill_batch(cfg, self._cache_cfg, [one], bucket)
            on_device = "tables_on_device" in self.optimisations
            yield batch if on_device else with_engram_rows(cfg, batch, token_map, host_tables)

    def lower(
        self, params: Params, cfg: ModelConfig, numerics: Numerics, layout: Layout, host_tables: RandomHostTables
    ) -> jax.stages.Lowered:
        """The program of every chunk."""
        cache = cache_shapes(cfg, self._cache_cfg, numerics)
        with contextlib.nullcontext() if "own_topk" in self.optimisations else without_own_topk():
            batch = next(self.batches(params, cfg, host_tables))
            given = self._given(params, cfg)
            return prefill_step.lower(given, cache, batch, cfg=cfg, numerics=numerics, layout=layout)

    def measure(
        self, program: Any, params: Params, cfg: ModelConfig, numerics: Numerics, host_tables: RandomHostTables
    ) -> dict[str, Any]:
        """Seconds of all chunks, of the second time that they run."""
        if isinstance(program, Exception):
            raise program
        cache, given = random_cache(cfg, self._cache_cfg, numerics), self._given(params, cfg)
        for _ in range(2):
            begin = time.perf_counter()
            for batch in self.batches(params, cfg, host_tables):
                cache, output = program(given, cache, batch)
            jax.block_until_ready(output.tokens)
            seconds = time.perf_counter() - begin
        switches = {one: one in self.optimisations for one in OPTIMISATIONS}
        return switches | {"seconds": seconds, "tokens_per_second": self.new / seconds}

    def _given(self, params: Params, cfg: ModelConfig) -> Params:
        return params if "tables_on_device" in self.optimisations else _without_tables(params, cfg)


def prompt_cases(new: int, cached: int, chunks: Sequence[int]) -> list[PromptCase]:
    """Every setup in chunks of the first size, and all optimisations together in chunks of the others."""
    first = [PromptCase(new, cached, chunks[0], setup) for setup in setups()]
    return first + [PromptCase(new, cached, chunk, ALL) for chunk in chunks[1:]]


def prompt_verdicts(rows: Sequence[Row]) -> list[str]:
    """What each optimisation of a prompt gains alone, and what all do together; by the medians of repeats."""
    found: dict[tuple, dict[tuple, list[float]]] = {}
    for row in rows:
        if "seconds" in row:
            setup = tuple(one for one in OPTIMISATIONS if row[one])
            found.setdefault((row["new"], row["cached"], row["chunk"]), {}).setdefault(setup, []).append(row["seconds"])
    lines = []
    for (new, cached, chunk), by_setup in found.items():
        seconds = {setup: statistics.median(repeats) for setup, repeats in by_setup.items()}
        what = f"{new:,} tokens behind {cached:,} in chunks of {chunk:,}"
        if together := seconds.get(OPTIMISATIONS):
            lines.append(f"{what}: {new / together:,.0f} tokens/s with all optimisations")
        if plain := seconds.get(()):
            gains = {" + ".join(setup): plain / one - 1 for setup, one in seconds.items() if setup}
            told = ", ".join(f"{name.replace('_', ' ')} {gain:+.1%}" for name, gain in gains.items())
            lines.append(f"{what}, against none: {told}")
    return lines


def _without_tables(params: Params, cfg: ModelConfig) -> Params:
    layers = dict(params["layers"])
    for i in cfg.engram_layer_ids:
        engram = {name: leaf for name, leaf in layers[i]["engram"].items() if name != "embed"}
        layers[i] = {**layers[i], "engram": engram}
    return {**params, "layers": layers}
