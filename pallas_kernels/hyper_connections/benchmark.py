"""Benchmark cases of a hyper-connection site, beside XLA's lowering of the reference."""

import functools

import jax
import jax.numpy as jnp

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Residual, predict_mix
from dsv4jax.quant import BLOCK
from pallas_kernels.hyper_connections import SiteWeights, hyper_connection_site, split_fp32
from pallas_kernels.hyper_connections.arg_specs import HIDDEN, STREAMS, TOKENS
from pallas_kernels.timing import Case

MIXES = STREAMS * (2 + STREAMS)


def cases() -> list[Case]:
    """Every number of tokens with the kernel and with the reference."""
    return [_case(tokens, name) for tokens in TOKENS for name in ("pallas", "reference")]


def _case(tokens: int, implementation: str) -> Case:
    def make():
        run = functools.partial(hyper_connection_site, cfg=ModelConfig(), implementation=implementation)
        draw = jax.jit(functools.partial(_arguments, tokens))
        # The streams of a decode step are still in the cache, as they are here.
        return jax.jit(run), [draw(jax.random.key(seed)) for seed in range(2)]

    label = "" if implementation == "pallas" else ", XLA"
    return Case(
        name=f"hyper-connection site {tokens} tokens{label}",
        make=make,
        bytes=fewest_bytes(tokens),
        flops=2.0 * tokens * 3 * MIXES * STREAMS * HIDDEN,
    )


def fewest_bytes(tokens: int) -> float:
    """Streams in and out, output, the next input in both forms, two mixes, and the projection, each moved once."""
    per_channel = 2 * STREAMS * 2 + 2 + 2 + 1 + 4 / BLOCK
    return tokens * (HIDDEN * per_channel + 2 * MIXES * 4) + 3 * MIXES * STREAMS * HIDDEN * 2


def _arguments(tokens: int, key: jax.Array) -> tuple[Residual, SiteWeights]:
    streams, output, fn, base, norm = jax.random.split(key, 5)
    x = jax.random.normal(streams, (tokens, STREAMS, HIDDEN), jnp.bfloat16)
    fn = jax.random.normal(fn, (MIXES, STREAMS * HIDDEN)) / 50
    base, scale = jax.random.normal(base, (MIXES,)), jnp.array([0.7, 0.9, 1.3])
    norm = 1 + jax.random.normal(norm, (HIDDEN,), jnp.bfloat16) / 8
    output = jax.random.normal(output, (tokens, HIDDEN), jnp.bfloat16)
    residual = Residual(x, output, predict_mix(x, fn, base, scale, ModelConfig()))
    return residual, SiteWeights(split_fp32(fn), base, scale, norm)
