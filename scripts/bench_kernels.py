"""Times every kernel at the released shapes beside ceilings and peers of the same run.

    python scripts/bench_kernels.py --report out
    python scripts/bench_kernels.py --only topk --only sparse_attention --report out

Each line is the median device time of a call (its kernels, gaps excluded), the share of the larger floor (bytes over
the copy rate, products over the matmul rate), and the goal. Needs a GPU.
"""

import importlib
import importlib.util
import pkgutil

import command_line
import jax
from absl import flags
from tqdm import tqdm

import pallas_kernels
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result
from pallas_kernels.timing import Case, ceilings, device_microseconds

_ONLY = flags.DEFINE_multi_string("only", [], "Operations (folders of pallas_kernels); all by default.")
_LAUNCHES = flags.DEFINE_integer("launches", 12, "Timed calls per case.", lower_bound=1)
_REPORT = command_line.report_flag()


def cases() -> list[Case]:
    """The benchmark cases of all chosen operations."""
    known = [
        info.name
        for info in pkgutil.iter_modules(pallas_kernels.__path__)
        if info.ispkg and importlib.util.find_spec(f"pallas_kernels.{info.name}.benchmark")
    ]
    for name in _ONLY.value:
        if name not in known:
            raise ValueError(f"--only={name}: must be one of {', '.join(known)}")
    chosen = [name for name in known if not _ONLY.value or name in _ONLY.value]
    return [case for name in chosen for case in importlib.import_module(f"pallas_kernels.{name}.benchmark").cases()]


def main() -> None:
    if jax.default_backend() != "gpu":
        raise ValueError(f"the default device is {jax.default_backend()}: kernels are timed on a GPU")
    chosen, limits = cases(), ceilings()
    print(", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in limits.items()), flush=True)
    given = conditions(
        model="kernels at the released shapes",
        layout="one device",
        flags=flag_values(globals()),
        seed=0,
        devices=jax.devices(),
    )
    result = Result(
        "kernels",
        given,
        keys={"cases": ("case",)},
        control={"what": "column floor: bytes over the copy rate or products over the matmul rate, the larger, in us"},
        ceiling={"what": "measured in the same run, bytes and operations per second", **limits},
        plots=[Plot("bar", "Kernels and their floors", "cases", "case", ("microseconds", "floor"), Axis("case"),
                    Axis("time", "us"))],
    )  # fmt: skip
    with reported(_REPORT.value, result):
        for case in tqdm(chosen, unit="case"):
            fn, argument_sets = case.make()
            measured = device_microseconds(fn, argument_sets, _LAUNCHES.value)
            floor = max(case.bytes / limits["copy"], case.flops / limits[case.flops_type]) * 1e6
            result.add_row("cases", {"case": case.name, "microseconds": measured, "floor": floor, "goal": case.goal})
            goal = "" if case.goal is None else f"  goal {case.goal:7.1f}"
            tqdm.write(f"{case.name:64s} {measured:8.1f} us {floor / measured:6.1%} of the ceiling{goal}")
        goals = [row for row in result.rows["cases"] if row["goal"] is not None]
        met = sum(row["microseconds"] <= row["goal"] for row in goals)
        result.verdicts.append(f"{met} of {len(goals)} goals are met")


if __name__ == "__main__":
    command_line.run(main)
