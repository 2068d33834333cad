import dataclasses
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dsv4jax import branching, sampling
from dsv4jax.sampling import sampling_params
from dsv4jax.sampling_settings import RequestSampling

VOCAB, SLOTS, RING = 40, 5, 4
ROWS = 400  # every batch of single tokens is padded to this, every step has 4 rows of RING tokens
PADDED_SLOT = SLOTS


# The same rules once more, in float64 numpy and one row at a time.


def expected_adjusted(logits, request, prompt, generated, bias):
    adjusted = logits.astype(np.float64) + bias
    counts = np.bincount(generated, minlength=len(logits))
    for token in {*prompt, *generated}:
        penalty = request.repetition_penalty
        adjusted[token] = adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
    return adjusted - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)


def expected_distribution(adjusted, request):
    """Probabilities after temperature and filters."""
    order = np.argsort(-adjusted, kind="stable")
    if request.temperature == 0:
        kept = order[:1]
    else:
        kept = order[: request.top_k or None]
        mass = np.cumsum(special.softmax(adjusted[kept] / request.temperature))
        if request.top_p < 1:
            kept = kept[: np.searchsorted(mass, np.float32(request.top_p)) + 1]
        relative = np.exp((adjusted[kept] - adjusted[kept[0]]) / request.temperature)
        kept = kept[relative >= request.min_p]
    probabilities = np.zeros(len(adjusted))
    probabilities[kept] = special.softmax(adjusted[kept] / (request.temperature or 1))
    return probabilities


@jax.jit
def noise(seeds, positions):
    def one(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (VOCAB,), mode="high")

    return jax.vmap(one)(seeds, positions)


# Calling the module.


@jax.jit
def step(state, logits, params, slots, tokens, positions, valid):
    """What a model step does around the model."""
    state = sampling.commit_tokens(state, slots, positions[:, 0])
    state = sampling.record_tokens(state, slots, tokens, positions, valid)
    batch = (logits, state, params, slots, tokens, positions, valid)
    return state, sampling.sample(*batch), sampling.adjusted_logits(*batch)


begin_request = jax.jit(sampling.begin_request)
commit_tokens = jax.jit(sampling.commit_tokens)
record_tokens = jax.jit(sampling.record_tokens)
sample = jax.jit(sampling.sample)


def new_state(prompts=(), biases=None, vocab=VOCAB):
    """State in which slot i holds a request with prompts[i], nothing generated."""
    state = sampling.init_sampling_state(SLOTS, vocab, RING)
    for slot, prompt in enumerate(prompts):
        state = begun(state, slot, prompt, bias=(biases or {}).get(slot, {}), vocab=vocab)
    return state


def begun(state, slot, prompt, outputs=(), bias=None, vocab=VOCAB):
    """State after a request got a slot, perhaps with tokens it generated before."""
    mask, counts, bias = sampling.request_rows(prompt, outputs, bias or {}, vocab)
    return begin_request(
        state, slot, prompt_mask=mask, output_counts=counts, logit_bias=bias, length=len(prompt) + len(outputs)
    )


def bit_masks(allowed):
    """[..., vocab] bool as words of 32 bits."""
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def draw(logits, requests, state=None, token=0, positions=0, rows=ROWS):
    """Samples once for requests in slot 0 that have one input token each; logits [requests, vocab]."""
    count, vocab = np.shape(logits)
    valid = np.arange(rows)[:, None] < count
    padded_logits = np.full((rows, 1, vocab), np.nan, np.float32)
    padded_logits[:count, 0] = logits
    padded_positions = np.zeros((rows, 1), np.int32)
    padded_positions[:count, 0] = positions
    sampled = sample(
        padded_logits,
        new_state(vocab=vocab) if state is None else state,
        sampling_params(requests, rows),
        np.where(valid[:, 0], 0, PADDED_SLOT).astype(np.int32),
        np.full((rows, 1), token, np.int32),
        padded_positions,
        valid,
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count, 0], sampled)


