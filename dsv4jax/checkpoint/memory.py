"""Memory that is free, and the refusal to start what would not fit."""

from collections.abc import Iterable
from pathlib import Path

import jax


def available_host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated on this host without swapping, within the limits of the process's control group.

    Page cache counts as free, since the system gives it up. Limits of control groups version 2 only; None where the
    system is not Linux.
    """
    if not (proc / "meminfo").is_file():
        return None
    meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    own = next((s[3:] for s in (proc / "self/cgroup").read_text().splitlines() if s.startswith("0::")), "/")
    group = cgroup / own.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(cgroup) or not (directory / "memory.max").is_file():
            continue
        limit = (directory / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            used = int((directory / "memory.current").read_text())
            cache = int(stat["active_file"]) + int(stat["inactive_file"])
            available = min(available, int(limit) - used + cache)
    return available


def available_device_memory(device: jax.Device) -> int | None:
    """Bytes that can be allocated on `device`; None where it shares the host's memory."""
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def require_memory(needs: Iterable[tuple[str, int, int | None]]) -> None:
    """Compares needs with what is free.

    Args:
      needs: (what it is for and where, bytes needed, bytes free or None if unknown).

    Raises:
      ValueError: names every need that does not fit.
    """
    problems = [
        f"{what} needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
        for what, needed, free in needs
        if free is not None and needed > free
    ]
    if problems:
        raise ValueError("not enough memory: " + "; ".join(problems))
