"""From the bytes of a request body to checked values."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int32

from dsv4jax.server.errors import ApiError, invalid_json, invalid_value, missing_field

MOST_PROBLEMS = 10
MAX_DEPTH = 256  # what encodes values again gives up at 1,000 levels less those of its caller
_MOST_SHOWN = 200
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder()
_MOST_OF_NAME = 100


def decode_object(body: bytes, *, undecoded: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON object of a body without its null fields, which count as absent.

    The fields named in `undecoded` stay JSON text (`msgspec.Raw`).

    Raises:
      ApiError: the body is not a JSON object, or a decoded field holds a number that is out of range or is nested
        deeper than `MAX_DEPTH` levels.
    """
    try:
        fields = _decoded(_OBJECT, body)
    except msgspec.ValidationError as error:
        raise invalid_json(f"the body must be a JSON object: {error}") from error
    values = {
        name: value if name in undecoded else decode_value(value, name)
        for name, value in fields.items()
        if memoryview(value) != b"null"
    }
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # otherwise it cannot be that deep
        _check_depth(values)
    return values


def is_list(text: msgspec.Raw) -> bool:
    return bytes(memoryview(text)[:1]) == b"["


def is_string(text: msgspec.Raw) -> bool:
    return bytes(memoryview(text)[:1]) == b'"'


def decode_list(text: msgspec.Raw) -> list[msgspec.Raw]:
    """The elements of a JSON list, undecoded."""
    return _decoded(_LIST, text)


def decode_value(text: msgspec.Raw, param: str) -> Any:
    """The value of a JSON text, which is field `param`.

    Raises:
      ApiError: it is not valid JSON, or holds a number that is out of range.
    """
    try:
        return _decoded(_VALUE, text)
    except msgspec.ValidationError as error:
        param = param[:_MOST_OF_NAME]  # the name may be anything
        given = bytes(memoryview(text)[:_MOST_SHOWN]).decode("utf-8", errors="replace")
        message = f"{param} is {given}: its numbers must be at most {sys.float_info.max:.1e} in size"
        raise invalid_value(param, message) from error


