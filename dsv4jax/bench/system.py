"""What is measured: engines on the simulated executor, or on a model whose programs are compiled once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsv4jax.bench.random_state import random_cache, random_params
from dsv4jax.cache import Cache, CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config, shape_buckets
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.records import Observer, RequestRecord, StepRecord
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import AcceptanceModel, CostModel, SimulatedExecutor, constant_tokens
from dsv4jax.numerics import Numerics
from dsv4jax.quant import ceil_div

PAGE = 64
_EOS = 1
_VOCABULARY = 1000  # of simulated prompts
_RELEASED_REPLAY = ReplayRule(window=128, layers=40)


class Silent(Observer):
    """Keeps nothing."""

    def step(self, record: StepRecord) -> None:
        pass

    def request(self, record: RequestRecord) -> None:
        pass

    def rejected(self, reason: str) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of an engine; those of cache and steps are of one rank.

    Args:
      pages: None for as many as all slots need at full length.
      drafts: most drafts that a request verifies in a step; 0 for plain decoding.
    """

    ranks: int = 1
    slots: int = 16
    max_model_len: int = 16384
    prefill_tokens: int = 2048
    prefill_requests: int = 8
    pages: int | None = None
    drafts: int = 0

    @property
    def pages_or_default(self) -> int:
        return self.slots * (ceil_div(self.max_model_len, PAGE) + 1) if self.pages is None else self.pages


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """Makes engines that differ in policy alone.

    Args:
      config: of their schedulers.
      empty_executor: an executor that holds nothing; of a model always the same one, which forgets what it held.
      vocab_size: of prompts.
      name: of the model, for conditions.
    """

    config: SchedulerConfig
    empty_executor: Callable[[], Executor]
    vocab_size: int
    name: str
    programs: Programs | None = None
    params: Any = None

    def engine(
        self, *, inside: Callable[[Executor], Executor] | None = None, depth: int = 2, **policy: Any
    ) -> tuple[Engine, Executor]:
        """An engine and the executor whose clock counts.

        Args:
          inside: makes the engine's executor from the one that works.
          depth: see `Engine`.
          policy: fields of `SchedulerConfig`.
        """
        executor = self.empty_executor()
        scheduler = Scheduler(dataclasses.replace(self.config, **policy))
        return Engine(scheduler, inside(executor) if inside else executor, Silent(), depth), executor

    def prompt(self, *seed: int, tokens: int) -> np.ndarray:
        """Random ids, the same for the same seed."""
        return np.random.default_rng(seed).integers(3, self.vocab_size, tokens).astype(np.int32)


def simulated_system(sizes: Sizes, cost: CostModel, acceptance: AcceptanceModel | None = None, **policy: Any) -> System:
    """On the virtual clock, with the window and the depth of the released model."""
    config = SchedulerConfig(
        slots=sizes.slots,
        pages=sizes.pages_or_default,
        max_model_len=sizes.max_model_len,
        eos_id=_EOS,
        replay=_RELEASED_REPLAY,
        ranks=sizes.ranks,
        page_size=PAGE,
        prefill_tokens=sizes.prefill_tokens,
        prefill_requests=sizes.prefill_requests,
        drafts=sizes.drafts,
        **policy,
    )
    tokens = constant_tokens(100)
    return System(config, lambda: SimulatedExecutor(cost, tokens, acceptance), _VOCABULARY, "simulated")


def model_system(
    cfg: ModelConfig,
    sizes: Sizes,
    numerics: Numerics,
    *,
    checkpoint: Path | None,
    random_contents: bool = False,
    forced_acceptance: np.ndarray | None = None,
    progress: bool = True,
    **policy: Any,
) -> System:
    """Compiles a model over as many devices as there are ranks.

    Args:
      checkpoint: of the weights; None for random ones.
      random_contents: the cache holds random records from the beginning.
      forced_acceptance: see `Programs`.

    Raises:
      ValueError: sizes that are not possible.
    """
    if sizes.max_model_len > cfg.max_position_embeddings:
        raise ValueError(f"max_model_len = {sizes.max_model_len}: the model's context is {cfg.max_position_embeddings}")
    cache_cfg = CacheConfig(
        slots=sizes.slots,
        pages=sizes.pages_or_default,
        page_size=PAGE,
        slack=max(CacheConfig.slack, 1 + sizes.drafts),
        drafts="shared" if sizes.drafts else None,
    )
    buckets = shape_buckets(
        cache_cfg,
        prefill_tokens=[sizes.prefill_tokens],
        prefill_requests=sizes.prefill_requests,
        decode_requests=[sizes.slots],
        contexts=[sizes.max_model_len],
        replay="bounded",
        deterministic=False,
        drafts=sizes.drafts,
    )
    # No request asks for prompt log-probabilities.
    buckets = dataclasses.replace(buckets, prefill=tuple(b for b in buckets.prefill if not b.prompt_logprobs))
    preset = "single" if sizes.ranks == 1 else "decode_dep"
    options = dict(preset=preset, devices=sizes.ranks, replay="bounded", drafts=sizes.drafts)
    shape = EngineShape(cache_cfg, buckets, numerics, sizes.max_model_len, **options)
    layout = shape.layout
    if checkpoint is None:
        params = random_params(cfg, numerics, layout)
    else:
        params = load_engine_params(checkpoint, cfg, shape, layout, progress=progress)
    kind = _FilledPrograms if random_contents else Programs
    compiled = dict(params=params, forced_acceptance=forced_acceptance, progress=progress)
    programs = kind(cfg, cache_cfg, buckets, numerics, layout, **compiled)
    executor = JaxExecutor(params, programs)
    executor.warm_up(progress=progress)

    def emptied() -> Executor:
        executor.reset()
        return executor

    config = scheduler_config(cfg, shape, _EOS, **policy)
    name = f"random weights, {cfg.num_hidden_layers} layers" if checkpoint is None else checkpoint.resolve().name
    return System(config, emptied, cfg.vocab_size, name, programs, params)


class _FilledPrograms(Programs):
    """Programs whose caches hold random records."""

    @property
    def init_cache(self) -> Callable[[], Cache]:
        return lambda: random_cache(self.cfg, self.cache_cfg, self.numerics, self.layout)