def assert_distributed(tokens, probabilities):
    counts = np.bincount(np.ravel(tokens), minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    rare = expected < 5
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    used = pooled[1] > 0
    assert stats.chisquare(pooled[0][used], pooled[1][used]).pvalue > 1e-4


# Which token.

PROMPT, GENERATED = [3, 3, 7, 1], [2, 3, 2, 2, 9]
DISTRIBUTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"top_k": 6, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.2},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.5, "presence_penalty": -0.5, "top_p": 0.9, "top_k": 9},
]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_frequencies_follow_the_exact_distribution(fields, vary):
    draws = 4000
    logits = (np.random.default_rng(1).normal(size=VOCAB) * 1.5).astype(np.float32)
    bias = {0: 1.0, 11: -0.5}
    state = new_state([PROMPT], {0: bias})
    # All but the newest generated token are counted, the newest is the step's input.
    counts = np.bincount(GENERATED[:-1], minlength=VOCAB)
    state = state.replace(output_counts=state.output_counts.at[0].set(counts))
    seeds, steps = np.full(draws, 5), np.arange(draws)
    if vary == "seed":
        seeds, steps = np.random.default_rng(2).integers(-(2**63), 2**63, draws), np.zeros(draws)
    sampled = draw(
        np.tile(logits, (draws, 1)),
        [RequestSampling(seed=int(seed), **fields) for seed in seeds],
        state,
        token=GENERATED[-1],
        positions=len(PROMPT) + len(GENERATED) - 1 + steps,
        rows=draws,
    )

    dense_bias = np.zeros(VOCAB)
    dense_bias[list(bias)] = list(bias.values())
    request = RequestSampling(**fields)
    adjusted = expected_adjusted(logits, request, PROMPT, GENERATED, dense_bias)
    assert_distributed(sampled.tokens, expected_distribution(adjusted, request))


request_settings = st.builds(
    RequestSampling,
    temperature=st.just(0.0) | st.floats(0.05, 2),
    top_k=st.just(0) | st.integers(1, VOCAB + 5),
    top_p=st.just(1.0) | st.floats(1e-6, 0.999),
    min_p=st.just(0.0) | st.floats(1e-6, 1),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(0.2, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
    top_logprobs=st.integers(-1, 20),
)


@settings(max_examples=100)
@given(requests=st.lists(request_settings, min_size=2, max_size=4), data_seed=st.integers(0, 2**32))
def test_any_mix_of_settings_agrees_with_numpy(requests, data_seed):
    rng = np.random.default_rng(data_seed)
    rows, num_tokens = 4, RING
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in requests]
    biases = {slot: {int(rng.integers(VOCAB)): float(rng.uniform(-5, 5))} for slot in range(len(requests))}
    # Among nearly equal logits most draws would land outside a filter, so that a wrong one shows.
    logits = (rng.normal(size=(rows, num_tokens, VOCAB)) * rng.choice([0.2, 3])).astype(np.float32)
    slots = np.full(rows, PADDED_SLOT, np.int32)
    slots[: len(requests)] = rng.permutation(len(requests))
    tokens = rng.integers(0, VOCAB, (rows, num_tokens)).astype(np.int32)
    # The first input token is the last of the prompt.
    positions = np.tile(np.arange(5, 5 + num_tokens, dtype=np.int32), (rows, 1))
    valid = np.arange(rows)[:, None] < np.full(num_tokens, len(requests))
    params = sampling_params(requests, rows)
    _, sampled, adjusted = step(new_state(prompts, biases), logits, params, slots, tokens, positions, valid)

    for row, request in enumerate(requests):
        gumbel = np.asarray(noise(np.tile(params.seed[row], (num_tokens, 1)), positions[row] + 1))
        bias = np.zeros(VOCAB)
        for token, value in biases[slots[row]].items():
            bias[token] = value
        for j in range(num_tokens):
            generated = tokens[row, 1 : j + 1]
            expected = expected_adjusted(logits[row, j], request, prompts[slots[row]], generated, bias)
            np.testing.assert_allclose(adjusted[row, j], expected, rtol=1e-5, atol=1e-5)
            # From here on with the module's own float32 values: rounding must not reorder near ties.
            with np.errstate(divide="ignore"):
                score = np.log(expected_distribution(np.float64(adjusted[row, j]), request)) + gumbel[j]
            assert sampled.tokens[row, j] == np.argmax(score)
    assert not np.any(sampled.tokens[len(requests) :])


def test_ties_keep_the_smaller_ids_and_exactly_k():
    equal = np.zeros((ROWS, VOCAB))
    requests = [RequestSampling(seed=seed, top_k=3) for seed in range(ROWS)]
    assert set(draw(equal, requests).tokens) == {0, 1, 2}
    requests = [RequestSampling(seed=seed, top_p=0.25) for seed in range(ROWS)]
    assert set(draw(equal, requests).tokens) == set(range(10))
    signed_zeros = np.full((ROWS, VOCAB), -1.0)
    signed_zeros[:, [4, 6]] = -0.0, 0.0
    requests = [RequestSampling(seed=seed, top_k=1) for seed in range(ROWS)]
    assert set(draw(signed_zeros, requests).tokens) == {4}
    assert draw(equal[:1], [RequestSampling(temperature=0.0)]).tokens == 0


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-30, 1e-3])
def test_top_p_keeps_at_least_one_token(top_p):
    logits = np.random.default_rng(3).normal(size=(50, VOCAB))
    sampled = draw(logits, [RequestSampling(seed=seed, top_p=top_p) for seed in range(50)])
    np.testing.assert_array_equal(sampled.tokens, logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-30, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=["plain", "filters"])
