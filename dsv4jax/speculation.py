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
from jaxtyping import Array, Bool, Float32, Int, Int32

from dsv4jax.batch import NEXT_TOKEN, SpeculativeBatch, StepBatch
from dsv4jax.cache import Cache, DraftState
from dsv4jax.config import ModelConfig
from dsv4jax.draft_counts import choose_draft_counts
from dsv4jax.model.draft import block_hidden
from dsv4jax.model.layout import block_layout
from dsv4jax.model.transformer import Model, merge
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.sampling import commit_tokens, keep_next_tokens, record_tokens
from dsv4jax.step_flags import jit_step
from dsv4jax.verification import Method, draw_drafts, verify
from sharding import SINGLE, ExpertPlacement, Layout


@flax.struct.dataclass
class DraftOutput:
    """Result of a draft round; rows of padded requests are unspecified."""

    tokens: Int32[Array, "requests block"]
    """Drafts for the positions after the newest chosen token."""
    confidences: Float32[Array, "requests block"]
    """Logit of the probability that a draft is accepted if those before it are."""
    expert_load: Int[Array, "stages experts"] | None
    """Tokens of all ranks routed to each expert of the draft stages, padding excluded."""


@flax.struct.dataclass
class SpeculativeOutput:
    """Result of `speculative_step`: over several ranks, the rows of all of them in order, and expert loads once.

    Places past the tokens of a request hold 0.
    """

    counts: Int32[Array, " requests"]
    """Tokens chosen: the accepted drafts and one more; 0 for a padded request and for one at its end or in a pause."""
    tokens: Int32[Array, "requests tokens"]
    logprobs: Float32[Array, "requests tokens"]
    """Of each token, as `StepOutput` reports it; the next two as well."""
    top_tokens: Int32[Array, "requests tokens 20"]
    top_logprobs: Float32[Array, "requests tokens 20"]
    verified: Int32[Array, " requests"]
    """Drafts that were verified, of which counts - 1 stand."""
    confidences: Float32[Array, "requests block"]
    """Of all drafts there were, verified or not, as `DraftOutput` has them; NaN where there was none. `step_statistics`
    takes these three."""
    expert_load: Int[Array, "layers experts"] | None
    draft: DraftOutput
    """The next drafts, which the slots hold."""

    @property
    def next_drafts(self) -> Int32[Array, "requests block"]:
        """Their tokens."""
        return self.draft.tokens


@functools.partial(jit_step, donate_argnames="cache", static_argnames=("cfg", "numerics", "layout"))
def draft_step(
    params: dict[str, Any],
    cache: Cache,
    batch: SpeculativeBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
    layout: Layout = SINGLE,
    draft_placement: ExpertPlacement | None = None,
) -> tuple[Cache, DraftOutput]:
    """Drafts a block for requests whose prompt has been prefilled; their newest chosen token may be in flight still.

    Args:
      params, layout: as in `prefill_step`.
      cache: donated.
      batch: from `speculative_batch`; slots and sampling settings count. Over several ranks from `concatenate_batches`.
      draft_placement: where the experts of the draft stages are; None if expert e is in slot e.

    Raises:
      ValueError: the cache is one without drafts or with other slots than the batch was made for.
    """

    def step(weights: Any, cache: Cache, batch: SpeculativeBatch) -> tuple[Any, Array]:
        params, placement = weights
        _check_fit(batch, cache)
        valid = batch.slots < cache.num_slots
        cache, output, load = _draft(merge(cfg, params), cache, batch, valid, numerics, layout, placement)
        return (cache, output), load

    (cache, output), load = layout.map(step, (params, draft_placement), cache, batch)
    readable = layout.to_all_processes({"tokens": output.tokens})
    return cache, output.replace(expert_load=load, **readable)


