"""Tables of a page: in HTML, with heads for who listens to them, wide ones scrolling within themselves."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dsv4jax.bench.results.result import Result, Row, columns_of, is_number
from dsv4jax.bench.results.svg import number, words

_MOST_ROWS = 100


@dataclasses.dataclass(frozen=True)
class Cell:
    """Text, a quieter line below it, and whether it heads a row or holds a number."""

    text: str
    below: str = ""
    head: bool = False
    numeric: bool = False


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], name: str, kind: str = "") -> str:
    """A table that scrolls within itself where it is wider than the page."""
    lines = list(rows)
    numeric = [any(line[i].numeric for line in lines) for i in range(len(columns))]
    heads = "".join(
        f'<th scope="col"{_numeric(right)}>{escape(column)}</th>'
        for column, right in zip(columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, right) for cell, right in zip(line, numeric, strict=True)) + "</tr>"
        for line in lines
    )
    wide = " wide" if len(columns) > 9 else ""
    return (
        f'<div class="scroll{wide}" role="region" tabindex="0" aria-labelledby="{name}"><table class="{kind}">'
        f'<caption id="{name}">{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _numeric(right: bool) -> str:
    return ' class="number"' if right else ""


def _cell(cell: Cell, right: bool) -> str:
    below = f"<small>{escape(cell.below)}</small>" if cell.below else ""
    tag = 'th scope="row"' if cell.head else "td"
    return f"<{tag}{_numeric(right)}>{escape(cell.text)}{below}</{tag[:2]}>"


def cell_text(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if is_number(value) else str(value)


def measured_table(result: Result, table: str, name: str) -> str:
    """A table of a result, repeats in one line: their median, and below it from where to where they go."""
    rows, keys = result.rows[table], result.keys.get(table, ())
    columns = columns_of(rows)
    nested = sorted({column for row in rows for column in row} - set(columns))
    groups: dict[Any, list[Row]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row.get(key) for key in keys) if keys else i, []).append(row)
    lines = [
        [value_cell(group, column, column in keys or (not keys and j == 0)) for j, column in enumerate(columns)]
        for group in itertools.islice(groups.values(), _MOST_ROWS)
    ]
    counts = sorted({len(group) for group in groups.values()})
    repeated = f", {' or '.join(map(str, counts))} repeats each" if counts[-1:] > [1] else ""
    missing = [f"columns {', '.join(map(words, nested))}"] * bool(nested)
    missing += [f"{len(groups) - len(lines)} more rows"] * (len(lines) < len(groups))
    left_out = f'<p class="note">In the file, not here: {escape("; ".join(missing))}.</p>' if missing else ""
    return html_table(words(table) + repeated, [words(column) for column in columns], lines, name) + left_out


def value_cell(group: Sequence[Row], column: str, head: bool) -> Cell:
    """What repeats of a row have in a column."""
    values = [row[column] for row in group if row.get(column) is not None]
    if head or not values:
        return Cell(cell_text(values[0]) if values else "", head=head, numeric=bool(values) and is_number(values[0]))
    if not all(map(is_number, values)):
        return Cell(", ".join(dict.fromkeys(map(cell_text, values))))
    low, high = cell_text(min(values)), cell_text(max(values))
    below = f"{low} to {high}" if low != high else ""
    return Cell(cell_text(statistics.median(values) if len(values) > 1 else values[0]), below, numeric=True)


def flat(found: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested mappings, one after the other."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{outer}{words(name)}: ")
        else:
            text = ", ".join(map(cell_text, value)) if isinstance(value, list) else cell_text(value)
            yield f"{outer}{words(name)}", text


def listed_table(found: Mapping[str, Any], name: str, caption: str) -> str:
    """A mapping, a line for each of its values."""
    lines = [[Cell(what, head=True), Cell(text)] for what, text in flat(found)]
    return html_table(caption, ["what", "value"], lines, name, "list")
