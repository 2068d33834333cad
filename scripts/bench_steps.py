"""Times the real step functions at released widths with random weights, beside ceilings measured in the same run.

    python scripts/bench_steps.py --layers 6 --output benchmarks/steps.json

Decode runs on a cache of random records, prefill on random tokens; every time is the median of blocking calls, compiled
before. Also compares prefill + decode with the whole-sequence run on a short prompt.
"""

import dataclasses
import datetime
import functools
import json
import math
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dsv4jax.batch import DecodeBucket, DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.cache import COMPRESSED_ENTRY, INDEX_KEY, WINDOW_KEY, Cache, CacheConfig, init_cache
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.packing import pack_params
from dsv4jax.params import Params, abstract_params, named_leaves
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import decode_step, forward, prefill_step

_LAYERS = flags.DEFINE_integer("layers", 6, "Layers of the reduced released configuration.")
_EXPERTS = flags.DEFINE_integer("experts", 384, "Routed experts per layer.")
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", 100_000, "Where the prime search for the Engram tables starts.")
_DECODE = flags.DEFINE_multi_string(
    "decode", ["1x1x4096", "8x1x4096", "64x1x4096", "8x1x32768"], "requests x tokens per request x context."
)
_PREFILL = flags.DEFINE_multi_integer("prefill", [512, 2048], "Tokens of one prompt per step.")
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = flags.DEFINE_enum("implementation", "reference", ["reference", "pallas"], "Plain JAX or kernels.")
_COMPARE = flags.DEFINE_bool("compare", True, "Also compare prefill + decode with the whole-sequence run.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls per point.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

_GREEDY = RequestSampling(temperature=0.0)
_PAGE = 64


def random_params(cfg: ModelConfig) -> Params:
    """Weights drawn on the device, of roughly normal size: `checkpoint.random` would draw them on the host for longer
    than everything here runs."""
    abstract = abstract_params(cfg)

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def draw(key, shape, stored, exponent):
        if stored == "I8":
            return jax.random.bits(key, shape, jnp.uint8)
        if stored == "F8_E8M0":
            return jax.random.randint(key, shape, exponent - 1, exponent + 2).astype(jnp.uint8)
        if stored == "F8_E4M3":
            return (jax.random.normal(key, shape, jnp.bfloat16) * 64).astype(jnp.float8_e4m3fn)
        return jax.random.normal(key, shape, jnp.bfloat16)

    leaves = []
    for i, (name, spec) in enumerate(named_leaves(abstract)):
        key, packed = jax.random.key(i), "experts" in name
        inputs = spec.shape[-1] * {"F8_E8M0": 32, "I8": 2}.get(spec.stored, 1)
        exponent = 127 + round(math.log2(inputs**-0.5 / (3 if packed else 64)))
        if spec.derived:
            leaves.append(jnp.arange(cfg.vocab_size, dtype=jnp.int32) % cfg.engram_compressed_vocab_size)
            continue
        value = draw(key, spec.shape, spec.stored, exponent)
        if spec.stored in ("BF16", "F32"):
            one = "norm" in name or name.endswith(("q_weight", "k_weight"))
            value = (1 + 0.2 * value if one else value * inputs**-0.5).astype(spec.dtype)
        leaves.append(value)
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def random_cache(cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics) -> Cache:
    """A cache whose records are those of normal vectors."""
    cache = init_cache(cfg, cache_cfg, numerics)

    def fill(record_format, arrays, n, seed):
        made = jax.jit(
            lambda shape, key: record_format.store(jax.random.normal(key, (*shape, n), numerics.dtype), numerics),
            static_argnums=0,
        )
        keys = jax.random.split(jax.random.key(seed), len(arrays))
        return tuple(made(a.shape[:2], key) for a, key in zip(arrays, keys, strict=True))

    return cache.replace(
        entries=fill(COMPRESSED_ENTRY, cache.entries, cfg.head_dim, 0),
        index_keys=fill(INDEX_KEY, cache.index_keys, cfg.index_head_dim, 1),
        windows=fill(WINDOW_KEY, cache.windows, cfg.head_dim, 2),
    )


def median_seconds(run) -> float:
    """Median wall time of blocking calls, after one that is not counted."""
    run()
    times = []
    for _ in range(_REPEATS.value):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Read + write bandwidth of x + 1 and bf16 matmul rate on this device; sizes shrink on a CPU."""
    size = (1 << 30) if jax.default_backend() == "gpu" else (1 << 24)
    n = 8192 if jax.default_backend() == "gpu" else 512
    x = jnp.ones(size, jnp.bfloat16)
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    add, dot = jax.jit(lambda x: x + 1), jax.jit(lambda a: a @ a)
    return {
        "read_write_bytes_per_second": 4 * size / median_seconds(lambda: add(x).block_until_ready()),
        "bf16_flops_per_second": 2 * n**3 / median_seconds(lambda: dot(a).block_until_ready()),
    }


def decode_weight_bytes(cfg: ModelConfig, tokens: int) -> float:
    """Fewest weight bytes a decode step reads: shared weights once, each expert that uniform routing picks once."""
    d, layers = cfg.hidden_size, cfg.num_hidden_layers
    expert = 3 * d * cfg.moe_intermediate_size * (0.5 + 1 / 32)
    picked = cfg.n_routed_experts * (1 - (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) ** tokens)
    attention = cfg.q_lora_rank * d + cfg.num_attention_heads * cfg.head_dim * (cfg.q_lora_rank + cfg.o_lora_rank)
    attention += cfg.head_dim * d + d * cfg.o_groups * cfg.o_lora_rank
    shared = 3 * d * cfg.moe_intermediate_size + 2 * 24 * cfg.hc_mult * d * 4 + 2 * cfg.n_routed_experts * d
    return layers * (picked * expert + attention + shared) + 2 * cfg.vocab_size * d


def time_decode(
    params, cfg: ModelConfig, numerics: Numerics, requests: int, tokens_per_request: int, context: int
) -> float:
    """Seconds of one decode step."""
    pages = ceil_div(context + tokens_per_request, _PAGE)
    cache_cfg = CacheConfig(slots=requests, pages=pages * requests, page_size=_PAGE)
    cache = random_cache(cfg, cache_cfg, numerics)
    newest = [list(range(17 + i, 17 + i + tokens_per_request)) for i in range(requests)]
    tokens = [DecodeTokens(newest[i], context, i, range(i * pages, (i + 1) * pages), _GREEDY) for i in range(requests)]
    batch = decode_batch(cfg, cache_cfg, tokens, DecodeBucket(requests, pages, tokens_per_request))
    batch = jax.device_put(batch)
    state = [cache]

    def run():
        state[0], output = decode_step(params, state[0], batch, cfg=cfg, numerics=numerics)
        output.tokens.block_until_ready()

    return median_seconds(run)


def time_prefill(params, cfg: ModelConfig, numerics: Numerics, tokens: int, replay: str) -> float:
    """Seconds of one prefill step of a whole prompt."""
    pages = ceil_div(tokens, _PAGE)
    cache_cfg = CacheConfig(slots=1, pages=pages, page_size=_PAGE)
    cache = init_cache(cfg, cache_cfg, numerics)
    prompt = np.random.default_rng(0).integers(3, cfg.vocab_size, tokens).astype(np.int32)
    bucket = PrefillBucket(tokens, 1, pages, tile=64, replay=replay)
    chunk = PrefillChunk(prompt, 0, tokens, 0, range(pages), sampling=_GREEDY)
    batch = prefill_batch(cfg, cache_cfg, [chunk], bucket)
    batch = jax.device_put(batch)
    state = [cache]

    def run():
        state[0], output = prefill_step(params, state[0], batch, cfg=cfg, numerics=numerics)
        output.tokens.block_until_ready()

    return median_seconds(run)


def compare_with_forward(params, cfg: ModelConfig, numerics: Numerics, length: int = 600) -> dict[str, float]:
    """Prefill of length - 8 tokens in two chunks, then 8 decode steps, against `forward` over all of them."""
    tokens = np.random.default_rng(1).integers(3, cfg.vocab_size, length).astype(np.int32)
    whole = np.asarray(forward(params, tokens[None], cfg=cfg, numerics=numerics).logits[0, length - 9 :])
    pages, prompt = ceil_div(length, _PAGE), tokens[: length - 8]
    cache_cfg = CacheConfig(slots=1, pages=pages, page_size=_PAGE)
    cache = init_cache(cfg, cache_cfg, numerics)
    bucket, rows = PrefillBucket(512, 1, pages, tile=64), []
    for start, end in ((0, 333), (333, length - 8)):
        chunk = PrefillChunk(prompt, start, end, 0, range(pages), sampling=_GREEDY)
        batch = prefill_batch(cfg, cache_cfg, [chunk], bucket)
        cache, output = prefill_step(params, cache, batch, cfg=cfg, numerics=numerics)
    rows.append(np.asarray(output.logits[0, 0]))
    for p in range(length - 8, length):
        newest = DecodeTokens([int(tokens[p])], p, 0, range(pages), _GREEDY)
        batch = decode_batch(cfg, cache_cfg, [newest], DecodeBucket(1, pages))
        cache, output = decode_step(params, cache, batch, cfg=cfg, numerics=numerics)
        rows.append(np.asarray(output.logits[0, 0]))
    difference = np.linalg.norm(np.stack(rows) - whole, axis=-1) / np.linalg.norm(whole, axis=-1)
    return {
        "relative_l2_median": float(np.median(difference)),
        "relative_l2_max": float(difference.max()),
        "argmax_agreement": float((np.stack(rows).argmax(-1) == whole.argmax(-1)).mean()),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    cfg = reduced_config(
        _LAYERS.value, n_routed_experts=_EXPERTS.value, engram_vocab_size=_ENGRAM.value, dspark_n_routed_experts=8
    )
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(cfg))
    if _IMPLEMENTATION.value == "pallas":
        params = pack_params(params)
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "numerics": _NUMERICS.value,
        "implementation": _IMPLEMENTATION.value,
        "modes": [cfg.mode(i) for i in range(cfg.num_hidden_layers)],
        "experts": cfg.n_routed_experts,
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "drawing_seconds": time.perf_counter() - begin,
        "ceilings": ceilings(),
        "decode": [],
        "prefill": [],
    }
    bandwidth = report["ceilings"]["read_write_bytes_per_second"]
    numerics = dataclasses.replace(
        FAST if _NUMERICS.value == "fast" else REFERENCE, implementation=_IMPLEMENTATION.value
    )
    if _COMPARE.value:
        report["prefill_decode_against_forward"] = compare_with_forward(params, cfg, numerics)
        print(report["prefill_decode_against_forward"], flush=True)
    for point in _DECODE.value:
        requests, tokens, context = map(int, point.split("x"))
        seconds = time_decode(params, cfg, numerics, requests, tokens, context)
        floor = decode_weight_bytes(cfg, requests * tokens) / bandwidth
        report["decode"].append(
            {
                "requests": requests, "tokens": tokens, "context": context, "milliseconds": seconds * 1e3,
                "weight_floor_milliseconds": floor * 1e3, "share_of_ceiling": floor / seconds,
            }
        )  # fmt: skip
        print(report["decode"][-1], flush=True)
    for tokens in _PREFILL.value:
        for replay in ("exact", "bounded"):
            seconds = time_prefill(params, cfg, numerics, tokens, replay)
            report["prefill"].append({"tokens": tokens, "replay": replay, "milliseconds": seconds * 1e3})
            print(report["prefill"][-1], flush=True)
    Path(_OUTPUT.value).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
