"""How requests are counted: the one place that says what a token per second, a latency and a valid run are.

**Tokens** count in the window in which they came, whichever request they belong to: output tokens at the time of their
chunk, the tokens of a prompt, cached and computed ones apart, at the time of the request's first token. A time belongs
to a window if begin < time <= end, so that windows which partition time add up to the whole.

**Latencies** are those of requests that arrived and ended inside the window (begin <= arrived < end, finished <= end)
and are complete. The others are counted by why they are left out: those that arrived before it are its warm-up, those
that arrived inside and ended later, or arrived later, its drain, and those inside that failed or were cut off are
incomplete. A window that is not several times as long as its longest requests therefore misses these.

**Time of a request** is taken apart: admission from `sent` to `queued`, queue from there to `scheduled`, prefill from
there to the first token, decode from there to the end. The first three are the time to the first token. What a server
does not say is in none of the parts: there is no queue without `scheduled`, and it begins at `sent` without `queued`.

**Time of a token**: each token of a chunk takes an equal share of the time since the chunk before. A request's shares
thus sum to the time between its first chunk and its last, however many tokens come at once. `pause` is the time between
chunks itself, which a reader sees as a halt. Chunks without tokens are no chunks here.

**User speed** is given in both ways: 1 / p90 of requests' latency per output token, from `sent` to `finished`, and
1 / p90 of tokens' shares.

**Percentiles** interpolate linearly between the two nearest values.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from dsv4jax.bench.traffic.records import Measurement


@dataclasses.dataclass(frozen=True)
class Window:
    """A time, in seconds since the run began.

    Raises:
      ValueError: it does not end after it begins.
    """

    begin: float
    end: float

    def __post_init__(self):
        if not self.begin < self.end:
            raise ValueError(f"end = {self.end}: must be after begin = {self.begin}")

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def arrives(self, measurement: Measurement) -> bool:
        """Whether a request arrived inside."""
        return self.begin <= measurement.arrived < self.end


@dataclasses.dataclass(frozen=True)
class Limits:
    """Beyond these a run is not what it was meant to be.

    Args:
      hit_rate: difference of the achieved and the expected share of cached prompt tokens.
      errors: share of the requests which arrived inside that failed.
      client_lag: seconds by which the client was late.
    """

    hit_rate: float = 0.05
    errors: float = 0.01
    client_lag: float = 0.05


DEFAULT_LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of `count` values, in their unit."""

    p50: float
    p90: float
    p99: float
    max: float
    count: int


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Tokens per second, always three numbers."""

    cached_input: float
    computed_input: float
    output: float

    @property
    def cached_computed_and_output(self) -> float:
        """The sum of the three, which must be called by this name."""
        return self.cached_input + self.computed_input + self.output

    def per(self, devices: int) -> "Throughput":
        """The same for each of so many devices."""
        return Throughput(*(value / devices for value in dataclasses.astuple(self)))

    def as_dict(self) -> dict[str, float]:
        """The three and their sum, by names that say the unit."""
        names = ("cached_input", "computed_input", "output", "cached_computed_and_output")
        return {f"{name}_tokens_per_second": getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Excluded:
    """Requests that are not counted; see the module."""

    warm_up: int
    drain: int
    incomplete: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """A window of a run. Percentiles are of seconds, over counted requests (`inter_token` over their tokens, `pause`
    over the times between their chunks), and None where there is no value."""

    window: Window
    devices: int
    throughput: Throughput
    user_speed_end_to_end: float | None
    """1 / p90 of the end-to-end latency per output token, in tokens per second."""
    user_speed_inter_token: float | None
    """1 / p90 of the inter-token latency, in tokens per second."""
    ttft: Percentiles | None
    admission: Percentiles | None
    queue: Percentiles | None
    prefill: Percentiles | None
    decode: Percentiles | None
    end_to_end: Percentiles | None
    inter_token: Percentiles | None
    pause: Percentiles | None
    requests: int
    """Counted ones."""
    excluded: Excluded
    hit_rate: float | None
    """Cached share of the prompt tokens of counted requests."""
    expected_hit_rate: float | None
    """What it should be, of those whose workload says so."""
    error_share: float
    client_lag: float
    """p99 of the time by which requests that arrived inside were sent late, or the client's own lag if that is more."""
    invalid: tuple[str, ...]
    """Why the run is not what it was meant to be; () for a valid one."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, with throughput in all and per device."""
        return dataclasses.asdict(self) | {
            "throughput": self.throughput.as_dict(),
            "throughput_per_device": self.throughput.per(self.devices).as_dict(),
            "valid": not self.invalid,
        }


