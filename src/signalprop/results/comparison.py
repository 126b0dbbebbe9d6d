"""How well two Profiles agree, quantity by quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import layout
from signalprop.network.moments import FloatArray
from signalprop.results.findings import Findings
from signalprop.results.profile import Profile, data_frame
from signalprop.results.series import SILENT, Series
from signalprop.results.text import network_in_words, percent
from signalprop.results.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = "signalprop/comparison/1"
_SMALLEST = 1e-6  # standard deviation below which a quantity is the same in all networks


@typed
@dataclass(frozen=True)
class Agreement:
    """Agreement of one quantity over the sublayers.

    Attributes:
        quantity: `forward variance`, `gradient token correlation`, ...
        r_squared: coefficient of determination of the logarithm of the variance (None for correlations, and where
            the reference does not vary, or by less than twice its standard errors: there the share of explained
            variation has no meaning).
        median, percentile_95: errors, of a variance |ln(predicted / reference)|, of a correlation |difference| /
            max(|reference|, 0.1). signed: their mean with the sign, positive where the prediction is too high.
        standard_error: median relative standard error of the reference, None when it has no error bars.
        z: root mean square of the differences over what so many networks of this width scatter by, as predicted; about
            1 where nothing but scatter is left. None where that is not derived, or nothing scatters.
    """

    quantity: str
    r_squared: float | None
    median: float
    percentile_95: float
    standard_error: float | None
    signed: float = 0.0
    z: float | None = None


@typed
@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A predicted and a measured Profile side by side, with their agreement.

    Attributes:
        predicted, measured: the two profiles. agreements: one for each quantity that both have.
    """

    predicted: Profile
    measured: Profile
    agreements: tuple[Agreement, ...]

    def __repr__(self) -> str:
        network = network_in_words(self.predicted.architecture)
        errors = ", ".join(f"{item.quantity} {percent(item.median)}" for item in self.agreements[::2])
        return f"<Comparison: {network}, {self.predicted.scheme}; median errors: {errors}>"

    @property
    def gradient_ratio(self) -> tuple[float | None, float | None]:
        """The predicted and the measured `Profile.gradient_ratio`."""
        return self.predicted.gradient_ratio, self.measured.gradient_ratio

    @property
    def findings(self) -> Findings:
        """Those of the measured profile, then those of the prediction that it does not have."""
        found = self.measured.findings
        names = {item.name for item in found}
        return found + [item for item in self.predicted.findings if item.name not in names]

    def to_dataframe(self) -> DataFrame:
        """A pandas DataFrame as of `Profile.to_dataframe`, with columns `predicted_...` and `measured_...`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        measured = data_frame(self.measured, "measured_")
        return data_frame(self.predicted, "predicted_").join(measured.iloc[:, 3:])

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary: the agreement table and both profiles."""
        return {
            "schema": SCHEMA,
            "findings": self.findings.to_json(),
            "agreement": [vars(item) for item in self.agreements],
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
        }


def relative_errors(predicted: Series, reference: Series) -> tuple[FloatArray, FloatArray]:
    """Errors with their sign: ln(predicted / reference) of the variance, difference / max(|r|, 0.1) of the correlation.

    Shapes as those of the series. An error of a logarithm is as large for half as for twice; it is held at 50.
    """
    both_zero = np.maximum(predicted.log_variance, reference.log_variance) < SILENT
    same = both_zero | (predicted.log_variance == reference.log_variance)
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(same, 0.0, predicted.log_variance - reference.log_variance)
    r, r_reference = predicted.token_correlation, reference.token_correlation
    return np.clip(log_ratio, -50.0, 50.0), (r - r_reference) / np.maximum(np.abs(r_reference), 0.1)


def relative_standard_errors(reference: Series) -> tuple[FloatArray | None, FloatArray | None]:
    """Standard errors of a mean over networks, as `relative_errors` counts; None if there are none."""
    r_se = reference.token_correlation_se
    if r_se is not None:
        with np.errstate(over="ignore"):  # of an error near the largest double, which then is infinite
            r_se = r_se / np.maximum(np.abs(reference.token_correlation), 0.1)
    return reference.variance_se, r_se


