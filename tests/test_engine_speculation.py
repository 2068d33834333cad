"""The engine on the model with drafts: each request gets what it gets without them, whatever stands of the drafts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import NOQUANT, drafting_model
from test_scheduler import Recorder, assert_empty, drain

from dsv4jax.batch import DecodeBucket, SpeculativeBatch
from dsv4jax.cache import CacheConfig
from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom, Room
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.grammar import (
    Choice,
    ContextFreeGrammar,
    GrammarCompiler,
    JsonObject,
    JsonSchema,
    Regex,
    ToolCalls,
    ToolSchema,
)
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.token_mask import MaskRules, mask_factory
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.tokenizer import Tokenizer

LENGTH, DRAFTS = 160, 4
# The least slack that the steps may have.
CACHE = CacheConfig(slots=3, pages=36, page_size=4, slack=DRAFTS + 1, drafts="shared")


@jax.jit
def with_drafts(cache, slots, drafted, following, right):
    """The cache with the tokens that follow in slots that have drafted as drafts, and the drafts of all.

    Of each the first `right` are right. Confidences predict an even chance for each.
    """
    drafts, rows = cache.drafts, jnp.where(drafted, slots, cache.num_slots)
    at = drafts.positions[:, None] + 1 + jnp.arange(drafts.tokens.shape[1])
    tokens = jnp.take_along_axis(following, jnp.clip(at, 0, LENGTH - 1), 1)
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < right[:, None], tokens, (tokens + 1) % 100)
    tokens = drafts.tokens.at[rows].set(tokens.at[slots].get(mode="fill", fill_value=0), mode="drop")
    drafts = drafts.replace(tokens=tokens, confidences=jnp.zeros_like(drafts.confidences))
    return cache.replace(drafts=drafts), tokens.at[slots].get(mode="fill", fill_value=-7)


class WithRightDrafts(JaxExecutor):
    """Drafts, in place of what the model drafts, what requests are known to get, up to some random place in each."""

    known: tuple = ()

    def reset(self):
        super().reset()
        self.ran = set()  # buckets of decode steps
        self.rng = np.random.default_rng(0)
        self.following = np.zeros((CACHE.slots, LENGTH), np.int32)

    def _start(self, starts):
        super()._start(starts)
        for start in starts:
            for tokens in self.known:
                if np.array_equal(tokens[: len(start.tokens)], start.tokens):
                    self.following[start.slot, : len(tokens)] = tokens

    def _run(self, bucket, batches):
        output = super()._run(bucket, batches)
        (batch,) = batches
        self.ran |= {bucket} if isinstance(bucket, DecodeBucket) else set()
        if not isinstance(batch, SpeculativeBatch):
            return output
        drafted = output.counts > 0 if bucket in self._programs.buckets.verify else batch.slots < CACHE.slots
        right = self.rng.integers(0, DRAFTS + 1, CACHE.slots).astype(np.int32)
        cache, tokens = with_drafts(self._cache, batch.slots, drafted, self.following, right)
        if not self.known:
            return output
        self._cache = cache
        if bucket in self._programs.buckets.verify:
            return output.replace(draft=output.draft.replace(tokens=tokens))
        return output.replace(tokens=tokens)


@pytest.fixture(scope="module")
def compiled():
    model = drafting_model()
    buckets = make_buckets(
        CACHE,
        prefill_tokens=[32],
        prefill_requests=2,
        decode_requests=[CACHE.slots],
        contexts=[LENGTH],
        prompt_logprobs=False,
        drafts=DRAFTS,
        fewer_drafts=[1],
    )
    programs = Programs(model.cfg, CACHE, buckets, NOQUANT, progress=False)
    cfg = SchedulerConfig(
        slots=CACHE.slots,
        pages=CACHE.pages,
        max_model_len=LENGTH,
        eos_id=1,
        replay=ReplayRule(model.cfg.sliding_window, model.cfg.num_hidden_layers, "exact"),
        page_size=CACHE.page_size,
        prefill_tokens=32,
        prefill_requests=2,
        drafts=DRAFTS,
    )
    executor = WithRightDrafts(model.params, programs, strict=True)
    executor.warm_up(progress=False)
    yield executor, cfg
    executor.close()


def requests(drafts):
    """Chunked prompts, some with a common beginning; greedy ones and seeded ones, with penalties."""
    rng, made = np.random.default_rng(0), []
    base = rng.integers(2, 120, 50)
    for i in range(6):
        prompt = np.concatenate([base if i % 2 else base[:0], rng.integers(2, 120, 3 + 7 * i)]).astype(np.int32)
        sampling = RequestSampling(
            temperature=0.8 * (i == 4), seed=i, top_logprobs=2 * (i % 3) - 1, frequency_penalty=0.4 * (i == 3)
        )
        made.append(
            GenerationRequest(
                f"r{i}", prompt, max_tokens=30 - i, sampling=sampling, ignore_eos=True, drafts=drafts and drafts[i]
            )
        )
    return made


def run(executor, cfg, asked, together, room=None):
    executor.reset()
    engine = Engine(Scheduler(cfg, room), executor, Recorder())
    made = []
    for request in asked:
        made += engine.submit(request)
        if together:
            engine.step()
            engine.step()
        else:
            drain(engine)
    drain(engine)
    assert_empty(engine)
    return made, engine.stats()


@pytest.fixture(scope="module")
def alone(compiled):
    """Each request without drafts and on its own."""
    executor, cfg = compiled
    made, stats = run(executor, dataclasses.replace(cfg, prefix_cache=False), requests([0] * 6), together=False)
    assert stats.drafts.rounds == 0
    executor.known = [np.concatenate([s.request.prompt, s.generated]).astype(np.int32) for s in made]
    return made


def test_tokens_are_those_without_drafts_with_hits_chunks_and_preemptions(compiled, alone):
    executor, cfg = compiled
    made, stats = run(executor, cfg, requests([None, 4, None, 2, None, 0]), together=True)
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert all(
        0 < accepted < verified for accepted, verified in zip(stats.drafts.accepted, stats.drafts.verified, strict=True)
    )
    for sequence, expected in zip(made, alone, strict=True):
        assert sequence.generated == expected.generated
        np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
        assert len(sequence.top_logprobs) == len(expected.top_logprobs)
        for pairs, others in zip(sequence.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in pairs] == [token for token, _ in others]
    assert executor.compilations.count == 0


def test_deterministic_results_are_the_same_bits_whatever_runs_beside_and_stands_of_the_drafts(
    compiled, alone, monkeypatch
):
    executor, cfg = compiled
    cfg = dataclasses.replace(cfg, deterministic=True)
    buckets = executor._programs.buckets
    widest = dataclasses.replace(buckets, verify=buckets.verify[-1:])  # one shape per kind of step
    monkeypatch.setattr(executor._programs, "buckets", widest)
    asked = requests([None, 4, None, 2, None, 0])
    made, stats = run(executor, cfg, asked, together=True)
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and sum(stats.drafts.accepted) > 0
    expected, _ = run(executor, dataclasses.replace(cfg, prefix_cache=False), asked, together=False)
    for one, other, undrafted in zip(made, expected, alone, strict=True):
        assert one.generated == other.generated == undrafted.generated
        assert one.logprobs == other.logprobs and one.top_logprobs == other.top_logprobs


@pytest.fixture(scope="module")
def tokenizer(default_tokenizer_json):
    """The embedded one with the least tokens that the model here has room for."""
    content, kept = json.loads(default_tokenizer_json), 450
    model, added = content["model"], [token for token in content["added_tokens"] if token["id"] >= kept]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < kept}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    for i, token in enumerate(added):
        token["id"] = kept + i
    return Tokenizer(json.dumps(content))


def masked_requests(tokenizer, vocab, drafts):
    """One under each kind of mask that changes, by what changes it; some close their reasoning or begin a call."""
    compiler, end = GrammarCompiler(tokenizer), tokenizer.control_id("</think>")
    marker, less = tokenizer.control_id("｜DSML｜"), int(tokenizer.encode("<")[0])
    tools = (ToolSchema("go", '{"properties": {"to": {"type": "string"}}, "required": ["to"]}'),)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]}'
    grammars = {
        "schema": JsonSchema(schema),
        "object": JsonObject(),
        "regex": Regex("([a-f]{2}-){9}z"),
        "choice": Choice(("the first of them all", "the second of them all")),
        "lark": ContextFreeGrammar('start: ("a" | "bc")+ "."'),
        "auto": ToolCalls(tools),
        "required": ToolCalls(tools, required=True),
    }
    compiled = {name: compiler.compile(grammar, name) for name, grammar in grammars.items()}
    rules = {name: MaskRules(grammar=grammar) for name, grammar in compiled.items()}
    rules["required"] = MaskRules(grammar=compiled["required"], in_reasoning=True, reasoning_budget=7)
    rules["reasons"] = MaskRules(grammar=compiled["schema"], in_reasoning=True)
    rules["budget"] = MaskRules(in_reasoning=True, reasoning_budget=6, min_tokens=17)
    rules["words"] = MaskRules(bad_words=((less, marker), (end, less, less)), min_tokens=4)
    rng, made = np.random.default_rng(0), []
    for i, (name, rule) in enumerate(rules.items()):
        biased = {"auto": (less, marker), "reasons": (end,), "words": (less, end)}.get(name, ())
        request = GenerationRequest(
            name,
            rng.integers(2, 120, 12 + 3 * i).astype(np.int32),
            max_tokens=28,
            sampling=RequestSampling(temperature=0.9, seed=i, top_p=0.9 if i % 2 else 1.0),
            logit_bias=dict.fromkeys(biased, 6.0),
            mask=mask_factory(rule, tokenizer, vocab),
            drafts=drafts,
        )
        made.append(request)
    return made


def test_tokens_under_masks_that_change_are_those_without_drafts(compiled, alone, tokenizer):
    executor, cfg = compiled
    cfg, vocab = dataclasses.replace(cfg, eos_id=tokenizer.eos_id), executor._programs.cfg.vocab_size
    asked = masked_requests(tokenizer, vocab, 0)
    expected, _ = run(executor, dataclasses.replace(cfg, prefix_cache=False), asked, together=False)
    generated = {s.request.request_id: s.generated for s in expected}
    end, marker = tokenizer.control_id("</think>"), tokenizer.control_id("｜DSML｜")
    assert marker in generated["auto"] and marker in generated["required"]
    assert end in generated["reasons"][:-3] and generated["budget"].index(end) == 6
    known, executor.known = executor.known, [np.int32([*s.request.prompt, *s.generated]) for s in expected]
    for drafts in (None, 4):
        executor.reset()
        engine = Engine(Scheduler(cfg), executor, Recorder())
        aborted = engine.submit(dataclasses.replace(asked[0], request_id="aborted", drafts=4))[0]
        made = []
        for i, request in enumerate(asked):
            made += engine.submit(dataclasses.replace(request, drafts=drafts))
            engine.step()
            if i == 2:
                engine.finish(aborted, "abort")
        drain(engine)
        assert_empty(engine)
        assert engine.stats().preemptions > 0 and 0 < len(aborted.generated) < 28
        for sequence in made:
            name = sequence.request.request_id
            assert (sequence.generated, sequence.error) == (generated[name], None), name
            assert sequence.accepted > 3, f"{name}: {sequence.accepted} of {sequence.drafted} drafts stand"
    executor.known = known
    assert executor.compilations.count == 0


def test_where_drafts_do_not_pay_only_those_are_verified_that_requests_insist_on(compiled, alone):
    executor, cfg = compiled
    times = executor.measure_costs()
    assert [(t.requests, t.pages, t.drafts) for t in times] == [(CACHE.slots, LENGTH // 4, k) for k in (0, 1, DRAFTS)]
    totals = [np.arange(1, 1 + len(t.seconds), dtype=np.float32) for t in times]
    executor.set_costs([dataclasses.replace(t, seconds=10 * n) for t, n in zip(times, totals, strict=True)])
    for drafts in (None, 4):
        made, _ = run(executor, cfg, requests([drafts] * 6)[:3], together=True)
        assert [s.generated for s in made] == [s.generated for s in alone[:3]]
        assert {s.drafted > 0 for s in made} == {drafts is not None}
    executor.set_costs([dataclasses.replace(t, seconds=np.ones_like(n)) for t, n in zip(times, totals, strict=True)])
    with pytest.raises(ValueError, match="no verify bucket is of 3 requests with 3 drafts over 40 pages"):
        executor.set_costs([DecodeTimes(3, 40, 3, np.ones(13, np.float32))])


def test_steps_change_between_programs_as_it_pays_and_tokens_stay_the_same(compiled, alone):
    """Confidences say one half for each draft: 1.5 tokens for one, 1.94 for four."""
    executor, cfg = compiled
    times = [
        DecodeTimes(CACHE.slots, LENGTH // 4, k, np.full(CACHE.slots * (1 + k) + 1, seconds, np.float32))
        for k, seconds in ((0, 1.0), (1, 1.2), (DRAFTS, 1.4))
    ]

    class Changing(DraftRoom):
        """What pays, by turns with nothing, and with one draft only."""

        turn = 0

        def choose(self, *arguments):
            self.turn += 1
            room = super().choose(*arguments)
            assert room.drafts in (1, DRAFTS) or not arguments[2].any()
            kind = self.turn % 11
            return room if kind < 4 or arguments[3].any() else Room(1, True) if kind < 7 else Room(0, kind == 7)

    for asked in (requests([None] * 6), requests([None, 4, None, 2, None, 0])):
        room = Changing(times, CACHE.slots, 1)
        made, stats = run(executor, cfg, asked, together=True, room=room)
        assert stats.preemptions > 0 and stats.prefix_hits > 0
        for sequence, expected in zip(made, alone, strict=True):
            assert sequence.generated == expected.generated
            np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(room.predicted(np.array([0]), np.array([-2])), [0.5 ** np.arange(1, 5)], rtol=1e-5)
        assert {b.tokens_per_request for b in executor.ran} == {1, 2, 1 + DRAFTS}
    assert executor.compilations.count == 0
