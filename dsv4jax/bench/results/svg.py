"""Plots as SVG, drawn for the width of a phone and coloured by the page they are on."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Row, is_number

COLOURS = 8
"""The page styles the classes c0 to c7, whose elements are drawn in `var(--c)`."""
_WIDTH = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 24, 40
_HEIGHT = 270  # without a legend
_CHARACTER = 6.3  # mean width of one, of text 12 high
_LINE = 18

Series = dict[str, list[tuple[Any, float]]]


def usable_rows(plot: Plot, rows: Iterable[Row]) -> tuple[list[Row], int]:
    """Rows that the plot can show, and how many that belong to it cannot be shown.

    These lack a column, are not above 0 on a logarithmic axis, or are a bar below 0.
    """
    belonging = [row for row in rows if all(row.get(name) == value for name, value in plot.where.items())]
    found = [
        row
        for row in belonging
        if _x_of(plot, row) is not None and any(_y_of(plot, row, y) is not None for y in plot.y)
    ]
    return found, len(belonging) - len(found)


def draw(plot: Plot, rows: Sequence[Row], name: str, among: Sequence[Row] | None = None) -> str:
    """The plot of usable rows, at least one.

    Args:
      name: of its elements that need one; unique on a page.
      among: usable rows that axes and colours are for, those of `rows` included. Default: these alone.
    """
    series, room = _series(plot, rows), _series(plot, rows if among is None else among)
    if plot.kind in ("bar", "stacked"):
        body, height = _bars(plot, series, room)
    else:
        body, height = _points(plot, series, room)
    legend, below = _legend(list(room) if len(room) > 1 else [], height)
    what = f"{_title(plot.y_axis)} by {_title(plot.x_axis)}; the numbers are in the table {plot.table}"
    return (
        f'<svg role="img" aria-labelledby="{name}-t {name}-d" viewBox="0 0 {_WIDTH} {below:.0f}"'
        f' xmlns="http://www.w3.org/2000/svg"><title id="{name}-t">{escape(plot.title)}</title>'
        f'<desc id="{name}-d">{escape(what)}</desc>{body}{legend}</svg>'
    )


def number(value: float) -> str:
    """Four digits that count; thousands apart, and from ten million on in M, G, T or P what is not a whole number."""
    if isinstance(value, float) and 1e7 <= abs(value) < math.inf:
        return _with_unit(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{round(value):,}"
    return f"{value:.4g}"


def _with_unit(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def words(name: str) -> str:
    """A column's name for people; it can break between words."""
    return name.replace("_", " ")


def _x_of(plot: Plot, row: Row) -> Any:
    value = row.get(plot.x)
    if plot.kind in ("bar", "stacked"):
        if value is None or isinstance(value, list | dict):
            return None
        return number(value) if is_number(value) else str(value)
    return value if _is_on(plot.x_axis, value) else None


def _y_of(plot: Plot, row: Row, column: str) -> float | None:
    value = row.get(column)
    below = plot.kind in ("bar", "stacked") and is_number(value) and value < 0
    return value if _is_on(plot.y_axis, value) and not below else None


def _is_on(axis: Axis, value: Any) -> bool:
    return is_number(value) and (value > 0 or not axis.log)


def _series(plot: Plot, rows: Iterable[Row]) -> Series:
    """Points by the name of their series, in the order of the rows; of many parts of a stack the largest first."""
    found: Series = {}
    for row in rows:
        told = ", ".join(_told(name, row[name]) for name in plot.by if row.get(name) is not None)
        for column in plot.y:
            y = _y_of(plot, row, column)
            if y is not None:
                name = ": ".join(filter(None, (told, words(column) if len(plot.y) > 1 else "")))
                found.setdefault(name, []).append((_x_of(plot, row), y))
    if plot.kind == "stacked" and len(found) > COLOURS:
        # The large parts get colours of their own.
        return dict(sorted(found.items(), key=lambda series: -sum(y for _, y in series[1])))
    return found


def _told(name: str, value: Any) -> str:
    """A column's value as part of a name; words say themselves what they are."""
    is_words = isinstance(value, str) and any(character.isalpha() for character in value)
    return words(value) if is_words else f"{words(name)} {value}"


def _repeats(points: Iterable[tuple[Any, float]]) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = {}
    for x, y in points:
        found.setdefault(x, []).append(y)
    return found


