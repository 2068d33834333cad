"""Rules on the next token, alone and together."""

import functools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.engine.grammar import Choice, GrammarCompiler, JsonObject, ToolCalls, ToolSchema
from dsv4jax.engine.token_mask import MaskError, MaskRules, bad_word_sequences, mask_factory
from dsv4jax.sampling_settings import MAX_PAUSE_TOKENS


@pytest.fixture(scope="module")
def tokenizer(default_tokenizer):
    return default_tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def new_mask(tokenizer, **rules):
    return mask_factory(MaskRules(**rules), tokenizer, tokenizer.vocab_size)()


def allowed(words, vocab_size: int) -> set[int]:
    if words is None:
        return set(range(vocab_size))
    assert words.dtype == np.uint32 and words.shape == (-(-vocab_size // 32),)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert not ids.size or ids[-1] < vocab_size
    return set(ids.tolist())


def push_text(mask, tokenizer, text):
    for token in tokenizer.encode(text).tolist():
        mask.push(token)


def test_nothing_to_restrict(tokenizer):
    assert mask_factory(MaskRules(), tokenizer, tokenizer.vocab_size) is None
    # Without reasoning there is no budget, and stop ids matter for `min_tokens` only.
    assert mask_factory(MaskRules(reasoning_budget=3, stop_token_ids=(5,)), tokenizer, tokenizer.vocab_size) is None


def test_ids_without_a_token_are_never_allowed(tokenizer, compiler):
    vocab_size = tokenizer.vocab_size + 100
    for rules in (MaskRules(), MaskRules(grammar=compiler.compile(JsonObject(), "f")), MaskRules(bad_words=((7, 8),))):
        mask = mask_factory(rules, tokenizer, vocab_size)()
        ids = allowed(mask.next(), vocab_size)
        assert ids and max(ids) < tokenizer.vocab_size
    with pytest.raises(MaskError, match="not allowed"):
        mask_factory(MaskRules(), tokenizer, vocab_size)().push(vocab_size - 1)
    for token in (vocab_size, -1):
        with pytest.raises(MaskError, match="outside the vocabulary"):
            mask_factory(MaskRules(), tokenizer, vocab_size)().push(token)


def test_min_tokens_counts_tokens(tokenizer):
    vocab = tokenizer.vocab_size
    mask = new_mask(tokenizer, min_tokens=3, stop_token_ids=(40, 41))
    everything = set(range(vocab))
    for chosen in range(3):
        assert allowed(mask.next(), vocab) == everything - {tokenizer.eos_id, 40, 41}
        assert not mask.waits_for_tokens
        assert allowed(mask.next(ahead=1), vocab) == (everything if chosen == 2 else everything - {1, 40, 41})
        mask.push(50)
    assert mask.next() is None
    mask.push(tokenizer.eos_id)
    with pytest.raises(MaskError, match="not allowed"):
        new_mask(tokenizer, min_tokens=1).push(tokenizer.eos_id)


def test_how_long_a_mask_stays_is_known_where_no_token_matters(tokenizer):
    mask = new_mask(tokenizer, min_tokens=3, allowed_token_ids=(5, 64))
    stays = []
    for _ in range(5):
        stays.append(mask.unchanged_for)
        mask.push(5)
    assert stays[:3] == [3, 2, 1] and min(stays[3:]) > 1_000_000
    budget = new_mask(tokenizer, reasoning_budget=4, in_reasoning=True)
    budget.push(60)
    assert budget.unchanged_for == 3
    assert new_mask(tokenizer, bad_words=((60, 61),)).unchanged_for == 1
    assert mask.pause_tokens == budget.pause_tokens == ()
    word = new_mask(tokenizer, bad_words=((60, 61, 62),))
    assert word.unchanged_for == 2
    word.push(60)
    assert word.unchanged_for == 1
    word.push(61)
    assert word.unchanged_for == 1


def test_behind_which_tokens_a_grammar_may_begin(tokenizer, compiler):
    end, marker = tokenizer.control_id("</think>"), tokenizer.control_id("｜DSML｜")
    auto = compiler.compile(ToolCalls((ToolSchema("go"),)), "tools")
    mask = new_mask(tokenizer, grammar=auto, in_reasoning=True)
    assert mask.pause_tokens == (marker,) and mask.unchanged_for > 1_000_000
    push_text(mask, tokenizer, "<")
    assert mask.pause_tokens == (marker,) and mask.unchanged_for > 1_000_000
    mask.push(marker)
    assert mask.pause_tokens == () and mask.unchanged_for == 1
    required = compiler.compile(ToolCalls((ToolSchema("go"),), required=True), "tools")
    mask = new_mask(tokenizer, grammar=required, in_reasoning=True, reasoning_budget=9)
    assert mask.pause_tokens == (marker, end) and mask.unchanged_for == 9
    mask = new_mask(tokenizer, grammar=compiler.compile(JsonObject(), "f"), in_reasoning=True)
    assert mask.pause_tokens == (end,) and mask.unchanged_for > 1_000_000
    mask.push(end)
    assert mask.pause_tokens == () and mask.unchanged_for == 1


def test_allowed_token_ids(tokenizer):
    mask = new_mask(tokenizer, allowed_token_ids=(5, 64, 31), bad_words=((64,),))
    assert allowed(mask.next(), tokenizer.vocab_size) == {5, 31}
    assert mask.next() is mask.next() and not mask.next().flags.writeable


@settings(max_examples=40)
@given(st.data())
def test_bad_words_forbid_the_last_token_after_the_others(default_tokenizer, data):
    token = st.integers(10, 13)
    words = data.draw(st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple))
    if {w[0] for w in words if len(w) == 1} == {10, 11, 12, 13}:
        words = words[:1]
    mask = new_mask(default_tokenizer, bad_words=words)
    reply = []
    for _ in range(12):
        forbidden = {
            w[-1] for w in words if tuple(reply[len(reply) - len(w) + 1 :]) == w[:-1] and len(reply) >= len(w) - 1
        }
        ids = allowed(mask.next(), default_tokenizer.vocab_size)
        assert ids == set(range(default_tokenizer.vocab_size)) - forbidden
        ahead = None if mask.waits_for_tokens else allowed(mask.next(ahead=1), default_tokenizer.vocab_size)
        choices = sorted(ids & {10, 11, 12, 13, 14})
        reply.append(data.draw(st.sampled_from(choices)))
        mask.push(reply[-1])
        # What was promised without knowing the token holds.
        assert ahead is None or ahead == allowed(mask.next(), default_tokenizer.vocab_size)


def test_bad_word_sequences(released_tokenizer):
    tokenizer = released_tokenizer
    sequences = bad_word_sequences(tokenizer, [" hello", "<｜User｜>"])
    assert tuple(tokenizer.encode("hello").tolist()) in sequences
    assert tuple(tokenizer.encode(" hello").tolist()) in sequences
    assert not any(tokenizer.control_id("<｜User｜>") in sequence for sequence in sequences)
    for word in ("", "  "):
        with pytest.raises(ValueError, match=r"bad_words\[0\]"):
            bad_word_sequences(tokenizer, [word])


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_reasoning_budget(tokenizer, budget):
    end = tokenizer.control_id("</think>")
    mask = new_mask(tokenizer, reasoning_budget=budget, in_reasoning=True, min_tokens=2)
    for used in range(budget):
        assert len(allowed(mask.next(), tokenizer.vocab_size)) > 100
        assert mask.waits_for_tokens == (budget - used <= 1)
        mask.push(60)
    assert allowed(mask.next(), tokenizer.vocab_size) == {end} and mask.waits_for_tokens
    mask.push(end)
    assert not mask.waits_for_tokens and len(allowed(mask.next(), tokenizer.vocab_size)) > 100
    # Reasoning that ends by itself is not cut, and what follows is not counted.
    mask = new_mask(tokenizer, reasoning_budget=3, in_reasoning=True)
    for token in (60, end, 60, 60, 60, 60):
        mask.push(token)
    assert mask.next() is None


def test_grammar_waits_for_the_end_of_the_reasoning(tokenizer, compiler):
    end, eos, vocab = tokenizer.control_id("</think>"), tokenizer.eos_id, tokenizer.vocab_size
    mask = new_mask(tokenizer, grammar=compiler.compile(Choice(("yes", "no")), "f"), in_reasoning=True)
    push_text(mask, tokenizer, "I say </think> no, yes")
    assert allowed(mask.next(), vocab) == set(range(vocab)) - {eos} and mask.waits_for_tokens
    mask.push(end)
    assert {tokenizer.token_bytes([i])[:1] for i in allowed(mask.next(), vocab)} == {b"y", b"n"}
    push_text(mask, tokenizer, "no")
    assert allowed(mask.next(), vocab) == {eos}
    mask.push(eos)
    assert allowed(mask.next(), vocab) == {eos}
    with pytest.raises(MaskError, match="not allowed"):
        mask.push(60)


def test_budget_then_grammar(tokenizer, compiler):
    end = tokenizer.control_id("</think>")
    grammar = compiler.compile(JsonObject(), "f")
    mask = new_mask(tokenizer, grammar=grammar, in_reasoning=True, reasoning_budget=1)
    mask.push(60)
    assert allowed(mask.next(), tokenizer.vocab_size) == {end}
    mask.push(end)
    push_text(mask, tokenizer, '{"a": [1, 2]}')
    assert allowed(mask.next(), tokenizer.vocab_size) == {tokenizer.eos_id}


def test_required_call_after_free_reasoning(tokenizer, compiler):
    vocab = tokenizer.vocab_size
    end, marker = tokenizer.control_id("</think>"), tokenizer.control_id("｜DSML｜")
    tools = (ToolSchema("go", json.dumps({"properties": {"to": {"type": "string"}}})),)
    grammar = compiler.compile(ToolCalls(tools, required=True), "tools")
    usual = new_mask(tokenizer, grammar=grammar, in_reasoning=True)
    push_text(usual, tokenizer, "Let me see.")
    usual.push(end)
    # The model sometimes opens the block without ending its reasoning.
    direct = new_mask(tokenizer, grammar=grammar, in_reasoning=True, reasoning_budget=50)
    push_text(direct, tokenizer, "Let me see.")
    for mask in (usual, direct):
        push_text(mask, tokenizer, "\n\n<")
        mask.push(marker)
        push_text(mask, tokenizer, " calls>\n<")
        mask.push(marker)
        push_text(mask, tokenizer, ' invoke name="go">\n')
        assert tokenizer.eos_id not in allowed(mask.next(), vocab)
    with pytest.raises(MaskError):
        push_text(usual, tokenizer, "anything")


@settings(max_examples=60)
@given(st.data())
def test_a_mask_given_ahead_is_the_mask_that_comes(default_tokenizer, data):
    tokenizer = default_tokenizer
    end, marker = tokenizer.control_id("</think>"), tokenizer.control_id("｜DSML｜")
    less = int(tokenizer.encode("<")[0])
    rules = MaskRules(
        min_tokens=data.draw(st.integers(0, 8)),
        bad_words=data.draw(st.sampled_from([(), ((60, less),), ((60, 60, less), (less, 60)), ((60, less, less),)])),
        reasoning_budget=data.draw(st.none() | st.integers(0, 6)),
        in_reasoning=data.draw(st.booleans()),
        grammar=data.draw(st.sampled_from([None, *_grammars(tokenizer)])),
    )
    factory = mask_factory(rules, tokenizer, tokenizer.vocab_size)
    if factory is None:
        return
    mask, reply, promised, until, pauses = factory(), [], None, 0, ()
    some = [end, marker, less, 60, tokenizer.eos_id]
    for place in range(10):
        ids = allowed(mask.next(), tokenizer.vocab_size)
        assert place >= until or ids == promised
        if place + mask.unchanged_for > until:
            promised, until, pauses = ids, place + mask.unchanged_for, mask.pause_tokens
            assert len(pauses) <= MAX_PAUSE_TOKENS
        ahead = None if mask.waits_for_tokens else (mask.next(ahead=1),)
        wanted = sorted(ids & set(some)) or sorted(ids)[:3]
        if data.draw(st.booleans()):
            drafts = [data.draw(st.sampled_from(wanted)), *data.draw(st.lists(st.sampled_from(some), max_size=3))]
            assert_along(mask, drafts, factory(), reply, tokenizer.vocab_size)
            wanted = drafts[:1]
        reply.append(data.draw(st.sampled_from(wanted)))
        mask.push(reply[-1])
        if reply[-1] in pauses:
            until = 0
        if ahead is not None:
            assert allowed(ahead[0], tokenizer.vocab_size) == allowed(mask.next(), tokenizer.vocab_size)


def assert_along(mask, drafts, other, reply, vocab_size):
    """The masks along drafts are those of another choice that takes the same reply and then the drafts."""
    for token in reply:
        other.push(token)
    masks = mask.along(drafts)
    for place, draft in enumerate([*drafts, None]):
        ids = allowed(other.next(), vocab_size)
        assert allowed(masks[place], vocab_size) == ids
        if draft not in ids:
            assert len(masks) == place + 1 + (draft is not None), "behind a draft that is not allowed there is one more"
            return
        other.push(draft)


def test_masks_along_drafts_end_before_the_grammar_fails(tokenizer, compiler):
    """And a draft that leads there does not end the choice: another token may come."""
    ids = tuple({*tokenizer.encode("yes").tolist(), *tokenizer.encode("no").tolist(), tokenizer.eos_id})
    grammar = compiler.compile(Choice(("yes yes", "no")), "f")
    mask = new_mask(tokenizer, grammar=grammar, allowed_token_ids=ids)
    drafts = tokenizer.encode("yes").tolist()
    assert len(mask.along([*drafts, 60, 60])) == len(drafts), "behind yes only a space may come, which is not allowed"
    push_text(mask, tokenizer, "no")
    assert allowed(mask.next(), tokenizer.vocab_size) == {tokenizer.eos_id}


@functools.cache
def _grammars(tokenizer):
    compiler = GrammarCompiler(tokenizer)
    tools = (ToolSchema("go"),)
    specs = Choice(("<", "<<a")), ToolCalls(tools), ToolCalls(tools, required=True)
    return tuple(compiler.compile(spec, "f") for spec in specs)


def test_auto_calls_leave_the_rest_free(tokenizer, compiler):
    end, marker = tokenizer.control_id("</think>"), tokenizer.control_id("｜DSML｜")
    mask = new_mask(tokenizer, grammar=compiler.compile(ToolCalls((ToolSchema("go"),)), "tools"), in_reasoning=True)
    for token in (60, marker, end, 61):
        assert mask.next() is None and not mask.waits_for_tokens and mask.next(ahead=1) is None
        mask.push(token)
    push_text(mask, tokenizer, "</")
    mask.push(marker)
    assert mask.next() is None
    push_text(mask, tokenizer, "<")
    assert mask.waits_for_tokens and mask.next() is None
    with pytest.raises(ValueError, match="ahead = 1"):
        mask.next(ahead=1)
    mask.push(60)
    assert mask.next() is None and not mask.waits_for_tokens


def test_a_complete_document_ends_the_reply_whatever_the_other_rules(tokenizer, compiler):
    ids = tuple({*tokenizer.encode("yes").tolist()})
    grammar = compiler.compile(Choice(("yes", "yes yes")), "f")
    mask = new_mask(tokenizer, grammar=grammar, min_tokens=50, allowed_token_ids=ids)
    push_text(mask, tokenizer, "yes")
    with pytest.raises(MaskError, match="exclude each other"):
        mask.next()  # end of sentence comes too early, and the space is not allowed
    mask = new_mask(tokenizer, grammar=compiler.compile(Choice(("yes",)), "f"), min_tokens=50, allowed_token_ids=ids)
    push_text(mask, tokenizer, "yes")
    assert allowed(mask.next(), tokenizer.vocab_size) == {tokenizer.eos_id}


def test_bad_words_within_a_grammar(tokenizer, compiler):
    grammar = compiler.compile(Choice(("cat", "dog")), "f")
    words = tuple((i,) for i in range(tokenizer.vocab_size) if tokenizer.token_bytes([i])[:1] == b"c")
    mask = new_mask(tokenizer, grammar=grammar, bad_words=words)
    assert {tokenizer.token_bytes([i])[:1] for i in allowed(mask.next(), tokenizer.vocab_size)} == {b"d"}


def test_a_failing_choice_leaves_the_others_alone(tokenizer, compiler):
    factory = mask_factory(
        MaskRules(grammar=compiler.compile(Choice(("ab", "cd")), "f")), tokenizer, tokenizer.vocab_size
    )
    bad, good = factory(), factory()
    with pytest.raises(MaskError):
        bad.push(int(tokenizer.encode("x")[0]))
    push_text(good, tokenizer, "cd")
    assert allowed(good.next(), tokenizer.vocab_size) == {tokenizer.eos_id}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min_tokens": -1}, "min_tokens = -1"),
        ({"reasoning_budget": -1, "in_reasoning": True}, "reasoning_budget = -1"),
        ({"allowed_token_ids": ()}, "leave no token"),
        ({"allowed_token_ids": (5,), "bad_words": ((5,),)}, "leave no token"),
        ({"allowed_token_ids": (10**6,)}, "allowed_token_ids holds 1000000"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
        ({"bad_words": ((),)}, "empty sequence"),
        ({"bad_words": ((10**6,),)}, "bad_words holds 1000000"),
        ({"allowed_token_ids": (1, 40), "stop_token_ids": (40,), "min_tokens": 2}, "min_tokens = 2"),
        ({"allowed_token_ids": (5,), "in_reasoning": True, "reasoning_budget": 2}, "lacks </think>"),
    ],
)
def test_impossible_rules_are_refused(tokenizer, rules, message):
    with pytest.raises(ValueError, match=message):
        mask_factory(MaskRules(**rules), tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError, match="less than the tokenizer's"):
        mask_factory(MaskRules(), tokenizer, tokenizer.vocab_size - 1)


