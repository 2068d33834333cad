"""Trains the tokenizer of the default model: a small byte-level BPE with the released control tokens.

    python scripts/make_tokenizer.py

The result is deterministic: the same text gives the same file, byte for byte.
"""

from pathlib import Path

import command_line
import tokenizers
from absl import flags
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsv4jax.tokenizer import BOS, EOS, PAD, Tokenizer

_ROOT = Path(__file__).resolve().parent.parent
_TEXT = flags.DEFINE_string("text", str(_ROOT / "scripts/tokenizer_text.txt"), "UTF-8 text to train on.")
_OUTPUT = flags.DEFINE_string("output", str(_ROOT / "dsv4jax/default_model/tokenizer.json"), "File to write.")
_MERGES = flags.DEFINE_integer("merges", 512, "Number of BPE merges.", lower_bound=1)

# The released pre-tokeniser splits, in order (chat section 1).
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    ),
)

# Control tokens after begin, end and padding, in the released order and with the released `special` flag
# (chat section 1.1).
_SYSTEM_TOKEN = ("<｜System｜>",)
_UNFLAGGED_TOKENS = (
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
)
_GROUNDING_TOKENS = (
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
)


def train(text: str, merges: int) -> str:
    """The text of a `tokenizer.json`. Ids in order: begin, end, padding, 256 bytes, merges, control tokens.

    Raises:
      ValueError: `text` is too short for so many merges.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first = [_added(token, special=True) for token in (BOS, EOS, PAD)]
    base_size = len(first) + 256 + merges
    trainer = trainers.BpeTrainer(
        vocab_size=base_size,
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != base_size:
        found = tokenizer.get_vocab_size() - base_size + merges
        raise ValueError(f"the text gives only {found} merges; {merges} were asked for")
    # One call for all: `add_special_tokens` would set the flag of every token.
    tokenizer.add_tokens(
        [_added(token, special=True) for token in _SYSTEM_TOKEN]
        + [_added(token, special=False) for token in _UNFLAGGED_TOKENS]
        + [_added(token, special=True) for token in _GROUNDING_TOKENS]
    )
    return tokenizer.to_str(pretty=True) + "\n"


def _added(token: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False, special=special)


def main() -> None:
    serialized = train(Path(_TEXT.value).read_text(encoding="utf-8"), _MERGES.value)
    vocab_size = Tokenizer(serialized).vocab_size
    Path(_OUTPUT.value).write_text(serialized, encoding="utf-8")
    print(f"{_OUTPUT.value}: {vocab_size} ids, {len(serialized.encode())} bytes")


if __name__ == "__main__":
    command_line.run(main)
