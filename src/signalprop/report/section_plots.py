"""Sections of the report as one matplotlib picture: its charts and heat maps, with the page's colours and styles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.errors import require
from signalprop.network.moments import FloatArray
from signalprop.report.html.blocks import Block, numbers, unpacked
from signalprop.results.text import spread

# Okabe and Ito's palette: told apart by every common kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MAX_POINTS = 64  # of a curve of points; more would merge into a band
BAND = 2  # standard errors, as on the page
_STYLES: dict[str, Any] = {"line": "-", "dashed": "--", "dotted": ":", "mixed": "-.", "points": "o"}
_ROUNDS = ("line", "dashed", "dotted")  # of groups with the same colour
_LIGHTEST = 0.6  # share of its colour that the last group of those with one colour keeps; the rest is white
_LINEAR = 0.05  # up to here a signed axis is linear
_WHOLE = ("checkpoint", "depth", "first layer", "layer", "step", "token")  # what is counted


def sections_figure(
    sections: Sequence[Block], title: str, *, columns: int = 4, size: tuple[float, float] = (3.5, 3.2)
) -> Any:
    """A matplotlib Figure: the charts and maps of every section below each other, each with its legend.

    Args:
        columns: panels beside each other. size: of a panel, in inches.
    """
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    width, height = size
    drawn = [[block for block in section["blocks"] if block["type"] in _DRAW] for section in sections]
    rows = [-(-len(blocks) // columns) for blocks in drawn]
    figure = Figure(figsize=(width * columns, height * sum(rows) + 0.6 * len(rows) + 0.4), layout="constrained")
    figure.suptitle(title)
    parts = figure.subfigures(len(sections), 1, squeeze=False, height_ratios=[height * n + 0.6 for n in rows])[:, 0]
    for part, section, blocks, lines in zip(parts, sections, drawn, rows, strict=True):
        for place, block in enumerate(blocks):
            axis = part.add_subplot(lines, min(columns, len(blocks)), place + 1)
            axis.grid(alpha=0.3, linewidth=0.6)
            axis.set_title(block["title"], fontsize=9, wrap=True)
            axis.set_xlabel(block["x"], fontsize=8)
            axis.tick_params(labelsize=8)
            axis.xaxis.get_major_locator().set_params(integer=block["x"] in _WHOLE)
            _DRAW[block["type"]](axis, block, section)
        _legend(part, section)
    return figure


def _chart(axis: Any, chart: Block, section: Block) -> None:
    log = chart["scale"] == "log"
    exponents = log and any("log10" in series for series in chart["series"])  # beyond the range of numbers
    axis.set_ylabel(chart["y"] + ", power of ten" * exponents, fontsize=8)
    drawn = []
    for series in chart["series"]:
        x, y = numbers(section["places"][series["place"]]["x"]), numbers(series["y"])
        style = _style(section, series["group"], series["source"])
        if exponents:
            y = numbers(series["log10"]) if "log10" in series else np.log10(y)
        low, high = _edges(series, y, log=log) if not exponents else (None, None)
        if chart["bars"] or style["fmt"] == _STYLES["points"]:
            _points(axis, x, y, low, high, style)
        else:
            few = {"marker": "o", "markersize": 4} if np.isfinite(y).sum() < 3 else {}
            axis.plot(x, y, style["fmt"], color=style["color"], linewidth=1.6, **few)
            if low is not None:
                axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        drawn += [y] if high is None else [y, high]
    values = np.concatenate(drawn)
    for mark in chart["marks"]:
        axis.axvline(mark["x"], color="#555555", linestyle=":", linewidth=0.8)
        side = "right" if mark["x"] > np.mean(axis.get_xlim()) else "left"  # of the panel, which the text stays in
        axis.annotate(mark["label"], (mark["x"], 0.02), xycoords=("data", "axes fraction"), ha=side, fontsize=8,
                      color="#555555")  # fmt: skip
    if chart["ticks"]:
        at, names = zip(*chart["ticks"], strict=True)
        axis.set_xticks(at, names, rotation=90 if len(names) > 4 else 0)
    positive = values[values > 0]
    if exponents:
        return
    if log and positive.size:
        logarithmic(axis, float(np.log10(positive.max() / positive.min())))
    elif chart["scale"] == "signed":
        axis.axhline(0, color="grey", linewidth=0.6)
        if np.nanmax(np.abs(values)) > 10 * _LINEAR:
            axis.set_yscale("symlog", linthresh=_LINEAR)
            if np.nanmin(values) >= 0:
                axis.set_ylim(bottom=-_LINEAR / 2)
    elif chart["limits"]:
        axis.set_ylim(*chart["limits"])
    elif positive.size and not (values < 0).any():
        axis.set_ylim(0, 1.05 * positive.max())


def _edges(series: Block, y: FloatArray, *, log: bool) -> tuple[FloatArray, FloatArray] | tuple[None, None]:
    """Lower and upper edge of a series' band; on a logarithmic axis one that reaches 0 goes as far down as up."""
    if "error" in series:
        size = BAND * np.nan_to_num(numbers(series["error"]))
        low, high = y - size, y + size
    elif "low" in series:
        low, high = numbers(series["low"]), numbers(series["high"])
    else:
        return None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(low, y * y / high) if log else low, high