def test_zero_and_tiny_temperature_are_greedy(temperature, filters):
    logits = np.random.default_rng(4).normal(size=(20, VOCAB)) * 30
    logits[:, 7] = -np.inf
    requests = [RequestSampling(temperature=temperature, seed=seed, **filters) for seed in range(20)]
    sampled = draw(logits, requests)
    np.testing.assert_array_equal(sampled.tokens, logits.argmax(1))
    assert np.isfinite(sampled.logprobs).all()


EFFECTS = [
    ("temperature", 0.3, 1.0),
    ("top_k", 2, 0),
    ("top_k", 2, VOCAB),
    ("top_p", 0.3, 1.0),
    ("min_p", 0.5, 0.0),
    ("presence_penalty", 2.0, 0.0),
    ("frequency_penalty", 2.0, 0.0),
    ("repetition_penalty", 5.0, 1.0),
    ("seed", 6, 5),
    ("top_logprobs", 3, -1),
]


@pytest.mark.parametrize(("field", "value", "no_op"), EFFECTS)
def test_each_field_has_an_effect_and_its_no_op_value_none(field, value, no_op):
    rows = 64
    logits = np.random.default_rng(5).normal(size=(rows, VOCAB))
    state = new_state([list(range(10))])
    state = state.replace(output_counts=state.output_counts.at[0, 5:20].set(3))

    def run(**fields):
        request = RequestSampling(**{"seed": 5, **fields})
        sampled = draw(logits, [request] * rows, state, positions=20 + np.arange(rows))
        return jax.tree.leaves(sampled)

    def same(a, b):
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    assert same(run(**{field: no_op}), run())
    assert not same(run(**{field: value}), run())


