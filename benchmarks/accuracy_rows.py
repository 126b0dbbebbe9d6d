"""A cell of docs/accuracy.md: what is predicted now, against what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from benchmarks.accuracy_grid import TARGETS, Cell
from benchmarks.accuracy_store import Measured, kept, standard_errors
from signalprop.network.moments import FloatArray
from signalprop.prediction import predict
from signalprop.results.comparison import r_squared, relative_errors, rms, scores


@dataclass(frozen=True)
class Errors:
    """Agreement of one quantity over the sublayers: errors as of `signalprop.results.comparison`.

    Attributes:
        signed: mean with the sign. se: median standard error of the measurement. z: root mean square over the predicted
            scatter of so many networks, None where that is not derived.
    """

    median: float
    p95: float
    signed: float
    se: float
    z: float | None
    target: float

    @property
    def counts(self) -> bool:
        """Whether the measurement is exact enough to tell."""
        return self.se <= self.target / 2


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


def row_of(cell: Cell, measured: Measured) -> Row:
    """Predict a cell anew and compare."""
    a = cell.architecture()
    predicted = predict(cell.parametrization(a), cell.batch(a).statistics(a))
    assert predicted.gradient is not None
    gradient = predicted.gradient["stream_in"]
    first, first_z = float(gradient.log_variance[0]), None
    if gradient.variance_sd is not None and gradient.variance_excess is not None:
        above = first + float(gradient.variance_excess[0]) - measured.first[0]
        first_z = above / (float(gradient.variance_sd[0]) / math.sqrt(measured.networks))
    row = Row(cell, measured, predicted.fidelity, first, first_z)
    if measured.forward is None or measured.gradient is None:
        return row
    mask = kept(predicted.n_sublayers)
    stream, gradient = predicted.forward["stream_out"].select(mask), gradient.select(mask)
    signed = (*relative_errors(stream, measured.forward), relative_errors(gradient, measured.gradient)[0])
    z = (
        *scores(stream, measured.forward, measured.networks),
        scores(gradient, measured.gradient, measured.networks)[0],
    )
    ses = standard_errors(measured)
    errors = {name: _errors(signed[i], z[i], ses[name], target) for i, (name, target) in enumerate(TARGETS.items())}
    logs = gradient.log_variance, measured.gradient.log_variance
    return Row(cell, measured, predicted.fidelity, first, first_z, errors, logs)


def _errors(signed: FloatArray, z: FloatArray | None, se: float, target: float) -> Errors:
    size = np.abs(signed)
    middle, p95 = float(np.median(size)), float(np.percentile(size, 95))
    return Errors(middle, p95, float(np.mean(signed)), se, rms(z), target)
