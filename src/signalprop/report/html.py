"""The page: one HTML file that opens offline, whose charts plotly.py draws.

Names that come from a file are HTML text, escaped here, or JSON that plotly.py escapes; a content security policy
allows no scripts but those that it wrote, and no connection. Colours of texts and lines follow the system, and are
dark on paper, by the style sheet (`page.css`) alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from signalprop.errors import printable, require
from signalprop.files.storage import real_path, write_text
from signalprop.files.validation import typed
from signalprop.network.moments import FloatArray
from signalprop.report.documents import Item, document, read
from signalprop.report.sections import COLOURS, WHOLE, Card, Chart, Curve, Document, HeatMap, Link, Section, Table, Text
from signalprop.results.text import number, spread

__all__ = ["Item", "document", "read", "render", "write_report"]

# A page stays within 5 MB, of which plotly.js is 4.8: bytes for all drawings and tables, and of a drawing without its
# numbers, of a point with its band, of an entry of a map, of a cell. Where there is more, every n-th is shown.
_ROOM, _FIGURE, _POINT, _ENTRY, _CELL = 125_000, 2_400, 22, 5, 25
_CELLS, _ROWS = 2_000, 400  # cells of tables under drawings, all together; rows of a table
# Buttons, which Tab reaches; no other, as one of plotly's would send the chart to a server.
_BUTTONS = ["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]
CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": True, "modeBarButtons": [_BUTTONS]}
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "mixed": "dashdot"}
_ICONS = {"fault": "✕", "warning": "!", "note": "i", "good": "✓"}
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
<script>$library</script>
</head>
<body>
<a class="skip" href="#content">Skip to the charts</a>
<header><div class="wide"><p class="brand">signalprop</p><h1>$title</h1><p class="subtitle">$subtitle</p></div></header>
<nav aria-label="Sections"><div class="wide"><a href="#summary">Summary</a>$navigation</div></nav>
<main id="content">
<section id="summary"><div class="wide"><h2>Summary</h2><ul class="cards">$cards</ul>$notes</div></section>
$sections
</main>
<footer><div class="wide"><p>Made by signalprop. This file needs no network. Charts: plotly.js, Copyright Plotly, Inc.,
MIT license; without JavaScript the tables under them have their numbers.</p></div></footer>
</body>
</html>
""")


@typed
def write_report(
    path: str | Path, items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None
) -> None:
    """Write the report of profiles, comparisons, diagnoses, traces, parametrizations, runs and sweeps.

    One HTML file of about 5 MB that opens offline, written whole or not at all.

    Args:
        path: of the file. title: of the page; default: after what is in it.
        items: by the names that tell them apart (schemes and models have names of their own in the report).

    Raises:
        InputError: nothing to report, a sweep, or a path that cannot be written. MissingExtra: plotly is not installed.
    """
    write_text(path, render(document(items, title=title, beside=real_path(path).parent)))


@typed
def render(content: Document) -> str:
    """The HTML of a document.

    Raises:
        MissingExtra: plotly is not installed.
    """
    page = _Page(content)
    sections = "\n".join(page.section(k, section) for k, section in enumerate(content.sections))
    scripts = [_library(), *re.findall(r"<script[^>]*>(.*?)</script>", sections, re.S)]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    notes = "".join(f"<li>{_escaped(note)}</li>" for note in content.notes)
    return _PAGE.substitute(
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        title=_escaped(content.title),
        subtitle=_escaped(content.subtitle),
        style=resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        library=_library(),
        navigation="".join(f'<a href="#s{k}">{_escaped(item.title)}</a>' for k, item in enumerate(content.sections)),
        cards="\n".join(_card(card) for card in content.cards),
        notes=f'<details class="notes"><summary>Notes</summary><ul>{notes}</ul></details>' if notes else "",
        sections=sections,
    )


@lru_cache(maxsize=1)
def _library() -> str:
    """plotly.js, as plotly.py brings it."""
    return str(require("plotly.offline", "report").get_plotlyjs())


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escaped(text: object) -> str:
    """A text that is shown as it is, on a page and in a drawing."""
    return html.escape(printable(str(text)))


