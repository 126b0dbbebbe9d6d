"""The parts of a report, as values: cards and sections of charts, heat maps, tables and texts.

`html.py` (plotly) and `plots.py` (matplotlib) draw them; neither knows what they are about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from signalprop.network.moments import FloatArray

# After Okabe and Ito: distinguishable by every common kind of colour vision, and at 3:1 from white as from dark paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c46f9f", "#b87d00", "#3a8fc9", "#777777")
Line = Literal["solid", "dashed", "dotted", "mixed", "points"]
LINES: tuple[Line, ...] = ("solid", "dashed", "dotted", "mixed")
Severity = Literal["fault", "warning", "note", "good"]
WHOLE = ("checkpoint", "depth", "first layer", "layer", "step", "token")  # axes that count
BAND = 2  # standard errors that a band reaches to either side
# Beyond these a logarithmic axis ends, in a browser as in matplotlib.
_SMALLEST, _LARGEST = 1e-290, 1e290


class Link(NamedTuple):
    """A cell of a table that leads to a file; `target` is a quoted relative path."""

    text: str
    target: str


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve of a chart; a value that is not finite is a gap.

    Attributes:
        label: in the legend. x, y: (points,). low, high: ends of its band, or of the bar at every point.
        colour: index into `COLOURS`, which begin again. names: of the points; default: their x. frame: the step of the
            chart's slider that shows it; None: always.
    """

    label: str
    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None
    colour: int = 0
    line: Line = "solid"
    names: Sequence[str] = ()
    frame: str | None = None


@dataclass(frozen=True, eq=False)
class Chart:
    """Curves on common axes.

    Attributes:
        x, y: what the axes show. log: the vertical axis begins logarithmic, unless all values lie within a factor
            of 2. positive: it can be logarithmic. zero: a linear axis begins at 0 where all is positive, so that noise
            about a constant looks like one. limits: of
            the vertical axis while it is linear. marks: vertical lines, with their names. ticks: positions and labels
            where the horizontal axis is not simply numbers. bars: errors are bars at the points, not a band.
            slider: what it counts, of curves with frames.
    """

    title: str
    curves: Sequence[Curve]
    x: str
    y: str
    log: bool = False
    positive: bool = False
    zero: bool = True
    limits: tuple[float, float] | None = None
    caption: str = ""
    marks: Sequence[tuple[float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()
    bars: bool = False
    slider: str = ""

    @property
    def frames(self) -> list[str]:
        """Steps of its slider."""
        return list(dict.fromkeys(curve.frame for curve in self.curves if curve.frame is not None))

    def at(self, frame: str | None) -> list[Curve]:
        """The curves that a step of the slider shows."""
        return [curve for curve in self.curves if curve.frame in (None, frame)]

    @property
    def positives(self) -> FloatArray:
        """What is above 0 at the last step of the slider, upper ends of bands included."""
        shown = self.at(self.frames[-1] if self.frames else None)
        values = np.concatenate([part for curve in shown for part in (curve.y, curve.high) if part is not None])
        return values[values > 0]

    @property
    def begins_logarithmic(self) -> bool:
        """Whether the vertical axis begins logarithmic: a change below a factor of 2 looks small on one from 0."""
        values = self.positives
        return self.log and bool(values.size) and values.max() >= 2 * values.min()

    @property
    def from_zero(self) -> bool:
        """Whether a linear axis begins at 0."""
        return (self.zero or self.log) and not any((curve.y < 0).any() for curve in self.curves)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Matrices of one shape, (rows, columns), by the step of a slider that shows them.

    Attributes:
        x, y: what the axes show. limits: of the colours. origin: of the axes' numbers, (x, y). down: row 0 is on
            top. value: what an entry is. texts: in the entries; rows, columns: names in place of numbers.
    """

    title: str
    frames: Mapping[str, FloatArray]
    x: str
    y: str
    limits: tuple[float, float]
    origin: tuple[float, float] = (0, 0)
    caption: str = ""
    value: str = ""
    down: bool = False
    slider: str = ""
    colours: str = "Viridis"
    texts: Sequence[Sequence[str]] | None = None
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Texts and links; the first `left` columns are words, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    left: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A text, folded, as it is."""

    title: str
    body: str


@dataclass(frozen=True, eq=False)
class Section:
    """Blocks under a title."""

    title: str
    blocks: Sequence[Chart | HeatMap | Table | Text]
    lead: str = ""


@dataclass(frozen=True)
class Card:
    """A finding on top of the page: of what (`subject`), what, in sentences, and what would help.

    first: before all others. more: folded sentences.
    """

    severity: Severity
    subject: str
    title: str
    texts: Sequence[str]
    advice: str = ""
    first: bool = False
    more: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Document:
    """A report."""

    title: str
    subtitle: str = ""
    cards: Sequence[Card] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def numbers(values: Sequence[float | None]) -> FloatArray:
    """None as NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def with_errors(curve: Curve, errors: ArrayLike | None) -> Curve:
    """The curve with a band of two standard errors (points,) to either side; None: without."""
    if errors is None:
        return curve
    size = BAND * np.nan_to_num(np.asarray(errors, np.float64))
    return replace(curve, low=curve.y - size, high=curve.y + size)


def of_logs(curve: Curve, relative: ArrayLike | None = None) -> Curve:
    """The curve of exp(y): `logarithmic` expects such curves as `log`, with relative standard errors.

    In logarithms a band goes as far down as up, so that it never reaches 0.
    """
    if relative is None:
        return curve
    size = BAND * np.nan_to_num(np.asarray(relative, np.float64))
    return replace(curve, low=curve.y - np.log1p(size), high=curve.y + np.log1p(size))


def logarithmic(chart: Chart) -> Chart:
    """A chart of positive quantities whose curves hold natural logarithms (-inf: 0, NaN: a gap).

    The axis is logarithmic where values span more than a factor of ten, or `log` asks for it. Where one leaves the
    range of numbers, all are drawn as exponents of ten.
    """
    known = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.curves] or [np.zeros(0)])
    if known.size and (known.min() < math.log(_SMALLEST) or known.max() > math.log(_LARGEST)):
        curves = [_mapped(curve, lambda logs: logs / math.log(10)) for curve in chart.curves]
        return replace(chart, curves=curves, y=f"{chart.y}, power of ten", log=False, positive=False, zero=False)
    log = chart.log or bool(known.size and np.ptp(known) > math.log(10))
    return replace(chart, curves=[_mapped(curve, np.exp) for curve in chart.curves], log=log, positive=True)


def _mapped(curve: Curve, of: Callable[[FloatArray], FloatArray]) -> Curve:
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (None if end is None else of(end) for end in (curve.low, curve.high))
        return replace(curve, y=of(curve.y), low=low, high=high)


def all_positive(curves: Sequence[Curve]) -> bool:
    """Whether a logarithmic axis shows all of them."""
    return all(bool((curve.y[np.isfinite(curve.y)] > 0).all()) for curve in curves)
