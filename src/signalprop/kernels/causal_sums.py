"""Sums over what a row of causal attention sees, by running sums; other masks override them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.softmax_rows import by_pairs, mirrored, running
from signalprop.network.moments import FloatArray


class Sums:
    """Of rows that see the keys up to their own position."""

    kernel: FloatArray

    @property
    def _per_token(self) -> FloatArray:
        """The diagonal of S."""
        return np.diagonal(self.kernel)

    @property
    def _asks(self) -> FloatArray:
        """Kernel of the input of queries."""
        return self.kernel

    @property
    def _asks_per_token(self) -> FloatArray:
        """Its diagonal."""
        return self._per_token

    @cached_property
    def _row_length(self) -> FloatArray:
        return np.arange(1, len(self.kernel) + 1, dtype=np.float64)

    @cached_property
    def _visible(self) -> NDArray[np.bool_]:
        """Which keys (columns) a row sees under a mask."""
        index = np.arange(len(self.kernel))
        return index[:, None] >= index[None, :]

    def _sum_over_visible(self, values: FloatArray) -> FloatArray:
        """Per row, the sum over the keys that it sees."""
        return np.asarray(np.where(self._visible, values, 0.0).sum(1))

    def _over_keys(self, values: FloatArray) -> FloatArray:
        """M values: row i is the mean over the keys that query i sees (along axis 0)."""
        found = running(values, 0)
        found /= self._row_length[:, None]
        return found

    def _over_queries(self, values: FloatArray, axis: int) -> FloatArray:
        """Sums over the queries that see key k, for every k along `axis`."""
        return np.flip(running(np.flip(values, axis), axis), axis)

    def _over_both(self, values: FloatArray) -> FloatArray:
        """Per pair of keys, the sum of values over the queries that see both, each shared among its pairs."""
        later = self._over_queries((values * by_pairs(self._row_length))[:, None], 0)
        return np.where(self._visible, later, later.T)

    @property
    def _mean_overlap(self) -> FloatArray:
        """Sum over keys of the products of two rows' uniform weights: shared keys over the product of lengths."""
        return 1 / np.maximum.outer(self._row_length, self._row_length)

    def _of_pair(self, by_row: FloatArray) -> FloatArray:
        """At the shorter of two rows: of a value per row, or of what each row (first axis) has with every other."""
        if by_row.ndim == self.kernel.ndim:
            return mirrored(by_row)
        return np.where(self._visible, by_row[..., None, :], by_row[..., None])

    def _sums(self, shared: FloatArray, per_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        """M K and M K M^T of the kernel K that different tokens share, with that diagonal."""
        mean = self._over_keys(shared)
        return mean, self._over_keys(mean.T).T

    def _sums_of_rows(self, shared: FloatArray, per_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        """M K, and per row the mean of K over pairs of its keys: the diagonal of M K M^T."""
        mean, double = self._sums(shared, per_token)
        return mean, double.diagonal(0, -2, -1)

    def _mean_over_keys(self, values: FloatArray) -> FloatArray:
        """Per row, the mean of the values of its keys."""
        return self._over_keys(values[:, None])[:, 0]
