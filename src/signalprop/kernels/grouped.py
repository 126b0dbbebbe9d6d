"""Attention to groups of keys that share nothing, on token kernels: each by itself, and how they share the softmax.

Scores of one group have a part in common, by which the group as a whole gains or loses beside the others and a sink;
that is no small change, so it is integrated. Derivation: docs/theory/attention.md, "Shared keys and values".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.polynomial.hermite_e import hermegauss

from signalprop.kernels.masked import MaskedAttention
from signalprop.kernels.rows import Rows
from signalprop.network.moments import FloatArray

_NODES = 9  # in one dimension: shares are smooth, errors below 1e-4 up to a variance of 4


class LogSum(NamedTuple):
    """Of the sum of exponentials of a row's scores of a group, (Q,): mean and variance of its logarithm."""

    mean: FloatArray
    variance: FloatArray


class Shares(NamedTuple):
    """How groups, and a sink, share the softmax of every row.

    Attributes:
        mean, spread: of the share of a group, and its standard deviation, (groups, Q). slope, slope_spread: the same of
            how it moves with the scores of another, w_g (d_gh - w_h), (groups, groups, Q). square_slope: how the
            logarithm of its mean square moves with the group's own scores, (groups, Q).
    """

    mean: FloatArray
    spread: FloatArray
    slope: FloatArray
    slope_spread: FloatArray
    square_slope: FloatArray

    def sharper(self, g: int, rows: Rows, n: FloatArray) -> FloatArray:
        """By what part a group's rows of n keys are sharper where it gets more of the softmax: one key makes both."""
        half: FloatArray = n * rows.scatter / (2 * rows.second)
        return np.asarray(half * self.square_slope[g])


def shares_of(groups: Sequence[LogSum], sink: float | None) -> Shares:
    """Shares by the logarithms of groups' sums, -inf where a row sees nothing of one; sink: a logit, or None."""
    x, weight = hermegauss(_NODES)
    weight = weight / weight.sum()
    n = len(groups)
    points = np.stack(np.meshgrid(*[x] * n, indexing="ij")).reshape(n, -1)
    weights = np.prod(np.stack(np.meshgrid(*[weight] * n, indexing="ij")).reshape(n, -1), 0)
    logs = np.stack([one.mean + np.sqrt(one.variance) * at[:, None] for one, at in zip(groups, points, strict=True)])
    top = np.maximum(logs.max(0), -np.inf if sink is None else sink)
    size = np.exp(logs - top)
    share = size / (size.sum(0) + (0.0 if sink is None else np.exp(sink - top)))
    slope = share[:, None] * (np.eye(n)[:, :, None, None] - share)
    moved = np.einsum("p,gpq->gq", weights, 2 * share**2 * (1 - share))
    square = np.maximum(np.einsum("p,gpq->gq", weights, share**2), 1e-300)
    return Shares(*_mean_and_spread(share, weights), *_mean_and_spread(slope, weights), moved / square)


def _mean_and_spread(values: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Over the axis before the last."""
    mean = np.einsum("p,...pq->...q", weights, values)
    square = np.einsum("p,...pq,...pq->...q", weights, values, values)
    return mean, np.sqrt(np.maximum(square - mean**2, 0.0))


@dataclass(frozen=True)
class GroupedAttention:
    """What one attention to several groups does to kernels.

    Attributes:
        groups: the attention to each, all of one kernel of queries. empty: queries that see nothing of it, (groups, Q);
            its mask has some key for them all the same. sink: a logit without a value; None: none.
    """

    groups: Sequence[MaskedAttention]
    empty: FloatArray
    sink: float | None = None

    def forward(self) -> FloatArray:
        """Kernel of the heads' output, (Q, Q)."""
        out = np.asarray(sum(w * one for w, one in zip(self._together, self._of_each, strict=True)))
        for group, both, more in zip(self.groups, self._together, self._sharper, strict=True):
            out[np.diag_indices_from(out)] += np.diagonal(both) * more * group.own_part
        return out

    def backward(self, gradient: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """Gradient kernels at the queries, (Q, Q), and at the keys of each group, from the one at the output."""
        to_queries, to_keys = np.zeros_like(gradient), []
        for h, (group, both) in enumerate(zip(self.groups, self._together, strict=True)):
            queries, keys = group.backward_to_both(gradient * both, self._sharper[h])
            at_shares = np.zeros_like(gradient)
            for slope, spread, one in zip(
                self._shares.slope[:, h], self._shares.slope_spread[:, h], self._of_each, strict=True
            ):
                at_shares += gradient * self._both(slope, spread) * one
            at_shares *= group.qk
            to_queries += queries + at_shares * self._of_each[h]
            to_keys.append(keys + group.sent_to_values(at_shares * group.asks))
        return to_queries, to_keys

    @cached_property
    def _of_each(self) -> list[FloatArray]:
        return [group.forward() for group in self.groups]

    @cached_property
    def _shares(self) -> Shares:
        logs = [LogSum(*group.log_sum()) for group in self.groups]
        seen = [np.where(none, -np.inf, one.mean) for none, one in zip(self.empty, logs, strict=True)]
        return shares_of([LogSum(mean, one.variance) for mean, one in zip(seen, logs, strict=True)], self.sink)

    @cached_property
    def _sharper(self) -> list[FloatArray]:
        return [self._shares.sharper(g, one.rows, one.row_length) for g, one in enumerate(self.groups)]

    @cached_property
    def _alike(self) -> FloatArray:
        """Correlation of two queries."""
        first = self.groups[0]
        root = 1 / np.sqrt(np.maximum(np.diagonal(first.asks), 1e-150))
        return np.clip(first.asks * np.outer(root, root) * first.view.of_queries, -1.0, 1.0)

    def _both(self, mean: FloatArray, spread: FloatArray) -> FloatArray:
        """E of the product of two queries' values: to first order in how alike the queries are."""
        return np.asarray(np.outer(mean, mean) + self._alike * np.outer(spread, spread))

    @cached_property
    def _together(self) -> list[FloatArray]:
        """The same of their shares of every group."""
        return [self._both(m, d) for m, d in zip(self._shares.mean, self._shares.spread, strict=True)]
