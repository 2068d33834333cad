"""A model of two layers and an engine for it, for tests with several processes, each of which compiles it."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from test_scheduler import Recorder

import dsv4jax
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.load import load_params
from dsv4jax.checkpoint.random import random_tensor
from dsv4jax.checkpoint.reduced_config import with_fitted_tables
from dsv4jax.checkpoint.safetensors import write_checkpoint
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import Executor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import checkpoint_inventory
from dsv4jax.sampling_settings import RequestSampling
from sharding import Layout

CACHE = CacheConfig(slots=2, pages=24, page_size=8)
LENGTH = 64
BUCKETS = make_buckets(
    CACHE, prefill_tokens=[32], prefill_requests=2, decode_requests=[2], contexts=[LENGTH], prompt_logprobs=False
)


def write_small_checkpoint(directory: Path) -> None:
    """Random weights: a window-only layer, and one of every mechanism; experts divide over 2, 3 and 4 devices."""
    model = Path(dsv4jax.__file__).parent / "default_model"
    whole = ModelConfig.from_checkpoint(model)
    cfg = dataclasses.replace(
        whole,
        num_hidden_layers=2,
        compress_ratios=(0, 1) + (0,) * whole.num_nextn_predict_layers,
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=whole.engram_num_embeddings[:1],
        dspark_target_layer_ids=(0, 1),
        n_routed_experts=12,
        dspark_n_routed_experts=12,
        quantized=False,
    )
    cfg = with_fitted_tables(dataclasses.replace(cfg, engram_vocab_size=100))
    plan = checkpoint_inventory(cfg)
    files = {
        "config.json": json.dumps(cfg.to_dict()).encode(),
        "tokenizer.json": (model / "tokenizer.json").read_bytes(),
    }
    tensors = ((name, random_tensor(name, cfg, 0)) for name in plan)
    write_checkpoint(directory, plan, tensors, shard_bytes=1 << 30, files=files)


def make_executor(checkpoint: Path, layout: Layout) -> JaxExecutor:
    cfg = ModelConfig.from_checkpoint(checkpoint)
    params = load_params(checkpoint, cfg, layout, progress=False)
    numerics = Numerics(dtype=jnp.float32, quantize_activations=False)
    programs = Programs(cfg, CACHE, BUCKETS, numerics, layout, params=params, progress=False)
    return JaxExecutor(params, programs, strict=True)


def make_engine(checkpoint: Path, executor: Executor, ranks: int) -> Engine:
    cfg = ModelConfig.from_checkpoint(checkpoint)
    scheduler = SchedulerConfig(
        slots=CACHE.slots,
        pages=CACHE.pages,
        max_model_len=LENGTH,
        eos_id=1,
        replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, "exact"),
        ranks=ranks,
        page_size=CACHE.page_size,
        prefill_tokens=32,
        prefill_requests=2,
        deterministic=True,
    )
    return Engine(Scheduler(scheduler), executor, Recorder())


def requests() -> list[GenerationRequest]:
    """More than there are slots, of different lengths, some with a common beginning."""
    rng = np.random.default_rng(0)
    base = rng.integers(2, 700, 20)
    made = []
    for i in range(7):
        own = rng.integers(2, 700, 3 + 4 * i)
        prompt = np.concatenate([base if i % 3 == 0 else base[:0], own]).astype(np.int32)
        sampling = RequestSampling(temperature=0.8, seed=i, top_logprobs=1)
        made.append(GenerationRequest(f"r{i}", prompt, max_tokens=12 - i, sampling=sampling, ignore_eos=True))
    return made
