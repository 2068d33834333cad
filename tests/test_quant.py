"""Number formats: cache records, code tables and quantised linears against numpy written from section 5.3."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4jax import quant
from dsv4jax.cache import page_bytes_per_token
from dsv4jax.config import ModelConfig
from dsv4jax.linear import linear, linear_fp32
from dsv4jax.numerics import Numerics
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, dequantize, matmul

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (8, 64)
DTYPES = pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
FORMATS = pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])


# The formats once more, in numpy with true fp32 divisions.


def power_of_two_above(v):
    """UE8M0 byte: exponent field, plus one if the mantissa is not zero."""
    bits = v.view(np.uint32)
    return ((bits >> 23) + (bits & 0x7FFFFF > 0)).astype(np.uint8)


def power(byte):
    return np.ldexp(np.float32(1), byte.astype(np.int32) - 127)


def e4m3(x):
    return x.astype(ml_dtypes.float8_e4m3fn)


def e2m1(x):
    return x.astype(ml_dtypes.float4_e2m1fn)


def expected_record(name, x):
    """Bytes of the elements, bytes of the scales, and decoded float32 values of x [rows, n]."""
    block = 16 if name == "nvfp4" else 32
    groups = x.astype(np.float32).reshape(len(x), -1, block)
    amax = np.abs(groups).max(-1, keepdims=True)
    if name == "fp8":
        scale = power_of_two_above(np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448))
        code, factor = e4m3(np.clip(groups / power(scale), -448, 448)), power(scale)
    elif name == "mxfp4":
        scale = power_of_two_above(np.maximum(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
        code, factor = e2m1(np.clip(groups / power(scale), -6, 6)), power(scale)
    else:
        scale = e4m3(np.minimum(np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448)))
        code, factor = e2m1(np.clip(groups / scale.astype(np.float32), -6, 6)), scale.astype(np.float32)
    with np.errstate(over="ignore"):
        values = (code.astype(np.float32) * factor).reshape(x.shape)
    elements = code.view(np.uint8).reshape(x.shape)
    if name != "fp8":
        elements = elements[:, ::2] + 16 * elements[:, 1::2]
    return elements, scale.view(np.uint8).reshape(len(x), -1), values


@functools.cache
def jitted(function, *static):
    return jax.jit(lambda x: getattr(quant, function)(x, *static))


dequantize_blocks = jax.jit(quant.dequantize_blocks, static_argnums=(2, 3))
jitted_linear = jax.jit(linear, static_argnums=2)


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def check_format(name, x):
    """Record, decoded values and QDQ of x [rows, n] agree with numpy, bit for bit."""
    with np.errstate(over="ignore"):
        elements, scales, values = expected_record(name, x)
        values = values.astype(x.dtype)
    record = jitted(f"pack_{name}")(x)
    np.testing.assert_array_equal(record, np.concatenate([elements, scales], -1))
    np.testing.assert_array_equal(bits(jitted(f"unpack_{name}", x.dtype)(record)), bits(values))
    np.testing.assert_array_equal(bits(jitted(f"qdq_{name}")(x)), bits(values))


@st.composite
def values_at_code_borders(draw):
    """Rows whose elements lie on, just below or just above the border between two codes, at any magnitude."""
    seed, exponent = draw(st.integers(0, 2**32 - 1)), draw(st.integers(-20, 12))
    rng = np.random.default_rng(seed)
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    borders = [(codes[1:] + codes[:-1]) / 2, np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])]
    scale = rng.choice(codes[8:]) if draw(st.booleans()) else 1.0
    x = np.ldexp(rng.choice(borders[draw(st.integers(0, 1))], SHAPE) * scale, exponent).astype(np.float32)
    x[:, ::16] = np.ldexp(np.float32(draw(st.sampled_from([6, 5, 448, 3])) * scale), exponent)
    x = x.view(np.int32) + rng.integers(-1, 2, SHAPE, dtype=np.int32)
    return x.view(np.float32) * rng.choice(np.float32([-1, 1]), SHAPE)


# Subnormal numbers are left to the next test: backends may take them for zero.
NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False)
ARRAYS = hnp.arrays(np.float32, SHAPE, elements=NUMBERS, fill=st.just(0.0) | NUMBERS) | values_at_code_borders()


@FORMATS
@DTYPES
@settings(max_examples=40)
@given(x=ARRAYS)
def test_records_match_numpy_bit_for_bit(name, dtype, x):
    check_format(name, x.astype(dtype))


@FORMATS
@DTYPES
@pytest.mark.parametrize("magnitude", [0.0, -0.0, 2.0**-126, 1e-30, 1e-4, 1.0, 2688.0, 3e4, 3e38])
def test_records_of_constant_and_of_random_rows_of_any_magnitude(name, dtype, magnitude):
    x = np.full(SHAPE, magnitude, np.float32)
    x[4:] *= np.random.default_rng(0).choice(np.float32([-1, 1, 0, 0.5, 0.3]), (4, 64))
    x[np.abs(x) < 2.0**-126] *= 0
    check_format(name, x.astype(dtype))


@FORMATS
@DTYPES
@settings(max_examples=20)
@given(x=hnp.arrays(np.float32, SHAPE, elements=st.floats(-(2.0**-120), 2.0**-120, width=32)))
def test_subnormal_inputs_stay_below_the_smallest_normal_number(name, dtype, x):
    x = x.astype(dtype)
    decoded = jitted(f"unpack_{name}", dtype)(jitted(f"pack_{name}")(x))
    np.testing.assert_array_equal(bits(decoded), bits(jitted(f"qdq_{name}")(x)))
    error = np.abs(np.asarray(decoded, np.float64) - x.astype(np.float64))
    assert error.max() <= (2.0**-121 if name == "mxfp4" else 2.0**-120)


def test_an_nvfp4_scale_is_amax_through_a_true_division_by_six():
    """Around every border between two scales, where a product with the rounded 1/6 would go the other way."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    border = (codes[1:] + codes[:-1]) * 3
    amax = (border.view(np.int32)[:, None] + np.arange(-6, 7, dtype=np.int32)).view(np.float32).reshape(-1, 1)
    assert (amax / np.float32(6) != amax * np.float32(1 / 6)).any()
    x = np.repeat(amax, 16, 1)
    x = np.pad(x, ((0, -len(x) % SHAPE[0]), (0, 0))).reshape(-1, 128)
    check_format("nvfp4", x)


