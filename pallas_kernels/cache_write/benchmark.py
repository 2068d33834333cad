"""Benchmark cases of the cache writes, beside XLA's lowering of the reference."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv4jax.config import ModelConfig
from dsv4jax.model.rope import rotation
from dsv4jax.quant import BLOCK, record_bytes_fp8, record_bytes_mxfp4, record_bytes_nvfp4
from pallas_kernels.cache_write import compressed_entry, index_key, query_and_window_key
from pallas_kernels.cache_write.arg_specs import DIM, EPS, INDEX_DIM, PAGE_ENTRIES, Q_LORA, RING, TOKENS
from pallas_kernels.timing import Case

PLACES = 64
"""Slots, or pages, of the cache."""


def cases() -> list[Case]:
    """Every operation at every number of tokens, with the kernel and with the reference."""
    kinds = "query and window key", "compressed entry", "index key"
    names = "pallas", "reference"
    return [_case(kind, tokens, name) for kind in kinds for tokens in TOKENS for name in names]


def _case(kind: str, tokens: int, implementation: str) -> Case:
    def make():
        operation, norms, cache = _parts(kind)
        width = sum(norm.shape[0] for norm in norms)
        x = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
        by = rotation(ModelConfig(), 977 * jnp.arange(tokens), compressed=True)
        places = 37 * jnp.arange(tokens, dtype=jnp.int32)
        run = functools.partial(operation, eps=EPS, implementation=implementation)
        return _in_place(jax.jit(run, donate_argnums=len(norms) + 2), cache), [(x, *norms, by, places)]

    label = "" if implementation == "pallas" else ", XLA"
    return Case(name=f"{kind} {tokens} tokens{label}", make=make, bytes=float(tokens * _fewest_bytes(kind)))


def _in_place(write: Callable, cache: jax.Array) -> Callable:
    """Calls that hand the cache on from one to the next, as steps do; `places` is the last argument."""

    def call(*arguments):
        nonlocal cache
        results = write(*arguments[:-1], cache, arguments[-1])
        *results, cache = results if isinstance(results, tuple) else (results,)
        return results, cache

    return call


def _parts(kind: str):
    """Operation, norm weights and an empty cache."""
    norm = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    if kind == "compressed entry":
        pool = jnp.zeros((PLACES, PAGE_ENTRIES * 8, record_bytes_nvfp4(DIM)), jnp.uint8)
        return compressed_entry, (norm(DIM),), pool
    if kind == "index key":
        pool = jnp.zeros((PLACES, PAGE_ENTRIES * 8, record_bytes_mxfp4(INDEX_DIM)), jnp.uint8)
        return index_key, (norm(INDEX_DIM),), pool
    return query_and_window_key, (norm(Q_LORA), norm(DIM)), jnp.zeros((PLACES, RING, record_bytes_fp8(DIM)), jnp.uint8)


def _fewest_bytes(kind: str) -> int:
    """Bytes per token: projections and rotation in, results out."""
    turn = 8 * 32
    if kind == "compressed entry":
        return turn + 2 * 2 * DIM + record_bytes_nvfp4(DIM)
    if kind == "index key":
        return turn + 2 * INDEX_DIM + record_bytes_mxfp4(INDEX_DIM)
    return turn + 2 * (Q_LORA + DIM) + 3 * Q_LORA + 4 * Q_LORA // BLOCK + 2 * record_bytes_fp8(DIM)
