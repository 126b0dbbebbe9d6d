"""Numbers of a token kernel, and of the kernels at all depths: distances, effective ranks, cosines by lag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from signalprop.kernels.scaled_kernel import normalised
from signalprop.network.moments import FloatArray
from signalprop.theory.log_arithmetic import inverse_roots

RANGE = 600.0  # of ln of a raw number: beyond, doubles end
_ROWS = 64  # of a kernel that are read at a time: they stay in the cache


@dataclass(frozen=True, eq=False)
class KernelSeries:
    """Numbers of the kernels at depths 0 (the input) to n_layers (after the last layer); arrays (n_layers + 1,).

    Attributes:
        distance: mean of 1 - cosine over pairs of different positions, without the cancellation of 1 - mean.
        min_cosine: smallest cosine of two positions.
        lags: mean cosine of positions that stand so far apart, by that distance.
        effective_rank: e to the entropy of the eigenvalues of the normalised kernel (cosines / T), from 1, all tokens
            equal, to T; NaN if it was not computed.
        log_diagonal: ln of the mean raw diagonal. diagonal_sd, diagonal_min, diagonal_max: over positions. For a
            gradient relative to the mean diagonal at the top.
    """

    distance: FloatArray
    min_cosine: FloatArray
    lags: Mapping[int, FloatArray]
    effective_rank: FloatArray
    log_diagonal: FloatArray
    diagonal_sd: FloatArray
    diagonal_min: FloatArray
    diagonal_max: FloatArray

    @property
    def mean_cosine(self) -> FloatArray:
        """Mean cosine over pairs of different positions."""
        return 1 - self.distance

    @property
    def diagonal_mean(self) -> FloatArray:
        """Mean raw diagonal, held within e^-600 to e^600, as all raw numbers and matrices are."""
        return np.asarray(np.exp(np.clip(self.log_diagonal, -RANGE, RANGE)))

    def columns(self) -> dict[str, FloatArray]:
        """Every column by its name in JSON; a lag is `lag_5`."""
        out = {"mean_cosine": self.mean_cosine, "distance": self.distance, "min_cosine": self.min_cosine}
        out |= {f"lag_{lag}": column for lag, column in self.lags.items()}
        out |= {"effective_rank": self.effective_rank, "diagonal_mean": self.diagonal_mean}
        names = ("log_diagonal", "diagonal_sd", "diagonal_min", "diagonal_max")
        return out | {name: getattr(self, name) for name in names}


def effective_rank(kernel: FloatArray) -> float:
    """e to the entropy of the eigenvalues of the normalised kernel over T: 1 (all equal) to T (all orthogonal).

    NaN for a kernel that left the range of a double.
    """
    cosines = normalised(kernel)
    if not np.isfinite(cosines).all():
        return math.nan
    values = np.maximum(np.linalg.eigvalsh(cosines) / len(kernel), 0.0)
    values = values[values > 0]
    return math.exp(-float(np.sum(values * np.log(values))))


def distances(kernel: FloatArray) -> tuple[float, float]:
    """(mean, largest) of 1 - cosine over pairs of different positions; NaN without a pair.

    From (K_ii - K_ij) + (K_jj - K_ij) - (sqrt K_ii - sqrt K_jj)^2, small for nearly equal tokens, so that
    nothing is lost beyond the rounding of K itself.
    """
    diagonal, t = np.diagonal(kernel), len(kernel)
    if t < 2:
        return math.nan, math.nan
    root, inverse = np.sqrt(np.maximum(diagonal, 0.0)), inverse_roots(diagonal)
    total, largest = 0.0, -math.inf
    for start in range(0, t - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, t))
        gap = _gaps(diagonal[rows, None], diagonal[start:], kernel[rows, start:], root[rows, None], root[start:])
        gap *= inverse[rows, None]
        gap *= inverse[start:]
        if not inverse.all():
            gap[(inverse[rows, None] == 0) | (inverse[start:] == 0)] = 1.0
        m = len(gap)
        gap[np.tril_indices(m)] = 0.0  # pairs count once, a position by itself not at all
        total += float(gap.sum())
        largest = max(largest, float(gap.max()))
    return max(total / (t * (t - 1) / 2), 0.0), max(largest, 0.0)


def _gaps(left: FloatArray, right: FloatArray, shared: FloatArray, root: FloatArray, other: FloatArray) -> FloatArray:
    """sqrt(K_ii K_jj) - K_ij."""
    out = left - shared
    out += right - shared
    apart = root - other
    apart *= apart
    out -= apart
    out *= 0.5
    return out


def lag_cosine(kernel: FloatArray, lag: int) -> float:
    """Mean cosine of positions `lag` apart."""
    diagonal = np.diagonal(kernel)
    inverse = inverse_roots(diagonal)
    return float(np.mean(np.diagonal(kernel, lag) * inverse[:-lag] * inverse[lag:]))


def pooled(items: Sequence[KernelSeries]) -> tuple[KernelSeries, dict[str, FloatArray] | None]:
    """Means and standard deviations over sequences; of a single one its numbers, and None."""
    if len(items) == 1:
        return items[0], None
    stacked = {name: np.stack([item.columns()[name] for item in items]) for name in items[0].columns()}
    mean = {name: values.mean(0) for name, values in stacked.items()}
    logs = stacked["log_diagonal"]
    some = logs > -np.inf  # a gradient that did not come so far has none
    highest = np.where(some.any(0), logs.max(0), 0.0)
    with np.errstate(divide="ignore"):
        mean["log_diagonal"] = highest + np.log(np.exp(logs - highest).mean(0))  # of the mean, not the mean of it
    spread = {name: values.std(0, ddof=1) for name, values in stacked.items() if name != "log_diagonal"}
    spread["log_diagonal"] = np.where(some.all(0), np.where(some, logs, 0.0).std(0, ddof=1), np.nan)
    series = KernelSeries(
        lags={lag: mean[f"lag_{lag}"] for lag in items[0].lags},
        **{item.name: mean[item.name] for item in fields(KernelSeries) if item.name != "lags"},
    )
    return series, {name: spread[name] for name in stacked}
