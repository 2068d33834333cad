"""Flags that say what the programs of an engine are compiled for, of the scripts that compile them.

They are turned into an `EngineShape` in two steps, because devices may only be looked at once the process has joined
its cluster.
"""

import dataclasses

import command_line
import jax
from absl import flags, logging

from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape, shape_buckets
from dsv4jax.engine.memory_plan import pages_that_fit
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.quant import ceil_div
from sharding import PRESETS, preset
from sharding.placement import check_slots

_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, "Most tokens of prompt and output together. Default: the model's, at most 16384.", 1
)
RANKS = flags.DEFINE_integer(
    "ranks", 1, "Data-parallel ranks, one per device, among which experts are spread. Sizes are those of each rank.", 1
)
PRESET = flags.DEFINE_enum(
    "preset",
    None,
    PRESETS,
    "Layout over --ranks devices; latency: all of them work on the same requests, each with a part of all weights;"
    " without kernels."
    " Default: single for one, decode_dep for several.",
)
EXPERT_SLOTS = flags.DEFINE_integer(
    "expert_slots",
    None,
    "Experts of a layer that each rank has room for. With more than it needs, the busiest have replicas; all are"
    " rearranged by their load while serving. Default: no more than needed, and nothing is rearranged.",
    1,
)
_DRAFT_EXPERT_SLOTS = flags.DEFINE_integer(
    "draft_expert_slots", None, "The same as --expert_slots for the experts of a stage of the draft model.", 1
)
_SLOTS = flags.DEFINE_integer("slots", 16, "Requests that run at the same time on a rank.", 1)
PAGES = flags.DEFINE_integer(
    "pages", None, "Pages of the cache of a rank. Default: what memory holds, at most twice all slots."
)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "Tokens per page.", 2)
_CONTEXTS = flags.DEFINE_list(
    "contexts", None, "Context lengths that programs are compiled for. Default: 4096 and max_model_len."
)
_PREFILL_TOKENS = flags.DEFINE_list("prefill_tokens", None, "Sizes of prefill steps in tokens. Default: 256.")
_PREFILL_REQUESTS = flags.DEFINE_integer("prefill_requests", 4, "Most requests in a prefill step.", 1)
_DECODE_REQUESTS = flags.DEFINE_list("decode_requests", None, "Sizes of decode steps in requests. Default: slots.")
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = command_line.implementation_flag()
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
_FEWER_DRAFTS = flags.DEFINE_list(
    "fewer_drafts",
    None,
    "Smaller numbers of drafts for which there are quicker programs too, one of which a step runs in if that promises"
    " more tokens per second. Default: 1 and half of --drafts; none with the embedded model. Empty: none.",
)
_ENGRAM = flags.DEFINE_enum("engram", "device", ["device", "host"], "Where the Engram tables live.")
MEMORY_FRACTION = flags.DEFINE_float("memory_fraction", 0.9, "Share of the free memory that may be used.", 0.05, 1.0)

SHAPE_FLAGS = (
    RANKS, PRESET, EXPERT_SLOTS, _DRAFT_EXPERT_SLOTS, _MAX_MODEL_LEN, _SLOTS, PAGES, _PAGE_SIZE, _CONTEXTS,
    _PREFILL_TOKENS, _PREFILL_REQUESTS, _DECODE_REQUESTS, _DRAFTS, _FEWER_DRAFTS, _NUMERICS, _IMPLEMENTATION, _REPLAY,
    _DETERMINISTIC, _ENGRAM,
)  # fmt: skip
"""All that an `EngineShape` follows from."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes as the flags give them, ascending, and found to be possible."""

    max_model_len: int
    contexts: list[int]
    prefill_tokens: list[int]
    decode_requests: list[int]
    drafts: int
    fewer_drafts: list[int]


def check_sizes(cfg: ModelConfig, embedded: bool) -> Sizes:
    """Reads the flags, without a look at devices.

    Args:
      embedded: the model is the small one, whose default context is short, so that a laptop compiles it in a minute,
        as it does few programs.

    Raises:
      ValueError: a flag has a value that is not allowed, by its name.
    """
    length = _MAX_MODEL_LEN.value or min(cfg.max_position_embeddings, 4096 if embedded else 16384)
    if length > cfg.max_position_embeddings:
        raise ValueError(f"--max_model_len={length}: the model's context is {cfg.max_position_embeddings}")
    contexts = _numbers(_CONTEXTS, [min(4096, length)])
    if contexts[-1] > length:
        raise ValueError(f"--contexts: {contexts[-1]} is beyond --max_model_len={length}")
    prefill_tokens = _numbers(_PREFILL_TOKENS, [256])
    decode_requests = sorted({*_numbers(_DECODE_REQUESTS, []), _SLOTS.value})
    if decode_requests[-1] > _SLOTS.value:
        raise ValueError(f"--decode_requests: {decode_requests[-1]} is beyond --slots={_SLOTS.value}")
    on_device = _ENGRAM.value == "device"
    drafts = command_line.drafts(cfg, _DRAFTS.value, on_device)
    if _DRAFTS.value is None and not on_device:
        logging.info("drafts: none with --engram=host, because only the device knows drafts")
    fewer_drafts = _fewer_drafts(drafts, embedded)
    if _DRAFT_EXPERT_SLOTS.value is not None and not drafts:
        raise ValueError(f"--draft_expert_slots={_DRAFT_EXPERT_SLOTS.value}: no drafts are made")
    for flag, experts in ((EXPERT_SLOTS, cfg.n_routed_experts), (_DRAFT_EXPERT_SLOTS, cfg.dspark_n_routed_experts)):
        if flag.value is not None:
            if PRESET.value == "latency":
                raise ValueError(f"--{flag.name}={flag.value}: must not be given with --preset=latency")
            with command_line.about(flag):
                check_slots(experts, RANKS.value, flag.value)
    return Sizes(length, sorted({*contexts, length}), prefill_tokens, decode_requests, drafts, fewer_drafts)


