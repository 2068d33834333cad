"""The expert kernels: packing, routing on an emulator, what they refuse, their lowering, and parity on a GPU.

What the operation computes is tested in test_moe.py, on the reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper, on_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.moe_experts import decode, moe_experts, pack, pack_experts, prefill, unpack_experts
from pallas_kernels.moe_experts.arg_specs import EXPERTS, HIDDEN, LIMIT, TOKENS, WIDTH, K
from pallas_kernels.moe_experts.prepare import limits, most_tokens
from pallas_kernels.moe_experts.route import Routing, route

PALLAS, PALLAS_FAST = Numerics(implementation="pallas"), Numerics(implementation="pallas", fast=True)
NO_ROW = 2**32 - 1


def random_weights(rng, experts, hidden, width, low=0, high=256):
    def one(out, inner):
        codes = rng.integers(0, 256, (experts, out, inner // 2), np.uint8)
        return Mxfp4Weight(codes, rng.integers(low, high, (experts, out, inner // 32), np.uint8))

    return one(width, hidden), one(width, hidden), one(hidden, width)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(0, 256), (0, 1), (255, 256), (114, 122)]))
def test_packing_loses_nothing(seed, scales):
    """Any codes and scale bytes come back."""
    weights = random_weights(np.random.default_rng(seed), 2, 512, 256, *scales)
    again = jax.jit(lambda *w: unpack_experts(pack_experts(*w)))(*weights)
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_packed_words():
    """A thread's words hold the channels that the tensor cores want in its registers."""
    rng = np.random.default_rng(0)
    w = random_weights(rng, 1, 256, 512)[2]
    records = np.asarray(pack.pack_weight(jnp.asarray(w.weight), jnp.asarray(w.scale)).records)[0]
    codes = np.stack([w.weight[0] & 15, w.weight[0] >> 4], -1).reshape(256, 512)
    for _ in range(200):
        tile, slab, quarter, thread, word = (int(rng.integers(n)) for n in (4, 2, 4, 128, 4))
        bits = int(records[tile, slab].view(np.uint32)[(quarter * 128 + thread) * 4 + word])
        row = tile * 64 + thread // 32 * 16 + thread % 32 // 4
        column = slab * 256 + quarter * 64 + word // 2 * 32 + word % 2 * 16 + thread % 4 * 4
        first = [(bits >> 4 * i & 7) | (bits >> 8 * i + 7 & 1) << 3 for i in range(4)]
        second = [(bits >> 16 + 4 * i & 7) | (bits >> 8 * i + 3 & 1) << 3 for i in range(4)]
        assert first == list(codes[row, column : column + 4])
        assert second == list(codes[row + 8, column : column + 4])


def test_tops():
    """The largest scale that counts; all ones for 64 channels of which one spans more than 12 exponents."""
    codes = np.full((1, 256, 128), 0x11, np.uint8)
    scale = np.full((1, 256, 8), 120, np.uint8)
    scale[0, 3, 2], scale[0, 5, 1], scale[0, 6, 7] = 123, 109, 200
    codes[0, 6, 112:] = 0x88
    scale[0, 70, 0] = 108
    tops = np.asarray(pack.pack_weight(jnp.asarray(codes), jnp.asarray(scale)).tops).view(np.uint8).reshape(256)
    expected = np.full(256, 120)
    expected[3], expected[64:128] = 123, 255
    np.testing.assert_array_equal(tops, expected)


def test_activation_records_lose_nothing():
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.standard_normal((16, 512)), jnp.float8_e4m3fn)
    scale = jnp.asarray(2.0 ** rng.integers(-9, 9, (16, 16)), jnp.float32)
    again = pack.unpack_activation(pack.pack_activation(data, scale))
    np.testing.assert_array_equal(np.asarray(again[0]).view(np.uint8), np.asarray(data).view(np.uint8))
    np.testing.assert_array_equal(again[1], scale)


