"""Requests that went wrong somewhere: one value of a good one replaced by any other."""

import copy
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
    body = copy.deepcopy(good)
    *way, last = draw(st.sampled_from(_places(good)))
    holder = body
    for key in way:
        holder = holder[key]
    holder[last] = draw(_VALUES)
    return body
