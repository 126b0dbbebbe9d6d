"""Small errors through a chain of sublayers: means and covariances of (ln variance, correlation), affine recursions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.results.series import Series


def congruent(by: FloatArray, covariance: FloatArray) -> FloatArray:
    """A C A^T."""
    return np.asarray(by @ covariance @ np.swapaxes(by, -1, -2))


def to_state(r: FloatArray, sized: FloatArray | None = None) -> FloatArray:
    """From (variance, covariance), of variance 1, to (ln variance, correlation); 0 in the first where it is normed."""
    out = np.zeros((len(r), 2, 2))
    out[:, 0, 0] = 1.0 if sized is None else sized
    out[:, 1, 0], out[:, 1, 1] = -r, 1.0
    return out


def bend_of_ratio(r: FloatArray, noise: FloatArray) -> FloatArray:
    """Mean of (ln variance, correlation) over what they are without noise in (variance, covariance), to second order.

    Args:
        noise: its covariance, of variance 1; (..., 2, 2).
    """
    return np.stack([-noise[..., 0, 0] / 2, r * noise[..., 0, 0] - noise[..., 0, 1]], -1)


def of_gaussian_sizes(r: FloatArray, d: int) -> FloatArray:
    """Mean cosine of two Gaussian tokens of d features over what their covariance by one size of all tokens is."""
    return np.asarray(r * (1 - r) * (1.5 * r - 0.5) / d)


def affine(matrix: FloatArray, added: FloatArray, start: FloatArray) -> FloatArray:
    """x_(l+1) = matrix_l x_l + added_l for all l, (n, k)."""
    out = [start]
    for a, x in zip(matrix, added, strict=True):
        out.append(a @ out[-1] + x)
    return np.array(out[1:])


def chained(by: FloatArray, noise: FloatArray, start: FloatArray) -> FloatArray:
    """C_(l+1) = A_l C_l A_l^T + noise_l for all l, (n, 2, 2)."""
    out = [start]
    for a, c in zip(by, noise, strict=True):
        out.append(a @ out[-1] @ a.T + c)
    return np.array(out[1:])


def banded(
    series: Series, covariance: FloatArray, excess: FloatArray | None = None, above: FloatArray | None = None
) -> Series:
    """The series with its standard deviations and means; as it is, where one of them is not finite."""
    sd = np.sqrt(np.maximum(np.stack([covariance[:, 0, 0], covariance[:, 1, 1]]), 0.0))
    if not all(np.isfinite(x).all() for x in (sd, excess, above) if x is not None):
        return series
    return replace(
        series, variance_sd=sd[0], token_correlation_sd=sd[1], variance_excess=excess, token_correlation_excess=above
    )


def banded_of_many(series: Series, covariance: FloatArray) -> Series:
    """The series with the standard deviations of one network over many sequences, at most those over one."""
    if series.variance_sd is None or series.token_correlation_sd is None or not np.isfinite(covariance).all():
        return series
    sd = np.sqrt(np.maximum(np.stack([covariance[:, 0, 0], covariance[:, 1, 1]]), 0.0))
    return replace(
        series,
        variance_sd_many=np.minimum(sd[0], series.variance_sd),
        token_correlation_sd_many=np.minimum(sd[1], series.token_correlation_sd),
    )
