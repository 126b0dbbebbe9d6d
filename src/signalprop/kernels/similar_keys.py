"""Similar keys of a row: equal tokens, common segments, positions. `docs/theory/kernels.md`, "Equal keys"."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from signalprop.network.moments import FloatArray

_SMALLEST, LARGEST = 1e-4, 1e4  # score variances between which keys are grouped
_FAINT = 1e-9  # distance of a key from the others below which nothing is like it


class SimilarKeys(NamedTuple):
    """The correlation of the scores of two keys, (n, n), and how many keys are like each, (n,).

    Attributes:
        rho: correlation beyond what all keys share, at least 0. shared: e^(s rho - s), what is left of e^s between two.
        log_same: ln of (e^(s rho) - 1) / (e^s - 1), how far two keys count as one in a long row with itself.
        size: keys that are like one, itself included. degree: their correlation, rho of groups; 1 if there are none.
        log_degree: `log_same` there.
    """

    rho: FloatArray
    shared: FloatArray
    log_same: FloatArray
    size: FloatArray
    degree: float
    log_degree: float

    def same(self, counted: float | None = None) -> FloatArray:
        """How far two keys count as one, (n, n); counted: of two of one group, where rows are not long."""
        plain = counted is None or self.log_degree > -1e-9
        return np.exp(self.log_same * (1.0 if plain else math.log(counted or 1.0) / self.log_degree))


def similar_keys(kernel: FloatArray, score: float) -> SimilarKeys:
    """Of keys of such a kernel; score: variance of a row's scores over how far its keys lie apart."""
    about_mean, n = centred(kernel), len(kernel)
    # unequal keys share what they have in common on average
    rest = 1 - np.maximum(correlation(about_mean), 0.0)
    shared = float((rest * kernel).sum()) / max(float(rest.sum()), 1e-300)
    rho = np.maximum(correlation(kernel - shared), 0.0)
    per_token = float(np.maximum(np.diagonal(about_mean), 0.0).mean())
    s = min(max(score * per_token, _SMALLEST), LARGEST)
    squares = rho**2
    np.fill_diagonal(squares, 0.0)
    total = float(squares.sum())
    degree = float((squares * rho).sum()) / total if total > 0 else 1.0
    size = np.minimum(1 + squares.sum(1) / degree**2, n)
    return SimilarKeys(
        rho, np.exp(s * (rho - 1)), _log_same(s, rho), size, degree, float(_log_same(s, np.array(degree)))
    )


def _log_same(s: float, rho: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):  # independent
        return np.asarray(s * (rho - 1) + np.log(-np.expm1(-s * rho)) - math.log(-math.expm1(-s)))


def centred(kernel: FloatArray) -> FloatArray:
    """A kernel about the mean of all."""
    mean = kernel.mean(0)
    return np.asarray(kernel - mean - mean[:, None] + mean.mean())


def correlation(kernel: FloatArray) -> FloatArray:
    """The correlation of two keys in what they share; a key that shares nothing is like itself only."""
    per_token = np.diagonal(kernel)
    root = np.where(per_token > _FAINT, 1 / np.sqrt(np.maximum(per_token, _FAINT)), 0.0)
    rho = np.clip(kernel * np.outer(root, root), -1.0, 1.0)
    np.fill_diagonal(rho, 1.0)
    return np.asarray(rho)
