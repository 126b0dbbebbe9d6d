"""The signal over depth: profiles and comparisons on the same axes, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.network.inputs import IntArray
from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS, layer_starts, layout
from signalprop.network.moments import FloatArray
from signalprop.report import findings
from signalprop.report.html import blocks
from signalprop.report.html.blocks import Block, Style
from signalprop.report.html.curves import SOURCE_WORDS, Curve, curves_of, title_of
from signalprop.report.html.parts import Items, Part
from signalprop.report.html.signal_cards import agreement_findings, signal_findings
from signalprop.report.tables import AGREEMENT, agreement_rows, variance
from signalprop.results import comparison, profile
from signalprop.results.between_streams import alike
from signalprop.results.comparison import Comparison, compare
from signalprop.results.profile import Profile
from signalprop.results.text import depth_in_words, number

# --- charts ------------------------------------------------------------------------------------------------------


def signal_section(curves: Sequence[Curve], *, by_scheme: bool = False) -> Block:
    """Variance, gradient, token correlation and sensitivity over depth.

    Args:
        by_scheme: all groups of one scheme have its colour, and caveats stand at the charts that they are about; else
            every group has a colour of its own, and caveats are left out.
    """
    groups = list(dict.fromkeys(curve.group for curve in curves))
    if by_scheme:
        groups = _by_scheme({curve.group: curve.profile.scheme for curve in curves})
    sources = list(
        dict.fromkeys(curve.source for curve in sorted(curves, key=lambda c: c.profile.source, reverse=True))
    )
    places, at = places_of(curves)
    drawn = charts(curves, groups, sources, at)
    return blocks.section(
        "signal",
        "The signal over depth",
        _with_caveats(drawn, notes(curves)) if by_scheme else drawn,
        lead="After every sublayer. A band is two standard errors to either side; of a prediction, two standard "
        "deviations of one network.",
        groups=groups,
        sources=[(source, _style(source, k)) for k, source in enumerate(sources)],
        places=places,
    )


def _by_scheme(schemes: Mapping[str, str]) -> list[str]:
    """Groups in places that give those of one scheme one colour (its kinds of line go on); "" where nobody stands.

    Args:
        schemes: of every group.
    """
    order, taken = list(dict.fromkeys(schemes.values())), dict[int, str]()
    for group, name in schemes.items():
        place = order.index(name)
        while place in taken:
            place += blocks.COLOURS
        taken[place] = group
    return [taken.get(k, "") for k in range(max(taken, default=-1) + 1)]


# Which chart a caveat is about, by a word that it has; else it is about the first.
_ABOUT = {"gradient": "gradient-variance", "correlation": "token-correlation"}


def _with_caveats(drawn: Sequence[Block], caveats: Sequence[str]) -> list[Block]:
    out = [dict(chart) for chart in drawn]
    places = {chart["id"]: chart for chart in out}
    for caveat in caveats if out else ():
        about = next((key for word, key in _ABOUT.items() if word in caveat and key in places), out[0]["id"])
        places[about]["caption"] = " ".join(
            filter(None, [places[about]["caption"], f"{caveat[:1].upper()}{caveat[1:]}."])
        )
    return out


def _style(source: str, k: int) -> Style:
    if not source.startswith("predicted"):
        return "points" if source == SOURCE_WORDS["measured"] else "mixed"
    return "line" if k == 0 else "dashed"


def charts(curves: Sequence[Curve], groups: Sequence[str], sources: Sequence[str], at: Sequence[int]) -> list[Block]:
    """The four charts, and a fifth of several streams.

    Args:
        at: the place of every curve by sublayer; the place after it is that by layer.
    """
    forward, gradient, correlation, sensitivity, between = [], [], [], [], []
    for curve, k in zip(curves, at, strict=True):
        p, ids = curve.profile, (groups.index(curve.group), sources.index(curve.source), k)
        gap, starts = _borders(p), layer_starts(layout(p.architecture))
        stream = p.forward["stream_out"]
        forward.append(_log(ids, gap, stream.log_variance, _first(stream.variance_se, stream.variance_sd)))
        if p.gradient is not None:
            inner = p.gradient["stream_in"]
            gradient.append(_log(ids, gap, inner.log_variance, _first(inner.variance_se, inner.variance_sd)))
        se = _first(stream.token_correlation_se, stream.token_correlation_sd)
        correlation.append(
            blocks.series(*ids, _split(stream.token_correlation, gap), error=None if se is None else _split(se, gap))
        )
        with np.errstate(divide="ignore"):
            logs = np.log(p.layer_sensitivities)
        sensitivity.append(blocks.log_series(*ids[:2], k + 1, _split(logs, _borders(p, starts))))
        if p.stream_covariance is not None:
            between.append(blocks.series(*ids, _split(alike(p.stream_covariance), gap)))
    lowest = min((float(c.profile.forward["stream_out"].token_correlation.min()) for c in curves), default=0.0)
    marks = _marks(curves)
    made = [
        blocks.chart("forward-variance", "Variance of the residual stream", forward, x="layer", y="variance",
                     scale=_scale([c.profile.forward["stream_out"].log_variance for c in curves]), positive=True,
                     marks=marks),
        blocks.chart("gradient-variance", "Variance of the gradient", gradient, x="layer", y="variance, last = 1",
                     scale=_scale([c.profile.gradient["stream_in"].log_variance for c in curves if c.profile.gradient]),
                     positive=True, marks=marks, caption="Relative to that after the last sublayer."),
        blocks.chart("token-correlation", "Token correlation of the residual stream", correlation, x="layer",
                     y="correlation", limits=(min(0.0, 1.05 * lowest), 1.03), marks=marks,
                     caption="1: all tokens have become the same vector."),
        blocks.chart("sensitivity", "Sensitivity of the layers", sensitivity, x="layer",
                     y="variance that a layer adds / of the stream it meets", scale="log", marks=marks,
                     caption="Layers far below 1 / depth hardly matter; the sum is the network's sensitivity."),
        blocks.chart("between-streams", "Correlation between streams", between, x="layer", y="correlation",
                     limits=(-1.03, 1.03), marks=marks, caption="Mean over pairs of the residual streams."),
    ]  # fmt: skip
    return [item for item in made if item["series"]]


def _first(measured: FloatArray | None, predicted: FloatArray | None) -> FloatArray | None:
    """Standard errors of a measurement, or the scatter of a prediction."""
    return predicted if measured is None else measured


def _log(ids: tuple[int, int, int], gap: list[int], logs: FloatArray, se: FloatArray | None) -> Block:
    return blocks.log_series(*ids, _split(logs, gap), relative=None if se is None else _split(se, gap))


def _scale(logs: Sequence[FloatArray]) -> Any:
    """Logarithmic where the values span more than a factor of ten."""
    known = np.concatenate([values[np.isfinite(values)] for values in logs]) if logs else np.zeros(0)
    return "log" if known.size and float(np.ptp(known)) > math.log(10) else "linear"


def _borders(p: Profile, rows: Any = slice(None)) -> list[int]:
    """Where, of these sublayers, a stack begins that is not the first: a line has a gap there."""
    return [int(i) + 1 for i in np.flatnonzero(np.diff(layout(p.architecture).stack[rows]))]


def _split(values: ArrayLike, gap: list[int]) -> FloatArray:
    return np.insert(np.asarray(values, np.float64), gap, np.nan)


def depths(profile: Profile) -> FloatArray:
    """Position of every sublayer's output, in layers; the decoder's layers follow the encoder's."""
    rows, a = layout(profile.architecture), profile.architecture
    in_decoder = (rows.stack == STACKS.index("decoder")) & (a.kind == "encoder-decoder")
    starts = layer_starts(rows)
    sizes = np.diff(starts, append=len(rows.layer))
    rank = np.arange(len(rows.layer)) - np.repeat(starts, sizes)
    return np.asarray(rows.layer + in_decoder * a.n_layers + (rank + 1) / np.repeat(sizes, sizes), np.float64)


