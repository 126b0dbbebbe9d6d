"""A diagnosis as a picture: layers from left to right, one panel per question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from signalprop.diagnosis.result import Diagnosis, LayerSignal, Number
from signalprop.errors import require
from signalprop.report.plots import COLOURS

_COLUMNS = 4


def diagnosis_figure(items: Sequence[Diagnosis]) -> Any:
    """A matplotlib Figure of one diagnosis, or of several on the same axes (the angular matrix: of the first)."""
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    panels: list[Callable[[Any, Sequence[Diagnosis]], None]] = [
        _variance,
        lambda axis, d: _panel(axis, "gradient variance over the last layer's", d, lambda s: s.gradient, log=True),
        _correlation,
        _shares,
        _entropy,
        lambda axis, d: _panel(axis, "largest entry over root mean square", d, lambda s: s.outlier, log=True),
    ]
    if any(d.identity is not None for d in items):
        panels += [_nearness, _angles]
    if any(d.removal is not None for d in items):
        panels.append(_removal)
    if any(cast.signal_to_noise for d in items for cast in d.casts):
        panels.append(_casts)
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(3.5 * _COLUMNS, 3.9 * rows + 0.4), layout="constrained")
    figure.suptitle(" against ".join(d.model for d in items))
    for place, panel in enumerate(panels):
        axis = figure.add_subplot(rows, _COLUMNS, place + 1)
        panel(axis, items)
        axis.set_xlabel("layer")
    return figure


def _variance(axis: Any, items: Sequence[Diagnosis]) -> None:
    _panel(axis, "variance of the stream", items, lambda s: s.variance, log=True)
    for k, d in enumerate(items):
        known = [(w.layer, w.predicted_variance) for w in d.weights if w.predicted_variance]
        _curve(axis, known, COLOURS[k], "--", "predicted from weights" if k == 0 else None)
    if len(items) == 1:
        first = [(s.layer, s.first_variance) for s in items[0].signal if s.first_variance]
        _curve(axis, first, COLOURS[3], ":", "first positions")
    axis.legend(fontsize=8)


def _correlation(axis: Any, items: Sequence[Diagnosis]) -> None:
    _panel(axis, "token correlation", items, lambda s: s.token_correlation)
    axis.set_ylim(-0.05, 1.05)


def _shares(axis: Any, items: Sequence[Diagnosis]) -> None:
    _panel(axis, "share of the stream's variance", items, lambda s: s.attention_share, label="attention", log=True)
    for k, d in enumerate(items):
        points = [(s.layer, s.feed_forward_share) for s in d.signal if s.feed_forward_share]
        _curve(axis, points, COLOURS[k], "--", "feed-forward" if k == 0 else None)
    axis.legend(fontsize=8)


def _entropy(axis: Any, items: Sequence[Diagnosis]) -> None:
    _panel(axis, "attention entropy (mean, range of heads)", items, lambda s: _mean(s.entropy))
    for k, d in enumerate(items):
        rows = [s for s in d.signal if _known(s.entropy)]
        low, high = ([f(_known(s.entropy)) for s in rows] for f in (min, max))
        axis.fill_between([s.layer for s in rows], low, high, color=COLOURS[k], alpha=0.15, linewidth=0)
    axis.set_ylim(-0.02, 1.05)


def _panel(
    axis: Any,
    title: str,
    items: Sequence[Diagnosis],
    value: Callable[[LayerSignal], Number],
    *,
    label: str | None = None,
    log: bool = False,
) -> None:
    axis.set_title(title, fontsize=9)
    for k, d in enumerate(items):
        points = [(s.layer, v) for s in d.signal if (v := value(s)) is not None and (v > 0 or not log)]
        _curve(axis, points, COLOURS[k], "-", d.model if len(items) > 1 else (label or "measured"))
    if log and axis.lines:
        axis.set_yscale("log")


def _curve(axis: Any, points: Sequence[tuple[int, Number]], colour: str, style: str, label: str | None) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axis.plot(x, y, style, color=colour, label=label, linewidth=1.4)


def _nearness(axis: Any, items: Sequence[Diagnosis]) -> None:
    axis.set_title("|J - I| of a layer (root mean square)", fontsize=9)
    for k, d in enumerate(items):
        near = d.identity.jacobian if d.identity is not None else ()
        points = [(i, e.value) for i, e in enumerate(near) if e.value]
        _curve(axis, points, COLOURS[k], "-", d.model if len(items) > 1 else "measured")
        predicted = [(w.layer, w.identity) for w in d.weights if w.identity]
        _curve(axis, predicted, COLOURS[k], "--", "predicted from weights" if k == 0 else None)
    if axis.lines:
        axis.set_yscale("log")
        axis.legend(fontsize=8)


def _angles(axis: Any, items: Sequence[Diagnosis]) -> None:
    axis.set_title("angular distance of a stretch" + ("" if len(items) == 1 else f", {items[0].model}"), fontsize=9)
    axis.set_ylabel("layers in the stretch")
    if items[0].identity is None:
        return
    matrix = np.array([[np.nan if v is None else v for v in row] for row in items[0].identity.angular])
    n, m = matrix.shape
    shown = axis.imshow(matrix, origin="lower", aspect="auto", cmap="viridis", extent=(-0.5, m - 0.5, 0.5, n + 0.5))
    axis.figure.colorbar(shown, ax=axis, shrink=0.8)


def _removal(axis: Any, items: Sequence[Diagnosis]) -> None:
    axis.set_title("nats per token without a layer", fontsize=9)
    for k, d in enumerate(items):
        rows = [(r.layers[0], r.increase) for r in d.removal.single] if d.removal is not None else []
        known = [(x, e.value, e.standard_error or 0.0) for x, e in rows if e.value is not None]
        if known:
            x, y, e = zip(*known, strict=True)
            axis.errorbar(x, y, yerr=e, color=COLOURS[k], linewidth=1.2, markersize=3, marker="o")
            axis.set_yscale("symlog", linthresh=0.05)
    axis.axhline(0, color="grey", linewidth=0.6)


def _casts(axis: Any, items: Sequence[Diagnosis]) -> None:
    """Of the first diagnosis that has casts: the last kind of each format, which is the most that was asked for."""
    casts = next(d.casts for d in items if d.casts)
    axis.set_title(f"signal over noise of casts (dB): {casts[-1].of}", fontsize=9)
    chosen = [cast for cast in casts if cast.of == casts[-1].of and not (cast.format == "int8" and not cast.scaled)]
    for name in dict.fromkeys(cast.format for cast in chosen):
        colour = COLOURS[list(dict.fromkeys(cast.format for cast in chosen)).index(name)]
        for cast in chosen:
            if cast.format == name:
                points = [(k, value) for k, value in enumerate(cast.signal_to_noise) if value is not None]
                label = f"{name}, scaled" if cast.scaled else name
                _curve(axis, points, colour, "-" if cast.scaled else "--", label)
    if axis.lines:
        axis.legend(fontsize=7)


def _known(values: Sequence[Number]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[Number]) -> Number:
    known = _known(values)
    return float(np.mean(known)) if known else None
