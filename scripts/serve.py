"""Serves a checkpoint over HTTP, compatible with OpenAI's API.

python scripts/serve.py
python scripts/serve.py --model /path/to/checkpoint --slots 64 --max_model_len 65536 --contexts 8192,65536
python scripts/serve.py --model /path/to/checkpoint --ranks 8

Over two hosts with eight GPUs each, on the second with --process 1:
DSV4JAX_CLUSTER_TOKEN=... python scripts/serve.py --ranks 16 --pages 4000 --coordinator host0:9000 --processes 2 ...
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.resources
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from absl import app, flags, logging
from fastapi import FastAPI

import dsv4jax
from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer, spread_params
from dsv4jax.balance.solver import Solver
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.engram_tables import HostEngramTables
from dsv4jax.checkpoint.load import compressed_ids, load_params
from dsv4jax.checkpoint.safetensors import INDEX_FILE
from dsv4jax.config import ModelConfig
from dsv4jax.engine.async_engine import AsyncEngine
from dsv4jax.engine.broadcast import BroadcastExecutor, follow
from dsv4jax.engine.channel import ChannelConfig, ChannelFailure, FollowerChannel, end_process, open_channel
from dsv4jax.engine.cluster import join_cluster
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.grammar import GrammarCompiler
from dsv4jax.engine.handshake import HandshakeError
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.memory_plan import memory_plan, pages_that_fit
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.packing import pack_params
from dsv4jax.quant import ceil_div
from dsv4jax.server.app import Profiler, create_app
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.context import ServerContext
from dsv4jax.server.metrics import PrometheusObserver
from dsv4jax.server.run import listening, loading, serve
from dsv4jax.tokenizer import Tokenizer
from sharding import decode_dep, single
from sharding.placement import initial_owners

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the small embedded model (random weights).")
_SERVED_NAMES = flags.DEFINE_multi_string("served_model_name", [], "Names in the API; default: the directory's name.")

_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, "Most tokens of prompt and output together. Default: the model's, at most 16384.", 1
)
_RANKS = flags.DEFINE_integer(
    "ranks", 1, "Data-parallel ranks, one per device, among which experts are spread. Sizes are those of each rank.", 1
)
_EXPERT_SLOTS = flags.DEFINE_integer(
    "expert_slots",
    None,
    "Experts of a layer that each rank has room for. With more than it needs, the busiest have replicas; all are"
    " rearranged by their load while serving. Default: no more than needed, and nothing is rearranged.",
    1,
)
_DRAFT_EXPERT_SLOTS = flags.DEFINE_integer(
    "draft_expert_slots", None, "The same as --expert_slots for the experts of a stage of the draft model.", 1
)
_BALANCE_WINDOW = flags.DEFINE_integer("balance_window", 1000, "Steps whose loads a rearrangement is made for.", 1)
_BALANCE_INTERVAL = flags.DEFINE_integer("balance_interval", 3000, "Steps from one rearrangement to the next.", 1)
_SLOTS = flags.DEFINE_integer("slots", 16, "Requests that run at the same time on a rank.", 1)
_PAGES = flags.DEFINE_integer(
    "pages", None, "Pages of the cache of a rank. Default: what memory holds, at most twice all slots."
)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "Tokens per page.", 2)
_CONTEXTS = flags.DEFINE_list(
    "contexts", None, "Context lengths that programs are compiled for. Default: 4096 and max_model_len."
)
_PREFILL_TOKENS = flags.DEFINE_list("prefill_tokens", None, "Sizes of prefill steps in tokens. Default: 256.")
_PREFILL_REQUESTS = flags.DEFINE_integer("prefill_requests", 4, "Most requests in a prefill step.", 1)
_DECODE_REQUESTS = flags.DEFINE_list("decode_requests", None, "Sizes of decode steps in requests. Default: slots.")
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
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, ["reference", "pallas"], "Plain JAX or GPU kernels. Default: kernels where they can run."
)
_REPLAY = flags.DEFINE_enum(
    "replay", "bounded", ["exact", "bounded"], "Decoder layers over prompts and window keys after a prefix hit."
)
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "Greedy output depends on the request alone: one shape per step, exact replay."
)
_DRAFTS = flags.DEFINE_integer(
    "drafts",
    None,
    "Most drafts that a request verifies in a step; 0 for no speculative decoding. Default: the draft's block, 0 with"
    " --engram=host.",
    0,
)
_PREFIX_CACHE = flags.DEFINE_bool("prefix_cache", True, "Reuse pages of earlier requests.")
_ENGRAM = flags.DEFINE_enum("engram", "device", ["device", "host"], "Where the Engram tables live.")
_MEMORY_FRACTION = flags.DEFINE_float("memory_fraction", 0.9, "Share of the free memory that may be used.", 0.05, 1.0)
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


def _sizes(flag: flags.FlagHolder, default: list[int]) -> list[int]:
    """The flag's numbers, ascending; `default` if it is not given."""
    if flag.value is None:
        return default
    if not flag.value:
        raise ValueError(f"--{flag.name}=: must hold at least one number")
    try:
        sizes = sorted({int(text) for text in flag.value})
    except ValueError:
        raise ValueError(f"--{flag.name}={','.join(flag.value)}: must be whole numbers") from None
    if sizes[0] < 1:
        raise ValueError(f"--{flag.name}: {sizes[0]} must be at least 1")
    return sizes


