"""Smaller relatives of the released configuration, for machines that cannot hold it."""

import dataclasses
from typing import Any

from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import hash_constants

_FEWEST_LAYERS = 6


def reduced_config(layers: int, **overrides: Any) -> ModelConfig:
    """The released configuration with `layers` backbone layers and every kind of layer; `reduced_config(40)` is the
    released one.

    Layers 0 and 1 are window-only, layer 1 with Engram; ratio 2 up to half of the layers with a KV source every six;
    then ratio 1 from a single KV source, which is the candidate source, with Reindex and Reuse layers.

    Args:
      layers: 6 to 40.
      overrides: other fields of `ModelConfig`. Table sizes follow from `engram_vocab_size` unless given.

    Raises:
      ValueError: too few or too many layers, or overrides that contradict the rest (see `ModelConfig`).
    """
    released = ModelConfig()
    if not _FEWEST_LAYERS <= layers <= released.num_hidden_layers:
        raise ValueError(f"layers = {layers}: allowed are {_FEWEST_LAYERS} to {released.num_hidden_layers}")
    half = layers // 2
    sources = (*range(2, half, 6), half)
    reindex_every = 4 if layers - half > 4 else 2
    engram = tuple(i for i in released.engram_layer_ids if i < half)
    structure = {
        "num_hidden_layers": layers,
        "compress_ratios": (0,) * 2
        + (2,) * (half - 2)
        + (1,) * (layers - half)
        + (0,) * released.num_nextn_predict_layers,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": (*sources, *range(half + reindex_every, layers, reindex_every)),
        "candidate_source_layer_id": half,
        "engram_layer_ids": engram,
        "engram_num_embeddings": released.engram_num_embeddings[: len(engram)],
        "dspark_target_layer_ids": tuple(range(layers - len(released.dspark_target_layer_ids), layers)),
    }
    cfg = dataclasses.replace(released, **structure | overrides)
    return cfg if "engram_num_embeddings" in overrides else with_fitted_tables(cfg)


def with_fitted_tables(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with `engram_num_embeddings` as small as its hash primes allow (architecture section 6.2)."""
    unbounded = dataclasses.replace(cfg, engram_num_embeddings=(2**62,) * len(cfg.engram_layer_ids))
    return dataclasses.replace(cfg, engram_num_embeddings=tuple(sum(c.primes) for c in hash_constants(unbounded)))
