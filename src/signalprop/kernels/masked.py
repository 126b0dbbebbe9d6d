"""Attention on token kernels under any mask, of queries and keys that need not be the same tokens.

`TokenAttention` with sums by products with the mask, in O(T^3): for few tokens (docs/theory/kernels.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.rows import Averages, Rows, by_pairs, held
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import product


@dataclass(frozen=True)
class View:
    """Which keys every query sees, and how both are turned: by angle frequency times position.

    What rotates is computed in single precision.

    Attributes:
        mask: (Q, E), at least one key for every query. queries, keys: positions, (Q,), (E,).
        frequencies, shares: of rotations, and of all features that turn so, (F,); what the heads give turns back.
    """

    mask: NDArray[np.bool_]
    queries: FloatArray
    keys: FloatArray
    frequencies: FloatArray = field(default_factory=lambda: np.zeros(0))
    shares: FloatArray = field(default_factory=lambda: np.zeros(0))

    @property
    def turns(self) -> bool:
        """Whether anything rotates."""
        return len(self.frequencies) > 0

    @cached_property
    def weights(self) -> FloatArray:
        """Uniform over what a query sees, (Q, E)."""
        return np.asarray(self.mask / self.mask.sum(1, keepdims=True))

    @cached_property
    def of_queries(self) -> FloatArray:
        """Mean cosine between two queries' positions, of all features."""
        return self._between(self.queries)

    @cached_property
    def of_keys(self) -> FloatArray:
        """The same of two keys'."""
        return self._between(self.keys)

    def _between(self, positions: FloatArray) -> FloatArray:
        lag = np.subtract.outer(positions, positions)
        out = np.full(lag.shape, self._still)
        for frequency, share in zip(self.frequencies, self.shares, strict=True):
            out += share * np.cos(lag * frequency)
        return out

    @property
    def _still(self) -> float:
        return 1 - float(self.shares.sum())

    @cached_property
    def _turned(self) -> NDArray[np.float32]:
        """The weights times cosines and sines of the angles between key and query, (Q, 2 F, E)."""
        angles = np.subtract.outer(self.queries, self.keys)[:, None] * self.frequencies[:, None]
        both = np.concatenate([np.cos(angles), np.sin(angles)], 1) * self.weights[:, None]
        return np.asarray(both * np.sqrt(np.tile(self.shares, 2))[:, None], np.float32)

    def averaged(self, kernel: FloatArray) -> FloatArray:
        """What queries see of vectors of that kernel, turned by the distance of key and query, (Q, Q)."""
        out = self._still * product(product(self.weights, kernel), self.weights.T)
        if self.turns:
            q, e = self.mask.shape
            left = self._turned.reshape(-1, e) @ kernel.astype(np.float32)
            out += left.reshape(q, -1) @ self._turned.reshape(q, -1).T
        return np.asarray(out)

    def sent(self, gradient: FloatArray) -> FloatArray:
        """What goes back to the keys of gradients at what `averaged` gives, (E, E)."""
        out = self._still * product(product(self.weights.T, gradient), self.weights)
        if self.turns:
            q, e = self.mask.shape
            right = gradient.astype(np.float32) @ self._turned.reshape(q, -1)
            out += self._turned.reshape(-1, e).T @ right.reshape(-1, e)
        return np.asarray(out)

    @cached_property
    def longer(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where the first of two queries sees more keys than the second; as many."""
        n = self.mask.sum(1)
        return n[:, None] > n, n[:, None] == n


def flattened(score_variance: FloatArray, n: FloatArray) -> FloatArray:
    """What is left of the score variance of rows of n keys, given over the features of normed queries and keys.

    Their fourth cumulant is -6 s^2 / features; of short rows it sharpens weights: docs/theory/attention.md.
    """
    return np.asarray(np.maximum(1 - (3.5 - 18 / n + 18 / n**2) * score_variance, 0.5))


@dataclass(frozen=True)
class MaskedAttention(TokenAttention):
    """What attention under a mask does to kernels; `kernel` is that of the keys, which are the values too, (E, E).

    Attributes:
        asks: kernel of what the queries are made of, (Q, Q). view: which keys a query sees, and what rotates.
        chance: variance of the product of two keys' unit vectors around what their tokens share.
        normed: features of a head whose queries and keys have one size each; infinite: they need not.
    """

    asks: FloatArray = field(kw_only=True)
    view: View = field(kw_only=True)
    chance: float = 0.0
    normed: float = math.inf

    def log_sum(self) -> tuple[FloatArray, FloatArray]:
        """Per query, the mean logarithm of its sum of exponentials, and the variance of what its scores share."""
        own, n = self._row_score_variance, self._row_length
        common = np.maximum(self.qk * self._asks_own * self._mean_square - own, 0.0)
        return np.log(n) + (own - own / n) / 2, common + own / n

    @property
    def rows(self) -> Rows:
        """Every row of weights."""
        return self._rows

    @property
    def row_length(self) -> FloatArray:
        """Keys of every row, (Q,)."""
        return self._row_length

    @property
    def own_part(self) -> FloatArray:
        """Of the mean square of what a row averages, what grows with the sum of its squared weights, (Q,)."""
        dropped = self._mean_square * (1 / (1 - self.dropout) - 1)
        return np.asarray(self._rows.second * (self._of_values.spread + dropped))

    def backward_to_both(self, gradient: FloatArray, sharper: Array = 0.0) -> tuple[FloatArray, FloatArray]:
        """Gradient kernels at queries (Q, Q) and keys (E, E), from the one at what is averaged, (Q, Q).

        sharper: by what part the squared weights of a row are larger where its gradient is, (Q,).
        """
        own, keep = np.diagonal(gradient), 1 - self.dropout
        second, jacobian, weighted = (one * (1 + sharper) for one in self._rows[:3])
        to_keys, on = self._different_queries(gradient, 1, 1)
        value_spread = self._spread + (1 / keep - 1) * self._mean_square
        keys = weighted * self.qk * self._asks_own * value_spread
        on = on + self._sent_to_keys(own * (second / keep + keys))
        to_keys += self._over_both(own * (1 - second - keys)) * self.view.of_keys
        np.fill_diagonal(to_keys, on)
        slope = self._random_slope + self._structural_slope
        root, moved = np.sqrt(slope), self.qk * self._scored * value_spread
        to_queries = gradient * (np.outer(root, root) + self._keys_in_common)
        np.fill_diagonal(to_queries, own * (slope + jacobian * moved))
        return held(to_queries), held(to_keys)

    def sent_to_values(self, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at the keys, (E, E), through what is averaged; as `backward_to_both`, without dropout."""
        own, second = np.diagonal(gradient), self._rows.second
        out, on = self._different_queries(gradient, 1, 0)
        out += self._over_both(own * (1 - second)) * self.view.of_keys
        np.fill_diagonal(out, on + self._sent_to_keys(own * second))
        return out

    def _different_queries(self, gradient: FloatArray, value: int, scores: int) -> tuple[FloatArray, FloatArray]:
        pairs = gradient.copy()
        np.fill_diagonal(pairs, 0.0)
        popular, keys = self._bracket_weights
        n = self._row_length
        out = self._centred_sum(pairs / np.outer(n, n) * (value * popular + scores * keys))
        out = out + self.view.sent(pairs)
        return out, np.diagonal(out).copy()

    # --- sums over what a row sees ---------------------------------------------------------------------------------

    @cached_property
    def _row_length(self) -> FloatArray:
        return np.asarray(self.view.mask.sum(1), np.float64)

    @property
    def _seen(self) -> NDArray[np.bool_]:
        return self.view.mask

    def _sum_of_seen(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.view.mask, values, 0.0).sum(1))

    def _over_keys(self, values: FloatArray) -> FloatArray:
        found: FloatArray = self.view.weights @ values
        return found

    def _over_queries(self, values: FloatArray, axis: int) -> FloatArray:
        seen = self.view.mask.astype(np.float64)
        return np.asarray(seen.T @ values if axis == 0 else values @ seen)

    def _over_both(self, values: FloatArray) -> FloatArray:
        return np.asarray(self.view.mask.T @ ((values * by_pairs(self._row_length))[:, None] * self.view.mask))

    @cached_property
    def _met(self) -> FloatArray:
        return np.asarray(self.view.weights @ self.view.weights.T)

    def _of_pair(self, by_row: FloatArray) -> FloatArray:
        longer, alike = self.view.longer
        by_row = by_row if by_row.ndim > 1 else self._per_row(by_row)
        first = by_row.reshape(len(by_row), -1)
        return np.where(alike, (first + first.T) / 2, np.where(longer, first.T, first))

    @property
    def _asks(self) -> FloatArray:
        return self.asks

    @property
    def _asks_own(self) -> FloatArray:
        return np.diagonal(self.asks)

    # --- rotations -------------------------------------------------------------------------------------------------

    @property
    def _turn(self) -> FloatArray | None:
        return self.view.of_queries if self.view.turns else None

    @cached_property
    def _turned(self) -> FloatArray:
        return self.kernel * self.view.of_keys if self.view.turns else self.kernel

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
        raw = self.qk * self._asks_own * self._scored
        return np.asarray(raw * self._flattened)

    @cached_property
    def _flattened(self) -> FloatArray:
        """What one size of queries and keys takes off the score variance of rows, as far as weights see it."""
        raw = self.qk * self._asks_own * self._scored
        return flattened(raw / self.normed, self._row_length)

    @cached_property
    def _pair_scores(self) -> FloatArray:
        root = np.sqrt(self._flattened)
        shared = self.qk * self.asks * self.view.of_queries
        return np.asarray(shared * np.outer(root, root))

    @cached_property
    def _random_slope(self) -> FloatArray:
        """As in `TokenAttention`, of pairs of different keys: one key with itself is in the moments of a row."""
        return np.asarray(self.qk * self.chance * self._scored * self._spread * (1 - self._rows.second) ** 4)

    @property
    def _own_slope(self) -> FloatArray:
        return np.asarray(self._random_slope + self._structural_slope)

    @cached_property
    def _of_values(self) -> Averages:
        mean, double_mean = self._turned_means[0], self.view.averaged(self.kernel)
        return Averages(self._turned, mean, double_mean, self._own, self._mean_square, self._scored)
