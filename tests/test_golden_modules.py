"""Every module of every layer from its golden input, so that the first wrong one is named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA, FLOAT32, NOQUANT, TINY, Golden, golden
from golden_impl import ngrams

from dsv4jax.batch import PrefillBucket, PrefillChunk, prefill_batch
from dsv4jax.cache import COMPRESSED_ENTRY, INDEX_KEY, WINDOW_KEY, Cache, CacheConfig, init_cache
from dsv4jax.engram_hash import rows_on_device
from dsv4jax.linear import Activations, linear_fp32
from dsv4jax.model.hyper_connections import Mix, collapse, expand, first_mix, settled_residual
from dsv4jax.model.indexer import Selection, index_scores, visible_entries
from dsv4jax.model.layout import full_layout, tile_windows
from dsv4jax.model.moe import sqrt_softplus
from dsv4jax.model.rope import rotate, rotation
from dsv4jax.model.transformer import Layer, merge
from dsv4jax.numerics import Numerics

Arrays = dict[str, jax.Array]
State = tuple[Cache, Selection | None]

NUMERICS = {"modules_fp32_noquant": NOQUANT, "modules_fp32": FLOAT32}
EXACT = ("engram_rows", "engram_embed", "gate_indices")


def stored_keys(file: str) -> list[str]:
    """What both models' files hold per layer; `topk_margin` describes the reference's own selection."""
    keys = {k[4:] for name in TINY for k in np.load(DATA / name / f"{file}.npz").files if k.startswith("L")}
    return sorted(keys - {"topk_margin"})


@functools.cache
def captures(name: str, file: str) -> dict[str, np.ndarray]:
    """What our modules make of the golden inputs of one file, under the keys of that file, without the batch axis."""
    g = golden(name)
    given = {k: jnp.asarray(v.reshape(v.shape[1:] if v.shape[0] == 1 else v.shape)) for k, v in g.data(file).items()}
    return jax.device_get(jax.jit(functools.partial(all_captures, g, NUMERICS[file]))(g.params, given))


def all_captures(g: Golden, numerics: Numerics, params: Any, given: Arrays) -> Arrays:
    """`captures`, traced."""
    cfg, model = g.cfg, merge(g.cfg, params)
    ids = g.data("inputs")["ids_modules"][0]
    state: State = init_cache(cfg, CacheConfig(slots=1, pages=1), numerics), None
    streams = jnp.repeat(model.embed.get_value().weight[ids].astype(numerics.dtype)[:, None], cfg.hc_mult, 1)
    pre, out = first_mix(len(ids), cfg.hc_mult), {}
    for i, layer in enumerate(model.layers):
        inputs = {k[4:]: v for k, v in given.items() if k.startswith(f"L{i:02d}.")}
        made, state = attention_captures(g, layer, i, inputs["attn_in"], state, numerics)
        if "streams_in" in inputs:
            made |= {"streams_in": streams, "pre_mix_in": pre}
            more, streams, pre = block_captures(g, layer, i, inputs, numerics)
            made |= more
        out |= {f"L{i:02d}.{k}": v for k, v in made.items()}
    out["logits"] = model.logits(model.norm(collapse(streams, pre)))
    return out


def sequence(g: Golden):
    """Layout and windows of `ids_modules`, one tile from position 0."""
    ids = g.data("inputs")["ids_modules"][0]
    bucket = PrefillBucket(tokens=len(ids), requests=1, pages=1, tile=len(ids))
    chunk = PrefillChunk(ids, 0, len(ids), slot=0, pages=[0])
    batch = prefill_batch(g.cfg, CacheConfig(slots=1, pages=1), [chunk], bucket)
    layout = full_layout(jax.tree.map(jnp.asarray, batch))
    return layout, tile_windows(layout, g.cfg.sliding_window)


def attention_captures(
    g: Golden, layer: Layer, i: int, x: jax.Array, state: State, numerics: Numerics
) -> tuple[Arrays, State]:
    """Attention of layer i from its golden input; `state` was made by earlier layers from theirs."""
    cfg, attn, ratio = g.cfg, layer.attn, g.cfg.ratio(i)
    cache, selection = state
    layout, windows = sequence(g)
    by = rotation(cfg, layout.positions, compressed=bool(ratio))
    made = {}
    made["q_latent"], made["q_rope"] = attn.query(Activations(x), by, numerics)
    made["kv_rope"] = attn.window_key(Activations(x), by, numerics)
    key = WINDOW_KEY.store(made["kv_rope"], numerics)
    made["kv"] = WINDOW_KEY.load(key, numerics)
    if i in cfg.kv_source_layer_ids:
        made |= compressor_captures(cfg, attn, x, layout, cache, numerics)
        cache = attn.store_entries(x, layout, cache, numerics)
        made["compressed_kv"] = first_page(COMPRESSED_ENTRY, cache.entries[attn.source], len(x) // ratio, numerics)
        made["idx_k"] = first_page(INDEX_KEY, cache.index_keys[attn.source], len(x) // ratio, numerics)
    if ratio:
        seen = jnp.arange(len(x) // ratio) < visible_entries(layout.positions, layout.valid, ratio)[:, None]
    if i in cfg.index_source_layer_ids:
        made["idx_q"] = attn.indexer.query(made["q_latent"], by, numerics)
        made["idx_weights"] = attn.indexer.head_weights(x, numerics)
        keys = first_page(INDEX_KEY, cache.index_keys[attn.source], len(x) // ratio, numerics)
        scores = index_scores(made["idx_q"], made["idx_weights"], keys, numerics)
        made["idx_scores"] = jnp.where(seen, scores, -jnp.inf)
    made["attn_out"], cache, selection = attn(Activations(x), layout, windows, by, cache, selection, numerics)
    if ratio:
        made["topk"] = selection.positions
    if ratio and selection.candidates is not None:
        # The reference leaves entries of a kept block out that the query does not see.
        pool = jnp.repeat(selection.candidates, cfg.candidate_block_size, -1)[:, : len(x) // ratio]
        made["candidates"] = pool & seen
    made["attended_unrope"] = attn.attend(
        made["q_rope"], key, cache.windows[i], layout, windows, by, cache, selection, numerics
    )
    return made, (cache, selection)


def compressor_captures(cfg, attn, x, layout, cache, numerics) -> Arrays:
    """What a KV source stores, before it is quantised."""
    latent, _ = attn.compressor(x, layout, cache.open_groups, numerics)
    latent = latent[attn.ratio - 1 :: attn.ratio]
    by = rotation(cfg, jnp.arange(len(latent)) * attn.ratio, compressed=True)
    return {
        "compressor_out": latent,
        "ckv_rope": rotate(latent, by),
        "idx_k_rope": attn.indexer.key(latent, by, numerics),
    }


def first_page(kind, pool: jax.Array, entries: int, numerics: Numerics) -> jax.Array:
    """The entries of the one request."""
    return kind.load(pool[0, :entries], numerics)


def block_captures(
    g: Golden, layer: Layer, i: int, inputs: Arrays, numerics: Numerics
) -> tuple[Arrays, jax.Array, jax.Array]:
    """Everything around attention in layer i, each step from its golden input; the streams and mix it hands on."""
    layout, _ = sequence(g)
    made, streams = {}, inputs["streams_in"]
    if i in g.cfg.engram_layer_ids:
        token_map = g.data("engram_hash")["token_map"]
        history = ngrams(token_map[g.data("inputs")["ids_modules"][0]], g.cfg.engram_max_ngram_size)
        rows = rows_on_device(g.cfg, jnp.asarray(history), jnp.int32(token_map[g.cfg.engram_pad_token_id]))
        made["engram_rows"] = rows[:, g.cfg.engram_layer_ids.index(i)]
        made["engram_embed"] = layer.engram.lookup(inputs["engram_rows"], numerics.dtype)
        made["engram_out"] = layer.engram(streams, inputs["engram_embed"], layout.valid, numerics)
        streams = inputs["engram_out"]
    golden_mix = {}
    for site, before in (("attn_hc", streams), ("ffn_hc", inputs["streams_mid"])):
        mix = layer.mix("hc_attn" if site == "attn_hc" else "hc_ffn", before)
        made |= {f"{site}_pre": mix.pre, f"{site}_post": mix.post, f"{site}_comb": mix.residual}
        golden_mix[site] = Mix(*(inputs[f"{site}_{part}"] for part in ("pre", "post", "comb")))
    made["attn_in"] = layer.enter("hc_attn", settled_residual(streams, inputs["pre_mix_in"]), numerics)[1].values
    made["streams_mid"] = expand(inputs["attn_out"], streams, golden_mix["attn_hc"])
    made["moe_in"] = layer.ffn_norm(collapse(inputs["streams_mid"], inputs["attn_hc_pre"]))
    x, ffn = inputs["moe_in"], layer.ffn
    made["gate_scores"] = sqrt_softplus(linear_fp32(x, ffn.gate.weight[...]))
    made["gate_indices"], made["gate_weights"] = ffn.gate(x, layout.image_mask, ffn.k, ffn.scale)
    made["moe_shared"] = ffn.shared_experts(Activations(x), numerics)
    made["moe_out"], _ = ffn(Activations(x), layout.valid, layout.image_mask, numerics)
    return made, expand(inputs["moe_out"], inputs["streams_mid"], golden_mix["ffn_hc"]), golden_mix["ffn_hc"].pre


def wrong_rows(got: np.ndarray, want: np.ndarray, key: str, atol: float) -> np.ndarray:
    """Which tokens differ from the golden capture."""
    if key == "topk":
        got, want = np.sort(got), np.sort(want)
    exact = key in EXACT or key == "topk" or got.dtype == bool
    same = got == want if exact else np.isclose(got, want, rtol=1e-5, atol=atol)
    return ~same.reshape(len(got), -1).all(-1)


def layers_with(name: str, file: str, key: str) -> list[str]:
    """The file's keys for one module, one per layer."""
    return [k for k in golden(name).data(file).files if k[4:] == key]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("key", stored_keys("modules_fp32_noquant"))
