"""One device in the place of one rank of many, and parts of the model replaced by others to see what they are worth.

**Rank emulation**: the device holds one rank's share of the experts and everything else whole, as in data-parallel
attention with expert parallelism. In the exchange its own tokens stand for those of every rank: they are copied as
often as there are ranks, routed with expert ids turned by one rank's experts each, and the results of all copies are
summed. So the expert operation sees the rows that a rank receives under even routing, and device memory moves the bytes
of an all-gather and a reduce-scatter; the links between devices are not part of it: `exchange_bytes` says what they
carry. The result is that of a model whose ranks all hold the same experts.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.moe_experts import moe_experts
from pallas_kernels.topk.reference import topk_reference


@contextlib.contextmanager
def replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """What is traced within it calls `value` in the place of `module.name`.

    JAX keeps no trace from outside within it, nor from within it for later.
    """
    place = importlib.import_module(module)
    original = getattr(place, name)
    jax.clear_caches()
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, original)
        jax.clear_caches()


def emulated_rank(ranks: int) -> contextlib.AbstractContextManager[None]:
    """Within it, steps are traced as those of one rank of many; their parameters are `random_params(ranks=...)`."""
    if ranks == 1:
        return contextlib.nullcontext()
    return replaced("dsv4jax.model.moe", "moe_experts", emulated_experts(ranks))


def emulated_experts(ranks: int) -> Callable[..., Array]:
    """`moe_experts` between the stand-ins for dispatch and combine."""

    def run(x: Array, experts: Array, weights: Array, valid: Array, *stacks: Any, **options: Any) -> Array:
        local = jax.tree.leaves(stacks)[0].shape[0]
        with jax.named_scope("dispatch"):
            turns = local * jnp.arange(ranks)[:, None, None]
            experts = ((experts + turns) % (ranks * local)).reshape(-1, experts.shape[1])
            rows = [jnp.broadcast_to(a, (ranks, *a.shape)).reshape(-1, *a.shape[1:]) for a in (x, weights, valid)]
            # Like an exchange, it is no part of what comes before and after; XLA would leave the copies out.
            x, weights, valid, experts = lax.optimization_barrier((*rows, experts))
        y = moe_experts(x, experts, weights, valid, *stacks, **(options | {"ranks": ranks}))
        with jax.named_scope("combine"):
            return lax.optimization_barrier(jnp.sum(y.reshape(ranks, -1, *y.shape[1:]), 0))

    return run


def exchange_bytes(ranks: int, tokens: int, hidden: int, k: int) -> tuple[int, int]:
    """Bytes that a rank receives from the others in one layer: tokens with their routing, and fp32 results."""
    others = (ranks - 1) * tokens
    return others * (2 * hidden + 8 * k + 1), others * 4 * hidden


def without_own_topk() -> contextlib.AbstractContextManager[None]:
    """Within it, kernels select with XLA's sort in the place of `topk`."""
    return replaced("pallas_kernels.index_select.kernel", "topk_pallas", topk_reference)
