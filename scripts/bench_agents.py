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
import importlib.resources
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from dsv4jax.bench.agents import AgentParameters, generate_sessions, read_parameters, trace_statistics
from dsv4jax.bench.conditions import conditions
from dsv4jax.bench.counting import Window, summarize
from dsv4jax.bench.driver import Workload, run_engine
from dsv4jax.bench.page import reported
from dsv4jax.bench.records import Measurement
from dsv4jax.bench.result import Result, text_of, text_table
from dsv4jax.bench.session_report import (
    KEYS,
    PLOTS,
    context_rows,
    latency_rows,
    prompt_row,
    request_rows,
    summary_row,
    verdicts,
)
from dsv4jax.bench.sessions import FIRST_MARKERS, SessionWorkload
from dsv4jax.bench.trace_file import Session, read_trace, write_trace
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config, shape_buckets
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.records import Observer
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor, constant_tokens
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import REFERENCE
from dsv4jax.tokenizer import Tokenizer
from sharding import preset

_REPORT = flags.DEFINE_string("report", None, "Directory for the result file and its page.")
_PARAMETERS = flags.DEFINE_string(
    "parameters", None, "JSON file with parameters of the generator that are not default."
)
_TRACE = flags.DEFINE_string("trace", None, "Trace file, in the place of the generator.")
_WRITE_TRACE = flags.DEFINE_string("write_trace", None, "Write --sessions generated sessions to this file, and end.")
_SESSIONS = flags.DEFINE_integer("sessions", None, "Sessions after which no new ones begin.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the generator.", 0)
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

_EXECUTOR = flags.DEFINE_enum("executor", "simulated", ["simulated", "model"], "What runs steps, without --url.")
_MODEL = flags.DEFINE_string("model", None, "Checkpoint of --executor=model. Default: the small embedded model.")
_RANKS = flags.DEFINE_integer("ranks", 1, "Data-parallel ranks.", 1)
_SLOTS = flags.DEFINE_integer("slots", None, "Requests at a time, of a rank. Default: 2 x --live / --ranks.", 1)
_PAGES = flags.DEFINE_integer("pages", None, "Pages of a rank. Default: 32 full contexts' for each rank.", 1)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "Tokens per page; with --url, of the server's prefix cache.", 2)
_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len",
    None,
    "Most tokens of prompt and output. Default: what sessions need; with --url, what the server says.",
    1,
)
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", None, "Of a step. Default: 4096 simulated, 256 otherwise.", 16)
_DRAFTS = flags.DEFINE_integer("drafts", 0, "Most drafts that a request verifies in a step of --executor=model.", 0)

_URL = flags.DEFINE_string("url", None, "A server, in the place of an engine in this process.")
_API = flags.DEFINE_enum("api", "tokens", ["tokens", "text", "chat"], "How prompts are sent: see docs/bench/agents.md.")
_STAND_INS = flags.DEFINE_bool("stand_ins", False, "Ask --api=tokens for no ids, send made-up ones back.")
_NAME = flags.DEFINE_string("served_model", None, "Name of the model at the server. Default: its first one.")
_FIELDS = flags.DEFINE_string(
    "fields", '{"ignore_eos": true, "temperature": 0}', "Further fields of requests, as JSON."
)
_REPLAY = flags.DEFINE_integer("replay_tokens", 0, "Tokens that the server runs again behind a prefix it found.", 0)
_DEVICES = flags.DEFINE_integer("devices", 1, "GPUs of the server, for throughput per device.", 1)
_DRAIN = flags.DEFINE_float("drain_seconds", 60.0, "How long requests of --url may go on after the window.", 0.0)
_TIMEOUT = flags.DEFINE_float("request_timeout", 600.0, "Seconds a request to --url may take.", 1e-3)

