"""The step functions: any way of serving a request gives what one whole-sequence run gives."""

import dataclasses
import functools
import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import FLOAT32, NOQUANT, drafting_model, small_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import GREEDY, SMALL_DECODE, SMALL_PREFILL, Request, Server

import dsv4jax.cache
from dsv4jax.batch import NEXT_TOKEN, DecodeBucket, PrefillBucket, replay_start
from dsv4jax.engram_hash import DEAD
from dsv4jax.model import layout
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.quant import qdq_fp8, qdq_mxfp4, qdq_nvfp4
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import decode_step, forward, prefill_step, set_allowed_tokens

LENGTH = 120
TOLERANCE = 1e-4
PAGES = SMALL_PREFILL.pages


@pytest.fixture(scope="module")
def tiny():
    return small_model()


@pytest.fixture(scope="module")
def quantized():
    return small_model(quantized=True)


@pytest.fixture(scope="module")
def shallow():
    """One of everything that a step leaves behind, for what does not depend on how layers share it."""
    return drafting_model()


@pytest.fixture(scope="module")
def shallow_quantized():
    return drafting_model(quantized=True)


@pytest.fixture(scope="module")
def sequences(tiny):
    """Three token sequences and their logits at every position."""
    return with_logits(tiny)


@pytest.fixture(scope="module")
def shallow_sequences(shallow):
    return with_logits(shallow)


def with_logits(model):
    known = int((np.asarray(model.params["engram_token_map"]) >= 0).sum())
    tokens = np.random.default_rng(5).integers(3, known, (3, LENGTH)).astype(np.int32)
    return tokens, np.asarray(forward(model.params, tokens, cfg=model.cfg, numerics=NOQUANT).logits)


def serve(tiny, numerics=NOQUANT, prefill=SMALL_PREFILL, decode=SMALL_DECODE, **kwargs) -> Server:
    return Server(tiny.cfg, tiny.params, numerics, prefill=prefill, decode=decode, **kwargs)


def distance(output, row: int, expected: np.ndarray) -> float:
    """Largest difference of the first logits of a row of a step from the expected ones."""
    return float(np.abs(np.asarray(output.logits)[row, : len(expected)] - expected).max())


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_equals_the_whole_sequence_run(tiny, sequences, data):
    """Chunks, neighbours, slots, page numbers, padding, earlier owners (poisoned), several tokens per decode step and
    rejected drafts: none of it moves a request's logits."""
    tokens, expected = sequences
    draw = data.draw
    count = draw(st.integers(1, 3), label="requests")
    server = serve(tiny, poison=True)
    numbers = draw(st.permutations(range(64)), label="pages")
    slots = draw(st.permutations(range(3)), label="slots")
    requests, done = [], []
    for i in range(count):
        length = draw(st.integers(1, LENGTH - 20), label="prompt")
        requests.append(Request(tokens[i, :length], slots[i], list(numbers[i * PAGES : (i + 1) * PAGES])))
        server.start(requests[-1])
        done.append(0)
    # One request at a time may run ahead into decode while others still prefill.
    for _ in range(60):
        waiting = [i for i in range(count) if done[i] < len(requests[i].prompt)]
        running = [i for i in range(count) if len(requests[i].prompt) <= done[i] < LENGTH]
        if waiting and (not running or draw(st.booleans(), label="prefill next")):
            space, parts = SMALL_PREFILL.tokens, []
            for i in waiting:
                limit = min(len(requests[i].prompt) - done[i], space)
                if limit > 0:
                    parts.append((i, draw(st.integers(1, limit), label="chunk")))
                    space -= -(-parts[-1][1] // SMALL_PREFILL.tile) * SMALL_PREFILL.tile
            output = server.prefill(*((requests[i], done[i], done[i] + n) for i, n in parts))
            for row, (i, n) in enumerate(parts):
                done[i] += n
                assert distance(output, row, expected[i, done[i] - 1 : done[i]]) < TOLERANCE
        elif running:
            parts = []
            for i in running:
                n = min(draw(st.integers(1, 6), label="tokens"), LENGTH - done[i])
                accepted = draw(st.integers(1, n), label="accepted")
                drafts = tokens[i, done[i] : done[i] + n].copy()
                drafts[accepted:] = (drafts[accepted:] + 1) % 300
                parts.append((i, accepted, drafts))
            output = server.decode(*((requests[i], done[i], drafts) for i, _, drafts in parts))
            for row, (i, accepted, _) in enumerate(parts):
                assert distance(output, row, expected[i, done[i] : done[i] + accepted]) < TOLERANCE
                done[i] += accepted
        else:
            break


def test_prompts_of_one_to_three_tokens(tiny, sequences):
    tokens, expected = sequences
    server = serve(tiny, poison=True)
    requests = [Request(tokens[i, : i + 1], i, list(range(i * PAGES, (i + 1) * PAGES))) for i in range(3)]
    for request in requests:
        server.start(request)
    output = server.prefill(*((r, 0, len(r.prompt)) for r in requests))
    for i in range(3):
        assert distance(output, i, expected[i, i : i + 1]) < TOLERANCE


def test_decode_of_single_tokens_from_an_empty_prompt_state(tiny, sequences):
    """Step by step from the first token: every compression phase, with and without a group closing."""
    tokens, expected = sequences
    server = serve(tiny, decode=DecodeBucket(requests=3, pages=PAGES))
    request = Request(tokens[0, :1], 1, list(range(PAGES)))
    server.start(request)
    server.prefill((request, 0, 1))
    for p in range(1, 40):
        output = server.decode((request, p, [tokens[0, p]]))
        assert distance(output, 0, expected[0, p : p + 1]) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "numerics"), [("quantized", REFERENCE), ("shallow_quantized", FAST)], ids=["reference", "fast"]
)
def test_a_request_is_bit_identical_whatever_surrounds_it(request, sequences, model, numerics):
    tokens, _ = sequences
    model = request.getfixturevalue(model)

    def run(slot, pages, neighbours):
        server = serve(model, numerics, poison=True)
        request = Request(tokens[0, :30], slot, pages)
        others = [Request(tokens[1 + i, : 9 + i], (slot + 1 + i) % 3, list(range(40 + 8 * i, 48 + 8 * i)))
                  for i in range(neighbours)]  # fmt: skip
        for r in (request, *others):
            server.start(r)
        outputs = [server.prefill((request, 0, 20), *((r, 0, len(r.prompt)) for r in others)).logits[0]]
        outputs.append(server.prefill((request, 20, 30)).logits[0])
        outputs.append(
            server.decode((request, 30, tokens[0, 30:36]), *((r, len(r.prompt), [5]) for r in others)).logits[0]
        )
        return [np.asarray(o) for o in outputs]

    alone = run(0, list(range(PAGES)), 0)
    for slot, pages, neighbours in ((2, list(range(PAGES))[::-1], 0), (1, list(range(16, 32)), 2)):
        chex.assert_trees_all_equal(run(slot, pages, neighbours), alone)


