"""A token kernel and its scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.position_grid import Grid
from signalprop.network.moments import FloatArray
from signalprop.theory.log_arithmetic import LARGEST, NO_SIGNAL, inverse_roots

_AT_ONCE = 16384  # entries that are computed at a time: what is in between stays in the cache


def on_both_sides(kernel: FloatArray, factor: FloatArray) -> FloatArray:
    """Row and column i times factor_i, (T, T)."""
    out, rows = np.empty((len(kernel), len(kernel))), _AT_ONCE // len(kernel) + 1
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        np.multiply(kernel[part], factor, out=out[part])
        out[part] *= factor[part, None]
    return out


def combined(one: FloatArray, x: float, other: FloatArray, y: float) -> FloatArray:
    """x one + y other, (T, T)."""
    out, rows = np.empty((len(one), len(one))), _AT_ONCE // len(one) + 1
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        scaled = other[part] if y == 1 else np.multiply(other[part], y, out=out[part])
        np.add(one[part] if x == 1 else one[part] * x, scaled, out=out[part])
    return out


def normalised(kernel: FloatArray) -> FloatArray:
    """Cosines: K_ij / sqrt(K_ii K_jj), (T, T); 0 beside positions without any signal."""
    out = on_both_sides(kernel, inverse_roots(np.diagonal(kernel)))
    np.fill_diagonal(out, 1.0)
    return out


def exp_of(log_scale: float) -> float:
    """e^log_scale, held where products of it with ordinary numbers are doubles."""
    return math.exp(min(max(log_scale, -LARGEST), LARGEST))


_ORDINARY = 1e-6, 1e6


@dataclass(frozen=True)
class State:
    """A kernel of shape (T, T) times exp(log_scale); the scale keeps deep stacks within range."""

    kernel: FloatArray
    log_scale: float = 0.0

    @cached_property
    def size(self) -> float:
        """The mean of the kernel's diagonal."""
        return float(self.kernel.trace()) / len(self.kernel)

    @cached_property
    def _total(self) -> float:
        return float(self.kernel.sum())

    def rescaled(self) -> State:
        """The same kernel; where its size has left _ORDINARY, and is not zero, with size 1."""
        if self.size <= 0 or _ORDINARY[0] < self.size < _ORDINARY[1]:
            return self
        return State(self.kernel / self.size, self.log_scale + math.log(self.size))

    def absolute(self) -> FloatArray:
        """The kernel itself; a scale beyond the range of a double is held at its edge."""
        return self.kernel * math.exp(min(max(self.log_scale, -700.0), 700.0))

    def plus(self, other: State) -> State:
        """The sum of two kernels, rescaled."""
        if min(self.size, other.size) <= 0:  # nothing has no scale
            return (self if other.size <= 0 else other).rescaled()
        top = max(self.log_scale, other.log_scale)
        left, right = (math.exp(max(part.log_scale - top, -745.0)) for part in (self, other))
        total = combined(self.kernel, left, other.kernel, right)
        return State(total, top).rescaled()

    def times(self, factor: float) -> State:
        """The kernel times a number >= 0."""
        if factor == 1:
            return self
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
        elif keep is None:
            t = len(self.kernel)
            diagonal, pairs = t * self.size, self._total - t * self.size
        else:
            kernel = self.kernel[np.ix_(keep, keep)]
            t, diagonal = len(kernel), float(np.trace(kernel))
            pairs = float(kernel.sum()) - diagonal
        if diagonal <= 0:
            return NO_SIGNAL, 0.0
        pairs = pairs / (t * (t - 1)) if t > 1 else 0.0
        return self.log_scale + math.log(diagonal / t), min(1.0, max(-1.0, pairs / (diagonal / t)))

    def overlap(self, other: State, keep: NDArray[np.bool_] | Grid | None = None) -> float:
        """sum_ij A_ij B_ij / (tr A tr B) over positions that count; 0 where one of them is zero."""
        sizes = self.trace(keep) * other.trace(keep)
        if sizes <= 0:
            return 0.0
        if isinstance(keep, Grid):
            (off, diagonal), (off_other, diagonal_other) = keep.split(self.kernel), keep.split(other.kernel)
            return keep.total(off * off_other, diagonal * diagonal_other) / sizes
        if keep is None:
            return float(np.einsum("ij,ij->", self.kernel, other.kernel)) / sizes  # BLAS would start threads
        return float(keep @ (self.kernel * other.kernel) @ keep) / sizes

    def trace(self, keep: NDArray[np.bool_] | Grid | None = None) -> float:
        """Sum over the positions that count of the kernel's diagonal."""
        if isinstance(keep, Grid):
            return float(keep.weights @ keep.split(self.kernel)[1])
        return len(self.kernel) * self.size if keep is None else float(np.diagonal(self.kernel)[keep].sum())
