"""Verification of drafted tokens on device: how many of them stand, and which token follows (section 7.5).

A pure function to be called inside a jitted step, in place of `sample`:

    state = commit_tokens(state, slots, starts)
    state = record_tokens(state, slots, tokens, positions, valid)
    verified = verify(logits, drafts, draft_counts, draft_logits, state, params, slots, tokens, positions, valid)
    state = keep_next_tokens(state, slots, verified.tokens, verified.emitted)

The tokens that come out have the distribution of `sample` called once per token, whatever the drafts are worth. There
are two ways to that:

* Without draft logits every row's token is drawn as `sample` draws it, and a draft stands if it is that token. The
  output is that of `sample`, token for token, for any drafts and any choice of how many to verify. The most probable
  token of the draft model stands with the probability that the target gives it; more drafts stand if they were drawn
  with the noise that `sample` will use, `draw_drafts(shared_noise=True)`.
* With draft logits, drafts were drawn with noise of their own, `draw_drafts(shared_noise=False)`. With p the target's
  distribution after all filters and q the draft's, a draft stands with probability min(1, p/q), and after the first
  that does not, a token is drawn from max(p - q, 0), normalised. Most drafts stand, but tokens depend on how many were
  verified. Requests with temperature 0 are verified in the first way.
"""

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv4jax.branching import where_needed
from dsv4jax.sampling import (
    SamplingParams,
    SamplingState,
    adjusted_logits,
    choose_tokens,
    draws_at_random,
    filtered_logits,
    gumbel_noise,
    log_totals,
    noise_key,
    with_logprobs,
)

Method = Literal["rejection", "blockwise"]
# Purposes of a round's own noise. They are no token ids: the keys they give are none of the numbers that the noise of
# the round's first position hashes.
_DRAFT, _ACCEPT = 2**32 - 1, 2**32 - 2


@flax.struct.dataclass
class Verified:
    """Result of `verify`: accepted + 1 tokens per request, then zeros; column j follows input token j."""

    accepted: Int32[Array, "requests"]
    """Drafts that stand; 0 for a padded request."""
    tokens: Int32[Array, "requests tokens"]
    """The accepted drafts and the token after them."""
    logprobs: Float32[Array, "requests tokens"]
    """Of each token, as `sample` reports it; the next two as well."""
    top_tokens: Int32[Array, "requests tokens 20"]
    top_logprobs: Float32[Array, "requests tokens 20"]
    emitted: Bool[Array, "requests tokens"]
    """Places that hold a token."""


