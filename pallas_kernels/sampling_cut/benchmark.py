"""Benchmark cases of `sampling_cut` beside XLA's lowering of the reference."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.sampling_cut import sampling_cut
from pallas_kernels.sampling_cut.arg_specs import ASKED, ROWS, VOCAB, limits
from pallas_kernels.timing import Case


def cases() -> list[Case]:
    """One case per number of rows, of what they ask for, and, where they ask, implementation."""
    result = [_case(rows, asked, "pallas") for rows in ROWS for asked in ASKED]
    return result + [_case(rows, "all", "reference") for rows in ROWS]


def _case(rows: int, asked: str, implementation: str) -> Case:
    top_k, top_p = map(jnp.asarray, limits(rows, asked))

    def make():
        # One set: a step has just written the logits, so what fits into the cache is found there.
        logits = 3 * jax.random.normal(jax.random.key(0), (rows, VOCAB), jnp.float32)
        run = jax.jit(functools.partial(sampling_cut, implementation=implementation))
        temperature = jnp.ones(rows, jnp.float32)
        return run, [(logits, jnp.max(logits, axis=-1), temperature > 0, temperature, top_k, top_p)]

    label = "" if implementation == "pallas" else ", XLA"
    asking = int(jnp.sum((top_k > 0) | (top_p < 1)))
    return Case(f"sampling_cut {rows} rows, {asked} asked{label}", make, 4.0 * asking * VOCAB)
