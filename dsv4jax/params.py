"""Parameters as a plain nested dict: shapes, names and bytes from the modules' own declarations."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding

from dsv4jax.config import ModelConfig
from dsv4jax.model.transformer import Model
from dsv4jax.weights import STORED_DTYPES, ArraySpec
from sharding import Layout, ShardingRules, abstract_mesh, padded_shape, sharding_for

Params = dict[str, Any]


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Safetensors name: BF16, F32, F8_E4M3, F8_E8M0 or I8."""
    nbytes: int


def abstract_params(cfg: ModelConfig, tables_on_device: bool = True) -> Params:
    """The parameters with an `ArraySpec` (shape, stored type, logical axes) in place of every array.

    The nesting is that of the tensor names, with expert stacks [experts, ...] as one leaf. With
    `tables_on_device=False` the Engram tables are left out.
    """
    return nnx.to_pure_dict(nnx.split(Model(cfg, tables_on_device))[1])


def with_expert_slots(abstract: Params, slots: Mapping[str, int]) -> Params:
    """The specs with so many slots in the expert stacks of "layers" or "mtp", in place of one for each expert."""

    def of_layer(layer: dict[str, Any], count: int) -> dict[str, Any]:
        experts = jax.tree.map(
            lambda spec: dataclasses.replace(spec, shape=(count, *spec.shape[1:])),
            layer["ffn"]["experts"],
            is_leaf=lambda x: isinstance(x, ArraySpec),
        )
        return {**layer, "ffn": {**layer["ffn"], "experts": experts}}

    changed = {
        stack: {i: of_layer(layer, count) for i, layer in abstract[stack].items()} for stack, count in slots.items()
    }
    return {**abstract, **changed}


def leaf_shardings(abstract: Params, layout: Layout) -> dict[str, Sharding]:
    """The sharding of every leaf; all on JAX's default device when the layout has no mesh.

    Raises:
      ValueError: a leaf cannot be sharded by the layout's rules (see `sharding_for`).
    """
    if layout.mesh is None:
        # The default device as JAX sees it in this thread, whichever way it was set.
        (device,) = jnp.zeros((), jnp.int8).devices()
        return {name: SingleDeviceSharding(device) for name, _ in named_leaves(abstract)}
    rules, mesh = layout.rules, layout.mesh
    return {
        name: sharding_for(spec.axes, rules, mesh, name=name, shape=spec.shape) for name, spec in named_leaves(abstract)
    }


def in_memory(abstract: Params, layout: Layout) -> Params:
    """The specs with the shapes that leaves have on the devices of a layout, see `padded_shape`."""

    def padded(spec: ArraySpec) -> ArraySpec:
        return dataclasses.replace(spec, shape=padded_shape(spec.axes, spec.shape, layout.rules, layout.mesh))

    return jax.tree.map(padded, abstract, is_leaf=lambda x: isinstance(x, ArraySpec))


def bytes_per_device(cfg: ModelConfig, rules: ShardingRules, devices: int) -> dict[str, int]:
    """Bytes of parameters that each of so many devices holds, by part of the model; needs no devices.

    Raises:
      ValueError: the parameters cannot be spread so, see `sharding_for`.
    """
    mesh = abstract_mesh(devices)
    held = dict.fromkeys(("experts", "draft experts", "Engram tables", "vision", "everything else"), 0)
    for name, spec in named_leaves(abstract_params(cfg)):
        shape = padded_shape(spec.axes, spec.shape, rules, mesh)
        part = sharding_for(spec.axes, rules, mesh, name=name, shape=shape).shard_shape(shape)
        held[_part_of_model(name)] += math.prod(part) * spec.dtype.itemsize
    return held


def _part_of_model(name: str) -> str:
    if ".ffn.experts." in name:
        return "draft experts" if name.startswith("mtp.") else "experts"
    if ".engram.embed." in name:
        return "Engram tables"
    return "vision" if name.startswith(("vision.", "aligner.")) else "everything else"


def named_leaves(params: Params) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of every array, names as in the checkpoint; an expert stack is named with `experts.*`."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        yield name.replace(".experts.", ".experts.*."), leaf


def tensor_names(name: str, spec: ArraySpec) -> list[str]:
    """The checkpoint's tensor names behind one leaf: one, or one per expert."""
    if "*" not in name:
        return [name]
    return [name.replace("*", str(e)) for e in range(spec.shape[0])]


def checkpoint_inventory(cfg: ModelConfig) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint layout (architecture section 10): name to shape, type, bytes."""
    inventory = {}
    for name, spec in named_leaves(abstract_params(cfg)):
        if spec.derived:
            continue
        names = tensor_names(name, spec)
        shape = spec.shape if "*" not in name else spec.shape[1:]
        for tensor in names:
            inventory[tensor] = TensorInfo(shape, spec.stored, math.prod(shape) * STORED_DTYPES[spec.stored].itemsize)
    return inventory
