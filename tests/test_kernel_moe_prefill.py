"""The prefill form of the expert operation: routing and packing, its kernels' lowering, and parity on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lowered_for_hopper, needs_hopper
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dsv4jax.numerics import FAST, REFERENCE
from dsv4jax.quant import _encode_fp8
from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.moe_experts import pack, prefill, prefill_rows
from pallas_kernels.moe_experts.arg_specs import EXPERTS, HIDDEN, LIMIT, WIDTH, K
from pallas_kernels.moe_experts.prefill_matmul import expert_matmul_prefill
from pallas_kernels.moe_experts.prefill_plan import pack_rows
from pallas_kernels.moe_experts.prepare import limits
from pallas_kernels.moe_experts.reference import moe_experts, swiglu

TOKENS = (96, 512, 4096)
S = jax.ShapeDtypeStruct


def unpack_rows(packed):
    """Inverse of `pack_rows`."""
    slabs, blocks, _ = packed.shape
    x = lax.bitcast_convert_type(packed, jnp.bfloat16).reshape(slabs, blocks, 8, 8, 8)
    place = jnp.arange(8)[:, None] ^ jnp.arange(8)
    x = jnp.take_along_axis(x, place[None, None, :, :, None], 3).reshape(slabs, blocks, 8, 4, 2, 8)
    return x.transpose(1, 2, 0, 3, 5, 4).reshape(blocks * 8, slabs * 64)


def quantised(x):
    data, scale = _encode_fp8(x)
    values = data.astype(jnp.float32).reshape(*scale.shape, 32) * scale[..., None]
    return values.reshape(x.shape).astype(jnp.bfloat16)


def test_packed_rows_lose_nothing():
    x = jax.random.bits(jax.random.key(0), (24, 320), jnp.uint16) & 0xBFFF  # No NaN, of which bits may change.
    again = unpack_rows(pack_rows(lax.bitcast_convert_type(x, jnp.bfloat16)))
    np.testing.assert_array_equal(lax.bitcast_convert_type(again, jnp.uint16), x)


def random_arguments(rng, tokens, hidden, number, k, kind="random"):
    ids = rng.random((tokens, number)).argsort(1)[:, :k].astype(np.int32)
    valid = np.ones(tokens, bool)
    if kind == "other ranks":
        ids += rng.choice([0, -number, number], ids.shape).astype(np.int32)
    if kind == "same":
        ids[:] = rng.permutation(number)[:k]
    if kind == "invalid":
        valid = rng.random(tokens) < 0.5
        ids[~valid] = rng.integers(-(2**31), 2**31, ((~valid).sum(), k))
    x = rng.standard_normal((tokens, hidden)).astype(np.float32) * np.exp(rng.standard_normal((tokens, 1)))
    x[~valid] = np.nan
    weights = rng.random((tokens, k)).astype(np.float32)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(ids), jnp.asarray(weights), jnp.asarray(valid)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 7, 100]),
    st.sampled_from(["random", "same", "invalid", "other ranks"]),
)
def test_routing(seed, tokens, kind):
    """Rows are apart, in blocks of their expert, in order of token; tiles cover the blocks of each expert once."""
    number, k, most = 12, 3, 4
    _, ids, weights, valid = random_arguments(np.random.default_rng(seed), tokens, 8, number, k, kind)
    route = jax.jit(functools.partial(prefill.route_rows, number=number, tile_blocks=most))
    (group, block, count, used), places, sorted_weights = jax.tree.map(np.asarray, route(ids, weights, valid))
    ids, weights, valid = map(np.asarray, (ids, weights, valid))
    blocks, tiles = limits(tokens, k, number, most)
    assert used[0] <= tiles == len(group)

    owner = np.full(blocks, -1)
    for e, first, size in zip(group[: used[0]], block, count, strict=False):
        assert 0 < size <= most and (owner[first : first + size] == -1).all()
        owner[first : first + size] = e
    ids = np.where(valid[:, None] & (ids >= 0) & (ids < number), ids, number)
    order = ids.argsort(1, stable=True)
    ascending, here = np.take_along_axis(ids, order, 1), np.sort(ids, 1) < number
    assert (places[~here] == -1).all()
    taken = places[here]
    assert len(set(taken.flat)) == taken.size
    np.testing.assert_array_equal(owner[taken // 8], ascending[here])
    np.testing.assert_array_equal(sorted_weights[here], np.take_along_axis(weights, order, 1)[here])
    for e in range(number):
        rows = taken[owner[taken // 8] == e]
        assert (np.diff(rows) == 1).all()
        assert (owner == e).sum() == -(-len(rows) // 8)


def no_experts():
    weight = pack.PackedWeight(jnp.zeros((4, 8, 1, pack.WEIGHT_WORDS), jnp.int32), jnp.zeros((4, 8, 16), jnp.int32))
    return pack.PackedExperts(weight, weight)


def test_impossible_arguments_are_named():
    with pytest.raises(ValueError, match="192 output channels"):
        weight = S((1, 3, 1, pack.WEIGHT_WORDS), jnp.int32)
        tile = S((1,), jnp.int32)
        run = functools.partial(expert_matmul_prefill, plan=prefill.SMALL_TILES)
        jax.eval_shape(run, tile, tile, tile, tile, S((4, 1, 256), jnp.int32), weight)


def test_no_tokens():
    arguments = random_arguments(np.random.default_rng(0), 0, 256, 4, 2)
    assert prefill.moe_experts(*arguments, no_experts(), limit=LIMIT, fast=False).shape == (0, 256)


def argument_specs(tokens):
    def weight(out, inner):
        records = S((EXPERTS, out // 64, inner // 256, pack.WEIGHT_WORDS), jnp.int32)
        return pack.PackedWeight(records, S((EXPERTS, out // 64, 16), jnp.int32))

    experts = pack.PackedExperts(weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH))
    x, ids = S((tokens, HIDDEN), jnp.bfloat16), S((tokens, K), jnp.int32)
    return x, ids, S((tokens, K), jnp.float32), S((tokens,), jnp.bool), experts


@pytest.mark.parametrize("tokens", TOKENS)
def test_lowers_for_cuda(tokens):
    run = functools.partial(prefill.moe_experts, limit=LIMIT, fast=False)
    assert lowered_for_hopper(run, *argument_specs(tokens)).count("mosaic_gpu") >= 5


@functools.cache
def released_weights():
    def one(key, out, inner):
        a, b = jax.random.split(key)
        codes = jax.random.bits(a, (EXPERTS, out, inner // 2), jnp.uint8)
        scale = jax.random.randint(b, (EXPERTS, out, inner // 32), 114, 122, jnp.int32)
        return Mxfp4Weight(codes, scale.astype(jnp.uint8))

    a, b, c = jax.random.split(jax.random.key(0), 3)
    weights = one(a, WIDTH, HIDDEN), one(b, WIDTH, HIDDEN), one(c, HIDDEN, WIDTH)
    return weights, jax.jit(pack.pack_experts)(*weights)


@needs_hopper
@pytest.mark.parametrize("kind", ["random", "same", "invalid"])
@pytest.mark.parametrize("numerics", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_parity_on_gpu(tokens, numerics, kind):
    weights, packed = released_weights()
    arguments = random_arguments(np.random.default_rng(tokens), tokens, HIDDEN, EXPERTS, K, kind)
    got = jax.jit(functools.partial(prefill.moe_experts, limit=LIMIT, fast=numerics.fast))(*arguments, packed)
    reference = functools.partial(moe_experts, limit=LIMIT, numerics=numerics)
    want = jax.jit(reference, compiler_options={"xla_allow_excess_precision": False})(*arguments, *weights)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(got[~np.asarray(arguments[3])] == 0)
    errors = np.linalg.norm(got - want, axis=1)
    assert np.all(errors <= 1e-2 * np.linalg.norm(want, axis=1))


@needs_hopper
def test_rows_on_gpu():
    """The passes over rows give the bits of XLA's operations, up to rounding of the exponential."""
    tokens = 512
    rows = limits(tokens, K, EXPERTS, 12)[0] * 8

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def compare(x, ids, weights, valid):
        _, places, weights = prefill.route_rows(ids, weights, valid, EXPERTS, 12)
        packed, routing = prefill_rows.pack_tokens(x, places, weights, rows)
        got, want = unpack_rows(packed)[places], quantised(x)[:, None]
        weight = jnp.zeros(rows).at[places].set(weights)
        pairs = (jax.random.normal(jax.random.key(0), (rows, WIDTH // 8, 2, 8)) * 4).astype(jnp.bfloat16)
        gate, up = (pairs[:, :, i].reshape(rows, WIDTH) for i in range(2))
        z = prefill_rows.activate(pairs.reshape(rows, 2 * WIDTH), weight, limit=LIMIT, weighted=True)
        z_want = quantised((swiglu(gate, up, LIMIT) * weight[:, None]).astype(jnp.bfloat16))
        return jnp.sum(got != want), jnp.sum(routing[places] != weights), jnp.mean(unpack_rows(z) != z_want)

    different, wrong, rate = compare(*random_arguments(np.random.default_rng(0), tokens, HIDDEN, EXPERTS, K))
    assert (different, wrong) == (0, 0)
    assert rate < 1e-3