def _numerics(cfg: ModelConfig) -> Numerics:
    numerics = FAST if _NUMERICS.value == "fast" else REFERENCE
    numerics, why = with_implementation(numerics, _IMPLEMENTATION.value, cfg, _PAGE_SIZE.value)
    logging.info("implementation: %s", f"{numerics.implementation}: {why}" if why else numerics.implementation)
    return numerics


# What must be the same in all processes of an engine, besides what follows from the checkpoint.
_SAME = (
    _RANKS, _EXPERT_SLOTS, _DRAFT_EXPERT_SLOTS, _BALANCE_WINDOW, _BALANCE_INTERVAL, _MAX_MODEL_LEN, _SLOTS, _PAGES,
    _PAGE_SIZE, _CONTEXTS, _PREFILL_TOKENS, _PREFILL_REQUESTS, _DECODE_REQUESTS, _DRAFTS, _NUMERICS, _IMPLEMENTATION,
    _REPLAY, _DETERMINISTIC, _ENGRAM, _STRICT,
)  # fmt: skip


def _channel_config(model: Path, cfg: ModelConfig) -> ChannelConfig | None:
    """How this process meets the others of its engine; None if there are none."""
    if _PROCESSES.value == 1:
        if _COORDINATOR.value is not None or _PROCESS.value:
            raise ValueError("--coordinator, --process: need --processes above 1")
        return None
    if _PAGES.value is None:
        raise ValueError("--pages: must be given with several processes, whose free memory may differ")
    if _RANKS.value % _PROCESSES.value:
        raise ValueError(f"--ranks={_RANKS.value}: must be a multiple of --processes={_PROCESSES.value}")
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


def _balancers(cfg: ModelConfig, ranks: int, drafts: int) -> list[ExpertBalancer]:
    if _DRAFT_EXPERT_SLOTS.value is not None and not drafts:
        raise ValueError(f"--draft_expert_slots={_DRAFT_EXPERT_SLOTS.value}: no drafts are made")
    target = cfg.num_hidden_layers, cfg.n_routed_experts, cfg.num_experts_per_tok
    draft = cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok
    window, made = _BALANCE_WINDOW.value, []
    for stack, flag, sizes in (("layers", _EXPERT_SLOTS, target), ("mtp", _DRAFT_EXPERT_SLOTS, draft)):
        if flag.value is None:
            continue
        layers, experts, experts_per_token = sizes
        try:
            owners = initial_owners(layers, experts, ranks, flag.value)
        except ValueError as error:
            raise ValueError(f"--{flag.name}={flag.value}: {error}") from None
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


def _drafts(cfg: ModelConfig) -> int:
    """The most drafts of a request and step, with the reason if there are none by default."""
    most, given = cfg.dspark_block_size, _DRAFTS.value
    if given is not None and given > most:
        raise ValueError(f"--drafts={given}: the checkpoint's draft makes at most {most}")
    if _ENGRAM.value == "host":
        if given:
            raise ValueError(f"--drafts={given}: must be 0 with --engram=host, because only the device knows drafts")
        if given is None:
            logging.info("drafts: none with --engram=host, because only the device knows drafts")
        return 0
    return most if given is None else given


