"""The picture of a coordinate check: change of every probe against the width."""

from __future__ import annotations

from typing import Any

from signalprop.monitoring.coordinates import Coordinates
from signalprop.report.section_plots import COLOURS


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
