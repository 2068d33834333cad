"""Plausible mistakes, made in our own model: each must be the mistake it claims to be, and the golden data must see it.

Compiling the model once per mistake would take minutes, so it is compiled once with every mistake built in behind a
traced switch. Mistakes in weights need no switch.
"""

import copy
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA, FLOAT32, NOQUANT, TINY, Golden, functions, golden
from golden_impl import ngrams
from test_golden_model import TOLERANCE

from dsv4jax import engram_hash, linear
from dsv4jax.batch import PrefillBucket, PrefillChunk, StepBatch, prefill_batch
from dsv4jax.cache import WINDOW_KEY, CacheConfig, RecordFormat, init_cache
from dsv4jax.config import ModelConfig, RopeScaling
from dsv4jax.engram_hash import DEAD
from dsv4jax.linear import Activations
from dsv4jax.model import attention, block, hyper_connections, indexer, moe, norm, rope, transformer
from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.model.transformer import merge
from dsv4jax.params import named_leaves
from dsv4jax.quant import ceil_div, qdq_fp8
from pallas_kernels.moe_experts import reference
from pallas_kernels.sparse_attention import reference as sparse_attention

SENSITIVITY = json.loads((DATA / "functions" / "mutation_sensitivity.json").read_text(encoding="utf-8"))
"""How far each mistake moved the logits of the reference."""
TILE = 16
PAGE = 64
SWITCHES = (
    "candidates_ignored",
    "reindex_as_reuse",
    "newest_block_not_pinned",
    "residual_transposed",
    "not_unrotated",
    "multipliers_reversed",
    "caches_quantised",
    "index_key_from_rotated_latent",
    "partial_group_visible",
    "gate_clamped_below",
    "bias_in_weight",
    "engram_at_images",
    "rotated_at_end_of_group",
    "half_split_pairs",
    "own_mix",
)
Switches = dict[str, Any]


def no_mistake(cfg: ModelConfig) -> Switches:
    """Right values for the parts of the configuration that enter as arguments, and all switches off."""
    return {
        "sliding_window": cfg.sliding_window,
        "index_topk": cfg.index_topk,
        "frequencies": rope.frequencies(cfg, compressed=True),
        "hc_sinkhorn_iters": cfg.hc_sinkhorn_iters,
        "hc_eps": np.float32(cfg.hc_eps),
        "rms_norm_eps": np.float32(cfg.rms_norm_eps),
        "routed_scaling_factor": np.float32(cfg.routed_scaling_factor),
        "swiglu_limit": np.float32(cfg.swiglu_limit),
        "engram_pad": -1,
        "first_mix": np.float32([1, 0, 0, 0]),
    } | dict.fromkeys(SWITCHES, False)


def build_in(patch: pytest.MonkeyPatch, m: Switches) -> None:
    """Puts every mistake into the functions of the model, switched by the traced values of `m`."""
    _build_into_attention(patch, m)
    _build_into_selection(patch, m)
    _build_into_streams(patch, m)
    _build_into_experts_and_engram(patch, m)


def unchecked(function: Callable) -> Callable:
    """The function without run-time checks, which take no traced value for a number."""
    return inspect.unwrap(function)


