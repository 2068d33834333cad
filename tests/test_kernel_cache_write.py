"""Cache writes: the kernels' per-thread code on an emulator against the model's own roundings, lowering, and a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import simt_emulator
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper
from row_emulator import Machine, array, emulate

from dsv4jax.config import ModelConfig
from dsv4jax.model.norm import rms_norm
from dsv4jax.model.rope import Rotation, rotate, rotation
from dsv4jax.quant import pack_fp8, pack_mxfp4, pack_nvfp4
from pallas_kernels import rows
from pallas_kernels.cache_write import arg_specs, benchmark, compressed_entry, device, index_key, query_and_window_key
from pallas_kernels.cache_write.arg_specs import DIM, EPS, INDEX_DIM, PAIRS, Q_LORA, TOKENS
from pallas_kernels.fp8_linear import quantize_activations, swiglu, swiglu_activations

BF16 = ml_dtypes.bfloat16


@functools.partial(jax.jit, static_argnums=(0, 1))
def turns(tokens, compressed=True):
    return rotation(ModelConfig(), jnp.arange(tokens) * 977 + 3, compressed)


packed = jax.jit(lambda pack, x: pack(x), static_argnums=0)
quantized_rows = jax.jit(quantize_activations)
normalised = jax.jit(functools.partial(rms_norm, eps=EPS))


ROWS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "zeros": lambda rng, n: np.zeros(n),
    "zeros of both signs": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "wide": lambda rng, n: rng.standard_normal(n) * np.exp2(rng.integers(-30, 30, n)),
    "blocks apart": lambda rng, n: rng.standard_normal(n) * np.exp2(rng.integers(-9, 9, n // 16)).repeat(16),
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-30,
    "huge": lambda rng, n: rng.standard_normal(n) * 1e30,
    "few values": lambda rng, n: rng.integers(-6, 7, n) / 4,
    "one": lambda rng, n: np.where(np.arange(n) == 5, 3.0, 0.0),
}


def bf16_rows(case, tokens, n, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([ROWS[case](rng, n) for _ in range(tokens)]), jnp.bfloat16)


ENCODINGS = {"fp8": (rows.fp8, pack_fp8), "mxfp4": (rows.mxfp4, pack_mxfp4), "nvfp4": (rows.nvfp4, pack_nvfp4)}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("width", [128, 512])
def test_records_are_those_of_the_formats(encoding, case, width):
    """Bit for bit, without a norm: every rounding of the formats."""
    encode, pack = ENCODINGS[encoding]
    x = bf16_rows(case, 3, width)
    want = np.asarray(packed(pack, x))
    got = np.zeros_like(want)
    for record, row in zip(got, x, strict=True):
        m = Machine(128)
        memory = simt_emulator.Array(record.view(np.uint32))
        values = rows.read(m, array(row), m.tid, width // rows.CHANNELS)
        rows.put_record(m, memory, m.tid, width // rows.CHANNELS, encode(m, values))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", ROWS)
def test_activations_are_those_of_the_linear(case):
    x = bf16_rows(case, 3, Q_LORA)
    want = quantized_rows(x)
    elements, scales = array(np.zeros(x.shape, np.uint8)), simt_emulator.Array(np.zeros(want.scale.size, np.float32))
    for token, row in enumerate(x):
        m = Machine(256)
        values = rows.read(m, array(row), m.tid, Q_LORA // rows.CHANNELS)
        own = m.row(elements, m.u32(token), Q_LORA // 4)
        rows.put_activations(m, own, scales, m.tid, Q_LORA // rows.CHANNELS, m.u32(token), 3, values)
    np.testing.assert_array_equal(elements.data.view(np.uint8), np.asarray(want.elements).view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(scales.data.reshape(want.scale.shape), want.scale)


@pytest.mark.parametrize("case", ROWS)
def test_activations_of_sums(case):
    """As the grouped linear writes its result: a thread has four channels."""
    x = bf16_rows(case, 1, 4 * 32)
    want = quantized_rows(x)
    sums = np.float32(x[0]) * np.float32(1 + 2.0**-10)  # Rounds to x.
    word, scale = rows.quantised_four(Machine(32), list(sums.reshape(32, 4).T))
    np.testing.assert_array_equal(word.view(np.uint8), np.asarray(want.elements[0]).view(np.uint8))
    np.testing.assert_array_equal(scale[::8].view(np.float32), want.scale[:, 0])


@pytest.mark.parametrize("width", [288, 2304])
def test_swiglu_activations(width):
    """The sigmoid may differ in the last bits of fp32, so that one value in hundreds is rounded to the other side."""
    gate_up, limit = bf16_rows("wide", 3, 2 * width), 10.0
    want = jax.jit(functools.partial(swiglu_activations, limit=limit, implementation="reference"))(gate_up)
    results = [np.zeros((3, width), np.uint8), np.zeros((width // 32, 3), np.float32)]
    code = functools.partial(swiglu.device_code, width=width, number=3, limit=limit)
    _, (elements, scale) = emulate(code, 3, [gate_up], results, width)
    np.testing.assert_array_equal(scale.view(np.float32).reshape(want.scale.shape), want.scale)
    wanted = np.asarray(want.elements).view(np.uint8).reshape(-1)
    assert np.mean(elements != wanted) < 0.01
    assert np.abs(elements.astype(int) - wanted).max() <= 1


def exact_rotate(x, by):
    """`rotate` in NumPy, whose products are not contracted with sums."""
    x, (c, s) = np.array(x), (np.asarray(a) for a in (by.cos, by.sin))
    tail = x[:, -2 * c.shape[1] :].astype(np.float32)
    even, odd = tail[:, 0::2], tail[:, 1::2]
    turned = np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(tail.shape)
    x[:, -tail.shape[1] :] = turned.astype(BF16)
    return jnp.asarray(x)


def test_rotation():
    x, by = bf16_rows("normal", 4, DIM), turns(4)
    want = exact_rotate(x, by)
    np.testing.assert_allclose(np.float32(jax.jit(rotate)(x, by)), np.float32(want), rtol=2**-7, atol=1e-6)
    for token, row in enumerate(x):
        m = Machine(128)
        values = rows.read(m, array(row), m.tid, DIM // rows.CHANNELS)
        memory = array(np.zeros(DIM, BF16))
        values = rows.rotate(m, values, array(by.cos[token]), array(by.sin[token]), m.tid, DIM, PAIRS)
        rows.write(m, memory, m.tid, DIM // rows.CHANNELS, values)
        np.testing.assert_array_equal(memory.data.view(BF16), want[token])


def test_rotation_of_four_channels():
    """As the FP8 linear applies it to its sums: each thread has four channels of a row."""
    x, by = bf16_rows("normal", 2, INDEX_DIM), turns(2)
    want = exact_rotate(x, by)
    for token in range(2):
        m = Machine(32)
        sums = np.float32(x[token]) + np.float32(2.0**-30)  # Rounds to x.
        values = list(sums.reshape(32, 4).T)
        words = rows.rotated_four(m, values, array(by.cos[token]), array(by.sin[token]), m.tid * 4, INDEX_DIM, PAIRS)
        np.testing.assert_array_equal(np.stack(words, 1).reshape(-1).view(BF16), want[token])


def whole_rows(tokens, n, seed):
    """Rows whose mean square is an exact sum in any order, so that the norm leaves no room for another result."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-31, 32, (tokens, n)), jnp.bfloat16)


