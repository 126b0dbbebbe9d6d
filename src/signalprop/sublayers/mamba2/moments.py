"""Moments through Mamba-2: those of its scan at equally correlated tokens, `docs/theory/components.md`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.mamba2.roles import Settings, settings
from signalprop.sublayers.mamba2.scan import Gains, scan
from signalprop.theory.elements import Branch, BranchBackward, Pair, Rowset, Sent, dropped, linear

LONGEST = 64  # tokens that the scan is worked out for here: later tokens count as the mean of these
# correlations between which it is interpolated; gains are rounded to e^(1/64), finer where no norm follows
_NODES, _PER_E, _FINER = 5, 64, 1024


@dataclass(frozen=True)
class Mamba2:
    """The Mamba-2 sublayers of a table."""

    p: Parametrization

    def gains(self, i: int, *, back: bool = False) -> Gains:
        """fan_in sigma^2 of every map of sublayer i, `back`: fan_out sigma^2; sigma^2 of the taps."""
        s, d = settings(self.p.architecture), self.p.architecture.d_model
        sizes = (s.inner, s.inner, s.shared, s.shared, s.n_heads, 1, d) if back else (d, d, d, d, d, 1, s.inner)
        return Gains(*(n * self._of(self.p.weights, name, i) for n, name in zip(sizes, Gains._fields, strict=True)))

    def biases(self, i: int) -> Gains:
        """Variance of every bias."""
        return Gains(*(self._of(self.p.biases, name, i) for name in Gains._fields))

    def _of(self, columns: Any, name: str, i: int) -> float:
        return float(columns[f"scan_{name}"][i]) ** 2

    @property
    def uniform(self) -> bool:
        """Whether the taps are drawn so."""
        return self.p.distribution["scan_filter"] == "uniform"

    def through(self, i: int, second: float, r: float) -> FloatArray:
        """(covariance of what the norm gives at variance 1; vv, vc, cv, cc back to the stream) of sublayer i."""
        read = self.gains(i)._replace(out=1.0)
        scaled = Gains(*(x * second for x in read))._replace(filter=read.filter, out=1.0)
        biases, back = self.biases(i)._replace(out=0.0), self.gains(i, back=True)._replace(out=1.0)
        length = min(self.p.architecture.seq_len, LONGEST)
        s = settings(self.p.architecture)
        rounded = ((_rounded(x, _PER_E if s.normed else _FINER)) for x in (scaled, biases, back))
        coefficients = _table(s, length, self.uniform, *rounded)
        return np.asarray(chebyshev.chebval(1 - 2 * min(max(r, 0.0), 1.0), coefficients))

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """As `BranchMoments.forward`."""
        made = np.array([self._forward(int(n), v, r) for n, v, r in each(i, read)])
        if np.ndim(i) == 0:
            return Branch(float(made[0, 0]), float(made[0, 1]))
        return Branch(made[:, 0], made[:, 1])

    def _forward(self, i: int, second: float, r: float) -> tuple[float, float]:
        variance, covariance, *_ = self.through(i, second, r)
        out = linear((float(variance), float(covariance)), self.gains(i).out, self.biases(i).out)
        variance, covariance = dropped(out, self.p.architecture.dropout)
        return float(variance), float(covariance)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """As `BranchMoments.backward`."""
        kept = 1 / (1 - self.p.architecture.dropout)
        maps = [self.gains(int(n), back=True).out * self.through(int(n), v, r)[2:] for n, v, r in each(i, read)]
        vv, vc, cv, cc = np.transpose(maps)
        return Sent(BranchBackward(kept * vv, vc, kept * cv, cc))


def each(i: int | Rowset, read: Pair) -> list[tuple[int, float, float]]:
    """(sublayer, mean square, correlation) of so many sublayers."""
    rows = np.atleast_1d(i)
    values = (np.broadcast_to(np.asarray(x, np.float64), rows.shape) for x in read)
    return [(int(n), float(v), float(r)) for n, v, r in zip(rows, *values, strict=True)]


def _rounded(gains: Gains, per_e: int) -> Gains:
    return Gains(*(math.exp(round(per_e * math.log(x)) / per_e) if x > 0 else 0.0 for x in gains))


@lru_cache(maxsize=64)
def _table(s: Settings, length: int, uniform: bool, gains: Gains, biases: Gains, back: Gains) -> FloatArray:
    """Chebyshev coefficients in 1 - 2 r of variance, covariance, vv, vc, cv, cc; (nodes, 6)."""
    nodes = chebyshev.chebpts2(_NODES)
    values = [_at((1 - x) / 2, s, length, uniform, gains, biases, back) for x in nodes]
    return np.asarray(np.linalg.solve(chebyshev.chebvander(nodes, _NODES - 1), np.array(values)))


def _at(
    r: float, s: Settings, length: int, uniform: bool, gains: Gains, biases: Gains, back: Gains
) -> tuple[float, ...]:
    same, one = np.ones((length, length)), np.eye(length)
    made = scan(s, (1 - r) * one + r * same, gains, biases, uniform=uniform)
    alone, both = (means(made.back(g, back)) for g in (one, same))
    return (*means(made.normed), alone[0], both[0] - alone[0], alone[1], both[1] - alone[1])


def means(kernel: FloatArray) -> tuple[float, float]:
    """Of the diagonal, and of the rest."""
    n, trace = len(kernel), float(np.trace(kernel))
    return trace / n, (float(kernel.sum()) - trace) / max(n * (n - 1), 1)


def of(p: Parametrization, stack: int) -> Mamba2:
    """The Mamba-2 sublayers of a table."""
    return Mamba2(p)
