"""Nested arguments and results of programs as JSON: structure, static fields, and each array's shape, type, sharding.

    {"type": "dsv4jax.cache.Cache", "fields": {"entries": {"tuple": [{"shape": [64, 32, 40], ...}]}, ...}}

Flattened, the arrays stand in the order of the portable exports' arguments and results.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding import Layout

_PACKAGES = ("dsv4jax", "pallas_kernels", "sharding")
_ATOMS = (int, str, bool, type(None))


def encode(tree: Any, shared: Mapping[str, Any] | None = None) -> Any:
    """The signature of a tree of arrays, or of anything with `shape`, `dtype` and maybe `sharding` in their place.

    Args:
      shared: signatures by name; where the tree has one of these, the name stands for it.

    Raises:
      TypeError: a node of another kind than the steps have.
    """
    node = _encode(tree, shared or {})
    return next((name for name, other in (shared or {}).items() if node == other), node)


def _encode(tree: Any, shared: Mapping[str, Any]) -> Any:
    if tree is None:
        return None
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {
            "shape": list(tree.shape),
            "dtype": np.dtype(tree.dtype).name,
            "sharding": _partition(tree),
        }
    if isinstance(tree, dict):
        return {"dict": [[key, encode(value, shared)] for key, value in sorted(tree.items())]}
    if type(tree) is tuple:
        return {"tuple": [encode(value, shared) for value in tree]}
    if dataclasses.is_dataclass(tree):
        fields = {}
        for field in dataclasses.fields(tree):
            value = getattr(tree, field.name)
            static = not field.metadata.get("pytree_node", True)
            fields[field.name] = {"static": _plain(value)} if static else encode(value, shared)
        return {"type": f"{type(tree).__module__}.{type(tree).__qualname__}", "fields": fields}
    raise TypeError(f"{type(tree).__name__}: programs take dicts, tuples, dataclasses and arrays only")


def decode(node: Any, layout: Layout, shared: Mapping[str, Any] | None = None) -> Any:
    """The tree of a signature, with `jax.ShapeDtypeStruct` on the devices of `layout` in place of the arrays.

    Raises:
      ValueError: a node is none that `encode` writes.
    """
    if node is None:
        return None
    if isinstance(node, str) and node in (shared or {}):
        return decode(shared[node], layout)
    if isinstance(node, dict) and node.keys() == {"shape", "dtype", "sharding"}:
        return jax.ShapeDtypeStruct(node["shape"], np.dtype(node["dtype"]), sharding=_sharding(node, layout))
    if isinstance(node, dict) and node.keys() == {"dict"}:
        return {key: decode(value, layout, shared) for key, value in node["dict"]}
    if isinstance(node, dict) and node.keys() == {"tuple"}:
        return tuple(decode(value, layout, shared) for value in node["tuple"])
    if isinstance(node, dict) and node.keys() == {"type", "fields"}:
        values = {
            name: _hashable(value["static"]) if _is_static(value) else decode(value, layout, shared)
            for name, value in node["fields"].items()
        }
        return _class(node["type"])(**values)
    raise ValueError(f"{str(node)[:80]!r} is no signature")


def difference(exported: Any, here: Any, name: str) -> str | None:
    """The first place in which two signatures differ, with what stands there in both; None if there is none."""
    if exported == here:
        return None
    ours, theirs = _children(exported), _children(here)
    if ours is not None and theirs is not None and ours.keys() == theirs.keys():
        found = (difference(ours[key], theirs[key], f"{name}.{key}") for key in ours)
        return next(filter(None, found))
    return f"{name}: exported with {_text(exported)}, here {_text(here)}"


def _children(node: Any) -> dict[Any, Any] | None:
    """What stands in a node by key, place or field; None in an array, a static field, and what is shared."""
    if not isinstance(node, dict) or "shape" in node or _is_static(node):
        return None
    if "dict" in node:
        return dict(node["dict"])
    if "tuple" in node:
        return dict(enumerate(node["tuple"]))
    return {"type": {"static": node["type"]}, **node["fields"]}


def _text(node: Any) -> str:
    if isinstance(node, dict) and "shape" in node:
        return f"{node['dtype']}{node['shape']}" + (f" over {node['sharding']}" if node["sharding"] else "")
    return str(node["static"] if _is_static(node) else node)[:200]


def _partition(leaf: Any) -> list[Any] | None:
    """Mesh axis of every dimension; None on one device and for arrays of the host."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]


def _sharding(node: Mapping[str, Any], layout: Layout) -> NamedSharding | None:
    if node["sharding"] is None:
        return None
    if layout.mesh is None:
        raise ValueError(f"sharding = {node['sharding']}: the layout has one device")
    return NamedSharding(layout.mesh, PartitionSpec(*node["sharding"]))


def _class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] not in _PACKAGES:
        raise ValueError(f"type = {name!r}: must be one of {_PACKAGES}")
    found = getattr(importlib.import_module(module), attribute, None)
    if not dataclasses.is_dataclass(found):
        raise ValueError(f"type = {name!r}: there is no such dataclass")
    return found


def _is_static(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"static"}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, _ATOMS):
        raise TypeError(f"{value!r}: static fields of programs are numbers, strings and tuples of these")
    return value


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
