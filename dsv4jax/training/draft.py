"""Losses of the draft stages, which learn from the model as it is (architecture section 7)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from dsv4jax.cache import WINDOW_KEY
from dsv4jax.linear import Activations
from dsv4jax.model.draft import DraftStage
from dsv4jax.model.hyper_connections import Residual, collapse, first_mix, settled_residual
from dsv4jax.model.rope import Rotation, rotate, rotation
from dsv4jax.model.transformer import Model
from dsv4jax.numerics import Numerics
from dsv4jax.training.forward import mixture
from pallas_kernels.sparse_attention.reference import attention
from sharding import SINGLE

BLOCK_STRIDE = 8
"""Distance of the blocks that are drafted in training."""


def draft_losses(
    model: Model,
    tokens: Int32[Array, "batch sequence"],
    weights: Float[Array, "batch sequence"],
    features: Float[Array, "batch sequence features"],
    logits: Float[Array, "batch sequence vocab"],
    offset: Int[Array, ""],
    numerics: Numerics,
) -> tuple[dict[str, Array], Float[Array, "stages experts"]]:
    """Losses of blocks drafted at every `BLOCK_STRIDE`-th token from `offset` on, and the experts' shares.

    A draft learns the model's own distribution of the token in its place, given the right tokens before it. Its
    confidence learns whether both would choose the same token, where that was so for the drafts before it.

    Args:
      weights: of the token that follows each token; a block counts where it drafts tokens of weight.
      features, logits: of the model, which they do not teach.

    Returns:
      "draft" (cross-entropy, nats), "confidence" (binary cross-entropy, nats), and for reports "accepted" (mean drafts
      of a block that the model would choose) and "draft_agreement" (share of drafts that it would choose, each after
      right ones).
    """
    cfg, (batch, length) = model.cfg, tokens.shape
    block, window, last = cfg.dspark_block_size, cfg.sliding_window, model.mtp[-1]
    # The newest chosen token of each block, with the tokens it drafts behind it.
    positions = window + offset + BLOCK_STRIDE * jnp.arange((length - window - block - 1) // BLOCK_STRIDE)
    after = positions[:, None] + jnp.arange(block + 1)
    given = tokens[:, after]
    target = lax.stop_gradient(logits)[:, after[:, :-1]]
    blocks = batch * positions.shape[0]

    ids = jnp.full((blocks, block), cfg.dspark_noise_token_id, jnp.int32).at[:, 0].set(given[:, :, 0].reshape(-1))
    streams = jnp.repeat(model.embedding(ids.reshape(-1), numerics)[:, None], cfg.hc_mult, 1)
    residual = settled_residual(streams, first_mix(blocks * block, cfg.hc_mult))
    by = rotation(cfg, jnp.tile(after[:, :-1].reshape(-1), batch), compressed=False)
    context = model.mtp[0].context(lax.stop_gradient(features).reshape(batch * length, -1), numerics)
    context_by = rotation(cfg, jnp.tile(jnp.arange(length), batch), compressed=False)
    before = positions[:, None] + jnp.arange(-window, 0)
    loads = []
    for stage in model.mtp:
        keys = WINDOW_KEY.rounded(stage.attn.window_key(Activations(context), context_by, numerics), numerics)
        keys = keys.reshape(batch, length, -1)[:, before].reshape(blocks, window, -1)
        residual, load = _stage(stage, residual, keys, by, numerics)
        loads.append(load)
    hidden = collapse(residual.settled(), residual.mix.pre)
    previous = last.markov_embedding(given[:, :, :-1].reshape(-1))
    drafted = model.logits(last.norm(hidden)) + last.markov_logits(previous)
    shape = (batch, positions.shape[0], block)
    drafted = drafted.reshape(*shape, -1)
    confidence = last.confidence(lax.stop_gradient(hidden), lax.stop_gradient(previous)).reshape(shape)

    weight = weights[:, after[:, :-1]]
    loss = -jnp.sum(jax.nn.softmax(target) * jax.nn.log_softmax(drafted), -1)
    chosen = jnp.argmax(target, -1)
    agree = (jnp.argmax(drafted, -1) == chosen).astype(jnp.float32)
    right = (given[:, :, 1:] == chosen).astype(jnp.float32)
    # Drafts before this one are the given tokens, which the model chose itself.
    reached = weight * jnp.cumprod(jnp.concatenate([jnp.ones((*shape[:2], 1)), right[..., :-1]], -1), -1)
    uncertain = jax.nn.softplus(confidence) - agree * confidence
    return {
        "draft": _mean(loss, weight),
        "confidence": _mean(uncertain, reached),
        "accepted": _mean(jnp.sum(jnp.cumprod(agree, -1), -1), weight[..., 0]),
        "draft_agreement": _mean(agree, reached),
    }, jnp.stack(loads)


def _mean(values: Array, weights: Array) -> Float[Array, ""]:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def _stage(
    stage: DraftStage,
    residual: Residual,
    keys: Float[Array, "blocks window dim"],
    by: Rotation,
    numerics: Numerics,
) -> tuple[Residual, Float[Array, " experts"]]:
    """`DraftStage.run` with the context keys of every block given."""
    streams, x, mix = stage.enter("hc_attn", residual, numerics)
    _, q = stage.attn.query(x, by, numerics)
    own = WINDOW_KEY.rounded(stage.attn.window_key(x, by, numerics), numerics)
    blocks = keys.shape[0]
    near = jnp.concatenate([keys, own.reshape(blocks, -1, own.shape[-1])], 1)
    q = q.reshape(blocks, -1, *q.shape[1:])
    visible = jnp.ones((q.shape[1], near.shape[1]), bool)
    sink = stage.attn.attn_sink[...]
    o = jax.vmap(lambda q, near: attention(q, near, visible, None, None, sink))(q, near)
    o = rotate(o.reshape(-1, *o.shape[2:]), jax.tree.map(lambda a: a[:, None], by.inverse()))
    y = stage.attn.project(o, numerics, SINGLE)
    streams, x, mix = stage.enter("hc_ffn", Residual(streams, y, mix), numerics)
    y, load = mixture(stage.ffn, x, numerics)
    return Residual(streams, y, mix), load
