"""Under which conditions something was measured: what a result means nothing without."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl.flags import FlagHolder

import dsv4jax

_PACKAGES = ("jax", "jaxlib", "numpy")


def conditions(
    *,
    model: str | Mapping[str, Any],
    layout: str | Mapping[str, Any],
    flags: Mapping[str, Any],
    seed: int | None,
    devices: Sequence[Any] = (),
    **others: Any,
) -> dict[str, Any]:
    """Conditions of a run, for `Result.conditions`.

    Args:
      model: what ran, or its sizes.
      layout: how it was spread over devices, or what stood for that.
      flags: of the command, those included that kept their default.
      seed: of everything random; None where nothing is.
      devices: `jax.devices()` where the run used them. They are not looked for otherwise: that would claim them.
      others: whatever else the numbers depend on.
    """
    kinds = sorted({device.device_kind for device in devices})
    return {
        "date": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "model": model,
        "layout": layout,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "devices": f"{len(devices)} x {', '.join(kinds)}" if devices else "no device used",
        },
        "versions": {
            "dsv4jax": dsv4jax.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "commit": commit(),
        "seed": seed,
        "flags": dict(flags),
        **others,
    }


def flag_values(names: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the flags among the global names of a script."""
    return {flag.name: flag.value for flag in names.values() if isinstance(flag, FlagHolder)}


def commit() -> str | None:
    """The commit that the package is of, and whether tracked files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(dsv4jax.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return f"{head} with changes" if git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None
