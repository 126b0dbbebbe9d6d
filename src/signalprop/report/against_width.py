"""The section of a coordinate check: change of every probe against the width."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from signalprop.monitoring.coordinates import Coordinates
from signalprop.report.sections import Chart, Curve, Section


def coordinates_section(found: Coordinates) -> Section:
    """One line per probe, dashed where its slope is outside."""
    x = np.log10(np.array(found.widths, np.float64))
    outside = set(found.outside)
    curves = [
        Curve(f"{probe.name}: {probe.slope:.2f} ± {probe.error:.2f}", x, np.asarray(probe.change, np.float64), colour=k,
              line="dashed" if probe in outside else "solid")
        for k, probe in enumerate(found.probes)
    ]  # fmt: skip
    title = f"{found.scheme}, {found.optimizer}, learning rate {found.lr:g}"
    chart = Chart(title, curves, "width", f"change in {found.steps} steps", log=True, positive=True, bars=True,
                  ticks=_ticks(found.widths))  # fmt: skip
    return Section("Coordinate check", [chart], lead="Change of every probe in training; its slope behind its name.")


def _ticks(values: Sequence[int]) -> list[tuple[float, str]]:
    return [(math.log10(value), str(value)) for value in values]