def test_without_rounding(name, key):
    """Every row of every layer to 1e-5; indices, rows and masks exactly."""
    for full in layers_with(name, "modules_fp32_noquant", key):
        got, want = captures(name, "modules_fp32_noquant")[full], golden(name).data("modules_fp32_noquant")[full]
        wrong = wrong_rows(got, want.reshape(got.shape), key, atol=1e-5)
        assert not wrong.any(), f"{full}: rows {np.flatnonzero(wrong)}"


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("key", [k for k in stored_keys("modules_fp32") if k != "attn_in"])
def test_attention_with_quantised_caches(name, key):
    """99 % of all rows to 2e-5: a value at a rounding boundary may fall to the other side."""
    wrong = []
    for full in layers_with(name, "modules_fp32", key):
        got, want = captures(name, "modules_fp32")[full], golden(name).data("modules_fp32")[full]
        wrong.append(wrong_rows(got, want.reshape(got.shape), key, atol=2e-5))
    assert np.concatenate(wrong).mean() <= 0.01, [int(w.sum()) for w in wrong]


@pytest.mark.parametrize("name", TINY)
def test_logits_of_the_last_streams(name):
    got = captures(name, "modules_fp32_noquant")["logits"]
    np.testing.assert_allclose(got, golden(name).data("modules_fp32_noquant")["logits"][0], rtol=1e-5, atol=2e-5)
