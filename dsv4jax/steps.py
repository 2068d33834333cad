"""The jitted entry points: `forward` over whole sequences, `prefill_step` and `decode_step` over a cache.

    cache, output = prefill_step(params, cache, batch, cfg=cfg)
    cache, output = decode_step(params, cache, batch, cfg=cfg)

Steps take everything as arguments and return everything. The cache is donated: the one passed in must not be used
again. Shapes come from the batch alone, so a program is compiled once per bucket.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from dsv4jax.batch import NEXT_TOKEN, StepBatch
from dsv4jax.cache import Cache, CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.model.layout import last_tokens, over_tiles
from dsv4jax.model.transformer import Model, TextOutput, merge
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import (
    Sampled,
    SamplingState,
    begin_request,
    commit_tokens,
    keep_next_tokens,
    prompt_logprobs,
    record_tokens,
    sample,
    sampling_params,
)
from dsv4jax.step_flags import jit_step
from sharding import SINGLE, ExpertPlacement, Layout

_TILE = 32


@flax.struct.dataclass
class StepOutput:
    """Result of a step: over several ranks, the rows of all of them in order, and `expert_load` once.

    Where the ranks belong to several processes, `logits` and `selections` stay with their ranks; the rest is in all.

    Rows of padded requests and places past a request's tokens are token 0 and unspecified logits.

    `tokens` dimension: 1 after prefill (the request's last token of the step; meaningful if that ends its prompt), the
    bucket's tokens per request after decode (column j follows input token j).
    """

    tokens: Int32[Array, "requests tokens"]
    """Sampled next token."""
    logprobs: Float[Array, "requests tokens"]
    """Natural log-probability of it under the model's own distribution; NaN if the logits are undefined. 0 for a chunk
    that ends before the tokens which the decoder half runs on: it has no logits."""
    top_tokens: Int32[Array, "requests tokens 20"]
    """Most probable tokens and, next, their log-probabilities: as many as the request asked for, then 0."""
    top_logprobs: Float[Array, "requests tokens 20"]
    logits: Float[Array, "requests tokens vocab"]
    """Raw fp32 logits."""
    expert_load: Int[Array, "layers experts"] | None
    """Tokens of all ranks routed to each expert, padding excluded."""
    selections: tuple[Int32[Array, "rows topk"], ...]
    """With `collect=True`: entries selected by each index source per token, in the decoder half of a bounded replay per
    token of the prompts' tails; otherwise ()."""
    prompt_logprobs: Float[Array, " batch_tokens"] | None = None
    """After prefill in a bucket with `prompt_logprobs`, per token of the batch: natural log-probability of the prompt
    token that follows it, under the model's own distribution; 0 if none does, for padding and for tokens of a prefix
    hit. In other buckets None, as the next two."""
    prompt_top_tokens: Int32[Array, "batch_tokens 20"] | None = None
    """Most probable tokens in that place and, next, their log-probabilities."""
    prompt_top_logprobs: Float[Array, "batch_tokens 20"] | None = None


@functools.partial(jit_step, donate_argnames="cache", static_argnames=("cfg", "numerics", "collect", "layout"))
def prefill_step(
    params: dict[str, Any],
    cache: Cache,
    batch: StepBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
    collect: bool = False,
    layout: Layout = SINGLE,
    placement: ExpertPlacement | None = None,
) -> tuple[Cache, StepOutput]:
    """Runs chunks of prompts; samples after the last token of each request, which the slot keeps as its next token.

    Args:
      params: as `load_params` returns them for the same `layout`.
      cache: donated. `start_request` must have been called for each request's slot before its first chunk.
      batch: from `prefill_batch`; over several ranks from `concatenate_batches`.
      collect: return the selected entries.
      layout: devices and what each of them does.
      placement: where the experts of the backbone layers are; None if expert e is in slot e.
    """
    run = functools.partial(_prefill, cfg=cfg, numerics=numerics, collect=collect, layout=layout)
    (cache, output), load = layout.map(run, (params, placement), cache, batch)
    return cache, _readable(output.replace(expert_load=load), layout)


def _prefill(
    weights: tuple[dict[str, Any], ExpertPlacement | None],
    cache: Cache,
    batch: StepBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics,
    collect: bool,
    layout: Layout,
) -> tuple[tuple[Cache, StepOutput], Array]:
    """One rank's prefill with (params, placement), and the expert load of all."""
    params, placement = weights
    model = merge(cfg, params)
    out = model.text(batch, cache, decode=False, numerics=numerics, devices=layout, placement=placement)
    logits = model.logits(last_tokens(out.hidden, out.layout))[:, None]
    last = jnp.maximum(batch.starts + batch.lengths - 1, 0)
    tokens = batch.tokens[jnp.clip(batch.offsets + batch.lengths - 1, 0, batch.tokens.shape[0] - 1)]
    valid = (batch.lengths > 0) & (batch.slots < cache.num_slots)
    sampled = sample(
        logits,
        cache.sampling,
        batch.sampling,
        batch.slots,
        tokens[:, None],
        last[:, None],
        valid[:, None],
        numerics.implementation,
    )
    # Without tokens in the decoder half the logits may be those of another request, undefined ones too.
    own = out.layout.ends > out.layout.starts
    sampled = sampled.replace(logprobs=jnp.where(own[:, None], sampled.logprobs, 0.0))
    cache = out.cache.replace(sampling=keep_next_tokens(cache.sampling, batch.slots, sampled.tokens, valid[:, None]))
    cache = cache.without_drafts(batch.slots, batch.starts + batch.lengths)
    output = _step_output(sampled, logits, out, collect)
    return (cache, output.replace(**_prompt_logprobs(model, batch, out))), out.expert_load


@functools.partial(jit_step, donate_argnames="cache", static_argnames=("cfg", "numerics", "collect", "layout"))
def decode_step(
    params: dict[str, Any],
    cache: Cache,
    batch: StepBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics = REFERENCE,
    collect: bool = False,
    layout: Layout = SINGLE,
    placement: ExpertPlacement | None = None,
) -> tuple[Cache, StepOutput]:
    """Runs 1 to n tokens of each running request; samples after every one of them.

    The first token of a request is final, the others may be drafts: to reject a suffix, pass a smaller `start` next
    time. Each token gets exactly the result of a step of its own. The slot keeps what was sampled after the last token
    as its next token, for which NEXT_TOKEN stands in a later batch: right only if all tokens of this step stand.

    Args:
      params, layout, placement, collect: as in `prefill_step`.
      cache: donated.
      batch: from `decode_batch`, at most `CacheConfig.slack` tokens per request; over several ranks from
        `concatenate_batches`.

    Raises:
      ValueError: more tokens per request than the rings have slack for.
    """
    slack = cache.ngram_ids.shape[1] - (cfg.engram_max_ngram_size - 1)
    if batch.tile > slack:
        raise ValueError(f"tokens_per_request = {batch.tile}: the cache was made with slack = {slack}")
    run = functools.partial(_decode, cfg=cfg, numerics=numerics, collect=collect, layout=layout)
    (cache, output), load = layout.map(run, (params, placement), cache, batch)
    return cache, _readable(output.replace(expert_load=load), layout)


def _decode(
    weights: tuple[dict[str, Any], ExpertPlacement | None],
    cache: Cache,
    batch: StepBatch,
    *,
    cfg: ModelConfig,
    numerics: Numerics,
    collect: bool,
    layout: Layout,
) -> tuple[tuple[Cache, StepOutput], Array]:
    """One rank's decode with (params, placement), and the expert load of all."""
    params, placement = weights
    model, batch = merge(cfg, params), _with_next_tokens(batch, cache)
    out = model.text(batch, cache, decode=True, numerics=numerics, devices=layout, placement=placement)
    shape = (batch.slots.shape[0], batch.tile)
    logits = model.logits(out.hidden).reshape(*shape, -1)
    tokens, positions, valid = (a.reshape(shape) for a in (batch.tokens, out.layout.positions, out.layout.valid))
    state = commit_tokens(cache.sampling, batch.slots, batch.starts)
    state = record_tokens(state, batch.slots, tokens, positions, valid)
    sampled = sample(logits, state, batch.sampling, batch.slots, tokens, positions, valid, numerics.implementation)
    state = keep_next_tokens(state, batch.slots, sampled.tokens, valid)
    cache = out.cache.replace(sampling=state).without_drafts(batch.slots, batch.starts + batch.lengths)
    return (cache, _step_output(sampled, logits, out, collect)), out.expert_load


def _readable(output: StepOutput, layout: Layout) -> StepOutput:
    """The output with what a host reads after every step readable in every process."""
    names = ("tokens", "logprobs", "top_tokens", "top_logprobs")
    names += ("prompt_logprobs", "prompt_top_tokens", "prompt_top_logprobs")
    return output.replace(**layout.to_all_processes({name: getattr(output, name) for name in names}))


def _with_next_tokens(batch: StepBatch, cache: Cache) -> StepBatch:
    """The batch with the slots' next tokens in place of NEXT_TOKEN."""
    tokens = batch.tokens.reshape(-1, batch.tile)
    kept = cache.sampling.next_tokens.at[batch.slots].get(mode="fill", fill_value=0)
    first = jnp.where(tokens[:, 0] == NEXT_TOKEN, kept, tokens[:, 0])
    return batch.replace(tokens=tokens.at[:, 0].set(first).reshape(-1))


def _prompt_logprobs(model: Model, batch: StepBatch, out: TextOutput) -> dict[str, Array]:
    """The fields of StepOutput about prompt tokens, from the logits of as many rows at once as fit a GiB."""
    if not batch.prompt_targets.shape[0]:
        return {}
    layout = out.layout
    targets = jnp.where(layout.valid, batch.prompt_targets, -1)
    # Logits, their exponentials and what the search for the best makes of them.
    bytes_per_tile = 4 * 4 * layout.tile * model.cfg.vocab_size
    values = over_tiles(
        lambda tile: prompt_logprobs(model.logits(tile[0]), tile[1]),
        (layout.tiles(out.hidden), layout.tiles(targets)),
        bytes_per_tile,
    )
    names = ("prompt_logprobs", "prompt_top_tokens", "prompt_top_logprobs")
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in zip(names, values, strict=True)}


