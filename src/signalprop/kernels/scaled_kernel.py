"""A token kernel and its scale; or those of several members, which are followed together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.position_grid import Grid
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import diagonal, of_matrix
from signalprop.theory.log_arithmetic import NO_SIGNAL, inverse_roots

_AT_ONCE = 16384  # entries that are computed at a time: what is in between stays in the cache


def on_both_sides(kernel: FloatArray, factor: FloatArray) -> FloatArray:
    """Row and column i times factor_i, (..., T, T)."""
    if kernel.ndim > 2:
        return kernel * factor[..., None, :] * factor[..., None]
    out, rows = np.empty((len(kernel), len(kernel))), _AT_ONCE // len(kernel) + 1
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        np.multiply(kernel[part], factor, out=out[part])
        out[part] *= factor[part, None]
    return out


def combined(one: FloatArray, x: Array, other: FloatArray, y: Array) -> FloatArray:
    """x one + y other, (..., T, T)."""
    if one.ndim > 2:
        return one * of_matrix(x) + other * of_matrix(y)
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


_ORDINARY = 1e-6, 1e6


@dataclass(frozen=True)
class State:
    """A kernel of shape (T, T) times exp(log_scale); the scale keeps deep stacks within range.

    Of several members (members, T, T), with sizes and log_scale (members, 1), or one log_scale.
    """

    kernel: FloatArray
    log_scale: Any = 0.0

    @cached_property
    def size(self) -> Any:
        """The mean of the kernel's diagonal."""
        if self.kernel.ndim > 2:
            return np.asarray(diagonal(self.kernel).mean(-1, keepdims=True))
        return float(self.kernel.trace()) / len(self.kernel)

    @cached_property
    def _total(self) -> float:
        return float(self.kernel.sum())

    def of_member(self, which: int) -> State:
        """The kernel of one of several members."""
        log_scale = self.log_scale[which].item() if isinstance(self.log_scale, np.ndarray) else self.log_scale
        return State(self.kernel[which], log_scale)

    def rescaled(self) -> State:
        """The same kernel; where its size has left _ORDINARY, and is not zero, with size 1."""
        if self.kernel.ndim == 2:
            if self.size <= 0 or _ORDINARY[0] < self.size < _ORDINARY[1]:
                return self
            return State(self.kernel / self.size, self.log_scale + math.log(self.size))
        ordinary = (self.size <= 0) | ((self.size > _ORDINARY[0]) & (self.size < _ORDINARY[1]))
        if ordinary.all():
            return self
        size = np.where(ordinary, 1.0, self.size)
        return State(self.kernel / size[..., None], self.log_scale + np.log(size))

    def absolute(self) -> FloatArray:
        """The kernel itself; a scale beyond the range of a double is held at its edge."""
        return self.kernel * math.exp(min(max(self.log_scale, -700.0), 700.0))

    def plus(self, other: State) -> State:
        """The sum of two kernels, rescaled."""
        if self.kernel.ndim == 2:
            if min(self.size, other.size) <= 0:  # nothing has no scale
                return (self if other.size <= 0 else other).rescaled()
            top = max(self.log_scale, other.log_scale)
            left, right = (math.exp(part.log_scale - top) for part in (self, other))
        else:
            one, two = (np.where(part.size > 0, part.log_scale, -np.inf) for part in (self, other))
            top = np.where(np.maximum(one, two) > -np.inf, np.maximum(one, two), self.log_scale)
            left, right = np.exp(one - top), np.exp(two - top)
        total = combined(self.kernel, left, other.kernel, right)
        return State(total, top).rescaled()

    def times(self, factor: Any) -> State:
        """The kernel times a number >= 0, or one for each member, (members, 1)."""
        if self.kernel.ndim > 2:
            kernel = self.kernel if (factor > 0).all() else self.kernel * (factor > 0)[..., None]
            return State(kernel, self.log_scale + np.log(np.where(factor > 0, factor, 1.0)))
        if factor == 1:
            return self
        if factor > 0:
            return State(self.kernel, self.log_scale + math.log(factor))
        return State(np.broadcast_to(0.0, self.kernel.shape), self.log_scale)

    def moments(self, keep: NDArray[np.bool_] | Grid | None = None) -> tuple[Any, Any]:
        """(log variance, token correlation), averaged over positions and pairs of positions.

        Args:
            keep: the positions that count, None: all; or the grid of the kernel.
        """
        if isinstance(keep, Grid):
            t = keep.tokens
            total, pairs = keep.sums(self.kernel)
        elif keep is None:
            t = len(self.kernel)
            total, pairs = t * self.size, self._total - t * self.size
        else:
            kernel = self.kernel[np.ix_(keep, keep)]
            t, total = len(kernel), float(np.trace(kernel))
            pairs = float(kernel.sum()) - total
        pairs = pairs / (t * (t - 1)) if t > 1 else 0.0 * total
        if self.kernel.ndim == 2:
            if total <= 0:
                return NO_SIGNAL, 0.0
            return self.log_scale + math.log(total / t), min(1.0, max(-1.0, pairs / (total / t)))
        mean = np.where(total > 0, total, 1.0) / t
        log_scale = np.ravel(self.log_scale)
        return np.where(total > 0, log_scale + np.log(mean), NO_SIGNAL), np.where(
            total > 0, np.clip(pairs / mean, -1, 1), 0
        )

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
