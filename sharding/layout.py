"""How steps and parameters are spread over devices: presets, and the one place where a step is mapped over a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import RANK_AXIS, ShardingRules, expert_parallel, make_mesh, tensor_parallel

Exchange = Literal["gather", "all_to_all", "ragged"]
EXCHANGES = ("gather", "all_to_all", "ragged")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices, what of the parameters each of them holds, and which requests it works on.

    Static and hashable: an argument of every step. `mesh=None` is one device.

    Args:
      data_parallel: each device is a rank with requests, pages and slots of its own; otherwise all work on the same
        requests, each with its part of the weights.
      exchange: how tokens reach experts on other ranks, see `sharding.exchange`.
      emulated_ranks: for benchmarks, of one device: it stands for one of so many data-parallel ranks, of which it holds
        one's share of the experts. See `sharding.exchange`.

    Raises:
      ValueError: an unknown exchange, a mesh with other axes, or one for emulated ranks.
    """

    mesh: Mesh | None = None
    rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)
    data_parallel: bool = True
    exchange: Exchange = "gather"
    emulated_ranks: int = 1

    def __post_init__(self):
        if self.emulated_ranks < 1 or (self.emulated_ranks > 1 and self.mesh is not None):
            raise ValueError(f"emulated_ranks = {self.emulated_ranks}: must be at least 1, and 1 with a mesh")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange = {self.exchange!r}: must be one of {EXCHANGES}")
        if self.mesh is not None and self.mesh.axis_names != (RANK_AXIS,):
            raise ValueError(f"mesh with axes {self.mesh.axis_names}: must be {(RANK_AXIS,)}, see `make_mesh`")

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.devices if self.data_parallel else 1

    @property
    def expert_devices(self) -> int:
        """Devices that share the experts, emulated ones included."""
        return self.devices * self.emulated_ranks

    @property
    def by_rank(self) -> NamedSharding | None:
        """Sharding of arrays that hold the parts of all ranks along axis 0; None on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self._by_rank)

    @property
    def on_all(self) -> NamedSharding | None:
        """Sharding of arrays that every device holds as a whole; None on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def _by_rank(self) -> PartitionSpec:
        return PartitionSpec(RANK_AXIS) if self.data_parallel else PartitionSpec()

    @functools.cached_property
    def local_ranks(self) -> range:
        """Data-parallel ranks on devices of this process: all, if there is no other process.

        Raises:
          ValueError: none is, or other ranks lie between them.
        """
        if self.mesh is None or not self.data_parallel:
            return range(1)
        owners = [device.process_index for device in self.mesh.devices.flat]
        here = [rank for rank, owner in enumerate(owners) if owner == jax.process_index()]
        if not here or here != list(range(here[0], here[-1] + 1)):
            raise ValueError(f"process {jax.process_index()} has ranks {here} of {self.ranks}: must be consecutive")
        return range(here[0], here[-1] + 1)

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices belong to another process of the JAX cluster."""
        return isinstance(self.mesh, Mesh) and not self.by_rank.is_fully_addressable

    def put(self, tree: Any) -> Any:
        """Arrays of this process's ranks along axis 0 on their devices; unchanged on one device."""
        if not self.spans_processes:
            return tree if self.mesh is None else jax.device_put(tree, self.by_rank)
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, self.by_rank), tree)

    def to_all_processes(self, tree: Any) -> Any:
        """Arrays of all ranks along axis 0 made readable in every process; to be called inside a jit."""
        return jax.reshard(tree, NamedSharding(self.mesh, PartitionSpec())) if self.spans_processes else tree

    def map(self, step: Callable[..., tuple[Any, Any]], params: Any, *by_rank: Any) -> tuple[Any, Any]:
        """`step(params, *by_rank)` on every device with its own part of the arguments; to be called inside a jit.

        Args:
          step: returns (arrays of the rank, values that are equal on all devices). It may use the collectives of
            `sharding.exchange`.
          params: leaves with the shardings of `rules`, as `load_params` and the likes return them.
          by_rank: leaves hold the parts of all ranks along axis 0.
        """
        if self.mesh is None:
            return step(params, *by_rank)
        specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, params)
        by_rank = jax.reshard(by_rank, self.by_rank)
        one, all_equal = self._by_rank, PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(specs, *(one for _ in by_rank)),
            out_specs=(one, all_equal),
            # The results that are equal everywhere come from collectives, which the check does not follow.
            check_vma=False,
        )
        return mapped(params, *by_rank)

    def map_spread(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`function` of each device's part of arrays that are spread along axis 0, as are the results."""
        if self.mesh is None:
            return function(*arrays)
        spread = PartitionSpec(RANK_AXIS)
        return jax.shard_map(function, mesh=self.mesh, in_specs=spread, out_specs=spread, check_vma=False)(*arrays)


SINGLE = Layout()
"""One device: JAX's default one."""


def single() -> Layout:
    """One device."""
    return SINGLE


def emulated_rank(ranks: int) -> Layout:
    """One device in the place of one of so many data-parallel ranks, for benchmarks."""
    return Layout(emulated_ranks=ranks)


def prefill_dep(n: int) -> Layout:
    """Data-parallel attention and expert parallelism over n devices, for prefill.

    Raises:
      ValueError: there are fewer devices.
    """
    return Layout(make_mesh(n), expert_parallel())


def decode_dep(n: int) -> Layout:
    """Data-parallel attention and expert parallelism over n devices, for decode; errors as `prefill_dep`."""
    return Layout(make_mesh(n), expert_parallel())


def latency(n: int) -> Layout:
    """Every request on all of n devices: attention heads, experts and the shared expert's width are spread over them.

    For small batches: a step reads 1/n of these weights per device, at the price of two sums over all devices per
    layer. Errors as `prefill_dep`.
    """
    return Layout(make_mesh(n), tensor_parallel(), data_parallel=False)


PRESETS = ("single", "prefill_dep", "decode_dep", "latency")


def preset(name: str, devices: int) -> Layout:
    """The layout of a preset, by its name, over so many devices.

    Raises:
      ValueError: there is no such preset, "single" has more than one device, or there are fewer devices.
    """
    if name not in PRESETS:
        raise ValueError(f"preset = {name!r}: must be one of {PRESETS}")
    if name == "single":
        if devices != 1:
            raise ValueError(f"devices = {devices}: the preset 'single' has 1")
        return single()
    return {"prefill_dep": prefill_dep, "decode_dep": decode_dep, "latency": latency}[name](devices)
