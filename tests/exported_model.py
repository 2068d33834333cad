"""A small model and its exported steps, for tests in this process and in others."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
from golden import NOQUANT

import dsv4jax
from dsv4jax.batch import (
    DecodeBucket,
    PrefillBucket,
)
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.random import random_params
from dsv4jax.checkpoint.reduced_config import with_fitted_tables
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import Buckets, DraftBucket, Programs
from dsv4jax.export import export_steps, forbid_tracing, load, program_digests

MODEL = Path(dsv4jax.__file__).parent / "default_model"
FLAGS = os.environ.get("XLA_FLAGS", "")
_WHOLE = ModelConfig.from_checkpoint(MODEL)
CFG = with_fitted_tables(
    dataclasses.replace(
        _WHOLE,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        compress_ratios=(0, 1, 0),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=_WHOLE.engram_num_embeddings[:1],
        engram_vocab_size=100,
        dspark_target_layer_ids=(0, 1),
        quantized=False,
    )
)
"""A window-only layer and one with every mechanism."""
PROMPT = np.arange(5, 27, dtype=np.int32)


def shape(devices: int = 1) -> EngineShape:
    """On one device a deterministic engine, of which every step runs with drafts; over several, plain decode steps."""
    one = devices == 1
    return EngineShape(
        cache=CacheConfig(slots=2, pages=12, page_size=8, drafts="shared" if one else None),
        buckets=Buckets(
            prefill=(PrefillBucket(32, 2, 6),) if one else (),
            decode=() if one else (DecodeBucket(2, 6),),
            masks=(1, 2),
            verify=(DecodeBucket(2, 6, tokens_per_request=2),) if one else (),
            draft=(DraftBucket(2),) if one else (),
        ),
        numerics=NOQUANT,
        max_model_len=48,
        preset="single" if one else "decode_dep",
        devices=devices,
        deterministic=one,
        drafts=1 if one else 0,
    )


def files() -> dict[str, bytes]:
    """Configuration and tokenizer."""
    return {
        "config.json": json.dumps(CFG.to_dict()).encode(),
        "tokenizer.json": (MODEL / "tokenizer.json").read_bytes(),
    }


def export(path: Path, devices: int = 1) -> Programs:
    """Compiles the steps and exports them with random weights."""
    made = shape(devices)
    programs = Programs(CFG, made.cache, made.buckets, made.numerics, made.layout, progress=False)
    params = random_params(CFG, 3, made.layout)
    export_steps(
        path, CFG, made, files=files(), params=params, compiled=programs.compiled, xla_flags=FLAGS, progress=False
    )
    return programs


def main(command: str, path: str, results: str, devices: str) -> None:
    """In another process: exports or loads, and writes what `program_digests` gives; after loading, without tracing."""
    if command == "export":
        seen = program_digests(export(Path(path), int(devices)), random_params(CFG, 3, shape(int(devices)).layout))
    else:
        with forbid_tracing():
            loaded = load(path, xla_flags=FLAGS)
            seen = program_digests(loaded.programs(), loaded.load_params())
    Path(results).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
