"""Several schemes at several depths at one glance: heat maps of the gradient and of the token correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.report.tables import variance
from signalprop.results.profile import Profile

_DECADES = 4.0  # of the gradient's ratio, to either side of 1, beyond which all is equally dark


class HeatMap(NamedTuple):
    """One quantity by scheme and depth.

    Attributes:
        rows, columns: schemes, and numbers of layers. shade: (rows, columns), between the limits; NaN where there is no
            such network, whose text is "".
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[int, ...]
    shade: FloatArray
    texts: tuple[tuple[str, ...], ...]
    limits: tuple[float, float]
    colours: str


def heat_maps(profiles: Sequence[Profile]) -> list[HeatMap]:
    """Of the gradient's ratio and of the top's token correlation.

    None where there are not several schemes at several depths, or a gradient is missing.
    """
    cells = {(p.scheme, p.architecture.n_layers_total): p for p in profiles}
    rows = tuple(dict.fromkeys(scheme for scheme, _ in cells))
    columns = tuple(sorted({depth for _, depth in cells}))
    if len(cells) < len(profiles) or len(rows) == 1 or len(columns) == 1:
        return []
    grid = [[cells.get((scheme, depth)) for depth in columns] for scheme in rows]

    def made(title: str, value: Any, text: Any, limits: tuple[float, float], colours: str) -> HeatMap:
        shade = np.array([[math.nan if p is None else value(p) for p in row] for row in grid])
        texts = tuple(tuple("" if p is None else text(p) for p in row) for row in grid)
        return HeatMap(title, rows, columns, np.clip(shade, *limits), texts, limits, colours)

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


def draw_map(panel: Any, found: HeatMap, colours: Sequence[str]) -> None:
    """Draw it on a matplotlib panel; the name of a scheme has its colour."""
    low, high = found.limits
    image = panel.imshow(found.shade, aspect="auto", cmap=found.colours, vmin=low, vmax=high)
    panel.set_title(found.title, fontsize=11)
    panel.set_xticks(range(len(found.columns)), [f"{n} layers" for n in found.columns])
    panel.set_yticks(range(len(found.rows)), found.rows)
    for k, label in enumerate(panel.get_yticklabels()):
        label.set_color(colours[k % len(colours)])
    for (row, column), shade in np.ndenumerate(found.shade):
        red, green, blue, _ = image.cmap(image.norm(shade))
        ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        panel.text(column, row, found.texts[row][column], ha="center", va="center", fontsize=9, color=ink)