def test_the_cache_is_donated(tiny, sequences):
    tokens, _ = sequences
    server = serve(tiny)
    request = Request(tokens[0, :8], 0, list(range(PAGES)))
    for run in (
        lambda: server.start(request),
        lambda: server.prefill((request, 0, 8)),
        lambda: server.decode((request, 8, [3])),
    ):
        before = jax.tree.leaves(server.cache)
        run()
        assert all(leaf.is_deleted() for leaf in before)


def test_no_compilation_after_the_first_step_of_each_bucket(tiny, sequences):
    tokens, _ = sequences
    server = serve(tiny)
    rng = np.random.default_rng(0)
    settings_of_all_kinds = [
        GREEDY,
        RequestSampling(temperature=0.7, top_k=5, seed=1),
        RequestSampling(top_p=0.8, min_p=0.1, top_logprobs=5, presence_penalty=1.0),
    ]

    def workload():
        for i in range(3):
            request = Request(
                tokens[i, : int(rng.integers(1, 48))], i, list(range(i * 16, i * 16 + 16)), settings_of_all_kinds[i]
            )
            server.start(request)
            server.prefill((request, 0, len(request.prompt)))
            server.decode((request, len(request.prompt), tokens[i, : int(rng.integers(1, 7))]))

    workload()
    sizes = prefill_step._cache_size(), decode_step._cache_size()
    for _ in range(3):
        workload()
    assert (prefill_step._cache_size(), decode_step._cache_size()) == sizes


def test_seeded_tokens_do_not_depend_on_the_batch(quantized, sequences):
    tokens, _ = sequences
    seeded = RequestSampling(temperature=0.8, seed=42)

    def generate(slot, neighbour):
        server = serve(quantized, REFERENCE)
        request = Request(tokens[0, :10], slot, list(range(PAGES)), seeded)
        other = Request(tokens[1, :20], (slot + 1) % 3, list(range(20, 36)), neighbour or GREEDY)
        for r in (request, other):
            server.start(r)
        parts = [(request, 0, 10)] + [(other, 0, 20)] * (neighbour is not None)
        out = [int(server.prefill(*parts).tokens[0, 0])]
        for p in range(10, 20):
            parts = [(request, p, [out[-1]])] + [(other, p + 10, [4])] * (neighbour is not None)
            out.append(int(server.decode(*parts).tokens[0, 0]))
        return out

    alone = generate(0, None)
    assert len(set(alone)) > 3
    for slot, neighbour in ((1, GREEDY), (2, RequestSampling(seed=7)), (0, RequestSampling(temperature=1.5))):
        assert generate(slot, neighbour) == alone


