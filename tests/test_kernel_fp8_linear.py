"""FP8 linears: the reference, plans for any shape, refusals, the kernel's lowering, and the kernel itself on a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper
from hypothesis import given
from hypothesis import strategies as st

from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.quant import qdq_fp8
from dsv4jax.weights import Fp8Weight
from pallas_kernels.fp8_linear import (
    QuantizedActivations,
    benchmark,
    dequantize_activations,
    fp8_grouped_linear,
    fp8_linear,
    kernel,
    quantize_activations,
    swiglu_activations,
)
from pallas_kernels.fp8_linear.arg_specs import ARG_SPECS, GROUPS, ROWS
from pallas_kernels.fp8_linear.plans import (
    COPYING_REGISTERS,
    MAX_KERNEL_ROWS,
    OUTPUTS,
    REGISTERS,
    SCALE_WORDS,
    STEP,
    choose_plan,
    tile_rows,
)
from pallas_kernels.moe_experts.reference import swiglu

S = jax.ShapeDtypeStruct
SHARED_BYTES = 227 * 1024
"""Shared memory that a block of a Hopper GPU can have."""


def whole_numbers(rng, rows, inner):
    """-1, 0, 1 times a power of two per group: with `exact_weight`, every sum is exact in any order."""
    powers = 2.0 ** (np.arange(inner) // 32 % 3)
    return jnp.asarray(rng.integers(-1, 2, (rows, inner)) * powers, jnp.bfloat16)


def exact_weight(rng, out, inner):
    elements = jnp.asarray(rng.integers(-1, 2, (out, inner)), jnp.float8_e4m3fn)
    return Fp8Weight(elements, jnp.asarray(127 + rng.integers(0, 2, (out // 32, inner // 32)), jnp.uint8))


def values(weight):
    """The weight in float64."""
    scale = 2.0 ** (np.asarray(weight.scale, np.float64) - 127)
    return np.asarray(weight.weight, np.float64) * np.kron(scale, np.ones((32, 32)))


def rounded(y):
    return np.asarray(y.astype(ml_dtypes.bfloat16), np.float64)


def weight_like(out, inner):
    return Fp8Weight(S((out, inner), jnp.float8_e4m3fn), S((out // 32, inner // 32), jnp.uint8))


def activations_like(rows, inner):
    return QuantizedActivations(S((rows, inner), jnp.float8_e4m3fn), S((inner // 32, rows), jnp.float32))


def test_quantised_activations_are_those_of_the_model():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 96)) * 2.0 ** np.arange(5)[:, None], jnp.bfloat16)
    got = quantize_activations(x)
    assert got.elements.shape == (5, 96) and got.scale.shape == (3, 5)
    np.testing.assert_array_equal(dequantize_activations(got), qdq_fp8(x))


def test_reference():
    rng = np.random.default_rng(1)
    x, weight = whole_numbers(rng, 7, 256), exact_weight(rng, 192, 256)
    got = fp8_linear(quantize_activations(x), weight, implementation="reference")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rounded(np.asarray(x, np.float64) @ values(weight).T))


def test_grouped_reference():
    rng = np.random.default_rng(2)
    x, weight = whole_numbers(rng, 6, 4 * 128).reshape(6, 4, 128), exact_weight(rng, 256, 128)
    want = np.einsum("tgi,goi->tgo", np.asarray(x, np.float64), values(weight).reshape(4, 64, 128)).reshape(6, 256)
    np.testing.assert_array_equal(fp8_grouped_linear(x, weight, implementation="reference"), rounded(want))
    got, want = fp8_grouped_linear(x, weight, quantize=True), quantize_activations(jnp.asarray(want, jnp.bfloat16))
    np.testing.assert_array_equal(got.elements, want.elements)
    np.testing.assert_array_equal(got.scale, want.scale)


def test_no_rows():
    weight = exact_weight(np.random.default_rng(3), 64, 128)
    assert fp8_linear(quantize_activations(jnp.zeros((0, 128), jnp.bfloat16)), weight).shape == (0, 64)
    assert fp8_grouped_linear(jnp.zeros((0, 1, 128), jnp.bfloat16), weight).shape == (0, 64)


def turn(rows, pairs=32):
    phase = np.random.default_rng(rows).uniform(0, 6, (rows, pairs)).astype(np.float32)
    return Rotation(jnp.cos(phase), jnp.sin(phase))


def test_weights_side_by_side():
    rng = np.random.default_rng(7)
    q, weights = quantize_activations(whole_numbers(rng, 3, 128)), [exact_weight(rng, out, 128) for out in (64, 192)]
    parts = [fp8_linear(q, weight) for weight in weights]
    np.testing.assert_array_equal(fp8_linear(q, *weights), jnp.concatenate(parts, 1))


def test_rotation_of_heads():
    rng = np.random.default_rng(8)
    q, weight, by = quantize_activations(whole_numbers(rng, 3, 128)), exact_weight(rng, 256, 128), turn(3)
    want = rotate(fp8_linear(q, weight).reshape(3, 2, 128), Rotation(by.cos[:, None], by.sin[:, None]))
    np.testing.assert_array_equal(fp8_linear(q, weight, by=by, heads=2).reshape(3, 2, 128), want)


@given(
    rows=st.integers(1, 400),
    out=st.sampled_from([64, 128, 192, 512, 1280, 1792, 4608, 5120, 32768]),
    steps=st.integers(1, 128),
)
def test_every_shape_has_a_plan_that_fits(rows, out, steps):
    for grouped in (False, True):
        groups = 4 if grouped else 1
        out_of_all = 2 * OUTPUTS * groups * -(-out // (2 * OUTPUTS * groups)) if grouped else out
        plan = choose_plan(rows, out_of_all, steps * STEP, grouped)
        assert kernel.obstacle(rows, groups, (out_of_all,), steps * STEP, plan) is None
        x = tile_rows(rows) * (2 * STEP if grouped else STEP + STEP // 8)
        tiles = plan.deep * plan.stages * (plan.width * STEP + x)
        assert tiles + plan.consumers * 2 * plan.tiles * SCALE_WORDS * 4 + 1024 <= SHARED_BYTES
        if registers := plan.registers(tile_rows(rows)):
            share = REGISTERS // (plan.threads + 128)
            assert share < registers < 256 and registers % 8 == 0
            assert registers * plan.threads + COPYING_REGISTERS * 128 <= share // 8 * 8 * (plan.threads + 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(implementation="triton"), "triton"),
        (dict(inner=256), "256 channels, the weight 128"),
        (dict(scale=(4, 3)), r"scales of x are \[4, 3\]"),
        (dict(implementation="pallas"), "must be a Hopper GPU"),
        (dict(implementation="pallas", out=96), r"weight \[96, 128\]"),
        (dict(implementation="pallas", dtype=jnp.float8_e5m2), "x is float8_e5m2"),
        (dict(implementation="pallas", block=(1, 32)), r"blocks of \(1, 32\)"),
        (dict(heads=3), "heads = 3: must divide the 64 channels"),
        (dict(implementation="pallas", by=turn(4, 31), heads=1), "31 pairs of 64 channels"),
    ],
)
@needs_no_hopper
def test_impossible_arguments_are_named(change, message):
    inner, out = change.get("inner", 128), change.get("out", 64)
    scale = jnp.ones(change.get("scale", (inner // 32, 4)), jnp.float32)
    x = QuantizedActivations(jnp.zeros((4, inner), change.get("dtype", jnp.float8_e4m3fn)), scale)
    block = change.get("block", (32, 32))
    weight = Fp8Weight(jnp.zeros((out, 128), jnp.float8_e4m3fn), jnp.zeros((out // block[0], 4), jnp.uint8), block)
    with pytest.raises(ValueError, match=message):
        arguments = {name: change[name] for name in ("implementation", "heads", "by") if name in change}
        fp8_linear(x, weight, **arguments)


@needs_no_hopper
def test_impossible_groups_are_named():
    weight = exact_weight(np.random.default_rng(4), 192, 128)
    for shape, dtype, message in [
        ((4, 2, 64), jnp.bfloat16, "64 channels in a group"),
        ((4, 5, 128), jnp.bfloat16, "multiple of the 5 groups"),
        ((4, 2, 128), jnp.bfloat16, r"multiples of \[128, 128\]"),
        ((4, 3, 128), jnp.float32, "x is float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            fp8_grouped_linear(jnp.zeros(shape, dtype), weight, implementation="pallas")


@pytest.mark.parametrize("rows", [1, *ROWS, 100])
@pytest.mark.parametrize("name", ARG_SPECS)
def test_lowers_for_cuda(name, rows):
    spec = ARG_SPECS[name]
    if spec.grouped:
        x, fn = S((rows, GROUPS, spec.inner), jnp.bfloat16), fp8_grouped_linear
    else:
        x, fn = activations_like(rows, spec.inner), fp8_linear
    weight = weight_like(spec.out, spec.inner)
    assert "mosaic_gpu" in lowered_for_hopper(lambda *a: fn(*a, implementation="pallas"), x, weight)


@pytest.mark.parametrize("rows", [1, *ROWS])
def test_quantised_grouped_product_lowers_for_cuda(rows):
    run = functools.partial(fp8_grouped_linear, quantize=True, implementation="pallas")
    text = lowered_for_hopper(run, S((rows, GROUPS, 4096), jnp.bfloat16), weight_like(8192, 4096))
    assert text.count("custom_call @mosaic_gpu") == 1 and f"tensor<256x{rows}xf32>" in text


@pytest.mark.parametrize("rows", [1, *ROWS])
def test_joint_and_rotated_products_lower_for_cuda(rows):
    run = functools.partial(fp8_linear, implementation="pallas")
    weights = weight_like(1280, 5120), weight_like(512, 5120)
    assert lowered_for_hopper(run, activations_like(rows, 5120), *weights).count("custom_call @mosaic_gpu") == 1
    by = Rotation(S((rows, 32), jnp.float32), S((rows, 32), jnp.float32))
    text = lowered_for_hopper(
        lambda x, weight, by: run(x, weight, by=by, heads=64),
        activations_like(rows, 1280),
        weight_like(32768, 1280),
        by,
    )
    assert text.count("custom_call @mosaic_gpu") == 1 and "cosine" not in text


def test_swiglu():
    rng = np.random.default_rng(9)
    gate_up = jnp.asarray(rng.standard_normal((3, 128)) * 20, jnp.bfloat16)
    z = swiglu(gate_up[:, :64], gate_up[:, 64:], 10.0).astype(jnp.bfloat16)
    got, want = swiglu_activations(gate_up, 10.0), quantize_activations(z)
    np.testing.assert_array_equal(got.elements, want.elements)
    np.testing.assert_array_equal(got.scale, want.scale)
    assert swiglu_activations(gate_up[:0], 10.0).elements.shape == (0, 64)


@needs_no_hopper
@pytest.mark.parametrize(
    ("width", "dtype", "implementation", "message"),
    [
        (128, jnp.bfloat16, "triton", "triton"),
        (128, jnp.bfloat16, "pallas", "must be a Hopper GPU"),
        (128, jnp.float32, "pallas", "gate_up is float32"),
        (96, jnp.bfloat16, "pallas", "48 channels: must be a multiple of 32"),
    ],
)
def test_impossible_swiglu_is_named(width, dtype, implementation, message):
    with pytest.raises(ValueError, match=message):
        swiglu_activations(jnp.zeros((2, width), dtype), 10.0, implementation=implementation)


@pytest.mark.parametrize("rows", [1, *ROWS, 5000])
def test_swiglu_lowers_for_cuda(rows):
    run = functools.partial(swiglu_activations, limit=10.0, implementation="pallas")
    assert lowered_for_hopper(run, S((rows, 4608), jnp.bfloat16)).count("custom_call @mosaic_gpu") == 1


@needs_hopper
@pytest.mark.parametrize("rows", [1, 16, 96, 1000])
def test_swiglu_kernel_on_gpu(rows):
    gate_up = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 4608)) * 8, jnp.bfloat16)
    got = swiglu_activations(gate_up, 10.0, implementation="pallas")
    want = swiglu_activations(gate_up, 10.0, implementation="reference")
    assert np.mean(np.asarray(got.elements) != np.asarray(want.elements)) < 0.01
    np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize(("rows", "runs"), [(MAX_KERNEL_ROWS, True), (MAX_KERNEL_ROWS + 1, False), (0, False)])
def test_rows_decide_on_a_hopper_gpu(rows, runs):
    text = lowered_for_hopper(fp8_linear, activations_like(rows, 5120), weight_like(512, 5120))
    assert ("mosaic_gpu" in text) == runs


def test_benchmark_counts_the_weight_and_aims_at_three_quarters():
    by_name = {case.name: case for case in benchmark.cases()}
    case = by_name["fp8 linear wo_b 16 rows"]
    assert 5120 * 8192 < case.bytes < 1.01 * 5120 * 8192
    assert case.goal == pytest.approx(case.bytes / 4.3e12 / 0.75 * 1e6)
    assert by_name["fp8 linear wo_b 16 rows, XLA"].goal is None


@needs_hopper
@pytest.mark.parametrize(
    ("rows", "shape"),
    [(rows, (s.out, s.inner)) for s in ARG_SPECS.values() if not s.grouped for rows in (16, 96)]
    + [(rows, shape) for shape in ((5120, 2304), (192, 256)) for rows in (1, 5, 32, 33, 100, 200)],
)
def test_kernel_on_gpu(rows, shape):
    rng = np.random.default_rng(rows)
    weight = exact_weight(rng, *shape)
    q = quantize_activations(whole_numbers(rng, rows, shape[1]))
    want = fp8_linear(q, weight, implementation="reference")
    for _ in range(3):
        np.testing.assert_array_equal(fp8_linear(q, weight, implementation="pallas"), want)


@needs_hopper
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 40, 96, 100])
def test_joint_and_rotated_kernels_on_gpu(rows):
    rng = np.random.default_rng(rows)
    for outs, inner in (((1280, 512), 5120), ((2304, 2304), 5120)):
        weights = [exact_weight(rng, out, inner) for out in outs]
        q = quantize_activations(whole_numbers(rng, rows, inner))
        want = fp8_linear(q, *weights, implementation="reference")
        np.testing.assert_array_equal(fp8_linear(q, *weights, implementation="pallas"), want)
    for out, heads in ((32768, 64), (4096, 32)):
        weight, by = exact_weight(rng, out, 1280), turn(rows)
        q = quantize_activations(whole_numbers(rng, rows, 1280))
        got, want = (
            np.asarray(fp8_linear(q, weight, by=by, heads=heads, implementation=name))
            for name in ("pallas", "reference")
        )
        # A compiler may round a sum of products once instead of twice.
        assert np.mean(got != want) < 1e-4
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2**-7, atol=1e-5)


@needs_hopper
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 40, 96, 100])
def test_grouped_kernel_on_gpu(rows):
    rng = np.random.default_rng(rows)
    spec = ARG_SPECS["wo_a"]
    weight = exact_weight(rng, spec.out, spec.inner)
    x = whole_numbers(rng, rows, GROUPS * spec.inner).reshape(rows, GROUPS, spec.inner)
    want = fp8_grouped_linear(x, weight, implementation="reference")
    np.testing.assert_array_equal(fp8_grouped_linear(x, weight, implementation="pallas"), want)
    got, want = fp8_grouped_linear(x, weight, quantize=True, implementation="pallas"), quantize_activations(want)
    np.testing.assert_array_equal(got.elements, want.elements)
    np.testing.assert_array_equal(got.scale, want.scale)


@needs_hopper
def test_kernel_with_any_values_on_gpu():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 256, (2304, 5120), np.uint8)
    bits[(bits & 127) == 127] = 0x38
    scale = rng.integers(100, 135, (72, 160), np.uint8)
    weight = Fp8Weight(jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))
    x = jnp.asarray(rng.standard_normal((16, 5120)) * 2.0 ** rng.integers(-9, 9, (16, 160)).repeat(32, 1), jnp.bfloat16)
    q = quantize_activations(x)
    for got, exact in (
        (fp8_linear(q, weight, implementation="pallas"), np.asarray(dequantize_activations(q), np.float64)),
        (fp8_grouped_linear(x[:, None], weight, implementation="pallas"), np.asarray(x, np.float64)),
    ):
        want = exact @ values(weight).T
        assert np.linalg.norm(np.asarray(got, np.float64) - want) < 3e-3 * np.linalg.norm(want)


@needs_hopper
def test_calls_in_a_program_share_their_counters():
    rng = np.random.default_rng(6)
    weights = [exact_weight(rng, 5120, 2304) for _ in range(4)]
    q = quantize_activations(whole_numbers(rng, 16, 2304))
    run = jax.jit(lambda q, weights: [fp8_linear(q, w, implementation="pallas") for w in weights])
    for _ in range(3):
        for got, weight in zip(run(q, weights), weights, strict=True):
            np.testing.assert_array_equal(got, fp8_linear(q, weight, implementation="reference"))
