"""One run of one experiment as one JSON file, which is whole after every row."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dsv4jax.bench.results.plots import REQUESTS, Axis, Plot

EXPERIMENTS = {
    "forward": "Device time of the step functions alone, on a synthetically filled cache",
    "decode": "Decoding through the engine, beside the same step alone",
    "prefill": "Prefill, cold and behind a cached prefix, with each optimisation on and off",
    "ranks": "The same requests on every rank at once, then one rank after the other",
    "routing": "How unevenly the routing of one batch loads ranks, before and after experts are rearranged",
    "parallel": "Exchanges and steps over all devices, by the routing of the same batch",
    "balance": "How unevenly experts are loaded before and after rearranging, beside uniform routing of the same batch",
    "admission": "What it costs the host to admit requests, and what running ones notice of it",
    "agents": "Sessions of many turns with shared prefixes",
    "speculation": "Drafting and verifying, beside plain decoding",
    "acceptance": "How many drafts stand, by position and task, and how well confidences predict it",
    "slow_rank": "What one rank with a slow host costs all others",
    "kernels": "Every kernel at the released shapes",
    "peers": "Kernels beside those of other packages for the same shapes",
    "startup": "From the start of a process to its first token",
    "plan": "Layouts and batches that meet targets, by a model of cost",
}
"""Names of the experiments, and what each is about."""

Row = dict[str, Any]


@dataclasses.dataclass
class Result:
    """What one run of an experiment measured.

    Args:
      experiment: a name in `EXPERIMENTS`.
      conditions: see `conditions`.
      keys: per table, the columns that say what a row is of; all its other numbers were measured. Rows with the same
        keys are repeats of one measurement. Tables without keys are shown, but not compared between results.
      rows: named tables. Values are finite numbers, strings, booleans, None, and lists and mappings of such.
      requests: raw records of requests.
      control: what the experiment's control is and gave.
      ceiling: rates that nothing can exceed, and whether they were measured or assumed.
      verdicts: sentences that sum up.
      plots: drawn from the rows.
      interrupted: whether the run ended before its end.
      path: where `add_row` writes the file; None writes none. Not part of the file.
      echo: whether `add_row` prints the row. Not part of the file.

    Raises:
      ValueError: a field that is not of this form, by name.
    """

    experiment: str
    conditions: Row
    keys: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    rows: dict[str, list[Row]] = dataclasses.field(default_factory=dict)
    requests: list[Row] = dataclasses.field(default_factory=list)
    control: Row | None = None
    ceiling: Row | None = None
    verdicts: list[str] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    path: Path | None = None
    echo: bool = False

    def __post_init__(self):
        if self.experiment not in EXPERIMENTS:
            raise ValueError(f"experiment = {self.experiment!r}: must be one of {tuple(EXPERIMENTS)}")
        if REQUESTS in self.rows:
            raise ValueError(f"rows: {REQUESTS!r} is the name of the raw records")
        self.conditions = _plain("conditions", self.conditions)
        self.rows = {table: [self._row(table, row) for row in rows] for table, rows in self.rows.items()}

    def add_row(self, table: str, row: Mapping[str, Any]) -> None:
        """Adds a row to a table, writes the file and with `echo` prints the row.

        Raises:
          ValueError: a value that JSON has no form for, by table and column.
        """
        self.add_rows(table, [row])
        if self.echo:
            shown = (f"{name} {text_of(value)}" for name, value in row.items() if not isinstance(value, (list, dict)))
            with tqdm.external_write_mode():
                print(f"{table}: {', '.join(shown)}", flush=True)

    def add_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows that belong together and writes the file once. Raises as `add_row`."""
        if table == REQUESTS:
            raise ValueError(f"rows: {REQUESTS!r} is the name of the raw records")
        self.rows.setdefault(table, []).extend([self._row(table, row) for row in rows])
        self._write()

    def add_requests(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Adds raw records and writes the file. Raises as `add_row`."""
        self.requests += [_plain(REQUESTS, dict(request)) for request in requests]
        self._write()

    def attempt(self, table: str, names: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
        """Adds the row `names` with what `measure` returns; if it fails, with its error, so that others can follow."""
        try:
            row = self._row(table, measure())
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
        self.add_row(table, {**names, **row})

    def save(self, path: str | Path) -> None:
        """Writes the file in one move: what was there stays until all of the new one is written."""
        path, fields = Path(path), {name: getattr(self, name) for name in _FIELDS}
        fields["plots"] = [dataclasses.asdict(plot) for plot in self.plots]
        text = json.dumps(_plain("result", fields), indent=1, ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.part")
        written.write_text(text + "\n", encoding="utf-8")
        os.replace(written, path)

    def _row(self, table: str, row: Mapping[str, Any]) -> Row:
        for name in self.keys.get(table, ()):
            if isinstance(row.get(name), list | tuple | Mapping):
                raise ValueError(f"{table}: {name} = {row[name]!r}: must be a single value: it is one of the keys")
        return _plain(table, dict(row))

    def _write(self) -> None:
        if self.path is not None:
            self.save(self.path)


_FIELDS = tuple(field.name for field in dataclasses.fields(Result) if field.name not in ("path", "echo"))


def load(path: str | Path) -> Result:
    """The result in a file.

    Raises:
      ValueError: not a file that `Result.save` wrote; names the file, the field and what is allowed.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
    except ValueError as error:
        raise ValueError(f"{path}: must be a result in JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a result in JSON: found {type(found).__name__}")
    _known(f"{path}", found, _FIELDS)
    for name in ("experiment", "conditions"):
        if name not in found:
            raise ValueError(f"{path}: {name} is missing")
    for name, (is_so, wanted) in _FORMS.items():
        if name in found and not is_so(found[name]):
            raise ValueError(f"{path}: {name} = {json.dumps(found[name])[:80]}: must be {wanted}")
    try:
        found["keys"] = {table: tuple(names) for table, names in found.get("keys", {}).items()}
        found["plots"] = [_plot(plot) for plot in found.get("plots", [])]
        return Result(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def text_of(value: Any) -> str:
    """A value of a row, short enough for a line of text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in aligned columns, one for each name that any row has; lists and the likes are left out."""
    names = columns_of(rows)
    lines = [names, *([text_of(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every name that any row has a single value for, in the order in which they first come."""
    return list(dict.fromkeys(n for row in rows for n, value in row.items() if not isinstance(value, (list, dict))))


def is_number(value: Any) -> bool:
    """Whether it is a measured value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(where: str, value: Any) -> Any:
    """The value as JSON gives it back."""
    match value:
        case np.generic():
            return _plain(where, value.item())
        case float() if not math.isfinite(value):
            raise ValueError(f"{where} = {value}: must be a finite number, or None where there is none")
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            if wrong := [name for name in value if not isinstance(name, str)]:
                raise ValueError(f"{where}: {wrong[0]!r} as a name: must be a string")
            return {name: _plain(f"{where}: {name}", one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(where, one) for one in value]
    raise ValueError(f"{where} = {value!r}: must be a number, a string, a boolean, None, or lists or mappings of these")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _known(where: str, found: Mapping[str, Any], allowed: Sequence[str]) -> None:
    if unknown := sorted(set(found) - set(allowed)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}: must be one of {tuple(allowed)}")


def _plot(found: Mapping[str, Any]) -> Plot:
    axes = {}
    for name in ("x_axis", "y_axis"):
        if not isinstance(found.get(name), dict):
            raise ValueError(f"plots: {name} = {found.get(name)!r}: must be a mapping")
        axes[name] = Axis(**_checked(f"plots: {name}", found[name], Axis))
    return Plot(**{**_checked("plots", found, Plot), **axes})


def _checked(where: str, found: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Fields of a dataclass of plots as they are there: all known, none missing, each of its type."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    _known(where, found, tuple(fields))
    for name, field in fields.items():
        if name in found:
            is_so, wanted = _PLOT_FORMS.get(name, _PLOT_FORMS["title"])
            if not is_so(found[name]):
                raise ValueError(f"{where}: {name} = {found[name]!r}: must be {wanted}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: {name} is missing")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _named(values: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(map(values, found.values()))


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "experiment": (lambda value: isinstance(value, str), "a string"),
    "conditions": (lambda value: isinstance(value, dict), "a mapping"),
    "keys": (_named(_strings), "lists of columns by table"),
    "rows": (_named(_rows), "lists of mappings by table"),
    "requests": (_rows, "a list of mappings"),
    "control": (lambda value: isinstance(value, dict | None), "a mapping, or null"),
    "ceiling": (lambda value: isinstance(value, dict | None), "a mapping, or null"),
    "verdicts": (_strings, "a list of strings"),
    "plots": (_rows, "a list of mappings"),
    "interrupted": (lambda value: isinstance(value, bool), "true or false"),
}
_MAPPING = (lambda value: isinstance(value, dict), "a mapping")
_NAMES = (_strings, "a list of strings")
_PLOT_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "title": (lambda value: isinstance(value, str), "a string"),
    "y": _NAMES,
    "by": _NAMES,
    "where": _MAPPING,
    "x_axis": _MAPPING,
    "y_axis": _MAPPING,
    "log": (lambda value: isinstance(value, bool), "true or false"),
}