def test_cost_for_the_released_vocabulary(released_tokenizer, record_property):
    """Reported as test properties, not asserted: `pytest -s` prints them."""
    tokenizer = released_tokenizer
    grammar = GrammarCompiler(tokenizer).compile(JsonObject(), "f")
    text = '{"name": "Some words of text, then more of them", "list": [1, 2, 3.5, true, null], "other": {"x": "y"}}'
    ids = tokenizer.encode(text).tolist()
    for name, rules in (
        ("json", MaskRules(grammar=grammar)),
        ("json, all other rules", MaskRules(grammar=grammar, min_tokens=500, bad_words=((7, 8), (9, 10, 11)))),
        ("bad words", MaskRules(bad_words=((7, ids[0]), (9, 10, 11)))),
    ):
        factory = mask_factory(rules, tokenizer, tokenizer.vocab_size)
        masks = [factory() for _ in range(5)]
        costs = []
        for mask in masks:
            for token in ids[:-1]:
                start = time.perf_counter()
                mask.next()
                mask.push(token)
                costs.append(time.perf_counter() - start)
        report = f"{np.median(costs) * 1e6:.0f} us median, {np.max(costs) * 1e6:.0f} us worst"
        record_property(name, report)
        print(f"{name}: {report}")
        assert len(costs) == 5 * (len(ids) - 1)
