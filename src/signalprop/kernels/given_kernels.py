"""Token kernels to start from, given as a matrix.

Statistics of tokens (repeated by chance, or real ids) become a kernel by way of the network's embedding
(`signalprop.kernels.embedding_and_loss.input_kernel`); a matrix is taken as the stream that enters the first sublayer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.network.moments import FloatArray

# Rounding of single-precision products, relative to the largest entry: asymmetry and negative eigenvalues up to this.
_ROUNDING = 1e-5


def checked_kernel(matrix: ArrayLike, what: str = "the kernel") -> FloatArray:
    """A matrix as a token kernel in float64, exactly symmetric.

    Raises:
        InputError: not a square matrix of finite numbers, not symmetric, or not positive semi-definite, all up to the
            rounding of single precision.
    """
    try:
        k = np.asarray(matrix, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} is not a matrix of numbers; expected (tokens, tokens)") from None
    if k.ndim != 2 or k.shape[0] != k.shape[1] or k.size == 0:
        raise InputError(f"{what} has shape {k.shape}; expected a square matrix (tokens, tokens)")
    if not np.isfinite(k).all():
        raise InputError(f"{what} holds NaN or infinite values; expected finite numbers")
    size = float(np.abs(k).max())
    if not 0 < size <= 1e30:
        raise InputError(f"{what} has entries up to {size:.3g}; expected some beyond 0, and none beyond 1e30")
    uneven = float(np.abs(k - k.T).max())
    if uneven > _ROUNDING * size:
        raise InputError(f"{what} is not symmetric: entries differ by up to {uneven:.3g}; expected X X^T / d")
    k = (k + k.T) / 2
    lowest = float(np.linalg.eigvalsh(k / size)[0]) * size
    if lowest < -_ROUNDING * size * len(k):
        raise InputError(
            f"{what} is not positive semi-definite: it has the eigenvalue {lowest:.3g}; expected scalar products of "
            "tokens, X X^T / d"
        )
    return np.asarray(k)