def summarize(
    measurements: Iterable[Measurement],
    window: Window,
    *,
    devices: int,
    limits: Limits = DEFAULT_LIMITS,
    client_lag: float | None = None,
) -> Summary:
    """Counts the requests of a run.

    Args:
      devices: that served them.
      client_lag: seconds by which the client found itself late, such as p99 of its event loop's delay.

    Raises:
      ValueError: there is no device.
    """
    if devices < 1:
        raise ValueError(f"devices = {devices}: must be at least 1")
    measurements = list(measurements)
    counted, excluded = _counted(measurements, window)
    arrived = [m for m in measurements if window.arrives(m)]
    shares = np.concatenate([np.zeros(0), *map(inter_token_seconds, counted)])
    each = [(m.finished - m.sent) / m.output_tokens for m in counted if m.output_tokens]
    error_share = sum(m.failed for m in arrived) / max(1, len(arrived))
    late = percentiles([m.sent - m.arrived for m in arrived])
    lag = max(client_lag or 0.0, late.p99 if late else 0.0)
    hit_rate = _hit_rate(counted, [m.cached_tokens for m in counted])
    says = [m for m in counted if m.expected_cached_tokens is not None]
    expected = _hit_rate(says, [m.expected_cached_tokens for m in says])
    invalid = []
    if not counted:
        invalid.append(f"no request arrived and ended between {window.begin:g} and {window.end:g} s")
    achieved = _hit_rate(says, [m.cached_tokens for m in says])
    if expected is not None and abs(achieved - expected) > limits.hit_rate:
        invalid.append(
            f"cache hit rate {achieved:.1%} in the place of {expected:.1%}: {limits.hit_rate:.1%} are allowed"
        )
    if error_share > limits.errors:
        invalid.append(f"{error_share:.1%} of the requests failed: {limits.errors:.1%} are allowed")
    if lag > limits.client_lag:
        invalid.append(f"the client was late by {lag:.3g} s: {limits.client_lag:g} are allowed")
    return Summary(
        window=window,
        devices=devices,
        throughput=throughput(measurements, window),
        user_speed_end_to_end=_speed(percentiles(each)),
        user_speed_inter_token=_speed(percentiles(shares)),
        ttft=_between(counted, lambda m: m.sent, lambda m: m.first_token),
        admission=_between(counted, lambda m: m.sent, lambda m: m.queued),
        queue=_between(counted, lambda m: m.sent if m.queued is None else m.queued, lambda m: m.scheduled),
        prefill=_between(counted, lambda m: m.scheduled, lambda m: m.first_token),
        decode=_between(counted, lambda m: m.first_token, lambda m: m.finished),
        end_to_end=_between(counted, lambda m: m.sent, lambda m: m.finished),
        inter_token=percentiles(shares),
        pause=percentiles(np.concatenate([np.zeros(0), *(_pauses(m)[0] for m in counted)])),
        requests=len(counted),
        excluded=excluded,
        hit_rate=hit_rate,
        expected_hit_rate=expected,
        error_share=error_share,
        client_lag=lag,
        invalid=tuple(invalid),
    )


def throughput(measurements: Iterable[Measurement], window: Window) -> Throughput:
    """Tokens that came in the window, per second of it."""
    cached = computed = output = 0
    for m in measurements:
        if m.first_token is not None and window.begin < m.first_token <= window.end:
            cached += m.cached_tokens
            computed += m.prompt_tokens - m.cached_tokens
        seconds = np.asarray(m.chunk_seconds)
        inside = (window.begin < seconds) & (seconds <= window.end)
        output += int(np.asarray(m.chunk_tokens, np.int64)[inside].sum())
    return Throughput(*(tokens / window.seconds for tokens in (cached, computed, output)))


def percentiles(values: Sequence[float] | Float64[np.ndarray, " values"]) -> Percentiles | None:
    """Of values in any order; None of none."""
    if not len(values):
        return None
    p50, p90, p99, most = np.quantile(np.asarray(values, np.float64), [0.5, 0.9, 0.99, 1.0]).tolist()
    return Percentiles(p50, p90, p99, most, len(values))


def inter_token_seconds(measurement: Measurement, window: Window | None = None) -> Float64[np.ndarray, " tokens"]:
    """Per token that came after the first chunk, in the window if there is one: its share of the time since the chunk
    before."""
    pauses, tokens, ends = _pauses(measurement)
    if window is None:
        return np.repeat(pauses / tokens, tokens)
    return np.repeat(pauses / tokens, tokens * ((window.begin < ends) & (ends <= window.end)))


def _pauses(measurement: Measurement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times between chunks with tokens, and of the later chunk of each its tokens and when it came."""
    tokens = np.asarray(measurement.chunk_tokens, np.int64)
    seconds = np.asarray(measurement.chunk_seconds, np.float64)[tokens > 0]
    return np.diff(seconds), tokens[tokens > 0][1:], seconds[1:]


def _counted(measurements: Sequence[Measurement], window: Window) -> tuple[list[Measurement], Excluded]:
    counted, warm_up, drain, incomplete = [], 0, 0, 0
    for m in measurements:
        if m.arrived < window.begin:
            warm_up += 1
        elif m.arrived >= window.end or m.finished > window.end:
            drain += 1
        elif not m.complete:
            incomplete += 1
        else:
            counted.append(m)
    return counted, Excluded(warm_up, drain, incomplete)


def _hit_rate(measurements: Sequence[Measurement], cached: Sequence[int]) -> float | None:
    prompts = sum(m.prompt_tokens for m in measurements)
    return sum(cached) / prompts if prompts else None


def _between(measurements, begin, end) -> Percentiles | None:
    """Of the seconds from one time to another, of those requests that have both."""
    pairs = ((begin(m), end(m)) for m in measurements)
    return percentiles([b - a for a, b in pairs if a is not None and b is not None])


def _speed(seconds: Percentiles | None) -> float | None:
    return 1 / seconds.p90 if seconds and seconds.p90 else None
