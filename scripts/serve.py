"""Serves a checkpoint over HTTP, compatible with OpenAI's API.

python scripts/serve.py
python scripts/serve.py --model /path/to/checkpoint --slots 64 --max_model_len 65536 --contexts 8192,65536
python scripts/serve.py --model /path/to/checkpoint --ranks 8
python scripts/serve.py --executables /path/to/exported

Over two hosts with eight GPUs each, on the second with --process 1:
DSV4JAX_CLUSTER_TOKEN=... python scripts/serve.py --ranks 16 --pages 4000 --coordinator host0:9000 --processes 2 ...
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_line
import jax
from absl import flags, logging
from engine_flags import MEMORY_FRACTION, PAGES, PRESET, RANKS, SHAPE_FLAGS, check_sizes, make_shape
from executables import (
    EXECUTABLES,
    check_flags,
    load_exported,
    load_exported_params,
    model_directory,
    use_virtual_devices,
)
from fastapi import FastAPI

import dsv4jax
from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer
from dsv4jax.balance.solver import Solver
from dsv4jax.checkpoint.engram_tables import HostEngramTables
from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.checkpoint.safetensors import INDEX_FILE
from dsv4jax.compilation_cache import CacheCounts, use_compilation_cache
from dsv4jax.config import ModelConfig
from dsv4jax.engine.async_engine import AsyncEngine
from dsv4jax.engine.broadcast import BroadcastExecutor, follow, share_costs
from dsv4jax.engine.channel import ChannelConfig, ChannelFailure, FollowerChannel, end_process, open_channel
from dsv4jax.engine.cluster import join_cluster
from dsv4jax.engine.draft_room import DraftRoom
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config
from dsv4jax.engine.grammar import GrammarCompiler
from dsv4jax.engine.handshake import HandshakeError
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.memory_plan import memory_plan
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.numerics import Numerics
from dsv4jax.server.app import Profiler, create_app
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.context import ServerContext
from dsv4jax.server.metrics import PrometheusObserver
from dsv4jax.server.run import listening, loading, serve
from dsv4jax.tokenizer import Tokenizer
from sharding.placement import initial_owners

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the small embedded model (random weights).")
_SERVED_NAMES = flags.DEFINE_multi_string("served_model_name", [], "Names in the API; default: the directory's name.")

_BALANCE_WINDOW = flags.DEFINE_integer("balance_window", 1000, "Steps whose loads a rearrangement is made for.", 1)
_BALANCE_INTERVAL = flags.DEFINE_integer("balance_interval", 3000, "Steps from one rearrangement to the next.", 1)
_PREFILL_CONTEXT = flags.DEFINE_integer(
    "prefill_context",
    None,
    "Tokens behind which one takes twice as long to prefill as the first of a prompt: ranks deep in a long prompt then"
    " run less of it per step, and do not hold up the others. Default: all tokens take the same time.",
    1,
)
_PREFILL_EVERY = flags.DEFINE_integer("prefill_every", 1, "Prefill in every n-th step while requests decode.", 1)
_DECODE_EVERY = flags.DEFINE_integer("decode_every", 1, "Decode in every n-th step while prompts are prefilled.", 1)
_MAX_WAITING = flags.DEFINE_integer("max_waiting", 2048, "Waiting requests beyond which new ones get 429.", 1)
_MAX_WAITING_TOKENS = flags.DEFINE_integer("max_waiting_tokens", 8_000_000, "The same for their tokens.", 1)
_PREFIX_CACHE = flags.DEFINE_bool("prefix_cache", True, "Reuse pages of earlier requests.")
_COMPILATION_CACHE = flags.DEFINE_string("compilation_cache", None, "Directory that keeps compiled programs.")
_STRICT = flags.DEFINE_bool("strict", False, "A step during which anything is compiled fails.")

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0 for the others; JAX takes the port after it. For several processes."
)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes of this engine, all with the same flags.", 1)
_PROCESS = flags.DEFINE_integer("process", 0, "Number of this process; 0 answers HTTP.", 0)

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one.", 0, 65535)
_UDS = flags.DEFINE_string("uds", None, "Unix socket to listen on instead.")
_ROOT_PATH = flags.DEFINE_string("root_path", "", "Prefix that a proxy in front removes.")
_SSL_KEY = flags.DEFINE_string("ssl_keyfile", None, "For HTTPS.")
_SSL_CERT = flags.DEFINE_string("ssl_certfile", None, "For HTTPS.")
_API_KEYS = flags.DEFINE_multi_string("api_key", [], "Accepted bearer token; also from DSV4JAX_API_KEY.")
_ORIGINS = flags.DEFINE_list("allowed_origins", ["*"], "CORS.")
_METHODS = flags.DEFINE_list("allowed_methods", ["*"], "CORS.")
_HEADERS = flags.DEFINE_list("allowed_headers", ["*"], "CORS.")
_CREDENTIALS = flags.DEFINE_bool("allow_credentials", False, "CORS.")
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", 64 << 20, "Largest request body.", 1)
_REQUEST_TIMEOUT = flags.DEFINE_float("request_timeout", None, "Seconds a request may take.")
_SHUTDOWN_TIMEOUT = flags.DEFINE_float("shutdown_timeout", 30.0, "Seconds for running requests after SIGTERM.", 0.0)
_DEV = flags.DEFINE_bool(
    "dev", False, "Serve /reset_prefix_cache, and with --profile_dir /start_profile, /stop_profile."
)
_PROFILE_DIR = flags.DEFINE_string("profile_dir", None, "Where --dev's profiles of the device go.")
_THINKING = flags.DEFINE_enum("default_thinking", "on", ["on", "off"], "For requests that do not say.")
_EFFORT = flags.DEFINE_integer("default_effort", 75, "Reasoning effort of requests that give none.", 1, 100)
_DEFAULT_MAX_TOKENS = flags.DEFINE_integer("default_max_tokens", None, "Chat output limit of requests without one.", 1)


# What must be the same in all processes of an engine, besides what follows from the checkpoint.
_SAME = (*SHAPE_FLAGS, _BALANCE_WINDOW, _BALANCE_INTERVAL, _STRICT)


def _channel_config(model: Path, cfg: ModelConfig) -> ChannelConfig | None:
    """How this process meets the others of its engine; None if there are none."""
    if EXECUTABLES.value and _PROCESSES.value > 1:
        raise ValueError(f"--processes={_PROCESSES.value}: must be 1 with --executables")
    if _PROCESSES.value == 1:
        if _COORDINATOR.value is not None or _PROCESS.value:
            raise ValueError("--coordinator, --process: need --processes above 1")
        return None
    if PRESET.value == "latency":
        raise ValueError(f"--preset=latency: needs --processes=1, not {_PROCESSES.value}")
    if PAGES.value is None:
        raise ValueError("--pages: must be given with several processes, whose free memory may differ")
    if RANKS.value % _PROCESSES.value:
        raise ValueError(f"--ranks={RANKS.value}: must be a multiple of --processes={_PROCESSES.value}")
    host, _, port = (_COORDINATOR.value or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ValueError(f"--coordinator={_COORDINATOR.value}: must be HOST:PORT with a port from 1 to 65534")
    token = os.environ.get("DSV4JAX_CLUSTER_TOKEN")
    if token is None:
        raise ValueError("DSV4JAX_CLUSTER_TOKEN: must hold a secret that all processes are given")
    files = [file.read_bytes() for file in (model / "tokenizer.json", model / INDEX_FILE) if file.is_file()]
    same = {"dsv4jax": dsv4jax.__version__, "jax": jax.__version__}
    same |= {name: _digest(*content) for name, content in (("config", [f"{cfg}".encode()]), ("checkpoint", files))}
    same |= {f"--{flag.name}": str(flag.value) for flag in _SAME}
    return ChannelConfig(host.strip("[]"), int(port), _PROCESSES.value, _PROCESS.value, token, same)


def _balancers(cfg: ModelConfig, shape: EngineShape, ranks: int) -> list[ExpertBalancer]:
    target = cfg.num_hidden_layers, cfg.n_routed_experts, cfg.num_experts_per_tok
    draft = cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok
    window, made = _BALANCE_WINDOW.value, []
    for stack, slots, sizes in (("layers", shape.expert_slots, target), ("mtp", shape.draft_expert_slots, draft)):
        if slots is None:
            continue
        layers, experts, experts_per_token = sizes
        owners = initial_owners(layers, experts, ranks, slots)
        config = BalanceConfig(window, interval=_BALANCE_INTERVAL.value, vectors=min(250, window))
        solver = Solver(ranks, _PROCESSES.value)
        made.append(
            ExpertBalancer(config, solver, owners, stack=stack, experts=experts, experts_per_token=experts_per_token)
        )
    return made


def _digest(*content: bytes) -> str:
    digest = hashlib.sha256()
    for part in content:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _engine(
    model: Path, cfg: ModelConfig, tokenizer: Tokenizer, name: str, stack: contextlib.ExitStack, cached: CacheCounts
) -> tuple[AsyncEngine, PrometheusObserver, Numerics] | None:
    """Plans memory, compiles, loads and starts; ready for requests. None: process 0 has done its work with this one.

    Args:
      stack: ends the other processes when it is closed.
      cached: counts the programs that --compilation_cache has.
    """
    exported = load_exported(stack, cfg) if EXECUTABLES.value else None
    sizes = None if exported else check_sizes(cfg, embedded=not _MODEL.value)
    channel_config, channel = _channel_config(model, cfg), None
    if channel_config is not None:
        channel = stack.enter_context(open_channel(channel_config, end_process))
        join_cluster(channel_config)
        if RANKS.value != jax.device_count():
            raise ValueError(f"--ranks={RANKS.value}: all processes together have {jax.device_count()} devices")
    shape = make_shape(cfg, sizes) if exported is None else exported.shape
    layout, cache_cfg, numerics = shape.layout, shape.cache, shape.numerics
    balancers = _balancers(cfg, shape, layout.ranks)
    tokenizer_hash = hashlib.sha256((model / "tokenizer.json").read_bytes()).digest()
    scheduler_cfg = scheduler_config(
        cfg,
        shape,
        tokenizer.eos_id,
        prefill_context=_PREFILL_CONTEXT.value,
        prefill_every=_PREFILL_EVERY.value,
        decode_every=_DECODE_EVERY.value,
        max_waiting=_MAX_WAITING.value,
        max_waiting_tokens=_MAX_WAITING_TOKENS.value,
        prefix_cache=_PREFIX_CACHE.value,
        namespace=f"{cfg}{cache_cfg}{numerics}".encode() + tokenizer_hash,
    )
    on_device = shape.tables_on_device
    options = {"tables_on_device": on_device, "fraction": MEMORY_FRACTION.value, **shape.slots_of_experts}
    options["packed"] = exported is not None and not _MODEL.value
    memory_plan(cfg, cache_cfg, numerics, layout, **options).require()

    tables = None if on_device else HostEngramTables(model, cfg)
    token_map = None if on_device else compressed_ids(tokenizer, cfg)
    if exported is not None:
        programs = exported.programs(tables, token_map)
    else:
        programs = Programs(
            cfg, cache_cfg, shape.buckets, numerics, layout, tables, token_map, **shape.slots_of_experts
        )
    if cached.asked:
        logging.info("compilation cache: %d of %d programs were there", cached.found, cached.asked)
    plan = memory_plan(cfg, cache_cfg, numerics, layout, workspace=programs.workspace_bytes, **options)
    held = f"{cache_cfg.slots} slots and {cache_cfg.pages} pages of {cache_cfg.page_size} tokens"
    print(f"memory plan, {f'each of {layout.ranks} ranks with ' * (layout.ranks > 1)}{held}:\n{plan.table()}")
    plan.require()

    if exported is not None:
        params = load_exported_params(exported, _MODEL.value, cfg)
    else:
        params = load_engine_params(model, cfg, shape, layout)
    usable = min(tokenizer.vocab_size, cfg.vocab_size)
    executor = JaxExecutor(params, programs, usable_ids=usable, strict=_STRICT.value, balancers=balancers)
    first_run: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if channel is not None:
        channel.meet()
        first_run = channel.watch("the first run of all programs", channel.config.start_seconds)
    with first_run:
        executor.warm_up()
        times = executor.measure_costs() if shape.drafts and not shape.deterministic else []
    if channel is not None:
        times = share_costs(channel, times)
    executor.set_costs(times)
    if isinstance(channel, FollowerChannel):
        _leave_signals_to_process_0()
        follow(channel, executor)
        return None
    leading: Executor = executor
    if channel is not None:
        leading = BroadcastExecutor(executor, channel)
        stack.callback(leading.finish)
    room = DraftRoom(times, cache_cfg.slots, layout.ranks) if times else None
    scheduler = Scheduler(scheduler_cfg, room)
    cache_info = {
        "num_gpu_blocks": cache_cfg.pages * layout.ranks,
        "block_size": cache_cfg.page_size,
        "enable_prefix_caching": _PREFIX_CACHE.value,
    }
    observer = PrometheusObserver(name, shape.max_model_len, cache_info)
    engine = AsyncEngine(
        Engine(scheduler, leading, observer),
        observer,
        max_model_len=shape.max_model_len,
        vocab_size=cfg.vocab_size,
        compilations=lambda: executor.compilations.count,
        balance=lambda: executor.balance,
    )
    engine.start()
    asyncio.run(engine.warm_up())
    return engine, observer, numerics


def _run() -> None:
    begin = time.perf_counter()
    keys = (*_API_KEYS.value, *filter(None, [os.environ.get("DSV4JAX_API_KEY")]))
    config = ServerConfig(
        host=_HOST.value,
        port=_PORT.value,
        uds=_UDS.value,
        root_path=_ROOT_PATH.value,
        ssl_keyfile=_SSL_KEY.value,
        ssl_certfile=_SSL_CERT.value,
        api_keys=keys,
        allowed_origins=tuple(_ORIGINS.value),
        allowed_methods=tuple(_METHODS.value),
        allowed_headers=tuple(_HEADERS.value),
        allow_credentials=_CREDENTIALS.value,
        max_body_bytes=_MAX_BODY.value,
        request_timeout=_REQUEST_TIMEOUT.value,
        shutdown_timeout=_SHUTDOWN_TIMEOUT.value,
        dev_mode=_DEV.value,
    )
    devices = check_flags(SHAPE_FLAGS) if EXECUTABLES.value else RANKS.value
    use_virtual_devices(devices // _PROCESSES.value or 1)
    cached = use_compilation_cache(_COMPILATION_CACHE.value)
    model = model_directory(_MODEL.value)
    cfg = ModelConfig.from_checkpoint(model)
    tokenizer = Tokenizer.from_checkpoint(model)
    names = tuple(_SERVED_NAMES.value) or (model.resolve().name,)
    with contextlib.ExitStack() as stack:
        if _PROCESS.value:
            _engine(model, cfg, tokenizer, names[0], stack, cached)
            return
        listener = stack.enter_context(listening(config))
        with loading(config, listener):
            engine, observer, numerics = _engine(model, cfg, tokenizer, names[0], stack, cached)
            application = _app(config, engine, observer, model, cfg, numerics, tokenizer, names)
        print(f"ready {time.perf_counter() - begin:.1f} s after the start: {names[0]} at {_UDS.value or _HOST.value}")
        serve(application, listener)


def _leave_signals_to_process_0() -> None:
    """Process 0 is sent the same signals and ends this one when it has drained; a second one ends this one at once."""
    seen = 0

    def handle(number: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(128 + number)
        logging.info("waiting for process 0 to drain")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _app(
    config: ServerConfig,
    engine: AsyncEngine,
    observer: PrometheusObserver,
    model: Path,
    cfg: ModelConfig,
    numerics: Numerics,
    tokenizer: Tokenizer,
    names: tuple[str, ...],
) -> FastAPI:
    fingerprint = hashlib.sha256(f"{dsv4jax.__version__} {jax.__version__} {cfg} {numerics}".encode())
    context = ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        model_names=names,
        threads=ThreadPoolExecutor(4, thread_name_prefix="requests"),
        created=int((model / "config.json").stat().st_mtime),
        system_fingerprint=f"dsv4jax-{fingerprint.hexdigest()[:12]}",
        default_thinking=_THINKING.value == "on",
        default_effort=_EFFORT.value,
        default_max_tokens=_DEFAULT_MAX_TOKENS.value,
    )
    profiler = None
    if _PROFILE_DIR.value:
        profiler = Profiler(lambda: jax.profiler.start_trace(_PROFILE_DIR.value), jax.profiler.stop_trace)
    return create_app(context, config, observer, profiler)


def main() -> None:
    logging.set_verbosity(logging.INFO)
    try:
        _run()
    except ChannelFailure as failure:
        end_process(failure)
    except (ValueError, OSError, HandshakeError) as error:
        if _PROCESSES.value == 1:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # on the way out JAX would wait for the other processes


if __name__ == "__main__":
    command_line.run(main)
