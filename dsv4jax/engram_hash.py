"""Engram n-gram hashing: constants and row ids, exact in 64-bit arithmetic on host and device (section 6).

JAX has no 64-bit integers by default, so the device version carries each product as two 32-bit halves.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt32

from dsv4jax.config import ModelConfig

DEAD = -1
"""Compressed id of a position that hashes as padding and hides everything further back: an image-span token, a token
the tokenizer does not know, a position before the start of the sequence."""

_LIMB_BITS = 7  # prime < 2^25: a remainder shifted by 7 bits stays below 2^32


@dataclasses.dataclass(frozen=True)
class HashConstants:
    """Constants of one Engram layer: one multiplier per token of the n-gram, one prime and offset per column."""

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]


@functools.lru_cache
def hash_constants(cfg: ModelConfig) -> tuple[HashConstants, ...]:
    """Multipliers, primes and row offsets of every Engram layer (section 6.2).

    Raises:
      ValueError: the tables of the config are smaller than the primes need, or a prime exceeds 2^25.
    """
    columns, orders = cfg.engram_hash_columns, cfg.engram_max_ngram_size
    bound = max(1, (2**63 - 1) // cfg.engram_compressed_vocab_size // 2)
    primes = _primes_above(cfg.engram_vocab_size - 1, columns * len(cfg.engram_layer_ids))
    constants = []
    for i, (layer, rows) in enumerate(zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True)):
        mine = primes[i * columns : (i + 1) * columns]
        if sum(mine) > rows or mine[-1] >= 1 << 25:
            raise ValueError(
                f"engram_num_embeddings[{i}] = {rows}: the {columns} primes above engram_vocab_size ="
                f" {cfg.engram_vocab_size} need {sum(mine)} rows, each prime below 2^25"
            )
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=orders, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(mine)[:-1]])
        constants.append(
            HashConstants(tuple(int(2 * v + 1) for v in draws), tuple(mine), tuple(int(o) for o in offsets))
        )
    return tuple(constants)


def rows_on_host(cfg: ModelConfig, history: Int[np.ndarray, "tokens orders"], pad: int) -> np.ndarray:
    """Table rows [tokens, engram_layers, columns] int64 in numpy.

    Args:
      history: compressed ids of each token and of those before it, newest first; DEAD where there is none.
      pad: compressed id of `engram_pad_token_id`.
    """
    dead = np.logical_or.accumulate(history == DEAD, axis=1)
    ids = np.where(dead, pad, history).astype(np.int64)
    heads = cfg.engram_n_heads
    out = []
    for c in hash_constants(cfg):
        state = ids[:, 0] * c.multipliers[0]
        columns = []
        for order in range(1, cfg.engram_max_ngram_size):
            state = state ^ (ids[:, order] * c.multipliers[order])
            for column in range((order - 1) * heads, order * heads):
                columns.append(state % c.primes[column] + c.offsets[column])
        out.append(np.stack(columns, -1))
    return np.stack(out, 1)


def rows_on_device(
    cfg: ModelConfig, history: Int32[Array, "tokens orders"], pad: Int32[Array, ""]
) -> Int32[Array, "tokens layers columns"]:
    """The same rows on the device, from pairs of 32-bit halves."""
    dead = jnp.cumsum(history == DEAD, axis=1) > 0
    ids = jnp.where(dead, pad, history).astype(jnp.uint32)
    heads = cfg.engram_n_heads
    out = []
    for c in hash_constants(cfg):
        high, low = _product(ids[:, 0], c.multipliers[0])
        columns = []
        for order in range(1, cfg.engram_max_ngram_size):
            h, l = _product(ids[:, order], c.multipliers[order])
            high, low = high ^ h, low ^ l
            span = slice((order - 1) * heads, order * heads)
            primes, offsets = np.uint32(c.primes[span]), np.uint32(c.offsets[span])
            columns.append(_modulo(high[:, None], low[:, None], primes) + offsets)
        out.append(jnp.concatenate(columns, -1).astype(jnp.int32))
    return jnp.stack(out, 1)


def _product(a: UInt32[Array, " n"], b: int) -> tuple[Array, Array]:
    """High and low 32 bits of a · b for a < 2^17 and a product below 2^63, by 16-bit digits of both."""
    high = low = jnp.zeros_like(a)
    for i, j in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)):
        p = (a >> 16 * i & 0xFFFF) * np.uint32(b >> 16 * j & 0xFFFF)
        shift = 16 * (i + j)
        if shift >= 32:
            high = high + (p << (shift - 32))
        else:
            total = low + (p << shift)
            carry = (total < low).astype(jnp.uint32)
            high, low = high + (p >> (32 - shift) if shift else 0) + carry, total
    return high, low


def _modulo(high: UInt32[Array, "n #m"], low: UInt32[Array, "n #m"], prime: np.ndarray) -> UInt32[Array, "n m"]:
    """(high · 2^32 + low) mod prime for primes below 2^25."""
    r = high % prime
    for shift in (25, 18, 11, 4):
        r = ((r << _LIMB_BITS) | (low >> shift & 0x7F)) % prime
    return ((r << 4) | (low & 0xF)) % prime


def _primes_above(start: int, count: int) -> list[int]:
    """The first `count` primes greater than `start`, by a segmented sieve."""
    found: list[int] = []
    low = start + 1
    while len(found) < count:
        high = low + 64 * count + 1000
        is_prime = np.ones(high - low, bool)
        for d in range(2, int(high**0.5) + 1):
            is_prime[max(d * d, -(-low // d) * d) - low :: d] = False
        found += [int(v) for v in np.flatnonzero(is_prime) + low if v > 1]
        low = high
    return found[:count]