def _engine(
    model: Path, cfg: ModelConfig, tokenizer: Tokenizer, name: str, stack: contextlib.ExitStack
) -> tuple[AsyncEngine, PrometheusObserver, Numerics] | None:
    """Plans memory, compiles, loads and starts; ready for requests. None: process 0 has done its work with this one.

    Args:
      stack: ends the other processes when it is closed.
    """
    deterministic = _DETERMINISTIC.value
    replay = "exact" if deterministic else _REPLAY.value
    # The embedded model starts small, so that a laptop compiles it in a minute.
    length = _MAX_MODEL_LEN.value or min(cfg.max_position_embeddings, 16384 if _MODEL.value else 4096)
    if length > cfg.max_position_embeddings:
        raise ValueError(f"--max_model_len={length}: the model's context is {cfg.max_position_embeddings}")
    contexts = _sizes(_CONTEXTS, [min(4096, length)])
    if contexts[-1] > length:
        raise ValueError(f"--contexts: {contexts[-1]} is beyond --max_model_len={length}")
    contexts = sorted({*contexts, length})
    prefill_tokens = _sizes(_PREFILL_TOKENS, [256])
    decode_requests = sorted({*_sizes(_DECODE_REQUESTS, []), _SLOTS.value})
    if decode_requests[-1] > _SLOTS.value:
        raise ValueError(f"--decode_requests: {decode_requests[-1]} is beyond --slots={_SLOTS.value}")
    if deterministic:
        contexts, prefill_tokens, decode_requests = contexts[-1:], prefill_tokens[-1:], decode_requests[-1:]
    on_device = _ENGRAM.value == "device"
    drafts, ranks = _drafts(cfg), _RANKS.value
    channel_config, channel = _channel_config(model, cfg), None
    if channel_config is not None:
        channel = stack.enter_context(open_channel(channel_config, end_process))
        join_cluster(channel_config)
        if ranks != jax.device_count():
            raise ValueError(f"--ranks={ranks}: all processes together have {jax.device_count()} devices")
    layout, numerics = single() if ranks == 1 else decode_dep(ranks), _numerics(cfg)

    balancers = _balancers(cfg, ranks, drafts)
    expert_slots = {"expert_slots": _EXPERT_SLOTS.value, "draft_expert_slots": _DRAFT_EXPERT_SLOTS.value}
    options = {"tables_on_device": on_device, "fraction": _MEMORY_FRACTION.value, **expert_slots}
    full = _SLOTS.value * ceil_div(length, _PAGE_SIZE.value)
    pages = _PAGES.value
    one = CacheConfig(
        slots=_SLOTS.value,
        pages=1,
        page_size=_PAGE_SIZE.value,
        slack=max(CacheConfig.slack, 1 + drafts),
        # Any request gets the tokens that it gets without drafts.
        drafts="shared" if drafts else None,
    )
    if pages is None:
        spare = 4 << 30 if jax.default_backend() != "cpu" else 1 << 30
        # At least one request of full length: if that does not fit, the plan says so.
        one_request = ceil_div(length, _PAGE_SIZE.value)
        fit = pages_that_fit(cfg, one, numerics, layout, spare=spare, **options)
        pages = max(one_request, min(2 * full, full if fit is None else fit))
    cache_cfg = dataclasses.replace(one, pages=pages)
    if pages * _PAGE_SIZE.value < length and _PAGES.value is not None:
        raise ValueError(f"--pages={pages}: {pages * _PAGE_SIZE.value} tokens are fewer than --max_model_len={length}")
    tokenizer_hash = hashlib.sha256((model / "tokenizer.json").read_bytes()).digest()
    scheduler_cfg = SchedulerConfig(
        slots=_SLOTS.value,
        pages=pages,
        page_size=_PAGE_SIZE.value,
        max_model_len=length,
        eos_id=tokenizer.eos_id,
        replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, replay),
        ranks=ranks,
        prefill_tokens=prefill_tokens[-1],
        prefill_requests=_PREFILL_REQUESTS.value,
        prefill_context=_PREFILL_CONTEXT.value,
        prefill_every=_PREFILL_EVERY.value,
        decode_every=_DECODE_EVERY.value,
        max_waiting=_MAX_WAITING.value,
        max_waiting_tokens=_MAX_WAITING_TOKENS.value,
        prefix_cache=_PREFIX_CACHE.value,
        deterministic=deterministic,
        drafts=drafts,
        tokens_on_host=not on_device,
        namespace=f"{cfg}{cache_cfg}{numerics}".encode() + tokenizer_hash,
    )
    buckets = make_buckets(
        cache_cfg,
        prefill_tokens=prefill_tokens,
        prefill_requests=_PREFILL_REQUESTS.value,
        decode_requests=decode_requests,
        contexts=contexts,
        bounded=replay == "bounded",
        drafts=drafts,
    )
    if deterministic and drafts:
        buckets = dataclasses.replace(buckets, decode=())  # every step runs with drafts
    memory_plan(cfg, cache_cfg, numerics, layout, **options).require()

    tables = None if on_device else HostEngramTables(model, cfg)
    token_map = None if on_device else compressed_ids(tokenizer, cfg)
    programs = Programs(cfg, cache_cfg, buckets, numerics, layout, tables, token_map, **expert_slots)
    plan = memory_plan(cfg, cache_cfg, numerics, layout, workspace=programs.workspace_bytes, **options)
    sizes = f"{_SLOTS.value} slots and {pages} pages of {_PAGE_SIZE.value} tokens"
    print(f"memory plan, {f'each of {ranks} ranks with ' * (ranks > 1)}{sizes}:\n{plan.table()}")
    plan.require()

    params = load_params(model, cfg, layout, tables_on_device=on_device)
    if numerics.implementation == "pallas":
        params = pack_params(params, layout)
    for balancer in balancers:
        params = spread_params(params, balancer.owners, balancer.stack)
    usable = min(tokenizer.vocab_size, cfg.vocab_size)
    executor = JaxExecutor(params, programs, usable_ids=usable, strict=_STRICT.value, balancers=balancers)
    if channel is None:
        executor.warm_up()
        if drafts and not deterministic:
            executor.measure_costs()
    else:
        channel.meet()
        with channel.watch("the first run of all programs", channel.config.start_seconds):
            executor.warm_up()
    if isinstance(channel, FollowerChannel):
        _leave_signals_to_process_0()
        follow(channel, executor)
        return None
    leading: Executor = executor
    if channel is not None:
        leading = BroadcastExecutor(executor, channel)
        stack.callback(leading.finish)
    scheduler = Scheduler(scheduler_cfg)
    cache_info = {
        "num_gpu_blocks": pages * ranks,
        "block_size": _PAGE_SIZE.value,
        "enable_prefix_caching": _PREFIX_CACHE.value,
    }
    observer = PrometheusObserver(name, length, cache_info)
    engine = AsyncEngine(
        Engine(scheduler, leading, observer),
        observer,
        max_model_len=length,
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
    if _RANKS.value > 1:
        # Of use on the CPU only, where devices are virtual.
        jax.config.update("jax_num_cpu_devices", _RANKS.value // _PROCESSES.value or 1)
    if _COMPILATION_CACHE.value:
        jax.config.update("jax_compilation_cache_dir", _COMPILATION_CACHE.value)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    model = Path(_MODEL.value) if _MODEL.value else Path(str(importlib.resources.files("dsv4jax") / "default_model"))
    cfg = ModelConfig.from_checkpoint(model)
    tokenizer = Tokenizer.from_checkpoint(model)
    names = tuple(_SERVED_NAMES.value) or (model.resolve().name,)
    with contextlib.ExitStack() as stack:
        if _PROCESS.value:
            _engine(model, cfg, tokenizer, names[0], stack)
            return
        listener = stack.enter_context(listening(config))
        with loading(config, listener):
            engine, observer, numerics = _engine(model, cfg, tokenizer, names[0], stack)
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


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.INFO)
    try:
        _run()
    except ChannelFailure as failure:
        end_process(failure)
    except (ValueError, OSError, HandshakeError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if _PROCESSES.value > 1:
            os._exit(1)  # on the way out JAX would wait for the other processes
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