def places_of(curves: Sequence[Curve]) -> tuple[list[Block], list[int]]:
    """Places by sublayer and by layer for every architecture, and which every curve has."""
    places: list[Block] = []
    known: dict[str, int] = {}
    at = []
    for curve in curves:
        key = curve.profile.architecture.model_dump_json(include={"kind", "n_layers", "n_decoder_layers", "parallel"})
        if key not in known:
            known[key] = len(places)
            p, starts = curve.profile, layer_starts(layout(curve.profile.architecture))
            every = range(p.n_sublayers)
            places += [_place(p, every, depths(p), kinds=True), _place(p, starts, np.arange(1.0, len(starts) + 1))]
        at.append(known[key])
    return places, at


def _place(p: Profile, sublayers: Sequence[int] | IntArray, x: FloatArray, *, kinds: bool = False) -> Block:
    """Where these sublayers lie, by the names of their layers and, if asked, of their kinds."""
    rows, gap = layout(p.architecture), _borders(p, sublayers)
    both = p.architecture.kind == "encoder-decoder"
    names = [
        f"{STACKS[rows.stack[i]]} " * both + f"layer {rows.layer[i]}" + f", {kind_of(rows, i).words}" * kinds
        for i in sublayers
    ]
    for offset, i in enumerate(gap):
        names.insert(i + offset, "")
    return blocks.place(_split(x, gap), names)


