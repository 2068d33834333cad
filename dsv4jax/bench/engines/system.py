"""What is measured: engines on the simulated executor, or on a model whose programs are compiled once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv4jax.bench.steps.cases import PAGE
from dsv4jax.bench.steps.random_state import random_cache, random_params
from dsv4jax.bench.traffic.records import StepRecords
from dsv4jax.cache import Cache, CacheConfig
from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.records import StepRecord
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import (
    AcceptanceModel,
    ConfidenceModel,
    CostModel,
    SimulatedExecutor,
    constant_tokens,
)
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.packing import pack_params
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from sharding import Layout, preset

_EOS = 1
_TILE = 16
_VOCABULARY = 1000  # of simulated prompts
_RELEASED_REPLAY = ReplayRule(window=128, layers=40)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of an engine; those of cache and steps are of one rank.

    Args:
      pages: None for as many as all slots need at full length.
      contexts, decode_requests: of a model, sizes of programs besides the largest.
      drafts: most drafts that a request verifies in a step; 0 for plain decoding.
      fewer_drafts: of a model with drafts, smaller numbers that have programs too; 0 for plain decoding, without which
        every step drafts.
    """

    ranks: int = 1
    slots: int = 16
    max_model_len: int = 16384
    prefill_tokens: int = 2048
    prefill_requests: int = 8
    pages: int | None = None
    drafts: int = 0
    contexts: tuple[int, ...] = ()
    decode_requests: tuple[int, ...] = ()
    fewer_drafts: tuple[int, ...] = ()

    @property
    def pages_or_default(self) -> int:
        return self.slots * (ceil_div(self.max_model_len, PAGE) + 1) if self.pages is None else self.pages

    def check(self, cfg: ModelConfig) -> None:
        """Raises ValueError for sizes that a model cannot have."""
        if self.max_model_len > cfg.max_position_embeddings:
            raise ValueError(
                f"max_model_len = {self.max_model_len}: the model's context is {cfg.max_position_embeddings}"
            )
        if self.drafts > cfg.dspark_block_size:
            raise ValueError(f"drafts = {self.drafts}: the model's draft makes at most {cfg.dspark_block_size}")


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """Makes engines that differ in policy alone.

    Args:
      config: of their schedulers.
      empty_executor: an executor that holds nothing; of a model always the same one, which forgets what it held.
      vocab_size: of prompts.
      name: of the model, for conditions.
      programs, params: of a model.
      close: ends what the executor does besides, when it is no longer needed.
    """

    config: SchedulerConfig
    empty_executor: Callable[[], Executor]
    vocab_size: int
    name: str
    programs: Programs | None = None
    params: Params | None = None
    close: Callable[[], None] = lambda: None

    def engine(
        self,
        *,
        scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
        inside: Callable[[Executor], Executor] | None = None,
        depth: int = 2,
        **policy: Any,
    ) -> tuple[Engine, Executor]:
        """An engine, whose observer is a `StepRecords`, and the executor whose clock counts.

        Args:
          inside: makes the engine's executor from the one that works.
          depth: see `Engine`.
          policy: fields of `SchedulerConfig`.
        """
        executor = self.empty_executor()
        made = scheduler(dataclasses.replace(self.config, **policy))
        records = StepRecords(executor.now)
        return Engine(made, inside(executor) if inside else executor, records, depth), executor

    def prompt(self, *seed: int, tokens: int) -> np.ndarray:
        """Random ids, the same for the same seed."""
        return np.random.default_rng(seed).integers(3, self.vocab_size, tokens).astype(np.int32)


def simulated_system(
    sizes: Sizes,
    cost: CostModel,
    acceptance: AcceptanceModel | None = None,
    confidences: ConfidenceModel | None = None,
    **policy: Any,
) -> System:
    """On the virtual clock, with the window and the depth of the released model."""
    config = _scheduler_config(sizes, _RELEASED_REPLAY, **policy)

    def executor() -> Executor:
        return SimulatedExecutor(cost, constant_tokens(100), acceptance, sizes.drafts, confidences)

    return System(config, executor, _VOCABULARY, "simulated")


