"""Uniform and skewed routing by construction: how tokens spread, and that nothing else of the router changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4jax.balance.metrics import uniform_balancedness
from dsv4jax.config import ModelConfig
from dsv4jax.model.forced_routing import ROUTINGS, forced_scores
from dsv4jax.model.moe import Router, sqrt_softplus

EXPERTS, K, SCALE = 64, 6, 1.5


ROWS = 500


@functools.partial(jax.jit, static_argnames="routing")
def routed(x, routing):
    gate = Router(EXPERTS, ModelConfig(hidden_size=EXPERTS, n_routed_experts=EXPERTS))
    gate.weight = nnx.Param(jnp.eye(EXPERTS, dtype=jnp.bfloat16))
    gate.bias, gate.bias_vl = (nnx.Param(jnp.zeros(EXPERTS)) for _ in range(2))
    return gate(x, jnp.zeros(ROWS, bool), K, SCALE, routing)


def route(x, routing):
    """Experts and weights of the rows, in batches of `ROWS`."""
    padded = np.pad(x, [(0, -len(x) % ROWS), (0, 0)]).reshape(-1, ROWS, EXPERTS)
    parts = [routed(part, routing) for part in padded]
    return [np.concatenate(arrays)[: len(x)] for arrays in zip(*parts, strict=True)]


def logits(tokens, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (tokens, EXPERTS)).astype(np.float32)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_are_distinct_and_weights_are_those_of_their_scores(routing):
    x = logits(50)
    experts, weights = route(x, routing)
    assert all(len(set(row)) == K for row in experts.tolist())
    picked = np.take_along_axis(np.asarray(sqrt_softplus(jnp.asarray(x))), experts, -1)
    np.testing.assert_allclose(weights, picked / picked.sum(-1, keepdims=True) * SCALE, rtol=1e-5)


def test_uniform_routing_loads_ranks_as_the_control_says():
    ratios = []
    for seed in range(20):
        experts, _ = route(logits(500, seed), "uniform")
        load = np.bincount(experts.reshape(-1) * 8 // EXPERTS, minlength=8)
        ratios.append(load.mean() / load.max())
    assert np.mean(ratios) == pytest.approx(uniform_balancedness(np.array([500]), K, EXPERTS, 8)[0], abs=0.015)


def test_uniform_routing_has_no_favourites():
    load = np.bincount(route(logits(4000), "uniform")[0].reshape(-1), minlength=EXPERTS)
    mean = 4000 * K / EXPERTS
    assert abs(load - mean).max() < 5 * np.sqrt(mean)


def test_skewed_routing_follows_the_popularity():
    """The first pick of a token is expert number n with probability 1/n over their sum; it is the largest score."""
    first = route(logits(8000), "skewed")[0][:, 0]
    popularity = np.sort(np.bincount(first, minlength=EXPERTS))[::-1] / 8000
    expected = 1 / np.arange(1, EXPERTS + 1)
    np.testing.assert_allclose(popularity[:8], (expected / expected.sum())[:8], rtol=0.15)


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_a_token_takes_the_same_experts_in_any_batch(routing):
    x = logits(30)
    together, _ = route(x, routing)
    order = np.random.default_rng(1).permutation(30)
    np.testing.assert_array_equal(route(x[order], routing)[0], together[order])
    np.testing.assert_array_equal(route(x[7:8], routing)[0], together[7:8])
    assert (together != route(x, "model")[0]).any()


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_rows_without_sense_take_experts_that_exist(routing):
    scores = jnp.stack([jnp.full(EXPERTS, value) for value in (jnp.nan, jnp.inf, 0.0, -0.0)])
    forced = forced_scores(scores, routing)
    assert jnp.isfinite(forced).all()
    assert all(len(set(row)) == EXPERTS for row in np.argsort(forced, -1).tolist())


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match=re.escape("numerics.routing = 'random': must be one of ('model', 'uniform'")):
        route(logits(3), "random")
