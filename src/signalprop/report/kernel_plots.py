"""Pictures of token kernels: heat maps over depth, and the numbers behind them. Pure functions of traces.

Needs the `report` extra (matplotlib), imported inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from signalprop.errors import InputError, require
from signalprop.kernels.trace import Trace
from signalprop.network.moments import FloatArray
from signalprop.report.html.kernels import Kernels, kernel_section, of_trace
from signalprop.report.section_plots import sections_figure
from signalprop.results.text import spread

_PANEL = 1.55  # inches
_MAP = "viridis"
_LOWEST = 1e-16  # of 1 - cosine on a logarithmic axis: below is rounding


def heat_maps(traces: Mapping[str, Trace], *, at: Sequence[int] | None = None, title: str | None = None) -> Any:
    """A matplotlib Figure of normalised kernels: a row per configuration, a column per depth, one colour scale up to 1.

    Over each panel stands its mean cosine off the diagonal. Query positions run down, key positions to the right.

    Args:
        traces: by the name that their row gets. at: depths; default: all that every trace kept, at most six of them.
    """
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    depths = _common(traces, at)
    cosines = {name: [item.cosines(depth) for depth in depths] for name, item in traces.items()}
    low = min(0.0, math.floor(10 * min(float(c.min()) for row in cosines.values() for c in row)) / 10)
    rows, columns = len(traces), len(depths)
    width, height = 1.5 + _PANEL * columns + 0.7, (_PANEL + 0.25) * rows + (0.55 if title else 0.3)
    canvas = Figure(figsize=(max(width, 4.5), max(height, 2.4)), dpi=90, layout="constrained")
    if title:
        canvas.suptitle(title, fontsize=11)
    panels = canvas.subplots(rows, columns, squeeze=False)
    image: Any = None
    for row, (name, item) in enumerate(traces.items()):
        for column, depth in enumerate(depths):
            panel = panels[row, column]
            image = _heat(panel, cosines[name][column], low)
            mean = _mean_cosine(item, depth, cosines[name][column])
            panel.set_title(f"depth {depth}: {mean}" if row == 0 else mean, fontsize=9, pad=3)
        panels[row, 0].set_ylabel(_wrapped(name), fontsize=9.5, rotation=0, ha="right", va="center", labelpad=8)
    bar = canvas.colorbar(image, ax=panels, fraction=0.03, pad=0.01, aspect=40)
    bar.set_label("cosine of two positions", fontsize=9)
    return canvas


def curves(traces: Mapping[str, Trace]) -> Any:
    """A matplotlib Figure of the numbers over depth, as the page of kernels draws them."""
    section = kernel_section({name: Kernels(of_trace(item).curves) for name, item in traces.items()})
    return sections_figure([section], section["title"])


def _common(traces: Mapping[str, Trace], at: Sequence[int] | None) -> list[int]:
    if not traces:
        raise InputError("there is nothing to draw; give at least one trace")
    kept = set.intersection(*(set(item.kernels) for item in traces.values()))
    wanted = spread(sorted(kept), 6) if at is None else list(at)
    missing = [depth for depth in wanted if depth not in kept]
    if missing or not wanted:
        said = f"depth {missing[0]}" if missing else "any depth in common"
        raise InputError(f"these traces did not keep {said}; ask for depths in `at` of trace, the same for all")
    return wanted


def _heat(panel: Any, matrix: FloatArray, low: float) -> Any:
    panel.set_xticks([])
    panel.set_yticks([])
    for side in panel.spines.values():
        side.set_linewidth(0.5)
    return panel.imshow(matrix, cmap=_MAP, vmin=low, vmax=1.0, interpolation="nearest" if len(matrix) <= 160 else None)


def _mean_cosine(item: Trace, depth: int, shown: FloatArray) -> str:
    """The mean cosine of the matrix that is drawn; for several sequences that of the first."""
    t = len(shown)
    mean = float(item.forward.mean_cosine[depth])
    distance = float(item.forward.distance[depth])
    if item.sequences > 1 and t > 1:
        mean = (float(shown.sum()) - t) / (t * (t - 1))
        distance = 1 - mean
    if distance < 1e-3:
        return "1" if distance < _LOWEST * 10 else f"1 − {distance:.0e}".replace("e-0", "e-")
    return f"{mean:.3f}"


def _wrapped(name: str) -> str:
    """A name on lines of some 14 letters."""
    lines = [""]
    for word in name.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > 14:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
