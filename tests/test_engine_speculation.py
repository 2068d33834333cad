"""The engine on the model with drafts: each request gets what it gets without them, whatever stands of the drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import NOQUANT, drafting_model
from test_scheduler import Recorder, assert_empty, drain

from dsv4jax.cache import CacheConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.sampling_settings import RequestSampling

LENGTH, DRAFTS = 160, 4
# The least slack that the steps may have.
CACHE = CacheConfig(slots=3, pages=38, page_size=4, slack=DRAFTS + 1, drafts="shared")


@jax.jit
def with_drafts(cache, following, right):
    """The cache with the tokens that follow in each slot as drafts, of which the first `right` are right.

    Confidences predict an even chance for each.
    """
    drafts = cache.drafts
    at = drafts.positions[:, None] + 1 + jnp.arange(drafts.tokens.shape[1])
    tokens = jnp.take_along_axis(following, jnp.clip(at, 0, LENGTH - 1), 1)
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < right[:, None], tokens, (tokens + 1) % 100)
    return cache.replace(drafts=drafts.replace(tokens=tokens, confidences=jnp.zeros_like(drafts.confidences)))


class WithRightDrafts(JaxExecutor):
    """Replaces what the slots have as drafts by what requests are known to get, up to some random place in each."""

    known: tuple = ()

    def reset(self):
        super().reset()
        self.rng = np.random.default_rng(0)
        self.following = np.zeros((CACHE.slots, LENGTH), np.int32)

    def _start(self, starts):
        super()._start(starts)
        for start in starts:
            for tokens in self.known:
                if np.array_equal(tokens[: len(start.tokens)], start.tokens):
                    self.following[start.slot, : len(tokens)] = tokens

    def _speculate(self, ranks):
        if self.known:
            right = self.rng.integers(0, DRAFTS + 1, CACHE.slots).astype(np.int32)
            self._cache = with_drafts(self._cache, self.following, right)
        return super()._speculate(ranks)


@pytest.fixture(scope="module")
def compiled():
    model = drafting_model()
    buckets = make_buckets(
        CACHE,
        prefill_tokens=[32],
        prefill_requests=2,
        decode_requests=[CACHE.slots],
        contexts=[LENGTH],
        prompt_logprobs=False,
        drafts=DRAFTS,
    )
    programs = Programs(model.cfg, CACHE, buckets, NOQUANT, progress=False)
    cfg = SchedulerConfig(
        slots=CACHE.slots,
        pages=CACHE.pages,
        max_model_len=LENGTH,
        eos_id=1,
        replay=ReplayRule(model.cfg.sliding_window, model.cfg.num_hidden_layers, "exact"),
        page_size=CACHE.page_size,
        prefill_tokens=32,
        prefill_requests=2,
        drafts=DRAFTS,
    )
    executor = WithRightDrafts(model.params, programs, strict=True)
    executor.warm_up(progress=False)
    executor._cache = with_drafts(executor._cache, executor.following, np.zeros(CACHE.slots, np.int32))
    executor.compilations.count = 0
    yield executor, cfg
    executor.close()


def requests(drafts):
    """Chunked prompts, some with a common beginning; greedy ones and seeded ones, with penalties."""
    rng, made = np.random.default_rng(0), []
    base = rng.integers(2, 120, 50)
    for i in range(6):
        prompt = np.concatenate([base if i % 2 else base[:0], rng.integers(2, 120, 3 + 7 * i)]).astype(np.int32)
        sampling = RequestSampling(
            temperature=0.8 * (i == 4), seed=i, top_logprobs=2 * (i % 3) - 1, frequency_penalty=0.4 * (i == 3)
        )
        made.append(
            GenerationRequest(
                f"r{i}", prompt, max_tokens=30 - i, sampling=sampling, ignore_eos=True, drafts=drafts and drafts[i]
            )
        )
    return made


def run(executor, cfg, asked, together):
    executor.reset()
    engine = Engine(Scheduler(cfg), executor, Recorder())
    made = []
    for request in asked:
        made += engine.submit(request)
        if together:
            engine.step()
            engine.step()
        else:
            drain(engine)
    drain(engine)
    assert_empty(engine)
    return made, engine.stats()


@pytest.fixture(scope="module")
def alone(compiled):
    """Each request without drafts and on its own."""
    executor, cfg = compiled
    made, stats = run(executor, dataclasses.replace(cfg, prefix_cache=False), requests([0] * 6), together=False)
    assert stats.drafts.rounds == 0
    executor.known = [np.concatenate([s.request.prompt, s.generated]).astype(np.int32) for s in made]
    return made


def test_tokens_are_those_without_drafts_with_hits_chunks_and_preemptions(compiled, alone):
    executor, cfg = compiled
    made, stats = run(executor, cfg, requests([None, 4, None, 2, None, 0]), together=True)
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert all(
        0 < accepted < verified for accepted, verified in zip(stats.drafts.accepted, stats.drafts.verified, strict=True)
    )
    for sequence, expected in zip(made, alone, strict=True):
        assert sequence.generated == expected.generated
        np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
        assert len(sequence.top_logprobs) == len(expected.top_logprobs)
        for pairs, others in zip(sequence.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in pairs] == [token for token, _ in others]
    assert executor.compilations.count == 0


def test_deterministic_results_are_the_same_bits_whatever_runs_beside_and_stands_of_the_drafts(compiled, alone):
    executor, cfg = compiled
    cfg = dataclasses.replace(cfg, deterministic=True)
    asked = requests([None, 4, None, 2, None, 0])
    made, stats = run(executor, cfg, asked, together=True)
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and sum(stats.drafts.accepted) > 0
    expected, _ = run(executor, dataclasses.replace(cfg, prefix_cache=False), asked, together=False)
    for one, other, undrafted in zip(made, expected, alone, strict=True):
        assert one.generated == other.generated == undrafted.generated
        assert one.logprobs == other.logprobs and one.top_logprobs == other.top_logprobs


def test_where_drafts_do_not_pay_only_those_are_verified_that_requests_insist_on(compiled, alone):
    executor, cfg = compiled
    (bucket,) = executor._programs.buckets.verify
    most = CACHE.slots * (1 + DRAFTS)
    costs = executor.measure_costs()
    assert [*costs[bucket]] == [1, 2, 3, 4, 8, most] and min(costs[bucket].values()) > 0
    executor._programs.set_costs(bucket, {0: 0.0, 1: 1.0, most: 1.0 + 10 * most})
    for drafts in (None, 4):
        made, _ = run(executor, cfg, requests([drafts] * 6)[:3], together=True)
        assert [s.generated for s in made] == [s.generated for s in alone[:3]]
        assert {s.drafted > 0 for s in made} == {drafts is not None}
    executor._programs.set_costs(bucket, {0: 1.0})