def _step_output(sampled: Sampled, logits: Array, out: TextOutput, collect: bool) -> StepOutput:
    return StepOutput(
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        top_tokens=sampled.top_tokens,
        top_logprobs=sampled.top_logprobs,
        logits=logits,
        expert_load=None,
        selections=out.selections if collect else (),
    )


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="layout")
def start_request(
    cache: Cache,
    slot: Int32[Array, "*ranks"],
    prompt_mask: Bool[Array, "*ranks vocab"],
    output_counts: Int32[Array, "*ranks vocab"],
    logit_bias: Float[Array, "*ranks vocab"],
    length: Int32[Array, "*ranks"],
    *,
    layout: Layout = SINGLE,
) -> Cache:
    """Gives a slot to a request: call once before its first prefill step there. The cache is donated.

    A request that was preempted goes on by prefilling its prompt and all tokens it has generated as one prompt.

    Args:
      prompt_mask: tokens that occur in the prompt; `sampling.request_rows` makes this and the next two arguments.
      output_counts: how often each token was generated before a preemption.
      logit_bias: added to every logit.
      length: tokens of the prompt and those already generated.
      layout: with a mesh, every argument has one row per rank; a rank whose slot is >= number of slots starts nothing.
    """

    def start(_: None, state: SamplingState, slot: Array, *rows: Array) -> tuple[SamplingState, None]:
        if layout.mesh is not None:
            slot, *rows = (a[0] for a in (slot, *rows))
        mask, counts, bias, length = rows
        state = begin_request(state, slot, prompt_mask=mask, output_counts=counts, logit_bias=bias, length=length)
        return state, None

    rows = (slot, prompt_mask, output_counts, logit_bias, length)
    return cache.replace(sampling=layout.map(start, None, cache.sampling, *rows)[0])


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="layout")
def set_allowed_tokens(
    cache: Cache, slots: Int32[Array, " n"], masks: UInt32[Array, "n places words"], *, layout: Layout = SINGLE
) -> Cache:
    """Sets which tokens the requests in some slots may be given from now on. The cache is donated.

    `start_request` allows all. Log-probabilities do not depend on it.

    Args:
      slots: distinct; a padded row has a slot >= number of slots and sets nothing.
      masks: token i is allowed if bit i % 32 of word i // 32 is set; words = ⌈vocab / 32⌉. One mask for all tokens of a
        step, or in a cache with drafts one for each place: what may follow the newest chosen token, the first draft
        behind it, and so on to the last draft of a block.
      layout: over several ranks, the rows of all in order, as many for each.
    """

    def set_rows(_: None, allowed: Array, slots: Array, masks: Array) -> tuple[Array, None]:
        return allowed.at[slots].set(jnp.broadcast_to(masks, (*slots.shape, *allowed.shape[1:])), mode="drop"), None

    allowed, _ = layout.map(set_rows, None, cache.sampling.allowed, slots, masks)
    return cache.replace(sampling=cache.sampling.replace(allowed=allowed))


