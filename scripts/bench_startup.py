"""Time from the start of a process to the first token: compiled or loaded programs, weights from where, page cache.

    python scripts/bench_startup.py --report out
    python scripts/bench_startup.py --layers 6 --experts 288 --directory /local/disk --report out
        --pages 1000 --max_model_len 4096 --slots 16

The first is the embedded model. The second draws random weights of released widths on the device, exports them, and
needs no checkpoint. Every measurement is a process of its own, told apart by phases. "cold" gives the pages of all
files but Python's own out of the page cache before; rates of plain reads of the weights are the ceiling. The goal is
the first token within 20 seconds for 60 GB of weights, where the disk allows it, and nothing compiled.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_line
import jax
import numpy as np
from absl import flags, logging
from engine_flags import RANKS, Sizes, check_sizes, make_shape
from executables import use_virtual_devices

from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result
from dsv4jax.bench.steps.random_state import random_params
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.generating import EngineGenerator
from dsv4jax.engine.programs import Programs
from dsv4jax.export import compare_programs, export_steps, forbid_tracing, load, load_weights, read_manifest
from dsv4jax.sampling_settings import RequestSampling

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the embedded model.")
_LAYERS = flags.DEFINE_integer("layers", None, "Instead of a checkpoint: random weights of so many layers.", 6)
_EXPERTS = flags.DEFINE_integer("experts", 384, "With --layers: experts per layer.", 1)
_DIRECTORY = flags.DEFINE_string(
    "directory", tempfile.gettempdir(), "Where the exported directory is written, and deleted after."
)
_KEEP = flags.DEFINE_bool("keep", False, "Keep it, and use it if it is there.")
_REPEATS = flags.DEFINE_integer("repeats", 1, "Processes per measurement; all are reported.", 1)
_SKIP = flags.DEFINE_multi_string("skip", [], "Measurements to leave out, such as 'compiled, checkpoint, cold'.")
_REPORT = command_line.report_flag()
_WORKER = flags.DEFINE_string("worker", None, "Internal: what this process is to measure.")
_SPAWNED = flags.DEFINE_float("spawned", 0.0, "Internal: when it was started.")

_READERS = 8
_CHUNK = 16 << 20
_GOAL_SECONDS, _GOAL_BYTES = 20.0, 60e9


def _model() -> Path:
    return command_line.model_path(_MODEL.value)


def _exported() -> Path:
    return Path(_DIRECTORY.value) / "dsv4jax-startup"


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def _sizes() -> tuple[ModelConfig, Sizes]:
    if _LAYERS.value:
        cfg = reduced_config(_LAYERS.value, n_routed_experts=_EXPERTS.value, engram_vocab_size=1000)
    else:
        cfg = ModelConfig.from_checkpoint(_model())
    return cfg, check_sizes(cfg, embedded=not (_LAYERS.value or _MODEL.value))


def _export() -> None:
    """Compiles and writes programs and weights."""
    use_virtual_devices(RANKS.value)
    cfg, sizes = _sizes()
    shape = make_shape(cfg, sizes)
    params = (
        random_params(cfg, shape.numerics) if _LAYERS.value else load_engine_params(_model(), cfg, shape, shape.layout)
    )
    jax.block_until_ready(params)
    begin = time.time()
    programs = Programs(cfg, shape.cache, shape.buckets, shape.numerics, shape.layout, **shape.slots_of_experts)
    compiled = time.time()
    export_steps(_exported(), cfg, shape, params=params, compiled=programs.compiled, xla_flags=_flags())
    written = time.time()
    # Nothing is measured of programs that do something else.
    loaded = load(_exported(), xla_flags=_flags()).programs()
    compare_programs(programs, loaded, params, **shape.slots_of_experts)
    memory = sum(array.nbytes for array in jax.tree.leaves(params))
    _say(
        device=jax.devices()[0].device_kind,
        programs=len(programs.compiled),
        implementation=shape.numerics.implementation,
        compile_seconds=compiled - begin,
        export_seconds=written - compiled,
        weight_bytes=memory,
    )


def _measure(programs_from: str, weights_from: str) -> None:
    """Goes to the first token, and says when each phase ended."""
    ends, compiled = {"imports": time.time()}, []

    def note(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    manifest = read_manifest(_exported())
    cfg, shape = manifest.config, manifest.shape
    use_virtual_devices(shape.devices)
    jax.devices()
    ends["devices"] = time.time()
    if programs_from == "loaded":
        with forbid_tracing():
            programs = load(_exported(), xla_flags=_flags()).programs()
    else:
        programs = Programs(
            cfg, shape.cache, shape.buckets, shape.numerics, shape.layout, **shape.slots_of_experts,
            progress=False,
        )  # fmt: skip
    ends["programs"] = time.time()
    if weights_from == "snapshot":
        params = load_weights(_exported(), manifest, shape.layout)
    else:
        params = load_engine_params(_model(), cfg, shape, shape.layout, progress=False)
    jax.block_until_ready(params)
    ends["weights"] = time.time()
    prompt = np.arange(3, 67, dtype=np.int32)
    generator = EngineGenerator(
        shape, programs, params, [prompt], max_tokens=1, sampling=RequestSampling(temperature=0.0), eos_id=1
    )
    next(generator.run())
    ends["first token"] = time.time()
    begin, phases = _SPAWNED.value, {}
    for name, end in ends.items():
        phases[name], begin = end - begin, end
    _say(
        total=ends["first token"] - _SPAWNED.value,
        phases=phases,
        cpu_seconds=time.process_time(),
        compilations=len(compiled),
        compile_seconds=sum(compiled),
    )


def _say(**values: object) -> None:
    print("RESULT", json.dumps(values), flush=True)


def _child(worker: str) -> dict:
    """What a process of this script says."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--worker={worker}", f"--spawned={time.time()}"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        raise RuntimeError(f"{worker}: exit code {process.returncode}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def _files(*directories: Path) -> list[Path]:
    return [file for directory in directories for file in directory.rglob("*") if file.is_file()]


def _forget(files: list[Path]) -> None:
    """Takes files out of the page cache."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> int:
    buffer, size = bytearray(_CHUNK), 0
    with open(file, "rb", buffering=0) as opened:
        while read := opened.readinto(buffer):
            size += read
    return size


def _read_rate(files: list[Path]) -> float:
    """Bytes per second, by several threads."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        size = sum(pool.map(_read, files))
    return size / (time.perf_counter() - begin)


_PHASES = ("imports", "devices", "programs", "weights", "first token")


def _empty_result() -> Result:
    """What is filled."""
    given = conditions(
        model=f"random weights of {_LAYERS.value} layers" if _LAYERS.value else _MODEL.value or "the embedded model",
        layout=f"{RANKS.value} ranks",
        flags=flag_values(globals()),
        seed=0,
        environment=read_manifest(_exported()).environment,
    )
    return Result(
        "startup",
        given,
        keys={"startups": ("name",), "reads": ("state",)},
        ceiling={"what": "table reads: plain reads of the weights by several threads, measured in the same run"},
        plots=[Plot("stacked", "From the start to the first token", "startups", "name", _PHASES, Axis("measurement"),
                    Axis("time", "s"))],
    )  # fmt: skip


def _run(result: Result) -> None:
    """All measurements."""
    weights = _files(_exported() / "weights")
    for state in ("cold", "warm"):
        if state == "cold":
            _forget(weights)
        rate = _read_rate(weights)
        result.add_row("reads", {"state": state, "bytes_per_second": rate})
        print(f"plain reads of {len(weights)} files, {state}: {rate / 1e9:.2f} GB/s", flush=True)
    sources = ("snapshot",) if _LAYERS.value else ("checkpoint", "snapshot")
    columns = ("total", *_PHASES, "CPU", "compiling")
    print(f"{'seconds':32}" + "".join(f"{name:>13}" for name in columns))
    for programs_from in ("loaded", "compiled"):
        for weights_from in sources:
            for state in ("cold", "warm"):
                name = f"{programs_from}, {weights_from}, {state}"
                for _ in range(0 if name in _SKIP.value else _REPEATS.value):
                    if state == "cold":
                        _forget(_files(_exported(), *([_model()] if weights_from == "checkpoint" else [])))
                    measured = _child(f"{programs_from} {weights_from}")
                    row = {"total": measured["total"], **measured["phases"], **measured}
                    del row["phases"]
                    result.add_row("startups", {"name": name, **row})
                    seconds = (
                        *(row[phase] for phase in ("total", *_PHASES)),
                        row["cpu_seconds"],
                        row["compile_seconds"],
                    )
                    print(f"{name:32}" + "".join(f"{value:13.2f}" for value in seconds), flush=True)


def verdicts(result: Result, weight_bytes: int) -> list[str]:
    """How long each way to the first token took, and whether loaded programs with the snapshot reach the goal."""
    found, rates = [], {row["state"]: row["bytes_per_second"] for row in result.rows["reads"]}
    size = f"{weight_bytes / 1e9:.3g} GB of weights"
    for name in dict.fromkeys(row["name"] for row in result.rows.get("startups", [])):
        rows = [row for row in result.rows["startups"] if row["name"] == name]
        total, compiling = (statistics.median(row[column] for row in rows) for column in ("total", "compile_seconds"))
        found.append(f"{name}: the first token after {total:.1f} s with {size}, {compiling:.2f} s of compilation")
        if not name.startswith("loaded, snapshot"):
            continue
        read, goal = weight_bytes / rates[name.split(", ")[-1]], f"under {_GOAL_SECONDS:g} s for 60 GB, none compiled"
        if weight_bytes < 0.9 * _GOAL_BYTES:
            judged = f"not judged on {size}"
        elif total < _GOAL_SECONDS and not any(row["compilations"] for row in rows):
            judged = "met"
        else:
            judged = "not met" + (", the disk does not allow it" if read >= _GOAL_SECONDS else "")
        found.append(f"{name}: goal {goal}: {judged}; a plain read of the weights takes {read:.1f} s")
    return found


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    if _WORKER.value == "export":
        _export()
    elif _WORKER.value:
        _measure(*_WORKER.value.split())
    else:
        _sizes()  # finds wrong flags before any process starts
        exported = None
        if not (_KEEP.value and _exported().exists()):
            shutil.rmtree(_exported(), ignore_errors=True)
            exported = _child("export")
            print(json.dumps(exported), flush=True)
        with reported(_REPORT.value, _empty_result()) as result:
            if exported is not None:
                result.add_row("export", exported)
            _run(result)
            result.verdicts += verdicts(result, sum(file.stat().st_size for file in _files(_exported() / "weights")))
        if not _KEEP.value:
            shutil.rmtree(_exported())


if __name__ == "__main__":
    command_line.run(main)
