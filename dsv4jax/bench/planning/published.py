"""The cost model beside published figures of this model served at scale. None of them was used to choose a constant.

The published study names neither its machine nor its engine in what is known here. 64,400 tokens per second and device
are 1.0 PFLOP/s of the 8 billion parameters that prefill uses, which an H200 does not reach, and only a rack such as the
GB300 NVL72 has 32 devices in one NVLink domain. So it is compared with `gb300`, of which this project has measured
nothing: rates are those of the data sheet, and the rest is what was measured on an H200. An engine that sends tokens to
those ranks only that want them ("ragged") is assumed, and experts balanced to 0.94, as the study reports.
"""

from typing import Any

import numpy as np

from dsv4jax.bench.planning.cost_model import HardwareCost, StepTime
from dsv4jax.bench.planning.hardware import Hardware, load_hardware
from dsv4jax.config import ModelConfig
from dsv4jax.quant import record_bytes_mxfp4, record_bytes_nvfp4

_BALANCE = 0.94
_CHUNK = 8192
"""Prompt tokens of a prefill step and device, which the study does not say."""


def published_rows(cfg: ModelConfig) -> list[dict[str, Any]]:
    """One row per figure: what was published, what the model says, and its error.

    `at_rates` is what the same bytes and then the same operations take at the data sheet's rates with nothing else, not
    even an exchange; None where that says nothing.
    """
    gb300, h200 = load_hardware("gb300"), load_hardware("h200")
    ideal = gb300.at_its_rates()

    def time(hardware: Hardware, ranks: int, requests: int, tokens: int, context: int, draft: bool = False) -> StepTime:
        return _cost(cfg, hardware, ranks).decode(requests, tokens, context, draft)

    rows = []

    def add(
        figure: str, conditions: str, unit: str, published: float, ours: float, at_rates: float | None = None
    ) -> None:
        row = {"figure": figure, "conditions": conditions, "unit": unit, "published": published, "ours": ours}
        rows.append({**row, "error": ours / published - 1, "at_rates": at_rates})

    for tokens in (1, 6):
        for ranks, published in ((4, 13.4), (32, 6.0)):
            at = f"DEP{ranks}, 64 requests per device, {tokens} token(s) each, 128K"
            ours, rates = (_experts(cfg, hw, time(hw, ranks, 64, tokens, 131072)) for hw in (gb300, ideal))
            add("experts of a step", at, "ms", published, ours, rates)
        other, rates = (_other(cfg, hw, time(hw, 32, 64, tokens, 131072)) for hw in (gb300, ideal))
        add("other work of it", f"the same at DEP32, {tokens} token(s)", "ms", 10.0, other, rates)
    steps = {}
    for context, published in ((131072, 8.93), (875520, 9.53)):
        ours, ideally = (time(hw, 32, 16, 6, context) for hw in (gb300, ideal))
        steps[context] = 1e3 * ours.device, 1e3 * _alone(ideally)
        add("target forward", f"DEP32, 16 requests x 6 tokens, {context // 1024}K", "ms", published, *steps[context])
    add("its growth", "from 128K to 855K", "ms", 0.60, *(b - a for a, b in zip(*steps.values(), strict=True)))
    for ranks, published in ((2, 64_400), (4, 53_300)):
        ours, ideally = (_cost(cfg, hw, ranks).prefill(_CHUNK, _CHUNK / 2) for hw in (gb300, ideal))
        at = f"DEP{ranks}, chunks of {_CHUNK:,}, cold"
        add("prefill per device", at, "tokens/s", published, _CHUNK / ours.device, _CHUNK / _alone(ideally))
    for ranks, published in ((2, -5.9), (4, -13.6)):
        for length in (131072, 875520):
            at = f"DEP{ranks}, prefill alone, prompts of {length // 1024}K at any lag"
            add("mirror to lag", at, "%", published, 100 * _lag_loss(_cost(cfg, gb300, ranks), length))
    wide = [time(gb300, ranks, 16, 6, 131072, draft=True) for ranks in (16, 32)]
    add(
        "device time, DEP32 less DEP16",
        "16 requests x 6 tokens, draft, 128K",
        "ms",
        -1.1,
        1e3 * (wide[1].device - wide[0].device),
    )
    add("step, DEP16", "the same", "ms", 13.84, 1e3 * wide[0].seconds)
    add("step, DEP32 with slow hosts", "the same", "ms", 17.57, 1e3 * wide[1].seconds)
    for tokens in (1, 4):
        eight = HardwareCost(cfg, h200, 8).decode(8, tokens, 8192, draft=tokens > 1)
        at = f"8 x H200, 64 requests in all, {tokens} token(s) per step, 8K"
        add(
            "step",
            at,
            "ms",
            29.6,
            1e3 * eight.seconds,
            1e3 * _alone(HardwareCost(cfg, h200.at_its_rates(), 8).decode(8, tokens, 8192, tokens > 1)),
        )
    add("cache per token", "4 sources", "bytes", 890, _cache_bytes(cfg))
    return rows


def _cost(cfg: ModelConfig, hardware: Hardware, ranks: int) -> HardwareCost:
    return HardwareCost(cfg, hardware, ranks, exchange="ragged", balance=_BALANCE, draft_balance=_BALANCE)


def _experts(cfg: ModelConfig, hardware: Hardware, time: StepTime) -> float:
    """Milliseconds of the routed experts."""
    fixed = cfg.num_hidden_layers * hardware.stages["experts"].fixed
    return 1e3 * (time.parts["expert reads"] + time.parts["expert products"] + fixed)


def _other(cfg: ModelConfig, hardware: Hardware, time: StepTime) -> float:
    """Milliseconds of all but the routed experts and the exchange."""
    return 1e3 * _alone(time) - _experts(cfg, hardware, time)


def _alone(time: StepTime) -> float:
    """Seconds of the device without the exchange."""
    return time.device - time.parts["exchange"]


def _lag_loss(cost: HardwareCost, length: int) -> float:
    """Relative change of the tokens per second of prefill, from ranks that are at the same place of prompts of `length`
    tokens to ranks that are at places of their own: a step then lasts as long as that of the rank that is furthest."""
    contexts = np.arange(_CHUNK / 2, length, _CHUNK)
    seconds = np.sort([cost.prefill(_CHUNK, context, ends=False).device for context in contexts])
    shares = np.arange(len(seconds) + 1) / len(seconds)
    furthest = np.diff(shares**cost.ranks)  # probability that the slowest of the ranks is at each place
    return float(seconds.mean() / (furthest @ seconds) - 1)


def _cache_bytes(cfg: ModelConfig) -> float:
    """Of a token in all sources (architecture section 1.4)."""
    record = record_bytes_nvfp4(cfg.head_dim) + record_bytes_mxfp4(cfg.index_head_dim)
    return sum(record / cfg.ratio(i) for i in cfg.kv_source_layer_ids)
