"""Causal attention on token kernels: forward and backward steps on T x T matrices in O(T^2).

With scores small against ln(row length), a row of weights averages the keys that it sees, M_ij = 1/n_i, so every
product with M is a (cumulative) sum. Scores enter as the variance of rows (exact finite-length softmax moments) and as
the covariance of two rows' scores, which makes some keys popular for many queries. Derivation and measured errors:
`docs/theory/kernels.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from signalprop.kernels.causal_sums import Sums
from signalprop.kernels.softmax_rows import Averages, Rows, favoured, held, rows_of
from signalprop.network.moments import FloatArray
from signalprop.network.products import of_matrix, pairs
from signalprop.theory.attention_variants import share_beside_sink
from signalprop.theory.row_overlaps import LEAST, position, within_table
from signalprop.theory.signals import Signal


@dataclass(frozen=True)
class TokenAttention(Sums):
    """What one causal self-attention does to kernels, given the kernel S of its input (second moment about 1).

    Units as in `signalprop.theory.attention`: forward in units of d_model sigma_v^2, backward of d_v sigma_v^2.

    Attributes:
        kernel: S, (T, T).
        qk: score variance of uncorrelated unit tokens; of members on a grid, as query_bias, (members, 1).
        d_model: width of the input. dropout: on attention weights.
        rho, omega: of `rotation`, None without rotary positions.
        query_bias: variance of a query bias in units of d_model sigma_q^2.
        value_skip, gain: the heads output value_skip V + gain A V; on average A is M in both.
        values: kernel of the input of values, where it is not `kernel`; results are in its units then.
    """

    kernel: FloatArray
    qk: Any
    d_model: int
    dropout: float = 0.0
    rho: FloatArray | None = None
    omega: FloatArray | None = None
    query_bias: Any = 0.0
    value_skip: float = 0.0
    gain: float = 1.0
    values: FloatArray | None = None

    def forward(self) -> FloatArray:
        """Kernel of the heads' output."""
        if self.gain == 0:
            return self.value_skip**2 * (self.kernel if self.values is None else self.values)
        averages = self._averages() if self.gain == 1 else self.gain**2 * self._averages()
        if self.value_skip == 0:
            return averages
        kernel, mean = self._of_values[:2]
        return np.asarray(self.value_skip**2 * kernel + self.value_skip * self.gain * (mean + mean.T) + averages)

    def backward(self, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at the input, all three paths, from the gradient kernel at the heads' output."""
        if self.gain == 0:
            return self.value_skip**2 * gradient
        return self._past(gradient, self.gain**2 * held(self._averages_back(gradient)))

    def backward_apart(self, gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
        """`backward` through the values, whatever their input, and through queries and keys."""
        value = self._past(gradient, self.gain**2 * held(self._averages_back(gradient, scores=0)))
        return value, self.gain**2 * self._averages_back(gradient, value=0)

    def output(self) -> Signal:
        """`forward` as a Signal."""
        return Signal.of(self.forward())

    def sent(self, g: Signal) -> Signal:
        """`backward` of a Signal."""
        return Signal.of(self.backward(g.matrix()))

    def sent_apart(self, g: Signal) -> tuple[Signal, Signal]:
        """`backward_apart` of a Signal."""
        value, scores = self.backward_apart(g.matrix())
        return Signal.of(value), Signal.of(scores)

    def _past(self, gradient: FloatArray, averaged: FloatArray) -> FloatArray:
        """What averages of values send back, with what passes their skip."""
        if self.value_skip == 0:
            return averaged
        returned = self._over_queries(gradient / self._row_length[:, None], 0)  # M^T G
        per_token = self.value_skip**2 * gradient + self.value_skip * self.gain * (returned + returned.T)
        return np.asarray(per_token + averaged)

    def share_beside_sink(self, sink: float) -> FloatArray:
        """Root mean square of the share of its weights that every row keeps beside a sink of that logit."""
        raw = self.qk * (self._asks_per_token + self.query_bias) * self._mean_square
        per_token = self._row_score_variance
        return share_beside_sink(self._per_row(self._row_length), per_token, raw - per_token, sink)

    def _averages(self) -> FloatArray:
        """Kernel of A V."""
        out, per_token = self._averaged()
        np.fill_diagonal(out, per_token)
        return out

    def _averaged(self) -> tuple[FloatArray, FloatArray]:
        """Kernel of A V: what two rows share, on the diagonal in the limit of one place; and the diagonal."""
        n, spread, diagonal_scale, dropped = (
            self._row_length,
            self._of_values.spread,
            self._asks_per_token,
            1 / (1 - self.dropout),
        )
        double_mean, mean_square = self._of_values.double_mean, self._of_values.mean_square
        per_token = double_mean.diagonal(0, -2, -1)
        if self.kernel.ndim == 2 and self.qk == 0:  # all that scores do is left out: weights are 1/n
            out = np.broadcast_to(double_mean, self._asks.shape).copy()
            return out, np.maximum(per_token, 0.0) + mean_square / n * (dropped - 1)
        second = self._rows.second
        out = self._overlaps[0] * self._of_pair(self._per_row(spread))  # keys that are popular with both queries
        left = self._left_of_crowds
        out *= self._mean_overlap
        out += double_mean * pairs(left, left)
        linear = np.sqrt(self._random_slope + self._structural_slope)
        out += pairs(linear, linear) * self._asks
        per_token = per_token * left**2 + (second - 1 / n) * spread + self._diagonal_slope * diagonal_scale
        return out, np.maximum(per_token, 0.0) + second * mean_square * (dropped - 1)

    def _averages_back(self, gradient: FloatArray, value: int = 1, scores: int = 1) -> FloatArray:
        """Gradient kernel at the input of A V; `value`, `scores` are 0 where that path is left out."""
        out, per_token = self._sent_back(gradient, gradient.diagonal(), value, scores)
        np.fill_diagonal(out, per_token)
        return out

    def _sent_back(
        self, gradient: FloatArray, per_token: FloatArray, value: int, scores: int
    ) -> tuple[FloatArray, FloatArray]:
        """As `_averaged`, of the gradient at the input of A V; own is the diagonal of the gradient at its output."""
        second, jacobian, *_ = self._rows
        out, diagonal = self._different_queries(gradient, value, scores)
        # one query by itself: values and keys; what is not on the diagonal is spread over the other keys of its row
        keep = 1 - self.dropout
        value_spread = scores * (self._of_values.spread + (1 / keep - 1) * self._of_values.per_token)
        keys = jacobian * self.qk * (self._per_token + self.query_bias) * value_spread
        on = self._sent_to_keys(per_token * (value * second / keep + keys))
        if value:
            out += self._over_both(per_token * (1 - second))
        taken = self._over_both(per_token * keys)
        out -= taken if self._turn is None else taken * self._turn
        # queries: the output is linear in the query
        slope = scores * (self._random_slope + self._structural_slope)
        root = np.sqrt(slope)
        out += gradient * (pairs(root, root) + scores * self._keys_in_common)
        asks = self._per_token + self.query_bias
        per_query = np.divide(self._row_score_variance, asks, out=np.zeros(asks.shape), where=asks > 0)
        return out, diagonal + on + per_token * (slope + jacobian * per_query * value_spread)

    def _different_queries(self, gradient: FloatArray, value: int, scores: int) -> tuple[FloatArray, FloatArray]:
        """What pairs of different queries send back, and its diagonal; as `_sent_back`."""
        pairs = gradient / np.outer(self._row_length, self._row_length)
        np.fill_diagonal(pairs, 0.0)
        # values: M^T G M; keys, and keys made popular for the values: one bracket serves both
        popular, keys = self._bracket_weights
        out = self._centred_sum(pairs * (value * popular + scores * keys), values=not value)
        if value:
            out += self._over_queries(self._over_queries(pairs, 0), 1)
        return out, out.diagonal().copy()

    def _sent_to_keys(self, values: FloatArray) -> FloatArray:
        """Per key, what the queries that see it send of a value each, shared out as squared weights are."""
        return np.diagonal(
            self._over_queries((values / self._row_length)[:, None] * self._shared_out(self._rows.favour[1]), 0)
        )

    @cached_property
    def _means(self) -> tuple[FloatArray, FloatArray]:
        """(M S, M S M^T)."""
        return self._sums(self.kernel, self._per_token)

    @cached_property
    def _mean_square(self) -> FloatArray:
        """Per row, the mean diagonal of S over its keys."""
        return self._mean_over_keys(self._per_token)

    def _centred_sum(self, h: FloatArray, values: bool = False) -> FloatArray:
        """sum over i that see k, i' that see k' of h_ii' [S_kk' - (MS)_ik' - (MS)_i'k + (MSM^T)_ii'].

        `values`: of their kernel.
        """
        kernel, mean, double_mean = self._of_values[:3] if values else (self.kernel, *self._means)
        over_second = self._over_queries(h, 1)
        first = kernel * self._over_queries(over_second, 0)
        mixed = self._over_queries(mean * over_second, 0)
        last = self._over_queries(self._over_queries(h * double_mean, 0), 1)
        return first - mixed - mixed.T + last

    def _value_per_token(self, values: FloatArray) -> FloatArray:
        return values.diagonal()

    @cached_property
    def _of_values(self) -> Averages:
        """What is averaged."""
        if self.values is None:
            return Averages(self.kernel, *self._means, self._per_token, self._mean_square, self._spread)
        per_token = self._value_per_token(self.values)
        mean, double_mean = self._sums(self.values, per_token)
        square = self._mean_over_keys(per_token)
        return Averages(self.values, mean, double_mean, per_token, square, self._apart(square, double_mean))

    # --- scores ----------------------------------------------------------------------------------------------------

    @cached_property
    def _spread(self) -> FloatArray:
        """Per row, how far its keys lie apart: the unbiased 1 - r of equal tokens."""
        return self._apart(self._mean_square, self._means[1])

    def _apart(self, mean_square: FloatArray, double_mean: FloatArray) -> FloatArray:
        centred = mean_square - double_mean.diagonal(0, -2, -1)
        return np.maximum(np.where(self._row_length > 1, centred / self._finite, 0.0), 0.0)

    @cached_property
    def _finite(self) -> FloatArray:
        """1 - 1/n of every row; 1/2 for a single key, which nothing depends on."""
        return np.maximum(1 - 1 / self._row_length, 0.5)

    def _per_row(self, values: FloatArray) -> FloatArray:
        n = self._asks.shape[-1]
        return values if values.shape[-1] == n else np.broadcast_to(values, (n,))

    @cached_property
    def _row_score_variance(self) -> FloatArray:
        per_token = self._asks_per_token
        turned = 0.0 if self.omega is None else np.maximum(self._mean_square - self._spread, 0.0) * (1 - self.omega)
        return np.asarray(self.qk * (per_token + self.query_bias) * (self._spread + turned))

    @cached_property
    def _rows(self) -> Rows:
        """Every row of weights."""
        variance = self._row_score_variance
        length = np.broadcast_to(self._row_length, variance.shape)
        return rows_of(variance, length)

    @cached_property
    def _pair_scores(self) -> FloatArray:
        """Covariance of the scores that two queries give to one token-specific key: s0 S_ii', rotated."""
        shared = of_matrix(self.qk) * (self._asks + of_matrix(self.query_bias))
        return shared if self._turn is None else shared * self._turn

    @cached_property
    def _turn(self) -> FloatArray | None:
        """rho of every two positions."""
        if self.rho is None:
            return None
        index = np.arange(len(self.kernel))
        return self.rho[np.abs(np.subtract.outer(index, index))]

    @cached_property
    def _overlaps(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(overlap of two rows' weights - 1, that of their Jacobians, c times it), at the shorter row's length."""
        per_token = np.maximum(self._row_score_variance, 1e-12)
        c = self._pair_scores * self._per_row(self._spread)[..., None]
        np.clip(c, LEAST * per_token[..., None], per_token[..., None], out=c)
        s, beyond = map(np.asarray, within_table(per_token))
        x = np.asarray(position(s[..., None], c / beyond[..., None] if beyond.max() > 1 else c))
        value, overlap = self._rows.log_overlap(x), self._rows.slope(s, x)
        # a longer row is less sure of its keys, and moves with the shorter one as far as both can move
        moves = np.maximum((1 - self._rows.second) / self._finite, 1e-12)
        ratio = moves[..., None, :] / np.where(self._row_length > 1, moves, 1.0)[..., None]
        value *= s[..., None]
        np.minimum(value, np.log(self._row_length)[:, None], out=value)  # an overlap is at most n
        popular = np.expm1(value, out=value)
        overlap *= popular + 1
        overlap *= (1 / beyond / self._finite)[..., None]
        overlap *= ratio
        popular *= ratio
        c *= overlap
        return self._of_pair(popular), self._of_pair(overlap), self._of_pair(c)

    @cached_property
    def _bracket_weights(self) -> tuple[FloatArray, FloatArray]:
        """Of two queries, what multiplies the sum over keys of the centred bracket: (e^c - 1) / spread for values, and
        c e^c / spread for keys, with overlaps for e^c."""
        popular, _, weighted = self._overlaps
        spread = self._of_pair(self._per_row(self._spread))
        by_value = popular / self._of_pair(self._per_row(self._finite))
        far, spread = spread > 1e-12, np.maximum(spread, 1e-12)
        return np.where(far, by_value / spread, self._pair_scores), np.where(far, weighted / spread, self._pair_scores)

    @cached_property
    def _keys_in_common(self) -> FloatArray:
        """What two queries share of what scores send back to them, over their gradients' kernel: one key moves both."""
        spread = self._spread if self.values is None else self._of_values.spread
        apart = self._of_pair(self._spread) * self._of_pair(spread)
        both = self._of_pair(self._finite) * self._mean_overlap * self._overlaps[1] * of_matrix(self.qk) * apart
        return both if self._turn is None else both * self._turn

    @cached_property
    def _turned(self) -> FloatArray:
        """The correlation of one query's scores of two keys: S; with rotary positions it falls with their distance."""
        return self.kernel if self._turn is None else self.kernel * self._turn

    @cached_property
    def _turned_means(self) -> tuple[FloatArray, FloatArray]:
        """(M K, per row the mean of K over pairs of its keys) for `_turned`."""
        if self._turn is not None:
            return self._sums_of_rows(self._turned, self._per_token)
        return self._means[0], self._means[1].diagonal(0, -2, -1)

    @cached_property
    def _random_slope(self) -> FloatArray:
        """Per row, how much variance follows the query linearly: random overlaps of d_model-dimensional keys."""
        return np.asarray(self._chance_overlap * (1 - self._rows.second) ** 2)

    @property
    def _chance_overlap(self) -> FloatArray:
        """Those overlaps of scores and values, of uniform weights."""
        coherent = 1.0 if self.omega is None else self.omega
        return np.asarray(self.qk * coherent / self.d_model * self._spread * self._of_values.spread)

    @property
    def _diagonal_slope(self) -> FloatArray:
        """Both slopes, of a row with itself."""
        return self._structural_slope + self._chance_overlap * self._rows.response

    @cached_property
    def _structural_slope(self) -> FloatArray:
        """As above, from keys that are similar on purpose (equal tokens, one segment): mean product of centred kernels
        of scores and of values off their diagonals."""
        n, (turned_mean, turned_total) = self._row_length, self._turned_means
        v = self._of_values
        squares = self._sums_of_rows(self._turned * v.kernel, self._per_token * v.per_token)[1]
        total = v.double_mean.diagonal(0, -2, -1)
        centred = squares - 2 * self._sum_over_visible(v.mean * turned_mean) / n + total * turned_total
        per_token = v.per_token[..., None, :] - 2 * v.mean + total[..., None]
        turned_diagonal = per_token if self._turn is None else self._from_mean
        # equal keys have this much: each is part of the mean, which the moments of a row count
        usual = (v.mean_square - total) * (self._mean_square - turned_total) / (n * np.maximum(n - 1, 1))
        structural = np.maximum(centred - self._sum_over_visible(per_token * turned_diagonal) / n**2 - usual, 0.0)
        return np.asarray(self.qk * structural * (1 - self._rows.second) ** 2)

    @cached_property
    def _from_mean(self) -> FloatArray:
        """Per row, how far every key lies from the mean of all, as scores see it; (1, T) where rows see the same."""
        mean, total = self._turned_means
        return np.maximum(self._per_token[..., None, :] - 2 * mean + total[..., None], 0.0)

    def _shared_out(self, favour: FloatArray) -> FloatArray:
        """Per row, what every key gets over the mean of all: those that lie apart have larger scores."""
        apart, n = self._from_mean, self._row_length
        share = favoured(apart, self._sum_over_visible(apart) / n, favour)
        return share * (n / self._sum_over_visible(share))[..., None]

    @cached_property
    def _left_of_crowds(self) -> FloatArray:
        """Per row, what is left of its mean value: keys in a crowd get less than their share."""
        mean, n = self._of_values.mean, self._row_length
        moved = self._sum_over_visible((self._shared_out(self._rows.favour[0]) - 1) * mean) / n
        size = self._of_values.double_mean.diagonal(0, -2, -1)
        far = size > 1e-9 * self._of_values.mean_square
        found = np.divide(moved, size, out=np.zeros_like(moved), where=far)
        return self._per_row(1 + np.clip(found, -1.0, 0.0))