def model_system(
    params: Params,
    cfg: ModelConfig,
    sizes: Sizes,
    numerics: Numerics,
    layout: Layout,
    *,
    name: str = "",
    random_contents: bool = False,
    forced_acceptance: np.ndarray | None = None,
    progress: bool = True,
    **policy: Any,
) -> System:
    """Compiles a model over the devices of a layout and runs every program once.

    Args:
      params: on these devices, packed if `numerics` want it.
      random_contents: the cache holds random records from the beginning.
      forced_acceptance: see `Programs`.

    Raises:
      ValueError: sizes that are not possible.
    """
    if sizes.ranks != layout.ranks:
        raise ValueError(f"ranks = {sizes.ranks}: the layout has {layout.ranks}")
    replay = ReplayRule(cfg.sliding_window, cfg.num_hidden_layers)
    config = _scheduler_config(sizes, replay, tile=_TILE, **policy)
    sizes.check(cfg)
    cache_cfg = CacheConfig(
        slots=sizes.slots,
        pages=sizes.pages_or_default,
        page_size=PAGE,
        slack=max(CacheConfig.slack, 1 + sizes.drafts),
        drafts="shared" if sizes.drafts else None,
    )
    buckets = make_buckets(
        cache_cfg,
        prefill_tokens=[sizes.prefill_tokens],
        prefill_requests=sizes.prefill_requests,
        decode_requests=sorted({*sizes.decode_requests, sizes.slots}),
        contexts=sorted({*sizes.contexts, sizes.max_model_len}),
        bounded=True,
        prompt_logprobs=False,
        tile=_TILE,
        drafts=sizes.drafts,
        fewer_drafts=[drafts for drafts in sizes.fewer_drafts if drafts],
    )
    if sizes.drafts and 0 not in sizes.fewer_drafts:
        buckets = dataclasses.replace(buckets, decode=())
    kind = _FilledPrograms if random_contents else Programs
    programs = kind(
        cfg,
        cache_cfg,
        buckets,
        numerics,
        layout,
        params=params,
        forced_acceptance=forced_acceptance,
        progress=progress,
    )
    executor = JaxExecutor(params, programs)
    executor.warm_up(progress=progress)

    def emptied() -> Executor:
        executor.reset()
        return executor

    return System(config, emptied, cfg.vocab_size, name, programs, params, executor.close)


def load_system(
    path: Path, sizes: Sizes, implementation: str | None, *, random_weights: bool = False, **options: Any
) -> System:
    """`model_system` of a checkpoint over the first devices, with the rounding of its specification on a CPU.

    Args:
      implementation: see `with_implementation`.
      random_weights: the directory has a config.json only.

    Raises: as `model_system`, `load_params` and `pack_params`.
    """
    cfg = ModelConfig.from_checkpoint(path)
    sizes.check(cfg)
    numerics = REFERENCE if jax.default_backend() == "cpu" else FAST
    numerics, _ = with_implementation(numerics, implementation, cfg, PAGE)
    layout = preset("single" if sizes.ranks == 1 else "decode_dep", sizes.ranks)
    if random_weights:
        params = random_params(cfg, numerics, layout)
    else:
        params = load_params(path, cfg, layout)
        if numerics.implementation == "pallas":
            params = pack_params(params, layout)
    name = path.resolve().name + random_weights * ", random weights"
    return model_system(params, cfg, sizes, numerics, layout, name=name, **options)


def _scheduler_config(sizes: Sizes, replay: ReplayRule, **policy: Any) -> SchedulerConfig:
    return SchedulerConfig(
        slots=sizes.slots,
        pages=sizes.pages_or_default,
        max_model_len=sizes.max_model_len,
        eos_id=_EOS,
        replay=replay,
        ranks=sizes.ranks,
        page_size=PAGE,
        prefill_tokens=sizes.prefill_tokens,
        prefill_requests=sizes.prefill_requests,
        drafts=sizes.drafts,
        **policy,
    )


def finish_prefill(engine: Engine) -> None:
    """Steps until every request decodes."""
    while engine.scheduler.waiting or any(rank.prefilling for rank in engine.scheduler.ranks):
        engine.step()


def decode_together(
    engine: Engine, executor: Executor, requests: int, settling: int, steps: int
) -> tuple[float, list[StepRecord]]:
    """Seconds of a step in which all of so many requests of an engine of a `System` decode, and its records so far.

    Args:
      executor: whose clock counts.
      settling: steps that all decode in, before those that are timed.
      steps: that are timed, the last ones of the records.

    Raises:
      RuntimeError: not all requests ran at once.
    """
    finish_prefill(engine)
    for _ in range(settling):
        engine.step()
    begin = executor.now()
    for _ in range(steps):
        engine.step()
    seconds, records = (executor.now() - begin) / steps, engine.observer.steps
    if wrong := [r.decode_requests for r in records[-steps:] if r.decode_requests != requests]:
        raise RuntimeError(f"a step decoded {wrong[0]} of {requests} requests: not all ran at once")
    return seconds, records


class _FilledPrograms(Programs):
    """Programs whose caches hold random records."""

    @property
    def init_cache(self) -> Callable[[], Cache]:
        return lambda: random_cache(self.cfg, self.cache_cfg, self.numerics, self.layout)