_FLAGS = (
    _PARAMETERS, _TRACE, _SESSIONS, _SEED, _SCALE, _LIVE, _FROM_THE_MIDDLE, _COLD, _RUN, _IDS, _SECONDS, _WARM_UP,
    _EXECUTOR, _MODEL, _RANKS, _SLOTS, _PAGES, _PAGE_SIZE, _MAX_MODEL_LEN, _PREFILL_TOKENS, _DRAFTS,
    _URL, _API, _STAND_INS, _NAME, _FIELDS, _REPLAY, _DEVICES, _DRAIN, _TIMEOUT,
)  # fmt: skip
_EOS = 1
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
      run: runs a workload until a time.
      stand_ins: it gives no tokens back.
    """

    about: str | dict[str, Any]
    layout: str
    devices: int
    max_context: int
    replay_tokens: int
    ceiling: dict[str, Any] | None
    run: Callable[[Workload, float], Run]
    stand_ins: bool = False
    used: Sequence[Any] = ()


class Silent(Observer):
    """Keeps nothing; the driver records."""

    def rejected(self, reason: str) -> None:
        pass


def http_server() -> Server:
    """The server at --url."""
    from dsv4jax.bench.client import run_http  # both need the extra `bench`
    from dsv4jax.bench.http_target import Target, find_model

    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    key = os.environ.get("DSV4JAX_API_KEY", "")
    try:
        fields = json.loads(_FIELDS.value)
    except ValueError as error:
        raise ValueError(f"--fields={_FIELDS.value}: must be JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--fields={_FIELDS.value}: must be a JSON object")
    model = find_model(_URL.value, key, _NAME.value)
    length = _MAX_MODEL_LEN.value or model.max_context
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
        about=f"{model.name} at {_URL.value}, api {_API.value}",
        layout="the server's",
        devices=_DEVICES.value,
        max_context=length,
        replay_tokens=_REPLAY.value,
        ceiling=None,
        run=run,
        stand_ins=target.stand_ins,
    )


def simulated_server(needed: int) -> Server:
    """The scheduler on a virtual clock."""
    length, slots, pages = _sizes(needed)
    replay, cost = ReplayRule(window=128, layers=43), LinearCost()
    scheduler = SchedulerConfig(
        slots=slots,
        pages=pages,
        page_size=_PAGE_SIZE.value,
        max_model_len=length,
        eos_id=_EOS,
        replay=replay,
        ranks=_RANKS.value,
        prefill_tokens=_PREFILL_TOKENS.value or 4096,
    )
    executor = SimulatedExecutor(cost, constant_tokens(int(_IDS.value[0])))
    return Server(
        about={"simulated": dataclasses.asdict(cost)},
        layout=f"{_RANKS.value} ranks, {slots} slots and {pages} pages each",
        devices=_RANKS.value,
        max_context=length,
        replay_tokens=replay.window,
        ceiling={"assumed, seconds": dataclasses.asdict(cost)},
        run=functools.partial(_run_engine, Engine(Scheduler(scheduler), executor, Silent())),
    )


def model_server(needed: int) -> Server:
    """An engine with a model in this process."""
    length, slots, pages = _sizes(needed)
    if _RANKS.value > 1:
        jax.config.update("jax_num_cpu_devices", _RANKS.value)  # of use on the CPU only
    path = Path(_MODEL.value or str(importlib.resources.files("dsv4jax") / "default_model"))
    cfg, tokenizer = ModelConfig.from_checkpoint(path), Tokenizer.from_checkpoint(path)
    if length > cfg.max_position_embeddings:
        raise ValueError(f"--max_model_len={length}: the model's context is {cfg.max_position_embeddings}")
    if _DRAFTS.value > cfg.dspark_block_size:
        raise ValueError(f"--drafts={_DRAFTS.value}: the checkpoint's draft makes at most {cfg.dspark_block_size}")
    numerics, _ = with_implementation(REFERENCE, None, cfg, _PAGE_SIZE.value)
    cache = CacheConfig(
        slots=slots,
        pages=pages,
        page_size=_PAGE_SIZE.value,
        slack=max(CacheConfig.slack, 1 + _DRAFTS.value),
        drafts="shared" if _DRAFTS.value else None,
    )
    name = "single" if _RANKS.value == 1 else "decode_dep"
    buckets = shape_buckets(
        cache,
        prefill_tokens=[_PREFILL_TOKENS.value or 256],
        prefill_requests=4,
        decode_requests=[slots],
        contexts=[length],
        replay="bounded",
        deterministic=False,
        drafts=_DRAFTS.value,
    )
    shape = EngineShape(cache, buckets, numerics, length, name, _RANKS.value, replay="bounded", drafts=_DRAFTS.value)
    layout = preset(name, _RANKS.value)
    programs = Programs(cfg, cache, buckets, numerics, layout)
    params = load_engine_params(path, cfg, shape, layout)
    executor = JaxExecutor(params, programs, usable_ids=min(tokenizer.vocab_size, cfg.vocab_size))
    executor.warm_up()
    scheduler = Scheduler(scheduler_config(cfg, shape, tokenizer.eos_id))
    return Server(
        about=_MODEL.value or "the embedded model",
        layout=f"{name} over {_RANKS.value} devices, {slots} slots and {pages} pages each",
        devices=_RANKS.value,
        max_context=length,
        replay_tokens=cfg.sliding_window,
        ceiling=None,
        run=functools.partial(_run_engine, Engine(scheduler, executor, Silent())),
        used=jax.devices()[: _RANKS.value],
    )


def _run_engine(engine: Engine, workload: Workload, until: float) -> Run:
    run = run_engine(engine, engine.executor, workload, until=until)
    return Run(run.measurements, run.ended, run.interrupted)


def _sizes(needed: int) -> tuple[int, int, int]:
    """Most tokens of a request, slots and pages."""
    length = _MAX_MODEL_LEN.value or needed
    slots = _SLOTS.value or math.ceil(2 * _LIVE.value / _RANKS.value)
    pages = _PAGES.value or 32 * math.ceil(length / _PAGE_SIZE.value)
    if pages * _PAGE_SIZE.value < length:
        raise ValueError(f"--pages={pages}: {pages * _PAGE_SIZE.value} tokens are fewer than --max_model_len={length}")
    return length, slots, pages


def _ids() -> range:
    try:
        low, high = map(int, _IDS.value)
    except ValueError:
        raise ValueError(f"--ids={','.join(_IDS.value)}: must be two token ids") from None
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
        made = functools.partial(generate_sessions, parameters, _SEED.value)
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
        page_size=_PAGE_SIZE.value,
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
        result.verdicts.append(f"nothing to count: ended after {found.ended:.1f} s, the warm-up takes {warm_up:g} s")
        return
    window = Window(warm_up, end)
    summary = summarize(found.measurements, window, devices=server.devices, client_lag=found.client_lag)
    result.verdicts = [*verdicts(summary), *result.verdicts]
    result.control = {
        "what": f"a prefix cache that forgets nothing, in pages of {_PAGE_SIZE.value} tokens",
        "cached_share": summary.expected_hit_rate,
    }
    result.add_row("summary", {"live_sessions": _LIVE.value, "scale": _SCALE.value, **summary_row(summary)})
    for row in latency_rows(summary):
        result.add_row("latencies", row)
    for row in context_rows(found.measurements, window):
        result.add_row("contexts", row)


def main(argv: Sequence[str]) -> None:
    del argv
    parameters = read_parameters(_PARAMETERS.value) if _PARAMETERS.value else AgentParameters()
    if _WRITE_TRACE.value:
        if _SESSIONS.value is None:
            raise ValueError("--write_trace: needs --sessions")
        write_trace(_WRITE_TRACE.value, itertools.islice(generate_sessions(parameters, _SEED.value), _SESSIONS.value))
        return
    sessions = sessions_of(parameters)
    _ids()
    if _MAX_MODEL_LEN.value:
        check_first_turns(sessions.longest_first_turn, _MAX_MODEL_LEN.value)
    if _URL.value:
        server = http_server()
    else:
        server = (simulated_server if _EXECUTOR.value == "simulated" else model_server)(sessions.most_tokens)
    check_first_turns(sessions.longest_first_turn, server.max_context)
    number = _RUN.value if _RUN.value is not None else int(time.time()) if _URL.value else 0
    result = Result(
        experiment="agents",
        conditions=conditions(
            model=server.about,
            layout=server.layout,
            flags={flag.name: flag.value for flag in _FLAGS},
            seed=None if _TRACE.value else _SEED.value,
            devices=server.used,
            run=number,
            parameters=None if _TRACE.value else dataclasses.asdict(parameters),
        ),
        keys=KEYS,
        rows={"sessions": [{"of": "plan", **sessions.statistics}]},
        ceiling=server.ceiling,
        plots=PLOTS,
    )
    with reported(_REPORT.value, result):
        run(server, sessions, number, result)
    for row in result.rows.get("summary", []):
        print("".join(f"\n{name:<60}{text_of(value)}" for name, value in row.items()))
    for table in ("sessions", "latencies", "contexts"):
        print(f"\n{table}\n{text_table(result.rows.get(table, []))}")
    print("\n" + "\n".join(result.verdicts))
    if result.interrupted:
        sys.exit(130)


if __name__ == "__main__":
    app.run(main)
