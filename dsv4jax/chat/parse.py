"""From generated ids back to a message: reasoning, answer and tool calls (chat section 3)."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dsv4jax.chat.encode import DSML, THINK_END, ReplyStart, reply_start
from dsv4jax.chat.text import StopStrings, TextSources
from dsv4jax.chat.tool_calls import CallDelta, ToolCallParser
from dsv4jax.tokenizer import StreamDecoder, TokenIds, Tokenizer, check_ids

Tools = Sequence[Mapping[str, Any]]
EndReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class ReplyDelta:
    """A piece of the reply; only one field of the message changes.

    Attributes:
      channel: "reasoning", "content": `text` is new text of it. "tool_call": call `index` opens with `id` and
        `name`. "arguments": `text` is new JSON text of the arguments of call `index`.
      text: empty for "tool_call", and in a last delta that only accounts for ids.
      ids: number of pushed ids that this delta consumes.
    """

    channel: Literal["reasoning", "content", "tool_call", "arguments"]
    text: str
    ids: int = 0
    index: int | None = None
    id: str | None = None
    name: str | None = None


class _Parser:
    """What both parsers share: the reply, which `_Reply` reads as text and control tokens."""

    def __init__(
        self,
        start: ReplyStart,
        tools: Tools | None,
        stop: Sequence[str],
        include_stop_str: bool,
        parallel_tool_calls: bool,
    ):
        self._stop = StopStrings(stop, include=include_stop_str)
        self._reply = _Reply(start, tools or (), self._stop, parallel_tool_calls)

    @property
    def ended(self) -> bool:
        return self._reply.ended

    @property
    def tool_calls_seen(self) -> int:
        return self._reply.tool_calls_seen

    @property
    def stop_string(self) -> str | None:
        return self._reply.stop_string


class ReplyParser(_Parser):
    """Splits generated ids into reasoning, answer and tool calls while they arrive.

    The deltas joined do not depend on how the ids are cut. Ids decide: `</think>` and `｜DSML｜` count only as
    control tokens; the same spellings made of ordinary pieces are text. Begin of sentence, end of sentence and
    padding have no text; the caller decides whether they end the reply.

    Attributes:
      ended: True once a stop string was found, or the only call allowed is complete: nothing more is part of
        the reply.
      reasoning_tokens: number of ids with at least one character in the reasoning so far.
      tool_calls_seen: number of calls opened so far.
      stop_string: the stop string that ended the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: TokenIds,
        *,
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        parallel_tool_calls: bool = True,
    ):
        """Starts where `prompt_ids` ends.

        Args:
          tools: the tools that the prompt lists (`effective_tools`); without any, calls are not parsed and
            their markup stays in the answer.
          stop: strings that end the answer. They do not count in reasoning and calls.
          include_stop_str: output the stop string itself.
          min_tokens: a stop string that one of the first so many ids completes does not count.
          parallel_tool_calls: False ends the reply after its first call.

        Raises:
          ValueError: the prompt is no chat prompt, or a stop string is empty.
        """
        start = reply_start(tokenizer, prompt_ids)
        super().__init__(start, tools, stop, include_stop_str, parallel_tool_calls)
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._left = min_tokens  # ids that cannot end the reply
        self._think_end, self._dsml = tokenizer.control_id(THINK_END), tokenizer.control_id(DSML)
        self._silent = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)

    @property
    def reasoning_tokens(self) -> int:
        return self._reply.reasoning_tokens

    def push(self, ids: TokenIds) -> list[ReplyDelta]:
        """The deltas that become certain with `ids`, each with text or an opened call.

        Ids after the one that ends the reply are ignored and counted by no delta. Held ids are counted by the
        delta that frees their text; the rest by `finish`.

        Raises:
          ValueError: an id is outside the vocabulary, or the reply ended in an earlier call.
        """
        if self.ended:
            raise ValueError("the reply has ended: no further ids can be pushed")
        deltas: list[ReplyDelta] = []
        for token_id in check_ids(ids, self._tokenizer.vocab_size):
            deltas += self._take(token_id)
            if self.ended:
                break
        return _joined(deltas)

    def finish(self, reason: EndReason = "length") -> list[ReplyDelta]:
        """Ends the reply and returns everything held back; an incomplete character becomes one U+FFFD.

        With "stop", a call that is still open is closed, and its arguments are JSON; otherwise they are those so far.
        """
        return _joined([*self._flush_decoder(), *self._reply.finish(reason)])

    def _take(self, token_id: int) -> list[ReplyDelta]:
        self._stop.enabled, self._left = self._left <= 0, self._left - 1
        sources = self._reply.sources
        if token_id in self._silent:
            sources.add_silent()
            return []
        if token_id not in (self._think_end, self._dsml):
            text = self._decoder.push([token_id])
            sources.add(len(text))
            return self._reply.text(text)
        deltas = self._flush_decoder()
        if self.ended:
            sources.add_silent()
        elif token_id == self._think_end:
            deltas += self._reply.think_end(ids=1)
        else:
            sources.add(len(DSML))
            deltas += self._reply.dsml()
        return deltas

    def _flush_decoder(self) -> list[ReplyDelta]:
        text = self._decoder.finish()
        if not text or self.ended:
            return []
        self._reply.sources.add(len(text), ids=0)
        return self._reply.text(text)


