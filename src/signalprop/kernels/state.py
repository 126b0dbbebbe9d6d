"""A token kernel and its scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.grid import Grid
from signalprop.network.moments import FloatArray
from signalprop.theory.logs import LARGEST


def inverse_roots(diagonal: FloatArray) -> FloatArray:
    """1 / sqrt of every entry, by which a norm divides; 0 below 1e-300, where nothing is left that it could bring to
    size 1, and whose inverse a double may not hold."""
    good = diagonal > 1e-300
    return np.divide(1.0, np.sqrt(np.where(good, diagonal, 1.0)), out=np.zeros(len(diagonal)), where=good)


def normalised(kernel: FloatArray) -> FloatArray:
    """Cosines: K_ij / sqrt(K_ii K_jj), (T, T); 0 beside positions without any signal."""
    own = inverse_roots(np.diagonal(kernel))
    out = kernel * own * own[:, None]
    np.fill_diagonal(out, 1.0)
    return np.asarray(out)


def exp_of(log_scale: float) -> float:
    """e^log_scale, held where products of it with ordinary numbers are doubles."""
    return math.exp(min(max(log_scale, -LARGEST), LARGEST))


@dataclass(frozen=True)
class State:
    """A kernel of shape (T, T) times exp(log_scale); the scale keeps deep stacks within range."""

    kernel: FloatArray
    log_scale: float = 0.0

    def rescaled(self) -> State:
        """The same kernel with mean diagonal 1 (unless it is zero)."""
        mean = float(np.mean(np.diagonal(self.kernel)))
        return State(self.kernel / mean, self.log_scale + math.log(mean)) if mean > 0 else self

    def absolute(self) -> FloatArray:
        """The kernel itself; a scale beyond the range of a double is held at its edge."""
        return self.kernel * math.exp(min(max(self.log_scale, -700.0), 700.0))

    def plus(self, other: State) -> State:
        """The sum of two kernels, rescaled."""
        sizes = [float(np.mean(np.diagonal(part.kernel))) for part in (self, other)]
        if min(sizes) <= 0:  # nothing has no scale
            return (self if sizes[1] <= 0 else other).rescaled()
        top = max(self.log_scale, other.log_scale)
        left, right = (math.exp(max(part.log_scale - top, -745.0)) for part in (self, other))
        mean = left * sizes[0] + right * sizes[1]
        out = self.kernel * (left / mean)
        out += other.kernel * (right / mean)
        return State(out, top + math.log(mean))

    def times(self, factor: float) -> State:
        """The kernel times a number >= 0."""
        if factor > 0:
            return State(self.kernel, self.log_scale + math.log(factor))
        return State(np.broadcast_to(0.0, self.kernel.shape), self.log_scale)

    def moments(self, keep: NDArray[np.bool_] | Grid | None = None) -> tuple[float, float]:
        """(log variance, token correlation), averaged over positions and pairs of positions.

        Args:
            keep: the positions that count, None: all; or the grid that the kernel stands on.
        """
        if isinstance(keep, Grid):
            t = keep.tokens
            diagonal, pairs = keep.sums(self.kernel)
        else:
            kernel = self.kernel if keep is None else self.kernel[np.ix_(keep, keep)]
            t, diagonal = len(kernel), float(np.trace(kernel))
            pairs = float(kernel.sum()) - diagonal
        if diagonal <= 0:
            return -1e12, 0.0
        pairs = pairs / (t * (t - 1)) if t > 1 else 0.0
        return self.log_scale + math.log(diagonal / t), min(1.0, max(-1.0, pairs / (diagonal / t)))

    def overlap(self, other: State, keep: NDArray[np.bool_] | Grid | None = None) -> float:
        """sum_ij A_ij B_ij / (tr A tr B) over positions that count; 0 where one of them is zero."""
        sizes = self.trace(keep) * other.trace(keep)
        if sizes <= 0:
            return 0.0
        if isinstance(keep, Grid):
            (off, own), (off_other, own_other) = keep.split(self.kernel), keep.split(other.kernel)
            return keep.total(off * off_other, own * own_other) / sizes
        product = self.kernel * other.kernel
        return float(product.sum() if keep is None else keep @ product @ keep) / sizes

    def trace(self, keep: NDArray[np.bool_] | Grid | None = None) -> float:
        """Sum over the positions that count of the kernel's diagonal."""
        if isinstance(keep, Grid):
            return float(keep.weights @ keep.split(self.kernel)[1])
        diagonal = np.diagonal(self.kernel)
        return float(diagonal.sum() if keep is None else diagonal[keep].sum())
