"""What several residual streams share: the n x n covariance of a Profile, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import FloatArray

STREAM_COVARIANCE = "stream_covariance"  # in a Profile's statistics


def over_their_mean(covariance: FloatArray) -> FloatArray:
    """Covariances of streams (..., n, n) over the mean of their variances; 0 without a signal."""
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / covariance.shape[-1]
    return np.asarray(np.divide(covariance, mean, out=np.zeros_like(covariance), where=mean > 0))


def covariance_of(statistics: Mapping[str, Any]) -> FloatArray | None:
    """The covariance of a Profile's streams after every sublayer, (sublayers, n, n); None of one stream."""
    found = statistics.get(STREAM_COVARIANCE)
    return None if found is None else np.asarray(found, np.float64)


def alike(covariance: FloatArray) -> FloatArray:
    """The mean correlation of two different streams, of covariances (..., n, n); 0 beside a stream without signal."""
    n = covariance.shape[-1]
    size = np.sqrt(np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0.0))
    both = size[..., :, None] * size[..., None, :]
    r = np.divide(covariance, both, out=np.zeros_like(covariance), where=both > 0)
    return np.asarray((r.sum((-2, -1)) - np.trace(r, axis1=-2, axis2=-1)) / (n * (n - 1)))


def check_covariance(statistics: Mapping[str, Any], sublayers: int, streams: int | None) -> None:
    """Raise InputError where a file's covariance of streams is not (sublayers, n, n) finite numbers."""
    if STREAM_COVARIANCE not in statistics:
        return
    expected = (sublayers, streams, streams)
    try:
        found = covariance_of(statistics)
    except (TypeError, ValueError):
        found = None
    if found is None or found.shape != expected or not np.isfinite(found).all():
        raise InputError(f"statistics.{STREAM_COVARIANCE}: expected finite numbers of shape {expected}")
