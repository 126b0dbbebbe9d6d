"""Rows of attention weights by their length: moments of their softmax, what rotary positions leave, bounds."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.theory.softmax import softmax_moments

_NODES = 20
# Shares c / s at which ln(n P(c)) of a row is known, and what makes the polynomial of degree 4 through them and (0, 0).
SHARES = np.arange(1, 5) / 4
POLYNOMIAL = np.linalg.inv(SHARES[:, None] ** np.arange(1, 5))


@lru_cache(maxsize=32)
def _nodes(length: int) -> FloatArray:
    """Log-spaced row lengths up to `length`."""
    return np.unique(np.round(np.geomspace(1, length, _NODES)))


def row_moments(score_variance: FloatArray, row_length: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(P_i, J_i): E sum_j A_ij^2 and E |diag A - A A^T|^2 of row i, which sees n_i keys with score variance s_i.

    Exact integrals at about 20 row lengths; n P and n J are taken as linear in ln n in between (error below 1 % for s
    <= 1).
    """
    nodes = np.unique(row_length) if np.ptp(row_length) == 0 else _nodes(int(row_length.max()))
    second, jacobian = np.zeros(len(row_length)), np.zeros(len(row_length))
    upper = np.clip(np.searchsorted(nodes, row_length), 1, max(len(nodes) - 1, 1))
    if len(nodes) == 1:
        share = np.zeros(len(row_length))
    else:
        share = np.log(row_length / nodes[upper - 1]) / np.log(nodes[upper] / nodes[upper - 1])
    for k, n in enumerate(nodes):
        weight = np.where(upper == k, share, 0.0) + np.where(upper == k + 1, 1 - share, 0.0)
        where = np.flatnonzero(weight)
        moments = softmax_moments(score_variance[where], int(n))
        second[where] += weight[where] * n * np.asarray(moments.second)
        jacobian[where] += weight[where] * n * np.asarray(moments.jacobian)
    return np.minimum(second / row_length, 1.0), jacobian / row_length


@lru_cache(maxsize=8)
def rotation(length: int, d_head: int, base: float, fraction: float, causal: bool) -> tuple[FloatArray, FloatArray]:
    """Rotary positions: (rho, omega), rho[D] = mean cosine of the angles between positions D apart, and
    omega[i] = the share of a common key vector's score that row i keeps (mean of rho over pairs of its keys)."""
    rotated = 2 * round(fraction * d_head / 2)
    theta = base ** (-np.arange(0, rotated, 2) / max(rotated, 1))
    lag = np.arange(length)
    share = rotated / d_head
    rho = 1 - share + share * sum((np.cos(lag * f) for f in theta), np.zeros(length)) / max(len(theta), 1)
    n = np.arange(1, length + 1, dtype=np.float64)
    # over the pairs of a row of n keys: (n rho_0 + 2 sum_D (n - D) rho_D) / n^2
    omega = (2 * (n * np.cumsum(rho) - np.cumsum(rho * lag)) - n * rho[0]) / n**2
    return rho, omega if causal else np.full(length, omega[-1])


def held(kernel: FloatArray) -> FloatArray:
    """A kernel whose diagonal is not negative: scores beyond what the expansion holds for can make it so."""
    own = np.diagonal(kernel)
    if own.min() >= 0:
        return kernel
    root = np.sqrt(np.maximum(own, 0.0))
    most = np.outer(root, root)
    return np.asarray(np.clip(kernel, -most, most))
