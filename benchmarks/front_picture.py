"""The picture of README.md: the gradient in 192 post-norm layers, by two schemes, predicted and measured.

`python -m benchmarks.front_picture` writes docs/pictures/deep.json and, from it, docs/pictures/deep.png (some minutes);
`--redraw` only the latter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import signalprop as sp
from signalprop.files.storage import write_json

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
NUMBERS, PICTURE = FOLDER / "deep.json", FOLDER / "deep.png"
ARCHITECTURE = sp.Architecture.preset("tgs", n_layers=192, norm_placement="post", seq_len=128)
COLOURS = {"xavier": "#D55E00", "deepscalelm": "#0072B2"}
SEEDS = 4


def numbers() -> dict[str, Any]:
    """By scheme, the gradient's variance at the input of every layer, predicted and measured."""
    found: dict[str, Any] = {}
    for scheme in COLOURS:
        comparison = sp.compare(ARCHITECTURE, scheme=scheme, seeds=SEEDS)
        predicted, measured = comparison.predicted.gradient, comparison.measured.gradient
        assert predicted is not None and measured is not None
        error = measured["stream_in"].variance_se
        assert error is not None
        columns = (predicted["stream_in"].variance, measured["stream_in"].variance, error)
        names = ("predicted", "measured", "relative_error")
        layers = [[float(f"{x:.4g}") for x in column[::2]] for column in columns]
        found[scheme] = dict(zip(names, layers, strict=True))
    return found


def drawn(found: dict[str, Any]) -> Any:
    """The picture, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    panel = figure.subplots()
    for scheme, curve in found.items():
        layers, every = range(len(curve["predicted"])), slice(None, None, 6)
        panel.plot(layers, curve["predicted"], color=COLOURS[scheme], linewidth=2)
        errors = [2 * y * e for y, e in zip(curve["measured"], curve["relative_error"], strict=True)]
        panel.errorbar(
            layers[every], curve["measured"][every], yerr=errors[every], fmt="o", color=COLOURS[scheme], markersize=4.5,
            markerfacecolor="white", elinewidth=1, capsize=2,
        )  # fmt: skip
        first, middle = curve["predicted"][0], curve["predicted"][80]
        panel.annotate(
            f"{scheme}: {first:.2g} reaches the first layer", (80, middle), (-60, 22 if first > 0.01 else -50),
            textcoords="offset points", color=COLOURS[scheme], fontsize=12, fontweight="bold",
        )  # fmt: skip
    panel.set_yscale("log")
    panel.set_ylim(5e-7, 8)
    panel.set_xlim(-3, len(layers) + 1)
    panel.set_xlabel("layer")
    panel.set_title("Gradient at each of 192 post-norm layers (variance, last layer = 1)", fontsize=12, loc="left")
    panel.grid(alpha=0.3, linewidth=0.6)
    panel.text(
        0.99, 0.05, f"lines: predicted in milliseconds; dots: measured on {SEEDS} networks, ± 2 standard errors",
        transform=panel.transAxes, ha="right", fontsize=10, color="#444444",
    )  # fmt: skip
    return figure


if __name__ == "__main__":
    if "--redraw" not in sys.argv:
        write_json(NUMBERS, numbers())
    drawn(json.loads(NUMBERS.read_text())).savefig(PICTURE)
