"""What data-parallel ranks cost each other: requests at once or one rank after the other, and slow hosts.

    python scripts/bench_ranks.py --ranks 4 --report out
    python scripts/bench_ranks.py --ranks 2 --executor model --seconds 60 --lag 5 --requests 4 --prompt_tokens 300 \\
        --output_tokens 60 --max_model_len 1024 --slots 4 --prefill_tokens 256 --report out
    python scripts/bench_ranks.py --ranks 8 --sections placement --sections chunks --sections traffic

On the simulated executor, or on a model over as many devices. `docs/bench/ranks.md` says what each section isolates;
the last three are policies of the scheduler on the virtual clock.
"""

import functools
import itertools

import command_line
from absl import flags
from bench_system import MAX_MODEL_LEN, RANKS, SEED, SLOTS, make_system, system_ceiling, system_conditions

from dsv4jax.bench.engines.placement import balanced_chunks, placement, traffic
from dsv4jax.bench.engines.ranks import Load, RanksRun, loss, run_lag, run_slow_hosts
from dsv4jax.bench.engines.system import System
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.traffic.counting import Window

_SECTIONS = flags.DEFINE_multi_enum(
    "sections",
    ["lag", "slow_rank"],
    ["lag", "slow_rank", "placement", "chunks", "traffic"],
    "What to measure; may be repeated.",
)
_LAG = flags.DEFINE_multi_float("lag", [5.0], "Seconds by which each rank begins later than the one before.", 0.0)
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds of a run, on the executor's clock.", 0.1)
_WARM_UP = flags.DEFINE_float("warm_up", 10.0, "Seconds of it that do not count, after the last rank began.", 0.0)
_REQUESTS = flags.DEFINE_integer("requests", 8, "Requests of a rank at the same time.", 1)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 4000, "Tokens of a prompt, on average.", 1)
_OUTPUT = flags.DEFINE_integer("output_tokens", 400, "Tokens that a request generates, on average.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Runs of each point, each with other requests.", 1)
_DELAYS = flags.DEFINE_multi_float("delay_ms", [1.0, 3.0, 10.0], "Milliseconds by which a host is late.", 0.0)
_SLOW_SECONDS = flags.DEFINE_float("slow_seconds", 20.0, "As --seconds, of the runs with slow hosts.", 0.1)
_EVERY = flags.DEFINE_integer("slow_every", 1, "A slow host is late with one step of so many.", 1)
_LONG = flags.DEFINE_integer("long_prompt", 200_000, "Tokens of the long prompt of section chunks.", 1)
_HOURS = flags.DEFINE_float("hours", 0.05, "Virtual hours of section traffic.", 0.0001)
_RATE = flags.DEFINE_float("rate", 2.0, "Requests per virtual second of section traffic.", 0.01)
_REPORT = command_line.report_flag()

_FITS = 0.25  # relative error of the fitted cost of steps, beyond which it explains nothing
_PLOTS = [
    Plot(
        "bar",
        "Tokens per second of a rank, mirrored and lagged",
        "runs",
        "lag_s",
        ("computed_input_tokens_per_second_per_rank", "output_tokens_per_second_per_rank"),
        Axis("lag of each rank behind the one before", "s"),
        Axis("tokens of a rank", "tokens/s"),
    ),
    Plot(
        "stacked",
        "What the lag costs, and what of it imbalance explains",
        "loss",
        "lag_s",
        ("lost_by_imbalance", "lost_otherwise"),
        Axis("lag of each rank behind the one before", "s"),
        Axis("share of the mirror's tokens per second"),
    ),
]
_SLOW_PLOTS = [
    Plot(
        "line",
        "A step of all ranks behind slow hosts",
        "slow_rank",
        "delay_ms",
        ("step_ms",),
        Axis("by how much a host is late", "ms"),
        Axis("step", "ms"),
        by=("slow_ranks", "steps_in_flight"),
    ),
]


def load(seconds: float, repeat: int = 0) -> Load:
    """The load that the flags say, for so long."""
    return Load(
        requests=_REQUESTS.value,
        prompt_tokens=_PROMPT.value,
        output_tokens=_OUTPUT.value,
        seconds=seconds,
        warm_up=_WARM_UP.value,
        seed=SEED.value + repeat,
    )


def run_mirror_and_lag(result: Result, system: System) -> None:
    """Repeats of the mirror and of each lag, all in the same window."""
    ranks = system.config.ranks
    window = load(_SECONDS.value).window(max(_LAG.value), ranks)
    for repeat in range(_REPEATS.value):
        given = load(_SECONDS.value, repeat)
        mirror = _lag_row(result, system, given, 0.0, window)
        for lag in _LAG.value:
            lagged = _lag_row(result, system, given, lag, window)
            lost = loss(mirror, lagged)
            result.add_row("loss", {"lag_s": lag, **lost.row()})
            if not repeat:
                result.verdicts.append(
                    f"a lag of {lag:g} s loses {lost.both:.1%} of the mirror's tokens per second; ranks that wait for"
                    f" the slowest explain {lost.by_imbalance:.1%}"
                )
                if lost.cost_error > _FITS:
                    result.verdicts.append(
                        "the explanation does not hold here: what steps cost was fitted to the mirror and misses those"
                        f" of the lag by {lost.cost_error:.0%}"
                    )
    result.control = {"control": "mirror: all ranks at once", **result.rows["runs"][0]}


