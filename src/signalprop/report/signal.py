"""The signal over depth in the report: profiles and comparisons on the same axes, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS, layer_starts, layout
from signalprop.network.moments import FloatArray
from signalprop.report.parts import Items, Part
from signalprop.report.sections import (
    Card,
    Chart,
    Curve,
    HeatMap,
    Section,
    Table,
    logarithmic,
    of_logs,
    with_errors,
)
from signalprop.report.shown_profiles import Shown, details_of, shown
from signalprop.report.tables import AGREEMENT, agreement_rows, variance
from signalprop.results import comparison, profile
from signalprop.results.between_streams import alike
from signalprop.results.comparison import Comparison, compare
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.results.text import depth_in_words, number, percent
from signalprop.results.verdicts import findings_of

# --- charts ------------------------------------------------------------------------------------------------------


def signal_section(found: Sequence[Shown]) -> Section:
    """Variance, gradient, token correlation and sensitivity over depth, with the caveats of the profiles."""
    drawn = charts(found)
    caveats = dict.fromkeys(note for item in found for note in item.profile.notes)
    return Section(
        "The signal over depth",
        _with_caveats(drawn, list(caveats)),
        lead="After every sublayer. A band is two standard errors to either side; of a prediction, two standard "
        "deviations of one network.",
    )


# Which chart a caveat is about, by a word that it has; else it is about the first.
_VARIANCE, _GRADIENT = "Variance of the residual stream", "Variance of the gradient"
_CORRELATION, _SENSITIVITY = "Token correlation of the residual stream", "Sensitivity of the layers"
_ABOUT = {"gradient": _GRADIENT, "correlation": _CORRELATION}


def _with_caveats(drawn: Sequence[Chart], caveats: Sequence[str]) -> list[Chart]:
    out = {chart.title: chart for chart in drawn}
    for caveat in caveats if out else ():
        about = next((title for word, title in _ABOUT.items() if word in caveat and title in out), next(iter(out)))
        said = f"{caveat[:1].upper()}{caveat[1:]}."
        out[about] = replace(out[about], caption=" ".join(filter(None, [out[about].caption, said])))
    return list(out.values())


def charts(found: Sequence[Shown], slider: str = "") -> list[Chart]:
    """The four charts over depth, and a fifth of several streams.

    Args:
        slider: what it counts, of profiles with frames.
    """
    forward, gradient, correlation, sensitivity, between = [], [], [], [], []
    lowest = 0.0
    for item in found:
        p = item.profile
        rows = layout(p.architecture)
        sublayers, layers = _points(p, np.arange(p.n_sublayers)), _points(p, layer_starts(rows), by_layer=True)
        stream = p.forward["stream_out"]
        forward.append(_of_variance(item, sublayers, stream))
        if p.gradient is not None:
            gradient.append(_of_variance(item, sublayers, p.gradient["stream_in"]))
        error = stream.token_correlation_se if stream.token_correlation_se is not None else stream.token_correlation_sd
        curve = _curve(item, sublayers, stream.token_correlation)
        correlation.append(with_errors(curve, None if error is None else sublayers.split(error)))
        lowest = min(lowest, 1.05 * float(stream.token_correlation.min()))
        with np.errstate(divide="ignore"):
            sensitivity.append(_curve(item, layers, np.log(p.layer_sensitivities)))
        if p.stream_covariance is not None:
            between.append(_curve(item, sublayers, alike(p.stream_covariance)))
    borders = {c.profile.architecture.n_layers for c in found if c.profile.architecture.n_decoder_layers}
    marks = [(border + 1 / 6, "decoder →") for border in sorted(borders)]

    def chart(title: str, curves: Sequence[Curve], y: str, caption: str = "", **options: Any) -> Chart:
        return Chart(title, curves, "layer", y, caption=caption, marks=marks, slider=slider, **options)

    made = [
        logarithmic(chart(_VARIANCE, forward, "variance")),
        logarithmic(chart(_GRADIENT, gradient, "variance, last = 1", "Relative to that after the last sublayer.")),
        chart(_CORRELATION, correlation, "correlation", "1: all tokens have become the same vector.",
              limits=(lowest, 1.03)),
        logarithmic(chart(_SENSITIVITY, sensitivity, "variance that a layer adds / of the stream that enters",
                          "Layers far below 1 / depth hardly matter; the sum is the network's sensitivity.", log=True)),
        chart("Correlation between streams", between, "correlation", "Mean over pairs of the residual streams.",
              limits=(-1.03, 1.03)),
    ]  # fmt: skip
    return [item for item in made if item.curves]


@dataclass(frozen=True, eq=False)
class _Points:
    """Positions along the axis, in layers, with their names; where a second stack begins a line has a gap."""

    x: FloatArray
    names: list[str]
    gaps: list[int]

    def split(self, values: ArrayLike) -> FloatArray:
        return np.insert(np.asarray(values, np.float64), self.gaps, np.nan)


def _points(p: Profile, sublayers: Any, *, by_layer: bool = False) -> _Points:
    """Of these sublayers: a sublayer lies at its output; layers are counted, those of a decoder after the encoder's."""
    rows, a = layout(p.architecture), p.architecture
    gaps = [int(i) + 1 for i in np.flatnonzero(np.diff(rows.stack[sublayers]))]
    both = a.kind == "encoder-decoder"
    names = [
        f"{STACKS[rows.stack[i]]} " * both + f"layer {rows.layer[i]}" + f", {kind_of(rows, i).words}" * (not by_layer)
        for i in sublayers
    ]
    for offset, i in enumerate(gaps):
        names.insert(i + offset, "")
    x = np.arange(1.0, len(sublayers) + 1) if by_layer else depths(p)
    return _Points(np.insert(x, gaps, np.nan), names, gaps)


