"""What a report draws: declarations that name a table and its columns, so that a file holds every number once."""

import dataclasses
from typing import Any, Literal, get_args

PlotKind = Literal["line", "bar", "stacked", "scatter", "pareto"]
"""A bar per value of x and series; the series of a stacked bar are its parts. A pareto plot is a scatter with the
front of the points that no other beats in both directions; more is better on both axes."""
REQUESTS = "requests"
"""Name of the table of raw records of requests."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is along an axis. Bars have names along x, and no axis of theirs is logarithmic."""

    label: str
    unit: str = ""
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of one table; rows that lack one of its columns are not in it.

    Args:
      table: a name in `Result.rows`, or `REQUESTS`.
      x: column along x.
      y: columns along y, a series each.
      by: columns whose values tell series apart.
      where: only rows with these values.

    Raises:
      ValueError: an unknown kind, no column for y, or bars along a logarithmic axis.
    """

    kind: PlotKind
    title: str
    table: str
    x: str
    y: tuple[str, ...]
    x_axis: Axis
    y_axis: Axis
    by: tuple[str, ...] = ()
    where: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in get_args(PlotKind):
            raise ValueError(f"plot {self.title!r}: kind = {self.kind!r}: must be one of {get_args(PlotKind)}")
        if isinstance(self.y, str) or not self.y:
            raise ValueError(f"plot {self.title!r}: y = {self.y!r}: must be one column or more, as a tuple")
        for name in ("x_axis", "y_axis"):
            if self.kind in ("bar", "stacked") and getattr(self, name).log:
                raise ValueError(f"plot {self.title!r}: {name}.log = True: bars have names along x, and begin at 0")