def test_what_is_computed_whether_needed_or_not_is_the_same(monkeypatch):
    """GPUs compute filters, noise and top log-probabilities of every batch, CPUs where a request wants them."""
    rng = np.random.default_rng(0)
    requests = [
        RequestSampling(temperature=0.0),
        RequestSampling(temperature=0.8, top_k=7, seed=1, top_logprobs=5),
        RequestSampling(top_p=0.7, min_p=0.05, seed=2),
    ]
    # Few values: ties.
    logits = rng.integers(-4, 5, (3, 2, VOCAB)).astype(np.float32)
    state = sampling.init_sampling_state(SLOTS, VOCAB, RING)
    positions = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    slots, tokens, valid = np.arange(3, dtype=np.int32), np.zeros((3, 2), np.int32), np.ones((3, 2), bool)

    def run(some):
        params = sampling_params([requests[i] for i in some], 3)
        return jax.jit(lambda *a: sampling.sample(*a))(logits, state, params, slots, tokens, positions, valid)

    batches = ([0, 1, 2], [0, 0, 0], [2, 2, 0])
    by_branch = [run(some) for some in batches]
    monkeypatch.setattr(branching.lax, "platform_dependent", lambda *args, default, cuda: cuda(*args))
    for some, want in zip(batches, by_branch, strict=True):
        for got, expected in zip(jax.tree.leaves(run(some)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_defaults_leave_the_logits_as_they_are():
    logits = (np.random.default_rng(6).normal(size=(4, RING, VOCAB)) * 10).astype(np.float32)
    logits[0, 0, 3] = -np.inf
    state = new_state([[1, 2, 3]] * 4)
    state = state.replace(output_counts=state.output_counts + 7)
    tokens = np.full((4, RING), 5, np.int32)
    positions = np.tile(np.arange(3, 3 + RING, dtype=np.int32), (4, 1))
    params = sampling_params([RequestSampling()] * 4, 4)
    _, _, adjusted = step(
        state, logits, params, np.arange(4, dtype=np.int32), tokens, positions, np.ones((4, RING), bool)
    )
    np.testing.assert_array_equal(adjusted, logits)


def test_overflowing_repetition_penalty_stays_defined():
    logits = np.zeros((1, VOCAB))
    logits[0, :4] = 50, 60, 70, -70
    request = RequestSampling(repetition_penalty=2e-38, seed=1, top_p=0.9)
    assert draw(logits, [request], new_state([[1, 3]])).tokens == 1


# Independence of the batch.


def test_seeded_request_ignores_batch_slot_padding_and_step_split():
    length, prompt = 3 * RING, [4, 8, 4]
    request = RequestSampling(temperature=0.8, top_p=0.9, top_k=30, frequency_penalty=1.0, seed=42, top_logprobs=2)
    logits = (np.random.default_rng(7).normal(size=(length, VOCAB)) * 2).astype(np.float32)
    inputs = np.random.default_rng(8).integers(0, VOCAB, length).astype(np.int32)

    alone = []
    state = new_state([prompt])
    for i in range(length):
        state, sampled, _ = step(
            state,
            logits[None, i : i + 1],
            sampling_params([request], 1),
            np.array([0], np.int32),
            inputs[None, i : i + 1],
            np.array([[3 + i]], np.int32),
            np.ones((1, 1), bool),
        )
        alone.append(jax.tree.map(lambda leaf: np.asarray(leaf)[0, 0], sampled))

    # Row 2 of 4, slot 3, RING tokens a step, beside an unseeded, a greedy and a padded row.
    others = [RequestSampling(top_k=1), RequestSampling(temperature=0.0, repetition_penalty=2.0)]
    state = new_state([[1], [2], [3], prompt])
    rng = np.random.default_rng(9)
    for i in range(0, length, RING):
        batch_logits = rng.normal(size=(4, RING, VOCAB)).astype(np.float32)
        batch_logits[2] = logits[i : i + RING]
        tokens = rng.integers(0, VOCAB, (4, RING)).astype(np.int32)
        tokens[2] = inputs[i : i + RING]
        state, sampled, _ = step(
            state,
            batch_logits,
            sampling_params([*others, request], 4),
            np.array([0, 1, 3, PADDED_SLOT], np.int32),
            tokens,
            np.tile(np.arange(3 + i, 3 + i + RING, dtype=np.int32), (4, 1)),
            np.arange(4)[:, None] < np.full(RING, 3),
        )
        for j in range(RING):
            row = jax.tree.map(lambda leaf: np.asarray(leaf)[2, j], sampled)  # noqa: B023
            assert row.tokens == alone[i + j].tokens
            np.testing.assert_array_equal(row.top_tokens, alone[i + j].top_tokens)
            np.testing.assert_allclose(row.logprobs, alone[i + j].logprobs, rtol=1e-6)
            np.testing.assert_allclose(row.top_logprobs, alone[i + j].top_logprobs, rtol=1e-6)


def test_unseeded_requests_differ():
    first, second = (draw(np.zeros((40, VOCAB)), [RequestSampling()] * 40).tokens for _ in range(2))
    assert len(set(first)) > 5
    assert not np.array_equal(first, second)


def test_seed_is_the_threefry_key():
    seeds = [0, 7, 2**31, -1, 2**40 + 7, -(2**63), 2**63 - 1]
    rows = sampling_params([RequestSampling(seed=seed) for seed in seeds], len(seeds)).seed
    assert rows.dtype == np.uint32
    assert [int(np.int64(np.uint64(high) << np.uint64(32) | np.uint64(low))) for high, low in rows] == seeds
    np.testing.assert_array_equal(rows[1], jax.random.key_data(jax.random.key(7, impl="threefry2x32")))


def test_padded_rows_write_nothing_and_return_zeros():
    state = new_state([[1, 2], [3], [4], [5], [6]])
    state = state.replace(recent_tokens=state.recent_tokens + 9)
    after, sampled, _ = step(
        state,
        np.full((4, RING, VOCAB), np.nan, np.float32),
        sampling_params([], 4),
        np.array([PADDED_SLOT, PADDED_SLOT, PADDED_SLOT + 1, 2**31 - 1], np.int32),
        np.full((4, RING), 7, np.int32),
        np.full((4, RING), 11, np.int32),
        np.zeros((4, RING), bool),
    )
    jax.tree.map(np.testing.assert_array_equal, after, state)
    for leaf in jax.tree.leaves(sampled):
        assert not np.any(leaf)
    dropped = begin_request(
        state,
        PADDED_SLOT,
        prompt_mask=np.ones(VOCAB, bool),
        output_counts=np.ones(VOCAB, np.int32),
        logit_bias=np.ones(VOCAB, np.float32),
        length=3,
    )
    jax.tree.map(np.testing.assert_array_equal, dropped, state)


def test_invalid_token_of_a_real_request_is_ignored():
    request = RequestSampling(frequency_penalty=1.0, temperature=0.0, top_logprobs=5)
    state, sampled, adjusted = step(
        new_state([[0]]),
        np.zeros((4, RING, VOCAB), np.float32),
        sampling_params([request], 4),
        np.array([0, *[PADDED_SLOT] * 3], np.int32),
        np.tile(np.array([1, 2, 3, 4], np.int32), (4, 1)),
        np.tile(np.array([1, 2, 3, 4], np.int32), (4, 1)),
        np.array([[True, True, False, False], *[[False] * 4] * 3]),
    )
    np.testing.assert_array_equal(np.flatnonzero(adjusted[0, 3]), [1, 2])
    np.testing.assert_array_equal(state.recent_tokens[0], [0, 1, 2, 0])
    for leaf in jax.tree.leaves(sampled):
        assert not np.any(leaf[0, 2:])
    assert np.all(sampled.logprobs[0, :2] < 0)


def test_recorded_tokens_of_a_long_chunk_are_the_newest():
    positions = np.arange(9, dtype=np.int32)[None, ::-1]
    state = record_tokens(new_state(), np.zeros(1, np.int32), positions + 20, positions, np.ones((1, 9), bool))
    np.testing.assert_array_equal(state.recent_tokens[0], [28, 25, 26, 27])
    assert not np.any(state.recent_tokens[1:])


# Counting under speculation.

accepted_of_submitted = st.integers(1, RING).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
request_run = st.fixed_dictionaries(
    {"prompt_length": st.integers(1, 7), "steps": st.lists(accepted_of_submitted, min_size=1, max_size=8)}
)
PENALISED = RequestSampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5, temperature=0.0)


def run_requests(runs, truths, prompts, logits, rng):
    """The state after the given steps, and of every request the adjusted logits by accepted position."""
    slots = [3, 1]
    state = new_state([[11, 12]] * SLOTS)  # an earlier request was here
    state = state.replace(
        output_counts=state.output_counts + 2,
        counted=state.counted + 30,
        recent_tokens=state.recent_tokens + 5,
    )
    for slot, prompt in zip(slots, prompts, strict=True):
        state = begun(state, slot, prompt)
        chunk = np.array(prompt, np.int32)[None]
        state = record_tokens(
            state,
            np.array([slot], np.int32),
            chunk,
            np.arange(len(prompt), dtype=np.int32)[None],
            np.ones_like(chunk, bool),
        )
    generated = [0, 0]
    accepted_logits = [{}, {}]
    for i in range(max(len(run["steps"]) for run in runs)):
        row_slots = np.full(4, PADDED_SLOT, np.int32)
        tokens = rng.integers(0, VOCAB, (4, RING)).astype(np.int32)
        positions = np.tile(np.arange(RING, dtype=np.int32), (4, 1))
        valid = np.zeros((4, RING), bool)
        row_logits = np.zeros((4, RING, VOCAB), np.float32)
        active = [row for row in range(2) if i < len(runs[row]["steps"])]
        for row in active:
            accepted, submitted = runs[row]["steps"][i]
            row_slots[row] = slots[row]
            positions[row] += len(prompts[row]) + generated[row]
            valid[row, :submitted] = True
            tokens[row, :accepted] = truths[row][generated[row] : generated[row] + accepted]
            row_logits[row] = logits[row, generated[row] : generated[row] + RING]
        state, _, adjusted = step(
            state, row_logits, sampling_params([PENALISED] * 2, 4), row_slots, tokens, positions, valid
        )
        for row in active:
            accepted, _ = runs[row]["steps"][i]
            for j in range(accepted):
                accepted_logits[row][generated[row] + j] = np.asarray(adjusted[row, j])
            generated[row] += accepted
    ends = np.array([len(prompts[row]) + generated[row] for row in range(2)], np.int32)
    return commit_tokens(state, np.array(slots, np.int32), ends), accepted_logits, generated


@settings(max_examples=50)
@given(runs=st.tuples(request_run, request_run), data_seed=st.integers(0, 2**32))
def test_rejected_drafts_leave_no_trace(runs, data_seed):
    rng = np.random.default_rng(data_seed)
    truths = rng.integers(0, 8, (2, 64)).astype(np.int32)
    prompts = [rng.integers(0, VOCAB, run["prompt_length"]).tolist() for run in runs]
    logits = rng.normal(size=(2, 64, VOCAB)).astype(np.float32)
    state, speculated, generated = run_requests(runs, truths, prompts, logits, rng)
    single = [{"steps": [(1, 1)] * count} for count in generated]
    reference_state, one_by_one, _ = run_requests(single, truths, prompts, logits, rng)

    np.testing.assert_array_equal(state.output_counts, reference_state.output_counts)
    np.testing.assert_array_equal(state.counted, reference_state.counted)
    for row, slot in enumerate((3, 1)):
        counts = np.bincount(truths[row, : generated[row]], minlength=VOCAB)
        np.testing.assert_array_equal(state.output_counts[slot], counts)
        assert speculated[row].keys() == one_by_one[row].keys()
        for position, adjusted in speculated[row].items():
            np.testing.assert_array_equal(adjusted, one_by_one[row][position])
            expected = expected_adjusted(logits[row, position], PENALISED, prompts[row], truths[row, : position + 1], 0)
            np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)