class TextReplyParser(_Parser):
    """`ReplyParser` for text: control tokens are found by their spelling. Its deltas count no ids.

    For logged or foreign text. Where ids are at hand, `ReplyParser` is right and this is a guess.
    """

    def __init__(
        self,
        start: ReplyStart,
        *,
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        parallel_tool_calls: bool = True,
    ):
        """As `ReplyParser`; `start` is what `reply_start` says of the prompt."""
        super().__init__(start, tools, stop, include_stop_str, parallel_tool_calls)
        self._held = ""  # may become one of the two spellings

    def push(self, text: str) -> list[ReplyDelta]:
        """The deltas that become certain with `text`.

        Raises:
          ValueError: the reply ended in an earlier call.
        """
        if self.ended:
            raise ValueError("the reply has ended: no further text can be pushed")
        text, self._held = self._held + text, ""
        deltas: list[ReplyDelta] = []
        while text and not self.ended:
            found = [(at, spelling) for spelling in (THINK_END, DSML) if (at := text.find(spelling)) >= 0]
            if not found:
                tails = (text[-k:] for k in range(min(len(text), len(THINK_END) - 1), 0, -1))
                self._held = next((t for t in tails if THINK_END.startswith(t) or DSML.startswith(t)), "")
                deltas += self._reply.text(text[: len(text) - len(self._held)])
                break
            at, spelling = min(found)
            deltas += self._reply.text(text[:at])
            if not self.ended:
                deltas += self._reply.think_end() if spelling == THINK_END else self._reply.dsml()
            text = text[at + len(spelling) :]
        return _joined(deltas)

    def finish(self, reason: EndReason = "length") -> list[ReplyDelta]:
        """Ends the reply and returns everything held back; `reason` as in `ReplyParser.finish`."""
        held, self._held = self._held, ""
        return _joined([*([] if self.ended else self._reply.text(held)), *self._reply.finish(reason)])


