"""The Prometheus metrics and the page that shows the engine."""

import re
import threading
import time

import httpx
import numpy as np
import pytest
from browser import browse
from fake_engine import FakeEngine, engine_stats, make_app, step_record
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.parser import text_string_to_metric_families

from dsv4jax.engine.draft_totals import DraftTotals
from dsv4jax.engine.records import BalanceStats, RankStats, RequestRecord
from dsv4jax.server.metrics import INTER_TOKEN, RECENT_STEPS, Histogram, PrometheusObserver, token_buckets
from dsv4jax.server.run import BackgroundServer

COUNTERS = """
    prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens prompt_tokens_cached
    request_success spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos mm_cache_queries mm_cache_hits admission_rejections
""".split()
GAUGES = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc".split()
LATENCIES = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
INTER = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000"
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BUCKETS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": INTER,
    "request_time_per_output_token_seconds": INTER,
    "e2e_request_latency_seconds": LATENCIES,
    "request_queue_time_seconds": LATENCIES,
    "request_inference_time_seconds": LATENCIES,
    "request_prefill_time_seconds": LATENCIES,
    "request_decode_time_seconds": LATENCIES,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": None,
}


def make_observer(max_model_len=4096):
    return PrometheusObserver("toy", max_model_len, {"block_size": 64})


def scrape(observer, **stats) -> str:
    return generate_latest(observer.registry(lambda: engine_stats(**stats))).decode()