@FORMATS
def test_a_group_influences_no_other(name):
    block = 16 if name == "nvfp4" else 32
    x = np.random.default_rng(1).normal(size=(4, 128)).astype(np.float32)
    alone = np.asarray(jitted(f"qdq_{name}")(x))
    spoilt = x.copy()
    spoilt[1, block : 2 * block] = [np.nan, np.inf, -np.inf, 1e30] * (block // 4)
    result = np.asarray(jitted(f"qdq_{name}")(spoilt))
    elsewhere = np.ones(x.shape, bool)
    elsewhere[1, block : 2 * block] = False
    np.testing.assert_array_equal(result[elsewhere], alone[elsewhere])


@FORMATS
@pytest.mark.parametrize("width", [1, 20, 40, 70])
def test_qdq_takes_any_width(name, width):
    x = np.random.default_rng(2).normal(size=(3, width)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, -width % 32)))
    np.testing.assert_array_equal(jitted(f"qdq_{name}")(x), expected_record(name, padded)[2][:, :width])


@FORMATS
def test_records_keep_leading_axes_and_refuse_partial_blocks(name):
    x = np.random.default_rng(3).normal(size=(2, 3, 64)).astype(np.float32)
    record = jitted(f"pack_{name}")(x)
    flat = jitted(f"pack_{name}")(x.reshape(6, 64))
    np.testing.assert_array_equal(record.reshape(6, -1), flat)
    assert jitted(f"unpack_{name}", jnp.float32)(record).shape == x.shape
    with pytest.raises(ValueError, match="40"):
        jitted(f"pack_{name}")(x[..., :40])


@pytest.mark.parametrize(
    "name, amax, exponent",
    [("fp8", 1.0, -8), ("fp8", 3.7, -6), ("fp8", 448.0, 0), ("fp8", 449.0, 1), ("fp8", 1e-4, -22), ("fp8", 0.0, -22),
     ("mxfp4", 1.0, -2), ("mxfp4", 3.7, 0), ("mxfp4", 448.0, 7)],
)  # fmt: skip
def test_scales_of_section_12(name, amax, exponent):
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = -amax
    assert int(jitted(f"pack_{name}")(x)[0, -1]) == 127 + exponent


# Sizes.


@pytest.mark.parametrize("name, channels, size", [("nvfp4", 512, 288), ("mxfp4", 128, 68), ("fp8", 512, 528)])
def test_record_sizes_of_the_released_model(name, channels, size):
    assert getattr(quant, f"record_bytes_{name}")(channels) == size
    assert jitted(f"pack_{name}")(np.zeros((2, channels), np.float32)).shape == (2, size)


