"""What the scheduler promises with drafts, when only the device knows how many tokens a step brings."""

import dataclasses
import functools

import numpy as np
import pytest
from engine_model import ChainMask, CheckingExecutor, PausingMask, rollout
from test_scheduler import EXACT, SMALL, Altering, Recorder, assert_empty, drain, request

from dsv4jax.engine.engine import Engine
from dsv4jax.engine.request import RequestTooLarge
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.simulated import LinearCost, SimulatedExecutor, constant_tokens, fixed_acceptance
from dsv4jax.sampling_settings import RequestSampling

DRAFTING = dataclasses.replace(SMALL, drafts=4, pages=60)


def make(cfg=DRAFTING, acceptance=1.0, depth=2, executor=CheckingExecutor):
    executor = executor(cfg)
    executor.acceptance = acceptance
    return Engine(Scheduler(cfg), executor, Recorder(), depth=depth), executor


def free(prompt, tokens, name="r", **options):
    return request(prompt, tokens, name, ignore_eos=True, **options)


def speculations(executor, rank=0):
    given = [p.speculation.of_rank(rank) for p in executor.plans if p.speculation is not None]
    return [part for part in given if part is not None]


def test_right_drafts_save_steps_and_everything_is_counted():
    engine, executor = make()
    made = engine.submit(free([2, 3, 4], 41, drafts=4))[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    first = executor.plans[0].ranks[0]
    assert first.first_drafts == (first.prefills[0].slot,)
    # 40 tokens after the first, five a step; one step is in flight when the last token comes.
    assert len(speculations(executor)) == 9
    drafts = engine.stats().drafts
    assert (drafts.rounds, drafts.verified, drafts.accepted) == (8, [8] * 4, [8] * 4)
    assert (made.draft_rounds, made.drafted, made.accepted) == (8, 32, 32)
    (record,) = engine.observer.requests
    assert (record.draft_rounds, record.drafted, record.accepted) == (8, 32, 32)
    steps = engine.observer.steps
    assert sum(s.output_tokens for s in steps) == engine.stats().output_tokens == 41
    gaps = np.concatenate([s.inter_token_seconds for s in steps])
    assert (len(gaps), np.count_nonzero(gaps)) == (40, 8)


def test_wrong_drafts_cost_nothing_but_their_pages():
    cfg = dataclasses.replace(DRAFTING, pages=9, max_model_len=36)
    engine, executor = make(cfg, acceptance=0.0)
    made = engine.submit(free([2, 3, 4], 33, drafts=4))[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    assert (made.accepted, made.preemptions) == (0, 0)
    assert max(int(s.max_drafts[0]) for s in speculations(executor)) == 4
    assert_empty(engine)


@pytest.mark.parametrize(("drafts", "least", "most"), [(None, 0, 4), (0, None, None), (1, 1, 1), (4, 4, 4)])
def test_a_request_says_how_many_drafts_it_wants(drafts, least, most):
    engine, executor = make()
    made = engine.submit(free([2, 3, 4], 20, drafts=drafts))[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    plans = speculations(executor)
    if most is None:
        assert not plans and not executor.plans[0].ranks[0].first_drafts, "nobody drafts: the plain program runs"
        return
    assert {int(s.min_drafts[0]) for s in plans} == {least} and {int(s.max_drafts[0]) for s in plans} == {most}


def test_requests_without_drafts_run_in_the_same_program_as_those_with_them():
    cfg = dataclasses.replace(DRAFTING, ranks=3)
    engine, executor = make(cfg, 0.5)
    made = [engine.submit(free([2, 3, i], 30, f"r{i}", drafts=4 if i == 4 else 0))[0] for i in range(2, 8)]
    for _ in range(4):
        engine.step()
    later = executor.plans[1:]
    assert all(p.decodes is None and set(p.speculation.ranks.tolist()) == {0, 1, 2} for p in later)
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert sum(s.drafted > 0 for s in made) == 1
    assert executor.plans[-1].decodes is not None, "once nobody drafts any more, the plain program runs"


def test_drafts_end_at_the_length_that_the_request_says():
    engine, executor = make(acceptance=0.0, depth=1)  # with one step in flight the host knows every position
    made = engine.submit(free([2, 3, 4], 40, drafts=4, draft_context=20))[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    assert [(s.positions[0], s.max_drafts[0]) for s in speculations(executor)] == [(p, 4) for p in range(3, 20)]
    assert executor.plans[-1].decodes is not None
    assert engine.stats().drafts.withheld["context"] > 0


@pytest.mark.parametrize("ends", ["eos", "stop", "length"])
def test_tokens_behind_the_end_of_a_choice_are_dropped(ends):
    engine, _ = make()
    whole = rollout(free([2, 3], 24), 0)
    for count in range(6, 11):  # every place in a block of drafts
        if ends == "eos":
            cfg = dataclasses.replace(DRAFTING, eos_id=whole[count])
            engine, _ = make(cfg)
            made = engine.submit(request([2, 3], 24))[0]
        elif ends == "stop":
            made = engine.submit(free([2, 3], 24, stop_token_ids=(whole[count],)))[0]
        else:
            made = engine.submit(free([2, 3], count))[0]
        drain(engine)
        end = count if ends == "length" else whole.index(whole[count]) + 1
        assert made.generated == whole[:end]
        assert (made.finish_reason, made.stop_reason) == (
            "length" if ends == "length" else "stop",
            whole[count] if ends == "stop" else None,
        )
        assert_empty(engine)


def test_log_probabilities_come_for_each_token_as_far_as_they_are_asked_for():
    class WithLogprobs(CheckingExecutor):
        def _run(self, rank, step):
            result, decodes, speculation = super()._run(rank, step)
            result = dataclasses.replace(result, prefills=result.prefills and with_logprobs(result.prefills))
            return result, decodes, speculation and with_logprobs(speculation)

    def with_logprobs(part):
        best = np.broadcast_to(np.arange(20), (*part.tokens.shape, 20)).astype(np.int32)
        logprobs = -part.tokens.astype(np.float32)
        return dataclasses.replace(part, logprobs=logprobs, top_tokens=best, top_logprobs=-best.astype(np.float32))

    engine, _ = make(executor=WithLogprobs, acceptance=0.6)
    asks = [engine.submit(free([2, i], 20, f"r{i}", sampling=RequestSampling(top_logprobs=i - 2)))[0] for i in (2, 5)]
    none = engine.submit(free([2, 4], 20, "none"))[0]
    drain(engine)
    for sequence, best in zip(asks, (0, 3), strict=True):
        assert sequence.logprobs == [-t for t in sequence.generated]
        pairs = tuple((i, -i) for i in range(best))
        assert sequence.top_logprobs == [pairs] * 20
    assert none.logprobs == none.top_logprobs == []


def test_undefined_logits_behind_an_accepted_draft_end_the_choice_there():
    engine, executor = make(executor=Altering)
    made = [engine.submit(free([2, i], 20, f"r{i}"))[0] for i in (2, 3)]

    def alter(plan, result):
        speculated = result.speculation
        if plan.number == 2:
            row = plan.speculation.slots.tolist().index(made[1].slot)
            assert speculated.counts[row] > 2
            speculated.logprobs[row, 2] = np.nan
        return result

    executor.alter = alter
    for _ in range(2):
        engine.step()
    before = 1 + len(made[1].generated)
    drain(engine)
    assert (made[1].finish_reason, "undefined" in made[1].error) == ("error", True)
    assert made[1].generated == rollout(made[1].request, 0)[: len(made[1].generated)]
    assert len(made[1].generated) > before
    assert made[0].generated == rollout(made[0].request, 0)
    assert_empty(engine)


@pytest.mark.parametrize(
    "mask",
    [
        functools.partial(ChainMask, waits=False, period=1000),
        functools.partial(ChainMask, waits=False, period=9),
        functools.partial(ChainMask, waits=False),
        functools.partial(ChainMask, waits=True),
        PausingMask,
    ],
    ids=["constant", "changes once in a while", "changes", "depends on tokens", "turns with a token"],
)
def test_right_drafts_stand_under_any_mask(mask):
    engine, executor = make()
    asked = free([2, 3, 4], 41, mask=mask, drafts=4)
    executor.futures = [[2, 3, 4, *rollout(asked, 0)]]
    made = engine.submit(asked)[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    assert made.accepted >= 28, "of 32 that stand without a mask, a pause costs the drafts behind it"


def test_a_choice_whose_mask_turns_with_a_token_overlaps_its_steps():
    engine, executor = make()
    asked = free([2, 3, 4], 60, mask=PausingMask, drafts=4)
    executor.futures = [[2, 3, 4, *rollout(asked, 0)]]
    made = engine.submit(asked)[0]
    drain(engine)
    plans = [(int(s.positions[0]), int(s.seen[0]), bool(s.pause_tokens[0, 0] >= 0)) for s in speculations(executor)]
    ahead = [pauses for position, seen, pauses in plans if position > seen]
    assert len(ahead) > 3 and all(ahead), "what runs before the host has seen the newest token stops at a pause"
    assert any(not pauses for *_, pauses in plans)
    assert made.generated == rollout(made.request, 0)


def test_a_choice_that_may_be_in_a_pause_does_not_run_without_drafts():
    """Its step would be taken to bring one token; the host finds out once it drafts no more."""
    cfg = dataclasses.replace(DRAFTING, pages=15, max_model_len=60, drafts=8)
    engine, executor = make(cfg, acceptance=0.8)
    seeded = functools.partial(free, mask=PausingMask, drafts=8, sampling=RequestSampling(seed=81))
    asked = [seeded([2, i], 28, f"r{i}", draft_context=14 + i) for i in range(2, 6)]
    executor.futures = [[*a.prompt, *rollout(a, 0)] for a in asked]
    made = [engine.submit(a)[0] for a in asked]
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert engine.stats().drafts.withheld["pages"] > 0 and engine.stats().drafts.withheld["context"] > 0


def test_pages_for_drafts_are_given_back_before_anybody_is_preempted():
    """Both requests fit to their last token, but not both with the pages that drafts might need."""
    cfg = dataclasses.replace(DRAFTING, pages=12, max_model_len=24, drafts=8)
    engine, _ = make(cfg, acceptance=0.0)
    made = [engine.submit(free([2, i], 22, f"r{i}"))[0] for i in (2, 3)]
    drain(engine)
    assert not any(s.preemptions for s in made)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert_empty(engine)


def test_if_pages_are_short_fewer_drafts_are_verified():
    cfg = dataclasses.replace(DRAFTING, slots=4, pages=15, max_model_len=60, drafts=8, page_size=4)
    engine, executor = make(cfg, acceptance=0.3)
    made = [engine.submit(free([2, i], 30, f"r{i}", drafts=8))[0] for i in range(2, 6)]
    drain(engine)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert made[0].preemptions == 0
    most = [int(n) for s in speculations(executor) for n in s.max_drafts]
    assert 0 in most and 8 in most and set(most) - {0, 8}
    assert engine.stats().drafts.withheld["pages"] > 0
    assert_empty(engine)


def test_a_preempted_choice_goes_on_without_its_drafts_and_then_drafts_again():
    cfg = dataclasses.replace(DRAFTING, pages=14, max_model_len=56)
    engine, executor = make(cfg, acceptance=0.5)
    made = [engine.submit(free([i + 2] * 5, 40, f"r{i}"))[0] for i in range(4)]
    drain(engine)
    assert engine.scheduler.preemptions > 0
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert sum(len(p.ranks[0].first_drafts) for p in executor.plans) > len(made)


def test_deterministic_reruns_run_one_by_one_in_the_program_of_all():
    cfg = dataclasses.replace(EXACT, pages=14, max_model_len=56, deterministic=True, drafts=4)
    engine, executor = make(cfg, acceptance=0.5)
    made = [engine.submit(free([i + 2] * 5, 40, f"r{i}"))[0] for i in range(4)]
    drain(engine)
    assert any(s.preemptions for s in made)
    assert all(s.generated == rollout(s.request, 0) for s in made)
    assert all(p.decodes is None for p in executor.plans)
    given = [(s.tokens >= 0, s.max_drafts) for s in speculations(executor)]
    assert any(known.any() and drafts.any() for known, drafts in given)
    assert not any(drafts[known].any() for known, drafts in given)


def test_in_deterministic_mode_the_program_does_not_depend_on_other_requests():
    engine, executor = make(dataclasses.replace(EXACT, deterministic=True, drafts=4))
    made = engine.submit(free([2, 3], 9, drafts=0))[0]
    drain(engine)
    assert made.generated == rollout(made.request, 0)
    assert len(speculations(executor)) == 8 and made.drafted == 0


@pytest.mark.parametrize(("tokens", "cached"), [(28, 30), (29, 34)])
def test_pages_with_confirmed_tokens_are_found_by_the_next_request(tokens, cached):
    """All but the newest token are in pages, of which a window of 6 runs again."""
    engine, _ = make(dataclasses.replace(DRAFTING, max_model_len=80), acceptance=0.5)
    first = engine.submit(free(np.arange(2, 14), tokens, "first"))[0]
    drain(engine)
    second = engine.submit(free(np.concatenate([np.arange(2, 14), first.generated, [5]]), 3, "second"))[0]
    drain(engine)
    assert second.first_cached == cached
    assert second.generated == rollout(second.request, 0)


def test_drafts_that_no_engine_makes_are_refused_by_name():
    with pytest.raises(RequestTooLarge, match="drafts = 5: this engine makes at most 4"):
        Scheduler(DRAFTING).check(free([2], 3, drafts=5))
    with pytest.raises(RequestTooLarge, match="drafts = 1: this engine makes none"):
        Scheduler(SMALL).check(free([2], 3, drafts=1))
    Scheduler(SMALL).check(free([2], 3, drafts=0))
    for name in ("drafts", "draft_context"):
        with pytest.raises(ValueError, match=f"{name} = -1: must be at least 0, or None"):
            free([2], 3, **{name: -1})
    with pytest.raises(ValueError, match="drafts = 2: must be 0 with tokens_on_host"):
        dataclasses.replace(SMALL, drafts=2, tokens_on_host=True)
    with pytest.raises(ValueError, match="drafts = -1: must be at least 0"):
        dataclasses.replace(SMALL, drafts=-1)


def test_simulated_acceptance_gives_the_length_that_its_law_promises():
    law = [0.8, 0.7, 0.5, 0.5]
    executor = SimulatedExecutor(LinearCost(), constant_tokens(7), fixed_acceptance(law), block=4)
    engine = Engine(Scheduler(dataclasses.replace(DRAFTING, pages=4000, max_model_len=12_000)), executor, Recorder())
    (made,) = engine.submit(free([2, 3, 4], 10_000, sampling=RequestSampling(top_logprobs=2)))
    drain(engine, 20_000)
    assert len(made.generated) == len(made.top_logprobs) == 10_000
    assert 1 + made.accepted / made.draft_rounds == pytest.approx(1 + np.cumprod(law).sum(), rel=0.03)
    drafts = engine.stats().drafts
    assert np.array(drafts.accepted) / drafts.rounds == pytest.approx(np.cumprod(law), abs=0.03)