def _build_into_attention(patch: pytest.MonkeyPatch, m: Switches) -> None:
    tile_windows = transformer.tile_windows
    plain_frequencies = rope.frequencies
    plain_rotate, plain_rotation, store_entries = rope.rotate, rope.rotation, attention.Attention.store_entries

    def windows(layout, window):
        wide = tile_windows(layout, window + 1)
        queries = layout.tiles(layout.positions)[..., None]
        return wide.replace(visible=wide.visible & (wide.positions[:, None] > queries - m["sliding_window"]))

    def frequencies(cfg, compressed):
        return m["frequencies"] if compressed else plain_frequencies(cfg, compressed)

    def inverse(by):
        keep = m["not_unrotated"]
        return Rotation(jnp.where(keep, 1, by.cos), jnp.where(keep, 0, -by.sin))

    def rotate(x, by):
        return jnp.where(m["half_split_pairs"], rotate_half_split(x, by), plain_rotate(x, by))

    def late_entries(self, *args):
        def rotation(cfg, positions, compressed):
            return plain_rotation(cfg, positions + m["rotated_at_end_of_group"] * (self.ratio - 1), compressed)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(attention, "rotation", rotation)
            return store_entries(self, *args)

    def store(self, x, numerics):
        return jnp.where(m["caches_quantised"], self.unpack(self.pack(x), x.dtype), x)

    patch.setattr(transformer, "tile_windows", windows)
    patch.setattr(rope, "frequencies", frequencies)
    patch.setattr(Rotation, "inverse", inverse)
    for module in (attention, indexer, linear, sparse_attention):
        patch.setattr(module, "rotate", rotate)
    patch.setattr(attention.Attention, "store_entries", late_entries)
    for name in ("store", "rounded"):
        patch.setattr(RecordFormat, name, store)


