"""Training data: conversations in the chat format, the held-out ones, rows and batches."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.chat import ReplyParser
from dsv4jax.training.data import Mixture, Rows, batches
from dsv4jax.training.skills import SKILLS, addition, held_out_examples
from dsv4jax.training.text import standard_library_texts


@pytest.mark.parametrize("name", SKILLS)
def test_conversations_are_prompts_and_replies_of_the_server(name, default_tokenizer):
    random = np.random.default_rng(0)
    for _ in range(10):
        example = SKILLS[name](random, 300)
        ids, learnt = example.encoded(default_tokenizer)
        prompt = example.prompt(default_tokenizer)
        np.testing.assert_array_equal(ids[: len(prompt)], prompt)
        assert learnt[len(prompt) :].all() and not learnt[0] and ids[-1] == default_tokenizer.eos_id
        # What the server makes of the reply is the message that was wanted.
        parser = ReplyParser(default_tokenizer, prompt, tools=example.options.get("tools"))
        deltas = [*parser.push(ids[len(prompt) :]), *parser.finish()]
        last = example.messages[-1]
        for channel, field in (("content", "content"), ("reasoning", "reasoning_content")):
            assert "".join(d.text for d in deltas if d.channel == channel) == last.get(field, "")
        called = [d.name for d in deltas if d.channel == "tool_call"]
        arguments = "".join(d.text for d in deltas if d.channel == "arguments")
        for call in last.get("tool_calls", ()):
            assert called == [call["function"]["name"]]
            assert json.loads(arguments) == json.loads(call["function"]["arguments"])
        assert len(called) == len(last.get("tool_calls", ()))


def test_every_reply_of_a_conversation_is_learnt(default_tokenizer):
    random = np.random.default_rng(1)
    example = next(e for e in (SKILLS["memory"](random, 400) for _ in range(50)) if len(e.messages) >= 8)
    ids, learnt = example.encoded(default_tokenizer)
    spans = np.split(ids, np.flatnonzero(np.diff(learnt)) + 1)[1::2]
    replies = [m["content"] for m in example.messages if m["role"] == "assistant"]
    assert [default_tokenizer.decode(span) for span in spans] == replies


@given(st.integers(1, 99999), st.integers(1, 99999))
def test_sums_are_worked_out_right(a, b):
    steps, _, result = addition(a, b).partition("; ")
    assert int(result) == a + b
    for step in steps.split(", "):
        left, total = step.split("=")
        assert sum(map(int, left.split("+"))) == int(total)


@pytest.mark.parametrize("name", SKILLS)
def test_examinations_ask_what_was_never_trained(name, default_tokenizer):
    asked = held_out_examples(name, 3, 20, 256)
    assert all(example.held_out for example in asked) and asked == held_out_examples(name, 3, 20, 256)
    assert asked != held_out_examples(name, 4, 20, 256)
    limit = 1000 if name == "tool_call" else 256
    assert max(len(e.encoded(default_tokenizer)[0]) for e in asked) <= limit
    with pytest.raises(ValueError, match="skill = 'walk': allowed are"):
        held_out_examples("walk", 0, 1, 256)


@settings(max_examples=5)
@given(st.integers(0, 2**31), st.integers(0, 90))
def test_rows_depend_on_seed_and_number_alone(default_tokenizer, seed, index):
    def make():
        return Rows(default_tokenizer, ["Some text. " * 20], Mixture(), 500, seed, 100)

    row, again = make()[index], make()[index]
    for name, values in row.items():
        np.testing.assert_array_equal(values, again[name])
    assert row["tokens"].shape == row["weights"].shape == (501,)
    assert row["weights"].sum() > 0 and not row["weights"][row["tokens"] == default_tokenizer.pad_id].any()
    assert not np.array_equal(row["tokens"], make()[index + 1]["tokens"])


def test_batches_go_on_anywhere(default_tokenizer):
    rows = Rows(default_tokenizer, [], Mixture(("copy", "count"), text_share=0), 160, 0, 10)
    found = list(batches(rows, 3, 1))
    assert len(found) == 2
    for i, batch in enumerate(found, 1):
        np.testing.assert_array_equal(batch["tokens"], [rows[3 * i + k]["tokens"] for k in range(3)])


def test_mixtures_are_checked(default_tokenizer):
    with pytest.raises(ValueError, match=r"skills = \['walk'\]: allowed are"):
        Mixture(("walk", "copy"))
    with pytest.raises(ValueError, match="nothing to train on"):
        Mixture((), text_share=0)
    with pytest.raises(ValueError, match=r"texts: none, but text_share = 0\.2"):
        Rows(default_tokenizer, [], Mixture(), 100, 0, 1)


def test_texts_of_a_library(tmp_path):
    long = "Long enough to be read. " * 10
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text(json.dumps("x" * 500))
    (tmp_path / "broken.py").write_text("def (")
    functions = [f'def f{i}():\n    """{i} {long}"""\n' for i in range(40)]
    (tmp_path / "b.py").write_text("".join(functions) + 'def g():\n    """Short."""\n' + functions[0])
    kept, held_out = (standard_library_texts(h, tmp_path) for h in (False, True))
    assert len(kept) + len(held_out) == 40 and set(kept).isdisjoint(held_out) and held_out
    assert all(text.rstrip().endswith("read.") for text in kept)