@functools.partial(jit_step, donate_argnames="cache", static_argnames=("cfg", "numerics", "method", "layout"))
def speculative_step(
    params: dict[str, Any],
    cache: Cache,
    batch: SpeculativeBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
    method: Method = "rejection",
    layout: Layout = SINGLE,
    placement: ExpertPlacement | None = None,
    draft_placement: ExpertPlacement | None = None,
    step_seconds: Float32[Array, " totals"] | None = None,
    forced_acceptance: Float32[Array, " drafts"] | None = None,
) -> tuple[Cache, SpeculativeOutput]:
    """Runs the newest chosen token of each request and its drafts, keeps those that stand, and drafts anew.

    What comes out has the distribution that the model alone has, see `verify`. A request at its end or in a pause runs
    nothing and stays as it is.

    Args:
      params, layout, placement: as in `decode_step`; with Engram tables.
      cache: donated.
      batch: from `speculative_batch`; over several ranks from `concatenate_batches`.
      method: see `verify`; drafts with shared noise leave no choice.
      draft_placement: as in `draft_step`.
      step_seconds: `StepCosts.table()` of this program, by which each rank chooses how many of its drafts to verify;
        None for as many as the batch allows.
      forced_acceptance: for benchmarks only, see `verify`; for each draft of the batch's bucket at least. If it forces,
        the confidences are those of a head that knows it.

    Raises:
      ValueError: the batch was made for another cache, the cache is one without drafts or has too little slack, the
        table of costs is too short, or Engram tables are on the host, which would have to know the drafts.
    """
    if "embed" not in params["layers"][cfg.engram_layer_ids[0]]["engram"]:
        raise ValueError("params: speculative_step needs the Engram tables on the device")
    slack = cache.ngram_ids.shape[1] - (cfg.engram_max_ngram_size - 1)
    if batch.tile > slack:
        raise ValueError(f"tokens_per_request = {batch.tile}: the cache was made with slack = {slack}")

    def step(shared: Any, cache: Cache, batch: SpeculativeBatch) -> tuple[Any, Any]:
        params, placement, draft_placement, step_seconds, forced = shared
        _check_fit(batch, cache)
        model = merge(cfg, params)
        drafts = jax.tree.map(lambda a: a.at[batch.slots].get(mode="fill", fill_value=0), cache.drafts)
        if forced is not None:
            known = jnp.where(
                jnp.all(forced >= 0), jax.scipy.special.logit(forced), drafts.confidences[:, : len(forced)]
            )
            drafts = drafts.replace(confidences=drafts.confidences.at[:, : len(forced)].set(known))
        active = (batch.slots < cache.num_slots) & (drafts.positions < batch.ends) & ~_paused(batch, cache, drafts)
        counts = _draft_counts(batch, drafts, active, step_seconds)
        run = _tokens_to_run(batch, cache, drafts, active, counts)
        out = model.text(run, cache, decode=True, numerics=numerics, devices=layout, placement=placement)

        tokens, positions, valid = (
            a.reshape(-1, batch.tile) for a in (run.tokens, out.layout.positions, out.layout.valid)
        )
        logits = model.logits(out.hidden).reshape(*tokens.shape, -1)
        state = commit_tokens(cache.sampling, run.slots, run.starts)
        state = record_tokens(state, run.slots, tokens, positions, valid)
        verified = verify(
            logits,
            tokens[:, 1:],
            counts,
            None if drafts.logits is None or batch.tile == 1 else drafts.logits[:, : batch.tile - 1],
            state,
            batch.sampling,
            run.slots,
            tokens,
            positions,
            valid,
            method=method,
            pause_tokens=batch.pause_tokens,
            forced_acceptance=None if forced is None else forced[: batch.tile - 1],
            implementation=numerics.implementation,
        )
        state = keep_next_tokens(state, run.slots, verified.tokens, verified.emitted)
        chosen = jnp.where(active, verified.accepted + 1, 0)
        cache = out.cache.replace(sampling=state).without_drafts(run.slots, run.starts + chosen)
        cache, draft, draft_load = _draft(model, cache, batch, active, numerics, layout, draft_placement)
        output = SpeculativeOutput(
            counts=chosen,
            tokens=verified.tokens,
            logprobs=verified.logprobs,
            top_tokens=verified.top_tokens,
            top_logprobs=verified.top_logprobs,
            verified=counts,
            confidences=jnp.where(
                jnp.arange(drafts.confidences.shape[1]) < drafts.counts[:, None], drafts.confidences, jnp.nan
            ),
            expert_load=None,
            draft=draft,
        )
        return (cache, output), (out.expert_load, draft_load)

    shared = (params, placement, draft_placement, step_seconds, forced_acceptance)
    (cache, output), (load, draft_load) = layout.map(step, shared, cache, batch)
    names = ("counts", "verified", "tokens", "logprobs", "top_tokens", "top_logprobs", "confidences", "next_drafts")
    readable = layout.to_all_processes({name: getattr(output, name) for name in names})
    draft = output.draft.replace(tokens=readable.pop("next_drafts"), expert_load=draft_load)
    return cache, output.replace(expert_load=load, draft=draft, **readable)


