"""The effect of every token's size on gradients: norms before branches divide by it. `docs/theory/network.md`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray
from signalprop.theory.scatter.error_chains import affine


def own_part(skipped: FloatArray, added: FloatArray, start: float) -> tuple[FloatArray, FloatArray]:
    """Variance of ln of a token's size beyond what all tokens share, entering and leaving sublayers.

    Args:
        skipped: factor on what enters; 0 after a norm of the sum. added: by the sublayer's draws. start: of the first.
    """
    leaving = affine(skipped[:, None, None] ** 2, added[:, None], np.array([start]))[:, 0]
    return np.concatenate([[start], leaving[:-1]]), leaving


def bend_of_own_sizes(
    parts: tuple[FloatArray, FloatArray], skipped: FloatArray, sent: FloatArray, by_itself: NDArray[np.bool_], top: bool
) -> FloatArray:
    """ln of the mean gradient over the one of tokens of one size, by sublayer; 0 where no norm reads them.

    Args:
        parts, skipped: of `own_part`. sent: share of what comes back through a norm by a branch. by_itself: whether a
            token gets it of its own gradient alone, not of all. top: whether a norm follows the last sublayer.
    """
    entering, leaving = parts
    carried = np.divide(skipped * entering, leaving, out=np.zeros_like(skipped), where=leaving > 0)
    passed = carried * np.where(by_itself, 1.0, 1.0 - sent)
    start = np.array([leaving[-1] * top])
    weighed = affine(passed[::-1, None, None], (sent * entering)[::-1, None], start)[::-1, 0]
    above = np.append(weighed[1:], start)  # covariance of ln of tokens' gradients with their ln 1 / size
    return np.asarray(sent * (entering + np.where(by_itself, carried * above, 0.0)))
