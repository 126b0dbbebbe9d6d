"""Sections of a report, and profiles, as pictures drawn by matplotlib; how every picture is written.

Needs the `report` extra, imported inside.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import InputError, printable, require
from signalprop.files.storage import write_bytes
from signalprop.network.moments import FloatArray
from signalprop.report.parts import numbered
from signalprop.report.sections import COLOURS, WHOLE, Chart, Curve, HeatMap, Section
from signalprop.report.shown_profiles import shown
from signalprop.report.signal import overview_maps, share_the_axis, signal_section
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import network_in_words, spread

FORMATS = ("png", "svg", "pdf")
MAX_POINTS = 64  # of a curve of points; more would merge into a band
_LINES = {"solid": "-", "dashed": "--", "dotted": ":", "mixed": "-.", "points": "none"}


def check_format(path: str | Path) -> str:
    """The picture format that a file name asks for."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise InputError(
            f"cannot draw {path}: expected a name that ends in .png, .svg or .pdf; commands also write .html"
        )
    return suffix


def save_plot(path: str | Path, items: Profile | Comparison | Sequence[Profile], *, title: str | None = None) -> None:
    """Draw `figure(items)` and write it, whole or not at all, in the format of the file's name (png, svg, pdf)."""
    save_figure(path, lambda: figure(items, title=title))


def save_figure(path: str | Path, draw: Callable[[], Any]) -> None:
    """Write a matplotlib Figure that `draw` makes, whole or not at all, in the format of the file's name."""
    kind = check_format(path)
    buffer = io.BytesIO()
    require("matplotlib", "report")
    from matplotlib import rc_context

    # no date in the file, and a fixed salt of its names, so that equal input gives equal bytes
    metadata = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with rc_context({"svg.hashsalt": "signalprop"}):
        picture = draw()
        _plain(picture)
        picture.savefig(buffer, format=kind, metadata=metadata)
    write_bytes(path, buffer.getvalue())


def _plain(picture: Any) -> None:
    """Show names as they are: matplotlib would read text between two $ as a formula, and fail if it is none.

    The numbers of its axes, which are formulas, are written later, as it draws.
    """
    from matplotlib.text import Text

    for text in picture.findobj(Text):
        if text.get_text():
            text.set_text(printable(text.get_text()))
            text.set_parse_math(False)


def figure(items: Profile | Comparison | Sequence[Profile], *, title: str | None = None) -> Any:
    """A matplotlib Figure with the charts of the page (`signalprop.report.signal`), two beside each other.

    Stream variance, gradient variance, token correlation, and what each layer adds relative to the stream it meets.
    Predictions are lines, measurements points; bands and bars are two standard errors, of a prediction two standard
    deviations of one network. Networks of several depths share an axis, from their first layer to their last. Several
    schemes at several depths have heat maps below.
    """
    require("matplotlib", "report")
    given = [items] if isinstance(items, Profile | Comparison) else list(items)
    if not given:
        raise InputError("there is nothing to draw; give at least one profile")
    found = shown(numbered([(_name(item), item) for item in given]))
    profiles = [item.profile for item in found]
    section = signal_section(found)
    charts: Any = section.blocks
    if len({p.architecture.n_layers_total for p in profiles}) > 1:
        charts = share_the_axis(charts)
    section = Section(section.title, [*charts, *overview_maps(profiles)])
    return sections_figure([section], _title(profiles) if title is None else title, columns=2, size=(6.0, 3.7))


def _name(item: Profile | Comparison) -> str:
    return (item.predicted if isinstance(item, Comparison) else item).scheme


def _title(profiles: Sequence[Profile]) -> str:
    schemes = ", ".join(dict.fromkeys(p.scheme for p in profiles))
    source = profiles[-1].statistics.get("source") or profiles[0].statistics.get("source")
    found = [f", {p.source} in {p.n_seeds} network{'s' * (p.n_seeds != 1)}" for p in profiles if p.n_seeds]
    read = f", reading {source}" if source else ""
    return f"{network_in_words(*(p.architecture for p in profiles))}: {schemes}{read}{''.join(dict.fromkeys(found))}"


