"""Copies of expert slots: every bit arrives, nothing else changes, on one device and between eight."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import run_python

from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.moe_experts.pack import PackedExperts, PackedWeight, pack_experts
from sharding.move import copy_arrays, copy_slots, spread_experts


def random_stacks(rng, slots):
    """Experts of every kind: packed, and leaves of each stored type with any bits, NaN and -0 included."""

    def bits(dtype, *shape):
        dtype = np.dtype(dtype)
        return rng.integers(256, size=(slots, *shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8).view(dtype)

    packed = [PackedWeight(bits(np.int32, 2, 3, 8), bits(np.int32, 2, 4)) for _ in range(2)]
    plain = [bits(t, 4, 6) for t in (np.uint8, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]
    return {"packed": PackedExperts(*packed), "plain": plain}


def expected_copy(spare, stacks, sources, targets):
    """The copies on the host, as bytes."""
    result = np.ascontiguousarray(spare).view(np.uint8).copy()
    for source, target in zip(sources, targets, strict=True):
        if target < len(result):
            result[target] = np.ascontiguousarray(stacks).view(np.uint8)[source]
    return result


MOVES = [
    ([0, 1, 2, 3], [1, 0, 9, 8]),  # exchanges
    ([15, 15, 0, 7], [0, 14, 7, 16]),  # one source twice, a slot that is source and target, one padded
    ([0, 0, 0, 0], [16, 16, 16, 16]),
]


@pytest.mark.parametrize("sources, targets", MOVES)
def test_slots_on_one_device(sources, targets):
    check(jnp.asarray, sources, targets)


def test_slots_between_eight_devices():
    run_python(
        """
import jax
import numpy as np
from sharding.move import copy_slots
from test_move import MOVES, check, check_spread
from sharding import expert_parallel, make_mesh, sharding_for
mesh, rules = make_mesh(8), expert_parallel()
def put(a):
    axes = ("expert", *[None] * (a.ndim - 1))
    return jax.device_put(a, sharding_for(axes, rules, mesh, name="stack", shape=a.shape))
check_spread(put)
for sources, targets in MOVES:
    for leaf in check(put, sources, targets):
        assert leaf.addressable_shards[0].data.shape[0] == 2
        assert leaf.sharding.mesh == mesh
stack = put(np.zeros((16, 8), np.int32))
program = copy_slots.lower(stack, stack, np.int32([0, 1, 2]), np.int32([3, 4, 5])).compile().as_text()
assert "all-reduce" in program and "all-gather" not in program, "whole stacks are gathered"
""",
        devices=8,
    )


def test_what_the_kernels_read_is_made_expert_by_expert():
    """Packing stacks in another order gives the packed stacks in that order, in every leaf: so they may be moved."""
    rng = np.random.default_rng(3)

    def stack(out, inner):
        return Mxfp4Weight(
            jnp.asarray(rng.integers(256, size=(3, out, inner // 2), dtype=np.uint8)),
            jnp.asarray(rng.integers(110, 130, size=(3, out, inner // 32), dtype=np.uint8)),
        )

    stacks = [stack(256, 256) for _ in range(3)]
    order = np.array([2, 0, 1, 2])
    pack = jax.jit(pack_experts)
    packed, again = pack(*stacks), pack(*jax.tree.map(lambda a: a[order], stacks))
    assert isinstance(packed, PackedExperts) and len(jax.tree.leaves(packed)) == 4
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[order], b), packed, again)


def test_experts_are_spread_over_more_slots():
    check_spread(jnp.asarray)


def check_spread(put):
    host = random_stacks(np.random.default_rng(1), 16)
    owners = np.random.default_rng(2).permutation(24) % 16
    spread = spread_experts(jax.tree.map(put, host), owners, slots_at_once=5)
    for leaf, before in zip(jax.tree.leaves(spread), jax.tree.leaves(host), strict=True):
        found = np.ascontiguousarray(np.asarray(leaf)).view(np.uint8)
        np.testing.assert_array_equal(found, before.view(np.uint8)[owners])


def check(put, sources, targets):
    """Copies, compares with the host, and returns the leaves."""
    rng = np.random.default_rng(0)
    host = random_stacks(rng, 16)
    stacks = jax.tree.map(put, host)
    spare = copy_arrays(stacks)
    given = jax.tree.leaves(spare)
    spare = copy_slots(spare, stacks, np.int32(sources), np.int32(targets))
    assert all(leaf.is_deleted() for leaf in given), "the spare is donated, so that a move needs no third stack"
    for leaf, before in zip(jax.tree.leaves(spare), jax.tree.leaves(host), strict=True):
        found = np.ascontiguousarray(np.asarray(leaf)).view(np.uint8)
        np.testing.assert_array_equal(found, expected_copy(before, before, sources, targets))
    for leaf, before in zip(jax.tree.leaves(stacks), jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), before.view(np.uint8))
    return jax.tree.leaves(spare)
