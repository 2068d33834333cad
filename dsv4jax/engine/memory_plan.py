"""What an engine will keep in memory, told before anything is loaded."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.memory import available_device_memory, available_host_memory, require_memory
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import abstract_params, named_leaves


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose on the device, and what is free there; None if unknown."""

    weights: int
    tables: int
    """Engram tables on the device; 0 if they stay on the host."""
    pages: int
    windows: int
    """Per slot: window rings, open groups, ids."""
    sampling: int
    """Per slot: counts, masks and biases over the vocabulary, and drafts."""
    workspace: int | None
    """Temporary memory of the largest program; None until the programs are compiled."""
    free: int | None
    fraction: float
    """Share of the free memory that may be used."""

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return self.weights + self.tables + self.pages + self.windows + self.sampling + (self.workspace or 0)

    def table(self) -> str:
        """The plan as text, one purpose per line."""
        names = ("weights", "tables", "pages", "windows", "sampling", "workspace")
        lines = []
        for name in names:
            value = getattr(self, name)
            lines.append(f"  {name:<12}{'known after compiling' if value is None else _size(value):>22}")
        usable = "unknown" if self.free is None else f"{_size(self.free)} free, {self.fraction:.0%} may be used"
        return "\n".join([*lines, f"  {'total':<12}{_size(self.total):>22}   ({usable})"])

    def require(self) -> None:
        """Raises ValueError with the numbers if the plan does not fit."""
        usable = None if self.free is None else int(self.free * self.fraction)
        try:
            require_memory([("the memory plan", self.total, usable)])
        except ValueError as error:
            raise ValueError(f"{error}\n{self.table()}\nfewer pages, slots or a shorter context need less") from error


def memory_plan(
    cfg: ModelConfig,
    cache_cfg: CacheConfig,
    numerics: Numerics,
    *,
    tables_on_device: bool = True,
    workspace: int | None = None,
    fraction: float = 0.9,
) -> MemoryPlan:
    """The plan of an engine on the default device, which is free of its parts still."""
    everything = _spec_bytes(abstract_params(cfg))
    without_tables = _spec_bytes(abstract_params(cfg, tables_on_device=False))
    cache = jax.eval_shape(functools.partial(init_cache, cfg, cache_cfg, numerics))
    per_slot = (cache.windows, cache.open_groups, cache.draft_windows, cache.ngram_ids)
    (device,) = jnp.zeros((), jnp.int8).devices()
    free = available_device_memory(device)
    return MemoryPlan(
        weights=without_tables,
        tables=everything - without_tables if tables_on_device else 0,
        pages=_array_bytes((cache.entries, cache.index_keys)),
        windows=_array_bytes(per_slot),
        sampling=_array_bytes((cache.sampling, cache.drafts)),
        workspace=workspace,
        free=available_host_memory() if free is None else free,
        fraction=fraction,
    )


def pages_that_fit(
    cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics, spare: int, **options: Any
) -> int | None:
    """Pages that the memory left by everything else holds, `spare` bytes kept for the workspace; None if unknown.

    `cache_cfg` gives all sizes but the number of pages; `options` are those of `memory_plan`.
    """
    plan = memory_plan(cfg, cache_cfg, numerics, **options)
    if plan.free is None:
        return None
    left = int(plan.free * plan.fraction) - (plan.total - plan.pages) - spare
    return max(0, left // (plan.pages // cache_cfg.pages))


def _spec_bytes(params: dict[str, Any]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for _, spec in named_leaves(params))


def _array_bytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _size(value: int) -> str:
    unit = next((u for u, size in (("GiB", 2**30), ("MiB", 2**20)) if value >= size), "KiB")
    return f"{value / {'GiB': 2**30, 'MiB': 2**20, 'KiB': 2**10}[unit]:,.2f} {unit}"
