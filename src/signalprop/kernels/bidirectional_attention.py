"""Attention without a mask on token kernels: every row sees all keys, some of which are the same to it.

Equal keys get equal weights in every row, so that what two rows have in common is counted over different keys. All rows
see the same keys, so they share every sum over keys. Derivation: `docs/theory/kernels.md`, "Equal keys".
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.similar_keys import LARGEST, SimilarKeys, centred, similar_keys
from signalprop.kernels.softmax_rows import Rows, rows_of
from signalprop.network.moments import FloatArray
from signalprop.theory.repeated_keys import Groups, softmax_of_groups
from signalprop.theory.row_overlaps import LEAST, by_position, position, steepness, within_table

_DISTINCT = 1e-6  # share of keys that are not different ones below which all are


class Weights(NamedTuple):
    """Rows of weights.

    Attributes:
        rows: P and J summed over pairs of keys as far as they are the same; the overlaps of `different` keys.
        same: how far two keys count as one in a row with itself, (n, n).
        mean: E A_k, (n,). overlap: sum over pairs of keys, as far as they are the same, of E A_k E A_k'.
        value, slope: of two rows of independent scores, and of a row with itself, roots of what a key has of E A_k A'_k
            and of the Jacobians, (2, n); with `same` the sum over pairs is 1. moves: the same of Var A_k.
        apart: how weights of keys that are not the same are spread, (n, n); sums to 1.
        unlike: how far different keys lie apart, unturned. different: how many there are.
        variance: s of every row. spread: s_0 S_ii times that is s.
    """

    rows: Rows
    same: FloatArray
    mean: FloatArray
    overlap: float
    value: FloatArray
    slope: FloatArray
    moves: FloatArray
    apart: FloatArray
    unlike: float
    different: float
    variance: FloatArray
    spread: float


class Pairs(NamedTuple):
    """Of two rows, (T, T), symmetric.

    Attributes:
        more: what their overlap is above that of mean weights. near: c/s, from 0 to 1.
    """

    more: FloatArray
    near: FloatArray


class UnmaskedAttention(TokenAttention):
    """What one self-attention without a mask does to kernels; fields as of `TokenAttention`.

    One head of 32 to 48 tokens against sampling, up to score variance 16: keys that are equal or correlated
    within 3 % forward (5 % of its sum over pairs) and 5 % backward; the backward sum over correlated keys up to 15 %
    at 4.
    """

    def _averaged(self) -> tuple[FloatArray, FloatArray]:
        n, values, dropped = len(self.kernel), self._values, 1 / (1 - self.dropout) - 1
        if self.qk == 0:
            mean, out = float(values.mean()), np.empty(self._asks.shape)
            out.fill(mean)
            return out, np.full(len(out), mean + dropped * float(np.diagonal(values).mean()) / n)
        w, one = self._weights, self._same_pairs[0]
        low, apart = float(w.mean @ values @ w.mean), float((w.apart * values).sum())
        of_one = float((one * values).sum()) - apart * float(one.sum())
        gap = float((self._moving * values).sum()) - apart
        more, near = self._pairs
        out = more * (of_one + near * (gap - of_one))
        slope = self._slope + self._structural_slope
        out += np.sqrt(np.outer(slope, slope)) * self._asks + low
        per_token = low + (w.rows.second - w.overlap) * gap + self._diagonal_slope * self._asks_per_token
        alone = float(w.value[1] ** 2 @ np.diagonal(values))
        per_token = np.maximum(per_token, 0.0) + w.rows.second * alone * dropped
        root = np.sqrt(per_token)
        return np.minimum(
            out, np.outer(root, root)
        ), per_token  # rounding of the expansion could pass it near one direction

    def _sent_back(
        self, gradient: FloatArray, per_token: FloatArray, value: int, scores: int
    ) -> tuple[FloatArray, FloatArray]:
        out = self._to_keys(gradient, per_token, value, scores)
        if scores:
            out += self._to_queries(gradient, per_token)
        return out, np.diagonal(out).copy()

    def _to_keys(self, gradient: FloatArray, per_token: FloatArray, value: int = 1, scores: int = 1) -> FloatArray:
        """Gradient kernel at the input of keys and values; arguments as of `_sent_back`."""
        n, dropped = len(self.kernel), 1 / (1 - self.dropout) - 1
        if self.qk == 0:
            shared = np.full((n, n), gradient.sum() / n**2)
            return np.asarray(value * (shared + dropped * per_token.sum() / n**2 * np.eye(n)))
        w, (more, near), pairs = self._weights, self._pairs, gradient.copy()
        np.fill_diagonal(pairs, 0.0)
        out = np.zeros((n, n))
        if value:
            close = float((pairs * more * near).sum())
            one, itself = self._same_pairs
            itself_too = float(per_token @ w.rows.second)
            out += (float((pairs * more).sum()) - close) * one + close * self._moving + itself_too * itself
            out += w.apart * (per_token.sum() - out.sum()) + pairs.sum() * np.outer(w.mean, w.mean)
            out[np.diag_indices(n)] += dropped * itself_too * w.value[1] ** 2
        if scores:
            moved = pairs * self._moves[1] / max(self._different_spread, 1e-12)
            close = float((moved * near).sum())
            itself_too = self.qk * float(per_token * w.rows.jacobian @ (self._asks_per_token + self.query_bias))
            one, itself = self._moved_pairs
            keys = (float(moved.sum()) - close) * one + (close + itself_too) * itself
            keys[np.diag_indices(n)] += dropped * itself_too * w.slope[1] ** 2 * np.diagonal(self._values)
            keys -= w.apart * keys.sum()
            out += keys if self._turn is None else keys * self._turn
        return out

    def _to_queries(self, gradient: FloatArray, per_token: FloatArray) -> FloatArray:
        """Gradient kernel at the input of queries."""
        if self.qk == 0:
            return np.zeros_like(gradient)
        w, slope, dropped = self._weights, self._slope, 1 / (1 - self.dropout) - 1
        scored = self._turned - float((w.apart * self._turned).sum())
        one, itself = (max(float((moved * scored).sum()), 0.0) for moved in self._moved_pairs)
        similar = self.qk * self._moves[0] * (one + self._pairs.near * (itself - one))
        if self._turn is not None:
            similar *= self._turn
        out = gradient * (np.sqrt(np.outer(slope, slope)) + similar)
        alone = dropped * w.spread * float(w.slope[1] ** 2 @ np.diagonal(self._values))
        np.fill_diagonal(out, per_token * (slope + self.qk * w.rows.jacobian * (itself + alone)))
        return np.asarray(out)

    # --- keys ------------------------------------------------------------------------------------------------------

    @property
    def _values(self) -> FloatArray:
        return self.kernel if self.values is None else self.values

    @cached_property
    def _similar(self) -> SimilarKeys:
        return similar_keys(self._turned, self.qk * float((self._asks_per_token + self.query_bias).mean()))

    @cached_property
    def _weights(self) -> Weights:
        n, similar = len(self.kernel), self._similar
        same = similar.same()
        different = n**2 / float(same.sum())
        distinct = n - different < _DISTINCT * n
        finite = max(1 - 1 / max(different, 1.0), 1e-12)
        spread, unlike = (self._mean_distance(kernel) / finite for kernel in (self._turned, self.kernel))
        variance = self.qk * (self._asks_per_token + self.query_bias) * spread
        typical = min(float(variance.mean()), LARGEST)
        groups = None if distinct else softmax_of_groups(typical, similar.size, similar.degree)
        if groups is not None:
            same = similar.same(groups.counted_as_one(similar.size))
            different = n**2 / float(same.sum())
        length = np.full(n_rows := len(variance) + 1, float(n) if distinct else max(different, 2.0))
        rows = rows_of(np.append(variance, typical), length, None if distinct else n)
        every = np.full(n, math.sqrt(1 / n))
        mean, shapes = every**2, [every] * 4
        if groups is not None:
            one = rows_of(np.full(1, typical), length[-1:], n)
            rows, mean, shapes = self._of_groups(rows, one, groups, same)
        mean_favour, favour = rows.favour[:, -1]
        mean = mean * self._distance**mean_favour
        mean /= mean.sum()
        tilt = self._distance ** (favour / 2)
        before, second, jacobian, moves = (_shape(same, tilt * root) for root in shapes)
        rows = rows._replace(
            **{name: getattr(rows, name)[..., : n_rows - 1] for name in rows._fields if name != "favour"}
        )
        apart = (1 - same) * np.outer(mean, mean)
        return Weights(
            rows,
            same,
            mean,
            _summed(same, mean),
            np.stack([_shape(same, mean), second]),
            np.stack([before, jacobian]),
            moves,
            apart / max(float(apart.sum()), 1e-300),
            unlike,
            different,
            variance,
            float(spread),
        )

    def _of_groups(
        self, rows: Rows, typical: Rows, groups: Groups, same: FloatArray
    ) -> tuple[Rows, FloatArray, list[FloatArray]]:
        """Rows of keys some of which are equal, from those of as many different keys, and from the one of the typical
        score variance as if lengths were Gaussian, as groups have it; E A_k; and shapes: `Weights.slope`, with that of
        `Weights.value` in between, and `Weights.moves`."""
        roots = [np.sqrt(np.maximum(y, 0.0)) for y in (groups.second, groups.jacobian)]
        second, jacobian = (
            of * (_summed(same, root) / max(float(one[0]), 1e-300))
            for of, one, root in zip(rows[:2], typical[:2], roots, strict=True)
        )
        rows = rows._replace(second=np.minimum(second, 1.0), jacobian=jacobian)
        per_token, similar = groups.mean - groups.second, self._similar  # E A_k (1 - A_k), and with the group's weight
        with_group = per_token - (similar.size - 1) * groups.pair
        before = np.sqrt(similar.degree * with_group**2 + (1 - similar.degree) * per_token**2)
        moves = np.sqrt(np.maximum(groups.second - groups.mean**2, 0.0))
        return rows, groups.mean, [before, *roots, moves]

    @cached_property
    def _distance(self) -> FloatArray:
        """How far every key lies from the row's mean, over what groups of such sizes make of it; 1 on average."""
        from_mean = np.diagonal(self._turned) - 2 * self._turned_means[0][0] + self._turned_means[1][0]
        found = np.maximum(from_mean, 0.0) / self._about_mean
        return np.asarray(np.maximum(found / max(float(found.mean()), 1e-300), 1e-9))

    @cached_property
    def _about_mean(self) -> FloatArray:
        """How far a key lies from the mean of groups that share nothing."""
        similar, n = self._similar, len(self._similar.size)
        like = 1 + similar.degree * (similar.size - 1)
        return np.asarray(np.maximum(1 - 2 * like / n + like.sum() / n**2, 1e-9))

    def _mean_distance(self, kernel: FloatArray) -> float:
        """How far keys lie from their mean."""
        return max(float(np.diagonal(kernel).mean() - kernel.mean()), 0.0)

    @property
    def _different_spread(self) -> float:
        """How far different keys lie apart, unturned: what all share cancels in the scores of two rows."""
        return self._weights.unlike

    @cached_property
    def _same_pairs(self) -> tuple[FloatArray, FloatArray]:
        """How overlaps of two rows of independent scores, and of a row with itself, stand on pairs of keys."""
        (one, itself), same = self._weights.value, self._weights.same
        return self._similar.rho * np.outer(one, one), same * np.outer(itself, itself)

    @cached_property
    def _moving(self) -> FloatArray:
        """How what a row with itself has beyond mean weights stands on pairs of keys: of a group that always has nearly
        all weight little of it."""
        return self._weights.same * np.outer(self._weights.moves, self._weights.moves)

    @cached_property
    def _moved_pairs(self) -> tuple[FloatArray, FloatArray]:
        """The same of what scores send back, by how values lie about their mean."""
        per_token = self._about_mean * self._distance  # what a key far from the mean gets beyond is in `slope` already
        apart = centred(self._values) / np.sqrt(np.outer(per_token, per_token))
        one, itself = self._weights.slope
        return apart * np.outer(one, one), apart * self._similar.shared * np.outer(itself, itself)

    # --- rows ------------------------------------------------------------------------------------------------------

    @property
    def _row_score_variance(self) -> FloatArray:
        return self._weights.variance

    @property
    def _rows(self) -> Rows:
        return self._weights.rows

    @cached_property
    def _slope(self) -> FloatArray:
        """Per row, how much variance follows the query linearly: random overlaps of d_model-dimensional keys."""
        return np.asarray(self._chance_overlap * (1 - self._weights.rows.second) ** 2)

    @property
    def _chance_overlap(self) -> FloatArray:
        coherent = 1.0 if self.omega is None else float(self.omega[0])
        gap = max(float((self._same_pairs[1] * self._values).sum() - (self._weights.apart * self._values).sum()), 0.0)
        return np.asarray(self.qk * coherent / self.d_model * self._different_spread * gap)

    @cached_property
    def _structural_slope(self) -> FloatArray:
        """The same of what is left of structure, to first order in the scores: segments, keys that avoid each other."""
        rho, values, n = self._similar.rho, self._values, len(self.kernel)
        shared = float((self._weights.apart * values).sum())
        counted = self._mean_distance(self._turned) * float((rho * (values - shared)).sum())
        left = max(float((centred(self._turned) * values).sum()) - counted, 0.0) / n**2
        return np.asarray(self.qk * left * (1 - self._weights.rows.second) ** 2)

    @cached_property
    def _near(self) -> tuple[FloatArray, FloatArray]:
        """(x of two rows, as `theory.row_overlaps` has it; c/s), from each row (first axis)."""
        per_token = np.maximum(self._weights.variance, 1e-12)[:, None]
        c = np.clip(self._pair_scores * self._different_spread, LEAST * per_token, per_token)
        s, beyond = map(np.asarray, within_table(per_token))
        return np.asarray(position(s, c / beyond)), c / per_token

    @cached_property
    def _pairs(self) -> Pairs:
        w, (x, near) = self._weights, self._near
        itself = w.rows.with_others.sum(0)
        whole = np.log(np.maximum(w.rows.second, w.overlap) / w.overlap) / np.maximum(itself, 1e-300)
        more = w.rows.log_overlap(x)
        more *= whole[:, None]
        np.expm1(more, out=more)
        more *= w.overlap
        return Pairs(_symmetric(more), _symmetric(np.maximum(near, 0.0)))

    @cached_property
    def _moves(self) -> tuple[FloatArray, FloatArray]:
        """(E of two rows' Jacobians, summed over keys that are the same; c times it)."""
        w, (x, near) = self._weights, self._near
        per_token = np.maximum(w.variance, 1e-12)
        s = np.asarray(within_table(per_token)[0])
        itself = np.exp(s * w.rows.with_others.sum(0)) * sum(by_position(w.rows.with_others)) * steepness(s, 1.0)
        overlap = np.exp(s[:, None] * w.rows.log_overlap(x)) * w.rows.slope(s, x)
        overlap *= (w.rows.jacobian / np.maximum(itself, 1e-300))[:, None]
        return _symmetric(overlap), _symmetric(near * per_token[:, None] * overlap)

    # --- sums over what a row sees ---------------------------------------------------------------------------------

    @property
    def _row_length(self) -> FloatArray:
        return np.full(1, float(len(self.kernel)))

    def _over_keys(self, values: FloatArray) -> FloatArray:
        return np.asarray(values.mean(0, keepdims=True))

    def _over_queries(self, values: FloatArray, axis: int) -> FloatArray:
        return np.broadcast_to(values.sum(axis, keepdims=True), values.shape).copy()


def _summed(same: FloatArray, root: FloatArray) -> float:
    return float(root @ same @ root)


def _shape(same: FloatArray, root: FloatArray) -> FloatArray:
    return root / math.sqrt(max(_summed(same, root), 1e-300))


def _symmetric(values: FloatArray) -> FloatArray:
    return np.asarray((values + values.T) / 2)
