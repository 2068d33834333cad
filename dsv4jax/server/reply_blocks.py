"""A reply as a sequence of blocks in a stream of named events: what Responses and Messages have in common."""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple

from dsv4jax.server.chat_core import ChatTurn, ReplyStep, run_chat
from dsv4jax.server.context import ServerContext
from dsv4jax.server.error_formats import error_event
from dsv4jax.server.logprobs import GeneratedToken
from dsv4jax.server.sse import event_stream

BlockKind = Literal["reasoning", "content", "call"]


@dataclasses.dataclass
class Block:
    """The reasoning, the answer, or one call of a reply while it grows.

    Attributes:
      index: place in the reply.
      texts: pieces of the text, or of the JSON text of a call's arguments.
      tokens: those that the text consumed, if they are kept.
      call_id, name: of a call.
      cut: the token limit ended the reply in this block.
    """

    kind: BlockKind
    index: int
    call_id: str | None = None
    name: str | None = None
    texts: list[str] = dataclasses.field(default_factory=list)
    tokens: list[GeneratedToken] = dataclasses.field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockChange(NamedTuple):
    """One change of a block; only "add" has text."""

    kind: Literal["open", "add", "close"]
    block: Block
    text: str = ""
    tokens: Sequence[GeneratedToken] = ()


class ReplyBlocks:
    """Cuts the steps of a reply into blocks."""

    def __init__(self):
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def changes(self, step: ReplyStep) -> list[BlockChange]:
        """What the step changes, in order; the last step closes the last block."""
        changes = []
        for delta, tokens in ((piece.delta, piece.tokens) for piece in step.pieces):
            if delta.channel == "tool_call":
                changes += self._start("call", delta.id, delta.name)
                continue
            if not delta.text:  # only tells that tokens were consumed
                continue
            kind = "call" if delta.channel == "arguments" else delta.channel
            if self._open is None or self._open.kind != kind:
                changes += self._start(kind)
            self._open.texts.append(delta.text)
            self._open.tokens += tokens
            changes.append(BlockChange("add", self._open, delta.text, tokens))
        if step.finish_reason is not None and self._open is not None:
            self._open.cut = step.finish_reason == "length"
            changes += self._close()
        return changes

    def _start(self, kind: BlockKind, call_id: str | None = None, name: str | None = None) -> list[BlockChange]:
        closed = self._close()
        self._open = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(self._open)
        return [*closed, BlockChange("open", self._open)]

    def _close(self) -> list[BlockChange]:
        block, self._open = self._open, None
        return [] if block is None else [BlockChange("close", block)]


def named_events(payloads: AsyncGenerator[tuple[str, bytes] | None, None], path: str) -> AsyncGenerator[bytes, None]:
    """Pairs of event name and JSON text as events; an error ends the stream as `path` has it.

    Raises:
      ApiError: as `event_stream`.
    """
    return event_stream(payloads, _named, lambda error: error_event(error, path))


def _named(payload: tuple[str, bytes]) -> bytes:
    return b"event: " + payload[0].encode() + b"\ndata: " + payload[1] + b"\n\n"


async def whole_reply(context: ServerContext, turn: ChatTurn, blocks: ReplyBlocks) -> ReplyStep:
    """Runs a turn of one choice to its end; the blocks are complete then. Returns the last step.

    Raises:
      ApiError: the choice failed or was aborted.
    """
    last = None
    async with contextlib.aclosing(run_chat(context, turn)) as steps:
        async for step in steps:
            if step is not None:
                blocks.changes(step)
                last = step
    return last