def rotate_half_split(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotates channel i with channel i + pairs instead of its neighbour."""
    pairs = by.cos.shape[-1]
    head, first, second = x[..., : -2 * pairs], x[..., -2 * pairs : -pairs], x[..., -pairs:]
    return jnp.concatenate([head, first * by.cos - second * by.sin, first * by.sin + second * by.cos], -1)


def _build_into_selection(patch: pytest.MonkeyPatch, m: Switches) -> None:
    select_top, candidate_blocks, visible_entries = (
        indexer.select_top,
        indexer.candidate_blocks,
        indexer.visible_entries,
    )
    select, index_key = indexer.Indexer.select, indexer.Indexer.key

    def top(scores, visible, keep):
        more = select_top(scores, visible, keep + 1)
        right = jnp.pad(select_top(scores, visible, keep), ((0, 0), (0, 1)), constant_values=-1)
        return jnp.where(m["index_topk"] > keep, more, right)

    def candidates(scores, visible, keep, size):
        pinned = candidate_blocks(scores, visible, keep, size)
        padded = jnp.pad(scores, ((0, 0), (0, -scores.shape[-1] % size)), constant_values=-jnp.inf)
        usable = jnp.arange(padded.shape[-1]) < visible[:, None]
        best = jnp.where(usable, padded, -jnp.inf).reshape(len(scores), -1, size).max(-1)
        _, chosen = jax.lax.top_k(best, keep)
        free = jnp.zeros(best.shape, bool).at[jnp.arange(len(best))[:, None], chosen].set(True) & (best > -jnp.inf)
        return jnp.where(m["newest_block_not_pinned"], free, pinned) | m["candidates_ignored"]

    def select_or_reuse(self, x, q_latent, by, pool, layout, previous, numerics):
        made = select(self, x, q_latent, by, pool, layout, previous, numerics)
        if previous is None:
            return made
        return made.replace(positions=jnp.where(m["reindex_as_reuse"], previous.positions, made.positions))

    def visible(positions, valid, ratio):
        seen = visible_entries(positions, valid, ratio)
        return jnp.where(m["partial_group_visible"] & valid, positions // ratio + 1, seen)

    def key(self, latent, by, numerics):
        return index_key(self, jnp.where(m["index_key_from_rotated_latent"], rotate(latent, by), latent), by, numerics)

    patch.setattr(indexer, "select_top", top)
    patch.setattr(indexer, "candidate_blocks", candidates)
    patch.setattr(indexer.Indexer, "select", select_or_reuse)
    patch.setattr(indexer, "visible_entries", visible)
    patch.setattr(indexer.Indexer, "key", key)


def _build_into_streams(patch: pytest.MonkeyPatch, m: Switches) -> None:
    sinkhorn, rms_norm = unchecked(hyper_connections.sinkhorn), unchecked(norm.rms_norm)
    expand, enter = hyper_connections.expand, block.Block.enter

    def expand_or_transposed(y, streams, mix):
        transposed = jnp.swapaxes(mix.residual, -1, -2)
        return expand(y, streams, mix.replace(residual=jnp.where(m["residual_transposed"], transposed, mix.residual)))

    def enter_with_own_mix(self, site, residual, numerics):
        streams, x, mix = enter(self, site, residual, numerics)
        own = self.attn_norm(block.collapse(streams, mix.pre))
        return streams, Activations(jnp.where(m["own_mix"] & (site == "hc_attn"), own, x.values)), mix

    patch.setattr(
        hyper_connections, "sinkhorn", lambda logits, iterations, eps: sinkhorn(logits, m["hc_sinkhorn_iters"], eps)
    )
    patch.setattr(norm, "rms_norm", lambda x, weight, eps: rms_norm(x, weight, m["rms_norm_eps"]))
    patch.setattr(hyper_connections, "expand", expand_or_transposed)
    patch.setattr(block.Block, "enter", enter_with_own_mix)
    patch.setattr(transformer, "first_mix", lambda tokens, streams: jnp.tile(m["first_mix"], (tokens, 1)))


def _build_into_experts_and_engram(patch: pytest.MonkeyPatch, m: Switches) -> None:
    swiglu, router, engram = unchecked(reference.swiglu), moe.Router.__call__, transformer.Engram.__call__
    rows_on_device, hash_constants = transformer.rows_on_device, engram_hash.hash_constants

    def clamped(gate, up, limit):
        low = jnp.where(m["gate_clamped_below"], -m["swiglu_limit"], -jnp.inf)
        return swiglu(jnp.maximum(gate, low), up, m["swiglu_limit"])

    def route(self, x, image_mask, k, scale, routing, implementation):
        experts, weights = router(self, x, image_mask, k, scale, routing, implementation)
        scores = moe.sqrt_softplus(moe.linear_fp32(x, self.weight[...])) + self.bias[...]
        biased = jnp.take_along_axis(scores, experts, -1)
        biased = biased / (jnp.sum(biased, -1, keepdims=True) + 1e-20) * scale
        return experts, jnp.where(m["bias_in_weight"], biased, weights) * (m["routed_scaling_factor"] / scale)

    def rows(cfg, history, pad):
        pad = jnp.where(m["engram_pad"] < 0, pad, m["engram_pad"])
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(engram_hash, "hash_constants", reversed_multipliers)
            wrong = rows_on_device(cfg, history, pad)
        return jnp.where(m["multipliers_reversed"], wrong, rows_on_device(cfg, history, pad))

    def reversed_multipliers(cfg):
        return [dataclasses.replace(c, multipliers=c.multipliers[::-1]) for c in hash_constants(cfg)]

    def inject(self, streams, values, active, numerics):
        return engram(self, streams, values, active | m["engram_at_images"], numerics)

    for module in (reference, moe):
        patch.setattr(module, "swiglu", clamped)
    patch.setattr(moe.Router, "__call__", route)
    patch.setattr(transformer, "rows_on_device", rows)
    patch.setattr(transformer.Engram, "__call__", inject)


def prompts(g: Golden) -> dict[str, np.ndarray]:
    """The short and the long sequence of the file, and the image prompt."""
    inputs = g.data("inputs")
    return {f"len{n}": inputs[f"ids_{n}"][0] for n in SENSITIVITY[g.name]["lens"]} | {"image": inputs["image_ids"][0]}


def prefill_of_prompts(g: Golden) -> StepBatch:
    """All prompts in one step."""
    is_image = g.data("inputs")["image_types"][0] >= 0
    embeddings = g.data("image_inputs_embeds")["inputs_embeds"][0, is_image]
    pages = ceil_div(max(map(len, prompts(g).values())), PAGE)
    chunks = []
    for slot, (key, ids) in enumerate(prompts(g).items()):
        images = {"image_mask": is_image, "image_embeddings": embeddings} if key == "image" else {}
        chunks.append(PrefillChunk(ids, 0, len(ids), slot, range(slot * pages, (slot + 1) * pages), **images))
    tokens = sum(ceil_div(len(c.prompt), TILE) * TILE for c in chunks)
    bucket = PrefillBucket(tokens, requests=len(chunks), pages=pages, tile=TILE, images=len(embeddings))
    return prefill_batch(g.cfg, CacheConfig(len(chunks), len(chunks) * pages, PAGE), chunks, bucket)


@functools.cache
def program(name: str) -> Callable[[Any, Switches], jax.Array]:
    """Logits [tokens, vocab] of the step above, from weights and switches."""
    g = golden(name)
    batch = prefill_of_prompts(g)

    @jax.jit
    def run(params, batch, switches):
        with pytest.MonkeyPatch.context() as patch:
            build_in(patch, switches)
            model = merge(g.cfg, params)
            for layer in model.layers:
                layer.cfg = with_eps(g.cfg, switches)
                if hasattr(layer, "engram"):
                    layer.engram.cfg = with_eps(g.cfg, switches)
            cache = init_cache(g.cfg, CacheConfig(len(batch.slots), batch.page_table.size, PAGE), NOQUANT)
            return model.logits(model.text(batch, cache, decode=False, numerics=NOQUANT).hidden)

    return lambda params, switches: run(params, batch, switches)


def with_eps(cfg: ModelConfig, m: Switches) -> ModelConfig:
    """The configuration with traced values in two fields, which its checks would refuse."""
    cfg = copy.copy(cfg)
    for field in ("hc_eps", "rms_norm_eps"):
        object.__setattr__(cfg, field, m[field])
    return cfg


def logits(name: str, params: Any = None, **mistake: Any) -> dict[str, np.ndarray]:
    """Logits of every prompt under a mistake in weights or switches."""
    g = golden(name)
    switches = no_mistake(g.cfg)
    assert mistake.keys() <= switches.keys()
    flat = np.asarray(program(name)(g.params if params is None else params, switches | mistake))
    out, offset = {}, 0
    for key, ids in prompts(g).items():
        out[key] = flat[offset : offset + len(ids)]
        offset += ceil_div(len(ids), TILE) * TILE
    return out


@functools.cache
def right(name: str) -> dict[str, np.ndarray]:
    """Logits without a mistake."""
    return logits(name)


def changed(params: Any, suffix: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The weights with every array changed whose name ends so."""
    names = [name for name, _ in named_leaves(params)]
    assert any(name.endswith(suffix) for name in names)
    leaves = [change(a) if n.endswith(suffix) else a for n, a in zip(names, jax.tree.leaves(params), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


# Mistakes of the file, by its names: what to change, from the model.
Mistake = Callable[[Golden], dict[str, Any]]
STORED: dict[str, Mistake] = {
    "reload quantised file, unchanged": lambda g: {"params": golden.__wrapped__(g.name).params},
    "window + 1": lambda g: {"sliding_window": g.cfg.sliding_window + 1},
    "window - 1": lambda g: {"sliding_window": g.cfg.sliding_window - 1},
    "candidate pool ignored by reindex layers": lambda g: {"candidates_ignored": True},
    "index_topk + 1": lambda g: {"index_topk": g.cfg.index_topk + 1},
    "reindex layers treated as reuse": lambda g: {"reindex_as_reuse": True},
    "no attention sink": lambda g: {"params": changed(g.params, "attn_sink", lambda a: jnp.full_like(a, -1e30))},
    "no YaRN in compressed layers": lambda g: rotated_with(g, rope_scaling=RopeScaling(factor=1.0)),
    "plain theta in compressed layers": lambda g: rotated_with(g, compress_rope_theta=g.cfg.rope_theta),
    "sinkhorn iterations - 1": lambda g: {"hc_sinkhorn_iters": g.cfg.hc_sinkhorn_iters - 1},
    "hc_eps = 0": lambda g: {"hc_eps": np.float32(0)},
    "no gate bias": lambda g: {"params": changed(g.params, "gate.bias", jnp.zeros_like)},
    "routed_scaling_factor = 1": lambda g: {"routed_scaling_factor": np.float32(1)},
    "no swiglu clamp": lambda g: {"swiglu_limit": np.float32(np.inf)},
    "rms_norm_eps = 1e-6": lambda g: {"rms_norm_eps": np.float32(1e-6)},
    "latest block not forced into the pool": lambda g: {"newest_block_not_pinned": True},
    "comb transposed": lambda g: {"residual_transposed": True},
    "no inverse rope on the attention output": lambda g: {"not_unrotated": True},
    # The file's number is that of id 0; the tiny tokenizers map the padding token 2 to 2.
    "engram pad id not mapped through the token map": lambda g: {"engram_pad": 0},
    "engram multipliers reversed": lambda g: {"multipliers_reversed": True},
    "mean pooling instead of gated pooling (r=2)": lambda g: {
        "params": changed(g.params, "wgate.weight", jnp.zeros_like)
    },
    "cache quantisation on": lambda g: {"caches_quantised": True},
}


def rotated_with(g: Golden, **fields: Any) -> dict[str, Any]:
    """Frequencies of the compressed layers under another configuration."""
    return {"frequencies": rope.frequencies(dataclasses.replace(g.cfg, **fields), compressed=True)}


@pytest.mark.parametrize("name", TINY)
def test_without_a_mistake(name):
    want = golden(name).data("seq_fp32_noquant")
    for key, got in right(name).items():
        assert np.abs(got - want[f"{key}.logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mistake", SENSITIVITY["tiny_a"]["max_abs_logit_change"])
def test_moves_the_logits_as_in_the_reference(name, mistake):
    """By the same amount at both lengths, so it is the same mistake."""
    got = logits(name, **STORED[mistake](golden(name)))
    moved = SENSITIVITY[name]["max_abs_logit_change"][mistake]
    for n, want in zip(SENSITIVITY[name]["lens"], moved, strict=True):
        change = np.abs(got[f"len{n}"] - right(name)[f"len{n}"]).max()
        assert abs(change - want) <= 0.02 * want + 1e-5, n


def test_every_stored_mistake_is_seen():
    """The comparison of whole models catches all but one, and that of the norm catches this one."""
    largest = {
        mistake: max(max(SENSITIVITY[name]["max_abs_logit_change"][mistake]) for name in TINY) for mistake in STORED
    }
    unseen = {mistake for mistake, change in largest.items() if change < 1.5 * TOLERANCE}
    assert unseen == {"reload quantised file, unchanged", "rms_norm_eps = 1e-6"}
    wrong = norm.rms_norm(jnp.asarray(functions()["rmsnorm.x"]), jnp.asarray(functions()["rmsnorm.w"]), 1e-6)
    assert np.abs(wrong - functions()["rmsnorm.y_eps1e-20"]).max() > 1e-3


# Mistakes of section 13 that the file does not have, and the prompt whose golden logits show each.
OTHERS: dict[str, tuple[str, Mistake]] = {
    "index key from the rotated latent": ("len", lambda g: {"index_key_from_rotated_latent": True}),
    "partial group visible": ("len", lambda g: {"partial_group_visible": True}),
    "entry rotated at the last token of its group": ("len", lambda g: {"rotated_at_end_of_group": True}),
    "half-split pairs": ("len", lambda g: {"half_split_pairs": True}),
    "site reads with its own mix": ("len", lambda g: {"own_mix": True}),
    "bias in the routing weight": ("len", lambda g: {"bias_in_weight": True}),
    "text bias for image tokens": ("image", lambda g: {"params": text_bias_everywhere(g.params)}),
    "Engram at image tokens": ("image", lambda g: {"engram_at_images": True}),
    "FP4 nibbles swapped": ("len", lambda g: {"params": changed(g.params, "w1.weight", swap_nibbles)}),
    "Engram scales per 32 rows": ("len", lambda g: {"params": changed(g.params, "embed.scale", per_32_rows)}),
}


def text_bias_everywhere(params: Any) -> Any:
    """bias_vl overwritten with bias."""
    leaves = dict(named_leaves(params))
    values = [leaves[name.replace("gate.bias_vl", "gate.bias")] for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), values)


def swap_nibbles(a: jax.Array) -> jax.Array:
    """The odd column in the low nibble; FP8 weights of the same name stay."""
    return a >> 4 | a << 4 if a.dtype == jnp.uint8 else a


def per_32_rows(scale: jax.Array) -> jax.Array:
    """The scale of the first row of each 32, for all of them."""
    return scale[jnp.arange(len(scale)) // 32 * 32]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mistake", OTHERS)
def test_golden_logits_show(name, mistake):
    prompt, make = OTHERS[mistake]
    got, want = logits(name, **make(golden(name))), golden(name).data("seq_fp32_noquant")
    off = [np.abs(got[key] - want[f"{key}.logits"]).max() for key in got if key.startswith(prompt)]
    assert max(off) > 10 * TOLERANCE


def test_symmetric_gate_clamp():
    """tiny_b never reaches its clamp of 10."""
    g = golden("tiny_a")
    got, want = logits("tiny_a", gate_clamped_below=True), g.data("seq_fp32_noquant")["len97.logits"]
    assert np.abs(got["len97"] - want).max() > 10 * TOLERANCE


def test_mix_not_restarted():
    """Invisible in logits, since all streams enter equal and are normalised; the captured mix shows it."""
    data = golden("tiny_a").data("modules_fp32_noquant")
    carried = data["L11.ffn_hc_pre"][0, -1]
    got = logits("tiny_a", first_mix=carried)
    assert max(np.abs(got[key] - right("tiny_a")[key]).max() for key in got) < TOLERANCE
    assert np.abs(carried - data["L00.pre_mix_in"]).max() > 10 * 1e-5


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mistake", ["before rotation", "without the rotated channels"])
def test_window_keys_quantised(name, mistake, monkeypatch):
    """The captured window keys show both."""
    g = golden(name)
    data, width = g.data("modules_fp32"), g.cfg.qk_rope_head_dim
    attn = merge(g.cfg, g.params).layers[0].attn
    x = jnp.asarray(data["L00.attn_in"][0])
    by = rope.rotation(g.cfg, jnp.arange(len(x)), compressed=False)

    def wrong_share():
        key = WINDOW_KEY.load(WINDOW_KEY.store(attn.window_key(Activations(x), by, FLOAT32), FLOAT32), FLOAT32)
        return np.mean(np.abs(key - data["L00.kv"][0]).max(-1) > 10 * 2e-5)

    assert wrong_share() <= 0.01
    if mistake == "before rotation":
        monkeypatch.setattr(attention, "rotate", lambda x, by: rotate(qdq_fp8(x), by))
        monkeypatch.setattr(RecordFormat, "store", lambda self, x, numerics: x)
        monkeypatch.setattr(RecordFormat, "load", lambda self, x, numerics: x)
    else:
        monkeypatch.setattr(
            RecordFormat,
            "store",
            lambda self, x, numerics: jnp.concatenate([qdq_fp8(x[:, :-width]), x[:, -width:]], -1),
        )
        monkeypatch.setattr(RecordFormat, "load", lambda self, x, numerics: x)
    assert wrong_share() > 0.1


def test_dead_is_sticky():
    """Behind an image token everything hashes as padding; the released hash rows show it."""
    real = np.load(DATA / "functions" / "engram_real.npz")
    pad = int(real["pad_id_compressed"])

    def equal(hidden):
        rows = [ngrams(row, 4) for row in np.where(real["mask"], real["compressed_ids"], hidden)]
        got = np.stack([engram_hash.rows_on_host(ModelConfig(), row, pad) for row in rows])
        return np.array_equal(got, real["rows_masked"])

    assert equal(DEAD)
    assert not equal(pad)
