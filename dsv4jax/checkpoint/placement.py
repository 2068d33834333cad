"""Placing parameters on devices, a few leaves at a time."""

import concurrent.futures
import heapq
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from dsv4jax.checkpoint.memory import available_device_memory, available_host_memory, require_memory
from dsv4jax.params import Params, in_memory, leaf_shardings, named_leaves
from dsv4jax.weights import ArraySpec
from sharding import Layout

Index = tuple[slice, ...]
ReadLeaf = Callable[[str, Index], np.ndarray]

LEAVES_IN_FLIGHT = 4
"""Leaves that are being read and transferred at the same time."""


def check_memory(abstract: Params, shardings: dict[str, Sharding]) -> None:
    """Whether the parameters, with specs as `in_memory` gives them, fit on the devices, and the leaves in flight beside
    them on the host.

    Raises:
      ValueError: they do not; names each device and the host with bytes needed and free.
    """
    specs = dict(named_leaves(abstract))
    per_device: dict[jax.Device, int] = {}
    for name, spec in specs.items():
        shard_bytes = math.prod(shardings[name].shard_shape(spec.shape)) * spec.dtype.itemsize
        for device in shardings[name].addressable_devices:
            per_device[device] = per_device.get(device, 0) + shard_bytes
    on_host = sum(needed for device, needed in per_device.items() if device.platform == "cpu")
    on_host += sum(heapq.nlargest(LEAVES_IN_FLIGHT, (_in_flight(name, specs[name], shardings[name]) for name in specs)))
    needs = [(f"{d}", needed, available_device_memory(d)) for d, needed in per_device.items() if d.platform != "cpu"]
    require_memory([("the host", on_host, available_host_memory()), *needs])


def place_leaves(
    abstract: Params,
    layout: Layout,
    read: ReadLeaf,
    *,
    done: Callable[[str], None] = lambda name: None,
    progress: bool,
    description: str,
) -> Params:
    """Parameters in the structure of `abstract`, from `read(name, index)` for the part of a leaf that a device holds.

    Padding (see `padded_shape`) is zero. Host memory beyond the parameters is that of `LEAVES_IN_FLIGHT` leaves. All
    leaves are placed or none: the first error stops the rest and is raised.

    Args:
      abstract: specs.
      layout: devices, and how they share the leaves.
      read: called from several threads.
      done: called with a leaf's name once it is on its devices.
      progress: whether to show a progress bar.
      description: its label.

    Raises:
      ValueError: a leaf cannot be spread over the devices, or too little memory.
    """
    padded = in_memory(abstract, layout)
    shardings = leaf_shardings(padded, layout)
    check_memory(padded, shardings)
    shapes = {name: spec.shape for name, spec in named_leaves(padded)}
    specs = dict(named_leaves(abstract))

    def place(name: str) -> jax.Array:
        on_cpu = next(iter(shardings[name].addressable_devices)).platform == "cpu"

        def part(index: Index) -> np.ndarray:
            values = _read_padded(lambda inside: read(name, inside), index, specs[name].shape)
            # The CPU backend may keep using the memory it is given, and this may be a mapped file or a shared view.
            return values.copy() if on_cpu and not values.flags.owndata else np.ascontiguousarray(values)

        array = jax.make_array_from_callback(shapes[name], shardings[name], part)
        array.block_until_ready()
        done(name)
        bar.update(specs[name].nbytes)
        return array

    total = sum(spec.nbytes for spec in specs.values())
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc=description, disable=not progress) as bar,
        concurrent.futures.ThreadPoolExecutor(LEAVES_IN_FLIGHT) as pool,
    ):
        try:
            placed = [pool.submit(place, name) for name in specs]
            concurrent.futures.wait(placed, return_when=concurrent.futures.FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
        for future in placed:
            if not future.cancelled() and future.exception() is not None:
                future.result()
        leaves = [future.result() for future in placed]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _read_padded(read: Callable[[Index], np.ndarray], index: Index, shape: tuple[int, ...]) -> np.ndarray:
    """The part `index` of an array of which rows (axis 0) from `shape[0]` on are zero."""
    if not shape or index[0].stop is None or index[0].stop <= shape[0]:
        return read(index)
    first = min(index[0].start or 0, shape[0])
    values = read((slice(first, shape[0]), *index[1:]))
    missing = index[0].stop - (index[0].start or 0) - len(values)
    return np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))


def _in_flight(name: str, spec: ArraySpec, sharding: Sharding) -> int:
    """Bytes of host memory while the leaf is read: none where a mapped file is transferred as it is."""
    devices = sharding.addressable_devices
    if "*" not in name and next(iter(devices)).platform != "cpu":
        return 0
    if sharding.is_fully_replicated:
        return spec.nbytes
    return len(devices) * math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
