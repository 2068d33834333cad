"""Safetensors files: strict reader over memory maps, streaming writer (architecture section 10).

A checkpoint directory holds `model.safetensors.index.json` and the files it names, or `model.safetensors` alone. A
file is a little-endian u64 n, n bytes of JSON, and the tensors' bytes one after the other.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from dsv4jax.checkpoint.files import atomic_directory, write_synced
from dsv4jax.params import TensorInfo
from dsv4jax.weights import STORED_DTYPES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER = 100_000_000
_MAX_LISTED = 10


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    info: TensorInfo
    file: Path
    start: int
    """Offset of the first byte from the beginning of the file."""


class SafetensorsReader:
    """The tensors of a checkpoint directory as views of memory maps: nothing is read before it is used.

    Opening checks every header, every file's size and the index, so a truncated or mixed-up checkpoint is refused here.

    Attributes:
      directory: the checkpoint directory.
      tensors: name to type, shape and place of every tensor.
    """

    def __init__(self, directory: str | Path):
        """Opens the files.

        Raises:
          FileNotFoundError: no checkpoint there, or a file that the index names is missing.
          ValueError: an unreadable index or header, a file shorter or longer than its header says, overlapping or
            missing byte ranges, an unknown type, or index and files that disagree; lists what is wrong in all files.
        """
        self.directory = Path(directory)
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if index.is_file():
            weight_map, total_size = _read_index(index)
            files = {file: self.directory / file for file in dict.fromkeys(weight_map.values())}
        elif single.is_file():
            weight_map, total_size, files = None, None, {SINGLE_FILE: single}
        else:
            raise FileNotFoundError(f"neither {INDEX_FILE} nor {SINGLE_FILE} in {str(self.directory)!r}")

        problems: list[str] = []
        headers: dict[str, dict[str, StoredTensor]] = {}
        for file, path in files.items():
            if not path.is_file():
                raise FileNotFoundError(f"{index}: names {file!r}, which is not there")
            try:
                headers[file] = read_header(path)
            except ValueError as error:
                problems.append(str(error))
        if not problems and weight_map is not None:
            problems = _compare_with_index(index, weight_map, total_size, headers)
        _raise_if(problems)
        self.tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
        self._maps = {path: _map_file(path) for path in files.values()}

    def check(self, expected: Mapping[str, TensorInfo]) -> None:
        """Compares with the tensors that the model needs. F32 may stand for BF16 and the reverse.

        Raises:
          ValueError: missing or unknown tensors, wrong shapes or types; lists the first of each kind.
        """
        missing = [
            f"{name!r} ({info.dtype} {list(info.shape)})" for name, info in expected.items() if name not in self.tensors
        ]
        extra, shapes, types = [], [], []
        for name, (info, file, _) in self.tensors.items():
            if name not in expected:
                extra.append(f"{name!r} in {file.name!r}")
                continue
            want = expected[name]
            if info.shape != want.shape:
                shapes.append(f"{name!r} in {file.name!r} is {list(info.shape)}, expected {list(want.shape)}")
            if info.dtype != want.dtype and {info.dtype, want.dtype} != {"BF16", "F32"}:
                types.append(f"{name!r} in {file.name!r} is {info.dtype}, expected {want.dtype}")
        kinds = {
            "missing tensors": missing,
            "tensors the model does not have": extra,
            "tensors of wrong shape": shapes,
            "tensors of wrong type": types,
        }
        problems = [f"{len(found)} {kind}: {_shorten(found)}" for kind, found in kinds.items() if found]
        _raise_if([f"checkpoint {str(self.directory)!r} does not fit its configuration", *problems] if problems else [])

    def view(self, name: str) -> np.ndarray:
        """The tensor without copying it: read-only, in the type of `weights.STORED_DTYPES`."""
        info, file, start = self.tensors[name]
        raw = np.frombuffer(self._maps[file], np.uint8, info.nbytes, start) if info.nbytes else np.empty(0, np.uint8)
        dtype = STORED_DTYPES[info.dtype]
        if raw.ctypes.data % dtype.alignment:
            raw = raw.copy()
        return raw.view(dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of this process's memory; they are read again when used again."""
        info, file, start = self.tensors[name]
        first = start - start % mmap.PAGESIZE
        if info.nbytes:
            self._maps[file].madvise(mmap.MADV_DONTNEED, first, start + info.nbytes - first)

    def expect_random_access(self, name: str) -> None:
        """Tells the system not to read ahead in the tensor."""
        info, file, start = self.tensors[name]
        first = start - start % mmap.PAGESIZE
        self._maps[file].madvise(mmap.MADV_RANDOM, first, start + info.nbytes - first)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their bytes.

    Raises:
      ValueError: the header is unreadable or does not describe exactly the bytes of the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: {size} bytes, header length {length}: truncated, or not a safetensors file")
        raw = f.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise ValueError(f"{path}: unreadable header: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)

    spans = sorted((_span(path, name, entry) for name, entry in header.items()), key=lambda span: span[:2])
    tensors, position = {}, 0
    for begin, end, name, info in spans:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise ValueError(f"{path}: tensor {name!r} at bytes {begin}..{end} {what}, which ends at {position}")
        tensors[name] = StoredTensor(info, path, 8 + length + begin)
        position = end
    expected = 8 + length + position
    if size < expected:
        cut = next(n for n, t in tensors.items() if t.start + t.info.nbytes > size)
        raise ValueError(
            f"{path}: truncated: {size} bytes, but its header describes {expected}; tensor {cut!r} is the first cut"
        )
    if size > expected:
        raise ValueError(f"{path}: {size} bytes, but its header describes only {expected}")
    return tensors


def write_checkpoint(
    directory: str | Path,
    plan: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    shard_bytes: int,
    files: Mapping[str, bytes],
) -> None:
    """Writes a checkpoint directory, one tensor in memory at a time; it appears whole or not at all.

    Args:
      directory: must not exist.
      plan: every tensor in writing order; a new file begins where the next tensor would exceed `shard_bytes`.
      tensors: the same names in the same order, with their values in the type of `weights.STORED_DTYPES`.
      shard_bytes: most tensor bytes in one file; a larger tensor gets a file of its own.
      files: other files of the directory (configuration, tokenizer): name to content.

    Raises:
      FileExistsError: `directory` exists.
      ValueError: `tensors` does not match `plan`.
    """
    shards = _plan_shards(plan, shard_bytes)
    source = iter(tensors)
    with atomic_directory(directory) as temporary:
        for name, content in files.items():
            write_synced(temporary / name, content)
        for file, names in shards.items():
            with open(temporary / file, "wb") as f:
                f.write(_header_bytes({name: plan[name] for name in names}))
                for name in names:
                    f.write(_checked_bytes(name, plan[name], next(source, None)))
                f.flush()
                os.fsync(f.fileno())
        if (rest := next(source, None)) is not None:
            raise ValueError(f"tensor {rest[0]!r} is not in the plan")
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(info.nbytes for info in plan.values())},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
            write_synced(temporary / INDEX_FILE, json.dumps(index, indent=1).encode())


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str, TensorInfo]:
    """First byte, end, name and description of one header entry."""
    where = f"{path}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: malformed header entry {entry!r}") from error
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{where}: shape {shape} and data_offsets {[begin, end]} must be non-negative integers")
    if dtype not in STORED_DTYPES:
        raise ValueError(f"{where}: type {dtype!r}; known are {sorted(STORED_DTYPES)}")
    nbytes = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise ValueError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets {[begin, end]} span {end - begin}"
        )
    return begin, end, name, TensorInfo(tuple(shape), dtype, nbytes)


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """`weight_map` and `metadata.total_size`."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        weight_map = content["weight_map"]
        total_size = content.get("metadata", {}).get("total_size")
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: unreadable index: {type(error).__name__}: {error}") from error
    for file in files:
        if not isinstance(file, str) or not file or PurePosixPath(file).is_absolute() or ".." in file.split("/"):
            raise ValueError(f"{index}: {file!r} is not the name of a file inside the checkpoint directory")
    return weight_map, total_size


def _compare_with_index(
    index: Path, weight_map: dict[str, str], total_size: int | None, headers: dict[str, dict[str, StoredTensor]]
) -> list[str]:
    problems = []
    for file, header in headers.items():
        for name in header:
            if (place := weight_map.get(name)) == file:
                continue
            if place is None:
                problems.append(f"{index}: does not list tensor {name!r} of {file!r}")
            elif name in headers[place]:
                problems.append(f"tensor {name!r} is in two files: {place!r} and {file!r}")
            else:
                problems.append(f"{index}: lists tensor {name!r} in {place!r}, but it is in {file!r}")
    found = {name for header in headers.values() for name in header}
    problems += [
        f"{index}: lists tensor {name!r} in {file!r}, which does not have it"
        for name, file in weight_map.items()
        if name not in found
    ]
    actual = sum(tensor.info.nbytes for header in headers.values() for tensor in header.values())
    if total_size is not None and total_size != actual and not problems:
        problems.append(f"{index}: metadata.total_size is {total_size}, the tensors take {actual} bytes")
    return problems


def _plan_shards(plan: Mapping[str, TensorInfo], shard_bytes: int) -> dict[str, list[str]]:
    """File name to tensor names."""
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes = {shard_bytes}: must be positive")
    groups: list[list[str]] = [[]]
    used = 0
    for name, info in plan.items():
        if groups[-1] and used + info.nbytes > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += info.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _header_bytes(plan: Mapping[str, TensorInfo]) -> bytes:
    header, position = {}, 0
    for name, info in plan.items():
        end = position + info.nbytes
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _checked_bytes(name: str, info: TensorInfo, given: tuple[str, np.ndarray] | None) -> memoryview:
    if given is None or given[0] != name:
        raise ValueError(f"tensor {name!r} is next in the plan, got {given[0] if given else None!r}")
    array = given[1]
    if array.shape != info.shape or array.dtype != STORED_DTYPES[info.dtype]:
        raise ValueError(
            f"tensor {name!r}: {array.dtype} {list(array.shape)} given, planned {info.dtype} {list(info.shape)}"
        )
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _map_file(path: Path) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} occurs twice")
        result[name] = value
    return result


def _shorten(items: list[str]) -> str:
    rest = len(items) - _MAX_LISTED
    return "; ".join(items[:_MAX_LISTED]) + (f"; and {rest} more" if rest > 0 else "")


def _raise_if(problems: list[str]) -> None:
    if problems:
        rest = len(problems) - _MAX_LISTED
        raise ValueError("\n".join(problems[:_MAX_LISTED] + ([f"and {rest} more"] if rest > 0 else [])))
