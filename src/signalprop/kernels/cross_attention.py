"""Attention to the tokens of another stream on token kernels: `UnmaskedAttention` whose queries stand elsewhere.

Derivation: `docs/theory/kernels.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from signalprop.kernels.bidirectional_attention import UnmaskedAttention
from signalprop.kernels.position_grid import AlikeAttention, Grid
from signalprop.kernels.softmax_rows import held
from signalprop.network.moments import FloatArray


@dataclass(frozen=True)
class TokenCrossAttention(UnmaskedAttention):
    """What one cross-attention does to kernels; `kernel` is that of the keys' and values' stream, (S, S).

    Against sampling (one head of width 96, 5 to 24 queries, 7 to 32 keys, score variance .1 to 2; s.e. 1 %): output and
    the gradient at the keys within 4 % (8 % at 2), the gradient at the queries within 9 %, summed over pairs 15 %.

    Attributes:
        asks: kernel of the queries' stream, (T, T).
    """

    asks: FloatArray = field(kw_only=True)

    @property
    def _asks(self) -> FloatArray:
        return self.asks

    @property
    def _asks_per_token(self) -> FloatArray:
        return np.diagonal(self.asks)

    def backward_to_both(self, gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gradient kernels at both streams, (T, T) and (S, S), from the one at the heads' output, (T, T)."""
        per_token = np.diagonal(gradient)
        to_queries, to_keys = self._to_queries(gradient, per_token), self._to_keys(gradient, per_token)
        return self.gain**2 * held(to_queries), self.gain**2 * held(to_keys)


@dataclass(frozen=True)
class GridCrossAttention(AlikeAttention):
    """`TokenCrossAttention` of a decoder on a grid to equivalent tokens; `kernel`, `per_token` are those of
    `EqualTokens`.

    Attributes:
        asks, asks_per_token: what two queries share, (m, m), and of one query, (m,). queries: their grid.
    """

    asks: FloatArray = field(kw_only=True)
    asks_per_token: FloatArray = field(kw_only=True)
    queries: Grid = field(kw_only=True)

    @property
    def _asks(self) -> FloatArray:
        return self.asks

    @property
    def _asks_per_token(self) -> FloatArray:
        return self.asks_per_token

    def forward(self) -> FloatArray:
        """Kernel of the heads' output, (2 m, 2 m)."""
        off, per_token = self._averaged()
        return self.gain**2 * self.queries.joined(off, np.broadcast_to(per_token, self.asks_per_token.shape))

    def backward_to_both(self, gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
        """As of every token, (2 m, 2 m) and (2, 2)."""
        off, per_token = self.queries.split(gradient)
        n, keep = float(self._row_length[0]), 1 - self.dropout
        second, jacobian, *_ = self._rows
        value_spread = self._spread + (1 / keep - 1) * self._mean_square
        # values and keys: of two queries, of one query at one key, and of one query at two keys
        mean, double_mean = self._means
        from_pairs = self._over_pairs(off) / n**2
        moved = self._over_pairs(off * sum(self._bracket_weights)) / n**2
        keys = jacobian * self.qk * (self._asks_per_token + self.query_bias) * value_spread
        alone = self.queries.weights @ (per_token * (second / keep + keys)) / n
        apart = self.queries.weights @ (per_token * (1 - second - keys)) / max(n * (n - 1), 1.0)
        to_two = from_pairs + moved * (self.kernel - mean - mean.T + double_mean) + apart
        to_one = from_pairs + moved * (self._per_token - 2 * mean[0] + double_mean[0]) + alone
        # queries: the output is linear in the query; and each key moves with every query
        slope = self._random_slope
        root = np.sqrt(slope)
        to_queries = off * (np.outer(root, root) + self._keys_in_common)
        to_query = per_token * (slope + jacobian * self.qk * self._spread * value_spread)
        both = self.queries.joined(to_queries, to_query), self.grid.joined(to_two, to_one)
        return self.gain**2 * held(both[0]), self.gain**2 * held(both[1])

    def _of_pair(self, by_row: FloatArray) -> FloatArray:
        first = by_row.reshape(len(by_row), -1)
        return np.asarray((first + first.T) / 2)

    def _over_pairs(self, values: FloatArray) -> float:
        """Sum over pairs of different queries."""
        return self.queries.total(values, np.zeros(len(values)))
