"""Orbax snapshots: parameters as the model holds them, restorable onto any mesh.

A snapshot directory holds `params/`, a flat dictionary of arrays keyed by leaf name (expert stacks assembled, the
Engram token map included), beside the checkpoint's configuration and tokenizer files.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from tqdm import tqdm

from dsv4jax.checkpoint.files import atomic_directory, companion_files, write_synced
from dsv4jax.checkpoint.load import stream_params
from dsv4jax.checkpoint.placement import check_memory
from dsv4jax.checkpoint.safetensors import write_checkpoint
from dsv4jax.checkpoint.values import convert_exactly
from dsv4jax.config import ModelConfig
from dsv4jax.params import (
    Params,
    abstract_params,
    checkpoint_inventory,
    in_memory,
    leaf_shardings,
    named_leaves,
    tensor_names,
)
from dsv4jax.weights import STORED_DTYPES, ArraySpec
from sharding import SINGLE, Layout

_PARAMS = "params"
_GROUP_BYTES = 4 << 30
_CHUNK_BYTES = 64 << 20


def save_snapshot(path: str | Path, leaves: Iterable[tuple[str, Any]], checkpoint: str | Path) -> None:
    """Writes a snapshot directory; it appears whole or not at all.

    Groups of leaves of at most 4 GiB (or one larger leaf) are written one after the other. The peak host memory beyond
    what `leaves` keeps alive is about three groups: the group, Orbax's copy, and its encoded form.

    Args:
      path: must not exist.
      leaves: (name, array) of every leaf: `named_leaves(params)`, or `stream_params(...)` to write a checkpoint that
        is larger than memory.
      checkpoint: directory whose configuration and tokenizer files are copied.

    Raises:
      FileExistsError: `path` exists.
      FileNotFoundError: `checkpoint` lacks a configuration or a tokenizer.
    """
    files = companion_files(checkpoint)
    with atomic_directory(path) as temporary, _context(_GROUP_BYTES):
        for name, content in files.items():
            write_synced(temporary / name, content)
        target = temporary.absolute() / _PARAMS
        for group in _groups(leaves, lambda leaf: leaf.nbytes):
            ocp.partial.save(target, dict(group))
            del group  # before the next one is gathered
        ocp.partial.finalize(target)


def load_snapshot(
    path: str | Path,
    cfg: ModelConfig,
    layout: Layout = SINGLE,
    *,
    tables_on_device: bool = True,
) -> Params:
    """The parameters of a snapshot on the devices of `layout`, bit for bit.

    The layout they were saved from does not matter: every device reads its part. Host memory beyond the parameters is
    at most 4 GiB, or the largest leaf.

    Raises:
      FileNotFoundError: no snapshot there.
      ValueError: leaves that do not fit `cfg`, a dimension that does not divide over its mesh axis, or too little
        memory.
    """
    stored = _open(path, cfg)
    abstract = abstract_params(cfg, tables_on_device)
    padded = in_memory(abstract, layout)
    specs = dict(named_leaves(padded))
    shardings = leaf_shardings(padded, layout)
    check_memory(padded, shardings)
    wanted = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=shardings[name]) for name, spec in specs.items()
    }
    loaded = _load(path, stored, wanted)
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[name] for name in specs])


def stream_snapshot(path: str | Path, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, host array) of every leaf of a snapshot, in the order of `abstract_params`.

    Reads groups of at most 4 GiB (or one larger leaf); peak host memory is about three groups.

    Raises: as `load_snapshot`.
    """
    stored = _open(path, cfg)

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        for group in _groups(stored.items(), lambda spec: spec.nbytes):
            loaded = _load(path, stored, {name: np.empty(spec.shape, spec.dtype) for name, spec in group})
            while group:
                name, _ = group.pop(0)
                yield name, loaded.pop(name)

    return stream()


def save_arrays(path: str | Path, arrays: Iterable[tuple[str, Any]]) -> None:
    """Writes arrays by name, as they are and without anything beside them; memory as `save_snapshot`.

    Args:
      path: must not exist.
    """
    with _context(_GROUP_BYTES):
        target = Path(path).absolute()
        for group in _groups(arrays, lambda array: array.nbytes):
            ocp.partial.save(target, dict(group))
            del group
        ocp.partial.finalize(target)


