"""Which tokens may a request sample next (http_api section 7).

A mask is uint32 words: bit `i % 32` of word `i // 32` is set when token `i` is allowed. Rules compose by
intersection, with two exceptions that would otherwise leave no token at all: the `</think>` that a used-up
reasoning budget forces, and the end of sentence after a grammar that nothing can follow.
"""

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, UInt32

from dsv4jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

THINK_END = "</think>"

Words = UInt32[np.ndarray, " words"]
Mask = Words | UInt32[np.ndarray, "places words"] | None
"""Of all tokens of a step, or of each; None allows all."""
_ALWAYS = 2**30  # more tokens than any reply has


class MaskError(RuntimeError):
    """A grammar failed, a token was chosen that was not allowed, or none is allowed. Ends one request only."""


def mask_failure(error: Exception) -> str:
    """What is told of a choice whose mask has raised; only that it did, if that was not foreseen."""
    if isinstance(error, MaskError):
        return str(error)
    _log.error("a mask failed", exc_info=error)
    return "the rules for its tokens failed"


class GrammarState(Protocol):
    """Where one choice stands in its grammar. Methods raise `MaskError`; the state is of no use after that."""

    def fill(self, words: Words) -> None:
        """Writes the mask of the next token: `words` covers the tokenizer's ids, the last word padded with zeros."""

    def push(self, token_id: int) -> None:
        """Takes the token that was chosen; never end of sentence."""

    def copy(self) -> "GrammarState":
        """A state that goes its own way from here."""


class Grammar(Protocol):
    """A compiled grammar: immutable, shared by choices, requests and threads.

    Attributes:
      free_answer: the answer is free text; only a call block has a grammar.
      call_marker: token that opens a call block when it follows a token of `tag_openers`; None if none does.
      tag_openers: tokens whose text ends in `<`.
    """

    free_answer: bool
    call_marker: int | None
    tag_openers: frozenset[int]

    def answer(self) -> GrammarState:
        """The state at the first token of the answer; not to be called with `free_answer`."""

    def calls(self) -> GrammarState:
        """The state after `call_marker`; not to be called without one."""


@dataclasses.dataclass(frozen=True)
class MaskRules:
    """What restricts the tokens of a request.

    Attributes:
      min_tokens: end of sentence and `stop_token_ids` are forbidden until so many tokens were chosen.
      stop_token_ids: ids besides end of sentence that end the reply; read only for `min_tokens`.
      allowed_token_ids: the only ids that may be chosen; None for all.
      bad_words: token sequences that may not occur in the reply, see `bad_word_sequences`.
      reasoning_budget: number of reasoning tokens after which only `</think>` is allowed; None for no limit.
      in_reasoning: the prompt ends inside the reasoning, so the reply starts there.
      grammar: grammar of the answer; idle during the reasoning.
    """

    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    reasoning_budget: int | None = None
    in_reasoning: bool = False
    grammar: Grammar | None = None