def sections_figure(
    sections: Sequence[Section], title: str, *, columns: int = 4, size: tuple[float, float] = (3.5, 3.2)
) -> Any:
    """A matplotlib Figure: the charts and maps of every section below each other, each with its legend.

    Args:
        columns: panels beside each other. size: of a panel, in inches.
    """
    require("matplotlib", "report")
    from signalprop.report.notebook_figure import NotebookFigure

    width, height = size
    drawn = [[b for b in section.blocks if isinstance(b, Chart | HeatMap)] for section in sections]
    drawn = [blocks for blocks in drawn if blocks]
    rows = [-(-len(blocks) // columns) for blocks in drawn]
    figure = NotebookFigure(figsize=(width * columns, height * sum(rows) + 0.6 * len(rows) + 0.4), layout="constrained")
    figure.suptitle(title)
    parts = figure.subfigures(len(drawn), 1, squeeze=False, height_ratios=[height * n + 0.6 for n in rows])[:, 0]
    for part, blocks, lines in zip(parts, drawn, rows, strict=True):
        handles: dict[str, Any] = {}
        for place, block in enumerate(blocks):
            axis = part.add_subplot(lines, min(columns, len(blocks)), place + 1)
            axis.set_title(block.title, fontsize=9, wrap=True)
            axis.set_xlabel(block.x, fontsize=8)
            axis.set_ylabel(block.y, fontsize=8)
            axis.tick_params(labelsize=8)
            if isinstance(block, HeatMap):
                _map(axis, block)
            else:
                _chart(axis, block, handles)
        if len(handles) > 1:
            part.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8)
    return figure


def _chart(axis: Any, chart: Chart, handles: dict[str, Any]) -> None:
    """Curves, of a slider at its last step, and their places in the legend by their labels."""
    axis.grid(alpha=0.3, linewidth=0.6)
    axis.xaxis.get_major_locator().set_params(integer=chart.x in WHOLE)
    curves = chart.at(chart.frames[-1] if chart.frames else None)
    for curve in curves:
        handles.setdefault(curve.label, _curve(axis, curve, bars=chart.bars))
    for x, label in chart.marks:
        axis.axvline(x, color="#555555", linestyle=":", linewidth=0.8)
        side = "right" if x > np.mean(axis.get_xlim()) else "left"  # of the panel, which the text stays in
        axis.annotate(label, (x, 0.02), xycoords=("data", "axes fraction"), ha=side, fontsize=8, color="#555555")
    if chart.ticks:
        at, names = zip(*chart.ticks, strict=True)
        axis.set_xticks(at, names, rotation=90 if len(names) > 4 else 0)
    positive = chart.positives
    if chart.begins_logarithmic:
        _logarithmic(axis, float(np.log10(positive.max() / positive.min())))
    elif chart.limits:
        axis.set_ylim(*chart.limits)
    elif chart.from_zero and positive.size:
        axis.set_ylim(0, 1.05 * positive.max())


def _curve(axis: Any, curve: Curve, *, bars: bool) -> Any:
    """A line with its band, or hollow points with bars; what stands for it in a legend."""
    colour, (x, y, low, high) = COLOURS[curve.colour % len(COLOURS)], (curve.x, curve.y, curve.low, curve.high)
    if bars or curve.line == "points":
        keep = spread(range(len(x)), MAX_POINTS)
        ends = None if low is None or high is None else np.maximum(np.stack([y - low, high - y])[:, keep], 0.0)
        return axis.errorbar(x[keep], y[keep], yerr=ends, color=colour, linestyle=_LINES[curve.line], marker="o",
                             markersize=4, markerfacecolor="none", elinewidth=0.8, capsize=2)  # fmt: skip
    few = {"marker": "o", "markersize": 4} if np.isfinite(y).sum() < 3 else {}
    (line,) = axis.plot(x, y, _LINES[curve.line], color=colour, linewidth=1.6, **few)
    if low is not None and high is not None:
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    return line


def _logarithmic(panel: Any, decades: float) -> None:
    """A logarithmic axis with few, plain labels: 1, 2, 5, 10 where it is short, powers of ten where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log", nonpositive="clip")
    panel.yaxis.set_minor_formatter(NullFormatter())
    if decades < 3:
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _map(axis: Any, item: HeatMap) -> None:
    """The last frame of a heat map, with texts in its entries or a scale beside it."""
    matrix: FloatArray = list(item.frames.values())[-1]
    (x, y), (rows, columns) = item.origin, matrix.shape
    ends = [x - 0.5, x + columns - 0.5, y - 0.5, y + rows - 0.5]
    if item.down:
        ends = [*ends[:2], ends[3], ends[2]]
    low, high = item.limits
    image = axis.imshow(
        matrix, origin="upper" if item.down else "lower", aspect="auto", extent=ends, vmin=low, vmax=high,
        cmap=item.colours.lower() if item.colours == "Viridis" else item.colours,
    )  # fmt: skip
    if item.columns:
        axis.set_xticks(range(columns), item.columns)
        axis.set_yticks(range(rows), item.rows)
    if item.texts is None:
        axis.figure.colorbar(image, ax=axis, shrink=0.8, label=item.value)
    for (row, column), shade in np.ndenumerate(matrix) if item.texts is not None else ():
        red, green, blue, _alpha = image.cmap(image.norm(shade))
        ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        axis.text(column, row, item.texts[row][column], ha="center", va="center", fontsize=9, color=ink)  # type: ignore[index]
