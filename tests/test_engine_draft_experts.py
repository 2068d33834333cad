"""The draft's experts move while an engine over eight virtual devices serves, in a process of its own."""

from checkpoint_files import run_python

PROGRAM = """
import dataclasses
import numpy as np
from golden import NOQUANT, drafting_model
from test_scheduler import Recorder, drain
from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer, spread_params
from dsv4jax.balance.solver import Solver
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.random import random_params
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.recording import RecordingExecutor
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.sampling_settings import RequestSampling
from sharding import decode_dep
from sharding.placement import initial_owners

RANKS, SLOTS, LENGTH, DRAFTS = 8, 3, 64, 4
cfg = dataclasses.replace(
    drafting_model().cfg, n_routed_experts=8, dspark_n_routed_experts=16, num_hidden_layers=2,
    compress_ratios=(2, 1, 0), num_nextn_predict_layers=1, dspark_target_layer_ids=(0, 1))
layout, cache_cfg = decode_dep(RANKS), CacheConfig(slots=2, pages=20, page_size=8, slack=DRAFTS + 1, drafts="shared")
buckets = make_buckets(cache_cfg, prefill_tokens=[32], prefill_requests=2, decode_requests=[2], contexts=[LENGTH],
                       prompt_logprobs=False, drafts=DRAFTS)
buckets = dataclasses.replace(buckets, decode=())  # every step runs with drafts
programs = Programs(cfg, cache_cfg, buckets, NOQUANT, layout, draft_expert_slots=SLOTS, progress=False)
scheduler = SchedulerConfig(
    slots=2, pages=20, page_size=8, max_model_len=LENGTH, eos_id=1, ranks=RANKS, prefill_tokens=32, prefill_requests=2,
    replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, "exact"), deterministic=True, drafts=DRAFTS)

def serve(interval):
    owners = initial_owners(cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts, RANKS, SLOTS)
    balancer = ExpertBalancer(
        BalanceConfig(window=5, interval=interval, vectors=5, experts_per_step=4), Solver(RANKS), owners, stack="mtp",
        experts=cfg.dspark_n_routed_experts, experts_per_token=cfg.dspark_num_experts_per_tok)
    params = spread_params(random_params(cfg, 3, layout), owners, "mtp")
    executor = JaxExecutor(params, programs, strict=True, balancers=[balancer])
    executor.warm_up(progress=False)
    recording = RecordingExecutor(executor)
    engine, rng, choices = Engine(Scheduler(scheduler), recording, Recorder()), np.random.default_rng(0), []
    for i in range(24):
        prompt = rng.integers(2, 120, 3 + i).astype(np.int32)
        sampling = RequestSampling(temperature=0.5 * (i % 2), seed=i)
        choices += engine.submit(GenerationRequest(f"r{i}", prompt, max_tokens=20, sampling=sampling, ignore_eos=True))
        engine.step()
    drain(engine)
    results = [event.result for event in recording.events if event.result]
    ranks = [rank for result in results for rank in result.ranks]
    rounds = [s for result in results if (s := result.speculation) is not None]
    drafts = [s.next_drafts[s.counts > 0].tolist() for s in rounds]
    drafts += [rank.first_drafts.tolist() for rank in ranks if rank.first_drafts is not None]
    assert executor.compilations.count == 0
    executor._read_balance()
    return [s.generated for s in choices], drafts, executor.balance, np.count_nonzero(balancer.owners != owners)

tokens, drafts, still, nothing = serve(10**6)
moved_tokens, moved_drafts, balance, moved = serve(10)
assert set(balance) == {"draft"} and set(balance["draft"].measured) == {"prefill", "decode"}
assert still["draft"].rearrangements == nothing == 0
assert balance["draft"].rearrangements > 1 and moved > 5 and balance["draft"].failures == 0
assert 0 < balance["draft"].measured["decode"] <= 1
assert tokens == moved_tokens
assert drafts == moved_drafts and len({tuple(d) for rows in drafts for d in rows}) > 50
"""


def test_drafts_and_tokens_are_the_same_while_the_draft_s_experts_move():
    run_python(PROGRAM, devices=8)