class TokenMask:
    """The mask of one choice, advanced token by token. For one thread at a time; made by `mask_factory`."""

    def __init__(self, rules: MaskRules, masks: "_FixedMasks"):
        self._rules = rules
        self._masks = masks
        self._state: GrammarState | None = None
        self._in_reasoning = rules.in_reasoning
        self._reasoning_tokens = 0
        self._chosen = 0
        self._last_token: int | None = None
        self._ended = False
        longest = max((len(word) for word in masks.long_bad_words), default=1)
        self._tail: collections.deque[int] = collections.deque(maxlen=longest - 1)
        self._next: tuple[Words | None] | None = None
        self._foreseen: list[tuple[int, Words | None]] = []  # tokens that may come, each with the mask behind it
        if rules.grammar is not None and not rules.in_reasoning and not rules.grammar.free_answer:
            self._state = rules.grammar.answer()

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the mask of the token after next depends on which token is next."""
        if self._state is not None:
            return True
        rules = self._rules
        if self._in_reasoning:
            if self._grammar_pending:
                return True
            if rules.reasoning_budget is not None and rules.reasoning_budget - self._reasoning_tokens <= 1:
                return True
        if rules.grammar is not None and self._last_token in rules.grammar.tag_openers:
            return True
        return any(self._tail_is(word[:-2]) for word in self._masks.long_bad_words)

    @property
    def pause_tokens(self) -> tuple[int, ...]:
        """Tokens, at most `MAX_PAUSE_TOKENS`, that end what `unchanged_for` says when one of them is chosen."""
        rules = self._rules
        if self._state is not None or rules.grammar is None:
            return ()
        marker = () if rules.grammar.call_marker is None else (rules.grammar.call_marker,)
        return (*marker, self._masks.think_end_id) if self._grammar_pending else marker

    @property
    def unchanged_for(self) -> int:
        """How many of the next tokens, at least 1, obey the mask of the next one.

        That is so whatever these tokens are, up to and including the first of `pause_tokens`.
        """
        rules = self._rules
        if self._state is not None:
            return 1
        count = _ALWAYS
        if self._masks.long_bad_words:
            # One token leaves only the end of a bad word, the next one may then change the rules.
            words = self._masks.long_bad_words
            count = 1 if any(self._tail_is(w[:-2]) or self._tail_is(w[:-1]) for w in words) else 2
        if self._in_reasoning and rules.reasoning_budget is not None:
            count = min(count, rules.reasoning_budget - self._reasoning_tokens)
        if self._chosen < rules.min_tokens:
            count = min(count, rules.min_tokens - self._chosen)
        return max(count, 1)

    def next(self, ahead: int = 0) -> Words | None:
        """The mask of the next token, or of the one after it with `ahead` = 1; None when everything is allowed.

        The array is read-only and stays as it is. Asking again before `push` costs nothing.

        Raises:
          MaskError: the grammar failed, or no token is allowed.
          ValueError: `ahead` is not 0 or 1, or is 1 while `waits_for_tokens`.
        """
        if ahead == 0:
            if self._next is None:
                self._next = (self._compute(),)
            return self._next[0]
        if ahead != 1 or self.waits_for_tokens:
            raise ValueError(f"ahead = {ahead}: allowed are 0, and 1 when the mask does not wait for tokens")
        return self._fixed(ahead)

    def along(self, drafts: Sequence[int]) -> list[Words | None]:
        """The mask of the next token, and of those behind each draft if the drafts up to it are chosen.

        It ends with a draft that is not allowed, behind which any mask will do, and before one that the grammar fails
        at. Taking the drafts with `push` then costs little.

        Raises:
          MaskError: as `next`.
        """
        masks, ahead = [self.next()], copy.copy(self)
        ahead._tail, ahead._foreseen = self._tail.copy(), []
        ahead._state = None if self._state is None else self._state.copy()
        self._foreseen = []
        for draft in drafts:
            if not self._allows(masks[-1], draft):
                return [*masks, masks[-1]]
            try:
                ahead.push(draft)
                masks.append(ahead.next())
            except MaskError:
                break
            self._foreseen.append((draft, masks[-1]))
        return masks

    def push(self, token_id: int) -> None:
        """Takes the token that was chosen.

        Raises:
          MaskError: the token was not allowed, or the grammar failed; the mask is of no use after that.
        """
        if not 0 <= token_id < self._masks.vocab_size:
            raise MaskError(f"token {token_id} is outside the vocabulary of {self._masks.vocab_size}")
        if not self._allows(self.next(), token_id):
            raise MaskError(f"token {token_id} was chosen although it was not allowed")

        grammar = self._rules.grammar
        if self._state is not None:
            if token_id == self._masks.eos_id:
                self._ended = True
            else:
                self._state.push(token_id)
        elif grammar is not None and token_id == grammar.call_marker and self._last_token in grammar.tag_openers:
            # The model sometimes calls without closing its reasoning (chat section 3.1).
            self._in_reasoning = False
            self._state = grammar.calls()
        elif self._in_reasoning and token_id == self._masks.think_end_id:
            self._in_reasoning = False
            if grammar is not None and not grammar.free_answer:
                self._state = grammar.answer()
        elif self._in_reasoning:
            self._reasoning_tokens += 1
        self._chosen += 1
        self._last_token = token_id
        self._tail.append(token_id)
        as_foreseen = bool(self._foreseen) and self._foreseen[0][0] == token_id
        self._next = self._foreseen[0][1:] if as_foreseen else None
        self._foreseen = self._foreseen[1:] if as_foreseen else []

    @staticmethod
    def _allows(words: Words | None, token_id: int) -> bool:
        return words is None or bool(words[token_id // 32] >> (token_id % 32) & 1)

    @property
    def _grammar_pending(self) -> bool:
        # The reasoning must be followed by an answer that the grammar accepts.
        return self._in_reasoning and self._rules.grammar is not None and not self._rules.grammar.free_answer

    def _compute(self) -> Words | None:
        budget = self._rules.reasoning_budget
        if self._in_reasoning and budget is not None and self._reasoning_tokens >= budget:
            return self._masks.only_think_end
        fixed = self._fixed(ahead=0)
        forbidden = [word[-1] for word in self._masks.long_bad_words if self._tail_is(word[:-1])]
        if self._state is None:
            if not forbidden:
                return fixed
            words = self._masks.every_token.copy() if fixed is None else fixed.copy()
        else:
            if self._ended:
                return self._masks.only_eos
            words = np.zeros_like(self._masks.only_eos)
            self._state.fill(words[: self._masks.tokenizer_words])
            if not (words & ~self._masks.only_eos).any():
                if words.any():
                    return self._masks.only_eos
                raise MaskError("the grammar allows no token")
            if fixed is not None:
                words &= fixed
        for token_id in forbidden:
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if not words.any():
            raise MaskError("no token is allowed: the rules of the request exclude each other here")
        words.flags.writeable = False
        return words

    def _fixed(self, ahead: int) -> Words | None:
        if self._chosen + ahead < self._rules.min_tokens:
            return self._masks.no_stop
        return self._masks.no_eos if self._grammar_pending else self._masks.free

    def _tail_is(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) <= len(self._tail) and all(
            a == b for a, b in zip(reversed(tokens), reversed(self._tail), strict=False)
        )


def one_mask(masks: Sequence[Words | None]) -> Mask:
    """The masks of a step's tokens in one array; one of them if all are the same object."""
    if all(mask is masks[0] for mask in masks):
        return masks[0]
    everything = np.full_like(next(mask for mask in masks if mask is not None), 0xFFFFFFFF)
    return np.stack([everything if mask is None else mask for mask in masks])


