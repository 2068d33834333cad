"""The steps with kernels lower for Hopper at released widths."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import decided_by_the_host, hopper_mesh, on_hopper

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    concatenate_batches,
    decode_batch,
    prefill_batch,
    speculative_batch,
)
from dsv4jax.bench.steps.cases import decode_case
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.engine.programs import list_programs, make_buckets
from dsv4jax.numerics import FAST, REFERENCE
from dsv4jax.packing import param_shapes
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import decode_step, prefill_step
from sharding import Layout, expert_parallel

CFG = reduced_config(6, n_routed_experts=48, engram_vocab_size=1000, dspark_n_routed_experts=8)
CACHE = CacheConfig(slots=16, pages=16 * 40)


@pytest.mark.parametrize("numerics", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("step", ["decode", "decode in a short context", "prefill"])
def test_the_steps_lower_for_hopper(step, numerics):
    numerics = dataclasses.replace(numerics, implementation="pallas")
    cache = jax.eval_shape(lambda: init_cache(CFG, CACHE, numerics))
    if step.startswith("decode"):
        context, pages = (2000, 40) if step == "decode" else (50, 1)
        tokens = [DecodeTokens([5] * 6, context, slot, range(40 * slot, 40 * slot + pages)) for slot in range(16)]
        batch, run = decode_batch(CFG, CACHE, tokens, DecodeBucket(16, pages, 6)), decode_step
    else:
        bucket = PrefillBucket(512, 1, 40, tile=64, replay="bounded")
        chunk = PrefillChunk(jnp.zeros(2300, jnp.int32), 1700, 2212, 0, range(40))
        batch, run = prefill_batch(CFG, CACHE, [chunk], bucket), prefill_step
    with on_hopper():
        traced = run.trace(param_shapes(CFG, numerics), cache, batch, cfg=CFG, numerics=numerics)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert not decided_by_the_host(lowered)
    text = lowered.as_text()
    kernels = text.count("custom_call @mosaic_gpu")
    # Each once for all layers that call it with the same shapes.
    assert 10 <= kernels <= 40
    if step.startswith("decode"):
        # Records of the caches are written by kernels, in place.
        scatters = re.findall(r"stablehlo\.scatter.*?\}\) : \((tensor<[^>]*>)", text, re.DOTALL)
        assert scatters and not [kind for kind in scatters if "ui8" in kind]
        # Nothing is sorted or bisected over the vocabulary.
        sorts = re.findall(r"stablehlo\.sort.*?\}\) : \((tensor<[^>]*>)", text, re.DOTALL)
        assert sorts and not [kind for kind in sorts if str(CFG.vocab_size) in kind]
        assert "stablehlo.while" not in text


def test_a_step_over_two_devices_lowers_for_hopper():
    numerics = dataclasses.replace(FAST, implementation="pallas")
    layout = Layout(hopper_mesh(2), expert_parallel())
    case = decode_case(CFG, 16, 1, 2000)
    both = dataclasses.replace(case.cache_cfg, slots=2 * case.cache_cfg.slots, pages=2 * case.cache_cfg.pages)
    with jax.sharding.use_abstract_mesh(layout.mesh):
        batch, cache = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.by_rank),
            (concatenate_batches([case.batch] * 2), jax.eval_shape(lambda: init_cache(CFG, both, numerics))),
        )
        params = param_shapes(CFG, numerics, layout)
        traced = decode_step.trace(params, cache, batch, cfg=CFG, numerics=numerics, layout=layout)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 10
    assert "all_gather" in text and "reduce_scatter" in text


@pytest.mark.parametrize(
    ("layout", "most"),
    [(Layout(), 69_849), (Layout(emulated_ranks=8), 8737), (Layout(hopper_mesh(2), expert_parallel()), 34_938)],
)
def test_a_prefill_bucket_beyond_what_the_kernels_address_is_refused_by_name(layout, most):
    """The experts of a device are sent the tokens of all ranks."""

    def listed(tokens, implementation):
        sizes = {"prefill_requests": 1, "decode_requests": [1], "contexts": [4096], "tile": 1}
        buckets = make_buckets(CACHE, prefill_tokens=[16, tokens], **sizes)
        return list_programs(CFG, CACHE, buckets, dataclasses.replace(FAST, implementation=implementation), layout)

    with pytest.raises(ValueError, match=rf"^prefill_tokens = {most + 1}: must be at most {most}, so that"):
        listed(most + 1, "pallas")
    if layout.mesh is None:
        assert len(listed(most, "pallas")) == len(listed(most + 1, "reference"))


def test_the_steps_with_drafts_lower_for_hopper():
    """A draft round, and a step that verifies drafts, keeps context keys and drafts anew."""
    numerics = dataclasses.replace(REFERENCE, implementation="pallas")
    cache_cfg = dataclasses.replace(CACHE, drafts="own")
    cache = jax.eval_shape(lambda: init_cache(CFG, cache_cfg, numerics))
    batch = speculative_batch(CFG, cache_cfg, [], DecodeBucket(16, 1, 6))
    with on_hopper():
        params = param_shapes(CFG, numerics)
        arguments = {"cfg": CFG, "numerics": numerics}
        for traced in (
            draft_step.trace(params, cache, batch, **arguments),
            speculative_step.trace(params, cache, batch, **arguments, step_seconds=np.ones(97, np.float32)),
        ):
            lowered = traced.lower(lowering_platforms=("cuda",))
            assert not decided_by_the_host(lowered)
            assert "mosaic_gpu" in lowered.as_text()