def make_shape(cfg: ModelConfig, sizes: Sizes) -> EngineShape:
    """The shape that the flags say, the cache as large as the memory of the devices allows.

    Raises:
      ValueError: a flag has a value that is not allowed, by its name.
    """
    ranks, length = RANKS.value, sizes.max_model_len
    name = PRESET.value or ("single" if ranks == 1 else "decode_dep")
    layout, numerics, on_device = preset(name, ranks), _numerics(cfg), _ENGRAM.value == "device"
    one = CacheConfig(
        slots=_SLOTS.value,
        pages=1,
        page_size=_PAGE_SIZE.value,
        slack=max(CacheConfig.slack, 1 + sizes.drafts),
        # Any request gets the tokens that it gets without drafts.
        drafts="shared" if sizes.drafts else None,
    )
    pages = PAGES.value
    if pages is not None and pages * _PAGE_SIZE.value < length:
        raise ValueError(f"--pages={pages}: {pages * _PAGE_SIZE.value} tokens are fewer than --max_model_len={length}")
    if pages is None:
        spare = 4 << 30 if jax.default_backend() != "cpu" else 1 << 30
        slots = {"expert_slots": EXPERT_SLOTS.value, "draft_expert_slots": _DRAFT_EXPERT_SLOTS.value}
        options = {"tables_on_device": on_device, "fraction": MEMORY_FRACTION.value, **slots}
        # At least one request of full length: if that does not fit, the plan says so.
        one_request = ceil_div(length, _PAGE_SIZE.value)
        fit = pages_that_fit(cfg, one, numerics, layout, spare=spare, **options)
        full = _SLOTS.value * one_request
        pages = max(one_request, min(2 * full, full if fit is None else fit))
    cache, deterministic = dataclasses.replace(one, pages=pages), _DETERMINISTIC.value
    replay = "exact" if deterministic else _REPLAY.value
    buckets = shape_buckets(
        cache,
        prefill_tokens=sizes.prefill_tokens,
        prefill_requests=_PREFILL_REQUESTS.value,
        decode_requests=sizes.decode_requests,
        contexts=sizes.contexts,
        replay=replay,
        deterministic=deterministic,
        drafts=sizes.drafts,
        fewer_drafts=sizes.fewer_drafts,
    )
    return EngineShape(
        cache=cache,
        buckets=buckets,
        numerics=numerics,
        max_model_len=length,
        preset=name,
        devices=ranks,
        expert_slots=EXPERT_SLOTS.value,
        draft_expert_slots=_DRAFT_EXPERT_SLOTS.value,
        replay=replay,
        deterministic=deterministic,
        drafts=sizes.drafts,
        tables_on_device=on_device,
    )


def _numbers(flag: flags.FlagHolder, default: list[int]) -> list[int]:
    """The flag's numbers, ascending; `default` if it is not given."""
    return default if flag.value is None else sorted(set(command_line.numbers(flag.name, flag.value)))


def _numerics(cfg: ModelConfig) -> Numerics:
    numerics, wanted = FAST if _NUMERICS.value == "fast" else REFERENCE, _IMPLEMENTATION.value
    if PRESET.value == "latency":
        if wanted == "pallas":
            raise ValueError(
                "--implementation=pallas: the kernels take all heads, a device has 1/n with --preset=latency"
            )
        wanted = "reference"
    numerics, why = with_implementation(numerics, wanted, cfg, _PAGE_SIZE.value)
    logging.info("implementation: %s", f"{numerics.implementation}: {why}" if why else numerics.implementation)
    return numerics


def _fewer_drafts(drafts: int, embedded: bool) -> list[int]:
    """As the flag says, where an empty list means none."""
    default = [] if embedded else sorted({n for n in (1, (drafts + 1) // 2) if n < drafts})
    given = [] if _FEWER_DRAFTS.value == [] else _numbers(_FEWER_DRAFTS, default)
    if given and given[-1] >= drafts:
        raise ValueError(f"--fewer_drafts: {given[-1]} must be below --drafts={drafts}")
    return given
