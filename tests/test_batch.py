"""What the batch builders refuse, before anything runs."""

import dataclasses

import numpy as np
import pytest

from dsv4jax.batch import DecodeBucket, DecodeTokens, PrefillBucket, PrefillChunk, decode_batch, prefill_batch
from dsv4jax.batch import replay_start as resume
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig

CFG = ModelConfig()
CACHE = CacheConfig(slots=4, pages=32)
BUCKET = PrefillBucket(tokens=128, requests=2, pages=4)
CHUNK = PrefillChunk(np.arange(100, dtype=np.int32), 0, 100, slot=1, pages=[3, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 100}, r"chunk 0: 100\.\.100 is not inside a prompt of 100 tokens"),
        ({"end": 101}, r"0\.\.101 is not inside"),
        ({"start": -1}, r"-1\.\.100 is not inside"),
        ({"slot": 4}, "slot 4 is taken or not below 4"),
        ({"pages": [3]}, "1 pages of 64 do not cover 100 tokens"),
        ({"pages": [3, 32]}, r"page 32 is not in 0\.\.31"),
        ({"pages": [-1, 3]}, "page -1 is not in"),
        ({"prompt": np.full(100, CFG.vocab_size, np.int32)}, "token id 129280 is not in"),
        ({"prompt": np.arange(100) + 2**32}, "token id 4294967296 is not in"),
        ({"prompt": np.arange(100) / 2}, "must be a flat sequence of integers, got float64"),
        ({"cached": 101}, r"cached = 101 is not in 0\.\.100"),
        ({"cached": -1}, "cached = -1"),
        ({"window_floor": 1}, r"window_floor = 1 is not in 0\.\.0"),
        ({"image_mask": np.ones(100, int)}, "one bool per prompt token, 100"),
        ({"image_mask": np.ones(99, bool)}, "one bool per prompt token"),
        ({"image_embeddings": np.zeros((1, 5120), np.float32)}, "image_mask must be"),
        ({"image_mask": np.ones(100, bool)}, r"image_embeddings \(0, 5120\), expected \(100, 5120\)"),
        (
            {"image_mask": np.ones(100, bool), "image_embeddings": np.zeros((100, 5120), np.float32)},
            "100 image tokens do not fit a bucket of 0",
        ),
    ],
)
def test_bad_chunks(changes, message):
    with pytest.raises(ValueError, match=message):
        prefill_batch(CFG, CACHE, [dataclasses.replace(CHUNK, **changes)], BUCKET)


def test_chunks_that_do_not_fit_together():
    other = dataclasses.replace(CHUNK, slot=2, pages=[6, 7])
    with pytest.raises(ValueError, match="request 1: the batch does not fit a bucket of 128 tokens"):
        prefill_batch(CFG, CACHE, [CHUNK, other], BUCKET)
    with pytest.raises(ValueError, match="request 1: slot 1 is taken"):
        prefill_batch(CFG, CACHE, [dataclasses.replace(CHUNK, end=10)] * 2, BUCKET)
    with pytest.raises(ValueError, match="more than 2 requests"):
        chunks = [dataclasses.replace(CHUNK, end=10, slot=slot) for slot in range(3)]
        prefill_batch(CFG, CACHE, chunks, BUCKET)
    with pytest.raises(ValueError, match="exceed the bucket's context of 64"):
        prefill_batch(CFG, CACHE, [CHUNK], dataclasses.replace(BUCKET, pages=1))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (DecodeTokens([], 5, 0, [0]), "0 tokens, the bucket takes 1 to 6"),
        (DecodeTokens([1] * 7, 5, 0, [0]), "7 tokens"),
        (DecodeTokens([-1], 5, 0, [0]), "token id -1"),
        (DecodeTokens([1], -3, 0, [0]), "start = -3 is negative"),
        (DecodeTokens([1.5], 5, 0, [0]), "must be a flat sequence of integers"),
        (DecodeTokens([1], 5, 0, [0], history=[-7]), "history: token id -7"),
        (DecodeTokens([1], 64, 0, [0]), "1 pages of 64 do not cover 65 tokens"),
        (DecodeTokens([1], 5, 0, [32]), "page 32 is not in"),
        (DecodeTokens([1], 256, 0, [0, 1, 2, 3, 4]), "exceed the bucket's context of 256"),
    ],
)
def test_bad_decode_requests(request_, message):
    with pytest.raises(ValueError, match=message):
        decode_batch(CFG, CACHE, [request_], DecodeBucket(requests=2, pages=4, tokens_per_request=6))


def test_the_last_position_of_the_context_is_allowed():
    pages = CFG.max_position_embeddings // 64
    cache, bucket = CacheConfig(slots=1, pages=pages), DecodeBucket(requests=1, pages=pages + 1)
    last = DecodeTokens([5], CFG.max_position_embeddings - 1, 0, range(pages))
    assert decode_batch(CFG, cache, [last], bucket).starts[0] == CFG.max_position_embeddings - 1
    with pytest.raises(ValueError, match="exceed the bucket's context of 1048576"):
        decode_batch(CFG, cache, [dataclasses.replace(last, tokens=[5, 6])], DecodeBucket(1, pages + 1, 2))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (PrefillBucket, {"tokens": 100}, "multiple of tile = 16"),
        (PrefillBucket, {"replay": "partial"}, "must be 'exact' or 'bounded'"),
        (PrefillBucket, {"requests": 0}, "requests = 0"),
        (PrefillBucket, {"images": -1}, "images = -1"),
        (DecodeBucket, {"tokens_per_request": 0}, "tokens_per_request = 0"),
        (CacheConfig, {"page_size": 63}, "multiple of 2"),
        (CacheConfig, {"slots": 0}, "slots = 0"),
    ],
)
def test_bad_shapes(kind, changes, message):
    good = {
        PrefillBucket: {"tokens": 128, "requests": 1, "pages": 1},
        DecodeBucket: {"requests": 1, "pages": 1},
        CacheConfig: {"slots": 1, "pages": 1},
    }
    with pytest.raises(ValueError, match=message):
        kind(**(good[kind] | changes))


def test_replay_covers_what_missing_window_keys_depend_on():
    """One window in bounded replay; in exact replay one window of reach per layer that must be right (section 9.4)."""
    assert resume(CFG, 20_000, 10_000, "bounded", "bounded") == 10_000 - 128
    assert resume(CFG, 20_000, 10_000, "exact", "bounded") == 10_000 - 20 * 127
    assert resume(CFG, 10_001, 10_000, "exact", "bounded") == 10_001 - 128 - 20 * 127
    assert resume(CFG, 20_000, 10_000, "exact", "exact") == 10_000 - 40 * 127
    assert resume(CFG, 200, 100, "bounded", "exact") == resume(CFG, 9000, 2000, "exact", "exact") == 0
