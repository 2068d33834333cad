"""What a decode step costs the host: scheduler and loop on an executor whose steps take no time."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dsv4jax.bench.engines.system import PAGE, Sizes, finish_prefill, simulated_system
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.quant import ceil_div


def host_cost(
    requests: int, ranks: int, repeats: int, steps: int = 200, long_prompt: int = 0
) -> Iterator[dict[str, Any]]:
    """Milliseconds of host time of a decode step, a row for each of `repeats` runs.

    A new page is needed, and a finished one hashed, in one of 64 steps of each request.

    Args:
      requests: of all ranks together.
      long_prompt: tokens of the first one's prompt; 0 for 500 to 1,500, as the others have.

    Raises:
      RuntimeError: not all requests ran at once.
    """
    length = max(4096, long_prompt + 65536)
    slots = ceil_div(requests, ranks) + (ranks > 1)  # the rank of the long prompt may have fewer requests than others
    sizes = Sizes(
        ranks=ranks, slots=slots, pages=slots * 64 + length // PAGE, max_model_len=length, prefill_tokens=65536
    )
    engine, _ = simulated_system(sizes, lambda plan: 0.0, max_admissions=256).engine()
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, requests)
    if long_prompt:
        lengths[0] = long_prompt
    for i, tokens in enumerate(lengths.tolist()):
        prompt = rng.integers(2, 1000, tokens).astype(np.int32)
        engine.submit(GenerationRequest(f"r{i}", prompt, max_tokens=2500 + steps * repeats, ignore_eos=True))
        if long_prompt and not i:
            finish_prefill(engine)
    finish_prefill(engine)
    for _ in range(repeats):
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - begin) * 1e3)
        if engine.scheduler.num_running != requests:
            raise RuntimeError(f"{engine.scheduler.num_running} of {requests} requests ran: not all at once")
        yield {
            "requests": requests,
            "ranks": ranks,
            "long_prompt": long_prompt,
            "mean_ms": statistics.mean(times),
            "median_ms": statistics.median(times),
            "max_ms": max(times),
        }
