"""What the batch builders refuse, before anything runs."""

import dataclasses

import numpy as np
import pytest

from dsv4jax.batch import (
    NEXT_TOKEN,
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    decode_batch,
    prefill_batch,
)
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
        (DecodeTokens([-2], 5, 0, [0]), "request 0: token id -2"),
        (DecodeTokens([NEXT_TOKEN, NEXT_TOKEN], 5, 0, [0]), "request 0: token id -1"),
        (DecodeTokens([NEXT_TOKEN, CFG.vocab_size], 5, 0, [0]), "request 0: token id 129280"),
        (DecodeTokens([2**70], 5, 0, [0]), "must be a flat sequence of integers"),
        (DecodeTokens([1], -3, 0, [0]), "start = -3 is negative"),
        (DecodeTokens([1.5], 5, 0, [0]), "must be a flat sequence of integers"),
        (DecodeTokens([1], 5, 0, [0], history=[-7]), "history: token id -7"),
        (DecodeTokens([1], 64, 0, [0]), "1 pages of 64 do not cover 65 tokens"),
        (DecodeTokens([1], 5, 0, [32]), "page 32 is not in"),
        (DecodeTokens([1], 70, 0, np.int32([0, -1])), "request 0: page -1 is not in"),
        (DecodeTokens([1], 5, 0, np.array([2**32])), "page 4294967296 is not in"),
        (DecodeTokens([1], 5, 0, [1.0]), "pages must be a flat sequence of integers, got float64"),
        (DecodeTokens([1], 5, 0, np.zeros((1, 1), np.int32)), "pages must be a flat sequence"),
        (DecodeTokens([1], 256, 0, [0, 1, 2, 3, 4]), "exceed the bucket's context of 256"),
    ],
)
def test_bad_decode_requests(request_, message):
    with pytest.raises(ValueError, match=message):
        decode_batch(CFG, CACHE, [request_], DecodeBucket(requests=2, pages=4, tokens_per_request=6))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (DecodeTokens([5], 5, 4, [9]), "request 1: slot 4 is taken or not below 4"),
        (DecodeTokens([5], 5, 0, [9]), "request 1: slot 0 is taken"),
        (DecodeTokens([5, -1], 5, 1, [9]), "request 1: token id -1"),
        (DecodeTokens([5], 5, 1, np.int32([40])), "request 1: page 40"),
        (DecodeTokens([5], 5, 1, [9], history=[3, -9]), "request 1: history: token id -9"),
        (DecodeTokens([5, 2.5], 5, 1, [9]), "request 1: token ids must be a flat sequence of integers, got float64"),
    ],
)
def test_the_bad_one_among_good_requests_is_named(bad, message):
    good = [DecodeTokens([NEXT_TOKEN, 4], 5, slot, [7 + slot]) for slot in (0, 2)]
    bucket = DecodeBucket(requests=3, pages=4, tokens_per_request=3)
    decode_batch(CFG, CACHE, good, bucket)
    with pytest.raises(ValueError, match=message):
        decode_batch(CFG, CACHE, [good[0], bad, good[1]], bucket)
    with pytest.raises(ValueError, match="more than 1 requests"):
        decode_batch(CFG, CACHE, good, dataclasses.replace(bucket, requests=1))


def test_decode_rows_hold_what_the_requests_say():
    requests = [
        DecodeTokens([5], 130, 3, np.arange(3, 7, dtype=np.int32)),
        DecodeTokens((NEXT_TOKEN, 8, 9), 1, 1, range(10, 12), history=[4]),
        DecodeTokens(np.int32([6, 7]), 2, 0, [20], history=(2, -1)),
    ]
    batch = decode_batch(CFG, CACHE, requests, DecodeBucket(requests=4, pages=4, tokens_per_request=3))
    unused = np.iinfo(np.int32).max
    assert batch.tokens.reshape(4, 3).tolist() == [[5, 0, 0], [NEXT_TOKEN, 8, 9], [6, 7, 0], [0, 0, 0]]
    assert batch.page_table.tolist() == [
        [3, 4, 5, unused], [10, unused, unused, unused], [20, unused, unused, unused], [unused] * 4
    ]  # fmt: skip
    assert batch.slots.tolist() == [3, 1, 0, CACHE.slots]
    assert batch.starts.tolist() == [130, 1, 2, 0]
    assert batch.lengths.tolist() == [1, 3, 2, 0]
    assert batch.offsets.tolist() == [0, 3, 6, 9]
    assert batch.history.tolist() == [[-2, -2, -2], [4, -1, -1], [2, -1, -1], [-1, -1, -1]]
    for array in (batch.tokens, batch.page_table, batch.slots, batch.starts, batch.lengths, batch.offsets):
        assert array.dtype == np.int32


def test_prompt_targets_are_the_tokens_that_follow():
    prompt = np.arange(100, 140, dtype=np.int32)
    chunks = [
        PrefillChunk(prompt, 0, 5, slot=0, pages=[0]),
        PrefillChunk(prompt, 30, 40, slot=1, pages=[1], cached=33),
        PrefillChunk(prompt[:20], 10, 14, slot=2, pages=[2], cached=20),
    ]
    bucket = PrefillBucket(tokens=48, requests=3, pages=1, prompt_logprobs=True)
    targets = prefill_batch(CFG, CACHE, chunks, bucket).prompt_targets.reshape(3, 16)
    assert targets[0].tolist() == [101, 102, 103, 104, 105, *[-1] * 11]
    assert targets[1].tolist() == [-1, -1, -1, *range(134, 140), *[-1] * 7]
    assert targets[2].tolist() == [-1] * 16
    plain = dataclasses.replace(bucket, prompt_logprobs=False)
    assert prefill_batch(CFG, CACHE, chunks, plain).prompt_targets.size == 0


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
        (PrefillBucket, {"replay": "bounded", "prompt_logprobs": True}, "prompt_logprobs = True: needs replay"),
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
