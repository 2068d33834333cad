"""Balancing while serving: weights and map agree at every step, whatever happens, and the load gets even."""

import dataclasses
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python

import dsv4jax.balance.balancer as balancer_module
from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer
from dsv4jax.balance.solver import Solver, rank_loads
from dsv4jax.weights import DenseWeight
from pallas_kernels.moe_experts import PackedExperts
from pallas_kernels.moe_experts.pack import PackedWeight
from sharding.placement import initial_owners, owners_of

LAYERS, EXPERTS, RANKS, SLOTS_PER_RANK, K = 3, 16, 8, 3, 4
CFG = BalanceConfig(window=6, interval=40, vectors=3, experts_per_step=3)


def make(cfg=CFG, stack="layers", put=jnp.asarray):
    """A balancer, and params with expert e of layer l filled with 100 l + e; those of the draft are packed."""
    owners = initial_owners(LAYERS, EXPERTS, RANKS, SLOTS_PER_RANK)

    def experts(layer):
        codes = (100 * layer + owners[layer]).astype(np.int32)
        leaves = put(np.tile(codes[:, None, None], (1, 2, 4))), put(np.tile(codes[:, None], (1, 3)))
        if stack == "mtp":
            return {"packed": PackedExperts(PackedWeight(*leaves), PackedWeight(*leaves[::-1]))}
        return {"w1": DenseWeight(leaves[0]), "w2": DenseWeight(leaves[1])}

    layers = {i: {"ffn": {"experts": experts(i), "gate": i}, "attn": i} for i in range(LAYERS)}
    solver = Solver(RANKS, nodes=2)
    balancer = ExpertBalancer(cfg, solver, owners, stack=stack, experts=EXPERTS, experts_per_token=K)
    return balancer, {stack: layers, "head": 7}, balancer.placement


def check_weights(params, placement, stack="layers"):
    """Every slot holds exactly the expert that the map puts there."""
    owners = owners_of(placement, RANKS, SLOTS_PER_RANK)
    for layer, block in params[stack].items():
        for leaf in jax.tree.leaves(block["ffn"]["experts"]):
            codes = np.asarray(leaf).reshape(owners.shape[1], -1)
            np.testing.assert_array_equal(codes, np.tile(100 * layer + owners[layer][:, None], codes.shape[1]))
    return owners


def loads(rng, hot=0):
    """A step's loads; popular experts start at `hot`, in the next layer one further on."""
    popularity = np.roll(1 / np.arange(1, EXPERTS + 1), hot)
    return np.stack([rng.poisson(30000 * np.roll(popularity, layer)) for layer in range(LAYERS)]).astype(np.int32)


def busiest(owners, load):
    return [rank_loads(load[i][None], owners[i], RANKS).max() / load[i].sum() * RANKS for i in range(LAYERS)]


def run(balancer, params, placement, rng, steps, hot=0, stack="layers", put=jnp.asarray):
    for _ in range(steps):
        params, placement = balancer.advance(params, placement)
        check_weights(params, placement, stack)
        balancer.record(put(loads(rng, hot)), "decode")
    return params, placement


@pytest.mark.parametrize("stack, vectors", [("layers", 3), ("mtp", 0)])
def test_loads_get_even_one_layer_at_a_time_and_weights_follow_the_map(stack, vectors):
    balancer, params, placement = make(dataclasses.replace(CFG, vectors=vectors), stack)
    rng = np.random.default_rng(0)
    before = params, placement
    load = loads(rng)
    uneven = busiest(balancer.owners, load)
    changed = []
    for _ in range(2 * CFG.interval - 1):
        old = balancer.owners
        params, placement = run(balancer, params, placement, rng, 1, stack=stack)
        layers = np.flatnonzero((old != balancer.owners).any(1))
        assert len(layers) <= 1
        changed += layers.tolist()
    assert changed == [0, 1, 2]
    np.testing.assert_array_equal(check_weights(params, placement, stack), balancer.owners)
    assert max(busiest(balancer.owners, load)) < 1.15 < min(uneven)
    assert params["head"] == 7 and params[stack][1]["attn"] == 1 and params[stack][1]["ffn"]["gate"] == 1
    check_weights(*before, stack)  # the arguments of earlier steps, which may still run
    metrics = balancer.metrics()
    assert (metrics.rearrangements, metrics.rearranged_at, metrics.layers_left) == (1, CFG.interval, 0)
    assert metrics.experts_moved == np.sum(balancer.owners != initial_owners(LAYERS, EXPERTS, RANKS, SLOTS_PER_RANK))
    assert metrics.balancedness["decode"].measured > 0.9


