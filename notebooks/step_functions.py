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
# # Calling the step functions by hand
#
# The server, the scripts and this notebook run the same two jitted functions:
#
#     cache, output = prefill_step(params, cache, batch, cfg=cfg)
#     cache, output = decode_step(params, cache, batch, cfg=cfg)
#
# Everything goes in as an argument and comes back as a result. The cache is donated, so always continue with the
# one that was returned.

# %%
import importlib.resources

import matplotlib.pyplot as plt
import numpy as np

from dsv4jax.batch import DecodeBucket, DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.cache import CacheConfig, init_cache, page_bytes_per_token
from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import decode_step, forward, prefill_step, start_request
from dsv4jax.tokenizer import Tokenizer

# %% [markdown]
# ## The model
#
# The embedded default has random weights: it writes nonsense, through every mechanism of the real model.

# %%
path = importlib.resources.files("dsv4jax") / "default_model"
cfg = ModelConfig.from_checkpoint(path)
tokenizer = Tokenizer.from_checkpoint(path)
params = load_params(path, cfg, progress=False)
[(layer, cfg.mode(layer), cfg.ratio(layer), cfg.kv_source(layer)) for layer in range(cfg.num_hidden_layers)]

# %% [markdown]
# Parameters are a plain nested dict; quantised weights stay quantised.

# %%
params["layers"][2]["attn"]["wq_a"]

# %% [markdown]
# ## A cache and a prompt
#
# A page holds the compressed entries and index keys of `page_size` tokens. Windows belong to slots.

# %%
text = "One page covers some tokens of one request. " * 6
prompt = tokenizer.encode(text)
cache_cfg = CacheConfig(slots=2, pages=16, page_size=64)
cache = init_cache(cfg, cache_cfg)
pages = [3, 1, 4, 15, 9, 2]  # any free pages, in any order
slot = 1
print(
    len(prompt),
    "tokens,",
    page_bytes_per_token(cfg),
    "bytes of pages per token here;",
    page_bytes_per_token(ModelConfig()),
    "at released size",
)

# %% [markdown]
# ## Prefill in two chunks
#
# A bucket is a static shape. Here: up to 192 tokens of one request, contexts of up to 6 pages.

# %%
greedy = RequestSampling(temperature=0.0)
bucket = PrefillBucket(tokens=192, requests=1, pages=6)

rows = request_rows(prompt, [], {}, cfg.vocab_size)
cache = start_request(cache, np.int32(slot), *rows, np.int32(len(prompt)))
middle = len(prompt) // 2
for start, end in ((0, middle), (middle, len(prompt))):
    chunk = PrefillChunk(prompt, start, end, slot, pages, sampling=greedy)
    batch = prefill_batch(cfg, cache_cfg, [chunk], bucket)
    cache, prefilled = prefill_step(params, cache, batch, cfg=cfg, collect=True)
tokenizer.token(int(prefilled.tokens[0, 0]))

# %% [markdown]
# ## Decode
#
# One token at a time, and then several in one call: the later ones may be drafts. Their rows hold exactly what single
# steps give; to reject a suffix, continue from a smaller `start`.

# %%
bucket = DecodeBucket(requests=1, pages=6, tokens_per_request=6)
tokens = [int(prefilled.tokens[0, 0])]
for _ in range(12):
    newest = DecodeTokens(tokens[-1:], len(prompt) + len(tokens) - 1, slot, pages, greedy)
    cache, output = decode_step(params, cache, decode_batch(cfg, cache_cfg, [newest], bucket), cfg=cfg)
    tokens.append(int(output.tokens[0, 0]))

start = len(prompt) + len(tokens) - 7
again = DecodeTokens(tokens[-7:-1], start, slot, pages, greedy)
cache, output = decode_step(params, cache, decode_batch(cfg, cache_cfg, [again], bucket), cfg=cfg)
assert output.tokens[0].tolist() == tokens[-6:]
tokenizer.decode(tokens)

# %% [markdown]
# The same tokens from one run over the whole sequence, without cache:

# %%
whole = forward(params, np.concatenate([prompt, tokens[:-1]])[None], cfg=cfg)
agreement = np.asarray(whole.logits[0, len(prompt) - 1 :].argmax(-1)) == np.array(tokens)
print(f"{agreement.mean():.0%} of the greedy tokens agree")

# %% [markdown]
# ## Expert load
#
# Tokens routed to each expert in the last prefill chunk, padding excluded.

# %%
load = np.asarray(prefilled.expert_load)
figure, axes = plt.subplots(figsize=(7, 3))
image = axes.imshow(load, aspect="auto")
axes.set(xlabel="expert", ylabel="layer", title=f"{load[0].sum()} assignments per layer")
figure.colorbar(image)
# %% [markdown]
# ## Selected positions
#
# Which compressed entries each index source picked for the tokens of the last chunk. Layers 2 and 4 see one entry per
# two tokens; layer 8 chooses only from the blocks that layer 6 kept as candidates.

# %%
figure, panels = plt.subplots(1, len(prefilled.selections), figsize=(12, 3), sharey=True)
for panel, layer, selection in zip(panels, cfg.index_source_layer_ids, prefilled.selections, strict=True):
    selection = np.asarray(selection)[: len(prompt) - middle]
    rows = np.broadcast_to(np.arange(len(selection))[:, None], selection.shape)
    kept = selection >= 0
    panel.plot(selection[kept], middle + rows[kept], ",")
    panel.set(title=f"layer {layer}, ratio {cfg.ratio(layer)}", xlabel="entry")
panels[0].set_ylabel("query position")
panels[0].invert_yaxis()