def depths(p: Profile) -> FloatArray:
    """Position of every sublayer's output, in layers; the decoder's layers follow the encoder's."""
    rows, a = layout(p.architecture), p.architecture
    in_decoder = (rows.stack == STACKS.index("decoder")) & (a.kind == "encoder-decoder")
    starts = layer_starts(rows)
    sizes = np.diff(starts, append=len(rows.layer))
    rank = np.arange(len(rows.layer)) - np.repeat(starts, sizes)
    return np.asarray(rows.layer + in_decoder * a.n_layers + (rank + 1) / np.repeat(sizes, sizes), np.float64)


def _curve(item: Shown, at: _Points, values: ArrayLike) -> Curve:
    return Curve(
        item.label or item.group, at.x, at.split(values), colour=item.colour, line=item.line, names=at.names,
        frame=item.frame,
    )  # fmt: skip


def _of_variance(item: Shown, at: _Points, series: Series) -> Curve:
    """Its logarithm, with the standard errors of a measurement, or the scatter of a prediction."""
    error = series.variance_se if series.variance_se is not None else series.variance_sd
    return of_logs(_curve(item, at, series.log_variance), None if error is None else at.split(error))


def share_the_axis(drawn: Sequence[Chart]) -> list[Chart]:
    """Charts of networks of several depths, each from 0 to 1; a border of a decoder, which they do not share, goes."""
    return [
        replace(
            chart, x="layer, as a share of the depth", marks=(),
            curves=[replace(curve, x=curve.x / np.nanmax(curve.x)) for curve in chart.curves],
        )
        for chart in drawn
    ]  # fmt: skip


_DECADES = 4.0  # of the gradient's ratio, to either side of 1, beyond which all is equally dark


