"""Plans as bytes: every field of every step comes back, and a prompt travels once."""

import dataclasses

import numpy as np
import pytest
from test_recording import record
from test_scheduler import EXACT, SMALL

from dsv4jax.engine.plan import Decodes, Prefill, RankPlan, SlotMask, SlotStart, StepPlan
from dsv4jax.engine.plan_codec import PlanDecoder, PlanEncoder
from dsv4jax.engine.recording import plan_difference
from dsv4jax.sampling_settings import RequestSampling

NOTHING = RankPlan((), (), ())


@pytest.mark.parametrize("cfg", [SMALL, EXACT, dataclasses.replace(SMALL, ranks=2, pages=16, drafts=3)])
def test_every_plan_of_a_busy_time_comes_back(cfg):
    events, _ = record(cfg)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    plans = [event.plan for event in events if event.plan]
    names = ("starts", "masks", "prefills", "speculation", "first_drafts") if cfg.drafts else ("starts", "decodes")
    seen = dict.fromkeys(names, False)
    for plan in plans:
        back = decoder.decode(encoder.encode(plan))
        assert plan_difference(plan, back) is None
        for rank, other in zip(plan.ranks, back.ranks, strict=True):
            there = vars(plan) | vars(rank)
            seen = {name: found or bool(there[name]) for name, found in seen.items()}
            assert [m.mask is None for m in rank.masks] == [m.mask is None for m in other.masks]
    assert all(seen.values())


def test_arrays_keep_type_shape_and_alignment_whatever_is_before_them():
    mask = np.array([0xDEADBEEF, 1, 2], np.uint32)
    tokens = np.arange(7, dtype=np.int32)
    for slot in (1, 10, 100, 1000):  # headers of other lengths
        start = SlotStart(slot, tokens, 2, RequestSampling(seed=-5, top_logprobs=3), {5: -1.5, 0: 0.1})
        chunk = Prefill(slot, tokens, 1, 4, np.zeros(0, np.int32), 0, 0, 2)
        ints = np.array([slot, 2], np.int32)
        tables = {1: np.arange(6, dtype=np.int32).reshape(3, 2).T, 4: np.arange(6, dtype=np.int32).reshape(2, 3)}
        ranks, slots = np.array([1, 1, 4, 4], np.int32), np.tile(ints, 2)
        decodes = Decodes(ranks, slots, tables, slots, -slots)
        by_place = np.stack([mask, ~mask])
        masks = (SlotMask(slot, mask), SlotMask(0, None), SlotMask(3, by_place))
        rank = RankPlan((start,), masks, (chunk,))
        back = PlanDecoder().decode(PlanEncoder().encode(StepPlan(3, (NOTHING, rank, NOTHING), decodes)))
        assert back.number == 3 and back.speculation is None and not back.ranks[2].starts
        assert back.decodes.page_tables.keys() == tables.keys()
        other = back.ranks[1]
        assert other.starts[0].sampling == start.sampling and other.starts[0].logit_bias == start.logit_bias
        assert other.prefills[0].tokens is other.starts[0].tokens
        pairs = [(tokens, other.starts[0].tokens), (mask, other.masks[0].mask), (chunk.pages, other.prefills[0].pages)]
        pairs += [(by_place, other.masks[2].mask)]
        pairs += [(tables[rank], back.decodes.page_tables[rank]) for rank in tables]
        columns = [f.name for f in dataclasses.fields(decodes) if f.name != "page_tables"]
        pairs += [(getattr(decodes, name), getattr(back.decodes, name)) for name in columns]
        for sent, received in pairs:
            assert received.dtype == sent.dtype and received.shape == sent.shape and received.flags.aligned
            np.testing.assert_array_equal(received, sent)


def test_a_long_prompt_travels_once():
    tokens, pages = np.arange(855_000, dtype=np.int32), np.arange(13_360, dtype=np.int32)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    start = SlotStart(4, tokens, 0, RequestSampling(), {})
    sizes = []
    for i in range(20):
        chunk = Prefill(4, tokens, 2048 * i, 2048 * (i + 1), pages, 0, 0)
        content = encoder.encode(StepPlan(i, (NOTHING, RankPlan((start,) if i == 0 else (), (), (chunk,)))))
        sizes.append(len(content))
        plan = decoder.decode(content)
        assert np.array_equal(plan.ranks[1].prefills[0].tokens, tokens)
    assert sizes[0] > tokens.nbytes
    assert max(sizes[1:]) < pages.nbytes + 1000


def test_only_changes_of_page_tables_travel():
    rng = np.random.default_rng(0)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    tables = rng.integers(0, 5000, (64, 3000)).astype(np.int32)
    sizes = []
    for step in range(40):
        slots = np.sort(rng.choice(64, 50, replace=False)).astype(np.int32)
        tables[rng.integers(64), rng.integers(3000)] = rng.integers(5000)
        width = 1000 + 50 * step  # wider and, at the end, narrower
        table = tables[slots, : width if step < 35 else 10]
        decodes = Decodes(np.ones(50, np.int32), slots, {1: table}, slots, slots)
        content = encoder.encode(StepPlan(step, (NOTHING, NOTHING), decodes))
        sizes.append(len(content))
        back = decoder.decode(content).decodes
        np.testing.assert_array_equal(back.page_tables[1], table)
        np.testing.assert_array_equal(back.slots, slots)
    assert sizes[0] > 50 * 1000 * 4
    assert max(sizes[35:]) < 2000


def test_a_prefill_of_other_tokens_than_its_slot_was_started_with_is_refused():
    tokens = np.arange(5, dtype=np.int32)
    chunk = Prefill(2, tokens, 0, 5, np.zeros(1, np.int32), 0, 0)
    start = SlotStart(2, tokens[::-1].copy(), 0, RequestSampling(), {})
    for starts in ((), (start,)):
        plan = StepPlan(7, (RankPlan(starts, (), (chunk,)),))
        with pytest.raises(ValueError, match="step 7: slot 2 was not started with these tokens"):
            PlanEncoder().encode(plan)