MaskFactory = Callable[[], TokenMask]


def mask_factory(rules: MaskRules, tokenizer: Tokenizer, vocab_size: int) -> MaskFactory | None:
    """Makes the masks of a request's choices, one per call; None when nothing is restricted.

    Args:
      rules: the rules of the request.
      tokenizer: gives end of sentence and `</think>`.
      vocab_size: the model's; ids that the tokenizer lacks are never allowed.

    Raises:
      ValueError: a rule is out of range, or the rules leave no token; the message names the rule.
    """
    masks = _FixedMasks(rules, tokenizer, vocab_size)
    dynamic = rules.grammar is not None or (rules.in_reasoning and rules.reasoning_budget is not None)
    if not (dynamic or rules.min_tokens or masks.long_bad_words) and masks.free is None:
        return None
    return lambda: TokenMask(rules, masks)


def bad_word_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell `words`, for `MaskRules.bad_words`.

    Each word as it begins a text, and with a space before it when that gives as many tokens, the first of them
    another one. A word may still be spelled with other tokens.

    Raises:
      ValueError: a word is empty or blank.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        stripped = word.lstrip()
        if not stripped:
            raise ValueError(f"bad_words[{index}] is {word!r}: a word with at least one visible character is needed")
        plain, spaced = (tuple(tokenizer.encode(text).tolist()) for text in (stripped, " " + stripped))
        sequences[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return tuple(sequences)


class _FixedMasks:
    """Masks that do not depend on the tokens chosen, shared by the choices of a request.

    Attributes:
      free: allowed ids without one-token bad words; None when that is every id of the model.
      no_eos: `free` without end of sentence.
      no_stop: `free` without end of sentence and stop ids.
      long_bad_words: bad words of two tokens or more.
    """

    def __init__(self, rules: MaskRules, tokenizer: Tokenizer, vocab_size: int):
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size = {vocab_size} is less than the tokenizer's {tokenizer.vocab_size}")
        for name, value in (("min_tokens", rules.min_tokens), ("reasoning_budget", rules.reasoning_budget or 0)):
            if value < 0:
                raise ValueError(f"{name} = {value}: at least 0 is needed")
        _check_ids("stop_token_ids", rules.stop_token_ids, vocab_size)
        for word in rules.bad_words:
            _check_ids("bad_words", word, vocab_size)
            if not word:
                raise ValueError("bad_words holds an empty sequence")
        constrained = rules.grammar is not None and not rules.grammar.free_answer
        needs_think_end = rules.in_reasoning and (constrained or rules.reasoning_budget is not None)

        self.vocab_size = vocab_size
        self.tokenizer_words = -(-tokenizer.vocab_size // 32)
        self.eos_id = tokenizer.eos_id
        self.think_end_id = tokenizer.control_id(THINK_END) if rules.in_reasoning else None
        self.long_bad_words = tuple(word for word in rules.bad_words if len(word) > 1)

        allowed = np.zeros(vocab_size, bool)
        if rules.allowed_token_ids is None:
            allowed[: tokenizer.vocab_size] = True
        else:
            _check_ids("allowed_token_ids", rules.allowed_token_ids, tokenizer.vocab_size)
            allowed[list(rules.allowed_token_ids)] = True
        allowed[[word[0] for word in rules.bad_words if len(word) == 1]] = False
        if needs_think_end and not allowed[self.think_end_id]:
            raise ValueError(f"allowed_token_ids lacks {THINK_END} ({self.think_end_id}), which must end the reasoning")

        self.every_token = _pack(np.arange(vocab_size) < tokenizer.vocab_size)
        self.free = None if allowed.all() else _pack(allowed)
        self.no_eos = _pack(_without(allowed, [self.eos_id]))
        self.no_stop = _pack(_without(allowed, [self.eos_id, *rules.stop_token_ids]))
        self.only_eos = _pack(np.arange(vocab_size) == self.eos_id)
        self.only_think_end = None if self.think_end_id is None else _pack(np.arange(vocab_size) == self.think_end_id)
        if not allowed.any():
            raise ValueError("allowed_token_ids and bad_words leave no token")
        if rules.min_tokens and not self.no_stop.any():
            raise ValueError(f"min_tokens = {rules.min_tokens}: the allowed tokens all end the reply")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} holds {token_id}: allowed are 0 to {vocab_size - 1}")


def _without(allowed: Bool[np.ndarray, " vocab"], ids: list[int]) -> Bool[np.ndarray, " vocab"]:
    result = allowed.copy()
    result[ids] = False
    return result


def _pack(allowed: Bool[np.ndarray, " vocab"]) -> Words:
    packed = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view("<u4").astype(np.uint32)
    packed.flags.writeable = False
    return packed