def test_a_preempted_request_keeps_its_penalties_and_noise():
    """A slot that begins with generated tokens samples what one that generated them step by step samples."""
    prompt, outputs = [4, 8, 4], [5, 8, 5, 2, 5, 30]
    logits = np.tile((np.random.default_rng(13).normal(size=VOCAB) * 2).astype(np.float32), (1, 1, 1))
    request = dataclasses.replace(PENALISED, temperature=1.0, seed=9)

    def after(state, i, token):
        """One step whose input is output i."""
        column = np.array([[len(prompt) + i]], np.int32)
        params, slots = sampling_params([request], 1), np.array([0], np.int32)
        return step(state, logits, params, slots, np.array([[token]], np.int32), column, np.ones((1, 1), bool))

    state = new_state([prompt])
    for i, token in enumerate(outputs):
        state, sampled, adjusted = after(state, i, token)
    # The last step of the second prefill: its input, the newest output, is in the counts already.
    again = begun(new_state([[1]]), 0, prompt, outputs)
    newest = len(prompt) + len(outputs) - 1
    batch = (
        logits, again, sampling_params([request], 1), np.array([0], np.int32), np.array([[30]], np.int32),
        np.array([[newest]], np.int32), np.ones((1, 1), bool),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(sampling.adjusted_logits)(*batch), adjusted)
    jax.tree.map(np.testing.assert_array_equal, sample(*batch), sampled)
    for i, token in enumerate([7, 5, 7], len(outputs)):
        state, sampled, adjusted = after(state, i, token)
        again, sampled_again, adjusted_again = after(again, i, token)
        np.testing.assert_array_equal(adjusted_again, adjusted)
        jax.tree.map(np.testing.assert_array_equal, sampled_again, sampled)
    np.testing.assert_array_equal(again.output_counts[0], state.output_counts[0])


