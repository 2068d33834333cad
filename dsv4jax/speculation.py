"""Speculative decoding: the steps that draft a block of tokens per request, and verify it (architecture section 7).

    cache, output = draft_step(params, cache, batch, cfg=cfg)        # once, after the last chunk of a prompt
    cache, output = speculative_step(params, cache, batch, cfg=cfg)  # then again and again

The newest chosen token of a request, its position and the drafts after it stay in its slot, so that steps can be sent
before the results of earlier ones are read. Every step keeps up a cache made with `CacheConfig.drafts`: `decode_step`
may run the same requests in between, which then have no drafts until the next round. The first round is a program of
its own, small and the same for every prefill bucket, instead of a part of each of these; a request that goes without it
has its first drafts verified one step later.

What is drafted after a prompt depends on its last `sliding_window` tokens alone. It does not depend on chunks, and
after a prefix hit with exact replay it is that of the cold run; bounded replays feed the draft the approximations that
they define. Rejected drafts leave nothing to undo: the length moves back (see `dsv4jax.cache`).
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from dsv4jax.batch import SpeculativeBatch, StepBatch
from dsv4jax.cache import Cache
from dsv4jax.config import ModelConfig
from dsv4jax.model.draft import block_hidden, block_layout
from dsv4jax.model.transformer import Model, merge
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.sampling import commit_tokens, keep_next_tokens, record_tokens
from dsv4jax.verification import Method, draw_drafts, verify

_step = functools.partial(
    jax.jit,
    donate_argnames="cache",
    # As the other steps are compiled: see `dsv4jax.steps`.
    compiler_options={"xla_allow_excess_precision": False},
)


@flax.struct.dataclass
class DraftOutput:
    """Result of a draft round; rows of padded requests are unspecified."""

    tokens: Int32[Array, "requests block"]
    """Drafts for the positions after the newest chosen token."""
    confidences: Float[Array, "requests block"]
    """Logit of the probability that a draft is accepted if those before it are."""
    expert_load: Int[Array, "stages experts"]
    """Tokens routed to each expert of the draft stages, padding excluded."""


@flax.struct.dataclass
class SpeculativeOutput:
    """Result of `speculative_step`. Places past the tokens of a request hold 0."""

    counts: Int32[Array, " requests"]
    """Tokens chosen: the accepted drafts and one more; 0 for a padded request and for one that was at its end."""
    tokens: Int32[Array, "requests tokens"]
    logprobs: Float[Array, "requests tokens"]
    """Of each token, as `StepOutput` reports it; the next two as well."""
    top_tokens: Int32[Array, "requests tokens 20"]
    top_logprobs: Float[Array, "requests tokens 20"]
    verified: Int32[Array, " requests"]
    """Drafts that were verified: counts - 1 of them stand."""
    confidences: Float[Array, "requests drafts"]
    """Logit of the acceptance predicted for each of these; unspecified beyond them."""
    expert_load: Int[Array, "layers experts"]
    draft: DraftOutput
    """The next drafts, which the slots hold."""


@functools.partial(_step, static_argnames=("cfg", "numerics"))
def draft_step(
    params: dict[str, Any],
    cache: Cache,
    batch: SpeculativeBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
) -> tuple[Cache, DraftOutput]:
    """Drafts a block for requests whose prompt has been prefilled; their newest chosen token may be in flight still.

    Args:
      params: as `load_params` returns them.
      cache: donated.
      batch: from `speculative_batch`; slots and sampling settings count.

    Raises:
      ValueError: the batch was made for another cache, or the cache is one without drafts.
    """
    _check_fit(batch, cache)
    return _draft(merge(cfg, params), cache, batch, batch.slots < cache.num_slots, numerics)


@functools.partial(_step, static_argnames=("cfg", "numerics", "method"))
def speculative_step(
    params: dict[str, Any],
    cache: Cache,
    batch: SpeculativeBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
    method: Method = "rejection",
) -> tuple[Cache, SpeculativeOutput]:
    """Runs the newest chosen token of each request and its drafts, keeps those that stand, and drafts anew.

    Every token that comes out is one the model alone would have chosen, see `verify`. A request at its end runs nothing
    and stays as it is.

    Args:
      params: as `load_params` returns them, with Engram tables.
      cache: donated.
      batch: from `speculative_batch`.
      method: see `verify`; a cache with "argmax" drafts leaves no choice.

    Raises:
      ValueError: the batch was made for another cache, the cache is one without drafts or has too little slack, or
        Engram tables are on the host, which would have to know the drafts.
    """
    _check_fit(batch, cache)
    slack = cache.ngram_ids.shape[1] - (cfg.engram_max_ngram_size - 1)
    if batch.tile > slack:
        raise ValueError(f"tokens_per_request = {batch.tile}: the cache was made with slack = {slack}")
    if "embed" not in params["layers"][cfg.engram_layer_ids[0]]["engram"]:
        raise ValueError("params: speculative_step needs the Engram tables on the device")
    model, slots = merge(cfg, params), batch.slots
    drafts = jax.tree.map(lambda a: a.at[slots].get(mode="fill", fill_value=0), cache.drafts)
    starts, width = drafts.positions, batch.tile
    active = (slots < cache.num_slots) & (starts < batch.ends)
    counts = jnp.minimum(jnp.minimum(batch.max_drafts, drafts.counts), batch.ends - starts - 1)
    counts = jnp.where(active, counts, 0)
    # A request at its end is a padded one.
    slots = jnp.where(active, slots, cache.num_slots)
    newest = cache.sampling.next_tokens.at[slots].get(mode="fill", fill_value=0)
    tokens = jnp.concatenate([newest[:, None], drafts.tokens[:, : width - 1]], 1)
    step = _step_batch(batch, slots, starts, jnp.where(active, counts + 1, 0), tokens, cfg)

    out = model.text(step, cache, decode=True, numerics=numerics)
    logits = model.logits(out.hidden).reshape(*tokens.shape, -1)
    positions, valid = (a.reshape(tokens.shape) for a in (out.layout.positions, out.layout.valid))
    state = commit_tokens(cache.sampling, slots, starts)
    state = record_tokens(state, slots, tokens, positions, valid)
    verified = verify(
        logits,
        tokens[:, 1:],
        counts,
        None if drafts.logits is None or width == 1 else drafts.logits[:, : width - 1],
        state,
        batch.sampling,
        slots,
        tokens,
        positions,
        valid,
        method=method,
    )
    state = keep_next_tokens(state, slots, verified.tokens, verified.emitted)
    chosen = jnp.where(active, verified.accepted + 1, 0)
    cache = out.cache.replace(sampling=state).without_drafts(slots, starts + chosen)
    cache, draft = _draft(model, cache, batch, active, numerics)
    return cache, SpeculativeOutput(
        counts=chosen,
        tokens=verified.tokens,
        logprobs=verified.logprobs,
        top_tokens=verified.top_tokens,
        top_logprobs=verified.top_logprobs,
        verified=counts,
        confidences=drafts.confidences[:, : width - 1],
        expert_load=out.expert_load,
        draft=draft,
    )


def _draft(
    model: Model, cache: Cache, batch: SpeculativeBatch, active: Bool[Array, " requests"], numerics: Numerics
) -> tuple[Cache, DraftOutput]:
    """One draft round (section 7.4) from the newest chosen token of each active request."""
    cfg, last, drafts = model.cfg, model.mtp[-1], cache.drafts
    block, slots = cfg.dspark_block_size, jnp.where(active, batch.slots, cache.num_slots)
    positions, newest = (
        a.at[slots].get(mode="fill", fill_value=0) for a in (drafts.positions, cache.sampling.next_tokens)
    )
    ids = jnp.full((slots.shape[0], block), cfg.dspark_noise_token_id, jnp.int32).at[:, 0].set(newest)
    layout = block_layout(slots, positions, active, block, cache.num_slots)
    hidden, load = block_hidden(
        model.mtp, model.embedding(ids.reshape(-1), numerics), layout, cache.draft_windows, numerics
    )
    hidden = hidden.reshape(*ids.shape, -1)
    base = model.logits(last.norm(hidden).reshape(-1, hidden.shape[-1])).reshape(*ids.shape, -1)
    tokens, logits, confidences = [newest], [], []
    for j in range(block):
        previous = last.markov_embedding(tokens[-1])
        logits.append(base[:, j] + last.markov_logits(previous))
        confidences.append(last.confidence(hidden[:, j], previous))
        if drafts.logits is None:
            tokens.append(jnp.argmax(logits[-1], -1).astype(jnp.int32))
        else:
            tokens.append(draw_drafts(logits[-1], batch.sampling, positions + 1 + j))
    output = DraftOutput(jnp.stack(tokens[1:], 1), jnp.stack(confidences, 1), load)
    kept = drafts.replace(
        counts=drafts.counts.at[slots].set(block, mode="drop"),
        tokens=drafts.tokens.at[slots].set(output.tokens, mode="drop"),
        confidences=drafts.confidences.at[slots].set(output.confidences, mode="drop"),
    )
    if drafts.logits is not None:
        kept = kept.replace(logits=drafts.logits.at[slots].set(jnp.stack(logits, 1), mode="drop"))
    return cache.replace(drafts=kept), output


def _step_batch(
    batch: SpeculativeBatch, slots: Array, starts: Array, lengths: Array, tokens: Array, cfg: ModelConfig
) -> StepBatch:
    """The decode step that runs the tokens."""
    requests, width = tokens.shape
    zeros = jnp.zeros_like(starts)
    return StepBatch(
        tokens=tokens.reshape(-1),
        image_mask=jnp.zeros(tokens.size, bool),
        image_embeddings=jnp.zeros((0, cfg.hidden_size), jnp.float32),
        slots=slots,
        starts=starts,
        lengths=lengths,
        offsets=jnp.arange(requests, dtype=jnp.int32) * width,
        page_table=batch.page_table,
        # Not read by a decode step.
        history=jnp.full((requests, cfg.engram_max_ngram_size - 1), -1, jnp.int32),
        write_starts=zeros,
        encoder_floors=zeros,
        decoder_floors=zeros,
        prompt_targets=zeros[:0],
        sampling=batch.sampling,
        num_slots=batch.num_slots,
        page_size=batch.page_size,
        tile=width,
    )


def _check_fit(batch: SpeculativeBatch, cache: Cache) -> None:
    """Raises ValueError if the cache has no drafts or other slots than the batch was made for."""
    if cache.drafts is None:
        raise ValueError("cache: was made without drafts, see `CacheConfig.drafts`")
    if batch.num_slots != cache.num_slots:
        raise ValueError(f"slots: the batch was made for {batch.num_slots}, the cache has {cache.num_slots}")
