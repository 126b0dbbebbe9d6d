"""Attention on token kernels where a token sees a window: every sum over keys or queries is over a range of them.

`TokenAttention` with other ranges; derivation: `docs/theory/attention.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.softmax_rows import by_pairs, running
from signalprop.network.moments import FloatArray


def ranges(length: int, window: int, causal: bool) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First key that every row sees, and the one after its last: the last `window` keys, or those window // 2 away."""
    row = np.arange(length)
    if causal:
        return np.maximum(row - window + 1, 0), row + 1
    half = window // 2
    return np.maximum(row - half, 0), np.minimum(row + half + 1, length)


@dataclass(frozen=True)
class WindowAttention(TokenAttention):
    """`TokenAttention` whose rows see a `window`, as `ranges` has it."""

    window: int = 1
    causal: bool = True

    @cached_property
    def _keys(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return ranges(len(self.kernel), self.window, self.causal)

    @cached_property
    def _queries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First query that sees a key, and the one after the last."""
        low, high = self._keys
        key = np.arange(len(low))
        return np.searchsorted(high, key, side="right"), np.searchsorted(low, key, side="right")

    @cached_property
    def _row_length(self) -> FloatArray:
        low, high = self._keys
        return np.asarray(high - low, dtype=np.float64)

    @cached_property
    def _visible(self) -> NDArray[np.bool_]:
        (low, high), key = self._keys, np.arange(len(self.kernel))
        return (key >= low[:, None]) & (key < high[:, None])

    def _sum_over_visible(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.where(self._visible, values, 0.0).sum(1))

    def _over_keys(self, values: FloatArray) -> FloatArray:
        return _between(values, *self._keys, 0) / self._row_length[:, None]

    def _over_queries(self, values: FloatArray, axis: int) -> FloatArray:
        return _between(values, *self._queries, axis)

    def _over_both(self, values: FloatArray) -> FloatArray:
        low, high = self._queries
        first, after = np.maximum.outer(low, low), np.minimum.outer(high, high)
        total = np.concatenate([[0.0], np.cumsum(values * by_pairs(self._row_length))])
        return np.where(after > first, total[np.maximum(after, first)] - total[first], 0.0)

    @cached_property
    def _mean_overlap(self) -> FloatArray:
        low, high = self._keys
        shared = np.maximum(np.minimum.outer(high, high) - np.maximum.outer(low, low), 0)
        return np.asarray(shared / np.outer(self._row_length, self._row_length))

    def _of_pair(self, by_row: FloatArray) -> FloatArray:
        n, first = self._row_length, by_row.reshape(len(by_row), -1)
        shorter = np.where(n[:, None] > n, first.T, first)
        return np.where(n[:, None] == n, (first + first.T) / 2, shorter)


def windowed(
    kernel: FloatArray, window: int, rho: FloatArray | None, omega: FloatArray | None, **fields: Any
) -> WindowAttention:
    """A WindowAttention of the fields of a TokenAttention; omega by length of a row, as `rotation` gives it."""
    low, high = ranges(len(kernel), window, fields["causal"])
    turned = None if omega is None else omega[high - low - 1]
    return WindowAttention(kernel=kernel, window=window, rho=rho, omega=turned, **fields)


def _between(values: FloatArray, first: NDArray[np.intp], after: NDArray[np.intp], axis: int) -> FloatArray:
    """Sums of values along an axis from `first` up to before `after`."""
    total = running(values, axis)
    total = np.concatenate([np.zeros_like(total.take([0], axis)), total], axis=axis)
    return np.asarray(total.take(after, axis) - total.take(first, axis))
