"""Tokens per second of decoding through an engine: fixed numbers of drafts, and steps that choose among programs.

Requests have short prompts and run all at once. The engine runs on a device, or on the simulated executor with the
times that an earlier run has measured: then nothing but the choices of the host is real.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32
from scipy import special

from dsv4jax.bench.system import PAGE, Records, finish_prefill
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import Executor, StepPlan
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import SimulatedExecutor, constant_tokens
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.sampling_settings import RequestSampling
from sharding import Layout

_PROMPT = 32
_TILE = 16
_SETTLING = 40  # steps before those that count: means of what drafts promise settle
_OTHER_STEPS = 20  # of prefill, and some to spare


@dataclasses.dataclass(frozen=True)
class MeasuredTimes:
    """Times of steps between and beyond those that were measured.

    Verification is taken to depend on the tokens that its program has room for, requests and drafts together: linear
    between measurements, and beyond them as between the last two. So is the draft round with the requests.

    Raises ValueError on construction unless both were measured for at least two sizes.
    """

    verify: Mapping[int, float]
    """Seconds by tokens."""
    draft: Mapping[int, float]
    """Seconds by requests."""

    def __post_init__(self):
        for name in ("verify", "draft"):
            if len(getattr(self, name)) < 2:
                raise ValueError(f"{name}: {getattr(self, name)}: needs times of at least two sizes")

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "MeasuredTimes":
        """From the `steps` of a report of `scripts/bench_drafts.py`, the least of what was measured repeatedly."""
        verify: dict[int, list[float]] = {}
        draft: dict[int, list[float]] = {}
        for row in rows:
            if not row["drafts"].isdecimal() or "milliseconds" not in row:
                continue
            drafting = row.get("draft_milliseconds", 0.0)
            verify.setdefault(row["requests"] * (1 + int(row["drafts"])), []).append(row["milliseconds"] - drafting)
            if drafting:
                draft.setdefault(row["requests"], []).append(drafting)
        return cls(*({size: min(times[size]) / 1e3 for size in sorted(times)} for times in (verify, draft)))

    def seconds(self, requests: int, drafts: int) -> float:
        """Of a step of so many requests in the program with room for so many drafts; 0 for the plain one."""
        verify = _at(self.verify, requests * (1 + drafts))
        return verify + _at(self.draft, requests) if drafts else verify

    def programs(self, requests: int, rooms: Sequence[int]) -> list[DecodeTimes]:
        """Of programs of one size, which take the same time whatever they verify."""
        return [
            DecodeTimes(requests, 2**31 - 1, k, np.full(requests * (1 + k) + 1, self.seconds(requests, k), np.float32))
            for k in rooms
        ]


def _at(measured: Mapping[int, float], size: int) -> float:
    """Between the two sizes next to it, or the outermost two; never less than for a smaller measured size."""
    sizes, times = [*measured], np.maximum.accumulate([*measured.values()])
    i = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    slope = (times[i] - times[i - 1]) / (sizes[i] - sizes[i - 1])
    return float(times[i - 1] + slope * (size - sizes[i - 1]))


class SpreadLaw:
    """Acceptance of drafts by a law whose logits move up and down together, request by request and from time to time.

    Confidences know it.

    Args:
      law: probability that each draft is accepted if those before it are.
      spread: standard deviation of the move, in logits; 0 for the law itself.
    """

    def __init__(self, law: Float32[np.ndarray, " drafts"], spread: float, seed: int = 0):
        self._logits, self._spread = special.logit(law), spread
        self._rng = np.random.default_rng(seed)
        self._moves = np.zeros(0)
        self._now = np.zeros((0, len(law)), np.float32)

    def confidences(self, positions: Int32[np.ndarray, " requests"]) -> Float32[np.ndarray, "requests drafts"]:
        """Of the next drafts; a request's move stays for eight steps on average."""
        count = len(positions)
        fresh = self._rng.random(count) < 1 / 8 if len(self._moves) == count else np.ones(count, bool)
        moves = np.resize(self._moves, count) if count else np.zeros(0)
        self._moves = np.where(fresh, self._rng.normal(0, self._spread, count), moves)
        self._now = (self._logits + self._moves[:, None]).astype(np.float32)
        return self._now

    def accepted(
        self, positions: Int32[np.ndarray, " requests"], verified: Int32[np.ndarray, " requests"]
    ) -> Int32[np.ndarray, " requests"]:
        """How many of the drafts stand whose confidences were told last."""
        stands = self._rng.random(self._now.shape) < special.expit(self._now)
        stands &= np.arange(stands.shape[1]) < verified[:, None]
        return np.cumprod(stands, axis=1).sum(axis=1, dtype=np.int32)


