"""Pages of results: comparison with the spread of repeats, plots, tables, and what a real browser makes of them."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from bench_scripts import run_script
from browser import browse
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.bench.results.comparison import compare, spread
from dsv4jax.bench.results.page import comparison_page, page, reported, write_report
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, load
from dsv4jax.bench.results.svg import draw, number, pareto_front, usable_rows

HOSTILE = "<script>alert('&')</script>"
TIME, CONTEXT = Axis("time", "ms"), Axis("context", "tokens", log=True)
LINE = Plot("line", f"Time {HOSTILE}", "steps", "context", ("milliseconds",), CONTEXT, TIME, by=("batch",))


def measured(milliseconds: dict[int, tuple[float, ...]], **fields) -> Result:
    """Steps by context, in so many repeats."""
    rows = [
        {"context": context, "batch": "one", "milliseconds": one, "name": HOSTILE, "costs": {"tokens": [1]}}
        for context, repeats in milliseconds.items()
        for one in repeats
    ]
    conditions = {"model": HOSTILE, "machine": {"devices": "1 x H200"}, "flags": {"layers": 40}}
    return Result("forward", conditions, keys={"steps": ("context", "batch")}, rows={"steps": rows}, **fields)


# Comparison


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((10, 11), (11.6, 12.5), "beyond the spread"),  # Medians 10.5 and 12.05, spreads 1 and 0.9.
        ((10, 11), (11, 12), "within the spread"),
        ((10, 11), (8.9, 9.5), "beyond the spread"),
        ((10, 10.1), (11, 13), "within the spread"),  # The side with the larger spread counts.
        ((10, 10, 10), (10, 10), "within the spread"),
        ((7, 7), (8, 8), "beyond the spread"),
        ((10,), (20, 20), "no repeats"),
        ((10, 10), (20,), "no repeats"),
        ((10, 11), (), "only before"),
        ((), (10,), "only after"),
    ],
)
def test_a_difference_is_judged_by_the_spread_of_repeats(before, after, verdict):
    sides = measured({64: before, 8: (1, 2)}), measured({64: after, 8: (1, 2)})
    found = {one.keys["context"]: one for one in compare([sides[0]], [sides[1]])}
    assert found[64].verdict == verdict and found[8].verdict == "within the spread"
    assert found[64].before == before and found[64].after == after and found[64].column == "milliseconds"


@given(st.lists(st.lists(st.floats(1, 100), min_size=2, max_size=4), min_size=2, max_size=2))
def test_what_is_flagged_is_exactly_what_no_repeat_explains(sides):
    """Shifting one side by more than both spreads and their distance is always flagged, copies of a side never are."""
    before, after = (measured({8: tuple(values)}) for values in sides)
    (same,) = compare([before], [before])
    assert same.verdict == "within the spread" and same.change == 0
    far = 3 * (100 + sum(map(spread, sides)))
    (shifted,) = compare([before], [measured({8: tuple(value + far for value in sides[1])})])
    assert shifted.verdict == "beyond the spread"
    (there,), (back,) = compare([before], [after]), compare([after], [before])
    assert there.verdict == back.verdict


def test_files_of_a_side_are_repeats_and_other_experiments_are_refused():
    (one,) = compare([measured({8: (1.0,)}), measured({8: (2.0,)})], [measured({8: (5.0,)}), measured({8: (5.5,)})])
    assert one.before == (1.0, 2.0) and one.verdict == "beyond the spread" and one.change == pytest.approx(2.5)
    with pytest.raises(ValueError, match="experiment = 'forward' and 'decode': must be the same"):
        compare([measured({})], [Result("decode", {})])
    with pytest.raises(ValueError, match=r"keys = .*: must be the same"):
        compare([measured({})], [Result("forward", {})])
    with pytest.raises(ValueError, match="both sides must have a result"):
        compare([measured({})], [])


# Plots


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_front_is_what_no_other_point_beats(points):
    def beaten(point):
        return any(o != point and o[0] >= point[0] and o[1] >= point[1] for o in points)

    assert pareto_front(points) == sorted({point for point in points if not beaten(point)})


def elements(svg: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}" + tag))


@pytest.mark.parametrize("kind", ["line", "bar", "stacked", "scatter", "pareto"])
@settings(max_examples=50)
@given(
    rows=st.lists(
        st.fixed_dictionaries({"x": st.integers(1, 2**20), "y": st.floats(1e-3, 1e9), "who": st.sampled_from("abc")}),
        min_size=1,
        max_size=12,
    ),
    logs=st.tuples(st.booleans(), st.booleans()),
)
def test_every_mark_is_inside_its_picture_and_says_what_it_is(kind, rows, logs):
    bars = kind in ("bar", "stacked")
    axes = (Axis(name, log=log and not bars) for name, log in zip("xy", logs, strict=True))
    plot = Plot(kind, "Title", "t", "x", ("y",), *axes, by=("who",))
    svg = draw(plot, rows, "p")
    width, height = map(float, ET.fromstring(svg).get("viewBox").split()[2:])
    inside = [(e.get("cx"), e.get("cy")) for e in elements(svg, "circle")]
    inside += [(e.get("x"), e.get("y")) for tag in ("rect", "text") for e in elements(svg, tag)]
    inside += [(float(e.get("x")) + float(e.get("width")), e.get("y")) for e in elements(svg, "rect")]
    assert all(-1e-6 <= float(x) <= width and -1e-6 <= float(y) <= height for x, y in inside)
    # One for the whole, one for each mark.
    assert len(elements(svg, "title")) > 1 and not any(title.text is None for title in elements(svg, "title"))


def test_bars_are_as_long_as_their_values_and_stacks_as_their_sums():
    rows = [{"step": "a", "part": 3.0, "rest": 1.0}, {"step": "b", "part": 1.5, "rest": 2.0}]
    plot = Plot("stacked", "Steps", "t", "step", ("part", "rest"), Axis("step"), TIME)

    def lengths(plot):
        return [float(bar.get("width")) for bar in elements(draw(plot, rows, "p"), "rect") if bar.get("height") == "12"]

    a, b, c, d = lengths(plot)
    assert (a / b, a / c, d / c) == pytest.approx((3, 2, 4 / 3), rel=0.01)
    assert "75%" in draw(plot, rows, "p")
    e, f = lengths(dataclasses.replace(plot, kind="bar", y=("part",)))
    assert e == pytest.approx(2 * f, rel=0.01) and e > a


def test_of_many_parts_the_largest_come_first_and_have_colours_of_their_own():
    rows = [{"step": "a", "stage": f"stage {i}", "us": float(i)} for i in range(1, 12)]
    plot = Plot("stacked", "Stages", "t", "step", ("us",), Axis("step"), TIME, by=("stage",))
    marks = re.findall(r'<g class="([^"]+)"><rect[^>]*height="12"><title>a, (stage \d+):', draw(plot, rows, "p"))
    assert marks[0] == ("c0", "stage 11") and marks[-1] == ("c2 again", "stage 1") and len(set(marks)) == 11


def test_rows_that_cannot_be_shown_are_counted():
    rows = [
        {"context": 8, "milliseconds": 1.0},
        {"context": 8, "error": "out of memory"},
        {"context": 0, "milliseconds": 1.0},  # The axis is logarithmic.
        {"context": None, "milliseconds": 1.0},
        {"context": 8, "milliseconds": True},
    ]
    assert usable_rows(LINE, rows) == (rows[:1], 4)
    assert usable_rows(dataclasses.replace(LINE, where={"context": 9}), rows) == ([], 0)


def test_contexts_and_numbers_are_written_as_people_do():
    rows = [{"context": n, "milliseconds": 1.0 + n} for n in (1024, 131072, 875520, 1048576)]
    texts = [text.text for text in elements(draw(LINE, rows, "p"), "text")]
    assert {"1K", "128K", "context (tokens)", "time (ms)"} <= set(texts)
    assert [*map(number, (12, 1234567, 1234.56, 0.123456, 4.29e12))] == ["12", "1,234,567", "1,235", "0.1235", "4.29T"]


# Pages


class Checked(HTMLParser):
    """Refuses what is not closed in order; keeps ids, references and the text outside styles."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.text = [], [], [], [], ""
        self.feed(text)
        assert self.open == ["html"] or not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            self.ids += [value] * (name == "id")
            self.references += value.split() if name == "aria-labelledby" else []
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


