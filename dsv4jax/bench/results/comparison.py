"""Two sets of results of one experiment, and which of their differences are larger than repeats differ."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from dsv4jax.bench.results.result import Result, Row, is_number

Verdict = Literal["beyond the spread", "within the spread", "no repeats", "only before", "only after"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One measured column of one row, before and after; a value for each repeat."""

    table: str
    keys: Row
    column: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the medians differ by more than the repeats of either side do, from the least to the largest.

        It is not known without two repeats on each side: one value says nothing about the next.
        """
        if not self.before or not self.after:
            return "only before" if self.before else "only after"
        if min(len(self.before), len(self.after)) < 2:
            return "no repeats"
        difference = abs(statistics.median(self.after) - statistics.median(self.before))
        return "beyond the spread" if difference > max(map(spread, (self.before, self.after))) else "within the spread"

    @property
    def change(self) -> float | None:
        """Of the median, as a share of the one before; None where there is none to compare with."""
        if not self.before or not self.after or not statistics.median(self.before):
            return None
        return statistics.median(self.after) / statistics.median(self.before) - 1


def spread(values: Sequence[float]) -> float:
    """Difference of the largest and the least."""
    return max(values) - min(values)


def compare(before: Sequence[Result], after: Sequence[Result]) -> list[Difference]:
    """Every measured number of the tables with keys, in the order of the rows.

    Several results of a side are repeats, as rows with the same keys are.

    Raises:
      ValueError: a side is empty, or the results are not of one experiment with the same keys.
    """
    if not before or not after:
        raise ValueError("compare: both sides must have a result")
    for name in ("experiment", "keys"):
        values = [getattr(result, name) for result in (*before, *after)]
        if different := [value for value in values if value != values[0]]:
            raise ValueError(f"compare: {name} = {values[0]!r} and {different[0]!r}: must be the same")
    found: dict[tuple, tuple[list[float], list[float]]] = {}
    for side, results in enumerate((before, after)):
        for result in results:
            for table, keys in result.keys.items():
                for row in result.rows.get(table, []):
                    names = tuple((name, row.get(name)) for name in keys)
                    for column, value in row.items():
                        if column not in keys and is_number(value):
                            found.setdefault((table, names, column), ([], []))[side].append(value)
    return [
        Difference(table, dict(names), column, tuple(one), tuple(other))
        for (table, names, column), (one, other) in found.items()
    ]
