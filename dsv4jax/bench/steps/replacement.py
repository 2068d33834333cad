"""Parts of the model replaced by others, to see what they are worth."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax

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


def without_own_topk() -> contextlib.AbstractContextManager[None]:
    """Within it, kernels select with XLA's sort in the place of `topk`."""
    return replaced("pallas_kernels.index_select.kernel", "topk_pallas", topk_reference)
