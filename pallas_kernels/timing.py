"""Device time of calls, and what a benchmark case of a kernel is; `scripts/bench_kernels.py` runs the cases."""

import dataclasses
import glob
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of a benchmark.

    Attributes:
      name: operation and sizes.
      make: returns the jitted function to time and its argument sets, used in turn: together larger than the L2 cache
        where a real step would not find the data there.
      bytes: fewest bytes the call must move through device memory.
      flops: operations of its matrix products, with their type ("bf16" or "fp8").
      goal: microseconds aimed at.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]]
    bytes: float
    flops: float = 0.0
    flops_type: str = "bf16"
    goal: float | None = None


def device_microseconds(fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], launches: int = 12) -> float:
    """Median over calls of the time in which the device ran the call's kernels, gaps between them excluded."""
    return sum(kernel_microseconds(fn, argument_sets, launches).values())


def kernel_microseconds(
    fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], launches: int = 12
) -> dict[str, float]:
    """Median time of each kernel of a call, in the order of their launch, from JAX's profiler.

    Raises:
      RuntimeError: the calls did not all launch the same number of kernels, or there is no GPU.
    """
    for arguments in argument_sets:
        jax.block_until_ready(fn(*arguments))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for i in range(launches):
                jax.block_until_ready(fn(*argument_sets[i % len(argument_sets)]))
        (path,) = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        events = sorted(
            (event.start_ns, event.duration_ns, event.name)
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        )
    count, rest = divmod(len(events), launches)
    if not count or rest:
        raise RuntimeError(f"{len(events)} kernels in {launches} calls: expected the same number, not 0, in each")
    calls = [events[i * count : (i + 1) * count] for i in range(launches)]
    return {f"{i} {calls[0][i][2]}": statistics.median(call[i][1] for call in calls) / 1e3 for i in range(count)}


def ceilings(
    microseconds: Callable[..., float] = device_microseconds, elements: int = 1 << 30, size: int = 8192
) -> dict[str, float]:
    """Bytes per second of a copy (read + written) of fp32 `elements`, operations per second of matmuls of `size`."""
    x = jnp.ones(elements, jnp.float32)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    a8, b8 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
    copy = jax.jit(lambda x: x + 1)
    dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16))
    return {
        "copy": 2 * x.nbytes / microseconds(copy, [(x,)]) * 1e6,
        "bf16": 2 * size**3 / microseconds(dot, [(a, b)]) * 1e6,
        "fp8": 2 * size**3 / microseconds(dot, [(a8, b8)]) * 1e6,
    }
