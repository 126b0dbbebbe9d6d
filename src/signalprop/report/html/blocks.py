"""What a section of the report is made of: charts, heat maps, tables and texts, as JSON-ready dictionaries.

A section has places (positions along the horizontal axis, with a name each), groups (schemes, models or runs: one
colour each) and sources (predicted, measured, ...: one kind of line each); a series names one of each by its index.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from signalprop.network.moments import FloatArray

Block = dict[str, Any]
Cell = str | Block  # of a table: a text, or a `link`
Scale = Literal["linear", "log", "signed"]
COLOURS = 7  # of groups, as in assets/charts.js
Style = Literal["line", "dashed", "dotted", "mixed", "points"]

Severity = Literal["fault", "warning", "note", "good"]

_DIGITS = 8
# Beyond these a browser's arithmetic on a logarithmic axis ends; such a series carries exponents of ten instead.
_SMALLEST, _LARGEST = 1e-290, 1e290
_DECADE = math.log(10.0)
# Entries of all heat maps of a section together: 2 bytes each, 2.7 in the file.
MAX_ENTRIES = 450_000
MAX_SIDE, MIN_SIDE = 128, 24
_LEVELS = 32_767


def place(x: ArrayLike, names: Sequence[str]) -> Block:
    """Positions along the horizontal axis and their names."""
    return {"x": rounded(x), "names": list(names)}


def series(
    group: int,
    source: int,
    at: int,
    y: ArrayLike,
    *,
    error: ArrayLike | None = None,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
) -> Block:
    """One curve. A value that is not finite is a gap.

    Args:
        group, source, at: indices into the section's groups, sources and places.
        error: standard errors, in units of y; low, high: a range instead.
    """
    out: Block = {"group": group, "source": source, "place": at, "y": rounded(y)}
    for name, values in (("error", error), ("low", low), ("high", high)):
        if values is not None:
            out[name] = rounded(values)
    return out


def log_series(
    group: int, source: int, at: int, logs: ArrayLike, *, relative: ArrayLike | None = None, **ends: ArrayLike
) -> Block:
    """One curve of a positive quantity from its natural logarithm, with relative standard errors, or `low` and `high`.

    Where the quantity leaves the range of numbers, `log10` says what it is; -inf is 0, NaN a gap.
    """
    logs = np.asarray(logs, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.exp(logs)
        out = series(group, source, at, y, error=None if relative is None else np.asarray(relative) * y, **ends)
    extreme = np.isfinite(logs) & ~((y > _SMALLEST) & (y < _LARGEST))
    if extreme.any():
        out["log10"] = rounded(logs / _DECADE)
        out["y"] = [None if far else value for far, value in zip(extreme, out["y"], strict=True)]
        if relative is not None:
            out["log10_error"] = rounded(np.asarray(relative) / _DECADE)
    return out


def chart(
    key: str,
    title: str,
    curves: Sequence[Block],
    *,
    x: str,
    y: str,
    scale: Scale = "linear",
    positive: bool = False,
    zero: bool = True,
    limits: tuple[float, float] | None = None,
    caption: str = "",
    marks: Sequence[Block] = (),
    ticks: Sequence[tuple[float, str]] = (),
    bars: bool = False,
) -> Block:
    """A chart of curves.

    Args:
        x, y: what the axes show. scale: how the vertical axis starts. positive: it can be logarithmic. zero: a linear
            axis begins at 0 where all is positive, so that noise about a constant looks like a constant.
        limits: of the vertical axis while it is linear. marks: vertical lines, `{"x": 12, "label": "decoder"}`.
        ticks: positions and their labels where the horizontal axis is not simply numbers. bars: errors are drawn as
            bars at points that stand for themselves, not as a band.
    """
    scales = ["linear"] + ["log"] * (positive or scale == "log") + ["signed"] * (scale == "signed")
    return {
        "type": "chart", "id": key, "title": title, "x": x, "y": y, "scale": scale, "scales": scales,
        "zero": zero, "limits": limits, "caption": caption, "marks": list(marks),
        "ticks": [list(tick) for tick in ticks], "bars": bars, "series": list(curves),
    }  # fmt: skip


def heat_map(
    key: str,
    title: str,
    frames: Mapping[str, FloatArray],
    *,
    x: str,
    y: str,
    limits: tuple[float, float],
    origin: tuple[float, float] = (0, 0),
    step: tuple[float, float] = (1, 1),
    caption: str = "",
    value: str = "",
    down: bool = False,
) -> Block:
    """Matrices by the label of their frame (a step of the section's slider), all of one shape; `down`: row 0 on top.

    Entries are kept to one part in 65,534 of the limits.
    """
    rows, columns = next(iter(frames.values())).shape
    return {
        "type": "heatmap", "id": key, "title": title, "x": x, "y": y, "limits": list(limits), "value": value,
        "rows": rows, "columns": columns, "down": down, "origin": list(origin), "step": list(step), "caption": caption,
        "frames": {label: _packed(matrix, limits) for label, matrix in frames.items()},
    }  # fmt: skip


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, left: int = 1, search: bool = False,
    caption: str = "",
) -> Block:  # fmt: skip
    """A table of texts and links; the first `left` columns are words, the others numbers."""
    return {
        "type": "table", "title": title, "header": list(header), "rows": [list(row) for row in rows], "left": left,
        "search": search, "caption": caption,
    }  # fmt: skip


def link(label: str, target: str) -> Block:
    """A cell that leads to a file; `target` is a quoted relative path."""
    return {"text": label, "href": target}


def text(title: str, body: str) -> Block:
    """A folded text, shown as it is."""
    return {"type": "text", "title": title, "body": body}


def section(
    key: str,
    title: str,
    blocks: Sequence[Block],
    *,
    lead: str = "",
    groups: Sequence[str] = (),
    sources: Sequence[tuple[str, Style]] = (),
    places: Sequence[Block] = (),
    slider: Block | None = None,
) -> Block:
    """A section. slider: `{"label": "depth", "values": ["0", "1"], "start": 0}`, which heat maps and frames follow."""
    return {
        "id": key, "title": title, "lead": lead, "groups": list(groups), "places": list(places), "slider": slider,
        "sources": [{"name": name, "style": style} for name, style in sources], "blocks": list(blocks),
    }  # fmt: skip


def card(
    severity: Severity, subject: str, title: str, texts: Sequence[str], cure: str = "", *, first: bool = False
) -> Block:
    """A finding on top of the page: of what, what, in sentences, and what would help. first: before all others."""
    return {
        "severity": severity, "subject": subject, "title": title, "texts": list(texts), "cure": cure, "first": first,
    }  # fmt: skip


def rounded(values: ArrayLike) -> list[float | int | None]:
    """Numbers to eight digits; None for what is not finite."""
    return [_short(value) for value in np.asarray(values, np.float64).tolist()]


def numbers(values: Sequence[float | None]) -> FloatArray:
    """None as NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def every(n: int, frames: int) -> int:
    """Stride that brings matrices of n rows, so many of them, to a size that a page can hold."""
    side = int(math.sqrt(MAX_ENTRIES / max(frames, 1)))
    return -(-n // max(MIN_SIDE, min(MAX_SIDE, side)))


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{_DIGITS}g}")
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def unpacked(block: Block, frame: str) -> FloatArray:
    """The matrix of a frame of a heat map, (rows, columns), as the page shows it."""
    levels = np.frombuffer(base64.b64decode(block["frames"][frame]), "<i2").reshape(block["rows"], block["columns"])
    low, high = block["limits"]
    return np.where(levels < -_LEVELS, np.nan, low + (levels + float(_LEVELS)) / (2 * _LEVELS) * (high - low))


def _packed(matrix: FloatArray, limits: tuple[float, float]) -> str:
    """16-bit levels between the limits, little-endian, base64; -32,768 for what is not finite."""
    low, high = limits
    with np.errstate(invalid="ignore"):
        levels = np.rint((np.clip(matrix, low, high) - low) / ((high - low) or 1.0) * 2 * _LEVELS - _LEVELS)
    return base64.b64encode(np.where(np.isfinite(levels), levels, -_LEVELS - 1).astype("<i2").tobytes()).decode()
