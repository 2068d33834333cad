"""Benchmark cases of `router_select` beside XLA's lowering of the reference."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.router_select import router_select
from pallas_kernels.router_select.arg_specs import EXPERTS, SCALE, TOKENS, K
from pallas_kernels.timing import Case


def cases() -> list[Case]:
    """One case per number of tokens and implementation."""
    return [_case(tokens, name) for tokens in TOKENS for name in ("pallas", "reference")]


def _case(tokens: int, implementation: str) -> Case:
    def run(*arrays):
        return router_select(*arrays, K, SCALE, implementation=implementation)

    def make():
        draw = functools.partial(jax.random.uniform, dtype=jnp.float32)
        keys = jax.random.split(jax.random.key(0), 3)
        scores, bias, bias_vl = (draw(k, s) for k, s in zip(keys, ((tokens, EXPERTS), EXPERTS, EXPERTS), strict=True))
        return jax.jit(run), [(scores, bias, bias_vl, jnp.zeros(tokens, jnp.bool_))]

    label = "" if implementation == "pallas" else ", XLA"
    return Case(f"router_select {tokens} tokens{label}", make, 4.0 * tokens * (EXPERTS + 2 * K))
