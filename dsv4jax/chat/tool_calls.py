"""The block of tool calls in a reply, parsed while it arrives (chat sections 3.1 to 3.3)."""

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dsv4jax.chat.encode import DSML
from dsv4jax.chat.request import parsed_json

_INVOKE = 'invoke name="'
_TAGS = {"name": (" " + _INVOKE, _INVOKE), "key": (' parameter name="', 'parameter name="')}
_BLOCK_END = (" calls>", "calls>", " tool_calls>", "tool_calls>")
_WRAPPERS = ("arguments", "input")  # parameters in which models put the whole object
_STRING_ATTRIBUTE = re.compile(r'\bstring="(true|false)"')


@dataclasses.dataclass(frozen=True)
class CallDelta:
    """A call that opens (`name` given, no arguments yet) or a piece of the JSON text of its arguments."""

    index: int
    id: str
    name: str | None
    arguments: str


class ToolCallParser:
    """Reads the markup that follows the first `<｜DSML｜` of a reply.

    Text and the marker `｜DSML｜` come in separately: only the caller knows which spellings are control tokens.

    Attributes:
      opened: number of calls whose name is known.
      closed: number of calls that are complete.
      ended: the only call allowed is complete: nothing more is read.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, parallel: bool = True):
        """With `parallel` false, only one call is allowed."""
        self.opened = self.closed = 0
        self._parallel = parallel
        self._parameters = {
            tool["function"]["name"]: frozenset((tool["function"].get("parameters") or {}).get("properties") or ())
            for tool in tools
        }
        # "between": text between tags. "tag": after `<｜DSML｜` in a call, kind not yet known; "end_tag": after a
        # `</｜DSML｜` outside of calls.
        # "name", "key", "attributes", "value": inside these. "finished": after the block.
        self._state: Literal["between", "tag", "end_tag", "name", "key", "attributes", "value", "finished"] = "between"
        self._angle = ""  # "<" or "</": a tag if the marker follows
        self._pieces: list[str] = []  # text of the current state, as far as it is collected
        self._deltas: list[CallDelta] = []
        # Of the open call:
        self._in_call = False
        self._id = self._name = ""
        self._count = 0  # parameters
        self._body: list[str] = []  # text where parameters should be
        self._key = ""
        self._streamed = False  # the value is output as it arrives, not collected
        self._is_string = False
        self._wrapped: tuple[str, str] | None = None  # key and value of a parameter that may be the whole object

    @property
    def ended(self) -> bool:
        return self.closed > 0 and not self._parallel

    def text(self, text: str) -> list[CallDelta]:
        """Takes text that contains no marker."""
        text = self._angle + text
        self._angle = "</" if text.endswith("</") else "<" if text.endswith("<") else ""
        self._consume(text[: len(text) - len(self._angle)])
        return self._taken()

    def marker(self) -> list[CallDelta]:
        """Takes the control token `｜DSML｜`."""
        angle, self._angle = self._angle, ""
        closing = angle == "</"
        if not angle or (self._state == "value" and not closing):
            self._consume(angle + DSML)
        elif self._state == "value":
            self._end_value()
        elif self._state in ("key", "attributes"):  # a broken parameter
            self._enter("between" if closing else "tag")
        elif self._state != "finished":
            if closing and self._in_call:  # whatever the tag is called
                self._end_call()
                self._enter("between")
            else:
                self._enter("end_tag" if closing else "tag" if self._in_call else "between")
        return self._taken()

    def finish(self, *, cut: bool) -> list[CallDelta]:
        """Ends the reply, maybe inside a call.

        With `cut`, the call keeps the text of the arguments so far (chat section 3.3). Otherwise the model itself has
        ended there, and its value and the call are closed, so that the arguments are JSON.
        """
        if self._state == "value":
            self._consume(self._angle)
            if not cut:
                self._end_value()
            elif not self._streamed:
                value = "".join(self._pieces)
                self._arguments(self._opening(self._key) + (_quoted(value)[:-1] if self._is_string else value))
        elif cut:
            self._unwrap(last=False)
        if self._in_call and not cut:
            self._end_call()
        self._in_call, self._angle = False, ""
        self._enter("finished")
        return self._taken()

    def _taken(self) -> list[CallDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _enter(self, state: str) -> None:
        self._state, self._pieces = state, []

    def _arguments(self, text: str) -> None:
        self._deltas.append(CallDelta(self.opened - 1, self._id, None, text))

    def _opening(self, key: str) -> str:
        return ("{" if self._count == 1 else ", ") + _quoted(key) + ": "

    def _consume(self, text: str) -> None:
        while text:
            text = self._step(text)

    def _step(self, text: str) -> str:
        """Takes text up to the next change of state; returns what is left."""
        match self._state:
            case "between" if self._in_call:
                if not self._count:
                    self._body.append(text)
            case "between":
                text = "".join([*self._pieces, text])
                at = text.find(_INVOKE)
                if at >= 0:
                    self._enter("name")
                    return text[at + len(_INVOKE) :]
                self._pieces = [text[1 - len(_INVOKE) :]]
            case "tag":
                return self._after_tag("".join([*self._pieces, text]))
            case "end_tag":
                tag = "".join([*self._pieces, text])
                if tag.startswith(_BLOCK_END):
                    self._enter("finished")
                elif any(end.startswith(tag) for end in _BLOCK_END):
                    self._pieces = [tag]
                else:
                    self._enter("between")
                    return tag
            case "name" | "key" | "attributes":
                end = text.find(">" if self._state == "attributes" else '"')
                self._pieces.append(text if end < 0 else text[:end])
                if end >= 0:
                    self._end_piece("".join(self._pieces))
                    return text[end + 1 :]
            case "value" if self._streamed:
                self._arguments(_quoted(text)[1:-1])
            case "value":
                self._pieces.append(text)
        return ""

    def _after_tag(self, tag: str) -> str:
        for state, starts in _TAGS.items():
            for start in starts:
                if tag.startswith(start):
                    if state == "name":  # the call before has no end tag
                        self._end_call()
                        if self.ended:
                            self._enter("finished")
                            return ""
                    self._enter(state)
                    return tag[len(start) :]
                if start.startswith(tag):
                    self._pieces = [tag]
                    return ""
        self._enter("between")
        return tag

    def _end_piece(self, text: str) -> None:
        if self._state == "name":
            self._open_call(text)
        elif self._state == "key":
            self._key = text
            self._enter("attributes")
        else:
            self._start_value(text)

    def _open_call(self, name: str) -> None:
        self._in_call, self._name, self._id = True, name, f"call_{secrets.token_hex(12)}"
        self._count, self._wrapped, self._body = 0, None, []
        self.opened += 1
        self._deltas.append(CallDelta(self.opened - 1, self._id, name, ""))
        self._enter("between")

    def _start_value(self, attributes: str) -> None:
        self._unwrap(last=False)
        attribute = _STRING_ATTRIBUTE.search(attributes)
        self._count += 1
        self._is_string = attribute is not None and attribute[1] == "true"
        self._streamed = self._is_string and not self._may_be_wrapper()
        self._enter("value")
        if self._streamed:
            self._arguments(self._opening(self._key) + '"')
        if attributes.endswith("/"):  # a self-closing tag
            self._end_value()

    def _may_be_wrapper(self) -> bool:
        known = self._parameters.get(self._name)
        return self._count == 1 and self._key in _WRAPPERS and known is not None and self._key not in known

    def _end_value(self) -> None:
        value = "".join(self._pieces)
        if self._streamed:
            self._arguments('"')
        elif self._may_be_wrapper():
            self._wrapped = (self._key, value)
        else:
            self._arguments(self._opening(self._key) + self._value_text(value))
        self._enter("between")

    def _value_text(self, value: str) -> str:
        return value if not self._is_string and _is_json(value) else _quoted(value)

    def _unwrap(self, *, last: bool) -> bool:
        """Outputs a held wrapper: as the whole object if it is the only parameter and fits, else as parameter."""
        if self._wrapped is None:
            return False
        (key, value), self._wrapped = self._wrapped, None
        whole = parsed_json(value) if last else None
        if isinstance(whole, dict) and whole.keys() <= self._parameters[self._name]:
            self._arguments(value.strip())
            return True
        self._arguments(self._opening(key) + self._value_text(value))
        return False

    def _end_call(self) -> None:
        if not self._unwrap(last=True):
            body = "".join(self._body).strip().removeprefix(">").strip()
            if self._count:
                self._arguments("}")
            else:
                self._arguments(body if isinstance(parsed_json(body), dict) else "{}")
        self._in_call, self._body = False, []
        self.closed += 1


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    return text.strip() == "null" or parsed_json(text) is not None
