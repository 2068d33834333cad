"""Makes a page of result files, or of two sets of them side by side.

    python scripts/report.py --report out out/forward.json out/decode.json
    python scripts/report.py --report out --compare before1.json --compare before2.json after1.json after2.json

Files given without `--compare` are results, each a part of one page. With it, the files it names are one side and the
others the other side; files of one side, and rows of a file that have the same keys, are repeats of one measurement.
"""

from pathlib import Path

import command_line
from absl import flags

from dsv4jax.bench.results.page import comparison_page, page
from dsv4jax.bench.results.result import load

_REPORT = flags.DEFINE_string("report", None, "Directory to write the page into.", required=True)
_COMPARE = flags.DEFINE_multi_string("compare", [], "Result file to compare the others with; may be repeated.")


def main(files: list[str]) -> None:
    if not files:
        raise ValueError("result files: at least one must be given")
    results, before = ([load(path) for path in paths] for paths in (files, _COMPARE.value))
    if before:
        name, text = f"{before[0].experiment}_compared", comparison_page(before, results)
    else:
        name, text = results[0].experiment if len(results) == 1 else "report", page(results)
    path = Path(_REPORT.value) / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    command_line.run(main, arguments="result files")
