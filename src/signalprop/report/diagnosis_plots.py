"""A diagnosis as a picture: layers from left to right, one panel per question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from signalprop.diagnose.result import Diagnosis, LayerSignal, Number
from signalprop.errors import require
from signalprop.report.plots import COLOURS


def diagnosis_figure(items: Sequence[Diagnosis]) -> Any:
    """A matplotlib Figure of one diagnosis, or of several on the same axes (the angular matrix: of the first)."""
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    first = items[0]
    figure = Figure(figsize=(14, 8.5), layout="constrained")
    axes = figure.subplots(2, 4).ravel()
    several = len(items) > 1
    figure.suptitle(" against ".join(d.model for d in items))

    _panel(axes[0], "variance of the stream", items, lambda s: s.variance, log=True)
    for k, d in enumerate(items):
        known = [(w.layer, w.predicted_variance) for w in d.weights if w.predicted_variance]
        _curve(axes[0], known, COLOURS[k], "--", "predicted from weights" if k == 0 else None)
    known_first = [(s.layer, s.first_variance) for s in first.signal if s.first_variance]
    if not several:
        _curve(axes[0], known_first, COLOURS[3], ":", "first positions")
    axes[0].legend(fontsize=8)

    _panel(axes[1], "gradient variance, relative to the last layer", items, lambda s: s.gradient, log=True)
    _panel(axes[2], "token correlation", items, lambda s: s.token_correlation)
    axes[2].set_ylim(-0.05, 1.05)
    _panel(axes[3], "share of the stream's variance", items, lambda s: s.attention_share, label="attention", log=True)
    for k, d in enumerate(items):
        points = [(s.layer, s.feed_forward_share) for s in d.signal if s.feed_forward_share]
        _curve(axes[3], points, COLOURS[k], "--", "feed-forward" if k == 0 else None)
    axes[3].legend(fontsize=8)

    _panel(axes[4], "attention entropy over equal weights (heads: range)", items, lambda s: _mean(s.entropy))
    for k, d in enumerate(items):
        rows = [s for s in d.signal if _known(s.entropy)]
        low, high = ([f(_known(s.entropy)) for s in rows] for f in (min, max))
        axes[4].fill_between([s.layer for s in rows], low, high, color=COLOURS[k], alpha=0.15, linewidth=0)
    axes[4].set_ylim(-0.02, 1.05)
    _nearness(axes[5], items)
    _angles(axes[6], figure, first)
    _costs(axes[7], items)
    for axis in axes:
        axis.set_xlabel("layer")
    return figure


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


def _angles(axis: Any, figure: Any, d: Diagnosis) -> None:
    axis.set_title("angular distance of a stretch", fontsize=9)
    axis.set_ylabel("layers in the stretch")
    if d.identity is None:
        return
    matrix = np.array([[np.nan if v is None else v for v in row] for row in d.identity.angular])
    shown = axis.imshow(matrix, origin="lower", aspect="auto", cmap="viridis", extent=(-0.5, matrix.shape[1] - 0.5, 0.5,
                        matrix.shape[0] + 0.5))  # fmt: skip
    figure.colorbar(shown, ax=axis, shrink=0.8)


def _costs(axis: Any, items: Sequence[Diagnosis]) -> None:
    axis.set_title("loss that removing a layer costs (nats per token)", fontsize=9)
    for k, d in enumerate(items):
        if d.removal is None:
            continue
        rows = [(r.layers[0], r.increase.value, r.increase.standard_error or 0.0) for r in d.removal.single]
        known = [(x, y, e) for x, y, e in rows if y is not None]
        if known:
            x, y, e = zip(*known, strict=True)
            axis.errorbar(x, y, yerr=e, color=COLOURS[k], linewidth=1.2, markersize=3, marker="o")
            axis.set_yscale("symlog", linthresh=0.05)


def _known(values: Sequence[Number]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[Number]) -> Number:
    known = _known(values)
    return float(np.mean(known)) if known else None
