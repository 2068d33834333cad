"""Engines on the model, on one device or several, and what they must do over eight ranks.

The checks run in a process of its own, which has eight virtual devices: `main` there, `CHECKS` names them.
"""

import dataclasses
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from golden import NOQUANT, small_model
from test_scheduler import Recorder, drain

from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer, spread_params
from dsv4jax.balance.solver import Solver
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.random import random_params
from dsv4jax.engine import rank as rank_module
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import RankPlan, StepPlan
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.sampling_settings import RequestSampling
from sharding import SINGLE, Layout, decode_dep, latency
from sharding.placement import initial_owners

RANKS = 8
CACHE = CacheConfig(slots=4, pages=26, page_size=8)
LENGTH = 160
# Half the layers of `small_model`, to compile in half the time: both ratios, Engram and reuse.
CFG = dataclasses.replace(
    small_model().cfg,
    n_routed_experts=16,
    dspark_n_routed_experts=16,
    num_hidden_layers=4,
    compress_ratios=(0, 2, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=2,
    dspark_target_layer_ids=(1, 2, 3),
)
SCHEDULER = SchedulerConfig(
    slots=CACHE.slots,
    pages=CACHE.pages,
    max_model_len=LENGTH,
    eos_id=1,
    replay=ReplayRule(CFG.sliding_window, CFG.num_hidden_layers, "exact"),
    page_size=CACHE.page_size,
    prefill_tokens=32,
    prefill_requests=2,
    deterministic=True,
)

Results = dict[tuple[str, int], tuple[list[int], np.ndarray, list]]
"""Per choice: tokens, their log-probabilities, ids of the best ones."""


def buckets(prompt_logprobs: bool):
    """The one shape of each kind that goes with `SCHEDULER`."""
    return make_buckets(
        CACHE,
        prefill_tokens=[SCHEDULER.prefill_tokens],
        prefill_requests=SCHEDULER.prefill_requests,
        decode_requests=[CACHE.slots],
        contexts=[LENGTH],
        prompt_logprobs=prompt_logprobs,
    )


def make_executor(layout: Layout = SINGLE, prompt_logprobs: bool = False) -> JaxExecutor:
    """An executor of random weights, the same on every layout; over several ranks experts move all the time."""
    params, balancers, expert_slots = random_params(CFG, 3, layout), [], None
    if layout.ranks > 1:
        expert_slots = CFG.n_routed_experts // layout.ranks + 1
        owners = initial_owners(CFG.num_hidden_layers, CFG.n_routed_experts, layout.ranks, expert_slots)
        params = spread_params(params, owners)
        balancer = ExpertBalancer(
            BalanceConfig(window=10, interval=20, vectors=5, experts_per_step=4),
            Solver(layout.ranks),
            owners,
            stack="layers",
            experts=CFG.n_routed_experts,
            experts_per_token=CFG.num_experts_per_tok,
        )
        balancers = [balancer]
    programs = Programs(
        CFG, CACHE, buckets(prompt_logprobs), NOQUANT, layout, expert_slots=expert_slots, progress=False
    )
    return JaxExecutor(params, programs, strict=True, balancers=balancers)


def make_engine(executor: JaxExecutor, **changes) -> Engine:
    """An engine over the ranks of an executor, which is reset."""
    executor.reset()
    cfg = dataclasses.replace(SCHEDULER, ranks=executor._programs.layout.ranks, **changes)
    return Engine(Scheduler(cfg), executor, Recorder())


class HalfMask:
    """Allows the ids below 64 and those from 64 to 127 by turns, known one token ahead."""

    waits_for_tokens = False
    unchanged_for = 1
    pause_tokens = ()

    def __init__(self):
        self.count = 0
        words = np.zeros((2, -(-CFG.vocab_size // 32)), np.uint32)
        words[0, :2] = words[1, 2:4] = 0xFFFFFFFF
        self.masks = list(words)

    def next(self, ahead=0):
        return self.masks[(self.count + ahead) % 2]

    def along(self, drafts):
        return [self.masks[(self.count + i) % 2] for i in range(len(drafts) + 1)]

    def push(self, token):
        assert (token >= 64) == self.count % 2, "chosen under another slot's mask"
        self.count += 1


def requests() -> list[GenerationRequest]:
    """Requests of every kind; half of them share a prefix."""
    rng = np.random.default_rng(0)
    base = rng.integers(2, 120, 80)
    made = []
    for i in range(18):
        prompt = np.concatenate([base if i % 2 else base[:0], rng.integers(2, 120, 3 + 2 * i)]).astype(np.int32)
        sampling = RequestSampling(
            temperature=0.8 * (i % 4 != 2), seed=i, top_logprobs=i % 3, frequency_penalty=0.5 * (i % 5 == 1)
        )
        request = GenerationRequest(
            f"r{i}",
            prompt,
            max_tokens=24,
            n=1 + (i == 1),
            sampling=sampling,
            logit_bias={7: 3.0} if i % 4 == 0 else {},
            mask=HalfMask if i % 6 == 3 else None,
            ignore_eos=i % 3 > 0,
        )
        made.append(request)
    return made


def serve(engine: Engine, made: list[GenerationRequest]) -> Results:
    """What each choice gave."""
    choices = []
    for i, request in enumerate(made):
        choices += engine.submit(request)
        if i % 3 == 2:
            engine.step()
    drain(engine)
    engine.scheduler.check_integrity()
    assert {s.finish_reason for s in choices} <= {"stop", "length"}
    assert engine.executor.compilations.count == 0, "something was compiled after the start"
    return {
        (s.request.request_id, s.index): (
            s.generated,
            np.array(s.logprobs, np.float32),
            [[token for token, _ in pairs] for pairs in s.top_logprobs],
        )
        for s in choices
    }


def assert_same(actual: Results, expected: Results, tolerance: float = 0.0) -> None:
    """The same tokens, and log-probabilities within a tolerance."""
    assert actual.keys() == expected.keys()
    for key, (tokens, logprobs, best) in actual.items():
        assert (tokens, best) == (expected[key][0], expected[key][2]), key
        np.testing.assert_allclose(logprobs, expected[key][1], rtol=0, atol=tolerance, err_msg=str(key))


class Placed:
    """While it is entered, ranks have the load that `load(rank number)` says, which decides where requests go."""

    def __init__(self, load: Callable[[int], float]):
        self._load, self._original = load, rank_module.Rank.load

    def __enter__(self):
        rank_module.Rank.load = property(lambda rank: self._load(rank.number))

    def __exit__(self, *_):
        rank_module.Rank.load = self._original


def any_placement(executor: JaxExecutor, reference: Results) -> None:
    """The tokens are those of one device, wherever requests run, with hits, masks and preemptions on any rank."""
    engine = make_engine(executor)
    first = serve(engine, requests())
    assert_same(first, reference, 1e-4)
    engine, rng = make_engine(executor), np.random.default_rng(0)
    with Placed(lambda _: 1000 * rng.random()):
        assert_same(serve(engine, requests()), first)
    stats = engine.stats()
    assert stats.preemptions and any(rank.prefix_hits for rank in stats.ranks[1:])
    assert sum(rank.prefix_queries > 0 for rank in stats.ranks) > RANKS // 2


def all_on_the_last_rank(executor: JaxExecutor, reference: Results) -> None:
    """The others take part in every step without work; many masks and starts for one rank in a step."""
    engine = make_engine(executor)
    with Placed(lambda rank: 1e9 * (rank < RANKS - 1) + rank):
        results = serve(engine, [r for r in requests() if r.request_id in ("r3", "r9", "r15", "r1", "r5")])
    assert_same(results, {key: reference[key] for key in results}, 1e-4)
    ranks = engine.stats().ranks
    assert ranks[-1].prefix_hits > 0 and engine.stats().preemptions > 0


def idle_ranks_keep_what_they_have(executor: JaxExecutor, reference: Results) -> None:
    """Their part of the cache does not change by a bit, whatever the others do."""
    engine = make_engine(executor)
    serve(engine, requests())
    ranks = executor._programs.layout.ranks

    def contents():
        parts = [np.split(np.asarray(a), ranks) for a in jax.tree.leaves(executor._cache)]
        return [[part[rank].tobytes() for part in parts] for rank in range(ranks)]

    before = contents()
    with Placed(lambda rank: float(rank != 3)):
        serve(engine, [dataclasses.replace(requests()[3], request_id="again")])
    assert [old == new for old, new in zip(before, contents(), strict=True)] == [i != 3 for i in range(ranks)]


def prompt_logprobs(executor: JaxExecutor, reference: Results) -> None:
    """Of prompts on several ranks at once: what decoding gave for the same tokens."""
    engine = make_engine(executor)
    answers = [r for r in requests() if r.request_id in ("r2", "r4", "r6", "r7", "r8", "r10")]
    results = serve(engine, answers)
    again = []
    for request in answers:
        tokens, *_ = results[request.request_id, 0]
        prompt = np.concatenate([request.prompt, tokens]).astype(np.int32)
        again += engine.submit(GenerationRequest(request.request_id, prompt, max_tokens=2, prompt_logprobs=1))
        engine.submit(dataclasses.replace(request, request_id=f"plain {request.request_id}"))
    places = set()
    while not engine.idle:
        engine.step()
        places |= {s.rank for s in again}
    assert len(places - {-1}) > 3
    for request, sequence in zip(answers, again, strict=True):
        logprobs = np.concatenate([part.logprobs for part in sequence.prompt_logprobs])
        assert len(logprobs) == len(sequence.request.prompt) - 1
        np.testing.assert_allclose(
            logprobs[len(request.prompt) - 1 :], results[request.request_id, 0][1], rtol=0, atol=1e-4
        )
    assert executor.compilations.count == 0


def a_plan_for_other_ranks_is_refused(executor: JaxExecutor, reference: Results) -> None:
    nothing = RankPlan((), (), ())
    try:
        executor.dispatch(StepPlan(0, (nothing,) * 3))
    except ValueError as error:
        assert str(error) == "a plan for 3 ranks: the programs are for 8"
    else:
        raise AssertionError("it was not refused")


def experts_moved_meanwhile(executor: JaxExecutor, reference: Results) -> None:
    """What the checks before have shown, they have shown with experts on their way."""
    balancer = executor._balancers["layers"]
    metrics = balancer.metrics()
    assert metrics.rearrangements > 5 and metrics.experts_moved > 0 and metrics.failures == 0
    held = executor.balance["target"]
    assert set(held.measured) == {"prefill", "decode"} and 0 < held.measured["decode"] <= 1 and held.rearrangements
    assert np.array_equal(np.asarray(executor._placements["layers"].counts), balancer.placement.counts)
    assert balancer.placement.counts.max() > 1


def all_devices_on_the_same_requests(executor: JaxExecutor, reference: Results) -> None:
    """The preset `latency`: tokens are those of one device, up to rounding."""
    other = make_executor(latency(2))
    other.warm_up(progress=False)
    results = serve(make_engine(other), requests()[:8])
    other.close()
    executor.compilations.count = 0  # it has counted those of the other one
    assert_same(results, {key: reference[key] for key in results}, 1e-4)


CHECKS = (
    all_devices_on_the_same_requests,
    any_placement,
    all_on_the_last_rank,
    idle_ranks_keep_what_they_have,
    prompt_logprobs,
    a_plan_for_other_ranks_is_refused,
    experts_moved_meanwhile,
)


def main(reference: str, outcomes: str) -> None:
    """Runs all checks; writes what each raised, or "", to `outcomes`."""
    executor = make_executor(decode_dep(RANKS), prompt_logprobs=True)
    executor.warm_up(progress=False)
    expected = pickle.loads(Path(reference).read_bytes())
    found = {}
    for check in CHECKS:
        try:
            check(executor, expected)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
    Path(outcomes).write_bytes(pickle.dumps(found))
