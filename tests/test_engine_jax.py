"""The engine on the model itself: same schedule as without a device, same tokens as the request alone."""

import dataclasses
import pickle
import typing

import jax
import numpy as np
import pytest
from checkpoint_files import run_python
from device_engine import (
    CACHE,
    CHECKS,
    RANKS,
    SCHEDULER,
    HalfMask,
    assert_same,
    make_engine,
    make_executor,
    requests,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Recorder, assert_empty, drain

from dsv4jax import batch
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine import plan, replay
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config, shape_buckets
from dsv4jax.engine.jax_executor import CompileCounter
from dsv4jax.engine.programs import make_buckets
from dsv4jax.engine.recording import RecordingExecutor, schedule_difference
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling_settings import RequestSampling


@pytest.fixture(scope="module")
def executor():
    """On one device."""
    executor = make_executor()
    executor.warm_up(progress=False)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def over_eight_ranks(executor, tmp_path_factory):
    """What each of `device_engine.CHECKS` raised, or "", in a process with eight devices."""
    directory = tmp_path_factory.mktemp("ranks")
    reference, outcomes = directory / "reference", directory / "outcomes"
    reference.write_bytes(pickle.dumps(serve(make_engine(executor), requests())))
    run_python("import sys, device_engine; device_engine.main(*sys.argv[1:])", reference, outcomes, devices=RANKS)
    return pickle.loads(outcomes.read_bytes())


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_over_eight_ranks(over_eight_ranks, check):
    """The docstrings of the checks say what."""
    assert not over_eight_ranks[check], over_eight_ranks[check]


def busy_time(executor, cfg):
    """A short busy time, by step numbers: shared prefixes, an abort, a mask, preemptions."""
    engine = Engine(Scheduler(cfg), executor, Recorder())
    rng, made = np.random.default_rng(0), []
    base = rng.integers(2, 120, 80)
    for i in range(7):
        own = rng.integers(2, 120, 3 + 4 * i)
        prompt = np.concatenate([base if i % 2 else base[:0], own]).astype(np.int32)
        request = GenerationRequest(
            f"r{i}",
            prompt,
            max_tokens=30 - i,
            n=1 + (i == 1),
            sampling=RequestSampling(temperature=0.8, seed=i, top_logprobs=1),
            mask=HalfMask if i == 3 else None,
            ignore_eos=i != 4,
        )
        made += engine.submit(request)
        if i == 5:
            engine.finish(made[2], "abort")
        for _ in range(2):
            engine.step()
    drain(engine)
    assert_empty(engine)
    assert engine.stats().preemptions > 0 and engine.stats().prefix_hits > 0
    return made


def test_the_schedule_is_that_of_the_simulation_and_tokens_are_those_of_each_request_alone(executor):
    executor.reset()
    on_device = RecordingExecutor(executor)
    compilations = executor.compilations.count
    made = busy_time(on_device, SCHEDULER)
    assert executor.compilations.count == compilations, "something was compiled after the start"

    results = [e.result for e in on_device.events if e.result]
    sampled = iter([s for r in results for s in (*(rank.prefills for rank in r.ranks), r.decodes) if s])
    simulated = RecordingExecutor(SimulatedExecutor(LinearCost(), lambda rank, slots, positions: next(sampled).tokens))
    again = busy_time(simulated, SCHEDULER)
    assert schedule_difference(on_device.events, simulated.events) is None
    assert [s.generated for s in again] == [s.generated for s in made]

    executor.reset()
    engine = Engine(Scheduler(dataclasses.replace(SCHEDULER, prefix_cache=False)), executor, Recorder())
    for sequence in made:
        if sequence.finish_reason == "abort":
            continue
        request = dataclasses.replace(sequence.request, n=1, sampling=sequence.sampling)
        (alone,) = engine.submit(request)
        drain(engine)
        assert alone.generated == sequence.generated
        assert alone.logprobs == sequence.logprobs


@pytest.fixture(scope="module")
def undisturbed(executor):
    """Some requests, one of them under a mask, and what they get."""
    asked = requests()[1:4]
    return asked, serve(make_engine(executor), asked)


@pytest.mark.parametrize("kind", ["prefill", "decode", "start", "mask", "result"])
def test_requests_get_the_same_after_a_failure_that_took_the_cache_with_it(executor, undisturbed, kind, monkeypatch):
    """A program raises when the cache is donated to it already, or its result cannot be read."""
    programs, calls = executor._programs, 0
    asked, expected = undisturbed

    def fails():
        nonlocal calls
        calls += 1
        return calls == 3  # others are in flight by then

    def failing(program):
        def run(*arguments, **options):
            result = program(*arguments, **options)
            if fails():
                assert any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array))
                raise RuntimeError("the device gave up")
            return result

        return run

    kinds = {
        **dict.fromkeys(programs.buckets.prefill, "prefill"),
        **dict.fromkeys(programs.buckets.decode, "decode"),
        **dict.fromkeys(((n, 1) for n in programs.buckets.masks), "mask"),
        "start": "start",
    }
    engine, wait = make_engine(executor), executor.wait

    def failing_wait():
        if kind == "result" and fails():
            raise RuntimeError("the result is lost")
        return wait()

    compiled = {key: failing(p) if kinds.get(key) == kind else p for key, p in programs._compiled.items()}
    monkeypatch.setattr(programs, "_compiled", compiled)
    monkeypatch.setattr(executor, "wait", failing_wait)
    results = serve(engine, asked)
    assert calls > 3 and engine.stats().preemptions > 0
    assert_same(results, expected)


