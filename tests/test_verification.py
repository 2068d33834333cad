"""`verify` row by row; its distributions are in test_verification_distribution.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from test_sampling import DISTRIBUTIONS, PADDED_SLOT, SLOTS, VOCAB, begun, bit_masks, new_state, request_settings

from dsv4jax import sampling
from dsv4jax.sampling import sampling_params
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.verification import draw_drafts, verify

DRAFTS, ROWS = 3, 5
WAYS = ["without draft logits", "rejection", "blockwise"]
ALL_ALLOWED = np.full((ROWS, DRAFTS + 1, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
NOT_FORCED = np.full(DRAFTS, -1, np.float32)
NO_PAUSES = np.full((ROWS, 2), -1, np.int32)
PENALISED = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3}


@jax.jit
def committed(state, slots, tokens, positions, valid):
    state = sampling.commit_tokens(state, slots, positions[:, 0])
    return sampling.record_tokens(state, slots, tokens, positions, valid)


@functools.partial(jax.jit, static_argnames="way")
def verified(state, batch, draft_counts, draft_logits, way, pause_tokens=None, forced_acceptance=None):
    """What a step does around the model; `batch` is what `sample` takes besides the state."""
    logits, params, *places = batch
    return verify(
        logits,
        batch[3][:, 1:],
        draft_counts,
        None if way == WAYS[0] else draft_logits,
        committed(state, *places),
        params,
        *places,
        method="rejection" if way == WAYS[0] else way,
        pause_tokens=pause_tokens,
        forced_acceptance=forced_acceptance,
    )


@jax.jit
def sampled(state, batch):
    logits, params, *places = batch
    return sampling.sample(logits, committed(state, *places), params, *places)


def assert_equal_fields(a, b, where=np.s_[:]):
    """Of two results; tokens and log-probabilities only."""
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(np.asarray(getattr(a, name))[where], np.asarray(getattr(b, name))[where], name)


@functools.cache
def prompted_state():
    return new_state(np.random.default_rng(0).integers(0, VOCAB, (SLOTS, 6)).tolist())


class Batch:
    """ROWS rows of requests with random logits, drafts and draft logits; prompts of 6 tokens, nothing generated."""

    def __init__(self, requests, data_seed=0, scale=1.0):
        rng = np.random.default_rng(data_seed)
        count = len(requests)
        self.requests, self.rng = requests, rng
        self.state = prompted_state()
        self.slots = np.full(ROWS, PADDED_SLOT, np.int32)
        self.slots[:count] = rng.permutation(SLOTS)[:count]
        self.logits = (scale * rng.normal(size=(ROWS, DRAFTS + 1, VOCAB))).astype(np.float32)
        # Near the target's, so that drafts are accepted.
        self.draft_logits = self.logits[:, :-1] + (0.3 * rng.normal(size=(ROWS, DRAFTS, VOCAB))).astype(np.float32)
        self.positions = np.tile(np.arange(5, 6 + DRAFTS, dtype=np.int32), (ROWS, 1))
        self.params = sampling_params(requests, ROWS)
        self.tokens = rng.integers(0, VOCAB, (ROWS, DRAFTS + 1)).astype(np.int32)
        self.counts = np.full(ROWS, DRAFTS, np.int32)

    def draw(self, way):
        """Draws drafts as the way of verification wants them."""
        for j in range(DRAFTS):
            logits, positions = self.draft_logits[:, j], self.positions[:, j + 1]
            shared = way == WAYS[0]
            self.tokens[:, j + 1] = draw(logits, self.params, positions, self.positions[:, 0], shared_noise=shared)
        return self

    @property
    def valid(self):
        present = np.arange(ROWS) < len(self.requests)
        return (np.arange(DRAFTS + 1) <= self.counts[:, None]) & present[:, None]

    @property
    def batch(self):
        return self.logits, self.params, self.slots, self.tokens, self.positions, self.valid

    def masked(self, allowed):
        """The state with a mask for each place [ROWS, tokens, words]."""
        masks = np.full((SLOTS + 1, *allowed.shape[1:]), 0xFFFFFFFF, np.uint32)
        masks[self.slots] = allowed
        return self.state.replace(allowed=jnp.asarray(masks[:SLOTS]))

    def verified(self, way, allowed=ALL_ALLOWED, pause_tokens=NO_PAUSES, forced_acceptance=NOT_FORCED):
        arguments = (self.masked(allowed), self.batch, self.counts, self.draft_logits, way)
        return verified(*arguments, pause_tokens=pause_tokens, forced_acceptance=forced_acceptance)

    def sampled(self, allowed=ALL_ALLOWED):
        return sampled(self.masked(allowed), self.batch)


keep_next_tokens = jax.jit(sampling.keep_next_tokens)
draw = jax.jit(draw_drafts, static_argnames="shared_noise")


# The same as `sample`.


@settings(max_examples=40)
@given(requests=st.lists(request_settings, min_size=1, max_size=4), data_seed=st.integers(0, 2**32))
def test_without_draft_logits_the_output_is_that_of_sample(requests, data_seed):
    """Guessing what `sample` draws, some wrong: it stands as far as the guess is right, log-probabilities included."""
    batch = Batch(requests, data_seed)
    batch.counts = batch.rng.integers(0, DRAFTS + 1, ROWS).astype(np.int32)
    wrong_from = batch.rng.integers(0, DRAFTS + 1, ROWS)
    for j in range(DRAFTS):
        right = np.asarray(batch.sampled().tokens)[:, j]
        batch.tokens[:, j + 1] = np.where(j < wrong_from, right, (right + 1) % VOCAB)
    result, expected = batch.verified(WAYS[0]), batch.sampled()
    accepted = np.where(batch.valid[:, 0], np.minimum(batch.counts, wrong_from), 0)
    np.testing.assert_array_equal(result.accepted, accepted)
    emitted = batch.valid & (np.arange(DRAFTS + 1) <= accepted[:, None])
    np.testing.assert_array_equal(result.emitted, emitted)
    assert_equal_fields(result, expected, emitted)
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        assert not np.asarray(getattr(result, name))[~emitted].any()


@pytest.mark.parametrize("way", WAYS[1:])
@settings(max_examples=20)
@given(requests=st.lists(request_settings, min_size=1, max_size=4), data_seed=st.integers(0, 2**32))
def test_what_is_not_drawn_is_reported_as_sample_does(way, requests, data_seed):
    """Greedy requests give the tokens of `sample`, the others at least its log-probabilities; padding gives nothing."""
    batch = Batch(requests, data_seed).draw(way)
    batch.counts = batch.rng.integers(0, DRAFTS + 1, ROWS).astype(np.int32)
    result, expected = batch.verified(way), batch.sampled()
    accepted, tokens = np.asarray(result.accepted), np.asarray(result.tokens)
    emitted = batch.valid & (np.arange(DRAFTS + 1) <= accepted[:, None])
    np.testing.assert_array_equal(result.emitted, emitted)
    assert np.all(accepted <= batch.counts)
    kept = emitted[:, 1:]
    np.testing.assert_array_equal(tokens[:, :-1][kept], batch.tokens[:, 1:][kept])
    exact = special.log_softmax(batch.logits.astype(np.float64), axis=-1)
    exact = np.take_along_axis(exact, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(result.logprobs)[emitted], exact[emitted], rtol=1e-5, atol=1e-6)
    for name in ("top_tokens", "top_logprobs"):
        value = np.asarray(getattr(result, name))
        np.testing.assert_array_equal(value[emitted], np.asarray(getattr(expected, name))[emitted])
        assert not value[~emitted].any()
    assert not tokens[~emitted].any() and not np.asarray(result.logprobs)[~emitted].any()
    # Where nothing was drafted the token is that of `sample`, and so are all of a greedy request.
    greedy = np.array([r.temperature == 0 for r in requests] + [False] * (ROWS - len(requests)))
    assert_equal_fields(result, expected, emitted & (greedy | (batch.counts == 0))[:, None])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=["plain", "filters"])
def test_a_tiny_temperature_is_greedy(way, temperature, filters):
    batch = Batch([RequestSampling(temperature=temperature, seed=i, **filters) for i in range(ROWS)]).draw(way)
    best = batch.logits.argmax(-1)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.draft_logits.argmax(-1))
    result = batch.verified(way)
    accepted = np.cumprod(batch.tokens[:, 1:] == best[:, :-1], axis=1).sum(1)
    np.testing.assert_array_equal(result.accepted, accepted)
    np.testing.assert_array_equal(result.tokens, np.where(np.arange(DRAFTS + 1) <= accepted[:, None], best, 0))
    assert 0 < accepted.mean() < DRAFTS


def test_steps_without_room_for_drafts():
    batch = Batch([RequestSampling()] * ROWS)
    logits, params, slots, *places = batch.batch
    one = (logits[:, :1], params, slots, *(place[:, :1] for place in places))
    result = jax.eval_shape(functools.partial(verified, way=WAYS[0]), batch.state, one, batch.counts, None)
    assert result.tokens.shape == (ROWS, 1) and result.accepted.shape == (ROWS,)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.8}], ids=["greedy", "drawn"])
def test_penalties_count_every_accepted_token_over_many_steps(fields):
    """Tokens and counts of a speculating request are those of one that takes every token in a step of its own."""
    prompt, length, slot = [4, 8, 4, 1], 30, 2
    params = sampling_params([RequestSampling(seed=7, **PENALISED, **fields)], ROWS)
    rng = np.random.default_rng(3)
    table = (2 * rng.normal(size=(VOCAB, VOCAB))).astype(np.float32)  # logits by the token before
    slots = np.array([slot] + [PADDED_SLOT] * (ROWS - 1), np.int32)

    def step(state, generated, inputs):
        """State and batch of a step over tokens of which the first is the last of `generated`."""
        tokens, valid = np.zeros((ROWS, DRAFTS + 1), np.int32), np.zeros((ROWS, DRAFTS + 1), bool)
        tokens[0, : len(inputs)], valid[0, : len(inputs)] = inputs, True
        first = len(prompt) - 1 + generated
        positions = np.tile(np.arange(first, first + DRAFTS + 1, dtype=np.int32), (ROWS, 1))
        places = (slots, tokens, positions, valid)
        return committed(state, *places), (table[tokens], params, *places)

    state, expected = begun(new_state(), slot, prompt), [prompt[-1]]
    while len(expected) <= length + 2 * DRAFTS:
        state, batch = step(state, len(expected) - 1, expected[-1:])
        expected.append(int(sampled(state, batch).tokens[0, 0]))

    counts, unused = np.full(ROWS, DRAFTS, np.int32), np.zeros((ROWS, DRAFTS, VOCAB), np.float32)
    state, tokens, accepted = begun(new_state(), slot, prompt), [prompt[-1]], []
    while len(tokens) <= length:
        drafts = np.array(expected[len(tokens) : len(tokens) + DRAFTS])
        wrong = rng.integers(0, DRAFTS + 1)
        drafts[wrong:] = (drafts[wrong:] + 1) % VOCAB
        state, batch = step(state, len(tokens) - 1, [tokens[-1], *drafts])
        result = verified(state, batch, counts, unused, WAYS[0], NO_PAUSES, NOT_FORCED)
        state = keep_next_tokens(state, slots, result.tokens, result.emitted)
        assert result.accepted[0] == wrong
        accepted.append(wrong)
        tokens += np.asarray(result.tokens)[0, : wrong + 1].tolist()
        assert state.next_tokens[slot] == tokens[-1]
    assert tokens == expected[: len(tokens)] and set(accepted) == set(range(DRAFTS + 1))
    state, _ = step(state, len(tokens) - 1, tokens[-1:])  # which counts the tokens before its first
    np.testing.assert_array_equal(state.output_counts[slot], np.bincount(tokens[1:-1], minlength=VOCAB))


# The same in any company.


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20)
@given(requests=st.lists(request_settings, min_size=2, max_size=4), data_seed=st.integers(0, 2**32))
def test_a_seeded_request_gets_the_same_in_any_batch_row_and_slot(way, requests, data_seed):
    batch = Batch(requests, data_seed).draw(way)
    result = batch.verified(way)
    row, other = batch.rng.integers(len(requests)), batch.rng.integers(ROWS)
    alone = Batch([RequestSampling(temperature=1.1, top_k=3)] * other + [requests[row]], data_seed + 1)
    for name in ("logits", "draft_logits", "tokens", "positions", "counts"):
        getattr(alone, name)[other] = getattr(batch, name)[row]
    alone.logits[other + 1 :] = np.nan
    mask = np.array(batch.state.prompt_mask)
    mask[alone.slots[other]] = mask[batch.slots[row]]
    alone.state = batch.state.replace(prompt_mask=mask)
    again = alone.verified(way)
    assert again.accepted[other] == result.accepted[row]
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again, name)[other], getattr(result, name)[row])


def test_a_request_gets_the_same_in_a_smaller_bucket():
    batch = Batch([RequestSampling(temperature=i / 3, top_p=0.9, seed=i, top_logprobs=2) for i in range(ROWS)])
    batch.draw("blockwise").counts = np.array([1, 0, 1, 1, 1], np.int32)
    result = batch.verified("blockwise")
    logits, params, slots, *places = batch.batch
    small = (logits[:, :2], params, slots, *(place[:, :2] for place in places))
    again = verified(batch.state, small, batch.counts, batch.draft_logits[:, :1], "blockwise")
    assert set(np.asarray(result.accepted)) == {0, 1}
    np.testing.assert_array_equal(again.accepted, result.accepted)
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result, name)[:, :2])


# Rows with nothing to choose from.


def certain_batch(way, **fields):
    """All drafts of the first request are accepted, because there both models are certain of them."""
    batch = Batch([RequestSampling(seed=i, top_logprobs=2, **fields) for i in range(ROWS)]).draw(way)
    batch.logits[0, np.arange(DRAFTS), batch.tokens[0, 1:]] = 50
    batch.draft_logits[0] = batch.logits[0, :-1]
    return batch


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["nan", "infinity", "minus infinity", "mask"])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_an_undefined_row_ends_the_accepted_prefix(way, kind, fields):
    batch = certain_batch(way, **fields)
    clean, right = batch.verified(way), batch.logits
    assert clean.accepted[0] == DRAFTS
    for place in range(DRAFTS + 1):
        batch.logits, allowed = right.copy(), ALL_ALLOWED.copy()
        if kind == "mask":
            allowed[0, place] = 0
        elif kind == "minus infinity":
            batch.logits[0, place] = -np.inf
        else:
            batch.logits[0, place, 5] = np.nan if kind == "nan" else np.inf
        result = batch.verified(way, allowed=allowed)
        assert result.accepted[0] == place and result.emitted[0].sum() == place + 1
        assert_equal_fields(result, clean, np.s_[0, :place])
        assert not result.tokens[0, place:].any() and np.isnan(result.logprobs[0, place])
        assert np.isnan(result.top_logprobs[0, place, :2]).all() == (kind != "mask")
        assert_equal_fields(result, clean, np.s_[1:])


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf, "id -1", f"id {VOCAB}"])
def test_a_draft_without_a_distribution_is_not_accepted(way, kind):
    batch = certain_batch(way)
    clean = batch.verified(way)
    logits, tokens = batch.draft_logits, batch.tokens
    for place in range(DRAFTS):
        batch.draft_logits, batch.tokens = logits.copy(), tokens.copy()
        if isinstance(kind, str):
            batch.tokens[0, place + 1] = int(kind[3:])
        else:
            batch.draft_logits[0, place, slice(None) if kind == -np.inf else 5] = kind
        result = batch.verified(way)
        assert result.accepted[0] == place
        assert result.tokens[0, place] == tokens[0, place + 1]  # what the target is certain of
        assert_equal_fields(result, clean, np.s_[1:])


@pytest.mark.parametrize("way", WAYS)
def test_an_only_token_is_accepted_and_given(way):
    batch = Batch([RequestSampling(seed=i, temperature=i / 2) for i in range(ROWS)])
    only = np.eye(VOCAB, dtype=bool)[np.full((ROWS, DRAFTS + 1), 7)]
    batch.tokens[:, 1:] = 7
    result = batch.verified(way, allowed=bit_masks(only))
    np.testing.assert_array_equal(result.accepted, DRAFTS)
    np.testing.assert_array_equal(result.tokens, 7)
    assert np.isfinite(result.logprobs).all()
    batch.tokens[:, 2] = 8
    result = batch.verified(way, allowed=bit_masks(only))
    np.testing.assert_array_equal(result.accepted, 1)
    np.testing.assert_array_equal(result.tokens, np.tile([7, 7, 0, 0], (ROWS, 1)))


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_that_a_filter_excludes_is_never_given(way):
    batch = Batch([RequestSampling(seed=i, top_k=3) for i in range(ROWS)])
    ranks = (-batch.logits).argsort(-1).argsort(-1)
    batch.tokens[:, 1:] = batch.logits[:, :-1].argsort(-1)[..., 0]  # the worst
    batch.draft_logits = -batch.logits[:, :-1]
    result = batch.verified(way)
    assert not np.any(result.accepted)
    assert np.all(np.take_along_axis(ranks[:, 0], np.asarray(result.tokens)[:, :1], 1) < 3)


# Masks of positions.


@pytest.mark.parametrize("fields", DISTRIBUTIONS[::3], ids=str)
def test_one_mask_of_a_slot_is_that_of_all_positions(fields):
    batch = Batch([RequestSampling(seed=i, **fields) for i in range(ROWS)], data_seed=4).draw(WAYS[0])
    mask = bit_masks(np.random.default_rng(0).random((SLOTS, VOCAB)) < 0.5)
    by_position = np.repeat(mask[batch.slots][:, None], DRAFTS + 1, axis=1)
    # Neither pauses nor a law, which in `Batch` are those that change nothing.
    masked = batch.state.replace(allowed=jnp.array(mask)[:, None])
    without_options = verified(masked, batch.batch, batch.counts, None, WAYS[0])
    jax.tree.map(np.testing.assert_array_equal, batch.verified(WAYS[0], allowed=by_position), without_options)


# Pauses.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}], ids=str)
def test_a_pause_token_is_the_last_and_those_before_it_are_what_they_are_without_it(way, fields):
    ended = set()
    for data_seed in range(4):
        requests = [RequestSampling(seed=i, **fields) for i in range(ROWS)]
        batch = Batch(requests, data_seed, scale=3.0).draw(way)
        free = batch.verified(way)
        pauses = np.stack([batch.tokens[:, 2], batch.tokens[:, 3]], axis=1)
        result = batch.verified(way, pause_tokens=pauses)
        for row in range(ROWS):
            whole = np.asarray(free.tokens)[row, : free.accepted[row] + 1].tolist()
            places = [place for place, token in enumerate(whole) if token in pauses[row]]
            count = places[0] + 1 if places else len(whole)
            ended.add(len(whole) - count)
            assert result.accepted[row] + 1 == count == result.emitted[row].sum()
            assert_equal_fields(result, free, np.s_[row, :count])
            assert not np.asarray(result.tokens)[row, count:].any()
    assert 0 in ended and max(ended) > 0


# Forced acceptance.


@pytest.mark.parametrize("way", WAYS)
def test_forced_acceptance_follows_its_law(way):
    fields = {"temperature": 0.7}
    accepted = []
    for data_seed in range(80):
        batch = Batch([RequestSampling(seed=ROWS * data_seed + i, **fields) for i in range(ROWS)], data_seed)
        batch.counts[0] = 1
        result = batch.verified(way, forced_acceptance=np.float32([0.8, 0.5, 1.0]))
        assert np.isfinite(result.logprobs).all()
        np.testing.assert_array_equal(result.emitted.sum(1), result.accepted + 1)
        accepted.append(np.asarray(result.accepted))
    accepted = np.array(accepted)
    assert accepted[:, 0].max() == 1
    counts = np.bincount(accepted[:, 1:].ravel(), minlength=DRAFTS + 1)
    assert counts[2] == 0
    assert stats.chisquare(counts[[0, 1, 3]], counts.sum() * np.array([0.2, 0.4, 0.4])).pvalue > 1e-4
