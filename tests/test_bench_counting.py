"""What counts in a window, and when a run is invalid."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.traffic.counting import (
    Limits,
    Percentiles,
    Window,
    inter_token_seconds,
    percentiles,
    summarize,
    throughput,
)
from dsv4jax.bench.traffic.records import Measurement, spread


def measurement(name="r", arrived=0.0, tokens=(1, 1, 1), finish_reason="length", prompt=100, cached=0, **options):
    """Scheduled a second after it was sent; a chunk each second from the third on."""
    sent = options.pop("sent", arrived)
    chunks = tuple(sent + 3.0 + i for i in range(len(tokens)))
    given = dict(
        request_id=name,
        session="",
        turn=0,
        rank=None,
        arrived=arrived,
        sent=sent,
        scheduled=sent + 1.0,
        first_token=chunks[0] if chunks else None,
        finished=chunks[-1] if chunks else sent + 3.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        expected_cached_tokens=None,
        output_tokens=sum(tokens),
        chunk_seconds=chunks,
        chunk_tokens=tuple(tokens),
        drafted=0,
        accepted=0,
        finish_reason=finish_reason,
    )
    return Measurement(**(given | options))


@st.composite
def runs(draw):
    """Requests on a grid of times, so that bounds of windows meet them."""
    count = draw(st.integers(0, 12))
    return [
        measurement(
            f"r{i}",
            arrived=float(draw(st.integers(0, 20))),
            tokens=draw(st.lists(st.integers(0, 3), max_size=5)),
            finish_reason=draw(st.sampled_from(["length", "stop", "error", "aborted", "unfinished"])),
            prompt=draw(st.integers(50, 60)),
            cached=draw(st.integers(0, 50)),
            expected_cached_tokens=draw(st.none() | st.integers(0, 50)),
        )
        for i in range(count)
    ]


@settings(max_examples=60)
@given(runs(), st.sets(st.integers(1, 29), max_size=4))
def test_tokens_of_windows_that_partition_time_add_up(run, cuts):
    bounds = [-1.0, *map(float, sorted(cuts)), 30.0]
    windows = [Window(*pair) for pair in itertools.pairwise(bounds)]
    parts = [np.multiply(dataclasses.astuple(throughput(run, w)), w.seconds) for w in windows]
    began = [m for m in run if m.first_token is not None]
    whole = [
        sum(m.cached_tokens for m in began),
        sum(m.prompt_tokens - m.cached_tokens for m in began),
        sum(m.output_tokens for m in run),
    ]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole)


@settings(max_examples=60)
@given(runs(), st.integers(0, 10), st.integers(1, 20), st.randoms())
def test_a_summary_does_not_depend_on_the_order_and_every_request_is_counted_or_excluded(run, begin, seconds, random):
    window = Window(float(begin), float(begin + seconds))
    summary, shuffled = summarize(run, window, devices=2), random.sample(run, len(run))
    assert summarize(shuffled, window, devices=2) == summary
    assert summary.requests + sum(dataclasses.astuple(summary.excluded)) == len(run)
    assert summary.ttft is None or summary.ttft.count <= summary.requests
    json.dumps(summary.as_dict(), allow_nan=False)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=8))
def test_shares_of_tokens_sum_to_the_time_between_first_and_last_chunk(tokens):
    m = measurement(tokens=tokens)
    chunks = [(s, n) for s, n in zip(m.chunk_seconds, m.chunk_tokens, strict=True) if n]
    shares = inter_token_seconds(m)
    assert len(shares) == sum(n for _, n in chunks[1:])
    assert shares.sum() == pytest.approx(chunks[-1][0] - chunks[0][0] if chunks else 0)


def test_a_hand_made_run():
    run = [measurement(f"r{i}", arrived=float(i), cached=80, tokens=(1, 3)) for i in range(3)]
    slow = measurement("slow", tokens=(2, 1, 1), queued=0.5, scheduled=2.0, cached=0)
    summary = summarize([*run, slow], Window(0.0, 10.0), devices=2)
    assert summary.requests == 4 and not summary.invalid
    assert dataclasses.astuple(summary.throughput) == (24.0, 16.0, 1.6)
    assert summary.throughput.cached_computed_and_output == pytest.approx(41.6)
    assert summary.throughput.per(2).output == 0.8
    assert summary.as_dict()["throughput_per_device"]["cached_computed_and_output_tokens_per_second"] == 20.8
    assert summary.ttft == Percentiles(3, 3, 3, 3, 4)
    assert summary.admission == Percentiles(0.5, 0.5, 0.5, 0.5, 1)
    # 1, 1, 1 and, behind half a second of admission, 1.5.
    assert dataclasses.astuple(summary.queue) == pytest.approx((1, 1.35, 1.485, 1.5, 4))
    assert summary.prefill.max == 2 and summary.prefill.count == 4
    assert summary.decode.max == 2 and summary.decode.p50 == 1
    # 4 / 4 three times, 5 / 4 once.
    assert summary.user_speed_end_to_end == pytest.approx(1 / 1.175)
    # Nine thirds of a second and two whole ones.
    assert summary.inter_token.count == 11 and summary.inter_token.p50 == pytest.approx(1 / 3)
    assert summary.user_speed_inter_token == pytest.approx(1.0)
    assert summary.pause == Percentiles(1, 1, 1, 1, 5)
    assert summary.hit_rate == pytest.approx(240 / 400) and summary.expected_hit_rate is None


def test_percentiles_of_hand_made_values():
    assert percentiles([]) is None
    assert percentiles([7.0]) == Percentiles(7, 7, 7, 7, 1)
    values = [float(v) for v in range(101)]
    assert percentiles(values[::-1]) == Percentiles(50, 90, 99, 100, 101)
    assert percentiles([0.0, 10.0]) == Percentiles(5, 9, pytest.approx(9.9), 10, 2)


def test_requests_across_the_bounds_of_a_window():
    before = measurement("before", arrived=0.0, tokens=(1,) * 10)  # chunks at 3 to 12
    inside = measurement("inside", arrived=5.0, tokens=(1, 1))  # at 8 and 9
    after = measurement("after", arrived=7.0, tokens=(1, 1))  # at 10 and 11
    cut = measurement("cut", arrived=5.0, tokens=(1,), finish_reason="unfinished")
    summary = summarize([before, inside, after, cut], Window(5.0, 10.0), devices=1)
    assert summary.requests == 1 and dataclasses.astuple(summary.excluded) == (1, 1, 1)
    # Of `before` those at 6 to 10, one each of `after` and `cut`; the prompt of `before` came earlier.
    assert summary.throughput.output * 5 == pytest.approx(5 + 2 + 1 + 1)
    assert summary.throughput.computed_input * 5 == pytest.approx(300)
    assert summary.decode.max == 1


ONE_IN_FIFTY = [measurement(f"r{i}", finish_reason="error" if i == 0 else "stop") for i in range(50)]


@pytest.mark.parametrize(
    "run, options, reason",
    [
        ([], {}, "no request arrived and ended between 0 and 100 s"),
        ([measurement(finish_reason="aborted")], {}, "no request arrived"),
        ([measurement(cached=80, expected_cached_tokens=86)], {}, "cache hit rate 80.0% in the place of 86.0%: 5.0%"),
        ([measurement(cached=80, expected_cached_tokens=74)], {}, "cache hit rate 80.0% in the place of 74.0%: 5.0%"),
        (ONE_IN_FIFTY, {}, "2.0% of the requests failed: 1.0% are allowed"),
        # An error that was noticed only after the window.
        ([*ONE_IN_FIFTY[1:], measurement(arrived=99.0, finish_reason="error")], {}, "2.0% of the requests failed"),
        ([measurement(sent=0.06)], {}, "the client was late by 0.06 s: 0.05 are allowed"),
        ([measurement()], dict(client_lag=0.06), "the client was late by 0.06 s"),
    ],
)
def test_why_a_run_is_invalid(run, options, reason):
    (found,) = summarize(run, Window(0.0, 100.0), devices=1, **options).invalid
    assert found.startswith(reason)


@pytest.mark.parametrize(
    "run, options",
    [
        ([measurement(cached=80, expected_cached_tokens=84)], {}),
        ([measurement(cached=80, expected_cached_tokens=74)], dict(limits=Limits(hit_rate=0.1))),
        (
            [measurement(cached=80), measurement(cached=50, expected_cached_tokens=50)],
            {},
        ),  # what says nothing misses nothing
        (ONE_IN_FIFTY, dict(limits=Limits(errors=0.02))),
        ([measurement(sent=0.04)], dict(client_lag=0.04)),
        ([measurement(), measurement(arrived=100.0, finish_reason="error")], {}),
    ],
)
def test_within_the_limits_a_run_is_valid(run, options):
    assert summarize(run, Window(0.0, 100.0), devices=1, **options).invalid == ()


def test_records_survive_json_and_contradictions_are_refused():
    m = measurement(tokens=(2, 1), cached=3, queued=0.5, session="s", rank=1, error="lost")
    assert Measurement.from_dict(json.loads(json.dumps(m.as_dict()))) == m
    for wrong, message in [
        (dict(cached_tokens=101), "request 'r': cached_tokens = 101: must be 0 to 100"),
        (dict(output_tokens=4), "chunk_tokens sum to 3: must be output_tokens = 4"),
        (dict(chunk_seconds=(3.0,)), "1 chunk_seconds and 2 chunk_tokens"),
        (dict(scheduled=3.5), "times must not descend"),
        (dict(finished=3.5), "times must not descend"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(m, **wrong)
    with pytest.raises(ValueError, match=r"end = 1.0: must be after begin = 1.0"):
        Window(1.0, 1.0)
    with pytest.raises(ValueError, match="devices = 0: must be at least 1"):
        summarize([], Window(0.0, 1.0), devices=0)


def test_tokens_without_times_of_their_own_are_spread_over_chunks():
    assert spread(7, 3) == (3, 2, 2) and spread(2, 3) == (1, 1, 0) and spread(0, 2) == (0, 0) and spread(5, 0) == ()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=8), st.sets(st.integers(3, 10), max_size=3))
def test_shares_of_windows_are_those_of_the_whole(tokens, cuts):
    m, bounds = measurement(tokens=tokens), [0.0, *map(float, sorted(cuts)), 20.0]
    parts = [inter_token_seconds(m, Window(*pair)) for pair in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts), inter_token_seconds(m))
