"""A cell of records/accuracy.md: what is predicted now, against what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.accuracy_grid import TARGETS, Cell
from benchmarks.measured import Measured, kept, standard_errors
from signalprop.network.moments import FloatArray
from signalprop.prediction import predict
from signalprop.results.comparison import r_squared, relative_errors, relative_standard_errors, rms, scores
from signalprop.results.profile import Profile
from signalprop.results.series import Series

LINEAR = 0.7  # standard deviation of ln up to which `variance_excess` is right (docs/theory/network.md)


@dataclass(frozen=True)
class Errors:
    """Agreement of one quantity over the sublayers: errors as of `signalprop.results.comparison`.

    Attributes:
        signed: mean with the sign. se: median standard error of the measurement. predicted_se: by the predicted
            scatter, 0 where it is not derived. z: root mean square over the predicted scatter of so many networks,
            None where it is not derived. z_of_seeds: over the standard errors instead; None where nothing scatters.
    """

    median: float
    p95: float
    signed: float
    se: float
    predicted_se: float
    z: float | None
    z_of_seeds: float | None
    target: float

    @property
    def counts(self) -> bool:
        """Whether the measurement is exact enough to tell: three networks may lie near each other by chance."""
        return max(self.se, self.predicted_se) <= self.target / 2


@dataclass(frozen=True)
class Row:
    """One cell.

    Attributes:
        first: ln of the predicted gradient at the first sublayer; first_z: its distance from the measured one over the
            predicted scatter. errors: by quantity, of cells whose profile is kept. logs: ln of the gradient variance,
            predicted and measured.
    """

    cell: Cell
    measured: Measured
    fidelity: str
    first: float
    first_z: float | None
    errors: dict[str, Errors] = field(default_factory=dict)
    logs: tuple[FloatArray, FloatArray] | None = None

    @property
    def r_squared(self) -> float | None:
        """Of ln of the gradient variance within the cell."""
        return None if self.logs is None else r_squared(*self.logs)


def of_this_width(series: Series) -> Series:
    """With the means over networks of the cell's width, which are what is measured, in place of wide ones'.

    Where one network's ln scatters by over .7 the response is no longer linear, and what the mean is above not known.
    """
    excess, above, sd = series.variance_excess, series.token_correlation_excess, series.variance_sd
    if excess is None or sd is None:
        return series
    known = np.where(sd <= LINEAR, excess, 0.0)
    found = replace(series, log_variance=series.log_variance + known, variance_excess=excess - known)
    if above is None:
        return found
    return replace(found, token_correlation=series.token_correlation + above, token_correlation_excess=0 * above)


def row_of(cell: Cell, measured: Measured) -> Row:
    """Predict a cell anew and compare."""
    a = cell.architecture()
    predicted = predict(cell.parametrization(a), cell.batch(a).statistics(a))
    assert predicted.gradient is not None
    gradient = of_this_width(predicted.gradient["stream_in"])
    first, first_z = float(gradient.log_variance[0]), None
    assert measured.first is not None
    if gradient.variance_sd is not None and gradient.variance_excess is not None:
        above = first + float(gradient.variance_excess[0]) - measured.first[0]
        first_z = above / (float(gradient.variance_sd[0]) / math.sqrt(measured.networks))
    errors = errors_of(predicted, measured)
    logs = None
    if measured.gradient is not None:
        logs = gradient.log_variance[kept(predicted.n_sublayers)], measured.gradient.log_variance
    return Row(cell, measured, predicted.fidelity, first, first_z, errors, logs)


def errors_of(predicted: Profile, measured: Measured) -> dict[str, Errors]:
    """By quantity, of those that are kept."""
    assert predicted.gradient is not None
    mask, n = kept(predicted.n_sublayers), measured.networks
    stream, gradient = (
        of_this_width(predicted.forward["stream_out"].select(mask)),
        of_this_width(predicted.gradient["stream_in"].select(mask)),
    )
    pairs = ((stream, measured.forward), (stream, measured.forward), (gradient, measured.gradient))
    ses, out = standard_errors(measured), {}
    for i, ((name, target), (series, reference)) in enumerate(zip(TARGETS.items(), pairs, strict=True)):
        if reference is not None:
            signed, z = relative_errors(series, reference)[i % 2], scores(series, reference, n)[i % 2]
            size = np.abs(signed)
            middle, p95 = float(np.median(size)), float(np.percentile(size, 95))
            expected = _scatter(series)[i % 2] / math.sqrt(n)
            se = relative_standard_errors(reference)[i % 2]
            assert se is not None
            of_seeds = rms(np.divide(signed, se, out=np.full_like(signed, np.nan), where=se > 1e-6))
            out[name] = Errors(middle, p95, float(np.mean(signed)), ses[name], expected, rms(z), of_seeds, target)
    return out


def _scatter(series: Series) -> tuple[float, float]:
    """Medians of the predicted standard deviations of one network, as errors are counted; 0 where not derived."""
    sd, r_sd = series.variance_sd, series.token_correlation_sd
    if sd is None or r_sd is None:
        return 0.0, 0.0
    return float(np.median(sd)), float(np.median(r_sd / np.maximum(np.abs(series.token_correlation), 0.1)))


def needed_networks(cell: Cell) -> int:
    """Networks of a cell until its standard errors are half of their targets, by the predicted scatter.

    With two fifths more of them, so that the measured errors mostly are, too. It does not depend on what comes out.
    """
    a = cell.architecture()
    predicted = predict(cell.parametrization(a), cell.batch(a).statistics(a))
    assert predicted.gradient is not None
    mask = kept(predicted.n_sublayers)
    stream, gradient = predicted.forward["stream_out"].select(mask), predicted.gradient["stream_in"].select(mask)
    scatter = (*_scatter(stream), _scatter(gradient)[0])
    shares = (sd / (target / 2) for sd, target in zip(scatter, TARGETS.values(), strict=True))
    return math.ceil(1.4 * max(shares) ** 2)
