"""Prometheus metrics of the engine (http_api section 8) and the last steps for the status page."""

import bisect
import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dsv4jax.engine.records import EngineStats, RequestRecord, StepRecord

TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION_TOKENS = (1, *(2**i for i in range(3, 15)))
CHOICES = (1, 2, 5, 10, 20, 50, 100)
HOST_GAP = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1)

RECENT_STEPS = 120


def token_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bucket: bucket <= largest, series))


class Histogram:
    """Counts of values per bucket; a value belongs to the first bucket whose edge is not below it."""

    def __init__(self, edges: Sequence[float]):
        self.edges = tuple(edges)
        self._edge_array = np.asarray(edges, np.float64)
        self.counts = np.zeros(len(edges) + 1, np.int64)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.sum += value

    def add_all(self, values: np.ndarray) -> None:
        if values.size:
            self.counts += np.bincount(np.searchsorted(self._edge_array, values), minlength=self.counts.size)
            self.sum += float(values.sum())

    def cumulative(self) -> list[tuple[str, int]]:
        names = [floatToGoString(edge) for edge in (*self.edges, float("inf"))]
        return list(zip(names, self.counts.cumsum().tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class StepPoint:
    """One step on the status page."""

    number: int
    device_seconds: float
    gap_seconds: float
    tokens: int


class PrometheusObserver:
    """Collects what the engine reports; `registry` gives it to Prometheus together with the engine's statistics.

    The engine's thread writes, scrapes read. Totals that the engine keeps itself (`EngineStats`) are read when scraped.

    Args:
      model_name: value of the label `model_name`.
      max_model_len: tokens; end of the buckets that count a request's tokens.
      cache_config: labels of `vllm:cache_config_info`, as `block_size`.
    """

    def __init__(self, model_name: str, max_model_len: int, cache_config: Mapping[str, str | int]):
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        self._lock = threading.Lock()
        tokens = token_buckets(max_model_len)
        self._histograms = {
            "vllm:iteration_tokens_total": Histogram(ITERATION_TOKENS),
            "vllm:time_to_first_token_seconds": Histogram(TIME_TO_FIRST_TOKEN),
            "vllm:inter_token_latency_seconds": Histogram(INTER_TOKEN),
            "vllm:request_time_per_output_token_seconds": Histogram(INTER_TOKEN),
            "vllm:e2e_request_latency_seconds": Histogram(LATENCY),
            "vllm:request_queue_time_seconds": Histogram(LATENCY),
            "vllm:request_inference_time_seconds": Histogram(LATENCY),
            "vllm:request_prefill_time_seconds": Histogram(LATENCY),
            "vllm:request_decode_time_seconds": Histogram(LATENCY),
            "vllm:request_prompt_tokens": Histogram(tokens),
            "vllm:request_generation_tokens": Histogram(tokens),
            "vllm:request_max_num_generation_tokens": Histogram(tokens),
            "vllm:request_params_max_tokens": Histogram(tokens),
            "vllm:request_params_n": Histogram(CHOICES),
            "dsv4jax:host_gap_seconds": Histogram(HOST_GAP),
        }
        self._success = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._rejections: collections.Counter[str] = collections.Counter()
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._choices: dict[str, list[int]] = {}  # of running requests: output tokens of the choices that ended
        self._recent: collections.deque[StepPoint] = collections.deque(maxlen=RECENT_STEPS)

    def step(self, record: StepRecord) -> None:
        """Of `Observer`: a step was processed."""
        tokens = record.computed_tokens + record.output_tokens
        with self._lock:
            self._histograms["vllm:inter_token_latency_seconds"].add_all(record.inter_token_seconds)
            self._histograms["vllm:iteration_tokens_total"].add(tokens)
            self._histograms["dsv4jax:host_gap_seconds"].add(record.gap_seconds)
            self._recent.append(StepPoint(record.number, record.device_seconds, record.gap_seconds, tokens))

    def request(self, record: RequestRecord) -> None:
        """Of `Observer`: a choice ended. What belongs to the whole request is counted with choice 0."""
        with self._lock:
            self._success[record.finish_reason] += 1
            self._add("vllm:request_generation_tokens", record.output_tokens)
            if record.index == 0:
                self._add("vllm:request_prompt_tokens", record.prompt_tokens)
                self._add("vllm:request_params_n", record.n)
                self._add("vllm:request_params_max_tokens", record.max_tokens)
                if record.first_token is not None:
                    self._prompt_tokens += record.prompt_tokens
                    self._cached_prompt_tokens += record.cached_tokens
            self._add_longest_choice(record)
            self._add_times(record)

    def rejected(self, reason: str) -> None:
        """Of `Observer`: a request was not admitted."""
        with self._lock:
            self._rejections[reason] += 1

    def recent_steps(self) -> list[StepPoint]:
        """The last steps, oldest first."""
        with self._lock:
            return list(self._recent)

    def registry(self, stats: Callable[[], EngineStats]) -> CollectorRegistry:
        """All metrics, together with those of the process; `stats` is read at every scrape."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_EngineCollector(self, stats))
        ProcessCollector(registry=registry)
        return registry

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    def _add_longest_choice(self, record: RequestRecord) -> None:
        ended = self._choices.setdefault(record.request_id, [])
        ended.append(record.output_tokens)
        if len(ended) == record.n:
            self._add("vllm:request_max_num_generation_tokens", max(ended))
            del self._choices[record.request_id]

    def _add_times(self, record: RequestRecord) -> None:
        self._add("vllm:e2e_request_latency_seconds", record.finished - record.arrived)
        if record.scheduled is not None:
            self._add("vllm:request_queue_time_seconds", record.scheduled - record.arrived)
            self._add("vllm:request_inference_time_seconds", record.finished - record.scheduled)
        if record.first_token is not None:
            decode = record.finished - record.first_token
            self._add("vllm:time_to_first_token_seconds", record.first_token - record.arrived)
            self._add("vllm:request_decode_time_seconds", decode)
            if record.scheduled is not None:
                self._add("vllm:request_prefill_time_seconds", record.first_token - record.scheduled)
            if record.output_tokens > 1:
                self._add("vllm:request_time_per_output_token_seconds", decode / (record.output_tokens - 1))

    def collect(self, stats: EngineStats) -> Iterator[Metric]:
        """The metric families at this moment."""
        with self._lock:
            histograms = [(name, one.cumulative(), one.sum) for name, one in self._histograms.items()]
            success, rejections = dict(self._success), dict(self._rejections)
            prompt_tokens, cached_prompt_tokens = self._prompt_tokens, self._cached_prompt_tokens
        gauge, counter = self._gauge, self._counter

        yield gauge("vllm:num_requests_running", "Requests in the batch.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", stats.waiting)
        yield gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", {"capacity": stats.waiting}, "reason"
        )
        usage = stats.used_pages / stats.pages if stats.pages else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Part of the cache pages in use, 0 to 1.", usage)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield counter("vllm:num_preemptions", "Requests put back into the queue.", stats.preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens of ended requests that gave a token.", prompt_tokens)
        yield counter("vllm:prompt_tokens_cached", "Those of them that no step ran.", cached_prompt_tokens)
        yield counter("vllm:generation_tokens", "Generated tokens.", stats.output_tokens)
        yield counter("vllm:request_success", "Ended choices.", success, "finished_reason")
        yield counter("vllm:admission_rejections", "Requests not admitted.", rejections, "reason")
        drafts = stats.drafts
        by_place = {str(i): count for i, count in enumerate(drafts.accepted)}
        yield counter("vllm:spec_decode_num_drafts", "Verifications of a request with drafts.", drafts.rounds)
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", sum(drafts.verified))
        yield counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", sum(drafts.accepted))
        yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place.", by_place, "position")
        for name in ("queries", "hits"):
            yield counter(f"vllm:mm_cache_{name}", "Image cache: not used, always 0.", 0)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Cache settings.", labels=[*self._labels, *self._cache_config]
        )
        info.add_metric([*self._labels.values(), *self._cache_config.values()], 1)
        yield info

        yield counter("dsv4jax:compilations", "Programs compiled after warm-up.", stats.compilations)
        length = 1 + sum(drafts.accepted) / drafts.rounds if drafts.rounds else 0.0
        yield gauge("dsv4jax:acceptance_length", "Mean tokens of a verification with drafts; 0 before any.", length)
        verified = {str(i): count for i, count in enumerate(drafts.verified)}
        yield counter("dsv4jax:verified_drafts", "Drafts that were verified, by place.", verified, "position")
        yield counter(
            "dsv4jax:withheld_drafts",
            "Steps in which a request that wants drafts verified none, by reason.",
            drafts.withheld,
            "reason",
        )
        yield counter("dsv4jax:steps", "Steps processed.", stats.steps)
        tokens = {"cached": stats.cached_tokens, "computed": stats.computed_tokens, "output": stats.output_tokens}
        yield counter("dsv4jax:tokens", "Tokens: prompt cached, prompt computed, generated.", tokens, "kind")
        seconds = {
            "device": stats.device_seconds,
            "schedule": stats.schedule_seconds,
            "update": stats.update_seconds,
            "gap": stats.gap_seconds,
        }
        yield counter("dsv4jax:step_seconds", "Time of steps by part.", seconds, "part")
        pages = {
            "used": stats.used_pages,
            "cached": stats.cached_pages,
            "free": stats.pages - stats.used_pages - stats.cached_pages,
        }
        yield gauge("dsv4jax:pages", "Cache pages: used, free with a reusable prefix, free.", pages, "state")
        per_rank = {
            "running": "Requests in the batch of a data-parallel rank.",
            "load": "What the scheduler compares ranks by, in tokens of prefill.",
            "used_pages": "Cache pages of a rank in use.",
            "cached_pages": "Cache pages of a rank that are free with a reusable prefix.",
        }
        for name, text in per_rank.items():
            values = {str(i): getattr(rank, name) for i, rank in enumerate(stats.ranks)}
            yield gauge(f"dsv4jax:rank_{name}", text, values, "rank")
        for name, text in (("queries", "looked up in"), ("hits", "found in")):
            values = {str(i): getattr(rank, f"prefix_{name}") for i, rank in enumerate(stats.ranks)}
            yield counter(
                f"dsv4jax:rank_prefix_{name}", f"Prompt tokens {text} the prefix cache of a rank.", values, "rank"
            )
        for model, balance in stats.balance.items():
            prefix = "dsv4jax:draft_expert" if model == "draft" else "dsv4jax:expert"
            text = f"Mean expert load of the ranks / busiest's, averaged over recent steps and layers of the {model}."
            yield gauge(f"{prefix}_balancedness", text, balance.measured, "step")
            text = "The same for uniform random routing of as many tokens."
            yield gauge(f"{prefix}_balancedness_uniform", text, balance.uniform, "step")
            yield counter(f"{prefix}_rearrangements", "Rearrangements begun.", balance.rearrangements)
            yield counter(f"{prefix}_rearrangement_failures", "Those abandoned.", balance.failures)
            yield gauge(f"{prefix}s_moved", "Experts moved in the newest rearrangement.", balance.experts_moved)
        yield gauge("dsv4jax:waiting_tokens", "Prompt tokens of waiting requests.", stats.waiting_tokens)
        for name, buckets, total in histograms:
            family = HistogramMetricFamily(name, f"Histogram of {name.partition(':')[2]}.", labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, total)
            yield family

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily, name, text, value, label)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(CounterMetricFamily, name, text, value, label)

    def _fill(self, kind, name: str, text: str, value: float | Mapping[str, float], label: str) -> Metric:
        family = kind(name, text, labels=[*self._labels, *([label] if label else [])])
        values = value.items() if isinstance(value, Mapping) else [(None, value)]
        for label_value, number in values:
            family.add_metric([*self._labels.values(), *([label_value] if label else [])], number)
        return family


class _EngineCollector(Collector):
    def __init__(self, observer: PrometheusObserver, stats: Callable[[], EngineStats]):
        self._observer = observer
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        return self._observer.collect(self._stats())
