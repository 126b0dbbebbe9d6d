"""Small errors through a chain of sublayers: means and covariances of (ln variance, correlation), affine recursions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.results.series import Series


def congruent(by: FloatArray, covariance: FloatArray) -> FloatArray:
    """A C A^T."""
    return np.asarray(by @ covariance @ np.swapaxes(by, -1, -2))


def to_state(r: FloatArray | float, sized: FloatArray | float = 1.0) -> FloatArray:
    """From (variance, covariance), of variance 1, to (ln variance, correlation); 0 in the first where it is normed."""
    out = np.zeros((*np.shape(r), 2, 2))
    out[..., 0, 0] = sized
    out[..., 1, 0], out[..., 1, 1] = -np.asarray(r), 1.0
    return out


def bend_of_ratio(r: FloatArray, noise: FloatArray) -> FloatArray:
    """Mean of (ln variance, correlation) over what they are without noise in (variance, covariance), to second order.

    Args:
        noise: its covariance, of variance 1; (..., 2, 2).
    """
    return np.stack([-noise[..., 0, 0] / 2, r * noise[..., 0, 0] - noise[..., 0, 1]], -1)


def chain(left: FloatArray, right: FloatArray, added: FloatArray, start: FloatArray) -> FloatArray:
    """X_(l+1) = A_l X_l B_l + C_l for all l, (n, j, k)."""
    found, x = [], start
    for a, b, c in zip(left, right, added, strict=True):
        x = a @ x @ b + c
        found.append(x)
    return np.stack(found)


def covariances(by: FloatArray, noise: FloatArray, start: FloatArray) -> FloatArray:
    """Covariances C_(l+1) = A_l C_l A_l^T + noise_l for all l, (n, 2, 2)."""
    return chain(by, np.swapaxes(by, 1, 2), noise, start)


def means(by: FloatArray, added: FloatArray, start: FloatArray) -> FloatArray:
    """Means x_(l+1) = A_l x_l + added_l for all l, (n, 2)."""
    return chain(by, np.ones((len(by), 1, 1)), added[..., None], start[:, None])[..., 0]


def banded(series: Series, one: FloatArray, many: FloatArray, mean: FloatArray) -> Series:
    """The series with its bands; as it is, where one of them is not finite.

    Args:
        one, many: covariances of (ln variance, correlation) over networks that read one sequence, or many, (n, 2, 2).
        mean: of such networks, above the prediction: of ln of the variance, and of the correlation where known, (k, n).
    """
    sd, sd_many = (np.sqrt(np.maximum(np.stack([c[:, 0, 0], c[:, 1, 1]]), 0.0)) for c in (one, many))
    if not all(np.isfinite(x).all() for x in (sd, sd_many, mean)):
        return series
    names = ("variance_sd", "token_correlation_sd", "variance_sd_many", "token_correlation_sd_many",
             "variance_excess", "token_correlation_excess")  # fmt: skip
    return replace(series, **dict(zip(names, (*sd, *np.minimum(sd, sd_many), *mean), strict=False)))
