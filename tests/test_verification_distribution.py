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
from scipy import special, stats
from test_sampling import assert_distributed, bit_masks, expected_adjusted, expected_distribution, new_state

from dsv4jax import verification
from dsv4jax.sampling import sampling_params
from dsv4jax.sampling_settings import RequestSampling

VOCAB, DRAFTS, DRAWS = 4, 3, 8000
LENGTH = DRAFTS + 1
PROMPT, GENERATED = [3, 3], [1, 1, 2]
START = len(PROMPT) + len(GENERATED) - 1  # position of the newest generated token
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
WAYS = ["argmax", "shared noise", "rejection", "blockwise"]
DRAWN = ["rejection", "blockwise"]  # with draft logits
NO_PAUSES = np.full((DRAWS, 2), -1, np.int32)


def anything(prefix):
    return np.ones(VOCAB, bool)


def no_repetition(prefix):
    """A grammar: no token may follow itself, and 0 only once."""
    allowed = anything(prefix)
    allowed[list(prefix[-1:])] = False
    allowed[0] = 0 not in prefix
    return allowed


def every_draft(drafts):
    return np.full(DRAWS, DRAFTS)


class Experiment:
    """One request's settings, in `DRAWS` copies with different seeds."""

    def __init__(self, fields, grammar=anything, seed=1):
        self.request, self.grammar = RequestSampling(**fields), grammar
        params = jax.tree.map(lambda column: np.repeat(column, DRAWS, axis=0), sampling_params([self.request], 1))
        self.params = params.replace(seed=np.random.default_rng(seed).integers(0, 2**32, (DRAWS, 2), dtype=np.uint32))
        state = new_state([PROMPT], {0: BIAS}, VOCAB)
        counts = np.bincount(GENERATED[:-1], minlength=VOCAB)
        state = state.replace(
            output_counts=state.output_counts.at[0].set(counts), counted=state.counted.at[0].set(START)
        )
        # A slot for each, with a mask for each place.
        self.state = jax.tree.map(lambda a: jnp.broadcast_to(a[0], (DRAWS, *a.shape[1:])), state).replace(
            allowed=np.full((DRAWS, LENGTH, 1), 0xFFFFFFFF, np.uint32)
        )
        self.positions = np.tile(START + np.arange(LENGTH, dtype=np.int32), (DRAWS, 1))

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
                draw = draw_program(way == "shared noise")
                tokens.append(np.asarray(draw(logits[j], self.params, self.positions[:, j + 1], self.positions[:, 0])))
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
            draft_logits if way in DRAWN else None,
            self.state.replace(allowed=np.stack([self.allowed[j][codes[j]] for j in range(LENGTH)], axis=1)),
            self.params,
            np.arange(DRAWS, dtype=np.int32),
            tokens,
            self.positions,
            np.arange(LENGTH) <= counts[:, None],
            pause_tokens=NO_PAUSES,
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

    def verified_again_and_again(self, way, pause_tokens=NO_PAUSES):
        """Sequences of LENGTH tokens, of as many rounds as each request needs; no penalties, no grammar."""
        sequences = np.zeros((DRAWS, 2 * LENGTH), np.int32)
        done, newest = np.zeros(DRAWS, np.int32), np.full(DRAWS, GENERATED[-1], np.int32)
        columns = np.arange(LENGTH)
        while np.any(done < LENGTH):
            rounds = np.minimum(done, LENGTH)[:, None] + columns  # place of each row's token in the sequence
            tokens = [newest]
            for j in range(DRAFTS):
                logits = DRAFT[rounds[:, j] % DRAFTS, tokens[j]]
                starts = self.positions[:, 0] + done
                draw = draw_program(way == "shared noise")
                tokens.append(np.asarray(draw(logits, self.params, starts + j + 1, starts)))
            tokens = np.stack(tokens, 1)
            result = verify_program(way)(
                TARGET[rounds % LENGTH, tokens],
                tokens[:, 1:],
                np.full(DRAWS, DRAFTS, np.int32),
                DRAFT[rounds[:, :-1] % DRAFTS, tokens[:, :-1]] if way in DRAWN else None,
                self.state,
                self.params,
                np.arange(DRAWS, dtype=np.int32),
                tokens,
                self.positions[:, :1] + done[:, None] + columns,
                np.tile(done[:, None] < LENGTH, LENGTH),
                pause_tokens=pause_tokens,
            )
            emitted = np.asarray(result.emitted)
            row = np.nonzero(emitted)
            sequences[row[0], (done[:, None] + columns)[row]] = np.asarray(result.tokens)[row]
            done += emitted.sum(1, dtype=np.int32)
            newest = np.where(done < LENGTH, sequences[np.arange(DRAWS), np.maximum(done - 1, 0)], 0).astype(np.int32)
        return sequences[:, :LENGTH]

    def check(self, way, draft_counts=every_draft):
        """Raises AssertionError unless first tokens and sequences are distributed as they should be."""
        accepted, sequences = self.verified(way, draft_counts)
        assert_distributed(sequences[:, 0], self.next[0][0])
        assert_distributed(code(sequences), self.joint())
        return accepted

    def joint(self):
        """Probabilities of all sequences by their code."""
        joint = np.ones(1)
        for distributions in self.next:
            joint = (joint[:, None] * distributions).ravel()
        return joint


