"""Tokenizer, incremental decoding and Engram's compressed vocabulary."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4jax.tokenizer import (
    BOS,
    EOS,
    PAD,
    StreamDecoder,
    Tokenizer,
    check_engram_token_map,
    check_ids,
    engram_token_map,
)

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
DEFAULT_FILE = ROOT / "dsv4jax/default_model/tokenizer.json"
TOKENIZE_CASES = json.loads((DATA / "chat/tokenize.json").read_text(encoding="utf-8"))
CONTROL_TOKENS = [
    *(
        "<｜System｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
        "<｜latest_reminder｜>",
    ),
    *("<｜deepseek_image｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
    *("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
    *(
        "<｜polygon｜>",
        "<｜/polygon｜>",
        "<｜point｜>",
        "<｜/point｜>",
        "<｜box｜>",
        "<｜/box｜>",
        "<｜ref｜>",
        "<｜/ref｜>",
    ),
]

# What breaks decoders: characters of two to four bytes, joined emoji, combining marks, control spellings.
HARD_TEXTS = [
    "🦜",
    "👩‍👩‍👧",
    "漢字",
    "e\u0301",
    "\r\n\n",
    "  ",
    "12345",
    "The ",
    *CONTROL_TOKENS,
    BOS,
    EOS,
    PAD,
]
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(HARD_TEXTS)), max_size=12).map("".join)


def cuts(ids, positions):
    edges = sorted({0, len(ids), *(p % (len(ids) + 1) for p in positions)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def default_content() -> dict:
    return json.loads(DEFAULT_FILE.read_text(encoding="utf-8"))


# ---- encode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TOKENIZE_CASES, ids=lambda case: ascii(case["text"])[1:40])
def test_released_vocabulary_gives_the_golden_ids(released_tokenizer, case):
    assert released_tokenizer.encode(case["text"]).tolist() == case["ids_plain"]
    with_added = released_tokenizer.encode(case["text"], added_vocabulary=True)
    assert with_added.tolist() == case["ids_with_added_vocab"]
    assert released_tokenizer.decode(case["ids_plain"]) == case["text"]


@given(text=texts)
def test_plain_text_round_trips_and_never_becomes_a_control_token(default_tokenizer, text):
    ids = default_tokenizer.encode(text)
    assert ids.dtype == np.int32
    control = {default_tokenizer.control_id(t) for t in (*CONTROL_TOKENS, BOS, EOS, PAD)}
    assert control.isdisjoint(ids.tolist())
    assert default_tokenizer.token_bytes(ids).decode() == text
    assert default_tokenizer.decode(ids) == text


def test_added_vocabulary_is_recognised_on_request(default_tokenizer):
    ids = default_tokenizer.encode(f"{BOS}<｜User｜>Hi", added_vocabulary=True).tolist()
    assert ids[:2] == [default_tokenizer.bos_id, default_tokenizer.control_id("<｜User｜>")]
    assert ids[2:] == default_tokenizer.encode("Hi").tolist()


def test_a_lone_surrogate_is_refused(default_tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        default_tokenizer.encode("a\ud800")


# ---- decode ----------------------------------------------------------------------------------------------


@given(text=texts, positions=st.lists(st.integers(0, 1000), max_size=20))
def test_stream_text_does_not_depend_on_the_cuts(default_tokenizer, text, positions):
    ids = default_tokenizer.encode(text)
    decoder = StreamDecoder(default_tokenizer)
    deltas = [decoder.push(part) for part in cuts(ids, positions)]
    assert "".join(deltas) == text
    assert decoder.finish() == ""


@given(data=st.data(), positions=st.lists(st.integers(0, 1000), max_size=20))
def test_stream_of_arbitrary_ids_equals_the_whole_decode(default_tokenizer, data, positions):
    ids = data.draw(st.lists(st.integers(0, default_tokenizer.vocab_size - 1), max_size=30))
    decoder = StreamDecoder(default_tokenizer)
    deltas = [decoder.push(part) for part in cuts(ids, positions)] + [decoder.finish()]
    assert "".join(deltas) == default_tokenizer.decode(ids)
    shown = [i for i in ids if i not in (0, 1, 2)]
    assert "".join(deltas) == default_tokenizer.token_bytes(shown).decode("utf-8", errors="replace")


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_by_the_end_is_one_replacement_character(default_tokenizer, kept):
    ids = default_tokenizer.encode("\U0001f99c").tolist()  # four bytes that no merge joins
    assert len(ids) == 4
    decoder = StreamDecoder(default_tokenizer)
    assert decoder.push(default_tokenizer.encode("ok ")) == "ok "
    assert [decoder.push([i]) for i in ids[:kept]] == [""] * kept
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_only_begin_end_and_padding_are_left_out(default_tokenizer):
    text = f"{BOS}a<｜box｜></think>｜DSML｜{PAD}{EOS}"
    assert (
        default_tokenizer.decode(default_tokenizer.encode(text, added_vocabulary=True)) == "a<｜box｜></think>｜DSML｜"
    )


def test_ids_outside_the_vocabulary_are_refused(default_tokenizer):
    size = default_tokenizer.vocab_size
    for bad in (-1, size, size + 1, 2**40):
        message = f"token id {bad} is outside the vocabulary: allowed are 0 to {size - 1}"
        for call in (
            default_tokenizer.decode,
            default_tokenizer.token_bytes,
            StreamDecoder(default_tokenizer).push,
        ):
            with pytest.raises(ValueError, match=message):
                call([5, bad])
        with pytest.raises(ValueError, match=message):
            default_tokenizer.token(bad)


@pytest.mark.parametrize("bad", [[1.5], [True], [[1]], ["1"], [2**70]], ids=repr)
def test_ids_must_be_flat_integers(bad):
    with pytest.raises(ValueError, match="flat sequence of integers"):
        check_ids(bad, 100)


# ---- loading ---------------------------------------------------------------------------------------------


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b'{"model": ', b"[]", b"{}", b"\xff\xfe", b'{"decoder": {"type": "ByteLevel"}}']
)
def test_broken_file_is_named(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_file(file)


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    decoder = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    with pytest.raises(ValueError, match=r"'Metaspace'.*only byte-level"):
        Tokenizer(json.dumps(default_content() | {"decoder": decoder}))


def test_every_missing_control_token_is_named(default_tokenizer):
    with pytest.raises(ValueError, match="'<｜nobody｜>' is missing; '<｜nothing｜>' is missing"):
        default_tokenizer.require_control_tokens(["<think>", "<｜nobody｜>", "<｜nothing｜>"])
    with pytest.raises(ValueError, match="'<｜nobody｜>' is missing"):
        default_tokenizer.control_id("<｜nobody｜>")


def test_a_vocabulary_without_end_of_sentence_is_refused():
    text = DEFAULT_FILE.read_text(encoding="utf-8").replace(EOS, "<｜other｜>")
    with pytest.raises(ValueError, match=f"{EOS}' is missing"):
        Tokenizer(text)


def test_a_control_token_of_several_ids_is_refused():
    content = default_content()
    # The spelling stays a token of the base vocabulary, which no text reaches.
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != PAD]
    with pytest.raises(ValueError, match=f"'{PAD}' encodes to .* ids .*, not to one"):
        Tokenizer(json.dumps(content))


def test_a_gap_in_the_ids_is_refused():
    content = default_content()
    del content["model"]["vocab"]["z"]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if not any("z" in half for half in pair)]
    with pytest.raises(ValueError, match=r"id \d+ has no token"):
        Tokenizer(json.dumps(content))


# ---- the default model's tokenizer -----------------------------------------------------------------------


def test_default_tokenizer_has_all_control_tokens(default_tokenizer):
    assert (default_tokenizer.bos_id, default_tokenizer.eos_id, default_tokenizer.pad_id) == (0, 1, 2)
    default_tokenizer.require_control_tokens(CONTROL_TOKENS)
    assert DEFAULT_FILE.stat().st_size < 100_000


def test_default_tokenizer_follows_the_released_file(released_json):
    ours, released = default_content(), json.loads(released_json)
    assert ours["pre_tokenizer"] == released["pre_tokenizer"]
    assert ours["decoder"] == released["decoder"]
    flags = {token["content"]: token["special"] for token in released["added_tokens"]}
    assert {t["content"]: t["special"] for t in ours["added_tokens"]} == {
        t["content"]: flags[t["content"]] for t in ours["added_tokens"]
    }


def test_default_tokenizer_can_be_made_again(tmp_path):
    output = tmp_path / "tokenizer.json"
    command = [sys.executable, "scripts/make_tokenizer.py", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert output.read_bytes() == DEFAULT_FILE.read_bytes()


# ---- Engram's compressed vocabulary ----------------------------------------------------------------------


def test_released_compressed_vocabulary(released_tokenizer):
    token_map = engram_token_map(released_tokenizer)
    assert token_map.shape == (129280,) and token_map.dtype == np.int32
    check_engram_token_map(token_map, 99092)
    assert token_map[[0, 1, 2, 128799, 129264]].tolist() == [0, 1, 2, 98611, 99076]
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_golden_token_maps(name):
    directory = DATA / "golden" / name
    token_map = engram_token_map(Tokenizer.from_checkpoint(directory / "checkpoint_quantized"))
    with np.load(directory / "engram_hash.npz") as golden:
        np.testing.assert_array_equal(token_map, golden["token_map"])


def test_a_wrong_number_of_compressed_ids_names_both(default_tokenizer):
    token_map = engram_token_map(default_tokenizer)
    with pytest.raises(ValueError, match=f"{token_map.max() + 1} compressed Engram ids .* is 99092"):
        check_engram_token_map(token_map, 99092)


def test_what_shares_a_compressed_id():
    # In the byte alphabet "thÃ©" stands for "thé", and "thé" for bytes that are not UTF-8.
    words = ["the", "Ġthe", "ĠThe", "THE", "thÃ©", "thé"]
    blanks = ["Ġ", "ĠĠ", "Ċ", "ĉĠ"]
    lone = ["ÌģÌģ", "Ìģ"]  # combining accents only: they normalise to nothing and keep their text
    wide = ["ï½ģ", "a"]  # full-width a
    greek = ["ĠÎ£", "ÏĤ", "Ïĥ"]  # capital, final and plain sigma
    words_with_sigma = ["ÎĳÎ£", "Î±Ïĥ"]  # capital and small alpha sigma
    separators = ["Ĝ", "ĠĜ"]  # U+001C is not white space
    content = default_content()
    tokens = [BOS, EOS, PAD, *words, *blanks, *lone, *wide, *greek, *words_with_sigma, *separators]
    content["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    content["added_tokens"] = content["added_tokens"][:3]
    compressed = dict(zip(tokens, engram_token_map(Tokenizer(json.dumps(content))).tolist(), strict=True))
    assert len({compressed[word] for word in words[:5]}) == 1
    assert compressed["thé"] != compressed["the"]
    assert len({compressed[blank] for blank in blanks}) == 1
    assert len({compressed[token] for token in (*lone, "Ġ")}) == 3
    assert compressed["ï½ģ"] == compressed["a"]
    assert compressed["ĠÎ£"] == compressed["Ïĥ"] != compressed["ÏĤ"]
    assert len({compressed[word] for word in words_with_sigma}) == 1
    assert len({compressed[separator] for separator in separators}) == 1
