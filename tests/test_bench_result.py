"""Result files: whole after every row, refused by name when they are not of the form; conditions."""

import json
import os
import re
from unittest import mock

import numpy as np
import pytest

from dsv4jax.bench.results.conditions import conditions
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, load, text_table

PLOT = Plot(
    "line", "Time", "steps", "context", ("milliseconds",), Axis("context", "tokens", log=True), Axis("time", "ms"),
    by=("batch",), where={"drafts": 0},
)  # fmt: skip


def result(**fields) -> Result:
    return Result("forward", {"seed": 0}, **fields)


def test_a_file_gives_back_what_was_saved(tmp_path):
    saved = result(
        keys={"steps": ("context", "batch")},
        rows={"steps": [{"context": 4, "batch": 1, "milliseconds": 1.5, "stages": {"experts": [1.0, None]}}]},
        requests=[{"request_id": "a", "finished": 1.0}],
        control={"what": "uniform routing", "balancedness": 0.96},
        ceiling={"copy": 4e12, "measured": True},
        verdicts=["limited by expert reads: 61% of the step"],
        plots=[PLOT],
        interrupted=True,
    )
    saved.save(tmp_path / "below" / "forward.json")
    assert load(tmp_path / "below" / "forward.json") == saved
    assert os.listdir(tmp_path / "below") == ["forward.json"]


def test_a_run_that_is_cut_keeps_every_row_it_has_added(tmp_path):
    path = tmp_path / "forward.json"
    run = result(path=path)
    run.add_row("steps", {"context": np.int64(4), "milliseconds": np.float32(1.5)})
    run.add_requests([{"request_id": "a"}])
    # The machine stops while the file is written for the third time.
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.add_row("steps", {"context": 8, "milliseconds": 2.5})
    kept = load(path)
    assert kept.rows == {"steps": [{"context": 4, "milliseconds": 1.5}]} and kept.requests == [{"request_id": "a"}]


def test_what_fails_is_a_row_with_its_error_and_others_follow(tmp_path, capsys):
    run = result(path=tmp_path / "forward.json", echo=True)

    def fails():
        raise RuntimeError("out  of\nmemory")

    run.attempt("steps", {"step": "a"}, fails)
    run.attempt("steps", {"step": "b"}, lambda: {"milliseconds": float("nan")})
    run.attempt("steps", {"step": "c"}, lambda: {"milliseconds": 1.23456, "costs": {"tokens": [1]}})
    a, b, c = load(tmp_path / "forward.json").rows["steps"]
    assert a == {"step": "a", "error": "RuntimeError: out of memory"}
    assert b == {
        "step": "b",
        "error": "ValueError: steps: milliseconds = nan: must be a finite number, or None where there is none",
    }
    assert c == {"step": "c", "milliseconds": 1.23456, "costs": {"tokens": [1]}}
    assert "steps: step c, milliseconds 1.235\n" in capsys.readouterr().out
    lines = text_table([a, c]).splitlines()
    assert lines[0].split() == ["step", "error", "milliseconds"] and lines[2].split() == ["c", "1.235"]


@pytest.mark.parametrize("value", [float("inf"), np.float32("nan"), {1}, {"a": [object()]}, {1: 2}])
def test_values_that_json_has_no_form_for_are_refused_with_their_place_and_leave_the_result_as_it_was(value):
    run = result()
    with pytest.raises(ValueError, match=r"^steps: milliseconds"):
        run.add_row("steps", {"milliseconds": value})
    with pytest.raises(ValueError, match=r"^requests: milliseconds"):
        run.add_requests([{"milliseconds": 1.0}, {"milliseconds": value}])
    assert not run.rows.get("steps") and not run.requests


