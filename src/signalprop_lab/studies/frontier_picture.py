"""The picture of a frontier: the rate that the first step allows, against depth and against width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from signalprop.report.sections import COLOURS
from signalprop_lab.studies.frontier import Cell, Frontier


def figure(found: Frontier) -> Any:
    """A matplotlib Figure: against depth at the first width, and, where there are several, against width."""
    from matplotlib.figure import Figure

    first, axes = found.cells[0], []
    if len({c.layers for c in found.cells}) > 1:
        axes.append(("layers", [c for c in found.cells if c.width == first.width], f"width {first.width}"))
    if len({c.width for c in found.cells}) > 1 or not axes:
        axes.append(("width", [c for c in found.cells if c.layers == first.layers], f"{first.layers} layers"))
    picture = Figure(figsize=(1.5 + 4.5 * len(axes), 4.2), layout="constrained")
    for axis, (against, cells, title) in zip(picture.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        _lines(axis, against, cells)
        axis.set_title(title)
    handles, labels = axis.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right center", fontsize="small")
    picture.suptitle(f"{found.optimizer}: the rate whose first step changes the last stream by {found.change:g}")
    return picture


def _lines(axis: Any, against: str, cells: Sequence[Cell]) -> None:
    """One line for each scheme."""
    for k, kind in enumerate(dict.fromkeys((c.scheme, c.norm) for c in cells)):
        of = sorted((getattr(c, against), c.rate) for c in cells if (c.scheme, c.norm) == kind)
        axis.plot(
            [x for x, _ in of], [rate for _, rate in of], "-o", color=COLOURS[k % len(COLOURS)],
            label=", ".join(kind), markersize=4,
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel=against, ylabel="learning rate")
    ticks = sorted({getattr(c, against) for c in cells})
    axis.set_xticks(ticks, [str(x) for x in ticks])
    axis.minorticks_off()
