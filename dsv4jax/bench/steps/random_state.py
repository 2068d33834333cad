"""Models and caches of random numbers, drawn on the device: there, weights of tens of gigabytes take seconds."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int

from dsv4jax.cache import COMPRESSED_ENTRY, INDEX_KEY, WINDOW_KEY, Cache, CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.packing import pack_params
from dsv4jax.params import Params, abstract_params, in_memory, leaf_shardings, named_leaves
from dsv4jax.quant import BLOCK
from dsv4jax.weights import Fp8Weight
from sharding import SINGLE, Layout


def random_params(cfg: ModelConfig, numerics: Numerics, layout: Layout = SINGLE) -> Params:
    """Parameters of roughly normal size on the devices of the layout, packed if `numerics` want it.

    Of emulated ranks, one rank's share of the experts is drawn; everything else is whole.

    Raises:
      ValueError: experts do not divide over the ranks.
    """
    ranks = layout.emulated_ranks
    for name in ("n_routed_experts", "dspark_n_routed_experts"):
        if getattr(cfg, name) % ranks:
            raise ValueError(f"emulated_ranks = {ranks}: must divide {name} = {getattr(cfg, name)}")
    abstract = in_memory(abstract_params(cfg), layout)
    shardings = leaf_shardings(abstract, layout)
    leaves = []
    for i, (name, spec) in enumerate(named_leaves(abstract)):
        draw = _drawing(shardings[name])
        if spec.derived:
            token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
            leaves.append(jax.device_put(token_map, shardings[name]))
            continue
        shape, experts = spec.shape, ".experts.*." in name
        if experts:
            shape = (shape[0] // ranks, *shape[1:])
        inputs = shape[-1] * {"F8_E8M0": BLOCK, "I8": 2}.get(spec.stored, 1)
        exponent = 127 + round(math.log2(inputs**-0.5 / (3 if experts else 64)))
        one = "norm" in name or name.endswith(("q_weight", "k_weight"))
        mean, deviation = (1, 0.2) if one else (0, inputs**-0.5)
        if name.endswith(("gate.bias", "gate.bias_vl")):
            deviation = 0  # Even routing.
        leaves.append(draw(jax.random.key(i, impl="rbg"), shape, spec.stored, spec.dtype, exponent, mean, deviation))
    params = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return pack_params(params, layout) if numerics.implementation == "pallas" else params


@functools.cache
def _drawing(sharding: Sharding) -> Callable[..., Array]:
    """`_draw` on the devices of a sharding."""
    return jax.jit(_draw, static_argnums=(1, 2, 3), out_shardings=sharding)


def _draw(key, shape, stored, dtype, exponent, mean, deviation):
    """Codes of any value, scales around 2^(exponent - 127), or normal numbers."""
    if stored == "I8":
        return jax.random.bits(key, shape, jnp.uint8)
    if stored == "F8_E8M0":
        return (exponent - 1 + jax.random.bits(key, shape, jnp.uint8) % 3).astype(jnp.uint8)
    normal = jax.random.normal(key, shape, jnp.bfloat16)
    if stored == "F8_E4M3":
        return (normal * 64).astype(jnp.float8_e4m3fn)
    return (mean + deviation * normal).astype(dtype)


def random_cache(cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics, layout: Layout = SINGLE) -> Cache:
    """A cache of all ranks whose records are those of normal vectors.

    Pools repeat a few random pages, so that large ones need little memory while they are made.
    """
    cache = init_cache(cfg, cache_cfg, numerics, layout)

    made = _drawing_records(layout.by_rank)

    def fill(record_format, arrays, n, seed):
        keys = jax.random.split(jax.random.key(seed), len(arrays))
        return tuple(made(key, record_format, a.shape[:2], n, numerics) for a, key in zip(arrays, keys, strict=True))

    return cache.replace(
        entries=fill(COMPRESSED_ENTRY, cache.entries, cfg.head_dim, 0),
        index_keys=fill(INDEX_KEY, cache.index_keys, cfg.index_head_dim, 1),
        windows=fill(WINDOW_KEY, cache.windows, cfg.head_dim, 2),
        draft_windows=fill(WINDOW_KEY, cache.draft_windows, cfg.head_dim, 3),
    )


@functools.cache
def _drawing_records(sharding: Sharding | None) -> Callable[..., Array]:
    return jax.jit(_draw_records, static_argnums=(1, 2, 3, 4), out_shardings=sharding)


def _draw_records(key, record_format, shape, n, numerics):
    drawn = min(shape[0], 1024)
    records = record_format.store(jax.random.normal(key, (drawn, shape[1], n), numerics.dtype), numerics)
    return records[jnp.arange(shape[0]) % drawn]


class RandomHostTables:
    """Engram tables of random rows in host memory, of the sizes of `cfg`."""

    def __init__(self, cfg: ModelConfig):
        rng, dim = np.random.default_rng(0), cfg.engram_head_dim
        self._tables = []
        for rows in cfg.engram_num_embeddings:
            # Codes below 0x70 are finite.
            weight = rng.integers(0, 0x70, (rows, dim), np.uint8)
            self._tables.append((weight, rng.integers(114, 117, (rows, dim // BLOCK), np.uint8)))

    def lookup(self, rows: Int[np.ndarray, "tokens layers columns"]) -> tuple[Fp8Weight, ...]:
        """See `EngramTables`."""
        found = []
        for i, (weight, scale) in enumerate(self._tables):
            taken = weight.take(rows[:, i], axis=0).view(jnp.float8_e4m3fn)
            found.append(Fp8Weight(taken, scale.take(rows[:, i], axis=0), block=(1, BLOCK)))
        return tuple(found)