# Allowed tokens.


@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution_of_the_allowed_tokens(fields):
    draws = 4000
    rng = np.random.default_rng(14)
    logits = (rng.normal(size=VOCAB) * 1.5).astype(np.float32)
    allowed = rng.random(VOCAB) < 0.4
    allowed[[VOCAB - 1, int(logits.argmax())]] = True, False
    state = new_state([PROMPT])
    state = state.replace(allowed=state.allowed.at[0].set(bit_masks(allowed)))
    requests = [RequestSampling(seed=seed, **fields) for seed in range(draws)]
    sampled = draw(np.tile(logits, (draws, 1)), requests, state, token=9, positions=len(PROMPT), rows=draws)
    adjusted = expected_adjusted(logits, RequestSampling(**fields), PROMPT, [9], 0)
    expected = expected_distribution(np.where(allowed, adjusted, -np.inf), RequestSampling(**fields))
    assert_distributed(sampled.tokens, expected)
    raw = special.log_softmax(logits.astype(np.float64))
    np.testing.assert_allclose(sampled.logprobs, raw[sampled.tokens], rtol=1e-5)


@settings(max_examples=30)
@given(data_seed=st.integers(0, 2**32), greedy=st.booleans())
def test_a_mask_is_a_bias_of_minus_infinity_and_moves_no_other_row(data_seed, greedy):
    rng = np.random.default_rng(data_seed)
    logits = rng.normal(size=(4, RING, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (4, RING)).astype(np.int32)
    positions = np.tile(np.arange(3, 3 + RING, dtype=np.int32), (4, 1))
    request = RequestSampling(temperature=0.0 if greedy else 0.9, seed=3, top_p=0.9, top_logprobs=4)
    allowed = rng.random((2, VOCAB)) < rng.random((2, 1))
    allowed[:, rng.integers(VOCAB)] = True

    def run(state):
        batch = (sampling_params([request] * 4, 4), np.arange(4, dtype=np.int32), tokens, positions)
        return step(state, logits, *batch, np.ones((4, RING), bool))[1]

    free = new_state([[1, 2, 3]] * 4)
    masked = free.replace(allowed=free.allowed.at[np.array([0, 2])].set(bit_masks(allowed)[:, None]))
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)
    biased = free.replace(logit_bias=free.logit_bias.at[np.array([0, 2])].set(bias))
    jax.tree.map(np.testing.assert_array_equal, run(masked), run(biased))
    rows = np.array([1, 3])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[rows], b[rows]), run(masked), run(free))
    assert np.all(np.take_along_axis(allowed[:, None], np.asarray(run(masked).tokens)[[0, 2], :, None], 2))


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5}], ids=["greedy", "plain", "filters"]
)
def test_a_row_without_an_allowed_token_is_marked_and_others_untouched(fields):
    logits = np.random.default_rng(15).normal(size=(3, 1, VOCAB)).astype(np.float32)
    logits[1, 0, 5] = -np.inf
    state = new_state([[1]] * 3)
    masks = bit_masks(np.stack([np.zeros(VOCAB, bool), np.arange(VOCAB) == 5]))  # nothing, only what cannot be
    nothing = state.replace(allowed=state.allowed.at[:2].set(masks[:, None]))

    def run(state):
        params = sampling_params([RequestSampling(seed=1, top_logprobs=2, **fields)] * 3, 3)
        column = np.ones((3, 1), np.int32)
        return sample(logits, state, params, np.arange(3, dtype=np.int32), column, column, np.ones((3, 1), bool))

    marked, free = run(nothing), run(state)
    assert np.asarray(marked.tokens)[:2].tolist() == [[0], [0]]
    assert np.isnan(marked.logprobs[:2]).all()
    np.testing.assert_array_equal(marked.top_logprobs, free.top_logprobs)  # of the raw distribution
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2], b[2]), marked, free)


