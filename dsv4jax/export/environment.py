"""What a compiled program depends on besides the model: versions, device, flags, and the code it was traced from."""

import hashlib
import importlib.metadata
import importlib.resources
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib

from dsv4jax.step_flags import STEP_OPTIONS

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PACKAGES = ("dsv4jax", "pallas_kernels", "sharding")
_NO_STEP_CODE = ("server", "chat", "benchmark", "export", "default_model")
"""Parts of `dsv4jax` that no step depends on."""
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def environment(devices: int, xla_flags: str = "", target: tuple[str, str] | None = None) -> dict[str, Any]:
    """The environment of programs over so many devices that this process compiles.

    Args:
      xla_flags: the variable XLA_FLAGS of the process.
      target: (platform, device kind) of other devices than the ones here, for exports that are not compiled.
    """
    first = jax.devices()[0]
    own_platform = jax.export.default_export_platform()
    on, kind = target or (own_platform, first.device_kind)
    here = on == own_platform
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "plugin": _plugin() if here and on != "cpu" else None,
        "driver": _driver() if here and on == "cuda" else None,
        "platform": on,
        "device_kind": kind,
        "devices": devices,
        "processor": _processor() if here and on == "cpu" else None,
        "xla_flags": sorted(flag for flag in xla_flags.split() if not flag.startswith(_DEVICE_COUNT)),
        "step_options": dict(STEP_OPTIONS),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "enable_x64": jax.config.jax_enable_x64,
        "code": code_digest(),
    }


def code_digest() -> str:
    """SHA-256 over the sources that programs are traced from: all but those of server, chat and the like."""
    digest = hashlib.sha256()
    for name, content in _sources():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        root = Path(str(importlib.resources.files(package)))
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if parts[0] not in _NO_STEP_CODE:
                yield "/".join((package, *parts)), file.read_bytes()


def _plugin() -> str:
    found = []
    for name in _PLUGINS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "unknown"


def _driver() -> str:
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.is_file() else "unknown"


def _processor() -> str:
    """The host's processor, with what it can execute: programs for CPUs are its machine code."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return f"{platform.machine()} {platform.processor()}"
    first = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
    entries = {key.strip(): value.strip() for key, value in first.items()}
    features = " ".join(sorted(entries.get("flags", entries.get("Features", "")).split()))
    name = entries.get("model name", platform.machine())
    return f"{name}, features {hashlib.sha256(features.encode()).hexdigest()[:12]}"
