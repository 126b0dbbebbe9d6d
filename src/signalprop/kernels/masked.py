"""Attention on token kernels under any mask, of queries and keys that need not be the same tokens.

`TokenAttention` with sums by products with the mask, in O(T^3): for few tokens (docs/theory/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.attention import TokenAttention, _Kernel
from signalprop.kernels.rows import held
from signalprop.network.moments import FloatArray


@dataclass(frozen=True)
class Turning:
    """Rotations of a share of the features, by angle frequency times position.

    Attributes:
        frequencies: (F,). shares: of all features that rotate so, (F,). queries, keys: positions, (Q,), (E,).
    """

    frequencies: FloatArray
    shares: FloatArray
    queries: FloatArray
    keys: FloatArray

    def between(self, positions: FloatArray) -> FloatArray:
        """Mean cosine between positions, of all features."""
        lag = np.subtract.outer(positions, positions)
        out = np.full(lag.shape, 1 - self.shares.sum())
        for frequency, share in zip(self.frequencies, self.shares, strict=True):
            out += share * np.cos(lag * frequency)
        return out

    def averaged(self, weights: FloatArray, kernel: FloatArray) -> FloatArray:
        """W K W^T of vectors that are turned by the distance of key and query, (Q, Q)."""
        return self._sandwiched(weights, kernel, self.queries, self.keys)

    def sent(self, weights: FloatArray, gradient: FloatArray) -> FloatArray:
        """W^T G W of gradients at what `averaged` gives, (E, E)."""
        return self._sandwiched(weights.T, gradient, self.keys, self.queries)

    def _sandwiched(self, w: FloatArray, inner: FloatArray, outside: FloatArray, inside: FloatArray) -> FloatArray:
        out = (1 - self.shares.sum()) * (w @ inner @ w.T)
        apart, within = np.subtract.outer(outside, outside), np.subtract.outer(inside, inside)
        for frequency, share in zip(self.frequencies, self.shares, strict=True):
            even, odd = (w @ (inner * f(frequency * within)) @ w.T for f in (np.cos, np.sin))
            out += share * (np.cos(frequency * apart) * even + np.sin(frequency * apart) * odd)
        return np.asarray(out)


@dataclass(frozen=True)
class MaskedAttention(TokenAttention):
    """What attention under a mask does to kernels; `kernel` is that of the keys, which are the values too, (E, E).

    Attributes:
        asks: kernel of what the queries are made of, (Q, Q). mask: which keys (columns) a query sees, at least one.
        turning: of queries, keys, and back of what is averaged; None: nothing turns.
    """

    causal: bool = True
    asks: FloatArray = field(kw_only=True)
    mask: NDArray[np.bool_] = field(kw_only=True)
    turning: Turning | None = None

    def backward_to_both(self, gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gradient kernels at queries (Q, Q) and keys (E, E), from the one at what is averaged, (Q, Q)."""
        own, keep = np.diagonal(gradient), 1 - self.dropout
        second, jacobian = self._rows
        to_keys, on = self._different_queries(gradient, 1, 1)
        value_spread = self._spread + (1 / keep - 1) * self._mean_square
        keys = jacobian * self.qk * self._asks_own * value_spread
        on = on + self._later_sum(own * (second / keep + keys), 1 / self._row_length)
        n = self._row_length
        off = self._over_both(own * (1 - second - keys), (n > 1) / np.maximum(n * (n - 1), 1.0))
        to_keys += off if self.turning is None else off * self.turning.between(self.turning.keys)
        np.fill_diagonal(to_keys, on)
        slope = self._random_slope + self._structural_slope
        root, moved = np.sqrt(slope), self.qk * self._scored * value_spread
        apart = self._of_pair(self._spread)
        alike = self._of_pair(self._finite) * self._met * self._overlaps[1] * self.qk * apart**2
        if self._turn is not None:
            alike *= self._turn
        to_queries = gradient * (np.outer(root, root) + alike)
        np.fill_diagonal(to_queries, own * (slope + jacobian * moved))
        return held(to_queries), held(to_keys)

    def _different_queries(self, gradient: FloatArray, value: int, scores: int) -> tuple[FloatArray, FloatArray]:
        pairs = gradient.copy()
        np.fill_diagonal(pairs, 0.0)
        popular, keys = self._bracket_weights
        n = self._row_length
        out = self._centred_sum(pairs / np.outer(n, n) * (value * popular + scores * keys))
        if self.turning is None:
            out = out + self._weights.T @ pairs @ self._weights
        else:
            out = out + self.turning.sent(self._weights, pairs)
        return out, np.diagonal(out).copy()

    # --- sums over what a row sees ---------------------------------------------------------------------------------

    @cached_property
    def _weights(self) -> FloatArray:
        """Uniform over what a row sees."""
        return np.asarray(self.mask / self.mask.sum(1, keepdims=True))

    @cached_property
    def _row_length(self) -> FloatArray:
        return self.mask.sum(1).astype(np.float64)

    @property
    def _seen(self) -> NDArray[np.bool_]:
        return self.mask

    def _sum_of_seen(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.mask, values, 0.0).sum(1))

    def _over_keys(self, values: FloatArray) -> FloatArray:
        return self._weights @ values

    def _over_queries(self, values: FloatArray, axis: int) -> FloatArray:
        seen = self.mask.astype(np.float64)
        return seen.T @ values if axis == 0 else values @ seen

    def _over_both(self, values: FloatArray, weight: FloatArray) -> FloatArray:
        return np.asarray(self.mask.T @ ((values * weight)[:, None] * self.mask))

    @cached_property
    def _met(self) -> FloatArray:
        return self._weights @ self._weights.T

    def _of_pair(self, per_row: FloatArray) -> FloatArray:
        n = self._row_length
        per_row = self._per_row(per_row)
        shorter = np.where(n[:, None] > n, per_row, per_row[:, None])
        return np.where(n[:, None] == n, np.add.outer(per_row, per_row) / 2, shorter)

    @property
    def _asks(self) -> FloatArray:
        return self.asks

    @property
    def _asks_own(self) -> FloatArray:
        return np.diagonal(self.asks)

    # --- rotations -------------------------------------------------------------------------------------------------

    @cached_property
    def _turn(self) -> FloatArray | None:
        return None if self.turning is None else self.turning.between(self.turning.queries)

    @cached_property
    def _turned(self) -> FloatArray:
        return self.kernel if self.turning is None else self.kernel * self.turning.between(self.turning.keys)

    @cached_property
    def _turned_means(self) -> tuple[FloatArray, FloatArray]:
        mean, double = self._sums(self._turned, self._own)
        return mean, np.diagonal(double)

    @cached_property
    def _scored(self) -> FloatArray:
        """Per row, how far its keys lie apart, turned."""
        return self._apart(self._mean_square, np.diag(self._turned_means[1]))

    @cached_property
    def _row_score_variance(self) -> FloatArray:
        return np.asarray(self.qk * self._asks_own * self._scored)

    @cached_property
    def _of_values(self) -> _Kernel:
        if self.turning is None:
            return super()._of_values
        mean = self._turned_means[0]
        double_mean = self.turning.averaged(self._weights, self.kernel)
        return _Kernel(self.kernel, mean, double_mean, self._own, self._mean_square, self._scored)