def code(sequences):
    """[n, length] tokens as numbers of base VOCAB."""
    return sequences @ VOCAB ** np.arange(sequences.shape[1])[::-1]


@functools.cache
def draw_program(shared_noise):
    return jax.jit(functools.partial(verification.draw_drafts, shared_noise=shared_noise))


def verify_program(way):
    return compiled_verify(way if way in DRAWN else "rejection")


@functools.cache
def compiled_verify(method):
    return jax.jit(functools.partial(verification.verify, method=method))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_sequences_have_the_distribution_of_the_model(fields, way):
    accepted = Experiment(fields).check(way)
    assert 0 < np.mean(accepted) < DRAFTS


def test_drafts_of_a_block_that_did_not_stand_do_not_decide_about_the_next():
    """They are drawn again, by the same seed for the same positions."""
    experiments = [Experiment({}, seed=seed) for seed in range(3)]
    sequences = np.concatenate([experiment.verified_again_and_again("blockwise") for experiment in experiments])
    assert_distributed(code(sequences), experiments[0].joint())


@pytest.mark.parametrize("way", WAYS[1:])
def test_what_a_pause_drops_does_not_decide_about_what_comes_instead(way):
    experiment = Experiment({})
    sequences = experiment.verified_again_and_again(way, np.tile(np.int32([0, 2]), (DRAWS, 1)))
    assert_distributed(code(sequences), experiment.joint())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"frequency_penalty": 0.9, "temperature": 0.7}], ids=str)
def test_sequences_obey_a_grammar_and_have_its_distribution(fields, way):
    assert np.any(Experiment(fields, no_repetition).check(way))


def by_earlier_drafts(drafts):
    """How many drafts to verify: whether draft j is among them depends on those before it."""
    return np.where(drafts[:, 0] == 1, 1, np.where(drafts[:, 1] == 2, 2, np.where(drafts[:, 0] == 2, 2, 3)))


def by_the_draft_itself(drafts):
    return np.where(drafts[:, 0] == 1, 0, DRAFTS)


@pytest.mark.parametrize("way", DRAWN)
def test_the_choice_of_counts_may_depend_on_earlier_drafts(way):
    accepted = Experiment({"temperature": 1.3}).check(way, by_earlier_drafts)
    assert set(accepted) == {0, 1, 2, 3}


def test_drafts_may_choose_their_own_count_without_draft_logits_only():
    for way in ("argmax", "shared noise"):
        Experiment({}).check(way, by_the_draft_itself)
    for way in DRAWN:
        with pytest.raises(AssertionError):
            Experiment({}).check(way, by_the_draft_itself)