def test_warm_up_runs_every_program(executor, monkeypatch):
    ran = set()

    def noted(key, program):
        def run(*arguments):
            ran.add(key)
            return program(*arguments)

        return run

    programs = executor._programs
    monkeypatch.setattr(programs, "_compiled", {key: noted(key, p) for key, p in programs._compiled.items()})
    executor.reset()
    executor.warm_up(progress=False)
    assert ran == programs._compiled.keys()


def test_compilations_are_counted_until_the_counter_is_closed():
    def compile_something(number):
        jax.jit(lambda x: x + number)(np.zeros(3, np.float32))

    counter, other = CompileCounter(), CompileCounter()
    compile_something(1)
    assert counter.count == other.count > 0
    counter.close()
    before = counter.count
    compile_something(2)
    assert counter.count == before < other.count
    other.close()


def test_contexts_of_as_many_pages_share_their_programs():
    sizes = {"prefill_tokens": [32, 64], "prefill_requests": 2, "decode_requests": [2, 4]}
    buckets = make_buckets(CACHE, contexts=[17, 24, 20, 160], **sizes)
    assert buckets == make_buckets(CACHE, contexts=[24, 160], **sizes)
    assert {b.pages for b in (*buckets.prefill, *buckets.decode)} == {3, 20}
    for kind in (buckets.prefill, buckets.decode):
        assert len(set(kind)) == len(kind)


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_the_scheduler_may_plan_has_a_program_and_a_place(data):
    """Sizes of the scheduler are those of cache and programs, also where more drafts than prompt tokens run."""
    size, slots, drafts = (data.draw(st.sampled_from(sizes)) for sizes in ((4, 16, 64), (1, 3, 40), (0, 1, 5)))
    length = data.draw(st.integers(1, 500))
    cache = CacheConfig(
        slots, data.draw(st.integers(-(-length // size), 200)), size, drafts="shared" if drafts else None
    )
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(sorted)
    buckets = shape_buckets(
        cache,
        prefill_tokens=[16 * n for n in data.draw(sizes)],
        prefill_requests=1,
        decode_requests=sorted({*(n for n in data.draw(sizes) if n < slots), slots}),
        contexts=sorted({*(n for n in data.draw(sizes) if n < length), length}),
        replay=data.draw(st.sampled_from(["exact", "bounded"])),
        deterministic=(deterministic := data.draw(st.booleans())),
        drafts=drafts,
    )
    shape = EngineShape(cache, buckets, REFERENCE, length, deterministic=deterministic, drafts=drafts)
    cfg = scheduler_config(ModelConfig(), shape, eos_id=1)
    same = {"slots", "pages", "page_size"}
    assert {name: getattr(cfg, name) for name in same} == {name: getattr(cache, name) for name in same}
    pages = -(-cfg.max_model_len // cfg.page_size)
    for tokens in {1, cfg.prefill_tokens}:
        for prompt_logprobs in (False, True):
            tiles = -(-tokens // cfg.tile) * cfg.tile
            assert buckets.for_prefill(tiles, cfg.prefill_requests, pages, prompt_logprobs).tile == cfg.tile
    for requests_ in {1, cfg.slots}:
        if not (deterministic and drafts):
            assert buckets.for_decode(requests_, pages).tokens_per_request == 1
        if drafts:
            assert buckets.for_verify(requests_, pages, cfg.drafts).tokens_per_request == 1 + cfg.drafts
    assert max(buckets.masks) == cfg.slots and all(b.requests >= cfg.prefill_requests for b in buckets.draft)


def test_what_engine_and_model_both_define_is_the_same():
    """The engine imports nothing of the model, so that it runs without JAX."""
    assert plan.NEXT_TOKEN == batch.NEXT_TOKEN
    assert set(typing.get_args(replay.Replay)) == set(typing.get_args(batch.Replay))
