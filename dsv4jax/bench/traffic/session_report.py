"""Rows, plots and verdicts of a run of sessions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4jax.bench.results.plots import REQUESTS, Axis, Plot
from dsv4jax.bench.traffic.counting import Percentiles, Summary, Window, percentiles
from dsv4jax.bench.traffic.records import Measurement

KEYS = {
    "summary": ("live_sessions", "scale"),
    "throughput": ("tokens",),
    "latencies": ("of",),
    "contexts": ("prompt_tokens_from",),
}
"""Columns that say what a row is of."""
_PARTS = ("ttft", "admission", "queue", "prefill", "decode", "end_to_end", "inter_token", "pause")

PLOTS = [
    Plot(
        kind="line",
        title="Cached share of prompts by their length, beside a cache that forgets nothing",
        table="contexts",
        x="prompt_tokens_from",
        y=("cached_share", "expected_cached_share"),
        x_axis=Axis("prompt", "tokens", log=True),
        y_axis=Axis("cached share"),
    ),
    Plot(
        kind="line",
        title="Time to the first token by length of the prompt",
        table="contexts",
        x="prompt_tokens_from",
        y=("ttft_p50_seconds", "ttft_p90_seconds"),
        x_axis=Axis("prompt", "tokens", log=True),
        y_axis=Axis("time to first token", "s", log=True),
    ),
    Plot(
        kind="scatter",
        title="Time to the first token by tokens that had to be computed",
        table=REQUESTS,
        x="computed_tokens",
        y=("ttft_seconds",),
        x_axis=Axis("computed tokens of the prompt", "tokens", log=True),
        y_axis=Axis("time to first token", "s", log=True),
    ),
]


def summary_row(summary: Summary) -> dict[str, Any]:
    """A window in one row, without throughput and latencies."""
    return {
        "requests": summary.requests,
        "user_speed_end_to_end_tokens_per_second": summary.user_speed_end_to_end,
        "user_speed_inter_token_tokens_per_second": summary.user_speed_inter_token,
        "cached_share": summary.hit_rate,
        "expected_cached_share": summary.expected_hit_rate,
        "error_share": summary.error_share,
        "client_lag_seconds": summary.client_lag,
        "excluded_warm_up": summary.excluded.warm_up,
        "excluded_drain": summary.excluded.drain,
        "excluded_incomplete": summary.excluded.incomplete,
        "valid": not summary.invalid,
    }


def throughput_rows(summary: Summary) -> list[dict[str, Any]]:
    """Tokens per second, a row per kind of tokens and one for their sum."""
    per_device = summary.throughput.per(summary.devices).as_dict()
    return [
        {
            "tokens": name.removesuffix("_tokens_per_second"),
            "tokens_per_second": value,
            "tokens_per_second_per_device": per_device[name],
        }
        for name, value in summary.throughput.as_dict().items()
    ]


def latency_rows(summary: Summary) -> list[dict[str, Any]]:
    """Percentiles in milliseconds, a row per part of a request's time that the server tells."""
    found = [(part, getattr(summary, part)) for part in _PARTS]
    return [{"of": part, **_milliseconds(values)} for part, values in found if values is not None]


def context_rows(measurements: Sequence[Measurement], window: Window) -> list[dict[str, Any]]:
    """Cached shares and time to the first token of the requests that `Summary` counts, by powers of two of prompts."""
    counted = [m for m in measurements if m.complete and window.arrives(m) and m.finished <= window.end]
    bins: dict[int, list[Measurement]] = {}
    for m in counted:
        bins.setdefault(1 << int(math.log2(max(1, m.prompt_tokens))), []).append(m)
    rows = []
    for first, inside in sorted(bins.items()):
        prompts = sum(m.prompt_tokens for m in inside)
        expected = [m.expected_cached_tokens for m in inside]
        ttft = percentiles([m.first_token - m.sent for m in inside])
        rows.append(
            {
                "prompt_tokens_from": first,
                "requests": len(inside),
                "cached_share": sum(m.cached_tokens for m in inside) / prompts,
                "expected_cached_share": None if None in expected else sum(expected) / prompts,
                "ttft_p50_seconds": ttft.p50,
                "ttft_p90_seconds": ttft.p90,
            }
        )
    return rows


def request_rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Raw records with what plots need of them; that is None where no token came."""
    return [
        m.as_dict()
        | {
            "computed_tokens": m.prompt_tokens - m.cached_tokens if m.prompt_tokens else None,
            "ttft_seconds": None if m.first_token is None else m.first_token - m.sent,
        }
        for m in measurements
    ]


def prompt_row(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """What was really sent, of all requests whose usage is known."""
    known = [m for m in measurements if m.prompt_tokens]
    if not known:
        return {"requests": 0}
    p50, p99 = np.quantile([m.prompt_tokens for m in known], [0.5, 0.99]).tolist()
    return {
        "requests": len(known),
        "sessions": len({m.session for m in known}),
        "context_p50": p50,
        "context_p99": p99,
        "output_tokens": float(np.mean([m.output_tokens for m in known if m.complete] or [0.0])),
    }


def verdicts(summary: Summary) -> list[str]:
    """Sentences that sum a window up."""
    lines = [f"not valid: {reason}" for reason in summary.invalid] or ["valid"]
    if summary.hit_rate is not None and summary.expected_hit_rate is not None:
        lines.append(
            f"{summary.hit_rate:.1%} of the prompt tokens were cached, a cache that forgets nothing has"
            f" {summary.expected_hit_rate:.1%}"
        )
    parts = {name: getattr(summary, name) for name in ("queue", "prefill", "decode")}
    if all(parts.values()):
        slowest = max(parts, key=lambda name: parts[name].p50)
        shown = ", ".join(f"{name} {values.p50 * 1e3:.4g} ms" for name, values in parts.items())
        lines.append(f"most of the median request's time is {slowest}: {shown}")
    return lines


def _milliseconds(values: Percentiles) -> dict[str, Any]:
    return {f"{name}_ms": getattr(values, name) * 1e3 for name in ("p50", "p90", "p99", "max")} | {
        "count": values.count
    }
