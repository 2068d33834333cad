"""The exchange of tokens between ranks alone, and what the links between devices can carry."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dsv4jax.balance.metrics import uniform_picks
from dsv4jax.bench.steps.cases import seconds_per_call
from dsv4jax.config import ModelConfig
from dsv4jax.step_flags import STEP_OPTIONS
from sharding import Layout
from sharding.exchange import exchange_bytes, routed_experts

CHAIN = 8
"""Exchanges or collectives in one program, each behind the one before: so many layers without all else."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


@dataclasses.dataclass(frozen=True)
class Links:
    """What plain collectives reach between the devices, by name in `COLLECTIVES`."""

    bandwidth: Mapping[str, float]
    """Bytes per second that a device receives from the others, of large arrays."""
    latency: Mapping[str, float]
    """Seconds of a collective of a few bytes, in a chain."""


def collective(name: str, layout: Layout, chain: int) -> Callable[[Array], Array]:
    """A jitted chain of collectives of fp32 [ranks * n]; of each device's n, all but one of `ranks` parts travel.

    A chain takes parts of what it gathers, which is nothing for a few bytes.
    """
    axis, ranks = layout.by_rank.spec[0], layout.ranks

    def run(_: None, x: Array) -> tuple[Array, None]:
        for _ in range(chain):
            if name == "all_to_all":
                x = lax.all_to_all(x.reshape(ranks, -1), axis, 0, 0).reshape(-1)
            elif name == "reduce_scatter":
                x = lax.psum_scatter(x, axis, tiled=True)
                x = jnp.tile(x, ranks) if chain > 1 else x
            else:
                part = x[: x.shape[0] // ranks] if chain > 1 else x
                x = lax.all_gather(part, axis, tiled=True)
        return x, None

    return jax.jit(lambda x: layout.map(run, None, x)[0])


def measure_links(layout: Layout, megabytes: int, repeats: int) -> Links:
    """Times the collectives of `megabytes` and of some bytes per device."""
    ranks, bandwidth, latency = layout.ranks, {}, {}
    for name in COLLECTIVES:
        large = layout.put(np.ones((megabytes << 18) // ranks * ranks * ranks, np.float32))
        received = large.nbytes / ranks * ((ranks - 1) if name == "all_gather" else (ranks - 1) / ranks)
        one = collective(name, layout, 1)
        bandwidth[name] = received / seconds_per_call(functools.partial(one, large), repeats)
        chain = collective(name, layout, CHAIN)
        small = layout.put(np.ones(ranks * ranks * 64, np.float32))
        latency[name] = seconds_per_call(functools.partial(chain, small), repeats) / CHAIN
    return Links(bandwidth, latency)


@dataclasses.dataclass(frozen=True)
class ExchangeCase:
    """Dispatch and combine of `tokens` tokens of each rank, around experts that only pass them on; uniform routing."""

    layout: Layout
    tokens: int

    @property
    def names(self) -> dict[str, Any]:
        """What tells it from other cases."""
        return {"exchange": self.layout.exchange, "tokens_per_rank": self.tokens}

    def arguments(self, cfg: ModelConfig) -> tuple[Array, ...]:
        """Values, expert ids, weights and validity of all ranks' tokens, on their devices."""
        rows = self.layout.ranks * self.tokens
        rng = np.random.default_rng(0)
        experts = uniform_picks(rng, rows, cfg.num_experts_per_tok, cfg.n_routed_experts).T
        x = np.asarray(jax.random.normal(jax.random.key(0), (rows, cfg.hidden_size), jnp.bfloat16))
        weights = np.full(experts.shape, 1 / experts.shape[1], np.float32)
        return self.layout.put((x, experts, weights, np.ones(rows, bool)))

    def lower(self, cfg: ModelConfig) -> jax.stages.Lowered:
        """A chain of exchanges."""
        local = cfg.n_routed_experts // self.layout.devices

        def experts_pass_on(x: Array, experts: Array, weights: Array, valid: Array) -> Array:
            share = jnp.sum(jnp.where((experts < local) & valid[:, None], weights, 0), 1)
            return x.astype(jnp.float32) * share[:, None]

        def run(_: None, x: Array, *routing: Array) -> tuple[Array, None]:
            for _ in range(CHAIN):
                # Every layer has a routing of its own; XLA would exchange this one once for all.
                x, *routing = lax.optimization_barrier((x, *routing))
                x = routed_experts(self.layout, local, experts_pass_on, x, *routing).astype(x.dtype)
            return x, None

        rows, k, by_rank = self.layout.ranks * self.tokens, cfg.num_experts_per_tok, self.layout.by_rank
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=by_rank)
            for shape, dtype in (
                ((rows, cfg.hidden_size), jnp.bfloat16),
                ((rows, k), jnp.int32),
                ((rows, k), jnp.float32),
                ((rows,), bool),
            )
        ]
        chain = jax.jit(lambda *given: self.layout.map(run, None, *given)[0], compiler_options=dict(STEP_OPTIONS))
        return chain.lower(*shapes)

    def measure(self, program: Any, cfg: ModelConfig, links: Links, repeats: int) -> dict[str, float]:
        """Microseconds of one exchange, and what its bytes and its two collectives would take by themselves."""
        if isinstance(program, Exception):
            raise program
        arguments = self.arguments(cfg)
        seconds = seconds_per_call(functools.partial(program, *arguments), repeats) / CHAIN
        ranks, kind = self.layout.ranks, self.layout.exchange
        dispatch, combine = exchange_bytes(ranks, self.tokens, cfg.hidden_size, cfg.num_experts_per_tok)
        if kind == "ragged":
            sent = _tokens_for_others(np.asarray(arguments[1]), ranks, cfg.n_routed_experts // ranks)
            dispatch, combine = (size * sent / ((ranks - 1) * self.tokens) for size in (dispatch, combine))
        there, back = ("all_gather", "reduce_scatter") if kind == "gather" else ("all_to_all", "all_to_all")
        floor = dispatch / links.bandwidth[there] + combine / links.bandwidth[back]
        latency = links.latency[there] + links.latency[back]
        return {
            "microseconds": seconds * 1e6,
            "megabytes": (dispatch + combine) / 1e6,
            "floor_microseconds": floor * 1e6,
            "latency_microseconds": latency * 1e6,
            "share_of_bandwidth": floor / seconds,
            "share_with_latency": (floor + latency) / seconds,
        }


def _tokens_for_others(experts: np.ndarray, ranks: int, local: int) -> float:
    """Tokens that a rank gets from all others if each travels once to each rank that it is wanted on; their mean."""
    wanted = ((experts // local)[:, :, None] == np.arange(ranks)).any(1)
    own = np.arange(len(experts)) // (len(experts) // ranks)
    wanted[np.arange(len(experts)), own] = False
    return wanted.sum() / ranks