def scores(predicted: Series, reference: Series, networks: int) -> tuple[FloatArray | None, FloatArray | None]:
    """z of every sublayer's ln variance and token correlation: the difference over the scatter of a mean of networks.

    The scatter is the predicted one, of networks that read one sequence; that of many is less, so z is too small then.
    What the mean of networks of this width has above the prediction is taken into account. None: not derived. NaN:
    nothing scatters.
    """
    if predicted.variance_sd is None or predicted.token_correlation_sd is None:
        return None, None
    excess = 0.0 if predicted.variance_excess is None else predicted.variance_excess
    r_excess = 0.0 if predicted.token_correlation_excess is None else predicted.token_correlation_excess

    def score(difference: FloatArray, sd: FloatArray) -> FloatArray:
        size = sd / np.sqrt(networks)
        unknown = np.full_like(difference, np.nan)
        return np.asarray(np.divide(difference, size, out=unknown, where=size > _SMALLEST))

    with np.errstate(invalid="ignore"):
        above = predicted.log_variance + excess - reference.log_variance
    r = predicted.token_correlation + r_excess - reference.token_correlation
    return score(above, predicted.variance_sd), score(r, predicted.token_correlation_sd)


def rms(values: FloatArray | None) -> float | None:
    """Root mean square of what is finite; None where nothing is."""
    known = np.zeros(0) if values is None else values[np.isfinite(values)]
    return float(np.sqrt(np.mean(known**2))) if known.size else None


def r_squared(predicted: FloatArray, reference: FloatArray, se: FloatArray | None = None) -> float | None:
    """1 - (residual sum of squares) / (total sum of squares).

    None when the reference varies by less than 1 %, or its standard deviation is below two of its standard errors `se`.
    """
    ok = np.isfinite(predicted) & np.isfinite(reference)
    if ok.sum() < 3 or np.ptp(reference[ok]) < 0.01:
        return None
    if se is not None and np.std(reference[ok]) < 2 * (rms(se[ok]) or 0.0):
        return None
    residual = float(np.sum((predicted[ok] - reference[ok]) ** 2))
    return 1 - residual / float(np.sum((reference[ok] - reference[ok].mean()) ** 2))


@typed
def compare(predicted: Profile, measured: Profile) -> Comparison:
    """Agreement of a prediction (`predicted`) with a measurement (`measured`), or of any two profiles of one shape."""
    shapes = [profile.forward["stream_out"].variance.shape for profile in (predicted, measured)]
    if not np.array_equal(layout(predicted.architecture).kind, layout(measured.architecture).kind):
        raise InputError(
            f"cannot compare profiles of {predicted.n_sublayers} and {measured.n_sublayers} sublayers; "
            "they must have the same kinds of sublayers in the same order"
        )
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise InputError(f"cannot compare sweeps (shapes {shapes[0]} and {shapes[1]}); select one member of each")
    agreements, drawn = [], int(measured.statistics.get("networks", measured.n_seeds or 1))
    for name, point in (("forward", "stream_out"), ("branch", "branch")):
        agreements += _agreements(name, predicted.forward[point], measured.forward[point], drawn)
    if predicted.gradient is not None and measured.gradient is not None:
        agreements += _agreements("gradient", predicted.gradient["stream_in"], measured.gradient["stream_in"], drawn)
    return Comparison(predicted, measured, tuple(agreements))


def _agreements(name: str, predicted: Series, reference: Series, networks: int) -> list[Agreement]:
    variance, correlation = relative_errors(predicted, reference)
    z = scores(predicted, reference, networks)

    def row(
        quantity: str, errors: FloatArray, r2: float | None, se: FloatArray | None, z: FloatArray | None
    ) -> Agreement:
        return Agreement(
            quantity=f"{name} {quantity}",
            r_squared=r2,
            median=float(np.median(np.abs(errors))),
            percentile_95=float(np.percentile(np.abs(errors), 95)),
            standard_error=None if se is None else float(np.median(se)),
            signed=float(np.mean(errors)),
            z=rms(z),
        )

    se, r_se = relative_standard_errors(reference)
    explained = r_squared(predicted.log_variance, reference.log_variance, se)
    return [
        row("variance", variance, explained, se, z[0]),
        row("token correlation", correlation, None, r_se, z[1]),
    ]
