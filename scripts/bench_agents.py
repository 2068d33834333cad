"""Sessions of agents in a closed loop: throughput, latencies, and cached tokens beside what could be cached.

python scripts/bench_agents.py --seconds 600                            # simulated, on a virtual clock
python scripts/bench_agents.py --executor model --scale 0.01 --live 4   # the embedded model in this process
python scripts/bench_agents.py --url http://127.0.0.1:8000 --live 64    # any compatible server
python scripts/bench_agents.py --write_trace out.jsonl --sessions 100   # generated sessions as a file

Sessions are generated (--parameters, --seed) or come from --trace, which starts over at its end. With --url, the key
for the server is taken from DSV4JAX_API_KEY.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command_line
from absl import flags
from bench_system import EXECUTOR, MAX_MODEL_LEN, RANKS, SEED, SLOTS, make_system, system_ceiling, system_conditions

from dsv4jax.bench.engines.system import PAGE
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.result import Result, text_of, text_table
from dsv4jax.bench.traffic.agents import AgentParameters, generate_sessions, read_parameters, trace_statistics
from dsv4jax.bench.traffic.counting import Window, summarize
from dsv4jax.bench.traffic.driver import Workload, run_engine
from dsv4jax.bench.traffic.records import Measurement
from dsv4jax.bench.traffic.session_report import (
    KEYS,
    PLOTS,
    context_rows,
    latency_rows,
    prompt_row,
    request_rows,
    summary_row,
    throughput_rows,
    verdicts,
)
from dsv4jax.bench.traffic.sessions import FIRST_MARKERS, SessionWorkload
from dsv4jax.bench.traffic.trace_file import Session, read_trace, write_trace

_REPORT = command_line.report_flag()
_PARAMETERS = flags.DEFINE_string(
    "parameters", None, "JSON file with parameters of the generator that are not default."
)
_TRACE = flags.DEFINE_string("trace", None, "Trace file, in the place of the generator.")
_WRITE_TRACE = flags.DEFINE_string("write_trace", None, "Write --sessions generated sessions to this file, and end.")
_SESSIONS = flags.DEFINE_integer("sessions", None, "Sessions after which no new ones begin.", 1)
_SCALE = flags.DEFINE_float("scale", 1.0, "All tokens and times of sessions times this, for small machines.", 1e-4, 1.0)
_LIVE = flags.DEFINE_integer("live", 16, "Sessions at a time.", 1)
_FROM_THE_MIDDLE = flags.DEFINE_bool("from_the_middle", True, "The first sessions start at a turn chosen at random.")
_COLD = flags.DEFINE_bool("cold_first_turns", False, "Shared prefixes are not shared by first turns.")
_RUN = flags.DEFINE_integer(
    "run",
    None,
    "Runs with different numbers share no prefix. Default: 0; with --url, which may have served before, the time.",
    0,
)
_IDS = flags.DEFINE_list("ids", ["300", "800"], "First token id of prompts, and the one behind the last.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Length of the window that counts.", 1e-3)
_WARM_UP = flags.DEFINE_float("warm_up_seconds", None, "Time before it. Default: a quarter of --seconds.", 0.0)

_URL = flags.DEFINE_string("url", None, "A server, in the place of an engine in this process.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", PAGE, "Tokens in which the prefix cache of --url finds prefixes.", 1)
_API = flags.DEFINE_enum("api", "tokens", ["tokens", "text", "chat"], "How prompts are sent: see docs/bench/agents.md.")
_STAND_INS = flags.DEFINE_bool("stand_ins", False, "Ask --api=tokens for no ids, send made-up ones back.")
_NAME = flags.DEFINE_string("served_model", None, "Name of the model at the server. Default: its first one.")
_FIELDS = flags.DEFINE_string(
    "fields", '{"ignore_eos": true, "temperature": 0}', "Further fields of requests, as JSON."
)
_REPLAY = flags.DEFINE_integer("replay_tokens", 0, "Tokens that --url runs again behind a prefix it found.", 0)
_DEVICES = flags.DEFINE_integer("devices", 1, "GPUs of --url, for throughput per device.", 1)
_DRAIN = flags.DEFINE_float("drain_seconds", 60.0, "How long requests of --url may go on after the window.", 0.0)
_TIMEOUT = flags.DEFINE_float("request_timeout", 600.0, "Seconds a request to --url may take.", 1e-3)

_OF_URL = (_PAGE_SIZE, _API, _STAND_INS, _NAME, _FIELDS, _REPLAY, _DEVICES, _DRAIN, _TIMEOUT)
_OF_ENGINE = {flag.name: flag for flag in (EXECUTOR, RANKS, SLOTS)}
_COUNTED_SESSIONS = 200  # of the generator, for statistics


@dataclasses.dataclass(frozen=True)
class Run:
    """What the report needs, whoever served."""

    measurements: Sequence[Measurement]
    ended: float
    interrupted: bool
    client_lag: float | None = None
    verdicts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Server:
    """What serves.

    Args:
      conditions: see `bench.conditions`, without what sessions are.
      page_size, replay_tokens: of its prefix cache.
      stand_ins: it gives no tokens back.
      run: runs a workload until a time.
    """

    conditions: dict[str, Any]
    devices: int
    max_context: int
    page_size: int
    replay_tokens: int
    stand_ins: bool
    run: Callable[[Workload, float], Run]


def http_server() -> Server:
    """The server at --url."""
    from dsv4jax.bench.traffic.client import run_http  # both need the extra `bench`
    from dsv4jax.bench.traffic.http_target import Target, find_model

    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    key = os.environ.get("DSV4JAX_API_KEY", "")
    try:
        fields = json.loads(_FIELDS.value)
    except ValueError as error:
        raise ValueError(f"--fields={_FIELDS.value}: must be JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--fields={_FIELDS.value}: must be a JSON object")
    model = find_model(_URL.value, key, _NAME.value)
    length = MAX_MODEL_LEN.value if MAX_MODEL_LEN.present else model.max_context
    if length is None:
        raise ValueError("--max_model_len: must be given, the server does not say")
    target = Target(_URL.value, model.name, _API.value, not _STAND_INS.value, key, fields, _TIMEOUT.value)

    def run(workload: Workload, until: float) -> Run:
        found = run_http(target, workload, until=until, drain_seconds=_DRAIN.value)
        lag = found.loop_lag.p99 if found.loop_lag else None
        verdicts = [f"client: event loop late by {(lag or 0) * 1e3:.1f} ms (p99), busy {found.busy:.0%} of the time"]
        if found.gave_up:
            verdicts.append(f"given up: {found.gave_up}")
        if not found.reports_cached:
            verdicts.append("the server does not say how many tokens were cached: the hit rate is unknown")
        return Run(found.measurements, found.ended, found.interrupted, lag, verdicts)

    return Server(
        conditions=conditions(
            model=f"{model.name} at {_URL.value}",
            layout="the server's",
            flags={name: value for name, value in flag_values(globals()).items() if name not in _OF_ENGINE},
            seed=SEED.value,
        ),
        devices=_DEVICES.value,
        max_context=length,
        page_size=_PAGE_SIZE.value,
        replay_tokens=_REPLAY.value,
        stand_ins=target.stand_ins,
        run=run,
    )


def own_server(most_tokens: int) -> Server:
    """An engine in this process, for requests of as many tokens unless a flag says otherwise."""
    length = MAX_MODEL_LEN.value if MAX_MODEL_LEN.present else most_tokens
    system = make_system(sizes={"max_model_len": length})

    def run(workload: Workload, until: float) -> Run:
        found = run_engine(*system.engine(), workload, until=until)
        system.close()
        return Run(found.measurements, found.ended, found.interrupted)

    return Server(
        conditions=system_conditions(system, globals()),
        devices=RANKS.value,
        max_context=length,
        page_size=PAGE,
        replay_tokens=system.config.replay.window,
        stand_ins=False,
        run=run,
    )


def _ids() -> range:
    try:
        low, high = map(int, _IDS.value)
    except ValueError:
        low = high = 0
    if not 0 <= low < high - 1:
        raise ValueError(f"--ids={','.join(_IDS.value)}: must be two ascending token ids, not neighbours")
    return range(low, high)


@dataclasses.dataclass(frozen=True)
class Sessions:
    """What is to run, at --scale.

    Args:
      endless: in order, until --sessions.
      most_tokens: of a request, its output included.
      longest_first_turn: the same of a session's first.
      statistics: of all sessions of a trace, or of the first generated ones.
    """

    endless: Iterator[Session]
    most_tokens: int
    longest_first_turn: int
    statistics: dict[str, Any]


def sessions_of(parameters: AgentParameters) -> Sessions:
    """The sessions of --trace, again and again, or generated ones."""
    scale = _SCALE.value
    if _TRACE.value:
        found = [session.scaled(scale) for session in read_trace(_TRACE.value)]
        family = [one for session in found for one in session.family()]
        lengths = [[n + t.output_tokens for n, t in zip(s.contexts(), s.turns, strict=True)] for s in family]
        most, first = max(map(max, lengths)), max(turns[0] for turns in lengths)
        endless = itertools.cycle(found)
    else:
        made = functools.partial(generate_sessions, parameters, SEED.value)
        found = [session.scaled(scale) for session in itertools.islice(made(), _COUNTED_SESSIONS)]
        most = math.ceil(parameters.max_context * scale)
        # Each of the four parts of a first turn is rounded.
        first = math.ceil(parameters.longest_first_turn * scale) + 4
        endless = (session.scaled(scale) for session in made())
    return Sessions(
        endless=itertools.islice(endless, _SESSIONS.value),
        most_tokens=max(most, first) + FIRST_MARKERS,
        longest_first_turn=first + FIRST_MARKERS,
        statistics=trace_statistics(found).as_dict(),
    )


def check_flags() -> None:
    """Raises ValueError for flags that would have no effect, or that contradict others."""
    wrong, why = (_OF_URL, "needs") if _URL.value is None else (_OF_ENGINE.values(), "must not be given with")
    for flag in wrong:
        if flag.present:
            raise ValueError(f"--{flag.name}: {why} --url")
    if _TRACE.value and _PARAMETERS.value:
        raise ValueError("--parameters: must not be given with --trace, which is not generated")
    if _WRITE_TRACE.value and _SESSIONS.value is None:
        raise ValueError("--write_trace: needs --sessions")
    _ids()


def check_first_turns(longest: int, max_context: int) -> None:
    """Raises ValueError unless the first turn of every session and sub-agent fits."""
    if longest > max_context:
        raise ValueError(
            f"--scale={_SCALE.value}: a first turn may have {longest} tokens with its output, the context is"
            f" {max_context}: --scale must be at most {_SCALE.value * max_context / longest:.2g}, or --max_model_len"
            " larger"
        )


def run(server: Server, sessions: Sessions, number: int, result: Result) -> None:
    """Runs the sessions and fills the result."""
    warm_up = _SECONDS.value / 4 if _WARM_UP.value is None else _WARM_UP.value
    workload = SessionWorkload(
        sessions.endless,
        live=_LIVE.value,
        ids=_ids(),
        max_context=min(server.max_context, sessions.most_tokens),
        page_size=server.page_size,
        replay_tokens=server.replay_tokens,
        run=number,
        ramp_seconds=warm_up / 2,
        from_the_middle=_FROM_THE_MIDDLE.value,
        cold_first_turns=_COLD.value,
        stand_ins=server.stand_ins,
    )
    found = server.run(workload, warm_up + _SECONDS.value)
    result.interrupted = found.interrupted
    result.add_requests(request_rows(found.measurements))
    result.rows["sessions"].append({"of": "sent", **prompt_row(found.measurements)})
    result.verdicts += found.verdicts
    end = min(warm_up + _SECONDS.value, found.ended)
    if end <= warm_up:
        result.verdicts.append(f"not valid: ended after {found.ended:.1f} s, the warm-up takes {warm_up:g} s")
        return
    window = Window(warm_up, end)
    summary = summarize(found.measurements, window, devices=server.devices, client_lag=found.client_lag)
    result.verdicts = [*verdicts(summary), *result.verdicts]
    result.control = {
        "what": f"a prefix cache that forgets nothing, in pages of {server.page_size} tokens",
        "cached_share": summary.expected_hit_rate,
    }
    result.add_row("summary", {"live_sessions": _LIVE.value, "scale": _SCALE.value, **summary_row(summary)})
    result.add_rows("throughput", throughput_rows(summary))
    result.add_rows("latencies", latency_rows(summary))
    result.add_rows("contexts", context_rows(found.measurements, window))


def main() -> None:
    check_flags()
    parameters = read_parameters(_PARAMETERS.value) if _PARAMETERS.value else AgentParameters()
    if _WRITE_TRACE.value:
        made = itertools.islice(generate_sessions(parameters, SEED.value), _SESSIONS.value)
        write_trace(_WRITE_TRACE.value, (session.scaled(_SCALE.value) for session in made))
        return
    sessions = sessions_of(parameters)
    if MAX_MODEL_LEN.present:
        check_first_turns(sessions.longest_first_turn, MAX_MODEL_LEN.value)
    server = http_server() if _URL.value else own_server(sessions.most_tokens)
    check_first_turns(sessions.longest_first_turn, server.max_context)
    number = _RUN.value if _RUN.value is not None else int(time.time()) if _URL.value else 0
    result = Result(
        experiment="agents",
        conditions={
            **server.conditions,
            "run": number,
            "parameters": None if _TRACE.value else dataclasses.asdict(parameters),
        },
        keys=KEYS,
        ceiling={"what": "not known of a server behind HTTP"} if _URL.value else system_ceiling(),
        rows={"sessions": [{"of": "plan", **sessions.statistics}]},
        plots=PLOTS,
    )
    with reported(_REPORT.value, result):
        run(server, sessions, number, result)
    for row in result.rows.get("summary", []):
        print("".join(f"\n{name:<60}{text_of(value)}" for name, value in row.items()))
    for table in ("sessions", "throughput", "latencies", "contexts"):
        if rows := result.rows.get(table):
            print(f"\n{table}\n{text_table(rows)}")
    print("\n" + "\n".join(result.verdicts))
    if result.interrupted:
        sys.exit(130)


if __name__ == "__main__":
    command_line.run(main)
