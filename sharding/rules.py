"""Which mesh axis shards which logical axis of an array, and the mesh that goes with it."""

import contextlib
import dataclasses

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

RANK_AXIS = "rank"
_PADDED = ("engram_rows",)
"""Logical axes that are filled up with zeros to a multiple of their mesh axis: a hash never yields these rows."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of every logical axis that weights are declared with; None = replicated."""

    vocab: str | None = None
    embed: str | None = None
    heads: str | None = None
    latent: str | None = None
    q_lora: str | None = None
    o_lora: str | None = None
    index_heads: str | None = None
    expert: str | None = None
    expert_width: str | None = None
    shared_width: str | None = None
    engram_rows: str | None = None
    engram_kv: str | None = None


def expert_parallel(axis: str = RANK_AXIS) -> ShardingRules:
    """Experts and Engram table rows spread over `axis`, everything else replicated."""
    return ShardingRules(expert=axis, engram_rows=axis)


def tensor_parallel(axis: str = RANK_AXIS) -> ShardingRules:
    """As `expert_parallel`, and attention heads with their part of the output, and the shared expert's width."""
    return dataclasses.replace(expert_parallel(axis), heads=axis, o_lora=axis, shared_width=axis)


def make_mesh(devices: int, axis: str = RANK_AXIS) -> Mesh:
    """A mesh of one axis over the first `devices` devices.

    Raises:
      ValueError: there are fewer devices.
    """
    available = jax.devices()
    if not 1 <= devices <= len(available):
        raise ValueError(f"a mesh of {devices} devices: allowed are 1 to {len(available)}, the devices there are")
    return jax.make_mesh((devices,), (axis,), devices=available[:devices], axis_types=(AxisType.Explicit,))


def abstract_mesh(devices: int) -> AbstractMesh:
    """The mesh of `make_mesh` without devices, for computing with shapes."""
    return AbstractMesh((devices,), (RANK_AXIS,), axis_types=(AxisType.Explicit,))


def tracing_for(platform: str, device_kind: str) -> contextlib.AbstractContextManager[object]:
    """Within it, what is traced is for one device of a kind that need not be here, as "cuda" and "NVIDIA H200"."""
    # Hopper GPUs have 132 multiprocessors; no kernel asks how many there are.
    device = AbstractDevice(device_kind=device_kind, platform=platform, num_cores=132)
    mesh = AbstractMesh((1,), (RANK_AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def padded_shape(
    axes: tuple[str | None, ...], shape: tuple[int, ...], rules: ShardingRules, mesh: Mesh | AbstractMesh | None
) -> tuple[int, ...]:
    """The shape in memory of an array over a mesh: Engram table rows are filled up to a multiple of the devices."""
    if mesh is None:
        return shape
    shards = [mesh.shape.get(getattr(rules, axis), 1) if axis in _PADDED else 1 for axis in axes]
    return tuple(-(-size // n) * n for size, n in zip(shape, shards, strict=True))


def sharding_for(
    axes: tuple[str | None, ...], rules: ShardingRules, mesh: Mesh | AbstractMesh, *, name: str, shape: tuple[int, ...]
) -> NamedSharding:
    """Sharding of the array `name` whose dimensions `shape` have the logical `axes`; None = never sharded.

    Raises:
      ValueError: a logical axis without a rule, a mesh axis that `mesh` does not have, one mesh axis for two
        dimensions, or a dimension that does not divide evenly over its mesh axis.
    """
    known = {field.name for field in dataclasses.fields(rules)}
    partition: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in known:
            raise ValueError(f"{name}: logical axis {axis!r} has no sharding rule; known are {sorted(known)}")
        mesh_axis = getattr(rules, axis) if axis is not None else None
        if mesh_axis is not None:
            _check_dimension(name, axes, axis, size, mesh_axis, partition, mesh)
        partition.append(mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*partition))


def _check_dimension(
    name: str,
    axes: tuple[str | None, ...],
    axis: str,
    size: int,
    mesh_axis: str,
    used: list[str | None],
    mesh: Mesh | AbstractMesh,
) -> None:
    if mesh_axis not in mesh.shape:
        raise ValueError(
            f"{name}: the rule of {axis!r} names mesh axis {mesh_axis!r}; the mesh has {tuple(mesh.shape)}"
        )
    if mesh_axis in used:
        first = axes[used.index(mesh_axis)]
        raise ValueError(
            f"{name} with axes {axes}: {first!r} and {axis!r} are both sharded over mesh axis {mesh_axis!r}"
        )
    if size % mesh.shape[mesh_axis]:
        raise ValueError(
            f"{name}: dimension {axis!r} of size {size} does not divide over the {mesh.shape[mesh_axis]} devices of"
            f" mesh axis {mesh_axis!r}"
        )
