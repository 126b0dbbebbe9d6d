"""Several schemes at several depths at one glance: heat maps of the gradient and of the token correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.report.html.blocks import Block
from signalprop.report.tables import variance
from signalprop.results.profile import Profile

_DECADES = 4.0  # of the gradient's ratio, to either side of 1, beyond which all is equally dark


def heat_maps(profiles: Sequence[Profile]) -> list[Block]:
    """Blocks for pictures alone, of the gradient's ratio and of the top's token correlation by scheme and depth.

    None where there are not several schemes at several depths, or a gradient is missing. `shade`: (schemes, depths),
    between the limits; NaN where there is no such network, whose text is "".
    """
    cells = {(p.scheme, p.architecture.n_layers_total): p for p in profiles}
    rows = tuple(dict.fromkeys(scheme for scheme, _ in cells))
    columns = tuple(sorted({depth for _, depth in cells}))
    if len(cells) < len(profiles) or len(rows) == 1 or len(columns) == 1:
        return []
    grid = [[cells.get((scheme, depth)) for depth in columns] for scheme in rows]

    def made(title: str, value: Any, text: Any, limits: tuple[float, float], colours: str) -> Block:
        shade = np.array([[math.nan if p is None else value(p) for p in row] for row in grid])
        return {
            "type": "cells", "title": title, "x": "", "rows": rows, "columns": [f"{n} layers" for n in columns],
            "shade": np.clip(shade, *limits), "texts": [["" if p is None else text(p) for p in row] for row in grid],
            "limits": limits, "colours": colours,
        }  # fmt: skip

    def top(p: Profile) -> float:
        return float(p.forward["stream_out"].token_correlation[-1])

    if any(p.gradient is None for p in profiles):
        return []
    limits = (-_DECADES, _DECADES)
    return [
        made("Gradient's variance, first layer over last", _decades, _ratio, limits, "PuOr"),
        made("Token correlation after the last layer", top, lambda p: f"{top(p):.2f}", (0.0, 1.0), "Greys"),
    ]


def _decades(p: Profile) -> float:
    assert p.gradient is not None
    return float(p.gradient["stream_in"].log_variance[0] / math.log(10))


def _ratio(p: Profile) -> str:
    assert p.gradient is not None
    return variance(p.gradient["stream_in"], 0)
