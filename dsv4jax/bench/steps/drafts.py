"""Steps with drafts to time, with synthetic acceptance, beside plain decode steps of the same requests."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    SpeculativeBatch,
    SpeculativeRequest,
    decode_batch,
    speculative_batch,
)
from dsv4jax.bench.steps.cases import PAGE, cache_shapes, time_step
from dsv4jax.bench.steps.random_state import random_cache
from dsv4jax.cache import Cache, CacheConfig, DraftNoise
from dsv4jax.config import ModelConfig
from dsv4jax.draft_counts import StepCosts
from dsv4jax.draft_statistics import BINS, DraftStatistics, step_statistics
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import decode_step
from sharding import Layout

_step_statistics = jax.jit(step_statistics)
_WARM_UP = 2  # steps before those that are timed


@dataclasses.dataclass(frozen=True)
class SpeculativeRun:
    """What steps with drafts took and gave, per step."""

    seconds: float
    tokens: float
    """Chosen, of all requests."""
    expected_tokens: float | None
    """As many as the law of acceptance gives on average for the drafts that were verified; None without a law."""
    verified: float
    """Drafts, of all requests."""
    statistics: DraftStatistics
    """Of all steps together."""


@dataclasses.dataclass(frozen=True)
class DraftCase:
    """Requests behind a long context that decode in several ways.

    The ways are `plain` (a cache without drafts), `draft` (a draft round alone), a number of drafts, and `adaptive`.

    Args:
      fixed: numbers of drafts; adaptive steps verify up to the largest.
      steps: timed ones of a run, at most; pages are for so many.
    """

    cfg: ModelConfig
    numerics: Numerics
    layout: Layout
    requests: int
    context: int
    fixed: tuple[int, ...]
    noise: DraftNoise
    temperature: float
    steps: int

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of the programs."""
        return ("plain", "draft", *map(str, self.fixed), "adaptive")

    def width(self, way: str) -> int:
        """Tokens that a request runs at most."""
        return 1 if way == "plain" else 1 + (int(way) if way.isdecimal() else max(self.fixed))

    def lower(self, way: str, params: Params) -> jax.stages.Lowered:
        """The program of a way."""
        static: dict[str, Any] = dict(cfg=self.cfg, numerics=self.numerics, layout=self.layout)
        cache = cache_shapes(self.cfg, self._cache_cfg(way != "plain"), self.numerics)
        if way == "plain":
            return decode_step.lower(params, cache, self._plain_batch(), **static)
        batch = self._batch(way)
        if way == "draft":
            return draft_step.lower(params, cache, batch, **static)
        given = {"forced_acceptance": np.ones(batch.tile - 1, np.float32)}
        if way == "adaptive":
            given["step_seconds"] = np.ones(self.requests * batch.tile + 1, np.float32)
        return speculative_step.lower(params, cache, batch, **given, **static)

    def plain_seconds(self, program: Any, params: Params) -> float:
        """A plain decode step."""
        cache = random_cache(self.cfg, self._cache_cfg(False), self.numerics)
        return time_step(program, params, cache, self._plain_batch(), self.steps)[1]

    def draft_seconds(self, program: Any, params: Params) -> float:
        """A draft round."""
        return time_step(program, params, self._cache(), self._batch("draft"), self.steps)[1]

    def speculate(
        self,
        program: Any,
        params: Params,
        way: str,
        law: np.ndarray,
        step_seconds: np.ndarray | None = None,
        drafts: int | None = None,
    ) -> SpeculativeRun:
        """Steps of the program of a way.

        Args:
          law: acceptance of each draft given those before it; negative ones leave it to the model.
          step_seconds: what `adaptive` chooses by.
          drafts: in an adaptive program, a number that is verified whatever it costs.
        """
        tile = self.width(way)
        batch = jax.device_put(self._batch(way, drafts))
        given = {"forced_acceptance": jnp.asarray(law[: tile - 1], jnp.float32)}
        if way == "adaptive":
            default = np.ones(self.requests * tile + 1, np.float32)
            given["step_seconds"] = jnp.asarray(default if step_seconds is None else step_seconds)
        cache, outputs = self._cache(), []
        for step in range(_WARM_UP + self.steps):
            if step == _WARM_UP:
                jax.block_until_ready(cache)
                begin = time.perf_counter()
            cache, output = program(params, cache, batch, **given)
            outputs.append((output.confidences, output.verified, output.counts))
        jax.block_until_ready(cache)
        seconds = (time.perf_counter() - begin) / self.steps
        # As if all were requests of one step.
        confidences, verified, counts = map(np.concatenate, zip(*jax.device_get(outputs[_WARM_UP:]), strict=True))
        statistics = _step_statistics(confidences, verified, counts - 1, counts > 0)
        expected = None if np.any(law < 0) else expected_tokens(law, self.requests, statistics.verified, self.steps)
        return SpeculativeRun(
            seconds=seconds,
            tokens=float(counts.sum()) / self.steps,
            expected_tokens=expected,
            verified=float(verified.sum()) / self.steps,
            statistics=statistics,
        )

    def loads(self, program: Any, params: Params) -> dict[str, Int[np.ndarray, "steps layers experts"]]:
        """Tokens that each expert of the target and of the draft gets in each of `steps` steps with most drafts.

        Args:
          program: of the largest fixed number of drafts; the model decides which stand.
        """
        way = str(max(self.fixed))
        batch, found = jax.device_put(self._batch(way)), []
        law, cache = jnp.full(max(self.fixed), -1, jnp.float32), self._cache()
        for _ in range(self.steps):
            cache, output = program(params, cache, batch, forced_acceptance=law)
            found.append((output.expert_load, output.draft.expert_load))
        target, draft = (np.stack(loads) for loads in zip(*jax.device_get(found), strict=True))
        return {"target": target, "draft": draft}

    def costs(self, program: Any, params: Params, law: np.ndarray, draft_seconds: float) -> StepCosts:
        """What steps of the adaptive program take by the tokens that they verify, the same number for each request."""
        seconds = [
            self.speculate(program, params, "adaptive", law, drafts=drafts).seconds
            for drafts in range(self.width("adaptive"))
        ]
        return StepCosts(
            tokens=tuple(self.requests * (1 + drafts) for drafts in range(len(seconds))),
            verify_seconds=tuple(max(one - draft_seconds, 1e-9) for one in seconds),
            draft_seconds=draft_seconds,
        )

    @property
    def _end(self) -> int:
        """Where requests end: no run gets there."""
        return self.context + (_WARM_UP + self.steps + 1) * (1 + max(self.fixed))

    def _sampling(self, slot: int) -> RequestSampling:
        # With one seed for all, their drafts would stand or fall together.
        return RequestSampling(temperature=self.temperature, seed=1 + slot)

    def _pages(self, slot: int) -> range:
        pages = ceil_div(self._end, PAGE)
        return range(slot * pages, (slot + 1) * pages)

    def _cache_cfg(self, drafts: bool) -> CacheConfig:
        pages = self.requests * len(self._pages(0))
        return CacheConfig(self.requests, pages, PAGE, drafts=self.noise if drafts else None)

    def _cache(self) -> Cache:
        """Random records, and requests whose newest token stands behind the context."""
        cache = random_cache(self.cfg, self._cache_cfg(True), self.numerics)
        drafts, slots = cache.drafts, self.requests
        drafts = drafts.replace(
            positions=jnp.full(slots, self.context, jnp.int32),
            counts=jnp.full(slots, self.cfg.dspark_block_size, jnp.int32),
            tokens=jax.random.randint(jax.random.key(0), drafts.tokens.shape, 3, self.cfg.vocab_size),
        )
        return cache.replace(drafts=drafts)

    def _plain_batch(self) -> Any:
        rows = [
            DecodeTokens([17 + slot], self.context, slot, self._pages(slot), self._sampling(slot))
            for slot in range(self.requests)
        ]
        bucket = DecodeBucket(self.requests, len(self._pages(0)))
        return decode_batch(self.cfg, self._cache_cfg(False), rows, bucket)

    def _batch(self, way: str, drafts: int | None = None) -> SpeculativeBatch:
        tile = self.width(way)
        most, least = (tile - 1, 0 if way == "adaptive" else tile - 1) if drafts is None else (drafts, drafts)
        rows = [
            SpeculativeRequest(slot, self._pages(slot), self._end, most, least, self._sampling(slot))
            for slot in range(self.requests)
        ]
        return speculative_batch(
            self.cfg, self._cache_cfg(True), rows, DecodeBucket(self.requests, len(self._pages(0)), tile)
        )


