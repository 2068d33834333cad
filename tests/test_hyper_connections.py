"""Mixes between the residual streams against float64 numpy (architecture sections 2.1 to 2.3)."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Mix, collapse, expand, first_mix, predict_mix, sinkhorn

BF16 = ml_dtypes.bfloat16
STREAMS, HIDDEN, TOKENS, EPS = 4, 32, 6, 1e-6
MIXES = 2 * STREAMS + STREAMS**2


@functools.cache
def config(iterations=20):
    return ModelConfig(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=iterations)


# The formulas once more, in float64.


def expected_sinkhorn(logits, iterations=20):
    logits = np.asarray(logits, np.float64)
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + EPS
    c = c / (c.sum(-2, keepdims=True) + EPS)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdims=True) + EPS)
        c = c / (c.sum(-2, keepdims=True) + EPS)
    return c


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def expected_mix(streams, fn, base, scale, iterations=20):
    """(pre, post, residual), every coefficient from its own row of `fn`."""
    x = streams.astype(np.float64)
    statistic = 1 / np.sqrt((x**2).mean((1, 2)) + 1e-20)
    z = np.empty((len(x), MIXES))
    for row in range(MIXES):
        part = 0 if row < STREAMS else 1 if row < 2 * STREAMS else 2
        weight = fn[row].reshape(STREAMS, HIDDEN).astype(np.float64)  # stream-major columns
        z[:, row] = (x * weight).sum((1, 2)) * statistic * scale[part] + base[row]
    logits = np.empty((len(x), STREAMS, STREAMS))
    for i in range(STREAMS):
        for j in range(STREAMS):
            logits[:, i, j] = z[:, 2 * STREAMS + STREAMS * i + j]
    return (
        sigmoid(z[:, :STREAMS]) + EPS,
        2 * sigmoid(z[:, STREAMS : 2 * STREAMS]),
        expected_sinkhorn(logits, iterations),
    )


jitted_sinkhorn = jax.jit(sinkhorn, static_argnums=(1, 2))
jitted_predict = jax.jit(predict_mix, static_argnames="cfg")
jitted_expand = jax.jit(expand)
jitted_collapse = jax.jit(collapse)


def site(seed, dtype=BF16):
    """Streams and parameters of one site."""
    rng = np.random.default_rng(seed)
    streams = (rng.normal(size=(TOKENS, STREAMS, HIDDEN)) * np.exp(rng.normal(size=(TOKENS, 1, 1)) * 3)).astype(dtype)
    fn = (rng.normal(size=(MIXES, STREAMS * HIDDEN)) / 8).astype(np.float32)
    return streams, fn, rng.normal(size=MIXES).astype(np.float32), rng.uniform(0.2, 2, 3).astype(np.float32)


# Sinkhorn.


def test_sinkhorn_of_section_12():
    logits = np.float32([[1, 0, -1, 2], [0.5, 0.25, 0, -0.5], [3, 2, 1, 0], [-1, -2, 0, 1]])
    expected = [
        (0.235898, 0.188070, 0.074576, 0.501455), (0.227673, 0.384261, 0.322566, 0.065499),
        (0.464615, 0.370414, 0.146879, 0.018090), (0.071813, 0.057254, 0.455978, 0.414955),
    ]  # fmt: skip
    np.testing.assert_allclose(jitted_sinkhorn(logits, 20, EPS), expected, atol=1e-6)


def matrices(bound):
    return hnp.arrays(np.float32, (TOKENS, STREAMS, STREAMS), elements=st.floats(-bound, bound, width=32))


@settings(max_examples=50)
@given(matrices(4), st.sampled_from([1, 2, 5, 20]))
def test_sinkhorn_matches_float64(logits, iterations):
    c = jitted_sinkhorn(logits, iterations, EPS)
    np.testing.assert_allclose(c, expected_sinkhorn(logits, iterations), rtol=1e-5, atol=1e-6)


@settings(max_examples=50)
@given(matrices(1))
def test_twenty_iterations_make_rows_and_columns_sum_to_one(logits):
    c = np.asarray(jitted_sinkhorn(logits, 20, EPS), np.float64)
    np.testing.assert_allclose(c.sum(-2), 1 - EPS, atol=4e-7)  # the last step: S / (S + eps)
    np.testing.assert_allclose(c.sum(-1), 1, atol=1e-5)
    assert (c > 0).all()


EXTREME = st.sampled_from([-1e30, -1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4, 1e30]) | st.floats(-100, 100, width=32)


@settings(max_examples=50)
@given(hnp.arrays(np.float32, (TOKENS, STREAMS, STREAMS), elements=EXTREME))
def test_sinkhorn_of_extreme_logits_is_finite_and_ends_with_columns(logits):
    c = np.asarray(jitted_sinkhorn(logits, 20, EPS))
    np.testing.assert_allclose(c, expected_sinkhorn(logits), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(c.sum(-2), 1, atol=1e-4)


def test_sinkhorn_starts_with_a_softmax_over_columns_j():
    """One iteration of rows that differ: not the transpose, and the last step is over rows i."""
    logits = np.float32([[0, 5, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]])
    c = np.asarray(jitted_sinkhorn(logits, 1, EPS))
    np.testing.assert_allclose(c, expected_sinkhorn(logits, 1), rtol=1e-5)
    np.testing.assert_allclose(c.sum(0), 1, atol=1e-5)
    assert np.abs(c.sum(1) - 1).max() > 0.1
    assert np.abs(c - expected_sinkhorn(logits.T, 1).T).max() > 0.1


# Prediction.


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_mixes_match_float64_and_stay_fp32(seed, dtype):
    streams, fn, base, scale = site(seed, dtype)
    mix = jitted_predict(streams, fn, base, scale, cfg=config())
    for name, expected in zip(("pre", "post", "residual"), expected_mix(streams, fn, base, scale), strict=True):
        value = getattr(mix, name)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6, err_msg=name)


def test_the_configured_number_of_iterations_is_used():
    inputs = site(9)
    few, many = (jitted_predict(*inputs, cfg=config(n)).residual for n in (2, 20))
    np.testing.assert_allclose(few, expected_mix(*inputs, iterations=2)[2], rtol=1e-5, atol=2e-6)
    assert np.abs(few - many).max() > 1e-3


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-20, 2.0**20, 2.0**50])
def test_the_size_of_the_streams_does_not_matter(factor):
    streams, fn, base, scale = site(1, np.float32)
    streams = streams / np.abs(streams).max((1, 2), keepdims=True)
    plain = jitted_predict(streams, fn, base, scale, cfg=config())
    scaled = jitted_predict((streams * factor).astype(np.float32), fn, base, scale, cfg=config())
    if factor == 2.0**-60:  # below 1e-10 the eps of the statistic takes over: mixes tend to those of zero streams
        scaled_by_eps = expected_mix(streams * factor, fn, base, scale)
        np.testing.assert_allclose(scaled.pre, scaled_by_eps[0], rtol=1e-5)
        assert np.abs(scaled.pre - plain.pre).max() > 1e-2
    else:
        for name in ("pre", "post", "residual"):
            np.testing.assert_allclose(getattr(scaled, name), getattr(plain, name), rtol=1e-5, atol=1e-6)


def test_zero_streams_give_the_base_mix():
    _, fn, base, scale = site(2)
    mix = jitted_predict(np.zeros((2, STREAMS, HIDDEN), BF16), fn, base, scale, cfg=config())
    np.testing.assert_allclose(mix.pre, [sigmoid(base[:4].astype(float)) + EPS] * 2, rtol=1e-5)
    np.testing.assert_allclose(mix.residual, [expected_sinkhorn(base[8:].reshape(4, 4))] * 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_extreme_coefficients_stay_in_their_range(size):
    streams, fn, base, scale = site(3)
    mix = jitted_predict(streams, fn, base * np.float32(size), scale, cfg=config())
    assert (np.asarray(mix.pre) >= np.float32(EPS)).all() and (np.asarray(mix.pre) <= 1 + 2e-6).all()
    assert (np.asarray(mix.post) >= 0).all() and (np.asarray(mix.post) <= 2).all()
    assert np.isfinite(mix.residual).all()
    np.testing.assert_allclose(mix.residual.sum(-2), 1, atol=1e-4)


def test_the_first_mix_takes_stream_0():
    np.testing.assert_array_equal(first_mix(3, STREAMS), [[1, 0, 0, 0]] * 3)
    streams = site(4)[0]
    np.testing.assert_array_equal(
        np.asarray(jitted_collapse(streams, first_mix(TOKENS, STREAMS)), np.float32), streams[:, 0].astype(np.float32)
    )


# Collapse and expand.


def random_mix(rng):
    return Mix(*(
        jnp.asarray(rng.uniform(0, 2, (TOKENS, *shape)), jnp.float32)
        for shape in ((STREAMS,), (STREAMS,), (STREAMS, STREAMS))
    ))  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_collapse_and_expand_match_float64_with_one_rounding(dtype):
    rng = np.random.default_rng(5)
    mix, streams = random_mix(rng), site(5, dtype)[0]
    y = rng.normal(size=(TOKENS, HIDDEN)).astype(dtype)
    pre, post, residual = (np.asarray(a, np.float64) for a in (mix.pre, mix.post, mix.residual))
    x = streams.astype(np.float64)
    size = np.abs(x).max((1, 2), keepdims=True) + 1
    half_unit = 2.0**-8 if dtype == BF16 else 0

    collapsed = jitted_collapse(streams, mix.pre)
    exact = (pre[..., None] * x).sum(1)
    assert collapsed.dtype == dtype
    assert (np.abs(np.asarray(collapsed, np.float64) - exact) <= half_unit * np.abs(exact) + 2e-6 * size[:, 0]).all()

    expanded = jitted_expand(y, streams, mix)
    exact = np.stack(
        [
            post[:, j, None] * y.astype(np.float64) + sum(residual[:, i, j, None] * x[:, i] for i in range(STREAMS))
            for j in range(STREAMS)
        ],
        1,
    )
    assert expanded.dtype == dtype
    assert (np.abs(np.asarray(expanded, np.float64) - exact) <= half_unit * np.abs(exact) + 4e-6 * size).all()


def test_expand_carries_row_i_to_column_j():
    """Stream 1 goes to stream 3 and nowhere else; the output enters stream 2 only."""
    streams = np.zeros((1, STREAMS, HIDDEN), BF16)
    streams[0, :, 0] = [10, 20, 30, 40]
    residual = np.zeros((1, STREAMS, STREAMS), np.float32)
    residual[0, 1, 3] = 1
    post = np.float32([[0, 0, 1, 0]])
    mix = Mix(jnp.zeros((1, STREAMS)), jnp.asarray(post), jnp.asarray(residual))
    result = np.asarray(jitted_expand(np.full((1, HIDDEN), 7, BF16), streams, mix), np.float32)
    np.testing.assert_array_equal(result[0, :, 0], [0, 0, 7, 20])
    np.testing.assert_array_equal(result[0, :, 1], [0, 0, 7, 0])


def test_sums_are_rounded_once():
    """Terms that vanish one by one beside the first in bf16, and count together."""
    streams = np.zeros((1, STREAMS, HIDDEN), BF16)
    streams[0] = np.array([256, 0.75, 0.75, 0.75], BF16)[:, None]
    ones = jnp.ones((1, STREAMS))
    np.testing.assert_array_equal(np.asarray(jitted_collapse(streams, ones), np.float32), [[258] * HIDDEN])
    mix = Mix(ones, ones, jnp.ones((1, STREAMS, STREAMS)))
    result = jitted_expand(np.full((1, HIDDEN), 1.25, BF16), streams, mix)
    np.testing.assert_array_equal(np.asarray(result, np.float32), np.full((1, STREAMS, HIDDEN), 260))