def decode_token_ids(text: msgspec.Raw, param: str, vocab_size: int) -> Int32[np.ndarray, " tokens"]:
    """A JSON list of token ids as one array.

    Raises:
      ApiError: an element is no integer in [0, vocab_size); names its index.
    """
    data = bytes(memoryview(text)[1:-1]).strip()
    codes = np.frombuffer(data, np.uint8)
    # `text` is valid JSON: without these characters and any after "9", only natural numbers and commas are left.
    if codes.size and codes.max() <= ord("9") and not any(c in data for c in (b"-", b".", b'"')):
        ids = np.fromstring(data, np.int64, sep=",")  # a number beyond int64 becomes the largest
    else:
        values = decode_value(text, param)
        wrong = next((i for i, value in enumerate(values) if not is_integer(value)), None)
        if wrong is not None:
            raise invalid_value(f"{param}[{wrong}]", _is(f"{param}[{wrong}]", values[wrong], "a token id"))
        ids = np.array([min(max(value, -1), 2**62) for value in values], np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        given = decode_value(_decoded(_LIST, text)[wrong], param)
        raise invalid_value(
            f"{param}[{wrong}]", _is(f"{param}[{wrong}]", given, f"a token id from 0 to {vocab_size - 1}")
        )
    return ids.astype(np.int32)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for an error message: at most 200 characters of it."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, str):
        return json.dumps(value[:_MOST_SHOWN], ensure_ascii=False) + ("..." if len(value) > _MOST_SHOWN else "")
    return json.dumps(value)[:_MOST_SHOWN]


class Fields:
    """Reads the fields of one JSON object and collects what is wrong with them.

    Each method returns the field's value, or `default` if it is absent or wrong. Call `check` before using any.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", problems: list[ApiError] | None = None):
        """`path` is the dotted path of the object, and `problems` the list of the object that holds it."""
        self.values = values
        self.problems = [] if problems is None else problems
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def check(self) -> None:
        """Raises ApiError for the fields that were wrong: the parameter is the first one's, the message all's."""
        if not self.problems:
            return
        first, more = self.problems[0], len(self.problems) - MOST_PROBLEMS
        message = "; ".join(problem.message for problem in self.problems[:MOST_PROBLEMS])
        message += f"; and {more} more problems" if more > 0 else ""
        raise ApiError(first.status, message, type=first.type, code=first.code, param=first.param)

    def wrong(self, name: str, value: Any, allowed: str) -> None:
        """Notes that a field's value is not allowed; `allowed` completes "must be"."""
        self.problem(invalid_value(self.path(name), _is(self.path(name), value, allowed)))

    def problem(self, error: ApiError) -> None:
        self.problems.append(error)

    def missing(self, name: str) -> None:
        self.problem(missing_field(self.path(name)))

    def boolean(self, name: str, default: bool) -> bool:
        return self._typed(name, default, lambda value: isinstance(value, bool), "true or false")

    def string(self, name: str, default: str | None = None) -> str | None:
        return self._typed(name, default, lambda value: isinstance(value, str), "a string")

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        # Limits of 2**31 and more are those of a type, not worth telling.
        allowed = f"an integer of at least {low}" if high >= 2**31 - 1 else f"an integer from {low} to {high}"
        allowed = "a 64-bit integer" if low == -(2**63) else allowed
        return self._typed(name, default, lambda value: is_integer(value) and low <= value <= high, allowed)

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A finite number from `low`, or above it, to `high`."""
        allowed = f"a number {'above' if above else 'from'} {low:g}"
        allowed += f" to {high:g}" if high < 1e30 else ""

        def fits(value: Any) -> bool:
            is_number = is_integer(value) or (isinstance(value, float) and math.isfinite(value))
            return is_number and low <= value <= high and not (above and value == low)

        return float(self._typed(name, default, fits, allowed))

    def object(self, name: str) -> Mapping[str, Any] | None:
        """An object without its null fields."""
        value = self._typed(name, None, lambda value: isinstance(value, dict), "an object")
        return None if value is None else {key: item for key, item in value.items() if item is not None}

    def strings(self, name: str, *, most: int | None = None, longest: int | None = None) -> tuple[str, ...]:
        """A list of non-empty strings of at most `longest` characters."""
        values = self.values.get(name, [])
        if not isinstance(values, list) or (most is not None and len(values) > most):
            self.wrong(name, values, "a list of strings" if most is None else f"a list of at most {most} strings")
            return ()
        wrong = next((i for i, value in enumerate(values) if not (isinstance(value, str) and value)), None)
        if wrong is not None:
            self.wrong(f"{name}[{wrong}]", values[wrong], "a string that is not empty")
            return ()
        long = next((i for i, value in enumerate(values) if longest is not None and len(value) > longest), None)
        if long is not None:
            self.wrong(f"{name}[{long}]", values[long], f"a string of at most {longest} characters")
            return ()
        return tuple(values)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        values = self.values.get(name, [])
        if not isinstance(values, list):
            self.wrong(name, values, "a list of token ids")
            return ()
        wrong = next((i for i, value in enumerate(values) if not (is_integer(value) and 0 <= value < vocab_size)), None)
        if wrong is not None:
            self.wrong(f"{name}[{wrong}]", values[wrong], f"a token id from 0 to {vocab_size - 1}")
            return ()
        return tuple(values)

    def _typed(self, name: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not fits(value):
            self.wrong(name, value, allowed)
            return default
        return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise invalid_json(f"the body is nested deeper than {MAX_DEPTH} levels")


def _is(path: str, value: Any, allowed: str) -> str:
    return f"{path} is {shown(value)}: it must be {allowed}"


def _decoded(decoder: msgspec.json.Decoder, text: bytes | msgspec.Raw) -> Any:
    """The value; raises msgspec.ValidationError for JSON of another type, or with a number out of range."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid_json("the body is not valid JSON: it is nested too deeply") from error
