"""Benchmark cases of `topk` beside `lax.top_k`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.timing import Case
from pallas_kernels.topk import arg_specs, topk

_GOALS = {"64 x 32K": 13.0, "16 x 512K": 41.0, "64 x 1M": 140.0, "512 x 512K": 293.0}
"""Microseconds."""
_TOO_SLOW = ("512 x 512K",)
"""Sizes at which `lax.top_k`, which sorts, takes more than 10 ms."""


def cases() -> list[Case]:
    """One case per shape and implementation."""
    ours = functools.partial(topk, k=arg_specs.K, implementation="pallas")
    result = []
    for name, shape in arg_specs.SHAPES.items():
        result.append(_case(f"topk {name}", ours, shape, _GOALS.get(name)))
        if name not in _TOO_SLOW:
            result.append(_case(f"topk {name} lax.top_k", functools.partial(lax.top_k, k=arg_specs.K), shape, None))
    return result


def _case(name: str, fn: Callable, shape: tuple[int, int], goal: float | None) -> Case:
    size = 4 * shape[0] * shape[1]

    def make() -> tuple[Callable, list[tuple[Array]]]:
        # One set: a step has just written the scores, so what fits into the cache is found there.
        return jax.jit(fn), [(jax.random.normal(jax.random.key(0), shape, jnp.float32),)]

    return Case(name=name, make=make, bytes=size + 4 * shape[0] * arg_specs.K, goal=goal)
