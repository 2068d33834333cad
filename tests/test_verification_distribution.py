"""Whole sequences that come out of `verify`, against their distribution under the model, computed exactly.

The model is a table: its logits depend on the position and the token before. Thousands of requests that differ only in
their seed share one batch; what a request lacks after its emitted tokens is drawn from the exact distribution, so that
all sequences have one length.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import assert_distributed, bit_masks, expected_adjusted, expected_distribution, new_state

from dsv4jax import verification
from dsv4jax.sampling import sampling_params
from dsv4jax.sampling_settings import RequestSampling

VOCAB, DRAFTS, DRAWS = 4, 3, 8000
LENGTH = DRAFTS + 1
PROMPT, GENERATED = [3, 3], [1, 1, 2]
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"frequency_penalty": 0.9, "temperature": 0.7}], ids=str)
def test_sequences_obey_a_grammar_and_have_its_distribution(fields, way):
    assert np.any(Experiment(fields, no_repetition).check(way))


def by_earlier_drafts(drafts):
    """How many drafts to verify: whether draft j is among them depends on those before it."""
    return np.where(drafts[:, 0] == 1, 1, np.where(drafts[:, 1] == 2, 2, np.where(drafts[:, 0] == 2, 2, 3)))


def by_the_draft_itself(drafts):
    return np.where(drafts[:, 0] == 1, 0, DRAFTS)


@pytest.mark.parametrize("way", ["rejection", "blockwise"])
def test_the_choice_of_counts_may_depend_on_earlier_drafts(way):
    accepted = Experiment({"temperature": 1.3}).check(way, by_earlier_drafts)
    assert set(accepted) == {0, 1, 2, 3}


def test_only_drafts_not_drawn_at_random_may_choose_their_own_count():
    Experiment({}).check("argmax", by_the_draft_itself)
    for way in ("rejection", "blockwise"):
        with pytest.raises(AssertionError):
            Experiment({}).check(way, by_the_draft_itself)


@pytest.mark.parametrize("way", WAYS)
def test_no_drafts_and_one_draft(way):
    experiment = Experiment({"temperature": 1.3, "top_p": 0.95})
    assert not np.any(experiment.check(way, lambda drafts: np.zeros(DRAWS)))
    assert set(experiment.check(way, lambda drafts: np.arange(DRAWS) % 2)) == {0, 1}


# A wrong verifier must not pass.


def penalties_without_accepted_tokens(right):
    def wrong(logits, state, params, slots, tokens, positions, valid, allowed):
        first = valid & (jnp.arange(LENGTH) == 0)
        return right(logits, state, params, slots, tokens, positions, first, allowed)

    return wrong


def residual_is(values):
    """`_excess` wrong where it is what the token after a rejection is drawn from, right in sums over many rows."""

    def wrong_of(right):
        return lambda scores, *others: values(scores, *others) if scores.ndim == 2 else right(scores, *others)

    return wrong_of


def target(scores, total, *others):
    return jnp.exp(scores - total[..., None])


def target_without_best_draft(scores, total, draft_scores, *others):
    return jnp.where(draft_scores == 0, 0.0, target(scores, total))


def temperature_of_drafts_is_1(right):
    return lambda logits, params: right(logits, params.replace(temperature=jnp.ones(DRAWS)))


def every_draft_by_its_weight(right):
    def wrong(counts, weights, excess, uniform):
        return verification._prefix_length((jnp.arange(DRAFTS) < counts[:, None]) & (uniform < weights))

    return wrong


def weights_without_bound(right):
    return lambda ratio: jnp.pad(jnp.cumprod(ratio, axis=1), [(0, 0), (1, 0)], constant_values=1)


# The function with the mistake, and the wrong one given the right one.
MISTAKES = {
    "accepts with p": ("_ratio", lambda right: lambda log_target, log_draft: jnp.exp(log_target)),
    "accepts always": ("_ratio", lambda right: lambda log_target, log_draft: jnp.ones_like(log_target)),
    "draws from p after a rejection": ("_excess", residual_is(target)),
    "takes drafts for argmax": ("_excess", residual_is(target_without_best_draft)),
    "penalties": ("adjusted_logits", penalties_without_accepted_tokens),
    "masks": ("adjusted_logits", lambda right: lambda *batch: right(*batch[:-1])),
    "filters": ("filtered_logits", lambda right: lambda adjusted, random, params: adjusted),
    "temperature of drafts": ("_tempered", temperature_of_drafts_is_1),
    "noise of drafts": ("gumbel_noise", lambda right: lambda *batch: right(*batch, verification._DRAFT)),
    "residual without weight": ("_excess", lambda right: lambda *rows: right(*rows[:-1], jnp.ones_like(rows[-1]))),
    "every draft by its weight": ("_block_length", every_draft_by_its_weight),
    "weights without bound": ("_block_weights", weights_without_bound),
}


@functools.cache
def mistaken_program(way):
    """`verify` with all mistakes built in, so that it is compiled once; the first argument says which one is made."""

    def with_switches(name, mistake):
        right = getattr(verification, name)

        def switched(*arguments):
            value = right(*arguments)
            for number, (function, wrong_of) in enumerate(MISTAKES.values()):
                if function == name:
                    value = jnp.where(mistake == number, wrong_of(right)(*arguments), value)
            return value

        return switched

    def program(mistake, *arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            for name in dict(MISTAKES.values()):
                patch.setattr(verification, name, with_switches(name, mistake))
            method = "blockwise" if way == "blockwise" else "rejection"
            return verification.verify(*arguments, method=method, **options)

    return jax.jit(program)


@pytest.mark.parametrize(
    ("mistake", "ways", "fields"),
    [
        ("accepts with p", ["rejection", "blockwise"], {}),
        ("accepts always", ["rejection", "blockwise"], {}),
        ("draws from p after a rejection", ["rejection", "blockwise"], {}),
        ("takes drafts for argmax", ["rejection", "blockwise"], {}),
        ("penalties", WAYS, {"frequency_penalty": -1.0}),
        ("penalties", ["rejection", "blockwise"], {"repetition_penalty": 5.0}),
        ("masks", WAYS, {}),
        ("filters", ["rejection", "blockwise"], {"temperature": 0.5}),
        ("filters", ["rejection", "blockwise"], {"top_p": 0.7}),
        ("temperature of drafts", ["rejection", "blockwise"], {"temperature": 0.5}),
        ("noise of drafts", ["rejection", "blockwise"], {}),
        ("residual without weight", ["blockwise"], {}),
        ("every draft by its weight", ["blockwise"], {}),
        ("weights without bound", ["blockwise"], {}),
    ],
)
def test_a_mistake_is_noticed(mistake, ways, fields, monkeypatch):
    number = list(MISTAKES).index(mistake)
    monkeypatch.setitem(globals(), "verify_program", lambda way: functools.partial(mistaken_program(way), number))
    for way in ways:
        with pytest.raises(AssertionError):
            Experiment(fields, no_repetition if mistake == "masks" else anything).check(way)


def test_the_program_for_mistakes_is_right_without_one(monkeypatch):
    monkeypatch.setitem(globals(), "verify_program", lambda way: functools.partial(mistaken_program(way), -1))
    for way in WAYS:
        Experiment({"top_p": 0.7, "frequency_penalty": 2.0}, no_repetition).check(way)