class _Page:
    """The blocks of a page, each with the share of its points, entries and cells that keeps the page small."""

    def __init__(self, content: Document) -> None:
        blocks = [block for section in content.sections for block in section.blocks]
        charts = [block for block in blocks if isinstance(block, Chart)]
        maps = [block for block in blocks if isinstance(block, HeatMap)]
        curves, matrices = sum(len(chart.curves) for chart in charts), sum(len(item.frames) for item in maps)
        cells = sum(len(block.header) * min(len(block.rows), _ROWS) for block in blocks if isinstance(block, Table))
        room = max(24_000, _ROOM - _FIGURE * (len(charts) + len(maps)) - _CELL * cells) / (1 + bool(charts and maps))
        self._points = max(24, int(room / _POINT / max(curves, 1)))
        self._side = max(16, math.isqrt(int(room / _ENTRY / max(matrices, 1))))
        self._rows = max(8, _CELLS // max(sum(min(len(c.curves), 12) + 1 for c in charts) + 8 * len(maps), 1))
        self._drawn = 0

    def section(self, k: int, section: Section) -> str:
        """Its HTML, with plotly's scripts."""
        lead = f'<p class="lead">{_escaped(section.lead)}</p>' if section.lead else ""
        blocks = "\n".join(self._block(block) for block in section.blocks)
        title = f"<h2>{_escaped(section.title)}</h2>"
        return f'<section id="s{k}"><div class="wide">{title}{lead}<div class="blocks">{blocks}</div></div></section>'

    def _block(self, block: Chart | HeatMap | Table | Text) -> str:
        if isinstance(block, Text):
            folded = f"<summary>{_escaped(block.title)}</summary><pre tabindex=0>{_escaped(block.body)}</pre>"
            return f'<div class="block full"><details>{folded}</details></div>'
        if isinstance(block, Table):
            more = f"The first {_ROWS} of {len(block.rows)} rows. " if len(block.rows) > _ROWS else ""
            table = _table(block.header, block.rows[:_ROWS], block.left, block.title)
            caption = _caption(more + block.caption)
            return f'<div class="block full"><h3>{_escaped(block.title)}</h3>{table}{caption}</div>'
        self._drawn += 1
        figure = chart_figure(block, self._points) if isinstance(block, Chart) else map_figure(block, self._side)
        io: Any = require("plotly.io", "report")
        drawn = io.to_html(
            figure, config=CONFIG, full_html=False, include_plotlyjs=False, div_id=f"c{self._drawn}", validate=False,
            auto_play=False, include_mathjax=False,
        )  # fmt: skip
        header, rows = chart_numbers(block, self._rows) if isinstance(block, Chart) else map_numbers(block)
        said = block.y if isinstance(block, Chart) else block.value
        return (
            f'<figure class="block"><h3>{_escaped(block.title)}</h3><p class="unit">{_escaped(said)}</p>'
            f'<div class="plot" role="group" aria-label="{_escaped(described(block))}">{drawn}</div>'
            f"{_caption(block.caption)}<details><summary>Numbers</summary>"
            f"{_table(header, rows, 1, block.title)}</details></figure>"
        )


def _caption(text: str) -> str:
    return f'<p class="caption">{_escaped(text)}</p>' if text else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Link]], left: int, name: str) -> str:
    """Cells without their end tags, which HTML does not need."""

    def row(cells: Sequence[str | Link]) -> str:
        return "<tr>" + "".join(f"<td{' class=w' * (k < left)}>{_cell(cell)}" for k, cell in enumerate(cells))

    head = "".join(f'<th scope="col"{" class=w" * (k < left)}>{_escaped(name)}' for k, name in enumerate(header))
    body = "\n".join(map(row, rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_escaped(name)}">'
        f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str | Link) -> str:
    if isinstance(cell, Link):
        return f'<a href="{html.escape(cell.target)}">{_escaped(cell.text)}</a>'
    return _escaped(cell)


