"""Hyper-connection site: the reference, refusals, the kernel's per-thread code on an emulator, its lowering, a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AbstractDevice, AbstractMesh
from site_emulator import emulate_site

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Residual, collapse, predict_mix
from dsv4jax.model.norm import rms_norm
from dsv4jax.quant import qdq_fp8
from pallas_kernels.fp8_linear import dequantize_activations
from pallas_kernels.hyper_connections import SiteWeights, benchmark, hyper_connection_site, join_fp32, split_fp32
from pallas_kernels.hyper_connections.arg_specs import HIDDEN, STREAMS, TOKENS

MIXES = STREAMS * (2 + STREAMS)


def case(tokens, hidden=1024, dtype=jnp.bfloat16, streams=STREAMS):
    """Residual, weights and the fp32 projection."""
    rng = np.random.default_rng(tokens)
    mixes = streams * (2 + streams)
    x = jnp.asarray(rng.standard_normal((tokens, streams, hidden)) * 2, dtype)
    y = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
    fn = jnp.asarray(rng.standard_normal((mixes, streams * hidden)) * 0.02, jnp.float32)
    base, scale = jnp.asarray(rng.standard_normal(mixes), jnp.float32), jnp.array([0.7, 0.9, 1.3])
    norm = jnp.asarray(1 + rng.standard_normal(hidden) / 8, dtype)
    mix = predict_mix(x, fn, base, scale, ModelConfig(hc_mult=streams))
    return Residual(x, y, mix), SiteWeights(split_fp32(fn), base, scale, norm), fn


def lowered(tokens, implementation):
    residual, weights, _ = jax.eval_shape(lambda: case(tokens, HIDDEN))
    run = functools.partial(hyper_connection_site, cfg=ModelConfig(), implementation=implementation)
    return lowered_for_hopper(run, residual, weights)


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_split_is_lossless(x):
    x = np.where(abs(x) < 2.0**-100, 0, x).astype(np.float32)
    parts = split_fp32(jnp.asarray(x))
    assert parts.shape == (6, 5) and parts.dtype == jnp.bfloat16
    np.testing.assert_array_equal(join_fp32(parts), x)


def test_reference_is_the_steps_of_the_model():
    residual, weights, fn = case(5)
    cfg = ModelConfig()
    streams, x, quantized, mix = hyper_connection_site(residual, weights, cfg, implementation="reference")
    np.testing.assert_array_equal(streams, residual.settled())
    want = rms_norm(collapse(streams, residual.mix.pre), weights.norm, cfg.rms_norm_eps)
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(dequantize_activations(quantized), qdq_fp8(want))
    for name, value in vars(predict_mix(streams, fn, weights.base, weights.scale, cfg)).items():
        np.testing.assert_array_equal(getattr(mix, name), value)


def test_no_tokens_are_refused():
    residual, weights, _ = case(1)
    with pytest.raises(ValueError, match="no tokens"):
        hyper_connection_site(jax.tree.map(lambda a: a[:0], residual), weights, ModelConfig())


@needs_no_hopper
@pytest.mark.parametrize(
    ("change", "implementation", "message"),
    [
        ({}, "triton", "triton"),
        ({}, "pallas", "must be a Hopper GPU"),
        (dict(dtype=jnp.float32), "pallas", "float32: must be bfloat16"),
        (dict(hidden=512), "pallas", "4 streams of 512 channels"),
        (dict(hidden=8192), "pallas", "4 streams of 8192 channels"),
        (dict(streams=2), "pallas", "2 streams"),
    ],
)
def test_impossible_arguments_are_named(change, implementation, message):
    residual, weights, _ = case(2, **change)
    with pytest.raises(ValueError, match=message):
        hyper_connection_site(residual, weights, ModelConfig(), implementation=implementation)


def test_a_projection_that_was_not_split_is_named():
    residual, weights, fn = case(2)
    with pytest.raises(ValueError, match=r"fn is \[24, 4096\]: must be \[72, 4096\]"):
        hyper_connection_site(residual, weights.replace(fn=fn.astype(jnp.bfloat16)), ModelConfig())


def assert_close(got, want):
    """Of the values that are rounded, one in tens of thousands falls to the other side: by up to an eighth in FP8."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 5e-3 if b.dtype == jnp.float8_e4m3fn else 3e-4
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (40, 1024), (33, 2048)])
def test_code_of_the_kernel(tokens, hidden):
    residual, weights, _ = case(tokens, hidden)
    cfg = ModelConfig()
    want = hyper_connection_site(residual, weights, cfg, implementation="reference")
    assert_close(emulate_site(residual, weights, cfg), want)