def test_a_token_of_the_released_model_takes_890_bytes_of_pages():
    assert page_bytes_per_token(ModelConfig()) == 890


# Code tables.

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def decode_e4m3(code):
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 127 == 127:
        return np.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_all_256_element_codes():
    elements = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(8, 32)
    scale = np.full((8, 1), 128, np.uint8)
    values = dequantize_blocks(elements, scale, (1, 32), jnp.float32).reshape(-1)
    np.testing.assert_array_equal(values, [2 * decode_e4m3(code) for code in range(256)])


def test_all_256_scale_codes():
    decoded = np.asarray(jitted("e8m0_decode")(np.arange(256, dtype=np.uint8)), np.float64)
    np.testing.assert_array_equal(decoded, [2.0 ** (code - 127) for code in range(255)] + [np.nan])


@pytest.mark.parametrize("byte", [0, 1, 119, 120, 127, 134, 254, 255])
@DTYPES
def test_scale_codes_multiply_elements(byte, dtype):
    elements = np.array([[0.5, 1.0, -1.75, 448.0] if byte < 200 else [2.0**-9, 0.25, -0.5, 1.0]], np.float32)
    values = dequantize_blocks(e4m3(elements), np.full((1, 1), byte, np.uint8), (1, 32), dtype)
    expected = elements.astype(np.float64) * (2.0 ** (byte - 127) if byte < 255 else np.nan)
    normal = ~(np.abs(expected) < 2.0**-126)  # a backend may take smaller results for zero
    np.testing.assert_array_equal(np.asarray(values, np.float64)[normal], expected[normal])


def test_all_16_codes_of_e2m1_and_the_order_of_the_nibbles():
    ramp = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
    decoded = jitted("e2m1_decode")(ramp)
    np.testing.assert_array_equal(bits(decoded), bits(np.float32(E2M1)))
    np.testing.assert_array_equal(jitted("e2m1_decode")(np.array([0x21], np.uint8)), [0.5, 1])
    np.testing.assert_array_equal(jitted("pack_nibbles")(np.arange(16, dtype=np.uint8)), ramp)
    weight = Mxfp4Weight(jnp.asarray(np.tile(ramp, 2)[None]), jnp.array([[128]], jnp.uint8))
    values = jax.jit(functools.partial(dequantize, dtype=jnp.float32))(weight)
    np.testing.assert_array_equal(values, [[2 * v for v in E2M1 * 2]])


@given(hnp.arrays(np.uint8, (4, 6), elements=st.integers(0, 15)))
@settings(max_examples=20)
def test_packed_codes_are_decoded_in_place(codes):
    packed = jitted("pack_nibbles")(codes)
    assert packed.shape == (4, 3)
    np.testing.assert_array_equal(jitted("e2m1_decode")(packed), np.array(E2M1)[codes])


TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 6.0: 7, 7.0: 7, 1e30: 7}


def test_e2m1_rounds_ties_to_the_even_code_and_saturates():
    x = np.float32([*TIES, *(-v for v in TIES)])
    codes = jax.jit(quant.e2m1_encode)(x, np.float32(1))
    np.testing.assert_array_equal(codes, [*TIES.values(), *(8 + c for c in TIES.values())])


# Blocks of a weight.


