"""Router and experts against numpy: who is picked, with which weight, and what is computed (architecture section 5)."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations
from dsv4jax.model.moe import MoE, Router, SharedExpert, expert_load, sqrt_softplus
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.quant import pack_nibbles
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, dequantize
from pallas_kernels.moe_experts import moe_experts
from pallas_kernels.moe_experts.reference import swiglu

BF16 = ml_dtypes.bfloat16
FLOAT32 = Numerics(dtype=jnp.float32, quantize_activations=False)
HIDDEN, WIDTH, EXPERTS, K, LIMIT = 64, 32, 6, 2, 2.0

# Router.

SCORES = 32  # experts, and channels: with an identity matrix as weight the input is the logits


@functools.cache
def router():
    return Router(SCORES, ModelConfig(hidden_size=SCORES, n_routed_experts=SCORES))


@functools.partial(jax.jit, static_argnames=("k", "scale"))
def routed(logits, bias, bias_vl, image_mask, k, scale):
    gate = nnx.clone(router())
    gate.weight = nnx.Param(jnp.eye(SCORES, dtype=jnp.bfloat16))
    gate.bias, gate.bias_vl = nnx.Param(bias), nnx.Param(bias_vl)
    return gate(logits, image_mask, k, scale)


def route(logits, bias=None, bias_vl=None, image_mask=None, k=6, scale=1.5):
    logits = jnp.asarray(logits)
    zeros = np.zeros(SCORES, np.float32)
    mask = np.zeros(len(logits), bool) if image_mask is None else np.array(image_mask)
    experts, weights = routed(
        logits, zeros if bias is None else bias, zeros if bias_vl is None else bias_vl, mask, k, scale
    )
    return np.asarray(experts), np.asarray(weights)


def expected_route(logits, bias, k, scale):
    scores = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
    experts = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    picked = np.take_along_axis(scores, experts, -1)
    return experts, picked / (picked.sum(-1, keepdims=True) + 1e-20) * scale


@st.composite
def distinct_logits(draw):
    """Rows of logits between two bounds, far enough apart for fp32 to order them, in random order."""
    low, high = sorted(draw(st.tuples(st.floats(-40, 100), st.floats(-40, 100))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = np.linspace(low, max(high, low + 1), SCORES, dtype=np.float32)
    return rng.permuted(np.tile(row, (4, 1)), axis=1)


@settings(max_examples=50)
@given(distinct_logits(), st.sampled_from([(6, 1.5), (3, 1.5), (1, 2.5)]))
def test_weights_are_finite_sum_to_the_scale_and_choose_as_float64(logits, k_and_scale):
    k, scale = k_and_scale
    experts, weights = route(logits, k=k, scale=scale)
    expected_experts, expected_weights = expected_route(logits, 0, k, scale)
    np.testing.assert_array_equal(experts, expected_experts)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-5)
    np.testing.assert_allclose(weights.sum(-1), scale, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("logit", [-1000, -100, -40, -20, 0, 20, 100])
def test_rows_of_one_extreme_logit(logit, dtype):
    """Equal scores: the first experts in ascending order, equal weights, which the floor of 1e-20 takes to zero."""
    logits = np.full((2, SCORES), logit, dtype)
    experts, weights = route(logits)
    np.testing.assert_array_equal(experts, [range(6)] * 2)
    np.testing.assert_allclose(weights, expected_route(logits, 0, 6, 1.5)[1], rtol=1e-4, atol=1e-30)
    if logit >= -40:
        np.testing.assert_allclose(weights, 0.25, rtol=1e-5)


def test_sqrt_softplus_from_underflow_to_overflow():
    x = np.float32([-170, -120, -100, -40, -21, -20.001, -20, -19.999, -5, 0, 1e-3, 20, 88, 89, 100, 1e4, 1e30])
    expected = np.sqrt(np.logaddexp(0, x.astype(np.float64)))
    np.testing.assert_allclose(sqrt_softplus(jnp.asarray(x)), expected, rtol=5e-6)


def test_ties_go_to_the_smaller_expert():
    logits = np.zeros((1, SCORES), np.float32)
    logits[0, [30, 7, 19]] = 3
    logits[0, [25, 2]] = 5
    experts, _ = route(logits)
    np.testing.assert_array_equal(experts, [[2, 25, 7, 19, 30, 0]])


def test_the_bias_picks_but_does_not_weigh():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, SCORES)).astype(np.float32)
    bias, bias_vl = rng.normal(size=(2, SCORES)).astype(np.float32)
    image_mask = np.arange(9) % 3 == 1
    experts, weights = route(logits, bias, bias_vl, image_mask)
    expected = expected_route(logits, np.where(image_mask[:, None], bias_vl, bias).astype(np.float64), 6, 1.5)
    np.testing.assert_array_equal(experts, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)
    assert (experts != route(logits, bias, bias_vl)[0]).any(), "images have a bias of their own"
    assert (experts != route(logits)[0]).any()


# The activation.


def test_the_gate_is_clamped_from_above_and_the_up_half_on_both_sides():
    gate, up = np.meshgrid(np.float32([-50, -3, 0, 3, 50]), np.float32([-50, -3, 0, 3, 50]))
    clamped = np.minimum(gate.astype(np.float64), 10)
    expected = clamped / (1 + np.exp(-clamped)) * np.clip(up, -10, 10)
    for dtype in (jnp.float32, jnp.bfloat16):
        z = swiglu(jnp.asarray(gate, dtype), jnp.asarray(up, dtype), 10.0)
        assert z.dtype == jnp.float32
        np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-30)
    corners = swiglu(jnp.array([50.0, 50.0, -50.0]), jnp.array([50.0, -50.0, 50.0]), 10.0)
    np.testing.assert_allclose(corners[:2], [99.995, -99.995], rtol=1e-4)
    assert -1e-18 < corners[2] < -1e-21, "silu(-50) · 10: the gate keeps its negative values"


# Experts, once more: one token and one expert at a time.


def qdq_fp8(x):
    """Section 5.3 on the last axis, for values far from its extremes."""
    groups = x.reshape(*x.shape[:-1], -1, 32).astype(np.float32)
    scale = np.exp2(np.ceil(np.log2(np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4) / 448)))
    return ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def expert_output(x, w1, w3, w2, g, *, quantized, rounded, limit=LIMIT):
    """Float64, with the roundings of the reference mode where asked for; g weighs before the down projection."""

    def keep(a):
        return a.astype(BF16).astype(np.float64) if rounded else a

    into = qdq_fp8 if quantized else lambda a: a
    gate, up = keep(w1 @ into(x)), keep(w3 @ into(x))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return keep(w2 @ into(keep(gate / (1 + np.exp(-gate)) * up * g)))


def expected_output(x, experts, weights, valid, kind, **how):
    w1, w3, w2 = decoded(kind)
    out = np.zeros(x.shape)
    for t in np.flatnonzero(valid):
        for e, g in sorted(zip(experts[t].tolist(), weights[t].tolist(), strict=True)):
            out[t] += expert_output(x[t].astype(np.float64), w1[e], w3[e], w2[e], g, **how)
    return out


@functools.cache
def dense_stacks():
    rng = np.random.default_rng(0)
    shapes = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return tuple(DenseWeight(jnp.asarray(rng.normal(size=s).astype(BF16) / 4)) for s in shapes)


@functools.cache
def fp4_stacks():
    rng = np.random.default_rng(1)

    def stack(out, inner):
        codes = jnp.asarray(rng.integers(0, 16, (EXPERTS, out, inner), dtype=np.uint8))
        scale = rng.integers(122, 126, (EXPERTS, out, inner // 32), dtype=np.uint8)
        return Mxfp4Weight(pack_nibbles(codes), jnp.asarray(scale))

    return stack(WIDTH, HIDDEN), stack(WIDTH, HIDDEN), stack(HIDDEN, WIDTH)


STACKS = {"dense": dense_stacks, "mxfp4": fp4_stacks}


@functools.cache
def decoded(kind):
    values = jax.jit(functools.partial(dequantize, dtype=jnp.float32))
    return [np.asarray(values(weight), np.float64) for weight in STACKS[kind]()]


@functools.partial(jax.jit, static_argnames=("limit", "numerics"))
def run(x, experts, weights, valid, w1, w3, w2, *, limit=LIMIT, numerics=FLOAT32):
    return moe_experts(x, experts, weights, valid, w1, w3, w2, limit=limit, numerics=numerics)


def routing(rng, tokens, k=K):
    """Inputs, distinct experts per token, routing weights."""
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    experts = np.argsort(rng.random((tokens, EXPERTS)), axis=-1)[:, :k].astype(np.int32)
    return x, experts, rng.uniform(0.05, 1.5, (tokens, k)).astype(np.float32)


@pytest.mark.parametrize("tokens, k, kind", [(1, 2, "mxfp4"), (23, 2, "dense"), (8, 6, "dense"), (100, 3, "mxfp4")])
def test_experts_match_a_plain_loop(tokens, k, kind):
    """Few and many rows per expert, row counts that fill no tile."""
    x, experts, weights = routing(np.random.default_rng(tokens), tokens, k)
    valid = np.ones(tokens, bool)
    out = run(x, experts, weights, valid, *STACKS[kind]())
    expected = expected_output(x, experts, weights, valid, kind, quantized=False, rounded=False)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


TOKENS = 21


@settings(max_examples=30)
@given(st.data())
def test_any_ragged_routing_matches_a_plain_loop(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    x, _, weights = routing(np.random.default_rng(seed), TOKENS)
    pairs = st.permutations(range(EXPERTS)).map(lambda p: p[:K])
    popular = data.draw(st.lists(pairs, min_size=1, max_size=3))  # most rows go to few experts
    experts = np.int32(data.draw(st.lists(st.sampled_from(popular) | pairs, min_size=TOKENS, max_size=TOKENS)))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS)))
    out = np.asarray(run(x, experts, weights, valid, *dense_stacks()))
    expected = expected_output(x, experts, weights, valid, "dense", quantized=False, rounded=False)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert (out[~valid] == 0).all()


def test_all_tokens_may_go_to_one_expert():
    x, experts, weights = routing(np.random.default_rng(2), 200, 1)
    valid = np.ones(200, bool)
    for expert in (0, EXPERTS - 1):
        experts[:] = expert
        out = run(x, experts, weights, valid, *dense_stacks())
        expected = expected_output(x, experts, weights, valid, "dense", quantized=False, rounded=False)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_as_many_tokens_as_the_largest_steps_have():
    x, experts, weights = routing(np.random.default_rng(9), 64)
    arguments = x, experts, weights, np.arange(64) % 5 > 0
    many = run(*(np.tile(a, (1024, 1)[: a.ndim]) for a in arguments), *dense_stacks())
    np.testing.assert_allclose(many, np.tile(run(*arguments, *dense_stacks()), (1024, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens, numerics", [(20, REFERENCE), (90, REFERENCE), (90, FAST)])
def test_padding_is_exactly_zero_and_touches_nothing(tokens, numerics):
    rng = np.random.default_rng(3)
    x, experts, weights = routing(rng, tokens)
    x = x.astype(BF16)
    valid = rng.permutation(tokens) >= 0.3 * tokens
    clean = np.asarray(run(x, experts, weights, valid, *fp4_stacks(), numerics=numerics))
    assert (clean[~valid] == 0).all() and (clean[valid] != 0).any(1).all()
    x[~valid], weights[~valid] = np.nan, np.nan
    experts[~valid] = rng.choice(np.int32([-1, EXPERTS, EXPERTS + 5, 2**31 - 1, -(2**31)]), (sum(~valid), K))
    poisoned = np.asarray(run(x, experts, weights, valid, *fp4_stacks(), numerics=numerics))
    np.testing.assert_array_equal(poisoned, clean)


def test_a_batch_of_padding_only_is_zero():
    x, experts, weights = routing(np.random.default_rng(4), TOKENS)
    out = run(x * np.nan, experts, weights, np.zeros(TOKENS, bool), *dense_stacks())
    np.testing.assert_array_equal(out, np.zeros((TOKENS, HIDDEN)))


@pytest.mark.parametrize("tokens", [20, 90])
def test_results_do_not_depend_on_the_other_tokens(tokens):
    """Bit for bit: not on order, not on neighbours, not on the run."""
    rng = np.random.default_rng(5)
    x, experts, weights = routing(rng, tokens)
    x = x.astype(BF16)
    valid = np.ones(tokens, bool)

    def output(*arrays):
        return np.asarray(run(*arrays, *fp4_stacks(), numerics=REFERENCE))

    out = output(x, experts, weights, valid)
    np.testing.assert_array_equal(output(x, experts, weights, valid), out)
    order = rng.permutation(tokens)
    np.testing.assert_array_equal(output(x[order], experts[order], weights[order], valid), out[order])
    columns = np.array([1, 0])
    np.testing.assert_array_equal(output(x, experts[:, columns], weights[:, columns], valid), out)
    others = rng.permutation(tokens) < tokens // 2
    x[others] = rng.normal(size=(others.sum(), HIDDEN)) * 50
    experts[others] = (experts[others] + 1) % EXPERTS
    np.testing.assert_array_equal(output(x, experts, weights, valid)[~others], out[~others])


def test_every_token_adds_its_experts_in_ascending_order_of_id():
    """Bit for bit the fp32 sum, in that order, of what each expert gives alone."""
    x, experts, weights = routing(np.random.default_rng(8), 12, 3)
    valid = np.ones(12, bool)
    out = np.asarray(run(x, experts, weights, valid, *dense_stacks()))
    order = np.argsort(experts, -1)
    experts, weights = np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)
    alone = [np.asarray(run(x, experts[:, i, None], weights[:, i, None], valid, *dense_stacks())) for i in range(3)]
    np.testing.assert_array_equal(out, (alone[0] + alone[1]) + alone[2])
    assert (out != alone[0] + (alone[1] + alone[2])).any()


def test_the_reference_mode_rounds_as_specified():
    """Against the loop with every rounding; a handful of values may fall on the other side of one."""
    x, experts, weights = routing(np.random.default_rng(6), 90)
    x = x.astype(BF16)
    valid = np.ones(90, bool)
    expected = expected_output(x, experts, weights, valid, "mxfp4", quantized=True, rounded=True)
    size = np.sqrt(np.mean(expected**2))

    def error(numerics):
        return np.abs(np.asarray(run(x, experts, weights, valid, *fp4_stacks(), numerics=numerics)) - expected)

    assert (error(REFERENCE) > 1e-5 * size).mean() < 0.05
    assert (error(FAST) > 1e-5 * size).mean() > 0.5
    assert np.sqrt(np.mean(error(FAST) ** 2)) < 0.05 * size


@pytest.mark.parametrize("numerics", [REFERENCE, FAST], ids=["reference", "fast"])
def test_the_clamp_holds_in_routed_and_shared_experts(numerics):
    """Pre-activations of ±50: an expert answers exactly as for ±limit, except for a gate below."""
    limit = 10.0
    x = np.zeros((4, 32), np.float32)
    x[:, 0], x[:, 1] = [50, 50, -50, -50], [50, -50, 50, -50]  # gate and up
    select_gate, select_up, identity = np.zeros((3, 32, 32), np.float32)
    select_gate[:, 0], select_up[:, 1] = 1, 1
    np.fill_diagonal(identity, 1)
    gate, up = np.minimum(x[:, :1], limit), np.clip(x[:, 1:2], -limit, limit)
    expected = np.repeat(gate / (1 + np.exp(-gate)) * up, 32, 1)

    stacks = [DenseWeight(jnp.asarray(np.stack([w] * 2), jnp.bfloat16)) for w in (select_gate, select_up, identity)]
    one = np.ones((4, 1), np.float32)
    routed = run(x.astype(BF16), one.astype(np.int32), one, one[:, 0] > 0, *stacks, limit=limit, numerics=numerics)
    np.testing.assert_allclose(routed, expected, rtol=2.0**-7, atol=1e-18)

    shared = SharedExpert(ModelConfig(hidden_size=32, moe_intermediate_size=32, swiglu_limit=limit))
    for name, w in (("w1", select_gate), ("w3", select_up), ("w2", identity)):
        weight = Fp8Weight(jnp.asarray(w.astype(ml_dtypes.float8_e4m3fn)), jnp.full((1, 1), 127, jnp.uint8))
        setattr(shared, name, nnx.Param(weight))
    out = jax.jit(lambda x: shared(Activations(x), numerics))(x.astype(BF16))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2.0**-4, atol=1e-18)


# The whole module.


def test_the_module_adds_the_shared_expert_and_counts_valid_tokens():
    cfg = ModelConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=K,
        swiglu_limit=LIMIT, quantized=False,
    )  # fmt: skip
    rng = np.random.default_rng(7)
    module = MoE(cfg, EXPERTS, K, packed=False)
    gate = rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32) / 8
    bias, bias_vl = rng.normal(size=(2, EXPERTS)).astype(np.float32)
    module.gate.weight = nnx.Param(jnp.asarray(gate))
    module.gate.bias, module.gate.bias_vl = nnx.Param(jnp.asarray(bias)), nnx.Param(jnp.asarray(bias_vl))
    for name, stack in zip(("w1", "w3", "w2"), dense_stacks(), strict=True):
        setattr(module.experts, name, nnx.Param(stack))
        setattr(module.shared_experts, name, nnx.Param(DenseWeight(stack.weight[0] * 2)))
    x = rng.normal(size=(30, HIDDEN)).astype(np.float32)
    valid, image_mask = np.arange(30) % 4 != 2, np.arange(30) % 3 == 0
    y, chosen = jax.jit(lambda x, *masks: module(Activations(x), *masks, FLOAT32))(jnp.asarray(x), valid, image_mask)

    experts, weights = expected_route(x @ gate.T, np.where(image_mask[:, None], bias_vl, bias), K, 1.5)
    expected = expected_output(x, experts, weights, valid, "dense", quantized=False, rounded=False)
    w1, w3, w2 = (2 * np.asarray(s.weight[0], np.float64) for s in dense_stacks())
    shared = [expert_output(row.astype(np.float64), w1, w3, w2, 1, quantized=False, rounded=False) for row in x]
    np.testing.assert_allclose(np.asarray(y)[valid], (expected + shared)[valid], rtol=1e-4, atol=1e-4)
    load = np.bincount(experts[valid].ravel(), minlength=EXPERTS)
    # Of two layers, the second with fewer tokens.
    np.testing.assert_array_equal(expert_load([chosen, chosen[:0]], EXPERTS), [load, np.zeros(EXPERTS)])
