"""The engine on the model: what is generated depends on the request alone, whatever else happens around it."""

import dataclasses

import numpy as np
import pytest
from golden import NOQUANT, drafting_model, small_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler import Recorder, drain

from dsv4jax.cache import CacheConfig
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling_settings import RequestSampling

PAGE, SLOTS, PAGES, LENGTH, BUDGET = 8, 4, 80, 256, 64
GREEDY = RequestSampling(temperature=0.0, top_logprobs=0)
NEVER = 10**6  # no EOS


@pytest.fixture(scope="module", params=["reference", "float32"])
def executor(request):
    """One executor for all tests of a numeric mode: two compiled steps.

    Exact replay of the model of `float32` reaches back by an odd number of tokens, so not to the beginning of a tile.
    """
    model = small_model(quantized=True) if request.param == "reference" else drafting_model()
    cache_cfg = CacheConfig(slots=SLOTS, pages=PAGES, page_size=PAGE)
    buckets = make_buckets(
        cache_cfg, prefill_tokens=[BUDGET], prefill_requests=3, decode_requests=[SLOTS], contexts=[LENGTH],
        prompt_logprobs=False,
    )  # fmt: skip
    numerics = REFERENCE if request.param == "reference" else NOQUANT
    programs = Programs(model.cfg, cache_cfg, buckets, numerics, params=model.params, progress=False)
    executor = JaxExecutor(model.params, programs, strict=True)
    yield executor
    executor.close()


def make(executor, **changes):
    executor.reset()
    cfg = executor._programs.cfg
    replay = ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, "exact")
    settings = SchedulerConfig(
        slots=SLOTS, pages=PAGES, max_model_len=LENGTH, eos_id=NEVER, replay=replay, page_size=PAGE,
        prefill_tokens=BUDGET, prefill_requests=3, deterministic=True,
    )  # fmt: skip
    return Engine(Scheduler(dataclasses.replace(settings, **changes)), executor, Recorder())


def ask(prompt, max_tokens=12, name="r", sampling=GREEDY, **options):
    return GenerationRequest(name, np.asarray(prompt, np.int32), max_tokens, sampling=sampling, **options)


BASE = np.random.default_rng(3).integers(3, 500, 200).astype(np.int32)


def result(sequence):
    return sequence.generated, np.array(sequence.logprobs, np.float32).tobytes()


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    others=st.lists(
        st.tuples(st.integers(0, 190), st.integers(1, 40), st.integers(1, 12), st.integers(0, 6)), max_size=6
    ),
    budget=st.sampled_from([48, 64]),
    pages=st.sampled_from([40, PAGES]),
    cache=st.booleans(),
    seed=st.none() | st.integers(0, 3),
)
def test_tokens_and_log_probabilities_are_bit_identical_whatever_happens_around(
    executor, others, budget, pages, cache, seed
):
    """Batch, chunk sizes, cache state, order of arrival and preemption change nothing in deterministic mode."""
    sampling = GREEDY if seed is None else RequestSampling(temperature=0.8, seed=seed, top_logprobs=0)
    alone = make(executor)
    prompt = BASE[:180]
    expected = alone.submit(ask(prompt, sampling=sampling))[0]
    drain(alone)
    engine = make(executor, prefill_tokens=budget, pages=pages, prefix_cache=cache)
    made = []
    for i, (shared, own, tokens, steps) in enumerate(others):
        if i == len(others) // 2:
            made += engine.submit(ask(prompt, sampling=sampling))
        text = np.concatenate([BASE[:shared], np.random.default_rng(i).integers(3, 500, own)])
        engine.submit(ask(text, tokens, f"o{i}"))
        for _ in range(steps):
            engine.step()
    made += engine.submit(ask(prompt, sampling=sampling, name="last"))
    drain(engine)
    for sequence in made:
        assert result(sequence) == result(expected)


def test_a_prefix_hit_gives_the_cold_result_for_every_length_of_the_hit(executor):
    """Exact replay: window keys are rebuilt, cached entries are not written again."""
    prompt = BASE[:188]
    cold = make(executor)
    expected = cold.submit(ask(prompt))[0]
    drain(cold)
    reused = 0
    for hit in (0, PAGE, 88, 136, 184, 188):
        engine = make(executor)
        engine.submit(ask(np.concatenate([prompt[:hit], [7]]), 1, "before"))
        drain(engine)
        warm = engine.submit(ask(prompt))[0]
        drain(engine)
        assert result(warm) == result(expected)
        reused += warm.first_cached
    assert reused > 0, "no hit saved any work: the test shows nothing"


def test_preempted_requests_continue_with_the_same_tokens(executor):
    for deterministic in (True, False):
        few = make(executor, pages=34, deterministic=deterministic)
        prompts = [BASE[i : i + 50] for i in range(4)]
        made = [few.submit(ask(p, 40, f"r{i}"))[0] for i, p in enumerate(prompts)]
        drain(few)
        assert few.scheduler.preemptions > 0
        for prompt, sequence in zip(prompts, made, strict=True):
            alone = make(executor)
            expected = alone.submit(
                ask(
                    prompt,
                    40,
                )
            )[0]
            drain(alone)
            if deterministic:
                assert result(sequence) == result(expected)
            elif executor._programs.numerics is NOQUANT:
                assert sequence.generated == expected.generated


def test_penalties_survive_a_preemption(executor):
    sampling = RequestSampling(
        temperature=0.7, seed=5, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2
    )
    few = make(executor, pages=34)
    made = [few.submit(ask(BASE[i : i + 50], 40, f"r{i}", sampling))[0] for i in range(4)]
    drain(few)
    assert few.scheduler.preemptions > 0
    for i, sequence in enumerate(made):
        alone = make(executor)
        expected = alone.submit(ask(BASE[i : i + 50], 40, sampling=sampling))[0]
        drain(alone)
        assert sequence.generated == expected.generated


def test_choices_of_one_request_equal_single_requests_with_their_seeds(executor):
    sampling = RequestSampling(temperature=1.0, seed=11, top_logprobs=0)
    engine = make(executor)
    choices = engine.submit(ask(BASE[:70], 10, n=3, sampling=sampling))
    drain(engine)
    for i, choice in enumerate(choices):
        alone = make(executor)
        expected = alone.submit(ask(BASE[:70], 10, sampling=dataclasses.replace(sampling, seed=11 + i)))[0]
        drain(alone)
        assert result(choice) == result(expected)
    assert len({tuple(c.generated) for c in choices}) == 3
