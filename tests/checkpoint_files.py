"""Raw access to safetensors files, independent of the library's reader, to build and damage checkpoints."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "golden"
SINGLE = "model.safetensors"


def parse(file: Path) -> tuple[dict[str, Any], bytearray]:
    """Header and tensor bytes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def build(file: Path, header: Any, data: bytes) -> None:
    """Writes a file from a header (an object, or ready bytes) and tensor bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))


def edit(directory: Path, change: Callable[[dict[str, Any], bytearray], bytearray | None]) -> None:
    """Applies `change(header, data)` to the single file of a checkpoint; it may return new data."""
    header, data = parse(directory / SINGLE)
    data = change(header, data) or data
    build(directory / SINGLE, header, data)


def set_byte(directory: Path, tensor: str, position: int, value: int) -> None:
    """Overwrites one byte of a tensor."""

    def change(header, data):
        data[header[tensor]["data_offsets"][0] + position] = value

    edit(directory, change)


def golden_copy(directory: Path, name: str = "tiny_a", form: str = "checkpoint_quantized") -> Path:
    """A writable copy of a golden checkpoint whose F32 tensors have BF16 values, as those of the released one do."""
    shutil.copytree(DATA / name / form, directory)

    def change(header, data):
        for tensor, entry in header.items():
            if tensor.startswith("vision") or "confidence_head" in tensor:
                begin, end = entry["data_offsets"]
                if entry["dtype"] == "F32":
                    words = np.frombuffer(data, np.uint32, (end - begin) // 4, begin)
                    data[begin:end] = (words & 0xFFFF0000).tobytes()

    edit(directory, change)
    return directory


def run_python(code: str, *arguments: object, devices: int = 1) -> str:
    """Output of a Python program in a process of its own, with so many virtual devices.

    Raises:
      AssertionError: it failed.
    """
    root = Path(__file__).parent.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parent)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
