"""Drafting and verifying over several virtual devices: each rank its own requests, in a process of its own."""

from checkpoint_files import run_python

PROGRAM = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from golden import NOQUANT, drafting_model
from parallel import Ranks
from serving import Request
from dsv4jax.batch import DecodeBucket, PrefillBucket, SpeculativeRequest, concatenate_batches, speculative_batch
from dsv4jax.checkpoint.random import random_params
from dsv4jax.speculation import speculative_step
from sharding import decode_dep

cfg = dataclasses.replace(drafting_model().cfg, n_routed_experts=4, dspark_n_routed_experts=4)
layout = decode_dep(2)
params = random_params(cfg, 3, layout)
PREFILL, DECODE = PrefillBucket(tokens=32, requests=2, pages=6, tile=8), DecodeBucket(2, 6, tokens_per_request=5)
prompts = [np.random.default_rng(i).integers(3, 200, n).astype(np.int32) for i, n in enumerate((13, 9, 1))]
# Rank and slot of each, and its row in the batch of its rank.
requests = [(0, Request(prompts[0], 1, list(range(6))), 0), (1, Request(prompts[1], 0, list(range(6, 12))), 0),
            (1, Request(prompts[2], 1, list(range(6))), 1)]
per_rank = [[q for rank, q, _ in requests if rank == r] for r in range(2)]

def run(known, steps):
    '''Tokens of each request, with drafts from `known`, and output of the last step.'''
    ranks = Ranks(cfg, params, NOQUANT, layout, prefill=PREFILL, decode=DECODE, slots=2, drafts="shared")
    for row in range(2):
        ranks.start([rank[row] if row < len(rank) else None for rank in per_rank])
    ranks.prefill([[(q, 0, len(q.prompt)) for q in rank] for rank in per_rank])
    first = np.asarray(ranks.cache.sampling.next_tokens).reshape(2, 2)
    got = [[int(first[rank, q.slot])] for rank, q, _ in requests]
    for step in range(steps):
        drafts = ranks.cache.drafts
        if known:
            tokens = np.asarray(drafts.tokens).reshape(2, 2, -1).copy()
            for i, (rank, q, _) in enumerate(requests):
                tokens[rank, q.slot] = known[i][len(got[i]) : len(got[i]) + 4]
            tokens = jax.device_put(tokens.reshape(4, -1), drafts.tokens.sharding)
            ranks.cache = ranks.cache.replace(drafts=drafts.replace(tokens=tokens))
        batch = [
            speculative_batch(cfg, ranks.cache_cfg, [SpeculativeRequest(q.slot, q.pages, 48, 4, sampling=q.sampling)
                                                     for q in rank], DECODE)
            for rank in per_rank]
        batch = layout.put(concatenate_batches(batch))
        ranks.cache, output = speculative_step(params, ranks.cache, batch, **ranks.static,
                                               step_seconds=np.ones(11, np.float32))
        counts, tokens = np.asarray(output.counts).reshape(2, 2), np.asarray(output.tokens).reshape(2, 2, -1)
        for i, (rank, _, row) in enumerate(requests):
            got[i] += tokens[rank, row, : counts[rank, row]].tolist()
    return got, output

slow, output = run(None, 14)
assert output.draft.expert_load.sum(1).tolist() == [3 * 4 * cfg.dspark_num_experts_per_tok] * 2
assert int(np.asarray(output.counts)[1]) == 0
fast, output = run(slow, 3)
assert output.counts.tolist() == [5, 0, 5, 5]
assert output.expert_load.sum(1).tolist() == [3 * 5 * cfg.num_experts_per_tok] * 3
assert [f[:11] for f in fast] == [s[:11] for s in slow]
assert all(len(set(s)) > 5 for s in slow)
"""


def test_every_rank_drafts_and_verifies_its_own_requests():
    run_python(PROGRAM, devices=2)