@pytest.mark.parametrize(
    ("tokens", "number", "k", "tile_blocks"), [(5, 48, 6, 1), (40, 48, 6, 2), (30, 70, 3, 3), (20, 6, 6, 2)]
)
def test_routing_per_thread_code(tokens, number, k, tile_blocks):
    """Tiles, the rows of each token and their weights, with invalid tokens and ids of other ranks."""
    rng, u32 = np.random.default_rng(tokens), np.uint32
    experts = rng.random((tokens, number)).argsort(1)[:, :k].astype(np.int64)
    valid = rng.random(tokens) < 0.7
    experts[~valid] = rng.integers(-9, 99, (int((~valid).sum()), k))
    experts[0, 0] = number + 1
    weights = rng.random((tokens, k)).astype(np.float32)
    blocks, tiles = limits(tokens, k, number, tile_blocks)

    def garbage(n):
        return simt_emulator.Array(rng.integers(0, 2**32, n, dtype=u32))

    sizes = dict(group=tiles, block=tiles, count=tiles, used=1, places=tokens * k)
    out = {name: garbage(n) for name, n in sizes.items()}
    out["routing"] = simt_emulator.Array(np.full(blocks * 8, np.nan, np.float32))
    inputs = (experts.astype(np.int32).view(u32).reshape(-1), weights.reshape(-1), valid.astype(u32))
    own = []
    for token in range(tokens):
        shared = dict(sizes=garbage(number), firsts=garbage(number + 1), own=garbage(k))
        arrays = map(simt_emulator.Array, inputs)
        routing = Routing(*arrays, **out, **shared, tokens=tokens, k=k, number=number, tile_blocks=tile_blocks)
        machine = simt_emulator.Machine(128)
        route(machine, routing, machine.u32(token))
        own.append(shared["own"].data)

    here = valid[:, None] & (experts >= 0) & (experts < number)
    place, expected, first = {}, [], 0
    for expert in range(number):
        rows = [t for t in range(tokens) if expert in experts[t][here[t]]]
        place.update({(t, expert): 8 * first + i for i, t in enumerate(rows)})
        count = -(-len(rows) // 8)
        expected += [(expert, first + i, min(tile_blocks, count - i)) for i in range(0, count, tile_blocks)]
        first += count
    used = int(out["used"].data[0])
    assert list(zip(*(out[n].data[:used].tolist() for n in ("group", "block", "count")), strict=True)) == expected
    for token, places in enumerate(out["places"].data.reshape(tokens, k)):
        ascending = [place[token, e] for e in sorted(experts[token][here[token]])]
        assert [p for p in places.tolist() if p != NO_ROW] == ascending
        for j, expert in enumerate(experts[token]):
            assert own[token][j] == (place[token, expert] if here[token, j] else NO_ROW)
            if here[token, j]:
                assert out["routing"].data[place[token, expert]] == weights[token, j]


def arguments(tokens, hidden=HIDDEN, experts=EXPERTS, width=WIDTH, k=K):
    """Shapes of the arguments before the weights, and of the weights."""
    s = jax.ShapeDtypeStruct
    before = s((tokens, hidden), jnp.bfloat16), s((tokens, k), jnp.int32), s((tokens, k), jnp.float32)

    def linear(out, inner):
        codes = s((experts, out, inner // 2), jnp.uint8)
        return Mxfp4Weight(codes, s((experts, out, inner // 32), jnp.uint8))

    return (*before, s((tokens,), jnp.bool_)), (linear(width, hidden), linear(width, hidden), linear(hidden, width))


@pytest.mark.parametrize(("tokens", "numerics"), [*((n, PALLAS) for n in TOKENS.values()), (96, PALLAS_FAST)])
def test_lowers_for_cuda(tokens, numerics):
    before, weights = arguments(tokens)
    packed = jax.eval_shape(pack_experts, *weights)
    run = functools.partial(moe_experts, limit=LIMIT, numerics=numerics)
    assert lowered_for_hopper(run, *before, packed).count("mosaic_gpu") >= 4


def test_what_cannot_run_is_named():
    before, weights = arguments(8)
    packed = jax.eval_shape(pack_experts, *weights)

    def run(x, *rest, numerics):
        jax.eval_shape(functools.partial(moe_experts, limit=LIMIT, numerics=numerics), x, *rest)

    with pytest.raises(ValueError, match="not PackedExperts"):
        run(*before, packed, numerics=REFERENCE)
    with pytest.raises(ValueError, match="pack_experts"):
        run(*before, *weights, numerics=PALLAS)
    with pytest.raises(ValueError, match="implementation = 'triton'"):
        run(*before, packed, numerics=Numerics(implementation="triton"))
    with pytest.raises(ValueError, match="x is float32"):
        run(jax.ShapeDtypeStruct((8, HIDDEN), jnp.float32), *before[1:], packed, numerics=PALLAS)
    with pytest.raises(ValueError, match="quantize_activations"):
        run(*before, packed, numerics=Numerics(implementation="pallas", quantize_activations=False))
    before, weights = arguments(69_850)
    with pytest.raises(ValueError, match="69850 tokens with 6 experts each, the kernels take at most 69849"):
        run(*before, packed, numerics=PALLAS)
    narrow, odd = arguments(8, hidden=1280)
    with pytest.raises(ValueError, match="hidden size 1280"), on_hopper():
        run(*narrow, jax.eval_shape(pack_experts, *odd), numerics=PALLAS)
    with pytest.raises(ValueError, match="multiples of 64 outputs and 256 inputs"):
        jax.eval_shape(pack_experts, *arguments(8, hidden=5120 + 32)[1])


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(8, 1000), st.sampled_from([256, 5120, 1 << 20]), st.sampled_from([256, 2304]))
def test_no_offset_of_the_most_tokens_needs_more_than_32_bits(k, number, hidden, width):
    most = most_tokens(k, number, hidden, width)

    def last_byte(tokens):
        blocks, _ = limits(tokens, k, number, prefill.LARGE_TILES.blocks)
        return max(2 * blocks * pack.TOKENS * max(hidden, 2 * width), 4 * tokens * hidden) - 1

    assert last_byte(most) < 1 << 32 <= last_byte(most + 1) + 1


@pytest.mark.parametrize(("tokens", "form"), [(160, decode), (161, prefill)])
def test_number_of_rows_picks_the_form(tokens, form, monkeypatch):
    """20 rows per expert are 160 tokens x 6 experts of 48."""
    before, weights = arguments(tokens)
    packed = jax.eval_shape(pack_experts, *weights)
    taken = []
    for module in (decode, prefill):
        monkeypatch.setattr(module, "moe_experts", lambda x, *_, m=module, **__: taken.append(m) or x)
    with on_hopper():
        jax.eval_shape(functools.partial(moe_experts, limit=LIMIT, numerics=PALLAS), *before, packed)
    assert taken == [form]


@needs_no_hopper
def test_other_devices_are_refused():
    before, weights = arguments(8)
    packed = jax.eval_shape(pack_experts, *weights)
    with pytest.raises(ValueError, match="Hopper"):
        jax.eval_shape(functools.partial(moe_experts, limit=LIMIT, numerics=PALLAS), *before, packed)


def route_tokens(kind, tokens, experts, k, rng):
    """Ids and validity."""
    ids = rng.random((tokens, experts)).argsort(1)[:, :k].astype(np.int32)
    valid = np.ones(tokens, bool)
    match kind:
        case "one group of experts":
            ids[:] = rng.permutation(experts)[:k]
        case "skewed":
            order = rng.random((tokens, experts)) ** np.linspace(0.05, 3, experts)
            ids = order.argsort(1)[:, -k:].astype(np.int32)
        case "half invalid":
            valid = rng.random(tokens) < 0.5
            ids[~valid] = rng.integers(-(2**31), 2**31, (int((~valid).sum()), k))
        case "one valid":
            valid[1:] = False
        case "none valid":
            valid[:] = False
    return ids, valid


@functools.cache
def gpu_weights(sizes, spread):
    """Raw and packed weights; with `spread` some rows hold scales of any size."""
    hidden, experts, width = sizes
    rng = np.random.default_rng(5)
    raw = random_weights(rng, experts, hidden, width, 114, 122)
    if spread:
        for w in raw:
            far = rng.random(w.scale.shape) < 0.01
            far[::2] = False
            w.scale[far] -= 40
    raw = jax.device_put(raw)
    return raw, jax.jit(pack_experts)(*raw)


SMALL = (1024, 12, 512)
KINDS = ["random", "one group of experts", "skewed", "half invalid", "one valid", "none valid"]
CASES = [(SMALL, tokens, kind, False, PALLAS) for tokens in (1, 7, 40) for kind in KINDS]
CASES += [(SMALL, 40, "random", True, PALLAS), (SMALL, 40, "random", False, PALLAS_FAST)]
CASES += [(SMALL, 1500, "skewed", False, PALLAS)]
CASES += [((HIDDEN, EXPERTS, WIDTH), tokens, "random", False, PALLAS) for tokens in (1, 8, 64, 96)]


@needs_hopper
@pytest.mark.parametrize(("sizes", "tokens", "kind", "spread", "numerics"), CASES)
def test_kernels_on_gpu(sizes, tokens, kind, spread, numerics):
    """Every token is close to the reference, invalid ones are zero, and repeating changes no bit."""
    raw, packed = gpu_weights(sizes, spread)
    hidden, experts, width = sizes
    rng = np.random.default_rng(tokens)
    ids, valid = route_tokens(kind, tokens, experts, K, rng)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32) * np.exp(rng.standard_normal((tokens, 1)))
    x[~valid] = np.nan
    before = jnp.asarray(x, jnp.bfloat16), ids, rng.random((tokens, K)).astype(np.float32), valid
    run = jax.jit(functools.partial(moe_experts, limit=LIMIT, numerics=numerics))
    got = np.asarray(run(*before, packed))
    np.testing.assert_array_equal(got[~valid], 0)
    np.testing.assert_array_equal(got, np.asarray(run(*before, packed)))
    if valid.any():
        like = FAST if numerics.fast else REFERENCE
        # XLA would otherwise leave out roundings of the reference.
        exact = {"xla_allow_excess_precision": False}
        want = jax.jit(functools.partial(moe_experts, limit=LIMIT, numerics=like)).lower(*before, *raw)
        want = np.asarray(want.compile(compiler_options=exact)(*before, *raw))[valid]
        error = np.linalg.norm(got[valid] - want, axis=1) / np.linalg.norm(want, axis=1)
        # An intermediate value next to a rounding step of FP8 may fall to its other side and move by an eighth: this is
        # what one of four standard deviations does to a row.
        assert error.max() < 4 / 8 / np.sqrt(width)


@needs_hopper
def test_a_token_does_not_depend_on_the_others():
    """In the decode form."""
    _, packed = gpu_weights(SMALL, False)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((40, SMALL[0])), jnp.bfloat16)
    ids, valid = route_tokens("random", 40, SMALL[1], K, rng)
    weights = rng.random((40, K)).astype(np.float32)
    run = jax.jit(functools.partial(moe_experts, limit=LIMIT, numerics=PALLAS))
    together = np.asarray(run(x, ids, weights, valid, packed))
    for few in (slice(0, 1), slice(3, 9), slice(20, 40)):
        np.testing.assert_array_equal(together[few], run(x[few], ids[few], weights[few], valid[few], packed))
