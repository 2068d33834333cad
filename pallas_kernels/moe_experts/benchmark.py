"""Benchmark cases of the routed experts: single matmuls and the whole operation, XLA's lowering as the peer."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.moe_experts import decode, moe_experts, pack_experts, prefill
from pallas_kernels.moe_experts.arg_specs import EXPERTS, HIDDEN, LIMIT, TOKENS, WIDTH, K
from pallas_kernels.moe_experts.kernel import Activation, expert_gate_up, expert_matmul
from pallas_kernels.moe_experts.pack import TOKENS as BLOCK_ROWS
from pallas_kernels.moe_experts.prefill_matmul import expert_matmul_prefill
from pallas_kernels.moe_experts.prefill_rows import pack_tokens
from pallas_kernels.moe_experts.prepare import limits, prepare
from pallas_kernels.timing import Case

DECODE_GOALS = {"48 rows": 100.0, "384 rows": 150.0, "576 rows": 150.0}
PREFILL_GOALS = {"3072 rows": 374.0, "24576 rows": 1600.0}
"""Microseconds of gate and up."""
MATRIX_BYTES = WIDTH * HIDDEN * 17 // 32
"""Codes and scales of one of an expert's three weights."""
GOAL_SHARE, COPY_RATE = 0.8, 4.3e12
"""Share of the copy rate in weight bytes that the whole decode operation aims at, and that rate on an H200."""


def cases() -> list[Case]:
    """Single matmuls and the whole operation at every number of rows, and the reference at 48 rows."""
    return [
        *(decode_gate_up(*item) for item in DECODE_GOALS.items()),
        *(decode_down(name) for name in DECODE_GOALS),
        *(prefill_gate_up(*item) for item in PREFILL_GOALS.items()),
        *(operation(name, "pallas") for name in TOKENS),
        operation("48 rows", "reference"),
    ]


def decode_gate_up(name: str, goal: float) -> Case:
    """Gate and up with SwiGLU."""

    def make():
        packed, (gate_up, _), (*tiles, records, routing, _) = decode_arguments(name)
        activation = Activation(LIMIT, weighted=True)
        run = jax.jit(lambda *a: expert_gate_up(*a, gate_up, activation))
        return run, [(*tiles, records, packed.w13, routing)]

    return matmul_case(f"gate/up {name}", name, 2, "fp8", make, goal)


def decode_down(name: str) -> Case:
    def make():
        packed, (gate_up, down), (*tiles, records, routing, _) = decode_arguments(name)
        activation = Activation(LIMIT, weighted=True)
        z = jax.jit(lambda *a: expert_gate_up(*a, gate_up, activation))(*tiles, records, packed.w13, routing)
        return jax.jit(lambda *a: expert_matmul(*a, down)), [(*tiles, z, packed.w2)]

    return matmul_case(f"down {name}", name, 1, "fp8", make, None)


def decode_arguments(name: str) -> tuple:
    """Packed weights, the plans, and what `prepare` returns."""
    packed, tokens = packed_weights(), TOKENS[name]
    plans = decode.plans(tokens * K, packed)
    x, ids, weights, valid = arguments(tokens)
    run = jax.jit(prepare, static_argnums=(4, 5))
    return packed, plans, run(x, ids, weights, valid.astype(np.int32), EXPERTS, plans[0].blocks)


def prefill_gate_up(name: str, goal: float) -> Case:
    def make():
        tokens, packed = TOKENS[name], packed_weights()
        plan = prefill.plan_of(tokens * K, EXPERTS)
        blocks, _ = limits(tokens, K, EXPERTS, plan.blocks)

        @jax.jit
        def before(x, ids, weights, valid):
            tiles, places, weights = prefill.route_rows(ids, weights, valid, EXPERTS, plan.blocks)
            return *tiles, pack_tokens(x, places, weights, blocks * BLOCK_ROWS)[0]

        run = jax.jit(lambda *a: expert_matmul_prefill(*a, plan))
        return run, [(*before(*arguments(tokens)), packed.w13.records)]

    return matmul_case(f"gate/up {name}", name, 2, "bf16", make, goal)


def matmul_case(title: str, name: str, matrices: int, kind: str, make: Callable, goal: float | None) -> Case:
    """A case of gate and up (2 matrices) or of down (1); the weights of one set are several times the L2 cache."""
    rows = TOKENS[name] * K
    size = matrices * touched(name) * MATRIX_BYTES + rows * (HIDDEN + WIDTH)
    return Case(f"experts, {title}", make, size, 2.0 * matrices * rows * HIDDEN * WIDTH, kind, goal)


def operation(name: str, implementation: str) -> Case:
    """The whole operation."""
    tokens, is_kernel = TOKENS[name], implementation == "pallas"
    size = 3 * touched(name) * MATRIX_BYTES + tokens * HIDDEN * 6
    is_decode = is_kernel and name in DECODE_GOALS

    def make():
        numerics = Numerics(implementation="pallas") if is_kernel else REFERENCE
        run = jax.jit(functools.partial(moe_experts, limit=LIMIT, numerics=numerics))
        weights = (packed_weights(),) if is_kernel else raw_weights()
        return run, [(*arguments(tokens), *weights)]

    label = "" if is_kernel else ", XLA's lowering of the reference"
    goal = size / COPY_RATE / GOAL_SHARE * 1e6 if is_decode else None
    kind = "fp8" if is_decode else "bf16"
    return Case(f"experts, whole operation {name}{label}", make, size, 6.0 * tokens * K * HIDDEN * WIDTH, kind, goal)


def touched(name: str) -> int:
    """Experts that have rows."""
    return len(np.unique(arguments(TOKENS[name])[1]))


def arguments(tokens: int) -> tuple:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, HIDDEN), np.float32).astype(jnp.bfloat16)
    ids = rng.random((tokens, EXPERTS)).argsort(1)[:, :K].astype(np.int32)
    return jax.device_put((x, ids, rng.random((tokens, K)).astype(np.float32), np.ones(tokens, bool)))


@functools.cache
def raw_weights() -> tuple[Mxfp4Weight, Mxfp4Weight, Mxfp4Weight]:
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, out, inner):
        codes, scale = jax.random.split(key)
        codes = jax.random.bits(codes, (EXPERTS, out, inner // 2), jnp.uint8)
        return Mxfp4Weight(codes, jax.random.randint(scale, (EXPERTS, out, inner // 32), 114, 122).astype(jnp.uint8))

    keys = jax.random.split(jax.random.key(0), 3)
    return draw(keys[0], WIDTH, HIDDEN), draw(keys[1], WIDTH, HIDDEN), draw(keys[2], HIDDEN, WIDTH)


@functools.cache
def packed_weights():
    return jax.jit(pack_experts)(*raw_weights())