def sample(text: str, name: str, **labels) -> float:
    """The one sample of that name with these labels among its labels."""
    found = [
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def request_record(**values) -> RequestRecord:
    fields = dict(
        request_id="a", index=0, n=1, prompt_tokens=100, cached_tokens=64, output_tokens=11, max_tokens=20,
        draft_rounds=0, drafted=0, accepted=0, preemptions=0, finish_reason="stop", arrived=10.0, scheduled=11.0,
        first_token=13.0, finished=18.0,
    )  # fmt: skip
    return RequestRecord(**{**fields, **values})


def test_every_metric_has_its_name_type_labels_and_buckets():
    observer = make_observer()
    observer.rejected("queue_full")
    text = scrape(observer)
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert {f"vllm:{name}_total": "counter" for name in COUNTERS}.items() <= types.items()
    assert {f"vllm:{name}": "gauge" for name in [*GAUGES, "cache_config_info"]}.items() <= types.items()
    assert {f"vllm:{name}": "histogram" for name in BUCKETS}.items() <= types.items()
    for line in text.splitlines():
        if line.startswith(("vllm:", "dsv4jax:")):
            assert 'model_name="toy"' in line and 'engine="0"' in line, line
    for name, buckets in BUCKETS.items():
        edges = re.findall(rf'^vllm:{name}_bucket{{.*le="([^"]+)".*}}', text, re.M)
        assert edges[-1] == "+Inf"
        if buckets:
            assert [float(edge) for edge in edges[:-1]] == [float(edge) for edge in buckets.split()]
    assert sample(text, "vllm:cache_config_info", block_size="64") == 1


def test_statistics_are_read_at_the_scrape():
    stats = dict(
        running=3, waiting=2, waiting_tokens=77, used_pages=250, cached_pages=100, prefix_queries=10, prefix_hits=4,
        cached_tokens=4, computed_tokens=9, output_tokens=8, preemptions=1, steps=6, device_seconds=1.5,
        schedule_seconds=0.25, update_seconds=0.125, gap_seconds=0.5, compilations=2,
    )  # fmt: skip
    text = scrape(make_observer(), **stats)
    assert sample(text, "vllm:num_requests_running") == 3
    assert sample(text, "vllm:num_requests_waiting") == 2
    assert sample(text, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert sample(text, "vllm:kv_cache_usage_perc") == 0.25
    assert sample(text, "vllm:prefix_cache_queries_total") == 10
    assert sample(text, "vllm:prefix_cache_hits_total") == 4
    assert sample(text, "vllm:generation_tokens_total") == 8
    assert sample(text, "vllm:num_preemptions_total") == 1
    assert sample(text, "dsv4jax:compilations_total") == 2
    assert [sample(text, "dsv4jax:tokens_total", kind=k) for k in ("cached", "computed", "output")] == [4, 9, 8]
    parts = ("device", "schedule", "update", "gap")
    assert [sample(text, "dsv4jax:step_seconds_total", part=p) for p in parts] == [1.5, 0.25, 0.125, 0.5]
    assert [sample(text, "dsv4jax:pages", state=s) for s in ("used", "cached", "free")] == [250, 100, 650]


def test_experts_of_target_and_draft_are_told_apart():
    target = BalanceStats({"prefill": 0.5, "decode": 0.75}, {"prefill": 0.9, "decode": 0.875}, 4, 30, 1)
    draft = BalanceStats({"prefill": 0.25, "decode": 0.625}, {"prefill": 0.8, "decode": 0.9375}, 3, 7, 0)
    text = scrape(make_observer(), balance={"target": target, "draft": draft})
    for prefix, stats in (("dsv4jax:expert", target), ("dsv4jax:draft_expert", draft)):
        for step in ("prefill", "decode"):
            assert sample(text, f"{prefix}_balancedness", step=step) == stats.measured[step]
            assert sample(text, f"{prefix}_balancedness_uniform", step=step) == stats.uniform[step]
        assert sample(text, f"{prefix}_rearrangements_total") == stats.rearrangements
        assert sample(text, f"{prefix}_rearrangement_failures_total") == stats.failures
        assert sample(text, f"{prefix}s_moved") == stats.experts_moved
    assert "expert" not in scrape(make_observer())


def test_drafts_are_counted_by_place_and_reason():
    drafts = DraftTotals(10, [10, 8, 5], [9, 4, 2], {"context": 3, "pages": 1})
    text = scrape(make_observer(), drafts=drafts)
    assert sample(text, "vllm:spec_decode_num_drafts_total") == 10
    assert sample(text, "vllm:spec_decode_num_draft_tokens_total") == 23
    assert sample(text, "vllm:spec_decode_num_accepted_tokens_total") == 15
    for place in range(3):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert sample(text, name, position=str(place)) == drafts.accepted[place]
        assert sample(text, "dsv4jax:verified_drafts_total", position=str(place)) == drafts.verified[place]
    assert sample(text, "dsv4jax:acceptance_length") == 2.5
    assert sample(text, "dsv4jax:withheld_drafts_total", reason="context") == 3
    assert sample(scrape(make_observer()), "dsv4jax:acceptance_length") == 0


def test_each_rank_has_metrics_of_its_own():
    ranks = RankStats(3, 99.5, 40, 10, 700, 300), RankStats(0, 0.0, 0, 50, 0, 0)
    text = scrape(make_observer(), ranks=ranks)
    for name, field in {
        "running": "running", "load": "load", "used_pages": "used_pages", "cached_pages": "cached_pages",
        "prefix_queries_total": "prefix_queries", "prefix_hits_total": "prefix_hits",
    }.items():  # fmt: skip
        for i, rank in enumerate(ranks):
            assert sample(text, f"dsv4jax:rank_{name}", rank=str(i)) == getattr(rank, field)


def test_an_ended_request_is_counted_with_its_times():
    observer = make_observer()
    observer.request(request_record())
    text = scrape(observer)
    sums = {
        "time_to_first_token_seconds": 3,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 5,
        "request_inference_time_seconds": 7,
        "e2e_request_latency_seconds": 8,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 100,
        "request_generation_tokens": 11,
        "request_max_num_generation_tokens": 11,
        "request_params_max_tokens": 20,
        "request_params_n": 1,
    }
    for name, expected in sums.items():
        assert sample(text, f"vllm:{name}_sum") == pytest.approx(expected), name
        assert sample(text, f"vllm:{name}_count") == 1, name
    assert sample(text, "vllm:prompt_tokens_total") == 100
    assert sample(text, "vllm:prompt_tokens_cached_total") == 64
    for reason, count in {"stop": 1, "length": 0, "abort": 0, "error": 0}.items():
        assert sample(text, "vllm:request_success_total", finished_reason=reason) == count


def test_several_choices_count_their_prompt_once():
    observer = make_observer()
    for index, tokens in ((1, 7), (0, 30), (2, 4)):
        observer.request(request_record(n=3, index=index, output_tokens=tokens))
    text = scrape(observer)
    assert sample(text, "vllm:prompt_tokens_total") == 100
    assert sample(text, "vllm:request_success_total", finished_reason="stop") == 3
    assert sample(text, "vllm:request_generation_tokens_count") == 3
    assert sample(text, "vllm:request_params_n_sum") == 3
    assert sample(text, "vllm:request_max_num_generation_tokens_count") == 1
    assert sample(text, "vllm:request_max_num_generation_tokens_sum") == 30


def test_a_request_aborted_in_the_queue_has_no_times_of_its_run():
    observer = make_observer()
    observer.request(request_record(finish_reason="abort", scheduled=None, first_token=None, output_tokens=0))
    text = scrape(observer)
    assert sample(text, "vllm:request_success_total", finished_reason="abort") == 1
    assert sample(text, "vllm:e2e_request_latency_seconds_count") == 1
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert sample(text, f"vllm:{name}_seconds_count") == 0, name
    assert sample(text, "vllm:prompt_tokens_total") == 0


def test_a_step_adds_its_tokens_and_gap():
    observer = make_observer()
    gaps = np.array([0.01, 0.011, 0.3, 99.0])
    observer.step(step_record(computed_tokens=60, output_tokens=5, gap_seconds=0.002, inter_token_seconds=gaps))
    text = scrape(observer)
    assert sample(text, "vllm:inter_token_latency_seconds_count") == 4
    assert sample(text, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps.sum())
    assert sample(text, "vllm:iteration_tokens_total_sum") == 65
    assert sample(text, "dsv4jax:host_gap_seconds_sum") == pytest.approx(0.002)


@given(st.lists(st.one_of(st.sampled_from(INTER_TOKEN), st.floats(0, 200)), max_size=30), st.integers(0, 30))
def test_a_histogram_counts_like_the_client_library(values, split):
    registry = CollectorRegistry()
    expected = ClientHistogram("h", "", buckets=INTER_TOKEN, registry=registry)
    ours = Histogram(INTER_TOKEN)
    for value in values:
        expected.observe(value)
    for value in values[:split]:
        ours.add(value)
    ours.add_all(np.array(values[split:], np.float64))
    for edge, count in ours.cumulative():
        assert registry.get_sample_value("h_bucket", {"le": edge}) == count
    assert ours.sum == pytest.approx(registry.get_sample_value("h_sum"))


def test_token_buckets_end_at_the_context():
    assert token_buckets(1) == (1,)
    assert token_buckets(500) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert token_buckets(1_048_576)[-1] == 1_000_000


def test_observing_while_scraping_loses_nothing():
    observer = make_observer()
    registry = observer.registry(engine_stats)
    steps, each = 2000, np.full(16, 0.02)

    def run():
        for number in range(steps):
            observer.step(step_record(number, output_tokens=16, inter_token_seconds=each))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        text = generate_latest(registry).decode()
        count = sample(text, "vllm:inter_token_latency_seconds_count")
        assert count % 16 == 0
        assert sample(text, "vllm:inter_token_latency_seconds_bucket", le="0.025") == count
    assert sample(generate_latest(registry).decode(), "vllm:inter_token_latency_seconds_count") == 16 * steps
    assert [step.number for step in observer.recent_steps()] == list(range(steps - RECENT_STEPS, steps))


def test_a_step_of_256_tokens_costs_the_engine_little():
    observer = make_observer()
    record = step_record(output_tokens=256, inter_token_seconds=np.linspace(0.005, 0.05, 256))
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(100):
            observer.step(record)
        best = min(best, (time.perf_counter() - begin) / 100)
    assert best < 500e-6  # about 15 us on an idle core; one observe() per token takes more than this bound


class BusyEngine(FakeEngine):
    """Statistics of a loaded engine that is a second older each time it is asked."""

    seconds = 100

    def stats(self):
        self.seconds += 1
        seconds = self.seconds
        swing = np.sin(seconds / 5)
        steps = seconds * 40
        return engine_stats(
            running=48, waiting=7, waiting_tokens=23_410, used_pages=610, cached_pages=255, steps=steps,
            prefix_queries=seconds * 9000, prefix_hits=seconds * 6200, cached_tokens=int(seconds * 6200 + 4000 * swing),
            computed_tokens=int(seconds * 2800 - 3000 * swing), output_tokens=int(seconds * 1890 + 900 * swing),
            preemptions=3, device_seconds=steps * 0.0231, schedule_seconds=steps * 0.0009,
            update_seconds=steps * 0.0014, gap_seconds=steps * 0.0004,
        )  # fmt: skip


def busy_server(**config):
    app = make_app(BusyEngine(), **config)
    draw = np.random.default_rng(0)
    for number in range(200):
        device = 0.022 + 0.004 * draw.random() + (0.05 if number % 23 == 0 else 0)
        gap = 0.0004 + (0.004 if number % 31 == 0 else 0)
        app.state.observer.step(step_record(number, device_seconds=device, gap_seconds=gap, output_tokens=48))
    return BackgroundServer(app)


def test_status_json_tells_what_the_page_shows():
    with busy_server() as server:
        status = httpx.get(server.url + "/status.json", timeout=60).json()
        assert status["state"] == "ready" and status["model"] == "toy"
        assert status["stats"]["running"] == 48 and status["stats"]["cached_pages"] == 255
        assert len(status["steps"]) == RECENT_STEPS
        assert set(status["steps"][-1]) == {"number", "device_seconds", "gap_seconds", "tokens"}
        page = httpx.get(server.url + "/", timeout=60)
        assert page.headers["content-type"].startswith("text/html")
        loads_from_elsewhere = r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)"
        assert not re.findall(loads_from_elsewhere, page.text)


def test_the_page_shows_the_engine_in_a_browser(tmp_path):
    with busy_server() as server:
        document = browse(server.url + "/", tmp_path, "412,915")
    text = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", document, flags=re.S)
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    assert re.search(r"Running 48 of 64 slots", shown)
    assert re.search(r"Waiting 7 23,410 tokens", shown)
    assert "used 610 (61.0 %)" in shown and "cached 255 (25.5 %)" in shown and "free 135 (13.5 %)" in shown
    assert re.search(r"since start", shown) and "68.9 %" in shown
    assert re.search(r"generated [\d,]+ prompt computed [\d,]+ prompt cached [\d,]+ ", shown)
    assert "device 23.10 ms schedule 900 µs update 1.40 ms device idle 400 µs" in shown
    assert text.count("<rect") == 2 * RECENT_STEPS
    assert 'data-state="ready"' in text