FULL = {
    "plots": [LINE, dataclasses.replace(LINE, where={"batch": "no"}), dataclasses.replace(LINE, table="not measured")],
    "control": {"what": HOSTILE},
    "ceiling": {"copy": 4e12},
    "verdicts": ["limited by expert reads: 61% of the step", f"invalid: {HOSTILE}"],
    "requests": [{"finish_reason": "stop"}, {"finish_reason": HOSTILE}],
}


def test_pages_are_whole_and_take_nothing_from_elsewhere_and_nothing_for_markup():
    one, other = measured({64: (1.0, 1.1), 8: (0.5,)}, **FULL), measured({64: (2.0, 2.1)}, **FULL)
    for text in (page([one]), page([one, other]), comparison_page([one], [other])):
        found = Checked(text)
        assert "script" not in found.tags and "link" not in found.tags and "img" not in found.tags
        assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\(|https?://(?!www\.w3\.org)""", text)
        assert HOSTILE in found.text and len(set(found.ids)) == len(found.ids)
        assert set(found.references) <= set(found.ids)
        assert text.count("<svg ") == text.count('role="img"') and "scope=" in text


def test_a_page_shows_medians_and_the_spread_of_repeats_failures_and_what_only_the_file_has():
    result = measured({64: (1.0, 1.25, 1.75)}, **FULL)
    result.add_row("steps", {"context": 8, "batch": "one", "error": "RuntimeError: out of memory"})
    result.add_row("steps_without_keys", {"met": True, "value": None})
    result.add_rows("nobody", [])
    text = re.sub(r"\s+", " ", Checked(page([result])).text)
    assert "Steps, 1 or 3 repeats each" in text.replace("steps", "Steps") and "1.251 to 1.75" in text
    assert "RuntimeError: out of memory" in text and "columns costs" in text and "yes" in text
    assert "1 of 4 rows have no such value" in text and text.count("Nothing to draw") == 1
    assert "nobody" not in text and "2 raw records" in text and "Interrupted" not in text
    long = Result("plan", {}, rows={"points": [{"batch": i} for i in range(130)]})
    assert "In the file, not here: 30 more rows." in page([long])


def test_a_comparison_says_how_many_values_differ_and_shows_both_plots_on_one_scale():
    before, after = (measured({64: repeats, 8: (0.5, 0.6)}, plots=[LINE]) for repeats in ((1.0, 1.1), (40.0, 41.0)))
    after.conditions["flags"]["layers"] = 38
    text = comparison_page([before], [after])
    shown = re.sub(r"\s+", " ", Checked(text).text)
    assert "1 of 2 values that both sides measured repeatedly differ by more than their spread" in shown
    assert re.search(r"flags: layers ?40 ?38 ?differs", shown)
    ticks = [re.findall(r'text-anchor="end"[^>]*>([^<]+)<', svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert len(ticks) == 2 and ticks[0] == ticks[1] and float(ticks[0][-1]) >= 40


def test_series_have_the_same_colour_on_both_sides_whatever_their_order():
    one, two = ({"context": 8, "batch": name, "milliseconds": 1.0} for name in ("one", "two"))
    sides = [Result("forward", {}, rows={"steps": rows}, plots=[LINE]) for rows in ([one, two], [two, one])]
    found = re.findall(
        r'<g class="(c\d)"><polyline[^>]*/><\w+[^>]*><title>(\w+),', comparison_page(*([x] for x in sides))
    )
    assert set(found) == {("c0", "one"), ("c1", "two")} and len(found) == 4


def test_long_names_are_cut_in_the_picture_and_whole_in_titles():
    name = "a very long name " * 10
    plot = dataclasses.replace(LINE, kind="bar", x="batch", x_axis=Axis("batch"), by=("context",))
    svg = draw(plot, [{"context": name + str(i), "batch": name, "milliseconds": 1.0} for i in (1, 2)], "p")
    assert all(len(text.text) < 66 for text in elements(svg, "text")) and name + "1" in svg


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_interrupted_keeps_its_rows_and_its_page(tmp_path, raised):
    run = Result("forward", {}, keys={"steps": ("n",)})
    with pytest.raises(SystemExit if raised is KeyboardInterrupt else raised), reported(str(tmp_path), run):
        run.add_row("steps", {"n": 1, "milliseconds": 2.0})
        assert load(tmp_path / "forward.json").rows == run.rows
        raise raised
    assert load(tmp_path / "forward.json").interrupted
    assert "Interrupted: what was measured until then." in (tmp_path / "forward.html").read_text()
    with reported(None, run):
        run.add_row("steps", {"n": 2})


def test_the_script_makes_pages_and_comparisons_of_files(tmp_path):
    for name, value in (("a", 1.0), ("b", 5.0)):
        measured({64: (value, value)}).save(tmp_path / f"{name}.json")
    a, b, out = str(tmp_path / "a.json"), str(tmp_path / "b.json"), f"--report={tmp_path / 'out'}"
    run_script("report", out, a)
    run_script("report", out, a, b)
    run_script("report", out, f"--compare={a}", b)
    pages = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert pages.keys() == {"forward.html", "report.html", "forward_compared.html"}
    assert pages["report.html"].count("<article") == 2 and "beyond the spread" in pages["forward_compared.html"]
    (tmp_path / "bad.json").write_text(json.dumps({"experiment": "forward", "conditions": {}, "rovs": {}}))
    with pytest.raises(ValueError, match=r"bad.json: unknown field 'rovs'"):
        run_script("report", out, str(tmp_path / "bad.json"))


WIDE = {f"a_column_with_a_long_name_{i}": 123456.0 + i for i in range(14)}
MEASURE = """<!doctype html><body><iframe src="{page}" style="width:390px;height:800px;border:0"></iframe>
<script>onload = () => {{
  const inner = document.querySelector("iframe").contentDocument;
  const [root, scroll] = [inner.documentElement, [...inner.querySelectorAll(".scroll")]];
  const outside = [...inner.querySelectorAll("main *")].filter(e => !e.closest(".scroll, svg"));
  const wider = outside.filter(e => e.getBoundingClientRect().right > 390);
  const text = [...inner.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
  document.body.dataset.found = JSON.stringify({{
    width: root.scrollWidth, wider: wider.length, scrolls: scroll.filter(e => e.scrollWidth > e.clientWidth).length,
    pictures: inner.querySelectorAll("svg").length, least: Math.min(...text)}});
}}</script>"""


def test_on_a_phone_wide_tables_scroll_within_themselves_and_plots_can_be_read(tmp_path):
    result = measured({64: (1.0, 1.1), 1024: (2.0, 2.1)}, **FULL)
    result.add_row("wide", WIDE)
    for kind in ("bar", "stacked", "pareto"):
        result.plots.append(dataclasses.replace(LINE, kind=kind, x_axis=Axis("context"), title="long " * 20))
    write_report(tmp_path, result)
    (tmp_path / "phone.html").write_text(MEASURE.format(page="forward.html"))
    document = browse(
        f"file://{tmp_path}/phone.html", tmp_path / "profile", "800,900", "--allow-file-access-from-files"
    )
    found = json.loads(re.search(r"data-found=\"([^\"]*)\"", document)[1].replace("&quot;", '"'))
    assert found["width"] <= 390 and found["wider"] == 0 and found["scrolls"] >= 1
    assert found["pictures"] == 4 and found["least"] >= 9
