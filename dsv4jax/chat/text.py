"""Generated text on its way out: stop strings, which ids the text came from, raw completions, JSON answers."""

import collections
import json
import re
from collections.abc import Sequence

from dsv4jax.tokenizer import StreamDecoder, TokenIds, Tokenizer, check_ids

_OPENING = re.compile(r"[\[{]")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


class StopStrings:
    """Cuts a stream of text at the stop string that completes first, however the text is cut.

    Of stop strings that complete together, the first in the list counts. Holds back exactly the text that may
    still become a stop string.

    Attributes:
      matched: the stop string that was found, otherwise None.
      held: the text that may still become a stop string.
      enabled: while false, text that completes a stop string is output like any other.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False):
        """With `include` the stop string itself is output, otherwise the text ends before it.

        Raises:
          ValueError: `stop` is a string itself or holds anything but non-empty strings.
        """
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop is {stop!r}: it must be a sequence of non-empty strings")
        self.matched: str | None = None
        self.held = ""
        self.enabled = True
        self._stop = tuple(stop)
        self._include = include
        self._longest = max(map(len, self._stop), default=1)

    def push(self, text: str) -> str:
        """The text that is certain to be output. Nothing follows once `matched` is set."""
        if self.matched is not None or not text:
            return ""
        known = len(self.held)
        text = self.held + text
        # Those that the new text completes.
        found = [(text.find(s, max(known - len(s) + 1, 0)), s) for s in reversed(self._stop)]
        ends = {at + len(s): s for at, s in found if at >= 0}
        if ends and self.enabled:
            end = min(ends)
            self.matched, self.held = ends[end], ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        held = next((k for k in range(min(self._longest - 1, len(text)), 0, -1) if self._may_start(text[-k:])), 0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]

    def release(self) -> str:
        """The held text, which no longer can become a stop string."""
        held, self.held = self.held, ""
        return held

    def _may_start(self, tail: str) -> bool:
        return any(len(tail) < len(s) and s.startswith(tail) for s in self._stop)


class TextSources:
    """Which ids a text came from, while parts of it are held back, output or dropped in order.

    An id belongs to the output that shows its first character. Ids without text and ids whose text was
    dropped belong to the output that follows.
    """

    def __init__(self):
        self._waiting: collections.deque[list[int]] = collections.deque()  # [ids, characters] of text not yet output
        self._dropped = 0  # ids whose text will not be output
        self._incomplete = 0  # ids since the last text: pieces of a character

    def add(self, characters: int, ids: int = 1) -> None:
        """`ids` further ids have completed `characters` of text (possibly none yet)."""
        self._incomplete += ids
        if characters:
            self._waiting.append([self._incomplete, characters])
            self._incomplete = 0

    def add_silent(self) -> None:
        """One further id that never has text."""
        self._dropped += 1

    def output(self, characters: int) -> tuple[int, int]:
        """The next characters are output: (ids consumed by that, those of them that have text in it)."""
        shown = self._take(characters)
        dropped, self._dropped = self._dropped, 0
        return shown + dropped, shown

    def drop(self, characters: int) -> None:
        """The next characters are not output."""
        while characters and self._waiting:
            entry = self._waiting[0]
            taken = min(characters, entry[1])
            entry[1] -= taken
            characters -= taken
            if not entry[1]:
                self._dropped += self._waiting.popleft()[0]

    def rest(self) -> int:
        """Consumes all ids that are left."""
        ids = self._dropped + self._incomplete + sum(entry[0] for entry in self._waiting)
        self._waiting.clear()
        self._dropped = self._incomplete = 0
        return ids

    def _take(self, characters: int) -> int:
        ids = 0
        while characters and self._waiting:
            entry = self._waiting[0]
            taken = min(characters, entry[1])
            ids, entry[0] = ids + entry[0], 0
            entry[1] -= taken
            characters -= taken
            if not entry[1]:
                self._waiting.popleft()
        return ids


class CompletionText:
    """Text of a raw completion while its ids arrive; stop strings count everywhere in it.

    The texts joined do not depend on how the ids are cut.

    Attributes:
      ended: True once a stop string was found: nothing more is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ):
        """A stop string that one of the first `min_tokens` ids completes does not count.

        Raises:
          ValueError: a stop string is empty.
        """
        self._tokenizer = tokenizer
        self._left = min_tokens  # ids that cannot end the text
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopStrings(stop, include=include_stop_str)
        self._sources = TextSources()

    @property
    def ended(self) -> bool:
        return self._stop.matched is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def push(self, ids: TokenIds) -> tuple[str, int]:
        """The text that becomes certain with `ids`, and how many ids it consumes.

        Ids after the one that completes a stop string are ignored. Held ids are consumed with the text that
        frees them; the rest by `finish`.

        Raises:
          ValueError: an id is outside the vocabulary, or the text ended in an earlier call.
        """
        if self.ended:
            raise ValueError("the text has ended: no further ids can be pushed")
        texts, consumed = [], 0
        for token_id in check_ids(ids, self._tokenizer.vocab_size):
            self._stop.enabled, self._left = self._left <= 0, self._left - 1
            text = self._decoder.push([token_id])
            self._sources.add(len(text))
            shown = self._stop.push(text)
            if shown:
                texts.append(shown)
                consumed += self._sources.output(len(shown))[0]
            if self.ended:
                break
        return "".join(texts), consumed

    def finish(self) -> tuple[str, int]:
        """Everything held back, and the number of ids not yet consumed; an incomplete character is one U+FFFD."""
        tail = self._stop.push(self._decoder.finish())
        return tail + self._stop.release(), self._sources.rest()


def json_content(content: str) -> str:
    """The JSON value inside the complete answer of a JSON mode without a grammar (chat section 3.6).

    A fence or prose around the value is removed. Of several values the longest counts. A broken object or list is
    never replaced by a value inside it; an answer without another one is returned unchanged.
    """
    if _is_json(content):
        return content
    best, at = "", 0
    while found := _OPENING.search(content, at):
        at = _end_of_brackets(content, found.start())
        value = content[found.start() : at]
        if len(value) > len(best) and _is_json(value):
            best = value
    return best or content


def _end_of_brackets(content: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`, or the end of the content."""
    depth = 0
    for part in _STRING_OR_BRACKET.finditer(content, start):
        if part[0] in "[{":
            depth += 1
        elif part[0] in "]}":
            depth -= 1
        if not depth:
            return part.end()
    return len(content)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)  # not converted: long integers would be refused
        return True
    except (ValueError, RecursionError):
        return False
