"""One attention to groups of equally correlated keys, averaged over positions and pairs of them, in O(tokens).

What `kernels.grouped` does to token kernels, where all tokens of a group are alike in law: row by row, with the sums
over pairs of rows as cumulative sums. Derivation: docs/theory/attention.md, "Shared keys and values".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.kernels.grouped import LogSum, Shares, shares_of
from signalprop.kernels.masked import flattened
from signalprop.kernels.rows import Rows, rows_of
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.theory.softmax import vanishing
from signalprop.theory.two_rows import horner, position, within_table

_ALIKE = 1e-9  # relative variance of the score variances of rows: normed queries all have one size


class Seen(NamedTuple):
    """Which keys of a group every row sees: contiguous ones, never fewer than the row before it.

    Attributes:
        n, low: how many, and the first of them, (L,). first, last: rows that see a key, of every key, (E,).
        coherence: what rotations leave of a vector that all keys of a row share, of its square, (L,). turn: mean cosine
            between a row and the later ones that see its keys; bracket: of what the Jacobians of two uniform rows have
            in common, over what the rows have; again: of the share of a row's keys that they see too; (L,).
    """

    n: FloatArray
    low: IntArray
    first: IntArray
    last: IntArray
    coherence: FloatArray
    turn: FloatArray
    bracket: FloatArray
    again: FloatArray

    def later(self, values: FloatArray) -> FloatArray:
        """Per row, the sum over later ones of their value times the keys that both see, (L,)."""
        until = _cumulated(values)
        over_keys = _cumulated(until[self.last + 1])
        count = self.n.astype(np.int64)
        return np.asarray(over_keys[self.low + count] - over_keys[self.low] - self.n * until[1:])

    def to_keys(self, values: FloatArray) -> FloatArray:
        """Per key, the sum over the rows that see it, (E,)."""
        until = _cumulated(values)
        return np.asarray(until[self.last + 1] - until[self.first])


def _cumulated(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])


class Weighed(NamedTuple):
    """What comes back to one side: from independent gradients, and from what every two of them share.

    Attributes:
        own: sums over positions, or keys one by one. pairs: sum over ordered pairs of different ones.
    """

    own: tuple[FloatArray, FloatArray]
    pairs: tuple[float, float]


@dataclass(frozen=True)
class Group:
    """The rows of weights of one group, as if there were no other; all arrays (L,).

    Attributes:
        seen: its keys. size: mean square of a key. common: of a row, what the mean of its keys has of the vector that
            all keys share, before rotations. apart: mean square of a key without that vector.
        qk: score variance of unit keys that share nothing. asks: correlation of two queries. d_head: features that make
            the size of a query or key 1. chance: variance of the product of two unit keys. dropout: on weights.
    """

    seen: Seen
    size: float
    common: FloatArray
    apart: FloatArray
    qk: float
    asks: float
    d_head: int
    chance: float
    dropout: float

    @cached_property
    def n(self) -> FloatArray:
        """Keys of a row; 1 where there is none, which no weight is given to."""
        return np.maximum(self.seen.n, 1.0)

    @cached_property
    def _finite(self) -> FloatArray:
        return np.maximum(1 - 1 / self.n, 0.5)

    @cached_property
    def turned(self) -> FloatArray:
        """Of every row, what its mean key has of the shared vector."""
        return np.asarray(self.common * np.sqrt(self.seen.coherence))

    @cached_property
    def spread(self) -> FloatArray:
        """How far the keys of a row lie apart, turned as its scores and averages have them."""
        return np.where(self.n > 1, np.maximum(self.size - self.turned**2, 0.0), 0.0)

    @cached_property
    def _unturned(self) -> FloatArray:
        return np.where(self.n > 1, np.maximum(self.size - self.common**2, 0.0), 0.0)

    @cached_property
    def _flat(self) -> FloatArray:
        return flattened(self.qk * self.spread / self.d_head, self.n)

    @cached_property
    def scores(self) -> FloatArray:
        """Score variance within a row."""
        return np.asarray(self.qk * self.spread * self._flat)

    @cached_property
    def rows(self) -> Rows:
        """Every row of weights; they depend on the number of keys alone."""
        _, once, index = np.unique(self.n, return_index=True, return_inverse=True)
        found = rows_of(self.scores[once], self.n[once], _ALIKE)
        return Rows(*(np.asarray(column)[..., index] for column in found))

    @cached_property
    def slope(self) -> FloatArray:
        """How much variance follows the query linearly."""
        squared: FloatArray = self.qk * self.chance * self.spread * self._unturned
        return np.asarray(squared * (1 - self.rows.second) ** 4)

    @cached_property
    def averaged(self) -> FloatArray:
        """Mean square of what a row averages."""
        shared = self.turned**2
        kept = shared + (self.size - shared) / self.n + (self.rows.second - 1 / self.n) * self.spread + self.slope
        return np.asarray(kept + self.rows.second * self.size * (1 / (1 - self.dropout) - 1))

    def log_sum(self) -> LogSum:
        """As of `MaskedAttention`; nothing where a row sees no key."""
        own = self.scores
        mean = np.where(self.seen.n > 0, np.log(self.n) + (own - own / self.n) / 2, -np.inf)
        return LogSum(mean, np.maximum(self.qk * self.size - own, 0.0) + own / self.n)

    @cached_property
    def _moves(self) -> FloatArray:
        return np.where(self.n > 1, np.maximum((1 - self.rows.second) / self._finite, 1e-12), 1.0)

    @cached_property
    def _overlaps(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """As of `TokenAttention`, of a row with a later one, over how far both can move."""
        s, beyond = map(np.asarray, within_table(np.maximum(self.scores, 1e-12)))
        c = np.minimum(self.qk * self.asks * self.seen.turn * self._flat * self._unturned, self.scores)
        x = position(s, c / beyond)
        value, jacobian, weighted = (np.asarray(horner(list(y), x)) for y in self.rows.with_others)
        popular = np.expm1(np.minimum(s * value, np.log(self.n)))
        met = np.exp(jacobian) * vanishing(s) / beyond / self._finite
        return popular / self._moves, met / self._moves, weighted * met * self.scores / self._moves

    def met(self, at: FloatArray, later: FloatArray) -> FloatArray:
        """Per row, twice the sum over later ones of both values times their overlap under uniform weights."""
        return np.asarray(2 * at / self.n * self.seen.later(later / self.n))

    @property
    def _moved(self) -> FloatArray:
        return np.where(self.n > 1, self._moves, 0.0)

    def met_in_values(self, by: FloatArray) -> FloatArray:
        """Per row, what keys get that it and later rows see, of values as gradients whose products are by_i by_j."""
        popular = self._overlaps[0] / self._finite * self.seen.bracket
        return self.met(by * self.seen.turn, by) + self.met(by * popular, by * self._moved)

    @cached_property
    def alike(self) -> FloatArray:
        """Mean cosine of two keys of a row."""
        return np.where(self.n > 1, (self.n * self.seen.coherence - 1) / np.maximum(self.n - 1, 1.0), 0.0)

    def shared(self, by: FloatArray) -> float:
        """Sum over pairs of rows, weighed with `by`, of what their averages have in common."""
        popular = self._overlaps[0]
        met = self.met(by * self.apart * self.seen.turn, by)
        more = self.met(by * popular * self.spread, by * self._moved)
        linear = self.asks * pairs_of(by * np.sqrt(self.slope))
        return pairs_of(by * self.turned) + float(met.sum() + more.sum()) + linear

    @property
    def own_part(self) -> FloatArray:
        """As of `MaskedAttention`."""
        return np.asarray(self.rows.second * (self.spread + self.size * (1 / (1 - self.dropout) - 1)))

    def back(self, second: FloatArray, by: Iterable[FloatArray], sharper: FloatArray) -> tuple[Weighed, Weighed]:
        """Gradients at queries, and at keys, of ones at the averages times the shares of the group.

        Args:
            second: mean squares of the shares. by: two rows' shares have the mean product sum of by_i by_j. sharper: as
                of `MaskedAttention`.
        """
        n, keep = self.n, 1 - self.dropout
        own_second, jacobian, own_weighted = (one * (1 + sharper) for one in self.rows[:3])
        apart = self._unturned + (1 / keep - 1) * self.size
        keys = own_weighted * self.qk * apart
        queries = second * (self.slope + jacobian * self.qk * self.spread * apart)
        on_key = [second * (own_second / keep + keys), np.zeros_like(n)]
        key_pairs = [float((second * (1 - own_second - keys) * self.alike).sum()), 0.0]
        query_pairs = 0.0
        _, met, weighted = self._overlaps
        for one in by:
            moved = one * self._moved
            on = self.met_in_values(one) + self.met(one * weighted * self.seen.bracket, moved)
            on_key[1] += on
            key_pairs[1] += pairs_of(one * np.sqrt(self.seen.coherence)) - float(on.sum())
            in_common = one * self._finite * met * self.qk * self._unturned**2 * self.seen.turn
            query_pairs += pairs_of(one * np.sqrt(self.slope)) + float(self.met(in_common, moved).sum())
        at_keys = tuple(self.seen.to_keys(one / n) for one in on_key)
        return (
            Weighed((queries, np.zeros_like(n)), (0.0, query_pairs)),
            Weighed((at_keys[0], at_keys[1]), (key_pairs[0], key_pairs[1])),
        )


def pairs_of(values: FloatArray) -> float:
    """Sum over ordered pairs of different rows of the product of their values."""
    return float(values.sum() ** 2 - values @ values)


@dataclass(frozen=True)
class Attended:
    """The attention to all groups in one softmax.

    Attributes:
        groups: what each does by itself. sink: a logit without a value; None: none.
    """

    groups: list[Group]
    sink: float | None

    @cached_property
    def _shares(self) -> Shares:
        seen = np.stack([group.seen.n for group in self.groups])
        new = np.concatenate([[True], (np.diff(seen) != 0).any(0)])
        found = shares_of([LogSum(*(x[new] for x in group.log_sum())) for group in self.groups], self.sink)
        return Shares(*(x[..., np.cumsum(new) - 1] for x in found))

    def _by(self, g: int) -> tuple[FloatArray, FloatArray]:
        """Shares of group g, as `Group.back` takes them."""
        return self._shares.mean[g], self._root_alike * self._shares.spread[g]

    @cached_property
    def _sharper(self) -> list[FloatArray]:
        return [self._shares.sharper(g, one.rows, one.n) for g, one in enumerate(self.groups)]

    @property
    def _root_alike(self) -> float:
        return math.sqrt(max(self.groups[0].asks, 0.0))

    def forward(self) -> tuple[float, float]:
        """(sum over positions, over ordered pairs of them) of what heads give."""
        mean, spread = self._shares[:2]
        own = sum(
            float((mean[g] ** 2 + spread[g] ** 2) @ (one.averaged + self._sharper[g] * one.own_part))
            for g, one in enumerate(self.groups)
        )
        pairs = sum(one.shared(by) for g, one in enumerate(self.groups) for by in self._by(g))
        return own, pairs

    def backward(self) -> tuple[Weighed, list[Weighed]]:
        """Gradients at queries, and at the keys of every group, of gradients of variance 1 at what heads give."""
        mean, spread = self._shares[:2]
        queries, keys = [], []
        for g, one in enumerate(self.groups):
            of_rows = one.back(mean[g] ** 2 + spread[g] ** 2, self._by(g), self._sharper[g])
            of_shares = self._by_shares(g)
            queries += [of_rows[0], of_shares[0]]
            keys.append(_added([of_rows[1], of_shares[1]]))
        return _added(queries), keys

    def _by_shares(self, h: int) -> tuple[Weighed, Weighed]:
        """What scores of group h send back by how much they give to every group.

        Of what two rows share, products of keys of two groups that both see are left out.
        """
        group, slopes, spreads = self.groups[h], self._shares.slope[:, h], self._shares.slope_spread[:, h]
        n, kept, qk = group.n, np.sqrt(group.seen.coherence), group.qk
        own = qk * sum((m**2 + d**2) * one.averaged for m, d, one in zip(slopes, spreads, self.groups, strict=True))
        query_pairs, key_pairs, on_key = 0.0, 0.0, np.zeros_like(n)
        for g, one in enumerate(self.groups):
            for slope in (slopes[g], self._root_alike * spreads[g]):
                seen, turned = one.seen, slope * one.turned
                query_pairs += pairs_of(turned * group.turned)
                query_pairs += float(one.met(slope * group.turned * one.apart * seen.turn, slope * group.turned).sum())
                query_pairs += float(group.met(turned * group.apart * group.seen.turn, turned).sum())
                on = group.met_in_values(turned)
                if one is group:  # products of keys that two rows both see
                    twice = group.apart * group.seen.turn**2 * group.seen.again
                    query_pairs += float(group.met(slope * twice * group.apart, slope / n).sum())
                    on = on + group.met(slope * twice, slope / n)
                on_key += group.asks * on
                met = one.met(slope * kept * one.apart * seen.turn, slope * kept)
                key_pairs += group.asks * (pairs_of(turned * kept) + float(met.sum()) - float(on.sum()))
        second = group.rows.second
        at_keys = group.seen.to_keys(own * second / n), group.seen.to_keys(qk * on_key / n)
        own_pairs = float((own * (1 - second) * group.alike).sum())
        return (
            Weighed((own * group.averaged, np.zeros_like(n)), (0.0, qk * query_pairs)),
            Weighed(at_keys, (own_pairs, qk * key_pairs)),
        )


def _added(several: list[Weighed]) -> Weighed:
    own = tuple(sum(one.own[k] for one in several) for k in (0, 1))
    pairs = tuple(sum(one.pairs[k] for one in several) for k in (0, 1))
    return Weighed(own, pairs)  # type: ignore[arg-type]