@flax.struct.dataclass
class ForwardOutput:
    """Result of `forward`; rows of padding are unspecified."""

    logits: Float[Array, "batch sequence vocab"]
    hidden: Float[Array, "batch sequence hidden"]
    """After the final norm."""
    streams: Float[Array, "layers batch sequence streams hidden"] | None
    """Residual streams entering each layer, before its Engram; None unless asked for."""


def forward(
    params: dict[str, Any],
    tokens: Int[Array | np.ndarray, "batch sequence"],
    *,
    cfg: ModelConfig,
    mask: Bool[Array | np.ndarray, "batch sequence"] | None = None,
    image_mask: Bool[Array | np.ndarray, "batch sequence"] | None = None,
    embeddings: Float[Array | np.ndarray, "batch sequence hidden"] | None = None,
    numerics: Numerics = REFERENCE,
    collect_streams: bool = False,
) -> ForwardOutput:
    """Whole sequences from position 0, every row through every layer; no state is kept.

    Args:
      mask: True for tokens, False for padding, which may stand on the right only.
      image_mask: True inside image spans.
      embeddings: replace the token embedding where `image_mask` is True.

    Raises:
      ValueError: token ids out of range, padding that is not on the right, image spans without embeddings, or params
        without the Engram tables.
    """
    tokens = np.asarray(tokens)
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    if tokens.ndim != 2 or tokens.size == 0 or mask.shape != tokens.shape:
        raise ValueError(f"tokens {tokens.shape} and mask {mask.shape}: both must be [batch, sequence], not empty")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: must be integers, got {tokens.dtype}")
    if tokens.shape[1] > cfg.max_position_embeddings:
        raise ValueError(f"tokens: {tokens.shape[1]} exceed the model's context of {cfg.max_position_embeddings}")
    if np.any(mask[:, 1:] & ~mask[:, :-1]):
        raise ValueError("mask: padding must stand on the right of all tokens")
    if np.any(mask & ((tokens < 0) | (tokens >= cfg.vocab_size))):
        raise ValueError(f"tokens: every id must be in 0..{cfg.vocab_size - 1}")
    if (image_mask is None) != (embeddings is None):
        raise ValueError("image_mask and embeddings: give both or neither")
    if "embed" not in params["layers"][cfg.engram_layer_ids[0]]["engram"]:
        raise ValueError("params: forward needs the Engram tables on the device")
    if image_mask is not None:
        image_mask, embeddings = jnp.asarray(image_mask, bool), jnp.asarray(embeddings)
        if image_mask.shape != tokens.shape or embeddings.shape != (*tokens.shape, cfg.hidden_size):
            raise ValueError(
                f"image_mask {image_mask.shape} and embeddings {embeddings.shape}: must be {tokens.shape} and"
                f" {(*tokens.shape, cfg.hidden_size)}"
            )
    return _forward(
        params, np.where(mask, tokens, 0).astype(np.int32), mask, image_mask, embeddings, cfg=cfg, numerics=numerics,
        collect=collect_streams,
    )  # fmt: skip