def _card(card: Card) -> str:
    texts = "".join(f"<p>{_escaped(text)}</p>" for text in card.texts)
    more = "".join(f"<p>{_escaped(text)}</p>" for text in card.more)
    texts += f"<details><summary>All {len(card.more)}</summary>{more}</details>" if card.more else ""
    texts += f'<p class="advice"><b>What would help:</b> {_escaped(card.advice)}</p>' if card.advice else ""
    return (
        f'<li class="card {card.severity}"><span class="icon" role="img" aria-label="{card.severity}">'
        f"{_ICONS[card.severity]}</span><div><h3>{_escaped(card.title)} "
        f'<span class="subject">{_escaped(card.subject)}</span></h3>{texts}</div></li>'
    )


# --- numbers under a drawing -------------------------------------------------------------------------------------


def chart_numbers(chart: Chart, rows: int) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the curves that a chart ends with; of long curves as many points, evenly spread."""
    curves = chart.at(chart.frames[-1] if chart.frames else None)[:12]
    known: dict[float, tuple[str, list[str]]] = {}
    for k, curve in enumerate(curves):
        names = curve.names or [f"{x:.5g}" for x in curve.x]
        for x, name, y in zip(curve.x.tolist(), names, curve.y.tolist(), strict=True):
            if x == x:
                known.setdefault(x, (name, [""] * len(curves)))[1][k] = number(y) if y == y else ""
    cells = [[name, *row] for _, (name, row) in sorted(known.items(), key=lambda item: item[0])]
    return [chart.x, *(curve.label for curve in curves)], spread(cells, rows)


def map_numbers(item: HeatMap) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the last matrix of a map, of a large one eight rows and columns."""
    frame, matrix = list(item.frames.items())[-1]
    rows, columns = (spread(list(range(n)), 8) for n in matrix.shape)

    def named(names: Sequence[str], k: int, axis: int) -> str:
        return names[k] if names else f"{item.origin[axis] + k * item.step[axis]:g}"

    head = f"{item.slider} {frame}" if len(item.frames) > 1 else item.y
    cells = [[named(item.rows, i, 1), *(number(float(matrix[i, j])) for j in columns)] for i in rows]
    return [head, *(named(item.columns, j, 0) for j in columns)], cells


def described(block: Chart | HeatMap) -> str:
    """A drawing in words, for those who do not see it."""
    if isinstance(block, HeatMap):
        return f"{block.title}: a map of {block.value}, {block.y} against {block.x}; numbers below"
    parts = []
    for curve in block.at(block.frames[-1] if block.frames else None)[:6]:
        known = curve.y[np.isfinite(curve.y)]
        if known.size:
            parts.append(f"{curve.label} from {number(float(known[0]))} to {number(float(known[-1]))}")
    return f"{block.title}, {block.y} against {block.x}: {'; '.join(parts) or 'no values'}"


# --- figures of plotly -------------------------------------------------------------------------------------------