def overview_maps(profiles: Sequence[Profile]) -> list[HeatMap]:
    """Maps of the gradient's ratio and of the top's token correlation by scheme and depth.

    None where there are not several schemes at several depths, or a gradient is missing.
    """
    cells = {(p.scheme, p.architecture.n_layers_total): p for p in profiles}
    rows = tuple(dict.fromkeys(scheme for scheme, _ in cells))
    columns = tuple(sorted({depth for _, depth in cells}))
    flat = len(rows) == 1 or len(columns) == 1 or len(cells) < len(profiles)
    if flat or any(p.gradient is None for p in profiles):
        return []
    grid = [[cells.get((scheme, depth)) for depth in columns] for scheme in rows]

    def ratio(p: Profile) -> Series:
        assert p.gradient is not None
        return p.gradient["stream_in"]

    def top(p: Profile) -> float:
        return float(p.forward["stream_out"].token_correlation[-1])

    def made(title: str, value: Any, text: Any, limits: tuple[float, float], colours: str) -> HeatMap:
        shade = np.array([[math.nan if p is None else value(p) for p in row] for row in grid])
        return HeatMap(
            title, {"": np.clip(shade, *limits)}, "", "", limits, down=True, colours=colours, rows=rows,
            columns=[f"{n} layers" for n in columns],
            texts=[["" if p is None else text(p) for p in row] for row in grid],
        )  # fmt: skip

    return [
        made("Gradient's variance, first layer over last", lambda p: ratio(p).log_variance[0] / math.log(10),
             lambda p: variance(ratio(p), 0), (-_DECADES, _DECADES), "PuOr"),
        made("Token correlation after the last layer", top, lambda p: f"{top(p):.2f}", (0.0, 1.0), "Greys"),
    ]  # fmt: skip


# --- tables and words --------------------------------------------------------------------------------------------


def glance_table(found: Sequence[Shown]) -> Table:
    """Every profile in one line."""
    rows = []
    for item in found:
        p, stream = item.profile, item.profile.forward["stream_out"]
        seeds = f", {p.n_seeds} seed{'s' if p.n_seeds != 1 else ''}" if p.n_seeds else ""
        rows.append(
            [
                item.group, f"{item.source}{seeds}", str(p.architecture.n_layers_total),
                f"{number(p.input.get('variance'))} → {variance(stream, -1)}",
                f"{number(p.input.get('token_correlation'))} → {number(float(stream.token_correlation[-1]))}",
                "-" if p.gradient is None else variance(p.gradient["stream_in"], 0),
                number(p.sensitivity()["mean"]),
                ", ".join(dict.fromkeys(item.name for item in findings_of(p))) or "nothing",
            ]
        )  # fmt: skip
    header = ["scheme", "source", "layers", "variance", "token correlation", "gradient ratio", "sensitivity",
              "stands out"]  # fmt: skip
    caption = "From the first to the last layer; gradient variance, first over last."
    return Table("At a glance", header, rows, left=2, caption=caption)


def _agreement(items: Mapping[str, Comparison], groups: Mapping[int, str]) -> list[Table]:
    """How well predictions and measurements agree, one line per quantity."""
    rows = [[groups[id(item.predicted)], *row] for item in items.values() for row in agreement_rows(item)]
    caption = (
        "Errors over sublayers: ln of the ratio; for correlations the difference over the correlation (at least 0.1). "
        "z: the error over the scatter of networks of this width; about 1 if that scatter explains it."
    )
    title = "Agreement of prediction and measurement"
    return [Table(title, ["scheme", "quantity", *AGREEMENT], rows, left=2, caption=caption)] if rows else []


# What the card of a comparison reports, and up to which median error it says that the two agree.
_TOLD, _AGREE = ("forward variance", "forward token correlation", "gradient variance"), 0.2


