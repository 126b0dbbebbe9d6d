"""Text tables: a profile by sublayer, agreement, parts and costs. Strings in, one string out."""

from __future__ import annotations

import math

import numpy as np

from signalprop.network.kinds import kind_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import STACKS, layout
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile, Series
from signalprop.results.text import number, percent, text_table

MAX_ROWS = 24


def variance(series: Series, index: int) -> str:
    """A variance, also where it is too large or too small for a float."""
    plain, log = float(series.variance[index]), float(series.log_variance[index])
    if math.isfinite(log) and not 1e-300 < plain < 1e300:
        exponent = log / math.log(10)
        whole = math.floor(exponent)
        return f"{10 ** (exponent - whole):.3f}e{whole:+d}"
    return number(plain)


def thinned(n: int, max_rows: int | None = MAX_ROWS) -> list[int]:
    """Indices of at most `max_rows` of n rows, evenly spread, the first and the last included; None: all."""
    if max_rows is None or n <= max_rows:
        return list(range(n))
    return sorted({round(i) for i in np.linspace(0, n - 1, max_rows)})


def _names(profile: Profile) -> list[str]:
    rows = layout(profile.architecture)
    both = profile.architecture.kind == "encoder-decoder"
    return [
        f"{STACKS[stack] + ' ' if both else ''}{layer} {kind_of(rows, i).short}"
        for i, (stack, layer) in enumerate(zip(rows.stack, rows.layer, strict=True))
    ]


def _with_error(text: str, error: FloatArray | None, index: int, *, relative: bool) -> str:
    """A number with its standard error, rounded to two digits and to 0.01 %."""
    if error is None:
        return text
    size = float(error[index])
    if relative:
        return f"{text} ±{100 * size:.2g}%" if size >= 1e-4 else f"{text} ±0.00%"
    return f"{text} ±{size:.2g}" if size >= 1e-4 else f"{text} ±0.0000"


def profile_table(profile: Profile, *, max_rows: int | None = MAX_ROWS) -> str:
    """One line per sublayer: variance of the stream after it and of the branch, token correlation, gradient.

    Standard errors stand behind ± where the profile has them (of a variance: relative to it). The gradient is
    that at the sublayer's input, relative to the last sublayer's output.
    """
    stream, branch, gradient = profile.forward["stream_out"], profile.forward["branch"], profile.gradient
    header = ["layer", "stream var", "branch var", "token corr"]
    if gradient is not None:
        header += ["grad var", "grad corr"]
    names = _names(profile)
    rows = []
    for i in thinned(profile.n_sublayers, max_rows):
        row = [
            names[i],
            _with_error(variance(stream, i), stream.variance_se, i, relative=True),
            variance(branch, i),
            _with_error(f"{stream.token_correlation[i]:.4f}", stream.token_correlation_se, i, relative=False),
        ]
        if gradient is not None:
            inner = gradient["stream_in"]
            row += [
                _with_error(variance(inner, i), inner.variance_se, i, relative=True),
                f"{inner.token_correlation[i]:.4f}",
            ]
        rows.append(row)
    return text_table(header, rows)


def comparison_table(comparison: Comparison, *, max_rows: int | None = MAX_ROWS) -> str:
    """One line per sublayer: predicted beside measured (± standard error) variance, token correlation, gradient."""
    predicted, measured = comparison.predicted, comparison.measured
    p, m = predicted.forward["stream_out"], measured.forward["stream_out"]
    header = ["layer", "stream var", "measured", "token corr", "measured"]
    with_gradient = predicted.gradient is not None and measured.gradient is not None
    if with_gradient:
        header += ["grad var", "measured"]
    names = _names(predicted)
    rows = []
    for i in thinned(predicted.n_sublayers, max_rows):
        row = [
            names[i],
            variance(p, i),
            _with_error(variance(m, i), m.variance_se, i, relative=True),
            f"{p.token_correlation[i]:.4f}",
            _with_error(f"{m.token_correlation[i]:.4f}", m.token_correlation_se, i, relative=False),
        ]
        if predicted.gradient is not None and measured.gradient is not None:
            g, h = predicted.gradient["stream_in"], measured.gradient["stream_in"]
            row += [variance(g, i), _with_error(variance(h, i), h.variance_se, i, relative=True)]
        rows.append(row)
    return text_table(header, rows)


def agreement_table(comparison: Comparison) -> str:
    """One line per quantity: R² on the logarithm, median and 95th-percentile error, the reference's standard error."""
    rows = [
        [
            item.quantity,
            "-" if item.r_squared is None else f"{item.r_squared:.4f}",
            percent(item.median),
            percent(item.percentile_95),
            percent(item.standard_error),
        ]
        for item in comparison.agreements
    ]
    return text_table(["agreement", "R² (log)", "median error", "95th pct", "measured ± se"], rows)
