"""Sampling on device: from logits to token ids, for requests with different settings in one batch.

Pure functions to be called inside a jitted step, in this order:

    state = commit_tokens(state, slots, starts)
    state = record_tokens(state, slots, tokens, positions, valid)
    sampled = sample(logits, state, params, slots, tokens, positions, valid)
    state = keep_next_tokens(state, slots, sampled.tokens, valid)

Counting is lazy because a step's tokens may be unverified drafts. A step only notes which token sits at
which position; the next step, whose first position says how much of that was accepted, adds it to the counts.
A rejected draft is thus never counted and nothing has to be undone.

Nothing depends on the batch a request is in: its noise comes from its own seed and the position of the token
being sampled, its filters from its own logits. On a CPU, noise, filters and top log-probabilities cost nothing when no
request of the batch uses them; on a GPU they are always computed (see `where_needed`), but for the cut of top_k and
top_p, which a kernel looks for in the rows that ask for one. The bits of the allowed tokens are read in the same pass
as the penalties' rows, of whose bytes they are a fiftieth. No setting changes a shape, so none recompiles.
"""

import secrets
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from dsv4jax.branching import where_needed
from dsv4jax.quant import ceil_div
from dsv4jax.sampling_settings import MAX_TOP_LOGPROBS, SETTINGS_ROW, RequestSampling, check_integer, check_number
from pallas_kernels.sampling_cut import sampling_cut
from pallas_kernels.topk import topk

_FLOAT32 = np.finfo(np.float32)
_ALL_ALLOWED = np.uint32(0xFFFFFFFF)


@flax.struct.dataclass
class SamplingParams:
    """Settings of the requests of one batch; `sampling_params` builds it from `RequestSampling`s."""

    temperature: Float[Array, "requests"]  # 0 = greedy
    top_k: Int[Array, "requests"]  # 0 = no limit
    top_p: Float[Array, "requests"]  # 1 = off
    min_p: Float[Array, "requests"]  # 0 = off
    presence_penalty: Float[Array, "requests"]  # over generated tokens; 0 = off
    frequency_penalty: Float[Array, "requests"]  # over generated tokens; 0 = off
    repetition_penalty: Float[Array, "requests"]  # over prompt and generated tokens; 1 = off
    seed: UInt32[Array, "requests 2"]  # high and low half of the seed's 64 bits: a threefry key
    top_logprobs: Int[Array, "requests"]  # -1 = no logprobs, 0 = of the chosen token, n = and of the n best


@flax.struct.dataclass
class SamplingState:
    """What sampling remembers of the request in each cache slot."""

    output_counts: Int32[Array, "slots vocab"]  # committed generated tokens
    prompt_mask: Bool[Array, "slots vocab"]  # tokens that occur in the prompt
    logit_bias: Float32[Array, "slots vocab"]
    allowed: UInt32[Array, "slots places words"]  # bit i % 32 of word i // 32: token i may be chosen
    recent_tokens: Int32[Array, "slots ring"]  # token ids of the newest positions, at position % ring
    counted: Int32[Array, "slots"]  # positions < counted hold prompt tokens and generated tokens in output_counts
    next_tokens: Int32[Array, "slots"]  # what the newest step sampled after its last token


@flax.struct.dataclass
class Sampled:
    """Result of `sample`; row (b, j) follows input token j of request b."""

    tokens: Int32[Array, "requests tokens"]
    logprobs: Float32[Array, "requests tokens"]
    top_tokens: Int32[Array, "requests tokens 20"]
    top_logprobs: Float32[Array, "requests tokens 20"]


# A padded row is greedy, so that it never makes a batch draw noise or search for a filter's cut.
_PADDING = RequestSampling(temperature=0.0, seed=0)


def sampling_params(requests: Sequence[RequestSampling], rows: int) -> SamplingParams:
    """Stacks the settings of a batch's requests and pads them to `rows` (host side, numpy arrays).

    A request without a seed gets fresh randomness from the operating system at every call.

    Raises ValueError if there are more requests than rows.
    """
    if len(requests) > rows:
        raise ValueError(f"rows must be at least the number of requests, {len(requests)}, got {rows}")
    stacked = np.frombuffer(b"".join(r.row for r in requests) + _PADDING.row * (rows - len(requests)), SETTINGS_ROW)
    columns = {name: np.ascontiguousarray(stacked[name]) for name in SETTINGS_ROW.names}
    unseeded = ~columns.pop("seeded")
    if unseeded.any():
        fresh = np.frombuffer(secrets.token_bytes(8 * rows), np.uint32).reshape(rows, 2)
        columns["seed"] = np.where(unseeded[:, None], fresh, columns["seed"])
    return SamplingParams(**columns)


