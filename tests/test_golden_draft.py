"""The draft stages from golden inputs: seven blocks at once, each with the context before its anchor."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import FLOAT32, NOQUANT, TINY, Golden, golden
from serving import Request, Server

from dsv4jax.batch import DecodeBucket, PrefillBucket, PrefillChunk, prefill_batch
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations
from dsv4jax.model.draft import block_windows, store_context
from dsv4jax.model.hyper_connections import Residual, collapse, first_mix, settled_residual
from dsv4jax.model.layout import TileWindow, TokenLayout, block_layout, full_layout
from dsv4jax.model.rope import Rotation, rotation
from dsv4jax.model.transformer import Model, merge
from dsv4jax.numerics import Numerics

Arrays = dict[str, jax.Array]
FILE = "dspark_fp32_noquant"
BLOCK_KEYS = ("attn_in", "attn_out", "moe_in", "moe_out", "streams", "pre_mix")
HEAD_KEYS = ("norm_hidden", "base_logits", "markov_logits", "draft_logits", "confidence_raw")


@functools.cache
def captures(name: str) -> dict[str, np.ndarray]:
    """What our stages make of the golden inputs without rounding, under the file's keys and without the batch axis."""
    g = golden(name)
    return jax.device_get(jax.jit(functools.partial(all_captures, g, NOQUANT))(g.params, inputs_of(g, FILE)))


def inputs_of(g: Golden, file: str) -> Arrays:
    """The arrays of a file without the batch axis."""
    stored = g.data(file)
    return {k: jnp.asarray(stored[k][0]) for k in stored.files}


def all_captures(g: Golden, numerics: Numerics, params: Any, given: Arrays) -> Arrays:
    """`captures`, traced."""
    cfg, model = g.cfg, merge(g.cfg, params)
    layout, windows, by = blocks(cfg, given["anchors"])
    rings = golden_context(g, model, given["target_features"], numerics)
    embeddings = model.embed.get_value().weight[given["noise_ids"].reshape(-1)].astype(numerics.dtype)
    streams = jnp.repeat(embeddings[:, None], cfg.hc_mult, 1)
    residual, out = settled_residual(streams, first_mix(len(streams), cfg.hc_mult)), {}
    for i, (stage, ring) in enumerate(zip(model.mtp, rings, strict=True)):
        inputs = {k: given[f"stage{i}.{k}"] for k in BLOCK_KEYS}
        made: Arrays = {"target": model.mtp[0].context(given["target_features"], numerics)}
        made["attn_in"] = stage.enter("hc_attn", residual, numerics)[1].values
        made["attn_out"] = stage.attend(Activations(inputs["attn_in"]), layout, windows, by, ring, numerics)
        streams, _, mix = stage.enter("hc_attn", residual, numerics)
        streams, x, mix = stage.enter("hc_ffn", Residual(streams, inputs["attn_out"], mix), numerics)
        made["moe_in"] = x.values
        made["moe_out"], _ = stage.ffn(Activations(inputs["moe_in"]), layout.valid, layout.image_mask, numerics)
        made["streams"], made["pre_mix"] = Residual(streams, inputs["moe_out"], mix).settled(), mix.pre
        out |= {f"stage{i}.{k}": v for k, v in made.items()}
        residual = settled_residual(inputs["streams"], inputs["pre_mix"])
    out["raw_hidden"] = collapse(residual.settled(), residual.mix.pre)
    last = model.mtp[-1]
    previous = last.markov_embedding(given["prev_ids"])
    out["norm_hidden"] = last.norm(given["raw_hidden"])
    out["base_logits"] = model.logits(given["norm_hidden"])
    out["markov_logits"] = last.markov_logits(previous)
    out["draft_logits"] = out["base_logits"] + out["markov_logits"]
    out["confidence_raw"] = last.confidence(given["raw_hidden"], previous)
    return out


def blocks(cfg: ModelConfig, anchors: jax.Array) -> tuple[TokenLayout, TileWindow, Rotation]:
    """A block at each anchor, in a slot of its own."""
    count = len(anchors)
    slots, valid = jnp.arange(count, dtype=jnp.int32), jnp.ones(count, bool)
    layout = block_layout(slots, anchors, valid, cfg.dspark_block_size, count)
    return layout, block_windows(layout, cfg.sliding_window), rotation(cfg, layout.positions, compressed=False)