@pytest.mark.parametrize("way", WAYS)
def test_no_drafts_and_one_draft(way):
    experiment = Experiment({"temperature": 1.3, "top_p": 0.95})
    assert not np.any(experiment.check(way, lambda drafts: np.zeros(DRAWS)))
    assert set(experiment.check(way, lambda drafts: np.arange(DRAWS) % 2)) == {0, 1}


def test_how_often_a_draft_is_accepted():
    """One by one as often as any coupling of p and q allows; with shared noise nearly so."""
    experiment = Experiment({"temperature": 0.8})
    accepted, _ = experiment.verified("rejection", every_draft)
    shared, _ = experiment.verified("shared noise", every_draft)
    draft = special.softmax(DRAFT[0, GENERATED[-1]].astype(np.float64) / 0.8)
    overlap = np.minimum(experiment.next[0][0], draft).sum()
    assert stats.binomtest(int(np.sum(accepted > 0)), DRAWS, overlap).pvalue > 1e-4
    assert overlap / (2 - overlap) < np.mean(shared > 0) < overlap


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.8}, {"frequency_penalty": 0.9}], ids=str)
def test_a_block_accepts_more_than_its_drafts_one_by_one_and_those_more_than_other_drafts(fields):
    experiment = Experiment(fields)
    argmax, shared, one_by_one, block = (experiment.verified(way, every_draft)[0].mean() for way in WAYS)
    assert block > one_by_one > shared > argmax


def test_drafts_of_the_target_itself_all_stand(monkeypatch):
    monkeypatch.setitem(globals(), "DRAFT", TARGET[:-1])
    monkeypatch.setitem(globals(), "BIAS", {0: 0.0})
    for way in WAYS[1:]:
        assert np.mean(Experiment({"temperature": 0.9}).check(way) == DRAFTS) > 0.999  # but for rounding


# A wrong verifier must not pass.


def penalties_without_accepted_tokens(right):
    def wrong(logits, state, params, slots, tokens, positions, valid):
        first = valid & (jnp.arange(LENGTH) == 0)
        return right(logits, state, params, slots, tokens, positions, first)

    return wrong


def without_masks(right):
    everything = jnp.full((DRAWS, LENGTH, 1), 0xFFFFFFFF, jnp.uint32)
    return lambda logits, state, *batch: right(logits, state.replace(allowed=everything), *batch)


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


def noise_of_drafts(right):
    starts = jnp.full(DRAWS, START, jnp.int32)
    return lambda params, *batch: right(verification._in_round(params, starts, verification._DRAFT), *batch)


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
    "masks": ("adjusted_logits", without_masks),
    "filters": ("filtered_logits", lambda right: lambda adjusted, *_: adjusted),
    "temperature of drafts": ("_tempered", temperature_of_drafts_is_1),
    "noise of drafts": ("gumbel_noise", noise_of_drafts),
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
            return verification.verify(*arguments, method=way if way in DRAWN else "rejection", **options)

    return jax.jit(program)


@pytest.mark.parametrize(
    ("mistake", "ways", "fields"),
    [
        ("accepts with p", DRAWN, {}),
        ("accepts always", DRAWN, {}),
        ("draws from p after a rejection", DRAWN, {}),
        ("takes drafts for argmax", DRAWN, {}),
        ("penalties", DRAWN, {"frequency_penalty": -1.0}),
        ("penalties", DRAWN, {"repetition_penalty": 5.0}),
        ("masks", DRAWN, {}),
        ("filters", DRAWN, {"temperature": 0.5}),
        ("filters", DRAWN, {"top_p": 0.7}),
        ("temperature of drafts", DRAWN, {"temperature": 0.5}),
        ("noise of drafts", DRAWN, {}),
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
    for way in DRAWN:
        Experiment({"top_p": 0.7, "frequency_penalty": 2.0}, no_repetition).check(way)
