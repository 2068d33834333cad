"""Fewest bytes and operations of each stage of a step, counted from shapes.

Every weight is read once per step, activations once by what consumes them and written once by what makes them. What no
step can avoid is counted and nothing else, so that the times which follow are floors.

All but the routed experts cost so much per unit of a load (a token, an index key that is scored, a half of the layers
that runs at all), so many requests are counted with one product; see `linear_costs`.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Float64

from dsv4jax.config import ModelConfig
from dsv4jax.quant import ceil_div, record_bytes_fp8, record_bytes_mxfp4, record_bytes_nvfp4

_FP8 = 1 + 1 / 1024
"""Bytes per FP8 weight with its scale per 32 x 32."""
_FP4 = 0.5 + 1 / 32
"""Bytes per FP4 weight with its scale per 32."""

ONCE = ("encoder", "decoder", "head")
"""Loads that are 1 if any token runs through this part of the model on a rank, else 0."""
_PER_REQUEST = Float[np.ndarray, " requests"]


@dataclasses.dataclass(frozen=True)
class StepShape:
    """A step on one rank.

    `tokens` of `requests` requests at a context of `context` tokens; the layers from `decoder_start` on run
    `decoder_tokens` of them, and the head `logits` rows.
    """

    requests: int
    tokens: int
    context: int
    decoder_tokens: int
    logits: int
    ranks: int = 1


@dataclasses.dataclass
class Cost:
    """Bytes that pass through device memory, and operations (two per product) by the type of their operands; in so
    many layers."""

    bytes: float = 0.0
    fp8: float = 0.0
    bf16: float = 0.0
    layers: float = 0.0

    def __iadd__(self, other: "Cost") -> "Cost":
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def times(self, count: float) -> "Cost":
        """That often."""
        return Cost(*(count * getattr(self, field.name) for field in dataclasses.fields(self)))

    def floor(self, ceilings: Mapping[str, float]) -> float:
        """Microseconds at the rates `copy` (bytes per second), `fp8` and `bf16` (operations per second)."""
        return 1e6 * max(self.bytes / ceilings["copy"], self.fp8 / ceilings["fp8"] + self.bf16 / ceilings["bf16"])


@dataclasses.dataclass(frozen=True)
class LinearCosts:
    """Cost of one unit of each load, by stage."""

    loads: tuple[str, ...]
    stages: Mapping[str, Mapping[str, Cost]]

    def at(self, loads: Mapping[str, float]) -> dict[str, Cost]:
        """Cost of each stage with so much of every load."""
        costs: dict[str, Cost] = {}
        for stage, units in self.stages.items():
            costs[stage] = Cost()
            for load, unit in units.items():
                costs[stage] += unit.times(loads[load])
        return costs


class _Count:
    """Sums the cost of units while layers are gone through."""

    def __init__(self):
        self.stages: dict[str, dict[str, Cost]] = collections.defaultdict(lambda: collections.defaultdict(Cost))

    def add(self, stage: str, load: str, **amounts: float) -> None:
        self.stages[stage][load] += Cost(**amounts)

    def linear(self, stage: str, once: str, rows: str, out: int, inner: int, per_weight: float = _FP8) -> None:
        """A product of every row with one matrix, whose operands are FP8 if its weights are."""
        kind = "fp8" if per_weight == _FP8 else "bf16"
        self.add(stage, once, bytes=out * inner * per_weight)
        self.add(stage, rows, bytes=2 * (out + inner), **{kind: 2 * out * inner})

    def finish(self) -> LinearCosts:
        loads = dict.fromkeys(load for units in self.stages.values() for load in units)
        return LinearCosts(tuple(loads), {stage: dict(units) for stage, units in self.stages.items()})


@functools.lru_cache
def linear_costs(cfg: ModelConfig) -> LinearCosts:
    """Everything of the backbone but the routed experts and exchanges, per unit of the loads of `request_loads`."""
    count, d = _Count(), cfg.hidden_size
    count.add("embed", "tokens", bytes=4 * d)
    for i in range(cfg.num_hidden_layers):
        half = "encoder" if i < cfg.decoder_start else "decoder"
        tokens, requests = ("tokens", "requests") if half == "encoder" else ("decoder_tokens", "decoder_requests")
        ratio = cfg.ratio(i)
        if i in cfg.engram_layer_ids:
            columns = cfg.engram_hash_columns
            count.linear("engram", half, tokens, (cfg.hc_mult + 1) * d, columns * cfg.engram_head_dim)
            rows = columns * record_bytes_fp8(cfg.engram_head_dim) + 4 * cfg.hc_mult * d
            count.add("engram", tokens, bytes=rows)
            count.add("engram", half, layers=1)
        if i in cfg.kv_source_layer_ids:
            # The decoder's source is compressed for every token.
            for _ in range(ratio):
                count.linear("compress", "encoder", "tokens", cfg.head_dim, d, 2)
            record = record_bytes_nvfp4(cfg.head_dim) + record_bytes_mxfp4(cfg.index_head_dim)
            count.add("compress", "tokens", bytes=record / ratio)
            count.add("compress", "encoder", layers=1)
        if i in cfg.index_source_layer_ids:
            heads, dim = cfg.index_n_heads, cfg.index_head_dim
            count.linear("index_select", half, tokens, heads * dim, cfg.q_lora_rank)
            kind = "" if i in cfg.kv_source_layer_ids else "candidate_"
            count.add("index_select", f"{half}_{kind}keys_{ratio}", bytes=record_bytes_mxfp4(dim))
            count.add("index_select", f"{half}_{kind}pairs_{ratio}", fp8=2 * heads * dim)
            count.add("index_select", half, layers=1)
        if ratio:
            count.add("sparse_attention", f"{half}_entries_{ratio}", bytes=record_bytes_nvfp4(cfg.head_dim))
            count.add("sparse_attention", f"{half}_selected_{ratio}", bf16=4 * cfg.num_attention_heads * cfg.head_dim)
        # Window keys are shared by the tokens of a request; selected entries need not be.
        _count_layer(count, cfg, half, tokens, requests, cfg.sliding_window, cfg.n_routed_experts)
    count.linear("head", "head", "logits", cfg.vocab_size, d, 2)
    count.add("head", "head", layers=1)
    count.add("sample", "logits", bytes=4 * cfg.vocab_size)
    count.add("sample", "head", layers=1)
    return count.finish()


@functools.lru_cache
def draft_costs(cfg: ModelConfig) -> LinearCosts:
    """A draft round but for its routed experts and exchanges (architecture section 7). Loads: `once`, `requests` that
    draft, `tokens` of their blocks, and `verified` tokens whose context keys the stages keep."""
    count, d, stages = _Count(), cfg.hidden_size, cfg.num_nextn_predict_layers
    features = len(cfg.dspark_target_layer_ids) * d
    count.linear("draft_context", "once", "verified", d, features)
    # The matrix of window keys is read for the block as well, and counted there.
    key = 2 * (cfg.head_dim + d) + record_bytes_fp8(cfg.head_dim)
    count.add("draft_context", "verified", bytes=stages * key, fp8=stages * 2 * cfg.head_dim * d)
    count.add("draft_context", "once", layers=1)
    for _ in range(stages):
        window = cfg.sliding_window + cfg.dspark_block_size
        _count_layer(count, cfg, "once", "tokens", "requests", window, cfg.dspark_n_routed_experts)
    count.linear("head", "once", "tokens", cfg.vocab_size, d, 2)
    count.add("head", "once", layers=1)
    for _ in range(cfg.dspark_block_size):
        # One token after the other, as each is chosen by the logits that the one before it adds to.
        count.linear("sample", "once", "requests", cfg.vocab_size, cfg.dspark_markov_rank, 2)
        count.add("sample", "once", layers=1)
    count.add("sample", "tokens", bytes=4 * cfg.vocab_size)
    return count.finish()


def _count_layer(
    count: _Count, cfg: ModelConfig, once: str, tokens: str, requests: str, window: int, experts: int
) -> None:
    """What every layer has: both sites of hyper-connections, attention but for what it selects, router, shared
    expert."""
    d, heads, dim, width = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim, cfg.moe_intermediate_size
    for _ in range(2):
        # Streams and the sublayer's output in; streams, input and its FP8 form out.
        count.add("hyper_connections", tokens, bytes=d * (2 * 2 * cfg.hc_mult + 2 + 2 + 1))
        count.linear("hyper_connections", once, tokens, 3 * (2 + cfg.hc_mult) * cfg.hc_mult, cfg.hc_mult * d, 2)
    count.linear("attention_input", once, tokens, cfg.q_lora_rank + dim, d)
    count.linear("attention_input", once, tokens, heads * dim, cfg.q_lora_rank)
    count.add("sparse_attention", requests, bytes=record_bytes_fp8(dim) * cfg.sliding_window)
    count.add("sparse_attention", tokens, bytes=record_bytes_fp8(dim) + 4 * heads * dim, bf16=4 * heads * dim * window)
    latent = cfg.o_groups * cfg.o_lora_rank
    count.add("attention_output", once, bytes=latent * heads * dim / cfg.o_groups * _FP8)
    count.add(
        "attention_output", tokens, bytes=2 * (heads * dim + latent), bf16=2 * latent * heads * dim / cfg.o_groups
    )
    count.linear("attention_output", once, tokens, d, latent)
    count.linear("router", once, tokens, experts, d, 2)
    count.linear("shared_expert", once, tokens, 2 * width, d)
    count.linear("shared_expert", once, tokens, d, width)
    for stage in (
        "hyper_connections",
        "attention_input",
        "sparse_attention",
        "attention_output",
        "router",
        "shared_expert",
    ):
        count.add(stage, once, layers=1)


def request_loads(
    cfg: ModelConfig, tokens: _PER_REQUEST, decoder_tokens: _PER_REQUEST, context: _PER_REQUEST, logits: _PER_REQUEST
) -> Float64[np.ndarray, "loads requests"]:
    """Loads of each request of a step, in the order of `linear_costs(cfg).loads`; those of `ONCE` are 0.

    Args:
      tokens, decoder_tokens: of them the encoder half and the decoder half of the layers run.
      context: tokens before and of the step that a token of the request sees, on average.
    """
    loads = {
        "tokens": tokens,
        "decoder_tokens": decoder_tokens,
        "logits": logits,
        "requests": np.minimum(tokens, 1),
        "decoder_requests": np.minimum(decoder_tokens, 1),
    }
    halves = {"encoder": (tokens, loads["requests"]), "decoder": (decoder_tokens, loads["decoder_requests"])}
    for half, ratio in _compressed_halves(cfg):
        rows, running = halves[half]
        entries, name = context // ratio, f"{half}_{{}}_{ratio}"
        restricted = cfg.candidate_topk_blocks * cfg.candidate_block_size
        loads[name.format("keys")] = running * entries
        loads[name.format("pairs")] = rows * entries
        loads[name.format("candidate_keys")] = np.minimum(rows * restricted, running * entries)
        loads[name.format("candidate_pairs")] = rows * np.minimum(entries, restricted)
        loads[name.format("selected")] = selected = rows * np.minimum(entries, cfg.index_topk)
        loads[name.format("entries")] = np.minimum(selected, running * context / ratio)
    none = np.zeros(len(tokens))
    names = linear_costs(cfg).loads
    rows = [none if load in ONCE else loads[load] for load in names]
    return np.concatenate(rows).reshape(len(names), len(tokens))


@functools.lru_cache
def _compressed_halves(cfg: ModelConfig) -> tuple[tuple[str, int], ...]:
    """(half, ratio) of all layers that attend to compressed entries."""
    found = (("encoder" if i < cfg.decoder_start else "decoder", cfg.ratio(i)) for i in range(cfg.num_hidden_layers))
    return tuple(dict.fromkeys(one for one in found if one[1]))


def expert_cost(cfg: ModelConfig, local: int, routed: float, present: float) -> Cost:
    """Routed experts of one layer on a rank with `local` of them, each as likely as the others.

    Few rows are multiplied as FP8, many as BF16.

    Args:
      routed: pairs of a token and an expert of this rank.
      present: tokens that the exchange brought to the rank, and of which it returns a sum.
    """
    d, weights = cfg.hidden_size, 3 * cfg.hidden_size * cfg.moe_intermediate_size
    active = local * (1 - (1 - 1 / local) ** routed)
    kind = "fp8" if routed <= few_rows(local) else "bf16"
    bytes_ = active * weights * _FP4 + present * d * (2 + 4)
    return Cost(bytes=bytes_, layers=1, **{kind: 2 * routed * weights})


def few_rows(local: int) -> int:
    """The most rows that a rank's experts multiply as FP8."""
    return 20 * local