def test_greedy_token_is_the_best_logit_and_logprobs_are_the_models(tiny, sequences):
    tokens, expected = sequences
    server = serve(tiny)
    request = Request(tokens[0, :30], 0, list(range(PAGES)), dataclasses.replace(GREEDY, top_logprobs=5))
    server.start(request)
    output = server.prefill((request, 0, 30))
    logprobs = jax.nn.log_softmax(expected[0, 29])
    assert int(output.tokens[0, 0]) == int(np.argmax(expected[0, 29]))
    np.testing.assert_allclose(output.logprobs[0, 0], logprobs.max(), atol=1e-4)
    np.testing.assert_allclose(output.top_logprobs[0, 0, :5], np.sort(logprobs)[::-1][:5], atol=1e-4)


# What an engine that runs ahead of its tokens needs.

PENALISED = RequestSampling(
    temperature=0.9, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, seed=11
)
KINDS = [PENALISED, dataclasses.replace(PENALISED, temperature=0.0), RequestSampling(seed=-3, min_p=0.02)]
SINGLE = DecodeBucket(requests=3, pages=PAGES)


def own_pages(i: int) -> list[int]:
    return list(range(i * PAGES, (i + 1) * PAGES))


def read(outputs):
    return [np.asarray(o.tokens)[:, 0].tolist() for o in outputs]


@pytest.mark.parametrize("decode", [SINGLE, SMALL_DECODE], ids=["1 column", "6 columns"])
def test_tokens_that_never_leave_the_device_are_those_fed_by_the_host(tiny, sequences, decode):
    """Requests of all kinds join and leave a running batch; nothing is read before the end."""
    tokens, _ = sequences
    steps, begin, slots = 14, (0, 2, 5), (2, 0, 1)

    def run(ahead: bool):
        server = serve(tiny, decode=decode)
        requests = [Request(tokens[i, : 9 + 7 * i], slots[i], own_pages(i), KINDS[i]) for i in range(3)]
        position, newest, rows, outputs = {}, {}, [], []
        for step in range(steps):
            for i in (i for i in range(3) if begin[i] == step):
                server.start(requests[i])
                cut = len(requests[i].prompt) // 2
                server.prefill((requests[i], 0, cut))
                outputs.append(server.prefill((requests[i], cut, len(requests[i].prompt))))
                rows.append([i])
                position[i] = len(requests[i].prompt)
                newest[i] = NEXT_TOKEN if ahead else int(outputs[-1].tokens[0, 0])
            # Request 0 pauses for a step, and another order of rows is another batch.
            running = sorted((i for i in position if (i, step) != (0, 7)), key=lambda i: (i + step) % 3)
            outputs.append(server.decode(*((requests[i], position[i], [newest[i]]) for i in running)))
            rows.append(running)
            for row, i in enumerate(running):
                position[i] += 1
                newest[i] = NEXT_TOKEN if ahead else int(outputs[-1].tokens[row, 0])
        streams = {i: [] for i in range(3)}
        for out, running in zip(read(outputs), rows, strict=True):
            for row, i in enumerate(running):
                streams[i].append(out[row])
        return streams, server.cache

    ahead, ahead_cache = run(ahead=True)
    fed, fed_cache = run(ahead=False)
    assert ahead == fed
    assert min(len(set(stream)) for stream in fed.values()) > 4
    chex.assert_trees_all_equal(ahead_cache, fed_cache)  # counted for penalties, hashed for Engram: all of it


def test_next_token_after_several_tokens_is_the_one_after_the_last(tiny, sequences):
    tokens, _ = sequences
    server = serve(tiny)
    requests = [Request(tokens[i, :10], i, own_pages(i)) for i in range(2)]
    for request in requests:
        server.start(request)
        server.prefill((request, 0, 10))
    output = server.decode((requests[0], 10, tokens[0, 10:14]), (requests[1], 10, tokens[1, 10:12]))
    after = [int(output.tokens[0, 3]), int(output.tokens[1, 1])]
    assert np.asarray(server.cache.sampling.next_tokens)[:2].tolist() == after
    # The same with drafts behind it as with the token given.
    cache = jax.tree.map(jnp.copy, server.cache)
    ahead = server.decode((requests[0], 14, [NEXT_TOKEN, 7, 8]), (requests[1], 12, [NEXT_TOKEN]))
    server.cache = cache
    given = server.decode((requests[0], 14, [after[0], 7, 8]), (requests[1], 12, [after[1]]))
    chex.assert_trees_all_equal(ahead, given)