def test_it_follows_loads_that_change_and_leaves_alone_what_is_good():
    balancer, params, placement = make()
    rng = np.random.default_rng(1)
    params, placement = run(balancer, params, placement, rng, 2 * CFG.interval - 1)
    first, settled = balancer.metrics(), balancer.owners
    params, placement = run(balancer, params, placement, rng, CFG.interval)
    second = balancer.metrics()
    assert second.rearrangements == first.rearrangements + 1
    assert second.experts_moved == np.sum(balancer.owners != settled) <= first.experts_moved / 10
    run(balancer, params, placement, rng, 2 * CFG.interval, hot=5)
    assert max(busiest(balancer.owners, loads(rng, hot=5))) < 1.15


def test_only_the_window_before_it_counts():
    balancer, params, placement = make()
    rng = np.random.default_rng(2)
    params, placement = run(balancer, params, placement, rng, CFG.interval - CFG.window - 1, hot=9)
    params, placement = run(balancer, params, placement, rng, CFG.window, hot=0)
    run(balancer, params, placement, rng, CFG.interval, hot=9)
    alone, params, placement = make()
    rng = np.random.default_rng(3)
    params, placement = run(alone, params, placement, rng, CFG.interval, hot=0)
    run(alone, params, placement, rng, CFG.interval - 1, hot=0)
    fresh = loads(rng, hot=0)
    np.testing.assert_allclose(busiest(balancer.owners, fresh), busiest(alone.owners, fresh), rtol=0.08)


def test_prefill_and_decode_are_recorded_apart_and_balanced_together():
    balancer, params, placement = make()
    rng = np.random.default_rng(4)
    for _ in range(2 * CFG.interval - 1):
        params, placement = balancer.advance(params, placement)
        balancer.record(jnp.asarray(loads(rng, 0)), "decode")
        balancer.record(jnp.asarray(loads(rng, 8)), "prefill")
    for hot in (0, 8):
        assert max(busiest(balancer.owners, loads(rng, hot))) < 1.3
    kinds = balancer.metrics().balancedness
    assert kinds.keys() == {"prefill", "decode"}
    assert kinds["decode"].steps == kinds["prefill"].steps == CFG.window


def test_a_rearrangement_that_outlasts_the_interval_is_finished_before_the_next():
    balancer, params, placement = make(BalanceConfig(window=5, interval=5, vectors=5, experts_per_step=1))
    rng = np.random.default_rng(8)
    begun = set()
    for _ in range(60):
        params, placement = run(balancer, params, placement, rng, 1)
        begun.add(balancer.metrics().rearranged_at)
    first, second = sorted(begun)[1:3]
    assert first == 5 and second % 5 == 0 and second > 15
    assert max(busiest(balancer.owners, loads(rng))) < 1.15


def test_without_loads_nothing_happens():
    balancer, params, placement = make()
    for _ in range(3 * CFG.interval):
        same = balancer.advance(params, placement)
        assert same[0] is params and same[1] is placement
        balancer.record(jnp.zeros((LAYERS, EXPERTS), jnp.int32), "decode")
    assert balancer.metrics().balancedness["decode"].steps == 0


