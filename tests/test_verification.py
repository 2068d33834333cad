"""`verify` against `sample`, and against distributions computed exactly."""

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import PADDED_SLOT, VOCAB, new_state, request_settings

from dsv4jax import sampling
from dsv4jax.sampling import sampling_params
from dsv4jax.verification import verify

DRAFTS = 3


@functools.partial(jax.jit, static_argnames="method")
def verified(state, batch, drafts, counts, draft_logits=None, allowed=None, method="rejection"):
    """What a step does around the model; `batch` is what `sample` takes besides the state."""
    logits, params, slots, tokens, positions, valid = batch
    state = sampling.commit_tokens(state, slots, positions[:, 0])
    state = sampling.record_tokens(state, slots, tokens, positions, valid)
    after = (state, params, slots, tokens, positions, valid)
    return verify(logits, drafts, counts, draft_logits, *after, method=method, allowed=allowed)


@jax.jit
def sampled(state, batch):
    logits, params, slots, tokens, positions, valid = batch
    state = sampling.commit_tokens(state, slots, positions[:, 0])
    state = sampling.record_tokens(state, slots, tokens, positions, valid)
    return sampling.sample(logits, state, params, slots, tokens, positions, valid)


@settings(deadline=None, max_examples=60)
@given(requests=st.lists(request_settings, min_size=1, max_size=4), data_seed=st.integers(0, 2**32))
def test_without_draft_logits_the_output_is_that_of_sample(requests, data_seed):
    """Guessing what `sample` draws, some wrong: it stands as far as the guess is right, log-probabilities included."""
    rng = np.random.default_rng(data_seed)
    rows, count = 4, len(requests)
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in requests]
    slots = np.full(rows, PADDED_SLOT, np.int32)
    slots[:count] = rng.permutation(count)
    state = new_state(prompts)
    logits = rng.normal(size=(rows, DRAFTS + 1, VOCAB)).astype(np.float32)
    positions = np.tile(np.arange(5, 6 + DRAFTS, dtype=np.int32), (rows, 1))
    params = sampling_params(requests, rows)
    tokens = rng.integers(0, VOCAB, (rows, DRAFTS + 1)).astype(np.int32)
    counts = rng.integers(0, DRAFTS + 1, rows).astype(np.int32)
    valid = (np.arange(DRAFTS + 1) <= counts[:, None]) & (np.arange(rows) < count)[:, None]
    wrong_from = rng.integers(0, DRAFTS + 1, rows)
    for j in range(DRAFTS):
        right = np.asarray(sampled(state, (logits, params, slots, tokens, positions, valid)).tokens)[:, j]
        tokens[:, j + 1] = np.where(j < wrong_from, right, (right + 1) % VOCAB)
    batch = (logits, params, slots, tokens, positions, valid)
    result, expected = verified(state, batch, tokens[:, 1:], counts), sampled(state, batch)
    accepted = np.where(np.arange(rows) < count, np.minimum(counts, wrong_from), 0)
    np.testing.assert_array_equal(result.accepted, accepted)
    emitted = valid & (np.arange(DRAFTS + 1) <= accepted[:, None])
    np.testing.assert_array_equal(result.emitted, emitted)
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        value, reference = np.asarray(getattr(result, name)), np.asarray(getattr(expected, name))
        np.testing.assert_array_equal(value[emitted], reference[emitted])
        assert not value[~emitted].any()
