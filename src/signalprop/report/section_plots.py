"""Sections of the report as one matplotlib picture: its charts and heat maps, with the page's colours and styles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.errors import require
from signalprop.report.html.blocks import Block, numbers, unpacked
from signalprop.report.plots import COLOURS, logarithmic

_COLUMNS = 4
_STYLES: dict[str, Any] = {"line": "-", "dashed": "--", "dotted": ":", "mixed": "-.", "points": "o"}
_ROUNDS = ("line", "dashed", "dotted")  # of groups with the same colour
_LINEAR = 0.05  # up to here a signed axis is linear


def sections_figure(sections: Sequence[Block], title: str) -> Any:
    """A matplotlib Figure: the charts and heat maps of every section below each other, each with its legend."""
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    drawn = [[block for block in section["blocks"] if block["type"] in _DRAW] for section in sections]
    rows = [-(-len(blocks) // _COLUMNS) for blocks in drawn]
    figure = Figure(figsize=(3.5 * _COLUMNS, 3.2 * sum(rows) + 0.6 * len(rows) + 0.4), layout="constrained")
    figure.suptitle(title)
    parts = figure.subfigures(len(sections), 1, squeeze=False, height_ratios=[3.2 * n + 0.6 for n in rows])[:, 0]
    for part, section, blocks, lines in zip(parts, sections, drawn, rows, strict=True):
        for place, block in enumerate(blocks):
            axis = part.add_subplot(lines, min(_COLUMNS, len(blocks)), place + 1)
            axis.set_title(block["title"], fontsize=9, wrap=True)
            axis.set_xlabel(block["x"], fontsize=8)
            axis.tick_params(labelsize=8)
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
        axis.errorbar(x, y, yerr=numbers(series["error"]) if "error" in series and not exponents else None, **style)
        if "low" in series and not exponents:
            low, high = (numbers(series[side]) for side in ("low", "high"))
            low = np.maximum(low, y * y / high) if log else low  # one that reaches 0 goes as far down as up
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        drawn.append(y)
    values = np.concatenate(drawn)
    for mark in chart["marks"]:
        axis.axvline(mark["x"], color="#555555", linestyle=":", linewidth=0.8)
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
    elif not (values < 0).any():
        axis.set_ylim(0, 1.05 * np.nanmax(values))


def _map(axis: Any, block: Block, _: Block) -> None:
    """The last frame of a heat map."""
    axis.set_ylabel(block["y"], fontsize=8)
    matrix = unpacked(block, list(block["frames"])[-1])
    (x, y), (right, up) = block["origin"], block["step"]
    ends = [x - right / 2, x + right * (block["columns"] - 0.5), y - up / 2, y + up * (block["rows"] - 0.5)]
    low, high = block["limits"]
    shown = axis.imshow(matrix, origin="lower", aspect="auto", cmap="viridis", extent=ends, vmin=low, vmax=high)
    axis.figure.colorbar(shown, ax=axis, shrink=0.8, label=block["value"])


_DRAW = {"chart": _chart, "heatmap": _map}


def _style(section: Block, group: int, source: int) -> dict[str, Any]:
    rounds = _ROUNDS[group // len(COLOURS) % len(_ROUNDS)]
    line = section["sources"][source]["style"] if len(section["sources"]) > 1 else rounds
    return {"color": COLOURS[group % len(COLOURS)], "fmt": _STYLES[line], "linewidth": 1.3, "elinewidth": 0.8}


def _legend(part: Any, section: Block) -> None:
    """Which colour is which group, and which line which source, where there are several."""
    from matplotlib.lines import Line2D

    groups, sources = section["groups"], section["sources"]
    handles = [
        Line2D([], [], color=style["color"], linestyle=style["fmt"], label=name)
        for name, style in ((name, _style(section, k, 0)) for k, name in enumerate(groups))
    ] if len(groups) > 1 else []  # fmt: skip
    if len(sources) > 1:
        handles += [Line2D([], [], color="grey", linestyle=_STYLES[s["style"]], label=s["name"]) for s in sources]
    if handles:
        part.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8)
