"""Benchmark cases of `index_select`: scores and selection of decode steps and of a prefill chunk."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt8

from dsv4jax.quant import qdq_mxfp4
from pallas_kernels.index_select import arg_specs, index_select
from pallas_kernels.index_select.arg_specs import Shape
from pallas_kernels.timing import Case

GOALS = {"16 x 1 x 1M": 398.0, "64 x 1 x 128K": 199.0, "16 x 6 x 1M": 788.0, "64 x 6 x 128K": 394.0}
"""Microseconds: 1.5 x the time to read the packed keys once at 4.3 TB/s or, for six queries, of the products at 1570
TFLOP/s."""
PEER = "16 x 1 x 1M"
"""Shape at which XLA's lowering of the reference is timed too."""
RECORD = 68


def cases() -> list[Case]:
    """The kernel at every shape of `arg_specs`, and the reference at one."""
    ours = [case(name, "pallas", GOALS.get(name)) for name in arg_specs.SHAPES]
    return [*ours, case(PEER, "reference", None)]


def case(name: str, implementation: str, goal: float | None) -> Case:
    shape = arg_specs.SHAPES[name]
    label = "" if implementation == "pallas" else ", XLA's lowering of the reference"
    per_token = shape.entries
    if shape.mode == "restricted":
        per_token = arg_specs.PUBLISH * arg_specs.BLOCK_SIZE
    tokens = shape.requests * shape.queries

    def make() -> tuple[Callable, list[tuple]]:
        publish = arg_specs.PUBLISH if shape.mode == "publish" else 0
        run = functools.partial(index_select, k=arg_specs.K, publish=publish, implementation=implementation)
        # One set: its keys are more than the L2 cache holds.
        return jax.jit(lambda arrays, keywords: run(*arrays, **keywords)), [arguments(shape)]

    keys = min(shape.requests * shape.entries, tokens * per_token)
    return Case(
        name=f"index_select {name}{label}",
        make=make,
        bytes=keys * RECORD + tokens * (32 * 128 * 2 + 4 * arg_specs.K),
        flops=2.0 * 32 * 128 * tokens * per_token,
        flops_type="fp8",
        goal=goal,
    )


def arguments(shape: Shape) -> tuple[tuple, dict]:
    """Positional and keyword arguments of `index_select`: random keys in pages of random order, all of them visible."""
    rng = np.random.default_rng(0)
    tokens, places = shape.requests * shape.queries, shape.entries // shape.per_page
    pages = shape.requests * places
    q, weights, keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
        qdq_mxfp4(jax.random.normal(q, (tokens, 32, 128), jnp.bfloat16)),
        jax.random.normal(weights, (tokens, 32), jnp.bfloat16) / 64,
        random_records(keys, pages, shape.per_page),
        rng.permutation(pages).reshape(shape.requests, places).astype(np.int32),
        np.arange(shape.requests, dtype=np.int32),
        np.full(tokens, shape.entries, np.int32),
    )
    keywords = {}
    if shape.mode == "restricted":
        blocks = shape.entries // arg_specs.BLOCK_SIZE
        chosen = [np.sort(rng.choice(blocks, arg_specs.PUBLISH, replace=False)) for _ in range(tokens)]
        keywords["candidates"] = np.stack(chosen).astype(np.int32)
    return jax.device_put((arrays, keywords))


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_records(key: Array, pages: int, per_page: int) -> UInt8[Array, "pages per_page 68"]:
    """MXFP4 records of random elements, scales 2^-3 to 2^0."""
    bits = jax.random.bits(key, (pages, per_page, RECORD // 4), jnp.uint32)
    elements = lax.bitcast_convert_type(bits, jnp.uint8).reshape(pages, per_page, RECORD)
    return elements.at[:, :, RECORD - 4 :].set(124 + elements[:, :, RECORD - 4 :] % 4)
