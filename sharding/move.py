"""Copies of arrays, and of experts between slots of stacks that are spread over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int32, Shaped, UInt


def put_like(arrays: Any, like: Array) -> Any:
    """Arrays on the devices of `like`, whole on each."""
    sharding = like.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(arrays, sharding)


@jax.jit
def copy_arrays(arrays: Any) -> Any:
    """The same arrays in memory of their own, sharded alike."""
    return jax.tree.map(lambda leaf: _from_bits(jnp.copy(_bits(leaf)), leaf.dtype), arrays)


@functools.partial(jax.jit, donate_argnames="spare")
def copy_slots(spare: Any, stacks: Any, sources: Int32[Array, " n"], targets: Int32[Array, " n"]) -> Any:
    """`spare` with slot `sources[i]` of `stacks` in its slot `targets[i]`; bit for bit, whatever the type.

    Between devices one sum of n slots' bytes is exchanged, to each of which only the device that has it contributes: a
    device receives n slots, whatever their number in all.

    Args:
      spare: donated; of the structure and shardings of `stacks`, maybe of another number of slots.
      stacks: leaves [slots, ...], any of their axes sharded.
      sources: slots of `stacks`.
      targets: distinct slots of `spare`; a padded entry has one >= their number and copies nothing.
    """
    return jax.tree.map(lambda to, leaf: _copy_leaf(to, leaf, sources, targets), spare, stacks)


def spread_experts(stacks: Any, owners: Int[np.ndarray, " slots"], slots_at_once: int = 8) -> Any:
    """New stacks [slots, ...], sharded alike, with expert `owners[p]` in slot p, from stacks [experts, ...]."""
    slots = len(owners)
    spread = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype, device=leaf.sharding), stacks)
    for first in range(0, slots, slots_at_once):
        targets = np.arange(first, first + slots_at_once, dtype=np.int32)
        sources = owners[np.minimum(targets, slots - 1)].astype(np.int32)
        spread = copy_slots(spread, stacks, sources, targets)
    return spread


def _copy_leaf(spare: Array, leaf: Array, sources: Array, targets: Array) -> Array:
    sharding = jax.typeof(leaf).sharding
    axis = sharding.spec[0]
    if axis is None and sharding.mesh.empty:
        return _copy_local(spare, leaf, sources, targets, axis)
    numbers = PartitionSpec()
    return jax.shard_map(
        functools.partial(_copy_local, axis=axis),
        mesh=sharding.mesh,
        in_specs=(sharding.spec, sharding.spec, numbers, numbers),
        out_specs=sharding.spec,
    )(spare, leaf, sources, targets)


def _copy_local(spare: Array, leaf: Array, sources: Array, targets: Array, axis: Any) -> Array:
    """The part of one device, whose slots are consecutive ones along `axis`; None = it has all slots."""
    device = 0 if axis is None else lax.axis_index(axis)
    held, slots = leaf.shape[0], spare.shape[0]
    sources, targets = sources - device * held, targets - device * slots
    here = (sources >= 0) & (sources < held)
    rows = _bits(leaf)[jnp.where(here, sources, 0)]
    if axis is not None:
        # Communication libraries lack sums of some types, none that of bytes.
        parts = lax.bitcast_convert_type(rows, jnp.uint8)
        parts = jnp.where(here.reshape(-1, *[1] * (parts.ndim - 1)), parts, 0)
        rows = lax.bitcast_convert_type(lax.psum(parts, axis), rows.dtype)
    # A negative index would count from the end.
    to = jnp.where(targets >= 0, targets, slots)
    return _from_bits(_bits(spare).at[to].set(rows, mode="drop"), leaf.dtype)


def _bits(x: Shaped[Array, "..."]) -> UInt[Array, "..."]:
    """Elements as unsigned integers of the same width: copies of floats may quiet a NaN."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_bits(x: UInt[Array, "..."], dtype: jnp.dtype) -> Shaped[Array, "..."]:
    return lax.bitcast_convert_type(x, dtype)
