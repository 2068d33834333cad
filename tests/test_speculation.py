"""Drafting and verifying steps: whatever is drafted and accepted, requests get what they get without drafts.

The cache has the least slack that the steps may have, so that every ring is as short as it can be.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import NOQUANT, drafting_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Request, Server

from dsv4jax.batch import DecodeBucket, PrefillBucket, SpeculativeRequest, replay_start, speculative_batch
from dsv4jax.cache import CacheConfig
from dsv4jax.model.rope import rotate, rotation
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import set_allowed_tokens
from dsv4jax.verification import draw_drafts

PAGES = 16
PREFILL = PrefillBucket(tokens=96, requests=3, pages=PAGES, tile=4)
BOUNDED = dataclasses.replace(PREFILL, replay="bounded")
SINGLE = DecodeBucket(requests=3, pages=PAGES)
DRAFTS = DecodeBucket(requests=3, pages=PAGES, tokens_per_request=5)
PENALISED = RequestSampling(
    temperature=0.9, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, seed=11
)
KINDS = [PENALISED, dataclasses.replace(PENALISED, temperature=0.0), RequestSampling(seed=-3, min_p=0.02)]
LENGTHS = (1, 23, 50)
GENERATED = 30


@pytest.fixture(scope="module")
def tiny():
    return drafting_model()


@pytest.fixture(scope="module")
def tokens(tiny):
    known = int((np.asarray(tiny.params["engram_token_map"]) >= 0).sum())
    return np.random.default_rng(5).integers(3, known, (3, 110)).astype(np.int32)


def serve(tiny, prefill=PREFILL, drafts="shared", **kwargs) -> Server:
    return Server(tiny.cfg, tiny.params, NOQUANT, prefill=prefill, decode=DRAFTS, poison=True, slack=5, drafts=drafts,
                  **kwargs)  # fmt: skip


def own_pages(i: int) -> list[int]:
    return list(range(i * PAGES, (i + 1) * PAGES))


def begin(server: Server, *requests: Request, cuts=(), start: int = 0) -> None:
    for request in requests:
        server.start(request)
        server.prefill_all(request, cuts, start=start)


def decode(server: Server, *parts):
    """A step of single tokens."""
    server.decode_bucket = SINGLE
    output = server.decode(*parts)
    server.decode_bucket = DRAFTS
    return output


@pytest.fixture(scope="module")
def undrafted(tiny, tokens):
    """Three requests of different kinds, and the tokens and log-probabilities that they get one by one."""
    requests = [Request(tokens[i, : LENGTHS[i]], i, own_pages(i), KINDS[i]) for i in range(3)]
    server = serve(tiny)
    begin(server, *requests)
    first = [int(t) for t in server.cache.sampling.next_tokens]
    outputs = [decode(server, *((r, len(r.prompt) + n, [-1]) for r in requests)) for n in range(GENERATED - 1)]
    chosen = np.concatenate([[first], [o.tokens[:, 0] for o in outputs]]).T
    logprobs = np.stack([o.logprobs[:, 0] for o in outputs]).T
    assert min(len(set(row)) for row in chosen.tolist()) > 8
    return requests, chosen, logprobs


@jax.jit
def with_drafts(cache, following, right):
    """The cache with drafts from `following` [slots, tokens], of which the first `right` [slots] are left as they are.

    Confidences predict an even chance for each.
    """
    drafts, count = cache.drafts, cache.drafts.tokens.shape[1]
    at = jnp.clip(drafts.positions[:, None] + 1 + jnp.arange(count), 0, following.shape[1] - 1)
    given = jnp.take_along_axis(following, at, 1)
    given = jnp.where(jnp.arange(count) < right[:, None], given, (given + 1) % 300)
    return cache.replace(drafts=drafts.replace(tokens=given, confidences=jnp.zeros_like(drafts.confidences)))


def following(requests, chosen) -> np.ndarray:
    """Prompt and generated tokens of each slot, padded to one length."""
    rows = [np.concatenate([r.prompt, row]) for r, row in zip(requests, chosen, strict=True)]
    return np.stack([np.pad(row, (0, 90 - len(row))) for row in rows]).astype(np.int32)


def ring_rows(server: Server, slot: int, length: int) -> list[np.ndarray]:
    """Context keys of the last window of `length` positions, per stage."""
    rows = np.arange(max(0, length - server.cfg.sliding_window), length)
    return [np.asarray(ring[slot, rows % ring.shape[1]]) for ring in server.cache.draft_windows]


def drafted(server: Server, request: Request):
    """Drafts of a request after a round of its own, and what they were made from."""
    return results(server, server.draft(request), 0, request.slot, len(request.prompt))


def results(server: Server, output, row: int, slot: int, length: int):
    """Drafts of one request, their confidences, and the keys of its `length` positions that they were made from."""
    return np.asarray(output.tokens[row]), np.asarray(output.confidences[row]), ring_rows(server, slot, length)


def assert_same_drafts(got, expected):
    assert got[0].tolist() == expected[0].tolist()
    chex.assert_trees_all_close(got[1:], expected[1:], atol=1e-4, rtol=1e-4)
    assert all(np.isfinite(rows).all() for rows in got[2])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 13, 14, 90])
def test_drafts_after_a_prompt_do_not_depend_on_chunks_or_place(tiny, tokens, length):
    """Shorter than a window, as long, and beyond a ring; alone and beside others."""
    prompt = tokens[0, :length]
    server = serve(tiny)
    begin(server, Request(prompt, 0, own_pages(0)))
    expected = drafted(server, Request(prompt, 0, own_pages(0)))
    for slot, cuts in ((1, (1,)), (2, range(3, length, 5)), (0, (length - 1, length - 3))):
        server = serve(tiny)
        request = Request(prompt, slot, own_pages(slot)[::-1])
        other = Request(tokens[1, :20], (slot + 1) % 3, own_pages((slot + 1) % 3))
        begin(server, other)
        begin(server, request, cuts=[c for c in cuts if c > 0])
        server.draft(other)
        assert_same_drafts(drafted(server, request), expected)


@pytest.mark.parametrize("hit", [8, 48, 80])
@pytest.mark.parametrize("bucket", [PREFILL, BOUNDED], ids=["exact", "bounded"])
def test_drafts_after_a_prefix_hit_are_those_of_the_cold_run(tiny, tokens, hit, bucket):
    """With exact replay of the encoder half; a decoder half in bounded replay runs the same rows in both cases."""
    prompt = tokens[0, :84]
    server = serve(tiny, bucket)
    cold = Request(prompt, 0, own_pages(0))
    begin(server, cold, cuts=[50])
    expected = drafted(server, cold)
    start = replay_start(tiny.cfg, len(prompt), hit, "exact", bucket.replay)
    warm = Request(prompt, 2, [*own_pages(0)[: hit // 8], *own_pages(2)[hit // 8 :]], cached=hit, window_floor=start)
    begin(server, warm, cuts=[hit + 1, 83], start=start)
    assert_same_drafts(drafted(server, warm), expected)


def test_a_bounded_rebuild_writes_every_key_that_is_read(tiny, tokens):
    """Approximate keys, but none that was never written, even if only the last token follows the hit."""
    window = tiny.cfg.sliding_window
    for length, hit in ((84, 80), (81, 80), (9, 8)):
        server = serve(tiny, BOUNDED)
        cold = Request(tokens[0, :length], 0, own_pages(0))
        begin(server, cold)
        start = replay_start(tiny.cfg, length, hit, "bounded", "bounded")
        assert start == hit - window
        pages = [*own_pages(0)[: hit // 8], *own_pages(2)[hit // 8 :]]
        warm = Request(cold.prompt, 2, pages, cached=hit, window_floor=start)
        begin(server, warm, start=start)
        got = drafted(server, warm)
        assert np.isfinite(got[1]).all() and all(np.isfinite(rows).all() for rows in got[2])


def test_bounded_replay_drafts_do_not_depend_on_chunks(tiny, tokens):
    """The features of the last window are those of bounded replay, which is exact for a prompt of one window."""
    for length in (8, 84):
        prompt, rounds = tokens[0, :length], []
        for cuts in ([], [3], [length - 2], [length - 9, length - 7]):
            server = serve(tiny, BOUNDED)
            request = Request(prompt, 1, own_pages(1))
            begin(server, request, cuts=[c for c in cuts if c > 0])
            rounds.append(drafted(server, request))
        for other in rounds[1:]:
            assert_same_drafts(other, rounds[0])
        exact = serve(tiny)
        begin(exact, request)
        same = np.allclose(ring_rows(exact, 1, length)[0], rounds[0][2][0], atol=1e-4)
        assert same == (length == 8)


@pytest.mark.parametrize("length", [98_304, 131_072, 200_000, 1_048_000])
def test_drafts_depend_on_distances_alone(tiny, tokens, length):
    """The same keys behind any number of tokens, so that nothing gives way where a context becomes long."""
    server, request = serve(tiny), Request(tokens[0, :50], 0, own_pages(0))
    begin(server, request)
    cache = jax.tree.map(jnp.copy, server.cache)
    expected = server.draft(request)
    ring = cache.draft_windows[0].shape[1]
    for turns in ((length - 50) // ring, (length - 50) // ring + 1):  # on both sides of the length
        # Places in the ring stay as they are, and what has been rotated is rotated further.
        further = rotation(tiny.cfg, jnp.int32(turns * ring), compressed=False)
        drafts = cache.drafts.replace(positions=cache.drafts.positions + turns * ring)
        moved = cache.replace(drafts=drafts, draft_windows=tuple(rotate(a, further) for a in cache.draft_windows))
        server.cache = jax.tree.map(jnp.copy, moved)
        output = server.draft(request)
        assert output.tokens[0].tolist() == expected.tokens[0].tolist()
        # A phase has a rounding error that grows with the position.
        np.testing.assert_allclose(output.confidences[0], expected.confidences[0], atol=length * 2.0**-22)


@pytest.mark.parametrize("right", range(5))
def test_after_any_number_of_rejected_drafts_all_is_as_in_a_fresh_run(tiny, undrafted, right):
    """Output and what is drafted next, in several steps one after the other."""
    requests, chosen, logprobs = undrafted
    server = serve(tiny)
    begin(server, *requests)
    server.draft(*requests)
    done = 0
    for _ in range(3):
        server.cache = with_drafts(server.cache, following(requests, chosen), jnp.full(3, right))
        output = server.speculate(*((r, 4) for r in requests))
        assert output.verified.tolist() == [4] * 3
        assert output.counts.tolist() == [right + 1] * 3
        assert output.tokens[:, : right + 1].tolist() == chosen[:, done + 1 : done + right + 2].tolist()
        assert not np.asarray(output.tokens[:, right + 1 :]).any()
        np.testing.assert_allclose(output.logprobs[:, : right + 1], logprobs[:, done : done + right + 1], atol=1e-4)
        assert not np.asarray(output.logprobs[:, right + 1 :]).any()
        done += right + 1
    fresh = serve(tiny)
    for slot, request in enumerate(requests):
        length = len(request.prompt) + done
        prompt = following(requests, chosen)[slot, :length]
        again = dataclasses.replace(request, prompt=prompt)
        fresh.start(again, generated=done)
        fresh.prefill_all(again)
        expected = drafted(fresh, again)
        assert_same_drafts(results(server, output.draft, slot, slot, length), expected)
        assert int(server.cache.drafts.positions[slot]) == length
        assert int(server.cache.sampling.next_tokens[slot]) == chosen[slot, done]


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drafts_move_no_token(tiny, undrafted, data):
    """Requests join at different times, drafts are right by chance, some steps run no drafts, a plain decode step comes
    in between, and nothing is read before the end: every request gets the tokens it gets one by one."""
    requests, chosen, _ = undrafted
    known = jnp.asarray(following(requests, chosen))
    server, outputs = serve(tiny), []
    joined: list[int] = []
    order = data.draw(st.permutations(range(3)))
    for step in range(8):
        if step % 2 == 0 and len(joined) < 3:
            joined.append(order[len(joined)])
            begin(server, requests[joined[-1]], cuts=data.draw(st.sets(st.integers(1, 49), max_size=2)))
            if data.draw(st.booleans(), label="draft at once"):
                server.draft(requests[joined[-1]])
        right = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3), label="right")
        limits = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3), label="limits")
        if data.draw(st.integers(0, 3)):
            server.cache = with_drafts(server.cache, known, jnp.asarray(right))
        running = data.draw(st.permutations(joined))
        output = server.speculate(*((requests[i], limits[i]) for i in running))
        outputs.append((running, limits, output))
    got = [[] for _ in requests]
    for running, limits, output in outputs:
        for row, i in enumerate(running):
            count = int(output.counts[row])
            assert 1 <= count <= 1 + int(output.verified[row]) <= 1 + limits[i]
            got[i] += output.tokens[row, :count].tolist()
    for i in range(3):
        count = min(len(got[i]), GENERATED - 1)
        assert got[i][:count] == chosen[i, 1 : count + 1].tolist()


def test_a_plain_decode_step_takes_the_drafts_back_and_keeps_the_context(tiny, undrafted):
    requests, chosen, _ = undrafted
    server = serve(tiny)
    begin(server, *requests)
    server.draft(*requests)
    output = decode(server, *((r, len(r.prompt), [-1]) for r in requests))
    assert output.tokens[:, 0].tolist() == chosen[:, 1].tolist()
    assert server.cache.drafts.counts.tolist() == [0] * 3
    output = server.speculate(*((r, 4) for r in requests))
    assert output.verified.tolist() == [0] * 3
    assert output.tokens[:, 0].tolist() == chosen[:, 2].tolist()
    fresh = serve(tiny)
    again = dataclasses.replace(requests[2], prompt=following(requests, chosen)[2, : LENGTHS[2] + 2])
    begin(fresh, again)
    expected = drafted(fresh, again)
    assert_same_drafts(
        (
            np.asarray(output.draft.tokens[2]),
            np.asarray(output.draft.confidences[2]),
            ring_rows(server, 2, LENGTHS[2] + 2),
        ),
        expected,
    )


def test_drafts_of_an_earlier_owner_are_never_verified(tiny, undrafted):
    requests, chosen, _ = undrafted
    server = serve(tiny)
    begin(server, requests[0])
    server.draft(requests[0])
    heir = dataclasses.replace(requests[1], slot=0)
    begin(server, heir, cuts=[9])
    output = server.speculate((heir, 4))
    assert (int(output.verified[0]), int(output.counts[0])) == (0, 1)
    assert int(output.tokens[0, 0]) == chosen[1, 1]


def test_a_given_token_runs_in_place_of_the_one_that_was_chosen(tiny, undrafted):
    """As after a preemption, when what was generated runs again."""
    requests, chosen, _ = undrafted
    server = serve(tiny)
    begin(server, *requests)
    for n in range(4):
        state = server.cache.sampling
        server.cache = server.cache.replace(sampling=state.replace(next_tokens=(state.next_tokens + 1) % 300))
        output = server.speculate(*((r, 0) for r in requests), tokens=chosen[:, n].astype(np.int32))
        assert output.tokens[:, 0].tolist() == chosen[:, n + 1].tolist()
        assert output.counts.tolist() == [1, 1, 1]


def test_a_request_stops_at_its_end(tiny, undrafted):
    """However many drafts are right; afterwards it runs nothing and stays as it is, beside one that goes on."""
    requests, chosen, _ = undrafted
    one, other = requests[1], requests[2]
    server = serve(tiny)
    begin(server, one, other)
    server.draft(one, other)
    end, counts = LENGTHS[1] + 7, []
    for step in range(5):
        server.cache = with_drafts(server.cache, following(requests, chosen), jnp.full(3, 4))
        if step == 3:
            before = jax.tree.map(lambda a: np.asarray(a[1]), per_slot(server.cache))
        output = server.speculate((one, 4), end=end)
        counts.append(int(output.counts[0]))
        if step % 2 == 0:
            server.speculate((other, 4))
    assert counts == [5, 2, 0, 0, 0]
    assert not np.asarray(output.tokens).any() and not np.asarray(output.logprobs).any()
    assert int(server.cache.sampling.next_tokens[1]) == chosen[1, 7]
    chex.assert_trees_all_equal(jax.tree.map(lambda a: np.asarray(a[1]), per_slot(server.cache)), before)
    # More room, and it goes on.
    output = server.speculate((one, 4))
    assert int(output.tokens[0, 0]) == chosen[1, 8]


def per_slot(cache):
    return cache.windows, cache.open_groups, cache.draft_windows, cache.ngram_ids, cache.sampling, cache.drafts


def test_other_slots_and_pages_are_never_written(tiny, undrafted):
    """Padded rows write nothing, rows that run write their own slot and pages only."""
    requests, chosen, _ = undrafted
    server = serve(tiny)
    request = dataclasses.replace(requests[1], pages=own_pages(1)[:5])
    begin(server, requests[0])
    cache = jax.device_get(server.cache)
    begin(server, request)
    server.draft(request)
    for right in (4, 0, 4):
        server.cache = with_drafts(server.cache, following(requests, chosen), jnp.full(3, right))
        drafts = jax.device_get(server.cache.drafts)
        output = server.speculate((request, 4), end=40)
    assert int(output.counts[0]) == 5
    after = jax.device_get(server.cache.replace(drafts=drafts))
    others = np.array([0, 2])
    before, now = (jax.tree.map(lambda a: a[others], per_slot(c.replace(drafts=None))) for c in (cache, after))
    chex.assert_trees_all_equal(now, before)
    foreign = np.setdiff1d(np.arange(64), request.pages)
    for pool, old in zip((*after.entries, *after.index_keys), (*cache.entries, *cache.index_keys), strict=True):
        np.testing.assert_array_equal(pool[foreign], old[foreign])
    final = jax.device_get(server.cache.drafts)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a[others], final), jax.tree.map(lambda a: a[others], drafts))


# Drafts drawn at random, a chosen number of drafts, masks per position: one program with all of them.

FLAT, STEEP = np.ones(16, np.float32), np.float32(10.0 ** np.arange(16))
ALL = np.full((3, 5, 16), 2**32 - 1, np.uint32)


def speculate_at_random(server: Server, *parts, step_seconds=FLAT, **options):
    """A step with drafts of their own noise; prefill and the first round run as programs for shared noise."""
    if server.cache.drafts.logits is None:
        logits = jnp.zeros((*server.cache.drafts.tokens.shape, server.cfg.vocab_size))
        server.cache = server.cache.replace(drafts=server.cache.drafts.replace(logits=logits))
    return server.speculate(*parts, step_seconds=step_seconds, **options)


def test_the_cache_for_own_noise_has_what_the_tests_give_it(tiny):
    drafts = serve(tiny, drafts="own").cache.drafts
    assert drafts.logits.shape == (3, 4, tiny.cfg.vocab_size)


def test_random_drafts_are_drawn_from_what_the_slot_keeps(tiny, undrafted):
    """And a seeded request gets the same tokens and drafts in any slot, row and company."""
    requests, _, _ = undrafted
    runs = []
    for slots, company in (((0, 1, 2), True), ((2, 1, 0), True), ((1, 0, 2), False)):
        server = serve(tiny)
        moved = [dataclasses.replace(r, slot=slots[i], pages=own_pages(slots[i])) for i, r in enumerate(requests)]
        begin(server, *moved)
        rows = sorted(range(3), key=lambda i: slots[i]) if company else [0]
        stream = []
        for step in range(6):
            output = speculate_at_random(server, *((moved[i], 4) for i in rows), min_drafts=4)
            row, kept = rows.index(0), server.cache.drafts
            count = int(output.counts[row])
            assert int(output.verified[row]) == (4 if step else 0)
            stream.append((output.tokens[row, :count].tolist(), kept.tokens[moved[0].slot].tolist()))
            assert output.draft.tokens[row].tolist() == kept.tokens[moved[0].slot].tolist()
        runs.append(stream)
        if company:
            params = jax.tree.map(jnp.asarray, server._speculative(*((r, 0) for r in moved)).sampling)
            by_request = np.array(slots)
            drafts = jax.tree.map(lambda a, at=by_request: a[at], kept)
            for j in range(4):
                drawn = draw_drafts(drafts.logits[:, j], params, drafts.positions + 1 + j, drafts.positions)
                assert drawn.tolist() == drafts.tokens[:, j].tolist()
            best = drafts.logits.argmax(-1).tolist()
            assert drafts.tokens[1].tolist() == best[1]
            assert drafts.tokens[0].tolist() != best[0]
            server.cache = server.cache.replace(drafts=kept.replace(logits=None))
            shared = server.draft(*moved).tokens[:, 0]
            first = drafts.logits[:, 0], params, drafts.positions + 1, drafts.positions
            assert shared.tolist() == draw_drafts(*first, shared_noise=True).tolist()
    assert runs[0] == runs[1] == runs[2]


def test_the_number_of_drafts_follows_costs_and_limits(tiny, undrafted):
    requests, chosen, _ = undrafted
    greedy, known = requests[1], following(requests, chosen)
    server = serve(tiny)
    begin(server, greedy)
    speculate_at_random(server, (greedy, 4))
    for costs, min_drafts, room, verified in ((FLAT, 0, 9, 4), (STEEP, 0, 9, 0), (STEEP, 2, 9, 2), (FLAT, 2, 1, 1)):
        server.cache = with_drafts(server.cache, known, jnp.full(3, 4))
        position = int(server.cache.drafts.positions[1])
        output = speculate_at_random(
            server, (greedy, 4), step_seconds=costs, min_drafts=min_drafts, end=position + 1 + room
        )
        assert output.verified.tolist() == [verified, 0, 0]
        # All of them are right.
        assert output.counts.tolist() == [verified + 1, 0, 0]
        assert output.tokens[0, : verified + 1].tolist() == known[1, position + 1 : position + verified + 2].tolist()


def test_masks_of_positions_end_the_accepted_drafts(tiny, undrafted):
    """The second token may be one of three only, whatever the drafts say."""
    requests, chosen, _ = undrafted
    greedy, few = requests[1], [7, 70, 170]
    server = serve(tiny)
    begin(server, greedy)
    speculate_at_random(server, (greedy, 4))
    server.cache = with_drafts(server.cache, following(requests, chosen), jnp.full(3, 4))
    masks = ALL.copy()
    masks[0, 1] = np.packbits(np.isin(np.arange(512), few), bitorder="little").view(np.uint32)
    server.cache = set_allowed_tokens(server.cache, np.int32([1, 3, 4]), masks)  # the others: padded rows
    output = speculate_at_random(server, (greedy, 4))
    assert int(output.counts[0]) == 2
    assert int(output.tokens[0, 0]) == chosen[1, 2]
    assert int(output.tokens[0, 1]) in few


def test_nothing_runs_behind_a_pause_token_before_the_host_has_seen_it(tiny, undrafted):
    """The slot stays as it is meanwhile, and goes on with the drafts that it has."""
    requests, chosen, logprobs = undrafted
    server, known = serve(tiny), following(requests, chosen)
    begin(server, *requests)
    turning = int(chosen[1, 3])
    assert turning not in chosen[1, 1:3]
    pauses = np.full((3, 2), -1, np.int32)
    pauses[1, 1] = turning
    seen, got = np.int32([len(r.prompt) for r in requests]), []
    for step in range(5):
        server.cache = with_drafts(server.cache, known, jnp.full(3, 4))
        kept = jax.device_get(jax.tree.map(lambda a: a[1], server.cache.drafts))
        output = server.speculate(*((r, 4) for r in requests), pauses=(pauses, seen))
        got.append(int(output.counts[1]))
        if step in (2, 3):
            chex.assert_trees_all_equal(jax.device_get(jax.tree.map(lambda a: a[1], server.cache.drafts)), kept)
        if step == 3:
            seen[1] = len(requests[1].prompt) + 3
    # No drafts yet; two of four; a pause of two steps; all of them.
    assert got == [1, 2, 0, 0, 5]
    assert output.tokens[1].tolist() == chosen[1, 4:9].tolist()
    np.testing.assert_allclose(output.logprobs[1], logprobs[1, 3:8], atol=1e-4, rtol=1e-4)
    assert int(output.verified[1]) == 4


def test_no_compilation_after_the_first_step(tiny, undrafted):
    requests, _, _ = undrafted
    server = serve(tiny)
    begin(server, *requests)
    server.draft(*requests)
    server.speculate((requests[0], 4))
    sizes = draft_step._cache_size(), speculative_step._cache_size()
    server.draft(requests[2])
    for limit in range(5):
        server.speculate((requests[1], limit), (requests[2], 4 - limit))
    assert (draft_step._cache_size(), speculative_step._cache_size()) == sizes


def test_unusable_batches_and_caches_are_refused(tiny, tokens):
    cfg, with_drafts_ = tiny.cfg, CacheConfig(slots=3, pages=64, page_size=8, slack=5, drafts="shared")
    request = SpeculativeRequest(slot=0, pages=[0, 1], end=16, max_drafts=4)
    pack = functools.partial(speculative_batch, cfg)
    with pytest.raises(ValueError, match="drafts = 'all': must be None, 'shared' or 'own'"):
        CacheConfig(slots=3, pages=64, drafts="all")
    with pytest.raises(ValueError, match="drafts = None: the cache holds no drafts"):
        pack(dataclasses.replace(with_drafts_, drafts=None), [request], DRAFTS)
    with pytest.raises(ValueError, match=r"tokens_per_request = 6: at most 5.*dspark_block_size = 4"):
        pack(dataclasses.replace(with_drafts_, slack=9), [request], dataclasses.replace(DRAFTS, tokens_per_request=6))
    with pytest.raises(ValueError, match=r"tokens_per_request = 5: at most 3, of slack = 3"):
        pack(dataclasses.replace(with_drafts_, slack=3), [request], DRAFTS)
    with pytest.raises(ValueError, match=r"request 0: max_drafts = 5 is not in 0\.\.4"):
        pack(with_drafts_, [dataclasses.replace(request, max_drafts=5)], DRAFTS)
    with pytest.raises(ValueError, match="request 0: 2 pages of 8 do not cover 17 tokens"):
        pack(with_drafts_, [dataclasses.replace(request, end=17)], DRAFTS)
    with pytest.raises(ValueError, match="request 0: max_drafts = 4: must be 0 with a token given"):
        pack(with_drafts_, [dataclasses.replace(request, token=5)], DRAFTS)
    with pytest.raises(ValueError, match="request 0: 3 pause_tokens: at most 2 are allowed"):
        pack(with_drafts_, [dataclasses.replace(request, pause_tokens=(1, 2, 3))], DRAFTS)
    with pytest.raises(ValueError, match=r"request 0: token: token id -2 is not in 0\.\."):
        pack(with_drafts_, [dataclasses.replace(request, token=-2)], DRAFTS)
    with pytest.raises(ValueError, match="request 0: 136 tokens exceed the bucket's context of 128"):
        pack(with_drafts_, [dataclasses.replace(request, end=136, pages=range(17))], DRAFTS)
    with pytest.raises(ValueError, match="request 1: slot 0 is taken"):
        pack(with_drafts_, [request, request], DRAFTS)
    batch = pack(with_drafts_, [request], DRAFTS)
    plain = serve(tiny, drafts=None)
    assert plain.cache.draft_windows == () and plain.cache.drafts is None
    for step in (draft_step, speculative_step):
        with pytest.raises(ValueError, match="cache: was made without drafts"):
            step(tiny.params, plain.cache, batch, cfg=cfg)
        with pytest.raises(ValueError, match="slots: the batch was made for 3, the cache has 4"):
            step(tiny.params, serve(tiny, slots=4).cache, batch, cfg=cfg)
    layers = tiny.params["layers"]
    bare = layers[0] | {"engram": {k: v for k, v in layers[0]["engram"].items() if k != "embed"}}
    with pytest.raises(ValueError, match="speculative_step needs the Engram tables on the device"):
        speculative_step(tiny.params | {"layers": layers | {0: bare}}, serve(tiny).cache, batch, cfg=cfg)
