"""Averages over the rows of an attention matrix, tabulated once per (length, mask) and interpolated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.moments import Array, FloatArray
from signalprop.theory.softmax import (
    SoftmaxMoments,
    Spline,
    linear_response,
    node_moments,
    node_variances,
    vanishing,
)

_CAUSAL_POSITIONS = 24

_FLOATS = SimpleNamespace(exp=math.exp, log=math.log, minimum=min, maximum=max)
_NUMBER = (float, int)
_PLAIN = frozenset(_NUMBER)


def is_number(x: Array) -> bool:
    return isinstance(x, _NUMBER)


def namespace(*values: Array) -> Any:
    """The functions to compute with: Python's own where every value is a plain number (ten times as fast), or NumPy."""
    return _FLOATS if _PLAIN.issuperset(map(type, values)) else np


class Band(NamedTuple):
    """A mask by which a token sees a window: the last `window` keys and itself, or without `causal` those up to
    window // 2 away. In the place of a `causal` that is True or False; lengths are numbers then."""

    window: int
    causal: bool

    def lengths(self, length: int) -> FloatArray:
        """Keys that every row sees, (length,)."""
        i = np.arange(length)
        if self.causal:
            return np.minimum(i + 1, self.window).astype(np.float64)
        half = self.window // 2
        return (np.minimum(i + half, length - 1) - np.maximum(i - half, 0) + 1).astype(np.float64)

    @property
    def widest(self) -> int:
        """Keys of a row away from the ends."""
        return self.window if self.causal else 2 * (self.window // 2) + 1

    @lru_cache(maxsize=64)  # noqa: B019
    def meetings(self, length: int) -> tuple[float, float, float]:
        """(C_V, C_J, mean of 1/n) under uniform weights: per key, the sum over pairs of rows of A_ik A_jk and of
        (J_i J_j)_kk, J = diag A - A Aᵀ; docs/theory/attention.md."""
        reach = self.window - 1 if self.causal else 2 * (self.window // 2)
        short = min(length, 3 * self.widest)  # rows in the middle of a longer sequence are nearly equal
        n, row = self.lengths(short), np.arange(short)
        first = np.maximum(row - (self.window - 1 if self.causal else self.window // 2), 0)
        last = row if self.causal else np.minimum(row + self.window // 2, short - 1)
        value, jacobian = np.zeros(short), np.zeros(short)
        for lag in range(1, min(reach, short - 1) + 1):
            early, late = n[:-lag], n[lag:]
            shared = np.maximum(last[:-lag] - first[lag:] + 1, 0)
            product = 2 * shared / (early * late)
            value[lag:] += product
            jacobian[lag:] += product * (1 - 1 / early - 1 / late + shared / (early * late))
        middle = 2 * self.widest - 1 if self.causal else short - 1 - self.window // 2
        more, at = length - short, min(middle, short - 1)
        return tuple(float(x.sum() + more * x[at]) / length for x in (value, jacobian, 1 / n))  # type: ignore[return-value]


Mask = bool | Band


@lru_cache(maxsize=64)
def over_rows(length: int, mask: Mask) -> list[tuple[int, float]]:
    """Lengths of rows and how often they are there, of a mask: see `_over_positions`."""
    return _over_positions(length, mask) if mask else [(length, 1.0)]


def _over_positions(length: int, mask: Mask) -> list[tuple[int, float]]:
    """Row lengths n and weights w with (1/L) Σ_i f(i) ≈ Σ w f(n): n f(n) is taken as linear in ln n in between."""
    if isinstance(mask, Band):
        lengths, count = np.unique(mask.lengths(min(length, 2 * mask.widest)).astype(int), return_counts=True)
        widest, share = int(lengths[-1]), 1 - float(count[:-1].sum()) / length
        if mask.causal and widest > 1:  # the shorter rows have every length once
            shorter = [(n, weight * (1 - share)) for n, weight in _over_positions(widest - 1, True)]
        else:
            edges = zip(*(np.array_split(x[:-1], _CAUSAL_POSITIONS) for x in (lengths, count)), strict=True)
            shorter = [(round(float(some.mean())), float(c.sum()) / length) for some, c in edges if len(some)]
        return [*shorter, (widest, share)]
    at = np.array(sorted(set(np.round(np.geomspace(1, length, _CAUSAL_POSITIONS)).tolist())), np.int64)
    i = np.arange(1, length + 1)
    upper = np.clip(np.searchsorted(at, i), 1, max(len(at) - 1, 1))
    weights = np.zeros(len(at))
    if length == 1:
        return [(1, 1.0)]
    part = np.log(i / at[upper - 1]) / np.log(at[upper] / at[upper - 1])
    np.add.at(weights, upper, part * at[upper] / i)
    np.add.at(weights, upper - 1, (1.0 - part) * at[upper - 1] / i)
    return list(zip(at.tolist(), (weights / length).tolist(), strict=True))


def pair_length(length: int, mask: Mask) -> int:
    """Keys that two queries i < j have in common: i. With the weight 1/j that such a pair has, the mean of i is L/4."""
    if isinstance(mask, Band):
        return max(min(mask.widest, length), 1)
    return max(1, round(length / 4)) if mask else length


@lru_cache(maxsize=1024)
def _row_table(length: int, mask: Mask) -> Spline:
    """Of `row_moments`: logarithms of what spans decades; powers of `far` take out the decay."""
    rows = [(weight, _columns(node_moments(n))) for n, weight in over_rows(length, mask)]
    mean = np.sum([weight * row for weight, row in rows], axis=0)
    # (1 - P)² = 1 - P (2 - P), where n P (2 - P) varies slowly with n
    remaining = 1.0 - np.sum([w * row[:, 0] * (2.0 - row[:, 0]) for w, row in rows], axis=0)
    far = np.asarray(vanishing(node_variances()))
    columns = [
        _log(mean[:, 0]),
        _log(mean[:, 1] / far),
        mean[:, 2] / far**2,
        remaining / far**2,
        mean[:, 3] / mean[:, 0] / far**2,
    ]
    return Spline(np.stack(columns, axis=1))


def _columns(m: SoftmaxMoments) -> FloatArray:
    """ΣA², J, response, ΣA² squared_tilt: what rows contribute, at the nodes."""
    return np.stack([m.second, m.jacobian, linear_response(m), m.second * m.squared_tilt], axis=1)


def _log(x: FloatArray) -> FloatArray:
    return np.asarray(np.log(np.maximum(x, 1e-300)), dtype=np.float64)  # J = 0 for a single token


def row_moments(s: Array, length: int, mask: Mask) -> tuple[Array, ...]:
    """Averages over the rows of an attention matrix of one length; floats, or arrays of the shape of s.

    P = E ΣA², 1/P being the effective number of attended tokens; J = E ‖diag A - AAᵀ‖²_F; how far the scores' own
    direction is tilted, (E(ΣAz)² - P)/s; E (1 - P_i)(1 - P_j) for two rows, the common factor of what is linear in the
    query; how far keys that get A² are tilted, (E ΣA²z² - P)/(4 s P).
    """
    xp, far = namespace(s), vanishing(s)
    p, j, response, remaining, tilt = _row_table(length, mask)(s)
    return xp.minimum(xp.exp(p), 1.0), xp.exp(j) * far, response * far**2, remaining * far**2, tilt * far**2


def by_length(of: Callable[..., tuple[Array, ...]], s: Array, c: Array, length: Array, mask: Mask) -> Sequence[Array]:
    """of(s, c, length, mask), for arrays once per distinct length."""
    if is_number(length):
        return of(s, c, int(length), mask)
    s, c, length = (np.asarray(x, np.float64) for x in np.broadcast_arrays(s, c, length))
    lengths, group = np.unique(length, return_inverse=True)
    found = []
    for k, n in enumerate(lengths.tolist()):
        member = np.flatnonzero(group.ravel() == k)
        found.append((member, of(s.ravel()[member], c.ravel()[member], int(n), mask)))
    out = np.empty((len(found[0][1]), s.size))
    for member, several in found:
        out[:, member] = several
    return list(out.reshape(-1, *s.shape))
