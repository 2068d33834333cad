"""Selection of a token's experts: per-thread code of `kernel`, written against `pallas_kernels.topk.simt.Machine`.

A warp works on a token; lane l holds the experts l, l + 32, ...
"""

import dataclasses
from typing import Any

_SIGN, _NONE = 0x80000000, 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Selection:
    """Arrays of `simt.Array` kind and sizes.

    In: `scores` [tokens * experts], `bias` and `bias_vl` [experts], `image_mask` [tokens]. Out: `chosen` and `weights`
    [tokens * k].
    """

    scores: Any
    bias: Any
    bias_vl: Any
    image_mask: Any
    chosen: Any
    weights: Any
    experts: int
    k: int
    scale: float


def select(m, s: Selection, token) -> None:
    """Writes the ids of the k experts of a token, best first, and their weights."""
    image = m.load(s.image_mask, token) != 0
    keys, ids = [], []
    for start in range(0, s.experts, 32):
        index = m.lane + start
        here = index < s.experts
        safe = m.where(here, index, m.u32(0))
        bias = m.where(image, m.load(s.bias_vl, safe), m.load(s.bias, safe))
        key = _sortable(m, m.load(s.scores, token * s.experts + safe) + bias)
        # 0 is for what is taken or does not exist.
        keys.append(m.where(here, m.where(key == 0, m.u32(1), key), m.u32(0)))
        ids.append(index)
    chosen = _largest(m, keys, ids, s.k)
    scores = [m.load(s.scores, token * s.experts + index) for index in chosen]
    total = m.f32(1e-20)
    for score in scores:
        total = total + score
    with m.when(m.lane == 0):
        for j, (index, score) in enumerate(zip(chosen, scores, strict=True)):
            m.store(s.chosen, token * s.k + j, index)
            m.store(s.weights, token * s.k + j, m.divide(score, total) * s.scale)


def _largest(m, keys, ids, k: int):
    """The ids of the k largest keys of a warp, ties by id."""
    keys, chosen = list(keys), []
    for _ in range(k):
        best = keys[0]
        for key in keys[1:]:
            best = m.where(key > best, key, best)
        best = m.reduce(best, "umax")
        first = m.u32(_NONE)
        for key, index in reversed(list(zip(keys, ids, strict=True))):
            first = m.where(key == best, index, first)
        first = m.reduce(first, "umin")
        keys = [m.where(index == first, m.u32(0), key) for key, index in zip(keys, ids, strict=True)]
        chosen.append(first)
    return chosen


def _sortable(m, value):
    """Unsigned integers in the order of the numbers."""
    bits = m.bits(value)
    return m.where(bits < _SIGN, bits + _SIGN, ~bits)
