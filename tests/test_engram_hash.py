"""Engram hashing: constants, and rows on host and device against exact Python integers (architecture section 6)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    decode_batch,
    prefill_batch,
    with_engram_rows,
)
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, hash_constants, rows_on_device, rows_on_host

TOKENS = 12

# Sections 6.2 and 12, released model: layers 1 and 14.
MULTIPLIERS = [
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
]
PRIMES = [
    (16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
     16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
     16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463),
    (16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
     16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
     16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889),
]  # fmt: skip
LAST_OFFSETS = [368005705, 368015793]
HISTORY = (5000, 1234, 98765, 42)  # compressed ids, the current token first
ROWS = [
    (15549121, 16178507, 43943392, 58488443, 73729315, 89855913, 97990380, 115673586,
     131187499, 152741863, 164154468, 176291809, 204149706, 216407964, 226706836, 253725597,
     256855057, 283876358, 298799997, 315843517, 333125074, 351925824, 362144355, 376572428),
    (5298743, 17712081, 36129568, 59269676, 70898166, 80115406, 111956423, 121059875,
     135632518, 157432677, 171137657, 185545265, 207247213, 219781161, 238060699, 244021372,
     269729600, 282090245, 297535010, 305716049, 327729877, 337107606, 359063324, 374398490),
]  # fmt: skip


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def expected_rows(cfg, history, pad):
    """Section 6.3 in Python integers: one row per token, layer and column."""
    result = []
    for ids in history.tolist():
        layers = []
        for c in hash_constants(cfg):
            dead, state, row = False, 0, []
            for back, token in enumerate(ids):
                dead = dead or token == DEAD
                state ^= (pad if dead else token) * c.multipliers[back]
                assert state < 2**63
                if back:
                    for head in range(cfg.engram_n_heads):
                        column = cfg.engram_n_heads * (back - 1) + head
                        row.append(state % c.primes[column] + c.offsets[column])
            layers.append(row)
        result.append(layers)
    return np.array(result)


def on_host(cfg, history, pad):
    return rows_on_host(cfg, np.asarray(history), pad)


def on_device(cfg, history, pad):
    return np.asarray(rows_on_device(cfg, jnp.asarray(history, jnp.int32), jnp.int32(pad)))


def config(**fields):
    """A config whose tables are large enough for any primes."""
    layers = fields.get("engram_layer_ids", (1, 14))
    return ModelConfig(**{"engram_num_embeddings": (2**31 - 1,) * len(layers)} | fields)


@st.composite
def configs(draw):
    return config(
        engram_layer_ids=draw(st.sampled_from([(0,), (1, 14), (3, 14)])),
        engram_max_ngram_size=draw(st.integers(2, 4)),
        engram_n_heads=draw(st.sampled_from([1, 3])),
        engram_vocab_size=draw(st.integers(1, 40) | st.integers(41, 33_550_000)),
        engram_compressed_vocab_size=draw(st.integers(2, 99_092) | st.sampled_from([2, 3, 65_535, 65_537, 99_092])),
    )


@st.composite
def cases(draw):
    """A config, histories with dead places, and a pad value."""
    cfg = draw(configs())
    last = cfg.engram_compressed_vocab_size - 1
    ids = st.integers(0, last) | st.sampled_from([0, last, DEAD])
    rows = st.lists(ids, min_size=cfg.engram_max_ngram_size, max_size=cfg.engram_max_ngram_size)
    history = draw(st.lists(rows, min_size=TOKENS, max_size=TOKENS))
    return cfg, np.array(history, np.int32), draw(st.integers(0, last))


# Constants.


def test_constants_of_the_released_model():
    constants = hash_constants(ModelConfig())
    assert [c.multipliers for c in constants] == MULTIPLIERS
    assert [c.primes for c in constants] == PRIMES
    assert [c.offsets[-1] for c in constants] == LAST_OFFSETS
    assert [sum(c.primes) for c in constants] == [384006168, 384016682]


@settings(max_examples=25)
@given(configs())
@example(config(engram_vocab_size=7, engram_n_heads=1, engram_layer_ids=(0,)))
def test_primes_are_the_next_unused_ones_and_offsets_their_running_sum(cfg):
    constants = hash_constants(cfg)
    primes = [p for c in constants for p in c.primes]
    columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    assert [len(c.primes) for c in constants] == [columns] * len(cfg.engram_layer_ids)
    between = range(cfg.engram_vocab_size, primes[-1] + 1)
    assert primes == [n for n in between if is_prime(n)]
    for c in constants:
        assert list(c.offsets) == [sum(c.primes[:i]) for i in range(columns)]


@settings(max_examples=25)
@given(configs())
def test_multipliers_are_odd_and_products_stay_below_2_to_63(cfg):
    for c in hash_constants(cfg):
        assert len(c.multipliers) == cfg.engram_max_ngram_size
        assert all(m % 2 == 1 and m * (cfg.engram_compressed_vocab_size - 1) < 2**63 for m in c.multipliers)


def test_layers_and_vocabularies_have_multipliers_of_their_own():
    cfg = config(engram_layer_ids=(1, 2, 14))
    drawn = [c.multipliers for c in hash_constants(cfg)]
    assert len(set(drawn)) == 3 and drawn[0] == MULTIPLIERS[0] and drawn[2] == MULTIPLIERS[1]
    other = dataclasses.replace(cfg, engram_compressed_vocab_size=99_000)
    assert hash_constants(other)[0].multipliers != MULTIPLIERS[0]


def test_tables_smaller_than_the_primes_need_are_refused():
    with pytest.raises(ValueError, match=r"engram_num_embeddings\[1\] = 384016681.*384016682"):
        hash_constants(config(engram_num_embeddings=(384006168, 384016681)))
    with pytest.raises(ValueError, match=r"engram_num_embeddings\[0\] = 100"):
        hash_constants(config(engram_num_embeddings=(100, 384016682)))


LARGEST = {"engram_layer_ids": (1,), "engram_max_ngram_size": 2, "engram_n_heads": 1}


def test_primes_of_2_to_25_and_more_are_refused():
    largest = 33_554_393
    assert hash_constants(config(engram_vocab_size=largest, **LARGEST))[0].primes == (largest,)
    with pytest.raises(ValueError, match=r"engram_vocab_size = 33554394.*2\^25"):
        hash_constants(config(engram_vocab_size=largest + 1, **LARGEST))


# Rows.


@pytest.mark.parametrize("rows", [on_host, on_device], ids=["host", "device"])
def test_rows_of_section_12(rows):
    np.testing.assert_array_equal(rows(ModelConfig(), [HISTORY], 2), [ROWS])


@settings(max_examples=50)
@given(cases())
@example(
    (config(engram_vocab_size=33_554_393, engram_compressed_vocab_size=2, **LARGEST), np.ones((1, 2), np.int32), 1)
)
def test_host_and_device_agree_with_exact_integers(case):
    cfg, history, pad = case
    expected = expected_rows(cfg, history, pad)
    np.testing.assert_array_equal(on_host(cfg, history, pad), expected)
    np.testing.assert_array_equal(on_device(cfg, history, pad), expected)


def test_the_device_agrees_with_the_host_under_jit_on_many_tokens():
    cfg = ModelConfig()
    history = np.random.default_rng(0).integers(-1, 99_092, (4096, 4), dtype=np.int32)
    history[0], history[1] = 99_091, 0
    rows = jax.jit(lambda h: rows_on_device(cfg, h, jnp.int32(99_091)))(history)
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, on_host(cfg, history, 99_091))


@settings(max_examples=50)
@given(cases())
def test_rows_lie_inside_their_columns(case):
    cfg, history, pad = case
    rows = on_host(cfg, history, pad)
    for layer, c in enumerate(hash_constants(cfg)):
        assert (rows[:, layer] >= np.array(c.offsets)).all()
        assert (rows[:, layer] < np.array(c.offsets) + np.array(c.primes)).all()


@pytest.mark.parametrize("rows", [on_host, on_device], ids=["host", "device"])
def test_a_dead_place_hides_itself_and_everything_before_it(rows):
    """It reads as the pad value, which is a compressed id: any id will do, and it is not always 2."""
    cfg, pad = ModelConfig(), 777
    for place in range(4):
        dead, other, plain = ([*HISTORY] for _ in range(3))
        dead[place] = DEAD
        other[place:] = [DEAD, 9, 8, 7][: 4 - place]
        plain[place:] = [pad] * (4 - place)
        result = rows(cfg, [dead, other, plain], pad)
        np.testing.assert_array_equal(result[0], result[1])
        np.testing.assert_array_equal(result[0], result[2])
        before = 8 * max(0, place - 1)  # n-grams that end before the dead place
        np.testing.assert_array_equal(result[0][:, :before], np.array(ROWS)[:, :before])
        assert (result[0][:, before:] != np.array(ROWS)[:, before:]).any()
        assert (result[0] != rows(cfg, [dead], 2)[0]).any()


def test_an_ngram_sees_only_its_own_tokens():
    cfg = ModelConfig()
    for place in range(1, 4):
        changed = [*HISTORY]
        changed[place] += 1
        same = on_device(cfg, [changed], 2)[0] == np.array(ROWS)
        assert same[:, : 8 * (place - 1)].all()
        assert not same[:, 8 * (place - 1) :].all(1).any()


# Token ids on their way to the hash.


class Rows:
    """Stands for tables on the host: answers with the rows that it is asked for."""

    @staticmethod
    def lookup(rows):
        return (rows,)


@settings(max_examples=25)
@given(
    ids=st.lists(st.integers(0, 39), min_size=1, max_size=24),
    images=st.sets(st.integers(0, 23)),
    cuts=st.sets(st.integers(1, 23)),
    decoded=st.integers(0, 6),
)
def test_host_rows_follow_from_the_tokens_before_alone(ids, images, cuts, decoded):
    """Not from chunks, tiles, neighbours in the batch, or where prefill ends and decoding begins."""
    cfg = config(engram_layer_ids=(1,), engram_vocab_size=50, engram_compressed_vocab_size=30, hidden_size=64)
    token_map, cache_cfg = (np.arange(cfg.vocab_size, dtype=np.int32) * 7 % 30), CacheConfig(3, 8)
    prompt = np.array(ids, np.int32)
    mask = np.isin(np.arange(len(prompt)), [*images])
    compressed = np.where(mask, DEAD, token_map[prompt]).tolist()
    history = np.array([([DEAD] * 4 + compressed)[p + 1 : p + 5][::-1] for p in range(len(prompt))])
    expected = rows_on_host(cfg, history, int(token_map[cfg.engram_pad_token_id]))

    def rows(batch, row):
        begin, length = batch.offsets[row], batch.lengths[row]
        return with_engram_rows(cfg, batch, token_map, Rows()).engram_rows[0][begin : begin + length]

    other = PrefillChunk(np.arange(5, dtype=np.int32), 1, 5, slot=2, pages=[7])
    end = max(1, len(prompt) - decoded)
    ends = [*sorted(cut for cut in cuts if cut < end), end]
    for start, stop in zip([0, *ends], ends, strict=False):
        embeddings = np.zeros((mask[start:stop].sum(), 64), np.float32)
        chunk = PrefillChunk(prompt, start, stop, 0, [0], image_mask=mask, image_embeddings=embeddings)
        for row, chunks in enumerate(([chunk, other], [other, chunk])):
            batch = prefill_batch(cfg, cache_cfg, chunks, PrefillBucket(48, 2, 1, tile=4, images=24))
            np.testing.assert_array_equal(rows(batch, row), expected[start:stop])
    for start in range(end, len(prompt)):
        if mask[start:].any():  # images are in prompts only
            break
        for stop in range(start + 1, len(prompt) + 1):
            before = np.where(mask, -1, prompt)[:start][::-1].tolist()
            tokens = DecodeTokens(prompt[start:stop].tolist(), start, 1, [1], history=before[:3])
            short = DecodeTokens([3], 0, 0, [0])
            for row, requests in enumerate(([tokens, short], [short, tokens])):
                batch = decode_batch(cfg, cache_cfg, requests, DecodeBucket(2, 1, tokens_per_request=6))
                np.testing.assert_array_equal(rows(batch, row), expected[start:stop])


@pytest.mark.parametrize("token", [-1, -129280, 129280, 129281])
def test_ids_outside_the_vocabulary_are_refused_before_any_lookup(token):
    cfg = ModelConfig()
    with pytest.raises(ValueError, match=f"token id {token} "):
        chunk = PrefillChunk(np.array([5, token, 6]), 0, 3, slot=0, pages=[0])
        prefill_batch(cfg, CacheConfig(1, 1), [chunk], PrefillBucket(16, 1, 1))
    with pytest.raises(ValueError, match=f"token id {token} "):
        decode_batch(cfg, CacheConfig(1, 1), [DecodeTokens([5, token], 3, 0, [0])], DecodeBucket(1, 1, 2))
