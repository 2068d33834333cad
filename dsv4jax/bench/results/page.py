"""Results as one HTML page that needs nothing else: no script, no file, no network."""

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from dsv4jax.bench.results.comparison import Difference, compare
from dsv4jax.bench.results.plots import REQUESTS, Plot
from dsv4jax.bench.results.result import EXPERIMENTS, Result, Row
from dsv4jax.bench.results.svg import draw, number, usable_rows, words
from dsv4jax.bench.results.tables import Cell, cell_text, flat, html_table, listed_table, measured_table, value_cell

_MOST_DIFFERENCES = 200


def write_report(directory: str | Path, result: Result) -> None:
    """Writes `<experiment>.json` and `<experiment>.html` into the directory."""
    result.save(Path(directory) / f"{result.experiment}.json")
    (Path(directory) / f"{result.experiment}.html").write_text(page([result]), encoding="utf-8")


@contextlib.contextmanager
def reported(directory: str | None, result: Result) -> Iterator[Result]:
    """Writes the result into the directory row by row, and its page at the end; without a directory, nothing.

    Ctrl-C keeps what was measured: the page is written, says that the run was interrupted, and the process ends.
    """
    if directory is not None:
        result.path = Path(directory) / f"{result.experiment}.json"
        result.save(result.path)
    try:
        yield result
    except BaseException as error:
        result.interrupted = True
        if not isinstance(error, KeyboardInterrupt):
            raise
        raise SystemExit(130) from None
    finally:
        if directory is not None:
            write_report(directory, result)
            print(f"written: {directory}/{result.experiment}.html", flush=True)


def page(results: Sequence[Result]) -> str:
    """Results one after the other, at least one."""
    title = results[0].experiment if len(results) == 1 else ", ".join(result.experiment for result in results)
    several = ""
    if len(results) > 1:
        links = "".join(
            f'<li><a href="#r{i}">{escape(words(result.experiment))}</a></li>' for i, result in enumerate(results)
        )
        several = f"<nav><ul>{links}</ul></nav>"
    return _document(title, several + "".join(_result(result, f"r{i}") for i, result in enumerate(results)))