def step_costs(cfg: ModelConfig, shape: StepShape) -> dict[str, Cost]:
    """Cost of each stage over all layers; of an emulated rank, with the exchange's stand-in."""
    n, ranks = shape.requests, shape.ranks
    each = (np.array([float(total) / n]) for total in (shape.tokens, shape.decoder_tokens, shape.logits))
    tokens, decoder_tokens, logits = each
    context = np.array([float(shape.context)])
    counted = linear_costs(cfg)
    loads = dict(zip(counted.loads, n * request_loads(cfg, tokens, decoder_tokens, context, logits)[:, 0], strict=True))
    loads |= {"encoder": 1, "decoder": min(1, shape.decoder_tokens), "head": min(1, shape.logits)}
    costs = counted.at(loads)
    costs["experts"] = Cost()
    if ranks > 1:
        costs |= {"dispatch": Cost(), "combine": Cost()}
    encoder = cfg.decoder_start
    for rows, layers in ((shape.tokens, encoder), (shape.decoder_tokens, cfg.num_hidden_layers - encoder)):
        if not rows:
            continue
        local = ceil_div(cfg.n_routed_experts, ranks)
        experts = expert_cost(cfg, local, rows * cfg.num_experts_per_tok, rows * ranks)
        costs["experts"] += experts.times(layers)
        for stage, width in (("dispatch", 2), ("combine", 4)) if ranks > 1 else ():
            moved = (ranks + 1) * rows * cfg.hidden_size * width
            costs[stage] += Cost(bytes=layers * moved, layers=layers)
    return costs
