"""Rates that nothing in a result can exceed, for `Result.ceiling`."""

import time
from typing import Any

import jax

from pallas_kernels.timing import ceilings


def measured_ceilings() -> dict[str, Any]:
    """Rates `copy` in bytes per second, `bf16` and `fp8` in operations per second, measured now on the first device.

    By the clock and at small sizes where there is no GPU.
    """
    if jax.default_backend() == "gpu":
        rates = ceilings()
    else:
        rates = ceilings(_by_the_clock, 1 << 22, 256)
    return {"what": "measured in the same run, bytes and operations per second", **rates}


def _by_the_clock(fn: Any, argument_sets: Any) -> float:
    jax.block_until_ready(fn(*argument_sets[0]))
    begin = time.perf_counter()
    jax.block_until_ready(fn(*argument_sets[0]))
    return (time.perf_counter() - begin) * 1e6
