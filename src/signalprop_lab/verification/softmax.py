"""Moments through a softmax over features, as a separate component."""

from __future__ import annotations

import numpy as np

from signalprop.network.moments import Moments, ratio
from signalprop.theory.row_overlaps import log_overlap
from signalprop.theory.softmax import softmax_moments


def softmax(x: Moments, length: int) -> Moments:
    """Softmax over the feature axis, of `length` Gaussian logits (TGS Table 1 gives the small-variance limit).

    The part that all logits of a row share cancels, so only variance·(1 - feature_correlation) matters. Exact for
    mean, variance and feature correlation. The token correlation is that of two softmaxes whose logits have that
    covariance: `row_overlaps.steady` has its error.

    Raises:
        InputError: a negative variance, or a length out of range.
    """
    s = np.maximum(np.asarray(x.variance * (1.0 - x.feature_correlation), dtype=np.float64), 0.0)
    second = softmax_moments(s, length).second
    shared = np.clip(np.asarray(x.token_correlation, dtype=np.float64), 0.0, 1.0)
    overlap = np.asarray(log_overlap(s, shared * s, length))
    variance = np.maximum(second / length - 1.0 / length**2, 0.0)
    covariance = np.minimum(np.expm1(np.maximum(overlap, 0.0)) / length**2, variance)
    feature = -1.0 / (length - 1.0) if length > 1 else 0.0
    return Moments(1.0 / length, variance, ratio(covariance, variance), feature)


def softmax_backward(g: Moments, x: Moments, length: int) -> Moments:
    """Gradient at the logits; exact for gradients independent of the logits.

    The Jacobian diag A - AAᵀ removes constant vectors, hence the factor 1 - g.feature_correlation, which TGS Table 16
    does not have. Its rows sum to zero too: the feature correlation of the result is -1/(length - 1). The token
    correlation is not modelled beyond leading order, where both tokens see the uniform Jacobian.

    Raises:
        InputError: a negative variance, or a length out of range.
    """
    s = np.maximum(np.asarray(x.variance * (1.0 - x.feature_correlation), dtype=np.float64), 0.0)
    variance = g.variance * (1.0 - g.feature_correlation) * softmax_moments(s, length).jacobian / length
    feature = -1.0 / (length - 1.0) if length > 1 else 0.0
    return Moments(0.0, variance, g.token_correlation, feature)
