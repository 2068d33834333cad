"""Benchmark cases of sparse attention: decode steps with their goals, prefill chunks, XLA's lowering as the peer."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.model.layout import TokenLayout, tile_windows
from dsv4jax.model.rope import Rotation
from dsv4jax.numerics import REFERENCE
from dsv4jax.quant import pack_fp8, pack_nvfp4
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_attention.arg_specs import (
    ARG_SPECS,
    DIM,
    HEADS,
    PAGE_ENTRIES,
    PAIRS,
    SELECTED,
    SLACK,
    WINDOW,
    ArgSpec,
)
from pallas_kernels.timing import Case

GOALS = {"64x1": 35.0, "16x6": 45.0}
CONTEXT = 16384
"""Tokens before the step in every request; each token selects from their entries."""
PAGES = 8192
"""Pages of the pool, 75 MB: more than the L2 cache holds."""
COLD = 120e6
"""Bytes that the argument sets of a case touch together, so that no call finds its own in the cache."""


def cases() -> list[Case]:
    """Every shape of `ARG_SPECS` with the kernel, and 64x1 with the reference."""
    kernel = [case(name, "pallas", GOALS.get(name)) for name in ARG_SPECS]
    return [*kernel, case("64x1", "reference", None)]


def case(name: str, implementation: str, goal: float | None) -> Case:
    spec = ARG_SPECS[name]

    def make():
        run = jax.jit(functools.partial(sparse_attention, numerics=REFERENCE, implementation=implementation))
        pool = packed_pool()
        sets = min(12, math.ceil(COLD / fewest_bytes(spec)))
        return run, [arguments(spec, pool, seed) for seed in range(sets)]

    label = "" if implementation == "pallas" else ", XLA's lowering of the reference"
    keys = WINDOW + SELECTED * spec.entries
    return Case(
        f"sparse attention {name}{label}", make, fewest_bytes(spec), 4.0 * spec.tokens * keys * HEADS * DIM, goal=goal
    )


def fewest_bytes(spec: ArgSpec) -> int:
    """Queries and results, the packed rows that some token reads, selections and rotations, each moved once."""
    window = spec.requests * (WINDOW + spec.length - 1) * 528
    entries = spec.requests * min(spec.length * SELECTED, CONTEXT // 2) * 288 if spec.entries else 0
    per_token = 2 * HEADS * DIM * 2 + 2 * PAIRS * 4 + SELECTED * 4 * spec.entries
    return window + entries + spec.tokens * per_token


@functools.cache
def packed_pool() -> jax.Array:
    draw = jax.jit(lambda key: pack_nvfp4(jax.random.normal(key, (PAGES, PAGE_ENTRIES, DIM))))
    return draw(jax.random.key(0))


def arguments(spec: ArgSpec, pool: jax.Array, seed: int) -> tuple:
    """Random arguments of `sparse_attention`; the selection of a token is ascending, as the indexer makes it."""
    rng = np.random.default_rng(seed)
    q, keys, ring, angle, sink = jax.random.split(jax.random.key(seed), 5)
    tokens, requests = spec.tokens, spec.requests
    starts = np.full(requests, CONTEXT, np.int32)
    pages = CONTEXT // 2 // PAGE_ENTRIES
    layout = TokenLayout(
        positions=np.tile(CONTEXT + np.arange(spec.length, dtype=np.int32), requests),
        valid=np.ones(tokens, bool),
        image_mask=np.zeros(tokens, bool),
        tile_requests=np.repeat(np.arange(requests, dtype=np.int32), spec.length // spec.tile),
        slots=rng.permutation(requests).astype(np.int32),
        starts=starts,
        ends=starts + spec.length,
        floors=np.zeros(requests, np.int32),
        write_starts=starts,
        page_table=np.stack([rng.permutation(PAGES)[:pages] for _ in range(requests)]).astype(np.int32),
        num_slots=requests,
        tile=spec.tile,
    )
    every = CONTEXT // 2 // SELECTED
    selected = np.arange(SELECTED) * every + rng.integers(0, every, (tokens, SELECTED))
    angle = jax.random.normal(angle, (tokens, PAIRS))
    values = (
        jax.random.normal(q, (tokens, HEADS, DIM), jnp.bfloat16),
        pack_fp8(jax.random.normal(keys, (tokens, DIM))),
        pack_fp8(jax.random.normal(ring, (requests, WINDOW + SLACK, DIM))),
        layout,
        tile_windows(layout, WINDOW),
        Rotation(jnp.cos(angle), jnp.sin(angle)),
        jax.random.normal(sink, (HEADS,)),
        pool if spec.entries else None,
        selected.astype(np.int32) if spec.entries else None,
    )
    return jax.device_put(values)
