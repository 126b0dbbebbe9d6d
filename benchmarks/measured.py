"""What is kept of a measurement of random networks beside which predictions are made anew.

Means over networks, at no more than 64 sublayers evenly spaced from the first to the last, with their standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy_grid import TARGETS
from signalprop.files.storage import read_json, write_json
from signalprop.network.moments import FloatArray
from signalprop.results.comparison import relative_standard_errors
from signalprop.results.profile import Profile
from signalprop.results.series import Series

C = TypeVar("C")
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
        first: ln of the first sublayer's gradient variance over the last one's, and its relative standard error; None:
            there is no gradient.
        forward, gradient: the stream after, and the gradient before, every sublayer of `kept`; None: not kept (of cells
            of the grid that were measured when only errors were).
    """

    networks: int
    seconds: float
    first: tuple[float, float] | None
    forward: Series | None = None
    gradient: Series | None = None

    @staticmethod
    def of(profile: Profile, seconds: float) -> Measured:
        """From a measured profile; a gradient that is nothing (of a head that starts at zero) is not kept."""
        mask = kept(profile.n_sublayers)
        assert profile.gradient is not None and profile.n_seeds is not None
        gradient = profile.gradient["stream_in"].select(mask) if profile.gradient_scale != 0 else None
        return Measured.at(profile.n_seeds, seconds, profile.forward["stream_out"].select(mask), gradient)

    @staticmethod
    def at(networks: int, seconds: float, forward: Series, gradient: Series | None) -> Measured:
        """From series of the sublayers that are kept."""
        first = None if gradient is None else (float(gradient.log_variance[0]), float(_known(gradient.variance_se)[0]))
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
        first = None if self.first is None else [float(f"{x:.7g}") for x in self.first]
        out: dict[str, Any] = {"networks": self.networks, "seconds": round(self.seconds, 1), "first": first}
        for name in ("forward", "gradient"):
            series = getattr(self, name)
            if series is not None:
                columns = ((key, getattr(series, key), digits) for key, digits in _DIGITS.items())
                out[name] = {key: [float(f"{x:.{digits}g}") for x in column] for key, column, digits in columns}
        return out

    @staticmethod
    def from_row(row: dict[str, Any]) -> Measured:
        """The inverse of `row`."""
        series = {name: _series(row[name]) for name in ("forward", "gradient") if name in row}
        first = None if row["first"] is None else (_log(row["first"][0]), row["first"][1])
        return Measured(row["networks"], row["seconds"], first, **series)


def _log(value: float | None) -> float:
    """Null stands for the logarithm of a variance of 0."""
    return -math.inf if value is None else value


def _series(columns: dict[str, list[float]]) -> Series:
    return Series.of(**{**columns, "log_variance": [_log(x) for x in columns["log_variance"]]})


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


def standard_errors(measured: Measured) -> dict[str, float]:
    """Median standard error over the sublayers of every quantity that is kept, as errors are counted."""
    series = (measured.forward, measured.forward, measured.gradient)
    found = {}
    for i, (name, of) in enumerate(zip(TARGETS, series, strict=True)):
        if of is not None:
            found[name] = float(np.median(_known(relative_standard_errors(of)[i % 2])))
    return found


def read_store(path: Path, kind: type[C]) -> dict[C, Measured]:
    """All cells of a file of them, a dataclass each, that were measured."""
    rows = read_json(path)["cells"] if path.exists() else []
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {kind(**{name: row[name] for name in names}): Measured.from_row(row) for row in rows}


def write_store(path: Path, schema: str, cells: Mapping[Any, Measured]) -> None:
    """Write all cells, a line each."""
    write_json(path, {"schema": schema, "cells": [asdict(cell) | found.row() for cell, found in cells.items()]})