@functools.partial(jit_step, static_argnames=("cfg", "numerics", "collect"))
def _forward(
    params: dict[str, Any],
    tokens: Array,
    mask: Array,
    image_mask: Array | None,
    embeddings: Array | None,
    *,
    cfg: ModelConfig,
    numerics: Numerics,
    collect: bool,
) -> ForwardOutput:
    rows, length = tokens.shape
    tile = min(_TILE, length)
    padded = ceil_div(length, tile) * tile

    def flat(x):
        return jnp.pad(x, [(0, 0), (0, padded - length)] + [(0, 0)] * (x.ndim - 2)).reshape(-1, *x.shape[2:])

    cache_cfg = CacheConfig(slots=rows, pages=rows * ceil_div(padded, CacheConfig.page_size))
    pages = jnp.arange(cache_cfg.pages, dtype=jnp.int32).reshape(rows, -1)
    zeros = jnp.zeros(rows, jnp.int32)
    if image_mask is None:
        image_mask, images = jnp.zeros_like(mask), jnp.zeros((0, cfg.hidden_size))
    else:
        # Image rows first, in the order of their tokens.
        images = flat(embeddings)[jnp.argsort(~flat(image_mask), stable=True)]
    batch = StepBatch(
        tokens=flat(tokens),
        image_mask=flat(image_mask),
        image_embeddings=images,
        slots=jnp.arange(rows, dtype=jnp.int32),
        starts=zeros,
        lengths=jnp.sum(mask, 1, dtype=jnp.int32),
        offsets=jnp.arange(rows, dtype=jnp.int32) * padded,
        page_table=pages,
        history=jnp.full((rows, cfg.engram_max_ngram_size - 1), -1, jnp.int32),
        write_starts=zeros,
        encoder_floors=zeros,
        decoder_floors=zeros,
        prompt_targets=zeros[:0],
        sampling=sampling_params([], rows),
        num_slots=rows,
        page_size=cache_cfg.page_size,
        tile=tile,
    )
    model = merge(cfg, params)
    out = model.text(batch, init_cache(cfg, cache_cfg, numerics), decode=False, numerics=numerics)

    def unflat(x):
        return x.reshape(rows, padded, *x.shape[1:])[:, :length]

    return ForwardOutput(
        logits=unflat(model.logits(out.hidden)),
        hidden=unflat(out.hidden),
        streams=jnp.stack([unflat(s) for s in out.streams]) if collect else None,
    )
