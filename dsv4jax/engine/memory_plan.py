"""What an engine will keep in memory, told before anything is loaded."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.memory import available_device_memory, available_host_memory, require_memory
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.packing import packing_bytes, param_shapes
from sharding import SINGLE, Layout


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose on each device, and what is free there; None if unknown."""

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
    packing: int
    """While weights are packed for kernels, before pages and all that follows them exist; 0 without kernels."""
    free: int | None
    fraction: float
    """Share of the free memory that may be used."""

    @property
    def total(self) -> int:
        """The most bytes at a time."""
        running = self.pages + self.windows + self.sampling + (self.workspace or 0)
        return self.weights + self.tables + max(running, self.packing)

    def table(self) -> str:
        """The plan as text, one purpose per line."""
        names = ["weights", "tables", "pages", "windows", "sampling", "workspace"]
        if self.packing:
            names.append("packing")
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
    layout: Layout = SINGLE,
    *,
    tables_on_device: bool = True,
    expert_slots: int | None = None,
    draft_expert_slots: int | None = None,
    workspace: int | None = None,
    fraction: float = 0.9,
    packed: bool = False,
) -> MemoryPlan:
    """The plan of each device of a layout, which are free of the engine's parts still; the fullest one decides.

    `cache_cfg` is that of one rank. `packed` says that weights are loaded as the kernels take them. Devices without
    memory of their own have equal shares of the host's.
    """
    slots = {"expert_slots": expert_slots, "draft_expert_slots": draft_expert_slots}
    everything, without_tables = (
        _device_bytes(param_shapes(cfg, numerics, layout, tables_on_device=tables, **slots)) for tables in (True, False)
    )
    cache = jax.eval_shape(functools.partial(init_cache, cfg, cache_cfg, numerics))
    per_slot = (cache.windows, cache.open_groups, cache.draft_windows, cache.ngram_ids)
    on_devices = [available_device_memory(device) for device in _local_devices(layout)]
    if None in on_devices:
        on_host = available_host_memory()
        free = None if on_host is None else on_host // len(on_devices)
    else:
        free = min(on_devices)
    return MemoryPlan(
        weights=without_tables,
        tables=everything - without_tables if tables_on_device else 0,
        pages=_array_bytes((cache.entries, cache.index_keys)),
        windows=_array_bytes(per_slot),
        sampling=_array_bytes((cache.sampling, cache.drafts)),
        workspace=workspace,
        packing=packing_bytes(cfg, layout, **slots) if numerics.implementation == "pallas" and not packed else 0,
        free=free,
        fraction=fraction,
    )


def _local_devices(layout: Layout) -> list[jax.Device]:
    """Devices of this process; of a mesh without devices, the default one."""
    return layout.mesh.local_devices if isinstance(layout.mesh, Mesh) else list(jnp.zeros((), jnp.int8).devices())


def _device_bytes(shapes: Any) -> int:
    """Bytes that each device holds of arrays with these shapes and shardings."""
    parts = [a.shape if a.sharding is None else a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(shapes)]
    return sum(math.prod(p) * a.dtype.itemsize for p, a in zip(parts, jax.tree.leaves(shapes), strict=True))


def pages_that_fit(
    cfg: ModelConfig,
    cache_cfg: CacheConfig,
    numerics: Numerics,
    layout: Layout = SINGLE,
    *,
    spare: int,
    **options: Any,
) -> int | None:
    """Pages of each rank that the memory left by everything else holds, `spare` bytes kept for the workspace; None if
    unknown.

    `cache_cfg` gives all sizes but the number of pages; `options` are those of `memory_plan`.
    """
    plan = memory_plan(cfg, cache_cfg, numerics, layout, **options)
    if plan.free is None:
        return None
    others = plan.weights + plan.tables + plan.windows + plan.sampling + (plan.workspace or 0)
    left = int(plan.free * plan.fraction) - others - spare
    return max(0, left // (plan.pages // cache_cfg.pages))


def _array_bytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _size(value: int) -> str:
    unit = next((u for u, size in (("GiB", 2**30), ("MiB", 2**20)) if value >= size), "KiB")
    return f"{value / {'GiB': 2**30, 'MiB': 2**20, 'KiB': 2**10}[unit]:,.2f} {unit}"
