"""Time per stage of a step from a trace of JAX's profiler.

A stage is a `jax.named_scope` of the model. A trace names the HLO operation of each kernel, and the compiled program
the scopes of each operation. Kernels in command buffers are not named: see `step_flags`.
"""

import collections
import dataclasses
import glob
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

STAGES = (
    "embed", "engram", "hyper_connections", "compress", "attention_input", "index_select", "sparse_attention",
    "attention_output", "router", "dispatch", "experts", "combine", "shared_expert", "head", "sample",
)  # fmt: skip
"""The scopes of the model, in the order of a step."""
OTHER = "other"
"""Stage of what lies in no scope."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch on a device, in microseconds."""

    name: str
    operation: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the steps of a trace spent, per step and device."""

    microseconds: Mapping[str, float]
    """Of the kernels of each stage; of kernels that run at the same time each counts."""
    kernels: Mapping[str, float]
    """Launches of each stage."""
    launches: Mapping[tuple[str, str], tuple[float, float]]
    """Launches and their microseconds by stage and what follows it in the operation's path."""
    busy: float
    """Microseconds in which some kernel ran."""
    span: float
    """Microseconds from the start of the first kernel to the end of the last."""

    @property
    def gaps(self) -> float:
        """Microseconds within a step in which nothing ran."""
        return self.span - self.busy


def read_trace(directory: str, module: str) -> list[list[Kernel]]:
    """The kernels of each run of an HLO module on each device, from what `jax.profiler.trace(directory)` wrote.

    On a GPU the events of its streams; on a CPU those of its threads. A device whose events do not number their runs
    must have launched the same kernels in each: runs are then told apart by the first kernel's operation.

    Raises:
      ValueError: there is not exactly one trace, or it has no event of the module.
    """
    paths = glob.glob(f"{directory}/**/*.trace.json.gz", recursive=True)
    if len(paths) != 1:
        raise ValueError(f"{directory!r} holds {len(paths)} traces: expected one")
    with gzip.open(paths[0], "rt", encoding="utf-8") as file:
        return kernels_by_run(json.load(file)["traceEvents"], module)


def kernels_by_run(events: Sequence[Mapping], module: str) -> list[list[Kernel]]:
    """As `read_trace`, from the events of a trace."""
    processes, threads = {}, {}  # Each GPU is a process.
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event.get("ph") == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    on_gpu = any(name.startswith("/device:GPU") for name in processes.values())
    found = collections.defaultdict(list)
    for event in events:
        arguments = event.get("args", {})
        if event.get("ph") != "X" or arguments.get("hlo_module", "").partition("(")[0] != module:
            continue
        process, thread = processes.get(event["pid"], ""), threads.get((event["pid"], event["tid"]), "")
        if on_gpu and not (process.startswith("/device:GPU") and "Stream" in thread):
            continue
        kernel = Kernel(event["name"], arguments.get("hlo_op", ""), float(event["ts"]), float(event.get("dur", 0)))
        found[event["pid"]].append((arguments.get("run_id"), kernel))
    if not found:
        raise ValueError(f"the trace has no kernel of module {module!r}")
    return [run for pid in sorted(found) for run in _runs_of_device(found[pid])]


def _runs_of_device(found: list[tuple[Any, Kernel]]) -> list[list[Kernel]]:
    """The kernels of one device by run."""
    found.sort(key=lambda item: item[1].start)
    if all(run is not None for run, _ in found):
        runs = collections.defaultdict(list)
        for run, kernel in found:
            runs[run].append(kernel)
        return list(runs.values())
    first = found[0][1]
    runs: list[list[Kernel]] = []
    for _, kernel in found:
        if (kernel.name, kernel.operation) == (first.name, first.operation):
            runs.append([])
        runs[-1].append(kernel)
    return runs


def operation_paths(hlo: str) -> dict[str, str]:
    """Scopes and name of each operation, separated by slashes, from the text of a compiled program."""
    return dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"", hlo, re.M))


def stage_of(path: str) -> str:
    """The innermost stage among the scopes of an operation's name."""
    return next((part for part in reversed(path.split("/")) if part in STAGES), OTHER)


def profile(runs: Sequence[Sequence[Kernel]], paths: Mapping[str, str]) -> Profile:
    """Averages over the runs.

    Args:
      paths: `operation_paths` of the program.
    """
    microseconds, kernels = collections.Counter(), collections.Counter()
    named: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    busy = span = 0.0
    for run in runs:
        for kernel in run:
            path = paths.get(kernel.operation, "")
            stage = stage_of(path)
            microseconds[stage] += kernel.duration
            kernels[stage] += 1
            named[stage, path.rpartition(f"{stage}/")[2] or kernel.name].append(kernel.duration)
        run_busy, run_span = _busy_and_span(run)
        busy, span = busy + run_busy, span + run_span
    n = len(runs)
    return Profile(
        {stage: total / n for stage, total in microseconds.items()},
        {stage: count / n for stage, count in kernels.items()},
        {key: (len(durations) / n, sum(durations) / n) for key, durations in named.items()},
        busy / n,
        span / n,
    )


def _busy_and_span(run: Sequence[Kernel]) -> tuple[float, float]:
    """Length of the union of the kernels' times, and from the first start to the last end."""
    busy, end = 0.0, run[0].start
    for kernel in sorted(run, key=lambda k: k.start):
        stop = kernel.start + kernel.duration
        busy += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return busy, end - min(kernel.start for kernel in run)