@pytest.mark.parametrize("cut", [1, 4, 9, 15])
@pytest.mark.parametrize("kind", range(3), ids=["seeded penalties", "greedy penalties", "seeded"])
def test_a_preempted_request_goes_on_as_if_undisturbed(tiny, sequences, kind, cut):
    """Prefilled anew with what it has generated, elsewhere, among others; the old slot has a new owner by then."""
    tokens, _ = sequences
    server = serve(tiny, decode=SINGLE)
    request = Request(tokens[kind, :13], 1, own_pages(0), KINDS[kind])

    def generate(request, count):
        outputs = [server.prefill((request, 0, 7)), server.prefill((request, 7, len(request.prompt)))][1:]
        start = len(request.prompt)
        outputs += [server.decode((request, start + i, [NEXT_TOKEN])) for i in range(count - 1)]
        return [tokens[0] for tokens in read(outputs)]

    server.start(request)
    undisturbed = generate(request, 20)
    assert len(set(undisturbed)) > 5
    server.start(request)
    first = generate(request, cut)
    other = Request(tokens[2, :30], 1, own_pages(0))
    server.start(other)
    server.prefill((other, 0, 30))
    again = dataclasses.replace(
        request, prompt=np.concatenate([request.prompt, np.int32(first)]), slot=2, pages=own_pages(2)[::-1]
    )
    server.start(again, generated=cut)
    assert first + generate(again, 20 - cut) == undisturbed


def test_only_allowed_tokens_are_sampled_until_the_slot_begins_anew(tiny, sequences):
    tokens, expected = sequences
    vocab = tiny.cfg.vocab_size
    server = serve(tiny, decode=SINGLE)
    requests = [Request(tokens[i, :20], i, own_pages(i)) for i in range(2)]
    few = np.zeros(vocab, bool)
    few[[7, 40, 300]] = True
    masks = np.packbits(few, bitorder="little").view(np.uint32)[None].repeat(2, 0)
    for request in requests:
        server.start(request)
    server.cache = set_allowed_tokens(server.cache, np.int32([1, 3]), masks[:, None])  # 3: a padded row
    output = server.prefill(*((r, 0, 20) for r in requests))
    best = int(np.argmax(np.where(few, expected[1, 19], -np.inf)))
    assert np.asarray(output.tokens)[:2, 0].tolist() == [int(expected[0, 19].argmax()), best]
    np.testing.assert_allclose(output.logprobs[1, 0], jax.nn.log_softmax(expected[1, 19])[best], atol=1e-4)
    assert int(server.decode((requests[1], 20, [NEXT_TOKEN])).tokens[0, 0]) in (7, 40, 300)
    server.start(requests[1])
    assert int(server.prefill((requests[1], 0, 20)).tokens[0, 0]) == int(expected[1, 19].argmax())


