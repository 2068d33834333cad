"""The way of the data around the kernels: with a reference in the place of each, decode steps give the same bits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from golden import small_model

from dsv4jax import linear, steps
from dsv4jax.batch import DecodeBucket, DecodeTokens, decode_batch
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.model import attention, block, indexer, moe
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling_settings import RequestSampling

KERNELS = {
    attention: ("query_and_window_key", "compressed_entry", "index_key", "fp8_grouped_linear", "sparse_attention"),
    indexer: ("index_select",),
    linear: ("fp8_linear",),
}


@pytest.fixture
def kernels_by_reference(monkeypatch):
    """Kernels are their references; sites and experts, whose weights kernels take in another form, are plain."""

    def by_reference(kernel, *args, **kwargs):
        return kernel(*args, **kwargs | {"implementation": "reference"})

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(by_reference, getattr(module, name)))
    enter, experts = block.Block.enter, moe.moe_experts
    monkeypatch.setattr(block.Block, "enter", lambda self, site, residual, _: enter(self, site, residual, REFERENCE))
    monkeypatch.setattr(moe, "moe_experts", lambda *args, **kwargs: experts(*args, **kwargs | {"numerics": REFERENCE}))


def test_decode_steps(kernels_by_reference):
    """Windows wrap around, requests have different lengths, tokens are taken back, and one row is padding."""
    model = small_model(quantized=True)
    cfg, width = model.cfg, 3
    cache_cfg = CacheConfig(slots=3, pages=24, page_size=8, slack=width)
    rng = np.random.default_rng(0)
    plans, starts = [], [0, 0]
    while min(starts) < cfg.sliding_window + 3 * width:
        lengths = rng.integers(1, width + 1, 2)
        tokens = [rng.integers(3, cfg.vocab_size, n).tolist() for n in lengths]
        plans.append([(t, start, i) for i, (t, start) in enumerate(zip(tokens, starts, strict=True))])
        starts = [start + int(rng.integers(1, n + 1)) for start, n in zip(starts, lengths, strict=True)]
    assert max(starts) <= 12 * 8

    def run(numerics):
        cache, outputs = init_cache(cfg, cache_cfg, numerics), []
        for plan in plans:
            requests = [
                DecodeTokens(tokens, start, slot, range(12 * slot, 12 * slot + 12), RequestSampling(temperature=0.0))
                for tokens, start, slot in plan
            ]
            batch = decode_batch(cfg, cache_cfg, requests, DecodeBucket(3, 12, width))
            cache, output = steps.decode_step(model.params, cache, batch, cfg=cfg, numerics=numerics)
            outputs.append(output.logits[:2])
        return cache, outputs

    want_cache, want = run(REFERENCE)
    cache, got = run(dataclasses.replace(REFERENCE, implementation="pallas"))
    np.testing.assert_array_equal(got, want)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(want_cache), strict=True):
        np.testing.assert_array_equal(a, b)
