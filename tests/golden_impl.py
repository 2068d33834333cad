"""Our model behind the interface of the golden-data checker: numpy arrays in, numpy arrays out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4jax.batch import DecodeBucket, DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, rows_on_device, rows_on_host
from dsv4jax.model.hyper_connections import sinkhorn
from dsv4jax.model.indexer import candidate_blocks
from dsv4jax.model.norm import rms_norm
from dsv4jax.model.rope import frequencies
from dsv4jax.numerics import Numerics
from dsv4jax.quant import qdq_fp8, qdq_mxfp4, qdq_nvfp4
from dsv4jax.steps import decode_step, forward, prefill_step
from dsv4jax.weights import Fp8Weight, Mxfp4Weight, dequantize

LENGTH = 192
"""Every sequence is padded to this many tokens, so that one program serves all lengths."""
PAGES = LENGTH // CacheConfig.page_size
PREFILL = PrefillBucket(tokens=LENGTH, requests=1, pages=PAGES)
DECODE = DecodeBucket(requests=1, pages=PAGES)
CACHE = CacheConfig(slots=1, pages=PAGES)


class Implementation:
    """The public API of the package, one method per check."""

    def __init__(self, cfg: ModelConfig, params: dict[str, Any], numerics: Numerics):
        self.cfg, self.params, self.numerics = cfg, params, numerics
        self.functions = FUNCTIONS

    def forward(self, ids: np.ndarray, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Logits [B, S, V] and streams [L, B, S, M, H] entering each block."""
        length = ids.shape[1]
        mask = np.ones(ids.shape, bool) if mask is None else mask.astype(bool)
        ids, mask = (np.pad(a, [(0, 0), (0, LENGTH - length)]) for a in (ids, mask))
        out = forward(self.params, ids, cfg=self.cfg, mask=mask, numerics=self.numerics, collect_streams=True)
        return {
            "logits": np.asarray(out.logits[:, :length], np.float32),
            "streams": np.asarray(out.streams[:, :, :length], np.float32),
        }

    def decode(self, ids: np.ndarray, prefill: int) -> np.ndarray:
        """Logits [S, V] through the caches: a prompt of `prefill` tokens, then one token a step; NaN before its end."""
        prompt, cfg, pages = ids[0], self.cfg, range(PAGES)
        static = {"cfg": cfg, "numerics": self.numerics}
        logits = np.full((len(prompt), cfg.vocab_size), np.nan, np.float32)
        cache = init_cache(cfg, CACHE, self.numerics)
        chunk = PrefillChunk(prompt[:prefill], 0, prefill, slot=0, pages=pages)
        cache, out = prefill_step(self.params, cache, prefill_batch(cfg, CACHE, [chunk], PREFILL), **static)
        logits[prefill - 1] = out.logits[0, 0]
        for position in range(prefill, len(prompt)):
            token = DecodeTokens([int(prompt[position])], position, slot=0, pages=pages)
            cache, out = decode_step(self.params, cache, decode_batch(cfg, CACHE, [token], DECODE), **static)
            logits[position] = out.logits[0, 0]
        return logits

    def engram_rows(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Table rows [B, S, engram_layers, columns]; mask False = image or padding. Host and device must agree."""
        token_map = np.asarray(self.params["engram_token_map"])
        compressed = token_map[ids] if mask is None else np.where(mask, token_map[ids], DEAD)
        history = np.stack([ngrams(row, self.cfg.engram_max_ngram_size) for row in compressed])
        pad = int(token_map[self.cfg.engram_pad_token_id])
        on_host = np.stack([rows_on_host(self.cfg, row, pad) for row in history])
        on_device = np.stack([rows_on_device(self.cfg, jnp.asarray(row), jnp.int32(pad)) for row in history])
        assert np.array_equal(on_host, on_device), "rows_on_host and rows_on_device differ"
        return on_host


def ngrams(compressed: np.ndarray, size: int) -> np.ndarray:
    """[tokens, size]: compressed id of each token and of those before it, newest first; DEAD before the start."""
    padded = np.concatenate([np.full(size - 1, DEAD, np.int32), compressed.astype(np.int32)])
    return np.lib.stride_tricks.sliding_window_view(padded, size)[:, ::-1].copy()


def make_model(checkpoint_dir: str | Path, *, dtype: str, cache_quant: bool) -> Implementation:
    """The model of a checkpoint directory; like the reference it leaves activations unquantised."""
    cfg = ModelConfig.from_checkpoint(checkpoint_dir)
    numerics = Numerics(dtype=jnp.dtype(dtype).type, quantize_activations=False, quantize_cache=cache_quant)
    return Implementation(cfg, load_params(checkpoint_dir, cfg, progress=False), numerics)


def candidate_mask(scores: np.ndarray, visible: np.ndarray, blocks: int, size: int) -> np.ndarray:
    """Entries of the kept blocks, from scores [batch, queries, entries] and visible counts [batch, queries, 1]."""
    rows = [
        candidate_blocks(jnp.asarray(s), jnp.asarray(v)[:, 0], blocks, size)
        for s, v in zip(scores, visible, strict=True)
    ]
    return np.repeat(np.stack(rows), size, -1)[..., : scores.shape[-1]]


def _dequant_e4m3(block: tuple[int, int]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def run(stored, scale):
        elements = jnp.asarray(stored.view(jnp.float8_e4m3fn))
        return np.asarray(dequantize(Fp8Weight(elements, jnp.asarray(scale), block), jnp.float32))

    return run


def _yarn_angles(positions: np.ndarray) -> np.ndarray:
    return positions[..., None].astype(np.float32) * frequencies(ModelConfig(), compressed=True)


FUNCTIONS = {
    "cache_fp8": lambda x: np.asarray(qdq_fp8(jnp.asarray(x))),
    "cache_mxfp4": lambda x: np.asarray(qdq_mxfp4(jnp.asarray(x))),
    "cache_nvfp4": lambda x: np.asarray(qdq_nvfp4(jnp.asarray(x))),
    "dequant_fp8": _dequant_e4m3((32, 32)),
    "dequant_fp4": lambda stored, scale: np.asarray(
        dequantize(Mxfp4Weight(jnp.asarray(stored), jnp.asarray(scale)), jnp.float32)
    ),
    "dequant_engram": _dequant_e4m3((1, 32)),
    "sinkhorn": lambda x, iterations, eps: np.asarray(sinkhorn(jnp.asarray(x), iterations, eps)),
    "rmsnorm": lambda x, weight, eps: np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), eps)),
    "candidates": candidate_mask,
    "yarn_angles": _yarn_angles,
}