def test_prompt_logprobs_are_those_of_the_whole_run_in_any_chunks(shallow, shallow_sequences, monkeypatch):
    tokens, expected = shallow_sequences
    prompts = [tokens[0, :41], tokens[1, :1], tokens[2, :17]]
    # The limit of memory: all rows at once, and a few in several rounds. Each in a bucket that no other test compiles.
    for size, rows_at_once, cuts in ((52, 52, (0, 23, 41)), (56, 8, (0, 1, 4, 30, 41))):
        bucket = dataclasses.replace(SMALL_PREFILL, tokens=size, prompt_logprobs=True)
        over_tiles = functools.partial(layout.over_tiles, limit=16 * rows_at_once * shallow.cfg.vocab_size)
        monkeypatch.setattr("dsv4jax.steps.over_tiles", over_tiles)
        server = serve(shallow, prefill=bucket, poison=True)
        requests = [Request(prompt, i, own_pages(i)) for i, prompt in enumerate(prompts)]
        for request in requests:
            server.start(request)
        others = [(r, 0, len(r.prompt)) for r in requests[1:]]
        for start, end in itertools.pairwise(cuts):
            parts = [(requests[0], start, end), *others]
            output, offset = server.prefill(*parts), 0
            values, ids, top = (
                np.asarray(a) for a in (output.prompt_logprobs, output.prompt_top_tokens, output.prompt_top_logprobs)
            )
            filled = np.zeros(bucket.tokens, bool)
            for request, first, last in parts:
                with_target = min(last, len(request.prompt) - 1) - first
                rows = slice(offset, offset + with_target)
                filled[rows] = True
                direct = np.asarray(jax.nn.log_softmax(expected[request.slot, first : first + with_target]))
                following = request.prompt[first + 1 : first + 1 + with_target]
                np.testing.assert_allclose(
                    values[rows], np.take_along_axis(direct, following[:, None], 1)[:, 0], atol=TOLERANCE
                )
                np.testing.assert_allclose(top[rows], -np.sort(-direct)[:, :20], atol=TOLERANCE)
                np.testing.assert_allclose(np.take_along_axis(direct, ids[rows], 1), top[rows], atol=TOLERANCE)
                offset += -(-(last - first) // bucket.tile) * bucket.tile
            for array in (values, ids, top):
                assert not array[~filled].any()
            others = []


def test_a_prompt_logprob_is_its_entry_among_the_best_to_the_bit(shallow_quantized, sequences):
    """Every token is followed by one of its 20 best, in the arithmetic of the model itself."""
    tokens, _ = sequences
    bucket = PrefillBucket(tokens=16, requests=1, pages=PAGES, prompt_logprobs=True)
    server = serve(shallow_quantized, REFERENCE, prefill=bucket)
    prompt = tokens[0, :1]
    for rank in (0, 3, 19, 7):
        request = Request(np.append(prompt, np.int32(0)), 0, own_pages(0))
        server.start(request)
        best = np.asarray(server.prefill((request, 0, len(request.prompt))).prompt_top_tokens)
        prompt = np.append(prompt, best[len(prompt) - 1, rank])
    request = Request(prompt, 0, own_pages(0))
    server.start(request)
    output = server.prefill((request, 0, len(prompt)))
    top = np.asarray(output.prompt_top_logprobs)[np.arange(4), [0, 3, 19, 7]]
    np.testing.assert_array_equal(np.asarray(output.prompt_logprobs)[:4], top)
    assert np.all(top < 0)


def test_tokens_of_a_prefix_hit_have_no_prompt_logprobs(shallow, shallow_sequences):
    tokens, expected = shallow_sequences
    bucket = dataclasses.replace(SMALL_PREFILL, prompt_logprobs=True)
    server = serve(shallow, prefill=bucket)
    owner = Request(tokens[0, :32], 0, own_pages(0))
    server.start(owner)
    assert server.prefill((owner, 0, 32)).prompt_logprobs[:31].all()
    hit = Request(tokens[0, :32], 1, [*own_pages(0)[:2], *own_pages(1)[2:]], cached=16)
    server.start(hit)
    values = np.asarray(server.prefill((hit, 0, 32)).prompt_logprobs)
    direct = np.asarray(jax.nn.log_softmax(expected[0, 16:31]))
    np.testing.assert_allclose(values[16:31], direct[np.arange(15), tokens[0, 17:32]], atol=TOLERANCE)
    assert not values[:16].any()


# Bounded replay of the decoder half (architecture section 9.5).

LONG = PrefillBucket(tokens=96, requests=1, pages=PAGES, tile=4, replay="bounded")


def bounded_logits(tiny, tokens, cuts, prefill=LONG, numerics=NOQUANT):
    server = serve(tiny, numerics, prefill=prefill, poison=True)
    request = Request(tokens, 0, list(range(PAGES)))
    server.start(request)
    first = np.asarray(server.prefill_all(request, cuts).logits[0])
    return first, server, request


def test_bounded_replay_is_exact_up_to_one_window(tiny, sequences):
    tokens, expected = sequences
    window = tiny.cfg.sliding_window
    for length in (1, window - 1, window):
        first, _, _ = bounded_logits(tiny, tokens[0, :length], [])
        assert np.abs(first - expected[0, length - 1]).max() < TOLERANCE


def test_bounded_replay_does_not_depend_on_chunks_or_bucket(tiny, sequences):
    """Whole prompt at once (rows gathered), small chunks (rows masked), a last chunk shorter than a window."""
    tokens, expected = sequences
    prompt = tokens[0, :90]
    whole, server, request = bounded_logits(tiny, prompt, [])
    after = np.asarray(server.decode((request, 90, tokens[0, 90:96])).logits[0])
    wide = dataclasses.replace(LONG, requests=12)
    for cuts, bucket in (([30, 60], LONG), ([83, 85, 88], LONG), ([89], LONG), ([50], wide)):
        split, server, request = bounded_logits(tiny, prompt, cuts, bucket)
        assert np.abs(split - whole).max() < TOLERANCE
        assert distance(server.decode((request, 90, tokens[0, 90:96])), 0, after) < TOLERANCE
    assert np.abs(whole - expected[0, 89]).max() > TOLERANCE  # an approximation, not the exact run


def test_bounded_replay_follows_its_definition(tiny, sequences):
    """Same result as the exact step given window floors that hide everything before the last window from the decoder
    half: windows are truncated at the replay start, compressed entries are not."""
    tokens, _ = sequences
    prompt, window = tokens[0, :90], tiny.cfg.sliding_window
    whole, _, _ = bounded_logits(tiny, prompt, [])
    exact = dataclasses.replace(LONG, replay="exact")
    server = serve(tiny, prefill=exact, poison=True)
    request = Request(prompt, 0, list(range(PAGES)))
    server.start(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4jax.batch.decoder_floor", lambda *args: len(prompt) - window)
        by_floor = server.prefill((request, 0, len(prompt)))
    assert distance(by_floor, 0, whole) < TOLERANCE


def test_undefined_logits_are_told_of_their_own_request_only(tiny, sequences):
    """The second chunk ends before the decoder half's tokens: the logits in its place are those of the first."""
    tokens, _ = sequences
    server = serve(tiny, prefill=dataclasses.replace(LONG, requests=12))
    server.params = {**tiny.params, "norm": {"weight": jnp.full_like(tiny.params["norm"]["weight"], jnp.nan)}}
    long = Request(tokens[0, :90], 0, list(range(12)))
    short = Request(tokens[1, :20], 1, list(range(12, 24)))
    for request in (long, short):
        server.start(request)
    logprobs = server.prefill((short, 0, 20), (long, 0, 30)).logprobs[:, 0]
    assert np.isnan(logprobs[0]) and logprobs[1] == 0
    assert np.isnan(server.prefill((long, 30, 90)).logprobs[0, 0])


def test_bounded_replay_runs_the_decoder_half_on_one_window_of_rows(tiny, sequences):
    """Rows in the compiled program and tokens routed, per layer: all for the encoder half, one window for the rest."""
    tokens, _ = sequences
    cfg, length = tiny.cfg, 90
    server = serve(tiny, prefill=LONG)
    request = Request(tokens[0, :length], 0, list(range(PAGES)))
    server.start(request)
    output = server.prefill((request, 0, length), collect=True)
    for layer, selection in zip(cfg.index_source_layer_ids, output.selections, strict=True):
        assert selection.shape[0] == (LONG.tokens if layer < cfg.decoder_start else cfg.sliding_window)
    routed = np.asarray(output.expert_load).sum(1) / cfg.num_experts_per_tok
    assert routed.tolist() == [length] * cfg.decoder_start + [cfg.sliding_window] * (8 - cfg.decoder_start)


# Prefix hits: pages are there, window keys are not (section 9.7).


@pytest.mark.parametrize("hit", [8, 16, 56, 88, 96])
@pytest.mark.parametrize("decoder", ["exact", "bounded"])
def test_exact_window_rebuild_after_a_prefix_hit_equals_the_cold_run(tiny, sequences, hit, decoder):
    tokens, expected = sequences
    bucket = dataclasses.replace(LONG, replay=decoder)
    cold, server, owner = bounded_logits(tiny, tokens[0, :110], [60], bucket)
    assert decoder == "bounded" or np.abs(cold - expected[0, 109]).max() < TOLERANCE
    shared = owner.pages[: hit // 8]
    before = [np.asarray(pool[np.array(shared)]) for pool in (*server.cache.entries, *server.cache.index_keys)]
    start = replay_start(tiny.cfg, 110, hit, "exact", decoder)
    other = Request(
        tokens[0, :110], 2, shared + list(range(40, 40 + PAGES - len(shared))), cached=hit, window_floor=start
    )
    server.start(other)
    warm = server.prefill_all(other, [start + 31, 70, 100], start=start)
    assert distance(warm, 0, cold) < TOLERANCE
    after = [np.asarray(pool[np.array(shared)]) for pool in (*server.cache.entries, *server.cache.index_keys)]
    chex.assert_trees_all_equal(before, after)


def test_bounded_window_rebuild_runs_one_window_and_reads_nothing_older(tiny, sequences):
    """However long the hit is, the result stays close to the cold one."""
    tokens, expected = sequences
    window = tiny.cfg.sliding_window
    cold, server, owner = bounded_logits(tiny, tokens[0, :110], [60], dataclasses.replace(LONG, replay="exact"))
    for hit in (8, 16, 56, 88, 96, 104):
        start = replay_start(tiny.cfg, 110, hit, "bounded", "bounded")
        assert start == max(0, hit - window)
        pages = [*owner.pages[: hit // 8], *range(40, 54 - hit // 8)]
        other = Request(tokens[0, :110], 1, pages, cached=hit, window_floor=start)
        server.start(other)
        warm = np.asarray(server.prefill_all(other, [60, 100], start=start).logits[0])
        assert np.linalg.norm(warm - cold) < (0.1 if start else TOLERANCE) * np.linalg.norm(cold)
        assert int(warm.argmax()) == int(cold.argmax())
    # A hit no longer than a window loses nothing.
    short = Request(tokens[0, :30], 2, [*owner.pages[:1], 54, 55, 56], cached=8, window_floor=0)
    assert replay_start(tiny.cfg, 30, 8, "bounded", "exact") == 0
    server.start(short)
    assert distance(server.prefill_all(short), 0, expected[0, 29:30]) < TOLERANCE


# Engram tables on the host, image prompts, modes.


class Tables:
    """Host tables that are copies of the device's."""

    def __init__(self, layers):
        self.tables = [
            jax.tree.map(np.asarray, layer["engram"]["embed"]) for layer in layers.values() if "engram" in layer
        ]

    def lookup(self, rows):
        return tuple(jax.tree.map(lambda a, i=i: a[rows[:, i]], table) for i, table in enumerate(self.tables))


def test_tables_on_the_host_give_the_same_bits_as_on_the_device(shallow_quantized, sequences):
    tokens, _ = sequences
    whole = shallow_quantized
    layers, (engram,) = whole.params["layers"], whole.cfg.engram_layer_ids
    without = layers[engram] | {"engram": {k: v for k, v in layers[engram]["engram"].items() if k != "embed"}}
    bare = whole._replace(params=whole.params | {"layers": layers | {engram: without}})

    def run(model, tables):
        server = serve(model, REFERENCE, tables=tables)
        request = Request(tokens[0, :20], 0, list(range(PAGES)))
        server.start(request)
        outputs = [server.prefill((request, 0, 13)), server.prefill((request, 13, 20))]
        outputs.append(server.decode((request, 20, tokens[0, 20:24]), history=tokens[0, 16:20][::-1]))
        return [np.asarray(o.logits[0])[:4] for o in outputs]

    chex.assert_trees_all_equal(run(bare, Tables(layers)), run(whole, None))


def test_an_image_prompt_in_any_chunks_equals_the_whole_run(shallow):
    rng = np.random.default_rng(2)
    ids, mask = rng.integers(3, 300, 61).astype(np.int32), np.zeros(61, bool)
    mask[4:19] = mask[33:59] = True
    ids[mask] = shallow.cfg.image_token_id
    embeddings = rng.normal(size=(61, shallow.cfg.hidden_size)).astype(np.float32)
    whole = forward(
        shallow.params, ids[None], cfg=shallow.cfg, image_mask=mask[None], embeddings=embeddings[None], numerics=NOQUANT
    )
    bucket = PrefillBucket(tokens=64, requests=1, pages=PAGES, tile=4, images=41)
    compressed = np.where(mask, DEAD, np.asarray(shallow.params["engram_token_map"])[ids])
    for cuts in ([], [5, 17, 18, 40]):
        server = serve(shallow, prefill=bucket, poison=True)
        request = Request(ids, 0, list(range(PAGES)), image_mask=mask, image_embeddings=embeddings[mask])
        server.start(request)
        assert distance(server.prefill_all(request, cuts), 0, np.asarray(whole.logits)[0, -1:]) < TOLERANCE
        # What decode steps hash of it: images hide themselves and all before them there too.
        ring = np.asarray(server.cache.ngram_ids[0])
        newest = np.arange(61 - len(ring), 61)
        assert ring[newest % len(ring)].tolist() == compressed[newest].tolist() and mask[newest].any()


def test_fast_mode_stays_close_to_reference_mode(tiny, sequences):
    """Without quantisers, whose flips make tiny models chaotic, the modes differ by rounding of bfloat16 only."""
    tokens, expected = sequences

    def run(numerics):
        return np.asarray(forward(tiny.params, tokens, cfg=tiny.cfg, numerics=numerics).logits)

    assert np.abs(run(dataclasses.replace(NOQUANT, fast=True)) - expected).max() < TOLERANCE
    plain = Numerics(quantize_activations=False, quantize_cache=False)
    reference, fast = run(plain), run(dataclasses.replace(plain, fast=True))

    def error(a, b):
        return np.median(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1))

    assert error(reference, expected) < 0.02
    assert error(fast, expected) < 0.02


def test_float32_with_quantised_caches_is_prefix_consistent(shallow, sequences):
    """Rows of a long run equal the same rows reached by chunks and decode, cache quantisation included."""
    tokens, _ = sequences
    expected = np.asarray(forward(shallow.params, tokens, cfg=shallow.cfg, numerics=FLOAT32).logits)
    server = serve(shallow, FLOAT32)
    request = Request(tokens[0, :50], 0, list(range(PAGES)))
    server.start(request)
    rows = [distance(server.prefill_all(request, [9, 33]), 0, expected[0, 49:50])]
    for p in range(50, 98, 6):
        output = np.asarray(server.decode((request, p, tokens[0, p : p + 6])).logits[0])
        rows += np.abs(output - expected[0, p : p + 6]).max(-1).tolist()
    # A flipped FP4 code moves a row for good; most rows see none.
    assert np.mean(np.array(rows) < 1e-3) > 0.5


def test_more_tokens_than_slack_are_refused(tiny, sequences):
    tokens, _ = sequences
    server = serve(tiny, decode=DecodeBucket(requests=1, pages=PAGES, tokens_per_request=9))
    with pytest.raises(ValueError, match=r"tokens_per_request = 9.*slack = 8"):
        server.decode((Request(tokens[0, :3], 0, [0, 1]), 3, [5]))


def test_window_keys_of_the_decoder_half_are_exact_when_little_follows_a_hit(tiny, sequences):
    """The decoder half begins before the end of the hit, so the replay must reach back further."""
    tokens, _ = sequences
    prompt, hit = tokens[0, :97], 96
    bucket = dataclasses.replace(LONG, replay="bounded")
    _, server, owner = bounded_logits(tiny, prompt, [50], bucket)
    start = replay_start(tiny.cfg, len(prompt), hit, "exact", "bounded")
    other = Request(prompt, 2, [*owner.pages[:12], 50], cached=hit, window_floor=start)
    server.start(other)
    server.prefill_all(other, [70], start=start)
    window = tiny.cfg.sliding_window
    for layer in range(tiny.cfg.decoder_start, tiny.cfg.num_hidden_layers):
        ring = np.asarray(server.cache.windows[layer])
        rows = np.arange(len(prompt) - window, len(prompt)) % ring.shape[1]
        np.testing.assert_allclose(ring[2, rows], ring[0, rows], atol=2e-6)


def test_a_batch_for_another_cache_is_refused(tiny, sequences):
    tokens, _ = sequences
    server = serve(tiny)
    for wrong in ({"page_size": 16}, {"slots": 5}):
        server.cache_cfg = dataclasses.replace(dsv4jax.cache.CacheConfig(slots=3, pages=64, page_size=8), **wrong)
        with pytest.raises(ValueError, match="the batch was made for"):
            server.prefill((Request(tokens[0, :8], 0, [0, 1]), 0, 8))
    server = serve(tiny)
    server.numerics = REFERENCE
    with pytest.raises(ValueError, match="the cache holds float32 records"):
        server.prefill((Request(tokens[0, :8], 0, [0]), 0, 8))


def test_missing_tables_and_missing_history_are_refused(quantized, sequences):
    tokens, _ = sequences
    layers = quantized.params["layers"]
    bare = layers[1] | {"engram": {k: v for k, v in layers[1]["engram"].items() if k != "embed"}}
    params = quantized.params | {"layers": layers | {1: bare}}
    server = serve(quantized._replace(params=params), REFERENCE)
    with pytest.raises(ValueError, match="params hold no Engram tables"):
        server.prefill((Request(tokens[0, :8], 0, [0]), 0, 8))
    server.tables = Tables(layers)
    with pytest.raises(ValueError, match="history: Engram tables on the host need the 3 token ids"):
        server.decode((Request(tokens[0, :8], 0, [0, 1]), 8, [5]), history=[4, 5])
    with pytest.raises(ValueError, match="NEXT_TOKEN is known on the device only"):
        server.decode((Request(tokens[0, :8], 0, [0, 1]), 8, [NEXT_TOKEN]), history=[4, 5, 6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, 0), np.int32)}, "not empty"),
        ({"tokens": np.array([[1.5, 2.0]])}, "must be integers"),
        ({"tokens": np.array([[2**32 + 5]])}, "every id must be in"),
        ({"image_mask": np.ones((1, 2), bool), "embeddings": np.zeros((1, 2, 64))}, "must be"),
        ({"mask": np.array([[True, False, True]])}, "mask: padding must stand on the right"),
        ({"tokens": np.array([[1, 2, 512]])}, "tokens: every id must be in 0..511"),
        ({"tokens": np.array([[1, -1, 5]])}, "tokens: every id"),
        ({"image_mask": np.zeros((1, 3), bool)}, "image_mask and embeddings"),
    ],
)
def test_forward_refuses_bad_input(tiny, change, message):
    arguments = {"tokens": np.array([[1, 2, 3]])} | change
    with pytest.raises(ValueError, match=message):
        # Unwrapped: the tests' own check of annotations would refuse some of these first.
        inspect.unwrap(forward)(tiny.params, **arguments, cfg=tiny.cfg)