def _points(axis: Any, x: FloatArray, y: FloatArray, low: Any, high: Any, style: dict[str, Any]) -> None:
    """Hollow points, with bars where there are edges; on a line, where the style has one."""
    keep = spread(range(len(x)), MAX_POINTS)
    bars = None if low is None else np.maximum(np.stack([y - low, high - y])[:, keep], 0.0)
    line = "none" if style["fmt"] == _STYLES["points"] else style["fmt"]
    axis.errorbar(x[keep], y[keep], yerr=bars, color=style["color"], linestyle=line, marker="o", markersize=4,
                  markerfacecolor="none", elinewidth=0.8, capsize=2)  # fmt: skip


def _cells(axis: Any, block: Block, _: Block) -> None:
    """Rows and columns of coloured texts; the name of a row has the colour of its group."""
    low, high = block["limits"]
    axis.grid(visible=False)
    image = axis.imshow(block["shade"], aspect="auto", cmap=block["colours"], vmin=low, vmax=high)
    axis.set_xticks(range(len(block["columns"])), block["columns"])
    axis.set_yticks(range(len(block["rows"])), block["rows"])
    for k, label in enumerate(axis.get_yticklabels()):
        label.set_color(COLOURS[k % len(COLOURS)])
    for (row, column), shade in np.ndenumerate(block["shade"]):
        red, green, blue, _alpha = image.cmap(image.norm(shade))
        ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        axis.text(column, row, block["texts"][row][column], ha="center", va="center", fontsize=9, color=ink)


def logarithmic(panel: Any, decades: float) -> None:
    """A logarithmic axis with few, plain labels: 1, 2, 5, 10 where it is short, powers of ten where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log", nonpositive="clip")
    panel.yaxis.set_minor_formatter(NullFormatter())
    if decades < 3:
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _map(axis: Any, block: Block, _: Block) -> None:
    """The last frame of a heat map."""
    axis.set_ylabel(block["y"], fontsize=8)
    matrix = unpacked(block, list(block["frames"])[-1])
    (x, y), (right, up) = block["origin"], block["step"]
    ends = [x - right / 2, x + right * (block["columns"] - 0.5), y - up / 2, y + up * (block["rows"] - 0.5)]
    low, high = block["limits"]
    shown = axis.imshow(matrix, origin="lower", aspect="auto", cmap="viridis", extent=ends, vmin=low, vmax=high)
    if not np.isnan(matrix[-1, -1]):
        axis.figure.colorbar(shown, ax=axis, shrink=0.8, label=block["value"])
        return
    # in the empty corner: beside the map, all panels of its column would make room for it
    scale = axis.inset_axes((0.9, 0.3, 0.035, 0.6))
    axis.figure.colorbar(shown, cax=scale)
    scale.yaxis.set_ticks_position("left")
    scale.tick_params(labelsize=7)
    scale.set_title(block["value"], fontsize=7)


_DRAW = {"chart": _chart, "heatmap": _map, "cells": _cells}


def _style(section: Block, group: int, source: int) -> dict[str, Any]:
    """A colour for every group, for every source where there is one group.

    They are taken again by the groups after the last colour; these are lighter, and of one source have other lines.
    """
    from matplotlib.colors import to_hex, to_rgb

    again, rounds = group // len(COLOURS), -(-len(section["groups"]) // len(COLOURS))
    place = source if len(section["groups"]) == 1 else group
    white = (1 - _LIGHTEST) * again / max(rounds - 1, 1)
    red, green, blue = (part + white * (1 - part) for part in to_rgb(COLOURS[place % len(COLOURS)]))
    line = section["sources"][source]["style"] if len(section["sources"]) > 1 else _ROUNDS[again % len(_ROUNDS)]
    return {"color": to_hex((red, green, blue)), "fmt": _STYLES[line]}


def _legend(part: Any, section: Block) -> None:
    """Which colour is which group, and which line which source, where there are several."""
    from matplotlib.lines import Line2D

    groups, sources = section["groups"], section["sources"]
    handles = []
    for k, name in enumerate(groups) if len(groups) > 1 else ():
        style = _style(section, k, 0)
        line: Any = "-" if style["fmt"] == _STYLES["points"] else style["fmt"]
        handles += [Line2D([], [], color=style["color"], linestyle=line, label=name)] if name else []
    if len(sources) > 1:
        handles += [_handle(item["name"], section, k) for k, item in enumerate(sources)]
    if handles:
        part.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8)


def _handle(name: str, section: Block, source: int) -> Any:
    from matplotlib.lines import Line2D

    style = _style(section, 0, source)
    points = style["fmt"] == _STYLES["points"]
    colour = style["color"] if len(section["groups"]) == 1 else "grey"
    how: dict[str, Any] = {"marker": "o", "linestyle": "none"} if points else {"linestyle": style["fmt"]}
    return Line2D([], [], color=colour, label=name, markerfacecolor="none", **how)
