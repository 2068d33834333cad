"""Requests that went wrong somewhere: one value of a good one replaced by another."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
_NAMES = st.sampled_from(["type", "text", "content", "role", "name", "id", "function", "input", "x"])
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=5
)


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in items for place in _places(item, (*path, key))]


@st.composite
def changed(draw, good: dict) -> dict:
    """`good` with one value, at any depth, replaced."""
    place = draw(st.sampled_from(_places(good)))
    return _replaced(good, place, draw(_VALUES))[0]


def replacements(good: dict, value: Any) -> Iterator[tuple[str, dict, Any]]:
    """For each place in `good`: its dotted path, `good` with `value` there, and what was there."""
    for place in _places(good):
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
        yield path[1:], *_replaced(good, place, value)


def _replaced(good: dict, place: tuple, value: Any) -> tuple[dict, Any]:
    body = copy.deepcopy(good)
    *way, last = place
    holder = body
    for key in way:
        holder = holder[key]
    before, holder[last] = holder[last], value
    return body, before