def expected_tokens(law: np.ndarray, requests: int, verified: Int[np.ndarray, "drafts"], steps: int) -> float:
    """Tokens of a step by a law of acceptance, which steps do not know but through confidences.

    The tokens that came differ from this by chance alone, in a few steps by much more than ways to decode differ.

    Args:
      verified: drafts that `steps` steps of so many requests verified, by place.
    """
    return requests + float(np.asarray(verified)[: len(law)] @ np.cumprod(law, dtype=np.float64)) / steps


def reliability(statistics: DraftStatistics) -> list[dict[str, Any]]:
    """Reliability table of the confidence head, a row per bin with drafts in it.

    `survival` is the bin, `predicted` the mean survival there, that is the probability that a draft and all before it
    stand, and `accepted` the share that stood: they are equal for a head that knows. Where drafts are chosen by their
    confidences, only those that were chosen count.
    """
    verified, accepted = np.asarray(statistics.bin_verified), np.asarray(statistics.bin_accepted)
    predicted = np.asarray(statistics.predicted)
    return [
        {
            "survival": f"{i / BINS:.1f} to {(i + 1) / BINS:.1f}",
            "drafts": int(verified[i]),
            "predicted": float(predicted[i] / verified[i]),
            "accepted": float(accepted[i] / verified[i]),
        }
        for i in range(BINS)
        if verified[i]
    ]


def acceptance(statistics: DraftStatistics) -> list[dict[str, Any]]:
    """Acceptance by place of a draft, a row per place that was verified.

    `accepted` is the share of those that stood, and all before them; `given_earlier` of those whose earlier drafts did.
    """
    verified, accepted = np.asarray(statistics.verified), np.asarray(statistics.accepted)
    rows = []
    for i in np.flatnonzero(verified):
        # Drafts are verified with all before them: so many had their earlier ones accepted, of more verified at i - 1.
        before = verified[i] if i == 0 else accepted[i - 1] * verified[i] / verified[i - 1]
        rows.append(
            {
                "position": int(i) + 1,
                "drafts": int(verified[i]),
                "accepted": float(accepted[i] / verified[i]),
                "given_earlier": float(accepted[i] / before) if before else None,
            }
        )
    return rows