# Axes


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Values from `low` to `high` between two places."""

    low: float
    high: float
    log: bool
    begin: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        share = (self._at(value) - self._at(self.low)) / (self._at(self.high) - self._at(self.low))
        return self.begin + share * (self.end - self.begin)

    def _at(self, value: float) -> float:
        return math.log(value) if self.log else value


def _scale(values: Sequence[float], log: bool, begin: float, end: float, at_values: bool = False) -> _Scale:
    """An axis for values; with `at_values`, its ticks are the values where these are few."""
    low, high = min(values), max(values)
    distinct = sorted(set(values))
    if log:
        low, high = (low / 1.5, high * 1.5) if low == high else (low, high)
        edge = (high / low) ** 0.04
        low, high = low / edge, high * edge
        ticks = distinct if at_values and len(distinct) <= 12 else _log_ticks(low, high)
    else:
        # From zero, unless the values are so close together that nothing of them would be seen.
        close = high - low <= (0.7 if at_values else 0.3) * abs(high)
        low = low - (high - low) * 0.2 if close and high > low else min(0.0, low)
        high = max(high, low + abs(low) * 0.01, low + 1e-12)
        step = _nice((high - low) / 4)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        if high <= low:
            high = low + step
        ticks = [low + i * step for i in range(round((high - low) / step) + 1)]
        if at_values and len(distinct) <= 8 and all(value == int(value) for value in distinct):
            ticks = distinct
    return _Scale(low, high, log, begin, end, tuple(ticks))


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1,) if high / low > 200 else (1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**power * factor for power in powers for factor in factors if low <= 10.0**power * factor <= high]


def _tick_text(ticks: Sequence[float]) -> Callable[[float], str]:
    """How ticks are written: in units of 1024 where all are whole ones of them."""
    if all(tick % 1024 == 0 for tick in ticks) and any(ticks):
        return lambda tick: f"{tick / 2**20:g}M" if tick % 2**20 == 0 and tick else f"{tick / 1024:g}K"

    return _with_unit


def _fitting(text: str) -> str:
    """As much of a text as fits on a line; marks have all of it as their title."""
    most = int((_WIDTH - 30) / _CHARACTER)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _title(axis: Axis) -> str:
    return f"{axis.label} ({axis.unit})" if axis.unit else axis.label


# Lines and points


def _points(plot: Plot, series: Series, room: Series) -> tuple[str, float]:
    everything = list(itertools.chain(*room.values()))
    x = _scale([x for x, _ in everything], plot.x_axis.log, _LEFT, _WIDTH - _RIGHT, at_values=True)
    y = _scale([y for _, y in everything], plot.y_axis.log, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(x, y, plot)]
    if plot.kind == "pareto":
        front = pareto_front([point for points in series.values() for point in points])
        parts.append(f'<polyline class="front" points="{_path(front, x, y)}"/>')
    names = list(room)
    for name, points in series.items():
        index = names.index(name)
        parts.append(f"<g{_colour(index)}>")
        if plot.kind == "line":
            repeats = _repeats(sorted(points))
            points = [(at, statistics.median(values)) for at, values in repeats.items()]
            dash = ' stroke-dasharray="5 3"' if index >= COLOURS else ""
            parts.append(f'<polyline class="line" points="{_path(points, x, y)}"{dash}/>')
            for at, values in repeats.items():
                if len(values) > 1:
                    ends = f'y1="{y(min(values)):.1f}" x2="{x(at):.1f}" y2="{y(max(values)):.1f}"'
                    parts.append(f'<line class="spread" x1="{x(at):.1f}" {ends}/>')
        for at, value in points:
            told = ", ".join(
                filter(None, (name, f"{number(at)} {plot.x_axis.unit}", f"{number(value)} {plot.y_axis.unit}"))
            )
            parts.append(_marker(index, x(at), y(value), told))
        parts.append("</g>")
    return "".join(parts), _HEIGHT


def _path(points: Iterable[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one direction without losing in the other, by x; more is better."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _grid(x: _Scale, y: _Scale, plot: Plot) -> str:
    parts, bottom = [], _HEIGHT - _BOTTOM
    y_text, x_text = _tick_text(y.ticks), _tick_text(x.ticks)
    for tick in y.ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{y_text(tick)}</text>')
    free = -math.inf
    for tick in x.ticks:
        label, at = x_text(tick), x(tick)
        half = len(label) * _CHARACTER / 2
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        if at - half > free:
            at = min(at, _WIDTH - half)
            parts.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{bottom + 17}">{label}</text>')
            free = at + half + 4
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="4" y="12">{escape(_fitting(_title(plot.y_axis)))}</text>')
    label = escape(_fitting(_title(plot.x_axis)))
    parts.append(f'<text class="label" text-anchor="middle" x="{middle}" y="{_HEIGHT - 6}">{label}</text>')
    return "".join(parts)


def _marker(index: int, x: float, y: float, told: str) -> str:
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4">',
        f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6">',
        f'<path d="M{x:.1f} {y - 4.2:.1f}l4.2 4.2-4.2 4.2-4.2-4.2z">',
        f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z">',
    )
    shape = shapes[index % len(shapes)]
    return f"{shape}<title>{escape(told)}</title></{shape[1 : shape.index(' ')]}>"


def _colour(index: int) -> str:
    """Of a series; when all colours are taken, they come again, fainter."""
    return f' class="c{index % COLOURS}{" again" if index >= COLOURS else ""}"'


# Bars


def _bars(plot: Plot, series: Series, room: Series) -> tuple[str, float]:
    """Bars from the left, each group below its name, so that names of any length can be read."""
    names, stacked = list(room), plot.kind == "stacked"
    groups: dict[str, dict[str, list[float]]] = {}
    for name, points in series.items():
        for x, values in _repeats(points).items():
            groups.setdefault(x, {})[name] = values
    scale = _Scale(0, _longest(room, stacked), False, 4, _WIDTH - 70, ())
    parts, top = [f'<text class="label" x="4" y="12">{escape(_fitting(_title(plot.y_axis)))}</text>'], 24.0
    for group, bars in groups.items():
        parts.append(f'<text x="4" y="{top + 12:.1f}">{escape(_fitting(group))}</text>')
        top += _LINE
        total = sum(statistics.median(values) for values in bars.values())
        at = scale.begin
        for name, values in sorted(bars.items(), key=lambda bar: names.index(bar[0])):
            index, value = names.index(name), statistics.median(values)
            told = escape(f"{group}{', ' if name else ''}{name}: {number(value)} {plot.y_axis.unit}")
            length = abs(scale(value) - scale.begin)
            parts.append(
                f'<g{_colour(index)}><rect x="{at:.1f}" y="{top:.1f}" width="{length:.1f}" height="12">'
                f"<title>{told}</title></rect></g>"
            )
            if stacked:
                share = f"{value / total:.0%}" if total else ""
                if length > 36:
                    middle = at + length / 2
                    parts.append(
                        f'<text class="inside" text-anchor="middle" x="{middle:.1f}" y="{top + 10:.1f}">{share}</text>'
                    )
                at += length
            else:
                end = max(length, scale(max(values)) - scale.begin) + 8
                if len(values) > 1:
                    ends = f'x1="{scale(min(values)):.1f}" x2="{scale(max(values)):.1f}"'
                    parts.append(f'<line class="spread" {ends} y1="{top + 6:.1f}" y2="{top + 6:.1f}"/>')
                parts.append(f'<text class="tick" x="{end + 2:.1f}" y="{top + 10:.1f}">{number(value)}</text>')
                top += 15
        if stacked:
            parts.append(f'<text class="tick" x="{at + 6:.1f}" y="{top + 10:.1f}">{number(total)}</text>')
            top += 15
        top += 5
    return "".join(parts), top


def _longest(room: Series, stacked: bool) -> float:
    values: dict[Any, list[float]] = {}
    for points in room.values():
        for x, repeats in _repeats(points).items():
            values.setdefault(x, []).append(max(repeats))
    return max((sum(one) if stacked else max(one) for one in values.values()), default=0) or 1.0


def _legend(names: Sequence[str], top: float) -> tuple[str, float]:
    """Names of series below the plot, as many on a line as fit; and where they end."""
    parts, x, y = [], 6.0, top + 12
    for index, name in enumerate(names):
        width = len(_fitting(name)) * _CHARACTER + 28
        if x > 6 and x + width > _WIDTH:
            x, y = 6.0, y + _LINE
        mark = _marker(index, x + 4, y, name)
        parts.append(f'<g{_colour(index)}>{mark}</g><text x="{x + 14:.1f}" y="{y + 4}">{escape(_fitting(name))}</text>')
        x += width
    return "".join(parts), y + 10 if names else top