def draw_drafts(
    logits: Float32[Array, "requests vocab"],
    params: SamplingParams,
    positions: Int32[Array, "requests"],
    starts: Int32[Array, "requests"],
    *,
    shared_noise: bool = False,
) -> Int32[Array, "requests"]:
    """Draws a draft for each position from softmax(logits / temperature); the best token if the temperature is 0.

    No filter, penalty, bias or mask applies to a draft.

    Args:
      starts: position of the newest chosen token, from which the drafts go on.
      shared_noise: True draws with the noise that `sample` has for the position, for `verify` without draft logits: if
        both models agree, so do their tokens, provided the request has the same seed in the step that verifies. False
        draws with noise of its own, for `verify` with these logits.
    """
    random = draws_at_random(params)

    def draw():
        source = params if shared_noise else _in_round(params, starts, _DRAFT)
        noise = gumbel_noise(source, positions[:, None], logits.shape[-1])[:, 0]
        return jnp.argmax(jnp.where(random[:, None], _tempered(logits, params) + noise, logits), axis=-1)

    return where_needed(jnp.any(random), draw, lambda: jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def verify(
    target_logits: Float32[Array, "requests tokens vocab"],
    drafts: Int32[Array, "requests drafts"],
    draft_counts: Int32[Array, "requests"],
    draft_logits: Float32[Array, "requests drafts vocab"] | None,
    state: SamplingState,
    params: SamplingParams,
    slots: Int32[Array, "requests"],
    tokens: Int32[Array, "requests tokens"],
    positions: Int32[Array, "requests tokens"],
    valid: Bool[Array, "requests tokens"],
    *,
    method: Method = "rejection",
    pause_tokens: Int32[Array, "requests pauses"] | None = None,
    forced_acceptance: Float[Array, "drafts"] | None = None,
    implementation: str = "reference",
) -> Verified:
    """Accepts a prefix of each request's drafts and chooses the token that follows it.

    Args:
      target_logits: of the model; row (b, j) stands after input token j of request b.
      drafts: the input tokens after each request's first: tokens = drafts + 1, drafts[:, j] = tokens[:, j + 1].
      draft_counts: how many of them to verify, 0 .. drafts. With `draft_logits`, whether draft j is among them may
        depend on the drafts before it but not on draft j itself, or the output's distribution is not the target's.
      draft_logits: what `draw_drafts(shared_noise=False)` was given for each draft; None for drafts chosen otherwise.
      state, params, slots, tokens, positions, valid: as in `sample`; valid[:, 0] is False for a padded request. What
        `state` allows at a place holds if the drafts up to it stand; behind a draft that is not allowed it may be
        anything.
      method: with draft logits, whether each draft is accepted for itself or the block as a whole; see below.
      pause_tokens: a draft that is one of these is the last token of its request in this step if it stands: what may
        follow it is not known yet. What is dropped behind it has had no say in it, so that all said below holds.
      forced_acceptance: synthetic acceptance for benchmarks, the output is then not the model's: draft j is accepted
        with this probability if those before it are. All that `verify` computes otherwise is computed all the same. An
        array with a negative entry forces nothing.
      implementation: as in `sample`.

    Every row has the filters and penalties that `sample` would apply, with the drafts before it counted as generated.
    A row whose logits or allowed tokens leave nothing to choose from (see `sample`) ends the accepted prefix: its
    token is 0 with log-probability NaN. A draft whose own logits are no distribution, or that is no token id, is not
    accepted; the token there is then drawn from p.

    `rejection` accepts drafts one by one. `blockwise` is block verification: with the weight
    w_i = min(1, w_{i-1} p(t_i) / q(t_i)), w_0 = 1, of the first i drafts, i of them stand for the largest i that passes
    its own draw with probability e / (e + 1 - w_i), e the sum of max(w_i p - q, 0) over the next token's distributions,
    and w_i for the last. The token after it is drawn from max(w_i p - q, 0). On average at least as many drafts stand
    as with `rejection`, for one more pass over both distributions.

    A token is drawn with the noise of `sample`, so that a request without drafts gets the same token from both. Drafts
    and acceptance have noise of their own, from "request's seed, folded with the position of the round's first token":
    a block's length depends on all its drafts, so those that do not stand must not be drawn again with the same noise.
    A seeded request gets the same tokens in any batch, slot or bucket that verifies as many drafts.

    Temporary memory is that of `sample`: for an H200 the compiler plans 4.8 times the size of `target_logits`, which
    is 0.9 GiB for 64 requests with 5 drafts.
    """
    num_tokens, vocab = target_logits.shape[1:]
    columns = jnp.arange(num_tokens)
    adjusted = adjusted_logits(target_logits, state, params, slots, tokens, positions, valid)
    log_total = log_totals(target_logits)
    defined = jnp.isfinite(log_total) & (jnp.max(adjusted, axis=-1) > -jnp.inf)
    random = valid & draws_at_random(params)[:, None]
    verifiable = (columns[:-1] < draft_counts[:, None]) & valid[:, 1:] & defined[:, :-1]
    verifiable &= (drafts >= 0) & (drafts < vocab)
    uniform = _uniform_noise(_in_round(params, positions[:, 0], _ACCEPT), positions[:, :-1])
    block = _Block(drafts, verifiable, uniform, forced_acceptance)
    if draft_logits is None:
        accepted, following = _where_equal(block, choose_tokens(adjusted, random, params, positions, implementation))
    else:
        accepted, following = where_needed(
            jnp.any(random),
            lambda: _at_random(block, adjusted, draft_logits, random, params, positions, method, implementation),
            lambda: _where_equal(block, jnp.argmax(adjusted, axis=-1).astype(jnp.int32)),
        )

    chosen = jnp.where(columns < accepted[:, None], jnp.pad(drafts, [(0, 0), (0, 1)]), following[:, None])
    if pause_tokens is not None:
        goes_on = jnp.all(drafts[..., None] != pause_tokens[:, None], axis=-1)
        accepted = jnp.minimum(accepted, _prefix_length(goes_on))
    emitted = valid & (columns <= accepted[:, None])
    chosen = jnp.where(defined & emitted, chosen, 0)
    sampled = with_logprobs(chosen, defined, target_logits, log_total, params, emitted)
    return Verified(
        accepted=accepted,
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        top_tokens=sampled.top_tokens,
        top_logprobs=sampled.top_logprobs,
        emitted=emitted,
    )


@flax.struct.dataclass
class _Block:
    """The drafts of a step, and what is known of them before they are compared."""

    drafts: Int32[Array, "requests drafts"]
    verifiable: Bool[Array, "requests drafts"]
    uniform: Float32[Array, "requests drafts"]
    """Noise that accepts."""
    forced: Float[Array, "drafts"] | None

    def settled(self, accepted: Int32[Array, "requests"]) -> Int32[Array, "requests"]:
        """How many drafts stand, given how many should: as many as the law says that is forced, if any is."""
        if self.forced is None:
            return accepted
        forced = _prefix_length(self.verifiable & (self.uniform < self.forced))
        # As long as the compiler cannot rule this out, it has to keep what the measured program would compute.
        return jnp.where(jnp.all(self.forced >= 0), forced, accepted)


def _where_equal(
    block: _Block, chosen: Int32[Array, "requests tokens"]
) -> tuple[Int32[Array, "requests"], Int32[Array, "requests"]]:
    """Drafts that stand because they are what was chosen in their place, and the token after them."""
    accepted = block.settled(_prefix_length(block.verifiable & (chosen[:, :-1] == block.drafts)))
    return accepted, _at(chosen, accepted)


def _at_random(
    block: _Block,
    adjusted: Float32[Array, "requests tokens vocab"],
    draft_logits: Float32[Array, "requests drafts vocab"],
    random: Bool[Array, "requests tokens"],
    params: SamplingParams,
    positions: Int32[Array, "requests tokens"],
    method: Method,
    implementation: str,
) -> tuple[Int32[Array, "requests"], Int32[Array, "requests"]]:
    """Drafts that stand by `method`, for greedy requests by comparison, and the token after them."""
    drafts = block.drafts
    scores = filtered_logits(adjusted, random, params, implementation)
    draft_scores = _tempered(draft_logits, params)
    totals, draft_totals = jax.nn.logsumexp(scores, axis=-1), jax.nn.logsumexp(draft_scores, axis=-1)
    considered = block.verifiable & (jnp.isfinite(draft_totals) | ~random[:, :1])
    counts = _prefix_length(considered)
    ratio = _ratio(_of(drafts, scores[:, :-1]) - totals[:, :-1], _of(drafts, draft_scores) - draft_totals)
    if method == "rejection":
        weights = jnp.ones_like(totals)
        accepted = _prefix_length(considered & (block.uniform < ratio))
    else:
        weights = _block_weights(ratio)
        rows = (scores[:, 1:-1], totals[:, 1:-1], draft_scores[:, 1:], draft_totals[:, 1:], weights[:, 1:-1])
        accepted = _block_length(counts, weights[:, 1:], jnp.sum(_excess(*rows), axis=-1), block.uniform)
    equal = _prefix_length(considered & (jnp.argmax(scores[:, :-1], axis=-1) == drafts))
    accepted = block.settled(jnp.where(random[:, 0], accepted, equal))

    # Noise is needed for one row per request only.
    last = jnp.minimum(accepted, drafts.shape[1] - 1)
    draft_row = _tempered(_at(draft_logits, last), params)
    row = _at(scores, accepted)
    residual = _excess(row, _at(totals, accepted), draft_row, _at(draft_totals, last), _at(weights, accepted))
    # If rounding leaves no residual, p and q are equal, and the draft was rejected by rounding: then p it is.
    rejected = random[:, 0] & (accepted < counts) & jnp.any(residual > 0, axis=-1)
    row = jnp.where(rejected[:, None], jnp.log(residual), row)
    noise = gumbel_noise(params, _at(positions, accepted)[:, None] + 1, adjusted.shape[-1])[:, 0]
    chosen = jnp.argmax(jnp.where(random[:, :1], row + noise, row), axis=-1)
    return accepted, chosen.astype(jnp.int32)


def _ratio(
    log_target: Float32[Array, "requests drafts"], log_draft: Float32[Array, "requests drafts"]
) -> Float32[Array, "requests drafts"]:
    """p / q of each draft; 0 where p is."""
    return jnp.where(log_target > -jnp.inf, jnp.exp(log_target - log_draft), 0.0)


def _excess(
    scores: Float32[Array, "*rows vocab"],
    total: Float32[Array, "*rows"],
    draft_scores: Float32[Array, "*rows vocab"],
    draft_total: Float32[Array, "*rows"],
    weight: Float32[Array, "*rows"],
) -> Float32[Array, "*rows vocab"]:
    """max(weight p - q, 0)."""
    target = weight[..., None] * jnp.exp(scores - total[..., None])
    return jnp.maximum(target - jnp.exp(draft_scores - draft_total[..., None]), 0.0)


def _block_weights(ratio: Float32[Array, "requests drafts"]) -> Float32[Array, "requests tokens"]:
    """w_0 .. w_drafts of `verify`'s block verification."""
    weights = [jnp.ones_like(ratio[:, 0])]
    for j in range(ratio.shape[1]):
        weights.append(jnp.minimum(weights[-1] * ratio[:, j], 1.0))
    return jnp.stack(weights, axis=1)


def _block_length(
    counts: Int32[Array, "requests"],
    weights: Float32[Array, "requests drafts"],
    excess: Float32[Array, "requests drafts-1"],
    uniform: Float32[Array, "requests drafts"],
) -> Int32[Array, "requests"]:
    """The longest prefix of `counts` drafts that passes its own draw.

    Args:
      weights: w_1 .. w_drafts.
      excess: the e that belong to w_1 .. w_{drafts-1}.
    """
    length = jnp.arange(1, weights.shape[1] + 1)
    before_last = jnp.pad(excess / (excess + 1 - weights[:, :-1]), [(0, 0), (0, 1)])
    chance = jnp.where(length == counts[:, None], weights, before_last)
    passes = (length <= counts[:, None]) & (uniform < chance)
    return jnp.max(jnp.where(passes, length, 0), axis=1)


def _in_round(params: SamplingParams, starts: Int32[Array, "requests"], purpose: int) -> SamplingParams:
    """The settings with seeds for noise of the round that starts at these positions."""

    def seed_of(seed, start):
        return jax.random.key_data(jax.random.fold_in(noise_key(seed, start), purpose))

    return params.replace(seed=jax.vmap(seed_of)(params.seed, starts))


def _uniform_noise(
    params: SamplingParams, positions: Int32[Array, "requests drafts"]
) -> Float32[Array, "requests drafts"]:
    def noise(seed, position):
        return jax.random.uniform(noise_key(seed, position))

    return jax.vmap(jax.vmap(noise, (None, 0)))(params.seed, positions)


def _tempered(
    logits: Float32[Array, "requests *rows vocab"], params: SamplingParams
) -> Float32[Array, "requests *rows vocab"]:
    """Logits over the temperature, those of the best token 0; over 1 where the temperature is 0."""
    temperature = jnp.where(draws_at_random(params), params.temperature, 1.0)
    temperature = temperature.reshape(-1, *[1] * (logits.ndim - 1))
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature


def _prefix_length(holds: Bool[Array, "requests drafts"]) -> Int32[Array, "requests"]:
    """In how many leading columns `holds` is True."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1)


def _of(tokens: Int32[Array, "requests drafts"], values: Float32[Array, "requests drafts vocab"]) -> Array:
    """values[b, j, tokens[b, j]]; NaN for what is no token id."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def _at(values: Array, column: Int32[Array, "requests"]) -> Array:
    """values[b, column[b]] of each request b."""
    return jnp.take_along_axis(values, column.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]
