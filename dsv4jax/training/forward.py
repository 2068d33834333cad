"""The text stack over whole sequences as training needs it: differentiable, with the losses that only training has.

The layers are the model's own, and so is their arithmetic. What differs from `Model.text` is where keys come from:
nothing is packed into a cache, window keys are read from the neighbouring tile, and entries that are not selected are
masked instead of not being gathered, as the scatters of a gather's gradient cost more on a GPU than the products they
save at these lengths; likewise every expert runs for every token. Sums over keys may thus be taken in another order;
nothing else is.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Int32

from dsv4jax.cache import COMPRESSED_ENTRY, INDEX_KEY, WINDOW_KEY
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, rows_on_device
from dsv4jax.linear import Activations
from dsv4jax.model.attention import Attention
from dsv4jax.model.hyper_connections import Residual, collapse, first_mix, settled_residual
from dsv4jax.model.indexer import Indexer, index_scores, visible_entries
from dsv4jax.model.layout import TokenLayout, block_layout
from dsv4jax.model.moe import MoE
from dsv4jax.model.rope import Rotation, rotate, rotation
from dsv4jax.model.transformer import Layer, Model
from dsv4jax.numerics import Numerics
from dsv4jax.quant import qdq_fp8
from dsv4jax.training.selection import candidate_mask, top_mask
from dsv4jax.weights import DenseWeight, dequantize
from pallas_kernels.moe_experts.reference import swiglu
from sharding import SINGLE

INDEX_STRIDE = 8
"""The index loss is taken at every so manieth query: neighbours say much the same."""


@flax.struct.dataclass
class TrainingOutput:
    """Result of `training_forward`."""

    hidden: Float[Array, "batch sequence hidden"]
    """After the final norm."""
    features: Float[Array, "batch sequence features"]
    """Of the layers that the draft reads."""
    index_loss: Float[Array, " sources"]
    """Per index source, mean over queries and the layers that use its selection: Kullback-Leibler divergence, in nats,
    of its scores from the attention they stand for."""
    loads: Float[Array, "layers experts"]
    """Share of the tokens that each expert got; sums to the experts per token."""


@flax.struct.dataclass
class _Source:
    """What the newest KV source and index source of a layer provide."""

    entries: Float[Array, "batch entries dim"]
    keys: Float[Array, "batch entries index"]
    selected: Bool[Array, "batch sequence entries"]
    candidates: Bool[Array, "batch sequence entries"] | None
    log_scores: Float[Array, "batch queries entries"]
    """Logarithm of the softmax of the index scores, at every `INDEX_STRIDE`-th query."""


def training_forward(
    model: Model, tokens: Int32[Array, "batch sequence"], *, numerics: Numerics, select: bool, offset: Int[Array, ""]
) -> TrainingOutput:
    """Every token through every layer.

    Args:
      tokens: without padding; the sequence is a multiple of the window and of `INDEX_STRIDE`.
      select: attend to the selected entries, as the model does. False attends to all visible ones, for the time in
        which the indexer has learnt nothing yet.
      offset: first query of the index loss, in 0..INDEX_STRIDE-1.
    """
    cfg, (batch, length) = model.cfg, tokens.shape
    if length % cfg.sliding_window or length % INDEX_STRIDE:
        raise ValueError(f"sequence = {length}: must be a multiple of {cfg.sliding_window} and of {INDEX_STRIDE}")
    sequences = jnp.arange(batch, dtype=jnp.int32)
    layout = block_layout(sequences, jnp.zeros_like(sequences), jnp.ones(batch, bool), length, batch)
    by = tuple(rotation(cfg, layout.positions, compressed) for compressed in (False, True))
    rows = engram_rows(cfg, model.engram_token_map[...], tokens)
    streams = jnp.repeat(model.embedding(tokens.reshape(-1), numerics)[:, None], cfg.hc_mult, 1)
    residual = settled_residual(streams, first_mix(batch * length, cfg.hc_mult))
    source: _Source | None = None
    features, loads = [], []
    index_loss = [jnp.zeros(())] * len(cfg.index_source_layer_ids)
    for i, layer in enumerate(model.layers):
        run = jax.checkpoint(
            functools.partial(_layer, layer, i, layout=layout, by=by, numerics=numerics, select=select),
            policy=jax.checkpoint_policies.save_only_these_names("selection"),
        )
        row = rows[:, cfg.engram_layer_ids.index(i)] if i in cfg.engram_layer_ids else None
        residual, source, mean, divergence, load = run(residual, source, row, offset)
        loads.append(load)
        if i in cfg.dspark_target_layer_ids:
            features.append(mean)
        if cfg.ratio(i):
            n = max(n for n, s in enumerate(cfg.index_source_layer_ids) if s <= i)
            index_loss[n] += divergence
    users = [sum(s <= i < e for i in range(cfg.num_hidden_layers) if cfg.ratio(i)) for s, e in _spans(cfg)]
    return TrainingOutput(
        hidden=model.norm(collapse(residual.settled(), residual.mix.pre)).reshape(batch, length, -1),
        features=jnp.concatenate(features, -1).reshape(batch, length, -1),
        index_loss=jnp.stack(index_loss) / jnp.array(users, jnp.float32),
        loads=jnp.stack(loads),
    )


def _spans(cfg: ModelConfig) -> list[tuple[int, int]]:
    """First layer of each index source and of the one after it."""
    sources = cfg.index_source_layer_ids
    return list(zip(sources, (*sources[1:], cfg.num_hidden_layers), strict=True))


def engram_rows(
    cfg: ModelConfig, token_map: Int32[Array, " vocab"], tokens: Int32[Array, "batch sequence"]
) -> Int32[Array, "tokens layers columns"]:
    """Table rows of every token of whole sequences."""
    ids = token_map[tokens]
    orders = range(cfg.engram_max_ngram_size)
    back = [jnp.pad(ids, ((0, 0), (s, 0)), constant_values=DEAD)[:, : ids.shape[1]] for s in orders]
    history = jnp.stack(back, -1).reshape(ids.size, -1)
    return rows_on_device(cfg, history, token_map[cfg.engram_pad_token_id])


def _layer(
    layer: Layer,
    index: int,
    residual: Residual,
    source: _Source | None,
    rows: Int32[Array, "tokens columns"] | None,
    offset: Int[Array, ""],
    *,
    layout: TokenLayout,
    by: tuple[Rotation, Rotation],
    numerics: Numerics,
    select: bool,
) -> tuple[Residual, _Source | None, Array, Array, Array]:
    """One layer: what the next enters with, the sources in force, the mean of the streams that enter, the divergence
    of the index scores from this layer's attention, and the experts' shares."""
    cfg = layer.cfg
    if rows is not None:
        values = layer.engram.lookup(rows, numerics.dtype)
        entering = residual.settled()
        streams = layer.engram(entering, values, layout.valid, numerics)
        residual = settled_residual(streams, residual.mix.pre)
    streams, x, mix = layer.enter("hc_attn", residual, numerics)
    mean = jnp.mean((streams if rows is None else entering).astype(jnp.float32), 1).astype(numerics.dtype)
    turn = by[bool(cfg.ratio(index))]
    q_latent, q = layer.attn.query(x, turn, numerics)
    near = WINDOW_KEY.rounded(layer.attn.window_key(x, turn, numerics), numerics)
    if index in cfg.index_source_layer_ids:
        source = _index(layer.attn, index, x.values, q_latent, turn, layout, source, offset, numerics, select)
    batch = layout.slots.shape[0]
    q, near = (a.reshape(batch, -1, *a.shape[1:]) for a in (q, near))
    sink = layer.attn.attn_sink[...]
    if cfg.ratio(index):
        o, top, total = attend(q, near, sink, cfg.sliding_window, source.entries, source.selected)
        at = _every(offset, q.shape[1])
        seen = _visible(cfg.ratio(index), q.shape[1], source.entries)[at]
        divergence = index_divergence(q[:, at], source.entries, top[:, at], total[:, at], source.log_scores, seen)
    else:
        o, _, _ = attend(q, near, sink, cfg.sliding_window)
        divergence = jnp.zeros(())
    o = rotate(o.reshape(-1, *o.shape[2:]), jax.tree.map(lambda a: a[:, None], turn.inverse()))
    y = layer.attn.project(o, numerics, SINGLE)
    streams, x, mix = layer.enter("hc_ffn", Residual(streams, y, mix), numerics)
    y, load = mixture(layer.ffn, x, numerics)
    return Residual(streams, y, mix), source, mean, divergence, load


def _every(offset: Int[Array, ""], length: int) -> Int[Array, " queries"]:
    return offset + INDEX_STRIDE * jnp.arange(length // INDEX_STRIDE)


def _visible(ratio: int, length: int, entries: Array) -> Bool[Array, "sequence entries"]:
    """Which entries each query sees (section 3.5)."""
    positions = jnp.arange(length)
    return jnp.arange(entries.shape[1]) < visible_entries(positions, jnp.ones(length, bool), ratio)[:, None]


def _index(
    attn: Attention,
    index: int,
    x: Float[Array, "tokens hidden"],
    q_latent: Float[Array, "tokens q_lora"],
    by: Rotation,
    layout: TokenLayout,
    previous: _Source | None,
    offset: Int[Array, ""],
    numerics: Numerics,
    select: bool,
) -> _Source:
    """Entries, selection and index scores from this layer on (sections 3.4 and 4).

    The indexer learns from its own loss alone, the rest of the model from everything else: what it reads is cut off.
    """
    cfg, ratio, batch = attn.cfg, attn.ratio, layout.slots.shape[0]
    indexer, length = attn.indexer, layout.tile
    entries, keys = (previous.entries, previous.keys) if previous else (None, None)
    if index in cfg.kv_source_layer_ids:
        empty = tuple(jnp.zeros((batch, 1, 2, cfg.head_dim)) for s in cfg.kv_source_layer_ids if cfg.ratio(s) == 2)
        latent = attn.compressor(x, layout, empty, numerics)[0]
        latent = latent.reshape(batch, length, -1)[:, ratio - 1 :: ratio]
        count = latent.shape[1]
        latent = latent.reshape(batch * count, -1)
        turn = rotation(cfg, jnp.tile(jnp.arange(count, dtype=jnp.int32) * ratio, batch), compressed=True)
        entries = COMPRESSED_ENTRY.rounded(rotate(latent, turn), numerics).reshape(batch, count, -1)
        keys = INDEX_KEY.rounded(indexer.key(lax.stop_gradient(latent), turn, numerics), numerics)
        keys, previous = keys.reshape(batch, count, -1), None

    x, q_latent = lax.stop_gradient((x, q_latent))
    positions = jnp.arange(length)
    visible = visible_entries(positions, jnp.ones(length, bool), ratio)
    seen = _visible(ratio, length, entries)
    selected = candidates = jnp.broadcast_to(seen, (batch, *seen.shape))
    if select:
        scores = lax.stop_gradient(_scores(indexer, x, q_latent, by, keys, numerics))
        candidates = previous.candidates if previous else None
        best = functools.partial(top_mask, scores, visible)
        if candidates is None:
            if indexer.publishes_candidates:
                candidates = candidate_mask(scores, visible, cfg.candidate_topk_blocks, cfg.candidate_block_size)
            selected = best(cfg.index_topk)
        else:
            selected = best(cfg.index_topk, candidates)
    selected, candidates = checkpoint_name(selected, "selection"), checkpoint_name(candidates, "selection")

    at = _every(offset, length)
    some = jax.tree.map(
        lambda a: a.reshape(batch, length, -1)[:, at].reshape(-1, a.shape[-1]), (x, q_latent, by.cos, by.sin)
    )
    scores = _scores(indexer, some[0], some[1], Rotation(*some[2:]), keys, numerics).astype(jnp.float32)
    log_scores = jax.nn.log_softmax(jnp.where(seen[at], scores, -1e30), -1)
    return _Source(entries, keys, selected, candidates, log_scores)


def _scores(
    indexer: Indexer,
    x: Float[Array, "queries hidden"],
    q_latent: Float[Array, "queries q_lora"],
    by: Rotation,
    keys: Float[Array, "batch entries index"],
    numerics: Numerics,
) -> Float[Array, "batch sequence entries"]:
    q, weights = indexer.query(q_latent, by, numerics), indexer.head_weights(x, numerics)
    q, weights = (a.reshape(keys.shape[0], -1, *a.shape[1:]) for a in (q, weights))
    return jax.vmap(functools.partial(index_scores, numerics=numerics))(q, weights, keys)


def attend(
    q: Float[Array, "batch sequence heads dim"],
    near: Float[Array, "batch sequence dim"],
    sink: Float[Array, " heads"],
    window: int,
    far: Float[Array, "batch entries dim"] | None = None,
    selected: Bool[Array, "batch sequence entries"] | None = None,
) -> tuple[
    Float[Array, "batch sequence heads dim"], Float[Array, "batch sequence heads"], Float[Array, "batch sequence heads"]
]:
    """`pallas_kernels.sparse_attention.reference.attention` with a mask in place of gathered entries.

    Also returns the largest score, and the sum of the exponentials of all relative to it, the sink included.
    """
    batch, length, heads, dim = q.shape
    tiles = length // window
    tiled = near.reshape(batch, tiles, window, dim)
    tiled = jnp.concatenate([jnp.pad(tiled, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1], tiled], 2)
    query, key = jnp.arange(window)[:, None], jnp.arange(-window, window)
    visible = (key <= query) & (key > query - window)
    visible = visible & ((jnp.arange(tiles)[:, None, None] > 0) | (key >= 0))
    scores = _dot("bcqhd,bckd->bcqhk", q.reshape(batch, tiles, window, heads, dim), tiled)
    scores = scores.reshape(batch, length, heads, -1)
    visible = jnp.broadcast_to(visible, (batch, *visible.shape)).reshape(batch, length, 1, -1)
    if far is not None:
        scores = jnp.concatenate([scores, _dot("bqhd,bnd->bqhn", q, far)], -1)
        visible = jnp.concatenate([visible, selected[:, :, None]], -1)
    scale = dim**-0.5
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    top = lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    p = jnp.where(visible, jnp.exp(scores - top), 0)
    total = jnp.sum(p, -1) + jnp.exp(sink - top[..., 0])
    p = p.astype(q.dtype)
    width = 2 * window
    near_p = p[..., :width].reshape(batch, tiles, window, heads, width)
    value = _dot("bcqhk,bckd->bcqhd", near_p, tiled).reshape(batch, length, heads, dim)
    if far is not None:
        value = value + _dot("bqhn,bnd->bqhd", p[..., width:], far)

    return (value / total[..., None]).astype(q.dtype), top[..., 0], total


def index_divergence(
    q: Float[Array, "batch queries heads dim"],
    entries: Float[Array, "batch entries dim"],
    top: Float[Array, "batch queries heads"],
    total: Float[Array, "batch queries heads"],
    log_scores: Float[Array, "batch queries entries"],
    seen: Bool[Array, "queries entries"],
) -> Float[Array, ""]:
    """Mean divergence of index scores from the attention of all heads to the entries that a query sees, whether they
    were selected or not; it teaches the scores only."""
    q, entries, top, total = lax.stop_gradient((q, entries, top, total))
    exponent = _dot("bqhd,bnd->bqhn", q, entries) * q.shape[-1] ** -0.5 - top[..., None]
    # Entries that were not selected may score above the largest.
    shares = jnp.exp(jnp.minimum(exponent, 20.0)) / total[..., None]
    target = jnp.where(seen, jnp.sum(shares, 2), 0)
    target = target / (jnp.sum(target, -1, keepdims=True) + 1e-9)
    log_target = jnp.log(jnp.maximum(target, 1e-9))
    return jnp.mean(jnp.sum(target * (log_target - jnp.where(seen, log_scores, 0)), -1))


def _dot(spec: str, a: Array, b: Array) -> Array:
    """A product accumulated and returned in fp32."""
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def mixture(
    ffn: MoE, x: Activations, numerics: Numerics
) -> tuple[Float[Array, "tokens hidden"], Float[Array, " experts"]]:
    """`MoE.__call__` with every expert computed for every token; the output, and each expert's share of the tokens."""
    values = x.values
    experts, weights = ffn.gate(values, jnp.zeros(values.shape[0], bool), ffn.k, ffn.scale)
    count = ffn.gate.bias[...].shape[0]
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.float32)
    weights = jnp.sum(chosen * weights[..., None], 1)
    w1, w3, w2 = (dequantize(getattr(ffn.experts, name), values.dtype) for name in ("w1", "w3", "w2"))
    # As in `linear`.
    quantize = numerics.quantize_activations and not isinstance(ffn.experts.w1.get_value(), DenseWeight)
    rounded = qdq_fp8(values) if quantize else values

    def project(spec, a, w):
        return _dot(spec, a, w).astype(values.dtype)

    z = swiglu(project("th,ewh->tew", rounded, w1), project("th,ewh->tew", rounded, w3), ffn.limit)
    z = (z if numerics.fast else z * weights[..., None]).astype(values.dtype)
    y = project("tew,ehw->teh", qdq_fp8(z) if quantize else z, w2).astype(jnp.float32)
    if numerics.fast:
        y = y * weights[..., None]
    routed = sum(y[:, e] for e in range(count))
    shared = ffn.shared_experts(x, numerics).astype(jnp.float32)
    return (routed + shared).astype(values.dtype), jnp.mean(jnp.sum(chosen, 1), 0)
