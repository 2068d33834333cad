"""Seconds of a step from what it runs and what the hardware can do.

One definition of bytes and operations, `bench.steps.costs`; every stage takes its `StageFactors` times what these need
at the machine's rates. The same numbers serve in closed form (`HardwareCost.decode` and `prefill`) and for any step
plan of the scheduler, as the cost model of a `SimulatedExecutor`.

What is assumed. Ranks run a layer together, so the slowest rank's attention and dense products count, and routed
experts take the tokens of all ranks, spread evenly but for `1 / balance`. The stages of a rank run one after the other,
as does the exchange of tokens. The host works beside the device: a step lasts as long as the slower of the two. Steps
run what their plan says, without the padding of buckets. A draft round follows every step with drafts.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int

from dsv4jax.bench.planning.hardware import Hardware
from dsv4jax.bench.steps.costs import (
    ONCE,
    Cost,
    LinearCosts,
    draft_costs,
    expert_cost,
    few_rows,
    linear_costs,
    request_loads,
)
from dsv4jax.config import ModelConfig
from dsv4jax.engine.plan import RankPlan, StepPlan
from dsv4jax.engine.replay import Replay
from dsv4jax.quant import ceil_div
from sharding.exchange import exchange_bytes
from sharding.layout import EXCHANGES, Exchange

PARTS = (
    "expert reads",
    "expert products",
    "dense reads",
    "dense products",
    "index keys",
    "attention",
    "exchange",
    "draft",
    "launches",
)
"""What the seconds of a step on the device are made of. "Dense" is all that is neither routed experts, index nor
attention over the cache; "launches" is what each layer takes however little it does."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepWork:
    """What a step runs, of all ranks: entry i is of one request, in any order.

    `decoder_tokens` of its `tokens` run through the decoder half of the layers, `logits` through the head, at `context`
    tokens on average; `drafting[r]` requests of rank r draft after the step.
    """

    rank: Int[np.ndarray, " requests"]
    tokens: Float64[np.ndarray, " requests"]
    decoder_tokens: Float64[np.ndarray, " requests"]
    context: Float64[np.ndarray, " requests"]
    logits: Float64[np.ndarray, " requests"]
    drafting: Float64[np.ndarray, " ranks"]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank."""

    parts: Mapping[str, float]
    """On the device, by `PARTS`."""
    host: float

    @property
    def device(self) -> float:
        """While the device is at work."""
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        """From one step to the next."""
        return max(self.device, self.host)

    @property
    def limit(self) -> tuple[str, float]:
        """What takes most of the step, and its share: a part, or "host" where the device waits for it."""
        if self.host > self.device:
            return "host", 1.0
        part = max(self.parts, key=lambda name: self.parts[name])
        return part, self.parts[part] / self.device


class HardwareCost:
    """Seconds of steps of `ranks` data-parallel ranks that share the experts.

    Args:
      exchange: how tokens reach experts, see `sharding.exchange`. "gather" and "all_to_all" carry the same bytes;
        "ragged" a token once to each rank that it has experts on.
      balance: mean load of the ranks' experts / load of the busiest.
      draft_balance: the same for the draft's.
      replay: which prompt tokens run through the decoder half: all, or the last window of the prompt.

    Raises:
      ValueError: a value that is not allowed, by name.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        hardware: Hardware,
        ranks: int,
        *,
        exchange: Exchange = "gather",
        balance: float = 1.0,
        draft_balance: float = 1.0,
        replay: Replay = "bounded",
    ):
        if not 1 <= ranks <= cfg.n_routed_experts:
            raise ValueError(f"ranks = {ranks}: must be 1 to n_routed_experts = {cfg.n_routed_experts}")
        if exchange not in EXCHANGES:
            raise ValueError(f"exchange = {exchange!r}: must be one of {EXCHANGES}")
        for name, value in (("balance", balance), ("draft_balance", draft_balance)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} = {value}: must be greater than 0 and at most 1")
        if replay not in ("exact", "bounded"):
            raise ValueError(f"replay = {replay!r}: must be 'exact' or 'bounded'")
        self.cfg, self.hardware, self.ranks = cfg, hardware, ranks
        self._exchange, self._replay = exchange, replay
        self._imbalance, self._draft_imbalance = 1 / balance, 1 / draft_balance
        self._by_part = _Units.of(self._seconds_by_part(linear_costs(cfg)), self._seconds_by_part(draft_costs(cfg)))
        self._in_all = self._by_part.summed()
        self._experts = functools.lru_cache(maxsize=4096)(self._expert_layer)

    # Closed form

    def decode(self, requests: int, tokens: int, context: float, draft: bool = False) -> StepTime:
        """A step of `tokens` tokens (drafts included) of each of `requests` requests per rank behind `context` ones;
        with `draft`, and the draft round after it."""
        return self.step(self._even(requests, tokens, tokens, context, tokens, draft))

    def prefill(self, tokens: int, context: float, ends: bool = True) -> StepTime:
        """A step of one chunk of `tokens` prompt tokens per rank, at `context` tokens on average; the last of its
        prompt if it `ends` there."""
        decoder_tokens = tokens if self._replay == "exact" else min(tokens, self.cfg.sliding_window) * ends
        return self.step(self._even(1, tokens, decoder_tokens, context, int(ends), draft=False))

    def _even(
        self, requests: int, tokens: int, decoder_tokens: float, context: float, logits: int, draft: bool
    ) -> StepWork:
        rank = np.repeat(np.arange(self.ranks), requests)
        each = (np.full(len(rank), float(value)) for value in (tokens, decoder_tokens, context, logits))
        return StepWork(rank, *each, np.full(self.ranks, float(requests * draft)))

    def step(self, work: StepWork) -> StepTime:
        """Any step, with its parts."""
        by_rank = self._by_rank(work, self._by_part)
        slowest = int(by_rank.sum(axis=0).argmax())
        parts = by_rank[:, slowest] + self._together(work)
        return StepTime(dict(zip(PARTS, parts.tolist(), strict=True)), self._host(work))

    def seconds(self, work: StepWork) -> float:
        """`step(work).seconds`, in less time."""
        device = self._by_rank(work, self._in_all).max() + self._together(work).sum()
        return max(float(device), self._host(work))

    # Simulation

    def __call__(self, plan: StepPlan) -> float:
        """Seconds from the start of this step to that of the next."""
        return self.seconds(self.work_of(plan))

    def work_of(self, plan: StepPlan) -> StepWork:
        """What a plan runs. Every draft that may be verified counts as verified."""
        if len(plan.ranks) != self.ranks:
            raise ValueError(f"plan of {len(plan.ranks)} ranks: this model is of {self.ranks}")
        drafting, parts = np.zeros(self.ranks), []
        if (decodes := plan.decodes) is not None:
            ran = np.ones(len(decodes.ranks))
            parts.append((decodes.ranks, ran, ran, decodes.starts + 1.0, ran))
        if (speculation := plan.speculation) is not None:
            drafting += np.bincount(speculation.ranks, minlength=self.ranks)
            ran = speculation.max_drafts + 1.0
            parts.append((speculation.ranks, ran, ran, speculation.positions + 1.0, ran))
        for number, rank in enumerate(plan.ranks):
            if rank.prefills:
                drafting[number] += len(rank.first_drafts)
                parts.append((np.full(len(rank.prefills), number), *self._prefills(rank)))
        if not parts:
            parts.append((np.zeros(0, np.int64), *np.zeros((4, 0))))
        columns = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        return StepWork(*columns, drafting)

    def _prefills(self, rank: RankPlan) -> tuple[np.ndarray, ...]:
        starts, ends, lengths = np.array([(p.start, p.end, len(p.tokens)) for p in rank.prefills]).T
        tokens = ends - starts
        if self._replay == "bounded":
            decoder_tokens = np.maximum(0, ends - np.maximum(starts, lengths - self.cfg.sliding_window))
        else:
            decoder_tokens = tokens
        return tokens, decoder_tokens, (starts + ends) / 2, (ends == lengths).astype(np.int64)

    # Seconds

    def _by_rank(self, work: StepWork, units: "_Units") -> Float64[np.ndarray, "parts ranks"]:
        """Everything but the routed experts and exchanges."""
        loads = request_loads(self.cfg, work.tokens, work.decoder_tokens, work.context, work.logits)
        rank, ranks = work.rank, self.ranks
        total = np.array([np.bincount(rank, row, ranks) for row in units.each @ loads], np.float64)
        for once, rows in zip(units.once, (work.tokens, work.decoder_tokens, work.logits), strict=True):
            total += once[:, None] * (np.bincount(rank, rows, ranks) > 0)
        if work.drafting.any():
            verified = np.bincount(rank, np.where(work.logits > 0, work.tokens, 0.0), ranks)
            loads = {
                "once": work.drafting > 0,
                "requests": work.drafting,
                "tokens": self.cfg.dspark_block_size * work.drafting,
                "verified": np.minimum(verified, self.cfg.sliding_window * work.drafting),
            }
            total[units.draft_row] += sum(units.draft[load] * amount for load, amount in loads.items())
        return total

    def _together(self, work: StepWork) -> Float64[np.ndarray, " parts"]:
        """Routed experts and exchanges, which no rank is without."""
        cfg, total = self.cfg, np.zeros(len(PARTS))
        encoder, decoder = cfg.decoder_start, cfg.num_hidden_layers - cfg.decoder_start
        halves = [(encoder, work.tokens), (decoder, work.decoder_tokens)]
        for layers, rows in halves:
            if rows.any():
                most = np.bincount(work.rank, rows, self.ranks).max()
                experts = self._experts(
                    cfg.n_routed_experts, cfg.num_experts_per_tok, rows.sum() / self.ranks, self._imbalance
                )
                total += layers * experts
                total[PARTS.index("exchange")] += layers * self._exchanged(most, cfg.num_experts_per_tok)
        if work.drafting.any():
            rows, k = cfg.dspark_block_size * work.drafting, cfg.dspark_num_experts_per_tok
            experts = self._experts(cfg.dspark_n_routed_experts, k, rows.sum() / self.ranks, self._draft_imbalance)
            draft = experts.sum() + self._exchanged(rows.max(), k)
            total[PARTS.index("draft")] += cfg.num_nextn_predict_layers * draft
        return total

    def _expert_layer(self, experts: int, k: int, tokens: float, imbalance: float) -> Float64[np.ndarray, " parts"]:
        """One layer's, with so many tokens per rank; more rows never take less time."""
        local, routed = ceil_div(experts, self.ranks), tokens * k * imbalance
        present = tokens * self.ranks * self._arriving(k)
        seconds = self._expert_seconds(expert_cost(self.cfg, local, routed, present))
        if routed > few_rows(local):
            few = self._expert_seconds(expert_cost(self.cfg, local, few_rows(local), present))
            products = PARTS.index("expert products")
            seconds[products] = max(seconds[products], few[products])
        return seconds

    def _expert_seconds(self, cost: Cost) -> Float64[np.ndarray, " parts"]:
        total = np.zeros(len(PARTS))
        reads, products, fixed = self.hardware.stage_seconds("experts", cost)
        for part, seconds in (("expert reads", reads), ("expert products", products), ("launches", fixed)):
            total[PARTS.index(part)] = seconds
        return total

    def _exchanged(self, tokens: float, k: int) -> float:
        """Dispatch and combine of one layer, of at most so many tokens of a rank."""
        if self.ranks == 1:
            return 0.0
        hardware, ranks = self.hardware, self.ranks
        received = sum(exchange_bytes(ranks, 1, self.cfg.hidden_size, k)) * tokens * self._arriving(k)
        linked = int(hardware.link_devices.value)
        outside = max(0, ranks - linked) / (ranks - 1)
        latency = hardware.network_latency if outside else hardware.link_latency
        by_link = (1 - outside) * received / hardware.link_bandwidth.value
        return 2 * latency.value + max(by_link, outside * received / hardware.network_bandwidth.value)

    def _arriving(self, k: int) -> float:
        """Share of all tokens that come to a rank: with "ragged" those with an expert there."""
        return 1 - (1 - 1 / self.ranks) ** k if self._exchange == "ragged" else 1.0

    def _host(self, work: StepWork) -> float:
        return self.hardware.host_step.value + self.hardware.host_request.value * len(work.rank)

    def _seconds_by_part(self, counted: LinearCosts) -> dict[str, Float64[np.ndarray, " parts"]]:
        """Seconds per unit of each load."""
        total = {load: np.zeros(len(PARTS)) for load in counted.loads}
        for stage, units in counted.stages.items():
            reads_of, products_of = {
                "index_select": ("index keys", "index keys"),
                "sparse_attention": ("attention", "attention"),
            }.get(stage, ("dense reads", "dense products"))
            for load, cost in units.items():
                reads, products, fixed = self.hardware.stage_seconds(stage, cost)
                total[load][PARTS.index(reads_of)] += reads
                total[load][PARTS.index(products_of)] += products
                total[load][PARTS.index("launches")] += fixed
                # Every layer has one router.
                gaps = cost.layers if stage == "router" else 0
                total[load][PARTS.index("launches")] += self.hardware.gap.value * gaps
        return total


@dataclasses.dataclass(frozen=True, eq=False)
class _Units:
    """Seconds per unit of what a rank does for its own requests, by part or all parts together."""

    once: Float64[np.ndarray, "loads parts"]
    each: Float64[np.ndarray, "parts loads"]
    draft: Mapping[str, float]
    draft_row: int

    @staticmethod
    def of(by_load: Mapping[str, np.ndarray], draft: Mapping[str, np.ndarray]) -> "_Units":
        """Of the units of all loads of `linear_costs`, and those of `draft_costs`."""
        each = np.stack(list(by_load.values()), axis=1)
        totals = {load: float(parts.sum()) for load, parts in draft.items()}
        return _Units(np.stack([by_load[load] for load in ONCE]), each, totals, PARTS.index("draft"))

    def summed(self) -> "_Units":
        """With all parts as one."""
        return _Units(self.once.sum(axis=1, keepdims=True), self.each.sum(axis=0, keepdims=True), self.draft, 0)