@pytest.mark.parametrize("name", ["copy_arrays", "copy_slots", "Solver.solve", "set_owners", "_set_layer"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failure_leaves_everything_as_it_was(name, nth, monkeypatch):
    balancer, params, placement = make()
    rng = np.random.default_rng(5)
    params, placement = run(balancer, params, placement, rng, CFG.interval - 1)
    owner, attribute = (balancer.solver.__class__, "solve") if "." in name else (balancer_module, name)
    works, calls = getattr(owner, attribute), 0

    def fails(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise RuntimeError("out of memory")
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, fails)
    failed = 0
    for _ in range(CFG.interval):
        before, owners = (params, placement), balancer.owners
        try:
            params, placement = balancer.advance(params, placement)
        except RuntimeError:
            failed += 1
            assert before == (params, placement) and balancer.owners is owners
        np.testing.assert_array_equal(check_weights(params, placement), balancer.owners)
        balancer.record(jnp.asarray(loads(rng)), "decode")
    assert failed == balancer.metrics().failures == 1
    run(balancer, params, placement, rng, CFG.interval)
    assert max(busiest(balancer.owners, loads(rng))) < 1.15, "the next rearrangement does the rest"


def test_a_layer_whose_copy_failed_on_the_device_is_not_changed_over(monkeypatch):
    balancer, params, placement = make()
    rng = np.random.default_rng(6)
    params, placement = run(balancer, params, placement, rng, CFG.interval)

    def fails(_spare):
        raise RuntimeError("the device ran out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", fails)
        with pytest.raises(RuntimeError, match="ran out of memory"):
            for _ in range(CFG.interval):
                params, placement = balancer.advance(params, placement)
    np.testing.assert_array_equal(check_weights(params, placement), initial_owners(3, EXPERTS, RANKS, SLOTS_PER_RANK))


def test_nothing_compiles_after_warm_up():
    balancer, params, placement = make()
    balancer.record(jnp.zeros((LAYERS, EXPERTS), jnp.int32), "decode")
    balancer.warm_up(params, placement)
    rng = np.random.default_rng(7)
    steps = [jnp.asarray(loads(rng)) for _ in range(2 * CFG.interval - 1)]
    events = []
    jax.monitoring.register_event_duration_secs_listener(seen := lambda event, *_, **__: events.append(event))
    for step in steps:
        params, placement = balancer.advance(params, placement)
        balancer.record(step, "decode")
    jax.monitoring.unregister_event_duration_listener(seen)
    assert balancer.metrics().experts_moved > 0
    assert not [event for event in events if "compile" in event]


def test_tokens_are_identical_before_during_and_after():
    """A model on four ranks, routing forced to be skewed: logits bit for bit those of a run that moves no expert."""
    run_python(
        """
import dataclasses
import jax, numpy as np
from golden import NOQUANT, small_model
from parallel import Ranks
from serving import Request
from dsv4jax.balance.balancer import BalanceConfig, ExpertBalancer
from dsv4jax.balance.solver import Solver
from dsv4jax.batch import DecodeBucket, PrefillBucket
from dsv4jax.checkpoint.random import random_params
from sharding import decode_dep
from jax import NamedSharding, P
from sharding.move import put_like, spread_experts
from sharding.placement import initial_owners
cfg = dataclasses.replace(
    small_model().cfg, n_routed_experts=8, num_hidden_layers=4, compress_ratios=(0, 2, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2), candidate_source_layer_id=2, engram_layer_ids=(0,),
    dspark_n_routed_experts=8, dspark_target_layer_ids=(1, 2, 3))
layout, layers, k = decode_dep(4), cfg.num_hidden_layers, cfg.num_experts_per_tok
owners = initial_owners(layers, 8, 4, 3)
loaded = random_params(cfg, 3, layout)
placed = {i: dict(layer) for i, layer in loaded["layers"].items()}
for i, layer in placed.items():
    layer["ffn"] = layer["ffn"] | {"experts": spread_experts(layer["ffn"]["experts"], owners[i])}
loaded = loaded | {"layers": placed}

def run(balance):
    balancer = ExpertBalancer(
        BalanceConfig(window=3, interval=4, vectors=3, experts_per_step=2), Solver(4), owners, stack="layers",
        experts=8, experts_per_token=k)
    params, placement = loaded, put_like(balancer.placement, jax.device_put(0, NamedSharding(layout.mesh, P())))
    buckets = dict(prefill=PrefillBucket(tokens=8, requests=1, pages=6, tile=8), decode=DecodeBucket(1, 6))
    numerics = dataclasses.replace(NOQUANT, routing="skewed")
    ranks = Ranks(cfg, params, numerics, layout, slots=1, pages=6, **buckets)
    requests = [Request(np.array([5 + rank], np.int32), 0, list(range(6))) for rank in range(4)]
    ranks.start(requests)
    tokens, logits, changed, loads = np.arange(5, 9), [], set(), 0
    for step in range(30):
        if balance:
            before = balancer.owners
            params, placement = balancer.advance(params, placement)
            changed |= set(np.flatnonzero((before != balancer.owners).any(1)).tolist())
            ranks.params = params
        parts = [[(request, step, [int(token)])] for request, token in zip(requests, tokens)]
        output = ranks.decode(parts, placement=placement)
        balancer.record(output.expert_load, "decode")
        logits.append(np.asarray(output.logits))
        loads = loads + np.asarray(output.expert_load)
        tokens = logits[-1].reshape(4, -1).argmax(-1)
    for before, after in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim), "a step would be compiled again"
    assert placement.slots.sharding.is_equivalent_to(NamedSharding(layout.mesh, P()), 3)
    popularity = loads[:, np.argsort(np.random.default_rng(0).permutation(8))]
    assert (popularity[:, :2].sum(1) > 2 * popularity[:, -2:].sum(1)).all(), "forced routing does not reach the layers"
    return np.stack(logits), changed, balancer.metrics()

still, moving = run(False), run(True)
assert still[0].tobytes() == moving[0].tobytes()
assert len(moving[1]) >= 3, moving[1]
found = moving[2].balancedness["decode"]
assert found.steps > 0 and 0 < found.measured <= 1 and 0 < found.uniform <= 1
""",
        devices=4,
    )


def test_two_processes_decide_alike_and_have_each_its_part_of_the_weights():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = """
import sys, zlib
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from test_balancer import CFG, LAYERS, busiest, loads, make
from sharding import expert_parallel, make_mesh, sharding_for
mesh, rules = make_mesh(2), expert_parallel()
def put(a, first="expert"):
    axes = (first, *[None] * (a.ndim - 1))
    sharding = sharding_for(axes, rules, mesh, name="stack", shape=a.shape)
    return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])
def whole(a):
    return put(a, None)
balancer, params, placement = make(put=put)
placement = jax.tree.map(whole, placement)
rng = np.random.default_rng(0)
history = []
for _ in range(2 * CFG.interval - 1):
    params, placement = balancer.advance(params, placement)
    balancer.record(whole(loads(rng)), "decode")
    history.append(zlib.crc32(balancer.owners))
assert max(busiest(balancer.owners, loads(rng))) < 1.15
for layer in range(LAYERS):
    for leaf in jax.tree.leaves(params["layers"][layer]["ffn"]["experts"]):
        (shard,) = leaf.addressable_shards
        expected = 100 * layer + balancer.owners[layer][shard.index[0]]
        assert (np.asarray(shard.data).reshape(len(expected), -1) == expected[:, None]).all()
print(history)
"""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda process: run_python(program, address, process), range(2))
        first, second = (output.splitlines()[-1] for output in outputs)
    assert first == second and len(set(first.split())) > 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 41}, "window = 41: must be 1 to interval = 40"),
        ({"vectors": 7}, "vectors = 7: must be 0 to window = 6"),
        ({"experts_per_step": 0}, "experts_per_step = 0: must be positive"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CFG, **change)


def test_loads_and_stacks_of_other_sizes_are_refused():
    balancer, params, placement = make()
    with pytest.raises(ValueError, match=re.escape("expert_load (3, 15): 'layers' has (layers, experts) = (3, 16)")):
        balancer.record(jnp.zeros((3, 15), jnp.int32), "decode")
    params["layers"][0]["ffn"]["experts"]["w2"] = DenseWeight(jnp.zeros((23, 3)))
    message = "layers.0.ffn.experts['w2'].weight (23, 3): must have 24 expert slots"
    with pytest.raises(ValueError, match=re.escape(message)):
        balancer.warm_up(params, placement)