def chart_figure(chart: Chart, points: int | None = None) -> dict[str, Any]:
    """A chart as a figure of plotly; of long curves every n-th point, at most so many, with the last."""
    frames = chart.frames
    shown = _step(chart, frames[-1] if frames else None)
    zero = chart.zero and all(not (curve.y < 0).any() for curve in chart.curves)
    layout = _layout(chart)
    layout["yaxis"] |= {"type": "log" if chart.log else "linear", "exponentformat": "power"}
    layout["yaxis"] |= {"rangemode": "tozero"} if zero and not chart.limits else {}
    if chart.limits and not chart.log:
        layout["yaxis"] |= {"range": list(chart.limits)}
    layout["showlegend"] = len({curve.label for curve in shown}) > 1
    layout["shapes"], layout["annotations"] = [], []
    middle = np.nanmean(np.concatenate([curve.x for curve in shown])) if chart.marks else 0.0
    for x, name in chart.marks:
        line = {"width": 1, "dash": "dot", "color": COLOURS[-1]}
        layout["shapes"].append({"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line})
        side = "right" if x > middle else "left"  # of the panel, which the text stays in
        where = {"x": x, "y": 0, "yref": "paper", "xanchor": side, "yanchor": "bottom", "showarrow": False}
        layout["annotations"].append(where | {"text": _escaped(name), "font": {"size": 11}})
    known = [curve.x[np.isfinite(curve.x)] for curve in shown]
    wide = max((float(np.ptp(x)) for x in known if x.size), default=0.0)
    if chart.x in WHOLE and wide <= 12:
        layout["xaxis"]["dtick"] = 1
    if chart.ticks:
        at, names = zip(*chart.ticks, strict=True)
        layout["xaxis"] |= {"tickvals": list(at), "ticktext": [_escaped(name) for name in names]}
    if chart.positive:
        ticks = _log_ticks(shown)
        layout["yaxis"] |= ticks if chart.log else {}
        of_log = {"yaxis.type": "log", **{f"yaxis.{name}": value for name, value in ticks.items()}}
        of_linear = {"yaxis.type": "linear", "yaxis.tickmode": "auto", "yaxis.tickformat": ""}
        buttons = [
            {"label": label, "method": "relayout", "args": [arguments]}
            for label, arguments in (("linear", of_linear), ("log", of_log))
        ]
        layout["updatemenus"] = [
            {"type": "buttons", "direction": "left", "buttons": buttons, "active": int(chart.log), "x": 0, "y": 1.02,
             "xanchor": "left", "yanchor": "bottom", "pad": {"t": 0, "b": 2}, "font": {"size": 11}}
        ]  # fmt: skip
    traces = [_traces(curve, chart, points) for curve in shown]
    out: dict[str, Any] = {"data": [trace for part in traces for trace in part], "layout": layout}
    if len(frames) > 1:
        steps = [
            [trace for curve in _step(chart, frame) for trace in _traces(curve, chart, points)] for frame in frames
        ]
        _slide(out, chart.slider, frames, steps)
    return out


def _log_ticks(curves: Sequence[Curve]) -> dict[str, Any]:
    """1, 2, 5, 10 on an axis of one to three decades; else what plotly chooses."""
    values = np.concatenate([curve.y[np.isfinite(curve.y) & (curve.y > 0)] for curve in curves])
    low, high = (float(f(np.log10(values))) if values.size else 0.0 for f in (np.min, np.max))
    if 0.8 < high - low < 3 and low > -4 and high < 5:
        return {"tickmode": "linear", "dtick": "D2", "tickformat": "~g"}
    return {"tickmode": "auto"}


def _step(chart: Chart, frame: str | None) -> list[Curve]:
    """The curves of a step of the slider, as many and in one order at every step; those of frames have no bands."""
    there = {curve.label: replace(curve, low=None, high=None) for curve in chart.curves if curve.frame == frame}
    empty = np.zeros(0)
    moving = {curve.label: curve for curve in chart.curves if curve.frame is not None}
    slots = [there.get(label) or replace(curve, x=empty, y=empty) for label, curve in moving.items()]
    return [*slots, *(curve for curve in chart.curves if curve.frame is None)]


def map_figure(item: HeatMap, side: int | None = None) -> dict[str, Any]:
    """A heat map as a figure of plotly; of a large matrix every n-th row and column, about `side` of them."""
    every = max(1, math.ceil(max(next(iter(item.frames.values())).shape) / (side or math.inf) - 0.2))
    (x0, y0), (dx, dy) = item.origin, item.step
    digits = max(0, math.ceil(2 - math.log10(item.limits[1] - item.limits[0] or 1.0)))  # a hundredth of the range
    layout = _layout(item)
    if item.down:
        layout["yaxis"] |= {"autorange": "reversed"}
    layout["height"] = 400

    def trace(matrix: FloatArray) -> dict[str, Any]:
        shown = matrix[::every, ::every]
        out: dict[str, Any] = {
            "type": "heatmap", "z": [[round(v, digits) if v == v else None for v in row] for row in shown.tolist()],
            "zmin": item.limits[0], "zmax": item.limits[1], "colorscale": item.colours,
            "x0": x0, "dx": dx * every, "y0": y0, "dy": dy * every,
            "colorbar": {"title": {"text": _escaped(item.value), "side": "right"}, "thickness": 12},
            "hoverongaps": False,
        }  # fmt: skip
        if item.rows:
            out |= {"y": [_escaped(name) for name in item.rows], "x": [_escaped(name) for name in item.columns]}
        if item.texts is not None:
            out |= {"text": [[_escaped(text) for text in row] for row in item.texts], "texttemplate": "%{text}"}
        return out

    frames = list(item.frames)
    out = {"data": [trace(item.frames[frames[-1]])], "layout": layout}
    if len(frames) > 1:
        _slide(out, item.slider, frames, [[trace(item.frames[frame])] for frame in frames])
    return out


def _layout(block: Chart | HeatMap) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False, "gridcolor": "#dde2e8", "showgrid": isinstance(block, Chart)}
    clear = "rgba(0,0,0,0)"
    return {
        "height": 340, "margin": {"l": 50, "r": 10, "t": 30, "b": 40}, "paper_bgcolor": clear, "plot_bgcolor": clear,
        "font": {"size": 12}, "hovermode": "x unified" if isinstance(block, Chart) else "closest",
        "modebar": {"bgcolor": clear, "color": "#777777", "activecolor": "#3a8fc9"},
        "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#16202c", "size": 12}},
        "xaxis": {**axis, "title": {"text": _escaped(block.x)}},
        "yaxis": axis if isinstance(block, Chart) else {**axis, "title": {"text": _escaped(block.y)}},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    }  # fmt: skip


