"""Which widths, batches and drafts serve a workload within targets, by a model of cost.

    python scripts/plan.py --hardware h200 --ttft 1 --user_speed 50 --report out
    python scripts/plan.py --hardware gb300 --exchange ragged --decode_widths 32,72 --host_tables
    python scripts/plan.py --hardware h200 --calibrate out/forward.json --save_hardware mine.json
    python scripts/plan.py --published
    python scripts/plan.py --hardware gb300 --exchange ragged --simulate_hours 1 --ranks 32 --live 64

Prints deployments, best first; `docs/planner.md` says what the numbers rest on. --calibrate takes the result of
`bench_steps.py --profile` on the machine at hand. --published compares the model with published figures.
--simulate_hours runs agents' sessions on the real scheduler and a virtual clock, which closed forms cannot replace.
"""

import dataclasses
import time

import command_line
import numpy as np
from absl import flags

from dsv4jax.bench.planning.calibrate import calibrate, calibration_errors
from dsv4jax.bench.planning.cost_model import HardwareCost
from dsv4jax.bench.planning.hardware import Hardware, load_hardware
from dsv4jax.bench.planning.planner import (
    WIDTHS,
    Plan,
    Sweep,
    Targets,
    Workload,
    load_workload,
    make_plan,
    pareto_front,
)
from dsv4jax.bench.planning.published import published_rows
from dsv4jax.bench.planning.simulation import Traffic, simulate
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, load, text_table
from dsv4jax.bench.results.verdicts import limit
from dsv4jax.bench.traffic.agents import AgentParameters, read_parameters
from dsv4jax.bench.traffic.session_report import latency_rows, summary_row
from dsv4jax.bench.traffic.session_report import verdicts as session_verdicts
from dsv4jax.config import ModelConfig
from sharding.layout import EXCHANGES

_HARDWARE = flags.DEFINE_string("hardware", "h200", "h200, b300, gb300, or a file like theirs.")
_MODEL = flags.DEFINE_string("model", None, "Directory with a config.json. Default: the released sizes.")
_WORKLOAD = flags.DEFINE_string("workload", None, "JSON file with fields of `planner.Workload` that are not default.")
_TTFT = flags.DEFINE_float("ttft", None, "Target: seconds to the first token, on average.")
_USER_SPEED = flags.DEFINE_float("user_speed", None, "Target: tokens per second of a user.")
_DECODE = flags.DEFINE_list("decode_widths", [str(n) for n in WIDTHS], "Devices of a decode group.")
_PREFILL = flags.DEFINE_list("prefill_widths", [str(n) for n in WIDTHS], "Devices of a prefill group.")
_BATCHES = flags.DEFINE_list("batches", [str(n) for n in Sweep.batches], "Requests per decode device.")
_DRAFTS = flags.DEFINE_list("drafts", [str(n) for n in Sweep.drafts], "Drafts verified per step.")
_CHUNKS = flags.DEFINE_list("chunks", [str(n) for n in Sweep.chunks], "Prompt tokens of a prefill step and device.")
_EXCHANGE = flags.DEFINE_enum("exchange", "gather", EXCHANGES, "How tokens reach experts: see sharding/exchange.py.")
_BALANCE = flags.DEFINE_float("balance", 1.0, "Mean load of the ranks' experts / load of the busiest.")
_DRAFT_BALANCE = flags.DEFINE_float("draft_balance", 1.0, "The same for the draft's.")
_UTILIZATION = flags.DEFINE_float("utilization", Sweep.utilization, "Share of the time that prefill is busy.")
_FRACTION = flags.DEFINE_float("fraction", Sweep.fraction, "Share of a device's memory that may be used.")
_WORKSPACE = flags.DEFINE_float("workspace_gb", Sweep.workspace / 1e9, "Kept for the programs' temporary memory.")
_HOST_TABLES = flags.DEFINE_bool("host_tables", False, "The Engram tables are in host memory.")
_TOP = flags.DEFINE_integer("top", 20, "Deployments to print.", 1)
_CALIBRATE = flags.DEFINE_string("calibrate", None, "Result of bench_steps.py --profile to take constants from.")
_SAVE = flags.DEFINE_string("save_hardware", None, "Write the hardware, calibrated if so, to this file.")
_PUBLISHED = flags.DEFINE_bool("published", False, "Only compare the model with published figures.")
_HOURS = flags.DEFINE_float("simulate_hours", None, "Only simulate sessions of agents, so many virtual hours.")
_RANKS = flags.DEFINE_integer("ranks", 32, "Ranks of the simulation, which do both prefill and decode.", 1)
_LIVE = flags.DEFINE_integer("live", 64, "Its sessions at a time.", 1)
_SLOTS = flags.DEFINE_integer("slots", 16, "Its requests at a time, of a rank.", 1)
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", 8192, "Most prompt tokens of its steps, of a rank.", 128)
_AGENTS = flags.DEFINE_string("agents", None, "JSON file with parameters of its sessions that are not default.")
_SEED = flags.DEFINE_integer("seed", 0, "Of its sessions.", 0)
_REPORT = command_line.report_flag()