def _agreement_cards(items: Mapping[str, Comparison], groups: Mapping[int, str]) -> list[Card]:
    """A card per comparison that comes before all others."""
    out = []
    for item in items.values():
        median = {a.quantity: a.median for a in item.agreements if a.quantity in _TOLD}
        said = ", ".join(f"{quantity} {percent(value)}" for quantity, value in median.items())
        seeds = item.measured.n_seeds or 1
        agree = max(median.values(), default=math.nan) < _AGREE
        title = f"prediction and measurement {'agree' if agree else 'differ'}"
        text = f"median error over layers: {said}; {seeds} network{'s' * (seeds > 1)} measured"
        out.append(Card("good" if agree else "note", groups[id(item.predicted)], title, [text], first=True))
    return out


def _signal_cards(found: Sequence[Shown]) -> list[Card]:
    """A card per group: what stands out, or its numbers."""
    out = []
    for group in dict.fromkeys(item.group for item in found):
        members = [item for item in found if item.group == group]
        best = next((item for item in members if item.profile.source == "measured"), members[0])
        warned = findings_of(best.profile)
        if warned:
            title = ", ".join(dict.fromkeys(item.name for item in warned))
            texts = [f"{item.text} ({best.source}{item.confidence and f'; {item.confidence}'})" for item in warned]
            remedies = "; ".join(dict.fromkeys(item.remedy for item in warned if item.remedy))
            out.append(Card("warning", group, title, texts, remedies))
        else:
            out.append(Card("good", group, "healthy signal", [_healthy(best)]))
    return out


def _healthy(item: Shown) -> str:
    p, stream = item.profile, item.profile.forward["stream_out"]
    gradient = (
        "" if p.gradient is None else f", gradient variance first over last {variance(p.gradient['stream_in'], 0)}"
    )
    return (
        f"variance {number(p.input.get('variance'))} → {variance(stream, -1)}, token correlation at the top "
        f"{number(float(stream.token_correlation[-1]))}{gradient} ({item.source})"
    )


# --- the part of the page ----------------------------------------------------------------------------------------


def _compared(items: Items) -> tuple[list[Shown], dict[str, Comparison], dict[int, str]]:
    """Profiles, comparisons, and the group of every predicted profile."""
    found = shown(items)
    compared = {name: item for name, item in items.items() if isinstance(item, Comparison)}
    return found, compared, {id(item.profile): item.group for item in found}


def _sections(items: Items, _: Path | None) -> list[Section]:
    for item in items.values():
        profiles = [item.predicted, item.measured] if isinstance(item, Comparison) else [item]
        if any(profile.forward["stream_out"].variance.ndim != 1 for profile in profiles):
            raise InputError("a report cannot show a sweep; select one of its members")
    found, compared, groups = _compared(items)
    return [signal_section(found), Section("In numbers", [glance_table(found), *_agreement(compared, groups)])]


def _cards(items: Items) -> list[Card]:
    found, compared, groups = _compared(items)
    return [*_agreement_cards(compared, groups), *_signal_cards(found)]


def _subtitle(items: Items) -> str:
    """What all profiles have in common, in words."""
    details = [details_of(item.profile.architecture) for item in shown(items)]
    return ", ".join(text for name, text in details[0].items() if all(other[name] == text for other in details))


def _comparison(source: Path, data: dict[str, Any]) -> dict[str, Any]:
    predicted, measured = (Profile.from_json(data.get(side)) for side in ("predicted", "measured"))
    return {source.stem: compare(predicted, measured)}


def _several(_: Path, data: dict[str, Any]) -> dict[str, Any]:
    given = data.get("profiles")
    if not isinstance(given, list) or not given:
        raise InputError("it has no list of profiles")
    profiles = [Profile.from_json(item) for item in given]
    return {f"{p.scheme}, {depth_in_words([p.architecture])}": p for p in profiles}


PART = Part(
    types=(Profile, Comparison),
    sections=_sections,
    cards=_cards,
    names=lambda items: list(dict.fromkeys(item.group for item in shown(items))),
    subtitle=_subtitle,
    readers={
        profile.SCHEMA: lambda source, data: {source.stem: Profile.from_json(data)},
        profile.SEVERAL: _several,
        comparison.SCHEMA: _comparison,
    },
)
