"""The way of the data around the kernels of attention: with references in their place, the same bits result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import small_model

from dsv4jax import linear
from dsv4jax.batch import DecodeBucket, DecodeTokens, decode_batch
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.linear import Activations
from dsv4jax.model import attention, indexer
from dsv4jax.model.layout import full_layout, tile_windows
from dsv4jax.model.rope import rotation
from dsv4jax.model.transformer import merge
from dsv4jax.numerics import REFERENCE

KERNELS = {
    attention: ("query_and_window_key", "compressed_entry", "index_key", "fp8_grouped_linear", "sparse_attention"),
    linear: ("fp8_linear",),
}


@pytest.fixture
def kernels_by_reference(monkeypatch):
    """Kernels are their references; the indexer, whose kernel rounds scores less, is plain."""

    def by_reference(kernel, *args, **kwargs):
        return kernel(*args, **kwargs | {"implementation": "reference"})

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(by_reference, getattr(module, name)))
    select = indexer.Indexer.select
    monkeypatch.setattr(indexer.Indexer, "select", lambda *args: select(*args[:-1], REFERENCE))


def test_decode_steps_of_attention(kernels_by_reference):
    """Windows wrap around, requests have different lengths, tokens are taken back, and one row is padding."""
    model, width, pages = small_model(quantized=True), 3, 6
    cfg = model.cfg
    cache_cfg = CacheConfig(slots=3, pages=3 * pages, page_size=8, slack=width)
    rng = np.random.default_rng(0)
    starts, plans = [0, 0], []
    while min(starts) < 2 * cfg.sliding_window + 3 * width:
        lengths = rng.integers(1, width + 1, 2)
        plans.append(list(zip(starts, lengths.tolist(), strict=True)))
        starts = [start + int(rng.integers(1, n + 1)) for start, n in plans[-1]]
    assert max(starts) + width <= 8 * pages
    inputs = jnp.asarray(rng.standard_normal((len(plans), 3, 3 * width, cfg.hidden_size)), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="numerics")
    def run(batch, inputs, cache, numerics):
        layers, layout = merge(cfg, model.params).layers, full_layout(batch, decode=True)
        windows, outputs = tile_windows(layout, cfg.sliding_window), []
        for i, x in zip((0, 2, 5), inputs, strict=True):
            by, attn = rotation(cfg, layout.positions, bool(cfg.ratio(i))), layers[i].attn
            if cfg.ratio(i):
                cache = attn.store_entries(x, layout, cache, numerics)
            y, cache, _ = attn(Activations(x), layout, windows, by, cache, None, numerics)
            outputs.append(y)
        return outputs, cache

    caches = [init_cache(cfg, cache_cfg, REFERENCE)] * 2
    for x, plan in zip(inputs, plans, strict=True):
        requests = [
            DecodeTokens([5] * n, start, slot, range(pages * slot, pages * (slot + 1)))
            for slot, (start, n) in enumerate(plan)
        ]
        batch = decode_batch(cfg, cache_cfg, requests, DecodeBucket(3, pages, width))
        want, caches[0] = run(batch, x, caches[0], REFERENCE)
        got, caches[1] = run(batch, x, caches[1], dataclasses.replace(REFERENCE, implementation="pallas"))
        for a, b in zip(jax.tree.leaves((got, caches[1])), jax.tree.leaves((want, caches[0])), strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(np.any(ring != 0) for ring in caches[0].windows[:1]) and np.any(caches[0].entries[0] != 0)