_KEYS = {"points": ("decode", "batch", "drafts"), "published": ("figure", "conditions"), "calibration": ("step",)}
_PARETO = Plot(
    kind="pareto",
    title="Output of all devices against the speed of a user",
    table="points",
    x="user_speed",
    y=("output_per_gpu",),
    x_axis=Axis("speed of a user", "tokens/s", log=True),
    y_axis=Axis("output per GPU, prefill included", "tokens/s", log=True),
    by=("decode",),
)
_HIDDEN = ("prefill_limit", "computed_per_gpu", "cached_per_gpu", "decode_tokens_per_second")


def sweep() -> Sweep:
    """What the flags ask for."""
    lists = {
        flag.name: tuple(command_line.numbers(flag.name, flag.value, 0 if flag is _DRAFTS else 1))
        for flag in (_DECODE, _PREFILL, _BATCHES, _DRAFTS, _CHUNKS)
    }
    return Sweep(
        **lists,
        exchange=_EXCHANGE.value,
        balance=_BALANCE.value,
        draft_balance=_DRAFT_BALANCE.value,
        utilization=_UTILIZATION.value,
        fraction=_FRACTION.value,
        workspace=_WORKSPACE.value * 1e9,
        tables_on_device=not _HOST_TABLES.value,
    )


def verdicts(plan: Plan, targets: Targets) -> list[str]:
    """Sentences that sum a plan up."""
    lines = []
    if not plan.points:
        lines.append("nothing fits into memory")
    else:
        first = plan.points[0]
        about = (
            f"decode DEP{first.width} with {first.batch} requests per device and {first.drafts} drafts, prefill"
            f" DEP{first.prefill.width} on {first.prefill_share:.0%} of the devices"
        )
        numbers = (
            f"{first.output_tokens_per_second:,.0f} output tokens/s per device, a user gets {first.user_speed:.0f} per"
            f" second, the first after {first.prefill.ttft:.2f} s"
        )
        if first.misses:
            lines.append(f"no deployment meets the targets; the one with the most output ({about}): {numbers}")
        else:
            lines.append(f"{about}: {numbers}")
        of_decode = "waits for the host" if first.time.limit[0] == "host" else limit(first.time.parts, "the step")
        lines += [f"decode: {of_decode}", f"prefill: {limit(first.prefill.time.parts, 'the step')}"]
    for group in dict.fromkeys(one.group for one in plan.refused):
        least, *others = sorted((one for one in plan.refused if one.group == group), key=lambda one: one.memory.total)
        memory, more = least.memory, f", nor with {len(others)} others" if others else ""
        lines.append(
            f"{group} does not fit with {least.size}{more}: {memory.total / 1e9:.0f} of at most"
            f" {memory.usable / 1e9:.0f} GB"
        )
    return lines


