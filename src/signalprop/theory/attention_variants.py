"""What capped scores and a sink change in an attention's numbers: docs/theory/attention.md."""

from __future__ import annotations

import numpy as np

from signalprop.network.moments import Array, FloatArray
from signalprop.theory.log_arithmetic import plain

_Z = np.linspace(-8.0, 8.0, 161)  # trapezoidal sums of a Gaussian: errors below 1e-13 for what is smooth
_WEIGHT = np.exp(-0.5 * _Z**2) / np.exp(-0.5 * _Z**2).sum()


def capped(s0: Array, cap: float | None) -> Array:
    """Variance of cap tanh(x / cap) for a score x of variance s0; None: s0."""
    if cap is None:
        return s0
    x = np.sqrt(np.asarray(s0, dtype=np.float64))[..., None] * _Z / cap
    return plain(cap * cap * (np.tanh(x) ** 2 @ _WEIGHT))


def share_beside_sink(n: FloatArray, s: FloatArray, common: FloatArray, sink: float) -> FloatArray:
    """Root mean square of the share Z / (Z + e^sink) that the keys of a row keep beside a sink.

    Args:
        n: keys. s: variance of their scores within the row. common: variance of what their scores share, which only a
            sink sees.
    """
    apart = s / n  # of the row's mean of the scores
    log_z = np.log(n) + 0.5 * (s - apart)
    shift = np.sqrt(np.maximum(common + apart, 0.0))[..., None] * _Z
    share = 1 / (1 + np.exp(np.clip(sink - log_z[..., None] - shift, -700, 700)))
    return np.asarray(np.sqrt(share**2 @ _WEIGHT))