def device_rates(
    params: Params,
    cfg: ModelConfig,
    numerics: Numerics,
    layout: Layout,
    *,
    requests: int,
    fixed: Sequence[int],
    law: Float32[np.ndarray, " drafts"],
    steps: int,
) -> list[dict[str, Any]]:
    """Rates on a device; arguments as those of `simulated_rates`, for each rank."""
    scheduler_cfg = _scheduler_config(requests, steps, fixed, layout.ranks, cfg)
    cache_cfg = CacheConfig(slots=requests, pages=scheduler_cfg.pages, page_size=PAGE, drafts="shared")
    buckets = make_buckets(
        cache_cfg,
        prefill_tokens=[scheduler_cfg.prefill_tokens],
        prefill_requests=scheduler_cfg.prefill_requests,
        decode_requests=[requests],
        contexts=[scheduler_cfg.max_model_len],
        bounded=True,
        prompt_logprobs=False,
        tile=_TILE,
        drafts=max(fixed),
        fewer_drafts=fixed,
    )
    programs = Programs(
        cfg, cache_cfg, buckets, numerics, layout, params=params, forced_acceptance=law[: max(fixed)], progress=False
    )
    executor = JaxExecutor(params, programs)
    try:
        executor.warm_up(progress=False)
        times = executor.measure_costs()
        rows = []
        for drafts in (0, *fixed, None):
            room = DraftRoom(times, requests, layout.ranks)
            rows.append(_rate(executor, scheduler_cfg, room, drafts, steps))
    finally:
        executor.close()
    return _with_best(rows)


def simulated_rates(
    times: MeasuredTimes,
    *,
    requests: int,
    fixed: Sequence[int],
    law: Float32[np.ndarray, " drafts"],
    steps: int,
    spread: float = 0.0,
    noise: float = 0.0,
) -> list[dict[str, Any]]:
    """Rates on the simulated executor.

    Args:
      times: what steps take.
      requests: that run at the same time.
      fixed: numbers of drafts; steps that choose have programs with room for each.
      law: of acceptance, as `SpreadLaw` has it with `spread`; for the largest number at least.
      steps: that count.
      noise: relative standard deviation of errors in the times that choices are made by.
    """
    scheduler_cfg = _scheduler_config(requests, steps, fixed, 1)
    known, rng = times.programs(requests, (0, *fixed)), np.random.default_rng(0)
    known = [dataclasses.replace(one, seconds=one.seconds * np.float32(1 + noise * rng.normal())) for one in known]
    rows = []
    for drafts in (0, *fixed, None):
        accepted = SpreadLaw(law[: max(fixed)], spread)
        cost = functools.partial(_simulated_cost, times, requests, sorted(fixed))
        executor = SimulatedExecutor(
            cost, constant_tokens(7), accepted.accepted, max(fixed), confidences=accepted.confidences
        )
        rows.append(_rate(executor, scheduler_cfg, DraftRoom(known, requests, 1), drafts, steps))
    return _with_best(rows)


def _scheduler_config(
    requests: int, steps: int, fixed: Sequence[int], ranks: int, cfg: ModelConfig | None = None
) -> SchedulerConfig:
    """For requests that decode without an end for so many steps."""
    length = _PROMPT + (steps + _SETTLING + _OTHER_STEPS + requests) * (1 + max(fixed))
    replay = ReplayRule(cfg.sliding_window, cfg.num_hidden_layers) if cfg else ReplayRule(128, 40)
    return SchedulerConfig(
        slots=requests,
        pages=requests * (-(-length // PAGE) + 1),
        max_model_len=length,
        eos_id=1,
        replay=replay,
        ranks=ranks,
        page_size=PAGE,
        tile=_TILE,
        prefill_tokens=8 * _PROMPT,
        prefill_requests=8,
        max_admissions=requests,
        prefix_cache=False,
        drafts=max(fixed),
    )


def _rate(executor: Executor, cfg: SchedulerConfig, room: DraftRoom, drafts: int | None, steps: int) -> dict[str, Any]:
    """The rate of requests that all want so many drafts, or None as many as pay."""
    executor.reset()
    scheduler, seen = Scheduler(cfg, room), Records()
    engine, count = Engine(scheduler, executor, seen), cfg.slots * cfg.ranks
    for i in range(count):
        prompt = np.full(_PROMPT, 3 + i % 50, np.int32)
        sampling = RequestSampling(temperature=0.0, seed=i)
        end = cfg.max_model_len - _PROMPT
        engine.submit(GenerationRequest(f"r{i}", prompt, end, sampling=sampling, ignore_eos=True, drafts=drafts))
    finish_prefill(engine)
    for _ in range(_SETTLING):
        engine.step()
    first, begin = len(seen.steps), executor.now()
    for _ in range(steps):
        engine.step()
    seconds, records = executor.now() - begin, seen.steps[first:]
    if wrong := [r.decode_requests for r in records if r.decode_requests != count]:
        raise RuntimeError(f"a step decoded {wrong[0]} of {count} requests: not all ran at once")
    tokens = sum(record.output_tokens for record in records)
    return {
        "drafts": "adaptive" if drafts is None else str(drafts),
        "milliseconds": seconds / steps * 1e3,
        "tokens_per_request": tokens / steps / count,
        "tokens_per_second": tokens / seconds,
    }


def _simulated_cost(times: MeasuredTimes, requests: int, rooms: Sequence[int], plan: StepPlan) -> float:
    # Prompts take no time: they are over before steps count.
    seconds = 0.0
    if plan.decodes is not None:
        seconds += times.seconds(requests, 0)
    if plan.speculation is not None:
        drafts = int(plan.speculation.max_drafts.max())
        seconds += times.seconds(requests, next(room for room in rooms if room >= drafts))
    return seconds


def _with_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, of which the last says how it compares with the best of the others."""
    *fixed, adaptive = rows
    best = max(fixed, key=lambda row: row["tokens_per_second"])
    adaptive |= {
        "best_fixed": best["drafts"],
        "times_best_fixed": adaptive["tokens_per_second"] / best["tokens_per_second"],
    }
    return rows
