"""Attention to groups of keys that share nothing, on token kernels: each by itself, and how they share the softmax.

Scores of one group have a part in common, by which the group as a whole gains or loses beside the others and a sink;
that is no small change, so it is integrated. Derivation: docs/theory/attention.md, "Shared keys and values".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.polynomial.hermite_e import hermegauss

from signalprop.kernels.masked import MaskedAttention
from signalprop.network.moments import FloatArray

_NODES = 9  # in one dimension: shares are smooth, errors below 1e-4 up to a variance of 4


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
        return np.asarray(sum(w * one for w, one in zip(self._together, self._of_each, strict=True)))

    def backward(self, gradient: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """Gradient kernels at the queries, (Q, Q), and at the keys of each group, from the one at the output."""
        to_queries, to_keys = np.zeros_like(gradient), []
        for h, (group, both) in enumerate(zip(self.groups, self._together, strict=True)):
            queries, keys = group.backward_to_both(gradient * both)
            at_shares = np.zeros_like(gradient)
            for g, one in enumerate(self._of_each):
                slope = self._slopes[g, h]
                at_shares += gradient * np.outer(slope, slope) * one
            at_shares *= group.qk
            to_queries += queries + at_shares * self._of_each[h]
            to_keys.append(keys + group.view.sent(at_shares * group.asks))
        return to_queries, to_keys

    @cached_property
    def _of_each(self) -> list[FloatArray]:
        return [group.forward() for group in self.groups]

    @cached_property
    def _shares(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Mean share of every group, (groups, Q), its standard deviation, and mean slopes, (groups, groups, Q)."""
        x, weight = hermegauss(_NODES)
        weight = weight / weight.sum()
        n = len(self.groups)
        points = np.stack(np.meshgrid(*[x] * n, indexing="ij")).reshape(n, -1)
        weights = np.prod(np.stack(np.meshgrid(*[weight] * n, indexing="ij")).reshape(n, -1), 0)
        logs = np.empty((n, points.shape[1], self.empty.shape[1]))
        for g, group in enumerate(self.groups):
            log_sum, common = group.log_sum()
            logs[g] = np.where(self.empty[g], -np.inf, log_sum + np.sqrt(common) * points[g][:, None])
        top = np.maximum(logs.max(0), -np.inf if self.sink is None else self.sink)
        size = np.exp(logs - top)
        total = size.sum(0) + (0.0 if self.sink is None else np.exp(self.sink - top))
        share = size / total
        mean = np.einsum("p,gpq->gq", weights, share)
        square = np.einsum("p,gpq,hpq->ghq", weights, share, share)
        own = np.einsum("ggq->gq", square)
        slopes = -square
        slopes[np.arange(n), np.arange(n)] += mean
        return mean, np.sqrt(np.maximum(own - mean**2, 0.0)), slopes

    @property
    def _slopes(self) -> FloatArray:
        return self._shares[2]

    @cached_property
    def _together(self) -> list[FloatArray]:
        """E of the product of two queries' shares of a group: to first order in how alike the queries are."""
        first = self.groups[0]
        root = 1 / np.sqrt(np.maximum(np.diagonal(first.asks), 1e-150))
        alike = np.clip(first.asks * np.outer(root, root) * first.view.of_queries, -1.0, 1.0)
        mean, spread, _ = self._shares
        return [np.outer(m, m) + alike * np.outer(d, d) for m, d in zip(mean, spread, strict=True)]