# Tokens that stay on the device.


def test_the_token_after_the_last_valid_one_is_kept():
    state = new_state([[1]] * SLOTS).replace(next_tokens=np.full(SLOTS, 33, np.int32))
    sampled = np.arange(4 * RING, dtype=np.int32).reshape(4, RING)
    valid = np.arange(RING) < np.array([[RING], [2], [0], [3]])
    slots = np.array([2, 0, 1, PADDED_SLOT], np.int32)
    kept = jax.jit(sampling.keep_next_tokens)(state, slots, sampled, valid).next_tokens
    assert kept.tolist() == [RING + 1, 33, RING - 1, 33, 33]


# Log-probabilities.


def test_prompt_logprobs():
    rng = np.random.default_rng(16)
    logits = (rng.normal(size=(6, VOCAB)) * 4).astype(np.float32)
    logits[3, 7] = np.nan
    order = np.argsort(-logits, axis=1, kind="stable")
    targets = np.array([5, -1, order[2, 4], 8, order[4, 0], order[5, 19]], np.int32)
    logprobs, ids, top = jax.jit(sampling.prompt_logprobs)(logits, targets)
    expected = special.log_softmax(logits.astype(np.float64), axis=1)
    for row in (0, 2, 4, 5):
        np.testing.assert_allclose(logprobs[row], expected[row, targets[row]], rtol=1e-5)
        np.testing.assert_array_equal(ids[row], order[row, :20])
        np.testing.assert_allclose(top[row], expected[row, order[row, :20]], rtol=1e-5, atol=1e-6)
    assert [logprobs[2], logprobs[4], logprobs[5]] == [top[2, 4], top[4, 0], top[5, 19]]
    assert not logprobs[1] and not ids[1].any() and not top[1].any()
    assert np.isnan(logprobs[3]) and np.isnan(top[3]).all()


@pytest.mark.parametrize("top_logprobs", [-1, 0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(top_logprobs):
    rng = np.random.default_rng(10)
    logits = (rng.normal(size=(6, VOCAB)) * 5).astype(np.float32)
    logits[:, 13] = logits[:, 31] = logits.max(1) - 1e-3  # a tie among the best
    request = RequestSampling(temperature=0.7, top_k=3, presence_penalty=2.0, top_logprobs=top_logprobs)
    state = new_state([[13]], {0: {13: 50.0}})
    sampled = draw(logits, [request] * 6, state)

    expected = special.log_softmax(logits.astype(np.float64), axis=1)
    np.testing.assert_array_equal(sampled.tokens, 13)
    np.testing.assert_allclose(sampled.logprobs, expected[:, 13], rtol=1e-5)
    count = max(top_logprobs, 0)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(sampled.top_tokens[:, :count], order)
    np.testing.assert_allclose(
        sampled.top_logprobs[:, :count], np.take_along_axis(expected, order, 1), rtol=1e-5, atol=1e-6
    )
    assert not np.any(sampled.top_tokens[:, count:])
    assert not np.any(sampled.top_logprobs[:, count:])
    if count >= 5:  # the chosen token's value is its value in the list, to the bit
        np.testing.assert_array_equal(sampled.top_logprobs[:, 1], sampled.logprobs)


def test_top_logprobs_beyond_a_small_vocabulary():
    sampled = draw(np.zeros((1, 12)), [RequestSampling(top_logprobs=20)], rows=1)
    np.testing.assert_array_equal(sampled.top_tokens[0], [*range(12), *[0] * 8])
    assert np.all(np.isfinite(sampled.top_logprobs[0, :12]))
    assert np.all(np.isneginf(sampled.top_logprobs[0, 12:]))


# Logits that are no distribution.


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5}], ids=["greedy", "plain", "filters"]
)
def test_undefined_rows_are_marked_and_others_untouched(fields):
    logits = np.random.default_rng(11).normal(size=(4, VOCAB))
    request = RequestSampling(seed=1, top_logprobs=2, **fields)
    clean = draw(logits, [request] * 4)
    logits[0, 5] = np.nan
    logits[1, 5] = np.inf
    logits[2] = -np.inf
    sampled = draw(logits, [request] * 4)
    assert not np.any(sampled.tokens[:3])
    assert np.isnan(sampled.logprobs[:3]).all()
    assert np.isnan(sampled.top_logprobs[:3, :2]).all()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[3], b[3]), sampled, clean)


