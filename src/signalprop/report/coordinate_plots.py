"""The picture of a coordinate check: change of every probe against the width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.monitoring.coordinates import Coordinates
from signalprop.report.plots import COLOURS, save_figure


def save_coordinates(path: str | Path, found: Coordinates) -> None:
    """Draw a coordinate check and write it, whole or not at all (png, svg, pdf).

    Raises:
        InputError: another format, or a file that cannot be written. MissingExtra: matplotlib is not installed.
    """
    save_figure(path, lambda: figure(found))


def figure(found: Coordinates) -> Any:
    """A matplotlib Figure: one line per probe, dashed where its slope is outside."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axis = picture.subplots()
    outside = set(found.outside)
    for k, probe in enumerate(found.probes):
        axis.plot(
            found.widths, probe.change, "--o" if probe in outside else "-o", color=COLOURS[k % len(COLOURS)],
            label=f"{probe.name}: {probe.slope:.2f} ± {probe.error:.2f}", markersize=4,
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="width", ylabel=f"change in {found.steps} steps")
    axis.set_xticks(found.widths, [str(w) for w in found.widths])
    axis.minorticks_off()
    axis.set_title(f"{found.scheme}, {found.optimizer}, learning rate {found.lr:g}")
    picture.legend(loc="outside right center", fontsize="small", title="slope")
    return picture
