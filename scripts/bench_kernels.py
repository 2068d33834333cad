"""Times every kernel at the released shapes beside ceilings and peers of the same run.

    python scripts/bench_kernels.py --output benchmarks/kernels.json
    python scripts/bench_kernels.py --only topk --only sparse_attention --output /tmp/kernels.json

Each line is the median device time of a call (its kernels, gaps excluded), the share of the larger floor (bytes over
the copy rate, products over the matmul rate), and the goal. Needs a GPU.
"""

import datetime
import importlib
import importlib.util
import json
import pkgutil
from pathlib import Path

import jax
from absl import app, flags

import pallas_kernels
from pallas_kernels.timing import Case, ceilings, device_microseconds

_ONLY = flags.DEFINE_multi_string("only", [], "Operations (folders of pallas_kernels); all by default.")
_LAUNCHES = flags.DEFINE_integer("launches", 12, "Timed calls per case.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)


def cases() -> list[Case]:
    """The benchmark cases of all chosen operations."""
    known = [
        info.name
        for info in pkgutil.iter_modules(pallas_kernels.__path__)
        if info.ispkg and importlib.util.find_spec(f"pallas_kernels.{info.name}.benchmark")
    ]
    unknown = set(_ONLY.value) - set(known)
    if unknown:
        raise app.UsageError(f"--only={sorted(unknown)[0]}: must be one of {', '.join(known)}")
    chosen = [name for name in known if not _ONLY.value or name in _ONLY.value]
    return [case for name in chosen for case in importlib.import_module(f"pallas_kernels.{name}.benchmark").cases()]


def main(_) -> None:
    if jax.default_backend() != "gpu":
        raise app.UsageError(f"the default device is {jax.default_backend()}: kernels are timed on a GPU")
    limits = ceilings()
    print(", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in limits.items()), flush=True)
    chosen, records = cases(), []

    for case in chosen:
        fn, argument_sets = case.make()
        measured = device_microseconds(fn, argument_sets, _LAUNCHES.value)
        floor = max(case.bytes / limits["copy"], case.flops / limits[case.flops_type]) * 1e6
        records.append({"case": case.name, "microseconds": measured, "floor": floor, "goal": case.goal})
        goal = "" if case.goal is None else f"  goal {case.goal:7.1f}"
        print(f"{case.name:64s} {measured:8.1f} us {floor / measured:6.1%} of the ceiling{goal}", flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "ceilings": limits,
        "cases": records,
    }
    Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