def _lag_row(result: Result, system: System, given: Load, lag: float, window: Window) -> RanksRun:
    """Adds the row of a run and returns the run; of one that Ctrl-C cut short, its requests only."""
    run = run_lag(system, given, lag, window)
    of_run = {"lag_s": lag, "repeat": given.seed - SEED.value}
    result.add_requests([{**of_run, **m.without_chunks()} for m in run.run.measurements])
    if run.run.interrupted:
        raise KeyboardInterrupt
    row = run.row(system.config.ranks)
    result.add_row("runs", {"lag_s": lag, **row})
    if row["invalid"]:
        result.verdicts.append(f"invalid, lag {lag:g} s: {row['invalid']}")
    return run


def run_slow(result: Result, system: System) -> None:
    """The mirror behind hosts that are late: none of them, one of them, all of them."""
    ranks, given = system.config.ranks, load(_SLOW_SECONDS.value)
    points = [(0, 0.0), *itertools.product(sorted({1, ranks}), _DELAYS.value)]
    for depth in (2, 1):
        for slow, delay in points:
            names = {"slow_ranks": slow, "delay_ms": delay, "steps_in_flight": depth}
            options = dict(delay=delay / 1e3, slow=slow, every=_EVERY.value, depth=depth)
            run, waits = run_slow_hosts(system, given, **options)
            result.add_requests([{**names, **m.without_chunks()} for m in run.run.measurements])
            if run.run.interrupted:
                raise KeyboardInterrupt
            row = {**names, **run.row(ranks), **waits}
            if not slow:
                control = row
            row["step_ms_more"] = row["step_ms"] - control["step_ms"]
            row["tokens_per_second_lost"] = 1 - row[_BOTH] / control[_BOTH]
            result.add_row("slow_rank", row)
            if slow == 1 and delay == max(_DELAYS.value):
                result.verdicts.append(
                    f"one host of {ranks} that is {delay:g} ms late with one step of {_EVERY.value} makes steps"
                    f" {row['step_ms_more']:.2f} ms longer with {depth} in flight: all ranks lose"
                    f" {row['tokens_per_second_lost']:.1%} of their tokens"
                )
    result.control = {"control": "no host is late", **result.rows["slow_rank"][0]}


_BOTH = "cached_computed_and_output_tokens_per_second_per_rank"


def run_policies(result: Result) -> None:
    """What the scheduler promises over ranks, on the virtual clock."""
    ranks = RANKS.value
    if "placement" in _SECTIONS.value:
        for row in placement(ranks):
            result.add_row("placement", row)
    if "chunks" in _SECTIONS.value:
        for row in balanced_chunks(ranks, _LONG.value):
            result.add_row("chunks", row)
    if "traffic" in _SECTIONS.value:
        result.add_row("traffic", traffic(_HOURS.value * 3600, _RATE.value, ranks))


def check_flags() -> None:
    """Raises ValueError for what the sections cannot run."""
    sections = set(_SECTIONS.value)
    if RANKS.value < 2 and sections & {"lag", "slow_rank", "placement", "chunks"}:
        raise ValueError(f"--ranks={RANKS.value}: must be at least 2")
    for section, seconds, lag in (("lag", _SECONDS, max(_LAG.value)), ("slow_rank", _SLOW_SECONDS, 0.0)):
        if section in sections:
            load(seconds.value).check(SLOTS.value, MAX_MODEL_LEN.value)
            with command_line.about(seconds):
                load(seconds.value).window(lag, RANKS.value)


def main() -> None:
    check_flags()
    sections = set(_SECTIONS.value)
    system = make_system()
    made = functools.partial(Result, conditions=system_conditions(system, globals()), ceiling=system_ceiling())
    if sections - {"slow_rank"}:
        keys = {"runs": ("lag_s",), "loss": ("lag_s",), "placement": ("traffic", "rule"), "chunks": ("chunks",)}
        with reported(_REPORT.value, made("ranks", keys=keys)) as result:
            if "lag" in sections:
                result.plots = _PLOTS
                run_mirror_and_lag(result, system)
            run_policies(result)
        show(result)
    if "slow_rank" in sections:
        keys = {"slow_rank": ("slow_ranks", "delay_ms", "steps_in_flight")}
        with reported(_REPORT.value, made("slow_rank", keys=keys, plots=_SLOW_PLOTS)) as result:
            run_slow(result, system)
        show(result)


def show(result: Result) -> None:
    """Prints every table, of those with many columns the ones to look at first, and the verdicts."""
    for name, table in result.rows.items():
        shown = _SHOWN.get(name)
        print(f"\n{name}\n{text_table([{c: row[c] for c in shown} for row in table] if shown else table)}")
    print("", *result.verdicts, sep="\n")


_RUN = ("computed_input_tokens_per_second_per_rank", "output_tokens_per_second_per_rank", "step_ms")
_SHOWN = {
    "runs": ("lag_s", *_RUN, "user_speed_inter_token_tokens_per_second", "requests"),
    "loss": ("lag_s", "lost_computed_input", "lost_output", "lost", "lost_by_imbalance", "fit_error_lag"),
    "slow_rank": ("slow_ranks", "delay_ms", "steps_in_flight", "step_ms", "step_ms_more", "tokens_per_second_lost"),
}


if __name__ == "__main__":
    command_line.run(main)
