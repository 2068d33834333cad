# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exported executables
#
# Compiling the steps takes minutes; loading compiled ones takes seconds. This notebook exports the steps of a small
# engine, loads them in another process, calls them, and compares with the live ones. `docs/export.md` says when to use
# which of the files.

# %%
import dataclasses
import importlib.resources
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from dsv4jax.batch import DecodeBucket, DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.random import random_params
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import Buckets, Programs
from dsv4jax.export import ExportMismatch, export_steps, forbid_tracing, load
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling import request_rows

# %% [markdown]
# ## Export
#
# A shape says what the programs of an engine are compiled for: the cache, one program per bucket, the layout over
# devices. Weights are not needed to compile, and may be written beside the programs as these take them.

# %%
model = ModelConfig.from_checkpoint(importlib.resources.files("dsv4jax") / "default_model")
# Two layers of the embedded model, one of which has every mechanism, so that it compiles in seconds.
cfg = dataclasses.replace(
    model,
    num_hidden_layers=2,
    compress_ratios=(0, 1, 0, 0, 0),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,),
    candidate_source_layer_id=1,
    engram_layer_ids=(1,),
    engram_num_embeddings=model.engram_num_embeddings[:1],
    dspark_target_layer_ids=(0, 1),
)
params = random_params(cfg, 0)

shape = EngineShape(
    cache=CacheConfig(slots=2, pages=16),
    buckets=Buckets(prefill=(PrefillBucket(64, 1, 2),), decode=(DecodeBucket(1, 2),), masks=(1,)),
    numerics=REFERENCE,
    max_model_len=128,
)
flags = os.environ.get("XLA_FLAGS", "")  # part of what programs depend on
seconds = {}

begin = time.perf_counter()
live = Programs(cfg, shape.cache, shape.buckets, shape.numerics, progress=False)
seconds["compile"] = time.perf_counter() - begin

directory = Path(tempfile.mkdtemp()) / "exported"
# Without `compiled` it would compile them itself.
export_steps(directory, cfg, shape, params=params, compiled=live.compiled, xla_flags=flags, progress=False)

# %% [markdown]
# Per program an executable, which only loads where it was compiled, and StableHLO, which can be compiled elsewhere.

# %%
for file in sorted(directory.iterdir()):
    print(f"{file.name:48} {'directory' if file.is_dir() else f'{file.stat().st_size:>9} B'}")
print("made for this", *json.loads((directory / "manifest.json").read_text())["environment"], sep=", ")

# %% [markdown]
# ## Load, in another process
#
# Nothing of the model is traced there: tracing a step would raise.

# %%
program = """
import sys, time
from dsv4jax.export import forbid_tracing, load
with forbid_tracing():
    begin = time.perf_counter()
    steps = load(sys.argv[1], xla_flags=sys.argv[2])
    params = steps.load_params()
    print(time.perf_counter() - begin)
"""
done = subprocess.run([sys.executable, "-c", program, directory, flags], capture_output=True, text=True, check=True)
seconds["load, weights included"] = float(done.stdout)

# %%
figure, axes = plt.subplots(figsize=(7, 1.5))
axes.barh(list(seconds), list(seconds.values()))
axes.set(xlabel="seconds until the first step can run")
axes.invert_yaxis()

# %% [markdown]
# ## Call
#
# Loaded steps take the arguments of the live ones. The cache is donated, here as there.

# %%
steps = load(directory, xla_flags=flags)
prompt = np.arange(3, 45, dtype=np.int32)
rows = request_rows(prompt, [], {}, cfg.vocab_size)
pages = [3, 1]

with forbid_tracing():
    loaded_params = steps.load_params()
    cache = steps.init_cache(cfg, shape.cache)
    cache = steps.start_request(cache, 0, *rows, len(prompt))
    batch = prefill_batch(cfg, shape.cache, [PrefillChunk(prompt, 0, len(prompt), 0, pages)], shape.buckets.prefill[0])
    before, (cache, prefilled) = cache, steps.prefill_step(loaded_params, cache, batch, cfg=cfg)
    token = int(prefilled.tokens[0, 0])
    newest = decode_batch(cfg, shape.cache, [DecodeTokens([token], len(prompt), 0, pages)], shape.buckets.decode[0])
    cache, decoded = steps.decode_step(loaded_params, cache, newest, cfg=cfg)
assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
token, int(decoded.tokens[0, 0])

# %% [markdown]
# ## Compare
#
# The same two steps by the live programs, bit for bit, down to the cache.

# %%
live_cache = live.start_request(live.init_cache(), np.int32(0), *rows, np.int32(len(prompt)))
live_cache, live_prefilled = live.step(shape.buckets.prefill[0])(params, live_cache, batch)
live_cache, live_decoded = live.step(shape.buckets.decode[0])(params, live_cache, newest)


def same_bits(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


assert same_bits((cache, decoded), (live_cache, live_decoded))
assert same_bits(prefilled.logits, live_prefilled.logits)

# %% [markdown]
# ## What does not fit is refused
#
# By name, and with what stands on both sides. `on_mismatch="recompile"` would compile the portable exports instead.

# %%
try:
    load(directory, xla_flags=f"{flags} --xla_cpu_enable_fast_math=true")
except ExportMismatch as mismatch:
    print(str(mismatch).partition("process: ")[2])
