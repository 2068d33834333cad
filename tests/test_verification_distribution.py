"""Whole sequences that come out of `verify`, against their distribution under the model, computed exactly.

The model is a table: its logits depend on the position and the token before. Thousands of requests that differ only in
their seed share one batch; what a request lacks after its emitted tokens is drawn from the exact distribution, so that
all sequences have one length.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from test_sampling import assert_distributed, bit_masks, expected_adjusted, expected_distribution, new_state

from dsv4jax import verification
from dsv4jax.sampling import sampling_params
from dsv4jax.sampling_settings import RequestSampling

VOCAB, DRAFTS, DRAWS = 4, 3, 8000
LENGTH = DRAFTS + 1
PROMPT, GENERATED = [3, 0], [1, 1, 2]
BIAS = {0: 0.5, 3: -0.4}
rng = np.random.default_rng(0)
TARGET = (rng.normal(size=(LENGTH, VOCAB, VOCAB)) * 1.2).astype(np.float32)
DRAFT = (0.9 * TARGET[:-1] + 0.6 * rng.normal(size=(DRAFTS, VOCAB, VOCAB))).astype(np.float32)

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.5, "presence_penalty": -0.5, "top_p": 0.9},
]
WAYS = ["argmax", "rejection", "blockwise"]


def anything(prefix):
    return np.ones(VOCAB, bool)


def no_repetition(prefix):
    """A grammar: no token may follow itself, and 0 only once."""
    allowed = anything(prefix)
    allowed[list(prefix[-1:])] = False
    allowed[0] = 0 not in prefix
    return allowed


class Experiment:
    """One request's settings, in `DRAWS` copies with different seeds."""

    def __init__(self, fields, grammar=anything):
        self.request, self.grammar = RequestSampling(**fields), grammar
        params = jax.tree.map(lambda column: np.repeat(column, DRAWS, axis=0), sampling_params([self.request], 1))
        self.params = params.replace(seed=np.random.default_rng(1).integers(0, 2**32, (DRAWS, 2), dtype=np.uint32))
        state = new_state([PROMPT], {0: BIAS}, VOCAB)
        counts = np.bincount(GENERATED[:-1], minlength=VOCAB)
        counted = len(PROMPT) + len(GENERATED) - 1
        self.state = state.replace(
            output_counts=state.output_counts.at[0].set(counts), counted=state.counted.at[0].set(counted)
        )
        self.positions = np.tile(counted + np.arange(LENGTH, dtype=np.int32), (DRAWS, 1))

        prefixes = [list(itertools.product(range(VOCAB), repeat=j)) for j in range(LENGTH)]
        # Row c of item j belongs to the prefix of j tokens that are the digits of c.
        self.allowed = [bit_masks(np.array([grammar(prefix) for prefix in of_length])) for of_length in prefixes]
        self.next = [np.array([self.distribution(prefix) for prefix in of_length]) for of_length in prefixes]

    def distribution(self, prefix):
        """Probabilities of the token after GENERATED and `prefix`."""
        bias = np.zeros(VOCAB)
        bias[list(BIAS)] = list(BIAS.values())
        past = [*GENERATED, *prefix]
        adjusted = expected_adjusted(TARGET[len(prefix), past[-1]], self.request, PROMPT, past, bias)
        return expected_distribution(np.where(self.grammar(prefix), adjusted, -np.inf), self.request)

    def drafts(self, way):
        """Drafts and the logits they came from."""
        tokens = [np.full(DRAWS, GENERATED[-1])]
        logits = [DRAFT[0, tokens[0]]]
        for j in range(DRAFTS):
            if way == "argmax":
                tokens.append(logits[j].argmax(1))
            else:
                tokens.append(np.asarray(draw_program()(logits[j], self.params, self.positions[:, j + 1])))
            if j + 1 < DRAFTS:
                logits.append(DRAFT[j + 1, tokens[-1]])
        return np.stack(tokens[1:], 1).astype(np.int32), np.stack(logits, 1)

    def verified(self, way, draft_counts):
        """Accepted counts and sequences of LENGTH tokens; draft_counts is a function of the drafts."""
        drafts, draft_logits = self.drafts(way)
        tokens = np.concatenate([np.full((DRAWS, 1), GENERATED[-1], np.int32), drafts], 1)
        counts = draft_counts(drafts).astype(np.int32)
        codes = [code(drafts[:, :j]) for j in range(LENGTH)]
        result = verify_program(way)(
            TARGET[np.arange(LENGTH), tokens],
            drafts,
            counts,
            None if way == "argmax" else draft_logits,
            self.state,
            self.params,
            np.zeros(DRAWS, np.int32),
            tokens,
            self.positions,
            np.arange(LENGTH) <= counts[:, None],
            allowed=np.stack([self.allowed[j][codes[j]] for j in range(LENGTH)], axis=1),
        )
        accepted, sequences = np.array(result.accepted), np.array(result.tokens)
        emitted = np.arange(LENGTH) <= accepted[:, None]
        kept = emitted[:, 1:]
        assert np.all(accepted <= counts) and np.array_equal(sequences[:, :-1][kept], drafts[kept])
        assert np.isfinite(result.logprobs).all() and not sequences[~emitted].any()
        complete = np.random.default_rng(2)
        for j in range(1, LENGTH):
            mass = np.cumsum(self.next[j][code(sequences[:, :j])], axis=1)
            drawn = np.sum(mass <= complete.random((DRAWS, 1)) * mass[:, -1:], axis=1)
            sequences[:, j] = np.where(emitted[:, j], sequences[:, j], drawn)
        return accepted, sequences

    def check(self, way, draft_counts=None):
        """Raises AssertionError unless first tokens and sequences are distributed as they should be."""
        accepted, sequences = self.verified(way, draft_counts or (lambda drafts: np.full(DRAWS, DRAFTS)))
        joint = np.ones(1)
        for distributions in self.next:
            joint = (joint[:, None] * distributions).ravel()
        assert_distributed(sequences[:, 0], self.next[0][0])
        assert_distributed(code(sequences), joint)
        return accepted


def code(sequences):
    """[n, length] tokens as numbers of base VOCAB."""
    return sequences @ VOCAB ** np.arange(sequences.shape[1])[::-1]


@functools.cache
def draw_program():
    return jax.jit(verification.draw_drafts)


@functools.cache
def verify_program(way):
    method = "blockwise" if way == "blockwise" else "rejection"
    return jax.jit(functools.partial(verification.verify, method=method))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_sequences_have_the_distribution_of_the_model(fields, way):
    accepted = Experiment(fields).check(way)
    assert 0 < np.mean(accepted) < DRAFTS