def norm_weight(n, seed=9):
    return jnp.asarray(1 + np.random.default_rng(seed).standard_normal(n) / 8, jnp.bfloat16)


def test_query_and_window_key():
    tokens, slots = 5, 3
    projected, norms = whole_rows(tokens, Q_LORA + DIM, 0), (norm_weight(Q_LORA), norm_weight(DIM, 8))
    by = turns(tokens, compressed=False)
    rng = np.random.default_rng(3)
    ring = rng.integers(0, 256, (slots, 10, 528), np.uint8)
    places = np.array([4, 29, -1, 30, 0], np.int32)
    code = functools.partial(device.query_and_window_key, widths=(Q_LORA, DIM), pairs=PAIRS, tokens=tokens, eps=EPS)
    shapes = [
        np.zeros((tokens, Q_LORA), BF16),
        np.zeros((tokens, Q_LORA), np.uint8),
        np.zeros((Q_LORA // 32, tokens), np.float32),
        np.zeros((tokens, 528), np.uint8),
    ]
    arguments = (projected, *norms, by.cos, by.sin)
    got_ring, got = emulate(code, tokens, arguments, shapes, Q_LORA + DIM, ring, places)

    q_latent = normalised(projected[:, :Q_LORA], norms[0])
    quantized = quantized_rows(q_latent)
    records = np.asarray(packed(pack_fp8, exact_rotate(normalised(projected[:, Q_LORA:], norms[1]), by)))
    np.testing.assert_array_equal(got[0].view(BF16).reshape(q_latent.shape), q_latent)
    np.testing.assert_array_equal(got[1], np.asarray(quantized.elements).view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(got[2].view(np.float32).reshape(quantized.scale.shape), quantized.scale)
    np.testing.assert_array_equal(got[3].reshape(records.shape), records)
    want = ring.reshape(30, 528).copy()
    want[[4, 29, 0]] = records[[0, 1, 4]]
    np.testing.assert_array_equal(got_ring.reshape(30, 528), want)
    no_ring, same = emulate(code, tokens, arguments, shapes, Q_LORA + DIM)
    assert no_ring is None
    for a, b in zip(same, got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["entry", "key"])
def test_pool_writes(kind):
    tokens, width = 6, DIM if kind == "entry" else INDEX_DIM
    x, weight, by = whole_rows(tokens, width, 1), norm_weight(width), turns(tokens)
    normal = normalised(x, weight)
    pack = pack_nvfp4 if kind == "entry" else pack_mxfp4
    records = np.asarray(packed(pack, exact_rotate(normal, by)))
    pool = np.random.default_rng(2).integers(0, 256, (4, 8, records.shape[1]), np.uint8)
    places = np.array([31, 2, 32, 7, -5, 0], np.int32)
    code = device.compressed_entry if kind == "entry" else device.index_key
    results = [np.zeros((tokens, width), BF16)] if kind == "entry" else []
    code = functools.partial(code, width=width, pairs=PAIRS, eps=EPS)
    got, found = emulate(code, tokens, (x, weight, by.cos, by.sin), results, width, pool, places)
    want = pool.reshape(32, -1).copy()
    want[[31, 2, 7, 0]] = records[[0, 1, 3, 5]]
    np.testing.assert_array_equal(got.reshape(32, -1), want)
    if kind == "entry":
        np.testing.assert_array_equal(found[0].view(BF16).reshape(normal.shape), normal)


def whole_call(kind, tokens, seed=0):
    """Operation, its arguments, and the number of the argument that is the cache."""
    rng = np.random.default_rng(seed)
    if kind == "window":
        x, norms = whole_rows(tokens, Q_LORA + DIM, seed), (norm_weight(Q_LORA), norm_weight(DIM, 8))
        cache, operation = rng.integers(0, 256, (64, arg_specs.RING, 528), np.uint8), query_and_window_key
    elif kind == "entry":
        x, norms, operation = whole_rows(tokens, DIM, seed), (norm_weight(DIM),), compressed_entry
        cache = rng.integers(0, 256, (50, 256, 288), np.uint8)
    else:
        x, norms, operation = whole_rows(tokens, INDEX_DIM, seed), (norm_weight(INDEX_DIM),), index_key
        cache = rng.integers(0, 256, (50, 256, 68), np.uint8)
    places = rng.permutation(cache.shape[0] * cache.shape[1] + 9)[:tokens].astype(np.int32)
    places[::5] = -1
    return functools.partial(operation, eps=EPS), (x, *norms, turns(tokens), jnp.asarray(cache), jnp.asarray(places))


KINDS = "window", "entry", "key"


@pytest.mark.parametrize("kind", KINDS)
def test_reference_writes_its_places_only(kind):
    operation, arguments = whole_call(kind, 7)
    cache, places = np.asarray(arguments[-2]), np.asarray(arguments[-1])
    got = jax.tree.leaves(jax.jit(operation)(*arguments))[-1]
    flat = cache.reshape(-1, cache.shape[2])
    kept = np.setdiff1d(np.arange(len(flat)), places)
    np.testing.assert_array_equal(np.asarray(got).reshape(flat.shape)[kept], flat[kept])
    written = places[(places >= 0) & (places < len(flat))]
    assert len(written) and (np.asarray(got).reshape(flat.shape)[written] != flat[written]).any(1).all()


def test_no_tokens():
    for kind in KINDS:
        operation, arguments = whole_call(kind, 1)
        x, *rest, by, cache, places = arguments
        by = Rotation(by.cos[:0], by.sin[:0])
        results = jax.jit(operation)(x[:0], *rest, by, cache, places[:0])
        np.testing.assert_array_equal(jax.tree.leaves(results)[-1], cache)


def test_window_key_without_a_ring():
    operation, (x, *rest, _, _) = whole_call("window", 3)
    *_, records, ring = jax.jit(operation)(x, *rest)
    assert ring is None
    assert records.shape == (3, 528) and np.any(records != 0)


@needs_no_hopper
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("window", dict(implementation="triton"), "triton"),
        ("window", dict(implementation="pallas"), "must be a Hopper GPU"),
        ("key", dict(implementation="pallas", projected=jnp.zeros((1, 128))), "projected is float32: must be bfloat16"),
        ("key", dict(implementation="pallas", by=Rotation(jnp.zeros((1, 3)), jnp.zeros((1, 3)))), "3 pairs"),
        ("window", dict(projected=jnp.zeros((1, 9), jnp.bfloat16)), "9 channels: must be 1280 [+] 512"),
        ("entry", dict(by=Rotation(jnp.zeros((2, 32)), jnp.zeros((2, 32)))), "2 rotations"),
        ("entry", dict(cache=jnp.zeros((2, 2, 68), jnp.uint8)), "records of .68,.: must be 288 bytes"),
    ],
)
def test_impossible_arguments_are_named(kind, change, message):
    operation, (x, *norms, by, cache, places) = whole_call(kind, 1)
    x, by = change.pop("projected", x), change.pop("by", by)
    cache, places = change.pop("cache", cache), change.pop("places", places)
    with pytest.raises(ValueError, match=message):
        operation(x, *norms, by, cache, places, **change)


def test_narrow_rows_are_refused():
    x, by = jnp.zeros((1, 96), jnp.bfloat16), turns(1)
    with pytest.raises(ValueError, match="96 channels: must be multiples of 128"):
        index_key(
            x, x[0], by, jnp.zeros((1, 1, 51), jnp.uint8), jnp.zeros(1, jnp.int32), eps=EPS, implementation="pallas"
        )


@pytest.mark.parametrize("tokens", [1, *TOKENS])
@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_cuda_and_writes_in_place(kind, tokens):
    operation, arguments = whole_call(kind, tokens)
    run = functools.partial(operation, implementation="pallas")
    text = lowered_for_hopper(run, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments))
    assert text.count("custom_call @mosaic_gpu") == 1 and "output_operand_aliases" in text
    assert "scatter" not in text


def test_benchmark_cases_count_what_they_move():
    by_name = {case.name: case for case in benchmark.cases()}
    assert by_name["index key 96 tokens"].bytes == 12 * by_name["index key 8 tokens"].bytes
    assert by_name["query and window key 8 tokens"].bytes > 8 * 2 * (Q_LORA + DIM)


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 16, 96, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_on_gpu(kind, tokens):
    """Bit for bit but for the rotation, where a compiler may round a sum of products once instead of twice."""
    operation, arguments = whole_call(kind, tokens)
    got, want = (
        jax.jit(functools.partial(operation, implementation=name))(*arguments) for name in ("pallas", "reference")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and np.mean(a != b) < 1e-4
        if a.dtype != np.uint8:
            np.testing.assert_array_equal(a, b)