def load_arrays(path: str | Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of `save_arrays`, each with the sharding that is wanted of it: every device reads its part.

    Raises:
      FileNotFoundError: there are none.
      ValueError: others are stored than are wanted; names them.
    """
    target = Path(path).absolute()
    if not target.is_dir():
        raise FileNotFoundError(f"no arrays in {str(path)!r}")
    found = ocp.metadata(target).metadata
    problems = [f"{name!r} is missing" for name in wanted if name not in found]
    problems += [f"{name!r} is not wanted" for name in found if name not in wanted]
    for name, array in wanted.items():
        if name in found and (tuple(found[name].shape), np.dtype(found[name].dtype)) != (array.shape, array.dtype):
            problems.append(
                f"{name!r} is {found[name].dtype} {list(found[name].shape)}, expected {array.dtype} {list(array.shape)}"
            )
    if problems:
        raise ValueError(f"{str(path)!r} holds other arrays: {'; '.join(problems[:10])}")
    with _context(max(_GROUP_BYTES, *(array.size * array.dtype.itemsize for array in wanted.values()))):
        return ocp.load(target, dict(wanted))


def checkpoint_to_snapshot(checkpoint: str | Path, path: str | Path, *, progress: bool = True) -> None:
    """Converts a safetensors checkpoint; memory and errors as `save_snapshot` and `stream_params`."""
    cfg = ModelConfig.from_checkpoint(checkpoint)
    save_snapshot(path, _counted(stream_params(checkpoint, cfg), cfg, progress), checkpoint)


def snapshot_to_checkpoint(
    path: str | Path, checkpoint: str | Path, *, shard_bytes: int, progress: bool = True
) -> None:
    """Converts a snapshot to the released layout, where its tensors are byte for byte those it was made from, in the
    types that the layout declares.

    Peak host memory as `stream_snapshot`.

    Raises:
      FileExistsError: `checkpoint` exists.
      ValueError: as `load_snapshot`.
    """
    cfg = ModelConfig.from_checkpoint(path)
    tensors = stored_tensors(_counted(stream_snapshot(path, cfg), cfg, progress), cfg)
    files = companion_files(path)
    write_checkpoint(checkpoint, checkpoint_inventory(cfg), tensors, shard_bytes=shard_bytes, files=files)


def _open(path: str | Path, cfg: ModelConfig) -> dict[str, ArraySpec]:
    """Specs of all leaves, which the snapshot was found to hold and nothing else."""
    target = Path(path).absolute() / _PARAMS
    if not target.is_dir():
        raise FileNotFoundError(f"no snapshot in {str(path)!r}: it has no directory {_PARAMS!r}")
    found = ocp.metadata(target).metadata
    specs = dict(named_leaves(abstract_params(cfg)))
    problems = [f"{name!r} is missing" for name in specs if name not in found]
    problems += [f"{name!r} is not a leaf of the model" for name in found if name not in specs]
    for name, spec in specs.items():
        if name in found and not _fits(found[name], spec):
            problems.append(
                f"{name!r} is {found[name].dtype} {list(found[name].shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise ValueError(f"snapshot {str(path)!r} does not fit its configuration: {shown}")
    return specs


def _fits(found: Any, spec: ArraySpec) -> bool:
    """Whether a stored array is a leaf. Engram tables saved from several devices may have padding behind their rows."""
    shape = tuple(found.shape)
    if spec.axes[:1] == ("engram_rows",) and len(shape) == len(spec.shape):
        shape = (min(shape[0], spec.shape[0]), *shape[1:])
    return (shape, np.dtype(found.dtype)) == (spec.shape, spec.dtype)


def _load(path: str | Path, stored: Mapping[str, ArraySpec], wanted: Mapping[str, Any]) -> dict[str, Any]:
    with _context(max(_GROUP_BYTES, *(stored[name].nbytes for name in wanted))):
        return ocp.load(Path(path).absolute() / _PARAMS, {name: wanted.get(name, ocp.PLACEHOLDER) for name in stored})


def _context(read_bytes: int) -> ocp.Context:
    context = ocp.Context()
    # Quantised weights hardly compress. Splitting the writing of replicated arrays compiles a program for each shape.
    # Small chunks, so that another mesh reads no more than its part.
    context.array.saving.use_compression = False
    context.array.saving.use_replica_parallel = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.memory.read_concurrent_bytes = read_bytes
    # Of the rows of Engram tables, see `padded_shape`; other shapes have been found equal.
    context.array.loading.enable_padding_and_truncation = True
    return context


def _groups(items: Iterable[tuple[str, Any]], size: Any) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive items of at most `_GROUP_BYTES`, or one larger item."""
    group: list[tuple[str, Any]] = []
    used = 0
    for name, item in items:
        if group and used + size(item) > _GROUP_BYTES:
            yield group
            group, used = [], 0
        group.append((name, item))
        used += size(item)
    yield group


def stored_tensors(leaves: Iterable[tuple[str, np.ndarray]], cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint's tensors behind leaves, in their stored types."""
    specs = dict(named_leaves(abstract_params(cfg)))
    for name, values in leaves:
        spec = specs[name]
        if spec.derived:
            continue
        for tensor, part in zip(tensor_names(name, spec), values if "*" in name else [values], strict=True):
            yield tensor, convert_exactly(tensor, part, STORED_DTYPES[spec.stored], (0,) * part.ndim)


def _counted(
    leaves: Iterator[tuple[str, np.ndarray]], cfg: ModelConfig, progress: bool
) -> Iterator[tuple[str, np.ndarray]]:
    total = sum(spec.nbytes for _, spec in named_leaves(abstract_params(cfg)))
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=not progress) as bar:
        for name, values in leaves:
            yield name, values
            bar.update(values.nbytes)
