"""Charts and heat maps of a report as figures of plotly, in plain dictionaries."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from signalprop.errors import printable
from signalprop.network.moments import FloatArray
from signalprop.report.sections import COLOURS, WHOLE, Chart, Curve, HeatMap

# Buttons, which Tab reaches; no other, as one of plotly's would send the chart to a server.
_BUTTONS = ["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]
CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": True, "modeBarButtons": [_BUTTONS]}
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "mixed": "dashdot"}


def escaped(text: object) -> str:
    """A text that is shown as it is, on a page and in a drawing."""
    return html.escape(printable(str(text)))


def chart_figure(chart: Chart, points: int | None = None) -> dict[str, Any]:
    """A chart as a figure of plotly; of long curves every n-th point, at most so many, with the last."""
    frames = chart.frames
    shown = _step(chart, frames[-1] if frames else None)
    log, layout = chart.begins_logarithmic, _layout(chart)
    layout["yaxis"] |= {"type": "log" if log else "linear", "exponentformat": "power"}
    layout["yaxis"] |= {"rangemode": "tozero"} if chart.from_zero and not chart.limits else {}
    if chart.limits and not log:
        layout["yaxis"] |= {"range": list(chart.limits)}
    layout["showlegend"] = len({curve.label for curve in shown}) > 1
    layout["shapes"], layout["annotations"] = [], []
    middle = np.nanmean(np.concatenate([curve.x for curve in shown])) if chart.marks else 0.0
    for x, name in chart.marks:
        line = {"width": 1, "dash": "dot", "color": COLOURS[-1]}
        layout["shapes"].append({"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line})
        side = "right" if x > middle else "left"  # of the panel, which the text stays in
        where = {"x": x, "y": 0, "yref": "paper", "xanchor": side, "yanchor": "bottom", "showarrow": False}
        layout["annotations"].append(where | {"text": escaped(name), "font": {"size": 11}})
    known = [curve.x[np.isfinite(curve.x)] for curve in shown]
    wide = max((float(np.ptp(x)) for x in known if x.size), default=0.0)
    if chart.x in WHOLE and wide <= 12:
        layout["xaxis"]["dtick"] = 1
    if chart.ticks:
        at, names = zip(*chart.ticks, strict=True)
        layout["xaxis"] |= {"tickvals": list(at), "ticktext": [escaped(name) for name in names]}
    if chart.positive:
        ticks = _log_ticks(shown)
        layout["yaxis"] |= ticks if log else {}
        of_log = {"yaxis.type": "log", **{f"yaxis.{name}": value for name, value in ticks.items()}}
        of_linear = {"yaxis.type": "linear", "yaxis.tickmode": "auto", "yaxis.tickformat": ""}
        buttons = [
            {"label": label, "method": "relayout", "args": [arguments]}
            for label, arguments in (("linear", of_linear), ("log", of_log))
        ]
        layout["updatemenus"] = [
            {"type": "buttons", "direction": "left", "buttons": buttons, "active": int(log), "x": 0, "y": 1.02,
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
    x0, y0 = item.origin
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
            "x0": x0, "dx": every, "y0": y0, "dy": every,
            "colorbar": {"title": {"text": escaped(item.value), "side": "right"}, "thickness": 12},
            "hoverongaps": False,
        }  # fmt: skip
        if item.rows:
            out |= {"y": [escaped(name) for name in item.rows], "x": [escaped(name) for name in item.columns]}
        if item.texts is not None:
            out |= {"text": [[escaped(text) for text in row] for row in item.texts], "texttemplate": "%{text}"}
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
        "xaxis": {**axis, "title": {"text": escaped(block.x)}},
        "yaxis": axis if isinstance(block, Chart) else {**axis, "title": {"text": escaped(block.y)}},
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
    x, colour, name = curve.x[keep], COLOURS[curve.colour % len(COLOURS)], escaped(curve.label)
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