def run_plan(
    result: Result, cfg: ModelConfig, hardware: Hardware, workload: Workload, targets: Targets, tried: Sweep
) -> None:
    """Fills the result with the sweep's deployments, and prints the best."""
    plan = make_plan(cfg, hardware, workload, targets, tried)
    rows = [point.as_row() for point in plan.points]
    front = {id(point) for point in pareto_front(plan.points)}
    for place, (row, point) in enumerate(zip(rows, plan.points, strict=True)):
        row |= {"place": place + 1, "on_front": id(point) in front}
    result.add_rows("points", rows)
    result.add_rows("refused", [one.as_row() for one in plan.refused])
    result.verdicts += verdicts(plan, targets)
    result.plots.append(_PARETO)
    if plan.points:
        first = plan.points[0]
        ideal = HardwareCost(cfg, hardware.at_its_rates(), first.width, exchange=_EXCHANGE.value)
        bare = ideal.decode(first.batch, 1 + first.drafts, workload.context, first.drafts > 0)
        seconds = bare.device - bare.parts["exchange"]
        result.control = {
            "what": "the best deployment's decode step at the machine's rates, without exchange",
            "step_ms": 1e3 * seconds,
        }
    shown = ("place", *(name for name in (rows[0] if rows else {}) if name not in (*_HIDDEN, "place")))
    print(text_table([{name: row[name] for name in shown if name in row} for row in rows[: _TOP.value]]))


def run_simulation(result: Result, cfg: ModelConfig, hardware: Hardware, workload: Workload, tried: Sweep) -> None:
    """Fills the result with what came of the sessions."""
    agents = read_parameters(_AGENTS.value) if _AGENTS.value else AgentParameters()
    traffic = Traffic(
        live=_LIVE.value,
        seconds=3600 * _HOURS.value,
        slots=_SLOTS.value,
        prefill_tokens=_PREFILL_TOKENS.value,
        acceptance=workload.acceptance[: max(tried.drafts)],
        agents=agents,
        seed=_SEED.value,
    )
    cost = HardwareCost(
        cfg,
        hardware,
        _RANKS.value,
        exchange=_EXCHANGE.value,
        balance=_BALANCE.value,
        draft_balance=_DRAFT_BALANCE.value,
    )
    begin, cpu = time.perf_counter(), time.process_time()
    run, summary = simulate(cost, traffic, tried)
    took = {"wall_seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    result.interrupted |= run.interrupted
    steps = {
        "steps": len(run.steps),
        "step_ms_mean": 1e3 * float(np.mean([step.device_seconds for step in run.steps])),
        "decoding_mean": float(np.mean([step.decode_requests for step in run.steps])),
    }
    result.add_row("simulation", {"virtual_seconds": run.ended, **took, **steps, **summary_row(summary)})
    result.add_rows("latencies", latency_rows(summary))
    result.verdicts += session_verdicts(summary)
    print(text_table([{"what": name, "value": value} for name, value in result.rows["simulation"][0].items()]))
    print(text_table(result.rows["latencies"]))


def main() -> None:
    cfg = ModelConfig.from_checkpoint(_MODEL.value) if _MODEL.value else ModelConfig()
    hardware = load_hardware(_HARDWARE.value)
    workload = load_workload(_WORKLOAD.value) if _WORKLOAD.value else Workload()
    targets = Targets(ttft=_TTFT.value, user_speed=_USER_SPEED.value)
    tried, errors = sweep(), []
    if _CALIBRATE.value:
        measured = load(_CALIBRATE.value)
        hardware = calibrate(hardware, measured, cfg)
        errors = calibration_errors(hardware, measured, cfg)
        print(text_table(errors))
    if _SAVE.value:
        hardware.save(_SAVE.value)
    result = Result(
        "plan",
        conditions(
            model=_MODEL.value or "released sizes",
            layout="groups of DEP",
            flags=flag_values(globals()),
            seed=_SEED.value if _HOURS.value else None,
            workload=dataclasses.asdict(workload),
            targets=dataclasses.asdict(targets),
            hardware=hardware.as_dict(),
        ),
        keys=_KEYS,
        ceiling=hardware.as_ceiling(),
    )
    with reported(_REPORT.value, result):
        result.add_rows("calibration", errors)
        if _PUBLISHED.value:
            result.add_rows("published", published_rows(cfg))
            print(text_table(result.rows["published"]))
        elif _HOURS.value is not None:
            run_simulation(result, cfg, hardware, workload, tried)
        else:
            run_plan(result, cfg, hardware, workload, targets, tried)
        for line in result.verdicts:
            print(line)


if __name__ == "__main__":
    command_line.run(main)
