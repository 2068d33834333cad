"""Decoding through the engine beside the same step alone, the gap by its causes, and what a step costs the host.

    python scripts/bench_decode.py --points 8x1024 --report out
    python scripts/bench_decode.py --points 16x131072 --model /path/to/checkpoint --ranks 8 --skew 0.5 --report out
    python scripts/bench_decode.py --sections host --host_requests 64 --host_requests 1024 --report out

`docs/bench/decode.md` says what each column isolates. Section gap runs the embedded model by default, a checkpoint with
--model, or with --executor=simulated the scheduler on the virtual clock; section host needs no device.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import command_line
from absl import flags
from bench_system import EXECUTOR, RANKS, acceptance, make_system, system_ceiling, system_conditions

from dsv4jax.bench.engines.host_cost import host_cost
from dsv4jax.bench.engines.host_gap import decode_gap, decode_length
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.compilation_cache import use_compilation_cache

_SECTIONS = flags.DEFINE_multi_enum("sections", ["gap"], ["gap", "host"], "What to measure; may be repeated.")
_POINTS = flags.DEFINE_list("points", ["8x1024"], "Requests per rank x context, of section gap.")
_STEPS = flags.DEFINE_integer("steps", 40, "Steps that are timed.", 4)
_SKEW = flags.DEFINE_float(
    "skew",
    0.0,
    "Contexts of ranks differ: the first has less than the mean by this share, the last one more.",
    0.0,
    0.99,
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of a measurement, of whose times the least count.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each point.", 1)
_HOST = flags.DEFINE_multi_integer("host_requests", [1, 64, 256, 1024], "Running requests of section host.", 1)
_LONG = flags.DEFINE_integer("long_prompt", 0, "Tokens of one of these requests; 0 for as few as the others have.", 0)
_CACHE = command_line.compile_cache_flag()
_REPORT = command_line.report_flag()

flags.set_default(EXECUTOR, "model")

_KEYS = {
    "gap": ("requests_per_rank", "context", "drafts", "skew"),
    "host": ("requests", "ranks", "long_prompt"),
}
_CAUSES = ("ranks", "dispatch", "readback", "host")
_PLOTS = [
    Plot(
        "stacked",
        "A decode step of the engine",
        "gap",
        "point",
        ("balanced_program_milliseconds", *(f"gap_{cause}_milliseconds" for cause in _CAUSES)),
        Axis("requests of a rank x context"),
        Axis("time", "ms"),
    ),
    Plot(
        "line",
        "Host time of a decode step whose device takes no time",
        "host",
        "requests",
        ("mean_ms", "max_ms"),
        Axis("running requests", log=True),
        Axis("host time", "ms", log=True),
    ),
]


def run_gap(result: Result, points: Sequence[tuple[int, int]]) -> None:
    """Every point, on one system with a program for each."""
    steps, drafts = _STEPS.value, len(acceptance())
    lengths = tuple(decode_length(context, steps, drafts, _SKEW.value) for _, context in points)
    sizes = dict(
        slots=max(requests for requests, _ in points),
        max_model_len=max(lengths),
        contexts=lengths,
        decode_requests=tuple(requests for requests, _ in points),
    )
    system = make_system(random_contents=True, sizes=sizes)
    result.conditions, result.ceiling = system_conditions(system, globals()), system_ceiling()
    for requests, context in points:
        rows = []
        for _ in range(_REPEATS.value):
            row = decode_gap(
                system, requests=requests, context=context, steps=steps, skew=_SKEW.value, rounds=_ROUNDS.value
            )
            rows.append({"point": f"{requests} x {context}", **row})
            result.add_row("gap", rows[-1])
        result.verdicts.append(_verdict(requests, context, rows))
    result.control = {"control": "balanced_program: the program alone, every rank with the mean context", **rows[-1]}
    system.close()


def _verdict(requests: int, context: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the medians of repeats."""
    columns = ("engine_milliseconds", "balanced_program_milliseconds", *(f"gap_{c}_milliseconds" for c in _CAUSES))
    middle = {name: statistics.median(row[name] for row in rows) for name in columns}
    spread = max(max(row[name] for row in rows) - min(row[name] for row in rows) for name in columns[:2])
    engine, program = (middle[name] for name in columns[:2])
    text = f"{requests} requests at {context:,}: a step takes {engine:.2f} ms, the program alone {program:.2f}"
    if engine - program <= spread:
        return f"{text}; the gap is within the spread of repeats, {spread:.2f} ms"
    worst = max(_CAUSES, key=lambda cause: middle[f"gap_{cause}_milliseconds"])
    return (
        f"{text}, {program / engine:.0%} of it; of the gap most is for {_NAMES[worst]},"
        f" {middle[f'gap_{worst}_milliseconds']:.2f} ms"
    )


_NAMES = {
    "ranks": "waiting for the rank with the longest contexts",
    "dispatch": "making and dispatching batches",
    "readback": "reading samples back",
    "host": "deciding and taking results",
}


def main() -> None:
    use_compilation_cache(_CACHE.value)
    sections = _SECTIONS.value
    points = [point for text in _POINTS.value for point in command_line.sizes_of("points", text, (2,))]
    if _SKEW.value and RANKS.value == 1:
        raise ValueError(f"--skew={_SKEW.value}: must be 0 with --ranks=1")
    plots = [plot for plot in _PLOTS if plot.table in sections]
    made = Result("decode", system_conditions(None, globals()), keys=_KEYS, plots=plots)
    with reported(_REPORT.value, made) as result:
        if "gap" in sections:
            run_gap(result, points)
        if "host" in sections:
            for requests in _HOST.value:
                for row in host_cost(requests, RANKS.value, _REPEATS.value, long_prompt=_LONG.value):
                    result.add_row("host", row)
    for name, rows in result.rows.items():
        print(f"\n{name}\n{text_table(rows)}")
    print("", *result.verdicts, sep="\n")


if __name__ == "__main__":
    command_line.run(main)