def test_sinkhorn_of_large_logits():
    residual, weights, _ = case(4)
    weights = weights.replace(scale=weights.scale * 20)
    want = hyper_connection_site(residual, weights, ModelConfig(), implementation="reference")
    assert_close(emulate_site(residual, weights, ModelConfig())[-1], want[-1])


def test_a_token_does_not_depend_on_the_others():
    residual, weights, _ = case(40)
    some = np.array([35, 3, 17])
    streams, x, quantized, mix = emulate_site(residual, weights, ModelConfig())
    few = emulate_site(jax.tree.map(lambda a: a[some], residual), weights, ModelConfig())
    want = streams[some], x[some], (quantized[0][some], quantized[1][:, some]), [a[some] for a in mix]
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_that_wait_for_each_other_must_fit_the_device():
    residual, weights, _ = jax.eval_shape(lambda: case(2, HIDDEN))
    device = AbstractDevice(device_kind="NVIDIA H200 MIG 1g.18gb", platform="cuda", num_cores=16)
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        pytest.raises(ValueError, match="16 multiprocessors: must be 40 or more"),
    ):
        jax.eval_shape(
            functools.partial(hyper_connection_site, cfg=ModelConfig(), implementation="pallas"), residual, weights
        )


@pytest.mark.parametrize("tokens", [1, 5, *TOKENS, 1000])
def test_lowers_for_cuda(tokens):
    assert lowered(tokens, "pallas").count("mosaic_gpu") >= 2


def test_the_device_decides():
    assert "mosaic_gpu" in lowered(16, None)
    assert "mosaic_gpu" not in lowered(16, "reference")


def test_benchmark_counts_streams_and_projection():
    by_name = {case.name: case for case in benchmark.cases()}
    small, large = (by_name[f"hyper-connection site {n} tokens"].bytes for n in (8, 96))
    per_token = (large - small) / 88
    assert 2 * STREAMS * HIDDEN * 2 < per_token < 3 * STREAMS * HIDDEN * 2
    assert small - 8 * per_token == pytest.approx(3 * MIXES * STREAMS * HIDDEN * 2)


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 96, 100, 1000])
def test_kernel_on_gpu(tokens):
    residual, weights, _ = case(tokens, HIDDEN)

    def run(implementation):
        site = functools.partial(hyper_connection_site, cfg=ModelConfig(), implementation=implementation)
        return jax.jit(site)(residual, weights)

    kernel, reference = run("pallas"), run("reference")
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(run("pallas")), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(kernel, reference)


@needs_hopper
def test_a_token_does_not_depend_on_the_others_on_gpu():
    residual, weights, _ = case(96, HIDDEN)
    site = jax.jit(functools.partial(hyper_connection_site, cfg=ModelConfig(), implementation="pallas"))
    every = site(residual, weights)
    few = site(jax.tree.map(lambda a: a[40:47], residual), weights)

    def by_row(result):
        streams, x, quantized, mix = result
        return jax.tree.leaves((streams, x, quantized.elements, quantized.scale.T, mix))

    for a, b in zip(by_row(few), by_row(every), strict=True):
        np.testing.assert_array_equal(a, b[40:47])
