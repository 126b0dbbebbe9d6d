"""Text tables: a profile by sublayer, agreement, parts and costs. Strings in, one string out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS, layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import layout
from signalprop.results.between_streams import alike
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.series import SILENT, Series
from signalprop.results.text import number, percent, spread, text_table

MAX_ROWS = 6  # so that a result fits in 24 lines of a terminal


def variance(series: Series, index: int) -> str:
    """A variance, also where it is too large or too small for a float."""
    plain, log = float(series.variance[index]), float(series.log_variance[index])
    if log > SILENT and not 1e-300 < plain < 1e300:
        exponent = log / math.log(10)
        whole = math.floor(exponent)
        return f"{10 ** (exponent - whole):.3f}e{whole:+d}"
    return number(plain)


class _Layer(NamedTuple):
    """A layer's name, its first and last sublayer, and its sublayers by their column."""

    name: str
    first: int
    last: int
    branches: dict[str, int]


def _layers(profile: Profile) -> list[_Layer]:
    rows, a = layout(profile.architecture), profile.architecture
    starts = layer_starts(rows).tolist()
    found = []
    for first, end in pairwise([*starts, len(rows.layer)]):
        branches: dict[str, int] = {}
        for i in range(first, end):
            kind = kind_of(rows, i).short
            twins = sum(name.startswith(kind) for name in branches)
            branches[f"{kind} {twins + 1}" if twins else kind] = i
        stack = f"{STACKS[rows.stack[first]][:3]} " if a.kind == "encoder-decoder" else ""
        found.append(_Layer(f"{stack}{rows.layer[first]}", first, end - 1, branches))
    return found


def _over_layers(
    header: Sequence[str], layers: Sequence[_Layer], max_rows: int | None, cells: Callable[[_Layer], list[str]]
) -> str:
    """A table with a row for each of at most `max_rows` layers, and a line that says how many were left out."""
    shown = spread(layers, max_rows)
    text = text_table(["layer", *header], [[layer.name, *cells(layer)] for layer in shown])
    left_out = len(layers) - len(shown)
    return f"{text}\n({left_out} of {len(layers)} layers left out; --all prints them)" if left_out else text


def _with_error(text: str, error: FloatArray | None, index: int, *, relative: bool) -> str:
    """A number with its standard error, rounded to two digits and to 0.01 %."""
    if error is None:
        return text
    size = float(error[index])
    if relative:
        return f"{text}±{100 * size:.2g}%" if size >= 1e-4 else f"{text}±0.00%"
    return f"{text}±{size:.2g}" if size >= 1e-4 else f"{text}±0.0000"


def profile_table(profile: Profile, *, max_rows: int | None = MAX_ROWS, errors: bool = True) -> str:
    """One line per layer: variance of the stream after it, token correlation, variance of its branches, gradient.

    Standard errors follow ± if the profile has them (of a variance: relative to it), unless `errors` is false. The
    gradient is that at the layer's input, relative to the last sublayer's output. Of several residual streams: the mean
    correlation of two of them, and the least and largest variance of one, over their mean.
    """
    stream, branch, gradient = profile.forward["stream_out"], profile.forward["branch"], profile.gradient
    layers = _layers(profile)
    kinds = list(dict.fromkeys(name for layer in layers for name in layer.branches))
    header = ["stream var", "token corr", *(f"{kind} var" for kind in kinds)]
    header += ["grad var", "grad corr"] if gradient is not None else []
    streams = profile.stream_covariance
    if streams is not None:
        header += ["streams corr", "var of each"]
        between, sizes = alike(streams), np.diagonal(streams, axis1=1, axis2=2)

    def cells(layer: _Layer) -> list[str]:
        row = [*_stream(stream, layer.last, errors)]
        row += [variance(branch, layer.branches[kind]) if kind in layer.branches else "-" for kind in kinds]
        if gradient is not None:
            inner, i = gradient["stream_in"], layer.first
            row += [_variance(inner, i, errors), f"{inner.token_correlation[i]:.4f}"]
        if streams is not None:
            least, most = sizes[layer.last].min(), sizes[layer.last].max()
            row += [f"{between[layer.last]:.4f}", f"{least:.2f}-{most:.2f}"]
        return row

    return _over_layers(header, layers, max_rows, cells)


def _variance(series: Series, i: int, errors: bool) -> str:
    return _with_error(variance(series, i), series.variance_se if errors else None, i, relative=True)


def _stream(series: Series, i: int, errors: bool) -> tuple[str, str]:
    """Variance and token correlation."""
    se = series.token_correlation_se if errors else None
    return _variance(series, i, errors), _with_error(f"{series.token_correlation[i]:.4f}", se, i, relative=False)


def comparison_table(comparison: Comparison, *, max_rows: int | None = MAX_ROWS, errors: bool = True) -> str:
    """One line per layer: predicted beside measured (± standard error) variance, token correlation, gradient."""
    predicted, measured = comparison.predicted, comparison.measured
    header = ["variance", "measured", "token r", "measured"]
    with_gradient = predicted.gradient is not None and measured.gradient is not None
    header += ["gradient", "measured"] if with_gradient else []

    def cells(layer: _Layer) -> list[str]:
        both = [_stream(p.forward["stream_out"], layer.last, errors) for p in (predicted, measured)]
        row = [both[0][0], both[1][0], both[0][1], both[1][1]]
        for p in (predicted, measured) if with_gradient else ():
            assert p.gradient is not None
            row.append(_variance(p.gradient["stream_in"], layer.first, errors))
        return row

    return _over_layers(header, _layers(predicted), max_rows, cells)


# Root mean square of z up to which only scatter is seen; median error up to which a larger one does not matter.
LARGE_Z, SMALL_ERROR = 2.0, 0.02


AGREEMENT = ("R² (log)", "median error", "95th pct", "mean", "± se", "rms z")


def agreement_rows(comparison: Comparison) -> list[list[str]]:
    """Of every quantity its name, and what stands under `AGREEMENT`."""
    return [
        [
            item.quantity,
            "-" if item.r_squared is None else f"{item.r_squared:.4f}",
            percent(item.median),
            percent(item.percentile_95),
            f"{100 * item.signed:+.1f} %",
            percent(item.standard_error),
            "-" if item.z is None else f"{item.z:.1f}",
        ]
        for item in comparison.agreements
    ]


def agreement_table(comparison: Comparison) -> str:
    """One line per quantity: R² on the logarithm, median, 95th-percentile and mean error, standard error, z."""
    rows = [[name.replace("correlation", "corr"), *cells] for name, *cells in agreement_rows(comparison)]
    table = text_table(["agreement", *AGREEMENT], rows)
    return f"{table}\n{agreement_in_words(comparison)}"


def agreement_in_words(comparison: Comparison) -> str:
    """Whether more than the scatter of so many random networks lies between the two, and where most."""
    derived = [item for item in comparison.agreements if item.z is not None]
    if not derived:
        return "verdict             none: the scatter of single networks is not known here"
    known = {item.quantity: item.z for item in derived if item.z is not None and item.median > SMALL_ERROR}
    if max(known.values(), default=0.0) <= LARGE_Z:
        return "verdict             differences over 2 % are the scatter of single networks"
    name = max(known, key=lambda key: known[key])
    return f"verdict             {name}: beyond the scatter of single networks (z {known[name]:.1f})"
