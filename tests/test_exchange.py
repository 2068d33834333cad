"""What devices exchange within a step: experts' work on tokens of other ranks, and rows of spread tables.

Experts here are a function of token and id that tells every mistake; eight virtual devices in a process of its own.
"""

import pytest
from checkpoint_files import run_python

PROGRAM = """
import dataclasses, functools, sys
import jax, jax.numpy as jnp, numpy as np
from sharding import Layout, decode_dep, latency
from sharding.exchange import rank_of, routed_experts, sum_over_devices, table_rows, total_over_ranks
from sharding.placement import chosen_slots, initial_owners, placement_from_owners
"""

EXPERTS = """
RANKS, LOCAL, HIDDEN = 8, 2, 8

def expert(x, slot):  # of physical slot `slot`
    return x.astype(jnp.float32) * (slot + 1) + jnp.sin(1.0 * slot)

def contributions(first):
    def apply(x, experts, weights, valid):  # ids relative to `first`
        here = valid[:, None] & (experts < LOCAL)
        y = expert(x[:, None], (experts + first)[..., None]) * weights[..., None]
        return jnp.where(here[..., None], y, 0)
    return apply

def run(layout, one_by_one, x, experts, weights, valid):
    def step(_, x, experts, weights, valid):
        first = jax.lax.axis_index("rank") * LOCAL
        def apply(*args):
            y = contributions(first)(*args)
            return y if one_by_one else y.sum(1)
        return routed_experts(layout, LOCAL, apply, x, experts, weights, valid), None
    return jax.jit(lambda *args: layout.map(step, None, *args)[0])(x, experts, weights, valid)

def expected(x, experts, weights, valid):
    y = jax.jit(lambda: expert(x[:, None], experts[..., None]) * weights[..., None])()
    return np.where(valid[:, None, None], np.asarray(y), 0)

def routing(kind, tokens, k, rng):
    if kind == "one rank":  # everything to the experts of rank 5 and one of rank 0
        ids = np.tile(np.array([11, 10, 0])[:k], (tokens, 1))
    elif kind == "own rank":
        rank = np.arange(tokens) // (tokens // RANKS)
        ids = 2 * rank[:, None] + np.array([1, 0, 2])[:k]
    else:
        ids = np.stack([rng.permutation(RANKS * LOCAL)[:k] for _ in range(tokens)])
    return (ids % (RANKS * LOCAL)).astype(np.int32)

for exchange in ("gather", "all_to_all", "ragged"):
    layout = dataclasses.replace(decode_dep(RANKS), exchange=exchange)
    for kind in ("random", "one rank", "own rank"):
        for k in (1, 3):
            rng = np.random.default_rng(k)
            tokens = RANKS * 5
            x = rng.standard_normal((tokens, HIDDEN)).astype(jnp.bfloat16)
            ids, weights = routing(kind, tokens, k, rng), rng.random((tokens, k), np.float32)
            valid = rng.random(tokens) < 0.7
            valid[10:15] = False  # rank 2 has nothing to do
            x[~valid] = np.nan
            wanted = expected(np.where(valid[:, None], x, 0), ids, weights, valid)
            parts = layout.put((x, ids, weights, valid))
            exact = np.asarray(run(layout, True, *parts))
            assert exact.tobytes() == wanted.astype(np.float32).tobytes(), (exchange, kind, k)
            total = np.asarray(run(layout, False, *parts))
            np.testing.assert_allclose(total, wanted.sum(1), rtol=1e-5, atol=1e-5)

layout = latency(RANKS)  # every device has all tokens
total = np.asarray(run(layout, False, x, ids, weights, valid))
np.testing.assert_allclose(total, wanted.sum(1), rtol=1e-5, atol=1e-5)
assert total.shape == (tokens, HIDDEN)

one = Layout()
single = routed_experts(one, RANKS * LOCAL, lambda *args: args[0] * 2, x, ids, weights, valid)
assert single.dtype == x.dtype and np.array_equal(single[valid], 2 * x[valid])
"""

ROWS = """
rng = np.random.default_rng(0)
table = {
    "weight": rng.integers(0, 256, (48, 4), np.uint8).view(jnp.float8_e4m3fn),
    "scale": rng.integers(0, 256, (48, 1), np.uint8),
    "wide": rng.integers(0, 2**16, (48, 3), np.uint16).view(jnp.bfloat16),
    "word": rng.standard_normal((48, 2)).astype(np.float32),
}
table["word"][7] = [-0.0, np.nan]
rows = rng.integers(0, 48, (24, 5)).astype(np.int32)
rows[0, :2] = 0, 47
wanted = jax.tree.map(lambda a: a[rows], table)
for layout in (decode_dep(8), latency(8), decode_dep(1)):
    spread = jax.device_put(table, jax.NamedSharding(layout.mesh, jax.P("rank")))
    look = jax.jit(lambda table, rows: layout.map(lambda t, r: (table_rows(layout, t, r), None), table, rows)[0])
    found = look(spread, layout.put(rows))
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype, name
        assert np.asarray(found[name]).tobytes() == values.tobytes(), (layout, name)

def step(_, x):
    return x * 0 + rank_of(dep), (total_over_ranks(dep, x.sum()), sum_over_devices(dep, x.sum()) * 0)
dep = decode_dep(8)
ranks, (total, _) = jax.jit(lambda x: dep.map(step, None, x))(dep.put(np.arange(16, dtype=np.int32)))
assert np.array_equal(ranks, np.arange(16) // 2) and int(total) == 120
"""


@pytest.mark.parametrize("program", [EXPERTS, ROWS], ids=["experts", "rows"])
def test_eight_devices(program):
    run_python(PROGRAM + program, devices=8)