def comparison_page(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Two sets of results side by side; the results of a set are repeats. Raises as `compare`."""
    differences = compare(before, after)
    first = before[0]
    beyond = [one for one in differences if one.verdict == "beyond the spread"]
    others = [one for one in differences if one.verdict != "beyond the spread"]
    parts = [
        f"<header><h1>{escape(words(first.experiment))}: before and after</h1>",
        f'<p class="about">{escape(EXPERIMENTS[first.experiment])}.</p></header>',
        _verdicts(comparison_lines(differences)),
        _section("Conditions", _conditions_of_both(before[0], after[0])),
    ]
    if beyond:
        parts.append(_section("Differences beyond the spread of repeats", _differences(beyond, "beyond")))
    plots = [_side_by_side(plot, before, after, f"p{i}") for i, plot in enumerate(first.plots)]
    parts.append(_section("Plots, each with one scale for both", "".join(plots)))
    if others:
        parts.append(_section("All other measured values", _differences(others, "others")))
    tables = {name for result in (*before, *after) for name in result.rows if not result.keys.get(name)}
    if tables:
        parts.append(f'<p class="note">Not compared, because no columns say which rows belong together: '
                     f"{escape(', '.join(map(words, sorted(tables))))}.</p>")  # fmt: skip
    parts.append(
        '<p class="note">The spread is the difference of the largest and the least of repeats, of the side where it is '
        "larger. A difference is beyond it where the medians differ by more; that is not known without two repeats on "
        "each side.</p>"
    )
    return _document(f"{first.experiment}: before and after", "".join(parts))


def comparison_lines(differences: Sequence[Difference]) -> list[str]:
    """How many values differ by more than repeats do, and the three of them that changed most."""
    counts = collections.Counter(one.verdict for one in differences)
    known, beyond = counts["beyond the spread"] + counts["within the spread"], counts["beyond the spread"]
    lines = [f"{beyond} of {known} values that both sides measured repeatedly differ by more than their spread"]
    changed = [one for one in differences if one.verdict == "beyond the spread" and one.change is not None]
    for one in sorted(changed, key=lambda one: -abs(one.change))[:3]:
        lines.append(f"{words(one.column)} {one.change:+.1%}: {', '.join((words(one.table), _names(one.keys)))}")
    for verdict in ("no repeats", "only before", "only after"):
        if counts[verdict]:
            lines.append(f"{counts[verdict]} values are not judged: {verdict}")
    return lines


def _names(keys: Row) -> str:
    return ", ".join(
        value if isinstance(value, str) else f"{words(key)} {cell_text(value)}" for key, value in keys.items()
    )


def _document(title: str, body: str) -> str:
    style = resources.files("dsv4jax.bench.results").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _result(result: Result, name: str) -> str:
    given = result.conditions
    flattened = dict(flat(given))
    where = [flattened.get(name) for name in ("model", "layout", "machine: devices", "date")]
    about = " · ".join(filter(None, where))
    parts = [
        f'<article id="{name}"><header><h1>{escape(words(result.experiment))}</h1>',
        f'<p class="about">{escape(EXPERIMENTS[result.experiment])}.</p><p class="note">{escape(about)}</p></header>',
    ]
    if result.interrupted:
        parts.append('<p class="warning">Interrupted: what was measured until then.</p>')
    parts.append(_verdicts(result.verdicts))
    # A table that is not there belongs to a part of the experiment that was not asked for.
    plots = [plot for plot in result.plots if plot.table in (REQUESTS, *result.rows)]
    if plots:
        figures = "".join(_figure(plot, result, f"{name}-p{i}") for i, plot in enumerate(plots))
        parts.append(_section("Plots", f'<div class="plots">{figures}</div>'))
    for what, found in (("Control", result.control), ("Ceiling", result.ceiling)):
        if found:
            parts.append(_section(what, listed_table(found, f"{name}-{what.lower()}", what)))
    tables = [
        measured_table(result, table, f"{name}-t{i}") for i, table in enumerate(result.rows) if result.rows[table]
    ]
    if tables:
        parts.append(_section("Measured", "".join(tables)))
    if result.requests:
        parts.append(_section("Requests", _requests(result, f"{name}-requests")))
    parts.append(_section("Conditions", listed_table(given, f"{name}-conditions", "Conditions")))
    return "".join([*parts, "</article>"])


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _verdicts(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = (f"<li{_invalid(line)}>{escape(line)}</li>" for line in lines)
    return f'<ul class="verdicts">{"".join(items)}</ul>'


def _invalid(line: str) -> str:
    return ' class="warning"' if line.startswith("invalid") else ""


# Plots


def _rows_of(plot: Plot, results: Iterable[Result]) -> list[Row]:
    return [
        row for one in results for row in (one.requests if plot.table == REQUESTS else one.rows.get(plot.table, []))
    ]


def _figure(plot: Plot, result: Result, name: str) -> str:
    rows = _rows_of(plot, [result])
    return _drawn(plot, rows, rows, name, plot.title)


def _drawn(plot: Plot, rows: list[Row], among: list[Row], name: str, caption: str) -> str:
    shown, left_out = usable_rows(plot, rows)
    notes = [f'<span class="note">{left_out} of {left_out + len(shown)} rows have no such value.</span>'] * (
        left_out > 0
    )
    picture = draw(plot, shown, name, usable_rows(plot, among)[0]) if shown else '<p class="note">Nothing to draw.</p>'
    return f"<figure><figcaption>{' '.join([escape(caption), *notes])}</figcaption>{picture}</figure>"


def _side_by_side(plot: Plot, before: Sequence[Result], after: Sequence[Result], name: str) -> str:
    sides = _rows_of(plot, before), _rows_of(plot, after)
    figures = (
        _drawn(plot, sides[i], sides[0] + sides[1], f"{name}-{i}", f"{plot.title}: {side}")
        for i, side in enumerate(("before", "after"))
    )
    return f'<div class="plots">{"".join(figures)}</div>'


def _requests(result: Result, name: str) -> str:
    reasons: dict[str, int] = {}
    for request in result.requests:
        reason = cell_text(request.get("finish_reason"))
        reasons[reason] = reasons.get(reason, 0) + 1
    lines = [[Cell(reason, head=True), Cell(number(count), numeric=True)] for reason, count in sorted(reasons.items())]
    table = html_table(
        f"{number(len(result.requests))} raw records, by how they ended", ["ended", "requests"], lines, name
    )
    return table + '<p class="note">The records themselves are in the JSON file beside this page.</p>'


def _conditions_of_both(before: Result, after: Result) -> str:
    sides = dict(flat(before.conditions)), dict(flat(after.conditions))
    lines = []
    for what in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = (side.get(what, "–") for side in sides)
        lines.append([Cell(what, head=True), Cell(one), Cell(other), Cell("" if one == other else "differs")])
    # What differs first: it is what the comparison is of, or what spoils it.
    lines.sort(key=lambda line: line[3].text == "")
    return html_table(
        "Conditions of the first result of each side", ["what", "before", "after", ""], lines, "conditions", "sides"
    )


def _differences(differences: Sequence[Difference], name: str) -> str:
    found: dict[str, list[Difference]] = {}
    for one in differences:
        found.setdefault(one.table, []).append(one)
    columns = ["measured", "change", "before", "after", "verdict"]
    parts = []
    for i, (table, ones) in enumerate(found.items()):
        lines = [
            [
                Cell(words(one.column), _names(one.keys), head=True),
                Cell("–" if one.change is None else f"{one.change:+.1%}", numeric=True),
                *(_side(values) for values in (one.before, one.after)),
                Cell(one.verdict),
            ]
            for one in ones[:_MOST_DIFFERENCES]
        ]
        parts.append(html_table(words(table), columns, lines, f"{name}-{i}", name))
        if len(ones) > len(lines):
            parts.append(f'<p class="note">{number(len(ones) - len(lines))} more are not shown here.</p>')
    return "".join(parts)


def _side(values: Sequence[float]) -> Cell:
    if not values:
        return Cell("–", numeric=True)
    return value_cell([{"value": value} for value in values], "value", head=False)