def request_rows(
    prompt: Sequence[int] | np.ndarray,
    outputs: Sequence[int] | np.ndarray,
    logit_bias: Mapping[int, float | int],
    vocab: int,
) -> tuple[Bool[np.ndarray, "vocab"], Int32[np.ndarray, "vocab"], Float32[np.ndarray, "vocab"]]:
    """Dense rows of one request for `begin_request`: prompt_mask, output_counts, logit_bias (host side).

    Args:
      outputs: tokens the request generated before it was preempted; empty for a new request.

    Raises ValueError for a token id outside 0 .. vocab - 1 and for a bias outside -100 .. 100.
    """
    prompt_mask = np.zeros(vocab, bool)
    prompt_mask[_checked_ids("prompt", prompt, vocab)] = True
    output_counts = np.bincount(_checked_ids("outputs", outputs, vocab), minlength=vocab).astype(np.int32)
    bias_row = np.zeros(vocab, np.float32)
    for token, bias in logit_bias.items():
        check_integer("logit_bias key", token, 0, vocab - 1)
        check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        bias_row[token] = bias
    return prompt_mask, output_counts, bias_row


def _checked_ids(name: str, ids: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{name} must be a flat sequence of integers, got shape {ids.shape} of {ids.dtype}")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        first = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
        raise ValueError(f"{name}[{first}] must be an integer from 0 to {vocab - 1}, got {ids[first]}")
    return ids.astype(np.int64)


def init_sampling_state(slots: int, vocab: int, ring: int, places: int = 1) -> SamplingState:
    """State of `slots` empty slots.

    Args:
      ring: at least the number of tokens a request can have in one step.
      places: for how many tokens of a step there are allowed tokens of their own.

    Raises ValueError if a size is below 1.
    """
    for name, size in (("slots", slots), ("vocab", vocab), ("ring", ring), ("places", places)):
        check_integer(name, size, 1, 2**31 - 1)
    return SamplingState(
        output_counts=jnp.zeros((slots, vocab), jnp.int32),
        prompt_mask=jnp.zeros((slots, vocab), bool),
        logit_bias=jnp.zeros((slots, vocab), jnp.float32),
        allowed=jnp.full((slots, places, ceil_div(vocab, 32)), _ALL_ALLOWED),
        recent_tokens=jnp.zeros((slots, ring), jnp.int32),
        counted=jnp.zeros(slots, jnp.int32),
        next_tokens=jnp.zeros(slots, jnp.int32),
    )


def begin_request(
    state: SamplingState,
    slot: Int[Array, ""] | int,
    *,
    prompt_mask: Bool[Array, "vocab"],
    output_counts: Int32[Array, "vocab"],
    logit_bias: Float[Array, "vocab"],
    length: Int[Array, ""] | int,
) -> SamplingState:
    """Puts a request into a slot, forgetting the previous one; a slot >= number of slots changes nothing.

    Args:
      prompt_mask, output_counts, logit_bias: from `request_rows`.
      length: tokens the request begins with: its prompt and what `output_counts` counts. Penalties and noise of a
        preempted request go on as if it had never stopped.
    """

    def put(values, value):
        return values.at[slot].set(value, mode="drop")

    return SamplingState(
        output_counts=put(state.output_counts, output_counts),
        prompt_mask=put(state.prompt_mask, prompt_mask),
        logit_bias=put(state.logit_bias, logit_bias),
        allowed=put(state.allowed, _ALL_ALLOWED),
        recent_tokens=put(state.recent_tokens, 0),
        counted=put(state.counted, length),
        next_tokens=put(state.next_tokens, 0),
    )


def commit_tokens(
    state: SamplingState, slots: Int32[Array, "requests"], starts: Int32[Array, "requests"]
) -> SamplingState:
    """Counts the generated tokens before each request's position `starts`, which are now final.

    They are read from `recent_tokens`, so between two calls a request may not advance by more than `ring`
    positions past those it began with. Slots are distinct; a padded row has a slot >= number of slots and writes
    nothing.
    """
    vocab, ring = state.output_counts.shape[1], state.recent_tokens.shape[1]
    positions = starts[:, None] - 1 - jnp.arange(ring)
    # Positions the request began with are never due: begin_request puts them below `counted`.
    due = positions >= state.counted.at[slots].get(mode="fill", fill_value=0)[:, None]
    recent = state.recent_tokens.at[slots[:, None], positions % ring].get(mode="fill", fill_value=0)
    counts = state.output_counts.at[slots[:, None], jnp.where(due, recent, vocab)].add(1, mode="drop")
    return state.replace(output_counts=counts, counted=state.counted.at[slots].max(starts, mode="drop"))


def record_tokens(
    state: SamplingState,
    slots: Int32[Array, "requests"],
    tokens: Int32[Array, "requests tokens"],
    positions: Int32[Array, "requests tokens"],
    valid: Bool[Array, "requests tokens"],
) -> SamplingState:
    """Notes a step's input tokens by position; of more than `ring` tokens the newest. Counts nothing yet."""
    num_slots, ring = state.recent_tokens.shape
    newest = jnp.max(jnp.where(valid, positions, -1), axis=1, keepdims=True)
    written = valid & (positions > newest - ring)
    rows = jnp.where(written, slots[:, None], num_slots)
    return state.replace(recent_tokens=state.recent_tokens.at[rows, positions % ring].set(tokens, mode="drop"))


def keep_next_tokens(
    state: SamplingState,
    slots: Int32[Array, "requests"],
    sampled: Int32[Array, "requests tokens"],
    valid: Bool[Array, "requests tokens"],
) -> SamplingState:
    """Keeps for each slot the token sampled after the last valid token of the step.

    That is a request's next token if all its tokens of the step stand; which one it is after drafts were rejected is
    for the caller to choose.
    """
    count = jnp.sum(valid, axis=1)
    newest = jnp.take_along_axis(sampled, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    rows = jnp.where(count > 0, slots, state.next_tokens.shape[0])
    return state.replace(next_tokens=state.next_tokens.at[rows].set(newest, mode="drop"))


def adjusted_logits(
    logits: Float32[Array, "requests tokens vocab"],
    state: SamplingState,
    params: SamplingParams,
    slots: Int32[Array, "requests"],
    tokens: Int32[Array, "requests tokens"],
    positions: Int32[Array, "requests tokens"],
    valid: Bool[Array, "requests tokens"],
) -> Float32[Array, "requests tokens vocab"]:
    """Logits after bias, repetition, frequency and presence penalty, in this order; -inf for tokens not allowed.

    Row (b, j) takes the committed tokens of the request and the step's own generated tokens 0 .. j as past.
    The repetition penalty divides a positive logit and multiplies a negative one. With all settings off the
    result equals `logits` bit for bit.
    """

    def of_request(values):
        return values.at[slots].get(mode="fill", fill_value=0)[:, None]

    def column(values):
        return values[:, None, None]

    num_tokens, vocab = logits.shape[1:]
    generated = valid & (positions >= of_request(state.counted))
    up_to = jnp.tri(num_tokens, dtype=bool)[:, :, None]
    same = (tokens[:, :, None] == jnp.arange(vocab)) & generated[:, :, None]
    counts = of_request(state.output_counts) + jnp.sum(same[:, None] & up_to, axis=2, dtype=jnp.int32)

    biased = logits + of_request(state.logit_bias)
    repetition = column(params.repetition_penalty)
    repeated = jnp.where(biased > 0, biased / repetition, biased * repetition)
    # A tiny repetition penalty may overflow; the largest finite logit keeps the softmax defined.
    repeated = jnp.minimum(repeated, _FLOAT32.max)
    seen = of_request(state.prompt_mask) | (counts > 0)
    penalty = column(params.frequency_penalty) * counts + column(params.presence_penalty) * (counts > 0)
    bits = allowed_words(state, slots, num_tokens)[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    may_follow = bits.reshape(*bits.shape[:2], -1)[..., :vocab] > 0
    return jnp.where(may_follow, jnp.where(seen, repeated, biased) - penalty, -jnp.inf)


def allowed_words(
    state: SamplingState, slots: Int32[Array, "requests"], num_tokens: int
) -> UInt32[Array, "requests tokens words"]:
    """Which tokens may follow each token of a step: those of its place, from the last place on those of the last."""
    places = jnp.minimum(jnp.arange(num_tokens), state.allowed.shape[1] - 1)
    return state.allowed.at[slots[:, None], places].get(mode="fill", fill_value=0)


@jax.named_scope("sample")
def sample(
    logits: Float32[Array, "requests tokens vocab"],
    state: SamplingState,
    params: SamplingParams,
    slots: Int32[Array, "requests"],
    tokens: Int32[Array, "requests tokens"],
    positions: Int32[Array, "requests tokens"],
    valid: Bool[Array, "requests tokens"],
    implementation: str = "reference",
) -> Sampled:
    """Chooses the token that follows each input token.

    Args:
      logits: of the model; row (b, j) stands after input token j of request b.
      state: after `commit_tokens` and `record_tokens` of this step.
      params: one row per request.
      slots: cache slot of each request, distinct; >= number of slots for a padded row.
      tokens, positions: the step's inputs, consecutive positions; prefill passes its last token only.
      valid: False for padding. Values of `tokens` and `positions` there are ignored.
      implementation: of `sampling_cut`, "reference" or "pallas"; the tokens are the same.

    The rules, per row: bias, penalties and allowed tokens (`adjusted_logits`); then the best token if the
    temperature is 0, otherwise temperature, the top_k best, of these the shortest list of best tokens that holds
    at least top_p of their probability, of these the ones with at least min_p times the best one's probability,
    and a Gumbel-max draw. Its noise has the threefry key "request's seed, folded with the position of the token
    being chosen", so a seeded request gets the same tokens from the same logits in any batch, slot, bucket
    or split into steps. Equal logits rank by token id, smaller first. top_p adds probabilities up in
    integers, as multiples of at most 2^-26, so that no order of summation can move its cut.

    Log-probabilities are natural logs of the softmax of the unchanged `logits`; that of the chosen token is
    returned whatever top_logprobs says, and equals its entry among the best bit for bit. Of `top_tokens` and
    `top_logprobs` the first params.top_logprobs entries are filled (beyond the vocabulary: token 0, -inf),
    the others are 0.

    A logit of -inf excludes a token. A row whose logits hold NaN or +inf, or are all -inf, has no
    distribution, and a row may have no token that is allowed: its token is 0 and its log-probability NaN, so that
    the caller can end the request; other rows are untouched.
    Rows that are not valid: token 0, log-probability 0.
    """
    adjusted = adjusted_logits(logits, state, params, slots, tokens, positions, valid)
    random = valid & draws_at_random(params)[:, None]
    chosen = choose_tokens(adjusted, random, params, positions, implementation)
    best = jnp.take_along_axis(adjusted, chosen[..., None], axis=-1)[..., 0]
    log_total = log_totals(logits)
    defined = jnp.isfinite(log_total) & (best > -jnp.inf)
    return with_logprobs(jnp.where(defined, chosen, 0), defined, logits, log_total, params, valid)


def with_logprobs(
    tokens: Int32[Array, "requests tokens"],
    defined: Bool[Array, "requests tokens"],
    logits: Float32[Array, "requests tokens vocab"],
    log_total: Float32[Array, "requests tokens"],
    params: SamplingParams,
    valid: Bool[Array, "requests tokens"],
) -> Sampled:
    """Chosen tokens with the log-probabilities that `sample` documents.

    Args:
      defined: False where there was nothing to choose from: log-probability NaN.
      log_total: from `log_totals(logits)`.
      valid: False where no token is due: all fields 0.
    """
    logprobs = jnp.where(defined, _logprobs_of(tokens, logits, log_total), jnp.nan)
    wanted = valid[..., None] & (jnp.arange(MAX_TOP_LOGPROBS) < params.top_logprobs[:, None, None])

    def none():
        return jnp.zeros_like(wanted, jnp.int32), jnp.zeros_like(wanted, jnp.float32)

    def top():
        return _top_logprobs(logits, log_total, jnp.any(wanted, axis=-1))

    top_tokens, top_logprobs = where_needed(jnp.any(wanted), top, none)
    return Sampled(
        tokens=jnp.where(valid, tokens, 0),
        logprobs=jnp.where(valid, logprobs, 0.0),
        top_tokens=jnp.where(wanted, top_tokens, 0),
        top_logprobs=jnp.where(wanted, top_logprobs, 0.0),
    )


def prompt_logprobs(
    logits: Float32[Array, "tokens vocab"], targets: Int32[Array, "tokens"]
) -> tuple[Float32[Array, "tokens"], Int32[Array, "tokens 20"], Float32[Array, "tokens 20"]]:
    """Log-probability of each token's target, and the most probable tokens with theirs, as `sample` reports them.

    All are 0 where the target is -1: there is none.
    """
    log_total = log_totals(logits)
    present = targets >= 0
    logprobs = _logprobs_of(jnp.maximum(targets, 0), logits, log_total)
    top = _top_logprobs(logits, log_total, present)
    return jnp.where(present, logprobs, 0.0), *(jnp.where(present[:, None], values, 0) for values in top)


def log_totals(logits: Float32[Array, "*rows vocab"]) -> Float32[Array, "*rows"]:
    """Log of the softmax's denominator; NaN in rows that are no distribution."""
    log_total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.isfinite(log_total), log_total, jnp.nan)


def _logprobs_of(
    tokens: Int32[Array, "*rows"], logits: Float32[Array, "*rows vocab"], log_total: Float32[Array, "*rows"]
) -> Float32[Array, "*rows"]:
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - log_total


def _top_logprobs(
    logits: Float32[Array, "*rows vocab"], log_total: Float32[Array, "*rows"], wanted: Bool[Array, "*rows"]
) -> tuple[Int32[Array, "*rows 20"], Float32[Array, "*rows 20"]]:
    """The most probable tokens, best first, ties to the smaller id; token 0 and -inf where there are no more.

    Rows that are not wanted have none; the kernel reads the first eighth of them.
    """
    vocab = logits.shape[-1]
    lengths = jnp.where(wanted, vocab, 0).reshape(-1)
    ids = topk(logits.reshape(-1, vocab), MAX_TOP_LOGPROBS, lengths).reshape(*wanted.shape, MAX_TOP_LOGPROBS)
    values = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=-1)
    order = jnp.argsort(jnp.where(ids < 0, jnp.inf, -values), axis=-1, stable=True)
    ids, values = (jnp.take_along_axis(a, order, axis=-1) for a in (ids, values))
    return jnp.maximum(ids, 0), jnp.where(ids < 0, -jnp.inf, values) - log_total[..., None]


def draws_at_random(params: SamplingParams) -> Bool[Array, "requests"]:
    """Requests whose temperature is not 0."""
    # Below the normal numbers a temperature may count as 0 in one operation and not in another.
    return params.temperature >= _FLOAT32.tiny


def choose_tokens(
    adjusted: Float32[Array, "requests tokens vocab"],
    random: Bool[Array, "requests tokens"],
    params: SamplingParams,
    positions: Int32[Array, "requests tokens"],
    implementation: str = "reference",
) -> Int32[Array, "requests tokens"]:
    """Filters and draws in the rows where `random` holds, takes the best token in the others."""

    def draw():
        scores = filtered_logits(adjusted, random, params, implementation)
        noise = gumbel_noise(params, positions + 1, adjusted.shape[-1])
        return jnp.argmax(jnp.where(random[..., None], scores + noise, scores), axis=-1)

    return where_needed(jnp.any(random), draw, lambda: jnp.argmax(adjusted, axis=-1)).astype(jnp.int32)


def gumbel_noise(
    params: SamplingParams, positions: Int32[Array, "requests tokens"], vocab: int
) -> Float32[Array, "requests tokens vocab"]:
    """Noise with which the token of each position is drawn."""

    def noise(seed, position):
        # The default mode cannot tell apart probabilities below about 1e-7, which may add up to percents.
        return jax.random.gumbel(noise_key(seed, position), (vocab,), jnp.float32, mode="high")

    return jax.vmap(jax.vmap(noise, (None, 0)))(params.seed, positions)


def noise_key(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> Array:
    """Key of all that is drawn at random for a position."""
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


def filtered_logits(
    adjusted: Float32[Array, "requests tokens vocab"],
    random: Bool[Array, "requests tokens"],
    params: SamplingParams,
    implementation: str = "reference",
) -> Float32[Array, "requests tokens vocab"]:
    """Logits whose softmax is the distribution that `sample` draws from; those of the best token are 0.

    Tokens that a filter excludes have -inf. Rows in which `random` is False stay as they are.

    Args:
      implementation: of `sampling_cut`.
    """
    vocab = adjusted.shape[-1]
    best = jnp.max(adjusted, axis=-1)
    settings = (jnp.broadcast_to(a[:, None], random.shape) for a in (params.temperature, params.top_k, params.top_p))
    per_row = (a.reshape(-1) for a in (best, random, *settings))
    cut = sampling_cut(adjusted.reshape(-1, vocab), *per_row, implementation=implementation)
    last, last_id = (a.reshape(*random.shape, 1) for a in cut)
    kept = (adjusted > last) | ((adjusted == last) & (jnp.arange(vocab) <= last_id))
    random = random[..., None]
    # Distance below the best token in units of the temperature: exp(-distance) is the probability relative to
    # the best. Subtracting first keeps a tiny temperature finite.
    temperature = jnp.where(random, params.temperature[:, None, None], 1.0)
    distance = (best[..., None] - adjusted) / temperature
    kept &= distance <= -jnp.log(params.min_p)[:, None, None]
    return jnp.where(random, jnp.where(kept, -distance, -jnp.inf), adjusted)
