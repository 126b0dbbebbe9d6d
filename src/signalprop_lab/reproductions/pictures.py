"""The picture of a reproduction: panels of curves, the paper's beside ours, as a small PNG. Needs matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import require
from signalprop.files.storage import write_bytes
from signalprop.report.section_plots import COLOURS
from signalprop.results.text import spread
from signalprop_lab.reproductions.result import Curve, Panel, Reproduction

LARGEST = 60_000  # bytes of a picture of the gallery
_POINTS, _ALL = 33, 48  # measured points of a curve that has more than the second number; all would merge into a band
_TICKS = 8  # values of x that get a tick each, on a logarithmic axis
_COLOURS = (160, 64, 32, 16)  # of the palette: as many as the size allows


def picture(found: Reproduction) -> Any:
    """A matplotlib Figure of what was found."""
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    from signalprop.errors import InputError

    if found.findings is None or not found.findings.panels:
        raise InputError(f"{found.id} has no picture: {found.reason}")
    if found.findings.figure is not None:
        return found.findings.figure()
    panels = found.findings.panels
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    canvas = Figure(figsize=(7.2 if columns == 1 else 11.0, 4.1 * rows), dpi=90, layout="constrained")
    for axes, panel in zip(canvas.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        draw_panel(axes, panel)
    return canvas


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw one panel on matplotlib axes."""
    if panel.log_x:
        axes.set_xscale("log")
        values = np.unique(np.concatenate([curve.x for curve in panel.curves]))
        if len(values) <= _TICKS:
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_xticks([], minor=True)
    for curve in panel.curves:
        _draw(axes, curve)
    if panel.log_y:
        axes.set_yscale("log")
        _log_limits(axes, panel)
    elif panel.y_limits is None and all(curve.y.min() >= 0 for curve in panel.curves):
        axes.set_ylim(bottom=0)
    if panel.y_limits is not None:
        highest = max(float(np.nanmax(curve.y)) for curve in panel.curves)
        axes.set_ylim(panel.y_limits[0], max(panel.y_limits[1], 1.05 * highest))
    axes.set_title(panel.title, fontsize=10.5)
    axes.set_xlabel(panel.x_label, fontsize=9.5)
    axes.set_ylabel(panel.y_label, fontsize=9.5)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.legend(fontsize=8.5, framealpha=0.85)


def _draw(axes: Any, curve: Curve) -> None:
    colour = COLOURS[curve.colour % len(COLOURS)]
    if curve.kind == "measured":
        keep = spread(range(len(curve.x)), _POINTS if len(curve.x) > _ALL else _ALL)
        error = None if curve.error is None else curve.error[keep]
        axes.errorbar(
            curve.x[keep], curve.y[keep], yerr=error, color=colour, fmt="o", markersize=4.5, markerfacecolor="none",
            elinewidth=1, capsize=2, label=curve.label, zorder=2,
        )  # fmt: skip
        return
    style = {"theory": "-", "paper": "--"}[curve.kind]
    # a guide that nobody measured stays behind the curves
    order, width = (3, 1.8) if curve.kind == "theory" else (1, 1.6)
    marker = "s" if curve.kind == "paper" and len(curve.x) <= _TICKS and axes.get_xscale() == "log" else None
    axes.plot(
        curve.x,
        curve.y,
        style,
        color=colour,
        linewidth=width,
        marker=marker,
        markersize=5,
        label=curve.label,
        zorder=order,
    )


def _log_limits(axes: Any, panel: Panel) -> None:
    """Limits by the curves, not by error bars that reach down to 0."""
    values = np.concatenate([curve.y for curve in panel.curves])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size:
        axes.set_ylim(values.min() / 2, values.max() * 2)


def png(figure: Any) -> bytes:
    """A figure as a PNG of few colours, of at most 60 kB where so few do."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    whole = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
    data = b""
    for colours in _COLOURS:
        small = io.BytesIO()
        whole.quantize(colours, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        data = small.getvalue()
        if len(data) <= LARGEST:
            break
    return data


def save(directory: Path, found: Reproduction) -> list[Path]:
    """Write the JSON of a reproduction, and its picture where it has one; the paths that were written."""
    from signalprop.files.storage import write_json

    written = [directory / f"{found.slug}.json"]
    write_json(written[0], found.to_json())
    if found.findings is not None and found.findings.panels:
        written.append(directory / f"{found.slug}.png")
        write_bytes(written[1], png(picture(found)))
    return written