def test_packed_records_equal_quantise_dequantise_bit_for_bit(shallow_quantized, sequences, monkeypatch):
    """The cache holds 4- and 8-bit records; what the model reads is exactly its own quantised arithmetic."""
    tokens, _ = sequences

    def run():
        server = serve(shallow_quantized, REFERENCE)
        request = Request(tokens[0, :60], 0, list(range(PAGES)))
        server.start(request)
        outputs = [server.prefill((request, 0, 41)), server.prefill((request, 41, 60))]
        outputs.append(server.decode((request, 60, tokens[0, 60:66])))
        return server.cache, [np.asarray(o.logits[0]) for o in outputs]

    cache, packed = run()
    assert cache.entries[0].dtype == jnp.uint8
    rounded = {
        dsv4jax.cache.WINDOW_KEY: qdq_fp8,
        dsv4jax.cache.COMPRESSED_ENTRY: qdq_nvfp4,
        dsv4jax.cache.INDEX_KEY: qdq_mxfp4,
    }
    record = dsv4jax.cache.RecordFormat
    monkeypatch.setattr(record, "store", lambda self, x, numerics: rounded[self](x))
    monkeypatch.setattr(record, "load", lambda self, x, numerics: x)
    monkeypatch.setattr(record, "empty", lambda self, shape, n, numerics: jnp.zeros((*shape, n), numerics.dtype))
    monkeypatch.setattr("dsv4jax.model.transformer._check_fit", lambda *args: None)
    jax.clear_caches()
    cache, plain = run()
    jax.clear_caches()
    assert cache.entries[0].dtype == jnp.bfloat16
    chex.assert_trees_all_equal(packed, plain)
