"""The steps over several virtual devices: where a request or an expert is changes nothing.

Each program runs in a process of its own. One run on one device is the reference, to the tolerance of float32 sums;
among placements results are equal bit for bit.
"""

import pytest
from checkpoint_files import run_python

PROGRAM = """
import dataclasses, sys
import jax, numpy as np
from device_engine import CFG
from golden import NOQUANT
from parallel import Ranks
from serving import Request
from dsv4jax.batch import DecodeBucket, PrefillBucket
from dsv4jax.checkpoint.random import random_params
from dsv4jax.steps import forward
from sharding import decode_dep, latency
from sharding.placement import placement_from_owners

def config(experts):
    return dataclasses.replace(CFG, n_routed_experts=experts, dspark_n_routed_experts=experts)

PREFILL, DECODE = PrefillBucket(tokens=56, requests=3, pages=6, tile=8), DecodeBucket(3, 6, tokens_per_request=2)

def place(prompts, ranks, rng):
    '''Requests for random ranks, in random slots with random pages; (rank, row) of each prompt.'''
    slots = [list(rng.permutation(3)) for _ in range(ranks)]
    pages = [list(rng.permutation(48)) for _ in range(ranks)]
    parts, where = [[] for _ in range(ranks)], []
    for prompt in prompts:
        rank = int(rng.choice([r for r in range(ranks) if slots[r] and sum(len(q.prompt) for q in parts[r]) < 24]))
        where.append((rank, len(parts[rank])))
        parts[rank].append(Request(prompt, int(slots[rank].pop()), [int(pages[rank].pop()) for _ in range(6)]))
    return parts, where

def run(ranks, prompts, rng, steps=2, **options):
    '''Logits after each prompt in two chunks and after greedy tokens, and the expert load of every step.'''
    parts, where = place(prompts, ranks.layout.ranks, rng)
    for row in range(3):
        ranks.start([rank[row] if row < len(rank) else None for rank in parts])
    halves = [[(q, 0, len(q.prompt) // 2) for q in rank if len(q.prompt) > 1] for rank in parts]
    loads = [np.asarray(ranks.prefill(halves, **options).expert_load)]
    rest = [[(q, len(q.prompt) // 2, len(q.prompt)) for q in rank] for rank in parts]
    output = ranks.prefill(rest, **options)
    logits = []
    for step in range(steps + 1):
        values = np.asarray(output.logits).reshape(ranks.layout.ranks, 3, -1, ranks.cfg.vocab_size)
        logits.append([values[rank, row, 0] for rank, row in where])
        loads.append(np.asarray(output.expert_load))
        chosen = {at: [int(v.argmax())] for at, v in zip(where, logits[-1])}
        output = ranks.decode(
            [[(q, len(q.prompt) + step, chosen[r, i]) for i, q in enumerate(rank)] for r, rank in enumerate(parts)],
            **options)
    return np.array(logits), np.array(loads)

def moved(params, cfg, owners):
    '''The parameters with the experts of backbone layers in the slots that a placement says.'''
    layers = {i: dict(layer) for i, layer in params["layers"].items()}
    for i, layer in layers.items():
        stacks = jax.tree.map(lambda a: jax.device_put(np.asarray(a)[owners[i]], a.sharding), layer["ffn"]["experts"])
        layer["ffn"] = layer["ffn"] | {"experts": stacks}
    return params | {"layers": layers}

def check(cfg, layout, prompts, rounds, owners=(None,)):
    params = random_params(cfg, 3, layout)
    first = None
    for owner in owners:
        placement = None if owner is None else placement_from_owners(owner, cfg.n_routed_experts, layout.ranks)
        placed = params if owner is None else moved(params, cfg, owner)
        ranks = Ranks(cfg, placed, NOQUANT, layout, prefill=PREFILL, decode=DECODE)
        for seed in range(rounds):
            result = run(ranks, prompts, np.random.default_rng(seed), placement=placement)
            first = result if first is None else first
            assert all(a.tobytes() == b.tobytes() for a, b in zip(result, first)), "a placement changes the result"
    logits, loads = first
    tokens = sum(map(len, prompts))
    assert (loads[0] + loads[1]).sum(1).tolist() == [tokens * cfg.num_experts_per_tok] * cfg.num_hidden_layers
    assert loads[-1].sum(1).tolist() == [len(prompts) * cfg.num_experts_per_tok] * cfg.num_hidden_layers
    one = random_params(cfg, 3)
    for i, prompt in enumerate(prompts):
        tokens = np.append(prompt, logits[:-1, i].argmax(-1)).astype(np.int32)
        padded = np.pad(tokens, (0, 40 - len(tokens)))[None]
        whole = forward(one, padded, cfg=cfg, mask=np.arange(40)[None] < len(tokens), numerics=NOQUANT)
        expected = np.asarray(whole.logits)[0, len(prompt) - 1 : len(tokens)]
        assert np.abs(logits[:, i] - expected).max() < 1e-4

rng = np.random.default_rng(0)
prompts = [rng.integers(3, 200, n).astype(np.int32) for n in (20, 9, 33, 1, 17)]
"""

EIGHT = """
# 16 experts in 24 slots: three of each rank, two of them its own and one a replica; then the experts in another order.
cfg = config(16)
owners = [np.zeros((cfg.num_hidden_layers, 8, 3), np.int32) for _ in range(2)]
for placement, order in zip(owners, (lambda: np.arange(16), lambda: rng.permutation(16))):
    for layer in placement:
        experts = order()
        layer[:] = np.stack([experts[0::2], experts[1::2], np.roll(experts[1::2], 3)], 1)
check(cfg, decode_dep(8), prompts, rounds=3, owners=[o.reshape(-1, 24) for o in owners])
"""

LATENCY = """
check(config(4), latency(2), [prompts[0], prompts[3], prompts[4]], rounds=2)
"""

THIRTY_TWO = """
check(config(32), dataclasses.replace(decode_dep(32), exchange="all_to_all"), prompts, rounds=3)
"""


@pytest.mark.parametrize(
    ("program", "devices"),
    [(EIGHT, 8), (LATENCY, 2), (THIRTY_TWO, 32)],
    ids=["eight", "latency", "thirty-two"],
)
def test_steps(program, devices):
    run_python(PROGRAM + program, devices=devices)