def _draft(
    model: Model,
    cache: Cache,
    batch: SpeculativeBatch,
    active: Bool[Array, " requests"],
    numerics: Numerics,
    layout: Layout,
    placement: ExpertPlacement | None,
) -> tuple[Cache, DraftOutput, Int[Array, "stages experts"]]:
    """One draft round (section 7.4) from the newest chosen token of each active request, and the expert load of all."""
    last, drafts, block = model.mtp[-1], cache.drafts, model.cfg.dspark_block_size
    slots = jnp.where(active, batch.slots, cache.num_slots)
    positions, newest = (
        a.at[slots].get(mode="fill", fill_value=0) for a in (drafts.positions, cache.sampling.next_tokens)
    )
    ids = jnp.full((slots.shape[0], block), model.cfg.dspark_noise_token_id, jnp.int32).at[:, 0].set(newest)
    embeddings = model.embedding(ids.reshape(-1), numerics)
    blocks = block_layout(slots, positions, active, block, cache.num_slots)
    hidden, load = block_hidden(model.mtp, embeddings, blocks, cache.draft_windows, numerics, layout, placement)
    base = model.logits(last.norm(hidden)).reshape(*ids.shape, -1)
    hidden = hidden.reshape(*ids.shape, -1)
    tokens, logits, confidences = [newest], [], []
    for j in range(block):
        previous = last.markov_embedding(tokens[-1])
        logits.append(base[:, j] + last.markov_logits(previous))
        confidences.append(last.confidence(hidden[:, j], previous))
        shared = drafts.logits is None
        tokens.append(draw_drafts(logits[-1], batch.sampling, positions + 1 + j, positions, shared_noise=shared))
    output = DraftOutput(jnp.stack(tokens[1:], 1), jnp.stack(confidences, 1), None)
    kept = drafts.replace(
        counts=drafts.counts.at[slots].set(block, mode="drop"),
        tokens=drafts.tokens.at[slots].set(output.tokens, mode="drop"),
        confidences=drafts.confidences.at[slots].set(output.confidences, mode="drop"),
    )
    if drafts.logits is not None:
        kept = kept.replace(logits=drafts.logits.at[slots].set(jnp.stack(logits, 1), mode="drop"))
    return cache.replace(drafts=kept), output, load


def _paused(batch: SpeculativeBatch, cache: Cache, drafts: DraftState) -> Bool[Array, " requests"]:
    """Which requests have chosen a token that the host must see before any other."""
    newest = cache.sampling.next_tokens.at[batch.slots].get(mode="fill", fill_value=0)
    return jnp.any(newest[:, None] == batch.pause_tokens, axis=1) & (drafts.positions > batch.seen)


def _draft_counts(
    batch: SpeculativeBatch,
    drafts: DraftState,
    active: Bool[Array, " requests"],
    step_seconds: Float32[Array, " totals"] | None,
) -> Int32[Array, " requests"]:
    """How many drafts each request verifies."""
    limits = jnp.minimum(jnp.minimum(batch.max_drafts, drafts.counts), batch.ends - drafts.positions - 1)
    limits = jnp.where(active, limits, -1)
    if step_seconds is None:
        return jnp.maximum(limits, 0)
    confidences = drafts.confidences[:, : batch.tile - 1]
    minimums = jnp.minimum(batch.min_drafts, limits)
    return choose_draft_counts(confidences, limits, step_seconds, minimums, drawn_at_random=drafts.logits is not None)


def _tokens_to_run(
    batch: SpeculativeBatch,
    cache: Cache,
    drafts: DraftState,
    active: Bool[Array, " requests"],
    counts: Int32[Array, " requests"],
) -> StepBatch:
    """The decode step of the newest chosen tokens and `counts` drafts after each; inactive requests are padding."""
    requests, width = batch.slots.shape[0], batch.tile
    slots = jnp.where(active, batch.slots, cache.num_slots)
    kept = cache.sampling.next_tokens.at[slots].get(mode="fill", fill_value=0)
    newest = jnp.where(batch.tokens == NEXT_TOKEN, kept, batch.tokens)
    zeros = jnp.zeros_like(slots)
    return StepBatch(
        tokens=jnp.concatenate([newest[:, None], drafts.tokens[:, : width - 1]], 1).reshape(-1),
        image_mask=jnp.zeros(requests * width, bool),
        image_embeddings=jnp.zeros((0, 0), jnp.float32),
        slots=slots,
        starts=drafts.positions,
        lengths=jnp.where(active, counts + 1, 0),
        offsets=jnp.arange(requests, dtype=jnp.int32) * width,
        page_table=batch.page_table,
        # A decode step reads its own record.
        history=jnp.zeros((requests, 0), jnp.int32),
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
