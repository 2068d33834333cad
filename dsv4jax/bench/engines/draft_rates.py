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

from dsv4jax.bench.engines.system import Sizes, System, decode_together, finish_prefill, model_system, simulated_system
from dsv4jax.bench.steps.drafts import expected_tokens
from dsv4jax.config import ModelConfig
from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom
from dsv4jax.engine.plan import StepPlan
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params
from dsv4jax.sampling_settings import RequestSampling
from sharding import Layout

_PROMPT = 32
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
    sizes = _sizes(requests, steps, fixed, layout.ranks)
    system = model_system(
        params, cfg, sizes, numerics, layout, forced_acceptance=law[: max(fixed)], progress=False, **_policy(requests)
    )
    try:
        executor = system.empty_executor()
        times = executor.measure_costs()
        executor.set_costs(times)
        rows = [_rate(system, times, drafts, steps, law[: max(fixed)]) for drafts in (0, *fixed, None)]
    finally:
        system.close()
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
    known, rng = times.programs(requests, (0, *fixed)), np.random.default_rng(0)
    known = [dataclasses.replace(one, seconds=one.seconds * np.float32(1 + noise * rng.normal())) for one in known]
    sizes, cost = _sizes(requests, steps, fixed), functools.partial(_simulated_cost, times, requests, sorted(fixed))
    rows = []
    for drafts in (0, *fixed, None):
        drawn = SpreadLaw(law[: max(fixed)], spread)
        system = simulated_system(sizes, cost, drawn.accepted, drawn.confidences, **_policy(requests))
        rows.append(_rate(system, known, drafts, steps))
    return _with_best(rows)


def _sizes(requests: int, steps: int, fixed: Sequence[int], ranks: int = 1) -> Sizes:
    """For requests that decode without an end for so many steps."""
    return Sizes(
        ranks=ranks,
        slots=requests,
        max_model_len=_PROMPT + (steps + _SETTLING + _OTHER_STEPS + requests) * (1 + max(fixed)),
        prefill_tokens=8 * _PROMPT,
        drafts=max(fixed),
        fewer_drafts=(0, *fixed),
    )


def _policy(requests: int) -> dict[str, Any]:
    return {"max_admissions": requests, "prefix_cache": False}


def _rate(
    system: System,
    times: Sequence[DecodeTimes],
    drafts: int | None,
    steps: int,
    law: Float32[np.ndarray, " drafts"] | None = None,
) -> dict[str, Any]:
    """The rate of requests that all want so many drafts, or None as many as pay.

    Given the law that all drafts have at all times, the tokens that count are those it gives on average.
    """
    cfg = system.config
    room = DraftRoom(times, cfg.slots, cfg.ranks)
    engine, executor = system.engine(scheduler=functools.partial(Scheduler, room=room))
    count, end = cfg.slots * cfg.ranks, cfg.max_model_len - _PROMPT
    for i in range(count):
        sampling, prompt = RequestSampling(temperature=0.0, seed=i), system.prompt(i, tokens=_PROMPT)
        engine.submit(GenerationRequest(f"r{i}", prompt, end, sampling=sampling, ignore_eos=True, drafts=drafts))
    finish_prefill(engine)
    for _ in range(_SETTLING):
        engine.step()
    before = engine.stats().drafts.verified
    seconds, records = decode_together(engine, executor, count, 0, steps)
    tokens = sum(record.output_tokens for record in records[-steps:]) / steps
    verified = np.subtract(engine.stats().drafts.verified, before)
    expected = tokens if law is None else expected_tokens(law, count, verified, steps)
    return {
        "drafts": "adaptive" if drafts is None else str(drafts),
        "milliseconds": seconds * 1e3,
        "tokens_per_request": tokens / count,
        "expected_tokens": expected / count,
        "tokens_per_second": expected / seconds,
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
