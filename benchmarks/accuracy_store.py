"""What was measured of the cells of docs/accuracy.md, one line each in docs/accuracy.json; predictions are not in it.

Means over networks, at no more than 64 sublayers evenly spaced from the first to the last, with their standard errors.
Of cells that were measured when only errors were kept, the first gradient is there alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy_grid import TARGETS, Cell
from signalprop.files.storage import read_json, write_json
from signalprop.network.moments import FloatArray
from signalprop.results.comparison import relative_standard_errors
from signalprop.results.profile import Profile
from signalprop.results.series import Series

STORE = Path("docs/accuracy.json")
SCHEMA = "signalprop/accuracy/2"
_KEPT = 64
_DIGITS = {"log_variance": 7, "variance_se": 3, "token_correlation": 6, "token_correlation_se": 3}


def kept(n_sublayers: int) -> NDArray[np.bool_]:
    """Which sublayers the store has."""
    mask = np.zeros(n_sublayers, np.bool_)
    mask[np.linspace(0, n_sublayers - 1, min(n_sublayers, _KEPT)).round().astype(np.intp)] = True
    return mask


@dataclass(frozen=True)
class Measured:
    """Means over networks of one cell.

    Attributes:
        networks: seeds 0 to networks - 1. seconds: of processor time that they took.
        first: ln of the first sublayer's gradient variance over the last one's, and its relative standard error.
        forward, gradient: the stream after, and the gradient before, every sublayer of `kept`; None: not kept.
    """

    networks: int
    seconds: float
    first: tuple[float, float]
    forward: Series | None = None
    gradient: Series | None = None

    @staticmethod
    def of(profile: Profile, seconds: float) -> Measured:
        """From a measured profile."""
        mask = kept(profile.n_sublayers)
        assert profile.gradient is not None and profile.n_seeds is not None
        return Measured.at(
            profile.n_seeds, seconds, profile.forward["stream_out"].select(mask),
            profile.gradient["stream_in"].select(mask),
        )  # fmt: skip

    @staticmethod
    def at(networks: int, seconds: float, forward: Series, gradient: Series) -> Measured:
        """From series of the sublayers that are kept."""
        assert gradient.variance_se is not None
        first = float(gradient.log_variance[0]), float(gradient.variance_se[0])
        return Measured(networks, seconds, first, forward, gradient)

    def and_more(self, other: Measured) -> Measured:
        """The mean over the networks of both, with the standard error of the whole."""
        assert self.forward and other.forward and self.gradient and other.gradient
        share = self.networks / (self.networks + other.networks)
        return Measured.at(
            self.networks + other.networks, self.seconds + other.seconds,
            _mean(self.forward, other.forward, share), _mean(self.gradient, other.gradient, share),
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """As the store has it."""
        out: dict[str, Any] = {"networks": self.networks, "seconds": round(self.seconds, 1), "first": list(self.first)}
        for name in ("forward", "gradient"):
            series = getattr(self, name)
            if series is not None:
                columns = ((key, getattr(series, key), digits) for key, digits in _DIGITS.items())
                out[name] = {key: [float(f"{x:.{digits}g}") for x in column] for key, column, digits in columns}
        return out

    @staticmethod
    def from_row(row: dict[str, Any]) -> Measured:
        """The inverse of `row`."""
        series = {name: Series.of(**row[name]) for name in ("forward", "gradient") if name in row}
        return Measured(row["networks"], row["seconds"], (row["first"][0], row["first"][1]), **series)


def _mean(one: Series, other: Series, share: float) -> Series:
    """Of two means over different networks; `share` of them are behind the first."""
    top = np.maximum(one.log_variance, other.log_variance)
    first, second = share * np.exp(one.log_variance - top), (1 - share) * np.exp(other.log_variance - top)
    errors = [(s.variance_se, s.token_correlation_se) for s in (one, other)]
    (se, r_se), (other_se, other_r_se) = ((_known(a), _known(b)) for a, b in errors)
    return Series.of(
        log_variance=top + np.log(first + second),
        token_correlation=share * one.token_correlation + (1 - share) * other.token_correlation,
        variance_se=np.hypot(first * se, second * other_se) / (first + second),
        token_correlation_se=np.hypot(share * r_se, (1 - share) * other_r_se),
    )


def _known(column: FloatArray | None) -> FloatArray:
    assert column is not None
    return column


def read_store() -> dict[Cell, Measured]:
    """All cells that were measured."""
    rows = read_json(STORE)["cells"]
    return {Cell(**{k: row[k] for k in Cell.__dataclass_fields__}): Measured.from_row(row) for row in rows}


def write_store(measured: dict[Cell, Measured]) -> None:
    """Write all cells, cheap ones first."""
    cells = sorted(measured, key=lambda cell: (cell.cost, cell.name))
    write_json(STORE, {"schema": SCHEMA, "cells": [asdict(cell) | measured[cell].row() for cell in cells]})


def imprecision(measured: Measured) -> float:
    """The largest standard error over half of its target; infinite where only the first gradient is kept."""
    errors = standard_errors(measured)
    return max(error / (TARGETS[quantity] / 2) for quantity, error in errors.items()) if errors else math.inf


def standard_errors(measured: Measured) -> dict[str, float]:
    """Median standard error of every quantity over the sublayers, as errors are counted; of all that are kept."""
    if measured.forward is None or measured.gradient is None:
        return {}
    found = (*relative_standard_errors(measured.forward), relative_standard_errors(measured.gradient)[0])
    return {name: float(np.median(_known(se))) for name, se in zip(TARGETS, found, strict=True)}