def test_minus_infinity_excludes_a_token():
    logits = np.full((200, VOCAB), -np.inf)
    logits[:, [6, 30]] = 0.0
    for fields in ({}, {"top_k": 10}, {"top_p": 0.99}, {"top_k": 10, "top_p": 0.99}):
        sampled = draw(logits, [RequestSampling(seed=seed, **fields) for seed in range(200)])
        assert set(sampled.tokens) == {6, 30}


# Compilation and validation.


def test_no_setting_recompiles():
    traces = []

    @jax.jit
    def traced(*batch):
        traces.append(None)
        return sampling.sample(*batch)

    rng = np.random.default_rng(12)
    choices = {field: [value, no_op] for field, value, no_op in EFFECTS} | {"seed": [None, 3]}
    for _ in range(20):
        requests = [
            RequestSampling(**{field: values[rng.integers(2)] for field, values in choices.items()})
            for _ in range(rng.integers(0, 4))
        ]
        column = np.zeros((3, 1), np.int32)
        traced(
            rng.normal(size=(3, 1, VOCAB)).astype(np.float32),
            new_state(),
            sampling_params(requests, 3),
            np.arange(3, dtype=np.int32),
            column,
            column,
            np.arange(3)[:, None] < len(requests),
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field, values in {
            "temperature": [-0.1, 2.1, float("inf"), "1", None, True],
            "top_k": [-1, 2**31, 1.0, True, None],
            "top_p": [0.0, -0.5, 1.1, None],
            "min_p": [-0.1, 1.1],
            "presence_penalty": [-2.1, 2.1],
            "frequency_penalty": [-2.1, 2.1],
            "repetition_penalty": [0.0, -1.0, 1e-40, 1e39, float("inf")],
            "seed": [-(2**63) - 1, 2**63, 1.0, True, "1"],
            "top_logprobs": [-2, 21, 1.5, True],
        }.items()
        for value in values
    ]
    + [(field.name, float("nan")) for field in dataclasses.fields(RequestSampling)],
)
def test_bad_setting_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*got {re.escape(repr(value))}"):
        RequestSampling(**{field: value})


def test_limits_of_each_range_are_accepted():
    RequestSampling(0.0, 0, 1e-3, 0.0, -2.0, -2.0, 0.01, -(2**63), -1)
    RequestSampling(2, 2**31 - 1, 1, 1, 2, 2, 1e38, 2**63 - 1, 20)
    RequestSampling(np.float32(1), np.int32(3), seed=np.int64(5))


def test_more_requests_than_rows_are_refused():
    with pytest.raises(ValueError, match="at least the number of requests, 3, got 2"):
        sampling_params([RequestSampling()] * 3, 2)


@pytest.mark.parametrize(
    ("prompt", "bias", "message"),
    [
        ([1, 40], {}, r"prompt\[1\] must be an integer from 0 to 39, got 40"),
        (np.array([-1]), {}, r"prompt\[0\] .* got -1"),
        (np.array([1.5]), {}, "prompt must be a flat sequence of integers"),
        (np.array([[1]]), {}, "prompt must be a flat sequence of integers"),
        ([1], {40: 1.0}, "logit_bias key must be an integer from 0 to 39, got 40"),
        ([1], {-1: 1.0}, "logit_bias key .* got -1"),
        ([1], {2: 101.0}, r"logit_bias\[2\] must be .* got 101.0"),
        ([1], {2: float("nan")}, r"logit_bias\[2\] must be .* got nan"),
    ],
)
def test_bad_request_rows_are_refused(prompt, bias, message):
    with pytest.raises(ValueError, match=message):
        sampling.request_rows(prompt, (), bias, VOCAB)
    if not bias:
        with pytest.raises(ValueError, match=message.replace("prompt", "outputs")):
            sampling.request_rows([1], prompt, bias, VOCAB)


def test_request_rows():
    mask, counts, bias = sampling.request_rows([3, 5, 3], np.array([9, 3, 9]), {7: -100, 0: 2.5}, VOCAB)
    assert mask.dtype == bool and np.flatnonzero(mask).tolist() == [3, 5]
    assert counts.dtype == np.int32 and counts[[3, 9]].tolist() == [1, 2] and counts.sum() == 3
    assert bias.dtype == np.float32 and bias[[0, 7]].tolist() == [2.5, -100.0] and np.count_nonzero(bias) == 2
    assert not any(row.any() for row in sampling.request_rows([], [], {}, VOCAB))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_state_is_refused(sizes):
    with pytest.raises(ValueError, match="must be an integer from 1"):
        sampling.init_sampling_state(*sizes)
