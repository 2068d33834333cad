"""`tokenizer.json`: text to token ids, token ids to text, and Engram's compressed vocabulary.

Byte-level BPE on top of the `tokenizers` package. Ids are never constants: control tokens are looked up by
spelling.
"""

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"

TokenIds = Sequence[int] | Int[np.ndarray, " tokens"]

# What Unicode calls White_Space. `str.strip()` without an argument would also take U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
      vocab_size: number of ids; every id below it has a token. A model's `vocab_size` may be larger.
      bos_id, eos_id, pad_id: ids of begin of sentence, end of sentence and padding.
    """

    def __init__(self, serialized: str, source: str = "tokenizer.json"):
        """Builds the tokenizer from the text of a `tokenizer.json`; `source` is its name in error messages.

        Raises:
          ValueError: the text is not the JSON of a byte-level BPE tokenizer, ids have gaps, or begin of
            sentence, end of sentence or padding is missing.
        """
        self.source = source
        try:
            decoder = (json.loads(serialized).get("decoder") or {}).get("type")
            self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:  # `tokenizers` raises a bare Exception for a malformed file
            raise ValueError(f"{source} is not a tokenizer.json: {type(error).__name__}: {error}") from error
        if decoder != "ByteLevel":
            raise ValueError(f"{source}: the decoder is {decoder!r}; only byte-level BPE ('ByteLevel') is supported")

        # Shares the merges with `_tokenizer` but knows no added token: no text can become a control token.
        self._plain = tokenizers.Tokenizer(self._tokenizer.model)
        self._plain.normalizer = self._tokenizer.normalizer
        self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer

        self._tokens = _tokens_by_id(self._tokenizer, source)
        alphabet = _byte_alphabet()
        self._bytes = [_token_bytes(token, alphabet) for token in self._tokens]
        self._control_ids: dict[str, int] = {}
        self.vocab_size = len(self._tokens)
        self.require_control_tokens((BOS, EOS, PAD))
        self.bos_id, self.eos_id, self.pad_id = (self.control_id(token) for token in (BOS, EOS, PAD))

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`.

        Raises:
          FileNotFoundError: `path` is not a file.
          ValueError: see the constructor.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer file {str(path)!r}")
        try:
            serialized = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(path)!r} is not UTF-8 text: {error}") from error
        return cls(serialized, source=str(path))

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` of a checkpoint directory; raises as `from_file`."""
        return cls.from_file(Path(directory) / "tokenizer.json")

    def encode(self, text: str, *, added_vocabulary: bool = False) -> Int32[np.ndarray, " tokens"]:
        """Token ids of `text`; begin of sentence is not added (chat section 2.11).

        By default the spelling of a control token inside `text` becomes ordinary pieces. With
        `added_vocabulary` it becomes the control token, as a raw completion prompt needs.

        Raises:
          ValueError: `text` holds a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from error
        tokenizer = self._tokenizer if added_vocabulary else self._plain
        return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def control_id(self, spelling: str) -> int:
        """The id of a control token such as `<think>`.

        Raises:
          ValueError: no token has this spelling, or the spelling encodes to more than one id.
        """
        if spelling not in self._control_ids:
            self.require_control_tokens((spelling,))
        return self._control_ids[spelling]

    def require_control_tokens(self, spellings: Iterable[str]) -> None:
        """Checks that each spelling is one control token (chat section 1.3).

        Raises:
          ValueError: names every spelling that is missing or encodes to more than one id.
        """
        problems = []
        for spelling in spellings:
            if spelling in self._control_ids:
                continue
            ids = self._tokenizer.encode(spelling, add_special_tokens=False).ids
            token_id = self._tokenizer.token_to_id(spelling)
            if token_id is None:
                problems.append(f"{spelling!r} is missing")
            elif ids != [token_id]:
                problems.append(f"{spelling!r} encodes to {len(ids)} ids {ids}, not to one")
            else:
                self._control_ids[spelling] = token_id
        if problems:
            raise ValueError(f"{self.source}: control tokens: " + "; ".join(problems))

    def token(self, token_id: int) -> str:
        """The raw vocabulary string of one id: byte alphabet for base tokens, spelling for control tokens.

        Raises:
          ValueError: the id is outside the vocabulary.
        """
        return self._tokens[check_ids([token_id], self.vocab_size)[0]]

    def token_bytes(self, ids: TokenIds) -> bytes:
        """The bytes that the tokens stand for, joined; control tokens give their spelling.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        return b"".join([self._bytes[i] for i in check_ids(ids, self.vocab_size)])

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids` as a reader sees it.

        Begin of sentence, end of sentence and padding are left out, other control tokens keep their spelling
        (chat section 1.1). Bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        decoder = StreamDecoder(self)
        return decoder.push(ids) + decoder.finish()


class StreamDecoder:
    """Incremental `Tokenizer.decode`: the deltas joined are the text of all ids, however the ids are cut.

    Holds back at most three bytes, those of an incomplete UTF-8 sequence.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._unseen = frozenset((tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id))
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: TokenIds) -> str:
        """The text that `ids` complete.

        Raises:
          ValueError: an id is outside the vocabulary; nothing of `ids` is taken then.
        """
        ids = check_ids(ids, self._tokenizer.vocab_size)
        return self._utf8.decode(self._tokenizer.token_bytes([i for i in ids if i not in self._unseen]))

    def finish(self) -> str:
        """The held tail: one U+FFFD if the ids end inside a character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


def check_ids(ids: TokenIds, vocab_size: int) -> list[int]:
    """`ids` as a list of Python integers.

    Raises:
      ValueError: an id is not an integer in [0, vocab_size).
    """
    if type(ids) is list and len(ids) < 16 and all(type(i) is int and 0 <= i < vocab_size for i in ids):
        return ids  # one step's ids, checked in a fraction of numpy's time
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a flat sequence of integers, not {array.dtype} of shape {array.shape}")
    if array.size and not (0 <= array.min() and array.max() < vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary: allowed are 0 to {vocab_size - 1}")
    return array.tolist()


def engram_token_map(tokenizer: Tokenizer) -> Int32[np.ndarray, " vocab"]:
    """Token id -> compressed id, for every id of the tokenizer (chat section 1.4, architecture section 6.1).

    Tokens whose texts differ only in case, accents, compatibility form or surrounding white space share a
    compressed id. Compressed ids are handed out from 0 in order of first appearance.
    """
    compressed: dict[str, int] = {}
    token_map = np.empty(tokenizer.vocab_size, np.int32)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes([token_id]).decode("utf-8", errors="replace")
        key = tokenizer.token(token_id) if "\ufffd" in text else _engram_key(text)
        token_map[token_id] = compressed.setdefault(key, len(compressed))
    return token_map


def check_engram_token_map(token_map: Int32[np.ndarray, " vocab"], compressed_vocab_size: int) -> None:
    """Compares the number of compressed ids with `engram_compressed_vocab_size` of the configuration.

    Raises:
      ValueError: they differ; every hash would be wrong, since the hash multipliers depend on the number.
    """
    count = int(token_map.max()) + 1
    if count != compressed_vocab_size:
        raise ValueError(
            f"the tokenizer gives {count} compressed Engram ids but engram_compressed_vocab_size is "
            f"{compressed_vocab_size}: the tokenizer does not belong to this checkpoint"
        )


def _engram_key(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Lower-casing character by character, since `str.lower` of a whole text treats a final sigma differently.
    lowered = "".join(c.lower() for c in decomposed if not unicodedata.category(c).startswith("M"))
    spaced = re.sub("[ \t\r\n]+", " ", lowered)
    return (spaced if spaced == " " else spaced.strip(_WHITE_SPACE)) or text


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of the byte-level alphabet.

    Visible Latin-1 characters stand for themselves; U+0100, U+0101, ... for the other bytes in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {b: b for b in visible} | {0x100 + i: b for i, b in enumerate(others)}


def _token_bytes(token: str, alphabet: dict[int, int]) -> bytes:
    # A control token with a character outside the alphabet stands for its own spelling.
    if all(ord(c) in alphabet for c in token):
        return token.translate(alphabet).encode("latin-1")
    return token.encode("utf-8")


def _tokens_by_id(tokenizer: tokenizers.Tokenizer, source: str) -> list[str]:
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    missing = next((i for i in range(len(by_id)) if i not in by_id), None)
    if missing is not None:
        raise ValueError(f"{source}: id {missing} has no token although ids go up to {max(by_id)}")
    return [by_id[i] for i in range(len(by_id))]