class _Reply:
    """The state machine of chat section 3.1 over text and the two control tokens that matter.

    `sources` is told of ids by the caller and asked here which of them a delta consumes.
    """

    def __init__(self, start: ReplyStart, tools: Tools, stop: StopStrings, parallel_tool_calls: bool):
        self.sources = TextSources()
        self.reasoning_tokens = 0
        self._stop = stop
        self._calls_allowed = bool(tools)
        self._calls = ToolCallParser(tools, parallel=parallel_tool_calls)
        self._state: Literal["reasoning", "content", "calls"] = "content"
        if start.startswith("reasoning"):
            self._state = "reasoning"
        elif start == "tool_calls":
            self._state = "calls"
        self._at_start = not start.endswith("continuation")  # leading newlines are dropped
        self._newlines = 0  # held: dropped if `</think>` (in reasoning) or a call follows
        self._angle = ""  # "<" after them: the tag of a call if `｜DSML｜` follows

    @property
    def ended(self) -> bool:
        return self._stop.matched is not None or self._calls.ended

    @property
    def stop_string(self) -> str | None:
        return self._stop.matched

    @property
    def tool_calls_seen(self) -> int:
        return self._calls.opened

    def text(self, text: str) -> list[ReplyDelta]:
        if self._state == "calls":
            return self._call_deltas(self._calls.text(text))
        if self._at_start:
            stripped = text.lstrip("\n")
            self.sources.drop(len(text) - len(stripped))
            text, self._at_start = stripped, not stripped
        if self._state == "reasoning":
            return self._body(text)
        shown = self._body(self._stop.push(text))
        return shown + self._release() if self.ended else shown

    def think_end(self, ids: int = 0) -> list[ReplyDelta]:
        if self._state == "calls":
            self.sources.add(len(THINK_END), ids)
            return self._call_deltas(self._calls.text(THINK_END))
        if self._state == "reasoning":
            # Newlines before the tag are dropped unless a "<" that turned out to be text follows them.
            deltas = self._release() if self._angle else []
            self.sources.drop(self._newlines)
            self._newlines = 0
            self._state, self._at_start = "content", True
        else:  # stray
            deltas = self._body(self._stop.release()) + self._release()
            self._at_start = False
        for _ in range(ids):
            self.sources.add_silent()
        return deltas

    def dsml(self) -> list[ReplyDelta]:
        if self._state == "calls":
            return self._call_deltas(self._calls.marker())
        if not self._calls_allowed or not (self._stop.held or self._angle).endswith("<"):
            return self.text(DSML)
        deltas = self._body(self._stop.release())
        self._calls.text(self._angle)
        self._newlines, self._angle = 0, ""
        self._state = "calls"
        return deltas + self._call_deltas(self._calls.marker())

    def finish(self, reason: EndReason) -> list[ReplyDelta]:
        if self._state == "calls":
            deltas = self._call_deltas(self._calls.finish(cut=reason != "stop"))
        elif self.ended:
            deltas = []
        else:
            deltas = self._body(self._stop.release()) + self._release()
        rest = self.sources.rest()
        if rest and deltas:
            deltas[-1] = dataclasses.replace(deltas[-1], ids=deltas[-1].ids + rest)
        elif rest:
            deltas = [ReplyDelta("reasoning" if self._state == "reasoning" else "content", "", rest)]
        return deltas

    def _body(self, text: str) -> list[ReplyDelta]:
        """Outputs reasoning or answer text, except what may still be dropped."""
        if not text:
            return []
        text, self._angle = self._angle + text, ""
        if self._calls_allowed and text.endswith("<"):
            text, self._angle = text[:-1], "<"
        body = text.rstrip("\n") if self._state == "reasoning" or self._calls_allowed else text
        newlines = len(text) - len(body)
        if not body:
            self._newlines += newlines
            return []
        held, self._newlines = self._newlines, newlines
        return self._output("\n" * held + body)

    def _release(self) -> list[ReplyDelta]:
        """Outputs the held newlines and angle: no tag follows."""
        text = "\n" * self._newlines + self._angle
        self._newlines, self._angle = 0, ""
        return self._output(text) if text else []

    def _output(self, text: str) -> list[ReplyDelta]:
        ids, shown = self.sources.output(len(text))
        if self._state == "reasoning":
            self.reasoning_tokens += shown
        return [ReplyDelta("reasoning" if self._state == "reasoning" else "content", text, ids)]

    def _call_deltas(self, calls: Iterable[CallDelta]) -> list[ReplyDelta]:
        deltas = []
        for call in calls:
            ids = self.sources.rest()  # markup and arguments differ in length: all ids so far belong to it
            if call.name is None:
                deltas.append(ReplyDelta("arguments", call.arguments, ids, call.index))
            else:
                deltas.append(ReplyDelta("tool_call", "", ids, call.index, call.id, call.name))
        return deltas


def _joined(deltas: list[ReplyDelta]) -> list[ReplyDelta]:
    """Neighbours of one field become one delta."""
    if len(deltas) < 2:
        return deltas
    joined: list[ReplyDelta] = []
    for _, same in itertools.groupby(deltas, key=lambda delta: (delta.channel, delta.index)):
        pieces = list(same)
        text, ids = "".join(piece.text for piece in pieces), sum(piece.ids for piece in pieces)
        joined.append(dataclasses.replace(pieces[0], text=text, ids=ids))
    return joined
