"""Selection of experts: the per-thread code on an emulator, what is refused, lowering, and parity on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper

from pallas_kernels.router_select import router_select
from pallas_kernels.router_select.arg_specs import EXPERTS, SCALE, TOKENS, K
from pallas_kernels.router_select.select import Selection, select

KINDS = ["random", "ties", "equal", "negative", "NaN", "infinite"]


class Machine(simt_emulator.Machine):
    def divide(self, x, y):
        return x / y


def arguments(kind, tokens, experts, seed=0):
    """Scores, both biases, and which tokens are in images."""
    rng, f32 = np.random.default_rng(seed), np.float32
    scores = rng.random((tokens, experts)).astype(f32)
    bias, bias_vl = (rng.standard_normal(experts).astype(f32) / 10 for _ in range(2))
    match kind:
        case "ties":
            scores = rng.integers(0, 4, scores.shape).astype(f32)
            bias, bias_vl = np.zeros_like(bias), rng.integers(0, 2, experts).astype(f32)
        case "equal":
            scores[:], bias[:], bias_vl[:] = 0.5, 0, -1
        case "negative":
            bias, bias_vl = bias - 2, bias_vl - 5
        case "NaN":
            scores[rng.random(scores.shape) < 0.02] = np.nan
            scores[0] = np.nan
        case "infinite":
            bias[rng.random(experts) < 0.5] = -np.inf
            bias_vl[::7] = np.inf
    return jax.device_put((scores, bias, bias_vl, rng.random(tokens) < 0.3))


def check(got, want):
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "k"), [(384, 6), (40, 3), (8, 8)])
def test_per_thread_code(kind, experts, k):
    """Ids, ties included, are those of the reference, and weights up to rounding."""
    scores, bias, bias_vl, mask = arguments(kind, 5, experts)
    want = router_select(scores, bias, bias_vl, mask, k, SCALE, implementation="reference")
    chosen = simt_emulator.Array(np.zeros(5 * k, np.uint32))
    weights = simt_emulator.Array(np.zeros(5 * k, np.float32))
    inputs = (np.asarray(a).reshape(-1) for a in (scores, bias, bias_vl, mask.astype(jnp.uint32)))
    arrays = Selection(*map(simt_emulator.Array, inputs), chosen, weights, experts, k, SCALE)
    for token in range(5):
        machine = Machine(32)
        select(machine, arrays, machine.u32(token))
    check((chosen.data.reshape(5, k).astype(np.int32), weights.data.reshape(5, k)), want)


@pytest.mark.parametrize("tokens", [0, *TOKENS])
def test_lowers_for_cuda(tokens):
    s = jax.ShapeDtypeStruct
    biases = (s((EXPERTS,), jnp.float32),) * 2
    run = functools.partial(router_select, k=K, scale=SCALE, implementation="pallas")
    text = lowered_for_hopper(run, s((tokens, EXPERTS), jnp.float32), *biases, s((tokens,), jnp.bool_))
    assert text.count("custom_call @mosaic_gpu") == (tokens > 0)


def test_what_cannot_run_is_named():
    with pytest.raises(ValueError, match=r"k = 9: must be in 1\.\.8"):
        router_select(*arguments("random", 2, 8), 9, SCALE, implementation="reference")
    with pytest.raises(ValueError, match="implementation = 'triton'"):
        router_select(*arguments("random", 2, 8), 2, SCALE, implementation="triton")


@needs_no_hopper
def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="Hopper"):
        router_select(*arguments("random", 2, 8), 2, SCALE, implementation="pallas")


@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_kernel_on_gpu(kind, tokens):
    inputs = arguments(kind, tokens, EXPERTS)
    run = jax.jit(router_select, static_argnames=("k", "scale", "implementation"))
    got, want = (run(*inputs, K, SCALE, implementation=name) for name in ("pallas", "reference"))
    check(got, want)
