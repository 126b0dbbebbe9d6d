"""The moments of one probe point: the value that every formula takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from signalprop.files.validation import typed

FloatArray = NDArray[np.float64]
Array = float | FloatArray


@typed
@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of a tensor of shape (batch, tokens, features), over batch, tokens and features.

    Every field is a float or an array; arrays broadcast against each other, so that one call serves a whole sweep.
    Gradients are Moments too, with mean 0.

    Attributes:
        mean: mean of one entry.
        variance: variance of one entry (not a standard deviation).
        token_correlation: correlation of the same feature at two different tokens (r^l in Transformers Get Stable).
        feature_correlation: correlation of two features of the same token (r^d there).
    """

    mean: Array = 0.0
    variance: Array = 1.0
    token_correlation: Array = 0.0
    feature_correlation: Array = 0.0

    @property
    def covariance(self) -> Array:
        """Covariance of the same feature at two different tokens."""
        return self.token_correlation * self.variance

    @property
    def second_moment(self) -> Array:
        """Mean square of one entry: what linear maps and attention see."""
        return self.variance + self.mean**2


def ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 where the denominator is 0: the correlation of a constant is 0 by convention."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    out = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom != 0)
    return out if out.ndim else float(out)