@pytest.mark.parametrize(
    "lead, rows, cols, block",
    [((), 33, 70, (32, 32)), ((2, 1), 64, 64, (32, 32)), ((3,), 5, 31, (32, 32)), ((2,), 7, 72, (1, 32))],
)
def test_every_element_takes_the_scale_of_its_block(lead, rows, cols, block):
    rng = np.random.default_rng(4)
    elements = e4m3(rng.normal(size=(*lead, rows, cols)))
    grid = -(-rows // block[0]), -(-cols // block[1])
    scale = rng.integers(115, 140, (*lead, *grid), dtype=np.uint8)
    expected = np.empty(elements.shape)
    for *at, row, col in np.ndindex(elements.shape):
        byte = int(scale[(*at, row // block[0], col // block[1])])
        expected[(*at, row, col)] = float(elements[(*at, row, col)]) * 2.0 ** (byte - 127)
    for dtype in (jnp.float32, jnp.bfloat16):
        values = dequantize_blocks(elements, scale, block, dtype)
        assert values.dtype == dtype
        np.testing.assert_array_equal(np.asarray(values, np.float64), expected)


# Linears.

OUT, INNER = 40, 96


def weights(rng):
    """One weight of each type with its values in float64."""
    byte = functools.partial(rng.integers, 120, 132, dtype=np.uint8)
    fp8 = Fp8Weight(jnp.asarray(e4m3(rng.normal(size=(OUT, INNER)))), jnp.asarray(byte((2, 3))))
    packed = rng.integers(0, 256, (OUT, INNER // 2), dtype=np.uint8)
    fp4 = Mxfp4Weight(jnp.asarray(packed), jnp.asarray(byte((OUT, INNER // 32))))
    dense = DenseWeight(jnp.asarray(rng.normal(size=(OUT, INNER)).astype(BF16)))
    power = np.ldexp(1.0, np.asarray(fp8.scale, np.int32) - 127)
    fp8_values = np.asarray(fp8.weight, np.float64) * power.repeat(32, 0)[:OUT].repeat(32, 1)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(OUT, INNER)
    fp4_values = np.array(E2M1)[codes] * np.ldexp(1.0, np.asarray(fp4.scale, np.int32) - 127).repeat(32, 1)
    return [(fp8, fp8_values), (fp4, fp4_values), (dense, np.asarray(dense.weight, np.float64))]


@DTYPES
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("kind", range(3), ids=["fp8", "mxfp4", "dense"])
def test_linear_is_a_matmul_of_decoded_operands_rounded_once(dtype, quantize, kind):
    rng = np.random.default_rng(5)
    weight, w = weights(rng)[kind]
    x = rng.normal(size=(7, INNER)).astype(dtype)
    numerics = Numerics(dtype=dtype.type, quantize_activations=quantize)
    y = jitted_linear(x, weight, numerics)
    assert y.dtype == dtype
    used = x.astype(np.float64)
    if quantize and kind != 2:
        used = expected_record("fp8", x)[2].astype(np.float64)
    exact = used @ w.T
    # fp32 accumulation in any order, then half a unit in the last place of the output.
    bound = INNER * 2.0**-24 * (np.abs(used) @ np.abs(w).T) + np.abs(exact) * (2.0**-8 if dtype == BF16 else 2.0**-23)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("kind", range(3), ids=["fp8", "mxfp4", "dense"])
def test_linear_rounds_its_exact_sum_to_nearest_even(kind):
    """Small integers, so that fp32 sums are exact in any order and FP8 keeps the input as it is."""
    rng = np.random.default_rng(6)
    x = rng.integers(-8, 9, (16, INNER)).astype(BF16)
    elements = rng.integers(-4, 5, (OUT, INNER))
    elements[elements == 3] = 6
    weight = [
        Fp8Weight(jnp.asarray(e4m3(elements.astype(np.float32))), jnp.full((2, 3), 127, jnp.uint8)),
        Mxfp4Weight(
            quant.pack_nibbles(jnp.asarray(e2m1(elements.astype(np.float32)).view(np.uint8))),
            jnp.full((OUT, 3), 127, jnp.uint8),
        ),
        DenseWeight(jnp.asarray(elements.astype(BF16))),
    ][kind]
    exact = x.astype(np.float64) @ elements.T
    assert (exact.astype(BF16) != exact).any()
    y = jitted_linear(x, weight, Numerics())
    np.testing.assert_array_equal(np.asarray(y, np.float64), exact.astype(BF16).astype(np.float64))


def test_linear_keeps_leading_axes_and_fp32_matmuls_round_nothing():
    rng = np.random.default_rng(7)
    weight, w = weights(rng)[2]
    x = rng.normal(size=(2, 3, INNER)).astype(BF16)
    for y in (jax.jit(linear_fp32)(x, weight), jax.jit(matmul)(x, weight.weight)):
        assert y.dtype == jnp.float32 and y.shape == (2, 3, OUT)
        np.testing.assert_allclose(y, x.astype(np.float64) @ w.T, rtol=1e-5, atol=1e-5)
    flat = jitted_linear(x.reshape(6, INNER), weight, Numerics())
    np.testing.assert_array_equal(bits(jitted_linear(x, weight, Numerics()).reshape(6, OUT)), bits(flat))


@pytest.mark.parametrize("value", [np.nan, -np.nan, 3.3e38, -3.3e38, 1e-45, 0.0])
def test_an_index_key_without_infinity_has_no_nan_scale(value):
    """Kernels do not recognise the byte 255."""
    key = np.random.default_rng(0).normal(size=128).astype(np.float32)
    key[[5, 40, 41]] = value
    assert 255 not in np.asarray(quant.pack_mxfp4(jnp.asarray(key)))[64:]
    key[6] = np.inf
    assert np.isnan(value) or np.asarray(quant.pack_mxfp4(jnp.asarray(key)))[64] == 255