def golden_context(g: Golden, model: Model, features: jax.Array, numerics: Numerics) -> tuple[jax.Array, ...]:
    """Draft rings of one slot per block, written from the golden features of the positions before its anchor."""
    anchors = g.data("dspark_fp32")["anchors"][0]
    length = len(features)
    bucket = PrefillBucket(tokens=length * len(anchors), requests=len(anchors), pages=1, tile=length)
    cache_cfg = CacheConfig(slots=len(anchors), pages=1, drafts="shared")
    ids = np.zeros(length, np.int32)
    chunks = [PrefillChunk(ids, 0, int(end), slot=i, pages=[0]) for i, end in enumerate(anchors)]
    layout = full_layout(jax.tree.map(jnp.asarray, prefill_batch(g.cfg, cache_cfg, chunks, bucket)))
    rings = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan if a.dtype != jnp.uint8 else 255),
                         init_cache(g.cfg, cache_cfg, numerics).draft_windows)  # fmt: skip
    return store_context(model.mtp, jnp.tile(features, (len(anchors), 1)), layout, rings, numerics)


COMPARED = [(name, key) for name in TINY for key in golden(name).data(FILE).files
            if key.startswith("stage") or key in (*HEAD_KEYS, "raw_hidden")]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), COMPARED)
def test_without_rounding(name, key):
    got, want = captures(name)[key], golden(name).data(FILE)[key][0]
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_attention_with_quantised_keys(name):
    """99 % of the rows to 2e-5: a key at a rounding boundary may fall to the other side."""
    g, stored = golden(name), golden(name).data("dspark_fp32")

    @jax.jit
    def attended(params, given):
        model = merge(g.cfg, params)
        layout, windows, by = blocks(g.cfg, given["anchors"])
        rings = golden_context(g, model, given["target_features"], FLOAT32)
        return {
            i: stage.attend(Activations(given[f"stage{i}.attn_in"]), layout, windows, by, ring, FLOAT32)
            for i, (stage, ring) in enumerate(zip(model.mtp, rings, strict=True))
        }

    for i, got in attended(g.params, inputs_of(g, "dspark_fp32")).items():
        want = stored[f"stage{i}.attn_out"][0]
        same = np.isclose(got, want, rtol=1e-5, atol=2e-5).all(-1)
        assert same.mean() >= 0.99, (i, np.flatnonzero(~same))


def test_prefill_and_draft_step_give_the_golden_drafts():
    """From token ids through the model's features and the rings: every anchor is a prompt of that length.

    One feature of tiny_b comes from the encoder half.
    """
    g = golden("tiny_b")
    stored, ids = g.data(FILE), g.data("inputs")["spark_ids"][0]
    anchors, firsts = stored["anchors"][0], stored["noise_ids"][0, :, 0]
    count, block = len(anchors), g.cfg.dspark_block_size
    prefill, decode = PrefillBucket(64 * count, count, pages=1, tile=8), DecodeBucket(count, pages=1)
    server = Server(g.cfg, g.params, NOQUANT, prefill=prefill, decode=decode, slots=count, pages=count, page_size=64,
                    poison=True, drafts="own")  # fmt: skip
    requests = [Request(ids[:n], slot, [slot]) for slot, n in enumerate(anchors)]
    for request in requests:
        server.start(request)
    server.prefill(*((r, 0, len(r.prompt)) for r in requests))
    # The golden blocks begin with the text's own tokens.
    state = server.cache.sampling.replace(next_tokens=jnp.asarray(firsts))
    server.cache = server.cache.replace(sampling=state)
    output = server.draft(*requests)
    assert output.tokens.tolist() == stored["greedy_tokens"][0].tolist()
    # The golden Markov terms and confidences belong to other previous tokens, but for the first of a block.
    first = stored["draft_logits"][0, ::block]
    np.testing.assert_allclose(server.cache.drafts.logits[:, 0], first, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(output.confidences[:, 0], stored["confidence_raw"][0, ::block], rtol=1e-5, atol=5e-5)
