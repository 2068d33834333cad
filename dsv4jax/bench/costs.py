"""Fewest bytes and operations of each stage of a step, counted from shapes.

Every weight is read once per step, activations once by what consumes them and written once by what makes them. What no
step can avoid is counted and nothing else, so that the times which follow are floors.
"""

import collections
import dataclasses
from collections.abc import Mapping

from dsv4jax.config import ModelConfig
from dsv4jax.quant import record_bytes_fp8, record_bytes_mxfp4, record_bytes_nvfp4

_FP8 = 1 + 1 / 1024
"""Bytes per FP8 weight with its scale per 32 x 32."""
_FP4 = 0.5 + 1 / 32
"""Bytes per FP4 weight with its scale per 32."""


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
    """Bytes that pass through device memory, and operations (two per product) by the type of their operands."""

    bytes: float = 0.0
    fp8: float = 0.0
    bf16: float = 0.0

    def floor(self, ceilings: Mapping[str, float]) -> float:
        """Microseconds at the rates `copy` (bytes per second), `fp8` and `bf16` (operations per second)."""
        return 1e6 * max(self.bytes / ceilings["copy"], self.fp8 / ceilings["fp8"] + self.bf16 / ceilings["bf16"])


def step_costs(cfg: ModelConfig, shape: StepShape) -> dict[str, Cost]:
    """Cost of each stage over all layers; experts multiply FP8 operands for few rows, BF16 for many."""
    d, width, heads, dim = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_attention_heads, cfg.head_dim
    costs: dict[str, Cost] = collections.defaultdict(Cost)

    def linear(stage: str, rows: int, out: int, inner: int, per_weight: float = _FP8) -> None:
        cost, products = costs[stage], 2 * rows * out * inner
        cost.bytes += out * inner * per_weight + 2 * rows * (out + inner)
        if per_weight == _FP8:
            cost.fp8 += products
        else:
            cost.bf16 += products

    def move(stage: str, count: float) -> None:
        costs[stage].bytes += count

    move("embed", 4 * shape.tokens * d)
    for i in range(cfg.num_hidden_layers):
        ratio, tokens = cfg.ratio(i), shape.tokens if i < cfg.decoder_start else shape.decoder_tokens
        if i in cfg.engram_layer_ids:
            columns = cfg.engram_hash_columns
            linear("engram", tokens, (cfg.hc_mult + 1) * d, columns * cfg.engram_head_dim)
            move("engram", tokens * columns * record_bytes_fp8(cfg.engram_head_dim) + 4 * tokens * cfg.hc_mult * d)
        for _ in range(2):
            # Streams and the sublayer's output in; streams, input and its FP8 form out.
            move("hyper_connections", tokens * d * (2 * 2 * cfg.hc_mult + 2 + 2 + 1))
            linear("hyper_connections", tokens, 3 * (2 + cfg.hc_mult) * cfg.hc_mult, cfg.hc_mult * d, 2)
        if i in cfg.kv_source_layer_ids:
            for _ in range(ratio):
                linear("compress", shape.tokens, dim, d, 2)
            record = record_bytes_nvfp4(dim) + record_bytes_mxfp4(cfg.index_head_dim)
            move("compress", shape.tokens / ratio * record)
        linear("attention_input", tokens, cfg.q_lora_rank + dim, d)
        linear("attention_input", tokens, heads * dim, cfg.q_lora_rank)
        if i in cfg.index_source_layer_ids:
            linear("index_select", tokens, cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank)
            entries, restricted = shape.context // ratio, cfg.candidate_topk_blocks * cfg.candidate_block_size
            free = i in cfg.kv_source_layer_ids or entries <= restricted
            scored, read = (entries, shape.requests * entries) if free else (restricted, tokens * restricted)
            move("index_select", min(read, shape.requests * entries) * record_bytes_mxfp4(cfg.index_head_dim))
            costs["index_select"].fp8 += 2 * tokens * scored * cfg.index_n_heads * cfg.index_head_dim
        # Window keys are shared by the tokens of a request; selected entries need not be.
        selected = min(cfg.index_topk, shape.context // ratio) if ratio else 0
        window = record_bytes_fp8(dim) * (shape.requests * cfg.sliding_window + tokens)
        entries = min(tokens * selected, shape.requests * shape.context // max(1, ratio)) * record_bytes_nvfp4(dim)
        move("sparse_attention", window + entries + 4 * tokens * heads * dim)
        costs["sparse_attention"].bf16 += 4 * tokens * heads * dim * (cfg.sliding_window + selected)
        latent = cfg.o_groups * cfg.o_lora_rank
        move("attention_output", latent * heads * dim / cfg.o_groups * _FP8 + 2 * tokens * (heads * dim + latent))
        costs["attention_output"].bf16 += 2 * tokens * latent * heads * dim / cfg.o_groups
        linear("attention_output", tokens, d, latent)
        linear("router", tokens, cfg.n_routed_experts, d, 2)
        linear("shared_expert", tokens, 2 * width, d)
        linear("shared_expert", tokens, d, width)
        _experts(cfg, costs, tokens, shape.ranks)
    linear("head", shape.logits, cfg.vocab_size, d, 2)
    move("sample", 4 * shape.logits * cfg.vocab_size)
    return dict(costs)


def _experts(cfg: ModelConfig, costs: dict[str, Cost], tokens: int, ranks: int) -> None:
    """One layer's experts under even routing, and the exchange's stand-in."""
    d, local = cfg.hidden_size, cfg.n_routed_experts // ranks
    weights, routed = 3 * d * cfg.moe_intermediate_size, tokens * cfg.num_experts_per_tok
    active = local * (1 - (1 - 1 / local) ** routed)
    few = routed <= 20 * local
    costs["experts"].bytes += active * weights * _FP4 + tokens * ranks * d * (2 + 4)
    if few:
        costs["experts"].fp8 += 2 * routed * weights
    else:
        costs["experts"].bf16 += 2 * routed * weights
    if ranks > 1:
        costs["dispatch"].bytes += (ranks + 1) * tokens * d * 2
        costs["combine"].bytes += (ranks + 1) * tokens * d * 4