GOOD = {"experiment": "forward", "conditions": {}}
AXES = {"x_axis": {"label": "x"}, "y_axis": {"label": "y"}}
PIE = AXES | {"kind": "pie", "title": "t", "table": "a", "x": "b", "y": ["c"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a result in JSON"),
        ("[]", "must be a result in JSON: found list"),
        ('{"experiment": NaN}', "NaN is no number of JSON"),
        ({"conditions": {}}, "experiment is missing"),
        ({"experiment": "forward"}, "conditions is missing"),
        (GOOD | {"experiment": "backward"}, "experiment = 'backward': must be one of ('forward', "),
        (GOOD | {"experiment": []}, "experiment = []: must be a string"),
        (GOOD | {"rovs": {}}, "unknown field 'rovs': must be one of ('experiment', "),
        (GOOD | {"path": "x"}, "unknown field 'path'"),
        (GOOD | {"rows": {"steps": [1]}}, 'rows = {"steps": [1]}: must be lists of mappings by table'),
        (GOOD | {"rows": {"requests": []}}, "rows: 'requests' is the name of the raw records"),
        (GOOD | {"keys": {"steps": "context"}}, "keys = "),
        (GOOD | {"requests": {}}, "requests = {}: must be a list of mappings"),
        (GOOD | {"verdicts": "fast"}, 'verdicts = "fast": must be a list of strings'),
        (GOOD | {"control": 1}, "control = 1: must be a mapping, or null"),
        (GOOD | {"interrupted": 0}, "interrupted = 0: must be true or false"),
        (GOOD | {"plots": [{"kind": "line"}]}, "plots: x_axis = None: must be a mapping"),
        (GOOD | {"plots": [AXES | {"kind": "line"}]}, "plots: title is missing"),
        (GOOD | {"plots": [AXES | {"colour": "red"}]}, "plots: unknown field 'colour'"),
        (GOOD | {"plots": [PIE | {"x_axis": {}}]}, "plots: x_axis: label is missing"),
        (
            GOOD | {"plots": [PIE | {"x_axis": {"label": "x", "log": 1}}]},
            "plots: x_axis: log = 1: must be true or false",
        ),
        (GOOD | {"plots": [PIE | {"y": "c"}]}, "plots: y = 'c': must be a list of strings"),
        (GOOD | {"plots": [PIE | {"where": 1}]}, "plots: where = 1: must be a mapping"),
        (GOOD | {"plots": [PIE | {"x": None}]}, "plots: x = None: must be a string"),
        (GOOD | {"plots": [PIE]}, "plot 't': kind = 'pie': must be one of ('line', "),
    ],
)
def test_files_that_are_no_results_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: ") + ".*" + re.escape(message)):
        load(path)


def test_plots_that_cannot_be_drawn_are_refused():
    axis = Axis("x")
    with pytest.raises(ValueError, match=r"plot 't': y = \(\): must be one column or more"):
        Plot("line", "t", "steps", "x", (), axis, axis)
    with pytest.raises(ValueError, match=r"plot 't': y = 'ms': must be one column or more, as a tuple"):
        Plot("line", "t", "steps", "x", "ms", axis, axis)
    with pytest.raises(ValueError, match=r"plot 't': x_axis.log = True: bars have names along x, and begin at 0"):
        Plot("bar", "t", "steps", "x", ("ms",), Axis("x", log=True), axis)
    with pytest.raises(ValueError, match=r"plot 't': y_axis.log = True: bars"):
        Plot("stacked", "t", "steps", "x", ("ms",), axis, Axis("x", log=True))


def test_conditions_say_what_ran_where_and_from_which_commit():
    found = conditions(model="tiny", layout="one device", flags={"repeats": 3}, seed=1, requests=8)
    assert found["machine"]["devices"] == "no device used" and found["machine"]["cpus"] >= 1
    assert found["versions"].keys() == {"dsv4jax", "python", "jax", "jaxlib", "numpy"}
    assert found["flags"] == {"repeats": 3} and found["seed"] == 1 and found["requests"] == 8
    assert found["commit"] is None or re.match(r"[0-9a-f]{40}( with changes)?$", found["commit"])
    result(rows={}, requests=[]).conditions.update(found)
    with mock.patch("subprocess.run", side_effect=FileNotFoundError("git")):
        assert conditions(model="tiny", layout="", flags={}, seed=None)["commit"] is None
