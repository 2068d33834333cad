"""Which layouts, batches and drafts serve a workload within targets, by the cost model.

Prefill and decode run on devices of their own, in groups of a width each, as many groups of either as keep up with each
other. A decode group always has a full batch. Prefill is kept at a share `utilization` of what it could do, because
requests that come at random wait otherwise: the mean wait is that of a queue with random arrivals and equal service
times (M/D/1). Times are means: nothing here knows a 90th percentile. For that, simulate.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4jax.bench.planning.cost_model import HardwareCost, StepTime, StepWork
from dsv4jax.bench.planning.hardware import Hardware
from dsv4jax.bench.steps.cases import PAGE
from dsv4jax.cache import CacheConfig, DraftNoise
from dsv4jax.config import ModelConfig
from dsv4jax.engine.memory_plan import MemoryPlan, memory_plan
from dsv4jax.numerics import FAST
from dsv4jax.quant import ceil_div
from sharding.layout import Exchange

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 72)
"""Of DEP groups. One that does not divide the experts has more slots for them, some of which hold an expert twice; this
engine itself takes widths that divide them only."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Turns of agents' sessions. The defaults are public statistics, but for the acceptance, which is an example.

    Args:
      context: tokens of a prompt.
      cached: share of them found in the prefix cache.
      output: tokens generated per turn.
      acceptance: probability that a draft stands if those before it do, by its position.

    Raises:
      ValueError: a value that is not allowed, by name.
    """

    context: int = 68_000
    cached: float = 0.95
    output: int = 400
    acceptance: tuple[float, ...] = (0.8, 0.7, 0.6, 0.5, 0.4)

    def __post_init__(self):
        for name in ("context", "output"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1")
        if not _in_range(self.cached, 0, 1) or self.cached == 1:
            raise ValueError(f"cached = {self.cached!r}: must be at least 0 and less than 1")
        for value in self.acceptance:
            if not _in_range(value, 0, 1):
                raise ValueError(f"acceptance = {value!r}: must be 0 to 1")

    @property
    def computed(self) -> int:
        """Prompt tokens that are run: what is not cached, at least one."""
        return max(1, self.context - int(self.cached * self.context))

    def tokens_per_step(self, drafts: int) -> float:
        """That a request gets on average with so many drafts."""
        return 1.0 + float(np.cumprod(self.acceptance[:drafts]).sum())


def load_workload(path: str | Path) -> Workload:
    """The workload in a JSON file with fields of `Workload`.

    Raises:
      ValueError: it is not; names the file, the field and what is allowed.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object")
    names = [field.name for field in dataclasses.fields(Workload)]
    for name in found:
        if name not in names:
            raise ValueError(f"{path}: unknown field {name!r}: must be one of {tuple(names)}")
    try:
        return Workload(**{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Targets:
    """What a user is to get; None for no target.

    Args:
      ttft: seconds to the first token, on average.
      user_speed: tokens per second, first token to last.

    Raises:
      ValueError: a target that is not greater than 0.
    """

    ttft: float | None = None
    user_speed: float | None = None

    def __post_init__(self):
        for name in ("ttft", "user_speed"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} = {value}: must be greater than 0")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is tried, and what is taken as given.

    Args:
      decode_widths, prefill_widths: devices of a group.
      batches: requests per decode device.
      drafts: verified per step, 0 to the draft model's block.
      chunks: prompt tokens of a prefill step and device.
      exchange, balance, draft_balance: see `HardwareCost`.
      utilization: of prefill.
      fraction: of a device's memory that may be used.
      workspace: bytes kept for the temporary memory of programs, which is known only when they are compiled.
      tables_on_device: whether the Engram tables are spread over the devices of a group; else they are in host memory.

    Raises:
      ValueError: a value that is not allowed, by name.
    """

    decode_widths: tuple[int, ...] = WIDTHS
    prefill_widths: tuple[int, ...] = WIDTHS
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    drafts: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    chunks: tuple[int, ...] = (2048, 8192, 16384)
    exchange: Exchange = "gather"
    balance: float = 1.0
    draft_balance: float = 1.0
    utilization: float = 0.7
    fraction: float = 0.9
    workspace: float = 8e9
    tables_on_device: bool = True

    def __post_init__(self):
        for name in ("decode_widths", "prefill_widths", "batches", "drafts", "chunks"):
            least = 0 if name == "drafts" else 1
            if not getattr(self, name):
                raise ValueError(f"{name}: must be at least one number")
            for value in getattr(self, name):
                if not isinstance(value, int) or value < least:
                    raise ValueError(f"{name} = {value!r}: must be a whole number of at least {least}")
        for name in ("utilization", "fraction"):
            if not _in_range(getattr(self, name), 0, 1) or not 0 < getattr(self, name):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be greater than 0 and at most 1")
        if self.utilization == 1:
            raise ValueError("utilization = 1: must be less than 1, or requests wait for ever")
        if not _in_range(self.workspace, 0, math.inf):
            raise ValueError(f"workspace = {self.workspace!r}: must be at least 0")


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device of a group by purpose, and the most that may be used."""

    weights: int
    tables: int
    pages: int
    slots: int
    """Windows, open groups, sampling state."""
    workspace: int
    usable: int

    @property
    def total(self) -> int:
        return self.weights + self.tables + self.pages + self.slots + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


@dataclasses.dataclass(frozen=True)
class Refused:
    """What does not fit into the memory of a device."""

    group: str
    size: str
    memory: DeviceMemory

    def as_row(self) -> dict[str, Any]:
        """For a table."""
        return {
            "group": self.group,
            "size": self.size,
            "gb": self.memory.total / 1e9,
            "usable_gb": self.memory.usable / 1e9,
        }


@dataclasses.dataclass(frozen=True)
class PrefillPoint:
    """Prefill in groups of `width` devices."""

    width: int
    chunk: int
    time: StepTime
    tokens_per_second: float
    """Computed prompt tokens of a device that never waits."""
    ttft: float
    memory: DeviceMemory
    prefix_tokens: int
    """That what is left of the memory of a device holds in the prefix cache."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A deployment: decode in groups of `width` devices, with prefill beside it."""

    width: int
    batch: int
    drafts: int
    time: StepTime
    user_speed: float
    decode_tokens_per_second: float
    """Output of a decode device."""
    memory: DeviceMemory
    prefill: PrefillPoint
    prefill_share: float
    """Of all devices."""
    output_tokens_per_second: float
    """Per device, those of prefill included; as are the next two."""
    computed_tokens_per_second: float
    cached_tokens_per_second: float
    misses: tuple[str, ...]
    """Targets that it does not meet."""

    def as_row(self) -> dict[str, Any]:
        """For a table."""
        (limit, share), (prefill_limit, prefill_share) = self.time.limit, self.prefill.time.limit
        return {
            "decode": f"DEP{self.width}",
            "batch": self.batch,
            "drafts": self.drafts,
            "prefill": f"DEP{self.prefill.width}",
            "chunk": self.prefill.chunk,
            "output_per_gpu": self.output_tokens_per_second,
            "user_speed": self.user_speed,
            "ttft_ms": 1e3 * self.prefill.ttft,
            "step_ms": 1e3 * self.time.seconds,
            "limit": f"{limit} {share:.0%}",
            "prefill_limit": f"{prefill_limit} {prefill_share:.0%}",
            "prefill_gpus": self.prefill_share,
            "decode_gb": self.memory.total / 1e9,
            "prefill_gb": self.prefill.memory.total / 1e9,
            "prefix_tokens": self.prefill.prefix_tokens,
            "computed_per_gpu": self.computed_tokens_per_second,
            "cached_per_gpu": self.cached_tokens_per_second,
            "misses": ", ".join(self.misses),
            "parts_ms": {part: 1e3 * seconds for part, seconds in self.time.parts.items()},
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Deployments that fit into memory, best first: those that meet the targets before the others, by output per
    device. And what does not fit."""

    points: tuple[Point, ...]
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Point | None:
        """The first one, if it meets the targets."""
        return self.points[0] if self.points and not self.points[0].misses else None


def make_plan(cfg: ModelConfig, hardware: Hardware, workload: Workload, targets: Targets, sweep: Sweep) -> Plan:
    """Every deployment of a sweep, each with the prefill that takes the fewest devices within the target for the first
    token (the soonest first token if none is within it).

    Raises:
      ValueError: drafts beyond what the draft model makes or the workload knows, or widths beyond the experts.
    """
    known = min(cfg.dspark_block_size, len(workload.acceptance))
    for drafts in sweep.drafts:
        if drafts > known:
            raise ValueError(
                f"drafts = {drafts}: must be at most {known}: the draft model makes {cfg.dspark_block_size}, and"
                f" acceptance has {len(workload.acceptance)}"
            )
    refused: list[Refused] = []
    prefills = list(_prefill_points(cfg, hardware, workload, sweep, refused))
    if not prefills:
        return Plan((), tuple(refused))
    prefill = _choose_prefill(prefills, targets)
    points = []
    for width in dict.fromkeys(sweep.decode_widths):
        cost = _cost(cfg, hardware, width, sweep)
        for batch, drafts in itertools.product(dict.fromkeys(sweep.batches), dict.fromkeys(sweep.drafts)):
            memory = device_memory(cfg, hardware, width, batch, workload.context + workload.output, drafts > 0, sweep)
            if memory.fits:
                points.append(_point(cost, workload, targets, batch, drafts, memory, prefill, sweep))
            else:
                refused.append(Refused(f"decode DEP{width}", f"batch {batch}, {drafts} drafts", memory))
    points.sort(key=lambda p: (bool(p.misses), -p.output_tokens_per_second, p.width, p.batch, p.drafts))
    return Plan(tuple(points), tuple(refused))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in output per device without being slower for the user, or the reverse; by falling
    user speed."""
    best, front = -math.inf, []
    for point in sorted(points, key=lambda p: (-p.user_speed, -p.output_tokens_per_second, p.width, p.batch, p.drafts)):
        if point.output_tokens_per_second > best:
            best = point.output_tokens_per_second
            front.append(point)
    return front


def device_memory(
    cfg: ModelConfig, hardware: Hardware, width: int, requests: int, tokens: int, draft: bool, sweep: Sweep
) -> DeviceMemory:
    """Bytes on each device of a group with so many requests of `tokens` tokens, as `engine.memory_plan` counts them."""
    weights, tables, page, slot = _memory_units(cfg, width, draft)
    return DeviceMemory(
        weights=weights,
        tables=tables if sweep.tables_on_device else 0,
        pages=requests * ceil_div(tokens, PAGE) * page,
        slots=requests * slot,
        workspace=int(sweep.workspace),
        usable=int(sweep.fraction * hardware.memory_bytes.value),
    )


def _memory_units(cfg: ModelConfig, width: int, draft: bool) -> tuple[int, int, int, int]:
    """Bytes of a device's weights and Engram tables, of a page and of a slot."""
    # One device with the experts of one of the group's has the bytes of each of them, and every expert has as many.
    base, more_experts, more_draft = _memory_plans(cfg)
    weights = base.weights
    weights += (ceil_div(cfg.n_routed_experts, width) - 1) * (more_experts.weights - base.weights)
    weights += (ceil_div(cfg.dspark_n_routed_experts, width) - 1) * (more_draft.weights - base.weights)
    of_slots = more_draft if draft else base
    return weights, ceil_div(base.tables, width), base.pages, of_slots.windows + of_slots.sampling


@functools.lru_cache
def _memory_plans(cfg: ModelConfig) -> tuple[MemoryPlan, MemoryPlan, MemoryPlan]:
    """Of one page and slot, with one expert of the target and of the draft; one more of the target; one more of the
    draft, and a cache with drafts."""

    def plan(experts: int, draft_experts: int, drafts: DraftNoise | None) -> MemoryPlan:
        cache_cfg = CacheConfig(slots=1, pages=1, page_size=PAGE, drafts=drafts)
        return memory_plan(cfg, cache_cfg, FAST, expert_slots=experts, draft_expert_slots=draft_experts)

    return plan(1, 1, None), plan(2, 1, None), plan(1, 2, "shared")


def _cost(cfg: ModelConfig, hardware: Hardware, width: int, sweep: Sweep) -> HardwareCost:
    balance = (sweep.balance, sweep.draft_balance) if width > 1 else (1.0, 1.0)
    return HardwareCost(cfg, hardware, width, exchange=sweep.exchange, balance=balance[0], draft_balance=balance[1])


def _prefill_points(cfg: ModelConfig, hardware: Hardware, workload: Workload, sweep: Sweep, refused: list[Refused]):
    # A hit is followed by a replay of one window.
    tokens = workload.computed + (cfg.sliding_window if workload.cached else 0)
    tokens = min(tokens, workload.context)
    for width, chunk in itertools.product(dict.fromkeys(sweep.prefill_widths), dict.fromkeys(sweep.chunks)):
        steps = ceil_div(tokens, chunk)
        requests = max(1, chunk // tokens)  # that a step runs, of each rank
        # Those in a step, and as many again, admitted for the next one.
        memory = device_memory(cfg, hardware, width, 2 * requests, workload.context, False, sweep)
        if not memory.fits:
            refused.append(Refused(f"prefill DEP{width}", f"chunk {chunk}", memory))
            continue
        n = width * requests
        each = (np.full(n, value) for value in (tokens / steps, min(tokens, cfg.sliding_window) / steps))
        context, logits = np.full(n, workload.context - tokens / 2), np.full(n, 1 / steps)
        work = StepWork(np.repeat(np.arange(width), requests), *each, context, logits, np.zeros(width))
        time = _cost(cfg, hardware, width, sweep).step(work)
        service = steps * time.seconds
        load = sweep.utilization
        wait = load / (2 * (1 - load)) * service / requests
        page = _memory_units(cfg, width, False)[2]
        yield PrefillPoint(
            width=width,
            chunk=chunk,
            time=time,
            tokens_per_second=requests * workload.computed / service,
            ttft=wait + service,
            memory=memory,
            prefix_tokens=(memory.usable - memory.total) // page * PAGE,
        )


def _choose_prefill(points: Sequence[PrefillPoint], targets: Targets) -> PrefillPoint:
    within = [p for p in points if targets.ttft is None or p.ttft <= targets.ttft]
    if within:
        return min(within, key=lambda p: (-p.tokens_per_second, p.width, p.chunk))
    return min(points, key=lambda p: (p.ttft, p.width, p.chunk))


def _point(
    cost: HardwareCost,
    workload: Workload,
    targets: Targets,
    batch: int,
    drafts: int,
    memory: DeviceMemory,
    prefill: PrefillPoint,
    sweep: Sweep,
) -> Point:
    time = cost.decode(batch, 1 + drafts, workload.context + workload.output / 2, draft=drafts > 0)
    per_step = workload.tokens_per_step(drafts)
    # The first token comes from prefill; the second waits for the cache to be carried over.
    cache = workload.context / PAGE * _memory_units(cost.cfg, prefill.width, False)[2]
    transfer = cache / cost.hardware.transfer_bandwidth.value
    user_speed = workload.output / (transfer + workload.output / per_step * time.seconds)
    decode_rate = batch * per_step / time.seconds
    device_seconds = {
        "prefill": workload.computed / prefill.tokens_per_second / sweep.utilization,
        "decode": workload.output / decode_rate,
    }
    turns = 1 / sum(device_seconds.values())
    misses = []
    if targets.ttft is not None and prefill.ttft > targets.ttft:
        misses.append("ttft")
    if targets.user_speed is not None and user_speed < targets.user_speed:
        misses.append("user_speed")
    return Point(
        width=cost.ranks,
        batch=batch,
        drafts=drafts,
        time=time,
        user_speed=user_speed,
        decode_tokens_per_second=decode_rate,
        memory=memory,
        prefill=prefill,
        prefill_share=turns * device_seconds["prefill"],
        output_tokens_per_second=turns * workload.output,
        computed_tokens_per_second=turns * workload.computed,
        cached_tokens_per_second=turns * (workload.context - workload.computed),
        misses=tuple(misses),
    )


def _in_range(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