def _marks(curves: Sequence[Curve]) -> list[Block]:
    borders = {c.profile.architecture.n_layers for c in curves if c.profile.architecture.n_decoder_layers}
    return [{"x": border + 1 / 6, "label": "decoder →"} for border in sorted(borders)]


# --- tables and words --------------------------------------------------------------------------------------------


def agreement_block(items: Mapping[str, Comparison], curves: Sequence[Curve]) -> Block | None:
    """How well predictions and measurements agree, one line per quantity."""
    labels = {id(curve.profile): curve.group for curve in curves}
    rows = [[labels[id(item.predicted)], *row] for item in items.values() for row in agreement_rows(item)]
    header = ["scheme", "quantity", *AGREEMENT]
    caption = (
        "Errors over sublayers: ln of the ratio; of a correlation the difference, over at least 0.1. z: over what "
        "networks of this width scatter by, about 1 where nothing else is left."
    )
    return (
        blocks.table("Agreement of prediction and measurement", header, rows, left=2, caption=caption) if rows else None
    )


def glance_block(curves: Sequence[Curve]) -> Block:
    """Every profile in one line."""
    rows = []
    for curve in curves:
        p, stream = curve.profile, curve.profile.forward["stream_out"]
        seeds = f", {p.n_seeds} seed{'s' if p.n_seeds != 1 else ''}" if p.n_seeds else ""
        rows.append(
            [
                curve.group, f"{curve.source}{seeds}", str(p.architecture.n_layers_total),
                f"{number(p.input.get('variance'))} → {variance(stream, -1)}",
                f"{number(p.input.get('token_correlation'))} → {number(float(stream.token_correlation[-1]))}",
                "-" if p.gradient is None else variance(p.gradient["stream_in"], 0),
                number(p.sensitivity()["mean"]),
                ", ".join(dict.fromkeys(item.name for item in findings.warned(p))) or "nothing",
            ]
        )  # fmt: skip
    header = [
        "scheme",
        "source",
        "layers",
        "variance",
        "token correlation",
        "gradient ratio",
        "sensitivity",
        "stands out",
    ]
    return blocks.table("At a glance", header, rows, left=2,
                        caption="From the first to the last layer; gradient variance, first over last.")  # fmt: skip


def notes(curves: Sequence[Curve]) -> list[str]:
    """What the profiles say their reader should know, each once."""
    return list(dict.fromkeys(note for curve in curves for note in curve.profile.notes))


# --- the part of the page ----------------------------------------------------------------------------------------


def _sections(items: Items, _: Path | None) -> list[Block]:
    for item in items.values():
        profiles = [item.predicted, item.measured] if isinstance(item, Comparison) else [item]
        if any(profile.forward["stream_out"].variance.ndim != 1 for profile in profiles):
            raise InputError("a report cannot show a sweep; select one of its members")
    curves = curves_of(items)
    agreement = agreement_block({name: item for name, item in items.items() if isinstance(item, Comparison)}, curves)
    numbers = [glance_block(curves), *([] if agreement is None else [agreement])]
    return [signal_section(curves, by_scheme=True), blocks.section("numbers", "In numbers", numbers)]


def _comparison(source: Path, data: dict[str, Any]) -> dict[str, Any]:
    predicted, measured = (Profile.from_json(data.get(side)) for side in ("predicted", "measured"))
    return {source.stem: compare(predicted, measured)}


def _several(_: Path, data: dict[str, Any]) -> dict[str, Any]:
    given = data.get("profiles")
    if not isinstance(given, list) or not given:
        raise InputError("it has no list of profiles")
    profiles = [Profile.from_json(item) for item in given]
    return {f"{p.scheme}, {depth_in_words([p.architecture])}": p for p in profiles}


def _cards(items: Items) -> list[Block]:
    curves = curves_of(items)
    compared = {name: item for name, item in items.items() if isinstance(item, Comparison)}
    return [*agreement_findings(compared, curves), *signal_findings(curves)]


PART = Part(
    types=(Profile, Comparison),
    sections=_sections,
    cards=_cards,
    names=lambda items: list(dict.fromkeys(curve.group for curve in curves_of(items))),
    notes=lambda _: [],  # they stand at the charts
    subtitle=lambda items: title_of(curves_of(items)),
    readers={
        profile.SCHEMA: lambda source, data: {source.stem: Profile.from_json(data)},
        profile.SEVERAL: _several,
        comparison.SCHEMA: _comparison,
    },
)