def _slide(figure: dict[str, Any], name: str, frames: Sequence[str], steps: Sequence[list[dict[str, Any]]]) -> None:
    """A slider that puts the traces of a step in place of those of the last one."""
    figure["frames"] = [
        {"name": frame, "data": [{key: trace[key] for key in ("x", "y", "z") if key in trace} for trace in traces]}
        for frame, traces in zip(frames, steps, strict=True)
    ]
    now = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    figure["layout"]["sliders"] = [
        {
            "active": len(frames) - 1, "currentvalue": {"prefix": f"{name} "}, "pad": {"t": 30}, "y": 0,
            "steps": [{"label": frame, "method": "animate", "args": [[frame], now]} for frame in frames],
        }
    ]  # fmt: skip
    figure["layout"]["height"] += 90


def _traces(curve: Curve, chart: Chart, points: int | None) -> list[dict[str, Any]]:
    """A curve, after its band where it has one; clicking its name in the legend takes both away."""
    n, every = len(curve.x), max(1, math.ceil(len(curve.x) / (points or math.inf)))
    keep = np.array(sorted({*range((n - 1) % every, n, every), *np.flatnonzero(np.isnan(curve.x)).tolist()}), np.int64)
    x, colour, name = curve.x[keep], COLOURS[curve.colour % len(COLOURS)], _escaped(curve.label)
    common: dict[str, Any] = {"type": "scatter", "name": name, "legendgroup": name, **_places(x)}
    dotted = curve.line == "points" or chart.bars or np.isfinite(curve.y).sum() < 3
    main = common | {
        "y": _short(curve.y[keep]), "mode": "markers" if curve.line == "points" else "lines",
        "line": {"color": colour, "width": 2, "dash": _DASHES.get(curve.line, "solid")}, "connectgaps": False,
    }  # fmt: skip
    if dotted:
        main |= {"mode": "markers" if curve.line == "points" else "lines+markers"}
        main["marker"] = {"color": colour, "size": 7, "symbol": "circle-open"}
    if curve.low is None or curve.high is None:
        return [main]
    low, y, high = curve.low[keep], curve.y[keep], curve.high[keep]
    if dotted:
        main["error_y"] = {
            "type": "data", "symmetric": False, "array": _short(high - y, 3), "arrayminus": _short(y - low, 3),
            "thickness": 1, "width": 3, "color": colour,
        }  # fmt: skip
        return [main]
    edge = common | {"mode": "lines", "line": {"width": 0, "color": colour}, "hoverinfo": "skip"}
    edge |= {"showlegend": False}
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    band = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.16)"}
    return [edge | {"y": _short(low, 4)}, edge | {"y": _short(high, 4)} | band, main]


def _places(x: FloatArray) -> dict[str, Any]:
    """Positions, in two numbers where they are evenly spread."""
    if len(x) > 1 and np.allclose(np.diff(x), x[1] - x[0], rtol=1e-9):
        return {"x0": float(x[0]), "dx": float(x[1] - x[0])}
    return {"x": _short(x)}


def _short(values: FloatArray, digits: int = 6) -> list[float | None]:
    """Numbers to so many digits; None for what is not finite."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
